//! Prompts that several tenants share, because the configuration says so: read-only copies beside the pool.
//!
//! Owns which pinned chains are copied for whom, and the copies. A rule names a tenant (the donor), the label of its
//! pins, and the tenants that may read them; whatever the donor pins under that label is copied into memory that nobody can
//! write ([`ReadOnlyCopy`]) and found by these tenants' look-ups. Invariants:
//! - a tenant that no rule names as a reader never looks at anything of another one's, and so is told nothing, not even by
//!   the time that an answer takes;
//! - what is copied is pinned meanwhile, and its checksums are compared with those of the seals: a copy is as it was
//!   sealed, or there is none;
//! - an extent of a copy holds blocks of one donor, for one set of readers, and has a name that the pool never gives. What is
//!   copied for all readers of a chain already is not copied again for it;
//! - a block of a copy is found by a tenant as long as a chain through it is pinned under a label that names this tenant.
//!   An extent without such a block is retired: its holders are asked to give it back, each once its tables do not name it;
//! - every copy counts until its memory is the kernel's again: a retired one is taken back when its holders have given it
//!   back, as they say, and the kernel says that nobody has it open ([`Sealed::take_back`]). Until then it is asked again,
//!   later each time, and there is a time to wake up for only while there is such a copy;
//! - each donor has a part of the bound ([`parts`]) and never more, whatever the others leave.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::prefix::chains::digits;
use super::prefix::{self, Digest, Pin};
use super::quarantine::{FIRST, GRACE, LONGEST};
use super::{Broker, Descriptor, Job, Session};
use crate::heap::{ReadOnlyCopy, Sealed};
use crate::id::{BlockId, ClientId, ExtentId, Place, Tenant};
use crate::profile::Profile;
use crate::seldom::seldom;

/// Pins what is being copied. No chain has this name: nobody knows what hashes to it.
const COPYING: Digest = [1; 32];
/// A block of a copy has one life.
const GENERATION: u64 = 1;
/// Milliseconds that a reader gets to close a copy that is not in use any more. Nothing happens when they are over.
const DEADLINE_MS: u32 = 2000;

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

/// What is being copied.
#[derive(Debug)]
struct Copying {
    ticket: u64,
    chain: Digest,
    /// For whom: if that changes meanwhile, it is begun anew.
    readers: BTreeSet<Tenant>,
    /// Blocks of the chain of which these readers have no copy yet.
    names: Vec<Digest>,
    /// Blocks of one extent.
    slots: usize,
    /// Blocks of which the worker is through, or has.
    asked: usize,
    made: Vec<ReadOnlyCopy>,
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

/// A retired copy that all its holders have given back, as they say, and that somebody has open still.
#[derive(Debug)]
struct Kept {
    wait: Duration,
    due: Instant,
    /// The log knows of it.
    said: bool,
}

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

    /// The next chain to be copied: of another donor than the last one, if there is one, so that none can keep the others
    /// waiting by pinning and unpinning.
    fn next_wanted(&self, later: &BTreeSet<Digest>) -> Option<(Tenant, Digest)> {
        let last = self.common.last;
        let mut wanted = self.common.wanted.iter().filter(|(_, chain)| !later.contains(chain));
        let after = wanted.clone().find(|(donor, _)| last.is_none_or(|last| *donor > last));
        after.or_else(|| wanted.next()).copied()
    }

    fn begin_copy(&mut self) {
        // Those whose sums are still on their way: nobody else waits for them.
        let mut later = BTreeSet::new();
        while self.common.copying.is_none() {
            let Some((donor, chain)) = self.next_wanted(&later) else { return };
            let pin = self.state.prefixes.pins().find(|(c, _)| **c == chain).map(|(_, pin)| pin);
            let readers = pin.map(|pin| self.readers_of(pin)).unwrap_or_default();
            let Some(mut names) = self.pinned_names(&chain).filter(|_| !readers.is_empty()) else {
                self.common.wanted.remove(&(donor, chain));
                self.refuse_copy(chain, "a block of it is gone".into());
                continue;
            };
            let slots = self.blocks_per_copy(&names);
            names.retain(|name| self.copy_for(name, &readers).is_none());
            let prefixes = &self.state.prefixes;
            let unread = |name: &Digest| prefixes.get(name).and_then(|b| prefixes.checksum(b)) == Some(None);
            if self.policy.checksums && self.is_summing() && names.iter().any(unread) {
                later.insert(chain);
                continue;
            }
            self.common.wanted.remove(&(donor, chain));
            if names.is_empty() {
                self.common.complete.insert(chain, readers);
                continue;
            }
            let needed = u32::try_from(names.len().div_ceil(slots)).unwrap_or(u32::MAX);
            let used = self.state.common.extents_of(donor);
            let most = self.common_parts().get(&donor).copied().unwrap_or(0);
            if used.saturating_add(needed) > most {
                let why = format!(
                    "{needed} extents of copies are needed, and {used} of the {most} that are uid {}'s part of \
                     prefix.common-limit are in use",
                    donor.0
                );
                self.refuse_copy(chain, why);
                continue;
            }
            for name in &names {
                self.set_pinned(name, COPYING, true);
            }
            let (ticket, asked, made) = (self.next_ticket, 0, Vec::new());
            self.next_ticket += 1;
            self.common.last = Some(donor);
            self.common.copying = Some(Copying { ticket, chain, readers, names, slots, asked, made });
            self.copy_on();
        }
    }

    /// The names of a pinned chain that are its own, first to last.
    fn pinned_names(&self, chain: &Digest) -> Option<Vec<Digest>> {
        let (_, pin) = self.state.prefixes.pins().find(|(c, _)| *c == chain)?;
        let mut names = self.state.prefixes.chain(chain);
        names.truncate(pin.blocks as usize);
        names.reverse();
        (!names.is_empty() && names.len() == pin.blocks as usize).then_some(names)
    }

    fn blocks_per_copy(&self, names: &[Digest]) -> usize {
        let format = names.first().and_then(|n| self.state.prefixes.get(n));
        let format = format.and_then(|block| self.state.pool.format_of(block.place));
        format.and_then(|f| self.state.formats.get(&f)).map_or(1, |f| f.cut.slots.max(1) as usize)
    }

    /// Orders the next extent of the copy.
    fn copy_on(&mut self) {
        let Some(Copying { ticket, names, slots, asked, .. }) = &self.common.copying else { return };
        let until = names.len().min(asked + slots);
        let piece = |name: &Digest| self.piece(self.state.prefixes.get(name)?);
        let pieces: Option<Vec<_>> = names[*asked..until].iter().map(piece).collect();
        let ticket = *ticket;
        match pieces {
            Some(pieces) => {
                if let Some(copying) = &mut self.common.copying {
                    copying.asked = until;
                }
                self.jobs.push_back(Job::Copy { ticket, pieces });
            }
            None => self.end_copy(Err("a block of it is gone".into())),
        }
    }

    /// The worker has copied an extent, or not.
    pub(super) fn copied(&mut self, ticket: u64, result: Result<ReadOnlyCopy, String>) {
        let Some(copying) = self.common.copying.as_mut().filter(|c| c.ticket == ticket) else { return };
        let copy = match result {
            Ok(copy) => copy,
            Err(why) => return self.end_copy(Err(why)),
        };
        let first = copying.made.len() * copying.slots;
        let blocks = copying.names[first..copying.asked].iter().map(|n| self.state.prefixes.get(n));
        let differs = |(block, sum): (Option<BlockId>, &u32)| {
            let sealed = self.state.prefixes.checksum(block?)??;
            (sealed != *sum).then_some(block?)
        };
        if let Some(block) = blocks.zip(&copy.sums).find_map(differs) {
            self.end_copy(Err("a block of it is not what was sealed".into()));
            self.drop_damaged(block);
            return;
        }
        copying.made.push(copy);
        if copying.asked < copying.names.len() {
            return self.copy_on();
        }
        self.end_copy(Ok(()));
    }

    fn end_copy(&mut self, result: Result<(), String>) {
        let Some(Copying { chain, readers, names, slots, made, .. }) = self.common.copying.take() else {
            return;
        };
        for name in &names {
            self.set_pinned(name, COPYING, false);
        }
        // Whoever waited with a look-up for it.
        self.stirred = true;
        // It may have been unpinned meanwhile.
        let pin = self.state.prefixes.pins().find(|(c, _)| **c == chain).map(|(_, pin)| pin.clone());
        let Some(pin) = pin else { return };
        if let Err(why) = result {
            return self.refuse_copy(chain, why);
        }
        self.common.stirred = true;
        // Pinned anew meanwhile, under a label that names others, or nobody.
        if self.readers_of(&pin) != readers {
            return;
        }
        seldom!(
            info,
            "{} blocks of uid {} are common to {} tenants",
            names.len(),
            pin.tenant.0,
            readers.len()
        );
        for (copy, names) in made.into_iter().zip(names.chunks(slots)) {
            let common = &mut self.state.common;
            let extent = ExtentId::of_copy(common.next);
            common.next += 1;
            let (donor, label, names) = (pin.tenant, pin.label.clone(), names.to_vec());
            let (holders, told) = (BTreeSet::new(), BTreeSet::new());
            let (readers, bytes, live) = (readers.clone(), copy.bytes, true);
            common
                .extents
                .insert(extent, Copied { chain, donor, label, readers, names, bytes, live, holders, told });
            self.common.files.insert(extent, Arc::new(copy.file));
        }
    }

    fn refuse_copy(&mut self, chain: Digest, why: String) {
        if self.common.said.get(&chain) != Some(&why) {
            let name = digits(&chain);
            seldom!(warn, "chain {name} is not common to the tenants that prefix.common names: {why}");
        }
        self.common.refused.insert(chain, why);
        self.stirred = true;
    }

    /// Takes back retired copies that nobody says to have any more, if nobody has them. Whether any came back.
    fn take_back_retired(&mut self) -> bool {
        let (now, kept) = (self.absent.clock, &self.common.kept);
        let is_due = |(id, e): &(&ExtentId, &Copied)| {
            !e.live && e.holders.is_empty() && kept.get(id).is_none_or(|k| k.due <= now)
        };
        let due: Vec<ExtentId> = self.state.common.extents.iter().filter(is_due).map(|(id, _)| *id).collect();
        let mut any = false;
        for extent in due {
            // After a restart there is no file to ask about: what a client of the last run keeps is not known.
            match self.common.files.get(&extent).map_or(Ok(true), |file| file.take_back()) {
                Ok(true) => {
                    self.state.common.extents.remove(&extent);
                    self.common.files.remove(&extent);
                    self.common.kept.remove(&extent);
                    any = true;
                }
                Ok(false) => self.keep_copy(extent, None),
                Err(e) => self.keep_copy(extent, Some(e)),
            }
        }
        any
    }

    /// Somebody has it open still, or the kernel does not say.
    fn keep_copy(&mut self, extent: ExtentId, error: Option<std::io::Error>) {
        let Some(e) = self.state.common.extents.get(&extent) else { return };
        let now = self.absent.clock;
        let kept =
            self.common.kept.entry(extent).or_insert(Kept { wait: Duration::ZERO, due: now, said: false });
        let first = kept.wait.is_zero();
        kept.wait = if first { GRACE } else { (kept.wait * 2).clamp(FIRST, LONGEST) };
        kept.due = now + kept.wait;
        if first || std::mem::replace(&mut kept.said, true) {
            return;
        }
        let (donor, readers) =
            (e.donor.0, e.readers.iter().map(|t| t.0.to_string()).collect::<Vec<_>>().join(", "));
        let why = error
            .map_or("somebody has it open still".into(), |e| format!("who has it open cannot be told: {e}"));
        seldom!(
            warn,
            "{extent}, a copy of a prompt of uid {donor} for uid {readers}, has been given back by all, and {why}; it counts \
             against the part of uid {donor} until it is closed"
        );
    }

    /// A connection of this tenant has ended: what it kept may be closed with it.
    pub(super) fn look_for_kept_copies_of(&mut self, tenant: Tenant) {
        for (extent, kept) in &mut self.common.kept {
            if self.state.common.extents.get(extent).is_some_and(|e| e.readers.contains(&tenant)) {
                (kept.wait, kept.due) = (Duration::ZERO, self.absent.clock);
            }
        }
    }

    /// Asks again about copies that are kept, if it is time.
    pub(super) fn look_for_kept_copies(&mut self) {
        if self.next_look_for_copies().is_some_and(|due| due <= self.absent.clock) {
            self.settle();
        }
    }

    /// When it is; `None` while no copy is kept.
    pub(super) fn next_look_for_copies(&self) -> Option<Instant> {
        self.common.kept.values().map(|k| k.due).min()
    }

    /// Whoever has a retired copy and does not use it any more is asked to close it.
    fn ask_for_retired(&mut self) {
        let mut ask = Vec::new();
        for (&extent, e) in self.state.common.extents.iter().filter(|(_, e)| !e.live) {
            let uses = |client: &ClientId| {
                let sessions = self.state.clients.get(client).map(|c| &c.sessions).into_iter().flatten();
                let mut tables = sessions.filter_map(|id| self.state.sessions.get(id)).map(|s| &s.table);
                tables.any(|t| t.iter().any(|b| b.place.extent == extent))
            };
            let idle = e.holders.difference(&e.told).filter(|c| !uses(c));
            ask.extend(idle.map(|client| (extent, *client)));
        }
        for (extent, client) in ask {
            if let Some(e) = self.state.common.extents.get_mut(&extent) {
                e.told.insert(client);
            }
            self.tell_to_give_back(extent, [client], DEADLINE_MS);
        }
    }

    /// After a restart the copies' files are gone: who has one keeps it, nobody else gets it.
    pub(super) fn retire_copies(&mut self) {
        let names: Vec<Digest> = self.state.prefixes.iter().map(|(name, ..)| *name).collect();
        for name in names {
            self.set_pinned(&name, COPYING, false);
        }
        self.state.common.extents.values_mut().for_each(|e| e.live = false);
        self.state.common.extents.retain(|_, e| !e.holders.is_empty());
        self.common.stirred = true;
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
    pub(super) fn common_donors(&self) -> Vec<CommonDonorReport> {
        let report = |(donor, limit_extents): (Tenant, u32)| CommonDonorReport {
            uid: donor.0,
            extents: self.state.common.extents_of(donor),
            limit_extents,
        };
        self.common_parts().into_iter().map(report).collect()
    }

    /// Every chain that is common, is to be, or was.
    pub(super) fn common_reports(&self) -> Vec<CommonReport> {
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

#[cfg(test)]
mod tests;
