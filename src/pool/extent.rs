//! One extent: who owns it, how it is cut into slots, and what is in each slot.
//!
//! Owns the slots. Invariants: an extent has an owner exactly while it is cut into slots; its counts of free, cached and
//! suspect slots are the numbers of slots that are so; an extent that is wanted back has only free slots; a slot's
//! generation only grows, also when the extent is cut anew.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::ledger::Account;
use crate::id::{BlockId, ClientId, ExtentId, FormatId, Place, Tenant};

/// What a place holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Block {
    /// Nothing.
    Free,
    /// A block that a process has ahead of need.
    Credit(ClientId),
    /// Nobody's, but the process of a session that was ended may still write there: granted to nobody.
    Suspect(ClientId),
    /// A block of a session's table, a pinned or a cached one.
    Held {
        /// How many tables it stands in.
        refs: u32,
        /// Never written again.
        sealed: bool,
        /// Stays when no table holds it.
        pinned: bool,
    },
}

impl Block {
    /// Whether it is kept only for whoever may ask for it: sealed, in no table, not pinned.
    pub fn is_cached(self) -> bool {
        matches!(self, Block::Held { refs: 0, sealed: true, pinned: false })
    }

    /// Where the ledger books it.
    pub fn account(self) -> Account {
        match self {
            Block::Free => Account::Stranded,
            Block::Credit(_) => Account::Credit,
            Block::Suspect(_) => Account::Quarantined,
            Block::Held { pinned: true, .. } => Account::Pinned,
            Block::Held { refs: 0, .. } => Account::Cached,
            Block::Held { sealed: false, refs: 1, .. } => Account::Private,
            Block::Held { .. } => Account::Shared,
        }
    }
}

/// One place of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// The life of this place that is meant now; before the first grant, the one before it.
    pub generation: u64,
    /// What it holds.
    pub block: Block,
    /// Who may have left bytes here. `None`: it reads as zero.
    pub written_by: Option<ClientId>,
}

/// An extent in a tenant's hands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// Whose it is.
    pub tenant: Tenant,
    /// What its blocks are.
    pub format: FormatId,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// The process whose blocks it holds by preference.
    pub home: Option<ClientId>,
    /// Its slots.
    pub slots: Vec<Slot>,
    /// How many of them are free.
    pub free: u32,
    /// How many of them are cached.
    pub cached: u32,
    /// How many of them are suspect.
    pub suspect: u32,
    /// When a block of it became cached last, by the pool's clock.
    pub warmth: u64,
    /// Its holders have been asked to give it back: no block of it is granted meanwhile.
    pub wanted_back: bool,
    /// A device that is not coherent imports it for one session: nobody else gets a block of it meanwhile.
    pub aside: bool,
}

impl Owned {
    /// Whether there are blocks that are not free, and every one of them is cached or suspect.
    pub fn is_cold(&self) -> bool {
        let gone = self.cached + self.suspect;
        gone > 0 && (self.free + gone) as usize == self.slots.len()
    }

    /// The slots whose blocks are cached.
    pub fn cached_slots(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.slots).filter(|(_, slot)| slot.block.is_cached()).map(|(at, _)| at)
    }

    /// The names of its blocks that are `such`; the extent itself is called `extent`.
    pub(crate) fn blocks(
        &self,
        extent: ExtentId,
        such: impl Fn(Block) -> bool,
    ) -> impl Iterator<Item = BlockId> {
        let these = (0..).zip(&self.slots).filter(move |(_, s)| such(s.block));
        these.map(move |(slot, s)| BlockId { place: Place { extent, slot }, generation: s.generation })
    }

    /// Where the books list it.
    pub(super) fn home(&self) -> super::books::Home {
        (self.tenant, self.format, self.home)
    }

    /// Whether blocks of it can be granted.
    pub(super) fn is_open(&self) -> bool {
        self.free > 0 && !self.wanted_back && !self.aside
    }
}

/// What an extent is used for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Use {
    /// Nobody has ever mapped it; it reads as zero.
    Clean,
    /// It was somebody's: it must be renewed before it is another's.
    Dirty,
    /// Being renewed by the worker.
    Renewing,
    /// It was somebody's, and somebody still holds it: it is nobody's until that has ended.
    Quarantined,
    /// Cut into blocks of a tenant.
    Owned(Owned),
    /// With the kernel for a while: there is no buffer.
    Lent,
}

/// One kernel buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// What it is used for.
    pub usage: Use,
    /// The clients that have its descriptor.
    pub holders: BTreeSet<ClientId>,
    /// Of these, the ones that were told to close it and have not said that they did: with their next block of it they get
    /// the descriptor again.
    pub told: BTreeSet<ClientId>,
    /// No slot of this extent has had a higher generation.
    pub last_generation: u64,
}

impl Extent {
    /// An extent that nobody has seen.
    pub fn clean() -> Self {
        Extent { usage: Use::Clean, holders: BTreeSet::new(), told: BTreeSet::new(), last_generation: 0 }
    }

    /// The owner's part.
    pub fn owned(&self) -> Option<&Owned> {
        match &self.usage {
            Use::Owned(owned) => Some(owned),
            _ => None,
        }
    }
}
