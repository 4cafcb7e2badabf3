//! Stored prefixes on their way into the pool, and the look-ups that wait for them.
//!
//! Owns the one that is being read. Invariants: a prefix from a file is taken in as a whole or not at all: its blocks are credit
//! of the broker itself until every checksum has been compared, and only then sealed, published under their names and
//! pinned; it takes room as its tenant would, within its limits, and evicts nothing; look-ups wait for what is taken in at
//! the start, but for no longer than [`PATIENCE`].

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::saving::SAVING;
use super::{StoreOutcome, StoreRefusal, Task, Work, reported};
use crate::broker::grant::Want;
use crate::broker::prefix::{self, Digest, Pin, Publication};
use crate::broker::{Broker, Format, Job};
use crate::id::{BlockId, ClientId, FormatId, Tenant};
use crate::quote::plain;
use crate::size::Size;
use crate::store::{Entry, Head, Listing, Order, StoreError};

/// Whose credit the blocks are that are being filled from a file: the broker's own. Connections are numbered from 1.
const OWN: ClientId = ClientId(0);

/// How long look-ups wait for the prefixes that are taken in at the start. A client waits 5 s for an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// A prefix on its way from its file into the pool.
#[derive(Debug)]
pub(super) struct Loading {
    head: Head,
    tenant: Tenant,
    format: FormatId,
    /// The block that each name gets; `None` where there is one of this name already.
    blocks: Vec<Option<BlockId>>,
    /// The job after which nothing that was ordered earlier touches these blocks any more.
    cleared: u64,
}

impl Broker {
    /// [`load_prefixes`](Self::load_prefixes) at the start: look-ups wait for it.
    pub fn load_at_start(&mut self, now: Instant) {
        if self.load_prefixes().is_ok() {
            if let Some(store) = &mut self.store {
                store.until = Some(now + PATIENCE);
            }
        }
    }

    /// Takes in every stored prefix that is not there yet. Returns the number to ask [`stored`](Self::stored) with.
    pub fn load_prefixes(&mut self) -> Result<u64, StoreRefusal> {
        let work = Work::Load { rest: VecDeque::new(), current: None };
        let (number, location) = self.begin(work)?;
        self.jobs.push_back(Job::Store(Order::List(location)));
        Ok(number)
    }

    pub(super) fn listed(&mut self, listing: Result<Listing, StoreError>) {
        match listing {
            // Nothing has been stored yet.
            Err(StoreError::NoDirectory { .. }) => {}
            Err(why) => {
                let path = self.store.as_ref().map(|s| s.policy.location.path.clone()).unwrap_or_default();
                self.refuse_file(path, None, why.to_string());
            }
            Ok(listing) => {
                let mut heads = VecDeque::new();
                for (path, head) in listing {
                    match head {
                        Ok(head) => heads.push_back(head),
                        Err(why) => self.refuse_file(path, None, why.to_string()),
                    }
                }
                // Where not everything fits, those of the highest priority come in, and the longest one of a tenant's
                // first: others may be its beginning.
                let priority = |h: &Head| self.state.tenancy.of(Tenant(h.tenant)).priority;
                heads.make_contiguous().sort_by_key(|h| std::cmp::Reverse((priority(h), h.blocks.len())));
                if let Some(Task { work: Work::Load { rest, .. }, .. }) =
                    self.store.as_mut().and_then(|s| s.task.as_mut())
                {
                    *rest = heads;
                }
            }
        }
        self.load_next();
    }

    /// Goes on with the next file, until one needs the worker or there are none.
    fn load_next(&mut self) {
        loop {
            let Some(Task { work: Work::Load { rest, .. }, .. }) =
                self.store.as_mut().and_then(|s| s.task.as_mut())
            else {
                return;
            };
            let Some(head) = rest.pop_front() else { return self.end_task() };
            let path = self.path_of(&head);
            match self.make_way(&head) {
                Ok(Some(loading)) => {
                    if let Some(Task { work: Work::Load { current, .. }, .. }) =
                        self.store.as_mut().and_then(|s| s.task.as_mut())
                    {
                        *current = Some(Box::new(loading));
                    }
                    return;
                }
                Ok(None) => {
                    if let Some(store) = &mut self.store {
                        store.known.insert(head.chain().0);
                    }
                    self.report(reported(path, Some(&head), StoreOutcome::Present));
                }
                Err(why) => self.refuse_file(path, Some(&head), why),
            }
        }
    }

    /// Takes the blocks that a prefix needs, and has them cleared; `None` if it is there.
    fn make_way(&mut self, head: &Head) -> Result<Option<Loading>, String> {
        let tenant = Tenant(head.tenant);
        let covered = self.store.as_ref().is_some_and(|s| s.policy.covers(tenant, &head.label));
        if !covered {
            return Err(format!(
                "prefix.store does not name uid {} with the label {:?}; it stays in its file",
                head.tenant,
                plain(&head.label)
            ));
        }
        if self.frozen {
            return Err("the broker's books do not add up; it grants nothing more".into());
        }
        if prefix::root(tenant, &head.model.0, &head.profile) != head.root.0 {
            return Err("it is foreign: its names are not made of the tenant, the model and the geometry that it says; \
                 remove it, and save the prefix again"
                .into());
        }
        let chain = head.chain().0;
        if self.state.prefixes.pins().any(|(pinned, _)| *pinned == chain) {
            return Ok(None);
        }
        let known = self.state.formats.iter().find(|(_, f)| f.profile == head.profile).map(|(id, _)| *id);
        let format = known.unwrap_or(FormatId(self.state.next_format));
        let cut = self.cut(format, &head.profile);
        if cut.slots == 0 {
            let [need, have] = [cut.slot_bytes, self.state.pool.extent_bytes()].map(Size::from_bytes);
            return Err(format!(
                "a block of {need} never fits an extent of {have}: configure larger extents"
            ));
        }
        let mut missing = 0;
        let mut unpinned = 0;
        for entry in &head.blocks {
            match self.state.prefixes.get(&entry.name.0) {
                None => missing += 1,
                Some(block) => {
                    let extent = self.state.pool.extents().get(&block.place.extent);
                    if extent.and_then(|e| e.owned()).is_none_or(|o| o.tenant != tenant) {
                        return Err("it is foreign: it names a block of another tenant".into());
                    }
                    unpinned += u64::from(!self.state.prefixes.is_pinned(&entry.name.0));
                }
            }
        }
        let bytes = (unpinned + u64::from(missing)) * cut.slot_bytes;
        let (pinned, most) = (self.state.pool.pinned_bytes(tenant), self.state.tenancy.of(tenant).pinned);
        if pinned.saturating_add(bytes) > most {
            let [bytes, pinned, most] = [bytes, pinned, most].map(Size::from_bytes);
            return Err(format!(
                "it does not fit: {bytes} more would be pinned, this tenant has {pinned} pinned and its limit is {most} (limits.pinned)"
            ));
        }
        if let Err(refused) = self.may_name(tenant, head.blocks.len(), "remove its file") {
            return Err(format!("it does not fit: {}", refused.text));
        }
        let (now, _) = self.available(tenant, &cut, 0);
        if now < u64::from(missing) {
            return Err(format!(
                "it does not fit: {missing} blocks are needed, and its tenant can be granted {now} now; free some, and load it again"
            ));
        }
        if known.is_none() {
            self.state.next_format += 1;
            self.state.formats.insert(format, Format { profile: head.profile.clone(), cut });
        }
        let want =
            Want { format, want: missing, least: missing, has: 0, near: None, promised: 0, priority: 0 };
        let taken = self.take(OWN, tenant, &cut, &want, u64::MAX);
        // No message carries descriptors to the broker itself.
        self.fresh_descriptors.clear();
        let mut taken: Vec<BlockId> = taken.into_iter().map(|t| t.block).collect();
        if taken.len() < missing as usize {
            let got = taken.len();
            self.give_up(taken, format);
            return Err(format!("it does not fit: {missing} blocks are needed, and only {got} were found"));
        }
        // A tenant's zeros are written in order: when these are zero, nobody's earlier order writes there any more. What is behind a
        // block in its place is zero with that, too.
        let cleared = self.next_ticket;
        self.next_ticket += 1;
        let pieces = taken.iter().filter_map(|b| self.piece(*b)).collect();
        self.jobs.push_back(Job::Scrub { ticket: cleared, tenant, pieces, wanted: None });
        let prefixes = &self.state.prefixes;
        taken.reverse();
        let missing = |e: &Entry| if prefixes.get(&e.name.0).is_none() { taken.pop() } else { None };
        let blocks = head.blocks.iter().map(missing).collect();
        Ok(Some(Loading { head: head.clone(), tenant, format, blocks, cleared }))
    }

    /// Zeros are written, or not. `false` if they are not those of a prefix that is being loaded.
    pub(in crate::broker) fn store_cleared(&mut self, ticket: u64, result: &Result<(), String>) -> bool {
        let Some(store) = &self.store else { return false };
        let from = store.policy.location.clone();
        let Some(Task { work: Work::Load { current: Some(loading), .. }, .. }) = &store.task else {
            return false;
        };
        if loading.cleared != ticket {
            return false;
        }
        if let Err(why) = result {
            let why = format!("its blocks could not be cleared: {why}");
            self.loaded(Err(why));
            return true;
        }
        let place = |block: &Option<BlockId>| {
            let (buffer, range) = self.piece((*block)?)?;
            Some((buffer, range.start))
        };
        let into = loading.blocks.iter().map(place).collect();
        let head = Box::new(loading.head.clone());
        self.jobs.push_back(Job::Store(Order::Read { from, head, into }));
        true
    }

    pub(super) fn read(&mut self, result: Result<(), StoreError>) {
        self.loaded(result.map_err(|e| e.to_string()));
    }

    /// The file was read, or not.
    fn loaded(&mut self, result: Result<(), String>) {
        let Some(Task { work: Work::Load { current, .. }, .. }) =
            self.store.as_mut().and_then(|s| s.task.as_mut())
        else {
            return;
        };
        let Some(loading) = current.take() else { return };
        let path = self.path_of(&loading.head);
        let head = loading.head.clone();
        match result.and_then(|()| self.publish_loaded(&loading)) {
            Ok(()) => {
                if let Some(store) = &mut self.store {
                    store.known.insert(head.chain().0);
                }
                self.let_extents_go();
                self.report(reported(path, Some(&head), StoreOutcome::Loaded));
            }
            Err(why) => {
                self.give_up(loading.blocks.into_iter().flatten().collect(), loading.format);
                self.refuse_file(path, Some(&head), why);
            }
        }
        self.load_next();
    }

    /// Seals the blocks, publishes them under their names and pins the chain. Changes nothing if it cannot.
    fn publish_loaded(&mut self, loading: &Loading) -> Result<(), String> {
        let Loading { head, tenant, format, blocks, .. } = loading;
        let there = |(e, block): (&Entry, &Option<BlockId>)| {
            block.is_some() || self.state.prefixes.get(&e.name.0).is_some()
        };
        if !head.blocks.iter().zip(blocks).all(there) {
            return Err("a part of it that was in the pool has been evicted meanwhile; load it again".into());
        }
        let chain = head.chain().0;
        let priority = self.state.tenancy.of(*tenant).priority;
        let mut parent = head.before.map(|b| b.0);
        for (entry, block) in head.blocks.iter().zip(blocks) {
            let name = entry.name.0;
            let published = self.state.prefixes.get(&name).is_some();
            match block {
                // Somebody has published it meanwhile.
                Some(block) if published => _ = self.state.pool.free_credit(*block, OWN),
                Some(block) => {
                    let held = self.state.pool.hold(*block, OWN);
                    debug_assert_eq!(held, Ok(()), "it is the broker's credit");
                    self.state.pool.seal(block.place);
                    let (tenant, format, block) = (*tenant, *format, *block);
                    let windowed = self.is_windowed(format);
                    let publication = Publication { name, parent, block, tenant, format, priority, windowed };
                    if self.state.prefixes.publish(publication) {
                        self.sum_later(block);
                    }
                }
                None => {}
            }
            self.set_pinned(&name, chain, true);
            if let Some(block) = block.filter(|_| !published) {
                // No table holds it; it stays because it is pinned.
                self.state.pool.drop_refs([block], None, |_| true, |_, _| ());
            }
            parent = Some(name);
        }
        // A file of an earlier version may have one that could not come in over the socket today.
        let (tenant, model, label) = (*tenant, head.model.0, plain(&head.label));
        let (blocks, tokens) = (head.blocks.len() as u32, head.tokens);
        let pin = Pin { tenant, pid: 0, label, blocks, tokens, model };
        self.set_pin(chain, Some(pin));
        Ok(())
    }

    /// What was taken for a prefix that is refused goes back.
    fn give_up(&mut self, blocks: Vec<BlockId>, format: FormatId) {
        for block in blocks {
            let freed = self.state.pool.free_credit(block, OWN);
            debug_assert_eq!(freed, Ok(()));
        }
        self.let_extents_go();
        self.forget_format(format);
    }

    fn let_extents_go(&mut self) {
        for extent in self.state.pool.held_by(OWN) {
            self.state.pool.remove_holder(extent, OWN);
        }
    }

    /// Whether look-ups are to wait for what is being taken in.
    pub(in crate::broker) fn lookups_wait(&self) -> bool {
        self.store.as_ref().is_some_and(|s| s.until.is_some())
    }

    /// When they have waited long enough.
    pub(in crate::broker) fn lookups_wait_until(&self) -> Option<Instant> {
        self.store.as_ref()?.until
    }

    /// They have, if that is past.
    pub(in crate::broker) fn end_late_lookups(&mut self, now: Instant) {
        let Some(store) = &mut self.store else { return };
        if store.until.take_if(|until| *until <= now).is_some() {
            log::warn!("stored prefixes are still being read; look-ups do not wait for them any longer");
            self.stirred = true;
            self.settle();
        }
    }

    /// What was under way when the state was recorded is not any more.
    pub(in crate::broker) fn forget_store_work(&mut self) {
        let saving = |(name, ..): (&Digest, BlockId, Tenant, bool)| *name;
        let names: Vec<Digest> = self.state.prefixes.iter().map(saving).collect();
        for name in names {
            self.set_pinned(&name, SAVING, false);
        }
        for block in self.state.pool.credit_of(OWN) {
            let freed = self.state.pool.free_credit(block, OWN);
            debug_assert_eq!(freed, Ok(()));
        }
        self.let_extents_go();
    }
}
