//! The prefix index: which sealed block holds which tokens, after which others.
//!
//! Owns the names of sealed blocks. A name is a chain of SHA-256: the root is made of the tenant (as the kernel says
//! it), the model's fingerprint and the geometry; each block's name is made of its parent's and its token ids. Two
//! sessions find each other's blocks exactly when all of that is equal. Invariant: the index names exactly the
//! published blocks that are in use; a block leaves it in the same step in which its place becomes free.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::id::{BlockId, Place, Tenant};
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

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Node {
    block: BlockId,
    tenant: Tenant,
    /// Which chains that were pinned go through here, named by their last block.
    pins: BTreeSet<Digest>,
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
}

/// All published blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prefixes {
    nodes: BTreeMap<Digest, Node>,
    by_place: BTreeMap<Place, Digest>,
    queries: u64,
    hits: u64,
}

impl Prefixes {
    /// Publishes `block` under `name`; `false` if another block has that name already, which stays, or if the block
    /// has another name already: what it holds was true of its first name, and it has only one entry to be forgotten by.
    pub fn publish(&mut self, name: Digest, block: BlockId, tenant: Tenant) -> bool {
        if self.nodes.contains_key(&name) || self.by_place.contains_key(&block.place) {
            return false;
        }
        self.nodes.insert(name, Node { block, tenant, pins: BTreeSet::new() });
        self.by_place.insert(block.place, name);
        true
    }

    /// The block under `name`, counted as a look-up.
    pub fn look_up(&mut self, name: &Digest) -> Option<BlockId> {
        self.queries += 1;
        let block = self.nodes.get(name).map(|n| n.block);
        self.hits += u64::from(block.is_some());
        block
    }

    /// The block under `name`.
    pub fn get(&self, name: &Digest) -> Option<BlockId> {
        self.nodes.get(name).map(|n| n.block)
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

    /// The place has become free.
    pub fn forget(&mut self, place: Place) {
        if let Some(name) = self.by_place.remove(&place) {
            self.nodes.remove(&name);
        }
    }

    /// Counts.
    pub fn stats(&self) -> PrefixStats {
        let pinned = self.nodes.values().filter(|n| !n.pins.is_empty()).count();
        PrefixStats { blocks: self.nodes.len(), pinned, queries: self.queries, hits: self.hits }
    }

    /// Every published block with its tenant and whether it is pinned.
    pub fn iter(&self) -> impl Iterator<Item = (&Digest, BlockId, Tenant, bool)> {
        self.nodes.iter().map(|(name, n)| (name, n.block, n.tenant, !n.pins.is_empty()))
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

    #[test]
    fn a_block_stays_pinned_until_the_last_chain_through_it_lets_go() {
        let mut index = Prefixes::default();
        let block = BlockId { place: Place { extent: ExtentId(1), slot: 0 }, generation: 1 };
        assert!(index.publish([1; 32], block, Tenant(7)));
        assert!(!index.publish([1; 32], block, Tenant(7)));
        assert_eq!(index.pin(&[1; 32], [1; 32], true), Some(block));
        assert_eq!(index.pin(&[1; 32], [2; 32], true), None);
        assert_eq!(index.pin(&[1; 32], [1; 32], false), None);
        assert_eq!(index.pin(&[1; 32], [1; 32], false), None, "unpinning twice counts once");
        assert_eq!(index.pin(&[1; 32], [2; 32], false), Some(block));
        assert!(!index.publish([2; 32], block, Tenant(7)), "a block has one name");
        index.forget(block.place);
        assert_eq!(index.look_up(&[1; 32]), None);
        assert_eq!(index.stats(), PrefixStats { blocks: 0, pinned: 0, queries: 1, hits: 0 });
    }
}
