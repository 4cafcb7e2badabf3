//! Long runs of bytes from and to a file, in order, with several pieces under way at once.
//!
//! Owns the pieces. Invariants: bytes are handed out, and land in the file, exactly in order and exactly once; where
//! io_uring is refused, or answers with an error or short, the same piece is read or written plainly, so that only a plain
//! call's error is ever reported.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

#[cfg(feature = "daemon")]
use super::ring::Ring;

/// Pieces under way at once.
const DEPTH: usize = 8;
/// Bytes of a piece.
const PIECE: usize = 256 << 10;

/// Which way bytes go: through the ring where there is one, for tests also without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// io_uring if the kernel gives it.
    Ring,
    /// One call after the other.
    #[cfg_attr(not(test), allow(dead_code))]
    Plain,
}

/// An engine's library is built without io_uring, and never stores anything.
#[cfg(not(feature = "daemon"))]
struct Ring(std::convert::Infallible);

#[cfg(not(feature = "daemon"))]
impl Ring {
    fn new(_: usize, _: usize) -> Option<Self> {
        None
    }
    fn buffer(&mut self, _: usize) -> &mut [u8] {
        match self.0 {}
    }
    fn read(&mut self, _: usize, _: std::os::fd::BorrowedFd<'_>, _: u64, _: usize) {
        match self.0 {}
    }
    fn write(&mut self, _: usize, _: std::os::fd::BorrowedFd<'_>, _: u64, _: usize) {
        match self.0 {}
    }
    fn wait(&mut self, _: usize) -> io::Result<usize> {
        match self.0 {}
    }
}

/// Where pieces are kept.
enum Pieces {
    Ring(Box<Ring>),
    Plain(Box<[u8]>),
}

impl Pieces {
    fn new(way: Way) -> Self {
        let ring = if way == Way::Ring { Ring::new(DEPTH, PIECE) } else { None };
        ring.map_or_else(
            || Pieces::Plain(vec![0; PIECE].into_boxed_slice()),
            |ring| Pieces::Ring(Box::new(ring)),
        )
    }
}

/// Reads a run of a file ahead.
pub(super) struct Reader<'f> {
    file: &'f File,
    pieces: Pieces,
    /// Bytes are asked for up to here, and handed out up to there.
    asked: u64,
    given: u64,
    end: u64,
    number: usize,
}

impl<'f> Reader<'f> {
    /// Of the bytes from `at` to `end`.
    pub fn new(file: &'f File, at: u64, end: u64, way: Way) -> Self {
        let mut reader = Reader { file, pieces: Pieces::new(way), asked: at, given: at, end, number: 0 };
        for n in 0..DEPTH {
            reader.ask(n);
        }
        reader
    }

    fn ask(&mut self, n: usize) {
        let Pieces::Ring(ring) = &mut self.pieces else { return };
        let len = (self.end - self.asked).min(PIECE as u64) as usize;
        if len > 0 {
            ring.read(n, self.file.as_fd(), self.asked, len);
            self.asked += len as u64;
        }
    }

    /// Hands the next bytes to `take`; `false` when there are no more.
    pub fn next(&mut self, take: impl FnOnce(&[u8]) -> io::Result<()>) -> io::Result<bool> {
        let len = (self.end - self.given).min(PIECE as u64) as usize;
        if len == 0 {
            return Ok(false);
        }
        let n = self.number % DEPTH;
        let buffer = match &mut self.pieces {
            Pieces::Plain(buffer) => {
                self.file.read_exact_at(&mut buffer[..len], self.given)?;
                &buffer[..len]
            }
            Pieces::Ring(ring) => {
                let got = ring.wait(n).unwrap_or(0).min(len);
                let buffer = &mut ring.buffer(n)[..len];
                self.file.read_exact_at(&mut buffer[got..], self.given + got as u64)?;
                &*buffer
            }
        };
        take(buffer)?;
        self.given += len as u64;
        self.number += 1;
        self.ask(n);
        Ok(true)
    }
}

/// Writes a run of a file behind its caller.
pub(super) struct Writer<'f> {
    file: &'f File,
    pieces: Pieces,
    /// Length and place of what was written from each piece.
    under_way: [Option<(u64, usize)>; DEPTH],
    at: u64,
    filled: usize,
    number: usize,
}

impl<'f> Writer<'f> {
    /// From `at` on.
    pub fn new(file: &'f File, at: u64, way: Way) -> Self {
        let pieces = Pieces::new(way);
        Writer { file, pieces, under_way: [None; DEPTH], at, filled: 0, number: 0 }
    }

    /// Appends `bytes`.
    pub fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = self.number % DEPTH;
            if self.filled == 0 {
                self.finish(n)?;
            }
            let buffer = match &mut self.pieces {
                Pieces::Plain(buffer) => buffer,
                Pieces::Ring(ring) => ring.buffer(n),
            };
            let some = bytes.len().min(PIECE - self.filled);
            buffer[self.filled..self.filled + some].copy_from_slice(&bytes[..some]);
            self.filled += some;
            bytes = &bytes[some..];
            if self.filled == PIECE {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Sends the piece that is being filled on its way.
    fn send(&mut self) -> io::Result<()> {
        let (n, len) = (self.number % DEPTH, self.filled);
        match &mut self.pieces {
            Pieces::Plain(buffer) => self.file.write_all_at(&buffer[..len], self.at)?,
            Pieces::Ring(ring) => {
                ring.write(n, self.file.as_fd(), self.at, len);
                self.under_way[n] = Some((self.at, len));
            }
        }
        self.at += len as u64;
        self.filled = 0;
        self.number += 1;
        Ok(())
    }

    /// Makes sure that what was sent from this piece is written.
    fn finish(&mut self, n: usize) -> io::Result<()> {
        let (Pieces::Ring(ring), Some((at, len))) = (&mut self.pieces, self.under_way[n].take()) else {
            return Ok(());
        };
        let written = ring.wait(n).unwrap_or(0).min(len);
        self.file.write_all_at(&ring.buffer(n)[written..len], at + written as u64)
    }

    /// Writes what is left; with success all of it is in the file, though not yet on the disk.
    pub fn end(mut self) -> io::Result<()> {
        if self.filled > 0 {
            self.send()?;
        }
        (0..DEPTH).try_for_each(|n| self.finish(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 257) as u8).collect()
    }

    #[test]
    fn what_goes_out_comes_back_in_order_through_the_ring_and_plainly() {
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, DEPTH * PIECE, 2 * DEPTH * PIECE + 12345] {
            for (out, back) in [(Way::Ring, Way::Plain), (Way::Plain, Way::Ring)] {
                let file = tempfile::tempfile().unwrap();
                let all = bytes(len);
                let mut writer = Writer::new(&file, 100, out);
                for some in all.chunks(77_777) {
                    writer.put(some).unwrap();
                }
                writer.end().unwrap();
                assert_eq!(file.metadata().unwrap().len(), if len > 0 { 100 + len as u64 } else { 0 });
                let mut got = Vec::new();
                let mut reader = Reader::new(&file, 100, 100 + len as u64, back);
                let mut take = |some: &[u8]| {
                    got.extend_from_slice(some);
                    Ok(())
                };
                while reader.next(&mut take).unwrap() {}
                assert_eq!(got, all, "{len} bytes, out by {out:?}");
            }
        }
    }

    #[test]
    fn a_file_that_is_shorter_than_it_should_be_is_an_error_either_way() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes(PIECE + 10), 0).unwrap();
        for way in [Way::Ring, Way::Plain] {
            let mut reader = Reader::new(&file, 0, 2 * PIECE as u64, way);
            assert!(reader.next(|_| Ok(())).unwrap());
            let e = reader.next(|_| Ok(())).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof, "{way:?}");
        }
    }

    #[test]
    fn whoever_stops_in_the_middle_leaves_nothing_under_way() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes(20 * PIECE), 0).unwrap();
        for _ in 0..50 {
            let mut reader = Reader::new(&file, 0, 20 * PIECE as u64, Way::Ring);
            assert!(
                reader
                    .next(|some| (some == &bytes(PIECE)[..]).then_some(()).ok_or(io::ErrorKind::Other.into()))
                    .unwrap()
            );
            let mut writer = Writer::new(&file, 0, Way::Ring);
            writer.put(&bytes(3 * PIECE)).unwrap();
        }
        let mut start = vec![0; PIECE];
        file.read_exact_at(&mut start, 0).unwrap();
        assert_eq!(start, bytes(PIECE));
    }

    #[test]
    fn a_full_device_is_reported_as_such_either_way() {
        let Ok(full) = File::options().write(true).open("/dev/full") else {
            eprintln!("there is no /dev/full here: nothing to try");
            return;
        };
        for way in [Way::Ring, Way::Plain] {
            let mut writer = Writer::new(&full, 0, way);
            let put = writer.put(&bytes(3 * PIECE));
            let e = put.and_then(|()| writer.end()).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::StorageFull, "{way:?}");
        }
    }
}
