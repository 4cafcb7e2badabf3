//! Who uses what: the documents behind `kvbctl tenants` and `prefixes`.
//!
//! Owns nothing; reads the state. Invariants: sizes are in bytes; the bytes of all tenants and those of extents that are
//! nobody's add up to the pool. Of prefixes the answer names tenants and the beginnings of names (hashes, by which the
//! same prompts would be recognised): it is for operators, and no tenant ever gets it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::prefix::chains::digits;
use super::{Broker, CommonDonorReport, CommonReport, LedgerReport};
use crate::id::Tenant;
use crate::pool::Account;

/// One tenant in `kvbctl tenants`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TenantUsage {
    /// The tenant.
    pub uid: u32,
    /// Sessions of lower priority make room for those of higher.
    pub priority: u8,
    /// Bytes guaranteed.
    pub reserve_bytes: u64,
    /// Bytes allowed; `None` for no limit.
    pub limit_bytes: Option<u64>,
    /// Bytes that may be pinned; `None` for no bound.
    pub pinned_limit_bytes: Option<u64>,
    /// Bytes of the extents that it owns.
    pub bytes: u64,
    /// Where these are; they add up to `bytes`.
    pub ledger: LedgerReport,
    /// Blocks promised to its sessions and not granted yet.
    pub promised_blocks: u64,
    /// Connections.
    pub connections: u32,
    /// Sessions.
    pub sessions: u32,
    /// Chains that its processes have pinned.
    pub pins: u32,
}

/// `kvbctl tenants`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TenantsReport {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of extents that are no tenant's.
    pub unowned_bytes: u64,
    /// Every tenant that is configured, has extents, or is connected.
    pub tenants: Vec<TenantUsage>,
}

/// One chain in `kvbctl prefixes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainReport {
    /// The first 16 digits of the name of its last block: what `kvbctl unpin` and `evict --pinned` take.
    pub chain: String,
    /// Whose it is.
    pub uid: u32,
    /// The model's name.
    pub model: String,
    /// Published blocks of it.
    pub blocks: u32,
    /// Of these, how many at the start are those of other chains too.
    pub common_blocks: u32,
    /// Of these, pinned.
    pub pinned_blocks: u32,
    /// Of these, held by nobody and pinned by nobody: what an eviction may take.
    pub idle_blocks: u32,
    /// Tokens of its blocks.
    pub tokens: u64,
    /// Bytes of its blocks, the common ones included.
    pub bytes: u64,
    /// How often look-ups have found its last block.
    pub hits: u32,
    /// Chains of lower priority are evicted first.
    pub priority: u8,
    /// Who pinned it: the program and its session, as they say.
    pub pinned_by: Option<String>,
}

/// `kvbctl prefixes`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PrefixesReport {
    /// Published blocks, each counted once.
    pub blocks: usize,
    /// Bytes of these that nobody holds or pins.
    pub cached_bytes: u64,
    /// Bytes of these that are pinned.
    pub pinned_bytes: u64,
    /// Blocks that look-ups asked for.
    pub queries: u64,
    /// Of these, found.
    pub hits: u64,
    /// Published blocks that were evicted.
    pub evictions: u64,
    /// Every chain, by tenant and name.
    pub chains: Vec<ChainReport>,
    /// Chains of which other tenants may read a copy.
    #[serde(default)]
    pub common: Vec<CommonReport>,
    /// Bytes of these copies, beside the pool.
    #[serde(default)]
    pub common_bytes: u64,
    /// The most that they may have.
    #[serde(default)]
    pub common_limit_bytes: u64,
    /// Blocks of copies that look-ups have found; `hits` counts them too.
    #[serde(default)]
    pub common_hits: u64,
    /// What each tenant whose prompts are common has of that.
    #[serde(default)]
    pub common_donors: Vec<CommonDonorReport>,
}

impl Broker {
    /// What each tenant has.
    pub fn tenants(&self) -> TenantsReport {
        let (state, pool) = (&self.state, &self.state.pool);
        let extent = pool.extent_bytes();
        let mut ledgers: BTreeMap<u32, LedgerReport> = BTreeMap::new();
        let mut unowned = 0;
        for e in pool.extents().values() {
            let Some(o) = e.owned() else {
                unowned += extent;
                continue;
            };
            let ledger = ledgers.entry(o.tenant.0).or_default();
            let mut book = |account: Account, bytes: u64| {
                *ledger.entry(account.name().into()).or_default() += bytes;
            };
            o.slots.iter().for_each(|s| book(s.block.account(), o.slot_bytes));
            book(Account::Waste, extent - o.slot_bytes * o.slots.len() as u64);
        }
        let usage = |t: super::TenantReport| {
            let policy = state.tenancy.of(Tenant(t.uid));
            let promised = state.promises.iter().filter(|((tenant, _), _)| tenant.0 == t.uid);
            let mut ledger = ledgers.remove(&t.uid).unwrap_or_default();
            ledger.retain(|_, bytes| *bytes > 0);
            TenantUsage {
                uid: t.uid,
                priority: t.priority,
                reserve_bytes: u64::from(t.reserve) * extent,
                limit_bytes: t.limit.map(|limit| u64::from(limit).saturating_mul(extent)),
                pinned_limit_bytes: Some(policy.pinned).filter(|most| *most != u64::MAX),
                bytes: u64::from(t.extents) * extent,
                ledger,
                promised_blocks: promised.map(|(_, blocks)| blocks).sum(),
                connections: t.connections,
                sessions: t.sessions,
                pins: state.prefixes.pins().filter(|(_, pin)| pin.tenant.0 == t.uid).count() as u32,
            }
        };
        let tenants = self.limits().tenants.into_iter().map(usage).collect();
        TenantsReport { pool_bytes: pool.ledger().total(), unowned_bytes: unowned, tenants }
    }

    /// What prefixes there are.
    pub fn prefixes(&self) -> PrefixesReport {
        let (stats, ledger) = (self.state.prefixes.stats(), self.state.pool.ledger());
        PrefixesReport {
            blocks: stats.blocks,
            cached_bytes: ledger[Account::Cached],
            pinned_bytes: ledger[Account::Pinned],
            queries: stats.queries,
            hits: stats.hits,
            evictions: stats.evictions,
            chains: self.chain_reports(),
            common: self.common_reports(),
            common_bytes: self.common_bytes().0,
            common_limit_bytes: self.common_bytes().1,
            common_hits: self.common_hits(),
            common_donors: self.common_donors(),
        }
    }

    /// Every chain, by tenant and name.
    pub(super) fn chain_reports(&self) -> Vec<ChainReport> {
        let pins: BTreeMap<_, _> = self.state.prefixes.pins().collect();
        let mut chains = self.state.prefixes.chains();
        chains.sort_unstable_by_key(|c| (c.tenant, c.name));
        let report = |c: super::prefix::chains::Chain| {
            let format = self.state.formats.get(&c.format);
            let (tokens, bytes) =
                format.map_or((0, 0), |f| (u64::from(f.profile.tokens_per_block()), f.cut.slot_bytes));
            ChainReport {
                chain: digits(&c.name),
                uid: c.tenant.0,
                model: format.map_or_else(String::new, |f| f.profile.name().into()),
                blocks: c.blocks,
                common_blocks: c.common,
                pinned_blocks: c.pinned,
                idle_blocks: c.idle,
                tokens: tokens * u64::from(c.blocks),
                bytes: bytes * u64::from(c.blocks),
                hits: c.hits,
                priority: c.priority,
                pinned_by: pins.get(&c.name).map(|pin| pin.label.clone()),
            }
        };
        chains.into_iter().map(report).collect()
    }
}
