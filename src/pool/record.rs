//! A pool as it is written down, and the count of everything in it.
//!
//! Owns nothing. Invariant: what is written is the extents alone; all that is counted and listed of them is counted anew when
//! they are read, by the same count that [`Pool::check`] holds the books against.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Account, Block, Books, Extent, Pool, Use};
use crate::id::ExtentId;

/// The part of a pool that its record holds.
#[derive(Serialize, Deserialize)]
pub(super) struct PoolRecord {
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
