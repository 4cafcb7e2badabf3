//! Who waits, who is tried first and who steps aside: the order by itself, and as clients see it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::broker::{Done, Job, Peer, Policy, TenantPolicy};
use crate::heap::Memfd;
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::wire::{self, Fault, GrantedBlock, Reader, Verb, WireBlock, Writer};

#[test]
fn one_of_mine_is_tried_before_a_second_of_anybody_however_many_came_before_me() {
    let (mut waits, now) = (Waits::default(), Instant::now());
    let (many, me) = (Tenant(4001), Tenant(4002));
    let mut waiting: Vec<(Tenant, ClientId)> = (1..=40).map(|id| (many, ClientId(id))).collect();
    waiting.push((me, ClientId(41)));
    waiting.iter().for_each(|(tenant, client)| waits.begin(*client, *tenant));
    let mut mine = 0;
    for turn in 1..=20 {
        // One extent has come: the first one gets it, and asks for the next at once.
        let first = waits.order(waiting.iter().copied())[0];
        let tenant = if first == ClientId(41) { me } else { many };
        mine += u32::from(tenant == me);
        assert!((mine * 2).abs_diff(turn) <= 1, "of {turn} extents {mine} were mine");
        assert!(!waits.serve(first, tenant, now));
        waits.begin(first, tenant);
    }
}

#[test]
fn who_leaves_and_comes_again_is_not_first_because_of_it() {
    let (mut waits, now) = (Waits::default(), Instant::now());
    let (me, other) = ((Tenant(4002), ClientId(1)), Tenant(4001));
    waits.begin(me.1, me.0);
    for id in 2..=10 {
        let again = (other, ClientId(id));
        waits.begin(again.1, again.0);
        assert_eq!(waits.order([again, me].into_iter()), [me.1, again.1]);
        assert!(!waits.serve(again.1, other, now));
        assert!(!waits.forget(again.1, other, true, now));
    }
    assert!(waits.since.len() == 1 && waits.served.len() == 1, "nothing is kept of who is gone");
}

#[test]
fn of_one_tenant_whoever_waits_longest_is_first_although_it_was_tried_before() {
    let (mut waits, now) = (Waits::default(), Instant::now());
    for id in [3, 1, 2, 3] {
        waits.begin(ClientId(id), Tenant(7));
    }
    let all = || [1, 2, 3].map(|id| (Tenant(7), ClientId(id))).into_iter();
    assert_eq!(waits.order(all()), [3, 1, 2].map(ClientId));
    assert!(!waits.serve(ClientId(3), Tenant(7), now));
    waits.begin(ClientId(3), Tenant(7));
    assert_eq!(waits.order(all()), [1, 2, 3].map(ClientId));
}

const EXTENTS: u32 = 6;

/// A broker of extents of one block each, whose worker is run by hand. Clients free what they get as soon as they have it.
struct World {
    heap: Arc<Memfd>,
    broker: Broker,
    jobs: VecDeque<Job>,
    sequence: u64,
    /// Who was granted how many blocks, in this order.
    granted: Vec<(ClientId, usize)>,
    /// Of these, who got an extent that it had not.
    took: Vec<ClientId>,
    refused: Vec<ClientId>,
}

/// One connection with a geometry of its own: it never finds places in extents of others, not even its tenant's.
#[derive(Debug, Clone, Copy)]
struct Party {
    id: ClientId,
    format: u32,
}

impl World {
    fn new(tenants: &[(u32, TenantPolicy)]) -> Self {
        let tenants = tenants.iter().map(|(uid, policy)| (Tenant(*uid), *policy)).collect();
        let policy = Policy { tenants, rest_ms: 0, ..Policy::default() };
        let heap = Arc::new(Memfd::new(false));
        let bytes = 64 * page_bytes() as u64;
        let broker = Broker::new(heap.clone(), bytes, EXTENTS, EXTENTS, policy).unwrap();
        World {
            heap,
            broker,
            jobs: VecDeque::new(),
            sequence: 0,
            granted: Vec::new(),
            took: Vec::new(),
            refused: Vec::new(),
        }
    }

    fn send(&mut self, of: ClientId, verb: Verb, body: impl FnOnce(&mut Writer)) {
        self.sequence += 1;
        let mut message = Writer::request(verb, self.sequence, 0);
        body(&mut message);
        self.broker.request(of, &message.finish());
    }

    /// A client of `uid` whose blocks have `pages` pages, so few less than an extent that it holds only one.
    fn party(&mut self, uid: u32, pages: u32) -> Party {
        let id = self.broker.connect(Peer { uid, pid: 1 }).unwrap();
        let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
        self.send(id, Verb::Hello, |w| _ = w.put(&wire::Hello { magic, version, label: wire::label("w") }));
        let row = pages * page_bytes() as u32;
        let profile = Profile::uniform(format!("{pages}"), "f16", 1, row / 2, row / 2, 1).unwrap();
        self.send(id, Verb::Profile, |w| wire::put_profile(w, &profile, 0));
        let last = self.broker.outputs().pop_back().unwrap();
        let format: &wire::Format =
            Reader::new("format", wire::split(&last.message).unwrap().1).one().unwrap();
        assert_eq!(format.blocks_per_extent.get(), 1);
        Party { id, format: format.format.get() }
    }

    fn reserve(&mut self, party: Party, want: u32) {
        let body = wire::Reserve { format: party.format.into(), want: want.into() };
        self.send(party.id, Verb::Reserve, |w| _ = w.put(&body));
        self.listen();
    }

    /// What the broker says: blocks are freed at once. (Extents that are taken were emptied: nobody answers that.)
    fn listen(&mut self) {
        loop {
            let outputs = self.broker.outputs();
            self.jobs.extend(self.broker.jobs());
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                let (header, body) = wire::split(&output.message).unwrap();
                let opcode = header.opcode.get();
                if header.fault.get() != 0 {
                    assert_eq!(Fault::from_code(header.fault.get()), Some(Fault::Busy));
                    self.refused.push(output.to);
                } else if opcode == Verb::Reserve as u16 | wire::REPLY {
                    let mut r = Reader::new("grant", body);
                    let grant: &wire::Grant = r.one().unwrap();
                    r.many::<wire::ExtentInfo>(grant.extents.get(), 1024).unwrap();
                    let blocks = r.many::<GrantedBlock>(grant.blocks.get(), 1024).unwrap();
                    self.granted.push((output.to, blocks.len()));
                    self.took.extend((grant.extents.get() > 0).then_some(output.to));
                    let blocks: Vec<WireBlock> = blocks.iter().map(|b| b.block).collect();
                    self.send(output.to, Verb::Free, |w| {
                        let count = (blocks.len() as u32).into();
                        w.put(&wire::Free { count, reserved: 0.into() })
                            .put_blocks(blocks.iter().map(|b| b.id()));
                    });
                }
            }
        }
    }

    /// The worker does its oldest job.
    fn work(&mut self) {
        let job = self.jobs.pop_front().expect("there is something to do");
        self.broker.done(job.run(&*self.heap));
        self.listen();
    }

    /// Each of these that does not wait asks for one block.
    fn all_ask(&mut self, parties: &[Party]) {
        for party in parties {
            if !self.broker.is_waiting(party.id) {
                self.reserve(*party, 1);
            }
        }
    }

    /// Six of uid 1 that ask for one block each, again and again, and one of uid 2 that waits for three and has been overtaken
    /// as often as can be.
    fn crowd(&mut self) -> (Vec<Party>, Party) {
        let many: Vec<Party> = (0..EXTENTS).map(|i| self.party(1, 60 - i)).collect();
        let one = self.party(2, 50);
        self.all_ask(&many);
        self.all_ask(&many);
        self.reserve(one, 3);
        assert!(self.broker.is_waiting(one.id), "three extents are idle, and are renewed for it");
        (many, one)
    }

    fn until_due(&mut self, many: &[Party], one: Party) {
        for _ in 0..200 {
            if !self.broker.waits.due().is_empty() {
                return assert!(self.broker.is_waiting(one.id));
            }
            self.work();
            self.all_ask(many);
        }
        panic!("nobody is ever due");
    }
}

#[test]
fn one_who_needs_three_extents_gets_them_although_others_take_every_one_that_comes() {
    let mut world = World::new(&[]);
    let (many, one) = world.crowd();
    world.granted.clear();
    world.took.clear();
    for _ in 0..200 {
        if !world.broker.is_waiting(one.id) {
            break;
        }
        world.work();
        world.all_ask(&many);
    }
    assert!(world.granted.contains(&(one.id, 3)), "it is served");
    let before = world.took.iter().position(|to| *to == one.id).unwrap();
    assert!(before <= TURNS as usize, "{before} others took an extent first");
    // And the others go on, all of them.
    world.granted.clear();
    for _ in 0..100 {
        world.all_ask(&many);
        if !world.jobs.is_empty() {
            world.work();
        }
    }
    assert!(many.iter().all(|p| world.granted.contains(&(p.id, 1))) && world.refused.is_empty());
    world.broker.verify().unwrap();
}

#[test]
fn whoever_waits_for_one_that_is_due_goes_on_when_that_one_hangs_up() {
    let mut world = World::new(&[]);
    let (many, one) = world.crowd();
    world.until_due(&many, one);
    while world.broker.state.pool.clean_extents() == 0 {
        world.work();
        world.all_ask(&many);
    }
    let waits = |world: &World, p: &Party| world.broker.is_waiting(p.id);
    assert!(waits(&world, &one) && many.iter().any(|p| waits(&world, p)));
    world.granted.clear();
    world.broker.disconnect(one.id);
    world.listen();
    assert!(!world.granted.is_empty(), "an extent lies there, and nobody else is due");
}

#[test]
fn other_tenants_wait_a_quarter_of_a_second_for_one_that_is_due_and_then_seven_times_as_long_they_do_not() {
    let mut world = World::new(&[]);
    let at = Instant::now() + Duration::from_secs(5);
    world.broker.tick(at);
    let (many, one) = world.crowd();
    world.until_due(&many, one);
    many.iter().for_each(|p| world.broker.disconnect(p.id));
    world.listen();
    // One extent is renewed at a time, the last one that was given back: so the other two that are lacking stay on their way.
    let renew = |world: &mut World| {
        while world.broker.state.pool.clean_extents() == 0 {
            let job = world.jobs.pop_back().unwrap();
            world.broker.done(job.run(&*world.heap));
            world.listen();
        }
    };
    // Each time in a format that it has no extent of yet.
    let mut pages = 33..60;
    let mut asks = |world: &mut World| {
        renew(world);
        let other = world.party(3, pages.next().unwrap());
        world.reserve(other, 1);
        assert!(world.broker.is_waiting(one.id));
        other.id
    };
    let tick = |world: &mut World, after: Duration| {
        world.broker.tick(at + after);
        world.listen();
    };
    let first = asks(&mut world);
    assert!(world.broker.is_waiting(first), "an extent lies there, for the one that is due");
    assert_eq!(world.broker.next_wake(), Some(at + HOLD), "the driver is told when to come again");
    tick(&mut world, HOLD - Duration::from_millis(1));
    assert!(world.broker.is_waiting(first));
    tick(&mut world, HOLD);
    assert!(!world.broker.is_waiting(first), "it has waited long enough");
    for _ in 0..12 {
        let next = asks(&mut world);
        assert!(!world.broker.is_waiting(next));
    }
    let rested = HOLD + HOLD * REST;
    tick(&mut world, rested - Duration::from_millis(1));
    let last = asks(&mut world);
    assert!(!world.broker.is_waiting(last));
    tick(&mut world, rested);
    let then = asks(&mut world);
    assert!(world.broker.is_waiting(then), "it is its turn again");
    world.broker.verify().unwrap();
}

#[test]
fn half_of_the_time_nobody_waits_for_another_tenants_however_many_tenants_have_one_that_is_due() {
    let (mut waits, start) = (Waits::default(), Instant::now());
    let lack = |uid| Lack { tenant: Tenant(uid), format: FormatId(1), priority: 100 };
    for uid in 1..=20 {
        waits.begin(ClientId(uid.into()), Tenant(uid));
        waits.lack(ClientId(uid.into()), lack(uid));
    }
    let me = Tenant(77);
    (0..TURNS).for_each(|_| waits.overtake(ClientId(77), me, FormatId(1), true));
    let (mut held, mut of_one) = (0, 0);
    for ms in 0..20_000_u64 {
        let now = start + Duration::from_millis(ms);
        if waits.next_end().is_some_and(|end| end <= now) {
            waits.end_hold(now);
        }
        if let Some((client, lack)) = waits.due_of_others(me, now) {
            waits.begin_hold(client, lack.tenant, now);
            held += 1;
            of_one += u32::from(lack.tenant == Tenant(1));
        }
    }
    assert!((9_000..=10_250).contains(&held), "{held} of 20,000 ms");
    assert!((1..=2_750).contains(&of_one), "{of_one} of 20,000 ms for one tenant's");
    // A tenant's own always wait for it.
    assert_eq!(waits.due_of_its_own(Tenant(3)).map(|(client, _)| client), Some(ClientId(3)));
}

#[test]
fn a_reserve_and_a_higher_priority_wait_for_nobody_who_is_due() {
    let reserve = TenantPolicy { reserve: 1, ..TenantPolicy::default() };
    let high = TenantPolicy { priority: 200, ..TenantPolicy::default() };
    let mut world = World::new(&[(3, reserve), (4, high)]);
    let (many, one) = world.crowd();
    let (reserved, high) = (world.party(3, 45), world.party(4, 44));
    world.until_due(&many, one);
    world.granted.clear();
    world.reserve(reserved, 1);
    assert_eq!(world.granted, [(reserved.id, 1)], "what is kept for it is nobody else's");
    // Beyond its reserve it is one of many.
    world.reserve(reserved, 2);
    assert!(world.broker.is_waiting(reserved.id));
    while world.broker.state.pool.clean_extents() <= world.broker.kept_for_others(Tenant(4)) {
        world.work();
    }
    assert!(world.broker.is_waiting(one.id));
    world.granted.clear();
    world.reserve(high, 1);
    assert_eq!(world.granted[0], (high.id, 1));
}

#[test]
fn of_two_who_are_answered_when_one_that_is_due_has_been_both_get_their_blocks() {
    let mut world = World::new(&[]);
    // Two blocks of uid 3 are in use, so that its others have to wait.
    let [holder, first, second] = [(); 3].map(|()| world.party(3, 40));
    let body = wire::Reserve { format: holder.format.into(), want: 2.into() };
    world.send(holder.id, Verb::Reserve, |w| _ = w.put(&body));
    world.broker.outputs();
    let held = world.broker.state.pool.credit_of(holder.id);
    assert_eq!(held.len(), 2);
    let (many, one) = world.crowd();
    world.until_due(&many, one);
    for waiter in [first, second] {
        world.reserve(waiter, 1);
        assert!(world.broker.is_waiting(waiter.id), "it lets the one that is due go first");
    }
    while world.broker.state.pool.clean_extents() < 2 {
        world.work();
    }
    assert!([one, first, second].iter().all(|p| world.broker.is_waiting(p.id)));
    // Places that need zeros, because another process had them: so the answers wait for the worker once more. With the next
    // extent that comes, the one that is due has its three.
    world.send(holder.id, Verb::Free, |w| {
        w.put(&wire::Free { count: 2.into(), reserved: 0.into() }).put_blocks(held);
    });
    world.granted.clear();
    for _ in 0..200 {
        if !world.jobs.is_empty() {
            world.work();
        }
        world.all_ask(&many);
    }
    for waiter in [one, first, second] {
        assert!(world.granted.iter().any(|(to, _)| *to == waiter.id), "{waiter:?} has no answer");
    }
    world.broker.verify().unwrap();
}

#[test]
fn zeros_for_a_connection_that_has_ended_are_not_written() {
    let scrub = |world: &mut World| {
        let at = world.jobs.iter().position(|job| matches!(job, Job::Scrub { .. })).unwrap();
        let job = world.jobs.remove(at).unwrap();
        match job.run(&*world.heap) {
            Done::Scrubbed { result, .. } => result,
            other => panic!("{other:?}"),
        }
    };
    for ends in [false, true] {
        let mut world = World::new(&[]);
        let [before, after] = [(); 2].map(|()| world.party(1, 40));
        world.reserve(before, 1);
        world.reserve(after, 1);
        assert!(world.broker.is_waiting(after.id), "for zeros");
        if ends {
            world.broker.disconnect(after.id);
            world.listen();
        }
        assert_eq!(scrub(&mut world).is_err(), ends);
        world.broker.verify().unwrap();
    }
}
