//! What the product takes from the kernel: packing, zeros, counts, seals and permissions.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, SealFlag, fallocate};
use nix::sys::mman::ProtFlags;
use nix::sys::stat::{Mode, fchmod, fstat};
use nix::unistd::{Whence, lseek};

use crate::support::{
    ALICE, AREA, BLOCK, BOB, CMA_HEAP, DAEMON, EXTENT, HEAP_GROUP, Heap, HeapAllocation, KIB, MIB, Map, Peer,
    SYSTEM_HEAP, almost, as_user, broker_seals, cma_used, dma_buf_sync, holders, memfd, seal, udmabuf,
    vmsplice_error,
};

#[test]
fn only_root_can_open_a_heap_until_a_rule_says_otherwise() {
    for entry in fs::read_dir("/dev/dma_heap").expect("heaps") {
        let entry = entry.expect("entry");
        let node = entry.metadata().expect("metadata");
        assert_eq!((node.mode() & 0o7777, node.uid(), node.gid()), (0o600, 0, 0), "{:?}", entry.path());
    }
    for user in [DAEMON, ALICE] {
        as_user(user, || assert_eq!(Heap::open(CMA_HEAP).unwrap_err(), Errno::EACCES));
    }
}

#[test]
fn the_group_of_the_rule_lets_the_daemon_allocate_and_a_client_not() {
    let node = format!("/dev/dma_heap/{CMA_HEAP}");
    let own = |gid, mode| {
        std::os::unix::fs::chown(&node, Some(0), Some(gid)).expect("chown");
        fs::set_permissions(&node, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("chmod");
    };
    own(HEAP_GROUP, 0o660);
    let daemon = Peer::start(DAEMON, |_| {
        Heap::open(CMA_HEAP).expect("open").alloc(EXTENT).expect("alloc");
    });
    let client = Peer::start(ALICE, |_| assert_eq!(Heap::open(CMA_HEAP).unwrap_err(), Errno::EACCES));
    daemon.finish();
    client.finish();
    own(0, 0o600);
}

#[test]
fn extents_of_three_mebibytes_fill_the_area_and_single_blocks_lose_a_quarter() {
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let extents = heap.alloc_up_to(EXTENT, 1000);
    assert!(almost(AREA / EXTENT).contains(&extents.len()), "{} extents of 3 MiB", extents.len());
    for extent in &extents {
        assert_eq!(lseek(extent, 0, Whence::SeekEnd).expect("size"), EXTENT as i64);
    }
    drop(extents);

    // Each buffer starts on a multiple of its size rounded up to a power of two: 512 KiB.
    let blocks = heap.alloc_up_to(BLOCK, 1000);
    assert!(almost(AREA / (512 * KIB)).contains(&blocks.len()), "{} blocks of 384 KiB", blocks.len());
}

#[test]
fn a_buffer_that_another_tenant_filled_is_zeros_when_it_is_allocated_anew() {
    for name in [CMA_HEAP, SYSTEM_HEAP] {
        let heap = Heap::open(name).expect("heap");
        // On CMA all of it, so that the second round gets the first one's pages.
        let count = if name == CMA_HEAP { AREA / EXTENT } else { 8 };
        for round in 0..2 {
            let extents = heap.alloc_up_to(EXTENT, count);
            assert!(almost(count).contains(&extents.len()), "{} extents of {name}", extents.len());
            for extent in &extents {
                let map = Map::writable(extent.as_fd(), EXTENT);
                assert!(map.is_all(0), "stale bytes from {name} in round {round}");
                map.fill(0, EXTENT, 0xa5);
            }
        }
    }
}

#[test]
fn the_system_heap_leaves_the_cma_area_alone() {
    for (name, taken) in [(CMA_HEAP, 32 * MIB), (SYSTEM_HEAP, 0)] {
        let before = cma_used();
        let buffer = Heap::open(name).expect("heap").alloc(32 * MIB).expect("alloc");
        assert_eq!(cma_used() - before, taken, "{name}");
        drop(buffer);
        assert_eq!(cma_used(), before, "{name} gives it back at once");
    }
}

#[test]
fn the_heap_rounds_lengths_up_to_pages_and_refuses_what_it_does_not_know() {
    let heap = Heap::open(CMA_HEAP).expect("heap");
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let odd = heap.alloc(page as usize + 1).expect("alloc");
    assert_eq!(lseek(&odd, 0, Whence::SeekEnd).expect("size"), 2 * page);

    let fd_flags = libc::O_RDWR as u32;
    let good = || HeapAllocation { len: page as u64, fd_flags, ..Default::default() };
    for bad in [
        HeapAllocation { len: 0, ..good() },
        HeapAllocation { fd: 1, ..good() },
        HeapAllocation { heap_flags: 1, ..good() },
        HeapAllocation { fd_flags: fd_flags | libc::O_NONBLOCK as u32, ..good() },
    ] {
        let shown = format!("{bad:?}");
        assert_eq!(heap.request(bad).unwrap_err(), Errno::EINVAL, "{shown}");
    }
    heap.request(good()).expect("the same request without the fault");
}

#[test]
fn a_buffer_allocated_read_only_cannot_be_made_writable() {
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let fd_flags = libc::O_RDONLY as u32;
    let fd =
        heap.request(HeapAllocation { len: EXTENT as u64, fd_flags, ..Default::default() }).expect("alloc");
    assert!(Map::read_only(fd.as_fd(), EXTENT).is_all(0));
    let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    assert_eq!(Map::new(fd.as_fd(), EXTENT, both).unwrap_err(), Errno::EACCES);
    // A memfd can be opened again by its path; a dma-buf cannot, so it has one mode for all its holders.
    let again = fs::OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::ENXIO));
}

#[test]
fn the_holder_count_shows_every_fd_mapping_and_forked_process() {
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let buffer = heap.alloc(EXTENT).expect("alloc");
    assert_eq!(holders(buffer.as_fd()), 1);

    let copy = buffer.try_clone().expect("dup");
    assert_eq!(holders(buffer.as_fd()), 2);
    let map = Map::writable(buffer.as_fd(), EXTENT);
    assert_eq!(holders(buffer.as_fd()), 3);
    drop(copy);
    assert_eq!(holders(buffer.as_fd()), 2);

    // A child of fork shares the table entry's file: its mapping counts, its fds do not before they are copied.
    let mut child = Peer::start(ALICE, |turns| {
        turns.yield_to_test();
        drop(map);
        turns.yield_to_test();
    });
    child.wait_for_yield();
    assert!(holders(buffer.as_fd()) > 1, "the child's inherited fd and mapping count");
    child.resume();
    child.wait_for_yield();
    assert!(holders(buffer.as_fd()) > 1, "the child's inherited fd counts");
    child.resume();
    child.finish();
    assert_eq!(holders(buffer.as_fd()), 1);
}

#[test]
fn an_fd_in_flight_counts_as_a_holder_until_the_message_is_dropped() {
    use nix::sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
    };

    let buffer = Heap::open(CMA_HEAP).expect("heap").alloc(EXTENT).expect("alloc");
    let (sender, receiver) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .expect("socketpair");
    let fds = [buffer.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(sender.as_raw_fd(), &[io::IoSlice::new(b"x")], &control, MsgFlags::empty(), None)
        .expect("sendmsg");
    assert_eq!(holders(buffer.as_fd()), 2);
    drop(sender);
    assert_eq!(holders(buffer.as_fd()), 2, "the receiver can still take it");
    drop(receiver);
    assert_eq!(holders(buffer.as_fd()), 1);
}

#[test]
fn pages_of_a_heap_mapping_cannot_be_kept_in_a_pipe_or_read_by_another_process() {
    for name in [CMA_HEAP, SYSTEM_HEAP] {
        let buffer = Heap::open(name).expect("heap").alloc(EXTENT).expect("alloc");
        let map = Map::writable(buffer.as_fd(), EXTENT);
        map.fill(0, EXTENT, 0x5a);

        assert_eq!(vmsplice_error(&map), Some(Errno::EFAULT), "vmsplice of {name}");

        let mut copy = [0u8; 4096];
        let part = libc::iovec { iov_base: map.start().as_ptr().cast(), iov_len: 4096 };
        let local = libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: copy.len() };
        // SAFETY: the kernel writes to `copy` at most; the remote side is our own mapping.
        let read = Errno::result(unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &part, 1, 0) });
        assert_eq!(read.unwrap_err(), Errno::EFAULT, "process_vm_readv of {name}");
    }
}

#[test]
fn scattered_buffers_can_be_mapped_side_by_side_in_any_order() {
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let buffers = heap.alloc_up_to(BLOCK, 4);
    assert_eq!(buffers.len(), 4);
    for (i, buffer) in buffers.iter().enumerate() {
        Map::writable(buffer.as_fd(), BLOCK).fill(0, BLOCK, i as u8 + 1);
    }
    // A mapping of a memfd as the reserved range; each block then replaces its part.
    let range = Map::writable(memfd(4 * BLOCK, SealFlag::empty()).as_fd(), 4 * BLOCK);
    let order = [2, 0, 3, 1];
    for (place, &i) in order.iter().enumerate() {
        let at = range.start().as_ptr().wrapping_add(place * BLOCK).cast();
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: replaces pages of `range` only, which stays alive and is accessed through raw pointers.
        let got = unsafe { libc::mmap(at, BLOCK, prot, flags, buffers[i].as_raw_fd(), 0) };
        assert_eq!(got, at);
    }
    for (place, &i) in order.iter().enumerate() {
        assert_eq!(range.byte(place * BLOCK), i as u8 + 1);
        assert_eq!(range.byte((place + 1) * BLOCK - 1), i as u8 + 1);
    }
}

#[test]
fn sync_needs_a_direction() {
    let buffer = Heap::open(CMA_HEAP).expect("heap").alloc(EXTENT).expect("alloc");
    for flags in [0, 4, 8 | 1] {
        assert_eq!(dma_buf_sync(buffer.as_fd(), flags).unwrap_err(), Errno::EINVAL, "flags {flags}");
    }
    for flags in [2, 4 | 2, 3, 4 | 3] {
        dma_buf_sync(buffer.as_fd(), flags).unwrap_or_else(|error| panic!("flags {flags}: {error}"));
    }
}

#[test]
fn udmabuf_joins_shuffled_and_repeated_blocks_in_the_order_of_the_list() {
    let memory = memfd(6 * BLOCK, SealFlag::F_SEAL_SHRINK);
    let source = Map::writable(memory.as_fd(), 6 * BLOCK);
    for block in 0..6 {
        source.fill(block * BLOCK, BLOCK, block as u8 + 1);
    }
    let order = [5, 3, 3, 0, 4];
    let ranges = order.map(|block| (block * BLOCK, BLOCK));
    let joined = udmabuf(memory.as_fd(), &ranges).expect("udmabuf");
    let view = Map::writable(joined.as_fd(), order.len() * BLOCK);
    for (place, &block) in order.iter().enumerate() {
        assert_eq!(view.byte(place * BLOCK), block as u8 + 1);
        assert_eq!(view.byte((place + 1) * BLOCK - 1), block as u8 + 1);
    }
    // One memory under three names.
    view.fill(BLOCK + 7, 1, 0xee);
    assert_eq!((source.byte(3 * BLOCK + 7), view.byte(2 * BLOCK + 7)), (0xee, 0xee));
    source.fill(9, 1, 0xdd);
    assert_eq!(view.byte(3 * BLOCK + 9), 0xdd);
}

#[test]
fn udmabuf_wants_a_memfd_that_cannot_shrink_and_can_be_written() {
    let whole = [(0, BLOCK)];
    let write = SealFlag::F_SEAL_WRITE;
    for seals in [SealFlag::empty(), SealFlag::F_SEAL_SHRINK | write, broker_seals() | write] {
        let memory = memfd(BLOCK, seals);
        assert_eq!(udmabuf(memory.as_fd(), &whole).unwrap_err(), Errno::EINVAL, "{seals:?}");
    }
    udmabuf(memfd(BLOCK, broker_seals()).as_fd(), &whole).expect("the broker's seals");
    // A heap buffer is no memfd: the kernel joins no dma-bufs.
    let buffer = Heap::open(CMA_HEAP).expect("heap").alloc(BLOCK).expect("alloc");
    assert_eq!(udmabuf(buffer.as_fd(), &whole).unwrap_err(), Errno::EBADFD);
}

#[test]
fn udmabuf_has_a_limit_of_64_mebibytes_and_1024_ranges() {
    let memory = memfd(BLOCK, broker_seals());
    let times = |count| udmabuf(memory.as_fd(), &vec![(0, BLOCK); count]);
    times(64 * MIB / BLOCK).expect("170 blocks");
    assert_eq!(times(64 * MIB / BLOCK + 1).unwrap_err(), Errno::EINVAL);
    let page = |count| udmabuf(memory.as_fd(), &vec![(0, 4096); count]);
    page(1024).expect("1024 ranges");
    assert_eq!(page(1025).unwrap_err(), Errno::EINVAL);
}

#[test]
fn a_client_cannot_add_a_seal_that_stops_the_broker_from_taking_memory_back() {
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let future = SealFlag::F_SEAL_FUTURE_WRITE;

    let careless = memfd(EXTENT, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
    as_user(ALICE, || seal(careless.as_fd(), future).expect("nothing forbids it"));
    assert_eq!(fallocate(&careless, punch, 0, EXTENT as i64).unwrap_err(), Errno::EPERM);

    let careful = memfd(EXTENT, broker_seals());
    as_user(ALICE, || assert_eq!(seal(careful.as_fd(), future).unwrap_err(), Errno::EPERM));
    fallocate(&careful, punch, 0, EXTENT as i64).expect("punch");
}

#[test]
fn a_client_that_keeps_a_memfd_reads_zeros_once_the_broker_has_punched_it() {
    let memory = memfd(EXTENT, broker_seals());
    let mut keeper = Peer::start(ALICE, |turns| {
        let map = Map::writable(memory.as_fd(), EXTENT);
        map.fill(0, EXTENT, 0x77);
        turns.yield_to_test();
        assert!(map.is_all(0), "the old holder still sees its bytes");
        // What it writes from now on is memory of its own.
        map.fill(0, 1, 0x78);
    });
    keeper.wait_for_yield();
    assert_eq!(fstat(&memory).expect("fstat").st_blocks as usize * 512, EXTENT);
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&memory, punch, 0, EXTENT as i64).expect("punch");
    assert_eq!(fstat(&memory).expect("fstat").st_blocks, 0, "the memory is back");
    keeper.resume();
    keeper.finish();
}

#[test]
fn a_sealed_prefix_cannot_be_written_by_another_tenant_even_if_opened_anew() {
    let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let prefix = memfd(EXTENT, SealFlag::empty());
    Map::writable(prefix.as_fd(), EXTENT).fill(0, EXTENT, 0x11);
    seal(prefix.as_fd(), broker_seals() | SealFlag::F_SEAL_WRITE).expect("seal");
    let shared = fs::File::open(own_path(prefix.as_fd())).expect("read-only");
    drop(prefix);
    as_user(BOB, || {
        assert!(Map::read_only(shared.as_fd(), EXTENT).is_all(0x11));
        assert_eq!(Map::new(shared.as_fd(), EXTENT, both).unwrap_err(), Errno::EACCES);
        // A memfd's file mode is 0777, so its path opens for writing. It is the seal that protects it.
        let mut again =
            fs::OpenOptions::new().read(true).write(true).open(own_path(shared.as_fd())).expect("reopen");
        assert_eq!(Map::new(again.as_fd(), EXTENT, both).unwrap_err(), Errno::EPERM);
        assert_eq!(again.write(b"x").unwrap_err().raw_os_error(), Some(libc::EPERM));
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        assert_eq!(fallocate(&again, punch, 0, EXTENT as i64).unwrap_err(), Errno::EPERM);
    });
    assert_eq!(udmabuf(shared.as_fd(), &[(0, EXTENT)]).unwrap_err(), Errno::EINVAL);
}

#[test]
fn a_memfd_opened_read_only_but_not_sealed_can_be_opened_for_writing_unless_its_mode_forbids_it() {
    let memory = memfd(EXTENT, broker_seals());
    let shared = fs::File::open(own_path(memory.as_fd())).expect("read-only");
    let reopen = || fs::OpenOptions::new().write(true).open(own_path(shared.as_fd()));
    as_user(BOB, || drop(reopen().expect("mode 0777")));
    fchmod(&memory, Mode::from_bits_truncate(0o400)).expect("fchmod");
    as_user(BOB, || assert_eq!(reopen().unwrap_err().raw_os_error(), Some(libc::EACCES)));
}

/// The path by which a process opens its file descriptor anew.
fn own_path(fd: BorrowedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
