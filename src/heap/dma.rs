//! Extents as dma-bufs of a heap under `/dev/dma_heap`: contiguous where the heap is a CMA heap.
//!
//! Owns the open heap. Invariant: a buffer of this heap goes to a second tenant only when the kernel counts no holder but
//! the broker and the probe at the start has proven the count; then it is zeroed first. Without that proof it is destroyed
//! and allocated anew: the kernel zeroes what it hands out, and pages that somebody keeps stay out of the heap. (A dma-buf
//! has no revoke: who keeps a descriptor keeps the bytes, so a buffer with other holders is left alone.)

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dma_heap::{Heap as Node, HeapKind};
use nix::errno::Errno;

use super::{Backend, Buffer, Heap, HeapError, Proof, Renewal, holders, probe};
use crate::map::page_bytes;

/// Names under which kernels have offered their CMA heap, newest first.
const CMA_NAMES: [&str; 5] = ["default_cma_region", "reserved", "linux,cma", "cma", "default-pool"];

/// One heap.
pub struct DmaHeap {
    path: PathBuf,
    node: Node,
    proof: Proof,
}

impl fmt::Debug for DmaHeap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaHeap")
            .field("path", &self.path)
            .field("proof", &self.proof)
            .finish_non_exhaustive()
    }
}

impl DmaHeap {
    /// Opens the heap at `path`, and finds out what the count of holders proves here, on one page of it.
    pub fn open(path: &Path) -> Result<Self, HeapError> {
        let shown = path.display().to_string();
        // Opened once by hand: the crate's error does not tell a missing heap from a forbidden one.
        std::fs::File::open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => HeapError::Missing { path: shown.clone(), advice: others(path) },
            io::ErrorKind::PermissionDenied => HeapError::Forbidden { path: shown.clone() },
            _ => HeapError::Open { path: shown.clone(), source },
        })?;
        let node = Node::new(HeapKind::Custom(path.to_path_buf()))
            .map_err(|e| HeapError::Open { path: shown, source: io::Error::other(e) })?;
        let mut heap = DmaHeap { path: path.to_path_buf(), node, proof: Proof::NotNeeded };
        heap.proof = probe::probe(heap.allocate(page_bytes() as u64)?);
        Ok(heap)
    }

    /// The heap to use under `dir` when none is named: the CMA heap by the names that kernels give it, else the only
    /// heap there is beside the system's.
    pub fn find(dir: &Path) -> Option<PathBuf> {
        let named = CMA_NAMES.iter().map(|n| dir.join(n)).find(|p| p.exists());
        named.or_else(|| {
            let names = heaps(dir).into_iter().filter(|n| !n.starts_with("system"));
            let mut paths = names.map(|n| dir.join(n));
            paths.next().filter(|_| paths.next().is_none())
        })
    }
}

fn heaps(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn others(path: &Path) -> String {
    let names = path.parent().map(heaps).unwrap_or_default();
    match names.is_empty() {
        true => "this kernel offers none: it needs CONFIG_DMABUF_HEAPS_CMA and a CMA region; \
                 without one, backend = \"memfd\" serves engines that run on the CPU"
            .into(),
        false => format!("heaps that are there: {}", names.join(", ")),
    }
}

/// Why the kernel gave nothing: by what the caller can do about it.
fn refusal(heap: String, bytes: u64, source: io::Error) -> HeapError {
    match source.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOMEM) => HeapError::NoMemory {
            heap,
            bytes,
            source,
            advice: "enlarge the CMA region (cma= on the kernel command line, or the device-tree node) or make the pool smaller",
        },
        Some(Errno::ENOTTY) => HeapError::NoHeap { path: heap },
        Some(Errno::EINVAL) => HeapError::Refused { heap, bytes, source },
        _ => HeapError::Call { heap, call: "DMA_HEAP_IOCTL_ALLOC", source },
    }
}

impl Heap for DmaHeap {
    fn backend(&self) -> Backend {
        Backend::DmaHeap
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        let fd = self.node.allocate(bytes as usize).map_err(|e| refusal(self.name(), bytes, e))?;
        Ok(Buffer::new(fd, bytes, Backend::DmaHeap))
    }

    fn renew(&self, old: Arc<Buffer>) -> Renewal {
        let (mut old, counted) = match holders::alone(old) {
            Ok(alone) => alone,
            Err(held) => return Renewal::Held(held),
        };
        if self.proof.is_proven() && counted.is_ok() {
            match old.zero(0..old.bytes()) {
                Ok(()) => {
                    old.unmap();
                    return Renewal::Ready { buffer: old, reused: true };
                }
                Err(e) => {
                    log::warn!("{}: an extent could not be scrubbed, it is allocated anew: {e}", self.name())
                }
            }
        }
        let bytes = old.bytes();
        drop(old);
        Renewal::of(self.allocate(bytes))
    }

    fn proof(&self) -> Proof {
        self.proof.clone()
    }
}

const SYNC_WRITE: u64 = 2;
const SYNC_END: u64 = 4;

/// `DMA_BUF_IOCTL_SYNC` with END and WRITE: caches are written back to memory.
pub(super) fn end_cpu_write(fd: BorrowedFd<'_>) -> io::Result<()> {
    sync(fd, SYNC_END | SYNC_WRITE)
}

/// `DMA_BUF_IOCTL_SYNC` with START and WRITE.
pub(super) fn begin_cpu_write(fd: BorrowedFd<'_>) -> io::Result<()> {
    sync(fd, SYNC_WRITE)
}

#[allow(unsafe_code)]
fn sync(fd: BorrowedFd<'_>, flags: u64) -> io::Result<()> {
    nix::ioctl_write_ptr!(dma_buf_sync, b'b', 0, u64);
    loop {
        // SAFETY: the kernel reads one u64 (struct dma_buf_sync) through the pointer, which outlives the call.
        match unsafe { dma_buf_sync(fd.as_raw_fd(), &flags) } {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR | Errno::EAGAIN) => continue,
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_refuses_is_told_apart_by_what_helps() {
        let said = |errno: Errno| refusal("/dev/dma_heap/x".into(), 3 << 20, errno.into()).to_string();
        assert!(said(Errno::ENOMEM).contains("enlarge the CMA region"));
        assert!(said(Errno::ENOTTY).contains("name the right one with pool.heap"));
        assert!(said(Errno::EINVAL).contains("older than this heap's interface"));
        assert!(said(Errno::EMFILE).contains("DMA_HEAP_IOCTL_ALLOC failed"));
        let all = [Errno::ENOMEM, Errno::ENOTTY, Errno::EINVAL, Errno::EMFILE];
        assert!(all.into_iter().all(|e| said(e).contains("/dev/dma_heap/x")));
    }
}
