//! Mappings of memory that other processes write too.
//!
//! Owns mapped address ranges. Invariants: a range stays mapped as long as the value lives; what is behind it is only
//! touched through raw pointers, never through a slice, because another process may change it at any time; nothing is
//! read or written outside the range.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use memmap2::{MmapOptions, MmapRaw};

/// The machine's page size in bytes.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).expect("the page size is positive")
}

/// A whole buffer, mapped for reading and writing, populated, and not inherited by a forked child.
#[derive(Debug)]
pub struct SharedMap {
    map: MmapRaw,
}

impl SharedMap {
    /// Maps the first `bytes` bytes of `fd`.
    pub fn new(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        let map = MmapOptions::new().len(bytes).map_raw(fd.as_raw_fd())?;
        // A child has no use for it, and a mapping that a child keeps would count as a holder of a dma-buf.
        map.advise(memmap2::Advice::DontFork)?;
        Ok(SharedMap { map })
    }

    fn within(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.map.len(),
            "{range:?} is outside of the buffer"
        );
    }

    /// Where it is mapped; not to be used for longer than the value lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Writes zeros over `range`.
    pub fn zero(&self, range: Range<usize>) {
        self.within(&range);
        // SAFETY: the range lies inside the mapping, which lives as long as self; bytes have no invalid values.
        unsafe { self.map.as_mut_ptr().add(range.start).write_bytes(0, range.len()) }
    }

    /// Keeps its pages in memory (`mlock`).
    pub fn lock(&self) -> io::Result<()> {
        self.map.lock()
    }

    /// Gives the first page to a pipe (`vmsplice`), where it stays whatever becomes of the mapping. Returns its bytes.
    pub(crate) fn first_page_into(&self, pipe: &impl AsRawFd) -> io::Result<usize> {
        let len = page_bytes().min(self.map.len());
        let page = libc::iovec { iov_base: self.map.as_mut_ptr().cast(), iov_len: len };
        // SAFETY: the vector names memory inside the mapping, which outlives the call; the kernel only reads it.
        let taken = unsafe { libc::vmsplice(pipe.as_raw_fd(), &page, 1, libc::SPLICE_F_NONBLOCK) };
        usize::try_from(taken).map_err(|_| io::Error::last_os_error())
    }

    /// Copies `bytes` to offset `at`.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.within(&(at..at + bytes.len()));
        // SAFETY: inside the mapping, and the source is ours, so the two cannot overlap.
        unsafe { self.map.as_mut_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// A copy of `len` bytes at offset `at`.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        self.within(&(at..at + len));
        let mut out = vec![0; len];
        // SAFETY: inside the mapping, and the destination is ours, so the two cannot overlap.
        unsafe { self.map.as_ptr().add(at).copy_to_nonoverlapping(out.as_mut_ptr(), len) };
        out
    }
}
