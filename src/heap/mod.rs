//! Heaps: where extents come from.
//!
//! Owns the kernel buffers behind the pool's extents. Invariants: a buffer reads as zero when it is handed out, its
//! memory is there (no later touch can fail for want of memory), and its size never changes. Each kind of heap knows
//! what it can prove about who still reaches a buffer.

#[cfg(feature = "daemon")]
mod dma;
mod memfd;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(feature = "daemon")]
pub use dma::DmaHeap;
pub use memfd::Memfd;

use crate::map::SharedMap;

/// The kinds of memory that extents are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// dma-bufs of a heap under `/dev/dma_heap`.
    DmaHeap,
    /// Sealed memfds.
    Memfd,
    /// No memory at all: for simulations, and for tests of what decides without touching.
    Imaginary,
}

impl Backend {
    /// The number that the protocol uses.
    pub fn code(self) -> u32 {
        match self {
            Backend::DmaHeap => 1,
            Backend::Memfd => 2,
            Backend::Imaginary => 3,
        }
    }

    /// The backend that a number of the protocol means.
    pub fn from_code(code: u32) -> Option<Self> {
        [Backend::DmaHeap, Backend::Memfd, Backend::Imaginary].into_iter().find(|b| b.code() == code)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::DmaHeap => "dma-heap",
            Backend::Memfd => "memfd",
            Backend::Imaginary => "imaginary",
        })
    }
}

/// Why there is no buffer, and what to do about it.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum HeapError {
    #[error("{path}: there is no such heap; {advice}")]
    Missing { path: String, advice: String },
    #[error(
        "{path}: opening the heap is not permitted; run the broker as a user of the device's group (udev/60-kvbroker.rules gives it to group kvbroker)"
    )]
    Forbidden { path: String },
    #[error("{path}: {source}")]
    Open { path: String, source: io::Error },
    #[error("{heap}: no memory for a buffer of {bytes} bytes ({source}); {advice}")]
    NoMemory { heap: String, bytes: u64, source: io::Error, advice: &'static str },
    #[error("{heap}: {call} failed: {source}")]
    Call { heap: String, call: &'static str, source: io::Error },
}

/// A source of buffers.
pub trait Heap: Send + Sync + fmt::Debug {
    /// What kind of memory it gives.
    fn backend(&self) -> Backend;
    /// Its name, for people: a path, or `memfd`.
    fn name(&self) -> String;
    /// A buffer of `bytes` bytes (whole pages) that reads as zero and whose memory is there.
    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError>;
    /// Whether dropping a buffer cuts off whoever still has it: then an idle extent can be taken without asking.
    fn revokes(&self) -> bool;
}

/// One kernel buffer. Dropping it closes the broker's descriptor; a memfd is emptied first.
#[derive(Debug)]
pub struct Buffer {
    fd: Option<OwnedFd>,
    bytes: u64,
    backend: Backend,
    map: OnceLock<SharedMap>,
}

impl Buffer {
    fn new(fd: OwnedFd, bytes: u64, backend: Backend) -> Self {
        Buffer { fd: Some(fd), bytes, backend, map: OnceLock::new() }
    }

    /// Its descriptor; `None` for an imaginary one.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its descriptor if it is a memfd, of whose pages the kernel makes windows.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.fd().filter(|_| self.backend == Backend::Memfd)
    }

    /// Whether nobody else has a descriptor or a mapping of it, or imports it: provable for dma-bufs only.
    pub fn is_only_ours(&self) -> bool {
        let own = 1 + u64::from(self.map.get().is_some());
        self.fd().and_then(|fd| references(fd).ok().flatten()) == Some(own)
    }

    fn map(&self) -> io::Result<Option<&SharedMap>> {
        let Some(fd) = self.fd() else { return Ok(None) };
        if let Some(map) = self.map.get() {
            return Ok(Some(map));
        }
        let map = SharedMap::new(fd, self.bytes as usize)?;
        Ok(Some(self.map.get_or_init(|| map)))
    }

    /// Writes zeros over `range`. For a dma-buf the CPU's caches are written back after it, so that no line of zeros
    /// lands later on what the next owner wrote.
    pub fn zero(&self, range: Range<u64>) -> io::Result<()> {
        let Some(map) = self.map()? else { return Ok(()) };
        map.zero(range.start as usize..range.end as usize);
        #[cfg(feature = "daemon")]
        if self.backend == Backend::DmaHeap {
            if let Some(fd) = self.fd() {
                dma::end_cpu_write(fd)?;
            }
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Unmapped first: a mapping would keep pages that the punch is to give back.
        self.map.take();
        if self.backend == Backend::Memfd {
            if let Some(fd) = &self.fd {
                if let Err(e) = memfd::punch(fd.as_fd(), self.bytes) {
                    log::warn!("a memfd of {} bytes could not be emptied: {e}", self.bytes);
                }
            }
        }
    }
}

/// References to a dma-buf: descriptors, also in flight, mappings, imports. `None` for what is no dma-buf.
pub fn references(fd: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let count = text.lines().find_map(|l| l.strip_prefix("count:"));
    Ok(count.and_then(|c| c.trim().parse().ok()))
}

/// A heap without memory: its buffers have a size and nothing else.
#[derive(Debug, Clone, Copy, Default)]
pub struct Imaginary;

impl Heap for Imaginary {
    fn backend(&self) -> Backend {
        Backend::Imaginary
    }

    fn name(&self) -> String {
        "imaginary".into()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        Ok(Buffer { fd: None, bytes, backend: Backend::Imaginary, map: OnceLock::new() })
    }

    fn revokes(&self) -> bool {
        true
    }
}
