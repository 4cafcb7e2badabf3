//! The published blocks as a forest: each block under the one that it continues.
//!
//! Owns the nodes, the two ways to find one (by name, by place) and the links between a block and those that continue it.
//! Knows nothing of who goes first. Invariants, checked by [`Tree::check`]:
//! - every node is found under its name and under its place, and nothing else is;
//! - a node that continues another is on exactly one list: on its parent's where that is in the index, else on the one that
//!   waits under the parent's name until somebody publishes it anew.
//!
//! A node is found in constant time. Names are hashes, but ones that a client can compute and try out, so they are hashed
//! once more with a key of this process: nobody can make names that meet in one place of the table.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher as _;
use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use serde::{Deserialize, Serialize};
use slab::Slab;

use super::Digest;
use crate::id::{BlockId, FormatId, Place, Tenant};

/// What the index knows of a block, and its record holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Node {
    pub block: BlockId,
    pub tenant: Tenant,
    pub format: FormatId,
    /// `None` for the first block of a sequence.
    pub parent: Option<Digest>,
    /// Which chains that were pinned go through here, named by their last block.
    pub pins: BTreeSet<Digest>,
    /// No session holds it and no pin does.
    pub idle: bool,
    pub priority: u8,
    pub hits: u32,
    pub last: u64,
    /// Of its bytes as they were when it was sealed, once the worker has read them.
    pub checksum: Option<u32>,
    /// Of layers with a window: what continues it does not need it.
    pub windowed: bool,
}

/// Where a node is kept, as long as it is in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At(NonZeroU32);

impl At {
    fn new(key: usize) -> Self {
        let key = u32::try_from(key).ok().and_then(|k| NonZeroU32::MIN.checked_add(k));
        At(key.expect("a pool has fewer than 2^32 places"))
    }

    #[inline]
    fn key(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A node with what is derived from it and from the others.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub name: Digest,
    pub node: Node,
    /// Children that cannot be evicted, by themselves or because of what continues them.
    pub busy: u32,
    /// Where it is counted.
    pub account: usize,
    /// It is in the order of eviction.
    pub listed: bool,
    up: Option<At>,
    first: Option<At>,
    next: Option<At>,
    previous: Option<At>,
}

impl Entry {
    /// Whether it can be evicted, once those that continue it and need it have been.
    pub fn is_evictable(&self) -> bool {
        self.node.idle && (self.node.windowed || self.busy == 0)
    }

    /// Whether it can be evicted at once.
    pub fn is_end(&self) -> bool {
        self.node.idle && (self.node.windowed || self.first.is_none())
    }

    /// The block that it continues, if that is in the index.
    pub fn up(&self) -> Option<At> {
        self.up
    }
}

/// All nodes.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree {
    entries: Slab<Entry>,
    names: HashTable<At>,
    places: HashTable<At>,
    key: RandomState,
    /// The first child of a parent that is not in the index, by the parent's name.
    waiting: BTreeMap<Digest, At>,
}

impl Index<At> for Tree {
    type Output = Entry;
    #[inline]
    fn index(&self, at: At) -> &Entry {
        &self.entries[at.key()]
    }
}

impl IndexMut<At> for Tree {
    #[inline]
    fn index_mut(&mut self, at: At) -> &mut Entry {
        &mut self.entries[at.key()]
    }
}

/// A name is a SHA-256: any 64 bits of it are as good as all.
#[inline]
fn hash_of_name(key: &RandomState, name: &Digest) -> u64 {
    let (first, _) = name.split_first_chunk().expect("a name has 32 bytes");
    key.hash_one(u64::from_le_bytes(*first))
}

fn hash_of_place(key: &RandomState, place: Place) -> u64 {
    key.hash_one((u64::from(place.extent.0) << 32) | u64::from(place.slot))
}

impl Tree {
    /// Published blocks.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The node under `name`.
    #[inline]
    pub fn find(&self, name: &Digest) -> Option<At> {
        let hash = hash_of_name(&self.key, name);
        self.names.find(hash, |at| self[*at].name == *name).copied()
    }

    /// The node whose block lies at `place`.
    pub fn at(&self, place: Place) -> Option<At> {
        let hash = hash_of_place(&self.key, place);
        self.places.find(hash, |at| self[*at].node.block.place == place).copied()
    }

    /// Every node, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = (At, &Entry)> {
        self.entries.iter().map(|(key, entry)| (At::new(key), entry))
    }

    /// Every node with its name.
    pub fn into_nodes(self) -> impl Iterator<Item = (Digest, Node)> {
        self.entries.into_iter().map(|(_, entry)| (entry.name, entry.node))
    }

    /// Those that continue a node.
    pub fn children(&self, at: At) -> impl Iterator<Item = At> {
        self.list(self[at].first)
    }

    fn list(&self, first: Option<At>) -> impl Iterator<Item = At> {
        std::iter::successors(first, |at| self[*at].next)
    }

    /// Takes in a node whose name and place are not in the index.
    pub fn insert(&mut self, name: Digest, node: Node, account: usize) -> At {
        let (parent, place) = (node.parent, node.block.place);
        let first = self.waiting.remove(&name);
        let entry = Entry {
            name,
            node,
            busy: 0,
            account,
            listed: false,
            up: None,
            first,
            next: None,
            previous: None,
        };
        let at = At::new(self.entries.insert(entry));
        let Tree { entries, names, places, key, .. } = self;
        names.insert_unique(hash_of_name(key, &name), at, |at| hash_of_name(key, &entries[at.key()].name));
        let place_of = |at: &At| entries[at.key()].node.block.place;
        places.insert_unique(hash_of_place(key, place), at, |at| hash_of_place(key, place_of(at)));
        let children: Vec<At> = self.list(first).collect();
        children.iter().for_each(|child| self[*child].up = Some(at));
        self[at].busy = children.iter().filter(|child| !self[**child].is_evictable()).count() as u32;
        if let Some(parent) = parent {
            let up = self.find(&parent);
            let before = match up {
                Some(up) => self[up].first.replace(at),
                None => self.waiting.insert(parent, at),
            };
            if let Some(next) = before {
                self[next].previous = Some(at);
            }
            let entry = &mut self[at];
            (entry.up, entry.next) = (up, before);
        }
        at
    }

    /// Takes a node out. Those that continue it wait for it to come again.
    pub fn remove(&mut self, at: At) -> Entry {
        let children: Vec<At> = self.children(at).collect();
        children.iter().for_each(|child| self[*child].up = None);
        let Tree { entries, names, places, key, waiting } = self;
        let entry = entries.remove(at.key());
        if let Some(first) = entry.first {
            waiting.insert(entry.name, first);
        }
        let hashes = (hash_of_name(key, &entry.name), hash_of_place(key, entry.node.block.place));
        for (table, hash) in [(names, hashes.0), (places, hashes.1)] {
            table.find_entry(hash, |other| *other == at).expect("every node is in both tables").remove();
        }
        if let Some(next) = entry.next {
            self[next].previous = entry.previous;
        }
        match (entry.previous, entry.up, entry.node.parent, entry.next) {
            (Some(previous), ..) => self[previous].next = entry.next,
            (None, Some(up), ..) => self[up].first = entry.next,
            (None, None, Some(parent), Some(next)) => _ = self.waiting.insert(parent, next),
            (None, None, Some(parent), None) => _ = self.waiting.remove(&parent),
            (None, None, None, _) => {}
        }
        entry
    }

    /// Looks whether tables and lists name each node once. The error says which does not.
    pub fn check(&self) -> Result<(), String> {
        let all = self.len();
        if (self.names.len(), self.places.len()) != (all, all) {
            return Err(format!(
                "of {all} published blocks {} are found by name and {} by place",
                self.names.len(),
                self.places.len()
            ));
        }
        let lists = self.iter().map(|(at, entry)| (entry.name, Some(at), entry.first));
        let lists = lists.chain(self.waiting.iter().map(|(name, first)| (*name, None, Some(*first))));
        let mut listed = 0;
        for (name, up, first) in lists {
            let mut previous = None;
            for child in self.list(first) {
                let entry = &self[child];
                if (entry.up, entry.previous, entry.node.parent) != (up, previous, Some(name)) {
                    return Err(format!("{} is on a list that is not its parent's", entry.node.block));
                }
                previous = Some(child);
                listed += 1;
            }
        }
        for (at, entry) in self.iter() {
            if self.find(&entry.name) != Some(at) || self.at(entry.node.block.place) != Some(at) {
                return Err(format!("{} is not found by its name and its place", entry.node.block));
            }
        }
        let continuing = self.iter().filter(|(_, entry)| entry.node.parent.is_some()).count();
        if listed != continuing {
            return Err(format!("{continuing} published blocks continue others, {listed} are on a list"));
        }
        match self.waiting.keys().find(|name| self.find(name).is_some()) {
            Some(_) => Err("blocks wait for a parent that is there".into()),
            None => Ok(()),
        }
    }
}
