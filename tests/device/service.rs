//! The product's installed files on a real systemd and udev: who may open what.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use kvbroker::client::{Client, ClientOptions, OpenOptions};
use kvbroker::profile::Profile;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

use crate::daemon::{check_kv, write_kv};
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

/// What systemctl prints about the daemon.
fn systemctl(words: &[&str]) -> String {
    let output = Command::new("systemctl").args(words).output().expect("systemctl");
    String::from_utf8(output.stdout).expect("UTF-8").trim().into()
}

#[test]
fn a_client_in_the_group_works_over_the_socket_and_the_unit_is_active() {
    as_user(user("alice", &["kvbroker-clients"]), || {
        // The first connection starts the daemon, which takes its pool before it answers.
        let options = ClientOptions { timeout: Duration::from_secs(60), ..ClientOptions::default() };
        let client = Client::connect_with(options).expect("connect");
        let profile = client.profile(&Profile::reference()).expect("profile");
        let mut session = client.open(&profile, OpenOptions::default()).expect("open");
        session.ensure(256).expect("16 blocks");
        write_kv(&mut session, 0..256, 1);
        check_kv(&session, 0..256, 1);
    });
    assert_eq!(systemctl(&["is-active", "kvbrokerd.service"]), "active");
    assert_eq!(systemctl(&["is-active", "kvbrokerd.socket"]), "active");
    let said = systemctl(&["show", "--property=StatusText", "--value", "kvbrokerd.service"]);
    assert!(said.contains("extents of 3 MiB"), "{said}");
    assert!(said.contains(&format!("/dev/dma_heap/{CMA_HEAP}")), "{said}");
    let pid = systemctl(&["show", "--property=MainPID", "--value", "kvbrokerd.service"]);
    assert_eq!(fs::metadata(format!("/proc/{pid}")).expect("the daemon").uid(), user_id("kvbroker"));
    // Root asks at the usual place.
    let status = Command::new("kvbctl").args(["status", "--json"]).output().expect("kvbctl");
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!(status["pool"]["extents_wanted"], 42, "128 MiB, as the configuration's drop-in says");
    assert!(status["counters"]["granted"].as_u64().expect("granted") >= 16, "{status}");
}

#[test]
fn a_user_outside_the_group_is_refused_and_told_which_group_may() {
    as_user(user("mallory", &[]), || {
        let refused = Client::connect().expect_err("no client of this machine").to_string();
        for words in [CLIENT_SOCKET, "may not connect", "kvbroker-clients"] {
            assert!(refused.contains(words), "{words} is not in: {refused}");
        }
        // The operator's socket is not for clients either.
        let status = Command::new("kvbctl").arg("status").output().expect("kvbctl");
        let said = String::from_utf8_lossy(&status.stderr);
        assert!(said.contains("the admin socket is for root"), "{said}");
    });
}
