//! What an NPU runtime does with the real daemon: import a window through a DRM driver, and die while it does.

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use kvbroker::client::{Client, ClientOptions, OpenOptions, WindowPlace};
use kvbroker::profile::Profile;
use kvbroker::window::{How, What};
use nix::errno::Errno;

use crate::support::{ALICE, Peer};

/// The daemon over 24 MiB, for a device that scatters; root's own, as what is tested here is no permission.
struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Daemon {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .expect("chmod");
        let config = directory.path().join("kvbroker.toml");
        let at = |name: &str| directory.path().join(name).display().to_string();
        let text = format!(
            "[pool]\nsize = \"24M\"\nextent = \"3M\"\nbackend = \"memfd\"\ndevice = \"iommu\"\nlock = false\n[socket]\npath = {:?}\nmode = \"0666\"\nadmin-path = {:?}\n",
            at("client.sock"),
            at("admin.sock")
        );
        fs::write(&config, text).expect("configuration");
        let child = Command::new("kvbrokerd").arg("--config").arg(&config).spawn().expect("kvbrokerd");
        let mut daemon = Daemon { child, directory };
        while Client::connect_to(&daemon.socket(), ClientOptions::default()).is_err() {
            assert!(daemon.child.try_wait().expect("wait").is_none(), "the daemon has ended");
            sleep(Duration::from_millis(50));
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("client.sock")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The node of a DRM driver, which is vgem: the machine has no other.
fn drm_node() -> String {
    let entries = fs::read_dir("/dev/dri").expect("a DRM driver").map(|e| e.expect("entry").path());
    let mut cards: Vec<_> = entries.filter(|p| p.to_string_lossy().contains("card")).collect();
    cards.sort();
    cards.first().expect("a card").display().to_string()
}

#[test]
fn a_drm_driver_imports_a_window_and_gives_it_back() {
    let daemon = Daemon::start();
    let out = Command::new("npu-import").arg(drm_node()).arg(daemon.socket()).output().expect("npu-import");
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    // The K and V of a fresh session's blocks lie one block apart: no run.
    assert!(said.contains("window: 24576 bytes of 83 tokens, way 2"), "{said}");
    assert!(said.contains("bytes that differ: 0"), "{said}");
}

#[test]
fn blocks_of_a_killed_client_stay_out_of_use_while_its_window_is_imported_and_come_back_after() {
    let daemon = Daemon::start();
    let options = || ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
    // The same tenant again, forked before there is a window: it must not inherit what stands for the importer.
    let mut heir = Peer::start(ALICE, |turns| {
        turns.yield_to_test();
        let client = Client::connect_to(&daemon.socket(), options()).expect("connect");
        let profile = client.profile(&Profile::reference()).expect("a profile");
        let mut s = client.open(&profile, OpenOptions::default()).expect("a session");
        s.ensure(59 * 16).expect("64 blocks, but for five");
        s.ensure(59 * 16 + 1).expect_err("what a device may still write is nobody's");
        turns.yield_to_test();
        // The daemon looks again by itself, every five seconds at most.
        let back = (0..200).any(|_| {
            sleep(Duration::from_millis(100));
            s.ensure(64 * 16).is_ok()
        });
        assert!(back, "the blocks do not come back");
    });
    heir.wait_for_yield();
    let victim = Peer::start(ALICE, |turns| {
        let client = Client::connect_to(&daemon.socket(), options()).expect("connect");
        let profile = client.profile(&Profile::reference()).expect("a profile");
        let mut s = client.open(&profile, OpenOptions::default()).expect("a session");
        s.ensure(5 * 16).expect("room");
        let window = s.window(0..80, What::Blocks, Some(How::Udmabuf)).expect("a window");
        assert!(matches!(window.place(), WindowPlace::Buffer { .. }));
        turns.yield_to_test();
    });
    // Extents are memfds here, so the only dma-buf is the window.
    let import = victim.kill_and_keep("/dmabuf:");
    heir.resume();
    heir.wait_for_yield();
    drop(import);
    heir.resume();
    heir.finish();
}

impl Peer {
    /// Waits for its turn, takes a copy of its descriptor of this kind as a driver would have one, and kills it.
    fn kill_and_keep(mut self, kind: &str) -> OwnedFd {
        self.wait_for_yield();
        let pid = self.pid();
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
        let paths = entries.map(|e| e.expect("entry").path());
        let is_it = |p: &PathBuf| fs::read_link(p).is_ok_and(|to| to.to_string_lossy().starts_with(kind));
        let path = paths.into_iter().find(is_it).expect("a descriptor of this kind");
        let number: i32 =
            path.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()).expect("a number");
        // SAFETY: the calls take numbers and return new descriptors, or fail.
        let copy = unsafe {
            let pidfd =
                Errno::result(libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0)).expect("pidfd_open");
            let pidfd = OwnedFd::from_raw_fd(pidfd as i32);
            let raw = std::os::fd::AsRawFd::as_raw_fd(&pidfd);
            let copy =
                Errno::result(libc::syscall(libc::SYS_pidfd_getfd, raw, number, 0)).expect("pidfd_getfd");
            OwnedFd::from_raw_fd(copy as i32)
        };
        self.kill();
        copy
    }
}
