//! A tiny writer of GGUF headers, for tests: it writes what it is told, also what no sane file says.

/// A header under construction.
pub struct Header {
    version: u32,
    pairs: u64,
    body: Vec<u8>,
}

/// A value and its type tag.
pub enum Value<'a> {
    U8(u8),
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    Bool(u8),
    Text(&'a str),
    /// Element type, claimed count, and the elements' bytes.
    List(u32, u64, Vec<u8>),
    /// A type tag and bytes.
    Raw(u32, Vec<u8>),
}

pub fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

impl Header {
    pub fn new(version: u32) -> Self {
        Header { version, pairs: 0, body: Vec::new() }
    }

    pub fn put(mut self, key: &str, value: Value<'_>) -> Self {
        self.pairs += 1;
        self.body.extend(text(key));
        let (kind, bytes) = match value {
            Value::U8(n) => (0u32, vec![n]),
            Value::U32(n) => (4, n.to_le_bytes().to_vec()),
            Value::I32(n) => (5, n.to_le_bytes().to_vec()),
            Value::F32(n) => (6, n.to_le_bytes().to_vec()),
            Value::Bool(n) => (7, vec![n]),
            Value::Text(t) => (8, text(t)),
            Value::List(kind, count, elements) => {
                let mut bytes = kind.to_le_bytes().to_vec();
                bytes.extend(count.to_le_bytes());
                bytes.extend(elements);
                (9, bytes)
            }
            Value::U64(n) => (10, n.to_le_bytes().to_vec()),
            Value::Raw(kind, bytes) => (kind, bytes),
        };
        self.body.extend(kind.to_le_bytes());
        self.body.extend(bytes);
        self
    }

    pub fn bytes(self) -> Vec<u8> {
        let pairs = self.pairs;
        self.claiming(pairs)
    }

    /// The header with another number of pairs than it has.
    pub fn claiming(self, pairs: u64) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(pairs.to_le_bytes());
        bytes.extend(self.body);
        bytes
    }
}
