//! The head of a stored prefix's file.

use kvbroker::profile::Profile;
use kvbroker::store::format::{ALIGNMENT, Entry, FIXED, Head, Hex, MAGIC, VERSION};
use sha2::{Digest as _, Sha256};

/// What stands in heads.
pub const WORDS: &[&[u8]] = &[
    b"\"tenant\"",
    b"\"tokens\"",
    b"\"block_bytes\"",
    b"\"blocks\":[]",
    b"\"before\":null",
    b"\"window\":1",
    b"\"tokens_per_block\"",
    b"\\u001b",
    b",",
    b"{}",
];

/// Bodies that are right: the checksum is put before them when they are read.
pub fn seeds() -> Vec<Vec<u8>> {
    let head = |blocks: u8, tokens: u64, before: Option<Hex>| {
        let profile = Profile::uniform("m", "f16", 2, 64, 64, 16).expect("a small geometry");
        let head = Head {
            tenant: 1000,
            model: Hex([1; 32]),
            root: Hex([2; 32]),
            before,
            label: "engine/system".into(),
            tokens,
            block_bytes: profile.block_bytes(0),
            profile,
            blocks: (0..blocks).map(|n| Entry { name: Hex([n + 3; 32]), sha256: Hex([0; 32]) }).collect(),
        };
        serde_json::to_vec(&head).expect("plain data")
    };
    vec![head(1, 16, None), head(3, 48, None), head(2, 96, Some(Hex([9; 32])))]
}

/// A file with this body and a checksum that is right.
fn forge(body: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    let sum = Sha256::new().chain_update(&bytes).chain_update(body).finalize();
    bytes.extend(sum);
    bytes.extend(body);
    assert_eq!(bytes.len(), FIXED + body.len());
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    bytes
}

fn parse(bytes: &[u8], file: u64) -> bool {
    let most = (1 << 20) + 64 * bytes.len();
    match super::alloc::at_most(most, "reading a prefix's head", || Head::parse(bytes, file)) {
        Ok(head) => {
            let written = head.to_bytes();
            let file = written.len() as u64 + head.data_bytes();
            assert_eq!(Head::parse(&written, file).as_ref(), Ok(&head), "a head survives its file");
            assert!(Head::parse(&written, file + 1).is_err() && Head::parse(&written, file - 1).is_err());
            true
        }
        Err(e) => {
            super::check_words(&e);
            false
        }
    }
}

/// The input as a file, and as the body of a file with the right checksum, of every length that it could have.
pub fn run(data: &[u8]) -> bool {
    parse(data, data.len() as u64);
    let forged = forge(data);
    parse(&forged, u64::MAX);
    parse(&forged, forged.len() as u64);
    // The length that the body says, where it can be told.
    let said = serde_json::from_slice::<Head>(data).ok().map(|head| head.data_bytes());
    said.is_some_and(|said| parse(&forged, said.saturating_add(forged.len() as u64)))
}
