//! The header of GGUF files.

use std::io::{BufReader, Cursor};

use kvbroker::model::{Fault, ModelShape, gguf};

/// What stands in such files.
pub const WORDS: &[&[u8]] = &[
    b"GGUF",
    b"general.architecture",
    b"general.name",
    b"llama.block_count",
    b"gemma3.attention.sliding_window",
    b".attention.sliding_window_pattern",
    b".attention.head_count_kv",
    b".attention.key_length",
    b"\x04\0\0\0",
    b"\x08\0\0\0",
    b"\x09\0\0\0",
    b"\x0c\0\0\0",
];

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A header of pairs: the key, and the value with its type.
fn header(pairs: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((pairs.len() as u64).to_le_bytes());
    for (key, value) in pairs {
        bytes.extend(text(key));
        bytes.extend(value);
    }
    bytes
}

fn number(n: u32) -> Vec<u8> {
    [4u32.to_le_bytes(), n.to_le_bytes()].concat()
}

fn words(words: &str) -> Vec<u8> {
    [&8u32.to_le_bytes()[..], &text(words)].concat()
}

fn list(kind: u32, count: usize, elements: &[u8]) -> Vec<u8> {
    [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(count as u64).to_le_bytes(), elements].concat()
}

fn pair(key: &str, value: Vec<u8>) -> (String, Vec<u8>) {
    (key.to_owned(), value)
}

/// Headers of several families, and of nesting and types that none has.
pub fn seeds() -> Vec<Vec<u8>> {
    let of = |family: &str, more: Vec<(String, Vec<u8>)>| {
        let key = |suffix: &str| format!("{family}.{suffix}");
        let mut pairs = vec![
            pair("general.architecture", words(family)),
            pair("general.name", words("a model")),
            (key("block_count"), number(4)),
            (key("attention.head_count"), number(8)),
            (key("attention.head_count_kv"), number(2)),
            (key("embedding_length"), number(512)),
            (key("context_length"), number(4096)),
        ];
        pairs.extend(more);
        header(&pairs)
    };
    let each = [8u32, 8, 2, 2].map(u32::to_le_bytes).concat();
    let inner = [&4u32.to_le_bytes()[..], &1u64.to_le_bytes(), &7u32.to_le_bytes()].concat();
    vec![
        of("llama", vec![pair("tokenizer.ggml.tokens", list(8, 2, &[text("a"), text("bc")].concat()))]),
        of(
            "qwen3",
            vec![
                pair("qwen3.attention.key_length", number(128)),
                pair("qwen3.attention.value_length", number(128)),
            ],
        ),
        of("gemma3", vec![pair("gemma3.attention.sliding_window", number(512))]),
        of(
            "gemma2",
            vec![
                pair("gemma2.attention.sliding_window", number(64)),
                pair("gemma2.attention.sliding_window_pattern", list(7, 4, &[1, 0, 1, 0])),
            ],
        ),
        of("llama", vec![pair("llama.rope.factors", list(9, 1, &inner)), pair("odd", list(4, 4, &each))]),
        header(&[
            pair("general.architecture", words("llama")),
            pair("llama.attention.head_count_kv", list(4, 4, &each)),
        ]),
    ]
}

fn parse(data: &[u8], buffer: usize) -> Result<ModelShape, Fault> {
    gguf::parse(BufReader::with_capacity(buffer, Cursor::new(data)), data.len() as u64, "fallback")
}

/// What a shape says, without the notes on what was assumed.
fn said(shape: &ModelShape) -> String {
    let ModelShape { family, name, heads, context, layers, .. } = shape;
    format!("{family:?} {name} {heads} {context:?} {layers:?}")
}

/// The same shape as a header that assumes nothing.
fn write(shape: &ModelShape, family: &str) -> Vec<u8> {
    let key = |suffix: &str| format!("{family}.{suffix}");
    let first = shape.layers[0];
    let kv: Vec<u8> = shape.layers.iter().flat_map(|l| l.kv_heads.to_le_bytes()).collect();
    let mut pairs = vec![
        pair("general.architecture", words(family)),
        pair("general.name", words(&shape.name)),
        (key("block_count"), number(shape.layers.len() as u32)),
        (key("attention.head_count"), number(shape.heads)),
        (key("attention.head_count_kv"), list(4, shape.layers.len(), &kv)),
        (key("attention.key_length"), number(first.k_dim)),
        (key("attention.value_length"), number(first.v_dim)),
    ];
    if let Some(context) = shape.context {
        pairs.push((key("context_length"), number(context)));
    }
    if let Some(window) = shape.layers.iter().find_map(|l| l.window) {
        let sliding: Vec<u8> = shape.layers.iter().map(|l| u8::from(l.window.is_some())).collect();
        pairs.push((key("attention.sliding_window"), number(window)));
        pairs.push((key("attention.sliding_window_pattern"), list(7, sliding.len(), &sliding)));
    }
    header(&pairs)
}

/// A header says the same through a buffer of any size, and what it says can be written and read again.
pub fn run(data: &[u8]) -> bool {
    let most = (4 << 20) + 64 * data.len();
    let read = super::alloc::at_most(most, "reading a GGUF header", || parse(data, 8 << 10));
    let narrow = parse(data, 16);
    match (&read, &narrow) {
        (Ok(a), Ok(b)) => assert_eq!(format!("{a:?}"), format!("{b:?}")),
        (Err(a), Err(b)) => assert_eq!(a.to_string(), b.to_string()),
        _ => panic!("the size of the buffer decides: {read:?} and {narrow:?}"),
    }
    match read {
        Ok(shape) => {
            super::hf::check_shape(&shape);
            let again = parse(&write(&shape, shape.family.name()), 64).expect("what was read can be written");
            assert_eq!(said(&again), said(&shape));
            true
        }
        Err(e) => {
            super::check_words(&e);
            false
        }
    }
}
