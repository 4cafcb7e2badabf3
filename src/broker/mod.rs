//! The broker: what a request does to sessions, prefixes and the pool.
//!
//! Owns all state that decides, and the buffers behind the pool's extents. It does no I/O on sockets and never waits:
//! a driver (the daemon's loop, or an embedding process) feeds it requests, carries its [`Output`]s to the clients and
//! its [`Job`]s to a worker. Invariants:
//! - state changes before the reply that tells of it leaves, and a block is free before it is granted again;
//! - a request that is refused has changed nothing but its report of the table;
//! - what a client says about blocks is a claim, checked against the pool before anything changes;
//! - references in the pool are the entries of the tables, and the prefix index names only blocks in use.

mod admission;
mod alone;
mod audit;
pub(crate) mod common;
mod consent;
mod drain;
mod elastic;
pub mod events;
mod evict;
mod fsck;
mod grant;
mod lent;
#[cfg(test)]
mod model_test;
pub mod prefix;
mod publish;
mod quarantine;
mod record;
mod report;
mod rest;
mod session;
mod store;
mod tables;
pub mod tenant;
mod usage;
mod verbs;
#[cfg(test)]
mod verify_test;
mod waits;
mod window;
#[cfg(test)]
mod window_test;
mod work;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::{Immutable, IntoBytes};

pub use common::{CommonDonorReport, CommonReport, CommonRule, label_begins, parts as common_parts};
pub use evict::{Evict, EvictReport};
pub use fsck::{DamageReport, FsckReport};
pub use lent::{Borrower, HoldError, HoldId, HoldProgress, HoldReport};
pub use prefix::{Eviction, PrefixStats};
pub use quarantine::{LastGranted, QuarantineReport};
pub use record::RecordError;
pub use report::{
    CountReport, ExtentReport, LedgerReport, MapReport, PinReport, PoolReport, PoolWaste, SessionReport,
    StatusReport,
};
pub use session::Session;
pub use store::{StoreOutcome, StorePolicy, StoreRefusal, StoreReport, StoredReport};
pub use tenant::{LimitChange, LimitsReport, Outcome, TenantPolicy, TenantReport};
pub use usage::{ChainReport, PrefixesReport, TenantUsage, TenantsReport};
pub use window::{Declined, Made, Making};
pub use work::{Descriptor, Done, Job, Opened, Output};

use crate::heap::{Buffer, Heap, HeapError};
use crate::id::{BlockId, ClientId, ExtentId, FormatId, SessionId, Tenant};
use crate::map::page_bytes;
use crate::packing::Extents;
use crate::pool::{Account, ClaimError, Cut, Dropped, Pool};
use crate::profile::Profile;
use crate::window::How;
use crate::wire::{self, Event, Fault, Verb, WireError, Writer};

/// The uid that the kernel shows for users without a mapping in this namespace: nobody in particular.
const OVERFLOW_UID: u32 = 65534;
/// How many requests the flight recorder remembers.
const RECORDER: usize = 64;

/// What the operator allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Connections in all.
    pub connections: u32,
    /// Connections of one tenant.
    pub connections_per_tenant: u32,
    /// Milliseconds that a connection gets to say hello. The driver keeps the time.
    pub hello_ms: u32,
    /// Sessions of one connection.
    pub sessions_per_connection: u32,
    /// Geometries that one connection may register.
    pub profiles_per_connection: u32,
    /// Blocks that all tables, windows and pins of one tenant may name; `None` for what follows from the pool.
    pub table_blocks_per_tenant: Option<u64>,
    /// Windows of one session.
    pub windows_per_session: u32,
    /// Windows of one tenant, with those that are closed and still held: each may cost the broker a descriptor.
    pub windows_per_tenant: u32,
    /// Windows in all.
    pub windows: u32,
    /// Bytes of blocks that one connection may hold, shared ones included; `None` for no bound but the tenant's.
    pub bytes_per_connection: Option<u64>,
    /// What a tenant gets of which nothing is said. Its reserve is 0.
    pub usual_tenant: TenantPolicy,
    /// What single tenants get. These are the numbers at the start: operators may change them.
    pub tenants: BTreeMap<Tenant, TenantPolicy>,
    /// Which cached prefixes go first.
    pub eviction: Eviction,
    /// Bytes of prefixes that are kept although nobody holds them; `None` for as many as there is room for.
    pub cache_bytes: Option<u64>,
    /// Milliseconds that a session gets to make room for one of higher priority.
    pub reclaim_ms: u32,
    /// Milliseconds after which an extent without a block in use goes back to the pool, at the latest after twice as many;
    /// 0 to leave it with its tenant until somebody else needs it.
    pub rest_ms: u32,
    /// Take checksums of sealed blocks, which a check compares ([`Broker::begin_fsck`]).
    pub checksums: bool,
    /// Whose pinned prompts are common to whom.
    pub common: Vec<CommonRule>,
    /// Bytes that read-only copies of these may have, in whole extents.
    pub common_bytes: u64,
    /// Of these, bytes for copies of single donors' prompts; the others share the rest equally.
    pub common_limits: BTreeMap<Tenant, u64>,
    /// Zero a block at every grant, not only when it comes from another process.
    pub scrub_always: bool,
    /// Strict mode: an extent holds one block, however many would fit.
    pub one_block_per_extent: bool,
    /// Free extents go back to the kernel while memory is short.
    pub elastic: bool,
    /// As long as more extents than these are there.
    pub floor_extents: u32,
    /// Check every invariant after every change. On in debug builds.
    pub audit: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            connections: 256,
            connections_per_tenant: 64,
            hello_ms: 5000,
            sessions_per_connection: 256,
            profiles_per_connection: 16,
            table_blocks_per_tenant: None,
            windows_per_session: 256,
            windows_per_tenant: 1024,
            windows: 4096,
            bytes_per_connection: None,
            usual_tenant: TenantPolicy::default(),
            tenants: BTreeMap::new(),
            eviction: Eviction::default(),
            cache_bytes: None,
            reclaim_ms: 2000,
            rest_ms: 500,
            checksums: false,
            common: Vec::new(),
            common_bytes: 0,
            common_limits: BTreeMap::new(),
            scrub_always: false,
            one_block_per_extent: false,
            elastic: false,
            floor_extents: 0,
            audit: cfg!(debug_assertions),
        }
    }
}

/// Who is at the other end, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The uid: the tenant.
    pub uid: u32,
    /// The process, for people only.
    pub pid: i32,
}

/// Why somebody may not connect.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum ConnectError {
    #[error("uid {OVERFLOW_UID} stands for users that this namespace does not know; it can be no tenant")]
    Nobody,
    #[error("{0} connections are open, as many as limits.connections allows")]
    Full(u32),
    #[error(
        "no connection is left: of the {0} that limits.connections allows, those that are not open are kept for tenants with a reserve"
    )]
    Kept(u32),
    #[error("uid {uid} has {count} connections open, as many as limits.connections-per-tenant allows")]
    TenantFull { uid: u32, count: u32 },
}

/// A refusal: whose fault, numbers, and words.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Refused {
    fault: Fault,
    needed: u64,
    available: u64,
    text: String,
}

impl Refused {
    fn new(fault: Fault, text: impl Into<String>) -> Self {
        Refused { fault, needed: 0, available: 0, text: text.into() }
    }

    fn bad(text: impl Into<String>) -> Self {
        Refused::new(Fault::BadRequest, text)
    }

    fn numbers(self, needed: u64, available: u64) -> Self {
        Refused { needed, available, ..self }
    }
}

impl From<WireError> for Refused {
    fn from(e: WireError) -> Self {
        Refused::bad(e.to_string())
    }
}

impl From<ClaimError> for Refused {
    fn from(e: ClaimError) -> Self {
        let fault = match e {
            ClaimError::NoExtent(_) | ClaimError::Stale { .. } => Fault::Stale,
            ClaimError::NoSlot(_) | ClaimError::NotInUse(_) | ClaimError::NotCredit(_) => Fault::BadRequest,
        };
        Refused::new(fault, e.to_string())
    }
}

/// What a verb answers.
enum Answer {
    /// This reply.
    Now(Reply),
    /// Nothing yet: the request is kept and tried again.
    Later,
    /// Nothing yet: the worker makes a window; these ways were not possible.
    Making { declined: Vec<(How, Declined)> },
}

/// The rest of a reply, after its header.
#[derive(Default)]
struct Reply {
    session: u64,
    body: Writer,
    extents: Vec<ExtentId>,
    /// Descriptors beside those of extents.
    descriptors: Vec<Arc<OwnedFd>>,
    /// Zeros to be written before the reply leaves.
    scrub: Vec<BlockId>,
    /// Blocks that become the client's credit with it.
    granted: Vec<BlockId>,
}

/// One connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Client {
    tenant: Tenant,
    pid: i32,
    label: String,
    greeted: bool,
    /// In the order in which they were registered: the first one is the connection's format 1.
    formats: Vec<FormatId>,
    sessions: BTreeSet<SessionId>,
    /// Sessions that ended without its doing, until it agrees: with the blocks that it may still write.
    lost: BTreeMap<SessionId, Vec<BlockId>>,
}

/// One geometry that clients have registered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Format {
    profile: Profile,
    cut: Cut,
}

/// What has happened since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Requests answered.
    pub requests: u64,
    /// Requests refused, all faults.
    pub refusals: u64,
    /// Of these, those that named something that had gone.
    pub stale: u64,
    /// Blocks granted.
    pub granted: u64,
    /// Blocks zeroed before a grant.
    pub scrubbed: u64,
    /// Extents renewed because they had been somebody's.
    pub renewed: u64,
    /// Of these, those whose memory was scrubbed and used again.
    pub reused: u64,
    /// Extents taken from tenants that had no block in use in them.
    pub seized: u64,
    /// Moments at which the machine was short of memory.
    pub pressed: u64,
    /// Extents that went back to the kernel over it.
    pub given_back: u64,
    /// Sessions asked to make room for one of higher priority.
    pub reclaims: u64,
    /// Of these, those that did not in time, and were ended.
    pub sessions_lost: u64,
    /// Sealed blocks that were found to be not what was sealed.
    #[serde(default)]
    pub damaged: u64,
    /// Connections that were ended because nobody said hello on them in time.
    #[serde(default)]
    pub silent: u64,
}

/// Everything that decides, in a form that can be written down and rebuilt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    pool: Pool,
    next_format: u32,
    formats: BTreeMap<FormatId, Format>,
    next_client: u64,
    clients: BTreeMap<ClientId, Client>,
    sessions_born: u64,
    /// The number of each tenant's youngest session.
    session_numbers: BTreeMap<Tenant, u64>,
    sessions: BTreeMap<SessionId, Session>,
    prefixes: prefix::Prefixes,
    common: common::Common,
    tenancy: tenant::Tenancy,
    /// Blocks that have been promised to sessions and not been granted yet.
    promises: BTreeMap<(Tenant, FormatId), u64>,
    /// The number of each tenant's youngest window.
    window_numbers: BTreeMap<Tenant, u32>,
    windows: BTreeMap<u64, window::Hold>,
    /// Extents that the pool was to have.
    wanted_extents: u32,
    /// Whom the descriptor of each extent went to last.
    last_granted: BTreeMap<ExtentId, LastGranted>,
    counters: Counters,
}

/// A client whose request waits for the worker.
#[derive(Debug)]
enum Waiting {
    /// For extents: the request is tried again when one has been renewed.
    Extents(Vec<u8>),
    /// For a window: the request goes on when the worker is done. With it the ways that were not possible so far.
    Window { message: Vec<u8>, declined: Vec<(How, Declined)> },
    /// For zeros: then this goes out.
    Zeros {
        ticket: u64,
        output: Output,
        verb: Verb,
        sequence: u64,
        /// All that the reply hands over, and the extents whose descriptors go with it.
        granted: Vec<BlockId>,
        extents: Vec<ExtentId>,
    },
}

/// The broker.
#[derive(Debug)]
pub struct Broker {
    heap: Arc<dyn Heap>,
    reason: String,
    pressure_watch: String,
    policy: Policy,
    instance: u64,
    /// How the configured pool was cut, for the status.
    cut: Option<Extents>,
    state: State,
    buffers: BTreeMap<ExtentId, Arc<Buffer>>,
    outbox: VecDeque<Output>,
    jobs: VecDeque<Job>,
    waiting: BTreeMap<ClientId, Waiting>,
    /// In which order those are tried again who wait for extents.
    waits: waits::Waits,
    /// Sessions that were asked to make room, and when their time is up.
    reclaims: BTreeMap<SessionId, std::time::Instant>,
    /// A session that was asked to make room has ended: who waits is to be tried again.
    stirred: bool,
    asked_back: BTreeMap<ExtentId, consent::Asked>,
    store: Option<store::Store>,
    absent: quarantine::Absent,
    rest: rest::Rest,
    common: common::Commons,
    sums: fsck::Sums,
    lent: lent::Lent,
    windows: window::Windows,
    /// Descriptors that the reply being made will carry.
    fresh_descriptors: BTreeSet<ExtentId>,
    tables: tables::Tables,
    audit: audit::Audit,
    next_ticket: u64,
    recorder: VecDeque<(ClientId, Verb, u64)>,
    frozen: bool,
    /// An operator's word, which a restart forgets.
    draining: bool,
}

impl Broker {
    /// Takes `extents` extents of `extent_bytes` bytes from `heap`, at least `least` of them. Fewer than wanted is said
    /// in the log and in the status, and the rest is asked for again from time to time.
    pub fn new(
        heap: Arc<dyn Heap>,
        extent_bytes: u64,
        extents: u32,
        least: u32,
        policy: Policy,
    ) -> Result<Self, HeapError> {
        let mut broker = Broker::empty(heap, extent_bytes, policy);
        broker.state.wanted_extents = extents;
        for taken in 0..extents {
            match broker.heap.allocate(extent_bytes) {
                Ok(buffer) => broker.take_in(buffer),
                Err(e) if taken < least.max(1) => return Err(e),
                Err(e) => {
                    log::warn!("the pool has {taken} of {extents} extents: {e}");
                    break;
                }
            }
        }
        broker.look_for_missing();
        Ok(broker)
    }

    fn empty(heap: Arc<dyn Heap>, extent_bytes: u64, policy: Policy) -> Self {
        let state = State {
            pool: Pool::new(extent_bytes),
            next_format: 1,
            formats: BTreeMap::new(),
            next_client: 1,
            clients: BTreeMap::new(),
            sessions_born: 0,
            session_numbers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            prefixes: prefix::Prefixes::new(policy.eviction),
            common: common::Common::default(),
            tenancy: tenant::Tenancy {
                revision: 1,
                usual: policy.usual_tenant,
                named: policy.tenants.clone(),
            },
            promises: BTreeMap::new(),
            window_numbers: BTreeMap::new(),
            windows: BTreeMap::new(),
            wanted_extents: 0,
            last_granted: BTreeMap::new(),
            counters: Counters::default(),
        };
        Broker {
            heap,
            reason: String::new(),
            pressure_watch: String::new(),
            policy,
            instance: fresh_instance(),
            cut: None,
            state,
            buffers: BTreeMap::new(),
            outbox: VecDeque::new(),
            jobs: VecDeque::new(),
            waiting: BTreeMap::new(),
            waits: waits::Waits::default(),
            reclaims: BTreeMap::new(),
            stirred: false,
            asked_back: BTreeMap::new(),
            store: None,
            absent: quarantine::Absent::new(),
            rest: rest::Rest::default(),
            common: common::Commons::default(),
            sums: fsck::Sums::default(),
            lent: lent::Lent::default(),
            windows: window::Windows::default(),
            fresh_descriptors: BTreeSet::new(),
            tables: tables::Tables::default(),
            audit: audit::Audit::default(),
            next_ticket: 1,
            recorder: VecDeque::with_capacity(RECORDER),
            frozen: false,
            draining: false,
        }
    }

    fn take_in(&mut self, buffer: Buffer) {
        let id = self.state.pool.add();
        self.buffers.insert(id, Arc::new(buffer));
    }

    /// Why the pool is made of this kind of memory: shown in the status.
    pub fn set_reason(&mut self, reason: String) {
        self.reason = reason;
    }

    /// How it is learnt that memory is short: shown in the status.
    pub fn set_pressure_watch(&mut self, how: String) {
        self.pressure_watch = how;
    }

    /// How the pool was cut: shown in the status, with what that costs.
    pub fn set_cut(&mut self, cut: Extents) {
        self.cut = Some(cut);
    }

    /// The heap that the pool is made of.
    pub fn heap(&self) -> Arc<dyn Heap> {
        self.heap.clone()
    }

    /// Somebody connects.
    pub fn connect(&mut self, peer: Peer) -> Result<ClientId, ConnectError> {
        if peer.uid == OVERFLOW_UID {
            return Err(ConnectError::Nobody);
        }
        if self.state.clients.len() as u32 >= self.policy.connections {
            return Err(ConnectError::Full(self.policy.connections));
        }
        let tenant = Tenant(peer.uid);
        let count = self.state.clients.values().filter(|c| c.tenant == tenant).count() as u32;
        if count >= self.policy.connections_per_tenant {
            return Err(ConnectError::TenantFull { uid: peer.uid, count });
        }
        let kept = self.connections_kept_for_others(tenant);
        if (self.state.clients.len() as u32).saturating_add(kept) >= self.policy.connections {
            return Err(ConnectError::Kept(self.policy.connections));
        }
        let id = ClientId(self.state.next_client);
        self.state.next_client += 1;
        let client = Client {
            tenant,
            pid: peer.pid,
            label: String::new(),
            greeted: false,
            formats: Vec::new(),
            sessions: BTreeSet::new(),
            lost: BTreeMap::new(),
        };
        self.state.clients.insert(id, client);
        Ok(id)
    }

    /// Whether hello has been said on a connection.
    pub fn has_greeted(&self, client: ClientId) -> bool {
        self.state.clients.get(&client).is_some_and(|c| c.greeted)
    }

    /// A connection on which nobody has said hello in time has been ended.
    pub fn count_silent(&mut self) {
        self.state.counters.silent += 1;
    }

    /// A connection has ended: what it had is free again when this returns.
    pub fn disconnect(&mut self, id: ClientId) {
        let Some(client) = self.state.clients.remove(&id) else { return };
        self.waiting.remove(&id);
        let last = self.state.clients.values().all(|c| c.tenant != client.tenant);
        self.stirred |= self.waits.forget(id, client.tenant, last);
        self.orphan_windows(id);
        for session in client.sessions {
            self.end_session(session);
        }
        for blocks in client.lost.into_values() {
            self.free_suspects(id, blocks);
        }
        for block in self.state.pool.credit_of(id) {
            let freed = self.state.pool.free_credit(block, id);
            debug_assert_eq!(freed, Ok(()));
        }
        for extent in self.state.pool.held_by(id) {
            self.state.pool.remove_holder(extent, id);
        }
        self.state.common.forget_client(id);
        self.look_for_kept_copies_of(client.tenant);
        for format in client.formats {
            self.forget_format(format);
        }
        self.settle();
    }

    /// Forgets a geometry that nobody uses.
    fn forget_format(&mut self, format: FormatId) {
        let used = self.state.clients.values().any(|c| c.formats.contains(&format))
            || self.state.pool.extents().values().any(|e| e.owned().is_some_and(|o| o.format == format));
        if !used {
            self.state.formats.remove(&format);
        }
    }

    /// Handles one message of a client. What comes of it is in the outbox: see [`outputs`](Self::outputs).
    pub fn request(&mut self, client: ClientId, message: &[u8]) {
        if !self.state.clients.contains_key(&client) {
            return;
        }
        let (header, body) = match wire::split(message) {
            Ok(parts) => parts,
            // Without a header that can be trusted there is no number to reply to.
            Err(e) => return self.hang_up(client, 0, 0, &Refused::from(e)),
        };
        let (opcode, sequence) = (header.opcode.get(), header.sequence.get());
        let Some(verb) = Verb::from_code(opcode) else {
            return self.refuse(client, opcode, sequence, &WireError::UnknownVerb(opcode).into());
        };
        if sequence == 0 {
            let why = Refused::bad("sequence number 0 is for events: number requests from 1");
            return self.hang_up(client, opcode, 0, &why);
        }
        if self.recorder.len() == RECORDER {
            self.recorder.pop_front();
        }
        self.recorder.push_back((client, verb, header.session.get()));
        let session = SessionId { tenant: self.client(client).tenant, number: header.session.get() };
        match self.dispatch(client, verb, session, body) {
            Ok(Answer::Now(reply)) => self.reply(client, verb, sequence, reply),
            Ok(Answer::Later) => {
                self.waiting.insert(client, Waiting::Extents(message.to_vec()));
                let tenant = self.client(client).tenant;
                self.waits.begin(client, tenant);
            }
            Ok(Answer::Making { declined }) => {
                self.waiting.insert(client, Waiting::Window { message: message.to_vec(), declined });
            }
            Err(why) if verb == Verb::Hello => self.hang_up(client, opcode, sequence, &why),
            Err(why) => self.refuse(client, opcode, sequence, &why),
        }
        self.settle();
    }

    fn reply(&mut self, client: ClientId, verb: Verb, sequence: u64, reply: Reply) {
        self.state.counters.requests += 1;
        let mut message = Writer::start(verb as u16 | wire::REPLY, 0, sequence, reply.session);
        message.put(reply.body.body());
        // Copies have the highest names, so their descriptors come last.
        let (copies, extents): (Vec<_>, Vec<_>) = reply.extents.iter().partition(|e| e.is_copy());
        self.note_granted(client, &extents);
        let buffers = extents.iter().filter_map(|e| self.buffers.get(e).cloned()).collect();
        let mut descriptors: Vec<_> = copies.iter().filter_map(|e| self.common_descriptor(*e)).collect();
        descriptors.extend(reply.descriptors.into_iter().map(Descriptor::Shared));
        let message = message.finish();
        let output = Output { to: client, message, buffers, descriptors, last: false };
        if reply.scrub.is_empty() {
            return self.outbox.push_back(output);
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let pieces = reply.scrub.iter().filter_map(|b| self.piece(*b)).collect();
        self.state.counters.scrubbed += reply.scrub.len() as u64;
        self.jobs.push_back(Job::Scrub { ticket, pieces });
        let Reply { granted, extents, .. } = reply;
        self.waiting.insert(client, Waiting::Zeros { ticket, output, verb, sequence, granted, extents });
    }

    /// Where a block's bytes are.
    fn piece(&self, block: BlockId) -> Option<(Arc<Buffer>, Range<u64>)> {
        let extent = self.state.pool.extents().get(&block.place.extent)?;
        let start = extent.owned()?.slot_bytes * u64::from(block.place.slot);
        let buffer = self.buffers.get(&block.place.extent)?.clone();
        Some((buffer, start..start + extent.owned()?.slot_bytes))
    }

    fn refusal(&mut self, client: ClientId, opcode: u16, sequence: u64, why: &Refused) -> Output {
        let counters = &mut self.state.counters;
        counters.requests += 1;
        counters.refusals += 1;
        counters.stale += u64::from(why.fault == Fault::Stale);
        log::debug!("client {}: {}: {}", client.0, why.fault.name(), why.text);
        let mut message = Writer::start(opcode | wire::REPLY, why.fault as u16, sequence, 0);
        message.put(&wire::Refusal { needed: why.needed.into(), available: why.available.into() });
        message.put(why.text.as_bytes());
        Output::plain(client, message)
    }

    fn refuse(&mut self, client: ClientId, opcode: u16, sequence: u64, why: &Refused) {
        let output = self.refusal(client, opcode & !wire::EVENT, sequence, why);
        self.outbox.push_back(output);
    }

    fn hang_up(&mut self, client: ClientId, opcode: u16, sequence: u64, why: &Refused) {
        let output = self.refusal(client, opcode & !wire::EVENT, sequence, why);
        self.outbox.push_back(Output { last: true, ..output });
    }

    /// Sends an event, about one of the client's sessions or (0) about none.
    fn tell(&mut self, to: ClientId, event: Event, session: u64, body: &(impl IntoBytes + Immutable)) {
        let mut message = Writer::start(wire::EVENT | event as u16, 0, 0, session);
        message.put(body);
        self.outbox.push_back(Output::plain(to, message));
    }

    /// Whether the client has a request that is not answered yet: the driver reads no more of it until then.
    pub fn is_waiting(&self, client: ClientId) -> bool {
        self.waiting.contains_key(&client)
    }

    /// Extents that one client may have descriptors of, copies included: of so many it may be told at once that they go back.
    pub fn most_extents_of_a_client(&self) -> usize {
        self.state.pool.extents().len() + self.common_places() as usize
    }

    /// Whether there is anything to be carried to clients or to the worker.
    pub fn has_work(&self) -> bool {
        !(self.outbox.is_empty() && self.jobs.is_empty())
    }

    /// Messages to be carried to clients, oldest first.
    pub fn outputs(&mut self) -> VecDeque<Output> {
        std::mem::take(&mut self.outbox)
    }

    /// Work to be carried to the worker, in this order.
    pub fn jobs(&mut self) -> VecDeque<Job> {
        std::mem::take(&mut self.jobs)
    }

    /// The worker is done with a job.
    pub fn done(&mut self, done: Done) {
        match done {
            Done::Scrubbed { ticket, result } => self.scrubbed(ticket, result),
            Done::Window { ticket, result } => self.window_made(ticket, result),
            Done::Renewed { extent, result } => self.renewed(extent, result),
            Done::Allocated(result) => self.allocated(result),
            Done::Summed { block, result } => self.summed(block, result),
            Done::GivenBack(extent) => self.given_back(extent),
            Done::Copied { ticket, result } => self.copied(ticket, result),
            Done::Stored(finished) => self.store_finished(finished),
        }
        self.settle();
    }

    fn scrubbed(&mut self, ticket: u64, result: Result<(), String>) {
        if self.store_cleared(ticket, &result) {
            return;
        }
        let is_it =
            |(_, w): &(&ClientId, &Waiting)| matches!(w, Waiting::Zeros { ticket: t, .. } if *t == ticket);
        // The client may have gone meanwhile; then its blocks are free already.
        let Some((&client, _)) = self.waiting.iter().find(is_it) else { return };
        let Some(Waiting::Zeros { output, verb, sequence, granted, extents, .. }) =
            self.waiting.remove(&client)
        else {
            return;
        };
        let Err(error) = result else { return self.outbox.push_back(output) };
        // All of the grant goes back, not only what could not be zeroed: the client gets to know none of it.
        for block in granted {
            let freed = self.state.pool.free_credit(block, client);
            debug_assert_eq!(freed, Ok(()));
        }
        for extent in extents {
            self.state.pool.remove_holder(extent, client);
        }
        log::error!("zeroing blocks for client {} failed: {error}", client.0);
        let why = Refused::new(Fault::BrokerFault, format!("the blocks could not be zeroed: {error}"));
        self.refuse(client, verb as u16, sequence, &why);
    }

    /// Tries requests again that waited for extents.
    fn retry(&mut self) {
        let waits = |(client, w): (&ClientId, &Waiting)| match w {
            Waiting::Extents(_) => Some(*client),
            Waiting::Zeros { .. } | Waiting::Window { .. } => None,
        };
        let clients =
            self.waiting.iter().filter_map(waits).map(|client| (self.client(client).tenant, client));
        for client in self.waits.order(clients) {
            let tenant = self.client(client).tenant;
            if let Some(Waiting::Extents(message)) = self.waiting.remove(&client) {
                self.request(client, &message);
                if !matches!(self.waiting.get(&client), Some(Waiting::Extents(_))) {
                    self.stirred |= self.waits.serve(client, tenant);
                }
            }
        }
    }

    /// After every change: extents that were somebody's go to the worker; debug builds check every invariant.
    fn settle(&mut self) {
        self.let_go_of_devices();
        self.tend_common();
        self.end_waiting_for_copies();
        // Whoever was due may have been answered, and others have waited for that.
        while std::mem::take(&mut self.stirred) {
            self.retry();
        }
        self.shrink_cache();
        while let Some(extent) = self.state.pool.begin_renewal() {
            let (old, bytes) = (self.buffers.remove(&extent), self.state.pool.extent_bytes());
            self.asked_back.remove(&extent);
            self.jobs.push_back(Job::Renew { extent, old, bytes });
        }
        self.order_sum();
        self.recall_for_waiting();
        self.audit.changed();
        self.watch_idle();
        if self.policy.audit {
            self.check_some();
        }
    }

    fn client(&self, id: ClientId) -> &Client {
        &self.state.clients[&id]
    }

    fn end_session(&mut self, id: SessionId) {
        self.end_promise(id);
        self.stirred |= self.reclaims.remove(&id).is_some();
        let Some(session) = self.state.sessions.remove(&id) else { return };
        self.tables.change(session.tenant, session.table.len(), 0);
        if let Some(client) = self.state.clients.get_mut(&session.client) {
            client.sessions.remove(&id);
        }
        // From the tail: of a chain that goes altogether, no block is left without its parent in between. Of layers with a
        // window it is the other way round: the end is what is still of use.
        if self.is_windowed(session.format) {
            self.let_all_go(session.table.iter().copied());
        } else {
            self.let_all_go(session.table.iter().rev().copied());
        }
        self.check_windows(id);
    }

    /// A block leaves a table. A published one that nobody holds any more is cached.
    fn let_go(&mut self, block: BlockId, to_credit: Option<ClientId>) -> Dropped {
        let State { pool, prefixes, .. } = &mut self.state;
        let mut became = Dropped::Kept;
        // Tables are all the references to a copy that are counted.
        let of_pool = Some(block).filter(|block| !block.place.extent.is_copy());
        pool.drop_refs(of_pool, to_credit, |place| prefixes.let_go(place), |_, what| became = what);
        if became == Dropped::Freed {
            self.freed(block);
        }
        became
    }

    /// All blocks of a table leave it, in this order.
    fn let_all_go(&mut self, blocks: impl Iterator<Item = BlockId>) {
        let State { pool, prefixes, .. } = &mut self.state;
        let mut freed = Vec::new();
        let of_pool = blocks.filter(|block| !block.place.extent.is_copy());
        pool.drop_refs(
            of_pool,
            None,
            |place| prefixes.let_go(place),
            |block, what| freed.extend((what == Dropped::Freed).then_some(block)),
        );
        freed.into_iter().for_each(|block| self.freed(block));
    }

    /// Blocks enter one more table.
    fn share(&mut self, blocks: &[BlockId]) {
        let State { pool, prefixes, .. } = &mut self.state;
        let of_pool = blocks.iter().map(|block| block.place).filter(|place| !place.extent.is_copy());
        pool.share(of_pool, |place| prefixes.hold(place));
    }

    fn freed(&mut self, block: BlockId) {
        self.state.prefixes.forget(block.place);
        self.state.pool.release_if_idle(block.place.extent);
    }

    /// Keeps the cache within its bound.
    fn shrink_cache(&mut self) {
        let Some(most) = self.policy.cache_bytes else { return };
        while self.state.pool.ledger()[Account::Cached] > most {
            let Some(block) = self.state.prefixes.evict_any() else { return };
            self.state.pool.evict(block.place);
            self.state.pool.release_if_idle(block.place.extent);
        }
    }

    /// What of prefixes is known.
    pub fn prefix_stats(&self) -> PrefixStats {
        self.state.prefixes.stats()
    }

    /// Where every byte of the pool is.
    pub fn ledger(&self) -> BTreeMap<&'static str, u64> {
        Account::ALL.iter().map(|a| (a.name(), self.state.pool.ledger()[*a])).collect()
    }

    /// Tells every client that the broker goes away.
    pub fn say_goodbye(&mut self) {
        for &to in self.state.clients.keys() {
            let message = Writer::start(wire::EVENT | wire::Event::Goodbye as u16, 0, 0, 0);
            self.outbox.push_back(Output { last: true, ..Output::plain(to, message) });
        }
    }

    /// The geometry's blocks in an extent of this pool.
    fn cut(&self, format: FormatId, profile: &Profile) -> Cut {
        let slot_bytes = profile.slot_bytes(0, page_bytes() as u64);
        let fit = (self.state.pool.extent_bytes() / slot_bytes) as u32;
        Cut { format, slot_bytes, slots: if self.policy.one_block_per_extent { fit.min(1) } else { fit } }
    }
}

/// A number that tells this run of the broker from others.
fn fresh_instance() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's hasher is keyed by the system's random numbers.
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish() | 1
}
