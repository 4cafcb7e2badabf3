//! What is counted and listed of a pool's extents, so that a look-up need not search them.
//!
//! Owns the ledger and the lists of extents with free places, of cold ones, and the totals by tenant and by client.
//! Invariants: all of it is what a count from the extents gives ([`Pool::check`](super::Pool::check) counts anew); entries of
//! 0 are not kept; a slot changes in [`set`](Books::set), or with others in [`lend`](Books::lend), and nowhere else.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::extent::{Block, Owned};
use super::ledger::{Account, Ledger};
use crate::id::{ClientId, ExtentId, FormatId, Place, Tenant};

/// Whose an extent with free places is, what its blocks are, and who lives there.
pub(super) type Home = (Tenant, FormatId, Option<ClientId>);

/// Derived from the slots of extents that belong to tenants, and the ledger of all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Books {
    pub ledger: Ledger,
    /// Grows with each block that becomes cached: tells warm extents from cold ones.
    pub clock: u64,
    /// The extents with free places that can be granted, each with how many: the fullest first, so that those with few blocks
    /// in use come to have none.
    pub open: BTreeMap<Home, BTreeSet<(u32, ExtentId)>>,
    /// Of these, the ones without a block in use.
    pub idle: BTreeSet<ExtentId>,
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
    // Inlined where it is known what the block is, and becomes: most of it folds away.
    #[inline(always)]
    pub fn set(&mut self, owned: &mut Owned, place: Place, to: Block) {
        let block = std::mem::replace(&mut owned.slots[place.slot as usize].block, to);
        let (from, into) = (block.account(), to.account());
        if from == into && from != Account::Credit {
            // One table more or less: nothing that is counted has changed.
            return;
        }
        let (tenant, bytes) = (owned.tenant, owned.slot_bytes);
        // An extent is cold while no block of it is in anybody's hands: so from these accounts it leaves that state only, and
        // into these it comes to it only.
        let idle = |a| matches!(a, Account::Cached | Account::Quarantined | Account::Stranded);
        let was_cold = (idle(from) && owned.is_cold()).then_some(owned.warmth);
        match from {
            Account::Cached => owned.cached -= 1,
            Account::Quarantined => owned.suspect -= 1,
            Account::Stranded => self.count_free(owned, place.extent, 1, false),
            Account::Pinned | Account::Credit => self.count_use(tenant, block, bytes, false),
            _ => {}
        }
        match into {
            Account::Cached => {
                owned.cached += 1;
                self.clock += 1;
                owned.warmth = self.clock;
            }
            Account::Quarantined => owned.suspect += 1,
            Account::Stranded => self.count_free(owned, place.extent, 1, true),
            Account::Pinned | Account::Credit => self.count_use(tenant, to, bytes, true),
            _ => {}
        }
        let is_cold = (idle(into) && owned.is_cold()).then_some(owned.warmth);
        if was_cold != is_cold {
            if let Some(warmth) = was_cold {
                remove_from(&mut self.cold, tenant, &(warmth, place.extent));
            }
            if let Some(warmth) = is_cold {
                self.cold.entry(tenant).or_default().insert((warmth, place.extent));
            }
        }
        self.ledger.transfer(from, into, bytes);
    }

    /// Free places of an extent, side by side, become a client's credit: what [`set`](Self::set) does for each of them, booked
    /// once. An extent that `is_new` is on no list before.
    pub fn lend(
        &mut self,
        owned: &mut Owned,
        extent: ExtentId,
        slots: Range<u32>,
        client: ClientId,
        is_new: bool,
    ) {
        let places = slots.end - slots.start;
        let (tenant, bytes) = (owned.tenant, owned.slot_bytes * u64::from(places));
        if owned.is_cold() {
            remove_from(&mut self.cold, tenant, &(owned.warmth, extent));
        }
        for slot in &mut owned.slots[slots.start as usize..slots.end as usize] {
            debug_assert_eq!(slot.block, Block::Free);
            slot.block = Block::Credit(client);
        }
        if is_new {
            owned.free -= places;
            self.open(owned, extent);
        } else {
            self.count_free(owned, extent, places, false);
        }
        count(&mut self.credit, client, bytes, true);
        self.ledger.transfer(Account::Stranded, Account::Credit, bytes);
    }

    /// Places more are free, or less.
    fn count_free(&mut self, owned: &mut Owned, extent: ExtentId, places: u32, more: bool) {
        self.unlist(owned, extent);
        owned.free = if more { owned.free + places } else { owned.free - places };
        self.list(owned, extent);
        if !owned.aside {
            count(&mut self.free_places, (owned.tenant, owned.format), places.into(), more);
        }
    }

    fn list(&mut self, owned: &Owned, extent: ExtentId) {
        if !owned.is_open() {
            return;
        }
        self.open.entry(owned.home()).or_default().insert((owned.free, extent));
        if owned.free as usize == owned.slots.len() {
            self.idle.insert(extent);
        }
    }

    fn unlist(&mut self, owned: &Owned, extent: ExtentId) {
        if !owned.is_open() {
            return;
        }
        remove_from(&mut self.open, owned.home(), &(owned.free, extent));
        if owned.free as usize == owned.slots.len() {
            self.idle.remove(&extent);
        }
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
        if owned.free == 0 {
            return;
        }
        count(&mut self.free_places, (owned.tenant, owned.format), owned.free.into(), true);
        self.list(owned, extent);
    }

    /// They are not granted any more from now on.
    pub fn close(&mut self, owned: &Owned, extent: ExtentId) {
        count(&mut self.free_places, (owned.tenant, owned.format), owned.free.into(), false);
        self.unlist(owned, extent);
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
