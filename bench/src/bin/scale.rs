//! Row `scale`: what a request costs the broker's state machine in pools of 64 MiB to 64 GiB without memory behind
//! them, with 1 to 1000 sessions. The promise is that a pool a thousand times as large makes nothing dearer but by
//! what the processor's caches lose.
//!
//! Blocks of 64 KiB, 48 in an extent; half of each pool is held by sessions of the same tenant, a quarter is cached
//! prefixes. No socket, no worker, no memory: only the decisions.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbroker::broker::{Broker, Peer, Policy};
use kvbroker::heap::Imaginary;
use kvbroker::id::{BlockId, ClientId};
use kvbroker::profile::Profile;
use kvbroker::wire::{self, Fault, Reader, Verb, Writer};
use kvbroker_bench::{Clock, at_most, reported};

const EXTENT: u64 = 3 << 20;
const PER_BLOCK: u32 = 16;
/// Most blocks that one request asks for while a pool is filled.
const BATCH: u32 = 32;

fn main() {
    let pools = [("64M", 64u64 << 20), ("256M", 256 << 20), ("4G", 4 << 30), ("64G", 64 << 30)];
    for sessions in [1usize, 10, 100, 1000] {
        let mut first: Option<Costs> = None;
        for (name, bytes) in pools {
            let costs = measure(bytes, sessions);
            for ((op, cost), (_, least)) in costs.iter().zip(first.as_ref().unwrap_or(&costs)) {
                let row = format!("scale/{op}-{sessions}-sessions-{name}");
                let note = format!(
                    "{cost:.2} us, in a pool of {name} with {sessions} sessions; over the pool of 64M"
                );
                match first {
                    None => {
                        reported(row, *cost, "us", format!("in a pool of {name} with {sessions} sessions"))
                    }
                    Some(_) => at_most(row, cost / least, 1.5, note),
                }
            }
            first.get_or_insert(costs);
        }
    }
}

type Costs = Vec<(&'static str, f64)>;

/// Medians in microseconds of processor time, of samples of 200 operations.
fn measure(bytes: u64, sessions: usize) -> Costs {
    let mut pool = Filled::new(bytes, sessions);
    let mut costs = vec![("grow-free", Vec::new()), ("open-close", Vec::new()), ("seal-find", Vec::new())];
    const EACH: usize = 200;
    let end = Instant::now() + Duration::from_millis(700);
    let mut turn = 0;
    while Instant::now() < end || costs[0].1.len() < 8 {
        let start = Clock::Cpu.now();
        for _ in 0..EACH {
            turn += 1;
            pool.grow_and_free(turn % sessions);
        }
        costs[0].1.push(Clock::Cpu.now() - start);
        let start = Clock::Cpu.now();
        for _ in 0..EACH {
            let session = pool.open();
            pool.close(session);
        }
        costs[1].1.push(Clock::Cpu.now() - start);
        let start = Clock::Cpu.now();
        for _ in 0..EACH {
            turn += 1;
            pool.seal_and_find(turn as u32);
        }
        costs[2].1.push(Clock::Cpu.now() - start);
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() / EACH as f64 * 1e6
    };
    costs.into_iter().map(|(name, times)| (name, median(times))).collect()
}

struct Filled {
    broker: Broker,
    client: ClientId,
    format: u32,
    sequence: u64,
    /// The sessions, and how many blocks each has been reported to hold.
    sessions: Vec<(u64, u32)>,
}

impl Filled {
    fn new(bytes: u64, sessions: usize) -> Self {
        let extents = u32::try_from(bytes / EXTENT).expect("few extents");
        let policy = Policy { sessions_per_connection: u32::MAX, audit: false, ..Policy::default() };
        let mut broker = Broker::new(Arc::new(Imaginary), EXTENT, extents, extents, policy).expect("a pool");
        let client = broker.connect(Peer { uid: 1000, pid: 1 }).expect("room for one");
        let mut pool = Filled { broker, client, format: 0, sequence: 0, sessions: Vec::new() };
        pool.ask(Verb::Hello, 0, |w| {
            w.put(&wire::Hello {
                magic: wire::MAGIC.into(),
                version: wire::VERSION.into(),
                label: wire::label("scale"),
            });
        });
        let profile = Profile::uniform("scale", "f16", 8, 256, 256, PER_BLOCK).expect("64 KiB blocks");
        let reply = pool.ask(Verb::Profile, 0, |w| wire::put_profile(w, &profile, 0));
        pool.format = Reader::new("format", &reply).one::<wire::Format>().expect("a format").format.get();
        let blocks = extents * (EXTENT / (64 << 10)) as u32;
        // A quarter of the pool in cached prefixes of 32 blocks, each under tokens of its own.
        for chain in 0..blocks / 4 / BATCH {
            let session = pool.open();
            let granted = pool.grow(session, 0, &[], BATCH);
            pool.seal(session, &granted, chain | 1 << 31);
            pool.close(session);
        }
        for _ in 0..sessions {
            let session = pool.open();
            pool.sessions.push((session, 0));
        }
        // Half of it in tables.
        let mut held = 0;
        'fill: loop {
            for i in 0..sessions {
                let share = (blocks / 2 / sessions as u32).clamp(1, BATCH);
                if held + share > blocks / 2 {
                    break 'fill;
                }
                let (session, reported) = pool.sessions[i];
                let granted = pool.grow(session, reported, &[], share);
                pool.report(session, reported, &granted);
                pool.sessions[i].1 += share;
                held += share;
            }
        }
        pool
    }

    fn ask(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> Vec<u8> {
        self.sequence += 1;
        let mut w = Writer::request(verb, self.sequence, session);
        fill(&mut w);
        self.broker.request(self.client, &w.finish());
        loop {
            for output in self.broker.outputs() {
                let (header, body) = wire::split(&output.message).expect("the broker keeps its protocol");
                if header.sequence.get() == 0 {
                    continue;
                }
                let fault = Fault::from_code(header.fault.get());
                assert_eq!(fault, None, "{verb:?}: {}", String::from_utf8_lossy(body));
                return body.to_vec();
            }
            for job in self.broker.jobs() {
                self.broker.done(job.run(&Imaginary));
            }
        }
    }

    fn open(&mut self) -> u64 {
        let format = self.format;
        let open = wire::Open { format: format.into(), ..wire::Open::default() };
        let reply = self.ask(Verb::Open, 0, |w| _ = w.put(&open));
        Reader::new("opened", &reply).one::<wire::Opened>().expect("opened").session.get()
    }

    fn close(&mut self, session: u64) {
        self.ask(Verb::Close, session, |w| _ = w.put(&wire::Report::default()));
    }

    fn grow(&mut self, session: u64, reported: u32, news: &[BlockId], want: u32) -> Vec<BlockId> {
        let report = report(reported, news.len());
        let reply = self.ask(Verb::Grow, session, |w| {
            w.put(&wire::Grow { report, want: want.into(), least: want.into() });
            w.put_blocks(news.iter().copied());
        });
        let mut r = Reader::new("grant", &reply);
        let grant: wire::Grant = *r.one().expect("a grant");
        let _: &[wire::ExtentInfo] = r.many(grant.extents.get(), wire::MAX_FDS).expect("extents");
        let blocks: &[wire::GrantedBlock] = r.many(grant.blocks.get(), wire::MAX_BLOCKS).expect("blocks");
        blocks.iter().map(|b| b.block.id()).collect()
    }

    /// Tells of blocks that the table has, and asks for nothing.
    fn report(&mut self, session: u64, reported: u32, news: &[BlockId]) {
        self.grow(session, reported, news, 0);
    }

    fn seal(&mut self, session: u64, blocks: &[BlockId], salt: u32) {
        let count = blocks.len() as u32 * PER_BLOCK;
        let tokens: Vec<u32> = (0..count).map(|i| i ^ salt.wrapping_mul(0x9e37_79b9)).collect();
        let report = report(0, blocks.len());
        self.ask(Verb::Seal, session, |w| {
            w.put(&wire::Seal { report, from: 0.into(), count: count.into() });
            w.put_tokens(&tokens).put_blocks(blocks.iter().copied());
        });
    }

    /// One block more for a session, and the block given back out of credit.
    fn grow_and_free(&mut self, which: usize) {
        let (session, reported) = self.sessions[which];
        let granted = self.grow(session, reported, &[], 1);
        self.ask(Verb::Free, 0, |w| {
            w.put(&wire::Free { count: 1.into(), reserved: 0.into() });
            w.put_blocks(granted.iter().copied());
        });
    }

    /// One block of a new prompt sealed, found by a second session, and cached.
    fn seal_and_find(&mut self, salt: u32) {
        let writer = self.open();
        let granted = self.grow(writer, 0, &[], 1);
        self.seal(writer, &granted, salt);
        let reader = self.open();
        let mut tokens: Vec<u32> = (0..PER_BLOCK).map(|i| i ^ salt.wrapping_mul(0x9e37_79b9)).collect();
        tokens.push(u32::MAX);
        let attach = wire::Attach { count: (tokens.len() as u32).into(), more: 0.into() };
        let reply = self.ask(Verb::Attach, reader, |w| _ = w.put(&attach).put_tokens(&tokens));
        let grant: &wire::Grant = Reader::new("grant", &reply).one().expect("a grant");
        assert_eq!(black_box(grant.tokens.get()), u64::from(PER_BLOCK), "it is found");
        self.close(reader);
        self.close(writer);
    }
}

fn report(reported: u32, news: usize) -> wire::Report {
    let tokens = u64::from(reported + news as u32) * u64::from(PER_BLOCK);
    wire::Report { tokens: tokens.into(), first: reported.into(), used: (news as u32).into() }
}
