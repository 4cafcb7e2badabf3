//! Stored prefixes: pinned prompts in files, so that they are there again after a reboot.
//!
//! Owns the files, and knows pools only as pieces of buffers. Invariants: see `format` (what a file is) and
//! `file` (how one is opened and replaced). All of it takes long and is done outside of the broker's loop:
//! [`Order::run`].

pub mod file;
pub mod format;
#[cfg(feature = "daemon")]
mod ring;
mod stream;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub use file::{Directory, Listing, StoreError};
pub use format::{Entry, FormatError, Head, Hex};

use crate::heap::Buffer;

/// A block's bytes: a buffer, and where in it they start.
pub type Piece = (Arc<Buffer>, u64);

/// The directory, and the bytes that all its files together may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Its path.
    pub path: PathBuf,
    /// The bound.
    pub limit: u64,
}

impl Location {
    fn open(&self, make: bool) -> Result<Directory, StoreError> {
        Directory::open(&self.path, self.limit, make)
    }
}

/// Work on files.
#[derive(Debug)]
pub enum Order {
    /// Read the heads of all files.
    List(Location),
    /// Fill blocks from a file.
    Read {
        /// Where it is.
        from: Location,
        /// The head that was listed.
        head: Box<Head>,
        /// Where each of its blocks goes; `None` for those that are there already.
        into: Vec<Option<Piece>>,
    },
    /// Write files, and remove others.
    Save {
        /// Where they are.
        to: Location,
        /// Heads without checksums, and where the bytes are.
        chains: Vec<(Head, Vec<Piece>)>,
        /// Chains whose files are to go.
        gone: Vec<Hex>,
    },
}

/// What became of an [`Order`].
#[derive(Debug)]
pub enum Finished {
    /// Of a list.
    Listed(Result<Listing, StoreError>),
    /// Of a read.
    Read(Result<(), StoreError>),
    /// Of a save: a file each, those that were written first.
    Saved(Vec<Saved>),
}

/// What became of one chain.
#[derive(Debug)]
pub struct Saved {
    /// The chain.
    pub chain: Hex,
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file; `None` if it was removed.
    pub result: Result<Option<u64>, StoreError>,
}

impl Order {
    /// Does it.
    pub fn run(self) -> Finished {
        match self {
            Order::List(location) => Finished::Listed(location.open(false).and_then(|d| d.list())),
            Order::Read { from, head, into } => Finished::Read(read(&from, &head, &into)),
            Order::Save { to, chains, gone } => Finished::Saved(save(&to, chains, gone)),
        }
    }
}

fn read(from: &Location, head: &Head, into: &[Option<Piece>]) -> Result<(), StoreError> {
    from.open(false)?.read(head, |block, at, bytes| match into.get(block) {
        Some(Some((buffer, start))) => buffer.write(start + at, bytes),
        _ => Ok(()),
    })
}

fn save(to: &Location, chains: Vec<(Head, Vec<Piece>)>, gone: Vec<Hex>) -> Vec<Saved> {
    let mut done = Vec::new();
    let directory = match to.open(true) {
        Ok(directory) => directory,
        Err(why) => {
            let chain = chains.first().map(|(head, _)| head.chain()).or(gone.first().copied());
            let chain = chain.unwrap_or(Hex([0; 32]));
            return vec![Saved { chain, path: to.path.clone(), result: Err(why) }];
        }
    };
    // First what makes room.
    for chain in gone {
        let path = directory.path_of(&chain);
        match directory.remove(&chain) {
            Ok(true) => done.push(Saved { chain, path, result: Ok(None) }),
            Ok(false) => {}
            Err(why) => done.push(Saved { chain, path, result: Err(why) }),
        }
    }
    for (head, pieces) in chains {
        let chain = head.chain();
        let path = directory.path_of(&chain);
        let give = |block: usize, at: u64, out: &mut [u8]| match pieces.get(block) {
            Some((buffer, start)) => buffer.read(start + at, out),
            None => Err(io::ErrorKind::InvalidInput.into()),
        };
        let result = directory.write(head, give).map(Some);
        done.push(Saved { chain, path, result });
    }
    done
}
