//! Which place a grant gets.
//!
//! Owns nothing: what is open, idle and clean is in the [`books`](super::books). Invariant: a place that is given was free, in an
//! extent of the tenant and the format that nobody is asked to give back, or in a clean one; the choice is one of the
//! best in each source, found without looking at the others.

use std::collections::BTreeSet;

use super::{Account, Block, Cut, Owned, Pool, Slot, Use};
use crate::id::{BlockId, ClientId, ExtentId, Place, Tenant};

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

/// A free place.
struct Found {
    place: Place,
    /// Its extent has just been cut, and is on no list.
    is_new: bool,
}

/// A block that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The block, now credit.
    pub block: BlockId,
    /// Who may have left bytes in it before.
    pub written_by: Option<ClientId>,
}

impl Pool {
    /// Takes blocks that lie side by side as credit, up to `most`: the first right after `near`, else in an extent where the
    /// client lives, else in another one of the tenant, else in a clean extent; the others right after it, as far as places
    /// are free. They are put behind those in `taken`. Returns their extent; `None` when there is no place left within the
    /// bounds of the request.
    pub fn take(&mut self, take: &Take, most: u32, taken: &mut Vec<Taken>) -> Option<ExtentId> {
        let Found { place: Place { extent: id, slot: first }, is_new } = self.find(take)?;
        let Pool { extents, books, .. } = self;
        let extent = extents.get_mut(&id)?;
        let Use::Owned(owned) = &mut extent.usage else { return None };
        let after = owned.slots.iter().skip(first as usize).take(most as usize);
        let run = first..first + after.take_while(|slot| slot.block == Block::Free).count() as u32;
        books.lend(owned, id, run.clone(), take.client, is_new);
        for slot in run {
            let place = Place { extent: id, slot };
            let slot = &mut owned.slots[slot as usize];
            slot.generation += 1;
            let block = BlockId { place, generation: slot.generation };
            taken.push(Taken { block, written_by: slot.written_by.replace(take.client) });
            extent.last_generation = extent.last_generation.max(block.generation);
        }
        Some(id)
    }

    fn find(&mut self, take: &Take) -> Option<Found> {
        if let Some(place) = self.behind_near(take) {
            return Some(Found { place, is_new: false });
        }
        let order: &[Source] = match take.whole {
            true => &[Source::Idle, Source::Clean, Source::Fullest],
            false => &[Source::Fullest, Source::Clean],
        };
        let (extent, is_new) = order.iter().find_map(|source| match source {
            Source::Idle | Source::Fullest => Some((self.open_extent(take, *source)?, false)),
            Source::Clean => Some((self.adopt(take)?, true)),
        })?;
        if is_new {
            return Some(Found { place: Place { extent, slot: 0 }, is_new });
        }
        let slots = &self.extents[&extent].owned()?.slots;
        let slot = slots.iter().position(|s| s.block == Block::Free)? as u32;
        // Nobody's home is where whoever takes from it lives from now on, so that the next block is looked for here.
        if self.extents[&extent].owned()?.home.is_none() {
            self.rehome(extent, Some(take.client));
        }
        Some(Found { place: Place { extent, slot }, is_new })
    }

    /// The place right after `near`, if the request may have it.
    fn behind_near(&self, take: &Take) -> Option<Place> {
        let near = take.near?;
        let next = Place { extent: near.extent, slot: near.slot + 1 };
        let owned = self.extents.get(&next.extent)?.owned()?;
        let is_theirs = (owned.tenant, owned.format) == (take.tenant, take.cut.format);
        let is_granted_from = !owned.wanted_back && !owned.aside;
        let is_free = owned.slots.get(next.slot as usize)?.block == Block::Free;
        (is_theirs && is_granted_from && is_free && self.may_know(next.extent, take)).then_some(next)
    }

    /// Whether the client has the extent's descriptor, or may get one more.
    fn may_know(&self, extent: ExtentId, take: &Take) -> bool {
        take.new_descriptors > 0 || self.is_holder(extent, take.client)
    }

    /// An extent of the tenant with a free place: where the client lives, else where another one of the tenant does.
    fn open_extent(&self, take: &Take, source: Source) -> Option<ExtentId> {
        let (tenant, format) = (take.tenant, take.cut.format);
        let best = |set: &BTreeSet<(u32, ExtentId)>| match source {
            Source::Idle => set.last().filter(|(free, _)| *free == take.cut.slots).copied(),
            _ => set.first().copied(),
        };
        let known = |e: &ExtentId| self.may_know(*e, take);
        let open = &self.books.open;
        let at_home = open.get(&(tenant, format, Some(take.client))).and_then(best);
        let elsewhere = || {
            let all = (tenant, format, None)..=(tenant, format, Some(ClientId(u64::MAX)));
            open.range(all).filter_map(|(_, set)| best(set)).min().map(|(_, e)| e)
        };
        at_home.map(|(_, e)| e).filter(known).or_else(|| elsewhere().filter(known))
    }

    /// Cuts a clean extent for a tenant, if it and the client may have one more. Its places are not listed yet: whoever takes
    /// the first of them does that.
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
        extent.usage = Use::Owned(owned);
        let bytes = cut.slot_bytes * u64::from(cut.slots);
        self.books.ledger.transfer(Account::Free, Account::Stranded, bytes);
        self.books.ledger.transfer(Account::Free, Account::Waste, self.extent_bytes - bytes);
        *self.tenant_extents.entry(take.tenant).or_default() += 1;
        Some(id)
    }

    /// Says where a client's next blocks are looked for first. The lists of open extents go by it.
    pub(super) fn rehome(&mut self, extent: ExtentId, home: Option<ClientId>) {
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
}
