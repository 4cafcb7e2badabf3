//! Seeded mutations, for the run without libFuzzer.
//!
//! Owns what is done to an input. Invariant: the same seed gives the same inputs on every machine.

pub use super::random::Random;

/// Numbers at which readers go wrong.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];
const NUMBERS: [&str; 12] = [
    "0",
    "1",
    "-1",
    "255",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "0.5",
];
/// Inputs do not grow beyond this.
const LONGEST: usize = 16 << 10;

/// Changes `bytes` a little; `other` is a second input to take pieces of.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8], words: &[&[u8]]) {
    for _ in 0..1 + random.below(4) {
        once(random, bytes, other, words);
    }
    bytes.truncate(LONGEST);
}

fn once(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8], words: &[&[u8]]) {
    if bytes.is_empty() {
        bytes.extend(other);
        return;
    }
    let at = random.below(bytes.len());
    match random.below(10) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        // A number of any width in the place of bytes.
        2 => {
            let edge = EDGES[random.below(EDGES.len())].wrapping_add(random.below(3) as u64).to_le_bytes();
            let width = (1 << random.below(4)).min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&edge[..width]);
        }
        3 => bytes.truncate(at),
        4 => {
            let end = at + random.below((bytes.len() - at).min(64)) + 1;
            bytes.drain(at..end.min(bytes.len()));
        }
        5 => {
            let end = at + random.below((bytes.len() - at).min(256)) + 1;
            let piece = bytes[at..end.min(bytes.len())].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        6 if !other.is_empty() => {
            let from = random.below(other.len());
            let piece = &other[from..(from + 1 + random.below(64)).min(other.len())];
            bytes.splice(at..at, piece.iter().copied());
        }
        7 if !words.is_empty() => {
            let word = words[random.below(words.len())];
            bytes.splice(at..at, word.iter().copied());
        }
        // A number in text.
        _ => {
            let digit = |b: &u8| b.is_ascii_digit();
            let Some(start) = bytes[at..].iter().position(digit).map(|i| at + i) else {
                bytes[at] = bytes[at].wrapping_add(1);
                return;
            };
            let end = bytes[start..].iter().position(|b| !digit(b)).map_or(bytes.len(), |i| start + i);
            bytes.splice(start..end, NUMBERS[random.below(NUMBERS.len())].bytes());
        }
    }
}
