//! Processes of one user that share blocks at the wrong moment: nobody gets what is not whole, and nobody writes in what
//! another one has.

use kvbroker::wire::{self, Fault, Verb, WireBlock, Writer};

use crate::support::{BLOCK, CONFIG, Daemon, PER_BLOCK, Place, Raw, Reply, until};

const A: u32 = 4001;

#[test]
fn a_look_up_between_the_grant_and_the_seal_finds_nothing() {
    let daemon = Daemon::new();
    let (mut a, mut twin) = (daemon.helper(A), daemon.helper(A));
    a.must("open");
    twin.must("open");
    a.must("ensure 0 64");
    assert_eq!(twin.say("attach 0 65"), "0", "granted");
    a.must("fill 0 0 64 5");
    twin.must("close 0");
    twin.must("open");
    assert_eq!(twin.say("attach 1 65"), "0", "written");
    a.must("seal 0 64");
    twin.must("close 1");
    twin.must("open");
    assert_eq!(twin.say("attach 2 65"), "64", "sealed");
    twin.must("holds 2 0 64 5");
}

#[test]
fn a_publisher_killed_half_way_leaves_what_it_had_sealed_and_nothing_of_the_rest() {
    let daemon = Daemon::new();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 64");
    a.must("fill 0 0 64 5");
    a.must("seal 0 32");
    a.must("fill 0 32 64 6");
    a.kill();
    until("it has gone", || daemon.clients() == 0);
    assert_eq!((daemon.account("cached"), daemon.account("private")), (2 * BLOCK, 0));
    let mut next = daemon.helper(A);
    next.must("open");
    assert_eq!(next.say("attach 0 65"), "32");
    next.must("holds 0 0 32 5");
    // It goes on where the other one was stopped, on blocks of its own.
    next.must("ensure 0 64");
    next.must("zeros 0 32 64");
    next.must("fill 0 32 64 5");
    next.must("seal 0 64");
    let mut last = daemon.helper(A);
    last.must("open");
    assert_eq!(last.say("attach 0 65"), "64");
    last.must("holds 0 0 64 5");
}

#[test]
fn writers_of_a_shared_tail_that_are_out_of_step_never_write_in_one_block() {
    let daemon = Daemon::new();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 20");
    a.must("fill 0 0 20 1");
    a.must("fork 0");
    a.must("fork 0");
    // One goes on, one is behind and has gone back, one has not moved; and then each again.
    a.must("ensure 0 26");
    a.must("fill 0 20 26 2");
    a.must("trim 1 18");
    a.must("ensure 1 30");
    a.must("fill 1 18 30 3");
    a.must("holds 2 0 20 1");
    a.must("ensure 2 21");
    a.must("fill 2 20 21 4");
    a.must("ensure 0 40");
    a.must("fill 0 26 40 2");
    for (session, own, from, to) in [(0, 2, 20, 40), (1, 3, 18, 30), (2, 4, 20, 21)] {
        a.must(&format!("holds {session} 0 {from} 1"));
        a.must(&format!("holds {session} {from} {to} {own}"));
    }
    // What they have in common is the first block; the last one is three blocks by now.
    assert_eq!(daemon.account("shared"), BLOCK);
    // A fork of what is sealed, written by both.
    a.must("seal 0 16");
    a.must("fork 0");
    a.must("writable 0 0 4");
    a.must("fill 0 0 4 7");
    a.must("writable 3 2 6");
    a.must("fill 3 2 6 8");
    for (session, range, who) in
        [(0, "0 4", 7), (0, "4 20", 1), (3, "0 2", 1), (3, "2 6", 8), (3, "6 20", 1), (1, "0 18", 1)]
    {
        a.must(&format!("holds {session} {range} {who}"));
    }
    daemon.ledger();
}

#[test]
fn a_chain_whose_first_blocks_are_evicted_while_it_is_being_sealed_is_found_whole_afterwards() {
    let daemon = Daemon::new();
    let mut a = daemon.helper(A);
    // Somebody published its start, which is cached by now.
    a.must("open");
    a.must("ensure 0 64");
    a.must("fill 0 0 64 5");
    a.must("seal 0 64");
    a.must("close 0");
    assert_eq!(daemon.account("cached"), 4 * BLOCK);
    // Another one has computed the same by itself: its blocks are duplicates without a name.
    a.must("open");
    a.must("ensure 1 64");
    a.must("fill 1 0 64 5");
    a.must("seal 1 64");
    // The rest of the pool, and the cached ones with it, go into the same chain.
    a.must("ensure 1 512");
    assert_eq!(daemon.account("cached"), 0);
    a.must("fill 1 64 512 5");
    a.must("seal 1 512");
    let mut twin = daemon.helper(A);
    twin.must("open");
    assert_eq!(twin.say("attach 0 512"), "511");
    twin.must("holds 0 0 511 5");
    daemon.ledger();
}

/// The next reply; events come between.
fn reply(raw: &mut Raw) -> Reply {
    loop {
        let next = raw.receive().expect("the daemon does not hang up");
        if next.number > 0 {
            return next;
        }
    }
}

fn ask(raw: &mut Raw, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> Reply {
    raw.send(verb, session, fill).unwrap();
    reply(raw)
}

#[test]
fn messages_about_a_session_that_was_ended_are_refused_and_reach_no_block_of_others() {
    let mut daemon = Place::new(&format!("{CONFIG}[limits]\nreclaim-ms = 50\n")).start();
    let mut low = daemon.raw();
    let format = low.greet();
    let open = |priority: u32| wire::Open {
        format: format.into(),
        priority: priority.into(),
        ..wire::Open::default()
    };
    assert_eq!(ask(&mut low, Verb::Open, 0, |w| _ = w.put(&open(10))).fault, None);
    let grow = |want: u32| wire::Grow { want: want.into(), least: want.into(), ..wire::Grow::default() };
    let grant = ask(&mut low, Verb::Grow, 1, |w| _ = w.put(&grow(32))).body;
    // Behind the grant and the extents, each block is a name of 16 bytes and 8 more.
    let extents = u32::from_le_bytes(grant[8..12].try_into().unwrap()) as usize;
    let names: Vec<u8> = grant[16 + 8 * extents..].chunks_exact(24).flat_map(|b| b[..16].to_vec()).collect();
    let tokens = (32 * PER_BLOCK) as u64;
    let report =
        |used: u32| wire::Report { tokens: tokens.into(), first: (32 - used).into(), used: used.into() };
    let all = wire::Report { tokens: tokens.into(), first: 0.into(), used: 32.into() };
    let table = wire::Grow { report: all, ..wire::Grow::default() };
    assert_eq!(ask(&mut low, Verb::Grow, 1, |w| _ = w.put(&table).put(&names[..])).fault, None);
    // One of higher priority needs some; the low one says nothing until it is too late.
    let mut high = daemon.raw();
    assert_eq!(high.greet(), format);
    assert_eq!(ask(&mut high, Verb::Open, 0, |w| _ = w.put(&open(0))).fault, None);
    let got = ask(&mut high, Verb::Grow, 2, |w| _ = w.put(&grow(4)));
    assert_eq!(got.fault, None);
    assert_eq!(daemon.admin("status")["counters"]["sessions_lost"], 1);
    let before = daemon.ledger();
    let trim = wire::Trim { report: report(0), tokens: 0.into(), ..wire::Trim::default() };
    let late: [(Verb, Vec<u8>); 5] = [
        (Verb::Trim, body(|w| _ = w.put(&trim))),
        (Verb::Grow, body(|w| _ = w.put(&grow(1)))),
        (Verb::Fork, body(|w| _ = w.put(&report(0)))),
        (Verb::Seal, body(|w| _ = w.put(&wire::Seal { report: report(0), ..wire::Seal::default() }))),
        (Verb::Attach, body(|w| _ = w.put(&wire::Attach::default()))),
    ];
    for (verb, body) in &late {
        let fault = ask(&mut low, *verb, 1, |w| _ = w.put(&body[..])).fault;
        assert_eq!(fault, Some(Fault::SessionLost), "{}", verb.name());
    }
    assert_eq!(daemon.ledger(), before);
    // It agrees, naming all that it had; after that there is no such session, and its blocks are others'.
    assert_eq!(ask(&mut low, Verb::Close, 1, |w| _ = w.put(&all).put(&names[..])).fault, None);
    for (verb, body) in &late {
        let fault = ask(&mut low, *verb, 1, |w| _ = w.put(&body[..])).fault;
        assert_eq!(fault, Some(Fault::Stale), "{}", verb.name());
    }
    for name in names.chunks_exact(size_of::<WireBlock>()) {
        let free = wire::Free { count: 1.into(), reserved: 0.into() };
        let fault = ask(&mut low, Verb::Free, 0, |w| _ = w.put(&free).put(name)).fault;
        assert!(matches!(fault, Some(Fault::Stale | Fault::BadRequest)), "{fault:?}");
    }
    assert_eq!(daemon.account("credit"), 4 * BLOCK, "the high one has what it was granted");
    daemon.lives();
}

fn body(fill: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut w = Writer::default();
    fill(&mut w);
    w.body().to_vec()
}
