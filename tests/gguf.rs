//! GGUF headers, good and hostile, through the library.

#[path = "common/gguf.rs"]
mod writer;

use kvbroker::model::{Fault, KvType, ModelShape, gguf};
use proptest::prelude::*;
use std::io::{BufReader, Cursor, Seek, Write};
use writer::{Header, Value, text};

fn read(bytes: &[u8]) -> Result<ModelShape, Fault> {
    gguf::parse(BufReader::new(Cursor::new(bytes)), bytes.len() as u64, "fallback")
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).expect_err("refused").to_string()
}

/// Qwen2.5-0.5B as llama.cpp's converter writes it, with a vocabulary before and after.
fn qwen2(version: u32) -> Header {
    let words = ["a", "", "bc"].map(text).concat();
    Header::new(version)
        .put("general.architecture", Value::Text("qwen2"))
        .put("general.name", Value::Text("Qwen2.5 0.5B"))
        .put("tokenizer.ggml.tokens", Value::List(8, 3, words.clone()))
        .put("qwen2.block_count", Value::U32(24))
        .put("qwen2.context_length", Value::U32(32768))
        .put("qwen2.embedding_length", Value::U32(896))
        .put("qwen2.attention.head_count", Value::U32(14))
        .put("qwen2.attention.head_count_kv", Value::U32(2))
        .put("qwen2.rope.freq_base", Value::F32(1e6))
        .put("tokenizer.ggml.scores", Value::List(6, 3, vec![0; 12]))
        .put("tokenizer.ggml.merges", Value::List(8, 3, words))
        .put("general.file_type", Value::U8(1))
}

/// A model with explicit head dimensions and the given extra pairs.
fn model(architecture: &str, layers: u32) -> Header {
    Header::new(3)
        .put("general.architecture", Value::Text(architecture))
        .put(&format!("{architecture}.block_count"), Value::U32(layers))
        .put(&format!("{architecture}.attention.head_count"), Value::U32(4))
        .put(&format!("{architecture}.attention.key_length"), Value::U32(256))
        .put(&format!("{architecture}.attention.value_length"), Value::U32(256))
}

fn gemma3() -> Header {
    model("gemma3", 26)
        .put("gemma3.attention.head_count_kv", Value::U32(1))
        .put("gemma3.attention.sliding_window", Value::U32(512))
}

fn full_layers(shape: &ModelShape) -> Vec<usize> {
    (0..shape.layers.len()).filter(|n| shape.layers[*n].window.is_none()).collect()
}

#[test]
fn a_header_of_either_version_gives_the_geometry() {
    for version in [2, 3] {
        let shape = read(&qwen2(version).bytes()).unwrap();
        assert_eq!(shape.name, "Qwen2.5 0.5B");
        assert_eq!((shape.heads, shape.context, shape.layers.len()), (14, Some(32768), 24));
        let profile = shape.profile(KvType::F16, 16).unwrap();
        assert_eq!((profile.bytes_per_token(), profile.block_bytes(0)), (12 << 10, 192 << 10));
    }
}

#[test]
fn keys_may_come_before_the_architecture_that_they_belong_to() {
    let header = Header::new(3)
        .put("llama.block_count", Value::U64(16))
        .put("llama.attention.head_count", Value::I32(32))
        .put("llama.attention.head_count_kv", Value::U8(8))
        .put("llama.embedding_length", Value::U32(2048))
        .put("general.architecture", Value::Text("llama"));
    let shape = read(&header.bytes()).unwrap();
    assert_eq!(shape.profile(KvType::F16, 16).unwrap().bytes_per_token(), 32 << 10);
    assert_eq!(shape.name, "fallback");
}

#[test]
fn gemma_3_has_four_layers_that_keep_all_tokens() {
    let shape = read(&gemma3().bytes()).unwrap();
    assert_eq!(full_layers(&shape), [5, 11, 17, 23]);
    assert_eq!(shape.profile(KvType::F16, 16).unwrap().bytes_at(4096), 27 << 20);
    let flags = [1, 0].repeat(13);
    let list = gemma3().put("gemma3.attention.sliding_window_pattern", Value::List(7, 26, flags));
    assert_eq!(full_layers(&read(&list.bytes()).unwrap()), (1..26).step_by(2).collect::<Vec<_>>());
    let third = gemma3().put("gemma3.attention.sliding_window_pattern", Value::U32(13));
    assert_eq!(full_layers(&read(&third.bytes()).unwrap()), [12, 25]);
}

#[test]
fn kv_heads_may_differ_by_layer() {
    let heads = [1u32, 2, 4].map(u32::to_le_bytes).concat();
    let shape =
        read(&model("llama", 3).put("llama.attention.head_count_kv", Value::List(4, 3, heads)).bytes())
            .unwrap();
    assert_eq!(shape.layers.iter().map(|l| l.kv_heads).collect::<Vec<_>>(), [1, 2, 4]);
}

#[test]
fn k_and_v_may_differ_and_absent_kv_heads_mean_one_for_each_head() {
    let header = Header::new(3)
        .put("general.architecture", Value::Text("llama"))
        .put("llama.block_count", Value::U32(2))
        .put("llama.attention.head_count", Value::U32(4))
        .put("llama.attention.key_length", Value::U32(192))
        .put("llama.attention.value_length", Value::U32(128));
    let shape = read(&header.bytes()).unwrap();
    assert_eq!((shape.layers[0].kv_heads, shape.layers[0].k_dim, shape.layers[0].v_dim), (4, 192, 128));
    assert_eq!(shape.notes.len(), 1);
}

#[test]
fn a_window_that_llama_cpp_ignores_is_noted_and_not_counted() {
    let header = model("llama", 2).put("llama.attention.sliding_window", Value::U32(4096));
    let shape = read(&header.bytes()).unwrap();
    assert_eq!(full_layers(&shape), [0, 1]);
    assert!(shape.notes.iter().any(|n| n.contains("sliding_window")), "{:?}", shape.notes);
    assert_eq!(
        full_layers(
            &read(&model("gemma3", 2).put("gemma3.attention.sliding_window", Value::U32(0)).bytes()).unwrap()
        ),
        [0, 1]
    );
}

#[test]
fn a_file_cut_anywhere_is_refused_with_the_offset() {
    let whole = qwen2(3).bytes();
    for length in 0..whole.len() {
        let said = refusal(&whole[..length]);
        assert!(said.contains(&format!("ends at byte {length}")), "cut at {length}: {said}");
    }
    assert!(read(&whole).is_ok());
}

#[test]
fn a_missing_or_wrong_key_is_named() {
    let missing = |skip: &str| {
        let mut header = Header::new(3).put("general.architecture", Value::Text("qwen2"));
        for (key, value) in [("block_count", 24), ("embedding_length", 896), ("attention.head_count", 14)] {
            if key != skip {
                header = header.put(&format!("qwen2.{key}"), Value::U32(value));
            }
        }
        refusal(&header.bytes())
    };
    for key in ["block_count", "embedding_length", "attention.head_count"] {
        assert!(missing(key).contains(&format!("qwen2.{key} is missing")), "{}", missing(key));
    }
    assert!(refusal(&Header::new(3).bytes()).contains("general.architecture is missing"));

    let wrong = |value| refusal(&model("llama", 2).put("llama.attention.head_count_kv", value).bytes());
    for said in [
        wrong(Value::U32(0)),
        wrong(Value::U32(3)),
        wrong(Value::U32(u32::MAX)),
        wrong(Value::I32(-1)),
        wrong(Value::F32(f32::NAN)),
        wrong(Value::Bool(2)),
        wrong(Value::Text("four")),
        wrong(Value::List(4, 1, vec![4, 0, 0, 0])),
        wrong(Value::List(4, 5000, vec![0; 20000])),
        wrong(Value::List(8, 2, [text("a"), text("b")].concat())),
    ] {
        assert!(said.contains("llama.attention.head_count_kv"), "{said}");
    }
    let uneven = Header::new(3)
        .put("general.architecture", Value::Text("llama"))
        .put("llama.block_count", Value::U32(2))
        .put("llama.attention.head_count", Value::U32(9))
        .put("llama.embedding_length", Value::U32(577));
    assert!(refusal(&uneven.bytes()).contains("llama.embedding_length is 577"));
}

#[test]
fn an_unknown_architecture_is_refused_with_the_key_and_the_known_ones() {
    let said = refusal(&model("mamba", 2).bytes());
    assert!(said.contains("general.architecture is \"mamba\"") && said.contains("qwen2"), "{said}");
    let said = refusal(&Header::new(3).put("general.architecture", Value::U32(1)).bytes());
    assert!(said.contains("general.architecture is 1"), "{said}");
}

#[test]
fn another_version_or_byte_order_is_told_apart() {
    assert!(refusal(&qwen2(1).bytes()).contains("version 1 is too old"));
    assert!(refusal(&qwen2(4).bytes()).contains("version 4"));
    assert!(refusal(&qwen2(3u32.swap_bytes()).bytes()).contains("big-endian"));
}

#[test]
fn hostile_counts_and_lengths_are_refused_at_once() {
    let one = |value| refusal(&Header::new(3).put("x", value).bytes());
    assert!(refusal(&Header::new(3).claiming(u64::MAX)).contains("claims 18446744073709551615 pairs"));
    assert!(one(Value::List(0, u64::MAX, vec![])).contains("a list of 18446744073709551615"));
    assert!(one(Value::List(10, u64::MAX / 8 + 1, vec![])).contains("a list of"));
    assert!(one(Value::List(8, 1 << 60, vec![])).contains("a list of"));
    assert!(one(Value::List(13, 1, vec![])).contains("unknown type 13"));
    assert!(one(Value::Raw(99, vec![])).contains("unknown type 99"));
    assert!(one(Value::Raw(8, u64::MAX.to_le_bytes().to_vec())).contains("cut short"));
    let mut long_key = Header::new(3).claiming(1);
    long_key.extend(u64::MAX.to_le_bytes());
    assert!(refusal(&long_key).contains("a key claims"));
    let twice = model("llama", 2).put("llama.block_count", Value::U32(3));
    assert!(refusal(&twice.bytes()).contains("comes twice"));
}

#[test]
fn lists_of_lists_end_at_a_depth() {
    let mut nested = Vec::new();
    for _ in 0..1000 {
        nested.extend(9u32.to_le_bytes());
        nested.extend(1u64.to_le_bytes());
    }
    assert!(
        refusal(&Header::new(3).put("x", Value::Raw(9, nested)).bytes()).contains("nested more than 4 deep")
    );
    let inner = |elements: &[u8]| [&4u32.to_le_bytes()[..], &1u64.to_le_bytes(), elements].concat();
    let shallow = model("llama", 2).put("x", Value::List(9, 2, [inner(&[0; 4]), inner(&[0; 4])].concat()));
    assert!(read(&shallow.bytes()).is_ok());
}

#[test]
fn a_header_ends_at_a_bound_but_what_follows_it_may_be_of_any_size() {
    // Sparse, so that it takes no room.
    let read_file = |header: Header, length: u64| {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&header.bytes()).expect("written");
        file.set_len(length).expect("a sparse file");
        file.rewind().expect("rewound");
        gguf::parse(BufReader::new(file), length, "fallback")
    };
    let long = gguf::MAX_HEADER_BYTES + 1;
    let endless = model("llama", 2).put("x", Value::List(0, long, vec![]));
    assert!(read_file(endless, 2 * long).expect_err("refused").to_string().contains("goes on beyond"));
    assert!(read_file(model("llama", 2), 16 << 30).is_ok());
}

#[test]
fn keys_and_names_that_are_not_text_do_no_harm() {
    let name = Value::Raw(8, [&3u64.to_le_bytes()[..], &[0xff, 0xfe, 0xfd]].concat());
    assert_eq!(read(&model("llama", 2).put("general.name", name).bytes()).unwrap().name, "fallback");
    let escape = model("llama", 2).put("general.name", Value::Text("a\u{1b}[31mb"));
    assert_eq!(read(&escape.bytes()).unwrap().name, "a[31mb");
    let long = "n".repeat(5000);
    assert_eq!(
        read(&model("llama", 2).put("general.name", Value::Text(&long)).bytes()).unwrap().name,
        "fallback"
    );
    assert!(read(&model("llama", 2).put(&"k".repeat(5000), Value::U32(1)).bytes()).is_ok());
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes: Vec<u8>) {
        let _ = read(&bytes);
        let _ = read(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat());
    }

    #[test]
    fn no_damage_to_a_good_header_makes_the_reader_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = gemma3().bytes();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(shape) = read(&bytes) {
            for kv in KvType::ALL {
                let _ = shape.profile(kv, 16);
            }
        }
    }
}
