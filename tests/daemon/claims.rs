//! Names, sizes and counts that a client has no right to: each is refused with words of its own and changes nothing.
//!
//! Every test ends with the books and the descriptors as they were before.

use kvbroker::profile::{Layer, Profile};
use kvbroker::wire::{self, Fault, Verb, WireBlock, Writer};

use crate::support::{BLOCK, CONFIG, Daemon, PER_BLOCK, Place, Raw, Reply, profile, until};

const A: u32 = 4001;
/// Bytes of a grant's head, of an extent and of a block in it.
const GRANT: (usize, usize, usize) =
    (size_of::<wire::Grant>(), size_of::<wire::ExtentInfo>(), size_of::<wire::GrantedBlock>());

/// What a test must leave as it found it.
#[derive(Debug, PartialEq)]
struct Books {
    ledger: serde_json::Value,
    clients: u64,
    fds: usize,
}

fn books(daemon: &Daemon) -> Books {
    Books { ledger: daemon.ledger(), clients: daemon.clients(), fds: daemon.fds() }
}

/// The blocks of a grant.
fn blocks(reply: &Reply) -> Vec<WireBlock> {
    assert_eq!(reply.fault, None, "{}", words(reply));
    let count = |at: usize| u32::from_le_bytes(reply.body[at..at + 4].try_into().unwrap()) as usize;
    let (extents, granted) = (count(8), count(12));
    let from = GRANT.0 + extents * GRANT.1;
    let each = reply.body[from..from + granted * GRANT.2].chunks_exact(GRANT.2);
    each.map(|bytes| zerocopy::FromBytes::read_from_bytes(&bytes[..size_of::<WireBlock>()]).unwrap())
        .collect()
}

/// What a refusal says.
fn words(reply: &Reply) -> String {
    String::from_utf8_lossy(&reply.body[size_of::<wire::Refusal>().min(reply.body.len())..]).into_owned()
}

/// A client that speaks for itself.
struct Party {
    raw: Raw,
    format: u32,
}

impl Party {
    fn new(daemon: &Daemon) -> Self {
        let mut raw = daemon.raw();
        let format = raw.greet();
        Party { raw, format }
    }

    fn ask(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> Reply {
        self.raw.ask(verb, session, fill).expect("it stays connected")
    }

    fn open(&mut self) -> u64 {
        let open = wire::Open { format: self.format.into(), ..wire::Open::default() };
        let reply = self.ask(Verb::Open, 0, |w| _ = w.put(&open));
        assert_eq!(reply.fault, None, "{}", words(&reply));
        u64::from_le_bytes(reply.body[..8].try_into().unwrap())
    }

    fn credit(&mut self, count: u32) -> Vec<WireBlock> {
        let format = self.format;
        blocks(&self.raw.reserve(format, count).unwrap())
    }

    fn free(&mut self, named: &[WireBlock]) -> Reply {
        self.ask(Verb::Free, 0, |w| {
            w.put(&wire::Free { count: (named.len() as u32).into(), reserved: 0.into() })
                .put_blocks(ids(named));
        })
    }

    /// Reports that the table of `session` begins with `used` and holds `tokens`.
    fn report(&mut self, session: u64, tokens: u64, used: &[WireBlock]) -> Reply {
        let grow = wire::Grow { report: report(tokens, used), ..wire::Grow::default() };
        self.ask(Verb::Grow, session, |w| _ = w.put(&grow).put_blocks(ids(used)))
    }

    fn seal(&mut self, session: u64, tokens: u64, used: &[WireBlock], from: u32, count: u32) -> Reply {
        let seal = wire::Seal { report: report(tokens, used), from: from.into(), count: count.into() };
        let ids_of_tokens: Vec<u32> = (0..count).collect();
        self.ask(Verb::Seal, session, |w| _ = w.put(&seal).put_tokens(&ids_of_tokens).put_blocks(ids(used)))
    }

    fn close(&mut self, session: u64) {
        let reply = self.ask(Verb::Close, session, |w| _ = w.put(&wire::Report::default()));
        assert_eq!(reply.fault, None, "{}", words(&reply));
    }

    /// Closes a session whose table is as the broker knows it: `held` entries with `tokens`.
    fn close_with(&mut self, session: u64, tokens: u64, held: u32) {
        let report = wire::Report { tokens: tokens.into(), first: held.into(), used: 0.into() };
        assert_eq!(self.ask(Verb::Close, session, |w| _ = w.put(&report)).fault, None);
    }

    /// It still is served.
    fn lives(&mut self) {
        let format = self.format;
        assert_eq!(self.raw.reserve(format, 0).unwrap().fault, None);
    }
}

fn ids(named: &[WireBlock]) -> impl Iterator<Item = kvbroker::id::BlockId> + '_ {
    named.iter().map(WireBlock::id)
}

fn report(tokens: u64, used: &[WireBlock]) -> wire::Report {
    wire::Report { tokens: tokens.into(), first: 0.into(), used: (used.len() as u32).into() }
}

fn refused(reply: &Reply, fault: Fault, with: &str) {
    assert_eq!(reply.fault, Some(fault), "{}", words(reply));
    assert!(words(reply).contains(with), "{}", words(reply));
}

#[test]
fn a_block_that_is_not_the_callers_credit_cannot_be_freed_and_the_rest_of_the_message_is_not_done() {
    let mut daemon = Daemon::new();
    let mut mine = Party::new(&daemon);
    let credit = mine.credit(4);
    let before = books(&daemon);
    let (one, two) = (credit[0], credit[1]);
    let of_another_life = WireBlock { generation: (one.generation.get() + 1).into(), ..one };
    let beyond = WireBlock { slot: 99.into(), ..one };
    let nowhere = WireBlock { extent: u32::MAX.into(), ..one };
    refused(&mine.free(&[two, one, one]), Fault::BadRequest, "is named twice");
    refused(&mine.free(&[two, of_another_life]), Fault::Stale, "is gone");
    refused(&mine.free(&[two, beyond]), Fault::BadRequest, "fewer places");
    refused(&mine.free(&[two, nowhere]), Fault::Stale, "does not exist");
    assert_eq!(books(&daemon), before, "a message with one wrong name has freed the right ones");
    assert_eq!(mine.free(&[two]).fault, None);
    refused(&mine.free(&[two]), Fault::BadRequest, "given back before");
    assert_eq!(mine.credit(1).len(), 1);
    // A block of a table is no credit any more.
    let session = mine.open();
    assert_eq!(mine.report(session, 1, &[one]).fault, None);
    refused(&mine.free(&[one]), Fault::BadRequest, "not credit");
    refused(&mine.report(session, 2, &[one, one]), Fault::BadRequest, "not credit");
    let other = mine.open();
    refused(&mine.report(other, 1, &[one]), Fault::BadRequest, "not credit");
    // Nor can a sibling of the same user free it.
    let mut sibling = Party::new(&daemon);
    refused(&sibling.free(&[credit[2]]), Fault::BadRequest, "not credit");
    drop(sibling);
    until("the sibling is gone", || daemon.clients() == 1);
    mine.close(session);
    mine.close(other);
    assert_eq!(mine.credit(1).len(), 1);
    until("all is as it was", || books(&daemon) == before);
    daemon.lives();
}

#[test]
fn what_is_said_of_another_tenants_blocks_is_what_is_said_of_blocks_that_are_not_there() {
    let mut daemon = Daemon::new();
    let mut other = daemon.helper(A);
    other.must("open");
    other.must("ensure 0 200");
    let mut mine = Party::new(&daemon);
    let session = mine.open();
    let before = books(&daemon);
    let nowhere = WireBlock { extent: 99.into(), slot: 0.into(), generation: 1.into() };
    let unknown = words(&mine.free(&[nowhere])).replace("99", "N");
    for extent in 1..=8u32 {
        for (slot, generation) in [(0u32, 1u64), (1, 1), (3, 1), (0, 2), (0, 0), (77, 1)] {
            let claim = WireBlock { extent: extent.into(), slot: slot.into(), generation: generation.into() };
            for reply in [mine.free(&[claim]), mine.report(session, 1, &[claim])] {
                refused(&reply, Fault::Stale, "does not exist");
                assert_eq!(words(&reply).replace(&extent.to_string(), "N"), unknown, "of {claim:?}");
            }
        }
        let back = wire::ReturnExtent { extent: extent.into(), reserved: 0.into() };
        let reply = mine.ask(Verb::ReturnExtent, 0, |w| _ = w.put(&back));
        refused(&reply, Fault::Stale, "is not on this connection");
    }
    assert_eq!(books(&daemon), before);
    other.must("fill 0 0 200 3");
    other.must("holds 0 0 200 3");
    daemon.lives();
}

#[test]
fn a_session_of_another_connection_is_as_unknown_as_one_that_never_was() {
    let daemon = Daemon::new();
    let (mut mine, mut sibling) = (Party::new(&daemon), Party::new(&daemon));
    let session = sibling.open();
    let before = books(&daemon);
    let body = [0u8; 64];
    for verb in [
        Verb::Grow,
        Verb::Trim,
        Verb::Fork,
        Verb::Seal,
        Verb::Pin,
        Verb::Attach,
        Verb::Close,
        Verb::Admit,
        Verb::Skip,
        Verb::Window,
    ] {
        let size = match verb {
            Verb::Fork | Verb::Close | Verb::Admit => 16,
            Verb::Attach | Verb::Skip => 8,
            Verb::Trim => 32,
            Verb::Window => size_of::<wire::Window>(),
            _ => 24,
        };
        let theirs = mine.ask(verb, session, |w| _ = w.put(&body[..size]));
        let nobodys = mine.ask(verb, 1 << 40, |w| _ = w.put(&body[..size]));
        refused(&theirs, Fault::Stale, "on this connection");
        let named = words(&theirs).replace(&session.to_string(), "N");
        assert_eq!(named, words(&nobodys).replace(&(1u64 << 40).to_string(), "N"), "{}", verb.name());
    }
    assert_eq!(books(&daemon), before);
    sibling.close(session);
    sibling.lives();
}

#[test]
fn an_extent_with_a_block_in_use_is_not_given_back_and_one_without_is() {
    let daemon = Daemon::new();
    let mut mine = Party::new(&daemon);
    let session = mine.open();
    let before = books(&daemon);
    let credit = mine.credit(2);
    let extent = credit[0].extent;
    let back = |mine: &mut Party| {
        let back = wire::ReturnExtent { extent, reserved: 0.into() };
        mine.ask(Verb::ReturnExtent, 0, |w| _ = w.put(&back))
    };
    refused(&back(&mut mine), Fault::BadRequest, "has blocks of this connection in use");
    assert_eq!(mine.report(session, 32, &credit).fault, None);
    refused(&back(&mut mine), Fault::BadRequest, "has blocks of this connection in use");
    assert_eq!(daemon.account("private"), 2 * BLOCK);
    mine.close(session);
    let session = mine.open();
    assert_eq!(back(&mut mine).fault, None);
    refused(&back(&mut mine), Fault::Stale, "is not on this connection");
    mine.close(session);
    drop(mine);
    let mine = Party::new(&daemon);
    until("all is as it was", || books(&daemon) == before);
    drop(mine);
}

#[test]
fn no_table_is_trimmed_beyond_its_end_and_nothing_is_sealed_that_was_not_written() {
    let mut daemon = Daemon::new();
    let mut mine = Party::new(&daemon);
    let session = mine.open();
    let before = books(&daemon);
    let credit = mine.credit(4);
    assert_eq!(mine.report(session, 40, &credit[..3]).fault, None);
    let table = books(&daemon);
    let mut trim = |tokens: u64, head: u32| {
        let trim = wire::Trim {
            report: wire::Report { tokens: 40.into(), first: 3.into(), used: 0.into() },
            tokens: tokens.into(),
            head: head.into(),
            release: 1.into(),
        };
        mine.ask(Verb::Trim, session, |w| _ = w.put(&trim))
    };
    refused(&trim(41, 0), Fault::BadRequest, "cannot be trimmed to 41");
    refused(&trim(u64::MAX, 0), Fault::BadRequest, "cannot be trimmed");
    refused(&trim(16, 2), Fault::BadRequest, "the head can be dropped");
    refused(&trim(0, u32::MAX), Fault::BadRequest, "the head can be dropped");
    assert_eq!(books(&daemon), table);
    // 40 tokens are written: the third block is not full, and there is no fourth.
    refused(&mine.seal(session, 40, &[], 0, 48), Fault::BadRequest, "not all there and written");
    refused(&mine.seal(session, 40, &[], 0, 64), Fault::BadRequest, "not all there and written");
    refused(&mine.seal(session, 40, &[], 0, 17), Fault::BadRequest, "whole (16 tokens)");
    refused(&mine.seal(session, 40, &[], 1, 16), Fault::BadRequest, "one after the other from block 0");
    // More tokens than the blocks hold, and a report that begins behind the table.
    refused(&mine.seal(session, 49, &[], 0, 48), Fault::BadRequest, "do not fit a table of 3 blocks");
    let far = wire::Grow {
        report: wire::Report { tokens: 40.into(), first: 4.into(), used: 0.into() },
        ..wire::Grow::default()
    };
    refused(&mine.ask(Verb::Grow, session, |w| _ = w.put(&far)), Fault::BadRequest, "the table holds 0 to 3");
    let pin = wire::Pin { report: report(40, &[]), blocks: 1.into(), on: 1.into() };
    refused(&mine.ask(Verb::Pin, session, |w| _ = w.put(&pin)), Fault::BadRequest, "cannot pin");
    assert_eq!(books(&daemon), table);
    assert_eq!(mine.seal(session, 40, &[], 0, 32).fault, None);
    mine.close(session);
    assert_eq!(mine.free(&credit[3..]).fault, None);
    let evicted = daemon.admin("evict blocks=all");
    assert!(evicted["error"].is_null(), "{evicted}");
    let session = mine.open();
    mine.close(session);
    drop(mine);
    let mine = Party::new(&daemon);
    until("all is as it was", || books(&daemon) == before);
    drop(mine);
    daemon.lives();
}

#[test]
fn the_same_block_in_two_messages_on_their_way_goes_to_the_first_and_the_second_changes_nothing() {
    let mut daemon = Daemon::new();
    let mut mine = Party::new(&daemon);
    let (one, two) = (mine.open(), mine.open());
    let before = books(&daemon);
    let credit = mine.credit(2);
    // Four messages that claim the same block, sent before any answer is read.
    let grow = wire::Grow { report: report(16, &credit[..1]), ..wire::Grow::default() };
    for session in [one, two] {
        mine.raw.send(Verb::Grow, session, |w| _ = w.put(&grow).put_blocks(ids(&credit[..1]))).unwrap();
    }
    for _ in 0..2 {
        let free = wire::Free { count: 1.into(), reserved: 0.into() };
        mine.raw.send(Verb::Free, 0, |w| _ = w.put(&free).put_blocks(ids(&credit[1..]))).unwrap();
    }
    let answers: Vec<_> = (0..4).map(|_| mine.raw.receive().unwrap().fault).collect();
    assert_eq!(answers, [None, Some(Fault::BadRequest), None, Some(Fault::BadRequest)]);
    assert_eq!(daemon.account("private"), BLOCK);
    // Two requests of one number get an answer each.
    for _ in 0..2 {
        mine.raw.number = 70;
        mine.raw
            .send(Verb::Query, 0, |w| {
                w.put(&wire::Query { format: mine.format.into(), reserved: 0.into() });
            })
            .unwrap();
    }
    let answers = [mine.raw.receive().unwrap(), mine.raw.receive().unwrap()];
    assert!(answers.iter().all(|a| a.number == 71 && a.fault.is_none()), "{answers:?}");
    mine.close(one);
    mine.close(two);
    drop(mine);
    let mut mine = Party::new(&daemon);
    mine.open();
    mine.open();
    until("all is as it was", || books(&daemon) == before);
    drop(mine);
    daemon.lives();
}

#[test]
fn a_geometry_that_cannot_be_is_refused_by_what_is_wrong_with_it() {
    let mut daemon = Daemon::new();
    let mut mine = Party::new(&daemon);
    let before = books(&daemon);
    let row = |number: u32, k: u32, v: u32| wire::LayerRow {
        number: number.into(),
        k_row: k.into(),
        v_row: v.into(),
    };
    let many: Vec<_> = (0..1025).map(|n| row(n, 64, 64)).collect();
    let huge: Vec<_> = (0..1024).map(|n| row(n, u32::MAX, u32::MAX)).collect();
    let cases: [(u32, u32, &[wire::LayerRow], Fault, &str); 10] = [
        (16, 0, &[], Fault::BadRequest, "has no layers"),
        (16, 0, &[row(0, 0, 512)], Fault::BadRequest, "K row of 0 bytes"),
        (0, 0, &[row(0, 512, 512)], Fault::BadRequest, "power of two"),
        (24, 0, &[row(0, 512, 512)], Fault::BadRequest, "power of two"),
        (1 << 31, 0, &[row(0, 512, 512)], Fault::BadRequest, "power of two"),
        (1 << 16, 0, &huge, Fault::BadRequest, "more than the 1073741824 a block may have"),
        (16, 2, &[row(0, 512, 512)], Fault::BadRequest, "layout 2"),
        (16, 0, &many, Fault::BadRequest, "1025"),
        (16, 0, &[row(0, 512, 512), row(0, 512, 512)], Fault::BadRequest, "layer 0"),
        // A block of 256 KiB; extents have 128.
        (256, 0, &[row(0, 512, 512)], Fault::NeverFits, "configure extents of at least 262144 bytes"),
    ];
    for (tokens, layout, rows, fault, with) in cases {
        let head = wire::ProfileHead {
            layout: layout.into(),
            tokens_per_block: tokens.into(),
            window: 0.into(),
            layers: (rows.len() as u32).into(),
            name: wire::label("n"),
            element: wire::label("f16"),
        };
        let reply = mine.ask(Verb::Profile, 0, |w| {
            w.put(&head);
            rows.iter().for_each(|row| _ = w.put(row));
        });
        refused(&reply, fault, with);
    }
    // The head says how many rows follow: neither more nor fewer do.
    for (says, brings) in [(2, 1), (1, 2), (u32::MAX, 1), (0, 1)] {
        let head = wire::ProfileHead {
            tokens_per_block: 16.into(),
            layers: says.into(),
            name: wire::label("n"),
            element: wire::label("f16"),
            ..wire::ProfileHead::default()
        };
        let reply = mine.ask(Verb::Profile, 0, |w| {
            w.put(&head);
            (0..brings).for_each(|n| _ = w.put(&row(n, 512, 512)));
        });
        assert_eq!(reply.fault, Some(Fault::BadRequest), "{says} said, {brings} there: {}", words(&reply));
    }
    // A latent cache has no V, and is right.
    let latent = Profile::uniform("latent", "f16", 2, 512, 0, 16).unwrap();
    assert_eq!(latent.groups()[0].layers[0].1, Layer { k_row: 512, v_row: 0 });
    assert_eq!(mine.ask(Verb::Profile, 0, |w| wire::put_profile(w, &latent, 0)).fault, None);
    mine.lives();
    assert_eq!(books(&daemon), before);
    daemon.lives();
}

#[test]
fn sessions_and_profiles_beyond_the_operators_limits_are_refused_and_those_that_are_there_go_on() {
    let config = format!("{CONFIG}\n[limits]\nsessions-per-connection = 3\nprofiles-per-connection = 2\n");
    let daemon = Place::new(&config).start();
    let mut mine = Party::new(&daemon);
    let before = books(&daemon);
    let sessions: Vec<_> = (0..3).map(|_| mine.open()).collect();
    let open = wire::Open { format: mine.format.into(), ..wire::Open::default() };
    let refusal = mine.ask(Verb::Open, 0, |w| _ = w.put(&open));
    refused(&refusal, Fault::OverLimit, "limits.sessions-per-connection");
    let fork = mine.ask(Verb::Fork, sessions[0], |w| _ = w.put(&wire::Report::default()));
    refused(&fork, Fault::OverLimit, "limits.sessions-per-connection");
    let credit = mine.credit(1);
    assert_eq!(mine.report(sessions[2], 16, &credit).fault, None);
    let mut more = |layers| {
        let more = Profile::uniform("more", "f16", layers, 512, 512, PER_BLOCK as u32).unwrap();
        mine.ask(Verb::Profile, 0, |w| wire::put_profile(w, &more, 0))
    };
    assert_eq!(more(1).fault, None);
    refused(&more(3), Fault::OverLimit, "limits.profiles-per-connection");
    // One that is registered already is none more.
    assert_eq!(mine.ask(Verb::Profile, 0, |w| wire::put_profile(w, &profile(), 0)).fault, None);
    for session in sessions {
        mine.close(session);
    }
    assert_eq!(mine.open(), 4);
    drop(mine);
    let mine = Party::new(&daemon);
    until("all is as it was", || books(&daemon) == before);
    drop(mine);
}

#[test]
fn one_who_forks_without_end_is_refused_with_numbers_and_others_fork_on() {
    let config = format!("{CONFIG}\n[limits]\ntable-blocks = 10\n");
    let mut daemon = Place::new(&config).start();
    let mut mine = Party::new(&daemon);
    let mut other = daemon.helper(A);
    other.must("open");
    other.must("ensure 0 64");
    let session = mine.open();
    let credit = mine.credit(4);
    assert_eq!(mine.report(session, 64, &credit).fault, None);
    let fork = |mine: &mut Party| {
        let nothing_new = wire::Report { tokens: 64.into(), first: 4.into(), used: 0.into() };
        mine.ask(Verb::Fork, session, |w| _ = w.put(&nothing_new))
    };
    let twin = fork(&mut mine);
    assert_eq!(twin.fault, None);
    let before = books(&daemon);
    let refusal = fork(&mut mine);
    refused(&refusal, Fault::OverLimit, "uid 0 name 8 blocks, and 4 more would exceed its limit of 10");
    assert_eq!(
        (&refusal.body[..8], &refusal.body[8..16]),
        (&12u64.to_le_bytes()[..], &10u64.to_le_bytes()[..])
    );
    // The limit is the tenant's, whichever connection asks.
    let mut sibling = Party::new(&daemon);
    let ask = wire::Attach { count: 160.into(), more: 0.into() };
    let third = sibling.open();
    let ids: Vec<u32> = (0..160).collect();
    let refusal = sibling.ask(Verb::Attach, third, |w| _ = w.put(&ask).put_tokens(&ids));
    refused(&refusal, Fault::OverLimit, "limits.table-blocks");
    sibling.close(third);
    drop(sibling);
    until("nothing has changed by what was refused", || books(&daemon) == before);
    let limits = daemon.admin("limits");
    let said = |uid: u32, key: &str| {
        let all = limits["tenants"].as_array().unwrap();
        all.iter().find(|t| t["uid"] == uid).unwrap()[key].as_u64().unwrap()
    };
    assert_eq!((said(0, "table_blocks"), said(0, "table_blocks_limit")), (8, 10));
    other.must("fork 0");
    assert_eq!(other.say("fork 0"), "over-limit");
    // What is new is its own, and so is never refused for its name; and with one twin less there is room for another.
    let more = mine.credit(4);
    let all: Vec<WireBlock> = credit.iter().chain(&more).copied().collect();
    let grown = u64::from_le_bytes(twin.body[..8].try_into().unwrap());
    assert_eq!(mine.report(grown, 128, &all).fault, None);
    mine.close_with(grown, 128, 8);
    assert_eq!(fork(&mut mine).fault, None);
    daemon.lives();
}

#[test]
fn nested_prefixes_are_pinned_up_to_a_number_whatever_their_size() {
    const MOST: u32 = 64;
    let config = format!("{CONFIG}\n[limits]\npinned = \"1M\"\ntable-blocks = 4096\n");
    let mut daemon = Place::new(&config).start();
    let mut mine = Party::new(&daemon);
    let small = Profile::uniform("pages", "f16", 1, 512, 512, 4).unwrap();
    let reply = mine.ask(Verb::Profile, 0, |w| wire::put_profile(w, &small, 0));
    mine.format = u32::from_le_bytes(reply.body[..4].try_into().unwrap());
    let session = mine.open();
    let (blocks, tokens) = (MOST + 1, u64::from(4 * (MOST + 1)));
    let credit = mine.credit(blocks);
    assert_eq!(mine.seal(session, tokens, &credit, 0, 4 * blocks).fault, None);
    // Each one block longer than the one before.
    let pin = |mine: &mut Party, blocks: u32, on: u32| {
        let report = wire::Report { tokens: tokens.into(), first: (MOST + 1).into(), used: 0.into() };
        let pin = wire::Pin { report, blocks: blocks.into(), on: on.into() };
        mine.ask(Verb::Pin, session, |w| _ = w.put(&pin))
    };
    for blocks in 1..=MOST {
        assert_eq!(pin(&mut mine, blocks, 1).fault, None, "{blocks}");
    }
    let before = books(&daemon);
    refused(&pin(&mut mine, blocks, 1), Fault::OverLimit, "64 prefixes pinned");
    assert_eq!(books(&daemon), before);
    // One that is pinned already is none more, and one less makes room.
    assert_eq!(pin(&mut mine, MOST, 1).fault, None);
    assert_eq!(pin(&mut mine, 1, 0).fault, None);
    assert_eq!(pin(&mut mine, blocks, 1).fault, None);
    assert_eq!(daemon.admin("status")["pins"].as_array().unwrap().len(), MOST as usize);
    daemon.lives();
}

#[test]
fn a_request_in_the_middle_of_another_of_several_messages_leaves_both_right() {
    let mut daemon = Daemon::new();
    let mut donor = Party::new(&daemon);
    let source = donor.open();
    let credit = donor.credit(3);
    assert_eq!(donor.report(source, 48, &credit).fault, None);
    assert_eq!(donor.seal(source, 48, &[], 0, 48).fault, None);
    let mut mine = Party::new(&daemon);
    let (half, other) = (mine.open(), mine.open());
    let before = books(&daemon);
    let prompt: Vec<u32> = (0..49).collect();
    let attach = |more: u32, tokens: &[u32]| {
        let attach = wire::Attach { count: (tokens.len() as u32).into(), more: more.into() };
        let tokens = tokens.to_vec();
        move |w: &mut Writer| _ = w.put(&attach).put_tokens(&tokens)
    };
    assert_eq!(blocks(&mine.ask(Verb::Attach, half, attach(1, &prompt[..16]))).len(), 1);
    // The rest of the prompt is still to come; meanwhile another session is grown, and this one asked for room.
    let own = mine.credit(1);
    assert_eq!(mine.report(other, 1, &own).fault, None);
    let admit = wire::Admit { tokens: 64.into(), ..wire::Admit::default() };
    assert_eq!(mine.ask(Verb::Admit, half, |w| _ = w.put(&admit)).fault, None);
    assert_eq!(blocks(&mine.ask(Verb::Attach, half, attach(0, &prompt[16..]))).len(), 2);
    // One that is broken off with a part of the prompt attached is a session like any other.
    mine.close(half);
    let half = mine.open();
    assert_eq!(blocks(&mine.ask(Verb::Attach, half, attach(1, &prompt[..32]))).len(), 2);
    mine.close(half);
    mine.close(other);
    drop(mine);
    let mut mine = Party::new(&daemon);
    mine.open();
    mine.open();
    until("all is as it was", || books(&daemon) == before);
    drop((mine, donor));
    daemon.lives();
}

#[test]
fn a_user_that_the_kernel_cannot_name_is_no_tenant() {
    let mut daemon = Daemon::new();
    let before = books(&daemon);
    let socket = daemon.place.socket();
    std::thread::spawn(move || {
        const NOBODY: libc::uid_t = 65534;
        // SAFETY: the call itself, not libc's, changes this one thread, which ends after this.
        let done = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(done, 0, "run as root: sudo -E cargo test --test daemon");
        let mut raw = Raw::connect(&socket).unwrap();
        let refusal = raw.receive().expect("a word before the end");
        refused(&refusal, Fault::BadRequest, "uid 65534");
        assert_eq!(raw.receive(), None);
    })
    .join()
    .unwrap();
    until("nothing is left of it", || books(&daemon) == before);
    daemon.lives();
}
