//! What the broker does where heaps are not as they should be: missing, forbidden, too small, shared with others, gone.

use std::fs::{self, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use crate::broker::{Connection, Place};
use crate::daemon::until;
use crate::support::{ALICE, AREA, BOB, CMA_HEAP, EXTENT, Heap, MIB, Map, Peer, as_user, cma_used};

const SIZE_LIMIT: &str = "/sys/module/udmabuf/parameters/size_limit_mb";

fn cma(size: &str) -> String {
    format!("backend = \"dma-heap\"\nheap = \"{CMA_HEAP}\"\nextent = \"3M\"\nsize = \"{size}\"")
}

#[test]
fn a_heap_that_is_none_ends_the_start_with_words_that_help() {
    let before = cma_used();
    let dma = |heap: &str| format!("backend = \"dma-heap\"\nheap = \"{heap}\"\nsize = \"12M\"");
    fs::write("/tmp/plain", "").expect("file");
    for (pool, words) in [
        (dma("nowhere"), "heaps that are there"),
        (dma("/tmp/plain"), "it is no heap"),
        (dma("/dev/null"), "it is no heap"),
        ("device = \"contiguous\"\nheap-directory = \"/tmp\"".into(), "name it with pool.heap"),
    ] {
        let (code, log) = Place::new(&pool).fails();
        assert_eq!(code, Some(1), "{pool}: {log}");
        assert!(log.contains(words), "{pool}: {log}");
    }
    // Forbidden nodes: with the modes that the kernel gives them.
    for (node, pool, words) in [
        (format!("/dev/dma_heap/{CMA_HEAP}"), cma("12M"), "group kvbroker"),
        ("/dev/udmabuf".into(), "backend = \"udmabuf\"\nsize = \"12M\"".into(), "the device's group"),
    ] {
        let place = Place::new(&pool);
        fs::set_permissions(&node, Permissions::from_mode(0o600)).expect("chmod");
        let (code, log) = place.fails();
        assert_eq!(code, Some(1), "{pool}: {log}");
        assert!(log.contains(words) && log.contains(&node), "{pool}: {log}");
    }
    // A missing /dev/udmabuf.
    let place = Place::new("device = \"iommu\"\nsize = \"12M\"");
    fs::rename("/dev/udmabuf", "/dev/udmabuf-away").expect("rename");
    let (code, log) = place.fails();
    fs::rename("/dev/udmabuf-away", "/dev/udmabuf").expect("rename");
    assert_eq!((code, log.contains("CONFIG_UDMABUF")), (Some(1), true), "{log}");
    assert_eq!(cma_used(), before, "nothing leaks");
}

#[test]
fn an_extent_above_udmabufs_limit_is_refused_with_the_parameter_to_raise() {
    let limit = fs::read_to_string(SIZE_LIMIT).expect("the limit");
    fs::write(SIZE_LIMIT, "2").expect("lower the limit");
    let place = Place::new("backend = \"udmabuf\"\nextent = \"3M\"\nsize = \"12M\"");
    let (code, log) = place.fails();
    fs::write(SIZE_LIMIT, limit.trim()).expect("restore the limit");
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("size_limit_mb") && log.contains("3145728"), "{log}");
    // And under it the same pool is served, by who will read it.
    let broker = Place::new("device = \"iommu\"\nextent = \"3M\"\nsize = \"12M\"").start();
    let pool = &broker.status()["pool"];
    assert_eq!((&pool["backend"], &pool["heap"]), (&"udmabuf".into(), &"/dev/udmabuf".into()));
    assert!(
        broker.kvbctl_status().contains("udmabuf (/dev/udmabuf: a device behind an IOMMU reads the pool)")
    );
    // The memfd behind it never leaves: what a client gets is a dma-buf.
    let socket = broker.socket();
    as_user(ALICE, || {
        let mut c = Connection::new(&socket, "client");
        c.reserve(1).expect("a block");
        let fd = c.extents.values().next().expect("an extent");
        assert!(crate::support::holders(fd.as_fd()) > 1);
    });
    broker.stop();
}

#[test]
fn a_limit_that_falls_while_the_broker_runs_makes_extents_missing_until_it_rises_again() {
    let limit = fs::read_to_string(SIZE_LIMIT).expect("the limit");
    let broker = Place::new("backend = \"udmabuf\"\nextent = \"3M\"\nsize = \"12M\"").start();
    let fds = broker.fds();
    fs::write(SIZE_LIMIT, "1").expect("lower the limit");
    let socket = broker.socket();
    as_user(ALICE, || drop(Connection::new(&socket, "client").reserve(32).expect("all blocks")));
    until("none can be renewed", || broker.status()["pool"]["extents_missing"] == 4);
    assert!(broker.place.log().contains("size_limit_mb"), "{}", broker.place.log());
    fs::write(SIZE_LIMIT, limit.trim()).expect("restore the limit");
    until("all have come back", || broker.status()["pool"]["extents_missing"] == 0);
    as_user(BOB, || drop(Connection::new(&socket, "client").reserve(32).expect("all blocks")));
    until("no descriptor is left over", || broker.fds() == fds);
    broker.stop();
}

#[test]
fn a_pool_that_the_area_cannot_hold_is_refused_and_everything_taken_for_it_is_given_back() {
    let before = cma_used();
    let place = Place::new(&format!("{}\nminimum = \"300M\"", cma("300M")));
    let (code, log) = place.fails();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("no memory for a buffer of 3145728 bytes"), "{log}");
    until("nothing leaks", || cma_used() == before);
}

#[test]
fn extents_that_somebody_else_took_are_missing_and_come_when_they_are_free() {
    // All of the area but 30 MiB is somebody else's.
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let eaten = heap.alloc_up_to(MIB, (AREA - cma_used()) / MIB - 30);
    let broker = Place::new(&format!("{}\nminimum = \"12M\"", cma("48M"))).start();
    let missing = broker.status()["pool"]["extents_missing"].as_u64().expect("a number");
    assert!((6..=12).contains(&missing), "{missing} of 16 are missing");
    assert!(broker.place.log().contains("of 16 extents"), "{}", broker.place.log());
    let shown = broker.kvbctl_status();
    assert!(shown.contains(&format!("{missing} of 16 extents are missing")), "{shown}");
    let said = broker.place.log().matches("missing").count();
    drop(eaten);
    until("all are there", || broker.status()["pool"]["extents_missing"] == 0);
    assert!(broker.place.log().matches("missing").count() > said, "and it is said");
    // A client can have all of them.
    let socket = broker.socket();
    as_user(ALICE, || {
        let mut c = Connection::new(&socket, "client");
        c.reserve(128).expect("all blocks");
        assert_eq!(c.extents.len(), 16);
    });
    broker.stop();
}

#[test]
fn a_node_that_is_removed_while_the_broker_runs_changes_nothing_for_it() {
    let broker = Place::new(&cma("12M")).start();
    let (node, away) = (format!("/dev/dma_heap/{CMA_HEAP}"), "/dev/heap-away");
    fs::rename(&node, away).expect("rename");
    let socket = broker.socket();
    let mut served = true;
    for user in [ALICE, BOB] {
        let peer = Peer::start(user, |_| {
            let mut c = Connection::new(&socket, "client");
            until("all blocks are to be had", || c.reserve(32).is_ok());
            for fd in c.extents.values() {
                let map = Map::writable(fd.as_fd(), EXTENT);
                assert!(map.is_all(0));
                map.fill(0, EXTENT, 7);
            }
        });
        served &= std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| peer.finish())).is_ok();
    }
    fs::rename(away, &node).expect("rename");
    assert!(served);
    assert!(broker.status()["counters"]["renewed"].as_u64() >= Some(4));
    broker.stop();
}
