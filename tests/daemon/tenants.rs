//! What tenants get, and what they never see of each other.

use crate::support::{BLOCK, CONFIG, Daemon, EXTENT, Helper, POOL, Place, Raw, Subordinate, until};

const A: u32 = 4001;
const B: u32 = 4002;

#[test]
fn memory_changes_hands_without_its_bytes_and_the_old_mapping_reads_zeros() {
    let daemon = Daemon::new();
    let (mut a, mut b) = (daemon.helper(A), daemon.helper(B));
    a.must("open");
    a.must("ensure 0 512");
    a.must("fill 0 0 512 7");
    a.must("remember 0");
    b.must("open");
    assert_eq!(b.say("ensure 0 16"), "busy");
    a.must("close 0");
    // All of the pool lies idle in the first tenant's hands, who keeps every mapping.
    b.must("ensure 0 512");
    b.must("zeros 0 0 512");
    b.must("fill 0 0 512 9");
    assert_eq!(a.say("old"), "zeros");
    b.must("holds 0 0 512 9");
    // What the client has not told of yet is still its credit in the daemon's books.
    assert_eq!(daemon.account("private") + daemon.account("credit"), POOL);
    // And the first one goes on when there is room again.
    a.must("open");
    assert_eq!(a.say("ensure 1 16"), "busy");
    drop(b);
    until("the second tenant's memory is back", || a.say("ensure 1 512") == "ok");
    a.must("zeros 1 0 512");
}

#[test]
fn limits_are_typed_come_at_once_and_leave_the_client_working() {
    let config = format!("{CONFIG}\n[[tenant]]\nuid = {A}\nlimit = \"256K\"\n");
    let daemon = Place::new(&config).start();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("open");
    a.must("ensure 0 96");
    assert_eq!(a.say("ensure 0 144"), "never-fits");
    a.must("ensure 1 32");
    assert_eq!(a.say("ensure 1 48"), "over-limit");
    a.must("fill 0 0 96 3");
    a.must("trim 0 80");
    a.must("ensure 1 48");
    a.must("holds 0 0 80 3");
    let mut b = daemon.helper(B);
    b.must("open");
    b.must("ensure 0 384");
    b.must("open");
    assert_eq!(b.say("ensure 1 16"), "busy");
    assert_eq!(b.say("ensure 1 528"), "never-fits");
    b.must("fill 0 0 384 4");
    b.must("trim 0 256");
    b.must("ensure 1 16");
    b.must("holds 0 0 256 4");
}

#[test]
fn a_prefix_is_found_by_the_same_user_only() {
    let daemon = Daemon::new();
    let (mut a, mut twin, mut b) = (daemon.helper(A), daemon.helper(A), daemon.helper(B));
    a.must("open");
    a.must("ensure 0 64");
    a.must("fill 0 0 64 5");
    a.must("seal 0 64");
    twin.must("open");
    assert_eq!(twin.say("attach 0 64"), "63");
    twin.must("holds 0 0 63 5");
    b.must("open");
    assert_eq!(b.say("attach 0 64"), "0");
    assert_eq!(daemon.account("shared"), 4 * BLOCK);
}

#[test]
fn a_client_without_room_for_descriptors_gets_an_error_and_goes_on_when_it_has_closed_files() {
    let daemon = Daemon::new();
    let mut donor = daemon.helper(A);
    donor.must("open");
    donor.must("ensure 0 64");
    donor.must("fill 0 0 64 5");
    donor.must("seal 0 64");
    let mut c = Helper::start(&daemon.place.socket(), A, &[(libc::RLIMIT_NOFILE, 64)]);
    c.must("open");
    c.must("open");
    let before = daemon.ledger();
    c.must("files 0");
    for _ in 0..3 {
        assert_eq!(c.say("ensure 0 128"), "map");
        assert_eq!(c.say("attach 1 64"), "map");
    }
    // One extent fits, three are needed: no half of it stays.
    c.must("files 1");
    assert_eq!(c.say("ensure 0 256"), "map");
    c.must("files 0");
    c.must("poll");
    until("nothing is left of what could not be taken", || daemon.ledger() == before);
    c.must("close-files");
    c.must("ensure 0 256");
    c.must("fill 0 0 256 6");
    assert_eq!(c.say("attach 1 64"), "63");
    c.must("holds 1 0 63 5");
    c.must("holds 0 0 256 6");
}

#[test]
fn growing_within_credit_makes_no_system_call() {
    let daemon = Daemon::new();
    for (reserved, ends) in [(8, "with code 7"), (7, "by signal 31")] {
        let mut c = daemon.helper(A);
        c.must("open");
        c.must("ensure 0 1");
        c.must("trim 0 0");
        c.must("release");
        c.must(&format!("reserve {reserved}"));
        // With one block too few the same filter must end it: that is what shows that it filters.
        c.order("quiet 8");
        let status = c.child.wait().unwrap();
        use std::os::unix::process::ExitStatusExt;
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("with code {code}"),
            (_, signal) => format!("by signal {}", signal.unwrap()),
        };
        assert_eq!(how, ends, "{reserved} blocks of credit");
    }
}

#[test]
fn an_extent_is_the_unit_that_a_tenant_owns() {
    let daemon = Daemon::new();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 16");
    let used = daemon.account("private") + daemon.account("credit");
    assert_eq!((used, daemon.account("stranded")), (BLOCK, EXTENT - BLOCK));
    drop(a);
    until("it is back", || daemon.account("free") == POOL);
}

/// What somebody is told who is not served.
fn turned_away(raw: &mut Raw) -> String {
    let told = raw.receive().expect("a word before the end");
    assert_eq!((told.number, told.fault), (0, Some(kvbroker::wire::Fault::BadRequest)));
    assert!(raw.receive().is_none(), "and then the end");
    String::from_utf8(told.body[16..].to_vec()).unwrap()
}

#[test]
fn whoever_has_subordinate_uids_is_no_tenant_under_them_unless_the_configuration_says_so() {
    let config = format!("{CONFIG}\n[[tenant]]\nuid = 100004\nlimit = \"256K\"\n");
    let mut daemon = Place::new(&config).start();
    for inside in [1, 2] {
        let mut one = Subordinate::connect(&daemon.place.socket(), inside);
        let why = turned_away(&mut one.raw);
        let uid = format!("uid {}", 100_000 + inside - 1);
        assert!(
            why.contains(&uid) && why.contains("another user namespace") && why.contains("[[tenant]]"),
            "{why}"
        );
    }
    // Also under its own uid: from there it can be anybody of those.
    let why = turned_away(&mut Subordinate::connect(&daemon.place.socket(), 0).raw);
    assert!(why.contains("uid 4001") && why.contains("another user namespace"), "{why}");
    // The user itself is a tenant, and so is who is named.
    daemon.helper(4001).must("open");
    let mut named = Subordinate::connect(&daemon.place.socket(), 5);
    named.raw.greet();
    let limits = daemon.admin("limits");
    let tenants = limits["tenants"].as_array().unwrap();
    let connected = |uid: u64| tenants.iter().any(|t| t["uid"] == uid && t["connections"] == 1);
    assert!(connected(100_004) && !tenants.iter().any(|t| t["uid"] == 100_000), "{limits}");
    daemon.lives();
}

#[test]
fn whoever_has_ended_before_the_daemon_has_looked_is_not_served_and_whoever_has_the_socket_learns_why() {
    let daemon = Daemon::new();
    let pid = nix::unistd::Pid::from_raw(daemon.pid() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let mut one = Subordinate::connect(&daemon.place.socket(), 1);
    one.end();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    let why = turned_away(&mut one.raw);
    assert!(why.contains("uid 100000") && why.contains("has ended"), "{why}");
    assert_eq!(daemon.clients(), 0);
}
