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

/// Writes zeros without fetching what they replace. What is scrubbed has lain in memory for a while: to fetch each line of
/// it only to overwrite it takes twice as long (17 against 36 GB/s, measured over 6 MiB of 192), and puts out of the caches
/// what somebody is using.
///
/// # Safety
/// The `len` bytes from `at` on can be written.
#[cfg(target_arch = "x86_64")]
unsafe fn zero_past_caches(at: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = at.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: head, lines and tail are the whole range, once. Streamed are whole lines, each at a multiple of its size; the
    // fence orders them before whatever tells others that the zeros are there.
    unsafe {
        at.write_bytes(0, head);
        let body = at.add(head);
        for line in 0..lines {
            let line = body.add(line * LINE).cast::<__m128i>();
            (0..4).for_each(|quarter| _mm_stream_si128(line.add(quarter), _mm_setzero_si128()));
        }
        _mm_sfence();
        let tail = head + lines * LINE;
        at.add(tail).write_bytes(0, len - tail);
    }
}

/// On arm64 the C library's `memset` does so for zeros by itself (`dc zva`).
///
/// # Safety
/// The `len` bytes from `at` on can be written.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn zero_past_caches(at: *mut u8, len: usize) {
    // SAFETY: the caller's.
    unsafe { at.write_bytes(0, len) }
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

    /// Writes zeros over `range`, past the caches: they are for others to read, not for whoever writes them.
    pub fn zero(&self, range: Range<usize>) {
        self.within(&range);
        // SAFETY: the range lies inside the mapping, which lives as long as self; bytes have no invalid values.
        unsafe { zero_past_caches(self.map.as_mut_ptr().add(range.start), range.len()) }
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
        let mut out = vec![0; len];
        self.read_into(at, &mut out);
        out
    }

    /// The same into memory of the caller's own.
    pub fn read_into(&self, at: usize, out: &mut [u8]) {
        self.within(&(at..at + out.len()));
        // SAFETY: inside the mapping, and the destination is ours, so the two cannot overlap.
        unsafe { self.map.as_ptr().add(at).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn map(bytes: usize) -> SharedMap {
        let name = c"kvbroker-test";
        let fd = nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&fd, bytes as i64).unwrap();
        // The mapping outlives the descriptor.
        SharedMap::new(fd.as_fd(), bytes).unwrap()
    }

    #[test]
    fn what_is_written_is_read_back_up_to_the_last_byte() {
        let bytes = 2 * page_bytes();
        let map = map(bytes);
        map.write(bytes - 3, b"end");
        map.write(0, b"start");
        assert_eq!((map.read(0, 6), map.read(bytes - 4, 4)), (b"start\0".to_vec(), b"\0end".to_vec()));
        map.zero(1..bytes - 1);
        assert_eq!((map.read(0, 2), map.read(bytes - 2, 2)), (b"s\0".to_vec(), b"\0d".to_vec()));
    }

    #[test]
    fn zeros_are_written_from_the_first_byte_to_the_last_and_nowhere_else() {
        let bytes = page_bytes();
        let map = map(bytes);
        for range in
            [0..0, 5..5, 1..16, 3..64, 64..128, 63..129, 60..1000, 128..129, 0..bytes, bytes - 1..bytes]
        {
            map.write(0, &vec![7; bytes]);
            map.zero(range.clone());
            let wrong = (0..).zip(map.read(0, bytes)).find(|(at, byte)| (*byte == 0) != range.contains(at));
            assert_eq!(wrong, None, "{range:?}");
        }
    }

    #[test]
    fn nothing_outside_of_a_mapping_is_read_or_written() {
        let bytes = page_bytes();
        let map = map(bytes);
        let stopped = |what: &dyn Fn()| catch_unwind(AssertUnwindSafe(what)).is_err();
        for at in [bytes, bytes - 1, usize::MAX - 1] {
            assert!(stopped(&|| map.write(at, b"no")), "write at {at}");
            assert!(stopped(&|| drop(map.read(at, 2))), "read at {at}");
            assert!(stopped(&|| map.read_into(at, &mut [0; 2])), "read into a buffer at {at}");
            assert!(stopped(&|| map.zero(at..at.wrapping_add(2))), "zero at {at}");
        }
        assert_eq!(map.read(0, bytes), vec![0; bytes]);
    }

    #[test]
    fn a_forked_child_does_not_have_the_mapping() {
        let bytes = page_bytes();
        let map = map(bytes);
        let is_there = || {
            let mut in_memory = 0;
            // SAFETY: the kernel writes one byte for the one page; where nothing is mapped it says ENOMEM.
            unsafe { libc::mincore(map.as_ptr().cast(), bytes, &mut in_memory) == 0 }
        };
        assert!(is_there());
        // SAFETY: the child makes two system calls and nothing else.
        let status = unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::_exit(if is_there() { 1 } else { 7 });
            }
            let mut status = 0;
            libc::waitpid(pid, &mut status, 0);
            status
        };
        assert_eq!(libc::WEXITSTATUS(status), 7);
        assert!(is_there());
    }
}
