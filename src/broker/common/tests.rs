//! Common prompts over a broker whose worker is run by hand: restarts, devices, and claims to what is not one's own.

use std::collections::BTreeMap;

use super::*;
use crate::broker::quarantine::LONGEST;
use crate::broker::{Peer, Policy};
use crate::heap::{Heap, Memfd};
use crate::wire::{self, Fault, Reader, Verb, WireBlock, Writer};

const DONOR: u32 = 1000;
const READER: u32 = 1001;
const EXTENT: u64 = 128 << 10;

fn policy() -> Policy {
    let readers = BTreeSet::from([Tenant(READER)]);
    let rule = CommonRule { donor: Tenant(DONOR), label: "engine".into(), readers };
    Policy { common: vec![rule], common_bytes: 2 * EXTENT, ..Policy::default() }
}

struct World {
    broker: Broker,
    number: u64,
}

impl World {
    /// The worker does all that was ordered.
    fn work(&mut self) {
        loop {
            let jobs = self.broker.jobs();
            if jobs.is_empty() {
                return self.broker.verify().unwrap();
            }
            for job in jobs {
                let done = job.run(&Memfd::new(false));
                self.broker.done(done);
            }
        }
    }

    fn ask(
        &mut self,
        client: ClientId,
        verb: Verb,
        session: u64,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<Vec<u8>, Fault> {
        self.number += 1;
        let mut w = Writer::request(verb, self.number, session);
        fill(&mut w);
        self.broker.request(client, &w.finish());
        self.work();
        let mut replies = self.broker.outputs();
        replies.retain(|o| wire::split(&o.message).unwrap().0.sequence.get() > 0);
        let reply = replies.pop_front().expect("a reply");
        let (header, body) = wire::split(&reply.message).unwrap();
        if verb == Verb::Attach {
            let grant: &wire::Grant = Reader::new("grant", body).one().unwrap();
            let came = reply.buffers.len() + reply.descriptors.len();
            assert_eq!(came, grant.extents.get() as usize, "a descriptor for each extent");
        }
        Fault::from_code(header.fault.get()).map_or(Ok(body.to_vec()), Err)
    }

    fn client(&mut self, uid: u32) -> (ClientId, u64) {
        let client = self.broker.connect(Peer { uid, pid: 1 }).unwrap();
        let (magic, version, label) = (wire::MAGIC.into(), wire::VERSION.into(), wire::label("engine"));
        let hello = wire::Hello { magic, version, label };
        let welcome = self.ask(client, Verb::Hello, 0, |w| _ = w.put(&hello)).unwrap();
        let copies = u32::from_le_bytes(welcome[36..40].try_into().unwrap());
        assert_eq!(copies, if uid == READER { 2 } else { 0 }, "nobody else is told of copies");
        let profile = Profile::uniform("small", "f16", 2, 512, 512, 16).unwrap();
        let format = self.ask(client, Verb::Profile, 0, |w| wire::put_profile(w, &profile, 0)).unwrap();
        let format = u32::from_le_bytes(format[..4].try_into().unwrap()).into();
        let open = wire::Open { format, ..wire::Open::default() };
        let opened = self.ask(client, Verb::Open, 0, |w| _ = w.put(&open)).unwrap();
        (client, u64::from_le_bytes(opened[..8].try_into().unwrap()))
    }

    /// Two blocks of the prompt are found, so many of them in copies.
    fn attach(&mut self, (client, session): (ClientId, u64)) -> Vec<BlockId> {
        let attach = wire::Attach { count: 33.into(), more: 0.into() };
        let body =
            self.ask(client, Verb::Attach, session, |w| _ = w.put(&attach).put_tokens(&[7; 33])).unwrap();
        let mut r = Reader::new("grant", &body);
        let grant: &wire::Grant = r.one().unwrap();
        let extents: Vec<wire::ExtentInfo> = r.many(grant.extents.get(), 9).unwrap().to_vec();
        let blocks: &[wire::GrantedBlock] = r.many(grant.blocks.get(), 9).unwrap();
        for e in extents {
            assert_eq!(e.flags.get() == wire::READ_ONLY, ExtentId(e.extent.get()).is_copy());
        }
        blocks.iter().map(|b| b.block.id()).collect()
    }
}

/// A world in which the donor has pinned two blocks.
fn world() -> (World, ClientId) {
    let heap = Arc::new(Memfd::new(false));
    let broker = Broker::new(heap, EXTENT, 4, 4, policy()).unwrap();
    let mut w = World { broker, number: 0 };
    let (donor, session) = w.client(DONOR);
    let grow = wire::Grow { want: 2.into(), least: 2.into(), ..wire::Grow::default() };
    let grant = w.ask(donor, Verb::Grow, session, |w| _ = w.put(&grow)).unwrap();
    let names: Vec<u8> = grant[24..].chunks_exact(24).flat_map(|b| b[..16].to_vec()).collect();
    assert_eq!(names.len(), 2 * size_of::<WireBlock>());
    let report = wire::Report { tokens: 32.into(), first: 0.into(), used: 2.into() };
    let seal = wire::Seal { report, from: 0.into(), count: 32.into() };
    w.ask(donor, Verb::Seal, session, |w| _ = w.put(&seal).put_tokens(&[7; 32]).put(&names[..])).unwrap();
    let report = wire::Report { tokens: 32.into(), first: 2.into(), used: 0.into() };
    let pin = wire::Pin { report, blocks: 2.into(), on: 1.into() };
    w.ask(donor, Verb::Pin, session, |w| _ = w.put(&pin)).unwrap();
    (w, donor)
}

#[test]
fn after_a_restart_who_reads_a_copy_goes_on_and_others_get_a_new_one() {
    let (mut w, _) = world();
    let reader = w.client(READER);
    let first = w.attach(reader);
    assert!(first.len() == 2 && first.iter().all(|b| b.place.extent.is_copy()));
    let record = w.broker.record();
    let there: Vec<ExtentId> = w.broker.buffers.keys().copied().collect();
    let fresh = |id| (id, Memfd::new(false).allocate(EXTENT).unwrap());
    let buffers: BTreeMap<_, _> = there.into_iter().map(fresh).collect();
    w.broker = Broker::from_record(&record, Arc::new(Memfd::new(false)), policy(), buffers).unwrap();
    w.work();
    assert_eq!(
        w.broker.state.sessions
            [&crate::id::SessionId { tenant: w.broker.state.clients[&reader.0].tenant, number: reader.1 }]
            .table,
        first
    );
    let second = w.client(READER);
    let found = w.attach(second);
    assert!(found.len() == 2 && found[0].place.extent.is_copy());
    assert_ne!(found[0].place.extent, first[0].place.extent);
    // The old one goes with its reader.
    w.broker.disconnect(reader.0);
    assert_eq!(w.broker.common_reports().len(), 1);
    w.work();
}

#[test]
fn no_device_gets_a_window_over_what_is_common_and_the_refusal_says_what_to_do() {
    let (mut w, _) = world();
    let reader = w.client(READER);
    assert_eq!(w.attach(reader).len(), 2);
    let report = wire::Report { tokens: 32.into(), first: 2.into(), used: 0.into() };
    let window = wire::Window { report, blocks: 2.into(), ..wire::Window::default() };
    let refused = w.ask(reader.0, Verb::Window, reader.1, |w| _ = w.put(&window));
    assert_eq!(refused, Err(Fault::BadRequest));
    w.work();
}

#[test]
fn a_claim_to_a_block_of_a_copy_is_no_credit_of_anybody() {
    let (mut w, donor) = world();
    let reader = w.client(READER);
    let copy = w.attach(reader)[0];
    // The donor, who has not got it, and the reader, to whom it is not credit.
    for client in [donor, reader.0] {
        let free = wire::Free { count: 1.into(), reserved: 0.into() };
        let refused = w.ask(client, Verb::Free, 0, |w| _ = w.put(&free).put_blocks([copy]));
        assert_eq!(refused, Err(Fault::Stale));
    }
    let extent = copy.place.extent.0.into();
    let back = wire::ReturnExtent { extent, reserved: 0.into() };
    assert_eq!(w.ask(donor, Verb::ReturnExtent, 0, |w| _ = w.put(&back)), Err(Fault::Stale));
    let in_use = w.ask(reader.0, Verb::ReturnExtent, 0, |w| _ = w.put(&back));
    assert_eq!(in_use, Err(Fault::BadRequest), "a table names it");
}

#[test]
fn a_label_is_matched_by_whole_segments() {
    for (label, start, begins) in [
        ("engine/system", "engine/system", true),
        ("engine/system/v2", "engine/system", true),
        ("engine/system-private", "engine/system", false),
        ("engine/system", "engine", true),
        ("engine/system", "engine/", true),
        ("engine2/system", "engine", false),
        ("engine", "engine/", false),
        ("engine/sys", "engine/system", false),
    ] {
        assert_eq!(label_begins(label, start), begins, "{label} {start}");
    }
}

#[test]
fn donors_without_a_limit_have_equal_parts_of_what_the_others_leave_and_together_no_more_than_all() {
    let rule = |uid: u32| CommonRule {
        donor: Tenant(uid),
        label: "engine".into(),
        readers: BTreeSet::from([Tenant(READER)]),
    };
    let rules = [rule(1), rule(2), rule(3), rule(2)];
    let of = |limits: &[(u32, u64)], places: u32| -> Vec<u32> {
        let limits = limits.iter().map(|(uid, bytes)| (Tenant(*uid), *bytes)).collect();
        parts(&rules, &limits, places, EXTENT).into_values().collect()
    };
    assert_eq!(of(&[], 10), [3, 3, 3]);
    assert_eq!(of(&[(2, 4 * EXTENT + 5)], 10), [3, 4, 3]);
    assert_eq!(of(&[(1, EXTENT), (2, 2 * EXTENT), (3, 3 * EXTENT)], 10), [1, 2, 3]);
    assert_eq!(of(&[(1, 64 * EXTENT)], 10), [10, 0, 0], "which the configuration refuses");
}

#[test]
fn the_loop_wakes_up_for_a_copy_that_is_kept_and_for_nothing_once_it_is_gone() {
    let (mut w, donor) = world();
    assert_eq!(w.broker.next_look_for_copies(), None);
    let reader = w.client(READER);
    let copy = w.attach(reader)[0].place.extent;
    // What a reader would do behind the library's back.
    let kept = w.broker.common.files[&copy].reader().unwrap();
    w.broker.disconnect(donor);
    let chain = *w.broker.state.prefixes.pins().next().unwrap().0;
    w.broker.unpin(&chain);
    w.work();
    assert_eq!(w.broker.next_look_for_copies(), None, "its reader has it");
    w.broker.disconnect(reader.0);
    let mut last = std::time::Duration::ZERO;
    for _ in 0..20 {
        let now = w.broker.absent.clock;
        let due = w.broker.next_look_for_copies().expect("to look again");
        assert!(w.broker.next_wake().is_some_and(|wake| wake <= due));
        assert!(due - now >= last, "later each time");
        last = due - now;
        w.broker.tick(due);
        w.work();
    }
    assert_eq!(last, LONGEST);
    assert_eq!(w.broker.common_bytes().0, w.broker.state.common.bytes());
    assert!(w.broker.common_bytes().0 > 0, "it counts");
    // Another process of the reader ends: that is looked at at once.
    let other = w.client(READER);
    drop(kept);
    w.broker.disconnect(other.0);
    w.work();
    assert_eq!((w.broker.next_look_for_copies(), w.broker.common_bytes().0), (None, 0));
}

#[test]
fn donors_take_turns_and_a_chain_whose_sums_are_on_their_way_keeps_nobody_waiting() {
    let (mut w, _) = world();
    let common = &mut w.broker.common;
    common.wanted = [(1, 1), (1, 2), (2, 3)].map(|(uid, n)| (Tenant(uid), [n; 32])).into();
    let next = |broker: &mut Broker, last: Option<u32>, later: &[u8]| {
        broker.common.last = last.map(Tenant);
        let later = later.iter().map(|n| [*n; 32]).collect();
        broker.next_wanted(&later).map(|(_, chain)| chain[0])
    };
    for (last, later, chain) in [
        (None, &[][..], Some(1)),
        (Some(1), &[], Some(3)),
        (Some(2), &[], Some(1)),
        (Some(1), &[3], Some(1)),
        (Some(2), &[1], Some(2)),
        (Some(2), &[1, 2, 3], None),
    ] {
        assert_eq!(next(&mut w.broker, last, later), chain, "{last:?} {later:?}");
    }
}
