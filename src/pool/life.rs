//! The life of an extent: from its tenant to nobody, through renewal, quarantine or a loan, to the next tenant.
//!
//! Owns nothing. Invariant: an extent leaves its tenant only without a block in use, and comes to another one only as a new
//! extent, under a new name; what is on its way is counted where it is.

use std::collections::BTreeSet;

use super::{Account, Extent, Owned, Pool, Use};
use crate::id::{ClientId, ExtentId, FormatId, Tenant};

impl Pool {
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

    /// From its tenant to nobody, for the worker to renew.
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

    /// Extents without a block in use that clients still have and are not asked for yet, other than `tenant`'s own in
    /// `format`: what could be asked back, or taken where the kernel can cut a holder off.
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
}
