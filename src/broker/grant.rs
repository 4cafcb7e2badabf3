//! Grants: which blocks a client gets, and what is done when there are none.
//!
//! Owns no state. Invariants: a grant hands over all of `least` blocks or none, never more than the tenant's limit, and
//! never what is kept for others: their reserves, and what was promised to sessions. It takes a new extent, or evicts a
//! cached block, only for blocks without which the grant would be of no use. Where there are too few it takes, in this
//! order and no more than it needs: extents in which nobody has a block in use; the tenant's own cached blocks; extents
//! with nothing but cached blocks, those of tenants of low priority first; and last what sessions of lower priority hold.

use std::collections::{BTreeMap, BTreeSet};

use super::waits::Lack;
use super::{Answer, Broker, Refused, Reply};
use crate::id::{BlockId, ClientId, ExtentId, FormatId, Place, Tenant};
use crate::pool::{Cut, Take, Taken};
use crate::wire::{self, ExtentInfo, Fault, Grant, GrantedBlock, MAX_BLOCKS, MAX_FDS};

/// What a client asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Want {
    pub format: FormatId,
    /// Blocks that would be good to have.
    pub want: u32,
    /// Blocks without which the rest is of no use.
    pub least: u32,
    /// Blocks that the same table holds already.
    pub has: u32,
    /// Right after this place if possible.
    pub near: Option<Place>,
    /// Of what has been promised to the tenant's sessions, this is the asker's.
    pub promised: u32,
    /// Sessions of a lower one make room.
    pub priority: u8,
}

/// Extents, each with its owner.
type Owners = Vec<(Tenant, ExtentId)>;

/// What came of it.
pub(super) enum Granted {
    Blocks(Vec<Taken>),
    Later,
}

impl Broker {
    /// Extents that the tenant may own.
    pub(super) fn extent_limit(&self, tenant: Tenant) -> u32 {
        self.state.tenancy.of(tenant).limit.unwrap_or(u32::MAX)
    }

    /// The most blocks of a format that the tenant could ever hold: what others have as a reserve it never gets.
    pub(super) fn capacity(&self, tenant: Tenant, cut: &Cut) -> u64 {
        let reserved = self.state.tenancy.reserved() - u64::from(self.state.tenancy.of(tenant).reserve);
        // Extents that are lent count, and so do those on their way back: they are there again before long.
        let extents = self.state.pool.extents().len() as u64 + u64::from(self.expected_back());
        let extents = extents.saturating_sub(reserved);
        extents.min(self.extent_limit(tenant).into()) * u64::from(cut.slots)
    }

    /// Extents that the tenant may still get, by its limit.
    pub(super) fn may_get(&self, tenant: Tenant) -> u32 {
        self.extent_limit(tenant).saturating_sub(self.charged_extents(tenant))
    }

    /// Blocks that could be granted to the tenant now without evicting anything, and how many once the worker has
    /// renewed what waits for it. `own` of what has been promised to the tenant's sessions is the asker's.
    pub(super) fn available(&self, tenant: Tenant, cut: &Cut, own: u32) -> (u64, u64) {
        let pool = &self.state.pool;
        let (may, kept) = (self.may_get(tenant), self.kept_for_others(tenant));
        let elsewhere = self.promised_extents(tenant, Some(cut.format));
        // What is promised to others may come from evicted blocks first.
        let evictable = self.state.prefixes.evictable(tenant, cut.format);
        let promised = (self.promised(tenant, cut.format) - u64::from(own)).saturating_sub(evictable);
        let free = pool.free_places(tenant, cut.format);
        let blocks = |clean: u32| {
            let extents = clean.saturating_sub(kept).min(may).saturating_sub(elsewhere);
            (free + u64::from(extents) * u64::from(cut.slots)).saturating_sub(promised)
        };
        (blocks(pool.clean_extents()), blocks(self.soon_there()))
    }

    /// Clean extents, those that become clean, and those that come back from a loan or will if they are asked for; but not
    /// those that holds wait for.
    fn soon_there(&self) -> u32 {
        let pool = &self.state.pool;
        let back = self.expected_back() + self.elastic_extents();
        (pool.clean_extents() + pool.soon_clean() + back).saturating_sub(self.owed_to_holds())
    }

    /// Blocks that the tenant could be granted as soon as the worker is done: with all that a grant would take back and evict for
    /// them, but without what others would have to be asked for.
    pub(super) fn could_grant(&self, tenant: Tenant, cut: &Cut, own: u32) -> u64 {
        let (idle, cold) = self.candidates(tenant, cut);
        let all = self.reach(tenant, cut, own, idle.iter().chain(&cold).map(|(_, e)| *e));
        all.min(self.capacity(tenant, cut))
    }

    /// Cached blocks of the tenant that may go for a block of the asker's.
    pub(super) fn may_evict(&self, tenant: Tenant, cut: &Cut, own: u32) -> u64 {
        let promised = self.promised(tenant, cut.format) - u64::from(own);
        self.state.prefixes.evictable(tenant, cut.format).saturating_sub(promised)
    }

    pub(super) fn grant(&mut self, client: ClientId, want: Want) -> Result<Granted, Refused> {
        let tenant = self.client(client).tenant;
        let cut = self.state.formats[&want.format].cut;
        if want.least as usize > MAX_FDS || want.want as usize > MAX_BLOCKS || want.least > want.want {
            return Err(Refused::bad(format!(
                "{} blocks, at least {}: one request asks for at most {MAX_BLOCKS}, insists on at most {MAX_FDS}",
                want.want, want.least
            )));
        }
        if self.frozen {
            return Err(Refused::new(
                Fault::BrokerFault,
                "the broker's books do not add up; it grants nothing more",
            ));
        }
        let (needed, capacity) = (u64::from(want.has) + u64::from(want.least), self.capacity(tenant, &cut));
        if needed > capacity {
            let text = format!(
                "{needed} blocks will never fit: this tenant can hold at most {capacity} of this format"
            );
            return Err(Refused::new(Fault::NeverFits, text).numbers(needed, capacity));
        }
        let (least, own) = (u64::from(want.least), want.promised);
        let room = self.connection_room(client, &cut);
        if room < least {
            let text = format!(
                "{least} blocks are needed, this connection may hold {room} more (limits.connection); close or trim sessions"
            );
            return Err(Refused::new(Fault::OverLimit, text).numbers(least, room));
        }
        self.rest_unanswered();
        let lack = Lack { tenant, format: cut.format, priority: want.priority };
        if self.available(tenant, &cut, own).1 < least {
            self.withdraw(tenant, &cut, own, least);
        }
        let mut emptied = BTreeSet::new();
        if self.available(tenant, &cut, own).0 < least {
            // Whatever is emptied in vain: this is what the request ran into.
            let at_limit = self.at_limit(tenant);
            emptied = self.make_room(tenant, &cut, own, least);
            let (now, soon) = self.available(tenant, &cut, own);
            if now < least {
                for extent in emptied {
                    self.state.pool.release_if_idle(extent);
                }
                if soon >= least || self.reclaim(want.priority, tenant, &cut, own, least) {
                    self.waits.lack(client, lack);
                    return Ok(Granted::Later);
                }
                return Err(self.busy(tenant, &cut, (least, now), at_limit));
            }
        }
        if self.steps_aside(client, lack, own, least) {
            emptied.into_iter().for_each(|extent| _ = self.state.pool.release_if_idle(extent));
            if least == 0 {
                // What is asked for ahead of need is nothing to wait for.
                return Ok(Granted::Blocks(Vec::new()));
            }
            self.waits.lack(client, lack);
            return Ok(Granted::Later);
        }
        let before = self.state.pool.extents_of(tenant);
        let taken = self.take(client, tenant, &cut, &want, room);
        let clean = self.state.pool.extents_of(tenant) > before;
        if !taken.is_empty() {
            self.waits.overtake(client, tenant, cut.format, clean);
        }
        emptied.into_iter().for_each(|extent| _ = self.state.pool.release_if_idle(extent));
        assert!(taken.len() as u64 >= least, "what was available has been taken");
        self.state.counters.granted += taken.len() as u64;
        Ok(Granted::Blocks(taken))
    }

    /// Takes what is there: all that presses, and beyond that what costs no extent and nobody has been promised.
    pub(super) fn take(
        &mut self,
        client: ClientId,
        tenant: Tenant,
        cut: &Cut,
        want: &Want,
        room: u64,
    ) -> Vec<Taken> {
        let now = self.available(tenant, cut, want.promised).0.max(want.least.into());
        let most = u64::from(want.want).min(now).min(room);
        let clean = self.state.pool.clean_extents().saturating_sub(self.kept_for_others(tenant));
        let elsewhere = self.promised_extents(tenant, Some(cut.format));
        let budget = clean.min(self.may_get(tenant)).saturating_sub(elsewhere);
        let before = self.state.pool.extents_of(tenant);
        let mut taken = Vec::with_capacity(most as usize);
        let mut near = want.near;
        let mut descriptors = Vec::new();
        let mut whole = self.whole_extents(cut, want, budget);
        while (taken.len() as u64) < most {
            let pressing = taken.len() < want.least as usize;
            let adopted = self.state.pool.extents_of(tenant) - before;
            let take = Take {
                tenant,
                client,
                cut: *cut,
                near,
                whole: whole > 0,
                new_extents: if pressing { budget.saturating_sub(adopted) } else { 0 },
                new_descriptors: (MAX_FDS - descriptors.len()) as u32,
            };
            let missing = u32::try_from(most).unwrap_or(u32::MAX) - taken.len() as u32;
            let Some(extent) = self.state.pool.take(&take, missing, &mut taken) else { break };
            whole -= u32::from(whole > 0 && near.is_none_or(|n| n.extent != extent));
            if self.state.pool.add_holder(extent, client) {
                descriptors.push(extent);
            }
            near = taken.last().map(|one| one.block.place);
        }
        self.fresh_descriptors.extend(descriptors);
        taken
    }

    /// How many clean extents a grant takes before it fills free places of others. A session that has, or gets, a whole
    /// extent's blocks leaves whole extents when it ends, if it does not share them; small ones fill up what the large ones
    /// leave. While a quarter of the pool is clean there is room to keep them apart; after that every place counts.
    fn whole_extents(&self, cut: &Cut, want: &Want, budget: u32) -> u32 {
        let pool = &self.state.pool;
        let spare = pool.clean_extents().saturating_sub(pool.extents().len() as u32 / 4);
        let wanted = (want.least / cut.slots).max(u32::from(want.has >= cut.slots && want.least > 0));
        wanted.min(spare).min(budget)
    }

    /// Blocks that the connection may still get by `limits.connection`.
    fn connection_room(&self, client: ClientId, cut: &Cut) -> u64 {
        let Some(most) = self.policy.bytes_per_connection else { return u64::MAX };
        let state = &self.state;
        let sessions = || self.client(client).sessions.iter().map(|id| &state.sessions[id]);
        let slot = |s: &super::Session| state.formats[&s.format].cut.slot_bytes;
        let credit = state.pool.credit_bytes(client);
        let entries: u64 = sessions().map(|s| s.table.len() as u64 * slot(s)).sum();
        let left = most.saturating_sub(credit + entries) / cut.slot_bytes;
        if left >= MAX_BLOCKS as u64 {
            return left;
        }
        // Near the bound it counts that several tables may hold one block.
        let held: BTreeMap<Place, u64> =
            sessions().flat_map(|s| s.table.iter().map(move |b| (b.place, slot(s)))).collect();
        let held = held.into_iter().filter(|(place, _)| !place.extent.is_copy()).map(|(_, bytes)| bytes);
        most.saturating_sub(credit + held.sum::<u64>()) / cut.slot_bytes
    }

    /// What an extent that nobody has a block in use of, cached ones apart, may be taken for: the tenant's own first,
    /// then those of others, lowest priority first, as long as they own more than their reserve.
    fn takeable(&self, tenant: Tenant, cut: &Cut, all: Owners) -> Owners {
        let own = |t: &Tenant| *t == tenant;
        let promised = |e: &ExtentId| {
            let owned = self.state.pool.extents()[e].owned();
            // Places that a promise may be kept from; blocks of a lost session are none.
            owned.is_some_and(|o| o.free + o.cached > 0 && self.promised(o.tenant, o.format) > 0)
        };
        let mut all: Vec<_> = all.into_iter().filter(|(_, e)| !promised(e)).collect();
        // Stable: within a tenant the order stays.
        // What nobody has to be asked for comes first.
        let held = |e: &ExtentId| !self.heap.revokes() && !self.state.pool.extents()[e].holders.is_empty();
        all.sort_by_key(|(t, e)| (!own(t), self.state.tenancy.of(*t).priority, *t, held(e)));
        let mut left: BTreeMap<Tenant, u32> = BTreeMap::new();
        all.retain(|(t, extent)| {
            let usable = |o: &crate::pool::Owned| o.format == cut.format && o.suspect == 0;
            if own(t) {
                return !self.state.pool.extents()[extent].owned().is_some_and(usable);
            }
            let left = left.entry(*t).or_insert_with(|| self.surplus(*t));
            let some = *left > 0;
            *left = left.saturating_sub(1);
            some
        });
        all
    }

    /// Extents without a block in use that could be taken, and then those with nothing but blocks that may be evicted.
    pub(super) fn candidates(&self, tenant: Tenant, cut: &Cut) -> (Owners, Owners) {
        let pool = &self.state.pool;
        let owner = |e: ExtentId| pool.extents()[&e].owned().map(|o| (o.tenant, e));
        let idle: Vec<_> = pool.idle(tenant, cut.format).into_iter().filter_map(owner).collect();
        let idle_first = idle.len();
        let evictable = |(_, e): &(Tenant, ExtentId)| {
            // Where nobody can be cut off, a block that may still be written waits until its writer says that it is not.
            let free_to_go = |o: &crate::pool::Owned| o.suspect == 0 || self.heap.revokes();
            pool.extents()[e].owned().is_some_and(free_to_go) && self.all_evictable(*e)
        };
        let cold = pool.tenants().flat_map(|t| pool.cold(t).map(move |e| (t, e))).filter(evictable);
        let all: Vec<_> = idle.iter().copied().chain(cold).collect();
        let idle: BTreeSet<ExtentId> = all[..idle_first].iter().map(|(_, e)| *e).collect();
        self.takeable(tenant, cut, all).into_iter().partition(|(_, e)| idle.contains(e))
    }

    /// Takes back extents in which nobody has a block in use, and evicts cached blocks, as many as are needed; nothing
    /// if all of that would not do. Returns extents that may have been emptied and are the tenant's still.
    pub(super) fn make_room(
        &mut self,
        tenant: Tenant,
        cut: &Cut,
        own: u32,
        least: u64,
    ) -> BTreeSet<ExtentId> {
        let (idle, cold) = self.candidates(tenant, cut);
        if self.reach(tenant, cut, own, idle.iter().chain(&cold).map(|(_, e)| *e)) + self.asked_blocks(cut)
            < least
        {
            // Nobody loses anything for a request that is refused all the same.
            return BTreeSet::new();
        }
        let mut emptied = BTreeSet::new();
        // Where holders must agree, the tenant's own blocks are there sooner.
        if !self.heap.revokes() {
            self.evict_own(tenant, cut, own, least, &mut emptied);
            // And so is what no client has any more: there is nobody to ask.
            let is_left = |(_, e): &&(Tenant, ExtentId)| self.state.pool.extents()[e].holders.is_empty();
            let left: Vec<ExtentId> = cold.iter().filter(is_left).map(|(_, e)| *e).collect();
            for extent in left {
                if self.lacks(tenant, cut, own, least) == 0 {
                    return emptied;
                }
                emptied.extend(self.evict_all_in(extent));
                self.take_back(extent);
                emptied.remove(&extent);
            }
        }
        for (_, extent) in idle {
            if self.lacks(tenant, cut, own, least) == 0 {
                return emptied;
            }
            self.take_back(extent);
        }
        if self.heap.revokes() {
            self.evict_own(tenant, cut, own, least, &mut emptied);
        }
        for (_, extent) in cold {
            if self.lacks(tenant, cut, own, least) == 0 {
                break;
            }
            let left = self.state.pool.extents()[&extent].owned().is_none();
            if left || (!self.heap.revokes() && self.asked_back.contains_key(&extent)) {
                // Taken already, or nobody answered last time: what is in it would be evicted in vain.
                continue;
            }
            emptied.extend(self.evict_all_in(extent));
            self.take_back(extent);
            emptied.remove(&extent);
        }
        emptied
    }

    /// Evicts as many of the tenant's own blocks as are missing, and notes their extents.
    fn evict_own(
        &mut self,
        tenant: Tenant,
        cut: &Cut,
        own: u32,
        least: u64,
        emptied: &mut BTreeSet<ExtentId>,
    ) {
        let missing = least.saturating_sub(self.available(tenant, cut, own).1);
        for _ in 0..missing.min(self.may_evict(tenant, cut, own)) {
            let Some(block) = self.state.prefixes.evict(tenant, cut.format) else { break };
            self.state.pool.evict(block.place);
            emptied.insert(block.place.extent);
        }
    }

    /// Blocks that the tenant could have if these extents were taken and all its cached blocks evicted.
    pub(super) fn reach(
        &self,
        tenant: Tenant,
        cut: &Cut,
        own: u32,
        extents: impl Iterator<Item = ExtentId>,
    ) -> u64 {
        let pool = &self.state.pool;
        let (mut mine, mut all, mut counted) = (0, 0, 0);
        for owned in extents.filter_map(|e| pool.extents()[&e].owned()) {
            mine += u32::from(owned.tenant == tenant);
            all += 1;
            if (owned.tenant, owned.format) == (tenant, cut.format) {
                counted += u64::from(owned.free + owned.cached);
            }
        }
        let may = self.extent_limit(tenant).saturating_add(mine).saturating_sub(self.charged_extents(tenant));
        let clean = (self.soon_there() + all).saturating_sub(self.kept_for_others(tenant));
        let extents = clean.min(may).saturating_sub(self.promised_extents(tenant, Some(cut.format)));
        let places = pool.free_places(tenant, cut.format) + self.state.prefixes.evictable(tenant, cut.format);
        let places = places.saturating_sub(counted);
        let promised = self.promised(tenant, cut.format) - u64::from(own);
        (places + u64::from(extents) * u64::from(cut.slots)).saturating_sub(promised)
    }

    /// Blocks that are missing, with those that will be there if everybody gives back what is asked for.
    fn lacks(&self, tenant: Tenant, cut: &Cut, own: u32, least: u64) -> u64 {
        let (now, soon) = self.available(tenant, cut, own);
        least.saturating_sub(now.max(soon + self.asked_blocks(cut)))
    }

    /// Evicts all blocks of an extent, with what continues them, and drops what lost sessions left there. Returns the
    /// extents that were touched.
    pub(super) fn evict_all_in(&mut self, extent: ExtentId) -> BTreeSet<ExtentId> {
        let mut touched = BTreeSet::new();
        let Some(owned) = self.state.pool.extents()[&extent].owned() else { return touched };
        let slots = owned.slots.len() as u32;
        for place in (0..slots).map(|slot| Place { extent, slot }) {
            for block in self.state.prefixes.evict_at(place) {
                self.state.pool.evict(block.place);
                touched.insert(block.place.extent);
            }
        }
        touched
    }

    /// Takes an extent without a block in use, or asks for it where the kernel does not let it be taken.
    pub(super) fn take_back(&mut self, extent: ExtentId) {
        if self.heap.revokes() {
            self.state.pool.drop_suspects(extent);
            let holders = self.state.pool.seize(extent);
            self.state.counters.seized += 1;
            self.tell_to_give_back(extent, holders, 0);
        } else if self.state.pool.release_if_idle(extent).is_none() {
            self.ask_for(extent);
        }
    }

    /// Whether the tenant has all that it may have while there is more.
    fn at_limit(&self, tenant: Tenant) -> bool {
        let pool = &self.state.pool;
        self.charged_extents(tenant) >= self.extent_limit(tenant)
            && pool.clean_extents() + pool.soon_clean() > 0
    }

    /// Says what would help, naming only the asker's own.
    fn busy(&self, tenant: Tenant, cut: &Cut, (needed, available): (u64, u64), at_limit: bool) -> Refused {
        let pool = &self.state.pool;
        let (owned, limit) = (pool.extents_of(tenant), self.extent_limit(tenant));
        let what = format!("{needed} blocks are needed, {available} can be granted now");
        if at_limit {
            let text = format!(
                "{what}: this tenant owns {owned} extents and its limit is {limit}; close or trim sessions, or have the limit raised"
            );
            return Refused::new(Fault::OverLimit, text).numbers(needed, available);
        }
        let own = u64::from(owned) * u64::from(cut.slots)
            - pool.free_places(tenant, cut.format).min(u64::from(owned) * u64::from(cut.slots));
        let text = format!(
            "{what}: the pool is in use (about {own} blocks by this tenant); close or trim sessions, or try again later"
        );
        Refused::new(Fault::Busy, text).numbers(needed, available)
    }

    /// Puts a grant into a reply: descriptors that the client has not got yet, and blocks.
    pub(super) fn hand_over(&mut self, client: ClientId, tokens: u64, taken: &[Taken]) -> Answer {
        let scrub: Vec<BlockId> = taken
            .iter()
            .filter(|t| match t.written_by {
                None => false,
                Some(before) => before != client || self.policy.scrub_always,
            })
            .map(|t| t.block)
            .collect();
        let blocks = taken.iter().map(|t| {
            let zero = t.written_by.is_none() || scrub.contains(&t.block);
            (t.block, if zero { wire::ZERO } else { 0 })
        });
        let mut reply = self.grant_reply(tokens, blocks.collect());
        reply.scrub = scrub;
        reply.granted = taken.iter().map(|t| t.block).collect();
        Answer::Now(reply)
    }

    /// A reply that hands over blocks with flags, and the descriptors collected for it.
    pub(super) fn grant_reply(&mut self, tokens: u64, blocks: Vec<(BlockId, u32)>) -> Reply {
        let extents: Vec<ExtentId> = std::mem::take(&mut self.fresh_descriptors).into_iter().collect();
        let mut reply = Reply::default();
        reply.body.put(&Grant {
            tokens: tokens.into(),
            extents: (extents.len() as u32).into(),
            blocks: (blocks.len() as u32).into(),
        });
        let alone = if self.imports_need_one_writer() { wire::EXTENT_ALONE } else { 0 };
        for e in &extents {
            let flags = if e.is_copy() { wire::READ_ONLY } else { alone };
            reply.body.put(&ExtentInfo { extent: e.0.into(), flags: flags.into() });
        }
        for (block, flags) in blocks {
            reply.body.put(&GrantedBlock { block: block.into(), flags: flags.into(), reserved: 0.into() });
        }
        reply.extents = extents;
        reply
    }
}
