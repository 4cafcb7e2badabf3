//! The extents of a pool, by their ids.
//!
//! Owns which extent is where. Invariant: each id leads to one extent, in constant time; whoever goes through all of them
//! meets them in the order of their ids, so that what a broker does does not depend on where they are kept.

use std::collections::BTreeMap;
use std::ops::Index;

use foldhash::fast::RandomState;
use slab::Slab;

use super::extent::{Extent, Owned, Use};
use crate::id::ExtentId;

/// All extents of a pool.
#[derive(Debug, Clone, Default)]
pub struct ExtentMap {
    kept: Slab<Extent>,
    /// Ids are the broker's own, counted up: the hash needs no key.
    at: std::collections::HashMap<ExtentId, usize, RandomState>,
    in_order: BTreeMap<ExtentId, usize>,
    /// How often one was handed out to be changed.
    changes: u64,
}

impl ExtentMap {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// One of them.
    pub fn get(&self, id: &ExtentId) -> Option<&Extent> {
        self.kept.get(*self.at.get(id)?)
    }

    /// What was read of any of them is true while this stays the same.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: &ExtentId) -> Option<&mut Extent> {
        self.changes += 1;
        self.kept.get_mut(*self.at.get(id)?)
    }

    /// The owner's part of one.
    #[inline]
    pub(super) fn owned_mut(&mut self, id: ExtentId) -> Option<&mut Owned> {
        match self.get_mut(&id).map(|e| &mut e.usage) {
            Some(Use::Owned(owned)) => Some(owned),
            _ => None,
        }
    }

    pub(super) fn insert(&mut self, id: ExtentId, extent: Extent) {
        self.changes += 1;
        self.remove(&id);
        let at = self.kept.insert(extent);
        self.at.insert(id, at);
        self.in_order.insert(id, at);
    }

    pub(super) fn remove(&mut self, id: &ExtentId) -> Option<Extent> {
        self.changes += 1;
        let at = self.at.remove(id)?;
        self.in_order.remove(id);
        Some(self.kept.remove(at))
    }

    /// Their ids, ascending.
    pub fn keys(&self) -> impl Iterator<Item = &ExtentId> {
        self.in_order.keys()
    }

    /// All, by ascending id.
    pub fn values(&self) -> impl Iterator<Item = &Extent> {
        self.in_order.values().map(|at| &self.kept[*at])
    }

    /// All with their ids, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (&ExtentId, &Extent)> {
        self.iter_from(ExtentId(0))
    }

    /// The same, of those from `first` on.
    pub fn iter_from(&self, first: ExtentId) -> impl Iterator<Item = (&ExtentId, &Extent)> {
        self.in_order.range(first..).map(|(id, at)| (id, &self.kept[*at]))
    }
}

impl Index<&ExtentId> for ExtentMap {
    type Output = Extent;
    fn index(&self, id: &ExtentId) -> &Extent {
        self.get(id).expect("callers name extents of the pool")
    }
}

/// Where they are kept, and how often they have changed, is no part of what they are.
impl PartialEq for ExtentMap {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for ExtentMap {}

impl From<BTreeMap<ExtentId, Extent>> for ExtentMap {
    fn from(all: BTreeMap<ExtentId, Extent>) -> Self {
        let mut extents = ExtentMap::default();
        all.into_iter().for_each(|(id, extent)| extents.insert(id, extent));
        extents
    }
}

impl From<ExtentMap> for BTreeMap<ExtentId, Extent> {
    fn from(mut extents: ExtentMap) -> Self {
        let in_order = std::mem::take(&mut extents.in_order);
        in_order.into_iter().map(|(id, at)| (id, extents.kept.remove(at))).collect()
    }
}
