//! Tenants: what each is guaranteed, what it may have at most, and who comes first.
//!
//! Owns the numbers, which an operator may change while the broker runs, and their revision. Invariants: the reserves
//! of all tenants together never exceed the pool; a change is taken whole or refused with reasons, and each one that is
//! taken is a new revision, so that two operators cannot undo each other without noticing.
//!
//! **Reserve and limit are counted in extents**, because extents are what changes hands. A reserve is kept as extents
//! that nobody has mapped: other tenants cannot take the clean extents that it still lacks, and nothing is taken from a
//! tenant that owns no more than its reserve. **A shared block is charged once, to the tenant**, since its extent is; of
//! the connections that hold it, each is charged for it (`limits.connection`), because each keeps it from being freed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Broker;
use crate::id::Tenant;
use crate::size::Size;

/// The priority of a tenant of which nothing is said.
pub const USUAL_PRIORITY: u8 = 100;

/// What a tenant gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantPolicy {
    /// Extents that it can always have.
    pub reserve: u32,
    /// Extents that it may own; `None` for as many as there are.
    pub limit: Option<u32>,
    /// Sessions of lower priority make room for those of higher; cached prefixes of lower priority go first.
    pub priority: u8,
    /// Bytes that it may pin.
    pub pinned: u64,
}

impl Default for TenantPolicy {
    fn default() -> Self {
        TenantPolicy { reserve: 0, limit: None, priority: USUAL_PRIORITY, pinned: u64::MAX }
    }
}

/// All tenants of which something is said, and what holds for the others.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tenancy {
    /// Grows with each change.
    pub revision: u64,
    /// For tenants that are not named.
    pub usual: TenantPolicy,
    /// The others.
    pub named: BTreeMap<Tenant, TenantPolicy>,
}

impl Tenancy {
    /// What holds for `tenant`.
    pub fn of(&self, tenant: Tenant) -> TenantPolicy {
        self.named.get(&tenant).copied().unwrap_or(self.usual)
    }

    /// Extents that are guaranteed to anybody.
    pub fn reserved(&self) -> u64 {
        self.named.values().map(|t| u64::from(t.reserve)).sum()
    }
}

/// A change of one tenant's numbers. What is `None` stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitChange {
    /// Whose.
    pub tenant: Tenant,
    /// Bytes, rounded up to whole extents.
    pub reserve: Option<u64>,
    /// Bytes, rounded down to whole extents; `Some(None)` for no limit.
    pub limit: Option<Option<u64>>,
    /// The priority.
    pub priority: Option<u8>,
    /// Only if this is the revision that holds: what the operator looked at before.
    pub revision: Option<u64>,
}

/// What became of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It holds from now on.
    Applied,
    /// It holds for what comes; what is in use stays until it is given back.
    Deferred,
    /// Nothing has changed.
    Refused,
}

/// One tenant, as operators see it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TenantReport {
    /// The tenant.
    pub uid: u32,
    /// Extents guaranteed.
    pub reserve: u32,
    /// Extents allowed.
    pub limit: Option<u32>,
    /// The priority.
    pub priority: u8,
    /// Extents owned.
    pub extents: u32,
    /// Bytes of cached prefixes in them.
    pub cached_bytes: u64,
    /// Bytes pinned.
    pub pinned_bytes: u64,
    /// Bytes that may be pinned; `None` for no bound.
    pub pinned_limit: Option<u64>,
    /// Connections.
    pub connections: u32,
    /// Sessions.
    pub sessions: u32,
    /// Blocks that its tables, windows and pins name, one counted as often as it is named.
    #[serde(default)]
    pub table_blocks: u64,
    /// The most that they may name.
    #[serde(default)]
    pub table_blocks_limit: u64,
}

/// `kvbctl limits`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LimitsReport {
    /// The revision that holds.
    pub revision: u64,
    /// What became of the change, if one was asked for.
    pub outcome: Option<Outcome>,
    /// Why it was deferred or refused.
    pub reasons: Vec<String>,
    /// Bytes of one extent.
    pub extent_bytes: u64,
    /// Extents of the pool.
    pub extents: u32,
    /// Extents that are guaranteed to anybody.
    pub reserved: u64,
    /// Every tenant that is named, has extents, or is connected.
    pub tenants: Vec<TenantReport>,
}

impl Broker {
    /// What holds for tenants now.
    pub fn tenancy(&self) -> &Tenancy {
        &self.state.tenancy
    }

    /// Extents that `tenant` lacks of its reserve, or of what has been promised to its sessions.
    fn unmet(&self, tenant: Tenant) -> u32 {
        let reserve = self.state.tenancy.of(tenant).reserve;
        reserve.saturating_sub(self.state.pool.extents_of(tenant)).max(self.promised_extents(tenant, None))
    }

    /// Clean extents that are kept for tenants other than `tenant`.
    pub(super) fn kept_for_others(&self, tenant: Tenant) -> u32 {
        let named = self.state.tenancy.named.keys().copied();
        let mut others: Vec<Tenant> = named.chain(self.promised_tenants()).filter(|t| *t != tenant).collect();
        others.sort_unstable();
        others.dedup();
        others.into_iter().map(|t| self.unmet(t)).fold(0, u32::saturating_add)
    }

    /// Connections that other tenants cannot take from those with a reserve: each of these can always have as many as one
    /// tenant may, or, where that would leave nothing for the rest, an equal share of all: the connections divided by the
    /// tenants with a reserve and one. What such a tenant has not opened of it is kept from everybody else, whether they
    /// have said hello or not.
    ///
    /// **Why that does**: the connections that are open and those that are kept are together never more than there may be.
    /// So it is at the start, and a connection is admitted only if it is so afterwards too; and then one that is kept can
    /// be had. (A reserve that an operator adds later is kept as connections end.)
    pub(super) fn connections_kept_for_others(&self, tenant: Tenant) -> u32 {
        let reserved =
            || self.state.tenancy.named.iter().filter(|(_, t)| t.reserve > 0).map(|(tenant, _)| *tenant);
        let parts = u32::try_from(reserved().count() + 1).unwrap_or(u32::MAX);
        let share = self.policy.connections_per_tenant.min(self.policy.connections / parts);
        let mut open: BTreeMap<Tenant, u32> = BTreeMap::new();
        self.state.clients.values().for_each(|c| *open.entry(c.tenant).or_default() += 1);
        let left = |t: Tenant| share.saturating_sub(open.get(&t).copied().unwrap_or(0));
        reserved().filter(|t| *t != tenant).map(left).fold(0, u32::saturating_add)
    }

    /// How many extents others may take from `tenant`.
    pub(super) fn surplus(&self, tenant: Tenant) -> u32 {
        self.state.pool.extents_of(tenant).saturating_sub(self.state.tenancy.of(tenant).reserve)
    }

    /// Changes a tenant's numbers, or says why not.
    pub fn change_limits(&mut self, change: &LimitChange) -> LimitsReport {
        let (outcome, reasons) = self.try_change(change);
        if outcome != Outcome::Refused {
            self.retry();
            self.settle();
        }
        LimitsReport { outcome: Some(outcome), reasons, ..self.limits() }
    }

    fn try_change(&mut self, change: &LimitChange) -> (Outcome, Vec<String>) {
        let refused = |why: String| (Outcome::Refused, vec![why]);
        let now = self.state.tenancy.revision;
        if let Some(seen) = change.revision.filter(|seen| *seen != now) {
            return refused(format!("revision {seen} was changed meanwhile: {now} holds; look again"));
        }
        let bytes = self.state.pool.extent_bytes();
        let whole = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let tenant = change.tenant;
        if let Some(why) = tenant.why_nobody() {
            return refused(format!("uid {}: {why}", tenant.0));
        }
        let mut new = self.state.tenancy.of(tenant);
        if let Some(reserve) = change.reserve {
            new.reserve = whole(reserve.div_ceil(bytes));
        }
        // A limit of 0 says that nothing is to be owned; 1 byte says something else, and would come to the same.
        if let Some(limit) = change.limit.flatten().filter(|limit| (1..bytes).contains(limit)) {
            let [limit, each] = [limit, bytes].map(Size::from_bytes);
            return refused(format!(
                "uid {}: a limit of {limit} is less than one extent of {each}: a tenant owns whole extents, and could own none",
                tenant.0
            ));
        }
        if let Some(limit) = change.limit {
            new.limit = limit.map(|limit| whole(limit / bytes));
        }
        new.priority = change.priority.unwrap_or(new.priority);
        if let Some(limit) = new.limit.filter(|limit| *limit < new.reserve) {
            return refused(format!(
                "uid {}: a limit of {limit} extents is below the reserve of {}",
                tenant.0, new.reserve
            ));
        }
        let mut tenancy = self.state.tenancy.clone();
        tenancy.named.insert(tenant, new);
        let (reserved, extents) = (tenancy.reserved(), self.state.pool.extents().len() as u64);
        if reserved > extents {
            return refused(format!("the reserves would be {reserved} extents, the pool has {extents}"));
        }
        tenancy.revision += 1;
        self.state.tenancy = tenancy;
        let mut reasons = Vec::new();
        let owned = self.state.pool.extents_of(tenant);
        if let Some(limit) = new.limit.filter(|limit| *limit < owned) {
            reasons.push(format!(
                "uid {} owns {owned} extents, the limit is {limit}: it gets no more until it has given back {}",
                tenant.0,
                owned - limit
            ));
        }
        let (lacks, clean) = (self.unmet(tenant), self.state.pool.clean_extents());
        let kept = self.kept_for_others(tenant);
        if lacks > clean.saturating_sub(kept) {
            let short = lacks - clean.saturating_sub(kept);
            reasons.push(format!(
                "uid {}: {short} extents of the reserve are in use by others; they are kept for it as they become free",
                tenant.0
            ));
        }
        (if reasons.is_empty() { Outcome::Applied } else { Outcome::Deferred }, reasons)
    }

    /// Every tenant's numbers.
    pub fn limits(&self) -> LimitsReport {
        let state = &self.state;
        let mut all: Vec<Tenant> = state.tenancy.named.keys().copied().chain(state.pool.tenants()).collect();
        all.extend(state.clients.values().map(|c| c.tenant));
        all.sort_unstable();
        all.dedup();
        LimitsReport {
            revision: state.tenancy.revision,
            outcome: None,
            reasons: Vec::new(),
            extent_bytes: state.pool.extent_bytes(),
            extents: state.pool.extents().len() as u32,
            reserved: state.tenancy.reserved(),
            tenants: all.into_iter().map(|t| self.tenant_report(t)).collect(),
        }
    }

    fn tenant_report(&self, tenant: Tenant) -> TenantReport {
        let (state, policy) = (&self.state, self.state.tenancy.of(tenant));
        let owned = state.pool.extents().values().filter_map(|e| e.owned()).filter(|o| o.tenant == tenant);
        let connections = state.clients.values().filter(|c| c.tenant == tenant);
        TenantReport {
            uid: tenant.0,
            reserve: policy.reserve,
            limit: policy.limit,
            priority: policy.priority,
            extents: state.pool.extents_of(tenant),
            cached_bytes: owned.map(|o| u64::from(o.cached) * o.slot_bytes).sum(),
            pinned_bytes: state.pool.pinned_bytes(tenant),
            pinned_limit: Some(policy.pinned).filter(|p| *p != u64::MAX),
            connections: connections.count() as u32,
            sessions: state.sessions.values().filter(|s| s.tenant == tenant).count() as u32,
            table_blocks: self.blocks_named(tenant),
            table_blocks_limit: self.most_named(),
        }
    }
}
