//! Sequences of messages from several clients to one broker: right ones, wrong ones, and bytes that are none.
//!
//! The input is a script. Each step takes a few bytes of it: which client, which verb, and which of the things that
//! exist it names, so that most requests reach what the verb does and some name what has gone or never was.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvbroker::broker::{Broker, Evict, Job, Peer, Policy};
use kvbroker::heap::{Imaginary, Memfd};
use kvbroker::id::ClientId;
use kvbroker::map::page_bytes;
use kvbroker::profile::{Group, Layer, Layout, Profile};
use kvbroker::window::{Access, Means, StagingMeans};
use kvbroker::wire::{self, MAX_BLOCKS, Reader, Verb, WireBlock, Writer};

/// Bytes of an extent: four blocks of the usual profile.
pub const EXTENT: u64 = 256 << 10;
const EXTENTS: u32 = 8;
const CLIENTS: usize = 4;

/// The script, taken from the front; behind its end everything is 0.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: usize) -> usize {
        self.byte() as usize % end.max(1)
    }

    /// Mostly small, sometimes absurd.
    fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::MAX,
            254 => 1 << 31,
            253 => MAX_BLOCKS as u32 + 1,
            n => u32::from(n % 64),
        }
    }
}

/// What clients ask for, the more often the more state it makes.
const USUAL: &[Verb] = {
    use Verb::*;
    &[
        Open,
        Open,
        Reserve,
        Reserve,
        Grow,
        Grow,
        Grow,
        Grow,
        Grow,
        Trim,
        Trim,
        Free,
        Fork,
        Seal,
        Seal,
        Seal,
        Pin,
        Pin,
        Attach,
        Attach,
        Skip,
        Query,
        Close,
        Admit,
        ReturnExtent,
        ReturnExtent,
        Window,
        Window,
        CloseWindow,
        Profile,
    ]
};

/// A session as its client knows it.
#[derive(Clone)]
struct Session {
    id: u64,
    format: u32,
    tokens_per_block: u64,
    /// Blocks dropped at the head, and those that follow.
    head: u32,
    table: Vec<WireBlock>,
    tokens: u64,
    sealed: u32,
}

/// A request under way: what its client will know when it is granted.
struct Open {
    sequence: u64,
    session: u64,
    /// Of which the blocks are that are asked for.
    format: u32,
    used: Vec<WireBlock>,
    tokens: u64,
    /// Trim: the tokens and the head that stay. Seal: the blocks that are sealed then.
    stays: u64,
    head: u32,
}

struct Client {
    id: ClientId,
    sequence: u64,
    sessions: Vec<Session>,
    /// Geometries, and tokens per block of each.
    formats: Vec<(u32, u64)>,
    /// Credit and its format, the oldest first.
    blocks: Vec<(u32, WireBlock)>,
    windows: Vec<u64>,
    /// Extents whose descriptors came.
    extents: Vec<u32>,
    /// Requests without a reply.
    open: VecDeque<Open>,
    /// Tokens per block of the profile that is being registered.
    registering: u64,
}

/// A broker, and what its clients know.
pub struct World {
    /// The broker, over memory that is not there.
    pub broker: Broker,
    clients: Vec<Client>,
    jobs: VecDeque<Job>,
    /// How often each verb was granted, by its number.
    pub granted: BTreeMap<u16, usize>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("broker", &self.broker).finish_non_exhaustive()
    }
}

fn profiles() -> [Profile; 3] {
    let page = page_bytes() as u32;
    // 16 tokens of two layers: four pages each for K and V of a layer.
    let usual = Profile::uniform("usual", "f16", 2, page / 4, page / 4, 16).expect("a small geometry");
    let layer = Layer { k_row: 100, v_row: 0 };
    let window = Group { layers: vec![(0, layer), (3, layer)], window: Some(8) };
    let window =
        Profile::new("window", "f16", Layout::TokenMajor, 4, vec![window]).expect("a small geometry");
    let large = Profile::uniform("large", "f16", 2, 4 * page, 4 * page, 16).expect("a geometry");
    [usual, window, large]
}

impl Default for World {
    fn default() -> Self {
        World::new()
    }
}

impl World {
    /// A pool of a few extents, without clients.
    pub fn new() -> Self {
        let policy =
            Policy { audit: false, connections: CLIENTS as u32, checksums: true, ..Policy::default() };
        let broker = Broker::new(Arc::new(Imaginary), EXTENT, EXTENTS, EXTENTS, policy);
        let mut broker = broker.expect("imaginary memory is there");
        // Windows by way of a staging buffer, which needs no device; so do runs.
        let staging = StagingMeans { heap: Arc::new(Memfd::new(false)), bytes: 64 << 10, total: 128 << 10 };
        let access = Access::Contiguous;
        broker.set_means(Means { access, staging: Ok(staging), ..Means::default() });
        World { broker, clients: Vec::new(), jobs: VecDeque::new(), granted: BTreeMap::new() }
    }

    /// Plays a script to its end.
    pub fn play(&mut self, script: &[u8]) {
        let mut script = Script(script);
        while !script.0.is_empty() {
            super::alloc::at_most(16 << 20, "one step of the broker", || self.step(&mut script));
            assert_eq!(self.broker.verify(), Ok(()));
        }
    }

    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() % 32 {
            0 => self.connect(script),
            1 => {
                if !self.clients.is_empty() && script.byte() % 4 == 0 {
                    let client = self.clients.remove(script.below(self.clients.len()));
                    self.broker.disconnect(client.id);
                }
            }
            2 => self.work(1),
            3 => self.broker.tick(Instant::now()),
            4 => self.raw(script),
            5 => {
                self.broker.evict(&Evict::Blocks { most: u64::MAX, tenant: None });
            }
            6 => _ = self.broker.begin_fsck(),
            7 => _ = if script.byte() % 2 == 0 { self.broker.pressed() } else { self.broker.relieved() },
            _ => self.request(script),
        }
        self.jobs.extend(self.broker.jobs());
        // The worker is sometimes late, never for ever.
        if self.jobs.len() > 3 {
            self.work(usize::MAX);
        }
        self.carry();
    }

    fn work(&mut self, most: usize) {
        for _ in 0..most {
            let Some(job) = self.jobs.pop_front() else { break };
            self.broker.done(job.run(&Imaginary));
            self.jobs.extend(self.broker.jobs());
        }
    }

    fn connect(&mut self, script: &mut Script<'_>) {
        let uid = 1000 + u32::from(script.byte() % 2);
        let Ok(id) = self.broker.connect(Peer { uid, pid: 1 }) else { return };
        let (sequence, sessions, formats, blocks, windows, open, extents) = Default::default();
        self.clients.push(Client {
            id,
            sequence,
            sessions,
            formats,
            blocks,
            windows,
            extents,
            open,
            registering: 0,
        });
        // Most clients are past their greeting.
        let which = self.clients.len() - 1;
        if script.byte() % 16 != 0 {
            let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
            let hello = wire::Hello { magic, version, label: wire::label("c") };
            self.send(which, Verb::Hello, 0, |w| _ = w.put(&hello));
            self.carry();
            self.register(which, script.below(2));
            self.carry();
        }
    }

    fn register(&mut self, which: usize, profile: usize) {
        let profile = &profiles()[profile];
        self.clients[which].registering = u64::from(profile.tokens_per_block());
        self.send(which, Verb::Profile, 0, |w| wire::put_profile(w, profile, 0));
    }

    fn send(&mut self, which: usize, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) {
        let open = Open { sequence: 0, session, format: 0, used: Vec::new(), tokens: 0, stays: 0, head: 0 };
        self.send_open(which, verb, open, fill);
    }

    fn send_open(&mut self, which: usize, verb: Verb, open: Open, fill: impl FnOnce(&mut Writer)) {
        let client = &mut self.clients[which];
        // A driver reads no more of a client that has a request open.
        if self.broker.is_waiting(client.id) {
            return;
        }
        client.sequence += 1;
        let mut writer = Writer::request(verb, client.sequence, open.session);
        client.open.push_back(Open { sequence: client.sequence, ..open });
        fill(&mut writer);
        self.broker.request(client.id, &writer.finish());
    }

    /// Bytes that are no message, or one with a header that is almost right.
    fn raw(&mut self, script: &mut Script<'_>) {
        if self.clients.is_empty() {
            return;
        }
        let which = script.below(self.clients.len());
        let length = script.below(200);
        let bytes: Vec<u8> = (0..length).map(|_| script.byte()).collect();
        let id = self.clients[which].id;
        if self.broker.is_waiting(id) {
            return;
        }
        // Without a header that can be trusted the broker hangs up.
        if script.byte() % 8 == 0 {
            return self.broker.request(id, &bytes);
        }
        let verb = Verb::ALL[script.below(Verb::ALL.len())];
        let session = self.clients[which].sessions.first().map_or(0, |s| s.id);
        self.send(which, verb, session, |w| _ = w.put(&bytes[..]));
    }

    fn request(&mut self, script: &mut Script<'_>) {
        if self.clients.is_empty() {
            return self.connect(script);
        }
        let which = script.below(self.clients.len());
        let verb = USUAL[script.below(USUAL.len())];
        let others = script.byte() % 32 == 0;
        let honest = script.byte() % 4 != 0;
        let whose = &self.clients[if others { script.below(self.clients.len()) } else { which }];
        let none = || Session {
            id: 7,
            format: 7,
            tokens_per_block: 16,
            head: 0,
            table: Vec::new(),
            tokens: 0,
            sealed: 0,
        };
        let s = match whose.sessions.len() {
            0 => none(),
            // The latest ones, so that they get somewhere.
            n => whose.sessions[n - 1 - script.below(n.min(2))].clone(),
        };
        let verb = match verb {
            Verb::Open | Verb::Reserve | Verb::Free | Verb::ReturnExtent | Verb::Query | Verb::Profile => {
                verb
            }
            _ if honest && whose.sessions.is_empty() => Verb::Open,
            Verb::CloseWindow if honest && whose.windows.is_empty() => Verb::Window,
            _ => verb,
        };
        let window = match whose.windows.len() {
            0 => u64::from(script.byte()),
            n => whose.windows[script.below(n)],
        };
        let extent = match whose.extents.len() {
            0 => script.number(),
            n => whose.extents[script.below(n)],
        };
        let (format, _) = match whose.formats.len() {
            0 => (7, 16),
            n => whose.formats[script.below(n)],
        };
        // Right reports put credit behind the table, and say of all of it that it is written, or of part of it.
        let fits = |b: &&(u32, WireBlock)| !honest || b.0 == s.format || verb == Verb::Free;
        let credit: Vec<WireBlock> = whose.blocks.iter().filter(fits).map(|b| b.1).collect();
        let used = script.below(4).min(credit.len());
        let from = if honest { 0 } else { script.below(credit.len() - used + 1) };
        let blocks = credit[from..from + used].to_vec();
        let end = s.head + s.table.len() as u32;
        let first = if honest { end } else { script.below(4) as u32 };
        let room = u64::from(first + used as u32) * s.tokens_per_block;
        let tokens =
            if honest { room.saturating_sub(script.byte() as u64 % 3) } else { script.number().into() };
        let tokens = tokens.max(if honest { s.tokens.min(room) } else { 0 });
        let lie = u32::from(!honest && script.byte() % 8 == 0);
        let count_used = used as u32 + lie;
        let report = wire::Report { tokens: tokens.into(), first: first.into(), used: count_used.into() };
        let (a, b, c) = (script.number(), script.number(), script.number());
        let whole = (tokens / s.tokens_per_block) as u32;
        let some_blocks = match (honest, verb) {
            (true, Verb::Seal) => whole.saturating_sub(s.sealed).min(a % 4),
            _ => a % 4,
        };
        let ids: Vec<u32> = (0..some_blocks * s.tokens_per_block as u32).map(|n| n + b % 2).collect();
        let count = ids.len() as u32 + lie;
        let seal_from = if honest { s.sealed } else { b % 4 };
        let pins = if honest { s.sealed } else { a % 5 };
        let stays = if honest { tokens.saturating_sub(u64::from(a)) } else { a.into() };
        let head = if honest {
            s.head + u32::from(b % 4 == 0 && stays > room / 2 && end > s.head + 1)
        } else {
            b % 5
        };
        let known = match verb {
            Verb::Seal => u64::from(seal_from + some_blocks),
            _ => stays,
        };
        let of = if verb == Verb::Reserve || verb == Verb::Open { format } else { s.format };
        let used = blocks.clone();
        let open = Open { sequence: 0, session: s.id, format: of, used, tokens, stays: known, head };
        let zero = zerocopy::little_endian::U32::default;
        if verb == Verb::Profile {
            return self.register(which, a as usize % 3);
        }
        self.send_open(which, verb, open, |w| {
            match verb {
                Verb::Hello => _ = w.put(&wire::Hello::default()),
                Verb::Profile => unreachable!("sent above"),
                Verb::Open => {
                    let (format, priority) = (format.into(), b.into());
                    let max_tokens = u64::from(a).into();
                    _ = w.put(&wire::Open { format, priority, max_tokens, ..wire::Open::default() });
                }
                Verb::Reserve => _ = w.put(&wire::Reserve { format: format.into(), want: (a % 9).into() }),
                Verb::Grow => {
                    _ = w
                        .put(&wire::Grow {
                            report,
                            want: (a % 12).into(),
                            least: (b % 13).min(a % 12 + lie).into(),
                        })
                        .put(&blocks[..])
                }
                Verb::Trim => {
                    let (tokens, head) = (stays.into(), head.into());
                    _ = w.put(&wire::Trim { report, tokens, head, release: (c % 2).into() }).put(&blocks[..]);
                }
                Verb::Free => {
                    _ = w.put(&wire::Free { count: count_used.into(), reserved: zero() }).put(&blocks[..])
                }
                Verb::Fork | Verb::Close => _ = w.put(&report).put(&blocks[..]),
                Verb::Seal => {
                    w.put(&wire::Seal { report, from: seal_from.into(), count: count.into() });
                    w.put_tokens(&ids).put(&blocks[..]);
                }
                Verb::Pin => {
                    _ = w.put(&wire::Pin { report, blocks: pins.into(), on: (b % 2).into() }).put(&blocks[..])
                }
                Verb::Attach => {
                    _ = w.put(&wire::Attach { count: count.into(), more: (b % 2).into() }).put_tokens(&ids);
                }
                Verb::Skip => {
                    _ = w.put(&wire::Skip { from: (b % 3).into(), count: count.into() }).put_tokens(&ids)
                }
                Verb::ReturnExtent => {
                    _ = w.put(&wire::ReturnExtent { extent: extent.into(), reserved: zero() });
                }
                Verb::Query => _ = w.put(&wire::Query { format: format.into(), reserved: zero() }),
                Verb::Admit => {
                    let (tokens, flags) = (u64::from(a).into(), (b % 2).into());
                    _ = w.put(&wire::Admit { tokens, flags, reserved: zero() });
                }
                Verb::Window => {
                    let window = (window * u64::from(c % 4 == 1)).into();
                    let (blocks_asked, first) = match honest && room > 0 {
                        true => {
                            ((1 + a % (first + blocks.len() as u32 - s.head).max(1)).into(), s.head.into())
                        }
                        false => ((a % 5).into(), (b % 4).into()),
                    };
                    let (what, layer, kv) = ((c / 2 % 2).into(), (c / 4 % 3).into(), (c / 8 % 2).into());
                    let how = if honest && b % 4 != 0 { 4 * (b % 2) } else { b % 5 };
                    let (how, capacity, flags) = (how.into(), a.into(), (c / 16 % 2).into());
                    w.put(&wire::Window {
                        report,
                        window,
                        first,
                        blocks: blocks_asked,
                        what,
                        layer,
                        kv,
                        how,
                        capacity,
                        flags,
                    });
                    w.put(&blocks[..]);
                }
                Verb::CloseWindow => _ = w.put(&wire::CloseWindow { window: window.into() }),
            };
        });
    }

    /// Carries what the broker says to the clients, who learn from it.
    fn carry(&mut self) {
        for output in self.broker.outputs() {
            let (header, body) =
                wire::split(&output.message).expect("the broker's messages have their length");
            assert!(output.message.len() <= wire::MAX_MESSAGE && output.buffers.len() <= wire::MAX_FDS);
            let Some(at) = self.clients.iter().position(|c| c.id == output.to) else { continue };
            let client = &mut self.clients[at];
            let (sequence, opcode) = (header.sequence.get(), header.opcode.get());
            let mut answered = None;
            if opcode & wire::EVENT != wire::EVENT {
                assert!(opcode & wire::REPLY != 0, "neither a reply nor an event: {opcode:#x}");
                answered = client.open.iter().position(|o| o.sequence == sequence);
                // Bytes that were no message are answered under the number that they happened to have.
                assert!(answered.is_some() || header.fault.get() != 0, "a reply to no request");
            }
            let answered = answered.and_then(|open| client.open.remove(open));
            if header.fault.get() != 0 {
                let mut reader = Reader::new("a refusal", body);
                reader.one::<wire::Refusal>().expect("a refusal has its numbers");
                super::check_words(&reader.text());
            } else if opcode & wire::EVENT == wire::REPLY {
                *self.granted.entry(opcode & !wire::REPLY).or_default() += 1;
                if let Some(open) = answered {
                    client.learn(opcode & !wire::REPLY, header.session.get(), &open, body);
                }
            }
            if output.last {
                let client = self.clients.remove(at);
                self.broker.disconnect(client.id);
            }
        }
    }

    /// All clients go: then everything is free again, and every request has been answered.
    pub fn end(mut self) {
        self.work(usize::MAX);
        for _ in 0..8 {
            self.jobs.extend(self.broker.jobs());
            self.work(usize::MAX);
            self.carry();
        }
        for client in &self.clients {
            let waits = self.broker.is_waiting(client.id);
            assert!(
                client.open.len() <= usize::from(waits),
                "{} requests without a reply",
                client.open.len()
            );
        }
        for client in std::mem::take(&mut self.clients) {
            self.broker.disconnect(client.id);
        }
        let pins: Vec<String> = self.broker.status().pins.iter().map(|pin| pin.chain.clone()).collect();
        pins.iter().for_each(|chain| assert!(self.broker.unpin_named(chain), "{chain} cannot be unpinned"));
        self.broker.evict(&Evict::Blocks { most: u64::MAX, tenant: None });
        self.broker.relieved();
        for _ in 0..8 {
            self.jobs.extend(self.broker.jobs());
            self.work(usize::MAX);
        }
        assert_eq!(self.broker.verify(), Ok(()));
        let ledger: BTreeMap<&str, u64> = self.broker.ledger();
        let left: Vec<_> = ledger.iter().filter(|(name, bytes)| **bytes > 0 && **name != "free").collect();
        assert!(left.is_empty(), "with no client there, not everything is free: {left:?}");
    }
}

impl Client {
    /// What a client knows after its request was granted.
    fn learn(&mut self, opcode: u16, session: u64, open: &Open, body: &[u8]) {
        let mut reader = Reader::new("a reply", body);
        let verb = Verb::from_code(opcode).expect("a reply repeats its verb");
        let per_block = self.formats.iter().find(|f| f.0 == open.format).map_or(16, |f| f.1);
        if !open.used.is_empty() {
            self.blocks.retain(|b| !open.used.iter().any(|used| used.id() == b.1.id()));
        }
        if let Some(s) = self.sessions.iter_mut().find(|s| s.id == open.session) {
            if matches!(verb, Verb::Grow | Verb::Trim | Verb::Fork | Verb::Seal | Verb::Pin | Verb::Window) {
                s.table.extend(&open.used);
                s.tokens = open.tokens;
            }
            match verb {
                Verb::Trim => {
                    let keep = open.stays.div_ceil(s.tokens_per_block).max(u64::from(s.head)) as u32;
                    s.table.truncate((keep - s.head) as usize);
                    s.table.drain(..((open.head.max(s.head) - s.head) as usize).min(s.table.len()));
                    (s.head, s.tokens, s.sealed) = (open.head, open.stays, s.sealed.min(keep));
                }
                Verb::Seal => s.sealed = open.stays as u32,
                _ => {}
            }
        }
        match verb {
            Verb::Profile => {
                let format: &wire::Format = reader.one().expect("a format");
                self.formats.push((format.format.get(), self.registering));
            }
            Verb::Open => {
                let (table, head, tokens, sealed) = Default::default();
                self.sessions.push(Session {
                    id: session,
                    format: open.format,
                    tokens_per_block: per_block,
                    head,
                    table,
                    tokens,
                    sealed,
                });
            }
            Verb::Fork => {
                let twin = self.sessions.iter().find(|s| s.id == open.session).cloned();
                self.sessions.extend(twin.map(|twin| Session { id: session, ..twin }));
            }
            Verb::Close => self.sessions.retain(|s| s.id != open.session),
            Verb::Reserve | Verb::Grow | Verb::Trim | Verb::Attach => {
                let grant: &wire::Grant = reader.one().expect("a grant");
                let extents: &[wire::ExtentInfo] =
                    reader.many(grant.extents.get(), wire::MAX_FDS).expect("extents");
                self.extents.extend(extents.iter().map(|e| e.extent.get()));
                let blocks: &[wire::GrantedBlock] =
                    reader.many(grant.blocks.get(), MAX_BLOCKS).expect("blocks");
                reader.end().expect("a grant ends with its blocks");
                let blocks = blocks.iter().map(|b| b.block);
                match (verb, self.sessions.iter_mut().find(|s| s.id == open.session)) {
                    (Verb::Attach, Some(s)) => {
                        s.table.extend(blocks);
                        s.tokens = grant.tokens.get();
                        s.sealed = s.head + s.table.len() as u32;
                    }
                    _ => self.blocks.extend(blocks.map(|b| (open.format, b))),
                }
            }
            Verb::Window => {
                let made: &wire::WindowMade = reader.one().expect("a window");
                self.windows.push(made.window.get());
            }
            _ => {}
        }
    }
}

/// Scripts that reach most verbs, from a fixed seed.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut random = super::mutate::Random::new(8);
    (1..=10).map(|n| (0..n * 600).map(|_| random.next() as u8).collect()).collect()
}

/// After every step the books add up; at the end nothing is left.
pub fn run(data: &[u8]) -> bool {
    let mut world = World::new();
    world.play(&data[..data.len().min(6000)]);
    let granted = !world.granted.is_empty();
    world.end();
    granted
}
