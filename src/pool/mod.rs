//! The pool: all extents, the blocks in them, and the ledger over both.
//!
//! Owns the state of every place. It touches no memory: buffers belong to the broker, which does what the pool
//! decides. Invariants, each checked by [`Pool::check`]:
//! - the ledger adds up to the pool, and with all that is counted beside it is what a count from the extents gives;
//! - an extent belongs to one tenant at a time, and changes hands only as a new extent;
//! - a place is granted only while it is free, and each grant is a new generation of it;
//! - the index of extents with free places that can be granted is exactly those, and so is that of extents with nothing but cached blocks.

mod books;
mod extent;
mod extent_map;
mod ledger;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use books::Books;
pub use extent::{Block, Extent, Owned, Slot, Use};
pub use extent_map::ExtentMap;
pub use ledger::{Account, Ledger};

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

/// What is asked of [`Pool::take`].
#[derive(Debug, Clone, Copy)]
pub struct Take {
    /// For whom.
    pub tenant: Tenant,
    /// For which process.
    pub client: ClientId,
    /// In which format.
    pub cut: Cut,
    /// Right after this place if it is free, so that a session's blocks lie side by side.
    pub near: Option<Place>,
    /// Else in an extent without a block in use, the tenant's or a clean one, although there are free places in others.
    pub whole: bool,
    /// Extents that the tenant may have more than now.
    pub new_extents: u32,
    /// Extents that the client may get to know by this grant.
    pub new_descriptors: u32,
}

/// Where a place is looked for.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// An extent of the tenant without a block in use.
    Idle,
    /// The fullest extent of the tenant that has a place.
    Fullest,
    /// A clean extent, which becomes the tenant's.
    Clean,
}

/// A block that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The block, now credit.
    pub block: BlockId,
    /// Who may have left bytes in it before.
    pub written_by: Option<ClientId>,
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

/// The part of a pool that its record holds.
#[derive(Serialize, Deserialize)]
struct PoolRecord {
    extent_bytes: u64,
    next: u32,
    clock: u64,
    extents: BTreeMap<ExtentId, Extent>,
}

impl From<Pool> for PoolRecord {
    fn from(p: Pool) -> Self {
        let Pool { extent_bytes, next, extents, books, .. } = p;
        PoolRecord { extent_bytes, next, clock: books.clock, extents: extents.into() }
    }
}

impl TryFrom<PoolRecord> for Pool {
    type Error = String;

    /// Everything is counted anew; what could not be counted without overflowing is refused before. Whether the rest is
    /// consistent, [`Pool::check`] says.
    fn try_from(s: PoolRecord) -> Result<Self, String> {
        if (s.extents.len() as u64).checked_mul(s.extent_bytes).is_none() {
            return Err(format!(
                "{} extents of {} bytes are more than can be counted",
                s.extents.len(),
                s.extent_bytes
            ));
        }
        for (id, e) in &s.extents {
            let Some(o) = e.owned() else { continue };
            let slots = o.slots.len() as u64;
            if o.slot_bytes.checked_mul(slots).is_none_or(|bytes| bytes > s.extent_bytes) {
                return Err(format!(
                    "{id} of {} bytes has {slots} slots of {}",
                    s.extent_bytes, o.slot_bytes
                ));
            }
            let counted = u64::from(o.free) + u64::from(o.cached) + u64::from(o.suspect);
            if counted > slots {
                return Err(format!(
                    "{id} counts {counted} places that are free, cached or suspect, of {slots}"
                ));
            }
        }
        let mut pool = Pool::new(s.extent_bytes);
        pool.next = s.next;
        pool.books.clock = s.clock;
        pool.extents = s.extents.into();
        pool.index();
        Ok(pool)
    }
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

    /// Takes one block as credit: right after `near`, else in an extent where the client lives, else in another one
    /// of the tenant, else in a clean extent. `None` when there is none left within the bounds of the request.
    pub fn take(&mut self, take: &Take) -> Option<Taken> {
        let place = self.find(take)?;
        let extent = self.extents.get_mut(&place.extent)?;
        let Use::Owned(owned) = &mut extent.usage else { return None };
        let slot = &mut owned.slots[place.slot as usize];
        let written_by = slot.written_by.replace(take.client);
        slot.generation += 1;
        let block = BlockId { place, generation: slot.generation };
        extent.last_generation = extent.last_generation.max(block.generation);
        set(&mut self.books, owned, place, Block::Credit(take.client));
        Some(Taken { block, written_by })
    }

    fn find(&mut self, take: &Take) -> Option<Place> {
        let (tenant, format) = (take.tenant, take.cut.format);
        if let Some(near) = take.near {
            let next = Place { extent: near.extent, slot: near.slot + 1 };
            let fits = self.extents.get(&next.extent).and_then(Extent::owned).is_some_and(|o| {
                o.tenant == tenant
                    && o.format == format
                    && !o.wanted_back
                    && !o.aside
                    && o.slots.get(next.slot as usize).is_some_and(|s| s.block == Block::Free)
            });
            if fits && (take.new_descriptors > 0 || self.is_holder(next.extent, take.client)) {
                return Some(next);
            }
        }
        let order: &[Source] = match take.whole {
            true => &[Source::Idle, Source::Clean, Source::Fullest],
            false => &[Source::Fullest, Source::Clean],
        };
        let extent = order.iter().find_map(|source| match source {
            Source::Idle | Source::Fullest => self.open_extent(take, *source),
            Source::Clean => self.adopt(take),
        })?;
        let slots = &self.extents[&extent].owned()?.slots;
        let slot = slots.iter().position(|s| s.block == Block::Free)? as u32;
        if self.extents[&extent].owned()?.home.is_none() {
            self.rehome(extent, Some(take.client));
        }
        Some(Place { extent, slot })
    }

    /// An extent of the tenant with a free place: where the client lives, else where another one of the tenant does.
    fn open_extent(&self, take: &Take, source: Source) -> Option<ExtentId> {
        let (tenant, format) = (take.tenant, take.cut.format);
        let best = |set: &BTreeSet<(u32, ExtentId)>| match source {
            Source::Idle => set.last().filter(|(free, _)| *free == take.cut.slots).copied(),
            _ => set.first().copied(),
        };
        let known = |e: &ExtentId| take.new_descriptors > 0 || self.is_holder(*e, take.client);
        let open = &self.books.open;
        let at_home = open.get(&(tenant, format, Some(take.client))).and_then(best);
        let elsewhere = || {
            let all = (tenant, format, None)..=(tenant, format, Some(ClientId(u64::MAX)));
            open.range(all).filter_map(|(_, set)| best(set)).min().map(|(_, e)| e)
        };
        at_home.map(|(_, e)| e).filter(known).or_else(|| elsewhere().filter(known))
    }

    /// Cuts a clean extent for a tenant, if it and the client may have one more.
    fn adopt(&mut self, take: &Take) -> Option<ExtentId> {
        if take.new_extents == 0 || take.new_descriptors == 0 {
            return None;
        }
        let id = self.clean.pop_first()?;
        let cut = take.cut;
        let extent = self.extents.get_mut(&id).expect("the clean list names extents of the pool");
        let fresh = Slot { generation: extent.last_generation, block: Block::Free, written_by: None };
        let owned = Owned {
            tenant: take.tenant,
            format: cut.format,
            slot_bytes: cut.slot_bytes,
            home: Some(take.client),
            slots: vec![fresh; cut.slots as usize],
            free: cut.slots,
            cached: 0,
            suspect: 0,
            warmth: 0,
            wanted_back: false,
            aside: false,
        };
        self.books.open(&owned, id);
        extent.usage = Use::Owned(owned);
        let bytes = cut.slot_bytes * u64::from(cut.slots);
        self.books.ledger.transfer(Account::Free, Account::Stranded, bytes);
        self.books.ledger.transfer(Account::Free, Account::Waste, self.extent_bytes - bytes);
        *self.tenant_extents.entry(take.tenant).or_default() += 1;
        Some(id)
    }

    fn rehome(&mut self, extent: ExtentId, home: Option<ClientId>) {
        let Pool { extents, books, .. } = self;
        let Some(owned) = extents.owned_mut(extent) else { return };
        let is_open = owned.is_open();
        if is_open {
            books.close(owned, extent);
        }
        owned.home = home;
        if is_open {
            books.open(owned, extent);
        }
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
        let slots = self.extents.get(&extent).and_then(Extent::owned).map_or(&[][..], |o| &o.slots);
        let is_it = |b: Block| matches!(b, Block::Suspect(c) if client.is_none_or(|client| client == c));
        let name = |(slot, s): (usize, &Slot)| BlockId {
            place: Place { extent, slot: slot as u32 },
            generation: s.generation,
        };
        slots.iter().enumerate().filter(|(_, s)| is_it(s.block)).map(name).collect()
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
        let mine = |s: &Slot| s.block == Block::Credit(client);
        let held = self.held.get(&client).into_iter().flatten();
        held.filter_map(|id| Some((*id, self.extents[id].owned()?)))
            .flat_map(|(extent, o)| {
                o.slots.iter().enumerate().filter(move |(_, s)| mine(s)).map(move |(slot, s)| {
                    let place = Place { extent, slot: slot as u32 };
                    BlockId { place, generation: s.generation }
                })
            })
            .collect()
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

    /// Takes `extent` from its tenant if no block of it is in use and no client has it.
    pub fn release_if_idle(&mut self, extent: ExtentId) -> Option<ExtentId> {
        let e = self.extents.get(&extent)?;
        let idle = e.holders.is_empty() && e.owned().is_some_and(|o| o.free as usize == o.slots.len());
        idle.then(|| self.disown(extent))
    }

    /// Takes an extent without a block in use from its tenant, whoever may still have it: the caller makes sure that
    /// holders are cut off. Returns its holders.
    pub fn seize(&mut self, extent: ExtentId) -> BTreeSet<ClientId> {
        self.disown(extent);
        let e = self.extents.get_mut(&extent).expect("just disowned");
        e.told.clear();
        let holders = std::mem::take(&mut e.holders);
        for &client in &holders {
            self.forget_holder(extent, client);
        }
        holders
    }

    fn disown(&mut self, extent: ExtentId) -> ExtentId {
        let e = self.extents.get_mut(&extent).expect("callers name extents of the pool");
        let Use::Owned(owned) = std::mem::replace(&mut e.usage, Use::Dirty) else {
            unreachable!("{extent} has no owner to be taken from");
        };
        assert_eq!(owned.free as usize, owned.slots.len(), "{extent} has a block in use");
        let bytes = owned.slot_bytes * owned.slots.len() as u64;
        self.books.ledger.transfer(Account::Stranded, Account::Free, bytes);
        self.books.ledger.transfer(Account::Waste, Account::Free, self.extent_bytes - bytes);
        if owned.is_open() {
            self.books.close(&owned, extent);
        }
        let extents = self.tenant_extents.get_mut(&owned.tenant).expect("counted since the cut");
        *extents -= 1;
        if *extents == 0 {
            self.tenant_extents.remove(&owned.tenant);
        }
        self.dirty.insert(extent);
        extent
    }

    /// The holders of an extent without a block in use are asked for it: until [`let_back`](Self::let_back), or until it
    /// has come, no block of it is granted. Returns the holders.
    pub fn want_back(&mut self, extent: ExtentId) -> BTreeSet<ClientId> {
        let Pool { extents, books, .. } = self;
        let e = extents.get_mut(&extent).expect("callers name extents of the pool");
        e.told = e.holders.clone();
        let Use::Owned(owned) = &mut e.usage else {
            unreachable!("{extent} is not in a tenant's hands; callers check")
        };
        assert_eq!(owned.free as usize, owned.slots.len(), "{extent} has a block in use");
        if owned.is_open() {
            books.close(owned, extent);
            owned.wanted_back = true;
        }
        e.holders.clone()
    }

    /// It is not wanted back any more: its owner may have blocks of it again.
    pub fn let_back(&mut self, extent: ExtentId) {
        let Pool { extents, books, .. } = self;
        let Some(owned) = extents.owned_mut(extent) else { return };
        if std::mem::take(&mut owned.wanted_back) && owned.is_open() {
            books.open(owned, extent);
        }
    }

    /// Sets an extent aside, so that no block of it is granted, or ends that. What is in use stays in use.
    pub fn set_aside(&mut self, extent: ExtentId, on: bool) {
        let Pool { extents, books, .. } = self;
        let Some(owned) = extents.owned_mut(extent) else { return };
        let was_open = owned.is_open();
        if on && was_open {
            books.close(owned, extent);
        }
        owned.aside = on;
        if !on && !was_open && owned.is_open() {
            books.open(owned, extent);
        }
    }

    /// Whether an extent is set aside.
    pub fn is_aside(&self, extent: ExtentId) -> bool {
        self.extents.get(&extent).and_then(Extent::owned).is_some_and(|o| o.aside)
    }

    /// Whether an extent is wanted back.
    pub fn is_wanted_back(&self, extent: ExtentId) -> bool {
        self.extents.get(&extent).and_then(Extent::owned).is_some_and(|o| o.wanted_back)
    }

    /// Extents that are wanted back.
    pub fn wanted_back(&self) -> impl Iterator<Item = (ExtentId, &Owned)> {
        self.extents.iter().filter_map(|(id, e)| Some((*id, e.owned()?))).filter(|(_, o)| o.wanted_back)
    }

    /// Extents without a block in use that clients still have and are not asked for yet, other than `tenant`'s own in `format`: what could be
    /// asked back, or taken where the kernel can cut a holder off.
    pub fn idle(&self, tenant: Tenant, format: FormatId) -> Vec<ExtentId> {
        let others = |o: &Owned| (o.tenant, o.format) != (tenant, format);
        self.all_idle().filter(|(_, o)| others(o)).map(|(extent, _)| extent).collect()
    }

    /// Extents of all tenants without a block in use that clients still have and are not asked for yet.
    pub fn all_idle(&self) -> impl Iterator<Item = (ExtentId, &Owned)> {
        let owned = |e: &ExtentId| self.extents[e].owned().expect("an idle extent is its tenant's");
        self.books.idle.iter().map(move |e| (*e, owned(e)))
    }

    /// Extents that will be clean once the worker has renewed them.
    pub fn soon_clean(&self) -> u32 {
        self.dirty.len() as u32 + self.renewing
    }

    /// Extents in the worker's hands.
    pub fn renewing(&self) -> u32 {
        self.renewing
    }

    /// The worker begins to renew a dirty extent: which one, or `None` when there is none.
    pub fn begin_renewal(&mut self) -> Option<ExtentId> {
        let id = self.dirty.pop_first()?;
        self.extents.get_mut(&id).expect("the dirty list names extents of the pool").usage = Use::Renewing;
        self.renewing += 1;
        Some(id)
    }

    /// Whoever was renewing extents is gone: they are dirty again.
    pub fn renew_again(&mut self) {
        let renewing = self.extents.iter().filter(|(_, e)| e.usage == Use::Renewing).map(|(id, _)| *id);
        let renewing: Vec<ExtentId> = renewing.collect();
        for id in renewing {
            self.extents.get_mut(&id).expect("just seen").usage = Use::Dirty;
            self.dirty.insert(id);
        }
        self.renewing = 0;
    }

    /// An extent that was to be renewed is still held by somebody. `false` if it is in quarantine already.
    pub fn quarantine(&mut self, extent: ExtentId) -> bool {
        match self.extents.get_mut(&extent) {
            Some(e) if e.usage == Use::Renewing => e.usage = Use::Quarantined,
            _ => return false,
        }
        self.renewing -= 1;
        self.quarantined += 1;
        self.books.ledger.transfer(Account::Free, Account::Quarantined, self.extent_bytes);
        true
    }

    /// An extent in quarantine is to be renewed whoever may hold it: its buffer is not the broker's any more.
    pub fn renew_quarantined(&mut self, extent: ExtentId) {
        match self.extents.get_mut(&extent) {
            Some(e) if e.usage == Use::Quarantined => e.usage = Use::Dirty,
            _ => return,
        }
        self.quarantined -= 1;
        self.dirty.insert(extent);
        self.books.ledger.transfer(Account::Quarantined, Account::Free, self.extent_bytes);
    }

    /// Extents that somebody holds to whom they do not belong.
    pub fn quarantined(&self) -> u32 {
        self.quarantined
    }

    /// The old buffer is gone, out of the worker's hands or out of quarantine. `renewed`: there is a new one in its stead,
    /// whose id is returned.
    pub fn end_renewal(&mut self, extent: ExtentId, renewed: bool) -> Option<ExtentId> {
        let account = match self.extents.get(&extent).map(|e| &e.usage) {
            Some(Use::Renewing) => {
                self.renewing -= 1;
                Account::Free
            }
            Some(Use::Quarantined) => {
                self.quarantined -= 1;
                Account::Quarantined
            }
            _ => return None,
        };
        self.extents.remove(&extent);
        self.books.ledger[account] -= self.extent_bytes;
        renewed.then(|| self.add())
    }

    /// Takes a clean extent out of service, for its memory to go back to the kernel: the one that would be granted last.
    pub fn lend(&mut self) -> Option<ExtentId> {
        let id = self.clean.pop_last()?;
        self.extents.get_mut(&id).expect("the clean list names extents of the pool").usage = Use::Lent;
        self.lent += 1;
        self.books.ledger.transfer(Account::Free, Account::Lent, self.extent_bytes);
        Some(id)
    }

    /// The loan is over: the extent is the pool's no more, until a new one comes in its stead. `false` if it was not lent.
    pub fn end_loan(&mut self, extent: ExtentId) -> bool {
        if self.extents.get(&extent).is_none_or(|e| e.usage != Use::Lent) {
            return false;
        }
        self.extents.remove(&extent);
        self.lent -= 1;
        self.books.ledger[Account::Lent] -= self.extent_bytes;
        true
    }

    /// Extents that are with the kernel for a while.
    pub fn lent(&self) -> u32 {
        self.lent
    }

    fn index(&mut self) {
        let extents = std::mem::take(&mut self.extents);
        let books = Books { clock: self.books.clock, ..Books::default() };
        *self = Pool { next: self.next, books, ..Pool::new(self.extent_bytes) };
        for (&id, e) in extents.iter() {
            let Some(o) = e.owned() else {
                let account = match e.usage {
                    Use::Quarantined => Account::Quarantined,
                    Use::Lent => Account::Lent,
                    _ => Account::Free,
                };
                self.books.ledger[account] += self.extent_bytes;
                match e.usage {
                    Use::Clean => _ = self.clean.insert(id),
                    Use::Dirty => _ = self.dirty.insert(id),
                    Use::Quarantined => self.quarantined += 1,
                    Use::Lent => self.lent += 1,
                    _ => self.renewing += 1,
                }
                continue;
            };
            self.books.ledger[Account::Waste] += self.extent_bytes - o.slot_bytes * o.slots.len() as u64;
            for s in &o.slots {
                self.books.ledger[s.block.account()] += o.slot_bytes;
                self.books.count_use(o.tenant, s.block, o.slot_bytes, true);
            }
            if o.is_cold() {
                self.books.cold.entry(o.tenant).or_default().insert((o.warmth, id));
            }
            *self.tenant_extents.entry(o.tenant).or_default() += 1;
            for client in &e.holders {
                self.held.entry(*client).or_default().insert(id);
            }
            if o.is_open() {
                self.books.open(o, id);
            }
        }
        self.extents = extents;
    }

    /// Counts everything anew and compares. The error says what does not add up.
    pub fn check(&self) -> Result<(), String> {
        let mut anew = self.clone();
        anew.index();
        if anew.books.ledger != self.books.ledger {
            return Err(format!("ledger {:?}, counted {:?}", self.books.ledger, anew.books.ledger));
        }
        let bytes = self.extents.len() as u64 * self.extent_bytes;
        if self.books.ledger.total() != bytes {
            return Err(format!("the ledger adds up to {}, the pool is {bytes}", self.books.ledger.total()));
        }
        for (id, e) in self.extents.iter() {
            if !e.told.is_subset(&e.holders) {
                return Err(format!("{id} is wanted from a client that has not got it"));
            }
            let Some(o) = e.owned() else { continue };
            if o.wanted_back && o.free as usize != o.slots.len() {
                return Err(format!("{id} is wanted back and has a block in use"));
            }
            let free = o.slots.iter().filter(|s| s.block == Block::Free).count();
            if free != o.free as usize {
                return Err(format!("{id} counts {} free places, it has {free}", o.free));
            }
            if o.slots.iter().any(|s| s.generation > e.last_generation) {
                return Err(format!("{id} has a place in a life beyond {}", e.last_generation));
            }
            if o.slots.iter().any(|s| matches!(s.block, Block::Held { refs: 0, sealed: false, .. })) {
                return Err(format!("{id} has a block that is not sealed and that nobody holds"));
            }
            let cached = o.slots.iter().filter(|s| s.block.is_cached()).count();
            if cached != o.cached as usize {
                return Err(format!("{id} counts {} cached blocks, it has {cached}", o.cached));
            }
            let suspect = o.slots.iter().filter(|s| matches!(s.block, Block::Suspect(_))).count();
            if suspect != o.suspect as usize {
                return Err(format!("{id} counts {} suspect blocks, it has {suspect}", o.suspect));
            }
        }
        if anew != *self {
            return Err("an index differs from what it is derived from".into());
        }
        Ok(())
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
