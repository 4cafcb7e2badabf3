//! Reads the header of a GGUF file, versions 2 and 3 (little-endian), as ggml's docs/gguf.md defines it: magic,
//! version (u32), number of tensors (u64), number of pairs (u64), then the pairs of key and typed value.
//!
//! Owns the walk over the pairs. Invariant: each step is checked against the file's length before it is made, at most
//! [`MAX_HEADER_BYTES`] are walked, and only the few values that geometry needs are kept, so a hostile file costs a
//! bounded time and a few MiB; every refusal names the byte offset or the key.

use super::{
    Family, Fault, MAX_HEAD_DIM, MAX_HEADS, MAX_LENGTH, MOST_LAYERS, ModelShape, Parts, alternate,
    derived_head_dim, printable, quote, within, wrong_number,
};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek};

/// The first bytes of the file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// The most bytes of header that are walked; the largest vocabularies need about 20 MiB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;
/// The most pairs; real files have fewer than 100.
const MAX_PAIRS: u64 = 1 << 14;
/// The longest key, by the format's definition.
const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
/// The longest text that is kept.
const MAX_TEXT_BYTES: u64 = 1 << 10;
/// The deepest nesting of lists.
const MAX_DEPTH: u32 = 4;

const GENERAL_ARCHITECTURE: &str = "general.architecture";
const GENERAL_NAME: &str = "general.name";
/// What is kept of an architecture's own keys, whose prefix may come after them.
const SUFFIXES: [&str; 9] = [
    ".block_count",
    ".context_length",
    ".embedding_length",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".attention.value_length",
    ".attention.sliding_window",
    ".attention.sliding_window_pattern",
];

/// The shape that a GGUF header describes. `bytes` is the file's length; `fallback_name` is used if it has no name.
pub fn parse<R: Read + Seek>(
    source: BufReader<R>,
    bytes: u64,
    fallback_name: &str,
) -> Result<ModelShape, Fault> {
    let mut walk = Walk { source, at: 0, end: bytes };
    let pairs = walk.header()?;
    shape(&pairs, fallback_name)
}

/// A kept value.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Number(u64),
    Flag(bool),
    Text(String),
    List(Vec<Value>),
    /// Something that no key of ours may be; in words.
    Other(&'static str),
}

impl Value {
    fn found(&self) -> String {
        match self {
            Value::Number(n) => n.to_string(),
            Value::Flag(b) => b.to_string(),
            Value::Text(t) => quote(t),
            Value::List(l) => format!("a list of {}", l.len()),
            Value::Other(words) => (*words).to_owned(),
        }
    }
}

type Pairs = BTreeMap<String, Value>;

struct Walk<R> {
    source: BufReader<R>,
    at: u64,
    end: u64,
}

impl<R: Read + Seek> Walk<R> {
    fn header(&mut self) -> Result<Pairs, Fault> {
        let magic: [u8; 4] = self.bytes("the magic")?;
        if magic != MAGIC {
            return Err(Fault::Gguf { offset: 0, what: "it does not begin with GGUF".to_owned() });
        }
        let version = self.u32("the version")?;
        if !matches!(version, 2 | 3) {
            let what = match (version, version.swap_bytes()) {
                (1, _) => "version 1 is too old: convert it with a current llama.cpp".to_owned(),
                (_, 2 | 3) => "the file is big-endian".to_owned(),
                _ => format!("version {version} is not known (2 and 3 are)"),
            };
            return Err(Fault::Gguf { offset: 4, what });
        }
        self.u64("the number of tensors")?;
        let offset = self.at;
        let count = self.u64("the number of pairs")?;
        if count > MAX_PAIRS {
            let what =
                format!("it claims {count} pairs of key and value, more than the {MAX_PAIRS} that are read");
            return Err(Fault::Gguf { offset, what });
        }
        let mut pairs = Pairs::new();
        for _ in 0..count {
            let offset = self.at;
            let (key, value) = self.pair()?;
            // The first one counts in some readers, the last in others: a file with two means to confuse one.
            if let (Some(key), Some(value)) = (key, value) {
                if pairs.contains_key(&key) {
                    return Err(Fault::Gguf { offset, what: format!("the key {} comes twice", quote(&key)) });
                }
                pairs.insert(key, value);
            }
        }
        Ok(pairs)
    }

    /// One pair; the key, and the value, only if they are of use.
    fn pair(&mut self) -> Result<(Option<String>, Option<Value>), Fault> {
        let offset = self.at;
        let length = self.u64("the length of a key")?;
        if length > MAX_KEY_BYTES {
            let what = format!("a key claims {length} bytes, more than the {MAX_KEY_BYTES} of the format");
            return Err(Fault::Gguf { offset, what });
        }
        let key = if length > MAX_TEXT_BYTES {
            self.skip(length, "a key")?;
            None
        } else {
            let bytes = self.vec(length, "a key")?;
            // Keys of use are ASCII: what is not UTF-8 is none of them.
            String::from_utf8(bytes).ok().filter(|k| is_wanted(k))
        };
        let kind = self.u32("the type of a value")?;
        let value = self.value(kind, key.is_some(), 0)?;
        Ok((key, value))
    }

    /// One value of type `kind`; `None` unless `keep`.
    fn value(&mut self, kind: u32, keep: bool, depth: u32) -> Result<Option<Value>, Fault> {
        const WHAT: &str = "a value";
        let value = match kind {
            0 => Value::Number(self.bytes::<1>(WHAT)?[0].into()),
            1 => signed(i8::from_le_bytes(self.bytes(WHAT)?).into()),
            2 => Value::Number(u16::from_le_bytes(self.bytes(WHAT)?).into()),
            3 => signed(i16::from_le_bytes(self.bytes(WHAT)?).into()),
            4 => Value::Number(self.u32(WHAT)?.into()),
            5 => signed(i32::from_le_bytes(self.bytes(WHAT)?).into()),
            7 => match self.bytes::<1>(WHAT)?[0] {
                0 => Value::Flag(false),
                1 => Value::Flag(true),
                _ => Value::Other("a flag that is neither 0 nor 1"),
            },
            8 => return self.text(keep),
            9 => return self.list(keep, depth),
            10 => Value::Number(self.u64(WHAT)?),
            11 => signed(i64::from_le_bytes(self.bytes(WHAT)?)),
            6 => self.skip(4, WHAT).map(|()| Value::Other("a floating-point number"))?,
            12 => self.skip(8, WHAT).map(|()| Value::Other("a floating-point number"))?,
            _ => {
                let what = format!("a value has the unknown type {kind}");
                return Err(Fault::Gguf { offset: self.at - 4, what });
            }
        };
        Ok(keep.then_some(value))
    }

    fn text(&mut self, keep: bool) -> Result<Option<Value>, Fault> {
        let length = self.u64("the length of a text")?;
        if !keep || length > MAX_TEXT_BYTES {
            self.skip(length, "a text")?;
            return Ok(keep.then_some(Value::Other("a very long text")));
        }
        let text = String::from_utf8(self.vec(length, "a text")?);
        Ok(Some(text.map_or(Value::Other("a text that is not UTF-8"), Value::Text)))
    }

    fn list(&mut self, keep: bool, depth: u32) -> Result<Option<Value>, Fault> {
        let offset = self.at;
        if depth == MAX_DEPTH {
            let what = format!("lists are nested more than {MAX_DEPTH} deep");
            return Err(Fault::Gguf { offset, what });
        }
        let kind = self.u32("the type of a list")?;
        let count = self.u64("the length of a list")?;
        let least = least_bytes(kind)
            .ok_or_else(|| Fault::Gguf { offset, what: format!("a list has the unknown type {kind}") })?;
        // Checked before the loop, so that a huge count costs nothing.
        let total = count.checked_mul(least.bytes).filter(|total| *total <= self.end - self.at);
        let Some(total) = total else {
            return Err(Fault::Truncated {
                offset: self.end,
                what: format!("a list of {count} at byte {offset}"),
            });
        };
        if least.fixed && (!keep || count > u64::from(MOST_LAYERS)) {
            self.skip(total, "a list")?;
            return Ok(keep.then_some(Value::Other("a list longer than any model has layers")));
        }
        let keep_each = keep && count <= u64::from(MOST_LAYERS);
        let mut kept = Vec::new();
        for _ in 0..count {
            if let Some(value) = self.value(kind, keep_each, depth + 1)? {
                kept.push(value);
            }
        }
        Ok(keep.then_some(if keep_each {
            Value::List(kept)
        } else {
            Value::Other("a list longer than any model has layers")
        }))
    }

    /// Checks that `length` more bytes are there.
    fn check(&self, length: u64, what: &str) -> Result<(), Fault> {
        let left = self.end - self.at;
        if length > left {
            let what = format!("{what} at byte {}", self.at);
            return Err(Fault::Truncated { offset: self.end, what });
        }
        if self.at + length > MAX_HEADER_BYTES {
            let what = format!("the header goes on beyond the {MAX_HEADER_BYTES} bytes that are read");
            return Err(Fault::Gguf { offset: self.at, what });
        }
        Ok(())
    }

    fn fill(&mut self, into: &mut [u8], what: &str) -> Result<(), Fault> {
        self.check(into.len() as u64, what)?;
        self.source.read_exact(into).map_err(|e| match e.kind() {
            // The file became shorter since its length was read.
            ErrorKind::UnexpectedEof => Fault::Truncated { offset: self.at, what: what.to_owned() },
            _ => Fault::Read(e),
        })?;
        self.at += into.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    /// `length` is at most [`MAX_TEXT_BYTES`].
    fn vec(&mut self, length: u64, what: &str) -> Result<Vec<u8>, Fault> {
        self.check(length, what)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    fn skip(&mut self, length: u64, what: &str) -> Result<(), Fault> {
        self.check(length, what)?;
        // Most texts lie within the buffer; a seek of the file is for the long lists. `check` bounds the length to far
        // below i64::MAX.
        let buffered = self.source.buffer().len() as u64;
        if length <= buffered {
            self.source.consume(length as usize);
        } else {
            self.source.seek_relative(length as i64)?;
        }
        self.at += length;
        Ok(())
    }
}

fn is_wanted(key: &str) -> bool {
    key == GENERAL_ARCHITECTURE || key == GENERAL_NAME || SUFFIXES.iter().any(|s| key.ends_with(s))
}

fn signed(number: i64) -> Value {
    u64::try_from(number).map_or(Value::Other("a negative number"), Value::Number)
}

struct Least {
    bytes: u64,
    fixed: bool,
}

/// The fewest bytes that a value of type `kind` takes, and whether it never takes more.
fn least_bytes(kind: u32) -> Option<Least> {
    let (bytes, fixed) = match kind {
        0 | 1 | 7 => (1, true),
        2 | 3 => (2, true),
        4..=6 => (4, true),
        10..=12 => (8, true),
        8 => (8, false),
        9 => (12, false),
        _ => return None,
    };
    Some(Least { bytes, fixed })
}

/// The shape that the kept pairs describe.
fn shape(pairs: &Pairs, fallback_name: &str) -> Result<ModelShape, Fault> {
    let architecture = match pairs.get(GENERAL_ARCHITECTURE) {
        Some(Value::Text(text)) => text,
        Some(other) => return Err(wrong(GENERAL_ARCHITECTURE, other, "a text")),
        None => return Err(missing(GENERAL_ARCHITECTURE)),
    };
    let family = Family::from_tag(GENERAL_ARCHITECTURE, architecture)?;
    let keys = Keys { pairs, architecture };
    let mut notes = Vec::new();

    let layers = keys.required(".block_count", MOST_LAYERS)?;
    let heads = keys.required(".attention.head_count", MAX_HEADS)?;
    let kv_heads = keys.kv_heads(layers, heads, &mut notes)?;
    // As llama.cpp does it: each of the two that is not stated follows from the embedding.
    let dim = |suffix: &str| match keys.number(suffix, MAX_HEAD_DIM)? {
        Some(stated) => Ok(stated),
        None => {
            let key = keys.name(".embedding_length");
            let embedding = keys.required(".embedding_length", MAX_LENGTH)?;
            within(&key, derived_head_dim(&key, embedding, heads)?.into(), MAX_HEAD_DIM)
        }
    };
    let k_dim = dim(".attention.key_length")?;
    let v_dim = dim(".attention.value_length")?;
    let windows = keys.windows(family, layers, &mut notes)?;
    let name = match pairs.get(GENERAL_NAME) {
        Some(Value::Text(text)) => printable(text),
        _ => None,
    };
    let parts = Parts {
        family,
        name: name.unwrap_or_else(|| fallback_name.to_owned()),
        heads,
        context: keys.number(".context_length", MAX_LENGTH)?,
        kv_heads,
        k_dim,
        v_dim,
        windows,
        notes,
    };
    parts.join(&keys.name(".attention.head_count_kv"))
}

/// The architecture's own keys.
struct Keys<'a> {
    pairs: &'a Pairs,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.architecture)
    }

    fn get(&self, suffix: &str) -> Option<&Value> {
        self.pairs.get(&self.name(suffix))
    }

    fn number(&self, suffix: &str, most: u32) -> Result<Option<u32>, Fault> {
        self.get(suffix).map(|value| bounded(&self.name(suffix), value, most)).transpose()
    }

    fn required(&self, suffix: &str, most: u32) -> Result<u32, Fault> {
        self.number(suffix, most)?.ok_or_else(|| missing(&self.name(suffix)))
    }

    /// The KV heads of each layer: one number, or a list of them.
    fn kv_heads(&self, layers: u32, heads: u32, notes: &mut Vec<String>) -> Result<Vec<u32>, Fault> {
        const SUFFIX: &str = ".attention.head_count_kv";
        let key = self.name(SUFFIX);
        match self.get(SUFFIX) {
            None => {
                // As llama.cpp reads it.
                notes.push(format!("{key} is not in the file: each attention head has its own K and V"));
                Ok(vec![heads; layers as usize])
            }
            Some(Value::List(list)) if list.len() == layers as usize => {
                (0..).zip(list).map(|(n, value)| bounded(&format!("{key}[{n}]"), value, MAX_HEADS)).collect()
            }
            Some(list @ Value::List(_)) => {
                Err(wrong(&key, list, &format!("one number, or {layers}: one for each layer")))
            }
            Some(value) => Ok(vec![bounded(&key, value, MAX_HEADS)?; layers as usize]),
        }
    }

    fn windows(
        &self,
        family: Family,
        layers: u32,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Option<u32>>, Fault> {
        const PATTERN: &str = ".attention.sliding_window_pattern";
        const WINDOW: &str = ".attention.sliding_window";
        let full = vec![None; layers as usize];
        // llama.cpp takes a window of 0 for none.
        let window = match self.get(WINDOW) {
            None | Some(Value::Number(0)) => return Ok(full),
            Some(value) => bounded(&self.name(WINDOW), value, MAX_LENGTH)?,
        };
        let key = self.name(PATTERN);
        match (self.get(PATTERN), family.global_every()) {
            (Some(Value::List(list)), _) if list.len() == layers as usize => (0..)
                .zip(list)
                .map(|(n, value)| match value {
                    Value::Flag(sliding) => Ok(sliding.then_some(window)),
                    Value::Number(sliding @ (0 | 1)) => Ok((*sliding == 1).then_some(window)),
                    other => Err(wrong(&format!("{key}[{n}]"), other, "true for a sliding layer, or false")),
                })
                .collect(),
            (Some(list @ Value::List(_)), _) => {
                Err(wrong(&key, list, &format!("one number, or {layers} flags: one for each layer")))
            }
            (Some(value), _) => Ok(alternate(layers, bounded(&key, value, MOST_LAYERS)?, window)),
            (None, Some(every)) => Ok(alternate(layers, every, window)),
            (None, None) => {
                notes.push(format!(
                    "{} is {window}, but for this architecture llama.cpp keeps all tokens in all layers, and so does this account",
                    self.name(WINDOW)
                ));
                Ok(full)
            }
        }
    }
}

fn bounded(key: &str, value: &Value, most: u32) -> Result<u32, Fault> {
    match value {
        Value::Number(number) => within(key, *number, most),
        other => Err(wrong_number(key, other.found(), most)),
    }
}

fn wrong(key: &str, value: &Value, expected: &str) -> Fault {
    Fault::Wrong { field: key.to_owned(), found: value.found(), expected: expected.to_owned() }
}

fn missing(key: &str) -> Fault {
    Fault::Missing { field: key.to_owned(), hint: ": it is needed for the size of the KV cache" }
}
