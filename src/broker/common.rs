//! Prompts that several tenants share, because the configuration says so: read-only copies beside the pool.
//!
//! Owns which pinned chains are copied for whom, and the copies. A rule names a tenant (the donor), the label of its
//! pins, and the tenants that may read them; whatever the donor pins under that label is copied (`copying`) into memory that
//! nobody can write, is found by these tenants' look-ups, and goes when it is not pinned any more (`retired`). Invariants:
//! - a tenant that no rule names as a reader never looks at anything of another one's, and so is told nothing, not even by
//!   the time that an answer takes;
//! - an extent of a copy holds blocks of one donor, for one set of readers, and has a name that the pool never gives. What is
//!   copied for all readers of a chain already is not copied again for it;
//! - a block of a copy is found by a tenant as long as a chain through it is pinned under a label that names this tenant.
//!   An extent without such a block is retired: its holders are asked to give it back, each once its tables do not name it;
//! - each donor has a part of the bound ([`parts`]) and never more, whatever the others leave; a copy counts until its memory
//!   is the kernel's again.

mod copying;
mod report;
mod retired;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::prefix::{self, Digest, Pin};
use super::{Broker, Descriptor, Session};
use crate::heap::Sealed;
use crate::id::{BlockId, ClientId, ExtentId, Place, Tenant};
use crate::profile::Profile;
use copying::Copying;
pub use report::{CommonDonorReport, CommonReport};
use retired::Kept;

/// A block of a copy has one life.
const GENERATION: u64 = 1;

/// Whose pinned prompts are common to whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommonRule {
    /// The tenant that pins them.
    pub donor: Tenant,
    /// Those whose labels begin with these segments: see [`label_begins`].
    pub label: String,
    /// The tenants that may read them.
    pub readers: BTreeSet<Tenant>,
}

/// Whether a label begins with `start`, segment by segment: segments are what stands between slashes. `a/b` is the beginning of
/// `a/b` and of `a/b/c`, and not of `a/bc`; `a/` is that of all below `a`.
pub fn label_begins(label: &str, start: &str) -> bool {
    let rest = label.strip_prefix(start);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || start.ends_with('/'))
}

/// How many of `places` extents the copies of each donor may be: as many as its bound in `limits` has bytes for, and
/// those without one get equal parts of what these leave. What a donor does not use is nobody else's, so that it is there
/// when it is wanted. Together the parts are no more than `places`, if the bounds are not.
pub fn parts(
    rules: &[CommonRule],
    limits: &BTreeMap<Tenant, u64>,
    places: u32,
    extent_bytes: u64,
) -> BTreeMap<Tenant, u32> {
    let donors: BTreeSet<Tenant> = rules.iter().map(|r| r.donor).collect();
    let named = |donor: &Tenant| {
        let bytes = limits.get(donor)?;
        Some(u32::try_from(bytes / extent_bytes).unwrap_or(u32::MAX).min(places))
    };
    let taken = donors.iter().filter_map(named).fold(0, u32::saturating_add);
    let others = donors.iter().filter(|d| named(d).is_none()).count() as u32;
    let equal = places.saturating_sub(taken) / others.max(1);
    donors.iter().map(|donor| (*donor, named(donor).unwrap_or(equal))).collect()
}

/// One extent of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Copied {
    /// The pinned chain that it was copied for, or, if that one is gone, another one that needs it.
    chain: Digest,
    donor: Tenant,
    label: String,
    readers: BTreeSet<Tenant>,
    /// The donor's names of its blocks, by slot.
    names: Vec<Digest>,
    bytes: u64,
    /// It can be found.
    live: bool,
    /// Clients that have its descriptor.
    holders: BTreeSet<ClientId>,
    /// Of these, those that were asked to close it.
    told: BTreeSet<ClientId>,
}

/// The part that is written down.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Common {
    next: u32,
    extents: BTreeMap<ExtentId, Copied>,
}

impl Common {
    /// Whether the client has the descriptor.
    pub fn is_holder(&self, extent: ExtentId, client: ClientId) -> bool {
        self.extents.get(&extent).is_some_and(|e| e.holders.contains(&client) && !e.told.contains(&client))
    }

    /// Whether the client has not said yet that it has closed it.
    pub fn may_hold(&self, extent: ExtentId, client: ClientId) -> bool {
        self.extents.get(&extent).is_some_and(|e| e.holders.contains(&client))
    }

    /// The client gets the descriptor.
    pub fn add_holder(&mut self, extent: ExtentId, client: ClientId) {
        if let Some(e) = self.extents.get_mut(&extent) {
            e.holders.insert(client);
            e.told.remove(&client);
        }
    }

    /// The client says that it has closed it, or is gone. `false` if it had not got it.
    pub fn remove_holder(&mut self, extent: ExtentId, client: ClientId) -> bool {
        let Some(e) = self.extents.get_mut(&extent) else { return false };
        e.told.remove(&client);
        e.holders.remove(&client)
    }

    /// The client is gone.
    pub fn forget_client(&mut self, client: ClientId) {
        let all: Vec<ExtentId> = self.extents.keys().copied().collect();
        all.into_iter().for_each(|extent| _ = self.remove_holder(extent, client));
    }

    /// Whether a table of this client may name the block.
    pub fn is_held(&self, block: BlockId, client: ClientId) -> bool {
        let Place { extent, slot } = block.place;
        let there = |e: &Copied| (slot as usize) < e.names.len() && e.holders.contains(&client);
        block.generation == GENERATION && self.extents.get(&extent).is_some_and(there)
    }

    fn bytes(&self) -> u64 {
        self.extents.values().map(|e| e.bytes).sum()
    }

    /// Extents of copies that count against a donor's part.
    fn extents_of(&self, donor: Tenant) -> u32 {
        self.extents.values().filter(|e| e.donor == donor).count() as u32
    }
}

/// How far a look-up has come along the chains of those tenants whose prompts this one may read.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Walk {
    /// Blocks from the start of the sequence that the names stand for.
    blocks: u32,
    /// For each donor, what it calls a chain of these blocks.
    names: Vec<Digest>,
}

impl Walk {
    /// One block further.
    pub(super) fn step(&mut self, tokens: &[u32]) {
        self.names.iter_mut().for_each(|name| *name = prefix::child(name, tokens));
        self.blocks += 1;
    }

    /// What comes from this block on is the session's own: nobody else's chain goes on behind it.
    pub(super) fn end_at(&mut self, block: u32) {
        if block < self.blocks {
            *self = Walk::default();
        }
    }
}

/// A pinned chain that a rule covers.
#[derive(Debug)]
struct Named {
    donor: Tenant,
    label: String,
    readers: BTreeSet<Tenant>,
    blocks: u32,
}

/// How a block came to be covered by the rules.
#[derive(Debug, Clone, Copy)]
struct Way {
    /// A pinned chain through it.
    chain: Digest,
    /// All that is before it, up to the sequence's start, is covered too.
    whole: bool,
}

/// Blocks that may be found, by the set of tenants that may find them.
type Covered = BTreeMap<BTreeSet<Tenant>, BTreeMap<Digest, Way>>;

/// The part that is not written down.
#[derive(Debug, Default)]
pub(super) struct Commons {
    /// Every copy's file. Also of those that are retired: their memory is taken back through it, and nothing else proves
    /// that nobody has them.
    files: BTreeMap<ExtentId, Arc<Sealed>>,
    kept: BTreeMap<ExtentId, Kept>,
    /// By the donor's name, every block of a copy that can be found by somebody.
    copies: BTreeMap<Digest, Vec<BlockId>>,
    /// By reader, and by the donor's name.
    found: BTreeMap<(Tenant, Digest), BlockId>,
    /// Something was pinned or unpinned.
    pub stirred: bool,
    wanted: BTreeSet<(Tenant, Digest)>,
    /// Whose chain was begun last: the next one is another donor's, if one of another's is wanted.
    last: Option<Tenant>,
    copying: Option<Copying>,
    /// Chains of which all blocks are copied, and for whom.
    complete: BTreeMap<Digest, BTreeSet<Tenant>>,
    /// Chains of which there is no copy, and why.
    refused: BTreeMap<Digest, String>,
    /// What the log knows of that.
    said: BTreeMap<Digest, String>,
    hits: u64,
}

impl Broker {
    /// Extents of copies that there may be.
    pub(super) fn common_places(&self) -> u32 {
        match self.policy.common.is_empty() {
            true => 0,
            false => {
                u32::try_from(self.policy.common_bytes / self.state.pool.extent_bytes()).unwrap_or(u32::MAX)
            }
        }
    }

    /// The same, as far as this tenant may come to read them: nobody else is told that there are any.
    pub(super) fn common_places_for(&self, tenant: Tenant) -> u32 {
        let reads = self.policy.common.iter().any(|r| r.readers.contains(&tenant));
        if reads { self.common_places() } else { 0 }
    }

    /// The beginning of a look-up that goes on where the session's sealed blocks end.
    pub(super) fn begin_walk(&self, s: &Session, profile: &Profile) -> Walk {
        if s.sealed() > 0 {
            return if s.walk.blocks == s.sealed() { s.walk.clone() } else { Walk::default() };
        }
        self.walk_from_start(s, profile)
    }

    /// One that starts at the sequence's start.
    pub(super) fn walk_from_start(&self, s: &Session, profile: &Profile) -> Walk {
        let donors = self.policy.common.iter().filter(|r| r.readers.contains(&s.tenant)).map(|r| r.donor);
        let donors: BTreeSet<Tenant> = donors.collect();
        Walk { blocks: 0, names: donors.into_iter().map(|d| prefix::root(d, &s.model, profile)).collect() }
    }

    /// The block of a copy that the walk has come to.
    pub(super) fn common_block(&self, reader: Tenant, walk: &Walk) -> Option<BlockId> {
        walk.names.iter().find_map(|name| self.common.found.get(&(reader, *name)).copied())
    }

    /// The same for a look-up that is counted.
    pub(super) fn find_common(&mut self, reader: Tenant, walk: &Walk) -> Option<BlockId> {
        let block = self.common_block(reader, walk)?;
        self.common.hits += 1;
        self.state.prefixes.count_found();
        Some(block)
    }

    /// The descriptor of an extent of a copy.
    pub(super) fn common_descriptor(&self, extent: ExtentId) -> Option<Descriptor> {
        self.common.files.get(&extent).cloned().map(Descriptor::Copy)
    }

    /// How many blocks of the session's table lie in the pool.
    pub(super) fn in_pool(&self, s: &Session) -> usize {
        match self.state.common.extents.is_empty() {
            true => s.table.len(),
            false => s.table.iter().filter(|b| !b.place.extent.is_copy()).count(),
        }
    }

    /// Whether look-ups had better wait, because what they ask for is being copied.
    pub(super) fn common_has_work(&self) -> bool {
        self.common.stirred || self.common.copying.is_some() || !self.common.wanted.is_empty()
    }

    /// After every change: what was unpinned is retired, what was pinned is copied, what is retired is asked for, and what was
    /// given back is taken back.
    pub(super) fn tend_common(&mut self) {
        if self.policy.common.is_empty() && self.state.common.extents.is_empty() {
            self.common.stirred = false;
            return;
        }
        loop {
            if std::mem::take(&mut self.common.stirred) {
                self.compare_with_pins();
            }
            // What was refused for want of room may have some now.
            if !self.take_back_retired() || self.common.refused.is_empty() {
                break;
            }
            self.common.stirred = true;
        }
        self.begin_copy();
        self.ask_for_retired();
    }

    /// Who may read what is pinned so; nobody, if no rule says so.
    fn readers_of(&self, pin: &Pin) -> BTreeSet<Tenant> {
        let covers = |r: &&CommonRule| r.donor == pin.tenant && label_begins(&pin.label, &r.label);
        let mut readers: BTreeSet<Tenant> =
            self.policy.common.iter().filter(covers).flat_map(|r| r.readers.iter().copied()).collect();
        readers.remove(&pin.tenant);
        readers
    }

    /// The extents that copies of each donor's prompts may be.
    fn common_parts(&self) -> BTreeMap<Tenant, u32> {
        let (places, each) = (self.common_places(), self.state.pool.extent_bytes());
        parts(&self.policy.common, &self.policy.common_limits, places, each)
    }

    /// Every pinned chain that a rule covers.
    fn named(&self) -> BTreeMap<Digest, Named> {
        let named = |(chain, pin): (&Digest, &Pin)| {
            let (donor, label, blocks) = (pin.tenant, pin.label.clone(), pin.blocks);
            let readers = self.readers_of(pin);
            (!readers.is_empty()).then_some((*chain, Named { donor, label, readers, blocks }))
        };
        self.state.prefixes.pins().filter_map(named).collect()
    }

    /// The blocks of these chains. Each is looked at once for all chains that go on from it, and for each that does not reach
    /// back to the start of its sequence.
    fn covered(&self, named: &BTreeMap<Digest, Named>) -> Covered {
        let prefixes = &self.state.prefixes;
        let mut covered = Covered::new();
        for (chain, n) in named {
            let blocks = covered.entry(n.readers.clone()).or_default();
            let (mut own, mut next, mut whole) = (Vec::new(), Some(*chain), false);
            while let Some(name) = next.filter(|_| own.len() < n.blocks as usize) {
                whole = blocks.get(&name).is_some_and(|way| way.whole);
                if whole || prefixes.get(&name).is_none() {
                    break;
                }
                own.push(name);
                next = prefixes.parent(&name);
                whole = next.is_none();
            }
            for name in own {
                let way = blocks.entry(name).or_insert(Way { chain: *chain, whole });
                way.whole |= whole;
            }
        }
        covered
    }

    fn compare_with_pins(&mut self) {
        let named = self.named();
        let covered = self.covered(&named);
        for e in self.state.common.extents.values_mut().filter(|e| e.live) {
            let needs = |(readers, blocks): (&BTreeSet<Tenant>, &BTreeMap<Digest, Way>)| {
                let mut names = e.names.iter().filter(|_| readers.is_subset(&e.readers));
                names.find_map(|name| blocks.get(name)).map(|way| way.chain)
            };
            let Some(chain) = covered.iter().find_map(needs) else {
                e.live = false;
                continue;
            };
            if named.get(&e.chain).is_none_or(|n| !n.readers.is_subset(&e.readers)) {
                e.chain = chain;
            }
            if let Some(n) = named.get(&e.chain) {
                e.label.clone_from(&n.label);
            }
        }
        self.index_copies(&covered);
        self.common.complete.retain(|chain, readers| named.get(chain).is_some_and(|n| n.readers == *readers));
        let is_copied = |chain: &Digest| {
            self.common.complete.contains_key(chain)
                || self.common.copying.as_ref().is_some_and(|c| c.chain == *chain)
        };
        let wanted = named.iter().filter(|(chain, _)| !is_copied(chain)).map(|(chain, n)| (n.donor, *chain));
        self.common.wanted = wanted.collect();
        self.common.said.append(&mut self.common.refused);
        self.common.said.retain(|chain, _| named.contains_key(chain));
    }

    /// What can be found, derived anew.
    fn index_copies(&mut self, covered: &Covered) {
        let extents = &self.state.common.extents;
        self.common.copies.clear();
        for (&extent, e) in extents.iter().filter(|(_, e)| e.live) {
            for (slot, name) in (0..).zip(&e.names) {
                let block = BlockId { place: Place { extent, slot }, generation: GENERATION };
                self.common.copies.entry(*name).or_default().push(block);
            }
        }
        self.common.found.clear();
        for (readers, blocks) in covered {
            for name in blocks.keys() {
                let Some(block) = self.copy_for(name, readers) else { continue };
                for reader in readers {
                    self.common.found.entry((*reader, *name)).or_insert(block);
                }
            }
        }
    }

    /// The block of a copy that all of these may read.
    fn copy_for(&self, name: &Digest, readers: &BTreeSet<Tenant>) -> Option<BlockId> {
        let may = |block: &&BlockId| {
            let extent = self.state.common.extents.get(&block.place.extent);
            extent.is_some_and(|e| readers.is_subset(&e.readers))
        };
        self.common.copies.get(name)?.iter().find(may).copied()
    }

    /// What tables name of copies is there.
    pub(super) fn check_copies(&self) -> Result<(), String> {
        let extents = &self.state.common.extents;
        for (extent, e) in extents {
            if !extent.is_copy() || !e.told.is_subset(&e.holders) {
                return Err(format!("{extent} is no copy, or is wanted from who has not got it"));
            }
            if e.live && !self.common.files.contains_key(extent) {
                return Err(format!("{extent} can be found, and its file is gone"));
            }
            if let Some(gone) = e.holders.iter().find(|c| !self.state.clients.contains_key(c)) {
                return Err(format!("{extent} is held by client {}, which is gone", gone.0));
            }
            let is_given_back = !e.live && e.holders.is_empty();
            if is_given_back != self.common.kept.contains_key(extent) {
                return Err(format!(
                    "{extent} is given back: {is_given_back}, and asked about: {}",
                    !is_given_back
                ));
            }
        }
        let of_none =
            self.common.files.keys().chain(self.common.kept.keys()).find(|e| !extents.contains_key(e));
        if let Some(extent) = of_none {
            return Err(format!("{extent} is not there, and its file is"));
        }
        // Those of an earlier run are left out: its configuration may have been another one.
        let of = |donor: Tenant| self.common.files.keys().filter(|id| extents[*id].donor == donor).count();
        match self.common_parts().iter().find(|(donor, part)| of(**donor) > **part as usize) {
            Some((donor, part)) => {
                Err(format!("uid {} has more copies than its part, {part} extents", donor.0))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
