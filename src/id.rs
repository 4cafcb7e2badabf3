//! Names of things that cross a module border, one type each, so that none can be taken for another.
//!
//! Owns nothing. Invariant: an [`ExtentId`], a [`SessionId`] and a [`ClientId`] are never given out twice by one
//! broker, and a block's generation only grows, so a late message names something that is gone, never its successor.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One kernel buffer of the pool. A buffer that is destroyed and allocated anew gets a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExtentId(pub u32);

/// One connection to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClientId(pub u64);

/// One token sequence with its block table. Sessions are numbered by tenant, so that their numbers, which clients see, do
/// not tell what others open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId {
    /// Whose it is.
    pub tenant: Tenant,
    /// Which of the tenant's, from 1: what clients are told.
    pub number: u64,
}

/// A trust domain: one uid, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tenant(pub u32);

impl Tenant {
    /// The uid that the kernel shows for users without a mapping in this namespace: nobody in particular.
    pub(crate) const OVERFLOW: Tenant = Tenant(65534);
    /// `(uid_t)-1`, which calls take for "leave as it is".
    const NO_UID: Tenant = Tenant(u32::MAX);

    /// Why nobody who connects is this tenant, if so.
    pub(crate) fn why_nobody(self) -> Option<&'static str> {
        match self {
            Tenant::OVERFLOW => {
                Some("it stands for users that this namespace does not know; it can be no tenant")
            }
            Tenant::NO_UID => Some("no user can have this uid"),
            _ => None,
        }
    }
}

/// One geometry of blocks (a layer group of a profile) that the broker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FormatId(pub u32);

/// A place for a block: the slot of an extent, whoever has it now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The extent.
    pub extent: ExtentId,
    /// The slot in it, from 0.
    pub slot: u32,
}

/// A block: a place, and which of its lives is meant. From a client it is a claim until the pool has checked it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockId {
    /// Where it lies.
    pub place: Place,
    /// Which life of that place: grows each time the place is granted.
    pub generation: u64,
}

/// Set in the names of read-only copies, which lie beside the pool. The pool counts its extents from 1 and does not come
/// so far: at one renewal a millisecond that would take 24 days of nothing else.
const COPY: u32 = 1 << 31;

impl ExtentId {
    /// The name of the n-th read-only copy.
    pub(crate) fn of_copy(n: u32) -> Self {
        ExtentId(COPY | n)
    }

    /// Whether it is a read-only copy of a common prompt, and no extent of the pool.
    pub fn is_copy(self) -> bool {
        self.0 & COPY != 0
    }
}

impl SessionId {
    /// None comes before it.
    pub(crate) const FIRST: Self = SessionId { tenant: Tenant(0), number: 0 };

    /// The least that comes after it.
    pub(crate) fn next(self) -> Self {
        SessionId { number: self.number + 1, ..self }
    }
}

impl fmt::Display for ExtentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "extent {}", self.0)
    }
}

/// What its client calls it: whose it is, the client knows, and a log says beside it.
impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {}", self.number)
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}.{} (life {})", self.place.extent.0, self.place.slot, self.generation)
    }
}
