//! How many blocks the tables, windows and pins of a tenant name, and how many they may.
//!
//! Owns the count of table entries and of names of pins by tenant. Invariant: they are the sums of the lengths of the tenant's
//! tables and of its pinned chains ([`Broker::verify`] counts them anew), so that the bound costs no walk over sessions.
//!
//! **Why there is a bound.** A block in use costs memory of the pool, which is limited. Naming it once more costs memory of
//! the broker, which nothing else limits: `fork` and `attach` put blocks into a table that are in others already, and a
//! window lists its blocks beside the table. So do pins: each block knows the chains that it is pinned for, and chains over
//! the same blocks cost nothing of `limits.pinned` after the first. An entry takes 48 bytes: 16 for the block, 32 for the name
//! of a sealed one; a table that has become shorter keeps room for at most four times what is in it ([`Session`](super::Session)). A block
//! that is pinned takes 32 bytes for each of its chains, and the room that a tree of them keeps.
//!
//! **The rule.** A tenant may name `limits.table-blocks` blocks. If the operator says nothing, that is the larger of
//! - twice the smallest blocks (one page) that fit the pool: whatever the geometry, every block of the pool may stand in
//!   two tables;
//! - `limits.sessions-per-connection` times the blocks of the reference geometry that fit the pool: each session of one
//!   process may name the whole pool, which is what a tree of forks over one prompt comes to.
//!
//! `fork`, `attach`, `window` and `pin` are refused beyond it, and a stored prefix is not taken in. A report of a table never is: what it adds is credit, so each
//! block of it stands in one table only, and the pool bounds it. All in all a tenant names no more than the bound and as
//! many blocks as it has in the pool.

use std::collections::BTreeMap;

use super::prefix::Pin;
use super::{Broker, Refused, State};
use crate::id::Tenant;
use crate::map::page_bytes;
use crate::profile::Profile;
use crate::wire::Fault;

/// Names of blocks by tenant; none of 0.
type Names = BTreeMap<Tenant, u64>;

fn change(names: &mut Names, tenant: Tenant, before: u64, after: u64) {
    let of_tenant = names.entry(tenant).or_default();
    *of_tenant = *of_tenant + after - before;
    if *of_tenant == 0 {
        names.remove(&tenant);
    }
}

/// The entries of all tables, and what all pinned chains name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tables {
    entries: Names,
    pins: Names,
}

impl Tables {
    /// Counts them anew.
    pub fn count(state: &State) -> Self {
        let mut tables = Tables::default();
        state.sessions.values().for_each(|s| tables.change(s.tenant, 0, s.table.len()));
        state.prefixes.pins().for_each(|(_, pin)| tables.change_pin(None, Some(pin)));
        tables
    }

    /// A table of `tenant` has become longer or shorter.
    pub fn change(&mut self, tenant: Tenant, before: usize, after: usize) {
        change(&mut self.entries, tenant, before as u64, after as u64);
    }

    /// A chain is pinned, pinned by somebody else, or by nobody any more.
    pub fn change_pin(&mut self, before: Option<&Pin>, after: Option<&Pin>) {
        // First what is added: no count is below 0 on the way.
        after.into_iter().for_each(|pin| change(&mut self.pins, pin.tenant, 0, pin.blocks.into()));
        before.into_iter().for_each(|pin| change(&mut self.pins, pin.tenant, pin.blocks.into(), 0));
    }

    /// Entries of one tenant's tables, and names of its pins.
    pub fn of(&self, tenant: Tenant) -> u64 {
        let of = |names: &Names| names.get(&tenant).copied().unwrap_or(0);
        of(&self.entries) + of(&self.pins)
    }

    /// Entries of all tables.
    pub fn total(&self) -> u64 {
        self.entries.values().sum()
    }
}

impl Broker {
    /// Blocks that the tables, windows and pins of one tenant may name: see the module.
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

    /// Blocks that the tables, windows and pins of one tenant name now, one counted as often as it is named.
    pub(super) fn blocks_named(&self, tenant: Tenant) -> u64 {
        self.tables.of(tenant) + self.blocks_under_windows(tenant)
    }

    /// Refuses `more` names of blocks for `tenant` if its tables, windows and pins would have too many. `way_out` is what the
    /// client could do beside closing sessions.
    pub(super) fn may_name(&self, tenant: Tenant, more: usize, way_out: &str) -> Result<(), Refused> {
        let (named, most) = (self.blocks_named(tenant), self.most_named());
        let needed = named.saturating_add(more as u64);
        if more == 0 || needed <= most {
            return Ok(());
        }
        let text = format!(
            "the tables, windows and pins of uid {} name {named} blocks, and {more} more would exceed its limit of {most} (limits.table-blocks): close sessions or windows, unpin prefixes, {way_out}, or have the limit raised",
            tenant.0
        );
        Err(Refused::new(Fault::OverLimit, text).numbers(needed, most))
    }
}
