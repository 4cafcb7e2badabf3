//! What operators are shown of common prompts.
//!
//! Owns nothing. Invariant: it reads; a chain that is pinned stands there once, and what is retired beside it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::broker::Broker;
use crate::broker::prefix::Digest;
use crate::broker::prefix::chains::digits;
use crate::id::{ClientId, ExtentId, Tenant};

/// One chain in `kvbctl prefixes`, as far as it is common to several tenants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonReport {
    /// The chain, by the first 16 digits of its name.
    pub chain: String,
    /// Who pinned it.
    pub uid: u32,
    /// Under which label.
    pub label: String,
    /// The tenants that may read it.
    pub readers: Vec<u32>,
    /// Blocks of the chain, or, if it is not pinned any more, of the copy.
    pub blocks: u32,
    /// Bytes that were copied for it, which lie beside the pool. What another chain was copied for is counted there.
    pub bytes: u64,
    /// Connections that have mapped it.
    pub connections: u32,
    /// `shared`; `copying`; `refused`, with the reason; `retired`: unpinned, and not given back by all yet; or `kept`: given
    /// back by all, as they say, and somebody has it open still, as the kernel says.
    pub state: String,
    /// Why it is refused.
    pub why: Option<String>,
}

/// What one donor has of the bound, in `kvbctl prefixes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonDonorReport {
    /// Who.
    pub uid: u32,
    /// Extents of copies of its prompts, with those that are retired.
    pub extents: u32,
    /// The most that there may be.
    pub limit_extents: u32,
}

impl Broker {
    /// Bytes of all copies, and the most that they may have.
    pub fn common_bytes(&self) -> (u64, u64) {
        let most = u64::from(self.common_places()) * self.state.pool.extent_bytes();
        (self.state.common.bytes(), most)
    }

    /// Blocks of copies that look-ups have found.
    pub fn common_hits(&self) -> u64 {
        self.common.hits
    }

    /// What each donor has of the bound.
    pub(in crate::broker) fn common_donors(&self) -> Vec<CommonDonorReport> {
        let report = |(donor, limit_extents): (Tenant, u32)| CommonDonorReport {
            uid: donor.0,
            extents: self.state.common.extents_of(donor),
            limit_extents,
        };
        self.common_parts().into_iter().map(report).collect()
    }

    /// Every chain that is common, is to be, or was.
    pub(in crate::broker) fn common_reports(&self) -> Vec<CommonReport> {
        let extents = &self.state.common.extents;
        let mut reports = Vec::new();
        for (chain, n) in self.named() {
            let (state, why) = match self.common.refused.get(&chain) {
                Some(why) => ("refused", Some(why.clone())),
                None if self.common.complete.contains_key(&chain) => ("shared", None),
                None => ("copying", None),
            };
            let names = self.pinned_names(&chain).unwrap_or_default();
            let places: BTreeSet<ExtentId> = names
                .iter()
                .filter_map(|name| self.copy_for(name, &n.readers))
                .map(|block| block.place.extent)
                .collect();
            let holders = places.iter().filter_map(|id| extents.get(id)).flat_map(|e| &e.holders);
            let own = extents.values().filter(|e| e.live && e.chain == chain);
            reports.push(CommonReport {
                chain: digits(&chain),
                uid: n.donor.0,
                label: n.label,
                readers: n.readers.iter().map(|t| t.0).collect(),
                blocks: n.blocks,
                bytes: own.map(|e| e.bytes).sum(),
                connections: holders.collect::<BTreeSet<_>>().len() as u32,
                state: state.into(),
                why,
            });
        }
        let mut old: BTreeMap<(Digest, bool), (CommonReport, BTreeSet<ClientId>)> = BTreeMap::new();
        for e in extents.values().filter(|e| !e.live) {
            let kept = e.holders.is_empty();
            let new = || CommonReport {
                chain: digits(&e.chain),
                uid: e.donor.0,
                label: e.label.clone(),
                readers: e.readers.iter().map(|t| t.0).collect(),
                blocks: 0,
                bytes: 0,
                connections: 0,
                state: if kept { "kept" } else { "retired" }.into(),
                why: None,
            };
            let (report, clients) = old.entry((e.chain, kept)).or_insert_with(|| (new(), BTreeSet::new()));
            report.blocks += e.names.len() as u32;
            report.bytes += e.bytes;
            clients.extend(e.holders.iter().copied());
        }
        let connections = |clients: BTreeSet<ClientId>| clients.len() as u32;
        reports.extend(old.into_values().map(|(r, c)| CommonReport { connections: connections(c), ..r }));
        reports
    }
}
