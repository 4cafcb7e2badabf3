//! Loans as whoever asks for them sees them, over a heap without memory whose worker is run by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Borrower, HoldError, HoldId, HoldProgress, PATIENCE};
use crate::broker::{Broker, LimitChange, Outcome, Peer, Policy};
use crate::heap::{Backend, Buffer, Heap, HeapError, Imaginary};
use crate::id::{BlockId, ClientId};
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::wire::{self, Fault, Verb, Writer};

const EXTENTS: u32 = 8;
const SLOTS: u32 = 2;

/// A heap that can be out of memory, and may have to ask for what clients hold.
#[derive(Debug, Default)]
struct Kernel {
    revokes: bool,
    empty: AtomicBool,
}

impl Heap for Kernel {
    fn backend(&self) -> Backend {
        Backend::Imaginary
    }

    fn name(&self) -> String {
        "kernel".into()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        self.has_room(bytes)?;
        Imaginary.allocate(bytes)
    }

    fn revokes(&self) -> bool {
        self.revokes
    }

    fn has_room(&self, bytes: u64) -> Result<(), HeapError> {
        if self.empty.load(Ordering::Relaxed) {
            let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(HeapError::NoMemory { heap: self.name(), bytes, source, advice: "wait" });
        }
        Ok(())
    }
}

struct World {
    kernel: Arc<Kernel>,
    broker: Broker,
    now: Instant,
}

fn profile() -> Profile {
    let row = page_bytes() as u32 / 2;
    Profile::uniform("p", "f16", 1, row, row, 1).unwrap()
}

fn extent() -> u64 {
    u64::from(SLOTS) * page_bytes() as u64
}

impl World {
    fn new(revokes: bool, elastic: bool) -> Self {
        let kernel = Arc::new(Kernel { revokes, empty: AtomicBool::new(false) });
        // Nothing comes back by itself: here it is asked for.
        let policy = Policy { elastic, floor_extents: 3, rest_ms: 0, ..Policy::default() };
        let mut broker = Broker::new(kernel.clone(), extent(), EXTENTS, 1, policy).unwrap();
        let now = Instant::now();
        broker.tick(now);
        World { kernel, broker, now }
    }

    /// The worker does all that was ordered, and what comes of it.
    fn work(&mut self) {
        loop {
            self.broker.tick(self.now);
            let jobs = self.broker.jobs();
            if jobs.is_empty() {
                return self.broker.verify().unwrap();
            }
            for job in jobs {
                let done = job.run(&*self.kernel);
                self.broker.done(done);
                self.broker.verify().unwrap();
            }
        }
    }

    fn after(&mut self, time: Duration) {
        self.now += time;
        self.work();
    }

    fn hold(&mut self, extents: u32) -> Result<HoldId, HoldError> {
        let borrower = Borrower { uid: 0, pid: 7, command: "rkllm".into() };
        self.broker.hold(u64::from(extents) * extent(), borrower)
    }

    fn in_force(&self, hold: HoldId) -> bool {
        matches!(self.broker.hold_progress(hold), Some(HoldProgress::InForce(_)))
    }

    fn account(&self, name: &str) -> u64 {
        self.broker.ledger()[name] / extent()
    }

    fn client(&mut self, uid: u32) -> Client {
        let id = self.broker.connect(Peer { uid, pid: 1 }).unwrap();
        let mut client = Client { id, number: 0 };
        client.ask(self, Verb::Hello, |w| {
            let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
            w.put(&wire::Hello { magic, version, label: wire::label("c") });
        });
        client.ask(self, Verb::Profile, |w| wire::put_profile(w, &profile(), 0));
        client
    }
}

struct Client {
    id: ClientId,
    number: u64,
}

impl Client {
    /// What is answered: the body, a fault with its words, or nothing yet.
    fn ask(
        &mut self,
        w: &mut World,
        verb: Verb,
        fill: impl FnOnce(&mut Writer),
    ) -> Option<Result<Vec<u8>, Fault>> {
        self.ask_in(w, verb, 0, fill)
    }

    fn ask_in(
        &mut self,
        w: &mut World,
        verb: Verb,
        session: u64,
        fill: impl FnOnce(&mut Writer),
    ) -> Option<Result<Vec<u8>, Fault>> {
        self.number += 1;
        let mut message = Writer::request(verb, self.number, session);
        fill(&mut message);
        w.broker.request(self.id, &message.finish());
        self.answer(w)
    }

    fn answer(&mut self, w: &mut World) -> Option<Result<Vec<u8>, Fault>> {
        let outputs = w.broker.outputs();
        let reply = outputs.iter().find(|o| {
            let (header, _) = wire::split(&o.message).unwrap();
            o.to == self.id && header.sequence.get() == self.number
        })?;
        let (header, body) = wire::split(&reply.message).unwrap();
        Some(match Fault::from_code(header.fault.get()) {
            Some(fault) => Err(fault),
            None => Ok(body.to_vec()),
        })
    }

    fn reserve(&mut self, w: &mut World, blocks: u32) -> Option<Result<Vec<u8>, Fault>> {
        self.ask(w, Verb::Reserve, |m| _ = m.put(&wire::Reserve { format: 1.into(), want: blocks.into() }))
    }

    /// Gives back blocks of an earlier answer.
    fn free(&mut self, w: &mut World, granted: &[u8]) {
        let ids = granted_blocks(granted);
        let done = self.ask(w, Verb::Free, |m| {
            m.put(&wire::Free { count: (ids.len() as u32).into(), reserved: 0.into() });
            m.put_blocks(ids);
        });
        assert_eq!(done, Some(Ok(Vec::new())));
    }
}

fn granted_blocks(granted: &[u8]) -> Vec<BlockId> {
    let mut r = wire::Reader::new("grant", granted);
    let head: wire::Grant = *r.one().unwrap();
    let _: &[wire::ExtentInfo] = r.many(head.extents.get(), wire::MAX_FDS).unwrap();
    let blocks: &[wire::GrantedBlock] = r.many(head.blocks.get(), wire::MAX_BLOCKS).unwrap();
    blocks.iter().map(|b| b.block.id()).collect()
}

/// A session that has written `blocks` blocks, sealed them and ended: a prefix that nobody holds.
fn leave_prefix(w: &mut World, client: &mut Client, blocks: u32) {
    let open = wire::Open { format: 1.into(), ..wire::Open::default() };
    client.ask(w, Verb::Open, |m| _ = m.put(&open)).unwrap().unwrap();
    let session = *w.broker.state.sessions.last_key_value().unwrap().0;
    let none = wire::Report { tokens: 0.into(), first: 0.into(), used: 0.into() };
    let grow = wire::Grow { report: none, want: blocks.into(), least: blocks.into() };
    let granted = client.ask_in(w, Verb::Grow, session.0, |m| _ = m.put(&grow)).unwrap().unwrap();
    let used = granted_blocks(&granted);
    let report = wire::Report { tokens: u64::from(blocks).into(), first: 0.into(), used: blocks.into() };
    let sealed = client.ask_in(w, Verb::Seal, session.0, |m| {
        m.put(&wire::Seal { report, from: 0.into(), count: blocks.into() });
        m.put_tokens(&(0..blocks).collect::<Vec<_>>());
        m.put_blocks(used);
    });
    sealed.unwrap().unwrap();
    let report = wire::Report { tokens: u64::from(blocks).into(), first: blocks.into(), used: 0.into() };
    client.ask_in(w, Verb::Close, session.0, |m| _ = m.put(&report)).unwrap().unwrap();
}

#[test]
fn prefixes_that_nobody_holds_go_for_a_hold_but_only_as_many_extents_as_it_needs() {
    let mut w = World::new(true, false);
    let mut a = w.client(1001);
    leave_prefix(&mut w, &mut a, 4 * SLOTS);
    assert_eq!((w.account("cached"), w.account("free")), (4, 4));
    let why = w.hold(9).unwrap_err().to_string();
    assert!(why.contains(" 4 are of uid 1001 with nothing but cached prefixes"), "{why}");
    let hold = w.hold(6).unwrap();
    w.work();
    assert!(w.in_force(hold));
    assert_eq!(w.account("lent"), 6);
    assert!(w.account("cached") >= 1, "the oldest part of the prefix is still there");
}

#[test]
fn what_a_tenant_is_guaranteed_is_not_lent() {
    let mut w = World::new(true, true);
    let tenant = crate::id::Tenant(1001);
    let reserve = Some(6 * extent());
    let change = LimitChange { tenant, reserve, limit: None, priority: None, revision: None };
    assert_eq!(w.broker.change_limits(&change).outcome, Some(Outcome::Applied));
    let why = w.hold(3).unwrap_err().to_string();
    assert!(why.contains(" 2 are free,") && why.contains(" 6 are free and kept for what"), "{why}");
    let hold = w.hold(2).unwrap();
    w.work();
    assert!(w.in_force(hold) && !w.broker.has_slack());
    let mut a = w.client(1001);
    assert!(a.reserve(&mut w, 6 * SLOTS).unwrap().is_ok(), "all of its reserve");
    // And what it holds without a block is taken only beyond the reserve.
    assert!(matches!(w.hold(1), Err(HoldError::TooMuch { can: 0, .. })));
}

#[test]
fn under_pressure_cached_prefixes_shrink_first_in_any_pool_and_sessions_lose_nothing() {
    for elastic in [false, true] {
        let mut w = World::new(true, elastic);
        let mut a = w.client(1001);
        leave_prefix(&mut w, &mut a, 4 * SLOTS);
        let mut b = w.client(1002);
        b.reserve(&mut w, 2 * SLOTS).unwrap().unwrap();
        assert!(w.broker.has_slack());
        w.broker.pressed();
        w.work();
        assert_eq!((w.account("cached"), w.account("credit")), (2, 2), "half of what nobody holds");
        for _ in 0..9 {
            w.broker.pressed();
            w.work();
        }
        assert_eq!((w.account("cached"), w.account("credit")), (0, 2));
        assert_eq!(w.account("lent") > 0, elastic);
        assert!(!w.broker.has_slack());
    }
}

#[test]
fn a_hold_is_in_force_when_the_kernel_has_all_of_it_and_what_it_took_comes_back_at_its_end() {
    let mut w = World::new(true, false);
    let hold = w.hold(5).unwrap();
    assert_eq!((w.account("free"), w.account("lent")), (3, 5));
    assert!(!w.in_force(hold), "the buffers are not closed yet");
    w.work();
    assert!(w.in_force(hold));
    assert_eq!(w.broker.buffers.len(), 3, "and the broker has no descriptor of them any more");
    let second = w.hold(3).unwrap();
    w.work();
    assert!(w.in_force(second) && w.account("free") == 0);
    w.broker.end_hold(hold);
    w.work();
    assert_eq!((w.account("free"), w.account("lent")), (5, 3));
    w.broker.end_hold(second);
    w.work();
    assert_eq!((w.account("free"), w.broker.missing_extents()), (8, 0));
    assert_eq!(w.broker.next_wake(), None, "nothing is left to be looked at");
}

#[test]
fn a_size_is_rounded_up_to_whole_extents_and_nothing_is_no_size() {
    let mut w = World::new(true, false);
    let borrower = || Borrower { uid: 0, pid: 7, command: String::new() };
    let hold = w.broker.hold(extent() + 1, borrower()).unwrap();
    w.work();
    let Some(HoldProgress::InForce(report)) = w.broker.hold_progress(hold) else { panic!("no hold") };
    assert_eq!((report.extents, report.bytes), (2, 2 * extent()));
    assert_eq!(w.broker.hold(0, borrower()), Err(HoldError::Nothing));
    assert!(matches!(w.broker.hold(u64::MAX, borrower()), Err(HoldError::TooMuch { can: 6, .. })));
}

#[test]
fn a_hold_that_is_too_large_is_refused_with_who_has_the_memory_in_numbers() {
    let mut w = World::new(true, false);
    let (mut a, mut b) = (w.client(1001), w.client(1002));
    a.reserve(&mut w, 3).unwrap().unwrap();
    let idle = b.reserve(&mut w, 2).unwrap().unwrap();
    b.free(&mut w, &idle);
    let lent = w.hold(1).unwrap();
    w.work();
    let why = w.hold(6).unwrap_err().to_string();
    for part in [
        "(6 extents of ",
        "cannot be lent, 5 extents can",
        "of the pool's 8 extents",
        " 4 are free",
        " 2 are in use by uid 1001",
        " 1 are kept by uid 1002 without a block in use",
        " 1 are lent to holds",
    ] {
        assert!(why.contains(part), "{part:?} is not in: {why}");
    }
    assert!(w.in_force(lent));
    assert_eq!(w.account("lent"), 1, "a refused hold takes nothing");
}

#[test]
fn extents_that_a_tenant_keeps_without_a_block_are_taken_where_the_kernel_can_cut_it_off() {
    let mut w = World::new(true, false);
    let mut a = w.client(1001);
    let some = a.reserve(&mut w, 6 * SLOTS).unwrap().unwrap();
    a.free(&mut w, &some);
    a.reserve(&mut w, 1).unwrap().unwrap();
    let hold = w.hold(7).unwrap();
    w.work();
    assert!(w.in_force(hold));
    assert_eq!((w.account("lent"), w.account("free")), (7, 0));
    assert!(matches!(w.hold(1), Err(HoldError::TooMuch { can: 0, .. })), "a block in use stays");
}

#[test]
fn where_a_client_must_be_asked_the_hold_waits_for_its_answer_or_is_refused_when_its_time_is_up() {
    for answers in [true, false] {
        let mut w = World::new(false, false);
        let mut a = w.client(1001);
        let all = a.reserve(&mut w, EXTENTS * SLOTS).unwrap().unwrap();
        a.free(&mut w, &all);
        let hold = w.hold(2).unwrap();
        w.work();
        assert_eq!(w.broker.hold_progress(hold), Some(HoldProgress::Waiting));
        let asked: Vec<_> = w.broker.state.pool.wanted_back().map(|(id, _)| id).collect();
        assert_eq!(asked.len(), 2, "no more than it needs");
        if answers {
            for extent in asked {
                a.ask(&mut w, Verb::ReturnExtent, |m| {
                    _ = m.put(&wire::ReturnExtent { extent: extent.0.into(), reserved: 0.into() })
                });
            }
            w.work();
            assert!(w.in_force(hold));
        } else {
            assert_eq!(w.broker.next_wake(), Some(w.now + PATIENCE), "somebody looks when the time is up");
            w.after(PATIENCE);
            let Some(HoldProgress::Refused(why)) = w.broker.hold_progress(hold) else {
                panic!("not refused")
            };
            assert!(why.contains("8 are kept by uid 1001") && why.contains("in time"), "{why}");
            assert!(w.broker.holds().is_empty());
        }
        w.broker.end_hold(hold);
        w.work();
        assert_eq!((w.account("lent"), w.broker.missing_extents()), (0, 0));
    }
}

#[test]
fn what_becomes_clean_while_a_hold_waits_is_the_holds_and_nobody_is_told_to_wait_for_it() {
    let mut w = World::new(true, false);
    let mut a = w.client(1001);
    let all = a.reserve(&mut w, EXTENTS * SLOTS).unwrap().unwrap();
    a.free(&mut w, &all);
    let hold = w.hold(8).unwrap();
    let mut b = w.client(1002);
    assert_eq!(b.reserve(&mut w, 1), Some(Err(Fault::Busy)));
    w.work();
    assert!(w.in_force(hold));
    assert_eq!(b.reserve(&mut w, 1), Some(Err(Fault::Busy)), "busy, and not never: the memory comes back");
    w.broker.end_hold(hold);
    assert_eq!(b.reserve(&mut w, EXTENTS * SLOTS), None, "it is on its way: the request waits");
    w.work();
    assert!(b.answer(&mut w).unwrap().is_ok());
}

#[test]
fn where_the_kernel_has_nothing_at_the_end_the_pool_is_smaller_says_so_and_asks_again() {
    let mut w = World::new(true, false);
    let hold = w.hold(4).unwrap();
    w.work();
    w.kernel.empty.store(true, Ordering::Relaxed);
    w.broker.end_hold(hold);
    let mut a = w.client(1001);
    assert_eq!(a.reserve(&mut w, 6 * SLOTS), None, "nobody knows yet");
    w.work();
    assert_eq!(a.answer(&mut w), Some(Err(Fault::NeverFits)), "a pool of four extents");
    assert_eq!((w.account("lent"), w.broker.status().pool.extents_missing), (0, 4));
    assert!(a.reserve(&mut w, 3 * SLOTS).unwrap().is_ok(), "what is there serves");
    w.kernel.empty.store(false, Ordering::Relaxed);
    let again = w.broker.next_wake().expect("it is asked again");
    assert!(again > w.now, "not at once");
    w.after(Duration::from_secs(60));
    assert_eq!(w.broker.missing_extents(), 0);
}

#[test]
fn a_hold_that_ends_before_its_memory_is_closed_loses_nothing() {
    let mut w = World::new(true, false);
    let hold = w.hold(4).unwrap();
    w.broker.end_hold(hold);
    assert_eq!(w.broker.hold_progress(hold), None);
    w.work();
    assert_eq!((w.account("free"), w.broker.missing_extents()), (8, 0));
}

#[test]
fn there_are_sixteen_holds_at_most() {
    let mut w = World::new(true, false);
    let borrower = Borrower { uid: 0, pid: 7, command: String::new() };
    let mut holds = Vec::new();
    for _ in 0..EXTENTS {
        holds.push(w.hold(1).unwrap());
    }
    // Refused ones count until whoever asked has been told.
    for id in 0..8 {
        let id = HoldId(1000 + id);
        let stage = super::Stage::Refused("no".into());
        let extents = std::collections::BTreeMap::new();
        w.broker.lent.holds.insert(id, super::Hold { borrower: borrower.clone(), wanted: 1, extents, stage });
    }
    assert_eq!(w.hold(1), Err(HoldError::TooMany(16)));
}

#[test]
fn under_pressure_an_elastic_pool_gives_free_extents_down_to_its_floor_and_another_pool_none() {
    let mut w = World::new(true, true);
    assert!(w.broker.has_slack());
    assert_eq!((w.broker.pressed(), w.account("lent")), (3, 3), "half of the five above the floor");
    assert_eq!((w.broker.pressed(), w.broker.pressed(), w.broker.pressed()), (1, 1, 0));
    w.work();
    assert_eq!((w.account("lent"), w.account("free"), w.broker.elastic_extents()), (5, 3, 5));
    assert!(!w.broker.has_slack());
    assert_eq!(w.broker.relieved(), 5);
    w.work();
    assert_eq!((w.account("free"), w.broker.missing_extents()), (8, 0));
    let mut rigid = World::new(true, false);
    assert!(!rigid.broker.has_slack());
    assert_eq!((rigid.broker.pressed(), rigid.account("free")), (0, 8));
}

#[test]
fn what_was_given_back_under_pressure_comes_when_it_is_asked_for_and_softly_fails_if_it_is_gone() {
    let mut w = World::new(true, true);
    while w.broker.pressed() > 0 {}
    w.work();
    let mut a = w.client(1001);
    assert_eq!(a.reserve(&mut w, 5 * SLOTS), None, "three extents are there, and two are asked for");
    w.work();
    assert!(a.answer(&mut w).unwrap().is_ok());
    assert_eq!(w.broker.elastic_extents(), 3, "no more than it takes");
    w.kernel.empty.store(true, Ordering::Relaxed);
    let asked = a.reserve(&mut w, 2 * SLOTS);
    w.work();
    assert_eq!(asked.or_else(|| a.answer(&mut w)), Some(Err(Fault::Busy)));
    assert_eq!(
        (w.broker.elastic_extents(), w.broker.missing_extents()),
        (1, 2),
        "what cannot do is not tried"
    );
    w.kernel.empty.store(false, Ordering::Relaxed);
    w.after(Duration::from_secs(60));
    assert!(a.reserve(&mut w, 2 * SLOTS).unwrap().is_ok());
}

#[test]
fn after_a_restart_nobody_has_a_lease_and_what_was_lent_comes_back() {
    let mut w = World::new(true, true);
    w.hold(3).unwrap();
    w.work();
    w.broker.pressed();
    w.work();
    let record = w.broker.record();
    let buffers = w.broker.buffers.keys().map(|id| (*id, Imaginary.allocate(extent()).unwrap())).collect();
    let policy = w.broker.policy.clone();
    w.broker = Broker::from_record(&record, w.kernel.clone(), policy, buffers).unwrap();
    w.work();
    assert_eq!((w.account("lent"), w.account("free"), w.broker.missing_extents()), (0, 8, 0));
    assert!(w.broker.holds().is_empty());
}
