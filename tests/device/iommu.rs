//! Windows by device address: scattered memfd blocks side by side in a device's address space.
//!
//! QEMU's `edu` PCI device stands in for an NPU: it copies up to 4 KiB between its own buffer and memory, through the
//! machine's IOMMU, at the addresses it is given. It is driven over VFIO and iommufd, as a user-space driver would.

use std::fs::{self, File, OpenOptions};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;

use crate::support::{ALICE, BLOCK, CMA_HEAP, EXTENT, Heap, Map, as_user, broker_seals, memfd};

/// Where windows are placed: away from the MSI ranges of both architectures' IOMMUs.
const WINDOW: u64 = 0x1000_0000;

// <linux/iommufd.h> and <linux/vfio.h>: _IO(';', n) each.
const IOMMU_IOAS_ALLOC: libc::Ioctl = 0x3b81;
const IOMMU_IOAS_MAP: libc::Ioctl = 0x3b85;
const IOMMU_IOAS_UNMAP: libc::Ioctl = 0x3b86;
const VFIO_DEVICE_BIND_IOMMUFD: libc::Ioctl = 0x3b76;
const VFIO_DEVICE_ATTACH_IOMMUFD_PT: libc::Ioctl = 0x3b77;
/// Fixed address, writable, readable.
const MAP_FLAGS: u32 = 1 | 2 | 4;

#[repr(C)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    out_ioas_id: u32,
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

/// One ioctl whose argument is a struct that starts with its own size.
fn sized_ioctl<T>(file: &File, request: libc::Ioctl, argument: &mut T) -> nix::Result<()> {
    // SAFETY: the kernel reads and writes at most the size that the argument states, which is that of T.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), request, argument as *mut T) }).map(drop)
}

fn open(path: &str) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// An I/O address space and the context it belongs to.
struct AddressSpace {
    context: File,
    id: u32,
}

impl AddressSpace {
    fn new() -> AddressSpace {
        let context = open("/dev/iommu");
        let mut alloc = IoasAlloc { size: size_of::<IoasAlloc>() as u32, flags: 0, out_ioas_id: 0 };
        sized_ioctl(&context, IOMMU_IOAS_ALLOC, &mut alloc).expect("IOMMU_IOAS_ALLOC");
        AddressSpace { context, id: alloc.out_ioas_id }
    }

    /// Makes `map[offset..offset + length]` appear at `iova`.
    fn map(&self, map: &Map, offset: usize, length: usize, iova: u64) -> nix::Result<()> {
        let mut request = IoasMap {
            size: size_of::<IoasMap>() as u32,
            flags: MAP_FLAGS,
            ioas_id: self.id,
            reserved: 0,
            user_va: map.start().as_ptr() as u64 + offset as u64,
            length: length as u64,
            iova,
        };
        sized_ioctl(&self.context, IOMMU_IOAS_MAP, &mut request)
    }

    fn unmap(&self, iova: u64, length: usize) -> nix::Result<()> {
        let size = size_of::<IoasUnmap>() as u32;
        let mut request = IoasUnmap { size, ioas_id: self.id, iova, length: length as u64 };
        sized_ioctl(&self.context, IOMMU_IOAS_UNMAP, &mut request)
    }
}

/// The edu device in sysfs.
fn edu() -> PathBuf {
    let is_edu = |path: &PathBuf| {
        let id = |file| fs::read_to_string(path.join(file)).unwrap_or_default();
        id("vendor").trim() == "0x1234" && id("device").trim() == "0x11e8"
    };
    let devices = fs::read_dir("/sys/bus/pci/devices").expect("PCI");
    devices.map(|entry| entry.expect("entry").path()).find(is_edu).expect("an edu device")
}

/// Its PCI address.
pub fn edu_address() -> String {
    edu().file_name().and_then(|name| name.to_str()).expect("address").to_owned()
}

/// The character device of the edu device, once vfio-pci drives it.
pub fn edu_node() -> String {
    let device = edu();
    if !device.join("driver").exists() {
        fs::write(device.join("driver_override"), "vfio-pci").expect("driver_override");
        fs::write("/sys/bus/pci/drivers_probe", edu_address()).expect("drivers_probe");
    }
    let mut nodes = fs::read_dir(device.join("vfio-dev")).expect("vfio-pci has no character device");
    let node = nodes.next().expect("a node").expect("entry").file_name();
    format!("/dev/vfio/devices/{}", node.to_str().expect("UTF-8"))
}

fn bind(device: &File, space: &AddressSpace) -> nix::Result<()> {
    let argsz = size_of::<DeviceBind>() as u32;
    let mut request = DeviceBind { argsz, flags: 0, iommufd: space.context.as_raw_fd(), out_devid: 0 };
    sized_ioctl(device, VFIO_DEVICE_BIND_IOMMUFD, &mut request)
}

/// The device, driven through its registers.
pub struct Edu(File);

impl Edu {
    /// The regions of a vfio-pci device lie at index << 40 of its file.
    const CONFIGURATION: u64 = 7 << 40;
    const SOURCE: u64 = 0x80;
    const DESTINATION: u64 = 0x88;
    const COUNT: u64 = 0x90;
    const COMMAND: u64 = 0x98;
    /// The device's buffer, in its own address space.
    const BUFFER: u64 = 0x4_0000;

    fn new(space: &AddressSpace) -> Edu {
        let device = open(&edu_node());
        bind(&device, space).expect("VFIO_DEVICE_BIND_IOMMUFD");
        let argsz = size_of::<DeviceAttach>() as u32;
        let mut attach = DeviceAttach { argsz, flags: 0, pt_id: space.id };
        sized_ioctl(&device, VFIO_DEVICE_ATTACH_IOMMUFD_PT, &mut attach)
            .expect("VFIO_DEVICE_ATTACH_IOMMUFD_PT");
        Edu::over(device)
    }

    /// A device that somebody has bound and attached already.
    pub fn over(device: File) -> Edu {
        let edu = Edu(device);
        edu.set_bus_master(true);
        assert_eq!(edu.read(0) & 0xffff, 0x00ed, "the identification register");
        edu
    }

    /// Whether it may reach memory; it always answers to accesses to its registers.
    pub fn set_bus_master(&self, on: bool) {
        let command: u16 = if on { 6 } else { 2 };
        self.0.write_all_at(&command.to_le_bytes(), Edu::CONFIGURATION + 4).expect("PCI command");
    }

    fn read(&self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, register).expect("register");
        u32::from_le_bytes(bytes)
    }

    fn copy(&self, source: u64, destination: u64, count: u64, command: u64) {
        // QEMU 7.2 aborts on a transfer that fills the buffer.
        assert!(count < 4096);
        for (register, value) in [
            (Edu::SOURCE, source),
            (Edu::DESTINATION, destination),
            (Edu::COUNT, count),
            (Edu::COMMAND, command | 1),
        ] {
            self.0.write_all_at(&value.to_le_bytes(), register).expect("register");
        }
        // The model takes 100 ms for a transfer.
        while self.read(Edu::COMMAND) & 1 != 0 {
            sleep(Duration::from_millis(5));
        }
    }

    /// Memory at `iova` into the device's buffer.
    pub fn load(&self, iova: u64, count: u64) {
        self.copy(iova, Edu::BUFFER, count, 0);
    }

    /// The device's buffer into memory at `iova`.
    pub fn store(&self, iova: u64, count: u64) {
        self.copy(Edu::BUFFER, iova, count, 2);
    }
}

#[test]
fn a_device_reads_and_writes_scattered_blocks_as_one_range() {
    const LENGTH: usize = 2000;
    let memory = memfd(8 * BLOCK, broker_seals());
    let map = Map::writable(memory.as_fd(), 8 * BLOCK);
    let space = AddressSpace::new();
    let order = [5, 2, 0, 7];
    for (place, block) in order.into_iter().enumerate() {
        map.fill(block * BLOCK, BLOCK, block as u8 + 1);
        space.map(&map, block * BLOCK, BLOCK, WINDOW + (place * BLOCK) as u64).expect("map");
    }
    let edu = Edu::new(&space);
    // Out of the border between places 0 and 1, into that between 2 and 3.
    edu.load(WINDOW + (BLOCK - LENGTH / 2) as u64, LENGTH as u64);
    edu.store(WINDOW + (3 * BLOCK - LENGTH / 2) as u64, LENGTH as u64);

    let end = (order[2] + 1) * BLOCK;
    let start = order[3] * BLOCK;
    for i in 0..LENGTH / 2 {
        assert_eq!(map.byte(end - 1 - i), order[0] as u8 + 1, "byte {i} before the border");
        assert_eq!(map.byte(start + i), order[1] as u8 + 1, "byte {i} behind the border");
    }
    assert_eq!(map.byte(end - 1 - LENGTH / 2), order[2] as u8 + 1, "and no byte more");
    assert_eq!(map.byte(start + LENGTH / 2), order[3] as u8 + 1, "and no byte more");
}

#[test]
fn a_block_taken_out_of_the_window_is_out_of_the_devices_reach() {
    let memory = memfd(2 * BLOCK, broker_seals());
    let map = Map::writable(memory.as_fd(), 2 * BLOCK);
    map.fill(0, BLOCK, 0x11);
    map.fill(BLOCK, BLOCK, 0x22);
    let space = AddressSpace::new();
    for block in 0..2 {
        space.map(&map, block * BLOCK, BLOCK, WINDOW + (block * BLOCK) as u64).expect("map");
    }
    let edu = Edu::new(&space);
    edu.load(WINDOW, 64);
    space.unmap(WINDOW + BLOCK as u64, BLOCK).expect("unmap");
    edu.store(WINDOW + BLOCK as u64, 64);
    assert_eq!(map.byte(BLOCK), 0x22, "the device still reaches the block");
    // The same transfer while the block is mapped, so that the refusal above means something.
    space.map(&map, BLOCK, BLOCK, WINDOW + BLOCK as u64).expect("map again");
    edu.store(WINDOW + BLOCK as u64, 64);
    assert_eq!((map.byte(BLOCK), map.byte(BLOCK + 64)), (0x11, 0x22));
}

#[test]
fn a_device_cannot_be_bound_again_while_somebody_holds_it() {
    let space = AddressSpace::new();
    let held = Edu::new(&space);
    let other = AddressSpace::new();
    let node = edu_node();
    assert!(bind(&open(&node), &other).is_err(), "bound twice");
    drop(held);
    bind(&open(&node), &other).expect("free again");
}

#[test]
fn an_address_space_takes_memfds_and_refuses_heap_buffers() {
    let buffer = Heap::open(CMA_HEAP).expect("heap").alloc(EXTENT).expect("alloc");
    let map = Map::writable(buffer.as_fd(), EXTENT);
    map.fill(0, EXTENT, 1);
    let space = AddressSpace::new();
    // Pages are pinned, and refused, once a device is attached.
    let _edu = Edu::new(&space);
    assert_eq!(space.map(&map, 0, EXTENT, WINDOW).unwrap_err(), Errno::EFAULT);
    let memory = memfd(EXTENT, broker_seals());
    space.map(&Map::writable(memory.as_fd(), EXTENT), 0, EXTENT, WINDOW).expect("a memfd");
    as_user(ALICE, || {
        assert_eq!(File::open("/dev/iommu").unwrap_err().raw_os_error(), Some(libc::EACCES));
        assert_eq!(File::open(edu_node()).unwrap_err().raw_os_error(), Some(libc::EACCES));
    });
}
