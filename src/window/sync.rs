//! Hand-over of a dma-buf between CPU and device, and who still holds one.
//!
//! Owns nothing. Invariants: a [`Cpu`] section begins with START and ends with END of the same direction, also when what
//! lies between panics; the sections of a process are counted, so that a test can say that there is one per hand-over and
//! none per token (`a_section_is_ended_once_and_counted_as_what_it_was_however_it_ends`). `DMA_BUF_IOCTL_SYNC` keeps caches coherent; it excludes nobody.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;

/// What the CPU is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Read what the device has written: caches are invalidated at the start.
    Read = 1,
    /// Write what the device is to read: caches are written back at the end.
    Write = 2,
}

/// Hand-overs to and from devices since the process began.
#[derive(Debug, Default)]
pub struct Counts {
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Counts {
    /// None yet.
    pub const fn new() -> Self {
        Counts { reads: AtomicU64::new(0), writes: AtomicU64::new(0) }
    }

    /// (read sections, write sections) that were ended.
    pub fn get(&self) -> (u64, u64) {
        (self.reads.load(Ordering::Relaxed), self.writes.load(Ordering::Relaxed))
    }
}

/// A time during which the CPU, and not the device, has a dma-buf.
#[derive(Debug)]
pub struct Cpu<'a> {
    fd: BorrowedFd<'a>,
    direction: Direction,
    counts: Option<&'a Counts>,
    done: bool,
}

impl<'a> Cpu<'a> {
    /// The CPU takes the buffer.
    pub fn begin(fd: BorrowedFd<'a>, direction: Direction, counts: Option<&'a Counts>) -> io::Result<Self> {
        sync(fd, direction as u64)?;
        Ok(Cpu { fd, direction, counts, done: false })
    }

    /// The device may have it.
    pub fn end(mut self) -> io::Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> io::Result<()> {
        const END: u64 = 4;
        self.done = true;
        sync(self.fd, END | self.direction as u64)?;
        if let Some(counts) = self.counts {
            let count = match self.direction {
                Direction::Read => &counts.reads,
                Direction::Write => &counts.writes,
            };
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for Cpu<'_> {
    fn drop(&mut self) {
        if !self.done {
            if let Err(e) = self.finish() {
                log::warn!("handing a buffer over to the device: {e}");
            }
        }
    }
}

fn sync(fd: BorrowedFd<'_>, flags: u64) -> io::Result<()> {
    nix::ioctl_write_ptr!(dma_buf_sync, b'b', 0, u64);
    loop {
        // SAFETY: the kernel reads one u64 (struct dma_buf_sync) through the pointer, which outlives the call.
        match unsafe { dma_buf_sync(fd.as_raw_fd(), &flags) } {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            // A memfd (an embedded pool's staging buffer): no device imports it, so there is nothing to keep coherent.
            Err(Errno::ENOTTY) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;

    #[test]
    fn a_section_is_ended_once_and_counted_as_what_it_was_however_it_ends() {
        // What no device imports is handed over all the same, without the kernel.
        let memory: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let counts = Counts::new();
        let begin = |direction| Cpu::begin(memory.as_fd(), direction, Some(&counts)).unwrap();
        let section = begin(Direction::Read);
        assert_eq!(counts.get(), (0, 0), "it goes on");
        section.end().unwrap();
        assert_eq!(counts.get(), (1, 0));
        drop(begin(Direction::Write));
        assert_eq!(counts.get(), (1, 1));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _section = begin(Direction::Write);
            panic!("in the middle of a hand-over");
        }));
        assert!(panicked.is_err());
        assert_eq!(counts.get(), (1, 2));
        Cpu::begin(memory.as_fd(), Direction::Read, None).unwrap().end().unwrap();
        assert_eq!(counts.get(), (1, 2), "nobody counts these");
    }

    #[test]
    fn a_buffer_that_cannot_be_handed_over_is_an_error_and_no_section() {
        // A descriptor on which no ioctl is allowed at all.
        let path = nix::fcntl::open("/", nix::fcntl::OFlag::O_PATH, nix::sys::stat::Mode::empty()).unwrap();
        let counts = Counts::new();
        assert!(Cpu::begin(path.as_fd(), Direction::Write, Some(&counts)).is_err());
        assert_eq!(counts.get(), (0, 0));
    }
}
