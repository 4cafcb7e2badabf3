//! How many blocks the tables and windows of a tenant name, and how many they may.
//!
//! Owns the count of table entries by tenant. Invariant: it is the sum of the lengths of the tenant's tables
//! ([`Broker::verify`] counts them anew), so that the bound costs no walk over sessions.
//!
//! **Why there is a bound.** A block in use costs memory of the pool, which is limited. Naming it once more costs memory of
//! the broker, which nothing else limits: `fork` and `attach` put blocks into a table that are in others already, and a
//! window lists its blocks beside the table. An entry takes 48 bytes: 16 for the block, 32 for the name of a sealed one;
//! a table that has become shorter keeps room for at most four times what is in it ([`Session`]).
//!
//! **The rule.** A tenant may name `limits.table-blocks` blocks. If the operator says nothing, that is the larger of
//! - twice the smallest blocks (one page) that fit the pool: whatever the geometry, every block of the pool may stand in
//!   two tables;
//! - `limits.sessions-per-connection` times the blocks of the reference geometry that fit the pool: each session of one
//!   process may name the whole pool, which is what a tree of forks over one prompt comes to.
//!
//! `fork`, `attach` and `window` are refused beyond it. A report of a table never is: what it adds is credit, so each
//! block of it stands in one table only, and the pool bounds it. All in all a tenant names no more than the bound and as
//! many blocks as it has in the pool.

use std::collections::BTreeMap;

use super::{Broker, Refused, Session};
use crate::id::Tenant;
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::wire::Fault;

/// The entries of all tables, by tenant; none of 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tables(BTreeMap<Tenant, u64>);

impl Tables {
    /// Counts them anew.
    pub fn count<'a>(sessions: impl Iterator<Item = &'a Session>) -> Self {
        let mut tables = Tables::default();
        sessions.for_each(|s| tables.change(s.tenant, 0, s.table.len()));
        tables
    }

    /// A table of `tenant` has become longer or shorter.
    pub fn change(&mut self, tenant: Tenant, before: usize, after: usize) {
        let entries = self.0.entry(tenant).or_default();
        *entries = *entries + after as u64 - before as u64;
        if *entries == 0 {
            self.0.remove(&tenant);
        }
    }

    /// Entries of one tenant.
    pub fn of(&self, tenant: Tenant) -> u64 {
        self.0.get(&tenant).copied().unwrap_or(0)
    }

    /// Entries of all.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

impl Broker {
    /// Blocks that the tables and windows of one tenant may name: see the module.
    pub(super) fn most_named(&self) -> u64 {
        if let Some(most) = self.policy.table_blocks_per_tenant {
            return most;
        }
        let extents = (self.state.pool.extents().len() as u64).max(self.state.wanted_extents.into());
        let (pool, page) = (extents.saturating_mul(self.state.pool.extent_bytes()), page_bytes() as u64);
        let reference = pool.div_ceil(Profile::reference().slot_bytes(0, page));
        let smallest = pool / page;
        let sessions = u64::from(self.policy.sessions_per_connection);
        smallest.saturating_mul(2).max(reference.saturating_mul(sessions))
    }

    /// Blocks that the tables and windows of one tenant name now, one counted as often as it is named.
    pub(super) fn blocks_named(&self, tenant: Tenant) -> u64 {
        self.tables.of(tenant) + self.blocks_under_windows(tenant)
    }

    /// Refuses `more` names of blocks for `tenant` if its tables and windows would have too many. `way_out` is what the
    /// client could do beside closing sessions.
    pub(super) fn may_name(&self, tenant: Tenant, more: usize, way_out: &str) -> Result<(), Refused> {
        let (named, most) = (self.blocks_named(tenant), self.most_named());
        let needed = named.saturating_add(more as u64);
        if more == 0 || needed <= most {
            return Ok(());
        }
        let text = format!(
            "the tables and windows of uid {} name {named} blocks, and {more} more would exceed its limit of {most} (limits.table-blocks): close sessions or windows, {way_out}, or have the limit raised",
            tenant.0
        );
        Err(Refused::new(Fault::OverLimit, text).numbers(needed, most))
    }
}
