//! What an engine's author sees, with a broker in the same process: no daemon, no socket.

use kvbroker::broker::{Broker, Policy};
use kvbroker::client::{
    Admission, Client, ClientOptions, Embedded, EmbeddedOptions, Error, OpenOptions, PlaneView, Session,
};
use kvbroker::heap::Memfd;
use kvbroker::profile::{Kv, Layout, Profile};
use kvbroker::wire::Fault;
use std::sync::Arc;

const LAYERS: usize = 2;
const ROW: usize = 512;

/// Two layers of 512-byte rows, 16 tokens per block: 32 KiB blocks, 4 of them in an extent of 128 KiB.
fn profile() -> Profile {
    Profile::uniform("small", "f16", LAYERS as u32, ROW as u32, ROW as u32, 16).unwrap()
}

fn broker(extents: u32) -> Embedded {
    let heap = Arc::new(Memfd::new(false));
    Embedded::new(Broker::new(heap, 128 << 10, extents, extents, Policy::default()).unwrap())
}

fn client(broker: &Embedded, uid: u32) -> Client {
    Client::on(broker, uid, ClientOptions { credit_ahead: 0, ..ClientOptions::default() }).unwrap()
}

fn open(client: &Client) -> Session {
    let profile = client.profile(&profile()).unwrap();
    client.open(&profile, OpenOptions { model: "m".into(), ..OpenOptions::default() }).unwrap()
}

/// Bytes that only this token of this layer and plane has.
fn row(token: usize, layer: usize, kv: Kv, who: u8) -> Vec<u8> {
    (0..ROW).map(|i| (i + 3 * token + 7 * layer + 11 * kv as usize) as u8 ^ who).collect()
}

fn fill(session: &mut Session, tokens: std::ops::Range<usize>, who: u8) {
    for token in tokens {
        for layer in 0..LAYERS {
            for kv in [Kv::K, Kv::V] {
                session.write_row(token, layer, kv, &row(token, layer, kv, who)).unwrap();
            }
        }
    }
}

fn holds(session: &Session, tokens: std::ops::Range<usize>, who: u8) {
    let mut got = vec![0; ROW];
    for token in tokens {
        for layer in 0..LAYERS {
            for kv in [Kv::K, Kv::V] {
                session.read_row(token, layer, kv, &mut got).unwrap();
                assert_eq!(got, row(token, layer, kv, who), "token {token} layer {layer} {kv:?}");
            }
        }
    }
}

fn account(broker: &Embedded, name: &str) -> u64 {
    broker.with(|b| {
        b.verify().unwrap();
        let ledger = b.ledger();
        assert_eq!(ledger.values().sum::<u64>(), b.status().pool.bytes);
        ledger[name]
    })
}

#[test]
fn what_is_written_is_read_back_over_blocks_of_several_extents() {
    let broker = broker(4);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    s.ensure(150).unwrap();
    fill(&mut s, 0..150, 1);
    holds(&s, 0..150, 1);
    assert_eq!(s.table().len(), 10);
    assert_eq!((s.stats().blocks_private, s.stats().blocks_shared), (10, 0));
    drop(s);
    assert_eq!(account(&broker, "private"), 0);
    drop(c);
    assert_eq!(account(&broker, "free"), 4 * (128 << 10));
}

#[test]
fn a_refusal_is_typed_changes_nothing_and_the_session_lives_on() {
    let broker = broker(2);
    let c = client(&broker, 1000);
    let (mut a, mut b) = (open(&c), open(&c));
    a.ensure(5 * 16).unwrap();
    fill(&mut a, 0..80, 1);
    b.ensure(2 * 16).unwrap();
    let refused = b.ensure(4 * 16).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::Busy), "{refused}");
    assert!(matches!(refused, Error::Refused { needed: 2, available: 1, .. }), "{refused}");
    assert_eq!(b.tokens(), 32);
    assert_eq!(b.ensure(9 * 16).unwrap_err().fault(), Some(Fault::NeverFits));
    holds(&a, 0..80, 1);
    b.ensure(3 * 16).unwrap();
    a.trim(16).unwrap();
    b.ensure(7 * 16).unwrap();
    holds(&a, 0..16, 1);
    let too_long = OpenOptions { max_tokens: Some(8 * 16 + 1), ..OpenOptions::default() };
    let refused = c.open(&c.profile(&profile()).unwrap(), too_long).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::NeverFits), "{refused}");
}

#[test]
fn a_block_that_is_used_again_reads_as_zero_until_it_is_written() {
    let broker = broker(1);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    s.ensure(64).unwrap();
    fill(&mut s, 0..64, 0xff);
    s.trim(0).unwrap();
    s.ensure(64).unwrap();
    let mut got = vec![1; ROW];
    for token in 0..64 {
        s.read_row(token, 1, Kv::V, &mut got).unwrap();
        assert!(got.iter().all(|&b| b == 0));
    }
}

#[test]
fn a_block_that_another_process_of_the_tenant_has_used_comes_zeroed() {
    let broker = broker(1);
    let (a, b) = (client(&broker, 1000), client(&broker, 1000));
    let mut s = open(&a);
    s.ensure(64).unwrap();
    fill(&mut s, 0..64, 0xff);
    s.trim(16).unwrap();
    let profile = b.profile(&profile()).unwrap();
    // Zeroing by the library is off: what is read is what the broker has handed over.
    let mut t = b.open(&profile, OpenOptions { zero: false, ..OpenOptions::default() }).unwrap();
    t.ensure(48).unwrap();
    let mut got = vec![1; ROW];
    for token in 0..48 {
        t.read_row(token, 0, Kv::K, &mut got).unwrap();
        assert!(got.iter().all(|&b| b == 0));
    }
    holds(&s, 0..16, 0xff);
    assert!(broker.with(|b| b.status().counters.scrubbed) >= 3);
}

#[test]
fn memory_of_one_tenant_comes_to_another_only_as_new_memory() {
    let broker = broker(1);
    let (a, b) = (client(&broker, 1000), client(&broker, 1001));
    let mut s = open(&a);
    s.ensure(64).unwrap();
    fill(&mut s, 0..64, 0xff);
    let (base, page) = (s.base(), s.table()[0]);
    let mut t = open(&b);
    assert_eq!(t.ensure(16).unwrap_err().fault(), Some(Fault::Busy));
    drop(s);
    // The first tenant keeps its mapping on purpose: the extent is idle and is taken from it all the same.
    t.ensure(16).unwrap();
    fill(&mut t, 0..16, 2);
    let old = base.wrapping_add((page as usize) << 12);
    // SAFETY: the arena stays mapped as long as the client lives.
    let seen: Vec<u8> = (0..ROW).map(|i| unsafe { old.add(i).read_volatile() }).collect();
    assert!(
        seen.iter().all(|&b| b == 0),
        "the old mapping shows neither its own nor the other tenant's bytes"
    );
    holds(&t, 0..16, 2);
    assert_eq!(broker.with(|b| b.status().counters.seized), 1);
    // The first one goes on, once there is room.
    let mut again = open(&a);
    assert_eq!(again.ensure(16).unwrap_err().fault(), Some(Fault::Busy));
    drop(t);
    again.ensure(16).unwrap();
    account(&broker, "private");
}

#[test]
fn a_sealed_prefix_is_found_by_another_process_of_the_tenant_and_by_nobody_else() {
    let broker = broker(8);
    let (a, b, foreign) = (client(&broker, 1000), client(&broker, 1000), client(&broker, 1001));
    let ids: Vec<u32> = (0..50).collect();
    let mut s = open(&a);
    assert_eq!(s.attach(&ids).unwrap(), 0);
    s.ensure(50).unwrap();
    fill(&mut s, 0..50, 1);
    assert_eq!(open(&b).attach(&ids).unwrap(), 0, "a look-up between writing and sealing misses");
    assert_eq!(s.seal(&ids).unwrap(), 48);
    assert!(matches!(s.write_row(47, 0, Kv::K, &[0; ROW]), Err(Error::Invalid(_))));
    let mut t = open(&b);
    assert_eq!(t.attach(&ids).unwrap(), 48);
    holds(&t, 0..48, 1);
    assert_eq!((t.stats().blocks_private, t.stats().blocks_shared), (0, 3));
    let mut other = ids.clone();
    other[20] = 99;
    assert_eq!(open(&b).attach(&other).unwrap(), 16);
    assert_eq!(open(&foreign).attach(&ids).unwrap(), 0);
    let profile = b.profile(&profile()).unwrap();
    let another_model = OpenOptions { model: "n".into(), ..OpenOptions::default() };
    assert_eq!(b.open(&profile, another_model).unwrap().attach(&ids).unwrap(), 0);
    // The block is charged once, and stays when its last holder goes.
    drop(s);
    t.ensure(50).unwrap();
    fill(&mut t, 48..50, 2);
    holds(&t, 0..48, 1);
    drop(t);
    assert_eq!(account(&broker, "cached"), 3 * (32 << 10));
    assert_eq!(open(&b).attach(&ids).unwrap(), 48);
    assert_eq!(account(&broker, "shared"), 0);
}

#[test]
fn a_hit_leaves_the_last_token_of_the_prompt_to_be_computed() {
    let broker = broker(8);
    let c = client(&broker, 1000);
    let ids: Vec<u32> = (0..64).collect();
    let mut s = open(&c);
    s.ensure(64).unwrap();
    fill(&mut s, 0..64, 1);
    s.seal(&ids).unwrap();
    for (prompt, hit) in [(0, 0), (1, 0), (15, 0), (16, 15), (17, 16), (31, 16), (32, 31), (33, 32), (64, 63)]
    {
        let mut t = open(&c);
        assert_eq!(t.attach(&ids[..prompt]).unwrap(), hit, "a prompt of {prompt} tokens");
        // The tail is copied before it is written: the donor's token stays what it was.
        t.ensure(prompt).unwrap();
        fill(&mut t, hit..prompt, 9);
        holds(&t, 0..hit, 1);
        holds(&t, hit..prompt, 9);
    }
    holds(&s, 0..64, 1);
}

#[test]
fn a_pinned_prefix_stays_when_everybody_has_gone() {
    let broker = broker(4);
    let ids: Vec<u32> = (0..32).collect();
    {
        let c = client(&broker, 1000);
        let mut s = open(&c);
        s.ensure(40).unwrap();
        fill(&mut s, 0..40, 1);
        assert!(
            matches!(s.pin(32), Err(Error::Refused { fault: Fault::BadRequest, .. })),
            "only what is sealed"
        );
        s.seal(&ids).unwrap();
        assert_eq!(s.pin(32).unwrap(), 2);
        assert_eq!(s.pin(32).unwrap(), 0);
    }
    assert_eq!(account(&broker, "pinned"), 2 * (32 << 10));
    let c = client(&broker, 1000);
    let mut s = open(&c);
    assert_eq!(s.attach(&ids).unwrap(), 31);
    holds(&s, 0..31, 1);
    assert_eq!(s.unpin(32).unwrap(), 2);
    drop(s);
    drop(c);
    // Nobody pins it, nobody holds it: it stays as long as there is room.
    assert_eq!(account(&broker, "cached"), 2 * (32 << 10));
    let other = client(&broker, 1001);
    let mut all = open(&other);
    all.ensure(256).unwrap();
    assert_eq!(account(&broker, "cached"), 0, "somebody needed the room");
}

#[test]
fn an_admitted_session_gets_what_it_was_promised_whatever_others_take() {
    let broker = broker(4);
    let (a, b) = (client(&broker, 1000), client(&broker, 1001));
    let mut s = open(&a);
    assert_eq!(s.admit(300, false).unwrap(), Admission::NeverFits(3));
    assert_eq!(s.admit(128, false).unwrap(), Admission::Admitted);
    let mut greedy = open(&b);
    let refused = greedy.ensure(256).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::Busy));
    greedy.ensure(128).unwrap();
    let hopeless = open(&b).admit(16, false).unwrap();
    assert!(matches!(hopeless, Admission::WhenYoursFree(1) | Admission::Busy(1)), "{hopeless:?}");
    s.ensure(128).unwrap();
    fill(&mut s, 0..128, 1);
    holds(&s, 0..128, 1);
    assert_eq!(s.ensure(129).unwrap_err().fault(), Some(Fault::Busy));
}

#[test]
fn cached_prefixes_go_for_an_admission_only_if_the_caller_says_so() {
    let broker = broker(2);
    let c = client(&broker, 1000);
    let ids: Vec<u32> = (0..128).collect();
    let mut s = open(&c);
    s.ensure(128).unwrap();
    fill(&mut s, 0..128, 1);
    s.seal(&ids).unwrap();
    drop(s);
    let mut t = open(&c);
    assert_eq!(t.admit(48, false).unwrap(), Admission::AfterEviction(3));
    assert_eq!(account(&broker, "cached"), 8 * (32 << 10));
    assert_eq!(t.admit(48, true).unwrap(), Admission::Admitted);
    t.ensure(48).unwrap();
    // The end of the chain has gone, its start is found.
    assert_eq!(open(&c).attach(&ids).unwrap(), 80);
}

#[test]
fn a_fork_shares_everything_until_somebody_writes() {
    let broker = broker(4);
    let c = client(&broker, 1000);
    let mut parent = open(&c);
    parent.ensure(40).unwrap();
    fill(&mut parent, 0..40, 1);
    let mut child = parent.fork().unwrap();
    assert_eq!(account(&broker, "shared"), 3 * (32 << 10));
    child.ensure(48).unwrap();
    fill(&mut child, 40..48, 2);
    parent.ensure(44).unwrap();
    fill(&mut parent, 40..44, 3);
    holds(&parent, 0..40, 1);
    holds(&parent, 40..44, 3);
    holds(&child, 0..40, 1);
    holds(&child, 40..48, 2);
    // Writing where both have tokens: only the writer sees it.
    child.writable(3..5).unwrap();
    fill(&mut child, 3..5, 4);
    holds(&parent, 0..40, 1);
    holds(&child, 3..5, 4);
    drop(parent);
    holds(&child, 5..40, 1);
    drop(child);
    assert_eq!(account(&broker, "private") + account(&broker, "shared"), 0);
}

#[test]
fn trimming_into_a_sealed_block_and_writing_on_leaves_the_prefix_as_it_was() {
    let broker = broker(4);
    let c = client(&broker, 1000);
    let ids: Vec<u32> = (0..48).collect();
    let mut s = open(&c);
    s.ensure(48).unwrap();
    fill(&mut s, 0..48, 1);
    s.seal(&ids).unwrap();
    let mut reader = open(&c);
    assert_eq!(reader.attach(&ids).unwrap(), 47);
    s.trim(20).unwrap();
    s.ensure(40).unwrap();
    fill(&mut s, 20..40, 2);
    holds(&reader, 0..47, 1);
    holds(&s, 0..20, 1);
    holds(&s, 20..40, 2);
    // Other tokens now: sealed again, they are another prefix.
    let mut new_ids = ids[..20].to_vec();
    new_ids.extend(100..120);
    assert_eq!(s.seal(&new_ids).unwrap(), 32);
    let mut t = open(&c);
    assert_eq!(t.attach(&new_ids).unwrap(), 32);
    holds(&t, 20..32, 2);
}

#[test]
fn a_sliding_window_gives_whole_blocks_of_its_head_back() {
    let broker = broker(2);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    for end in (8..400).step_by(8) {
        s.ensure(end).unwrap();
        fill(&mut s, end - 8..end, 1);
        s.trim_head(end.saturating_sub(50)).unwrap();
    }
    assert_eq!(s.first_token(), 336);
    holds(&s, 336..392, 1);
    assert!(matches!(s.read_row(335, 0, Kv::K, &mut [0; ROW]), Err(Error::Invalid(_))));
    assert!(s.stats().blocks_private <= 5);
}

#[test]
fn a_plane_view_shows_the_tokens_in_order_and_zeros_beyond() {
    let profile = Profile::uniform("views", "f16", 2, 512, 256, 16).unwrap();
    let broker = broker(8);
    let c = client(&broker, 1000);
    let handle = c.profile(&profile).unwrap();
    let mut s = c.open(&handle, OpenOptions::default()).unwrap();
    let early = s.plane(1, Kv::K, 256, None).unwrap();
    s.ensure(100).unwrap();
    let late = s.plane(1, Kv::V, 256, None).unwrap();
    for token in 0..100 {
        s.write_row(token, 1, Kv::K, &[token as u8 + 1; 512]).unwrap();
        s.write_row(token, 1, Kv::V, &[token as u8 + 101; 256]).unwrap();
    }
    // SAFETY: tokens below the capacity lie inside the view, which lives as long as the session.
    let at = |view: PlaneView, token: usize| unsafe { view.address.add(token * view.row).read_volatile() };
    for token in 0..100 {
        assert_eq!((at(early, token), at(late, token)), (token as u8 + 1, token as u8 + 101));
    }
    for token in 112..256 {
        assert_eq!((at(early, token), at(late, token)), (0, 0));
    }
    s.trim(20).unwrap();
    assert_eq!((at(early, 19), at(early, 40)), (20, 0));
    // The view grows in place, also over a copy of what was shared.
    let ids: Vec<u32> = (0..16).collect();
    s.seal(&ids).unwrap();
    let mut twin = s.fork().unwrap();
    s.ensure(30).unwrap();
    s.write_row(25, 1, Kv::K, &[200; 512]).unwrap();
    assert_eq!((at(early, 25), at(early, 19), at(early, 3)), (200, 20, 4));
    let mut got = [0; 512];
    twin.ensure(30).unwrap();
    twin.read_row(19, 1, Kv::K, &mut got).unwrap();
    assert_eq!(got, [20; 512]);
    assert_eq!(s.ensure(257).unwrap_err().to_string(), "257 tokens: a plane view of this session holds 256");
}

#[test]
fn plane_views_that_cannot_be_are_refused_with_what_would_do() {
    let broker = broker(8);
    let c = client(&broker, 1000);
    let odd = Profile::uniform("odd", "f16", 2, 384, 384, 16).unwrap();
    let mut s = c.open(&c.profile(&odd).unwrap(), OpenOptions::default()).unwrap();
    let refused = s.plane(0, Kv::K, 64, None).unwrap_err().to_string();
    assert!(refused.contains("32 tokens per block"), "{refused}");
    let token_major = profile().with_layout(Layout::TokenMajor);
    let mut s = c.open(&c.profile(&token_major).unwrap(), OpenOptions::default()).unwrap();
    assert!(s.plane(0, Kv::K, 64, None).unwrap_err().to_string().contains("plane-major"));
    let mut s = open(&c);
    assert!(matches!(s.plane(2, Kv::K, 64, None), Err(Error::Invalid(_))));
    assert!(matches!(s.plane(0, Kv::K, 0, None), Err(Error::Invalid(_))));
    let refused = s.plane(0, Kv::K, 16 * 70_000, None).unwrap_err();
    assert!(matches!(refused, Error::TooManyMappings { needed: 70_001, .. }), "{refused}");
}

#[test]
fn two_models_draw_on_one_pool_and_an_empty_extent_serves_either() {
    let broker = broker(2);
    let c = client(&broker, 1000);
    let other = Profile::uniform("other", "f32", 1, 1024, 1024, 32).unwrap();
    let mut small = open(&c);
    small.ensure(8 * 16).unwrap();
    let mut big = c.open(&c.profile(&other).unwrap(), OpenOptions::default()).unwrap();
    assert_eq!(big.ensure(32).unwrap_err().fault(), Some(Fault::Busy));
    small.trim(0).unwrap();
    c.profile(&profile()).unwrap().release_credit().unwrap();
    big.ensure(64).unwrap();
    small.ensure(64).unwrap();
    account(&broker, "private");
    let never = Profile::uniform("never", "f32", 64, 1024, 1024, 32).unwrap();
    let refused = c.profile(&never).unwrap_err();
    assert!(
        matches!(refused, Error::Refused { fault: Fault::NeverFits, needed: 4_194_304, .. }),
        "{refused}"
    );
}

#[test]
fn threads_of_a_process_share_its_credit_without_sharing_a_block() {
    let broker = broker(16);
    let options = ClientOptions { credit_ahead: 4, ..ClientOptions::default() };
    let c = Client::on(&broker, 1000, options).unwrap();
    std::thread::scope(|scope| {
        for who in 1..=4 {
            let c = &c;
            scope.spawn(move || {
                let mut s = open(c);
                for round in 0..20 {
                    let tokens = 40 + (round * 37 + who as usize * 13) % 150;
                    s.ensure(tokens).unwrap();
                    fill(&mut s, 0..tokens, who);
                    std::thread::yield_now();
                    holds(&s, 0..tokens, who);
                    s.trim(0).unwrap();
                }
            });
        }
    });
    account(&broker, "private");
}

#[test]
fn an_embedded_pool_needs_nothing_installed() {
    let c = Client::embedded(EmbeddedOptions { pool_bytes: 12 << 20, extent_bytes: 3 << 20 }).unwrap();
    let p = c.profile(&Profile::reference()).unwrap();
    let mut s = c.open(&p, OpenOptions::default()).unwrap();
    s.ensure(512).unwrap();
    assert_eq!(s.table().len(), 32);
    assert_eq!(p.room().unwrap().capacity, 32);
    assert!(c.event_fd().is_none() && !c.is_lost());
}

#[test]
fn a_copy_at_the_start_of_a_long_table_takes_nothing_from_the_rest() {
    let broker = broker(340);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    let blocks = 1100;
    s.ensure(blocks * 16).unwrap();
    for block in 0..blocks {
        fill(&mut s, block * 16..block * 16 + 1, 1);
    }
    let mut twin = s.fork().unwrap();
    s.writable(0..1).unwrap();
    fill(&mut s, 0..1, 2);
    // More than one message can report has to be said before this is answered.
    s.ensure((blocks + 20) * 16).unwrap();
    assert_eq!(account(&broker, "shared"), (blocks as u64 - 1) * (32 << 10));
    for block in 1..blocks {
        holds(&s, block * 16..block * 16 + 1, 1);
        holds(&twin, block * 16..block * 16 + 1, 1);
    }
    holds(&s, 0..1, 2);
    holds(&twin, 0..1, 1);
    twin.trim(16).unwrap();
    drop(s);
    drop(twin);
    assert_eq!(account(&broker, "private") + account(&broker, "shared") + account(&broker, "credit"), 0);
}

#[test]
fn what_is_sealed_again_after_a_change_at_its_start_is_found_under_its_first_name_only() {
    let broker = broker(8);
    let c = client(&broker, 1000);
    let ids: Vec<u32> = (0..48).collect();
    let mut s = open(&c);
    s.ensure(48).unwrap();
    fill(&mut s, 0..48, 1);
    s.seal(&ids).unwrap();
    s.writable(0..16).unwrap();
    fill(&mut s, 0..16, 2);
    let mut changed = ids.clone();
    changed[0] = 99;
    // Blocks 1 and 2 were not computed after the new block 0: they stay what they were.
    assert_eq!(s.seal(&changed).unwrap(), 48);
    assert_eq!(open(&c).attach(&changed).unwrap(), 16);
    drop(s);
    assert_eq!(open(&c).attach(&changed).unwrap(), 16);
    assert_eq!(open(&c).attach(&ids).unwrap(), 47);
    assert_eq!(account(&broker, "shared"), 0);
}

#[test]
fn a_length_beyond_the_pool_is_refused_at_once_and_takes_nothing_from_anybody() {
    // 300 blocks: more than one request can ask for.
    let broker = broker(75);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    let refused = s.ensure(301 * 16).unwrap_err();
    assert!(
        matches!(refused, Error::Refused { fault: Fault::NeverFits, needed: 301, available: 300, .. }),
        "{refused}"
    );
    let refused = s.ensure(usize::MAX).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::NeverFits), "{refused}");
    let mut other = open(&c);
    other.ensure(16).unwrap();
    let refused = s.ensure(300 * 16).unwrap_err();
    assert!(
        matches!(refused, Error::Refused { fault: Fault::Busy, needed: 300, available: 299, .. }),
        "{refused}"
    );
    // The other session's block, and nothing ahead of need.
    assert_eq!((s.tokens(), c.profile(&profile()).unwrap().room().unwrap().held), (0, 1));
    s.ensure(299 * 16).unwrap();
    assert_eq!(s.table().len(), 299);
}

#[test]
fn credit_beyond_the_pool_is_refused_at_once_and_takes_nothing_from_anybody() {
    // 300 blocks: more than one request can ask for.
    let broker = broker(75);
    let c = client(&broker, 1000);
    let p = c.profile(&profile()).unwrap();
    for blocks in [301, u32::MAX] {
        let refused = p.reserve(blocks).unwrap_err();
        let whole = matches!(refused, Error::Refused { fault: Fault::NeverFits, needed, available: 300, .. } if needed == u64::from(blocks));
        assert!(whole, "{refused}");
    }
    let mut other = open(&c);
    other.ensure(16).unwrap();
    let refused = p.reserve(300).unwrap_err();
    assert!(matches!(refused, Error::Refused { fault: Fault::Busy, needed: 300, .. }), "{refused}");
    assert_eq!((p.credit(), p.room().unwrap().held), (0, 1));
    p.reserve(299).unwrap();
    assert_eq!(p.credit(), 299);
}

/// A session of priority 1 that fills the pool of 8 extents, and one of the usual priority, of the same client.
fn pressed(c: &Client) -> (Session, Session) {
    let profile = c.profile(&profile()).unwrap();
    let open = |priority| {
        c.open(&profile, OpenOptions { model: "m".into(), priority, ..OpenOptions::default() }).unwrap()
    };
    let (mut low, high) = (open(1), open(0));
    low.ensure(32 * 16).unwrap();
    fill(&mut low, 0..32 * 16, 1);
    // What the broker does not know to be a session's is nobody's to make room with.
    low.admit(0, false).unwrap();
    (low, high)
}

#[test]
fn what_a_session_that_was_ended_wrote_is_refused_and_its_addresses_disturb_nobody() {
    let broker = broker(8);
    let c = client(&broker, 1000);
    let (mut low, mut high) = pressed(&c);
    let ids: Vec<u32> = (0..16 * 16).collect();
    low.seal(&ids).unwrap();
    let addresses: Vec<*mut u8> = (0..32 * 16).map(|token| low.row_mut(token, 0, Kv::K)).collect();
    assert!(!low.is_lost());
    high.ensure(24 * 16).unwrap();
    fill(&mut high, 0..24 * 16, 2);
    assert!(low.is_lost() && low.wanted_back().is_none());

    // Not the other's rows, and not zeros that pass for its own.
    let mut got = vec![0; ROW];
    let lost = [
        low.read_row(0, 0, Kv::K, &mut got).unwrap_err(),
        low.read_row(31 * 16, 0, Kv::K, &mut got).unwrap_err(),
        low.write_row(31 * 16, 0, Kv::K, &row(0, 0, Kv::K, 3)).unwrap_err(),
        low.ensure(1).unwrap_err(),
        low.ensure(40 * 16).unwrap_err(),
        low.writable(0..16).unwrap_err(),
        low.trim(16).unwrap_err(),
    ];
    lost.iter().for_each(|e| assert_eq!(e.fault(), Some(Fault::SessionLost), "{e}"));
    // Who has an address goes on for a while: in memory that is there, and nobody else's. What was sealed is not written.
    for at in &addresses[16 * 16..] {
        // SAFETY: rows of a session that is open, which its own thread may write.
        unsafe { at.write_bytes(0xee, ROW) };
    }
    for at in &addresses {
        // SAFETY: as above.
        unsafe { at.read_volatile() };
    }
    holds(&high, 0..24 * 16, 2);
    drop(low);
    high.ensure(32 * 16).unwrap();
    holds(&high, 0..24 * 16, 2);
    drop(high);
    assert_eq!(account(&broker, "private") + account(&broker, "shared"), 0);
}

#[test]
fn while_one_thread_waits_for_room_another_hears_that_a_session_is_wanted_back() {
    let broker = broker(8);
    let c = client(&broker, 1000);
    let (low, mut high) = pressed(&c);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| high.ensure(24 * 16).unwrap());
        while low.wanted_back().is_none() {
            // The request may not have been sent yet; its answer ends the session, and with it the request to make room.
            assert!(!waits.is_finished() && !low.is_lost(), "it was ended before anybody could hear of it");
            c.poll().unwrap();
            std::thread::yield_now();
        }
        waits.join().unwrap();
    });
    c.poll().unwrap();
    assert!(low.is_lost());
}

#[test]
fn threads_of_one_client_attach_at_the_same_time_and_all_find_the_prefix() {
    let broker = broker(64);
    let publisher = client(&broker, 1000);
    let ids: Vec<u32> = (0..100 * 16).collect();
    let mut first = open(&publisher);
    first.ensure(ids.len()).unwrap();
    fill(&mut first, 0..ids.len(), 1);
    first.seal(&ids).unwrap();
    for round in 0..20 {
        // A new client each time: no extent of the prefix is mapped in it.
        let c = client(&broker, 1000);
        let start = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (c, start, ids) = (&c, &start, &ids);
                scope.spawn(move || {
                    let mut s = open(c);
                    let prompt = &ids[..thread * 12 * 16 + 1];
                    start.wait();
                    assert_eq!(s.attach(prompt).unwrap(), prompt.len() - 1, "round {round}");
                    holds(&s, 0..prompt.len() - 1, 1);
                });
            }
        });
    }
}

#[test]
fn what_was_promised_is_granted_at_once_however_long_it_is() {
    // 400 blocks: more than one request can ask for.
    let broker = broker(100);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    assert_eq!(s.admit(380 * 16, false).unwrap(), Admission::Admitted);
    let p = c.profile(&profile()).unwrap();
    assert_eq!(p.room().unwrap().free, 20);
    s.ensure(380 * 16).unwrap();
    assert_eq!((s.table().len(), p.room().unwrap().free), (380, 20));
}

#[test]
fn cached_blocks_of_another_model_are_no_reason_to_refuse_a_long_prompt() {
    let broker = broker(100);
    let c = client(&broker, 1000);
    let other = c.profile(&Profile::uniform("other", "f16", 1, 512, 512, 32).unwrap()).unwrap();
    let mut cached = c.open(&other, OpenOptions { model: "o".into(), ..OpenOptions::default() }).unwrap();
    let ids: Vec<u32> = (0..32 * 4 * 90).collect();
    cached.ensure(ids.len()).unwrap();
    cached.seal(&ids).unwrap();
    drop(cached);
    other.release_credit().unwrap();
    assert_eq!(c.profile(&profile()).unwrap().room().unwrap().free, 400);
    open(&c).ensure(300 * 16).unwrap();
    c.profile(&profile()).unwrap().reserve(390).unwrap();
}

#[test]
fn a_long_prompt_of_higher_priority_gets_its_room_in_one_call() {
    let broker = broker(100);
    let (c, d) = (client(&broker, 1000), client(&broker, 1000));
    let profile = d.profile(&profile()).unwrap();
    let mut low =
        d.open(&profile, OpenOptions { model: "m".into(), priority: 1, ..OpenOptions::default() }).unwrap();
    low.ensure(200 * 16).unwrap();
    low.admit(0, false).unwrap();
    let mut high = open(&c);
    high.ensure(390 * 16).unwrap();
    d.poll().unwrap();
    assert!(low.is_lost());
}

#[test]
fn a_forked_child_that_drops_what_it_inherits_unmaps_nothing_of_its_own() {
    let broker = broker(4);
    let c = client(&broker, 1000);
    let mut s = open(&c);
    s.ensure(16).unwrap();
    let view = s.plane(0, Kv::K, 64, None).unwrap();
    let (at, bytes) = (view.address, view.bytes);
    // SAFETY: the child maps, looks and leaves; it touches nothing that another thread of the parent may hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the view is not mapped in the child, so the place is free for something of its own.
        let ok = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let own = libc::mmap(at.cast(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            drop(s);
            // Fails with ENOMEM where nothing is mapped.
            own == at.cast() && libc::msync(own, bytes, libc::MS_ASYNC) == 0
        };
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if ok { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: waits for the test's own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    s.write_row(0, 0, Kv::K, &[1; ROW]).unwrap();
}

#[test]
fn an_extent_that_nobody_has_used_for_a_while_goes_back_to_the_pool() {
    let broker = broker(8);
    let c = client(&broker, 1000);
    let all = account(&broker, "free");
    let mut later = std::time::Instant::now();
    let mut half_a_second_later = || {
        later += std::time::Duration::from_millis(500);
        broker.with(|b| b.tick(later));
        // The broker's work is done at the next request.
        c.profile(&profile()).unwrap();
    };
    let use_some = || {
        let mut session = open(&c);
        session.ensure(100).unwrap();
        fill(&mut session, 0..100, 1);
        session
    };
    let used = use_some();
    let held = all - account(&broker, "free");
    drop(used);
    assert_eq!(all - account(&broker, "free"), held, "the next session most often needs what this one had");
    half_a_second_later();
    // Used meanwhile: the wait begins anew.
    drop(use_some());
    half_a_second_later();
    assert_eq!(all - account(&broker, "free"), held);
    half_a_second_later();
    assert_eq!(account(&broker, "free"), all);
    assert_eq!(broker.with(|b| b.next_wake()), None, "nothing is looked at while nothing is idle");
    // And what came of it is usable as ever.
    let mut session = use_some();
    holds(&session, 0..100, 1);
    session.ensure(200).unwrap();
    half_a_second_later();
    half_a_second_later();
    holds(&session, 0..100, 1);
    broker.with(|b| b.verify()).unwrap();
}

/// Takes all mappings that this process may still make, and gives them back when it is dropped.
struct Mappings {
    at: *mut u8,
    bytes: usize,
}

impl Mappings {
    fn all() -> Self {
        const PAGES: usize = 1 << 20;
        let bytes = PAGES * kvbroker::map::page_bytes();
        // SAFETY: a new range that nobody else knows of; nothing in it is touched.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        let taken = Mappings { at: at.cast(), bytes };
        let refused = (0..PAGES).step_by(2).any(|page| {
            let at = taken.at.wrapping_add(page * kvbroker::map::page_bytes());
            // SAFETY: inside the range; each second page is a mapping of its own then.
            unsafe { libc::mprotect(at.cast(), kvbroker::map::page_bytes(), libc::PROT_READ) != 0 }
        });
        assert!(refused, "vm.max_map_count is larger than this test thinks");
        taken
    }
}

impl Drop for Mappings {
    fn drop(&mut self) {
        // SAFETY: the range is this value's.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

#[test]
fn a_seal_and_a_fork_for_which_mappings_run_out_have_changed_nothing() {
    const NAME: &str = "a_seal_and_a_fork_for_which_mappings_run_out_have_changed_nothing";
    const ALONE: &str = "KVBROKER_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        // In a process of its own: what runs beside it needs mappings too.
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        let ran = test.args(["--exact", NAME, "--nocapture"]).env(ALONE, "1").output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        return;
    }
    let broker = broker(4);
    let c = client(&broker, 1000);
    // One plane, which is all of a block: blocks side by side are one mapping of the view, until one is protected.
    let profile = c.profile(&Profile::uniform("latent", "f16", 1, 256, 0, 16).unwrap()).unwrap();
    let open = || c.open(&profile, OpenOptions { model: "m".into(), ..OpenOptions::default() }).unwrap();
    let mut s = open();
    s.plane(0, Kv::K, 1024, None).unwrap();
    s.ensure(320).unwrap();
    let ids: Vec<u32> = (0..320).collect();
    let write = |s: &mut Session, tokens: std::ops::Range<usize>| {
        tokens.for_each(|token| s.write_row(token, 0, Kv::K, &[token as u8; 256]).unwrap());
    };
    write(&mut s, 0..320);
    let all = Mappings::all();
    let (sealed, forked) = (s.seal(&ids[..160]), s.fork());
    drop(all);
    for error in [sealed.unwrap_err(), forked.map(drop).unwrap_err()] {
        assert!(matches!(error, Error::Map { .. }), "{error}");
        assert!(error.to_string().contains("vm.max_map_count"), "{error}");
    }
    assert_eq!(s.stats().blocks_shared, 0);
    write(&mut s, 0..320);
    let sessions = || broker.with(|b| b.sessions().len());
    assert_eq!(sessions(), 1);
    // And both can be done later.
    assert_eq!(s.seal(&ids[..160]).unwrap(), 160);
    assert_eq!(s.seal(&ids).unwrap(), 320);
    let mut twin = s.fork().unwrap();
    assert_eq!((sessions(), twin.stats().blocks_shared), (2, 20));
    twin.ensure(321).unwrap();
    drop(twin);
    assert_eq!(open().attach(&ids).unwrap(), 319);
}
