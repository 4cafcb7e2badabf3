//! What memory costs the broker on a real kernel: taking the pool, being ready, moving an extent from one tenant to
//! another. Rows for `scripts/bench`, one JSON object a line; they pass whatever the figures are.
//!
//! Run by `scripts/vm measure`, in an emulated machine: the figures of one run stand against each other, and none of
//! them against a board.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvbroker::heap::{DmaHeap, Heap, Memfd, Udmabuf};

use crate::daemon::HeapRule;
use crate::support::{AREA, CMA_HEAP, DAEMON, EXTENT, MIB, Map, SYSTEM_HEAP};

const EXTENTS: usize = AREA / EXTENT - 1;
const ROUNDS: usize = 3;

/// Prints one figure for the report of `scripts/bench`. Nothing is promised under emulation, so there is no bar.
fn figure(name: &str, value: f64, unit: &str, note: &str) {
    let line = serde_json::json!({
        "name": name, "value": value, "unit": unit, "bar": null, "cmp": "<=",
        "note": format!("{note}; emulated {}", std::env::consts::ARCH),
    });
    // The test harness has begun a line with the test's name.
    println!("\n{line}");
}

/// The median of [`ROUNDS`] times, in seconds.
fn median(mut once: impl FnMut() -> Duration) -> f64 {
    let mut times: Vec<_> = (0..ROUNDS).map(|_| once()).collect();
    times.sort_unstable();
    times[ROUNDS / 2].as_secs_f64()
}

fn heaps() -> Vec<(&'static str, Box<dyn Heap>)> {
    let node = |name: &str| DmaHeap::open(format!("/dev/dma_heap/{name}").as_ref()).expect("heap");
    vec![
        ("cma", Box::new(node(CMA_HEAP))),
        ("system", Box::new(node(SYSTEM_HEAP))),
        ("udmabuf", Box::new(Udmabuf::open("/dev/udmabuf".as_ref()).expect("udmabuf"))),
        ("memfd", Box::new(Memfd::new(false))),
    ]
}

/// From `exec` to the word that systemd waits for.
fn start_to_ready(pool: &str) -> Duration {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
    let path = |name: &str| directory.path().join(name);
    fs::write(path("kvbroker.toml"), format!("[pool]\nlock = false\n{pool}\n")).expect("configuration");
    let notify = UnixDatagram::bind(path("notify")).expect("bind");
    fs::set_permissions(path("notify"), fs::Permissions::from_mode(0o777)).expect("chmod");
    let mut command = Command::new("kvbrokerd");
    command.arg("--config").arg(path("kvbroker.toml")).arg("--socket").arg(path("client.sock"));
    command.arg("--admin-socket").arg(path("admin.sock")).env("NOTIFY_SOCKET", path("notify"));
    command.uid(DAEMON.uid).gid(DAEMON.gid);
    let start = Instant::now();
    let mut daemon = command.spawn().expect("kvbrokerd");
    let mut said = [0; 4096];
    let got = notify.recv(&mut said).expect("a word");
    let took = start.elapsed();
    assert!(String::from_utf8_lossy(&said[..got]).contains("READY=1"));
    daemon.kill().expect("kill");
    daemon.wait().expect("wait");
    took
}

#[test]
fn taking_the_pool_and_being_ready() {
    let _rule = HeapRule::apply();
    // As the distribution's rule has it: the device's group, of which the daemon is one.
    chown("/dev/udmabuf", None, Some(DAEMON.gid)).expect("chown");
    fs::set_permissions("/dev/udmabuf", fs::Permissions::from_mode(0o660)).expect("chmod");
    let exec = median(|| {
        let start = Instant::now();
        let status = Command::new("kvbrokerd").arg("--version").stdout(Stdio::null()).status();
        assert!(status.expect("kvbrokerd").success());
        start.elapsed()
    });
    figure("memory/exec", exec * 1e3, "ms", "kvbrokerd --version, from fork to exit");
    let size = format!("size = \"{}M\"", EXTENTS * EXTENT / MIB);
    for (name, heap) in heaps() {
        let take = median(|| {
            let start = Instant::now();
            let buffers: Vec<_> =
                (0..EXTENTS).map(|_| heap.allocate(EXTENT as u64).expect("extent")).collect();
            let took = start.elapsed();
            drop(buffers);
            took
        });
        let note = format!("{EXTENTS} extents of 3 MiB");
        figure(&format!("memory/take-{name}"), take * 1e3, "ms", &note);
        figure(&format!("memory/extents-per-second-{name}"), EXTENTS as f64 / take, "1/s", &note);
        let pool = match name {
            "memfd" | "udmabuf" => format!("backend = \"{name}\"\n{size}"),
            "system" => format!("backend = \"dma-heap\"\nheap = \"{SYSTEM_HEAP}\"\n{size}"),
            _ => format!("backend = \"dma-heap\"\nheap = \"{CMA_HEAP}\"\n{size}"),
        };
        let ready = median(|| start_to_ready(&pool));
        let over = (ready - take) / exec;
        let note = format!(
            "start to READY=1 {:.1} ms, of which the heap {:.1} ms; the rest in times of an exec (promised: 10)",
            ready * 1e3,
            take * 1e3
        );
        figure(&format!("memory/ready-{name}"), over, "x", &note);
    }
}

#[test]
fn moving_an_extent_to_another_tenant() {
    let bytes = EXTENT as u64;
    for (name, heap) in heaps() {
        // The old tenant has written it, and the new one writes it: both want its pages in place.
        let mut buffer = Some(heap.allocate(bytes).expect("extent"));
        let used = |buffer: &kvbroker::heap::Buffer| {
            Map::writable(buffer.fd().expect("fd").as_fd(), EXTENT).fill(0, EXTENT, 0xa5);
        };
        let anew = median(|| {
            used(buffer.as_ref().expect("buffer"));
            let start = Instant::now();
            drop(buffer.take());
            buffer = Some(heap.allocate(bytes).expect("extent"));
            start.elapsed()
        });
        let what = if matches!(name, "memfd" | "udmabuf") { "punch-and-create" } else { "destroy-and-allocate" };
        figure(&format!("memory/move-{what}-{name}"), anew * 1e6, "us", "one extent of 3 MiB");
        let buffer = buffer.expect("buffer");
        let scrub = median(|| {
            used(&buffer);
            let start = Instant::now();
            buffer.zero(0..bytes).expect("zero");
            start.elapsed()
        });
        figure(
            &format!("memory/move-scrub-{name}"),
            scrub * 1e6,
            "us",
            "one extent of 3 MiB, zeroed in place and synced",
        );
        figure(
            &format!("memory/moves-per-second-{name}"),
            1.0 / anew.min(scrub),
            "1/s",
            "the quicker of the two",
        );
    }
}
