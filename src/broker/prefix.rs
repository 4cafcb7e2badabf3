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
//! - every operation takes logarithmic time, but for a walk up a chain when its last holder of a branch comes or goes.

pub mod chains;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::id::{BlockId, ExtentId, FormatId, Place, Tenant};
use crate::profile::Profile;

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

impl Eviction {
    /// Lower ranks go first. `last`: when the block was let go, by the index's clock.
    fn rank(self, node: &Node) -> Rank {
        let class = match self {
            Eviction::Found => node.hits.min(1),
            Eviction::Lru => 0,
        };
        Rank { priority: node.priority, class, last: node.last }
    }
}

/// The place of a block in the order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    priority: u8,
    class: u32,
    last: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Node {
    block: BlockId,
    tenant: Tenant,
    format: FormatId,
    /// `None` for the first block of a sequence.
    parent: Option<Digest>,
    /// Which chains that were pinned go through here, named by their last block.
    pins: BTreeSet<Digest>,
    /// No session holds it and no pin does.
    idle: bool,
    priority: u8,
    hits: u32,
    last: u64,
    /// Of its bytes as they were when it was sealed, once the worker has read them.
    checksum: Option<u32>,
    /// Of layers with a window: what continues it does not need it.
    windowed: bool,
    /// Children that cannot be evicted, by themselves or because of what continues them.
    #[serde(skip)]
    busy: u32,
}

impl Node {
    fn is_evictable(&self) -> bool {
        self.idle && (self.windowed || self.busy == 0)
    }
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

/// What of a chain is known.
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Prefixes {
    policy: Eviction,
    nodes: BTreeMap<Digest, Node>,
    pins: BTreeMap<Digest, Pin>,
    clock: u64,
    queries: u64,
    hits: u64,
    evictions: u64,
    /// Blocks in use that are not what was sealed.
    damaged: BTreeSet<BlockId>,
    // What follows is derived from the nodes.
    by_place: BTreeMap<Place, Digest>,
    /// Parent and child. The parent may have left the index.
    edges: BTreeSet<(Digest, Digest)>,
    /// What can be evicted at once: idle, and continued by nothing.
    leaves: BTreeMap<(Tenant, FormatId), BTreeSet<(Rank, Digest)>>,
    /// How many blocks can be evicted, one after the other.
    evictable: BTreeMap<(Tenant, FormatId), u64>,
    /// The same by extent.
    evictable_in: BTreeMap<ExtentId, u32>,
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
        let Prefixes { policy, nodes, pins, clock, queries, hits, evictions, damaged, .. } = p;
        Stored { policy, nodes, pins, clock, queries, hits, evictions, damaged }
    }
}

impl From<Stored> for Prefixes {
    fn from(s: Stored) -> Self {
        let Stored { policy, nodes, pins, clock, queries, hits, evictions, damaged } = s;
        let mut index =
            Prefixes { policy, pins, clock, queries, hits, evictions, damaged, ..Prefixes::default() };
        let idle: Vec<Digest> = nodes.iter().filter(|(_, n)| n.idle).map(|(name, _)| *name).collect();
        for (name, node) in nodes {
            index.link(name, Node { idle: false, ..node });
        }
        idle.iter().for_each(|name| index.change(name, |node| node.idle = true));
        index
    }
}

impl Prefixes {
    /// An empty index that evicts by `policy`.
    pub fn new(policy: Eviction) -> Self {
        Prefixes { policy, ..Prefixes::default() }
    }

    /// Publishes a block that somebody holds; `false` if another block has its name already, which stays, or if the
    /// block has another name already: what it holds was true of its first name, and it has only one entry to be
    /// forgotten by. So it is for a block that is damaged.
    pub fn publish(&mut self, p: Publication) -> bool {
        let is_new = !self.nodes.contains_key(&p.name) && !self.by_place.contains_key(&p.block.place);
        if !is_new || self.damaged.contains(&p.block) {
            return false;
        }
        self.clock += 1;
        let Publication { name, parent, block, tenant, format, priority, windowed } = p;
        let pins = BTreeSet::new();
        let (last, hits, busy, checksum) = (self.clock, 0, 0, None);
        let node = Node {
            block,
            tenant,
            format,
            parent,
            pins,
            idle: false,
            priority,
            hits,
            last,
            checksum,
            windowed,
            busy,
        };
        self.link(name, node);
        true
    }

    /// Takes in a node that somebody holds.
    fn link(&mut self, name: Digest, mut node: Node) {
        let evictable = |child: &&(Digest, Digest)| self.nodes.get(&child.1).is_some_and(Node::is_evictable);
        let children = self.edges.range((name, [0; 32])..=(name, [0xff; 32]));
        node.busy = children.filter(|child| !evictable(child)).count() as u32;
        self.by_place.insert(node.block.place, name);
        let parent = node.parent;
        self.nodes.insert(name, node);
        if let Some(parent) = parent {
            self.unlist(&parent);
            self.edges.insert((parent, name));
            self.list(&parent);
            self.count_child(&parent, 1);
        }
    }

    /// The block at `place`, if it is published, is held by somebody.
    pub fn hold(&mut self, place: Place) {
        let Some(name) = self.by_place.get(&place).copied() else { return };
        if self.is_idle(&name) {
            self.change(&name, |node| node.idle = false);
        }
    }

    /// The block at `place` is held by nobody any more. `false` if it is not published: then nobody will find it.
    pub fn let_go(&mut self, place: Place) -> bool {
        let Some(name) = self.by_place.get(&place).copied() else { return false };
        self.clock += 1;
        let now = self.clock;
        self.change(&name, |node| {
            node.idle = true;
            node.last = now;
        });
        true
    }

    /// Whether the block at `place` can be found.
    pub fn is_published(&self, place: Place) -> bool {
        self.by_place.contains_key(&place)
    }

    /// Changes a node and everything that depends on whether it may be evicted.
    fn change(&mut self, name: &Digest, change: impl FnOnce(&mut Node)) {
        self.unlist(name);
        let Some(node) = self.nodes.get_mut(name) else { return };
        let before = node.is_evictable();
        change(node);
        let (after, parent) = (node.is_evictable(), node.parent);
        let (key, extent) = ((node.tenant, node.format), node.block.place.extent);
        self.list(name);
        if before == after {
            return;
        }
        count(&mut self.evictable, key, after);
        count(&mut self.evictable_in, extent, after);
        if let Some(parent) = parent {
            self.count_child(&parent, if after { -1 } else { 1 });
        }
    }

    /// A node has one child more, or less, that cannot be evicted. Goes up as far as that changes anything.
    fn count_child(&mut self, name: &Digest, by: i32) {
        let mut next = Some(*name);
        while let Some(name) = next {
            let Some(node) = self.nodes.get_mut(&name) else { return };
            let before = node.is_evictable();
            node.busy = node.busy.checked_add_signed(by).expect("children are counted as they come and go");
            let (after, parent) = (node.is_evictable(), node.parent);
            let (key, extent) = ((node.tenant, node.format), node.block.place.extent);
            if before == after {
                return;
            }
            count(&mut self.evictable, key, after);
            count(&mut self.evictable_in, extent, after);
            next = parent;
        }
    }

    fn has_children(&self, name: &Digest) -> bool {
        self.edges.range((*name, [0; 32])..=(*name, [0xff; 32])).next().is_some()
    }

    /// Puts a node into the order of eviction if it may be evicted at once.
    fn list(&mut self, name: &Digest) {
        let Some(node) = self.nodes.get(name) else { return };
        if node.idle && (node.windowed || !self.has_children(name)) {
            let (key, rank) = ((node.tenant, node.format), self.policy.rank(node));
            self.leaves.entry(key).or_default().insert((rank, *name));
        }
    }

    fn unlist(&mut self, name: &Digest) {
        let Some(node) = self.nodes.get(name) else { return };
        let key = (node.tenant, node.format);
        if let Some(set) = self.leaves.get_mut(&key) {
            set.remove(&(self.policy.rank(node), *name));
            if set.is_empty() {
                self.leaves.remove(&key);
            }
        }
    }

    /// The block under `name`, counted as a look-up.
    pub fn look_up(&mut self, name: &Digest) -> Option<BlockId> {
        self.queries += 1;
        let node = self.nodes.get_mut(name)?;
        self.hits += 1;
        let (block, found) = (node.block, node.hits.saturating_add(1));
        // Only the first find of what is in the order of eviction changes its place there.
        if node.idle && node.hits == 0 {
            self.change(name, |node| node.hits = found);
        } else {
            node.hits = found;
        }
        Some(block)
    }

    /// The look-up that found nothing here has found it elsewhere.
    pub fn count_found(&mut self) {
        self.hits += 1;
    }

    /// The block under `name`.
    pub fn get(&self, name: &Digest) -> Option<BlockId> {
        self.nodes.get(name).map(|n| n.block)
    }

    fn node_of(&self, block: BlockId) -> Option<&Node> {
        let name = self.by_place.get(&block.place)?;
        self.nodes.get(name).filter(|n| n.block == block)
    }

    /// The checksum of a published block, if it has been taken; `None` for a block that is not published.
    pub fn checksum(&self, block: BlockId) -> Option<Option<u32>> {
        self.node_of(block).map(|n| n.checksum)
    }

    /// Keeps a published block's checksum.
    pub fn set_checksum(&mut self, block: BlockId, sum: u32) {
        let Some(name) = self.by_place.get(&block.place) else { return };
        if let Some(node) = self.nodes.get_mut(name).filter(|n| n.block == block) {
            node.checksum = Some(sum);
        }
    }

    /// The name of a published block.
    pub fn name_of(&self, block: BlockId) -> Option<Digest> {
        let name = *self.by_place.get(&block.place)?;
        self.nodes.get(&name).filter(|n| n.block == block).map(|_| name)
    }

    /// The chains for which a block is pinned.
    pub fn pins_of(&self, block: BlockId) -> Vec<Digest> {
        self.node_of(block).map_or_else(Vec::new, |n| n.pins.iter().copied().collect())
    }

    /// A block in use that has lost its name is never published again. Of earlier marks those stay for which `lives`.
    pub fn mark_damaged(&mut self, block: BlockId, lives: impl Fn(&BlockId) -> bool) {
        self.damaged.retain(lives);
        self.damaged.insert(block);
    }

    /// Pins or unpins, for the chain that ends in `chain`, the block under `name`. Returns the block if with that it
    /// became pinned by somebody, or by nobody.
    pub fn pin(&mut self, name: &Digest, chain: Digest, on: bool) -> Option<BlockId> {
        let node = self.nodes.get_mut(name)?;
        let before = node.pins.is_empty();
        if on {
            node.pins.insert(chain);
        } else {
            node.pins.remove(&chain);
        }
        (before != node.pins.is_empty()).then_some(node.block)
    }

    /// Whether `name` is pinned already, by whatever chain.
    pub fn is_pinned(&self, name: &Digest) -> bool {
        self.nodes.get(name).is_some_and(|n| !n.pins.is_empty())
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
        let up = |name: &Digest| self.nodes.get(name).and_then(|n| n.parent);
        let all = std::iter::successors(Some(*end), |name| up(name));
        all.take_while(|name| self.nodes.contains_key(name)).collect()
    }

    /// The name that the block under `name` continues.
    pub fn parent(&self, name: &Digest) -> Option<Digest> {
        self.nodes.get(name)?.parent
    }

    /// The place has become free.
    pub fn forget(&mut self, place: Place) {
        if let Some(name) = self.by_place.get(&place).copied() {
            self.remove(&name);
        }
    }

    fn remove(&mut self, name: &Digest) {
        // As if held: then nothing counts it as evictable any more, and its parent counts it as one that is not.
        self.change(name, |node| node.idle = false);
        let Some(node) = self.nodes.remove(name) else { return };
        self.by_place.remove(&node.block.place);
        if let Some(parent) = node.parent {
            self.unlist(&parent);
            self.edges.remove(&(parent, *name));
            self.list(&parent);
            self.count_child(&parent, -1);
        }
    }

    /// How many blocks of a tenant in a format can be evicted, one after the other.
    pub fn evictable(&self, tenant: Tenant, format: FormatId) -> u64 {
        self.evictable.get(&(tenant, format)).copied().unwrap_or(0)
    }

    /// How many blocks of all tenants can be evicted, one after the other.
    pub fn evictable_of_all(&self) -> u64 {
        self.evictable.values().sum()
    }

    /// How many blocks in an extent can be evicted, with what continues them.
    pub fn evictable_in(&self, extent: ExtentId) -> u32 {
        self.evictable_in.get(&extent).copied().unwrap_or(0)
    }

    /// Evicts the one block of a tenant in a format that is to go first.
    pub fn evict(&mut self, tenant: Tenant, format: FormatId) -> Option<BlockId> {
        let (_, name) = *self.leaves.get(&(tenant, format))?.first()?;
        Some(self.evict_leaf(&name))
    }

    /// Evicts the one block of all that is to go first.
    pub fn evict_any(&mut self) -> Option<BlockId> {
        let (_, name) = *self.leaves.values().filter_map(BTreeSet::first).min()?;
        Some(self.evict_leaf(&name))
    }

    /// Evicts the one block of a tenant, in whatever format, that is to go first.
    pub fn evict_of(&mut self, tenant: Tenant) -> Option<BlockId> {
        let all = (tenant, FormatId(0))..=(tenant, FormatId(u32::MAX));
        let (_, name) = *self.leaves.range(all).filter_map(|(_, set)| set.first()).min()?;
        Some(self.evict_leaf(&name))
    }

    /// Evicts the block under `name`, if nobody holds it and nothing that needs it continues it.
    pub fn evict_end(&mut self, name: &Digest) -> Option<BlockId> {
        let node = self.nodes.get(name)?;
        (node.idle && (node.windowed || !self.has_children(name))).then(|| self.evict_leaf(name))
    }

    fn evict_leaf(&mut self, name: &Digest) -> BlockId {
        let block = self.nodes[name].block;
        self.remove(name);
        self.evictions += 1;
        block
    }

    /// Evicts the block at `place` and all that continues it and needs it, ends first. Nothing if somebody holds any of that.
    pub fn evict_at(&mut self, place: Place) -> Vec<BlockId> {
        let Some(top) = self.by_place.get(&place).copied() else { return Vec::new() };
        if !self.nodes[&top].is_evictable() {
            return Vec::new();
        }
        if self.nodes[&top].windowed {
            return vec![self.evict_leaf(&top)];
        }
        let mut order = vec![top];
        let mut at = 0;
        while at < order.len() {
            let name = order[at];
            order.extend(self.edges.range((name, [0; 32])..=(name, [0xff; 32])).map(|(_, child)| *child));
            at += 1;
        }
        order.iter().rev().map(|name| self.evict_leaf(name)).collect()
    }

    /// Counts.
    pub fn stats(&self) -> PrefixStats {
        let pinned = self.nodes.values().filter(|n| !n.pins.is_empty()).count();
        let Prefixes { queries, hits, evictions, .. } = *self;
        PrefixStats { blocks: self.nodes.len(), pinned, queries, hits, evictions }
    }

    /// Every published block with its tenant and whether it is pinned.
    pub fn iter(&self) -> impl Iterator<Item = (&Digest, BlockId, Tenant, bool)> {
        self.nodes.iter().map(|(name, n)| (name, n.block, n.tenant, !n.pins.is_empty()))
    }

    /// Whether the block under `name` is held by nobody and pinned by nobody.
    pub fn is_idle(&self, name: &Digest) -> bool {
        self.nodes.get(name).is_some_and(|n| n.idle)
    }

    /// Derives every index anew and compares.
    pub fn check(&self) -> Result<(), String> {
        let anew = Prefixes::from(Stored::from(self.clone()));
        if anew != *self {
            return Err("the prefix index differs from what its blocks say".into());
        }
        if self.nodes.values().any(|n| n.idle && !n.pins.is_empty()) {
            return Err("a pinned prefix may be evicted".into());
        }
        Ok(())
    }
}

/// Entries of 0 are not kept.
fn count<K: Ord + Copy, N>(totals: &mut BTreeMap<K, N>, key: K, up: bool)
where
    N: Copy + Default + PartialEq + std::ops::Add<Output = N> + std::ops::Sub<Output = N> + From<u8>,
{
    let total = totals.entry(key).or_default();
    *total = if up { *total + N::from(1) } else { *total - N::from(1) };
    if *total == N::default() {
        totals.remove(&key);
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
        assert_eq!(index.evictable_in(ExtentId(0)), 1);
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
