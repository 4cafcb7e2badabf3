//! Eviction by an operator's word.
//!
//! Owns no state. Invariants: only blocks that nobody holds go, ends of chains before what they continue; a chain is
//! unpinned only when it is named.

use serde::{Deserialize, Serialize};

use super::prefix::chains::digits;
use super::{Broker, PinReport};
use crate::id::{BlockId, Tenant};

/// What is to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Evict {
    /// So many blocks, in the order in which grants would evict them; of one tenant, or of all.
    Blocks {
        /// How many at most.
        most: u64,
        /// Whose.
        tenant: Option<Tenant>,
    },
    /// The pinned chains whose names begin with these digits, unpinned for it.
    Pinned(String),
}

/// What went.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct EvictReport {
    /// Blocks evicted.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Chains that were unpinned for it.
    pub unpinned: Vec<PinReport>,
    /// Blocks of these chains that stay: sessions hold them, or other chains go through them.
    pub kept: u64,
}

impl Broker {
    /// Evicts. Nothing that fits the word is an answer with zeros.
    pub fn evict(&mut self, what: &Evict) -> EvictReport {
        let report = match what {
            Evict::Blocks { most, tenant } => self.evict_blocks(*most, *tenant),
            Evict::Pinned(begin) => self.evict_pinned(begin),
        };
        // Whoever waits for room may have it now.
        self.stirred = true;
        self.settle();
        report
    }

    fn evict_blocks(&mut self, most: u64, tenant: Option<Tenant>) -> EvictReport {
        let mut report = EvictReport::default();
        while report.blocks < most {
            let block = match tenant {
                Some(tenant) => self.state.prefixes.evict_of(tenant),
                None => self.state.prefixes.evict_any(),
            };
            let Some(block) = block else { break };
            self.drop_evicted(block, &mut report);
        }
        report
    }

    fn evict_pinned(&mut self, begin: &str) -> EvictReport {
        let named = self.state.prefixes.pins().filter(|(chain, _)| digits(chain).starts_with(begin));
        let chains: Vec<_> = named.map(|(chain, _)| *chain).collect();
        let mut report = EvictReport::default();
        for chain in chains {
            let names = self.state.prefixes.pinned_for(&chain);
            if let Some(pin) = self.unpin(&chain) {
                report.unpinned.push(PinReport::of(&chain, &pin));
            }
            for name in names {
                match self.state.prefixes.evict_end(&name) {
                    Some(block) => self.drop_evicted(block, &mut report),
                    None => report.kept += u64::from(self.state.prefixes.get(&name).is_some()),
                }
            }
        }
        report
    }

    fn drop_evicted(&mut self, block: BlockId, report: &mut EvictReport) {
        report.blocks += 1;
        let extent = self.state.pool.extents().get(&block.place.extent);
        report.bytes += extent.and_then(|e| e.owned()).map_or(0, |o| o.slot_bytes);
        self.state.pool.evict(block.place);
        self.state.pool.release_if_idle(block.place.extent);
    }
}
