//! Heaps: where extents come from.
//!
//! Owns the kernel buffers behind the pool's extents. Invariants: a buffer reads as zero when it is handed out, its
//! memory is there (no later touch can fail for want of memory), and its size never changes. Each kind of heap knows
//! what it can prove about who still reaches a buffer.

#[cfg(feature = "daemon")]
mod dma;
#[cfg_attr(not(feature = "daemon"), allow(dead_code))]
mod holders;
mod memfd;
#[cfg_attr(not(feature = "daemon"), allow(dead_code))]
mod probe;
mod room;
mod sealed;
#[cfg(feature = "daemon")]
mod udmabuf;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(feature = "daemon")]
pub use dma::DmaHeap;
pub use holders::Held;
pub use memfd::Memfd;
pub use probe::Proof;
#[cfg(feature = "daemon")]
pub(crate) use room::{beyond_file_size, cgroup_bytes, memory_bytes};
pub use sealed::{ReadOnlyCopy, Sealed};
#[cfg(feature = "daemon")]
pub use udmabuf::{DEVICE as UDMABUF_DEVICE, Limits as UdmabufLimits, Udmabuf};

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
    /// dma-bufs that `/dev/udmabuf` makes of memfds.
    Udmabuf,
}

/// What is true of all buffers of one kind.
struct Facts {
    /// In the protocol.
    code: u32,
    /// In configurations, on command lines, in reports.
    name: &'static str,
    /// For who has to choose one.
    about: &'static str,
    /// The descriptor is a dma-buf.
    dma_buf: bool,
    /// Physical pages may lie anywhere; otherwise the kernel may have them in one piece, on borders of its own.
    scattered: bool,
    /// Emptied by the broker, it reads as zero to whoever keeps it.
    revocable: bool,
    /// The kernel wants a write by the CPU begun, as well as ended.
    #[cfg_attr(not(feature = "daemon"), allow(dead_code))]
    begins_writes: bool,
    /// Descriptors that the broker needs for one buffer.
    descriptors: u32,
}

impl Backend {
    /// All of them.
    const ALL: [Backend; 4] = [Backend::DmaHeap, Backend::Memfd, Backend::Imaginary, Backend::Udmabuf];
    /// Those that a pool can be configured to be made of.
    pub const CONFIGURABLE: [Backend; 3] = [Backend::DmaHeap, Backend::Udmabuf, Backend::Memfd];

    /// The one place for what tells kinds apart without touching memory.
    const fn facts(self) -> Facts {
        match self {
            Backend::DmaHeap => Facts {
                code: 1,
                name: "dma-heap",
                about: "A heap under /dev/dma_heap: over CMA contiguous, and aligned by the kernel",
                dma_buf: true,
                scattered: false,
                revocable: false,
                begins_writes: false,
                descriptors: 1,
            },
            Backend::Memfd => Facts {
                code: 2,
                name: "memfd",
                about: "Sealed memfds",
                dma_buf: false,
                scattered: true,
                revocable: true,
                begins_writes: false,
                descriptors: 1,
            },
            Backend::Imaginary => Facts {
                code: 3,
                name: "imaginary",
                about: "No memory",
                dma_buf: false,
                scattered: true,
                // There is nothing to keep.
                revocable: true,
                begins_writes: false,
                descriptors: 0,
            },
            Backend::Udmabuf => Facts {
                code: 4,
                name: "udmabuf",
                about: "dma-bufs that /dev/udmabuf makes of memfds",
                dma_buf: true,
                scattered: true,
                revocable: false,
                // It knows no end without a beginning.
                begins_writes: true,
                // With the memfd that it is made of.
                descriptors: 2,
            },
        }
    }

    /// Whether an extent's descriptor is a dma-buf: devices import it, the kernel counts its holders, and CPU caches are told
    /// when it is written.
    pub const fn is_dma_buf(self) -> bool {
        self.facts().dma_buf
    }

    /// Whether the pages of an extent may lie anywhere. Else they may be in one piece, and extents are cut as for CMA.
    pub const fn is_scattered(self) -> bool {
        self.facts().scattered
    }

    /// Descriptors that the broker needs for an extent.
    pub const fn descriptors(self) -> u32 {
        self.facts().descriptors
    }

    /// The name in configurations, on command lines and in reports.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// One line about it, for who has to choose one.
    pub const fn about(self) -> &'static str {
        self.facts().about
    }

    /// The one of this name that can be configured.
    pub fn configurable(name: &str) -> Option<Self> {
        Backend::CONFIGURABLE.into_iter().find(|b| b.name() == name)
    }

    /// The number that the protocol uses.
    pub const fn code(self) -> u32 {
        self.facts().code
    }

    /// The backend that a number of the protocol means.
    pub fn from_code(code: u32) -> Option<Self> {
        Backend::ALL.into_iter().find(|b| b.code() == code)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
    #[error(
        "{path}: opening it is not permitted; put the broker's user into the device's group (kvm on Debian), and let its unit see the device"
    )]
    ForbiddenUdmabuf { path: String },
    #[error("{path}: it is no heap: it gives no memory; name the right one with pool.heap")]
    NoHeap { path: String },
    #[error(
        "{heap}: an extent of {bytes} bytes is more than the {limit} that the kernel lets one udmabuf have; raise size_limit_mb of the module udmabuf, or make pool.extent smaller"
    )]
    TooLarge { heap: String, bytes: u64, limit: u64 },
    #[error(
        "{heap}: the kernel refuses to allocate {bytes} bytes ({source}): it is older than this heap's interface, or the size is none that it knows"
    )]
    Refused { heap: String, bytes: u64, source: io::Error },
    #[error("{path}: {source}")]
    Open { path: String, source: io::Error },
    #[error(
        "{heap}: a buffer of {bytes} bytes is a file, and this process may have none of more than {limit} bytes (RLIMIT_FSIZE); raise the limit: ulimit -f unlimited, or LimitFSIZE=infinity in the unit"
    )]
    FileSize { heap: String, bytes: u64, limit: u64 },
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
    fn revokes(&self) -> bool {
        self.backend().facts().revocable
    }

    /// Makes of a buffer that was somebody's one that nobody has ever seen: by whatever this heap can prove.
    fn renew(&self, old: Arc<Buffer>) -> Renewal {
        let bytes = old.bytes();
        old.revoke();
        drop(old);
        Renewal::of(self.allocate(bytes))
    }

    /// Whether the kernel can give `bytes` more without taking them from somebody. Heaps of ordinary memory ask
    /// `/proc/meminfo`: an allocation that is too much for the machine does not fail there but ends in the out-of-memory
    /// killer.
    fn has_room(&self, bytes: u64) -> Result<(), HeapError> {
        let _ = bytes;
        Ok(())
    }

    /// What is known about the count of its buffers' holders.
    fn proof(&self) -> Proof {
        Proof::NotNeeded
    }
}

/// What became of a buffer that was to be renewed.
#[derive(Debug)]
pub enum Renewal {
    /// Here is one that nobody has ever seen, or whose every holder is proven gone, and that reads as zero.
    Ready {
        /// It.
        buffer: Buffer,
        /// The same memory, scrubbed.
        reused: bool,
    },
    /// Somebody else holds the old one still; nothing has been done to it.
    Held(Held),
    /// The old one is gone, and there is no new one.
    Missing(HeapError),
}

impl Renewal {
    /// Of a buffer allocated anew.
    pub(crate) fn of(allocated: Result<Buffer, HeapError>) -> Self {
        match allocated {
            Ok(buffer) => Renewal::Ready { buffer, reused: false },
            Err(e) => Renewal::Missing(e),
        }
    }
}

/// One kernel buffer. Dropping it closes the broker's descriptor; a memfd is emptied first.
#[derive(Debug)]
pub struct Buffer {
    fd: Option<OwnedFd>,
    /// What a udmabuf is made of.
    backing: Option<OwnedFd>,
    bytes: u64,
    backend: Backend,
    map: OnceLock<SharedMap>,
}

impl Buffer {
    fn new(fd: OwnedFd, bytes: u64, backend: Backend) -> Self {
        Buffer { fd: Some(fd), backing: None, bytes, backend, map: OnceLock::new() }
    }

    /// Its descriptor; `None` for an imaginary one.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memfd that it is, or that it is made of: of its pages the kernel makes windows. Not to be handed out.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        match self.backend {
            Backend::Memfd => self.fd(),
            Backend::Udmabuf => self.backing.as_ref().map(AsFd::as_fd),
            Backend::DmaHeap | Backend::Imaginary => None,
        }
    }

    /// Whether nobody else has a descriptor or a mapping of it, or imports it: provable for dma-bufs only.
    pub fn is_only_ours(&self) -> bool {
        let own = 1 + u64::from(self.map.get().is_some());
        self.fd().and_then(references) == Some(own)
    }

    fn map(&self) -> io::Result<Option<&SharedMap>> {
        let Some(fd) = self.fd() else { return Ok(None) };
        if let Some(map) = self.map.get() {
            return Ok(Some(map));
        }
        let map = SharedMap::new(fd, self.bytes as usize)?;
        Ok(Some(self.map.get_or_init(|| map)))
    }

    fn unmap(&mut self) {
        self.map.take();
    }

    /// The descriptor alone, for another kind of buffer to be made of it. Nothing is emptied.
    #[cfg(feature = "daemon")]
    fn into_fd(mut self) -> OwnedFd {
        self.unmap();
        self.fd.take().expect("made of a descriptor")
    }

    /// Cuts off whoever has it, where the kernel can: the broker itself may still have a message that names it.
    fn revoke(&self) {
        if let Some(fd) = self.fd.as_ref().filter(|_| self.backend.facts().revocable) {
            self.punch(fd);
        }
    }

    fn punch(&self, memfd: &OwnedFd) {
        if let Err(e) = memfd::punch(memfd.as_fd(), self.bytes) {
            log::warn!("a memfd of {} bytes could not be emptied: {e}", self.bytes);
        }
    }

    /// The CRC-32 of `range`, going on from the sum of what comes before it (0 at the start). An imaginary buffer has
    /// nothing to be read.
    pub fn checksum(&self, range: Range<u64>, sum: u32) -> io::Result<u32> {
        let Some(map) = self.map()? else { return Ok(sum) };
        let mut hasher = crc32fast::Hasher::new_with_initial(sum);
        // Copied before it is looked at: other processes can write there.
        let mut own = [0; 16 << 10];
        let (mut at, end) = (range.start as usize, range.end as usize);
        while at < end {
            let some = own.len().min(end - at);
            map.read_into(at, &mut own[..some]);
            hasher.update(&own[..some]);
            at += some;
        }
        Ok(hasher.finalize())
    }

    /// Fills `out` with the bytes from `at` on. An imaginary buffer reads as zero.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        match self.map()? {
            Some(map) => out.copy_from_slice(&map.read(at as usize, out.len())),
            None => out.fill(0),
        }
        Ok(())
    }

    /// Writes `bytes` from `at` on; for a dma-buf as [`zero`](Self::zero) does.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_by(|map| map.write(at as usize, bytes))
    }

    /// Writes zeros over `range`. For a dma-buf the CPU's caches are written back after it, so that no line of zeros
    /// lands later on what the next owner wrote.
    pub fn zero(&self, range: Range<u64>) -> io::Result<()> {
        self.write_by(|map| map.zero(range.start as usize..range.end as usize))
    }

    fn write_by(&self, write: impl FnOnce(&SharedMap)) -> io::Result<()> {
        let Some(map) = self.map()? else { return Ok(()) };
        #[cfg(feature = "daemon")]
        if self.backend.facts().begins_writes {
            self.fd().map_or(Ok(()), dma::begin_cpu_write)?;
        }
        write(map);
        #[cfg(feature = "daemon")]
        if self.backend.is_dma_buf() {
            self.fd().map_or(Ok(()), dma::end_cpu_write)?;
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Unmapped first: a mapping would keep pages that the punch is to give back.
        self.unmap();
        self.revoke();
        if let Some(memfd) = self.backing.take() {
            // The dma-buf first, for the same reason.
            self.fd.take();
            self.punch(&memfd);
        }
    }
}

/// References to a dma-buf: descriptors, also in flight, mappings, imports. `None` for what is no dma-buf.
pub fn references(fd: BorrowedFd<'_>) -> Option<u64> {
    holders::count(fd).ok()
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
        Ok(Buffer { fd: None, backing: None, bytes, backend: Backend::Imaginary, map: OnceLock::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_and_the_protocol_have_each_kind_of_memory_under_its_number() {
        let header = include_str!("../../include/kvbroker.h");
        let protocol = include_str!("../../docs/protocol.md");
        let row = protocol.lines().find(|l| l.contains("| `backend` |")).expect("the field of welcome");
        for backend in Backend::CONFIGURABLE {
            let (code, name) = (backend.code(), backend.name());
            let constant = format!("KVB_BACKEND_{} = {code}", name.to_uppercase().replace('-', "_"));
            assert!(header.contains(&constant), "kvbroker.h lacks {constant}");
            assert!(row.contains(&format!("{code} {name}")), "docs/protocol.md lacks {code} {name}: {row}");
            assert_eq!(Backend::from_code(code), Some(backend));
            assert_eq!(Backend::configurable(name), Some(backend));
        }
        let codes: std::collections::BTreeSet<u32> = Backend::ALL.into_iter().map(Backend::code).collect();
        assert_eq!(codes.len(), Backend::ALL.len(), "a number means one of them");
    }
}
