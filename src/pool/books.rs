//! What is counted and listed of a pool's extents, so that a look-up need not search them.
//!
//! Owns the ledger and the lists of extents with free places, of cold ones, and the totals by tenant and by client.
//! Invariants: all of it is what a count from the extents gives ([`Pool::check`](super::Pool::check) counts anew); entries of
//! 0 are not kept; [`set`](Books::set) is the one place where a slot changes.

use std::collections::{BTreeMap, BTreeSet};

use super::extent::{Block, Owned};
use super::ledger::Ledger;
use crate::id::{ClientId, ExtentId, FormatId, Place, Tenant};

/// Whose an extent with free places is, what its blocks are, and who lives there.
pub(super) type Home = (Tenant, FormatId, Option<ClientId>);

/// Derived from the slots of extents that belong to tenants, and the ledger of all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Books {
    pub ledger: Ledger,
    /// Grows with each block that becomes cached: tells warm extents from cold ones.
    pub clock: u64,
    /// The extents with free places that can be granted.
    pub open: BTreeMap<Home, BTreeSet<ExtentId>>,
    pub free_places: BTreeMap<(Tenant, FormatId), u64>,
    /// The extents in which every block in use is cached or suspect, coldest first.
    pub cold: BTreeMap<Tenant, BTreeSet<(u64, ExtentId)>>,
    /// Bytes that tenants have pinned.
    pub pinned: BTreeMap<Tenant, u64>,
    /// Bytes that clients have as credit.
    pub credit: BTreeMap<ClientId, u64>,
}

impl Books {
    /// Changes what a slot holds, and books that everywhere. `owned` is the extent in which `place` lies.
    pub fn set(&mut self, owned: &mut Owned, place: Place, to: Block) {
        let from = std::mem::replace(&mut owned.slots[place.slot as usize].block, to);
        if from.account() == to.account() && matches!((from, to), (Block::Held { .. }, Block::Held { .. })) {
            // One table more or less: nothing that is counted has changed.
            return;
        }
        let was_cold = owned.is_cold().then_some(owned.warmth);
        let (home, bytes) = (owned.home(), owned.slot_bytes);
        owned.cached = owned.cached - u32::from(from.is_cached()) + u32::from(to.is_cached());
        let suspect = |b: Block| u32::from(matches!(b, Block::Suspect(_)));
        owned.suspect = owned.suspect - suspect(from) + suspect(to);
        let (was_free, is_free) = (from == Block::Free, to == Block::Free);
        if was_free != is_free {
            let was_open = owned.is_open();
            owned.free = owned.free - u32::from(was_free) + u32::from(is_free);
            if !owned.aside {
                count(&mut self.free_places, (home.0, home.1), 1, is_free);
            }
            match (was_open, owned.is_open()) {
                (true, false) => remove_from(&mut self.open, home, &place.extent),
                (false, true) => _ = self.open.entry(home).or_default().insert(place.extent),
                _ => {}
            }
        }
        if to.is_cached() && !from.is_cached() {
            self.clock += 1;
            owned.warmth = self.clock;
        }
        let is_cold = owned.is_cold().then_some(owned.warmth);
        if was_cold != is_cold {
            if let Some(warmth) = was_cold {
                remove_from(&mut self.cold, home.0, &(warmth, place.extent));
            }
            if let Some(warmth) = is_cold {
                self.cold.entry(home.0).or_default().insert((warmth, place.extent));
            }
        }
        self.count_use(home.0, from, bytes, false);
        self.count_use(home.0, to, bytes, true);
        self.ledger.transfer(from.account(), to.account(), bytes);
    }

    /// Books what a tenant has pinned and what a client has as credit.
    pub fn count_use(&mut self, tenant: Tenant, block: Block, bytes: u64, add: bool) {
        match block {
            Block::Held { pinned: true, .. } => count(&mut self.pinned, tenant, bytes, add),
            Block::Credit(client) => count(&mut self.credit, client, bytes, add),
            _ => {}
        }
    }

    /// The free places of an extent can be granted from now on: it is cut, or wanted back or set aside no more.
    pub fn open(&mut self, owned: &Owned, extent: ExtentId) {
        let home = owned.home();
        count(&mut self.free_places, (home.0, home.1), owned.free.into(), true);
        self.open.entry(home).or_default().insert(extent);
    }

    /// They cannot be granted any more.
    pub fn close(&mut self, owned: &Owned, extent: ExtentId) {
        let home = owned.home();
        count(&mut self.free_places, (home.0, home.1), owned.free.into(), false);
        remove_from(&mut self.open, home, &extent);
    }
}

fn remove_from<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: K, value: &V) {
    if let Some(set) = sets.get_mut(&key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(&key);
        }
    }
}

fn count<K: Ord + Copy>(totals: &mut BTreeMap<K, u64>, key: K, number: u64, add: bool) {
    let total = totals.entry(key).or_default();
    if add {
        *total += number;
    } else {
        *total -= number;
    }
    if *total == 0 {
        totals.remove(&key);
    }
}
