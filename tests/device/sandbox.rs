//! Inside the daemon's unit: what it needs works under its user, its device list and its system-call filter, and the
//! rest of the machine is out of reach.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::mlock;

use crate::support::{
    BLOCK, CMA_HEAP, EXTENT, Heap, MIB, Map, broker_seals, holders, memfd, udmabuf, vmsplice_error,
};

#[test]
fn the_daemon_takes_extents_and_counts_their_holders() {
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let extents = heap.alloc_up_to(EXTENT, 4);
    assert_eq!(extents.len(), 4);
    let map = Map::writable(extents[0].as_fd(), EXTENT);
    map.fill(0, EXTENT, 1);
    assert_eq!(holders(extents[0].as_fd()), 2);
}

#[test]
fn it_is_the_kernel_that_refuses_to_splice_a_mapping_and_not_the_filter() {
    let extent = Heap::open(CMA_HEAP).expect("heap").alloc(EXTENT).expect("alloc");
    assert_eq!(vmsplice_error(&Map::writable(extent.as_fd(), EXTENT)), Some(Errno::EFAULT));
}

#[test]
fn the_daemon_makes_locks_joins_and_punches_memfds() {
    const POOL: usize = 128 * MIB;
    let memory = memfd(POOL, broker_seals());
    let map = Map::writable(memory.as_fd(), POOL);
    // SAFETY: the range is the mapping.
    unsafe { mlock(map.start().cast(), POOL) }.expect("a pool far above the default limit is locked");
    drop(udmabuf(memory.as_fd(), &[(BLOCK, BLOCK), (0, BLOCK)]).expect("udmabuf"));
    drop(map);
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&memory, punch, 0, POOL as i64).expect("punch");
}

#[test]
fn the_daemon_opens_the_iommu() {
    OpenOptions::new().read(true).write(true).open("/dev/iommu").expect("/dev/iommu");
}

#[test]
fn the_daemon_sees_its_peers_cgroups_and_the_memory_pressure() {
    let own = std::process::id();
    fs::read_to_string("/proc/1/cgroup").expect("the cgroup of another process");
    fs::read_to_string(format!("/proc/{own}/limits")).expect("own limits");
    // A user without capabilities may ask for windows of whole multiples of 2 s.
    let mut trigger = OpenOptions::new().read(true).write(true).open("/proc/pressure/memory").expect("PSI");
    trigger.write_all(b"some 150000 2000000\0").expect("PSI trigger");
}

#[test]
fn the_daemon_writes_its_state_and_nothing_else() {
    let state = env::var("STATE_DIRECTORY").expect("STATE_DIRECTORY");
    fs::write(Path::new(&state).join("probe"), "x").expect("state");
    for directory in ["/usr/lib", "/etc", "/var/lib", "/run/kvbroker", "/home"] {
        assert!(fs::write(Path::new(directory).join("probe"), "x").is_err(), "wrote to {directory}");
    }
}

#[test]
fn stored_prompts_are_written_and_read_through_io_uring_and_not_only_plainly() {
    // What the store does at a start: the kernel has it, and the filter lets it. Where either says no, the store goes on
    // by plain calls; in this unit that would be a mistake.
    let mut ring = io_uring::IoUring::new(8).expect("io_uring_setup");
    let state = env::var("STATE_DIRECTORY").expect("STATE_DIRECTORY");
    let path = Path::new(&state).join("ring");
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).expect("open");
    let (bytes, mut back) = ([7u8; 4096], [0u8; 4096]);
    let fd = io_uring::types::Fd(std::os::fd::AsRawFd::as_raw_fd(&file));
    let write = io_uring::opcode::Write::new(fd, bytes.as_ptr(), 4096).build();
    let read = io_uring::opcode::Read::new(fd, back.as_mut_ptr(), 4096).build();
    for entry in [write, read] {
        // SAFETY: both buffers and the file outlive the call, which waits for the operation's end.
        unsafe { ring.submission().push(&entry) }.expect("there is room");
        ring.submit_and_wait(1).expect("io_uring_enter");
        assert_eq!(ring.completion().next().expect("it is done").result(), 4096);
    }
    assert_eq!(back, bytes);
    fs::remove_file(path).expect("remove");
}

#[test]
fn the_directory_of_stored_prompts_can_be_made_where_the_configuration_says() {
    let state = env::var("STATE_DIRECTORY").expect("STATE_DIRECTORY");
    let directory = Path::new(&state).join("prefixes");
    let store = kvbroker::store::Directory::open(&directory, 1 << 20, true).expect("prefix.store.directory");
    assert!(store.list().expect("list").is_empty());
    fs::remove_dir(directory).expect("remove");
}

#[test]
fn the_daemon_has_no_capability_no_network_and_no_other_device() {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("capabilities");
        assert_eq!(line.trim_start_matches(':').trim(), "0000000000000000", "{name}");
    }
    let socket = UdpSocket::bind("127.0.0.1:0").expect_err("a network socket");
    assert_eq!(socket.raw_os_error(), Some(libc::EAFNOSUPPORT));
    for device in ["/dev/vda", "/dev/mem", "/dev/kmsg"] {
        assert!(File::open(device).is_err(), "opened {device}");
    }
}
