//! Ends: of clients, at any moment, and of the daemon.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{BLOCK, CONFIG, Daemon, POOL, Place, until};

const A: u32 = 4001;

#[test]
fn whenever_a_client_is_killed_its_blocks_come_back_and_pinned_ones_stay() {
    let mut daemon = Daemon::new();
    let mut pinner = daemon.helper(A);
    pinner.must("open");
    pinner.must("ensure 0 40");
    pinner.must("fill 0 0 40 5");
    pinner.must("seal 0 32");
    pinner.must("pin 0 32");
    drop(pinner);
    until("only the pinned blocks are left", || daemon.clients() == 0);
    let start = daemon.ledger();
    assert_eq!(start["pinned"], 2 * BLOCK);
    let fds = daemon.fds();
    for round in 0..24 {
        let mut clients = [daemon.helper(A), daemon.helper(A + round % 2)];
        for (i, client) in clients.iter_mut().enumerate() {
            client.must(&format!("churn {}", round * 2 + i as u32));
        }
        std::thread::sleep(Duration::from_micros(u64::from(round * 7919 % 9000)));
        clients.iter_mut().for_each(|c| c.kill());
        until("they are gone", || daemon.clients() == 0);
        // In the turn in which the client is gone its blocks are free; extents are renewed after that.
        let now = daemon.ledger();
        assert_eq!((&now["credit"], &now["private"], &now["shared"]), (&0.into(), &0.into(), &0.into()));
        // What they had published stays as long as there is room; all else is as it was.
        until("the pool is as it was", || {
            let now = daemon.ledger();
            let bytes = |name: &str| now[name].as_u64().unwrap();
            let kept = bytes("free") + bytes("stranded") + bytes("cached") + bytes("pinned");
            now["pinned"] == start["pinned"] && kept == POOL
        });
    }
    let mut last = daemon.helper(A);
    last.must("open");
    assert_eq!(last.say("attach 0 33"), "32");
    last.must("holds 0 0 32 5");
    drop(last);
    until("its descriptors are closed", || daemon.fds() <= fds);
    daemon.lives();
}

#[test]
fn a_process_that_ends_is_gone_even_if_a_child_keeps_its_socket() {
    let daemon = Daemon::new();
    let mut c = daemon.helper(A);
    c.must("open");
    c.must("ensure 0 100");
    let child: i32 = c.say("child").parse().unwrap();
    assert_eq!(daemon.clients(), 1);
    c.order("exit");
    c.child.wait().unwrap();
    until("its blocks are back", || daemon.account("free") == POOL);
    assert_eq!(daemon.clients(), 0);
    kill(Pid::from_raw(child), None).expect("the child lives and has the socket");
    kill(Pid::from_raw(child), Signal::SIGKILL).unwrap();
}

#[test]
fn what_a_client_holds_survives_the_daemon_however_it_ends() {
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGKILL] {
        let mut daemon = Daemon::new();
        let mut clients = [daemon.helper(A), daemon.helper(A + 1)];
        for c in &mut clients {
            c.must("open");
            c.must("ensure 0 128");
            c.must("fill 0 0 128 5");
        }
        let status = daemon.signal(signal);
        let sockets = [daemon.place.socket(), daemon.place.path("admin.sock")].map(|p| p.exists());
        if signal != Signal::SIGKILL {
            assert_eq!(status.code(), Some(0), "{}", daemon.place.log());
            assert_eq!(sockets, [false, false]);
        }
        for c in &mut clients {
            c.must("holds 0 0 128 5");
            c.must("fill 0 60 100 6");
            c.must("holds 0 60 100 6");
            assert_eq!(c.say("ensure 0 1000"), "session-lost");
            assert_eq!(c.say("lost"), "true");
            c.must("holds 0 0 60 5");
            c.must("trim 0 70");
            c.must("ensure 0 80");
            c.must("close 0");
        }
        // The next one takes the place over, sockets of a dead one included.
        let again = daemon.place.command().spawn().unwrap();
        let pid = Pid::from_raw(again.id() as i32);
        daemon.child = again;
        until("the next daemon serves", || daemon.try_admin("check").is_some());
        assert_eq!(daemon.account("free"), POOL);
        kill(pid, Signal::SIGTERM).unwrap();
        assert_eq!(daemon.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn an_idle_daemon_sleeps_and_is_small() {
    let daemon = Place::new(CONFIG).start();
    let mut c = daemon.helper(A);
    c.must("open");
    c.must("ensure 0 200");
    // What it has to do after its last answer ends with the looks of `rest-ms`, which are half a second apart.
    let switches = || daemon.status_line("voluntary_ctxt_switches:");
    until("it sleeps", || {
        let before = switches();
        std::thread::sleep(Duration::from_millis(1200));
        switches() == before
    });
    let before = switches();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(daemon.status_line("voluntary_ctxt_switches:"), before, "it woke up with nothing to do");
    let kib = daemon.status_line("VmRSS:") - daemon.status_line("RssShmem:");
    println!("resident without the pool: {kib} KiB (debug build)");
    assert!(kib <= 8 << 10, "{kib} KiB");
}
