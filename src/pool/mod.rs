//! The pool: all extents, the blocks in them, and the ledger over both.
//!
//! Owns the state of every place. It touches no memory: buffers belong to the broker, which does what the pool
//! decides. Invariants (what of them one state shows, [`Pool::check`] checks; what a change must keep, the broker's model test does):
//! - the ledger adds up to the pool, and with all that is counted beside it is what a count from the extents gives;
//! - an extent belongs to one tenant at a time, and changes hands only as a new extent;
//! - a place is granted only while it is free, and each grant is a new generation of it;
//! - the index of extents with free places that can be granted is exactly those, and so is that of extents with nothing but cached blocks.

mod books;
mod choose;
mod extent;
mod extent_map;
mod ledger;
mod life;
mod record;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use books::Books;
pub use choose::{Take, Taken};
pub use extent::{Block, Extent, Owned, Slot, Use};
pub use extent_map::ExtentMap;
pub use ledger::{Account, Ledger};
use record::PoolRecord;

use crate::id::{BlockId, ClientId, ExtentId, FormatId, Place, Tenant};

/// A claim about a block that does not hold. The fault is that of whoever made the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum ClaimError {
    #[error("{0} does not exist for this tenant: it has been taken back, or never was its own")]
    NoExtent(ExtentId),
    #[error("{0} does not exist: the extent has fewer places")]
    NoSlot(BlockId),
    #[error("{claimed} is gone: its place is in life {now}")]
    Stale { claimed: BlockId, now: u64 },
    #[error("{0} is not in use: it was given back before")]
    NotInUse(BlockId),
    #[error("{0} is not credit of this client")]
    NotCredit(BlockId),
}

/// How blocks of one format lie in an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cut {
    /// The format.
    pub format: FormatId,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Slots of one extent.
    pub slots: u32,
}

/// All memory the broker holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PoolRecord", into = "PoolRecord")]
pub struct Pool {
    extent_bytes: u64,
    next: u32,
    extents: ExtentMap,
    // What follows is derived from the extents, so that a look-up need not search them.
    books: Books,
    clean: BTreeSet<ExtentId>,
    dirty: BTreeSet<ExtentId>,
    renewing: u32,
    quarantined: u32,
    lent: u32,
    tenant_extents: BTreeMap<Tenant, u32>,
    held: BTreeMap<ClientId, BTreeSet<ExtentId>>,
}

impl Pool {
    /// A pool without extents. `extent_bytes` is the size of each that will be added.
    pub fn new(extent_bytes: u64) -> Self {
        Pool {
            extent_bytes,
            next: 1,
            extents: ExtentMap::default(),
            books: Books::default(),
            clean: BTreeSet::new(),
            dirty: BTreeSet::new(),
            renewing: 0,
            quarantined: 0,
            lent: 0,
            tenant_extents: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// Takes in an extent that nobody has ever seen and that reads as zero.
    pub fn add(&mut self) -> ExtentId {
        let id = ExtentId(self.next);
        self.next += 1;
        self.extents.insert(id, Extent::clean());
        self.clean.insert(id);
        self.books.ledger[Account::Free] += self.extent_bytes;
        id
    }

    /// Bytes of one extent.
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// All extents.
    pub fn extents(&self) -> &ExtentMap {
        &self.extents
    }

    /// What was read of any extent is true while this stays the same.
    pub fn changes(&self) -> u64 {
        self.extents.changes()
    }

    /// Where every byte is.
    pub fn ledger(&self) -> &Ledger {
        &self.books.ledger
    }

    /// How many extents belong to `tenant`.
    pub fn extents_of(&self, tenant: Tenant) -> u32 {
        self.tenant_extents.get(&tenant).copied().unwrap_or(0)
    }

    /// Extents that can be given to anybody at once.
    pub fn clean_extents(&self) -> u32 {
        self.clean.len() as u32
    }

    /// Free places in extents that `tenant` has in this format already.
    pub fn free_places(&self, tenant: Tenant, format: FormatId) -> u64 {
        self.books.free_places.get(&(tenant, format)).copied().unwrap_or(0)
    }

    /// What a place holds, if it exists.
    pub fn slot(&self, place: Place) -> Option<&Slot> {
        self.extents.get(&place.extent)?.owned()?.slots.get(place.slot as usize)
    }

    /// Whether `client` has the descriptor of `extent`, and has not been told to close it.
    pub fn is_holder(&self, extent: ExtentId, client: ClientId) -> bool {
        self.may_hold(extent, client) && !self.extents[&extent].told.contains(&client)
    }

    /// Whether `client` has not said yet that it has closed `extent`.
    pub fn may_hold(&self, extent: ExtentId, client: ClientId) -> bool {
        self.extents.get(&extent).is_some_and(|e| e.holders.contains(&client))
    }

    /// Notes that `client` gets the descriptor of `extent`; `false` if it has it already.
    pub fn add_holder(&mut self, extent: ExtentId, client: ClientId) -> bool {
        let Some(e) = self.extents.get_mut(&extent) else { return false };
        let again = e.told.remove(&client);
        let new = e.holders.insert(client) || again;
        if new {
            self.held.entry(client).or_default().insert(extent);
        }
        new
    }

    /// The extents that `client` has the descriptor of.
    pub fn held_by(&self, client: ClientId) -> BTreeSet<ExtentId> {
        self.held.get(&client).cloned().unwrap_or_default()
    }

    /// [`check_claim`](Self::check_claim) for what a client of `tenant` names: of another tenant's extent it learns no
    /// more than of one that does not exist, since lives of places would tell what the other one does.
    pub fn check_claim_of(&self, tenant: Tenant, claim: BlockId) -> Result<Block, ClaimError> {
        let extent = claim.place.extent;
        match self.extents.get(&extent).and_then(Extent::owned) {
            Some(owned) if owned.tenant == tenant => self.check_claim(claim),
            _ => Err(ClaimError::NoExtent(extent)),
        }
    }

    /// Turns a claim into a block in use, or says what is wrong with it.
    pub fn check_claim(&self, claim: BlockId) -> Result<Block, ClaimError> {
        let extent = self.extents.get(&claim.place.extent);
        let owned = extent.and_then(Extent::owned).ok_or(ClaimError::NoExtent(claim.place.extent))?;
        let slot = owned.slots.get(claim.place.slot as usize).ok_or(ClaimError::NoSlot(claim))?;
        if slot.generation != claim.generation {
            return Err(ClaimError::Stale { claimed: claim, now: slot.generation });
        }
        match slot.block {
            Block::Free => Err(ClaimError::NotInUse(claim)),
            block => Ok(block),
        }
    }

    /// The format of the extent in which a place lies.
    pub fn format_of(&self, place: Place) -> Option<FormatId> {
        Some(self.extents.get(&place.extent)?.owned()?.format)
    }

    /// Entries without an extent are not kept.
    fn forget_holder(&mut self, extent: ExtentId, client: ClientId) {
        if let Some(set) = self.held.get_mut(&client) {
            set.remove(&extent);
            if set.is_empty() {
                self.held.remove(&client);
            }
        }
    }

    fn set(&mut self, place: Place, to: Block) {
        let Pool { extents, books, .. } = self;
        let owned = extents.owned_mut(place.extent);
        set(books, owned.expect("callers look what a place holds before they change it"), place, to);
    }

    fn block(&self, place: Place) -> Block {
        self.slot(place).map_or(Block::Free, |s| s.block)
    }

    /// A block of the client's credit enters a table.
    pub fn hold(&mut self, claim: BlockId, client: ClientId) -> Result<(), ClaimError> {
        match self.check_claim(claim)? {
            Block::Credit(owner) if owner == client => {
                self.set(claim.place, Block::Held { refs: 1, sealed: false, pinned: false });
                Ok(())
            }
            _ => Err(ClaimError::NotCredit(claim)),
        }
    }

    /// Blocks in use enter one more table, each. Calls `was_cached` for those that were cached until now.
    pub fn share(&mut self, places: impl IntoIterator<Item = Place>, mut was_cached: impl FnMut(Place)) {
        let Pool { extents, books, .. } = self;
        let mut places = places.into_iter().peekable();
        while let Some(&Place { extent, .. }) = places.peek() {
            let mut owned = extents.owned_mut(extent);
            while let Some(place) = places.next_if(|place| place.extent == extent) {
                let Some(owned) = &mut owned else { continue };
                match owned.slots.get_mut(place.slot as usize).map(|slot| &mut slot.block) {
                    // Shared with one more: nothing that is counted changes.
                    Some(Block::Held { refs, sealed: true, .. }) if *refs > 0 => *refs += 1,
                    Some(Block::Held { refs: 0, sealed: true, pinned: false }) => {
                        books.set(owned, place, Block::Held { refs: 1, sealed: true, pinned: false });
                        was_cached(place);
                    }
                    Some(&mut Block::Held { refs, sealed, pinned }) => {
                        set(books, owned, place, Block::Held { refs: refs + 1, sealed, pinned });
                    }
                    _ => {}
                }
            }
        }
    }

    /// Blocks leave a table, each. The last holder of an unsealed block gets it as credit if `to_credit` names it; a sealed
    /// one stays as cached if `keep`, which is asked then only. Calls `dropped` with what became of each that not others
    /// hold.
    pub fn drop_refs(
        &mut self,
        blocks: impl IntoIterator<Item = BlockId>,
        to_credit: Option<ClientId>,
        mut keep: impl FnMut(Place) -> bool,
        mut dropped: impl FnMut(BlockId, Dropped),
    ) {
        let Pool { extents, books, .. } = self;
        let mut blocks = blocks.into_iter().peekable();
        while let Some(&BlockId { place: Place { extent, .. }, .. }) = blocks.peek() {
            let owned = extents.owned_mut(extent).expect("a table names blocks that are held");
            while let Some(block) = blocks.next_if(|block| block.place.extent == extent) {
                let place = block.place;
                let (refs, sealed, pinned) = match &mut owned.slots[place.slot as usize].block {
                    // Shared with one less: nothing that is counted changes.
                    Block::Held { refs, sealed: true, .. } if *refs > 1 => {
                        *refs -= 1;
                        continue;
                    }
                    Block::Held { refs: 1, sealed: true, pinned: false } if keep(place) => {
                        books.set(owned, place, Block::Held { refs: 0, sealed: true, pinned: false });
                        dropped(block, Dropped::Cached);
                        continue;
                    }
                    Block::Held { refs, sealed, pinned } => (*refs, *sealed, *pinned),
                    _ => unreachable!("a table names blocks that are held"),
                };
                let (to, what) = match to_credit {
                    _ if refs > 1 || pinned => {
                        (Block::Held { refs: refs - 1, sealed, pinned }, Dropped::Kept)
                    }
                    Some(client) if !sealed => (Block::Credit(client), Dropped::Credit),
                    _ => (Block::Free, Dropped::Freed),
                };
                set(books, owned, place, to);
                if what != Dropped::Kept {
                    dropped(block, what);
                }
            }
        }
    }

    /// Credit becomes free.
    pub fn free_credit(&mut self, claim: BlockId, client: ClientId) -> Result<(), ClaimError> {
        match self.check_claim(claim)? {
            Block::Credit(owner) if owner == client => {
                self.set(claim.place, Block::Free);
                Ok(())
            }
            _ => Err(ClaimError::NotCredit(claim)),
        }
    }

    /// A block of a table is never written again.
    pub fn seal(&mut self, place: Place) {
        if let Block::Held { refs, pinned, .. } = self.block(place) {
            self.set(place, Block::Held { refs, sealed: true, pinned });
        }
    }

    /// A sealed block stays whoever holds it, or no longer: then it is cached if no table holds it.
    pub fn pin(&mut self, place: Place, on: bool) -> Dropped {
        let Block::Held { refs, sealed, .. } = self.block(place) else { return Dropped::Kept };
        self.set(place, Block::Held { refs, sealed, pinned: on });
        if refs == 0 && !on { Dropped::Cached } else { Dropped::Kept }
    }

    /// A cached block goes.
    ///
    /// # Panics
    /// If it is not cached: a defect of the caller.
    pub fn evict(&mut self, place: Place) {
        assert!(self.block(place).is_cached(), "{place:?} is not cached");
        self.set(place, Block::Free);
    }

    /// A block of a table that only this table holds leaves it, but `client` may still write there: it is granted to
    /// nobody. `false` and no change for a block that others hold too, or that is sealed.
    pub fn suspect(&mut self, place: Place, client: ClientId) -> bool {
        let alone = self.block(place) == Block::Held { refs: 1, sealed: false, pinned: false };
        if alone {
            self.set(place, Block::Suspect(client));
        }
        alone
    }

    /// Nobody writes there any more.
    pub fn clear_suspect(&mut self, place: Place) {
        if matches!(self.block(place), Block::Suspect(_)) {
            self.set(place, Block::Free);
        }
    }

    /// The same for a whole extent that is about to be taken from its holders.
    pub fn drop_suspects(&mut self, extent: ExtentId) {
        self.suspects_in(extent, None).into_iter().for_each(|b| self.clear_suspect(b.place));
    }

    /// Blocks of an extent that a client, or any one, may still write without holding them.
    pub fn suspects_in(&self, extent: ExtentId, client: Option<ClientId>) -> Vec<BlockId> {
        let is_it = |b: Block| matches!(b, Block::Suspect(c) if client.is_none_or(|client| client == c));
        let owned = self.extents.get(&extent).and_then(Extent::owned);
        owned.into_iter().flat_map(|o| o.blocks(extent, is_it)).collect()
    }

    /// Extents of `tenant` in which every block in use is cached, or held back from everybody; coldest first.
    pub fn cold(&self, tenant: Tenant) -> impl Iterator<Item = ExtentId> {
        self.books.cold.get(&tenant).into_iter().flatten().map(|(_, extent)| *extent)
    }

    /// Every tenant that has extents.
    pub fn tenants(&self) -> impl Iterator<Item = Tenant> {
        self.tenant_extents.keys().copied()
    }

    /// Bytes that `tenant` has pinned.
    pub fn pinned_bytes(&self, tenant: Tenant) -> u64 {
        self.books.pinned.get(&tenant).copied().unwrap_or(0)
    }

    /// Bytes that `client` has as credit.
    pub fn credit_bytes(&self, client: ClientId) -> u64 {
        self.books.credit.get(&client).copied().unwrap_or(0)
    }

    /// All credit of `client`.
    pub fn credit_of(&self, client: ClientId) -> Vec<BlockId> {
        let mine = |b| b == Block::Credit(client);
        let held = self.held.get(&client).into_iter().flatten();
        let owned = held.filter_map(|id| Some((*id, self.extents[id].owned()?)));
        owned.flat_map(|(extent, o)| o.blocks(extent, mine)).collect()
    }

    /// `client` has let go of `extent`, or is gone. An extent without a block in use that nobody can reach any more
    /// leaves its tenant: then its id is returned, and it must be renewed.
    pub fn remove_holder(&mut self, extent: ExtentId, client: ClientId) -> Option<ExtentId> {
        let e = self.extents.get_mut(&extent)?;
        e.holders.remove(&client);
        e.told.remove(&client);
        self.forget_holder(extent, client);
        let e = &self.extents[&extent];
        let home = e.owned().is_some_and(|o| o.home == Some(client));
        if home {
            self.rehome(extent, None);
        }
        self.release_if_idle(extent)
    }
}

/// What became of a block that left a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// Others hold it, or it is pinned.
    Kept,
    /// It is credit of the client.
    Credit,
    /// It is sealed, and kept for whoever asks for it next.
    Cached,
    /// It is free.
    Freed,
}

/// [`Books::set`] for whatever a block is, and becomes.
#[inline(never)]
fn set(books: &mut Books, owned: &mut Owned, place: Place, to: Block) {
    books.set(owned, place, to);
}
