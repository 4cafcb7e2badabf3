//! Extents as udmabufs: dma-bufs over memfds that never leave the broker. For devices behind an IOMMU, which can do with
//! scattered pages.
//!
//! Owns the open `/dev/udmabuf`. Invariants: the memfd behind a buffer is sealed (SHRINK, GROW, SEAL), has all its pages,
//! is exported exactly once, and its descriptor is the broker's alone; clients get the dma-buf. A buffer is taken back
//! only when nobody else holds the dma-buf: punching the memfd earlier would cut nobody off (a udmabuf keeps its pages)
//! and give nothing back. Then the memfd is emptied and a new one made, so no page ever goes to a second tenant and the
//! count need prove nothing about pages.

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;

use super::{Backend, Buffer, Heap, HeapError, Memfd, Renewal, holders};

/// Where the kernel has the device.
pub const DEVICE: &str = "/dev/udmabuf";
/// Where the kernel shows its limits.
const PARAMETERS: &str = "/sys/module/udmabuf/parameters";

/// `struct udmabuf_create` of the kernel.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

mod ioctl {
    nix::ioctl_write_ptr!(udmabuf_create, b'u', 0x42, super::Create);
}

/// `UDMABUF_FLAGS_CLOEXEC`
const CLOEXEC: u32 = 1;

/// The kernel's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one udmabuf.
    pub bytes: u64,
    /// Pieces that one udmabuf may be made of.
    pub pieces: u64,
}

impl Limits {
    /// Reads `size_limit_mb` and `list_limit`, if the module shows them.
    pub fn read() -> Option<Limits> {
        Limits::read_in(Path::new(PARAMETERS))
    }

    fn read_in(directory: &Path) -> Option<Limits> {
        let number = |name: &str| {
            let text = std::fs::read_to_string(directory.join(name)).ok()?;
            text.trim().parse::<i64>().ok().map(|n| n.max(0) as u64)
        };
        Some(Limits {
            bytes: number("size_limit_mb")?.saturating_mul(1 << 20),
            pieces: number("list_limit")?,
        })
    }
}

/// The heap.
#[derive(Debug)]
pub struct Udmabuf {
    path: PathBuf,
    device: File,
}

impl Udmabuf {
    /// Opens the device.
    pub fn open(path: &Path) -> Result<Self, HeapError> {
        let shown = path.display().to_string();
        let device =
            OpenOptions::new().read(true).write(true).open(path).map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => HeapError::Missing {
                    path: shown.clone(),
                    advice: "this kernel has no udmabuf (CONFIG_UDMABUF, or modprobe udmabuf); without it, \
                         backend = \"dma-heap\" or \"memfd\" serves"
                        .into(),
                },
                io::ErrorKind::PermissionDenied => HeapError::ForbiddenUdmabuf { path: shown.clone() },
                _ => HeapError::Open { path: shown.clone(), source },
            })?;
        Ok(Udmabuf { path: path.to_path_buf(), device })
    }

    fn export(&self, memfd: &OwnedFd, bytes: u64) -> Result<OwnedFd, Errno> {
        let create = Create { memfd: memfd.as_raw_fd() as u32, flags: CLOEXEC, offset: 0, size: bytes };
        // SAFETY: the kernel reads one struct udmabuf_create through the pointer, which outlives the call.
        let fd = unsafe { ioctl::udmabuf_create(self.device.as_raw_fd(), &create) }?;
        // SAFETY: the call succeeded, so it returned a descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn refused(&self, bytes: u64, errno: Errno) -> HeapError {
        let limits = Limits::read();
        match (errno, limits) {
            (Errno::EINVAL, Some(limits)) if bytes > limits.bytes => {
                HeapError::TooLarge { heap: self.name(), bytes, limit: limits.bytes }
            }
            (Errno::ENOTTY, _) => HeapError::NoHeap { path: self.name() },
            (Errno::ENOMEM, _) => HeapError::NoMemory {
                heap: self.name(),
                bytes,
                source: errno.into(),
                advice: "make the pool smaller than the memory that is free",
            },
            _ => HeapError::Call { heap: self.name(), call: "UDMABUF_CREATE", source: errno.into() },
        }
    }
}

impl Heap for Udmabuf {
    fn backend(&self) -> Backend {
        Backend::Udmabuf
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        // No need to lock: what a udmabuf is made of is pinned.
        let memfd = Memfd::new(false).allocate(bytes)?.into_fd();
        let fd = self.export(&memfd, bytes).map_err(|e| self.refused(bytes, e))?;
        let mut buffer = Buffer::new(fd, bytes, Backend::Udmabuf);
        buffer.backing = Some(memfd);
        Ok(buffer)
    }

    fn has_room(&self, bytes: u64) -> Result<(), HeapError> {
        super::room::check(&self.name(), bytes)
    }

    fn renew(&self, old: Arc<Buffer>) -> Renewal {
        match holders::alone(old) {
            Err(held) => Renewal::Held(held),
            Ok((old, counted)) => {
                if let Err(e) = counted {
                    log::warn!("{}: whoever keeps an old extent keeps its memory: {e}", self.name());
                }
                let bytes = old.bytes();
                drop(old);
                Renewal::of(self.allocate(bytes))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Limits::read_in(dir.path()), None);
        std::fs::write(dir.path().join("size_limit_mb"), "64\n").unwrap();
        std::fs::write(dir.path().join("list_limit"), "1024\n").unwrap();
        assert_eq!(Limits::read_in(dir.path()), Some(Limits { bytes: 64 << 20, pieces: 1024 }));
        std::fs::write(dir.path().join("size_limit_mb"), "2147483647\n").unwrap();
        assert_eq!(Limits::read_in(dir.path()).unwrap().bytes, 2147483647 << 20);
    }

    #[test]
    fn a_device_that_is_missing_or_something_else_is_named_with_what_to_do() {
        let missing = Udmabuf::open(Path::new("/nowhere/udmabuf")).unwrap_err().to_string();
        assert!(missing.contains("/nowhere/udmabuf") && missing.contains("CONFIG_UDMABUF"), "{missing}");
        let null = Udmabuf::open(Path::new("/dev/null")).unwrap();
        let wrong = null.allocate(1 << 16).unwrap_err();
        assert!(matches!(wrong, HeapError::NoHeap { .. }), "{wrong}");
    }
}
