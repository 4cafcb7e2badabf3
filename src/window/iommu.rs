//! iommufd: a device's own address spaces, one context and one space per tenant.
//!
//! Owns contexts, address spaces, bound devices, and the mappings by which memfd ranges reach them. Invariants: who holds a
//! device's descriptor can attach any space of the context that it was bound to, so a context never serves two tenants;
//! what is mapped is unmapped whole, as one piece, or not at all; the pages of a [`Mapping`] stay pinned exactly until it is
//! unmapped. That a device is nobody's is proven, not remembered: [`Device::bind`] opens it anew, and the kernel refuses
//! while an earlier descriptor lives.
//!
//! The structures are those of `<linux/iommufd.h>` and `<linux/vfio.h>` (Linux 6.2, cdev 6.6).

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use thiserror::Error;

use super::udmabuf::Range;
use crate::map::page_bytes;

// _IO(';', n).
const IOMMU_IOAS_ALLOC: libc::Ioctl = 0x3b81;
const IOMMU_IOAS_IOVA_RANGES: libc::Ioctl = 0x3b84;
const IOMMU_IOAS_MAP: libc::Ioctl = 0x3b85;
const IOMMU_IOAS_UNMAP: libc::Ioctl = 0x3b86;
const VFIO_DEVICE_BIND_IOMMUFD: libc::Ioctl = 0x3b76;
const VFIO_DEVICE_ATTACH_IOMMUFD_PT: libc::Ioctl = 0x3b77;
const MAP_FIXED_IOVA: u32 = 1;
const MAP_WRITEABLE: u32 = 2;
const MAP_READABLE: u32 = 4;
/// Ranges that a space may be cut into by what the platform reserves; more are not asked for.
const MOST_RANGES: usize = 64;

/// Why a device's address space does not do what it should.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum IommuError {
    #[error("{path}: {source}; {advice}")]
    Open { path: String, source: io::Error, advice: &'static str },
    #[error(
        "{device} is in somebody's hands still: a descriptor of it that was handed out is open ({source})"
    )]
    InUse { device: String, source: io::Error },
    #[error("{call}: {source}")]
    Call { call: &'static str, source: io::Error },
    #[error("mapping {bytes} bytes at device address {iova:#x}: {source}; {advice}")]
    Map { iova: u64, bytes: u64, source: io::Error, advice: &'static str },
}

#[repr(C)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    out_ioas_id: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IovaRange {
    start: u64,
    last: u64,
}

#[repr(C)]
struct IovaRanges {
    size: u32,
    ioas_id: u32,
    num_iovas: u32,
    reserved: u32,
    allowed_iovas: u64,
    out_iova_alignment: u64,
}

#[repr(C)]
struct IoasMap {
    size: u32,
    flags: u32,
    ioas_id: u32,
    reserved: u32,
    user_va: u64,
    length: u64,
    iova: u64,
}

#[repr(C)]
struct IoasUnmap {
    size: u32,
    ioas_id: u32,
    iova: u64,
    length: u64,
}

#[repr(C)]
struct DeviceBind {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    out_devid: u32,
}

#[repr(C)]
struct DeviceAttach {
    argsz: u32,
    flags: u32,
    pt_id: u32,
}

/// One ioctl whose argument is a structure that starts with its own size.
fn sized_ioctl<T>(file: &File, request: libc::Ioctl, argument: &mut T) -> nix::Result<()> {
    // SAFETY: the kernel reads and writes at most the size that the argument states, which is that of T, and memory that
    // the argument points to, which its maker keeps alive over the call.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), request, argument as *mut T) }).map(drop)
}

fn call(call: &'static str) -> impl Fn(Errno) -> IommuError {
    move |e| IommuError::Call { call, source: e.into() }
}

fn open(path: &Path, advice: &'static str) -> Result<File, IommuError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|source| IommuError::Open { path: path.display().to_string(), source, advice })
}

/// A device that is driven through VFIO, as it is configured.
#[derive(Debug)]
pub struct Device {
    node: PathBuf,
    iommu: PathBuf,
    /// Bits of a device address.
    pub bits: u32,
}

/// The device in a tenant's hands: what is handed out to drive it.
pub type Handle = Arc<OwnedFd>;

impl Device {
    /// The device at `node` (`/dev/vfio/devices/vfioN`), which can address `bits` bits, behind the iommufd at `iommu`. Both
    /// are opened once, so that a missing rule or driver is told at the start.
    pub fn open(node: &Path, iommu: &Path, bits: u32) -> Result<Self, IommuError> {
        let device = Device { node: node.into(), iommu: iommu.into(), bits };
        drop(Space::new(&device)?);
        drop(device.node()?);
        Ok(device)
    }

    fn node(&self) -> Result<File, IommuError> {
        open(
            &self.node,
            "bind the device to vfio-pci first (kvbroker-npu-bind), on a kernel with CONFIG_VFIO_DEVICE_CDEV, and give the node to the broker's group",
        )
    }

    /// Its name, for people.
    pub fn name(&self) -> String {
        self.node.display().to_string()
    }

    /// Opens the device anew, binds it to the context of `space` and attaches it to the space. Fails with
    /// [`IommuError::InUse`] while any earlier descriptor of it is open anywhere.
    pub fn bind(&self, space: &Space) -> Result<Handle, IommuError> {
        let file = self.node()?;
        let argsz = size_of::<DeviceBind>() as u32;
        let mut bind = DeviceBind { argsz, flags: 0, iommufd: space.context.as_raw_fd(), out_devid: 0 };
        sized_ioctl(&file, VFIO_DEVICE_BIND_IOMMUFD, &mut bind).map_err(|e| match e {
            Errno::EINVAL | Errno::EBUSY => IommuError::InUse { device: self.name(), source: e.into() },
            e => IommuError::Call { call: "VFIO_DEVICE_BIND_IOMMUFD", source: e.into() },
        })?;
        let argsz = size_of::<DeviceAttach>() as u32;
        let mut attach = DeviceAttach { argsz, flags: 0, pt_id: space.id };
        sized_ioctl(&file, VFIO_DEVICE_ATTACH_IOMMUFD_PT, &mut attach)
            .map_err(call("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))?;
        Ok(Arc::new(file.into()))
    }
}

/// An I/O address space in a context of its own.
#[derive(Debug)]
pub struct Space {
    context: File,
    id: u32,
}

impl Space {
    /// An empty one for `device`.
    pub fn new(device: &Device) -> Result<Self, IommuError> {
        let context = open(
            &device.iommu,
            "this kernel needs CONFIG_IOMMUFD, and the broker the right to open it (udev/60-kvbroker.rules)",
        )?;
        let size = size_of::<IoasAlloc>() as u32;
        let mut alloc = IoasAlloc { size, flags: 0, out_ioas_id: 0 };
        sized_ioctl(&context, IOMMU_IOAS_ALLOC, &mut alloc).map_err(call("IOMMU_IOAS_ALLOC"))?;
        Ok(Space { context, id: alloc.out_ioas_id })
    }

    /// Addresses that can be used, now that a device is attached: the kernel leaves out what interrupts and firmware take.
    pub fn ranges(&self) -> Result<Vec<RangeInclusive<u64>>, IommuError> {
        let mut ranges = [IovaRange::default(); MOST_RANGES];
        let mut request = IovaRanges {
            size: size_of::<IovaRanges>() as u32,
            ioas_id: self.id,
            num_iovas: MOST_RANGES as u32,
            reserved: 0,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            out_iova_alignment: 0,
        };
        match sized_ioctl(&self.context, IOMMU_IOAS_IOVA_RANGES, &mut request) {
            // Too many for the array: those that did fit are good.
            Ok(()) | Err(Errno::EMSGSIZE) => {}
            Err(e) => return Err(call("IOMMU_IOAS_IOVA_RANGES")(e)),
        }
        let count = (request.num_iovas as usize).min(MOST_RANGES);
        Ok(ranges[..count].iter().map(|r| r.start..=r.last).collect())
    }

    /// Makes `ranges` appear one after the other from `iova` on, with one call of the kernel. The pages are pinned until
    /// [`unmap`](Self::unmap).
    pub fn map(&self, ranges: &[Range<'_>], iova: u64, writable: bool) -> Result<Mapping, IommuError> {
        let bytes: u64 = ranges.iter().map(|r| r.bytes).sum();
        let failed = |source: io::Error| {
            let advice = match source.raw_os_error() {
                Some(libc::EFAULT) => "only memfd pools can be mapped for a device: a heap's buffers cannot",
                Some(libc::ENOMEM) => "raise LimitMEMLOCK of the broker's unit, or vm.max_map_count",
                Some(libc::EADDRINUSE) => "something is mapped there that this broker does not know of",
                _ => "the kernel's log may say more",
            };
            IommuError::Map { iova, bytes, source, advice }
        };
        let mirror = Mirror::new(ranges, bytes as usize).map_err(failed)?;
        let mut request = IoasMap {
            size: size_of::<IoasMap>() as u32,
            flags: MAP_FIXED_IOVA | MAP_READABLE | if writable { MAP_WRITEABLE } else { 0 },
            ioas_id: self.id,
            reserved: 0,
            user_va: mirror.start as u64,
            length: bytes,
            iova,
        };
        sized_ioctl(&self.context, IOMMU_IOAS_MAP, &mut request).map_err(|e| failed(e.into()))?;
        Ok(Mapping { iova, bytes, _mirror: mirror })
    }

    /// Takes a mapping out of the device's reach. When this returns, an access of the device to it faults.
    pub fn unmap(&self, mapping: &Mapping) -> Result<(), IommuError> {
        let size = size_of::<IoasUnmap>() as u32;
        let mut request = IoasUnmap { size, ioas_id: self.id, iova: mapping.iova, length: mapping.bytes };
        sized_ioctl(&self.context, IOMMU_IOAS_UNMAP, &mut request).map_err(call("IOMMU_IOAS_UNMAP"))
    }
}

/// Bytes of memfds at consecutive device addresses.
#[derive(Debug)]
pub struct Mapping {
    /// The first device address.
    pub iova: u64,
    /// So many bytes.
    pub bytes: u64,
    _mirror: Mirror,
}

/// The ranges of a mapping side by side in this process, so that one call maps all of them for the device.
#[derive(Debug)]
struct Mirror {
    start: usize,
    bytes: usize,
}

impl Mirror {
    fn new(ranges: &[Range<'_>], bytes: usize) -> io::Result<Self> {
        debug_assert!(ranges.iter().all(|r| r.offset % page_bytes() as u64 == 0));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mirror = Mirror { start: start as usize, bytes };
        let mut at = mirror.start;
        for r in ranges {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
            let (length, fd, offset) = (r.bytes as usize, r.memfd.as_raw_fd(), r.offset as libc::off_t);
            // SAFETY: inside the reservation made above, which nothing refers to; the sum of the ranges is its length.
            let got = unsafe { libc::mmap(at as *mut libc::c_void, length, prot, flags, fd, offset) };
            if got == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            at += length;
        }
        // SAFETY: the range was just mapped. A forked child has no use for it.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTFORK) };
        Ok(mirror)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // SAFETY: the range is this value's; the kernel has pinned the pages that a device still reaches.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Heap, Memfd};

    #[test]
    fn a_missing_iommufd_says_what_the_kernel_needs() {
        let none = Path::new("/nonexistent/iommu");
        let e = Device::open(none, none, 32).unwrap_err();
        assert!(e.to_string().contains("CONFIG_IOMMUFD"), "{e}");
    }

    #[test]
    fn a_mirror_shows_scattered_ranges_side_by_side_and_is_gone_when_it_is_dropped() {
        let page = page_bytes();
        let buffer = Memfd::new(false).allocate(4 * page as u64).unwrap();
        let memfd = buffer.fd().unwrap();
        let map = crate::map::SharedMap::new(memfd, 4 * page).unwrap();
        for p in 0..4 {
            map.write(p * page, &[p as u8 + 1]);
        }
        let range =
            |p: usize, pages: usize| Range { memfd, offset: (p * page) as u64, bytes: (pages * page) as u64 };
        let mirror = Mirror::new(&[range(2, 2), range(0, 1), range(2, 1)], 4 * page).unwrap();
        // SAFETY: the mirror is four mapped pages.
        let byte = |p: usize| unsafe { ((mirror.start + p * page) as *const u8).read_volatile() };
        assert_eq!([byte(0), byte(1), byte(2), byte(3)], [3, 4, 1, 3]);
    }
}
