//! The pool on the machine's real heaps: how much the broker gets out of them, what it says when that is less than it
//! was told to take, and that it gives everything back.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};

use kvbroker::client::{Client, Error, OpenOptions, Session};
use kvbroker::profile::Profile;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::daemon::{Broker, HeapRule, Place, check_kv, until, write_kv};
use crate::support::{
    ALICE, AREA, BLOCK, BOB, CMA_HEAP, EXTENT, Heap, KIB, MIB, Map, Peer, ROOT, SYSTEM_HEAP, User, almost,
    cma_used, vmsplice_error,
};

const PER_BLOCK: usize = 16;

fn reference() -> Profile {
    Profile::reference()
}

/// What somebody else has taken of the CMA area.
fn eat(bytes: usize) -> Vec<OwnedFd> {
    let buffers = Heap::open(CMA_HEAP).expect("heap").alloc_up_to(MIB, bytes / MIB);
    assert_eq!(buffers.len(), bytes / MIB, "the area has less than {bytes} bytes free");
    buffers
}

/// The pool has as many extents as the fresh area holds, or almost; the status says how many, loudly if some are
/// missing; a client can have all their blocks.
fn serves(broker: &Broker, extents: usize, extent_bytes: usize, blocks_per_extent: u64, profile: Profile) {
    let got = broker.pool("extents");
    assert!(almost(extents).contains(&(got as usize)), "{got} extents\n{}", broker.place.log());
    assert_eq!(broker.pool("extents_wanted"), extents as u64);
    assert_eq!(broker.pool("extent_bytes"), extent_bytes as u64);
    assert_eq!(broker.pool("bytes"), got * extent_bytes as u64);
    let warned = broker.status_text().contains("extents are missing");
    assert_eq!(warned, got < extents as u64, "{}", broker.status_text());
    broker.blocks(ALICE, profile, got * blocks_per_extent);
}

#[test]
fn a_pool_of_256_mebibytes_is_85_extents_of_8_blocks_and_goes_back_whole() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma("");
    serves(&broker, AREA / EXTENT, EXTENT, 8, reference());
    assert_eq!(cma_used() - before, broker.pool("extents") as usize * EXTENT, "the area lost as much");
    broker.stop();
    assert_eq!(cma_used(), before);
}

#[test]
fn the_area_has_what_is_held_while_a_command_runs_and_the_pool_has_it_after() {
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma("");
    let (used, missing) = (cma_used(), broker.pool("extents_missing"));
    // An extent that was missing at the start may come at any time, with its descriptor.
    let fds = broker.fds();
    let whole = || used + missing.saturating_sub(broker.pool("extents_missing")) as usize * EXTENT;
    for how in [Signal::SIGTERM, Signal::SIGKILL] {
        let script = "cat /sys/kernel/debug/cma/*/used; exec sleep 1000";
        let mut kvbctl = broker.hold("96M", &["sh", "-c", script]);
        let mut pages = String::new();
        BufReader::new(kvbctl.stdout.take().expect("piped")).read_line(&mut pages).expect("a line");
        let used = pages.trim().parse::<usize>().expect("a number of pages") * 4 * KIB;
        assert_eq!(whole() - used, 96 * MIB, "from the first moment of the command, and to the page");
        assert_eq!(broker.account("lent"), 96 * MIB as u64);
        // Somebody else's driver gets it meanwhile.
        drop(eat(90 * MIB));
        kill(Pid::from_raw(kvbctl.id() as i32), how).expect("kill");
        kvbctl.wait().expect("wait");
        until("the pool has all that it had", || broker.account("lent") == 0 && cma_used() == whole());
        broker.is_sound();
    }
    until("no descriptor is left", || broker.fds() <= fds + 1);
}

#[test]
fn the_strict_mode_has_512_blocks_and_the_status_says_what_it_costs() {
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma("extent = \"block\"");
    serves(&broker, AREA / (512 * KIB), BLOCK, 1, reference());
    // 128 KiB behind each block but the last, which are of no use to anybody but smaller buffers.
    let lost = broker.status()["pool"]["waste"]["alignment"].as_u64().expect("waste.alignment");
    assert_eq!(lost, 511 * 128 * KIB as u64);
    let text = broker.status_text();
    for words in ["63.88 MiB of the 256 MiB (25 %)", "512 KiB", "kvbctl plan"] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
}

#[test]
fn blocks_of_64_kibibytes_fill_the_area_with_4096() {
    let _rule = HeapRule::apply();
    let small = Profile::uniform("small", "f16", 4, 512, 512, PER_BLOCK as u32).expect("profile");
    let table = "[[profile]]\nname = \"small\"\nlayers = 4\nkv-heads = 2\nhead-dim = 128";
    let broker = Broker::on_cma(table);
    serves(&broker, AREA / MIB, MIB, 16, small);
}

#[test]
fn a_pool_of_192_mebibytes_is_512_blocks() {
    let _rule = HeapRule::apply();
    let broker = Place::new("backend = \"dma-heap\"").option("--pool=192M").start();
    assert_eq!(broker.pool("extents"), 64);
    broker.blocks(BOB, reference(), 512);
}

#[test]
fn the_system_heap_serves_as_much_and_leaves_the_area_alone() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma(&format!("heap = \"{SYSTEM_HEAP}\""));
    assert_eq!(broker.status()["pool"]["heap"], format!("/dev/dma_heap/{SYSTEM_HEAP}"));
    assert_eq!(broker.pool("extents"), 85);
    broker.blocks(ALICE, reference(), 680);
    assert_eq!(cma_used(), before);
}

#[test]
fn the_heap_of_a_node_is_taken_by_its_name_and_found_without_it() {
    let _rule = HeapRule::apply();
    let path = format!("/dev/dma_heap/{CMA_HEAP}");
    // On arm64 the name is that of the overlay's node, on x86-64 what the kernel calls an area without one.
    for pool in [
        &format!("heap = \"{CMA_HEAP}\""),
        &format!("backend = \"dma-heap\"\nheap = \"{path}\""),
        "device = \"contiguous\"",
    ] {
        let broker = Place::new(&format!("size = \"48M\"\n{pool}")).start();
        let status = broker.status();
        assert_eq!(status["pool"]["heap"], path, "{pool}");
        assert_eq!(status["pool"]["backend"], "dma-heap", "{pool}");
        broker.blocks(ALICE, reference(), 128);
    }
}

#[test]
fn a_heap_that_the_daemon_may_not_open_is_named_with_who_may() {
    let (code, log) = Place::new("backend = \"dma-heap\"").refuses();
    assert_eq!(code, Some(1), "{log}");
    for words in [CMA_HEAP, "not permitted", "group kvbroker"] {
        assert!(log.contains(words), "{words} is not in\n{log}");
    }
}

#[test]
fn a_heap_that_is_not_there_is_named_with_those_that_are() {
    let _rule = HeapRule::apply();
    let (code, log) = Place::new("heap = \"linux,cma\"").refuses();
    assert_eq!(code, Some(1), "{log}");
    for words in ["/dev/dma_heap/linux,cma", CMA_HEAP, SYSTEM_HEAP] {
        assert!(log.contains(words), "{words} is not in\n{log}");
    }
}

#[test]
fn an_area_smaller_than_the_pool_is_served_as_far_as_it_goes_or_refused_below_the_minimum() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let asked = "backend = \"dma-heap\"\nsize = \"510M\"\n";
    // By default half of the size is the minimum: 255 MiB are 85 extents.
    let (code, log) = Place::new(&format!("{asked}minimum = \"300M\"")).refuses();
    assert_eq!(code, Some(1), "{log}");
    for words in ["no memory for a buffer", "enlarge the CMA region", "cma="] {
        assert!(log.contains(words), "{words} is not in\n{log}");
    }
    assert_eq!(cma_used(), before, "what it had taken until then is back");

    let broker = Place::new(&format!("{asked}minimum = \"128M\"")).start();
    let got = broker.pool("extents");
    assert!(almost(85).contains(&(got as usize)), "{got} extents");
    assert_eq!(broker.pool("extents_wanted"), 170);
    assert!(broker.place.log().contains(&format!("{got} of 170 extents")), "{}", broker.place.log());
    let text = broker.status_text();
    assert!(text.contains("WARNING") && text.contains("of 170 extents are missing"), "{text}");
    broker.blocks(ALICE, reference(), got * 8);
    broker.stop();
    assert_eq!(cma_used(), before);
}

#[test]
fn a_few_pages_taken_at_boot_cost_an_extent_that_the_log_and_the_status_name() {
    let _rule = HeapRule::apply();
    // As an unmovable page somewhere in the area would: arm64 has lost one extent of 85 that way.
    let _taken = eat(4 * MIB);
    let broker = Broker::on_cma("");
    let got = broker.pool("extents");
    assert!((82..85).contains(&got), "{got} extents");
    assert!(broker.place.log().contains(&format!("{got} of 85 extents")), "{}", broker.place.log());
    let text = broker.status_text();
    assert!(text.contains(&format!("WARNING: {} of 85 extents are missing", 85 - got)), "{text}");
    broker.client(ALICE, |client| {
        let mut session = open(client);
        session.ensure(got as usize * 8 * PER_BLOCK).expect("all that is there");
    });
    broker.stop();
    let (code, log) = Place::new("backend = \"dma-heap\"\nminimum = \"255M\"").refuses();
    assert_eq!(code, Some(1), "{log}");
}

fn open(client: &Client) -> Session {
    let profile = client.profile(&reference()).expect("profile");
    client.open(&profile, OpenOptions { model: "m".into(), ..Default::default() }).expect("open")
}

#[test]
fn a_session_writes_the_whole_pool_and_reads_it_back_and_nothing_leaks() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma("");
    let (fds, taken) = (broker.fds(), cma_used());
    let tokens = broker.pool("extents") as usize * 8 * PER_BLOCK;
    for (user, writer) in [(ALICE, 1), (BOB, 2)] {
        broker.client(user, |client| {
            let mut session = open(client);
            session.ensure(tokens).expect("the whole pool");
            let mut read = [1; 512];
            session.read_row(tokens - 1, 23, kvbroker::profile::Kv::V, &mut read).expect("read");
            assert_eq!(read, [0; 512], "an extent of another tenant is not cleared");
            write_kv(&mut session, 0..tokens, writer);
            check_kv(&session, 0..tokens, writer);
            assert!(matches!(session.ensure(tokens + 1), Err(Error::Refused { .. })), "more than there is");
            check_kv(&session, tokens - 64..tokens, writer);
        });
        until("all of it is free again", || broker.account("free") == broker.pool("bytes"));
        broker.is_sound();
        until("the descriptors are closed", || broker.fds() == fds);
        assert_eq!(cma_used(), taken);
    }
    broker.stop();
    assert_eq!(cma_used(), before);
}

#[test]
fn a_filter_that_forbids_the_probe_proves_nothing_and_extents_are_made_anew() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let pool = "backend = \"dma-heap\"\nsize = \"24M\"";
    // Unfiltered, this kernel proves the count exactly if it refuses to splice a mapping's pages itself.
    let extent = Heap::open(CMA_HEAP).expect("heap").alloc(EXTENT).expect("alloc");
    let refuses = vmsplice_error(&Map::writable(extent.as_fd(), EXTENT)) == Some(Errno::EFAULT);
    drop(extent);
    let broker = Place::new(pool).start();
    assert_eq!(broker.status()["pool"]["holder_count"]["proven"], refuses, "{}", broker.status_text());
    broker.stop();

    let broker = Place::new(pool).without_vmsplice().start();
    assert_eq!(broker.status()["pool"]["holder_count"]["proven"], false, "{}", broker.status_text());
    let tokens = 64 * PER_BLOCK;
    for (user, writer) in [(ALICE, 1), (BOB, 2)] {
        broker.client(user, |client| {
            let mut session = open(client);
            session.ensure(tokens).expect("the whole pool");
            let mut read = [1; 512];
            for token in (0..tokens).step_by(PER_BLOCK) {
                session.read_row(token, 23, kvbroker::profile::Kv::V, &mut read).expect("read");
                assert_eq!(read, [0; 512], "token {token} shows what another tenant wrote");
            }
            write_kv(&mut session, 0..tokens, writer);
        });
        until("all of it is free again", || broker.account("free") == broker.pool("bytes"));
    }
    broker.is_sound();
    broker.stop();
    assert_eq!(cma_used(), before);
}

/// Sessions that come, grow, fork, share, shrink and go, in two processes of two tenants that want more than there is.
/// What a token's rows hold follows from tenant, prompt and place, so that any mix-up shows.
fn mixed_load(broker: &Broker, user: User, steps: usize) {
    let client = broker.connect();
    let profile = client.profile(&reference()).expect("profile");
    let mut seed = u64::from(user.uid);
    let mut roll = move |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let writer = |prompt: u32| user.uid * 8 + prompt;
    let ids = |prompt: u32, tokens: usize| (0..tokens as u32).map(|t| prompt << 20 | t).collect::<Vec<_>>();
    let mut sessions: Vec<(Session, u32)> = Vec::new();
    let (mut granted, mut refused, mut shared) = (0, 0, 0);
    for _ in 0..steps {
        let at = roll(sessions.len().max(1));
        match roll(8) {
            0..=1 if sessions.len() < 8 => {
                let options = OpenOptions { model: "m".into(), ..Default::default() };
                let mut session = client.open(&profile, options).expect("open");
                let prompt = roll(3) as u32;
                match session.attach(&ids(prompt, 512)) {
                    Ok(tokens) => {
                        shared += tokens;
                        check_kv(&session, 0..tokens, writer(prompt));
                    }
                    Err(Error::Refused { .. }) => refused += 1,
                    Err(e) => panic!("attach: {e}"),
                }
                sessions.push((session, prompt));
            }
            2..=4 if !sessions.is_empty() => {
                let (session, prompt) = &mut sessions[at];
                let (from, to) = (session.tokens(), session.tokens() + 1 + roll(400));
                match session.ensure(to) {
                    Ok(()) => {
                        granted += to - from;
                        write_kv(session, from..to, writer(*prompt));
                    }
                    Err(Error::Refused { .. }) => refused += 1,
                    Err(e) => panic!("ensure: {e}"),
                }
            }
            5 if !sessions.is_empty() => {
                let (session, prompt) = &mut sessions[at];
                let tokens = session.tokens();
                session.seal(&ids(*prompt, tokens)).expect("seal");
            }
            6 if !sessions.is_empty() && sessions.len() < 8 => {
                let (session, prompt) = &mut sessions[at];
                let (twin, prompt) = (session.fork().expect("fork"), *prompt);
                sessions.push((twin, prompt));
            }
            7 if !sessions.is_empty() => {
                let (session, prompt) = sessions.swap_remove(at);
                check_kv(&session, 0..session.tokens(), writer(prompt));
            }
            _ => client.poll().expect("poll"),
        }
    }
    for (session, prompt) in &sessions {
        check_kv(session, 0..session.tokens(), writer(*prompt));
    }
    assert!(granted > 0 && shared > 0, "{granted} tokens granted, {shared} shared, {refused} refusals");
}

#[test]
fn two_users_with_mixed_sessions_on_one_area_never_see_each_other() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma("size = \"96M\"");
    let fds = broker.fds();
    let peers = [ALICE, BOB].map(|user| Peer::start(user, |_| mixed_load(&broker, user, 300)));
    for peer in peers {
        peer.finish();
    }
    broker.is_sound();
    assert!(broker.status()["counters"]["renewed"].as_u64().expect("renewed") > 0, "nothing changed hands");
    // Prefixes stay as cached; nothing else is in use.
    until("nobody holds anything", || {
        ["credit", "private", "shared", "pinned", "quarantined"].iter().all(|a| broker.account(a) == 0)
    });
    until("the descriptors are closed", || broker.fds() == fds);
    broker.stop();
    assert_eq!(cma_used(), before);
}

#[test]
fn an_area_eaten_by_somebody_else_while_extents_change_hands_costs_no_books_and_comes_back() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let broker = Broker::on_cma("size = \"96M\"");
    assert_eq!(broker.pool("extents"), 32);
    // Takes what there is, and every page that the broker lets go for a moment.
    let mut eater = Peer::start(ROOT, |turns| {
        let heap = Heap::open(CMA_HEAP).expect("heap");
        let mut eaten = heap.alloc_up_to(MIB, usize::MAX);
        turns.yield_to_test();
        loop {
            eaten.extend(heap.alloc_up_to(MIB, usize::MAX));
        }
    });
    eater.wait_for_yield();
    eater.resume();
    for (user, writer) in [(ALICE, 1), (BOB, 2)] {
        broker.client(user, |client| {
            let mut session = open(client);
            let tokens = 8 * PER_BLOCK;
            match session.ensure(tokens) {
                Ok(()) => {
                    write_kv(&mut session, 0..tokens, writer);
                    check_kv(&session, 0..tokens, writer);
                }
                // What had been Alice's is gone: Bob is told so, and nothing breaks.
                Err(Error::Refused { .. }) => assert_eq!(user.uid, BOB.uid),
                Err(e) => panic!("{e}"),
            }
            drop(session);
        });
        broker.is_sound();
    }
    eater.kill();
    until("the pool is whole again", || broker.pool("extents") == 32 && broker.account("free") == 96 << 20);
    broker.is_sound();
    broker.stop();
    assert_eq!(cma_used(), before);
}
