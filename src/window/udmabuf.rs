//! `/dev/udmabuf`: one dma-buf over the pages of scattered memfd ranges, in any order.
//!
//! Owns the open device and its limits. Invariants: what is asked for is within the module's limits or is refused with
//! words that name them; the dma-buf has CLOEXEC from its first moment. A udmabuf is always writable, and keeps its pages
//! when a hole is punched into the memfd: whoever makes one keeps the memfd's blocks in place until nobody holds it.

#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use thiserror::Error;

/// `_IOW('u', 0x43, struct udmabuf_create_list)`; the size covers the header only.
const CREATE_LIST: libc::Ioctl = 0x4008_7543;
const FLAG_CLOEXEC: u64 = 1;
/// Where the module's limits are.
const PARAMETERS: &str = "/sys/module/udmabuf/parameters";

/// Why there is no udmabuf.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum UdmabufError {
    #[error(
        "{node}: this kernel has no udmabuf (CONFIG_UDMABUF); Rockchip's 6.1 has none, Debian's and Armbian's current kernels do"
    )]
    Missing { node: String },
    #[error("{node}: {source}; the broker must be in the device's group (kvm by systemd's rule)")]
    Open { node: String, source: io::Error },
    #[error(
        "{ranges} scattered ranges are more than the {limit} of {PARAMETERS}/list_limit: raise it, ask for fewer tokens, or for whole blocks"
    )]
    TooManyRanges { ranges: usize, limit: usize },
    #[error(
        "{bytes} bytes are more than the {limit_mb} MiB of {PARAMETERS}/size_limit_mb: raise it, or ask for one plane"
    )]
    TooLarge { bytes: u64, limit_mb: u64 },
    #[error("UDMABUF_CREATE_LIST of {ranges} ranges, {bytes} bytes: {source}")]
    Create { ranges: usize, bytes: u64, source: io::Error },
}

/// A range of a memfd.
#[derive(Debug, Clone, Copy)]
pub struct Range<'a> {
    /// The memfd.
    pub memfd: BorrowedFd<'a>,
    /// From this byte: whole pages.
    pub offset: u64,
    /// So many bytes: whole pages.
    pub bytes: u64,
}

/// The open device.
#[derive(Debug)]
pub struct Udmabuf {
    node: File,
}

impl Udmabuf {
    /// Opens `node`, usually `/dev/udmabuf`.
    pub fn open(node: &Path) -> Result<Self, UdmabufError> {
        let shown = node.display().to_string();
        let opened = OpenOptions::new().read(true).write(true).open(node);
        let node = opened.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => UdmabufError::Missing { node: shown },
            _ => UdmabufError::Open { node: shown, source },
        })?;
        Ok(Udmabuf { node })
    }

    /// Something that is none, for tests of what decides without making.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Udmabuf { node: OpenOptions::new().read(true).write(true).open("/dev/null").expect("/dev/null") }
    }

    /// (`list_limit`, `size_limit_mb`), read at each use: both can be changed while the module is there.
    fn limits() -> (usize, u64) {
        let read = |name: &str| fs::read_to_string(format!("{PARAMETERS}/{name}")).ok()?.trim().parse().ok();
        // The defaults of every kernel up to 7.2, where sysfs is not to be seen.
        (read("list_limit").unwrap_or(1024) as usize, read("size_limit_mb").unwrap_or(64))
    }

    /// A dma-buf over `ranges`, one after the other.
    pub fn create(&self, ranges: &[Range<'_>]) -> Result<OwnedFd, UdmabufError> {
        let (limit, limit_mb) = Udmabuf::limits();
        if ranges.len() > limit {
            return Err(UdmabufError::TooManyRanges { ranges: ranges.len(), limit });
        }
        let bytes: u64 = ranges.iter().map(|r| r.bytes).sum();
        if bytes > limit_mb << 20 {
            return Err(UdmabufError::TooLarge { bytes, limit_mb });
        }
        // struct udmabuf_create_list {u32 flags, count; struct {u32 memfd, pad; u64 offset, size} list[]}.
        let word = |low: u64, high: u64| {
            if cfg!(target_endian = "little") { low | high << 32 } else { low << 32 | high }
        };
        let mut list = vec![word(FLAG_CLOEXEC, ranges.len() as u64)];
        for r in ranges {
            list.extend([word(r.memfd.as_raw_fd() as u64, 0), r.offset, r.bytes]);
        }
        // SAFETY: the kernel reads the header and as many entries as it counts, all of which are in `list`; the memfds are
        // borrowed, so they are open.
        let fd = Errno::result(unsafe { libc::ioctl(self.node.as_raw_fd(), CREATE_LIST, list.as_ptr()) });
        let fd = fd.map_err(|e| UdmabufError::Create { ranges: ranges.len(), bytes, source: e.into() })?;
        // SAFETY: the call succeeded, so it returned a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_kernel_without_udmabuf_is_told_from_one_that_forbids_it() {
        let e = Udmabuf::open(Path::new("/nonexistent/udmabuf")).unwrap_err();
        assert!(e.to_string().contains("CONFIG_UDMABUF"), "{e}");
    }

    #[test]
    fn what_the_modules_limits_forbid_is_refused_in_words_before_the_kernel_is_asked() {
        // Never reaches the ioctl: /dev/null stands for the device.
        let device = Udmabuf::none();
        let file = File::open("/dev/null").unwrap();
        let range = Range { memfd: file.as_fd(), offset: 0, bytes: 4096 };
        let (limit, limit_mb) = Udmabuf::limits();
        if limit < 1 << 20 {
            let e = device.create(&vec![range; limit + 1]).unwrap_err();
            assert!(matches!(e, UdmabufError::TooManyRanges { ranges, .. } if ranges == limit + 1), "{e}");
        }
        if limit_mb < 1 << 40 {
            let large = Range { bytes: (limit_mb << 20) + 4096, ..range };
            let e = device.create(&[large]).unwrap_err();
            assert!(e.to_string().contains("size_limit_mb"), "{e}");
        }
        assert!(matches!(device.create(&[range]), Err(UdmabufError::Create { .. })));
    }
}
