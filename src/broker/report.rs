//! What the broker tells operators: the documents behind `kvbctl status`, `sessions` and `map`.
//!
//! Owns nothing; reads the state. Invariant: sizes are in bytes, and every figure is counted at the moment of asking.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Broker, Counters, HoldReport, LastGranted, QuarantineReport};
use crate::heap::Backend;
use crate::pool::{Block, Use};

/// Bytes by account; they add up to the pool.
pub type LedgerReport = BTreeMap<String, u64>;

/// The pool.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PoolReport {
    /// Bytes that the broker holds.
    pub bytes: u64,
    /// Bytes of one extent.
    pub extent_bytes: u64,
    /// Extents that the broker holds.
    pub extents: u32,
    /// Extents that it was to take.
    pub extents_wanted: u32,
    /// Extents that the kernel had no memory for: asked for again from time to time.
    pub extents_missing: u32,
    /// Extents that somebody holds to whom they do not belong any more.
    pub quarantined: Vec<QuarantineReport>,
    /// Extents that are with the kernel while programs run that allocate for themselves.
    #[serde(default)]
    pub holds: Vec<HoldReport>,
    /// Extents that are with the kernel because memory is short.
    #[serde(default)]
    pub extents_elastic: u32,
    /// How the broker learns that memory is short, or why it does not.
    #[serde(default)]
    pub pressure: String,
    /// What the count of a buffer's holders proves on this kernel.
    pub holder_count: CountReport,
    /// The kind of memory.
    pub backend: Backend,
    /// The heap's name.
    pub heap: String,
    /// Why this one.
    pub reason: String,
    /// Bytes that the configuration asks for, of which `bytes` are in extents; 0 if the broker was not told.
    #[serde(default)]
    pub configured_bytes: u64,
    /// Bytes from the start of one extent to the next one's; more than `extent_bytes` where the kernel's alignment
    /// leaves gaps.
    #[serde(default)]
    pub stride_bytes: u64,
    /// Where the rest of the configured bytes is, had all extents been taken.
    #[serde(default)]
    pub waste: PoolWaste,
}

/// Bytes of the configured pool that are in no extent, by cause.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct PoolWaste {
    /// In gaps between extents, because the kernel aligns each one's start.
    pub alignment: u64,
    /// At the end, where no further extent fits.
    pub pool_tail: u64,
}

/// What the count of a buffer's holders proves.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CountReport {
    /// A count of 1 proves that nobody else reaches the buffer.
    pub proven: bool,
    /// How that is known, and what follows from it.
    pub text: String,
}

/// A geometry in use.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FormatReport {
    /// The model's name.
    pub name: String,
    /// The element type's label.
    pub element: String,
    /// Tokens in one block.
    pub tokens_per_block: u32,
    /// Bytes of one block's place.
    pub block_bytes: u64,
    /// Blocks in one extent.
    pub blocks_per_extent: u32,
    /// Bytes of an extent that no block can use.
    pub waste_bytes_per_extent: u64,
}

/// A chain that stays whoever comes and goes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PinReport {
    /// The chain, by the first 16 digits of the name of its last block: what `kvbctl unpin` takes.
    pub chain: String,
    /// Whose it is.
    pub uid: u32,
    /// The process that pinned it; it may have gone.
    pub pid: i32,
    /// Its program, and the session's name, as they say.
    pub label: String,
    /// Blocks.
    pub blocks: u32,
    /// Tokens.
    pub tokens: u64,
}

impl PinReport {
    pub(super) fn of(chain: &super::prefix::Digest, pin: &super::prefix::Pin) -> Self {
        let super::prefix::Pin { tenant, pid, label, blocks, tokens, .. } = pin.clone();
        let chain = super::prefix::chains::digits(chain);
        PinReport { chain, uid: tenant.0, pid, label, blocks, tokens }
    }
}

/// `kvbctl status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatusReport {
    /// The daemon's version.
    pub version: String,
    /// Identifies this run.
    pub instance: u64,
    /// The pool.
    pub pool: PoolReport,
    /// Where every byte is.
    pub ledger: LedgerReport,
    /// Geometries in use.
    pub formats: Vec<FormatReport>,
    /// Connections.
    pub clients: usize,
    /// Sessions.
    pub sessions: usize,
    /// Published blocks.
    pub prefix_blocks: usize,
    /// Of these, pinned.
    pub prefix_pinned: usize,
    /// Blocks that look-ups asked for.
    pub prefix_queries: u64,
    /// Of these, found.
    pub prefix_hits: u64,
    /// Published blocks that were evicted.
    pub prefix_evictions: u64,
    /// Who pinned what.
    pub pins: Vec<PinReport>,
    /// The revision of the tenants' limits.
    pub limits_revision: u64,
    /// Windows for devices.
    pub windows: usize,
    /// Windows that are closed, and whose blocks somebody may still reach.
    pub windows_held: usize,
    /// Bytes of staging buffers, beside the pool.
    pub staging_bytes: u64,
    /// Bytes of read-only copies of common prompts, beside the pool.
    #[serde(default)]
    pub common_bytes: u64,
    /// What has happened since the start.
    pub counters: Counters,
    /// Something is wrong: the broker grants nothing more.
    pub frozen: bool,
    /// An operator has the broker drained: nothing new begins.
    #[serde(default)]
    pub draining: bool,
}

/// One session in `kvbctl sessions`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SessionReport {
    /// The session's number, one of its uid's.
    pub session: u64,
    /// Its name.
    pub label: String,
    /// The tenant.
    pub uid: u32,
    /// The process.
    pub pid: i32,
    /// The program, as it says.
    pub program: String,
    /// The model's name.
    pub model: String,
    /// Tokens written, as last reported.
    pub tokens: u64,
    /// Blocks that only this session holds.
    pub blocks_private: u32,
    /// Blocks that are sealed or that others hold too.
    pub blocks_shared: u32,
    /// Blocks that the session's process has ahead of need, for all its sessions.
    pub blocks_credit: u32,
    /// Bytes of one block.
    pub block_bytes: u64,
}

/// One extent in `kvbctl map`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExtentReport {
    /// The extent.
    pub extent: u32,
    /// The tenant, if it has one.
    pub uid: Option<u32>,
    /// Clients that have its descriptor.
    pub holders: u32,
    /// One letter per slot: `.` free, `c` credit, `p` private, `s` shared, `k` cached, `P` pinned, `!` held back from
    /// everybody; for an extent of no tenant `-` clean, `~` about to be renewed, `!` in quarantine, `>`
    /// lent.
    pub slots: String,
    /// It is asked back: no block of it is granted.
    pub asked_back: bool,
    /// For an extent in quarantine: whom it was granted to last.
    pub last_granted: Option<LastGranted>,
}

/// `kvbctl map`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MapReport {
    /// Bytes of one extent.
    pub extent_bytes: u64,
    /// All extents.
    pub extents: Vec<ExtentReport>,
}

fn letter(block: Block) -> char {
    match block {
        Block::Free => '.',
        Block::Credit(_) => 'c',
        Block::Suspect(_) => '!',
        Block::Held { pinned: true, .. } => 'P',
        Block::Held { refs: 0, .. } => 'k',
        Block::Held { sealed: false, refs: 1, .. } => 'p',
        Block::Held { .. } => 's',
    }
}

impl Broker {
    /// The whole at a glance.
    pub fn status(&self) -> StatusReport {
        let (state, stats) = (&self.state, self.state.prefixes.stats());
        let extent_bytes = state.pool.extent_bytes();
        let format = |f: &super::Format| FormatReport {
            name: f.profile.name().into(),
            element: f.profile.element().into(),
            tokens_per_block: f.profile.tokens_per_block(),
            block_bytes: f.cut.slot_bytes,
            blocks_per_extent: f.cut.slots,
            waste_bytes_per_extent: extent_bytes - f.cut.slot_bytes * u64::from(f.cut.slots),
        };
        StatusReport {
            version: env!("CARGO_PKG_VERSION").into(),
            instance: self.instance,
            pool: PoolReport {
                bytes: state.pool.ledger().total(),
                extent_bytes,
                extents: state.pool.extents().len() as u32,
                extents_wanted: state.wanted_extents,
                extents_missing: self.missing_extents(),
                quarantined: self.quarantined(),
                holds: self.holds(),
                extents_elastic: self.elastic_extents(),
                pressure: self.pressure_watch.clone(),
                holder_count: CountReport {
                    proven: self.heap.proof().is_proven(),
                    text: self.heap.proof().to_string(),
                },
                backend: self.heap.backend(),
                heap: self.heap.name(),
                reason: self.reason.clone(),
                configured_bytes: self.cut.map_or(0, |cut| cut.pool),
                stride_bytes: self.cut.map_or(extent_bytes, |cut| cut.stride),
                waste: self.cut.map_or_else(PoolWaste::default, |cut| {
                    let waste = cut.pack(cut.bytes).waste;
                    PoolWaste { alignment: waste.alignment, pool_tail: waste.pool_tail }
                }),
            },
            ledger: self.ledger().into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect(),
            formats: state.formats.values().map(format).collect(),
            clients: state.clients.len(),
            sessions: state.sessions.len(),
            prefix_blocks: stats.blocks,
            prefix_pinned: stats.pinned,
            prefix_queries: stats.queries,
            prefix_hits: stats.hits,
            prefix_evictions: stats.evictions,
            pins: state.prefixes.pins().map(|(chain, pin)| PinReport::of(chain, pin)).collect(),
            limits_revision: state.tenancy.revision,
            windows: self.window_counts().0,
            windows_held: self.window_counts().1,
            staging_bytes: self.staging_bytes(),
            common_bytes: self.common_bytes().0,
            counters: state.counters,
            frozen: self.frozen,
            draining: self.draining,
        }
    }

    /// Every session, by number.
    pub fn sessions(&self) -> Vec<SessionReport> {
        let state = &self.state;
        let report = |(id, s): (&crate::id::SessionId, &super::Session)| {
            let client = &state.clients[&s.client];
            let private = |b: &&crate::id::BlockId| {
                let block = state.pool.slot(b.place).map(|s| s.block);
                matches!(block, Some(Block::Held { refs, sealed: false, .. }) if refs - self.windows.over(b.place) == 1)
            };
            let blocks_private = s.table.iter().filter(private).count() as u32;
            let format = &state.formats[&s.format];
            SessionReport {
                session: id.number,
                label: s.label.clone(),
                uid: s.tenant.0,
                pid: client.pid,
                program: client.label.clone(),
                model: format.profile.name().into(),
                tokens: s.tokens,
                blocks_private,
                blocks_shared: s.table.len() as u32 - blocks_private,
                blocks_credit: state.pool.credit_of(s.client).len() as u32,
                block_bytes: format.cut.slot_bytes,
            }
        };
        state.sessions.iter().map(report).collect()
    }

    /// The pool, place by place.
    pub fn map(&self) -> MapReport {
        let report = |(id, e): (&crate::id::ExtentId, &crate::pool::Extent)| ExtentReport {
            extent: id.0,
            uid: e.owned().map(|o| o.tenant.0),
            holders: e.holders.len() as u32,
            asked_back: e.owned().is_some_and(|o| o.wanted_back),
            last_granted: match e.usage {
                Use::Quarantined => self.state.last_granted.get(id).cloned(),
                _ => None,
            },
            slots: match &e.usage {
                Use::Quarantined => "!".into(),
                Use::Clean => "-".into(),
                Use::Lent => ">".into(),
                Use::Dirty | Use::Renewing => "~".into(),
                Use::Owned(o) => o.slots.iter().map(|s| letter(s.block)).collect(),
            },
        };
        let extents = self.state.pool.extents().iter().map(report).collect();
        MapReport { extent_bytes: self.state.pool.extent_bytes(), extents }
    }
}
