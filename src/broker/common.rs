//! Prompts that several tenants share, because the configuration says so: read-only copies beside the pool.
//!
//! Owns which pinned chains are copied for whom, and the copies. A rule names a tenant (the donor), the label of its
//! pins, and the tenants that may read them; whatever the donor pins under that label is copied into memory that nobody can
//! write ([`ReadOnlyCopy`]) and found by these tenants' look-ups. Invariants:
//! - a tenant that no rule names as a reader never looks at anything of another one's, and so is told nothing, not even by
//!   the time that an answer takes;
//! - what is copied is pinned meanwhile, and its checksums are compared with those of the seals: a copy is as it was
//!   sealed, or there is none;
//! - an extent of a copy holds blocks of one chain, for one set of readers, and has a name that the pool never gives;
//! - a copy is found as long as its chain is pinned. After that its holders are asked to give it back, each once its
//!   tables do not name it, and it counts against the bound until all have.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::prefix::chains::digits;
use super::prefix::{self, Digest, Pin};
use super::{Broker, Job, Session};
use crate::heap::ReadOnlyCopy;
use crate::id::{BlockId, ClientId, ExtentId, Place, Tenant};
use crate::profile::Profile;

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
    /// Those whose labels begin so.
    pub label: String,
    /// The tenants that may read them.
    pub readers: BTreeSet<Tenant>,
}

/// One extent of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Copied {
    /// The pinned chain that it is a part of.
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

    /// The client has closed it, or is gone. `false` if it had not got it.
    pub fn remove_holder(&mut self, extent: ExtentId, client: ClientId) -> bool {
        let Some(e) = self.extents.get_mut(&extent) else { return false };
        e.told.remove(&client);
        let was = e.holders.remove(&client);
        if !e.live && e.holders.is_empty() {
            self.extents.remove(&extent);
        }
        was
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
    names: Vec<Digest>,
    /// Blocks of one extent.
    slots: usize,
    /// Blocks of which the worker is through, or has.
    asked: usize,
    made: Vec<ReadOnlyCopy>,
}

/// The part that is not written down.
#[derive(Debug, Default)]
pub(super) struct Commons {
    descriptors: BTreeMap<ExtentId, Arc<OwnedFd>>,
    /// By reader, and by the donor's name.
    found: BTreeMap<(Tenant, Digest), BlockId>,
    /// Something was pinned or unpinned.
    pub stirred: bool,
    wanted: VecDeque<Digest>,
    copying: Option<Copying>,
    /// Chains of which there is no copy, and why.
    refused: BTreeMap<Digest, String>,
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
    /// Blocks of the copy.
    pub blocks: u32,
    /// Bytes of the copy, which lie beside the pool.
    pub bytes: u64,
    /// Connections that have mapped it.
    pub connections: u32,
    /// `shared`; `copying`; `refused`, with the reason; or `retired`: unpinned, and not given back by all yet.
    pub state: String,
    /// Why it is refused.
    pub why: Option<String>,
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
    pub(super) fn common_descriptor(&self, extent: ExtentId) -> Option<Arc<OwnedFd>> {
        self.common.descriptors.get(&extent).cloned()
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

    /// After every change: what was unpinned is retired, what was pinned is copied, and what is retired is asked for.
    pub(super) fn tend_common(&mut self) {
        if self.policy.common.is_empty() && self.state.common.extents.is_empty() {
            self.common.stirred = false;
            return;
        }
        if std::mem::take(&mut self.common.stirred) {
            self.compare_with_pins();
        }
        self.begin_copy();
        self.ask_for_retired();
    }

    /// Who may read what is pinned so; nobody, if no rule says so.
    fn readers_of(&self, pin: &Pin) -> BTreeSet<Tenant> {
        let covers = |r: &&CommonRule| r.donor == pin.tenant && pin.label.starts_with(r.label.as_str());
        let mut readers: BTreeSet<Tenant> =
            self.policy.common.iter().filter(covers).flat_map(|r| r.readers.iter().copied()).collect();
        readers.remove(&pin.tenant);
        readers
    }

    fn compare_with_pins(&mut self) {
        let pins = self.state.prefixes.pins();
        let named: BTreeMap<Digest, BTreeSet<Tenant>> = pins
            .map(|(chain, pin)| (*chain, self.readers_of(pin)))
            .filter(|(_, readers)| !readers.is_empty())
            .collect();
        for e in self.state.common.extents.values_mut() {
            e.live &= named.get(&e.chain) == Some(&e.readers);
        }
        // Nobody has it: it is gone at once.
        self.state.common.extents.retain(|_, e| e.live || !e.holders.is_empty());
        self.index_copies();
        let extents = &self.state.common.extents;
        let is_copied = |chain: &Digest| {
            extents.values().any(|e| e.live && e.chain == *chain)
                || self.common.copying.as_ref().is_some_and(|c| c.chain == *chain)
        };
        self.common.wanted = named.keys().filter(|chain| !is_copied(chain)).copied().collect();
        self.common.refused.clear();
    }

    /// What can be found, derived anew.
    fn index_copies(&mut self) {
        let extents = &self.state.common.extents;
        self.common.descriptors.retain(|id, _| extents.get(id).is_some_and(|e| e.live));
        self.common.found.clear();
        for (&extent, e) in extents.iter().filter(|(_, e)| e.live) {
            for (slot, name) in (0..).zip(&e.names) {
                let block = BlockId { place: Place { extent, slot }, generation: GENERATION };
                for reader in &e.readers {
                    self.common.found.entry((*reader, *name)).or_insert(block);
                }
            }
        }
    }

    fn begin_copy(&mut self) {
        while self.common.copying.is_none() {
            let Some(chain) = self.common.wanted.front().copied() else { return };
            let names = match self.pinned_names(&chain) {
                Some(names) => names,
                None => {
                    self.common.wanted.pop_front();
                    continue;
                }
            };
            let prefixes = &self.state.prefixes;
            let unread = |name: &Digest| prefixes.get(name).and_then(|b| prefixes.checksum(b)) == Some(None);
            if self.policy.checksums && self.is_summing() && names.iter().any(unread) {
                // The sums are on their way.
                return;
            }
            self.common.wanted.pop_front();
            let slots = self.blocks_per_copy(&names);
            let (needed, most) = (names.len().div_ceil(slots), self.common_places() as usize);
            let used = self.state.common.extents.len();
            if used + needed > most {
                let why = format!(
                    "{needed} extents of copies are needed, {used} of {most} are in use (prefix.common-limit)"
                );
                self.refuse_copy(chain, why);
                continue;
            }
            for name in &names {
                self.set_pinned(name, COPYING, true);
            }
            let (ticket, asked, made) = (self.next_ticket, 0, Vec::new());
            self.next_ticket += 1;
            self.common.copying = Some(Copying { ticket, chain, names, slots, asked, made });
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
        let Some(Copying { chain, names, slots, made, .. }) = self.common.copying.take() else { return };
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
        let readers = self.readers_of(&pin);
        log::info!("{} blocks of uid {} are common to {} tenants", names.len(), pin.tenant.0, readers.len());
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
            self.common.descriptors.insert(extent, Arc::new(copy.fd));
        }
        self.index_copies();
    }

    fn refuse_copy(&mut self, chain: Digest, why: String) {
        log::warn!("chain {} is not common to the tenants that prefix.common names: {why}", digits(&chain));
        self.common.refused.insert(chain, why);
        self.stirred = true;
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

    /// After a restart the copies' descriptors are gone: who has one keeps it, nobody else gets it.
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
        for (extent, e) in &self.state.common.extents {
            if !extent.is_copy() || !e.told.is_subset(&e.holders) {
                return Err(format!("{extent} is no copy, or is wanted from who has not got it"));
            }
            if e.live != self.common.descriptors.contains_key(extent) {
                return Err(format!("{extent} can be found: {}, and its descriptor is not so", e.live));
            }
            if let Some(gone) = e.holders.iter().find(|c| !self.state.clients.contains_key(c)) {
                return Err(format!("{extent} is held by client {}, which is gone", gone.0));
            }
        }
        Ok(())
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

    /// Every chain that is common, is to be, or was.
    pub(super) fn common_reports(&self) -> Vec<CommonReport> {
        let mut all: BTreeMap<(Digest, bool), (CommonReport, BTreeSet<ClientId>)> = BTreeMap::new();
        for e in self.state.common.extents.values() {
            let new = || CommonReport {
                chain: digits(&e.chain),
                uid: e.donor.0,
                label: e.label.clone(),
                readers: e.readers.iter().map(|t| t.0).collect(),
                blocks: 0,
                bytes: 0,
                connections: 0,
                state: if e.live { "shared" } else { "retired" }.into(),
                why: None,
            };
            let (report, clients) = all.entry((e.chain, e.live)).or_insert_with(|| (new(), BTreeSet::new()));
            report.blocks += e.names.len() as u32;
            report.bytes += e.bytes;
            clients.extend(e.holders.iter().copied());
        }
        let mut reports: Vec<CommonReport> = all
            .into_values()
            .map(|(report, clients)| CommonReport { connections: clients.len() as u32, ..report })
            .collect();
        let copying = self.common.copying.iter().map(|c| (c.chain, "copying", None));
        let wanted = self.common.wanted.iter().map(|chain| (*chain, "copying", None));
        let refused = self.common.refused.iter().map(|(chain, why)| (*chain, "refused", Some(why.clone())));
        for (chain, state, why) in copying.chain(wanted).chain(refused) {
            let Some((_, pin)) = self.state.prefixes.pins().find(|(c, _)| **c == chain) else { continue };
            reports.push(CommonReport {
                chain: digits(&chain),
                uid: pin.tenant.0,
                label: pin.label.clone(),
                readers: self.readers_of(pin).iter().map(|t| t.0).collect(),
                blocks: pin.blocks,
                bytes: 0,
                connections: 0,
                state: state.into(),
                why,
            });
        }
        reports
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::broker::{Peer, Policy};
    use crate::heap::{Heap, Memfd};
    use crate::wire::{self, Fault, Reader, Verb, WireBlock, Writer};

    const DONOR: u32 = 1000;
    const READER: u32 = 1001;
    const EXTENT: u64 = 128 << 10;

    fn policy() -> Policy {
        let readers = BTreeSet::from([Tenant(READER)]);
        let rule = CommonRule { donor: Tenant(DONOR), label: "engine".into(), readers };
        Policy { common: vec![rule], common_bytes: 2 * EXTENT, ..Policy::default() }
    }

    struct World {
        broker: Broker,
        number: u64,
    }

    impl World {
        /// The worker does all that was ordered.
        fn work(&mut self) {
            loop {
                let jobs = self.broker.jobs();
                if jobs.is_empty() {
                    return self.broker.verify().unwrap();
                }
                for job in jobs {
                    let done = job.run(&Memfd::new(false));
                    self.broker.done(done);
                }
            }
        }

        fn ask(
            &mut self,
            client: ClientId,
            verb: Verb,
            session: u64,
            fill: impl FnOnce(&mut Writer),
        ) -> Result<Vec<u8>, Fault> {
            self.number += 1;
            let mut w = Writer::request(verb, self.number, session);
            fill(&mut w);
            self.broker.request(client, &w.finish());
            self.work();
            let mut replies = self.broker.outputs();
            replies.retain(|o| wire::split(&o.message).unwrap().0.sequence.get() > 0);
            let reply = replies.pop_front().expect("a reply");
            let (header, body) = wire::split(&reply.message).unwrap();
            if verb == Verb::Attach {
                let grant: &wire::Grant = Reader::new("grant", body).one().unwrap();
                let came = reply.buffers.len() + reply.descriptors.len();
                assert_eq!(came, grant.extents.get() as usize, "a descriptor for each extent");
            }
            Fault::from_code(header.fault.get()).map_or(Ok(body.to_vec()), Err)
        }

        fn client(&mut self, uid: u32) -> (ClientId, u64) {
            let client = self.broker.connect(Peer { uid, pid: 1 }).unwrap();
            let (magic, version, label) = (wire::MAGIC.into(), wire::VERSION.into(), wire::label("engine"));
            let hello = wire::Hello { magic, version, label };
            let welcome = self.ask(client, Verb::Hello, 0, |w| _ = w.put(&hello)).unwrap();
            let copies = u32::from_le_bytes(welcome[36..40].try_into().unwrap());
            assert_eq!(copies, if uid == READER { 2 } else { 0 }, "nobody else is told of copies");
            let profile = Profile::uniform("small", "f16", 2, 512, 512, 16).unwrap();
            let format = self.ask(client, Verb::Profile, 0, |w| wire::put_profile(w, &profile, 0)).unwrap();
            let format = u32::from_le_bytes(format[..4].try_into().unwrap()).into();
            let open = wire::Open { format, ..wire::Open::default() };
            let opened = self.ask(client, Verb::Open, 0, |w| _ = w.put(&open)).unwrap();
            (client, u64::from_le_bytes(opened[..8].try_into().unwrap()))
        }

        /// Two blocks of the prompt are found, so many of them in copies.
        fn attach(&mut self, (client, session): (ClientId, u64)) -> Vec<BlockId> {
            let attach = wire::Attach { count: 33.into(), more: 0.into() };
            let body =
                self.ask(client, Verb::Attach, session, |w| _ = w.put(&attach).put_tokens(&[7; 33])).unwrap();
            let mut r = Reader::new("grant", &body);
            let grant: &wire::Grant = r.one().unwrap();
            let extents: Vec<wire::ExtentInfo> = r.many(grant.extents.get(), 9).unwrap().to_vec();
            let blocks: &[wire::GrantedBlock] = r.many(grant.blocks.get(), 9).unwrap();
            for e in extents {
                assert_eq!(e.flags.get() == wire::READ_ONLY, ExtentId(e.extent.get()).is_copy());
            }
            blocks.iter().map(|b| b.block.id()).collect()
        }
    }

    /// A world in which the donor has pinned two blocks.
    fn world() -> (World, ClientId) {
        let heap = Arc::new(Memfd::new(false));
        let broker = Broker::new(heap, EXTENT, 4, 4, policy()).unwrap();
        let mut w = World { broker, number: 0 };
        let (donor, session) = w.client(DONOR);
        let grow = wire::Grow { want: 2.into(), least: 2.into(), ..wire::Grow::default() };
        let grant = w.ask(donor, Verb::Grow, session, |w| _ = w.put(&grow)).unwrap();
        let names: Vec<u8> = grant[24..].chunks_exact(24).flat_map(|b| b[..16].to_vec()).collect();
        assert_eq!(names.len(), 2 * size_of::<WireBlock>());
        let report = wire::Report { tokens: 32.into(), first: 0.into(), used: 2.into() };
        let seal = wire::Seal { report, from: 0.into(), count: 32.into() };
        w.ask(donor, Verb::Seal, session, |w| _ = w.put(&seal).put_tokens(&[7; 32]).put(&names[..])).unwrap();
        let report = wire::Report { tokens: 32.into(), first: 2.into(), used: 0.into() };
        let pin = wire::Pin { report, blocks: 2.into(), on: 1.into() };
        w.ask(donor, Verb::Pin, session, |w| _ = w.put(&pin)).unwrap();
        (w, donor)
    }

    #[test]
    fn after_a_restart_who_reads_a_copy_goes_on_and_others_get_a_new_one() {
        let (mut w, _) = world();
        let reader = w.client(READER);
        let first = w.attach(reader);
        assert!(first.len() == 2 && first.iter().all(|b| b.place.extent.is_copy()));
        let record = w.broker.record();
        let there: Vec<ExtentId> = w.broker.buffers.keys().copied().collect();
        let fresh = |id| (id, Memfd::new(false).allocate(EXTENT).unwrap());
        let buffers: BTreeMap<_, _> = there.into_iter().map(fresh).collect();
        w.broker = Broker::from_record(&record, Arc::new(Memfd::new(false)), policy(), buffers).unwrap();
        w.work();
        assert_eq!(w.broker.state.sessions[&crate::id::SessionId(reader.1)].table, first);
        let second = w.client(READER);
        let found = w.attach(second);
        assert!(found.len() == 2 && found[0].place.extent.is_copy());
        assert_ne!(found[0].place.extent, first[0].place.extent);
        // The old one goes with its reader.
        w.broker.disconnect(reader.0);
        assert_eq!(w.broker.common_reports().len(), 1);
        w.work();
    }

    #[test]
    fn no_device_gets_a_window_over_what_is_common_and_the_refusal_says_what_to_do() {
        let (mut w, _) = world();
        let reader = w.client(READER);
        assert_eq!(w.attach(reader).len(), 2);
        let report = wire::Report { tokens: 32.into(), first: 2.into(), used: 0.into() };
        let window = wire::Window { report, blocks: 2.into(), ..wire::Window::default() };
        let refused = w.ask(reader.0, Verb::Window, reader.1, |w| _ = w.put(&window));
        assert_eq!(refused, Err(Fault::BadRequest));
        w.work();
    }

    #[test]
    fn a_claim_to_a_block_of_a_copy_is_no_credit_of_anybody() {
        let (mut w, donor) = world();
        let reader = w.client(READER);
        let copy = w.attach(reader)[0];
        // The donor, who has not got it, and the reader, to whom it is not credit.
        for client in [donor, reader.0] {
            let free = wire::Free { count: 1.into(), reserved: 0.into() };
            let refused = w.ask(client, Verb::Free, 0, |w| _ = w.put(&free).put_blocks([copy]));
            assert_eq!(refused, Err(Fault::Stale));
        }
        let extent = copy.place.extent.0.into();
        let back = wire::ReturnExtent { extent, reserved: 0.into() };
        assert_eq!(w.ask(donor, Verb::ReturnExtent, 0, |w| _ = w.put(&back)), Err(Fault::Stale));
        let in_use = w.ask(reader.0, Verb::ReturnExtent, 0, |w| _ = w.put(&back));
        assert_eq!(in_use, Err(Fault::BadRequest), "a table names it");
    }
}
