//! Reads and writes of files that overlap: io_uring over buffers of its own.
//!
//! Owns the ring and the buffers. Invariants: a buffer that the kernel may still fill or read is neither touched nor
//! freed before its completion has come (if the kernel stops telling, it is leaked); every buffer is ordinary memory of this
//! process, never a pool's: pages of a CMA region that the kernel holds on to for good would be lost to the pool.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, squeue, types};

/// See the module.
pub(super) struct Ring {
    ring: IoUring,
    buffers: Vec<Box<[u8]>>,
    /// For each buffer that was handed to the kernel: `None` until it is back.
    results: Vec<Option<i32>>,
    busy: Vec<bool>,
}

impl Ring {
    /// A ring of `count` buffers of `bytes` bytes; `None` where the kernel refuses (too old, `io_uring_disabled`, a
    /// filter of system calls, no memory to lock).
    pub fn new(count: usize, bytes: usize) -> Option<Self> {
        let ring = IoUring::new(count as u32)
            .inspect_err(|e| log::debug!("io_uring is refused ({e}): files are read and written plainly"))
            .ok()?;
        let buffers = (0..count).map(|_| vec![0; bytes].into_boxed_slice()).collect();
        Some(Ring { ring, buffers, results: vec![None; count], busy: vec![false; count] })
    }

    /// The buffer with this number.
    ///
    /// # Panics
    /// If the kernel has it: a defect of the caller.
    pub fn buffer(&mut self, n: usize) -> &mut [u8] {
        assert!(!self.busy[n], "buffer {n} is the kernel's");
        &mut self.buffers[n]
    }

    /// Starts to fill the first `len` bytes of a buffer from offset `at` of a file.
    pub fn read(&mut self, n: usize, fd: BorrowedFd<'_>, at: u64, len: usize) {
        let buffer = &mut self.buffer(n)[..len];
        let entry = opcode::Read::new(types::Fd(fd.as_raw_fd()), buffer.as_mut_ptr(), len as u32);
        self.start(n, &entry.offset(at).build());
    }

    /// Starts to write the first `len` bytes of a buffer to offset `at` of a file.
    pub fn write(&mut self, n: usize, fd: BorrowedFd<'_>, at: u64, len: usize) {
        let buffer = &self.buffer(n)[..len];
        let entry = opcode::Write::new(types::Fd(fd.as_raw_fd()), buffer.as_ptr(), len as u32);
        self.start(n, &entry.offset(at).build());
    }

    fn start(&mut self, n: usize, entry: &squeue::Entry) {
        let entry = entry.clone().user_data(n as u64);
        self.results[n] = None;
        // SAFETY: the entry names a buffer of self within its length (sliced above). The buffer is marked busy: until
        // its completion has come it is not handed out by `buffer`, and Drop waits for it or leaks it. The descriptor is open during
        // the submission below, in which the kernel takes its own reference.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        match pushed {
            Ok(()) => {
                self.busy[n] = true;
                // Whatever keeps it from being submitted now, waiting for it tries again.
                let _ = self.ring.submit();
            }
            // There are as many entries as buffers: this cannot be, and if it is, the caller does it plainly.
            Err(_) => self.results[n] = Some(-libc::EBUSY),
        }
    }

    /// What came of the last operation on this buffer: bytes, or an error. Waits for it.
    pub fn wait(&mut self, n: usize) -> io::Result<usize> {
        while self.busy[n] {
            if !self.collect() {
                return Err(io::ErrorKind::Other.into());
            }
        }
        let result = self.results[n].take().unwrap_or(-libc::EINVAL);
        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
    }

    /// Waits for a completion and takes in all that are there. `false` if the kernel refuses: then all that it has is
    /// given up.
    fn collect(&mut self) -> bool {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    log::warn!("io_uring: {e}");
                    self.give_up();
                    return false;
                }
            }
        }
        for entry in self.ring.completion() {
            let n = entry.user_data() as usize;
            self.busy[n] = false;
            self.results[n] = Some(entry.result());
        }
        true
    }

    /// Leaks what the kernel has.
    fn give_up(&mut self) {
        for (buffer, busy) in self.buffers.iter_mut().zip(&mut self.busy) {
            if std::mem::take(busy) {
                let bytes = buffer.len();
                std::mem::forget(std::mem::replace(buffer, vec![0; bytes].into_boxed_slice()));
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.busy.contains(&true) && self.collect() {}
    }
}
