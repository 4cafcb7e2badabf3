//! What an engine's author sees of models whose layers do not all keep the same tokens.

use std::ops::Range;
use std::sync::Arc;

use kvbroker::attention::{Contiguous, Element, Scratch, Shape, attention, store_row};
use kvbroker::broker::{Broker, Evict, Policy};
use kvbroker::client::{
    Admission, Client, ClientOptions, Embedded, Error, GroupedSession, OpenOptions, Session, SessionStats,
};
use kvbroker::heap::Memfd;
use kvbroker::profile::{Group, Kv, Layer, Layout, Profile};
use kvbroker::wire::Fault;

const EXTENT: u64 = 128 << 10;
const ROW: usize = 512;
const WINDOW: usize = 48;
const PER_BLOCK: usize = 16;
/// Layers 2 and 5 keep all tokens: 32 KiB a block. The other four see the last 48 only: 64 KiB a block.
const FULL: [u32; 2] = [2, 5];
const LOCAL: [u32; 4] = [0, 1, 3, 4];

fn profile() -> Profile {
    let layers = |numbers: &[u32]| {
        numbers.iter().map(|n| (*n, Layer { k_row: ROW as u32, v_row: ROW as u32 })).collect()
    };
    let groups = vec![
        Group { layers: layers(&FULL), window: None },
        Group { layers: layers(&LOCAL), window: Some(WINDOW as u32) },
    ];
    Profile::new("hybrid", "f16", Layout::PlaneMajor, PER_BLOCK as u32, groups).unwrap()
}

fn broker(extents: u32) -> Embedded {
    let heap = Arc::new(Memfd::new(false));
    Embedded::new(Broker::new(heap, EXTENT, extents, extents, Policy::default()).unwrap())
}

fn client(broker: &Embedded, ahead: u32) -> Client {
    Client::on(broker, 1000, ClientOptions { credit_ahead: ahead, ..ClientOptions::default() }).unwrap()
}

fn open(client: &Client) -> GroupedSession {
    let profile = client.grouped_profile(&profile()).unwrap();
    client.open_grouped(&profile, OpenOptions { model: "m".into(), ..OpenOptions::default() }).unwrap()
}

fn row(token: usize, layer: usize, kv: Kv, who: u8) -> Vec<u8> {
    (0..ROW).map(|i| (i + 3 * token + 7 * layer + 11 * kv as usize) as u8 ^ who).collect()
}

fn fill(s: &mut GroupedSession, tokens: Range<usize>, who: u8) {
    for token in tokens {
        for layer in 0..6 {
            for kv in [Kv::K, Kv::V] {
                s.write_row(token, layer, kv, &row(token, layer, kv, who)).unwrap();
            }
        }
    }
}

/// Grows to `tokens` tokens, `step` at a time, writing each.
fn run(s: &mut GroupedSession, tokens: usize, step: usize, who: u8) {
    while s.tokens() < tokens {
        let (from, to) = (s.tokens(), tokens.min(s.tokens() + step));
        s.ensure(to).unwrap();
        fill(s, from..to, who);
    }
}

/// Every row is there that the next token reads.
fn holds(s: &GroupedSession, who: u8) {
    let mut got = vec![0; ROW];
    for layer in 0..6 {
        let window = s.window(layer).unwrap_or(usize::MAX);
        for token in (s.tokens() + 1).saturating_sub(window)..s.tokens() {
            for kv in [Kv::K, Kv::V] {
                s.read_row(token, layer, kv, &mut got).unwrap();
                assert_eq!(got, row(token, layer, kv, who), "token {token} layer {layer} {kv:?}");
            }
        }
    }
}

fn blocks(s: &Session) -> usize {
    let SessionStats { blocks_private, blocks_shared, .. } = s.stats();
    blocks_private + blocks_shared
}

fn account(broker: &Embedded, name: &str) -> u64 {
    broker.with(|b| {
        b.verify().unwrap();
        let ledger = b.ledger();
        assert_eq!(ledger.values().sum::<u64>(), b.status().pool.bytes);
        ledger[name]
    })
}

/// Bytes that clients hold: the broker learns late which credit has become a table's.
fn held(broker: &Embedded) -> u64 {
    account(broker, "private") + account(broker, "shared") + account(broker, "credit")
}

#[test]
fn layers_with_a_window_hold_no_more_than_it_however_long_the_sequence_grows() {
    let broker = broker(40);
    let c = client(&broker, 1);
    let mut s = open(&c);
    for tokens in 1..=800 {
        s.ensure(tokens).unwrap();
        fill(&mut s, tokens - 1..tokens, 1);
        let [full, local] = s.groups() else { panic!("two groups") };
        assert_eq!(blocks(full), tokens.div_ceil(PER_BLOCK));
        assert!(blocks(local) <= WINDOW / PER_BLOCK + 1, "{} blocks at {tokens}", blocks(local));
        // The broker's account: the blocks of both groups, and one of each ahead of need.
        let most = (tokens.div_ceil(PER_BLOCK) as u64 + 1) * (32 << 10) + (4 + 1) * (64 << 10);
        assert!(held(&broker) <= most, "{} bytes of {most} at {tokens} tokens", held(&broker));
    }
    holds(&s, 1);
    let mut gone = [0; ROW];
    assert!(matches!(s.read_row(700, 0, Kv::K, &mut gone), Err(Error::Invalid(_))));
    s.read_row(0, 2, Kv::K, &mut gone).unwrap();
    assert_eq!(s.bytes_held(), 50 * (32 << 10) + 3 * (64 << 10));
    drop(s);
    assert_eq!(account(&broker, "private"), 0);
    drop(c);
    assert_eq!(account(&broker, "free"), 40 * EXTENT);
}

#[test]
fn a_long_step_holds_its_tokens_beside_the_window_and_gives_them_back_after() {
    let broker = broker(40);
    let c = client(&broker, 1);
    let mut s = open(&c);
    run(&mut s, 640, 64, 1);
    // The first query of the step sees 47 tokens before it: 3 blocks, and 4 for the step.
    assert_eq!(blocks(&s.groups()[1]), 7);
    holds(&s, 1);
    run(&mut s, 641, 1, 1);
    assert_eq!(blocks(&s.groups()[1]), 4);
    holds(&s, 1);
}

#[test]
fn a_refusal_grows_no_group() {
    // Of four extents one holds the blocks of full attention, two those of the others.
    let broker = broker(4);
    let c = client(&broker, 0);
    let mut s = open(&c);
    run(&mut s, 60, 60, 1);
    let before = (held(&broker), s.groups()[0].table().len());
    // The fifth block of full attention takes the last one, so there is none for the others.
    let refused = s.ensure(70).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::Busy), "{refused}");
    assert_eq!((held(&broker), s.groups()[0].table().len(), s.tokens()), (before.0, before.1, 60));
    holds(&s, 1);
    run(&mut s, 64, 4, 1);
    holds(&s, 1);
}

#[test]
fn what_is_reserved_is_there_later_whatever_others_take() {
    let broker = broker(8);
    let (c, other) = (client(&broker, 0), client(&broker, 0));
    let mut s = open(&c);
    s.reserve(200, 32).unwrap();
    let mut greedy = open(&other);
    let mut tokens = 0;
    while greedy.ensure(tokens + 16).is_ok() {
        tokens += 16;
    }
    run(&mut s, 200, 32, 1);
    holds(&s, 1);
    assert_eq!(s.ensure(260).unwrap_err().fault(), Some(Fault::Busy));
    // All or nothing: a reservation that one group cannot have leaves no credit behind.
    let credit = account(&broker, "credit");
    assert_eq!(greedy.reserve(tokens + 64, 16).unwrap_err().fault(), Some(Fault::Busy));
    assert_eq!(account(&broker, "credit"), credit);
}

#[test]
fn all_groups_are_admitted_or_none_and_a_promise_holds_whatever_others_take() {
    // 200 tokens: 13 blocks of the full group in 4 extents; window and step take 5 of the other in 3.
    let broker = broker(8);
    let c = client(&broker, 0);
    let (mut a, mut b, mut probe) = (open(&c), open(&c), open(&c));
    assert_eq!(a.admit(200, 16, false).unwrap(), Admission::Admitted);
    // The full group of the second would fit; three blocks of the other would not, so neither is promised anything.
    assert_eq!(b.admit(64, 16, false).unwrap(), Admission::WhenYoursFree(3));
    let full = probe.group_mut(0).unwrap();
    assert_eq!(full.admit(8 * PER_BLOCK, false).unwrap(), Admission::WhenYoursFree(1));
    assert_eq!(full.admit(7 * PER_BLOCK, false).unwrap(), Admission::Admitted);
    drop(probe);
    assert!(matches!(b.admit(8 * 4 * PER_BLOCK, 16, false).unwrap(), Admission::NeverFits(n) if n > 0));
    drop(b);
    // Another tenant takes all that is left: one extent.
    let other =
        Client::on(&broker, 1001, ClientOptions { credit_ahead: 0, ..ClientOptions::default() }).unwrap();
    let profile = other.grouped_profile(&profile()).unwrap();
    let mut greedy = other.open_grouped(&profile, OpenOptions::default()).unwrap();
    greedy.group_mut(0).unwrap().ensure(4 * PER_BLOCK).unwrap();
    let refused = greedy.group_mut(0).unwrap().ensure(5 * PER_BLOCK).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::Busy), "{refused}");
    run(&mut a, 200, 16, 1);
    holds(&a, 1);
    account(&broker, "private");
}

#[test]
fn a_length_that_never_fits_counts_all_groups() {
    let broker = broker(6);
    let c = client(&broker, 0);
    let profile = c.grouped_profile(&profile()).unwrap();
    let open =
        |tokens| c.open_grouped(&profile, OpenOptions { max_tokens: Some(tokens), ..OpenOptions::default() });
    // Two extents hold the window's 4 blocks; four hold 16 of full attention.
    open(256).unwrap();
    let Err(Error::Refused { fault, needed, available, .. }) = open(257) else { panic!("it fits") };
    assert_eq!((fault, needed, available), (Fault::NeverFits, 257, 256));
}

#[test]
fn the_longest_length_that_can_be_said_never_fits_whatever_the_groups() {
    let c = client(&broker(6), 0);
    let one = Profile::uniform("one", "f16", 2, 256, 256, 16).unwrap();
    for profile in [one, profile()] {
        let profile = c.grouped_profile(&profile).unwrap();
        for tokens in [u64::MAX, u64::MAX - 1, 1 << 60] {
            let options = OpenOptions { max_tokens: Some(tokens), ..OpenOptions::default() };
            let refused = c.open_grouped(&profile, options).unwrap_err();
            assert_eq!(refused.fault(), Some(Fault::NeverFits), "{tokens}: {refused}");
        }
    }
}

#[test]
fn a_prefix_is_found_where_every_group_has_what_is_read_after_it() {
    let broker = broker(40);
    let c = client(&broker, 0);
    let ids: Vec<u32> = (0..400).collect();
    let mut s = open(&c);
    run(&mut s, 160, 32, 1);
    assert_eq!(s.seal(&ids[..160]).unwrap(), 160);
    let mut t = open(&client(&broker, 0));
    assert_eq!(t.attach(&ids).unwrap(), 160);
    holds(&t, 1);
    // Of the layers with a window only what the next token sees is shared: 47 tokens.
    assert_eq!((blocks(&t.groups()[0]), blocks(&t.groups()[1])), (10, 3));
    run(&mut t, 300, 20, 1);
    holds(&t, 1);
    drop(t);

    // The donor goes on: what its window has passed is cached, and so are the shorter prefixes.
    run(&mut s, 170, 10, 1);
    let mut t = open(&c);
    assert_eq!(t.attach(&ids).unwrap(), 160);
    drop(t);
    assert_eq!(open(&c).attach(&ids[..130]).unwrap(), 128);
    run(&mut s, 240, 10, 1);
    assert_eq!(open(&c).attach(&ids).unwrap(), 160);
    // The next seal names what has gone as well, since names are chained.
    assert_eq!(s.seal(&ids[..240]).unwrap(), 240);
    let mut t = open(&c);
    assert_eq!(t.attach(&ids).unwrap(), 240);
    holds(&t, 1);
    let mut other = ids.clone();
    other[20] = 9999;
    assert_eq!(open(&c).attach(&other).unwrap(), 0, "other tokens far before the window are another prefix");
    assert_eq!(open(&c).attach(&ids[..240]).unwrap(), 239, "the last token is always computed");
}

#[test]
fn a_sequence_that_was_never_sealed_while_its_head_was_there_can_still_be_shared() {
    let broker = broker(40);
    let c = client(&broker, 0);
    let ids: Vec<u32> = (0..400).collect();
    let mut s = open(&c);
    run(&mut s, 200, 8, 1);
    assert!(s.groups()[1].first_token() > 100);
    assert_eq!(s.seal(&ids[..200]).unwrap(), 192);
    let mut t = open(&c);
    assert_eq!(t.attach(&ids).unwrap(), 192);
    holds(&t, 1);
    run(&mut t, 230, 8, 1);
    drop(s);
    holds(&t, 1);
    // A prefix whose window has gone before it was sealed is none.
    let mut late = open(&c);
    run(&mut late, 300, 8, 1);
    assert_eq!(late.seal(&(500..700).collect::<Vec<u32>>()).unwrap(), 0);
    assert_eq!(open(&c).attach(&(500..900).collect::<Vec<u32>>()).unwrap(), 0);
}

#[test]
fn a_pinned_prefix_keeps_what_is_read_after_it_and_no_more() {
    let broker = broker(40);
    let ids: Vec<u32> = (0..400).collect();
    {
        let c = client(&broker, 0);
        let mut s = open(&c);
        run(&mut s, 160, 160, 1);
        assert!(matches!(s.pin(160), Err(Error::Refused { fault: Fault::BadRequest, .. })));
        assert_eq!(account(&broker, "pinned"), 0, "one group alone pins nothing");
        s.seal(&ids[..160]).unwrap();
        assert_eq!(s.pin(160).unwrap(), 10 + 3);
    }
    assert_eq!(account(&broker, "pinned"), 10 * (32 << 10) + 3 * (64 << 10));
    let c = client(&broker, 0);
    let mut s = open(&c);
    assert_eq!(s.attach(&ids).unwrap(), 160);
    holds(&s, 1);
    // Whoever attaches has another head than whoever pinned: the same blocks are let go.
    assert_eq!(s.unpin(160).unwrap(), 10 + 3);
    drop(s);
    drop(c);
    // Nobody holds it any more: all that was sealed is cached.
    assert_eq!(
        (account(&broker, "pinned"), account(&broker, "cached")),
        (0, 10 * (32 << 10) + 10 * (64 << 10))
    );
}

#[test]
fn while_a_prompt_is_in_use_the_start_of_layers_with_a_window_can_go_and_the_prompt_is_found_as_before() {
    let broker = broker(40);
    let c = client(&broker, 0);
    let ids: Vec<u32> = (0..400).collect();
    let mut s = open(&c);
    run(&mut s, 160, 160, 1);
    s.seal(&ids[..160]).unwrap();
    drop(s);
    let mut reader = open(&c);
    assert_eq!(reader.attach(&ids).unwrap(), 160);
    // What the reader holds needs none of the blocks before its window.
    let gone = broker.with(|b| b.evict(&Evict::Blocks { most: u64::MAX, tenant: None }));
    assert_eq!((gone.blocks, account(&broker, "cached")), (7, 0));
    holds(&reader, 1);
    let mut next = open(&c);
    assert_eq!(next.attach(&ids).unwrap(), 160);
    holds(&next, 1);
    // A shorter prompt with the same beginning would have needed them.
    drop((reader, next));
    assert_eq!(open(&c).attach(&ids[..65]).unwrap(), 0);
}

#[test]
fn where_one_group_misses_the_longest_length_a_shorter_one_is_found() {
    // Nothing that can go is kept.
    let policy = Policy { cache_bytes: Some(0), ..Policy::default() };
    let broker = Embedded::new(Broker::new(Arc::new(Memfd::new(false)), EXTENT, 40, 40, policy).unwrap());
    let c = client(&broker, 0);
    let ids: Vec<u32> = (0..400).collect();
    let mut s = open(&c);
    run(&mut s, 96, 16, 1);
    s.seal(&ids[..96]).unwrap();
    s.pin(96).unwrap();
    run(&mut s, 160, 16, 1);
    assert_eq!(s.seal(&ids[..160]).unwrap(), 160);
    run(&mut s, 400, 16, 1);
    // Full attention has 160 tokens; layers with a window have only what is read after the 96 that are pinned.
    let mut t = open(&c);
    assert_eq!(t.attach(&ids[..200]).unwrap(), 96);
    assert_eq!((blocks(&t.groups()[0]), blocks(&t.groups()[1])), (6, 3));
    holds(&t, 1);
    run(&mut t, 200, 16, 1);
    holds(&t, 1);
}

#[test]
fn a_fork_and_a_trim_go_over_all_groups() {
    let broker = broker(40);
    let c = client(&broker, 0);
    let mut s = open(&c);
    run(&mut s, 200, 10, 1);
    let mut twin = s.fork().unwrap();
    run(&mut twin, 220, 5, 1);
    s.ensure(203).unwrap();
    fill(&mut s, 200..203, 2);
    holds(&twin, 1);
    // The window of the tokens before the newest ones has been passed: they cannot be taken back by many.
    let refused = twin.trim(150).unwrap_err().to_string();
    assert!(refused.contains("a window of 48"), "{refused}");
    assert_eq!(twin.tokens(), 220);
    holds(&twin, 1);
    // With as much kept as a draft is long, they can.
    twin.set_rewind(20);
    run(&mut twin, 300, 5, 1);
    twin.trim(280).unwrap();
    holds(&twin, 1);
    twin.trim(0).unwrap();
    run(&mut twin, 100, 10, 3);
    holds(&twin, 3);
    drop((s, twin));
    assert_eq!(account(&broker, "private") + account(&broker, "shared"), 0);
}

#[test]
fn a_head_that_the_engine_drops_is_gone_in_all_groups_and_the_rest_can_still_be_trimmed() {
    let broker = broker(40);
    let c = client(&broker, 0);
    let mut s = open(&c);
    run(&mut s, 200, 10, 1);
    assert_eq!(s.trim_head(100).unwrap(), 128, "the block in which the window begins");
    assert_eq!(s.groups()[0].first_token(), 96);
    s.trim(195).unwrap();
    assert!(s.trim(90).is_err());
    run(&mut s, 260, 10, 1);
    assert_eq!((s.groups()[0].first_token(), s.tokens()), (96, 260));
    let mut got = [0; ROW];
    s.read_row(96, 5, Kv::K, &mut got).unwrap();
    assert_eq!(got[..], row(96, 5, Kv::K, 1));
    assert!(s.read_row(95, 5, Kv::K, &mut got).is_err());
}

#[test]
fn attention_over_a_table_without_its_head_equals_attention_over_all_rows() {
    let (heads, dim) = (2, 128);
    let shape = |window| Shape { window, ..Shape::new(2 * heads, heads, dim) };
    let broker = broker(40);
    let c = client(&broker, 1);
    let mut s = open(&c);
    let value = |token: usize, i: usize| ((token * 37 + i * 11) % 101) as f32 / 50.0 - 1.0;
    let (tokens, values) = (300, heads * dim);
    let mut all = vec![0u8; tokens * ROW];
    for token in 0..tokens {
        s.ensure(token + 1).unwrap();
        let row: Vec<f32> = (0..values).map(|i| value(token, i)).collect();
        // SAFETY: the row has 256 values of 2 bytes, which is what the places hold.
        unsafe {
            store_row(Element::F16, all[token * ROW..].as_mut_ptr(), &row);
            for layer in 0..6 {
                store_row(Element::F16, s.row_mut(token, layer, Kv::K), &row);
                store_row(Element::F16, s.row_mut(token, layer, Kv::V), &row);
            }
        }
    }
    // Blocks that were dropped are somebody else's by now, full of numbers that would spoil every sum.
    let mut other = open(&c);
    other.ensure(64).unwrap();
    for token in 0..64 {
        for (layer, kv) in (0..6).flat_map(|l| [(l, Kv::K), (l, Kv::V)]) {
            other.write_row(token, layer, kv, &[0xff; ROW]).unwrap();
        }
    }
    let q: Vec<f32> = (0..2 * values).map(|i| value(7, i)).collect();
    let twin = Contiguous { k: all.as_ptr(), v: all.as_ptr(), k_stride: ROW, v_stride: ROW, run: 256 };
    for layer in 0..6 {
        let shape = shape(s.window(layer));
        let (mut paged, mut contiguous) = (vec![0.0; 2 * values], vec![0.0; 2 * values]);
        // SAFETY: all rows that the query sees are there in both.
        unsafe {
            let mut scratch = Scratch::new();
            attention(&shape, Element::F16, &s.paged(layer), tokens, &q, &mut paged, &mut scratch);
            attention(&shape, Element::F16, &twin, tokens, &q, &mut contiguous, &mut scratch);
        }
        assert!(paged.iter().all(|v| v.is_finite()), "layer {layer}");
        assert_eq!(paged, contiguous, "layer {layer}");
    }
}

#[test]
fn layers_are_called_by_their_number_and_no_number_twice() {
    let broker = broker(4);
    let c = client(&broker, 0);
    let layers = |numbers: &[u32]| numbers.iter().map(|n| (*n, Layer { k_row: 64, v_row: 64 })).collect();
    let group = |numbers: &[u32], window| Group { layers: layers(numbers), window };
    let profile = |groups| Profile::new("odd", "f16", Layout::PlaneMajor, 16, groups);
    for wrong in [vec![group(&[1, 4], None), group(&[4, 7], Some(32))], vec![group(&[7, 4], None)]] {
        assert!(profile(wrong).unwrap_err().to_string().contains("layer 4 is there twice, or behind"));
    }
    let gaps =
        c.grouped_profile(&profile(vec![group(&[1, 9], None), group(&[4], Some(32))]).unwrap()).unwrap();
    assert_eq!(gaps.layers().collect::<Vec<_>>(), [1, 4, 9]);
    assert_eq!([1, 4, 9, 2].map(|layer| gaps.group_of(layer)), [Some(0), Some(1), Some(0), None]);
    let mut s = c.open_grouped(&gaps, OpenOptions::default()).unwrap();
    s.ensure(1).unwrap();
    s.write_row(0, 9, Kv::V, &[7; 64]).unwrap();
    assert!(matches!(s.write_row(0, 2, Kv::V, &[7; 64]), Err(Error::Invalid(_))));
    let mut got = [0; 64];
    s.read_row(0, 9, Kv::V, &mut got).unwrap();
    assert_eq!(got, [7; 64]);
}

#[test]
fn two_models_of_different_blocks_take_turns_on_the_same_extents() {
    // All of the pool for the one, then all of it for the other, again and again; the ledger adds up at every step.
    let broker = broker(4);
    let c = client(&broker, 0);
    let small = Profile::uniform("small", "f16", 2, 512, 512, 16).unwrap();
    for turn in 0..6 {
        let mut hybrid = open(&c);
        run(&mut hybrid, 80, 16, turn);
        holds(&hybrid, turn);
        assert!(held(&broker) >= 5 * (32 << 10) + 4 * (64 << 10), "turn {turn}");
        drop(hybrid);
        let mut one = c.open(&c.profile(&small).unwrap(), OpenOptions::default()).unwrap();
        one.ensure(16 * 16).unwrap();
        one.write_row(255, 1, Kv::V, &row(255, 1, Kv::V, turn)).unwrap();
        assert_eq!(held(&broker), 4 * EXTENT, "turn {turn}");
        drop(one);
        assert_eq!(held(&broker), 0, "turn {turn}");
    }
}
