//! The prefix index: which sealed block holds which tokens, after which others, and which of them goes first.
//!
//! Owns the names of sealed blocks, and the order of eviction. It knows nothing of pools, so that a simulation can drive
//! it as it is. A name is a chain of SHA-256: the root is made of the tenant (as the kernel says
//! it), the model's fingerprint and the geometry; each block's name is made of its parent's and its token ids. Two
//! sessions find each other's blocks exactly when all of that is equal. Invariants:
//! - the index names exactly the published blocks that are in use; a block leaves it in the same step in which its
//!   place becomes free;
//! - a block is only evicted when nobody holds it and no block that continues it is in the index: of a chain, the end
//!   goes first, and what an operation builds on is never taken from under it. Of layers with a sliding window that is
//!   otherwise: whoever goes on after a prefix reads the last window of it only, so a block needs none of those before it,
//!   and of a chain goes first what was let go first, which is its start;
//! - a block is found, taken and let go in constant time, but for the ends of chains, which have their place in an order, and
//!   for a walk up a chain when the last holder of a branch comes or goes without one of what is before it.

pub mod chains;
mod order;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::id::{BlockId, FormatId, Place, Tenant};
use crate::profile::Profile;
use order::{Account, Order};
use tree::{At, Entry, Node, Tree};

/// The name of a block's contents: 32 bytes of SHA-256.
pub type Digest = [u8; 32];

/// The name under which the first block of a sequence is hashed. Every part is fixed in length or hashed by itself,
/// so that no two different triples give the same bytes.
pub fn root(tenant: Tenant, model: &Digest, profile: &Profile) -> Digest {
    let geometry = Sha256::digest(serde_json::to_vec(profile.groups()).expect("plain data"));
    let mut h = Sha256::new();
    h.update(b"kvbroker prefix root 1\0");
    h.update(tenant.0.to_le_bytes());
    h.update(model);
    h.update([profile.layout() as u8]);
    h.update(profile.tokens_per_block().to_le_bytes());
    h.update(Sha256::digest(profile.element()));
    h.update(geometry);
    h.finalize().into()
}

/// The name of the block that holds `tokens` after `parent`.
pub fn child(parent: &Digest, tokens: &[u32]) -> Digest {
    let mut h = Sha256::new();
    h.update(b"kvbroker prefix block 1\0");
    h.update(parent);
    for t in tokens {
        h.update(t.to_le_bytes());
    }
    h.finalize().into()
}

/// Which of the blocks that nobody holds goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Eviction {
    /// The one that was let go first. Of the two this finds more, on a shop floor's requests as on the conversations of a
    /// public trace: `kvbctl simulate` shows it.
    #[default]
    Lru,
    /// Blocks that were found by a look-up stay longer than those that never were, so that a stream of prompts that
    /// come once does not wash out the ones that come again; among equals the one that was let go first.
    Found,
}

/// A block to be published.
#[derive(Debug, Clone, Copy)]
pub struct Publication {
    /// Its name.
    pub name: Digest,
    /// The name before it in its sequence; `None` for the first one.
    pub parent: Option<Digest>,
    /// The block.
    pub block: BlockId,
    /// Whose it is.
    pub tenant: Tenant,
    /// What it is.
    pub format: FormatId,
    /// Blocks of lower priority are evicted first.
    pub priority: u8,
    /// It is of layers with a sliding window: what continues it does not need it.
    pub windowed: bool,
}

/// Counts of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixStats {
    /// Published blocks.
    pub blocks: usize,
    /// Of these, pinned.
    pub pinned: usize,
    /// Blocks asked for by look-ups.
    pub queries: u64,
    /// Of these, found.
    pub hits: u64,
    /// Blocks evicted.
    pub evictions: u64,
}

/// Who pinned a chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Whose it is.
    pub tenant: Tenant,
    /// The process that pinned it; it may have gone.
    pub pid: i32,
    /// Its program, and the session's name, as they say.
    pub label: String,
    /// Blocks of the chain.
    pub blocks: u32,
    /// Tokens of the chain.
    pub tokens: u64,
    /// The model's fingerprint.
    pub model: Digest,
}

/// All published blocks.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Prefixes {
    policy: Eviction,
    pins: BTreeMap<Digest, Pin>,
    clock: u64,
    queries: u64,
    hits: u64,
    evictions: u64,
    /// Blocks in use that are not what was sealed.
    damaged: BTreeSet<BlockId>,
    tree: Tree,
    // Derived from the tree.
    order: Order,
    /// How often something has changed which blocks can be evicted.
    changes: u64,
    /// Nodes that were visited on the way up a chain.
    #[cfg(test)]
    steps: u64,
}

/// The part of an index that its record holds.
#[derive(Serialize, Deserialize)]
struct Stored {
    policy: Eviction,
    nodes: BTreeMap<Digest, Node>,
    pins: BTreeMap<Digest, Pin>,
    clock: u64,
    queries: u64,
    hits: u64,
    evictions: u64,
    damaged: BTreeSet<BlockId>,
}

impl From<Prefixes> for Stored {
    fn from(p: Prefixes) -> Self {
        let Prefixes { policy, pins, clock, queries, hits, evictions, damaged, tree, .. } = p;
        let nodes = tree.into_nodes().collect();
        Stored { policy, nodes, pins, clock, queries, hits, evictions, damaged }
    }
}

impl From<Stored> for Prefixes {
    fn from(s: Stored) -> Self {
        let Stored { policy, nodes, pins, clock, queries, hits, evictions, damaged } = s;
        let mut index =
            Prefixes { policy, pins, clock, queries, hits, evictions, damaged, ..Prefixes::default() };
        let mut idle = Vec::new();
        for (name, mut node) in nodes {
            // A record may name one place twice: then it is not sound, which the check of it will say.
            let is_idle = std::mem::take(&mut node.idle);
            if index.tree.at(node.block.place).is_some() {
                continue;
            }
            let at = index.link(name, node);
            if is_idle {
                idle.push(at);
            }
        }
        idle.into_iter().for_each(|at| index.change(at, |node| node.idle = true));
        index
    }
}

/// As if each were told by its nodes: where a node is kept is not part of what an index is.
impl PartialEq for Prefixes {
    fn eq(&self, other: &Self) -> bool {
        let numbers = |p: &Self| (p.policy, p.clock, p.queries, p.hits, p.evictions);
        fn nodes(p: &Prefixes) -> BTreeMap<&Digest, (&Node, u32, bool)> {
            p.tree.iter().map(|(_, e)| (&e.name, (&e.node, e.busy, e.listed))).collect()
        }
        let ends = |p: &Self, account: &Account| -> Vec<_> {
            account.ends.iter().map(|(rank, at)| (*rank, p.tree[*at].name)).collect()
        };
        let accounts = |p: &Self| -> Vec<_> {
            p.order.accounts().map(|a| (a.key, a.blocks, a.evictable, ends(p, a))).collect()
        };
        numbers(self) == numbers(other)
            && (&self.pins, &self.damaged) == (&other.pins, &other.damaged)
            && nodes(self) == nodes(other)
            && accounts(self) == accounts(other)
    }
}

impl Eq for Prefixes {}

impl Prefixes {
    /// An empty index that evicts by `policy`.
    pub fn new(policy: Eviction) -> Self {
        Prefixes { policy, ..Prefixes::default() }
    }

    /// Publishes a block that somebody holds; `false` if another block has its name already, which stays, or if the
    /// block has another name already: what it holds was true of its first name, and it has only one entry to be
    /// forgotten by. So it is for a block that is damaged.
    pub fn publish(&mut self, p: Publication) -> bool {
        let is_new = self.tree.find(&p.name).is_none() && self.tree.at(p.block.place).is_none();
        if !is_new || self.damaged.contains(&p.block) {
            return false;
        }
        self.clock += 1;
        let Publication { name, parent, block, tenant, format, priority, windowed } = p;
        let pins = BTreeSet::new();
        let (idle, last, hits, checksum) = (false, self.clock, 0, None);
        self.link(
            name,
            Node { block, tenant, format, parent, pins, idle, priority, hits, last, checksum, windowed },
        );
        true
    }

    /// Takes in a node that somebody holds.
    fn link(&mut self, name: Digest, node: Node) -> At {
        self.changes += 1;
        let account = self.order.enter((node.tenant, node.format));
        let at = self.tree.insert(name, node, account);
        if let Some(up) = self.tree[at].up() {
            self.relist(up);
            self.count_child(up, 1);
        }
        at
    }

    /// The block at `place`, if it is published, is held by somebody.
    pub fn hold(&mut self, place: Place) {
        let Some(at) = self.tree.at(place) else { return };
        if self.tree[at].node.idle {
            self.change(at, |node| node.idle = false);
        }
    }

    /// The block at `place` is held by nobody any more. `false` if it is not published: then nobody will find it.
    pub fn let_go(&mut self, place: Place) -> bool {
        let Some(at) = self.tree.at(place) else { return false };
        self.clock += 1;
        let now = self.clock;
        self.change(at, |node| {
            node.idle = true;
            node.last = now;
        });
        true
    }

    /// Whether the block at `place` can be found.
    pub fn is_published(&self, place: Place) -> bool {
        self.tree.at(place).is_some()
    }

    /// Changes a node and everything that depends on whether it may be evicted.
    fn change(&mut self, at: At, change: impl FnOnce(&mut Node)) {
        self.changes += 1;
        let Prefixes { tree, order, policy, .. } = self;
        let entry = &mut tree[at];
        if entry.listed {
            order.unlist(entry.account, policy.rank(&entry.node), at);
        }
        let before = entry.is_evictable();
        change(&mut entry.node);
        let after = entry.is_evictable();
        entry.listed = entry.is_end();
        if entry.listed {
            order.list(entry.account, policy.rank(&entry.node), at);
        }
        if before == after {
            return;
        }
        order.count(entry.account, after);
        if let Some(up) = entry.up() {
            self.count_child(up, if after { -1 } else { 1 });
        }
    }

    /// Puts a node into the order of eviction, or takes it out, after its first child came or its last one went.
    fn relist(&mut self, at: At) {
        let entry = &mut self.tree[at];
        let is_end = entry.is_end();
        if std::mem::replace(&mut entry.listed, is_end) == is_end {
            return;
        }
        let (account, rank) = (entry.account, self.policy.rank(&entry.node));
        match is_end {
            true => self.order.list(account, rank, at),
            false => self.order.unlist(account, rank, at),
        }
    }

    /// A node has one child more, or less, that cannot be evicted. Goes up as far as that changes anything.
    fn count_child(&mut self, at: At, by: i32) {
        let mut next = Some(at);
        while let Some(at) = next {
            #[cfg(test)]
            {
                self.steps += 1;
            }
            let entry = &mut self.tree[at];
            let before = entry.is_evictable();
            entry.busy = entry.busy.checked_add_signed(by).expect("children are counted as they come and go");
            let after = entry.is_evictable();
            if before == after {
                return;
            }
            self.order.count(entry.account, after);
            next = entry.up();
        }
    }

    /// The block under `name`, counted as a look-up.
    #[inline]
    pub fn look_up(&mut self, name: &Digest) -> Option<BlockId> {
        self.queries += 1;
        let at = self.tree.find(name)?;
        self.hits += 1;
        let entry = &mut self.tree[at];
        let (block, found) = (entry.node.block, entry.node.hits.saturating_add(1));
        // Only the first find of what is in the order of eviction changes its place there.
        if found == 1 && entry.listed {
            self.find_first(at);
        } else {
            entry.node.hits = found;
        }
        Some(block)
    }

    /// Apart from [`look_up`](Self::look_up), so that what it is nearly always stays short.
    #[cold]
    #[inline(never)]
    fn find_first(&mut self, at: At) {
        self.change(at, |node| node.hits = 1);
    }

    /// The look-up that found nothing here has found it elsewhere.
    pub fn count_found(&mut self) {
        self.hits += 1;
    }

    fn node(&self, name: &Digest) -> Option<&Node> {
        self.tree.find(name).map(|at| &self.tree[at].node)
    }

    fn entry_of(&self, block: BlockId) -> Option<&Entry> {
        let at = self.tree.at(block.place)?;
        Some(&self.tree[at]).filter(|entry| entry.node.block == block)
    }

    /// The block under `name`.
    pub fn get(&self, name: &Digest) -> Option<BlockId> {
        self.node(name).map(|n| n.block)
    }

    /// The checksum of a published block, if it has been taken; `None` for a block that is not published.
    pub fn checksum(&self, block: BlockId) -> Option<Option<u32>> {
        self.entry_of(block).map(|entry| entry.node.checksum)
    }

    /// Keeps a published block's checksum.
    pub fn set_checksum(&mut self, block: BlockId, sum: u32) {
        let Some(at) = self.tree.at(block.place) else { return };
        let node = &mut self.tree[at].node;
        if node.block == block {
            node.checksum = Some(sum);
        }
    }

    /// The name of a published block.
    pub fn name_of(&self, block: BlockId) -> Option<Digest> {
        self.entry_of(block).map(|entry| entry.name)
    }

    /// The chains for which a block is pinned.
    pub fn pins_of(&self, block: BlockId) -> Vec<Digest> {
        self.entry_of(block).map_or_else(Vec::new, |entry| entry.node.pins.iter().copied().collect())
    }

    /// A block in use that has lost its name is never published again. Of earlier marks those stay for which `lives`.
    pub fn mark_damaged(&mut self, block: BlockId, lives: impl Fn(&BlockId) -> bool) {
        self.damaged.retain(lives);
        self.damaged.insert(block);
    }

    /// Pins or unpins, for the chain that ends in `chain`, the block under `name`. Returns the block if with that it
    /// became pinned by somebody, or by nobody.
    pub fn pin(&mut self, name: &Digest, chain: Digest, on: bool) -> Option<BlockId> {
        let at = self.tree.find(name)?;
        let node = &mut self.tree[at].node;
        let before = node.pins.is_empty();
        if on {
            node.pins.insert(chain);
        } else {
            node.pins.remove(&chain);
        }
        (before != node.pins.is_empty()).then_some(node.block)
    }

    /// The names of the blocks that are pinned for a chain, from its end to its start: also those beyond a block that has
    /// left the index because it was damaged. Looks at every block.
    pub fn pinned_for(&self, chain: &Digest) -> Vec<Digest> {
        let pinned = |at: &At| self.tree[*at].node.pins.contains(chain);
        let all = self.tree.iter().map(|(at, _)| at).filter(pinned);
        // A chain is one line but for its gaps: each piece of it from its end.
        let ends = all.filter(|at| !self.tree.children(*at).any(|child| pinned(&child)));
        let up = |end| std::iter::successors(Some(end), |at: &At| self.tree[*at].up()).take_while(pinned);
        let mut pieces: Vec<Vec<Digest>> =
            ends.map(|end| up(end).map(|at| self.tree[at].name).collect()).collect();
        pieces.sort_by_key(|piece| piece[0] != *chain);
        pieces.concat()
    }

    /// Whether `name` is pinned already, by whatever chain.
    pub fn is_pinned(&self, name: &Digest) -> bool {
        self.node(name).is_some_and(|n| !n.pins.is_empty())
    }

    /// Notes who pinned a chain, or that nobody does any more.
    pub fn set_pin(&mut self, chain: Digest, pin: Option<Pin>) -> Option<Pin> {
        match pin {
            Some(pin) => self.pins.insert(chain, pin),
            None => self.pins.remove(&chain),
        }
    }

    /// Every pinned chain, by the name of its last block.
    pub fn pins(&self) -> impl Iterator<Item = (&Digest, &Pin)> {
        self.pins.iter()
    }

    /// The names of a chain from its end to its start, as far as they are in the index.
    pub fn chain(&self, end: &Digest) -> Vec<Digest> {
        let all = std::iter::successors(self.tree.find(end), |at| self.tree[*at].up());
        all.map(|at| self.tree[at].name).collect()
    }

    /// The name that the block under `name` continues.
    pub fn parent(&self, name: &Digest) -> Option<Digest> {
        self.node(name)?.parent
    }

    /// The place has become free.
    pub fn forget(&mut self, place: Place) {
        if let Some(at) = self.tree.at(place) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: At) -> BlockId {
        self.changes += 1;
        let Prefixes { tree, order, policy, .. } = self;
        let entry = &mut tree[at];
        if std::mem::replace(&mut entry.listed, false) {
            order.unlist(entry.account, policy.rank(&entry.node), at);
        }
        let evictable = entry.is_evictable();
        if evictable {
            order.count(entry.account, false);
        }
        let up = entry.up();
        let entry = tree.remove(at);
        order.leave(entry.account);
        if let Some(up) = up {
            self.relist(up);
            // Its parent counts it only if it could not be evicted. Whoever counted all the same, and took it back, would go up
            // the whole chain for each block of it.
            if !evictable {
                self.count_child(up, -1);
            }
        }
        entry.node.block
    }

    /// How many blocks of a tenant in a format can be evicted, one after the other.
    pub fn evictable(&self, tenant: Tenant, format: FormatId) -> u64 {
        self.order.evictable((tenant, format))
    }

    /// How many blocks of all tenants can be evicted, one after the other.
    pub fn evictable_of_all(&self) -> u64 {
        self.order.evictable_of_all()
    }

    /// What [`is_evictable`](Self::is_evictable) said of any block is true while this stays the same.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether the block at `place` can be evicted, with what continues it.
    pub fn is_evictable(&self, place: Place) -> bool {
        self.tree.at(place).is_some_and(|at| self.tree[at].is_evictable())
    }

    /// Evicts the one block of a tenant in a format that is to go first.
    pub fn evict(&mut self, tenant: Tenant, format: FormatId) -> Option<BlockId> {
        let first = self.order.first((tenant, format))?;
        Some(self.evict_end_at(first))
    }

    /// Evicts the one block of all that is to go first.
    pub fn evict_any(&mut self) -> Option<BlockId> {
        let first = self.order.first_of(None)?;
        Some(self.evict_end_at(first))
    }

    /// Evicts the one block of a tenant, in whatever format, that is to go first.
    pub fn evict_of(&mut self, tenant: Tenant) -> Option<BlockId> {
        let first = self.order.first_of(Some(tenant))?;
        Some(self.evict_end_at(first))
    }

    /// Evicts the block under `name`, if nobody holds it and nothing that needs it continues it.
    pub fn evict_end(&mut self, name: &Digest) -> Option<BlockId> {
        let at = self.tree.find(name)?;
        self.tree[at].is_end().then(|| self.evict_end_at(at))
    }

    fn evict_end_at(&mut self, at: At) -> BlockId {
        self.evictions += 1;
        self.remove(at)
    }

    /// Evicts the block at `place` and all that continues it and needs it, ends first. Nothing if somebody holds any of that.
    pub fn evict_at(&mut self, place: Place) -> Vec<BlockId> {
        let Some(top) = self.tree.at(place) else { return Vec::new() };
        if !self.tree[top].is_evictable() {
            return Vec::new();
        }
        let mut order = vec![top];
        let mut done = 0;
        while done < order.len() && !self.tree[order[done]].node.windowed {
            order.extend(self.tree.children(order[done]));
            done += 1;
        }
        order.into_iter().rev().map(|at| self.evict_end_at(at)).collect()
    }

    /// Counts.
    pub fn stats(&self) -> PrefixStats {
        let pinned = self.tree.iter().filter(|(_, entry)| !entry.node.pins.is_empty()).count();
        let Prefixes { queries, hits, evictions, .. } = *self;
        PrefixStats { blocks: self.tree.len(), pinned, queries, hits, evictions }
    }

    /// Every published block with its tenant and whether it is pinned, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = (&Digest, BlockId, Tenant, bool)> {
        self.tree.iter().map(|(_, entry)| {
            let node = &entry.node;
            (&entry.name, node.block, node.tenant, !node.pins.is_empty())
        })
    }

    /// Whether the block under `name` is held by nobody and pinned by nobody.
    pub fn is_idle(&self, name: &Digest) -> bool {
        self.node(name).is_some_and(|n| n.idle)
    }

    /// Derives every index anew and compares.
    pub fn check(&self) -> Result<(), String> {
        self.tree.check()?;
        let anew = Prefixes::from(Stored::from(self.clone()));
        if anew != *self {
            return Err("the prefix index differs from what its blocks say".into());
        }
        if self.tree.iter().any(|(_, entry)| entry.node.idle && !entry.node.pins.is_empty()) {
            return Err("a pinned prefix may be evicted".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ExtentId;

    #[test]
    fn names_differ_by_tenant_model_geometry_parent_and_tokens() {
        let p = Profile::reference();
        let base = root(Tenant(1000), &[1; 32], &p);
        assert_ne!(base, root(Tenant(1001), &[1; 32], &p));
        assert_ne!(base, root(Tenant(1000), &[2; 32], &p));
        let other = Profile::uniform("reference", "f16", 25, 512, 512, 16).unwrap();
        assert_ne!(base, root(Tenant(1000), &[1; 32], &other));
        let renamed = Profile::uniform("another name", "f16", 24, 512, 512, 16).unwrap();
        assert_eq!(base, root(Tenant(1000), &[1; 32], &renamed));
        assert_ne!(child(&base, &[1, 2]), child(&base, &[2, 1]));
        assert_ne!(child(&base, &[1]), child(&child(&base, &[1]), &[1]));
    }

    fn block(n: u32) -> BlockId {
        BlockId { place: Place { extent: ExtentId(n / 4), slot: n % 4 }, generation: 1 }
    }

    fn publish(index: &mut Prefixes, name: u8, parent: Option<u8>) -> bool {
        let parent = parent.map(|p| [p; 32]);
        let (tenant, format) = (Tenant(7), FormatId(1));
        let block = block(name.into());
        let (name, priority, windowed) = ([name; 32], 0, false);
        index.publish(Publication { name, parent, block, tenant, format, priority, windowed })
    }

    fn evict(index: &mut Prefixes) -> Option<u32> {
        let block = index.evict(Tenant(7), FormatId(1))?;
        index.check().unwrap();
        Some(block.place.extent.0 * 4 + block.place.slot)
    }

    #[test]
    fn the_end_of_a_chain_goes_first_and_what_is_held_keeps_all_before_it() {
        let mut index = Prefixes::new(Eviction::Lru);
        // 1 - 2 - 3, and 2 - 4.
        for (name, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(2))] {
            assert!(publish(&mut index, name, parent));
        }
        assert_eq!(evict(&mut index), None, "all are held");
        for n in [1, 2, 3] {
            index.let_go(block(n).place);
        }
        index.check().unwrap();
        assert_eq!(index.evictable(Tenant(7), FormatId(1)), 1, "4 is held, and so 1 and 2 stay");
        assert!(!index.is_evictable(block(1).place) && index.is_evictable(block(3).place));
        assert_eq!(evict(&mut index), Some(3));
        assert_eq!(evict(&mut index), None);
        index.let_go(block(4).place);
        assert_eq!(index.evictable(Tenant(7), FormatId(1)), 3);
        assert_eq!([evict(&mut index), evict(&mut index), evict(&mut index)], [Some(4), Some(2), Some(1)]);
        assert_eq!(index.stats().blocks, 0);
    }

    #[test]
    fn of_layers_with_a_window_the_start_of_a_chain_goes_first_and_is_whole_again_when_it_comes_again() {
        let mut index = Prefixes::new(Eviction::Lru);
        let publication = |name: u8| Publication {
            name: [name; 32],
            parent: name.checked_sub(1).filter(|p| *p > 0).map(|p| [p; 32]),
            block: block(name.into()),
            tenant: Tenant(7),
            format: FormatId(1),
            priority: 0,
            windowed: true,
        };
        for name in 1..=4 {
            assert!(index.publish(publication(name)));
        }
        // As a window slides over it; the last one is still read.
        (1..=3).for_each(|n| _ = index.let_go(block(n).place));
        index.check().unwrap();
        assert_eq!(index.evictable(Tenant(7), FormatId(1)), 3, "what is held needs nothing before it");
        assert_eq!(evict(&mut index), Some(1));
        assert_eq!(index.evict_at(block(3).place), [block(3)], "what continues it stays");
        assert!(index.get(&[4; 32]).is_some());
        // Computed and published anew, a chain is a chain again.
        index.publish(publication(1));
        index.publish(publication(3));
        index.check().unwrap();
        assert_eq!(index.chain(&[4; 32]).len(), 4);
        assert_eq!(index.chains().len(), 1);
        (1..=4).for_each(|n| _ = index.let_go(block(n).place));
        assert_eq!([(); 4].map(|()| evict(&mut index)), [Some(1), Some(2), Some(3), Some(4)]);
    }

    #[test]
    fn a_prompt_that_comes_again_outlives_one_that_never_did_and_plain_lru_does_not_care() {
        for (policy, first) in [(Eviction::Found, 2), (Eviction::Lru, 1)] {
            let mut index = Prefixes::new(policy);
            publish(&mut index, 1, None);
            publish(&mut index, 2, None);
            assert!(index.look_up(&[1; 32]).is_some());
            index.let_go(block(1).place);
            index.let_go(block(2).place);
            assert_eq!(evict(&mut index), Some(first), "{policy:?}");
        }
    }

    #[test]
    fn a_chain_whose_start_was_published_anew_is_whole_again() {
        let mut index = Prefixes::new(Eviction::Lru);
        publish(&mut index, 1, None);
        publish(&mut index, 2, Some(1));
        index.forget(block(1).place);
        index.check().unwrap();
        index.let_go(block(2).place);
        let anew = Publication {
            name: [1; 32],
            parent: None,
            block: block(9),
            tenant: Tenant(7),
            format: FormatId(1),
            priority: 0,
            windowed: false,
        };
        assert!(index.publish(anew));
        index.let_go(block(9).place);
        index.check().unwrap();
        assert_eq!([evict(&mut index), evict(&mut index)], [Some(2), Some(9)]);
    }

    #[test]
    fn an_extent_is_emptied_with_all_that_continues_its_blocks() {
        let mut index = Prefixes::new(Eviction::Lru);
        publish(&mut index, 3, None);
        publish(&mut index, 4, Some(3));
        publish(&mut index, 5, Some(4));
        for n in [3, 4] {
            index.let_go(block(n).place);
        }
        assert_eq!(index.evict_at(block(3).place), [], "5 is held");
        index.let_go(block(5).place);
        assert_eq!(index.evict_at(block(3).place), [block(5), block(4), block(3)]);
        index.check().unwrap();
    }

    #[test]
    fn to_evict_a_long_chain_costs_no_more_for_a_block_than_to_evict_a_short_one() {
        for length in [100_u32, 1000] {
            let mut index = Prefixes::default();
            let name = |n: u32| Sha256::digest(n.to_le_bytes()).into();
            for n in 0..length {
                let parent = n.checked_sub(1).map(name);
                let (tenant, format, priority, windowed) = (Tenant(7), FormatId(1), 0, false);
                let (name, block) = (name(n), block(n));
                let new = Publication { name, parent, block, tenant, format, priority, windowed };
                assert!(index.publish(new));
            }
            (0..length).rev().for_each(|n| _ = index.let_go(block(n).place));
            index.check().unwrap();
            index.steps = 0;
            for n in (length / 2..length).rev() {
                assert_eq!(index.evict(Tenant(7), FormatId(1)), Some(block(n)));
            }
            index.check().unwrap();
            assert_eq!(index.evict_at(block(0).place).len() as u32, length / 2);
            assert!(index.steps <= u64::from(length), "{} steps for {length} blocks", index.steps);
        }
    }

    #[test]
    fn what_a_chain_pins_is_known_beyond_a_block_that_is_gone() {
        let mut index = Prefixes::default();
        for (name, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(1))] {
            publish(&mut index, name, parent);
        }
        (1..=3).for_each(|n| _ = index.pin(&[n; 32], [3; 32], true));
        assert_eq!(index.pinned_for(&[3; 32]), [[3; 32], [2; 32], [1; 32]]);
        index.forget(block(2).place);
        assert_eq!(index.pinned_for(&[3; 32]), [[3; 32], [1; 32]]);
        index.forget(block(3).place);
        assert_eq!(index.pinned_for(&[3; 32]), [[1; 32]]);
    }

    #[test]
    fn a_block_stays_pinned_until_the_last_chain_through_it_lets_go() {
        let mut index = Prefixes::default();
        assert!(publish(&mut index, 1, None));
        assert!(!publish(&mut index, 1, None));
        let block = block(1);
        assert_eq!(index.pin(&[1; 32], [1; 32], true), Some(block));
        assert_eq!(index.pin(&[1; 32], [2; 32], true), None);
        assert_eq!(index.pin(&[1; 32], [1; 32], false), None);
        assert_eq!(index.pin(&[1; 32], [1; 32], false), None, "unpinning twice counts once");
        assert_eq!(index.pin(&[1; 32], [2; 32], false), Some(block));
        index.forget(block.place);
        assert_eq!(index.look_up(&[1; 32]), None);
        assert_eq!(index.stats(), PrefixStats { blocks: 0, pinned: 0, queries: 1, hits: 0, evictions: 0 });
    }
}
