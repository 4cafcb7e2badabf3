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
mod connect;
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
mod policy;
pub mod prefix;
mod publish;
mod quarantine;
mod record;
mod references;
mod report;
mod request;
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
mod walks;
mod window;
#[cfg(test)]
mod window_test;
mod work;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use common::{CommonDonorReport, CommonReport, CommonRule, label_begins, parts as common_parts};
use connect::OVERFLOW_UID;
pub use connect::{ConnectError, Peer};
pub use evict::{Evict, EvictReport};
pub use fsck::{DamageReport, FsckReport};
pub use lent::{Borrower, HoldError, HoldId, HoldProgress, HoldReport};
pub use policy::Policy;
pub use prefix::{Eviction, PrefixStats};
pub use quarantine::{LastGranted, QuarantineReport};
pub use record::RecordError;
pub use report::{
    CountReport, ExtentReport, LedgerReport, MapReport, PinReport, PoolReport, PoolWaste, SessionReport,
    StatusReport,
};
use request::{Answer, RECORDER, Refused, Reply, Waiting};
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
use crate::pool::{Account, Cut, Pool};
use crate::profile::Profile;
use crate::wire::Verb;

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
    /// What was found by looking at all that tables name, or the index holds: see there.
    walks: std::cell::RefCell<walks::Walks>,
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
            walks: std::cell::RefCell::default(),
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
        self.all_done([done]);
    }

    /// The worker is done with these: what follows from them follows once.
    pub fn all_done(&mut self, done: impl IntoIterator<Item = Done>) {
        done.into_iter().for_each(|done| self.note_done(done));
        self.settle();
    }

    fn note_done(&mut self, done: Done) {
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

    /// What of prefixes is known.
    pub fn prefix_stats(&self) -> PrefixStats {
        self.state.prefixes.stats()
    }

    /// Where every byte of the pool is.
    pub fn ledger(&self) -> BTreeMap<&'static str, u64> {
        Account::ALL.iter().map(|a| (a.name(), self.state.pool.ledger()[*a])).collect()
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
