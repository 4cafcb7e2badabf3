//! How much is looked at for requests that are made one after the other while nothing changes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::broker::{Broker, Done, Output, Peer, Policy};
use crate::heap::Memfd;
use crate::id::{BlockId, ClientId};
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::wire::{self, Event, Fault, Reader, Verb, Writer};

const EXTENTS: u32 = 6;
/// Pages of an extent, and blocks of one page in it.
const PAGES: u32 = 64;
/// As many as the first five extents hold.
const NAMES: u32 = 5 * PAGES;

fn broker(extents: u32) -> Broker {
    let policy = Policy { rest_ms: 0, ..Policy::default() };
    let bytes = u64::from(PAGES) * page_bytes() as u64;
    Broker::new(Arc::new(Memfd::new(false)), bytes, extents, extents, policy).unwrap()
}

/// What the worker has done of what the broker has ordered.
fn worked(broker: &mut Broker) -> Vec<Done> {
    broker.jobs().into_iter().map(|job| job.run(&Memfd::new(false))).collect()
}

/// What the broker answers, or `None` while the request waits.
fn ask(
    broker: &mut Broker,
    client: ClientId,
    verb: Verb,
    session: u64,
    body: impl FnOnce(&mut Writer),
) -> Option<Result<Vec<u8>, Fault>> {
    let mut message = Writer::request(verb, 1, session);
    body(&mut message);
    broker.request(client, &message.finish());
    let answers = |m: &[u8]| wire::split(m).unwrap().0.sequence.get() == 1;
    let output = broker.outputs().into_iter().find(|o| o.to == client && answers(&o.message))?;
    let (header, body) = wire::split(&output.message).unwrap();
    Some(Fault::from_code(header.fault.get()).map_or_else(|| Ok(body.to_vec()), Err))
}

/// A client of `uid` whose blocks have `pages` pages, with its format.
fn client(broker: &mut Broker, uid: u32, pages: u32) -> (ClientId, wire::Format) {
    let id = broker.connect(Peer { uid, pid: 1 }).unwrap();
    let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
    let hello = wire::Hello { magic, version, label: wire::label("w") };
    ask(broker, id, Verb::Hello, 0, |w| _ = w.put(&hello)).unwrap().unwrap();
    let row = pages * page_bytes() as u32;
    let profile = Profile::uniform(format!("{pages}"), "f16", 1, row / 2, row / 2, 1).unwrap();
    let format = ask(broker, id, Verb::Profile, 0, |w| wire::put_profile(w, &profile, 0)).unwrap().unwrap();
    (id, *Reader::new("format", &format).one().unwrap())
}

fn blocks_of(grant: &[u8]) -> Vec<BlockId> {
    let mut r = Reader::new("grant", grant);
    let grant: wire::Grant = *r.one().unwrap();
    r.many::<wire::ExtentInfo>(grant.extents.get(), 64).unwrap();
    let blocks = r.many::<wire::GrantedBlock>(grant.blocks.get(), 1024).unwrap();
    blocks.iter().map(|b| b.block.id()).collect()
}

/// A session of `priority` with [`NAMES`] blocks of one page. Its client, its number, and what is not in its table yet.
fn session_with_names(broker: &mut Broker, priority: u32) -> (ClientId, u64, Vec<BlockId>) {
    let (id, format) = client(broker, 1, 1);
    assert_eq!(format.blocks_per_extent.get(), PAGES);
    let open = wire::Open { format: format.format, priority: priority.into(), ..wire::Open::default() };
    let opened = ask(broker, id, Verb::Open, 0, |w| _ = w.put(&open)).unwrap().unwrap();
    let session = Reader::new("opened", &opened).one::<wire::Opened>().unwrap().session.get();
    let mut credit = Vec::new();
    let mut first = 0;
    while first + (credit.len() as u32) < NAMES {
        let used = std::mem::take(&mut credit);
        let count = used.len() as u32;
        let report =
            wire::Report { tokens: u64::from(first + count).into(), first: first.into(), used: count.into() };
        let want = (NAMES - first - count).min(100);
        let grow = wire::Grow { report, want: want.into(), least: want.into() };
        let grant = ask(broker, id, Verb::Grow, session, |w| _ = w.put(&grow).put_blocks(used));
        credit = blocks_of(&grant.unwrap().unwrap());
        first += count;
    }
    (id, session, credit)
}

fn report(first: u32, used: &[BlockId]) -> wire::Report {
    let count = used.len() as u32;
    wire::Report { tokens: u64::from(first + count).into(), first: first.into(), used: count.into() }
}

#[test]
fn what_many_requests_wait_for_is_walked_once() {
    let mut broker = broker(EXTENTS);
    let (low, session, credit) = session_with_names(&mut broker, 1);
    let rest = report(NAMES - credit.len() as u32, &credit);
    let grow = wire::Grow { report: rest, want: 0.into(), least: 0.into() };
    ask(&mut broker, low, Verb::Grow, session, |w| _ = w.put(&grow).put_blocks(credit)).unwrap().unwrap();
    let mut waiting = Vec::new();
    for i in 0..30 {
        let (id, format) = client(&mut broker, 1, 33 + i);
        let open = wire::Open { format: format.format, priority: (2 + i).into(), ..wire::Open::default() };
        let opened = ask(&mut broker, id, Verb::Open, 0, |w| _ = w.put(&open)).unwrap().unwrap();
        let session = Reader::new("opened", &opened).one::<wire::Opened>().unwrap().session.get();
        let grow = wire::Grow { report: report(0, &[]), want: 2.into(), least: 2.into() };
        let answer = ask(&mut broker, id, Verb::Grow, session, |w| _ = w.put(&grow));
        assert_eq!(answer, None, "it waits until the session has made room");
        waiting.push(id);
    }
    let looked = |broker: &Broker| broker.walks.borrow().looked;
    // Once to see that it would do, once to choose who is asked, and once since then, whatever their priorities.
    assert_eq!(looked(&broker), 3 * u64::from(NAMES));
    // All who wait are tried again, and nothing has changed.
    for _ in 0..10 {
        broker.retry();
    }
    assert_eq!(looked(&broker), 3 * u64::from(NAMES));
    assert!(waiting.iter().all(|id| broker.is_waiting(*id)));
}

#[test]
fn what_may_be_evicted_is_looked_at_once_for_many_requests_that_are_refused() {
    let mut broker = broker(EXTENTS);
    let (id, session, credit) = session_with_names(&mut broker, 0);
    let rest = report(NAMES - credit.len() as u32, &credit);
    let tokens: Vec<u32> = (0..NAMES).collect();
    let seal = wire::Seal { report: rest, from: 0.into(), count: NAMES.into() };
    ask(&mut broker, id, Verb::Seal, session, |w| _ = w.put(&seal).put_tokens(&tokens).put_blocks(credit))
        .unwrap()
        .unwrap();
    ask(&mut broker, id, Verb::Close, session, |w| _ = w.put(&report(NAMES, &[]))).unwrap().unwrap();
    let (holder, whole) = client(&mut broker, 2, PAGES);
    let reserve = wire::Reserve { format: whole.format, want: 1.into() };
    ask(&mut broker, holder, Verb::Reserve, 0, |w| _ = w.put(&reserve)).unwrap().unwrap();
    let before = broker.walks.borrow().looked;
    for i in 0..60 {
        let (id, format) = client(&mut broker, 3 + i, 33 + i % 30);
        let reserve = wire::Reserve { format: format.format, want: EXTENTS.into() };
        let answer = ask(&mut broker, id, Verb::Reserve, 0, |w| _ = w.put(&reserve));
        assert_eq!(answer, Some(Err(Fault::Busy)), "one extent is in use");
    }
    assert_eq!(broker.walks.borrow().looked - before, u64::from(NAMES));
    broker.verify().unwrap();
}

#[test]
fn what_comes_back_in_one_turn_is_tried_for_with_one_walk() {
    for extents in [1, 4] {
        let mut broker = broker(EXTENTS + 4);
        let (low, session, credit) = session_with_names(&mut broker, 1);
        let rest = report(NAMES - credit.len() as u32, &credit);
        let grow = wire::Grow { report: rest, want: 0.into(), least: 0.into() };
        ask(&mut broker, low, Verb::Grow, session, |w| _ = w.put(&grow).put_blocks(credit)).unwrap().unwrap();
        let (holder, whole) = client(&mut broker, 2, PAGES);
        let reserve = wire::Reserve { format: whole.format, want: extents.into() };
        ask(&mut broker, holder, Verb::Reserve, 0, |w| _ = w.put(&reserve)).unwrap().unwrap();
        // It needs what the session was asked for, beside all that is there or comes back.
        let (waiting, format) = client(&mut broker, 3, 33);
        let open = wire::Open { format: format.format, priority: 2.into(), ..wire::Open::default() };
        let opened = ask(&mut broker, waiting, Verb::Open, 0, |w| _ = w.put(&open)).unwrap().unwrap();
        let session = Reader::new("opened", &opened).one::<wire::Opened>().unwrap().session.get();
        let most = EXTENTS + 4 - extents;
        let grow = wire::Grow { report: report(0, &[]), want: most.into(), least: most.into() };
        let answer = ask(&mut broker, waiting, Verb::Grow, session, |w| _ = w.put(&grow));
        assert_eq!(answer, None, "it waits until the session has made room");
        broker.disconnect(holder);
        let done = worked(&mut broker);
        assert_eq!(done.len() as u32, extents);
        let before = broker.walks.borrow().looked;
        broker.all_done(done);
        assert!(broker.is_waiting(waiting));
        assert_eq!(broker.walks.borrow().looked - before, u64::from(NAMES), "{extents} came back");
        broker.verify().unwrap();
    }
}

#[test]
fn a_session_ends_for_those_only_who_still_wait_when_its_time_is_up() {
    let mut broker = broker(EXTENTS);
    let (low, session, credit) = session_with_names(&mut broker, 1);
    let rest = report(NAMES - credit.len() as u32, &credit);
    let grow = wire::Grow { report: rest, want: 0.into(), least: 0.into() };
    ask(&mut broker, low, Verb::Grow, session, |w| _ = w.put(&grow).put_blocks(credit)).unwrap().unwrap();
    let told = |broker: &mut Broker, event: Event| {
        let opcode = wire::EVENT | event as u16;
        let is_it = |o: &Output| o.to == low && wire::split(&o.message).unwrap().0.opcode.get() == opcode;
        broker.outputs().iter().filter(|o| is_it(o)).count()
    };
    let mut now = Instant::now();
    for (hangs_up, ends) in [(true, false), (true, false), (false, true)] {
        let (id, format) = client(&mut broker, 1, 33);
        let open = wire::Open { format: format.format, priority: 2.into(), ..wire::Open::default() };
        let opened = ask(&mut broker, id, Verb::Open, 0, |w| _ = w.put(&open)).unwrap().unwrap();
        let session = Reader::new("opened", &opened).one::<wire::Opened>().unwrap().session.get();
        let grow = wire::Grow { report: report(0, &[]), want: 2.into(), least: 2.into() };
        let mut message = Writer::request(Verb::Grow, 1, session);
        message.put(&grow);
        broker.request(id, &message.finish());
        assert!(broker.is_waiting(id));
        assert_eq!(told(&mut broker, Event::ReclaimSession), 1, "it is asked again each time");
        if hangs_up {
            broker.disconnect(id);
        }
        now += Duration::from_secs(60);
        broker.tick(now);
        assert_eq!(told(&mut broker, Event::SessionLost) == 1, ends);
        assert!(broker.next_reclaim().is_none());
        broker.verify().unwrap();
    }
}
