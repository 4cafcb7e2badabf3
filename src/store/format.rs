//! The file of one stored prefix, byte by byte. `docs/store.md` says the same for whoever reads it with other means.
//!
//! Owns no state. Invariant: a [`Head`] that exists is consistent in itself and with the length of its file; whatever
//! is cut, changed, of another version or about another geometry is an error that names what is wrong, and no size that
//! stands in a file is believed before it has been checked against the bytes that are there.
//!
//! Layout, numbers little-endian: `KVBPREFX`; version (u32); length of the body (u32); SHA-256 of these 16 bytes and the
//! body; the body, JSON; zeros up to the next multiple of [`ALIGNMENT`]; the blocks, one after the other, without gaps.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::profile::Profile;
use crate::quote::shown;

/// First bytes of a file.
pub const MAGIC: &[u8; 8] = b"KVBPREFX";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// The blocks start at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 4096;
/// The longest body: about 30,000 blocks. A longer one is refused before memory is taken for it.
pub const MAX_BODY: u32 = 4 << 20;
/// Bytes before the body.
pub const FIXED: usize = 8 + 4 + 4 + 32;
/// The longest label: a program's and a session's name with a slash between them.
const MAX_LABEL: usize = 128;

/// Why a file is no stored prefix of this version.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum FormatError {
    #[error("it is no stored prefix: its first bytes are others")]
    Magic,
    #[error("it is of version {0}, and this broker reads version {VERSION}; save the prefix again")]
    Version(u32),
    #[error("it says that its head has {0} bytes, more than the {MAX_BODY} that a head may have")]
    HeadTooLong(u32),
    #[error("it is cut: {got} bytes are there of {said}")]
    Cut { said: u64, got: u64 },
    #[error("it is longer than it says: {got} bytes are there, {said} belong to it")]
    TooLong { said: u64, got: u64 },
    #[error("it is damaged: the checksum of its head does not match")]
    Checksum,
    #[error("it is damaged: there are bytes other than zero between its head and its blocks")]
    Padding,
    #[error("its head does not decode: {0}")]
    Decode(String),
    #[error("its head contradicts itself: {0}")]
    Contradiction(&'static str),
}

/// 32 bytes, written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hex(pub [u8; 32]);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Hex> for String {
    fn from(hex: Hex) -> Self {
        hex.to_string()
    }
}

impl TryFrom<String> for Hex {
    type Error = &'static str;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.as_str().try_into()
    }
}

impl TryFrom<&str> for Hex {
    type Error = &'static str;
    fn try_from(text: &str) -> Result<Self, Self::Error> {
        const WRONG: &str = "a digest is 64 lower-case hexadecimal digits";
        let digit = |b: u8| match b {
            b'0'..=b'9' => Ok(b - b'0'),
            b'a'..=b'f' => Ok(b - b'a' + 10),
            _ => Err(WRONG),
        };
        let (mut out, text) = ([0; 32], text.as_bytes());
        if text.len() != 64 {
            return Err(WRONG);
        }
        for (byte, pair) in out.iter_mut().zip(text.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Hex(out))
    }
}

/// One block of a stored prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its name in the prefix index.
    pub name: Hex,
    /// SHA-256 of its bytes.
    pub sha256: Hex,
}

/// What a file says of itself before its blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// The uid whose prefix it is.
    pub tenant: u32,
    /// The model's fingerprint, as its engine gave it.
    pub model: Hex,
    /// The name under which the first block of a sequence of this tenant, model and geometry is hashed.
    pub root: Hex,
    /// The name of the name before the first block; `None` at the start of a sequence. Layers with a window keep only
    /// the last blocks of a prefix.
    pub before: Option<Hex>,
    /// Who pinned it: the program and the session, as they said.
    pub label: String,
    /// Tokens of the whole chain, those before the first stored block included.
    pub tokens: u64,
    /// The geometry of one layer group: rows, layout, element type, tokens per block.
    pub profile: Profile,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// The blocks, in the order of their tokens.
    pub blocks: Vec<Entry>,
}

impl Head {
    /// The name of the chain: that of its last block.
    pub fn chain(&self) -> Hex {
        self.blocks.last().map_or(Hex([0; 32]), |b| b.name)
    }

    /// Where the blocks start, for a body of `body` bytes.
    fn data_at(body: usize) -> u64 {
        (FIXED as u64 + body as u64).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of all blocks. A head that was [parsed](Self::parse) cannot overflow it.
    pub fn data_bytes(&self) -> u64 {
        self.block_bytes.saturating_mul(self.blocks.len() as u64)
    }

    /// Everything before the blocks. Its length does not depend on what the digests are.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = serde_json::to_vec(self).expect("plain data");
        let mut out = Vec::with_capacity(Self::data_at(body.len()) as usize);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        let sum = checksum(&out, &body);
        out.extend_from_slice(&sum);
        out.extend_from_slice(&body);
        out.resize(Self::data_at(body.len()) as usize, 0);
        out
    }

    /// How many bytes of a file stand before its blocks, by its first [`FIXED`] bytes.
    pub fn head_bytes(fixed: &[u8], file: u64) -> Result<usize, FormatError> {
        let start = &fixed[..fixed.len().min(8)];
        if !MAGIC.starts_with(start) {
            return Err(FormatError::Magic);
        }
        if fixed.len() < FIXED {
            return Err(FormatError::Cut { said: FIXED as u64, got: fixed.len() as u64 });
        }
        let number = |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
        match number(8) {
            VERSION => {}
            other => return Err(FormatError::Version(other)),
        }
        let body = number(12);
        if body > MAX_BODY {
            return Err(FormatError::HeadTooLong(body));
        }
        let said = Self::data_at(body as usize);
        if said > file {
            return Err(FormatError::Cut { said, got: file });
        }
        Ok(said as usize)
    }

    /// Reads the head of a file of `file` bytes, of which `bytes` are at least those before the blocks.
    pub fn parse(bytes: &[u8], file: u64) -> Result<Self, FormatError> {
        let data_at = Self::head_bytes(&bytes[..bytes.len().min(FIXED)], file)?;
        if bytes.len() < data_at {
            return Err(FormatError::Cut { said: data_at as u64, got: bytes.len() as u64 });
        }
        let body = u32::from_le_bytes(bytes[12..16].try_into().expect("four bytes")) as usize;
        let (body, padding) = bytes[FIXED..data_at].split_at(body);
        if checksum(&bytes[..16], body) != bytes[16..FIXED] {
            return Err(FormatError::Checksum);
        }
        if padding.iter().any(|b| *b != 0) {
            return Err(FormatError::Padding);
        }
        let head: Head =
            serde_json::from_slice(body).map_err(|e| FormatError::Decode(shown(&e.to_string(), 300)))?;
        head.consistent()?;
        let said = head.data_bytes().checked_add(data_at as u64);
        let said = said.ok_or(FormatError::Contradiction("more bytes than can be counted"))?;
        match file {
            got if got < said => Err(FormatError::Cut { said, got }),
            got if got > said => Err(FormatError::TooLong { said, got }),
            _ => Ok(head),
        }
    }

    fn consistent(&self) -> Result<(), FormatError> {
        let wrong = |why| Err(FormatError::Contradiction(why));
        if self.blocks.is_empty() {
            return wrong("it names no block");
        }
        if self.profile.groups().len() != 1 {
            return wrong("a block holds the layers of one group, and its profile has others");
        }
        if self.block_bytes != self.profile.block_bytes(0) {
            return wrong("its blocks are not as large as its profile makes them");
        }
        if self.label.len() > MAX_LABEL || self.label.chars().any(char::is_control) {
            return wrong("its label is none that can be shown");
        }
        let per_block = u64::from(self.profile.tokens_per_block());
        if self.tokens % per_block != 0 || self.tokens / per_block < self.blocks.len() as u64 {
            return wrong("it has more blocks than its tokens fill");
        }
        if (self.tokens / per_block == self.blocks.len() as u64) != self.before.is_none() {
            return wrong("it does not say what its first block continues, or says it of the first of all");
        }
        Ok(())
    }
}

fn checksum(start: &[u8], body: &[u8]) -> [u8; 32] {
    let mut h = Sha256::new();
    h.update(start);
    h.update(body);
    h.finalize().into()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The head of a small prefix.
    pub fn head(blocks: u8) -> Head {
        let profile = Profile::uniform("m", "f16", 2, 64, 64, 16).unwrap();
        Head {
            tenant: 1000,
            model: Hex([1; 32]),
            root: Hex([2; 32]),
            before: None,
            label: "engine/system".into(),
            tokens: u64::from(blocks) * 16,
            block_bytes: profile.block_bytes(0),
            profile,
            blocks: (0..blocks).map(|n| Entry { name: Hex([n + 3; 32]), sha256: Hex([0; 32]) }).collect(),
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let head = head(3);
        let bytes = head.to_bytes();
        let file = bytes.len() as u64 + head.data_bytes();
        assert_eq!(bytes.len() as u64 % ALIGNMENT, 0);
        assert_eq!(Head::parse(&bytes, file), Ok(head));
    }

    #[test]
    fn every_cut_and_every_flipped_bit_of_a_head_is_refused() {
        let head = head(2);
        let bytes = head.to_bytes();
        let file = bytes.len() as u64 + head.data_bytes();
        for cut in 0..bytes.len() {
            assert!(Head::parse(&bytes[..cut], cut as u64).is_err(), "cut at {cut}");
            assert!(Head::parse(&bytes[..cut], file).is_err(), "cut at {cut}, of a file that seems whole");
        }
        let mut changed = bytes.clone();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                changed[at] ^= 1 << bit;
                assert!(Head::parse(&changed, file).is_err(), "byte {at}, bit {bit}");
                changed[at] ^= 1 << bit;
            }
        }
        assert!(matches!(Head::parse(&bytes, file - 1), Err(FormatError::Cut { .. })));
        assert!(matches!(Head::parse(&bytes, file + 1), Err(FormatError::TooLong { .. })));
    }

    #[test]
    fn a_file_of_another_version_is_told_from_a_damaged_one() {
        let head = head(1);
        let mut bytes = head.to_bytes();
        let file = bytes.len() as u64 + head.data_bytes();
        for version in [0, 2, u32::MAX] {
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            assert_eq!(Head::parse(&bytes, file), Err(FormatError::Version(version)));
        }
    }

    /// The bytes of a body that a careful writer would not write, with the right checksum.
    fn forged(body: &str) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((body.len() as u32).to_le_bytes());
        let sum = checksum(&out, body.as_bytes());
        out.extend(sum);
        out.extend(body.as_bytes());
        out.resize(Head::data_at(body.len()) as usize, 0);
        out
    }

    #[test]
    fn a_head_that_lies_with_a_right_checksum_is_refused_and_costs_no_memory() {
        let good = serde_json::to_string(&head(2)).unwrap();
        let parse = |body: &str| {
            let bytes = forged(body);
            Head::parse(&bytes, bytes.len() as u64 + head(2).data_bytes())
        };
        assert_eq!(parse(&good), Ok(head(2)));
        let digest = Hex([4; 32]).to_string();
        for (from, to, words) in [
            ("\"tenant\":1000", "\"tenant\":-1", "expected u32"),
            ("\"tenant\":1000", "\"tenant\":1000,\"more\":1", "unknown field"),
            ("\"block_bytes\":4096", "\"block_bytes\":18446744073709551615", "not as large"),
            ("\"block_bytes\":4096", "\"block_bytes\":8192", "not as large"),
            ("\"tokens\":32", "\"tokens\":16", "more blocks than its tokens"),
            ("\"tokens\":32", "\"tokens\":33", "more blocks than its tokens"),
            ("\"tokens\":32", "\"tokens\":48", "what its first block continues"),
            ("engine/system", "engine\\u001b[2J", "label"),
            (digest.as_str(), "04", "64 lower-case"),
            ("\"tokens_per_block\":16", "\"tokens_per_block\":17", "17 tokens per block"),
            ("\"tokens_per_block\":16", "\"tokens_per_block\":32", "not as large"),
        ] {
            let body = good.replacen(from, to, 1);
            assert_ne!(body, good, "{from} stands in {good}");
            let said = parse(&body).unwrap_err().to_string();
            assert!(said.contains(words), "{to}: {said}");
        }
        let mut bytes = forged(&good);
        bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Head::parse(&bytes, u64::MAX), Err(FormatError::HeadTooLong(u32::MAX)));
        let none = serde_json::to_string(&head(0)).unwrap();
        assert!(parse(&none).unwrap_err().to_string().contains("names no block"));
    }
}
