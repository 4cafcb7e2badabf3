//! The life of windows, against a naive memory of who can still reach what.
//!
//! The memory knows which udmabufs were made over which places, and how many hold each. From that it says, for every block
//! that the broker grants, whether that was right. The kernel's parts, making a udmabuf and counting its holders, are
//! played by hand; all else is the broker, over real messages.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::window::{Made, Making};
use super::{Broker, Done, Job, Peer, Policy};
use crate::heap::{Backend, Buffer, Heap, HeapError, Memfd};
use crate::id::{BlockId, ClientId, ExtentId, Place, SessionId};
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::window::{Access, Means, udmabuf::Udmabuf};
use crate::wire::{self, Fault, Reader, Verb, Writer};

thread_local! {
    /// References to what stands for a udmabuf; 1 is the broker's own.
    static HELD: RefCell<BTreeMap<RawFd, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn references(fd: BorrowedFd<'_>) -> Option<u64> {
    held(fd.as_raw_fd())
}

fn held(fd: RawFd) -> Option<u64> {
    HELD.with_borrow(|held| held.get(&fd).copied())
}

fn hold(fd: RawFd, change: i64) {
    HELD.with_borrow_mut(|held| {
        let count = held.get_mut(&fd).unwrap();
        *count = count.checked_add_signed(change).unwrap();
    });
}

/// What a client has been told.
#[derive(Debug, Default)]
struct Seen {
    session: u64,
    table: Vec<BlockId>,
    reported: usize,
    credit: Vec<BlockId>,
    /// Its windows: number, stand-in.
    windows: Vec<(u64, RawFd)>,
}

#[derive(Debug)]
struct Answered {
    body: Vec<u8>,
    descriptor: Option<RawFd>,
}

struct World {
    broker: Broker,
    clients: Vec<Option<(ClientId, Seen)>>,
    sequence: u64,
    /// What was made, over which places, as long as the stand-in's number means it.
    made: BTreeMap<RawFd, Vec<Place>>,
    /// Stand-ins that a device imports.
    imported: Vec<RawFd>,
}

/// Stands for a CMA heap: memory of this machine, said to be dma-bufs.
#[derive(Debug)]
struct Contiguous(Memfd);

impl Heap for Contiguous {
    fn backend(&self) -> Backend {
        Backend::DmaHeap
    }

    fn name(&self) -> String {
        "contiguous".into()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        self.0.allocate(bytes)
    }

    fn revokes(&self) -> bool {
        true
    }
}

const EXTENTS: u32 = 3;
const WINDOWS: u32 = 3;

impl World {
    fn new() -> Self {
        let udmabuf = Ok(Arc::new(Udmabuf::none()));
        let means = Means { access: Access::Scatter, udmabuf, ..Means::default() };
        World::over(Arc::new(Memfd::new(false)), means)
    }

    /// A pool whose extents a device imports as they are, and which sees no CPU's cache.
    fn incoherent() -> Self {
        let means = Means { access: Access::Contiguous, coherent: false, ..Means::default() };
        World::over(Arc::new(Contiguous(Memfd::new(false))), means)
    }

    fn over(heap: Arc<dyn Heap>, means: Means) -> Self {
        let policy = Policy { windows_per_session: WINDOWS, ..Policy::default() };
        let mut broker = Broker::new(heap, 4 * page_bytes() as u64, EXTENTS, EXTENTS, policy).unwrap();
        broker.set_means(means);
        broker.count_references_by(references, |b| b.fd().and_then(references).is_none_or(|n| n == 1));
        HELD.with_borrow_mut(BTreeMap::clear);
        let clients = vec![None, None, None];
        let mut world = World { broker, clients, sequence: 0, made: BTreeMap::new(), imported: Vec::new() };
        (0..3).for_each(|c| world.connect(c));
        world
    }

    /// Clients 0 and 1 are one tenant, client 2 another.
    fn connect(&mut self, c: usize) {
        let uid = if c < 2 { 1001 } else { 1002 };
        let client = self.broker.connect(Peer { uid, pid: 1 }).unwrap();
        self.clients[c] = Some((client, Seen::default()));
        let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
        let hello = wire::Hello { magic, version, label: wire::label("test") };
        self.ask(c, Verb::Hello, |w| _ = w.put(&hello)).unwrap();
        let row = page_bytes() as u32 / 4;
        let profile = Profile::uniform("m", "f16", 1, row, row, 2).unwrap();
        let format = self.ask(c, Verb::Profile, |w| wire::put_profile(w, &profile, 0)).unwrap().body;
        let format: wire::Format = *Reader::new("format", &format).one().unwrap();
        let open = wire::Open { format: format.format, ..wire::Open::default() };
        let opened = self.ask(c, Verb::Open, |w| _ = w.put(&open)).unwrap().body;
        self.seen(c).session = Reader::new("opened", &opened).one::<wire::Opened>().unwrap().session.get();
    }

    fn seen(&mut self, c: usize) -> &mut Seen {
        &mut self.clients[c].as_mut().unwrap().1
    }

    fn send(&mut self, c: usize, verb: Verb, fill: impl FnOnce(&mut Writer)) {
        let (client, seen) = self.clients[c].as_ref().unwrap();
        self.sequence += 1;
        let none = matches!(verb, Verb::Hello | Verb::Profile | Verb::Open | Verb::CloseWindow);
        let mut w = Writer::request(verb, self.sequence, if none { 0 } else { seen.session });
        fill(&mut w);
        let (client, message) = (*client, w.finish());
        self.broker.request(client, &message);
    }

    /// A request and its answer, the worker's part included.
    fn ask(&mut self, c: usize, verb: Verb, fill: impl FnOnce(&mut Writer)) -> Result<Answered, Fault> {
        self.send(c, verb, fill);
        self.work();
        let (client, sequence) = (self.clients[c].as_ref().unwrap().0, self.sequence);
        for output in self.broker.outputs() {
            let (header, body) = wire::split(&output.message).unwrap();
            if (output.to, header.sequence.get()) == (client, sequence) {
                let descriptor = output.descriptors.first().map(|d| d.open().unwrap().as_fd().as_raw_fd());
                return match Fault::from_code(header.fault.get()) {
                    Some(fault) => Err(fault),
                    None => Ok(Answered { body: body.to_vec(), descriptor }),
                };
            }
        }
        panic!("no answer to {}", verb.name())
    }

    fn work(&mut self) {
        loop {
            let jobs = self.broker.jobs();
            if jobs.is_empty() {
                return;
            }
            for job in jobs {
                let done = match job {
                    Job::Window { ticket, making: Making::Join(..) } => {
                        let fd: OwnedFd = File::open("/dev/null").unwrap().into();
                        let number = fd.as_raw_fd();
                        assert!(
                            held(number).is_none_or(|n| n <= 1),
                            "a window was closed that somebody holds"
                        );
                        HELD.with_borrow_mut(|held| held.insert(number, 1));
                        self.made.remove(&number);
                        Done::Window { ticket, result: Ok(Made::Joined(fd)) }
                    }
                    job => job.run(&Memfd::new(false)),
                };
                self.broker.done(done);
            }
        }
    }

    fn report(&mut self, c: usize) -> (wire::Report, Vec<BlockId>) {
        let seen = self.seen(c);
        let (first, used) = (seen.reported, seen.table[seen.reported..].to_vec());
        seen.reported = seen.table.len();
        let tokens = (seen.table.len() as u64 * 2).into();
        (wire::Report { tokens, first: (first as u32).into(), used: (used.len() as u32).into() }, used)
    }

    fn under_a_held_window(&self, place: Place) -> bool {
        self.made.iter().any(|(fd, places)| held(*fd).is_some_and(|n| n > 1) && places.contains(&place))
    }

    /// One more block in the table, if there is one.
    fn grow(&mut self, c: usize) -> bool {
        if self.seen(c).credit.is_empty() {
            let (report, used) = self.report(c);
            let granted = self.ask(c, Verb::Grow, |w| {
                w.put(&wire::Grow { report, want: 2.into(), least: 1.into() }).put_blocks(used);
            });
            let Ok(granted) = granted else { return false };
            let mut r = Reader::new("grant", &granted.body);
            let grant: wire::Grant = *r.one().unwrap();
            let _: &[wire::ExtentInfo] = r.many(grant.extents.get(), 16).unwrap();
            let blocks: &[wire::GrantedBlock] = r.many(grant.blocks.get(), 16).unwrap();
            for block in blocks.iter().map(|b| b.block.id()) {
                assert!(
                    !self.under_a_held_window(block.place),
                    "{block} is granted under a window that is held"
                );
                self.seen(c).credit.push(block);
            }
        }
        let block = self.seen(c).credit.remove(0);
        self.seen(c).table.push(block);
        true
    }

    fn window(&mut self, c: usize, first: usize, blocks: usize, old: Option<u64>) -> Result<u64, Fault> {
        let (report, used) = self.report(c);
        let ask = wire::Window {
            report,
            first: (first as u32).into(),
            blocks: (blocks as u32).into(),
            window: old.unwrap_or(0).into(),
            ..wire::Window::default()
        };
        let made = self.ask(c, Verb::Window, |w| {
            w.put(&ask).put_blocks(used);
        })?;
        let body: &wire::WindowMade = Reader::new("window", &made.body).one().unwrap();
        assert_eq!(body.how.get(), 2, "a udmabuf is what this device can use first");
        let (number, fd) = (body.window.get(), made.descriptor.unwrap());
        let places = self.seen(c).table[first..first + blocks].iter().map(|b| b.place).collect();
        self.made.insert(fd, places);
        hold(fd, 1);
        self.seen(c).windows.push((number, fd));
        Ok(number)
    }

    /// The credit of a client goes back.
    fn free_credit(&mut self, c: usize) {
        let credit = std::mem::take(&mut self.seen(c).credit);
        let free = wire::Free { count: (credit.len() as u32).into(), reserved: 0.into() };
        self.ask(c, Verb::Free, |w| _ = w.put(&free).put_blocks(credit)).unwrap();
    }

    /// A window by run over blocks of a session; closed by its number.
    fn run(&mut self, c: usize, first: usize, blocks: usize) -> Result<u64, Fault> {
        let (report, used) = self.report(c);
        let (first, blocks) = ((first as u32).into(), (blocks as u32).into());
        let ask = wire::Window { report, first, blocks, how: 1.into(), ..wire::Window::default() };
        let made = self.ask(c, Verb::Window, |w| _ = w.put(&ask).put_blocks(used))?;
        let body: &wire::WindowMade = Reader::new("window", &made.body).one().unwrap();
        Ok(body.window.get())
    }

    fn end_run(&mut self, c: usize, window: u64) -> Result<Answered, Fault> {
        self.ask(c, Verb::CloseWindow, |w| _ = w.put(&wire::CloseWindow { window: window.into() }))
    }

    /// The client closes its descriptor and says so.
    fn close(&mut self, c: usize, at: usize) {
        let (number, fd) = self.seen(c).windows.remove(at);
        hold(fd, -1);
        let closed =
            self.ask(c, Verb::CloseWindow, |w| _ = w.put(&wire::CloseWindow { window: number.into() }));
        assert!(matches!(closed, Ok(_) | Err(Fault::Stale)), "{closed:?}");
    }

    fn trim(&mut self, c: usize, blocks: usize) {
        let (report, used) = self.report(c);
        let trim =
            wire::Trim { report, tokens: (blocks as u64 * 2).into(), head: 0.into(), release: 1.into() };
        self.ask(c, Verb::Trim, |w| _ = w.put(&trim).put_blocks(used)).unwrap();
        let seen = self.seen(c);
        seen.table.truncate(blocks);
        seen.reported = seen.table.len();
    }

    /// The process ends: what it held of windows is closed after the connection, or before.
    fn die(&mut self, c: usize, closes_first: bool) {
        let (client, seen) = self.clients[c].take().unwrap();
        if closes_first {
            seen.windows.iter().for_each(|(_, fd)| hold(*fd, -1));
        }
        self.broker.disconnect(client);
        self.work();
        if !closes_first {
            seen.windows.iter().for_each(|(_, fd)| hold(*fd, -1));
        }
        self.connect(c);
    }

    fn look_again(&mut self) {
        self.broker.recheck_windows();
        self.work();
    }

    /// Blocks of an extent's worth that a client can get when nobody holds anything.
    fn all_comes_back(&mut self) {
        for fd in std::mem::take(&mut self.imported) {
            hold(fd, -1);
        }
        for c in 0..3 {
            self.die(c, true);
        }
        self.look_again();
        assert_eq!(self.broker.window_counts(), (0, 0), "windows that nobody holds are gone");
        assert_eq!(self.broker.recheck_after(), None, "nothing to wake up for");
        for _ in 0..4 * EXTENTS {
            assert!(self.grow(2), "a block is lost");
        }
    }
}

#[test]
fn blocks_under_a_dead_clients_window_come_back_when_the_device_lets_go_of_it() {
    let mut w = World::new();
    (0..3).for_each(|_| assert!(w.grow(0)));
    w.window(0, 0, 3, None).unwrap();
    let (_, fd) = w.seen(0).windows[0];
    let under = w.made[&fd].clone();
    // The driver imports it, and the process is killed.
    hold(fd, 1);
    w.die(0, false);
    w.look_again();
    assert_eq!(w.broker.window_counts(), (0, 1));
    // Everything else can be had, by the same tenant, and not these three.
    let mut got = Vec::new();
    while w.grow(1) {
        got.push(w.seen(1).table.last().unwrap().place);
    }
    assert_eq!(got.len() as u32, 4 * EXTENTS - 3);
    assert!(under.iter().all(|p| !got.contains(p)));
    hold(fd, -1);
    w.look_again();
    assert_eq!(w.broker.window_counts(), (0, 0));
    assert!(w.grow(1), "they are back");
}

#[test]
fn a_window_ends_when_a_block_under_it_is_trimmed_and_others_of_the_session_go_on() {
    let mut w = World::new();
    (0..4).for_each(|_| assert!(w.grow(0)));
    w.window(0, 0, 2, None).unwrap();
    w.window(0, 1, 3, None).unwrap();
    w.trim(0, 3);
    assert_eq!(w.broker.window_counts(), (1, 1), "the longer one is closing");
    let ended = w.seen(0).windows[1].0;
    let again = w.window(0, 1, 2, Some(ended));
    assert_eq!(again.unwrap_err(), Fault::Stale, "it cannot grow any more");
    w.close(0, 1);
    w.look_again();
    assert_eq!(w.broker.window_counts(), (1, 0));
    w.all_comes_back();
}

#[test]
fn a_window_that_grows_keeps_what_the_device_still_has_of_the_old_one() {
    let mut w = World::new();
    assert!(w.grow(0));
    let first = w.window(0, 0, 1, None).unwrap();
    assert!(w.grow(0));
    let second = w.window(0, 0, 2, Some(first)).unwrap();
    assert_ne!(first, second);
    assert_eq!(w.broker.window_counts(), (1, 1), "the old descriptor is still held");
    w.trim(0, 0);
    assert!(w.grow(1), "the rest of the pool is not touched by that");
    w.all_comes_back();
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing_behind() {
    let mut w = World::new();
    (0..2).for_each(|_| assert!(w.grow(0)));
    assert_eq!(w.window(0, 0, 0, None), Err(Fault::BadRequest), "empty");
    assert_eq!(w.window(0, 1, 2, None), Err(Fault::BadRequest), "beyond the table");
    assert_eq!(w.window(0, u32::MAX as usize, 1, None), Err(Fault::BadRequest));
    assert_eq!(w.window(0, 0, 1, Some(77)), Err(Fault::Stale));
    let mut odd = |change: &dyn Fn(&mut wire::Window)| {
        let (report, used) = w.report(0);
        let mut ask = wire::Window { report, blocks: 1.into(), ..wire::Window::default() };
        change(&mut ask);
        w.ask(0, Verb::Window, |m| _ = m.put(&ask).put_blocks(used)).unwrap_err()
    };
    assert_eq!(odd(&|a| (a.what, a.layer) = (1.into(), 1.into())), Fault::BadRequest, "no such layer");
    assert_eq!(odd(&|a| a.what = 1.into()), Fault::BadRequest, "half a page per plane");
    assert_eq!(odd(&|a| a.what = 2.into()), Fault::BadRequest);
    assert_eq!(odd(&|a| a.how = 5.into()), Fault::BadRequest);
    assert_eq!(odd(&|a| a.how = 1.into()), Fault::BadRequest, "a memfd is no run for a device");
    assert_eq!(odd(&|a| a.how = 3.into()), Fault::BadRequest, "no device is configured");
    assert_eq!(odd(&|a| a.how = 4.into()), Fault::BadRequest, "no staging is configured");
    assert_eq!(odd(&|a| a.flags = 1.into()), Fault::BadRequest, "a udmabuf is writable");
    for _ in 0..WINDOWS {
        w.window(0, 0, 2, None).unwrap();
    }
    assert_eq!(w.window(0, 0, 1, None), Err(Fault::OverLimit));
    let other = w.seen(0).windows[0].0;
    assert!(w.grow(1));
    assert_eq!(w.window(1, 0, 1, Some(other)), Err(Fault::Stale), "another client's");
    let close = wire::CloseWindow { window: other.into() };
    assert_eq!(w.ask(1, Verb::CloseWindow, |m| _ = m.put(&close)).unwrap_err(), Fault::Stale);
    w.all_comes_back();
}

#[test]
fn a_client_that_dies_while_its_window_is_being_made_loses_no_block() {
    let mut w = World::new();
    (0..2).for_each(|_| assert!(w.grow(0)));
    let (report, used) = w.report(0);
    let ask = wire::Window { report, blocks: 2.into(), ..wire::Window::default() };
    w.send(0, Verb::Window, |m| _ = m.put(&ask).put_blocks(used));
    let client = w.clients[0].take().unwrap().0;
    assert!(w.broker.is_waiting(client));
    w.broker.disconnect(client);
    assert_eq!(w.broker.window_counts(), (0, 1));
    w.work();
    assert_eq!(w.broker.window_counts(), (0, 0), "made for nobody, and gone at once");
    w.connect(0);
    w.all_comes_back();
}

#[test]
fn a_sealed_block_is_no_udmabufs_and_a_forked_one_neither() {
    let mut w = World::new();
    (0..2).for_each(|_| assert!(w.grow(0)));
    let (report, used) = w.report(0);
    let seal = wire::Seal { report, from: 0.into(), count: 2.into() };
    w.ask(0, Verb::Seal, |m| _ = m.put(&seal).put_tokens(&[1, 2]).put_blocks(used)).unwrap();
    assert_eq!(w.window(0, 0, 2, None), Err(Fault::BadRequest));
    w.window(0, 1, 1, None).unwrap();
    let (report, used) = w.report(0);
    w.ask(0, Verb::Fork, |m| _ = m.put(&report).put_blocks(used)).unwrap();
    assert_eq!(w.window(0, 1, 1, None), Err(Fault::BadRequest));
    w.all_comes_back();
}

fn extent_of(w: &mut World, c: usize, block: usize) -> ExtentId {
    w.seen(c).table[block].place.extent
}

#[test]
fn an_extent_that_an_incoherent_device_imports_is_one_sessions_alone() {
    let mut w = World::incoherent();
    // Clients 0 and 1 are one tenant. The first has two blocks of an extent of four.
    (0..2).for_each(|_| assert!(w.grow(0)));
    w.free_credit(0);
    let window = w.run(0, 0, 2).unwrap();
    let alone = extent_of(&mut w, 0, 0);
    let rest = 4 * (EXTENTS as usize - 1);
    (0..rest).for_each(|_| assert!(w.grow(1), "everything else is there for the other"));
    assert!(w.seen(1).table.iter().all(|b| b.place.extent != alone));
    assert!(!w.grow(1), "the two free places beside the window are not the other's");
    // They are the session's own, one by one and never ahead of need, and the window grows over them.
    for blocks in 3..=4 {
        assert!(w.grow(0));
        assert!(w.seen(0).credit.is_empty(), "credit could become another session's");
        assert_eq!(extent_of(&mut w, 0, blocks - 1), alone);
        w.broker.verify().unwrap();
    }
    let longer = w.run(0, 0, 4).unwrap();
    // What leaves the table is no credit either, and nobody's while a window is left.
    w.trim(0, 2);
    assert!(matches!(w.end_run(0, longer), Err(Fault::Stale)), "ended by the trim");
    assert!(!w.grow(1));
    w.end_run(0, window).unwrap();
    assert!(w.grow(1), "with the last window the extent is as any other");
    w.all_comes_back();
}

#[test]
fn an_extent_with_a_second_writer_is_not_imported_by_an_incoherent_device() {
    let mut w = World::incoherent();
    (0..3).for_each(|_| assert!(w.grow(0)));
    assert_eq!(w.run(0, 0, 3), Err(Fault::Busy), "the fourth block is credit, which any session may take");
    w.free_credit(0);
    let window = w.run(0, 0, 3).unwrap();
    w.end_run(0, window).unwrap();
    // A fork may write as soon as the other has let go.
    let (report, used) = w.report(0);
    let forked = w.ask(0, Verb::Fork, |m| _ = m.put(&report).put_blocks(used)).unwrap();
    let twin = Reader::new("opened", &forked.body).one::<wire::Opened>().unwrap().session.get();
    assert_eq!(w.run(0, 0, 3), Err(Fault::BadRequest), "both have these blocks, so neither may write them");
    let first = std::mem::replace(&mut w.seen(0).session, twin);
    w.ask(0, Verb::Close, |m| _ = m.put(&wire::Report::default())).unwrap();
    w.seen(0).session = first;
    w.run(0, 0, 3).unwrap();
    let (report, used) = w.report(0);
    let fork = w.ask(0, Verb::Fork, |m| _ = m.put(&report).put_blocks(used)).unwrap_err();
    assert_eq!(fork, Fault::Busy, "no twin while the device has the extent");
    // Sealed, nobody writes them any more.
    let (report, used) = w.report(0);
    let seal = wire::Seal { report, from: 0.into(), count: 6.into() };
    w.ask(0, Verb::Seal, |m| _ = m.put(&seal).put_tokens(&[1, 2, 3, 4, 5, 6]).put_blocks(used)).unwrap();
    let (report, used) = w.report(0);
    w.ask(0, Verb::Fork, |m| _ = m.put(&report).put_blocks(used)).unwrap();
    w.all_comes_back();
}

#[test]
fn places_that_were_promised_are_not_set_aside_for_a_device() {
    let mut w = World::incoherent();
    assert!(w.grow(0));
    w.free_credit(0);
    // All that is free is promised to the other process's session, the three places beside the block among it.
    let blocks = 4 * EXTENTS - 1;
    let admit = wire::Admit { tokens: u64::from(2 * blocks).into(), ..wire::Admit::default() };
    let admitted = w.ask(1, Verb::Admit, |m| _ = m.put(&admit)).unwrap();
    let admission: &wire::Admission = Reader::new("admission", &admitted.body).one().unwrap();
    assert_eq!(admission.promised.get(), blocks, "{admission:?}");
    assert_eq!(w.run(0, 0, 1), Err(Fault::Busy));
    (0..blocks).for_each(|_| assert!(w.grow(1), "a promise is kept"));
    w.all_comes_back();
}

#[test]
fn a_run_is_no_way_to_a_block_that_the_device_may_not_write() {
    let mut w = World::incoherent();
    (0..2).for_each(|_| assert!(w.grow(0)));
    let means = Means { access: Access::Contiguous, ..Means::default() };
    w.broker.set_means(means);
    let (report, used) = w.report(0);
    let seal = wire::Seal { report, from: 0.into(), count: 2.into() };
    w.ask(0, Verb::Seal, |m| _ = m.put(&seal).put_tokens(&[1, 2]).put_blocks(used)).unwrap();
    assert_eq!(w.run(0, 0, 2), Err(Fault::BadRequest), "the first one is sealed");
    w.run(0, 1, 1).unwrap();
    let (report, used) = w.report(0);
    let (first, blocks) = (1.into(), 1.into());
    let ask =
        wire::Window { report, first, blocks, how: 1.into(), flags: 1.into(), ..wire::Window::default() };
    let refused = w.ask(0, Verb::Window, |m| _ = m.put(&ask).put_blocks(used)).unwrap_err();
    assert_eq!(refused, Fault::BadRequest, "nothing keeps a device from writing what it imports");
    w.all_comes_back();
}

#[test]
fn another_sessions_block_keeps_an_extent_from_an_incoherent_device_and_not_from_a_coherent_one() {
    for coherent in [false, true] {
        let mut w = World::incoherent();
        let means = Means { access: Access::Contiguous, coherent, ..Means::default() };
        w.broker.set_means(means);
        assert!(w.grow(0));
        w.free_credit(0);
        // The only free places that the tenant has, so they become the other process's, too.
        assert!(w.grow(1));
        w.free_credit(1);
        let same = extent_of(&mut w, 0, 0) == extent_of(&mut w, 1, 0);
        assert!(same, "the test needs both in one extent");
        let got = w.run(0, 0, 1);
        assert_eq!(got.is_ok(), coherent, "{got:?}");
        w.all_comes_back();
    }
}

#[test]
fn an_extent_stays_one_sessions_while_a_dead_clients_device_may_import_it() {
    let mut w = World::incoherent();
    assert!(w.grow(0));
    w.free_credit(0);
    w.run(0, 0, 1).unwrap();
    let extent = extent_of(&mut w, 0, 0);
    // A driver has the extent still: a reference beside the broker's own.
    let fd = w.broker.buffers[&extent].fd().unwrap().as_raw_fd();
    HELD.with_borrow_mut(|held| held.insert(fd, 2));
    w.die(0, false);
    w.look_again();
    assert_eq!(w.broker.window_counts(), (0, 1));
    while w.grow(1) {
        assert_ne!(
            w.seen(1).table.last().unwrap().place.extent,
            extent,
            "a dead client's device may have it"
        );
    }
    hold(fd, -1);
    w.look_again();
    assert!(w.grow(1), "it is back");
    w.all_comes_back();
}

#[test]
fn a_session_that_makes_room_for_another_keeps_what_its_device_may_write_out_of_use() {
    let mut w = World::new();
    // A session of low priority, whose first two blocks a device imports; then the pool is full.
    (0..2).for_each(|_| assert!(w.grow(0)));
    w.window(0, 0, 2, None).unwrap();
    let (_, fd) = w.seen(0).windows[0];
    hold(fd, 1);
    w.imported.push(fd);
    let under = w.made[&fd].clone();
    while w.grow(0) {}
    let all = w.seen(0).table.len();
    let id = SessionId { tenant: crate::id::Tenant(1001), number: w.seen(0).session };
    w.broker.state.sessions.get_mut(&id).unwrap().priority = 1;
    // The other process of the tenant needs room: the session is asked, and ended when its time is up.
    w.send(1, Verb::Grow, |m| {
        m.put(&wire::Grow { want: 1.into(), least: 1.into(), ..wire::Grow::default() });
    });
    let client = w.clients[1].as_ref().unwrap().0;
    assert!(w.broker.is_waiting(client), "it waits for the session to make room");
    w.broker.tick(Instant::now() + Duration::from_secs(3600));
    w.work();
    assert_eq!(
        w.broker.window_counts(),
        (0, 1),
        "the window ends with its session, and the device has it still"
    );
    w.broker.verify().unwrap();
    // The process agrees: it closes the session. What its device imports stays where it is.
    w.ask(0, Verb::Close, |m| _ = m.put(&wire::Report::default())).unwrap();
    assert!(!w.broker.is_waiting(client), "what nobody reaches any more is granted");
    w.die(1, true);
    while w.grow(1) {
        let place = w.seen(1).table.last().unwrap().place;
        assert!(!under.contains(&place), "{place:?} is granted under a window that a device has");
    }
    assert_eq!(w.seen(1).table.len(), all - 2);
    w.all_comes_back();
}

#[test]
fn what_a_device_has_is_not_evicted_and_is_cached_when_it_lets_go() {
    let mut w = World::new();
    (0..2).for_each(|_| assert!(w.grow(0)));
    w.window(0, 0, 2, None).unwrap();
    let (_, fd) = w.seen(0).windows[0];
    hold(fd, 1);
    let (report, used) = w.report(0);
    let seal = wire::Seal { report, from: 0.into(), count: 4.into() };
    w.ask(0, Verb::Seal, |m| _ = m.put(&seal).put_tokens(&[1, 2, 3, 4]).put_blocks(used)).unwrap();
    w.ask(0, Verb::Close, |m| _ = m.put(&wire::Report::default())).unwrap();
    let all = super::Evict::Blocks { most: u64::MAX, tenant: None };
    assert_eq!(w.broker.evict(&all).blocks, 0, "the window holds them");
    w.broker.verify().unwrap();
    hold(fd, -2);
    w.look_again();
    assert_eq!(w.broker.evict(&all).blocks, 2);
    w.seen(0).windows.clear();
    w.all_comes_back();
}

#[test]
fn draining_goes_on_with_windows_of_sessions_that_go_on() {
    let mut w = World::new();
    (0..2).for_each(|_| assert!(w.grow(0)));
    let first = w.window(0, 0, 1, None).unwrap();
    w.broker.set_draining(true);
    w.window(0, 0, 2, Some(first)).unwrap();
    w.window(0, 1, 1, None).unwrap();
    w.close(0, 0);
    w.broker.set_draining(false);
    w.all_comes_back();
}

#[test]
fn a_sessions_own_windows_are_nobody_elses_blocks() {
    let mut w = World::new();
    (0..3).for_each(|_| assert!(w.grow(0)));
    w.window(0, 0, 2, None).unwrap();
    w.window(0, 1, 2, None).unwrap();
    let ids: Vec<SessionId> = w.broker.state.sessions.keys().copied().collect();
    let (mine, other) =
        (ids.iter().find(|id| !w.broker.state.sessions[id].table.is_empty()).unwrap(), ids.last().unwrap());
    let s = &w.broker.state.sessions[mine];
    assert_eq!(w.broker.held_by_sessions(s.tenant, s.format, *mine), 0);
    assert_eq!(w.broker.held_by_sessions(s.tenant, s.format, *other), s.table.len() as u64);
}

#[test]
fn a_session_that_was_closed_gets_no_window() {
    let mut w = World::new();
    assert!(w.grow(0));
    w.window(0, 0, 1, None).unwrap();
    w.ask(0, Verb::Close, |m| _ = m.put(&wire::Report::default())).unwrap();
    let ask = wire::Window { blocks: 1.into(), ..wire::Window::default() };
    assert_eq!(w.ask(0, Verb::Window, |m| _ = m.put(&ask)).unwrap_err(), Fault::Stale);
    assert_eq!(w.broker.window_counts(), (0, 1), "the one that it had ends with it");
    w.all_comes_back();
}

#[test]
fn a_state_that_is_read_back_keeps_blocks_under_windows_in_place() {
    let mut w = World::new();
    (0..2).for_each(|_| assert!(w.grow(0)));
    w.window(0, 0, 2, None).unwrap();
    let record = w.broker.record();
    let heap: Arc<dyn Heap> = Arc::new(Memfd::new(false));
    let buffers =
        w.broker.state.pool.extents().keys().map(|id| (*id, heap.allocate(4 * page_bytes() as u64).unwrap()));
    let read = Broker::from_record(&record, heap.clone(), Policy::default(), buffers.collect()).unwrap();
    read.verify().unwrap();
    let client = w.clients[0].as_ref().unwrap().0;
    let mut read = read;
    read.disconnect(client);
    read.recheck_windows();
    read.verify().unwrap();
    assert_eq!(read.window_counts(), (0, 1), "whose udmabuf nobody can count");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn no_block_is_granted_while_somebody_reaches_it_and_all_come_back(
        steps in prop::collection::vec((0usize..12, 0usize..3, any::<u8>(), any::<u8>()), 1..60),
    ) {
        let mut w = World::new();
        for (what, c, a, b) in steps {
            let (length, (a, b)) = (w.seen(c).table.len(), (usize::from(a), usize::from(b)));
            let count = w.seen(c).windows.len();
            match what {
                0..=3 => _ = w.grow(c),
                4 | 5 if length > 0 => {
                    let first = a % length;
                    let blocks = 1 + b % (length - first);
                    let old = (count > 0 && a % 3 == 0).then(|| w.seen(c).windows[b % count].0);
                    let made = w.window(c, first, blocks, old);
                    let live = w.seen(c).windows.len() as u32 <= WINDOWS;
                    prop_assert!(made.is_ok() || matches!(made, Err(Fault::OverLimit | Fault::Stale)) , "{made:?} {live}");
                }
                6 if count > 0 => w.close(c, a % count),
                7 if length > 0 => w.trim(c, a % length),
                8 => w.die(c, a % 2 == 0),
                9 if count > 0 => {
                    let (_, fd) = w.seen(c).windows[a % count];
                    hold(fd, 1);
                    w.imported.push(fd);
                }
                10 if !w.imported.is_empty() => {
                    let at = a % w.imported.len();
                    let fd = w.imported.remove(at);
                    hold(fd, -1);
                }
                _ => w.look_again(),
            }
            w.broker.verify().map_err(TestCaseError::fail)?;
        }
        w.all_comes_back();
    }

    #[test]
    fn what_an_incoherent_device_imports_has_one_writer_whatever_the_sessions_do(
        steps in prop::collection::vec((0usize..9, 0usize..3, any::<u8>(), any::<u8>()), 1..60),
    ) {
        let mut w = World::incoherent();
        // Windows by run that are open: whose, number, extents.
        let mut runs: Vec<(usize, u64, Vec<ExtentId>)> = Vec::new();
        for (what, c, a, b) in steps {
            let (length, (a, b)) = (w.seen(c).table.len(), (usize::from(a), usize::from(b)));
            match what {
                0..=2 => _ = w.grow(c),
                3 => w.free_credit(c),
                4 | 5 if length > 0 => {
                    let first = a % length;
                    let blocks = 1 + b % (length - first);
                    let made = w.run(c, first, blocks);
                    let refused = matches!(made, Err(Fault::Busy | Fault::BadRequest | Fault::OverLimit));
                    prop_assert!(made.is_ok() || refused, "{made:?}");
                    if let Ok(window) = made {
                        let under = &w.seen(c).table[first..first + blocks];
                        runs.push((c, window, under.iter().map(|b| b.place.extent).collect()));
                    }
                }
                6 if length > 0 => {
                    w.trim(c, a % length);
                    // Which of them the trim has ended, the broker says when they are closed.
                    let (ended, others): (Vec<_>, Vec<_>) = runs.into_iter().partition(|(whose, ..)| *whose == c);
                    runs = others;
                    for (_, window, _) in ended {
                        let closed = w.end_run(c, window);
                        prop_assert!(matches!(closed, Ok(_) | Err(Fault::Stale)));
                    }
                }
                7 => {
                    w.die(c, a % 2 == 0);
                    runs.retain(|(whose, ..)| *whose != c);
                }
                8 if !runs.is_empty() => {
                    let (whose, window, _) = runs.remove(a % runs.len());
                    w.end_run(whose, window).unwrap();
                }
                _ => w.look_again(),
            }
            w.broker.verify().map_err(TestCaseError::fail)?;
            for (whose, window, extents) in &runs {
                for other in (0..3).filter(|other| other != whose) {
                    let seen = w.seen(other);
                    let mut has = seen.table.iter().chain(&seen.credit);
                    let second = has.find(|b| extents.contains(&b.place.extent));
                    prop_assert!(second.is_none(), "{second:?} is client {other}'s, under window {window} of {whose}");
                }
            }
        }
        w.all_comes_back();
    }
}
