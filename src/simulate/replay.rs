//! One replay: requests of a trace as messages to a broker, by a virtual clock.
//!
//! Owns the broker under test and what each simulated session holds. Invariant: the broker hears of nothing but what a
//! client would tell it. One shortcut is taken: to the broker one "token" is a whole block of the trace, as large in
//! bytes, so that a block's name is the hash of one id and not of five hundred. What is shared, evicted and refused
//! does not change by that.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::{Capacity, MOST_BLOCKS, Options, OptionsError, Outcome, Request};
use crate::broker::{Broker, Peer, Policy, TenantPolicy};
use crate::heap::Imaginary;
use crate::id::{BlockId, ClientId};
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::wire::{self, Event, Fault, MAX_FDS, MAX_TOKENS, Reader, Verb, Writer};

/// The uid of the first simulated tenant.
const FIRST_UID: u32 = 10_000;

/// Replays `trace`.
pub fn replay(trace: &[Request], options: &Options) -> Result<Outcome, OptionsError> {
    Replay::new(trace, options)?.run(trace)
}

/// A session that is being answered.
#[derive(Debug)]
struct Live {
    client: ClientId,
    session: u64,
    /// Blocks of its table.
    blocks: u64,
    /// Tokens that it has.
    tokens: u64,
    /// Tokens that it will have.
    end: u64,
    /// The last block of its table, to be reported.
    news: Option<BlockId>,
    /// Its part of the sum of tails.
    tail: u64,
}

#[derive(Debug)]
struct Replay<'a> {
    options: &'a Options,
    broker: Broker,
    clients: Vec<ClientId>,
    format: u32,
    sequence: u64,
    replies: VecDeque<Vec<u8>>,
    live: BTreeMap<u64, Live>,
    /// When a session needs its next block, or is over: in microseconds.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    next_live: u64,
    now: u64,
    /// Twice the tokens that fit the blocks of all tables and are not there, mean over the time until the next block.
    tails: u64,
    /// Sums over time: bytes held, bytes of live tokens.
    held: f64,
    alive: f64,
    outcome: Outcome,
}

/// A refusal, as far as a replay is concerned.
struct Refused;

impl<'a> Replay<'a> {
    fn new(trace: &[Request], options: &'a Options) -> Result<Self, OptionsError> {
        let o = options;
        if o.tokens_per_block == 0 || o.trace_block == 0 || o.trace_block % o.tokens_per_block != 0 {
            return Err(OptionsError::Blocks { pool: o.tokens_per_block, trace: o.trace_block });
        }
        if !(1..=1000).contains(&o.tenants) {
            return Err(OptionsError::Tenants(o.tenants));
        }
        if let Some(speed) = o.speed.filter(|s| !(s.is_finite() && *s > 0.0)) {
            return Err(OptionsError::Speed(speed.to_string()));
        }
        let most_id = u64::from(u32::MAX) / u64::from(o.trace_block / o.tokens_per_block) - 1;
        if let Some(id) = trace.iter().flat_map(|r| &r.hash_ids).copied().find(|id| *id > most_id) {
            return Err(OptionsError::HashId(id, most_id));
        }
        let (extents, slots) = match o.capacity {
            Capacity::Blocks(blocks) => (blocks, 1),
            Capacity::Extents { extents, slots } => (extents, slots),
            Capacity::Unlimited => (u32::try_from(most_at_once(trace, o)).unwrap_or(u32::MAX), 1),
        };
        let all = u64::from(extents) * u64::from(slots);
        if all > MOST_BLOCKS {
            return Err(OptionsError::Pool(all));
        }
        let blocks = |r: &Request| r.input_length / u64::from(o.tokens_per_block);
        if let Some((at, r)) = trace.iter().enumerate().find(|(_, r)| blocks(r) > MOST_BLOCKS) {
            return Err(OptionsError::Request { request: at + 1, blocks: blocks(r) });
        }
        if extents == 0 || slots == 0 {
            return Err(OptionsError::NoPool("give it at least one block"));
        }
        if u64::from(o.tenants) * u64::from(o.reserve) > u64::from(extents) {
            let (tenants, reserve) = (o.tenants, o.reserve);
            return Err(OptionsError::Reserves { tenants, reserve, extents });
        }
        let profile = stand_in(o.block_bytes)?;
        let usual = TenantPolicy { reserve: 0, limit: o.limit, ..TenantPolicy::default() };
        let uids = FIRST_UID..FIRST_UID + o.tenants;
        let policy = Policy {
            connections: o.tenants,
            sessions_per_connection: u32::MAX,
            usual_tenant: usual,
            tenants: uids
                .clone()
                .map(|uid| (crate::id::Tenant(uid), TenantPolicy { reserve: o.reserve, ..usual }))
                .collect(),
            eviction: o.eviction,
            cache_bytes: None,
            // Counting every byte anew after every request is for tests of the broker, not of a trace.
            audit: false,
            ..Policy::default()
        };
        let extent_bytes = profile.slot_bytes(0, page_bytes() as u64) * u64::from(slots);
        let broker = Broker::new(Arc::new(Imaginary), extent_bytes, extents, extents, policy)
            .map_err(|_| OptionsError::NoPool("it could not be made"))?;
        let mut replay = Replay {
            options,
            broker,
            clients: Vec::new(),
            format: 0,
            sequence: 0,
            replies: VecDeque::new(),
            live: BTreeMap::new(),
            due: BinaryHeap::new(),
            next_live: 0,
            now: 0,
            tails: 0,
            held: 0.0,
            alive: 0.0,
            outcome: Outcome {
                requests: 0,
                blocks: 0,
                hits: 0,
                hit_rate: 0.0,
                evictions: 0,
                refusals: 0,
                cut: 0,
                pool_blocks: u64::from(extents) * u64::from(slots),
                held_over_live: None,
            },
        };
        for uid in uids {
            replay.connect(uid, &profile);
        }
        Ok(replay)
    }

    fn connect(&mut self, uid: u32, profile: &Profile) {
        let client = self.broker.connect(Peer { uid, pid: 1 }).expect("the policy allows as many");
        self.clients.push(client);
        let mut w = self.request(Verb::Hello, 0);
        w.put(&wire::Hello {
            magic: wire::MAGIC.into(),
            version: wire::VERSION.into(),
            label: wire::label("simulate"),
        });
        self.must(client, w);
        let mut w = self.request(Verb::Profile, 0);
        wire::put_profile(&mut w, profile, 0);
        let reply = self.must(client, w);
        let format: &wire::Format =
            Reader::new("format", &reply).one().expect("the broker keeps its protocol");
        self.format = format.format.get();
    }

    fn request(&mut self, verb: Verb, session: u64) -> Writer {
        self.sequence += 1;
        Writer::request(verb, self.sequence, session)
    }

    /// Sends a request, does the worker's jobs, takes the reply's body.
    fn ask(&mut self, client: ClientId, message: Writer) -> Result<Vec<u8>, Refused> {
        self.broker.request(client, &message.finish());
        loop {
            for output in self.broker.outputs() {
                self.take_output(output.to, output.message);
            }
            if let Some(reply) = self.replies.pop_front() {
                let (header, body) = wire::split(&reply).expect("the broker keeps its protocol");
                return match Fault::from_code(header.fault.get()) {
                    None => Ok(body.to_vec()),
                    Some(Fault::BadRequest | Fault::BrokerFault) => {
                        unreachable!("a replay sends what a client would: {}", String::from_utf8_lossy(body))
                    }
                    Some(_) => Err(Refused),
                };
            }
            // A request without a reply waits for the worker.
            for job in self.broker.jobs() {
                self.broker.done(job.run(&Imaginary));
            }
        }
    }

    fn take_output(&mut self, to: ClientId, message: Vec<u8>) {
        let (header, body) = wire::split(&message).expect("the broker keeps its protocol");
        if header.sequence.get() > 0 {
            return self.replies.push_back(message);
        }
        if Event::from_code(header.opcode.get() & !wire::EVENT) != Some(Event::GiveBack) {
            return;
        }
        let event: &wire::GiveBack = Reader::new("event", body).one().expect("the broker keeps its protocol");
        // Memory that is not there is taken without asking; an extent that is asked for is given back at once.
        if event.deadline_ms.get() > 0 {
            let mut w = self.request(Verb::ReturnExtent, 0);
            w.put(&wire::ReturnExtent { extent: event.extent, reserved: 0.into() });
            self.broker.request(to, &w.finish());
        }
    }

    fn must(&mut self, client: ClientId, message: Writer) -> Vec<u8> {
        self.ask(client, message).unwrap_or_else(|_| unreachable!("this is never refused"))
    }

    fn run(mut self, trace: &[Request]) -> Result<Outcome, OptionsError> {
        for (number, r) in trace.iter().enumerate() {
            self.until(r.timestamp.saturating_mul(1000));
            let client = self.clients[number % self.clients.len()];
            let full = (r.input_length / u64::from(self.options.tokens_per_block)) as usize;
            let ids = self.names(r, full);
            self.outcome.requests += 1;
            self.outcome.blocks += ids.len() as u64;
            if self.serve(client, r, &ids).is_err() {
                self.outcome.refusals += 1;
            }
        }
        self.until(u64::MAX);
        let outcome = &mut self.outcome;
        outcome.hit_rate = if outcome.blocks > 0 { outcome.hits as f64 / outcome.blocks as f64 } else { 0.0 };
        outcome.held_over_live = (self.alive > 0.0).then(|| self.held / self.alive);
        outcome.evictions = self.broker.prefix_stats().evictions;
        if self.options.capacity == Capacity::Unlimited {
            outcome.pool_blocks = self.broker.prefix_stats().blocks as u64;
        }
        Ok(*outcome)
    }

    /// What the broker is told are the tokens of a prompt: one number for each full block.
    fn names(&self, r: &Request, full: usize) -> Vec<u32> {
        let parts = self.options.trace_block / self.options.tokens_per_block;
        let parts_of = |id: &u64| {
            let first = *id as u32 * parts;
            first..first + parts
        };
        r.hash_ids.iter().flat_map(parts_of).take(full).collect()
    }

    fn serve(&mut self, client: ClientId, r: &Request, ids: &[u32]) -> Result<(), Refused> {
        let mut w = self.request(Verb::Open, 0);
        w.put(&wire::Open {
            format: self.format.into(),
            priority: 0.into(),
            max_tokens: (ids.len() as u64).into(),
            model: [0; 32],
            label: [0; 32],
        });
        let reply = self.ask(client, w)?;
        let opened: &wire::Opened =
            Reader::new("opened", &reply).one().expect("the broker keeps its protocol");
        let session = opened.session.get();
        let served = self.fill(client, session, ids);
        let answer = self.options.speed.is_some();
        if served.is_err() || !answer {
            self.close(client, session);
            return served;
        }
        let live = Live {
            client,
            session,
            blocks: ids.len() as u64,
            tokens: r.input_length,
            end: r.input_length.saturating_add(r.output_length),
            news: None,
            tail: 0,
        };
        let key = self.next_live;
        self.next_live += 1;
        self.live.insert(key, live);
        self.step(key);
        Ok(())
    }

    /// Attaches what is there, and writes and seals the rest.
    fn fill(&mut self, client: ClientId, session: u64, ids: &[u32]) -> Result<(), Refused> {
        let mut hits = 0;
        // A look-up stops short of the prompt's last token: one that is never looked for comes after the full blocks.
        let prompt: Vec<u32> = ids.iter().copied().chain([u32::MAX]).collect();
        let mut chunks = prompt.chunks(MAX_TOKENS).peekable();
        while let Some(chunk) = chunks.next() {
            let mut w = self.request(Verb::Attach, session);
            let more = u32::from(chunks.peek().is_some());
            w.put(&wire::Attach { count: (chunk.len() as u32).into(), more: more.into() }).put_tokens(chunk);
            let reply = self.ask(client, w)?;
            let grant: &wire::Grant =
                Reader::new("grant", &reply).one().expect("the broker keeps its protocol");
            let now = grant.tokens.get() as usize;
            let complete = now - hits == chunk.len();
            hits = now;
            if !complete {
                break;
            }
        }
        self.outcome.hits += hits as u64;
        let mut reported = hits;
        let mut credit: Vec<BlockId> = Vec::new();
        while reported + credit.len() < ids.len() {
            let want = (ids.len() - reported - credit.len()).min(MAX_FDS) as u32;
            let news = std::mem::take(&mut credit);
            credit = self.grow(client, session, reported, &news, want)?;
            reported += news.len();
        }
        let mut sealed = hits;
        let mut news = credit;
        for chunk in ids[hits..].chunks(MAX_TOKENS / 2) {
            let mut w = self.request(Verb::Seal, session);
            let report = wire::Report {
                tokens: (ids.len() as u64).into(),
                first: (reported as u32).into(),
                used: (news.len() as u32).into(),
            };
            w.put(&wire::Seal { report, from: (sealed as u32).into(), count: (chunk.len() as u32).into() });
            w.put_tokens(chunk).put_blocks(news.iter().copied());
            self.ask(client, w)?;
            reported += news.len();
            sealed += chunk.len();
            news.clear();
        }
        Ok(())
    }

    fn grow(
        &mut self,
        client: ClientId,
        session: u64,
        reported: usize,
        news: &[BlockId],
        want: u32,
    ) -> Result<Vec<BlockId>, Refused> {
        let mut w = self.request(Verb::Grow, session);
        let report = wire::Report {
            tokens: ((reported + news.len()) as u64).into(),
            first: (reported as u32).into(),
            used: (news.len() as u32).into(),
        };
        w.put(&wire::Grow { report, want: want.into(), least: want.into() }).put_blocks(news.iter().copied());
        let reply = self.ask(client, w)?;
        let mut r = Reader::new("grant", &reply);
        let grant: &wire::Grant = r.one().expect("the broker keeps its protocol");
        let _: &[wire::ExtentInfo] =
            r.many(grant.extents.get(), MAX_FDS).expect("the broker keeps its protocol");
        let blocks: &[wire::GrantedBlock] =
            r.many(grant.blocks.get(), wire::MAX_BLOCKS).expect("the broker keeps its protocol");
        Ok(blocks.iter().map(|b| b.block.id()).collect())
    }

    fn close(&mut self, client: ClientId, session: u64) {
        let mut w = self.request(Verb::Close, session);
        w.put(&wire::Report { tokens: 0.into(), first: 0.into(), used: 0.into() });
        self.must(client, w);
    }

    /// Lets the clock run: answers grow and end.
    fn until(&mut self, time: u64) {
        while let Some(&Reverse((at, key))) = self.due.peek().filter(|d| d.0.0 <= time) {
            self.due.pop();
            self.pass(at);
            self.step(key);
        }
        if time != u64::MAX {
            self.pass(time);
        }
    }

    /// Accounts for what was held since the last event.
    fn pass(&mut self, at: u64) {
        let time = (at - self.now) as f64;
        self.now = at;
        if self.live.is_empty() || time == 0.0 {
            return;
        }
        let ledger = self.broker.ledger();
        let of = |names: &[&str]| names.iter().map(|n| ledger[n]).sum::<u64>() as f64;
        // The newest block of an answer is credit to the broker until the next report names it.
        let used = of(&["private", "shared", "credit"]);
        let token = self.options.block_bytes as f64 / f64::from(self.options.tokens_per_block);
        self.held += time * (used + of(&["stranded"]));
        self.alive += time * (used - self.tails as f64 / 2.0 * token);
    }

    /// A session has filled its blocks: it gets one more, or is over.
    fn step(&mut self, key: u64) {
        let Some(mut live) = self.live.remove(&key) else { return };
        let (per_block, speed) =
            (u64::from(self.options.tokens_per_block), self.options.speed.unwrap_or(1.0));
        let room = |l: &Live| l.blocks * per_block;
        self.tails -= live.tail;
        let full = room(&live).min(live.end);
        live.tokens = live.tokens.max(full);
        if live.tokens < live.end {
            let (reported, news) = (live.blocks - u64::from(live.news.is_some()), live.news);
            let news: Vec<BlockId> = news.into_iter().collect();
            match self.grow(live.client, live.session, reported as usize, &news, 1) {
                Ok(blocks) => live.news = blocks.first().copied(),
                Err(Refused) => {
                    self.outcome.cut += 1;
                    return self.close(live.client, live.session);
                }
            }
            live.blocks += 1;
            let tokens = room(&live).min(live.end) - live.tokens;
            let time = (tokens as f64 / speed * 1e6) as u64;
            self.due.push(Reverse((self.now + time.max(1), key)));
            // It fills up evenly until then.
            live.tail = 2 * (room(&live) - live.tokens) - tokens;
            self.tails += live.tail;
            self.live.insert(key, live);
            return;
        }
        self.close(live.client, live.session);
    }
}

/// Blocks that could ever be there at once.
fn most_at_once(trace: &[Request], o: &Options) -> u64 {
    let per_block = u64::from(o.tokens_per_block);
    if o.speed.is_some() {
        // Every prompt's blocks and every answer's.
        let tokens = |r: &Request| r.input_length.saturating_add(r.output_length);
        return trace.iter().map(|r| tokens(r) / per_block + 1).fold(0, u64::saturating_add);
    }
    // One request at a time: its own blocks, and those that are different by what comes before them, for each tenant.
    let (mut different, mut longest) = (HashSet::new(), 0);
    for (number, r) in trace.iter().enumerate() {
        let mut before = (number as u64) % u64::from(o.tenants);
        for id in &r.hash_ids {
            let mut hash = DefaultHasher::new();
            (before, id).hash(&mut hash);
            before = hash.finish();
            different.insert(before);
        }
        longest = longest.max(r.input_length / per_block + 1);
        if different.len() as u64 > MOST_BLOCKS {
            // Refused already.
            break;
        }
    }
    let parts = u64::from(o.trace_block / o.tokens_per_block);
    (different.len() as u64).saturating_mul(parts).saturating_add(longest)
}

/// A geometry with blocks of `bytes`, one token in each.
fn stand_in(bytes: u64) -> Result<Profile, OptionsError> {
    let error = || OptionsError::BlockBytes(bytes);
    let rows = 2 * bytes.div_ceil(u64::from(u32::MAX) * 2).max(1);
    let row = u32::try_from(bytes / rows).map_err(|_| error())?;
    let layers = u32::try_from(rows / 2).map_err(|_| error())?;
    if bytes == 0 || u64::from(row) * rows != bytes {
        return Err(error());
    }
    Profile::uniform("simulated", "f16", layers, row, row, 1).map_err(|_| error())
}
