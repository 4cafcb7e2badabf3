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
    /// The bytes that the files of any one tenant may have.
    pub part: u64,
}

impl Location {
    fn open(&self, make: bool) -> Result<Directory, StoreError> {
        Ok(Directory::open(&self.path, self.limit, make)?.with_part(self.part))
    }
}

/// A prefix that is to be written.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its head, without the file's checksums.
    pub head: Head,
    /// Where each block's bytes are.
    pub pieces: Vec<Piece>,
    /// Bytes from one block's start that its sum is over: the block, and what is behind it in its place.
    pub summed: u64,
    /// The CRC-32 of each block as it was sealed, as far as it has been taken.
    pub sums: Vec<Option<u32>>,
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
        /// What is to be written.
        chains: Vec<Source>,
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

fn save(to: &Location, chains: Vec<Source>, gone: Vec<Hex>) -> Vec<Saved> {
    let mut done = Vec::new();
    let directory = match to.open(true) {
        Ok(directory) => directory,
        Err(why) => {
            let chain = chains.first().map(|source| source.head.chain()).or(gone.first().copied());
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
    for source in chains {
        let chain = source.head.chain();
        let path = directory.path_of(&chain);
        let result = source.write_to(&directory).map(Some);
        done.push(Saved { chain, path, result });
    }
    done
}

impl Source {
    /// Writes the file, and compares the very bytes that are written with the sums of the seals.
    fn write_to(self, directory: &Directory) -> Result<u64, StoreError> {
        let Source { head, pieces, summed, sums } = self;
        let (path, block_bytes) = (directory.path_of(&head.chain()), head.block_bytes);
        let (mut sum, mut damaged) = (crc32fast::Hasher::new(), None);
        let give = |block: usize, at: u64, out: &mut [u8]| {
            let Some((buffer, start)) = pieces.get(block) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            buffer.read(start + at, out)?;
            sum.update(out);
            if at + out.len() as u64 == block_bytes {
                let mut behind = vec![0; summed.saturating_sub(block_bytes) as usize];
                buffer.read(start + block_bytes, &mut behind)?;
                sum.update(&behind);
                let read = std::mem::take(&mut sum).finalize();
                if sums.get(block).copied().flatten().is_some_and(|sealed| sealed != read) {
                    damaged = Some(block);
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
            Ok(())
        };
        let written = directory.write(head, give);
        match damaged {
            Some(block) => Err(StoreError::Sealed { path, block }),
            None => written,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::format::tests::head;
    use super::*;
    use crate::heap::{Heap, Memfd};

    #[test]
    fn a_block_that_is_not_what_was_sealed_is_saved_nowhere_and_is_named() {
        let parent = tempfile::tempdir().unwrap();
        let to = Location { path: parent.path().join("prefixes"), limit: 1 << 20, part: 1 << 20 };
        let buffer = Arc::new(Memfd::new(false).allocate(1 << 20).unwrap());
        let head = head(2);
        let summed = head.block_bytes + 4096;
        let pieces: Vec<Piece> = vec![(buffer.clone(), 0), (buffer.clone(), summed)];
        let sum = |n: u64| buffer.checksum(n * summed..(n + 1) * summed, 0).unwrap();
        let source = |sums| Source { head: head.clone(), pieces: pieces.clone(), summed, sums };
        buffer.write(0, b"what was sealed").unwrap();
        let sums = vec![Some(sum(0)), Some(sum(1))];
        let saved = |sums| save(&to, vec![source(sums)], Vec::new()).pop().unwrap().result;
        assert!(saved(sums.clone()).unwrap().is_some());
        // One byte of the second block, and one behind it.
        for at in [summed + 1, 2 * summed - 1] {
            buffer.write(at, b"x").unwrap();
            let why = saved(sums.clone()).unwrap_err();
            assert!(matches!(why, StoreError::Sealed { block: 1, .. }), "{why}");
            buffer.write(at, &[0]).unwrap();
        }
        // A sum that has not been taken yet is compared with nothing.
        buffer.write(summed, b"x").unwrap();
        assert!(saved(vec![sums[0], None]).unwrap().is_some());
    }
}
