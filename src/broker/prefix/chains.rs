//! The index as operators see it: chains, not single blocks.
//!
//! Owns nothing; reads the index. Invariant: every published block is in at least one of the chains that are listed, and
//! a walk takes each block once for each chain's end at most, whatever the tree looks like.

use super::tree::{At, Entry};
use super::{Digest, Prefixes};
use crate::id::{FormatId, Tenant};

/// A chain from its first published block to one that nothing continues, or that somebody has pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// The name of its last block.
    pub name: Digest,
    /// Whose it is.
    pub tenant: Tenant,
    /// What its blocks are.
    pub format: FormatId,
    /// Published blocks of it.
    pub blocks: u32,
    /// Of these, how many at the start are those of other chains too.
    pub common: u32,
    /// Of these, pinned by somebody.
    pub pinned: u32,
    /// Of these, held by nobody and pinned by nobody: what an eviction may take.
    pub idle: u32,
    /// How often look-ups have found its last block.
    pub hits: u32,
    /// Chains of lower priority are evicted first.
    pub priority: u8,
    /// Its last block is pinned as the end of a chain.
    pub is_pin: bool,
}

/// What has been seen on the way from the start.
#[derive(Debug, Clone, Copy, Default)]
struct Way {
    blocks: u32,
    common: u32,
    pinned: u32,
    idle: u32,
}

impl Prefixes {
    /// Every chain, in no order that means anything.
    pub fn chains(&self) -> Vec<Chain> {
        let starts = self.tree.iter().filter(|(_, entry)| entry.up().is_none());
        let mut open: Vec<(At, Way)> = starts.map(|(at, _)| (at, Way::default())).collect();
        let mut chains = Vec::new();
        while let Some((at, mut way)) = open.pop() {
            let Entry { name, node, .. } = &self.tree[at];
            way.blocks += 1;
            way.pinned += u32::from(!node.pins.is_empty());
            way.idle += u32::from(node.idle);
            let before = open.len();
            open.extend(self.tree.children(at).map(|child| (child, way)));
            let is_pin = self.pins.contains_key(name);
            let ends = open.len() == before;
            // Where a chain is listed although others go on from its end, all of it is theirs too.
            if open.len() - before > 1 || (is_pin && !ends) {
                open[before..].iter_mut().for_each(|(_, way)| way.common = way.blocks);
            }
            if ends || is_pin {
                let Way { blocks, common, pinned, idle } = way;
                let common = if ends { common } else { blocks };
                let (tenant, format, hits, priority) = (node.tenant, node.format, node.hits, node.priority);
                let name = *name;
                chains.push(Chain {
                    name,
                    tenant,
                    format,
                    blocks,
                    common,
                    pinned,
                    idle,
                    hits,
                    priority,
                    is_pin,
                });
            }
        }
        chains
    }
}

/// The first 16 digits of a name: what people type.
pub fn digits(name: &Digest) -> String {
    name[..8].iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Eviction, Pin, Publication};
    use super::*;
    use crate::id::{BlockId, ExtentId, Place};

    /// 1 - 2 - 3, 2 - 4; 9 alone; 3 is pinned, 9 let go.
    fn index() -> Prefixes {
        let mut index = Prefixes::new(Eviction::Lru);
        for (n, parent) in [(1u8, None), (2, Some(1)), (3, Some(2)), (4, Some(2)), (9, None)] {
            let block = BlockId { place: Place { extent: ExtentId(1), slot: n.into() }, generation: 1 };
            let (name, parent) = ([n; 32], parent.map(|p: u8| [p; 32]));
            let (tenant, format) = (Tenant(7), FormatId(1));
            let (priority, windowed) = (5, false);
            assert!(index.publish(Publication { name, parent, block, tenant, format, priority, windowed }));
        }
        for n in [1, 2, 3] {
            index.pin(&[n; 32], [3; 32], true);
        }
        let pin = Pin { tenant: Tenant(7), pid: 1, label: "x".into(), blocks: 3, tokens: 48, model: [0; 32] };
        index.set_pin([3; 32], Some(pin));
        index.let_go(Place { extent: ExtentId(1), slot: 9 });
        index
    }

    #[test]
    fn every_end_of_the_tree_is_a_chain_and_says_what_it_has_in_common_with_others() {
        let mut chains = index().chains();
        chains.sort_by_key(|c| c.name);
        let seen: Vec<_> =
            chains.iter().map(|c| (c.name[0], c.blocks, c.common, c.pinned, c.idle, c.is_pin)).collect();
        assert_eq!(seen, [(3, 3, 2, 3, 0, true), (4, 3, 2, 2, 0, false), (9, 1, 0, 0, 1, false)]);
    }

    #[test]
    fn a_pinned_chain_that_goes_on_is_listed_and_so_is_what_continues_it() {
        let mut index = index();
        let pin = Pin { tenant: Tenant(7), pid: 1, label: "x".into(), blocks: 2, tokens: 32, model: [0; 32] };
        index.set_pin([2; 32], Some(pin));
        let mut chains = index.chains();
        chains.sort_by_key(|c| c.name);
        let seen: Vec<_> = chains.iter().map(|c| (c.name[0], c.blocks, c.common, c.is_pin)).collect();
        assert_eq!(seen, [(2, 2, 2, true), (3, 3, 2, true), (4, 3, 2, false), (9, 1, 0, false)]);
    }
}
