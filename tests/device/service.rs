//! The product's installed files on a real systemd and udev: who may open what.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

use crate::support::{CMA_HEAP, Heap, Peer, User, as_user, group_id, user_id};

const CLIENT_SOCKET: &str = "/run/kvbroker/kvbroker.sock";
const ADMIN_SOCKET: &str = "/run/kvbroker/admin.sock";

/// Permissions, owner and group of a path.
fn ownership(path: &str) -> (u32, u32, u32) {
    let metadata = fs::metadata(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
}

/// A user with exactly these groups beside its own.
fn user(name: &str, groups: &[&str]) -> User {
    let groups: Vec<u32> = groups.iter().map(|group| group_id(group)).collect();
    User { uid: user_id(name), gid: group_id(name), groups: groups.leak() }
}

fn members(group: &str) -> Vec<String> {
    let text = fs::read_to_string("/etc/group").expect("/etc/group");
    let line = text.lines().find(|line| line.split(':').next() == Some(group)).expect("group");
    line.rsplit(':')
        .next()
        .unwrap_or("")
        .split(',')
        .filter(|name| !name.is_empty())
        .map(String::from)
        .collect()
}

#[test]
fn udev_gives_the_heaps_to_the_daemons_group_and_leaves_udmabuf_to_kvm() {
    for entry in fs::read_dir("/dev/dma_heap").expect("heaps") {
        let path = entry.expect("entry").path();
        let path = path.to_str().expect("UTF-8");
        assert_eq!(ownership(path), (0o660, 0, group_id("kvbroker")), "{path}");
    }
    assert_eq!(ownership("/dev/iommu"), (0o660, 0, group_id("kvbroker")));
    assert_eq!(ownership("/dev/udmabuf").2, group_id("kvm"));
}

#[test]
fn a_client_cannot_open_the_heap_and_the_daemon_can() {
    assert_eq!(members("kvbroker"), [""; 0], "nobody else is in the daemon's group");
    as_user(user("alice", &["kvbroker-clients"]), || {
        assert_eq!(Heap::open(CMA_HEAP).unwrap_err(), Errno::EACCES);
    });
    as_user(user("kvbroker", &["kvm"]), || drop(Heap::open(CMA_HEAP).expect("open")));
}

#[test]
fn only_clients_reach_the_client_socket_and_only_root_the_admin_socket() {
    assert_eq!(ownership(CLIENT_SOCKET), (0o660, 0, group_id("kvbroker-clients")));
    assert_eq!(ownership(ADMIN_SOCKET), (0o600, 0, 0));
    // Connecting takes write permission.
    let client = Peer::start(user("alice", &["kvbroker-clients"]), |_| {
        access(CLIENT_SOCKET, AccessFlags::W_OK).expect("a client may connect");
        assert_eq!(access(ADMIN_SOCKET, AccessFlags::W_OK).unwrap_err(), Errno::EACCES);
    });
    let stranger = Peer::start(user("mallory", &[]), |_| {
        for socket in [CLIENT_SOCKET, ADMIN_SOCKET] {
            assert_eq!(access(socket, AccessFlags::W_OK).unwrap_err(), Errno::EACCES, "{socket}");
        }
    });
    client.finish();
    stranger.finish();
}
