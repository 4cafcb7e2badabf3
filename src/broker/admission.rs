//! Admission and reclaim: what a session may count on, and who has to make room for it.
//!
//! Owns no state beyond the promises in the sessions and their sums. Invariants: a promise is backed at every moment by
//! places that are free, blocks that can be evicted, or clean extents that nobody else is given, so growing within it is
//! never refused; a session loses its blocks to another one only if its priority is lower, it was asked, and the
//! deadline has passed; a block that a process which is alive may still write is not granted again, but held until the
//! process agrees or ends, or until its whole extent is emptied under it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::waits::Lack;
use super::walks::Without;
use super::{Broker, Refused, Reply, Session, State};
use crate::id::{BlockId, ClientId, ExtentId, FormatId, SessionId, Tenant};
use crate::pool::{Block, Cut};
use crate::seldom::seldom;
use crate::wire::{self, Event, Fault, Verdict};

/// What came of a request to be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decision {
    pub verdict: Verdict,
    /// Blocks that would have to go, or that are missing.
    pub blocks: u64,
}

impl Broker {
    /// Blocks of a format that have been promised to a tenant's sessions and not granted yet.
    pub(super) fn promised(&self, tenant: Tenant, format: FormatId) -> u64 {
        self.state.promises.get(&(tenant, format)).copied().unwrap_or(0)
    }

    /// Tenants with promises.
    pub(super) fn promised_tenants(&self) -> impl Iterator<Item = Tenant> {
        self.state.promises.keys().map(|(tenant, _)| *tenant)
    }

    /// Extents that the tenant needs, beyond those that it has, for what has been promised to its sessions.
    pub(super) fn promised_extents(&self, tenant: Tenant, except: Option<FormatId>) -> u32 {
        let all = (tenant, FormatId(0))..=(tenant, FormatId(u32::MAX));
        let needed = |(&(_, format), &blocks): (&(Tenant, FormatId), &u64)| {
            let places =
                self.state.pool.free_places(tenant, format) + self.state.prefixes.evictable(tenant, format);
            let slots = self.state.formats.get(&format).map_or(1, |f| f.cut.slots);
            u32::try_from(blocks.saturating_sub(places).div_ceil(slots.into())).unwrap_or(u32::MAX)
        };
        let others = self.state.promises.range(all).filter(|((_, f), _)| Some(*f) != except);
        others.map(needed).fold(0, u32::saturating_add)
    }

    /// Sets what is promised to a session.
    fn promise(&mut self, id: SessionId, blocks: u32) {
        let Some(s) = self.state.sessions.get_mut(&id) else { return };
        let (key, before) = ((s.tenant, s.format), std::mem::replace(&mut s.promised, blocks));
        let sum = self.state.promises.entry(key).or_default();
        *sum = *sum + u64::from(blocks) - u64::from(before);
        if *sum == 0 {
            self.state.promises.remove(&key);
        }
    }

    /// The session ends, or goes on without a promise.
    pub(super) fn end_promise(&mut self, id: SessionId) {
        self.promise(id, 0);
        if let Some(s) = self.state.sessions.get_mut(&id) {
            s.admitted = 0;
        }
    }

    /// Blocks have been granted to the session.
    pub(super) fn use_promise(&mut self, id: SessionId, blocks: usize) {
        let promised = self.state.sessions.get(&id).map_or(0, |s| s.promised);
        self.promise(id, promised.saturating_sub(u32::try_from(blocks).unwrap_or(u32::MAX)));
    }

    /// Blocks have become free by what the session gave back: it may have as many again.
    pub(super) fn restore_promise(&mut self, id: SessionId, blocks: u32) {
        let Some(s) = self.state.sessions.get(&id) else { return };
        self.promise(id, s.promised.saturating_add(blocks).min(s.admitted));
    }

    /// Sums the promises anew and compares, and looks whether they are backed.
    pub(super) fn check_promises(&self) -> Result<(), String> {
        let mut sums: BTreeMap<_, u64> = BTreeMap::new();
        for s in self.state.sessions.values().filter(|s| s.promised > 0) {
            *sums.entry((s.tenant, s.format)).or_default() += u64::from(s.promised);
        }
        let noted = &self.state.promises;
        let mut keys = noted.keys().chain(sums.keys());
        match keys.find(|key| noted.get(key) != sums.get(key)) {
            Some(key) => {
                let (Tenant(uid), format) = key;
                let (noted, sum) = (noted.get(key).unwrap_or(&0), sums.get(key).unwrap_or(&0));
                Err(format!(
                    "{noted} blocks of format {} are promised to uid {uid}, its sessions say {sum}",
                    format.0
                ))
            }
            None => Ok(()),
        }
    }

    /// Decides about a session that will need `blocks` more than its table has. `None`: when the worker is done.
    pub(super) fn decide(&mut self, id: SessionId, blocks: u32, evict: bool) -> Option<Decision> {
        let s = &self.state.sessions[&id];
        let (client, tenant, priority, has) = (s.client, s.tenant, s.priority, self.in_pool(s) as u64);
        let (promised, cut) = (s.promised, self.state.formats[&s.format].cut);
        let lack = Lack { tenant, format: cut.format, priority };
        let least = u64::from(blocks);
        let decision = |verdict, blocks| Some(Decision { verdict, blocks });
        if blocks == 0 {
            // To ask for nothing more is to give the promise back, whatever the limits are by now.
            self.admit(id, 0);
            return decision(Verdict::Admitted, 0);
        }
        let capacity = self.capacity(tenant, &cut);
        if has + least > capacity {
            return decision(Verdict::NeverFits, has + least - capacity);
        }
        let (now, soon) = self.available(tenant, &cut, promised);
        if now >= least {
            return self.admit_in_turn(id, blocks, lack);
        }
        if soon >= least {
            self.waits.lack(client, lack);
            return None;
        }
        let lacking = least - soon;
        let evictable = self.may_evict(tenant, &cut, promised);
        if evictable >= lacking && now + evictable >= least {
            if !evict {
                return decision(Verdict::AfterEviction, lacking);
            }
            // The blocks stay findable until they are really needed.
            return self.admit_in_turn(id, blocks, lack);
        }
        let emptied = self.make_room(tenant, &cut, promised, least);
        let (now, soon) = self.available(tenant, &cut, promised);
        // Only then: an extent that leaves the tenant is on its way for a while, and what is there already suffices.
        emptied.into_iter().for_each(|extent| _ = self.state.pool.release_if_idle(extent));
        if now >= least {
            return self.admit_in_turn(id, blocks, lack);
        }
        if soon >= least || self.reclaim(priority, tenant, &cut, promised, least) {
            self.waits.lack(client, lack);
            return None;
        }
        let lacking = least - soon;
        let mine = self.held_by_sessions(tenant, cut.format, id);
        decision(if mine >= lacking { Verdict::WhenYoursFree } else { Verdict::Busy }, lacking)
    }

    /// Promises what is there, unless a request that is due could use it: then when that has been answered.
    fn admit_in_turn(&mut self, id: SessionId, blocks: u32, lack: Lack) -> Option<Decision> {
        let s = &self.state.sessions[&id];
        let (client, own) = (s.client, s.promised);
        if self.steps_aside(client, lack, own, blocks.into()) {
            self.waits.lack(client, lack);
            return None;
        }
        let before = self.promised_extents(lack.tenant, None);
        self.admit(id, blocks);
        let clean = self.promised_extents(lack.tenant, None) > before;
        self.waits.overtake(client, lack.tenant, lack.format, clean);
        Some(Decision { verdict: Verdict::Admitted, blocks: 0 })
    }

    fn admit(&mut self, id: SessionId, blocks: u32) {
        self.promise(id, blocks);
        if let Some(s) = self.state.sessions.get_mut(&id) {
            s.admitted = blocks;
        }
    }

    /// Blocks that other sessions of the tenant hold, or have been promised. Looks at the pool and at one table, not at all
    /// tables: forks name the same blocks again and again.
    pub(super) fn held_by_sessions(&self, tenant: Tenant, format: FormatId, but: SessionId) -> u64 {
        let State { pool, sessions, .. } = &self.state;
        // The pool counts tables and windows.
        let tables = |block: &BlockId| match pool.check_claim(*block) {
            Ok(Block::Held { refs, .. }) => refs - self.windows.over(block.place),
            _ => 0,
        };
        let owned = pool.extents().iter().filter_map(|(id, e)| Some((*id, e.owned()?)));
        let owned = owned.filter(|(_, o)| (o.tenant, o.format) == (tenant, format));
        let held = owned.flat_map(|(id, o)| o.blocks(id, |b| matches!(b, Block::Held { .. })));
        let held = held.filter(|block| tables(block) > 0).count();
        // A table names a block once: what is in this one and in one only is in no other.
        let alone = sessions.get(&but).map_or(0, |s| s.table.iter().filter(|b| tables(b) == 1).count());
        let of_others =
            |(id, s): &(&SessionId, &Session)| **id != but && (s.tenant, s.format) == (tenant, format);
        let promised = sessions.iter().filter(of_others).map(|(_, s)| u64::from(s.promised));
        (held - alone) as u64 + promised.sum::<u64>()
    }

    /// Asks sessions of lower priority to make room, if that would do. They are asked once; when their time is up they
    /// end ([`Broker::tick`]).
    pub(super) fn reclaim(&mut self, priority: u8, tenant: Tenant, cut: &Cut, own: u32, least: u64) -> bool {
        let Some(more) = self.who_must_end(priority, tenant, cut, own, least) else { return false };
        if !more.is_empty() {
            self.others_are_asked();
        }
        let deadline = self.absent.clock + Duration::from_millis(self.policy.reclaim_ms.into());
        for id in more {
            self.reclaims.insert(id, deadline);
            self.state.counters.reclaims += 1;
            let (session, deadline_ms) = (id.number.into(), self.policy.reclaim_ms.into());
            let body = wire::ReclaimSession { session, deadline_ms, reserved: 0.into() };
            self.tell(self.state.sessions[&id].client, Event::ReclaimSession, id.number, &body);
        }
        true
    }

    /// The sessions whose end would do, beside those that were asked already: the least important, then the youngest, as few as
    /// possible. `None` if all of them would not do, and if enough is on its way: its holders have only to give it back.
    fn who_must_end(
        &self,
        priority: u8,
        tenant: Tenant,
        cut: &Cut,
        own: u32,
        least: u64,
    ) -> Option<Vec<SessionId>> {
        // What the tenant could use as it is does not count.
        let usable = |e: &ExtentId| {
            self.state.pool.extents()[e].owned().is_some_and(|o| {
                (o.tenant, o.format) == (tenant, cut.format) && (o.free + o.cached) as usize == o.slots.len()
            })
        };
        let idle: Vec<ExtentId> = self.emptied(Without::None).into_iter().filter(|e| !usable(e)).collect();
        let enough =
            |emptied: &Emptied| self.reach(tenant, cut, own, emptied.extents.iter().copied()) >= least;
        let would_do = |without| {
            let all = self.emptied(without).into_iter().filter(|e| !usable(e));
            enough(&Emptied::new(self, tenant, all))
        };
        if would_do(Without::None) || !would_do(Without::Below(priority)) {
            return None;
        }
        if would_do(Without::Asked(priority)) {
            return Some(Vec::new());
        }
        let victims = self.state.sessions.iter();
        let victims = victims.filter(|(_, s)| s.priority < priority && !s.table.is_empty());
        let mut order: Vec<_> = victims
            .map(|(id, s)| (!self.reclaims.contains_key(id), s.priority, std::cmp::Reverse(s.born), *id))
            .collect();
        order.sort_unstable();
        let mut emptied = Emptied::new(self, tenant, idle);
        let mut chosen = Vec::new();
        for (id, extents) in self.endings(order.into_iter().map(|(.., id)| id).collect()) {
            chosen.push(id);
            let before = emptied.extents.len();
            emptied.count(self, extents);
            if emptied.extents.len() > before && enough(&emptied) {
                chosen.retain(|id| !self.reclaims.contains_key(id));
                return Some(chosen);
            }
        }
        None
    }

    /// When the next session's time is up.
    pub(super) fn next_reclaim(&self) -> Option<Instant> {
        self.reclaims.values().min().copied()
    }

    /// Sessions that were asked to make room and whose time is up end, if somebody who goes before them still waits for room. Else
    /// what they were asked lapses, and whoever needs it next asks again: else one that asks and hangs up ends them.
    pub(super) fn end_late_sessions(&mut self, now: Instant) {
        let late: Vec<_> = self.reclaims.iter().filter(|(_, at)| **at <= now).map(|(id, _)| *id).collect();
        if late.is_empty() {
            return;
        }
        let highest = self.waits.highest_priority();
        for id in late {
            let priority = self.state.sessions.get(&id).map(|s| s.priority);
            if highest > priority {
                self.lose_session(id);
            } else {
                self.reclaims.remove(&id);
                self.others_are_asked();
            }
        }
        self.settle();
    }

    /// Ends a session whose process may still write in its blocks: those that nobody else holds are granted to nobody
    /// until the process agrees, ends, or is cut off.
    fn lose_session(&mut self, id: SessionId) {
        self.reclaims.remove(&id);
        self.stirred = true;
        self.end_promise(id);
        let Some(session) = self.state.sessions.remove(&id) else { return };
        self.tables.change(session.tenant, session.table.len(), 0);
        self.state.counters.sessions_lost += 1;
        let mut kept = Vec::new();
        for block in session.table.iter().rev() {
            if self.state.pool.suspect(block.place, session.client) {
                kept.push(*block);
            } else {
                self.let_go(*block, None);
            }
        }
        if let Some(client) = self.state.clients.get_mut(&session.client) {
            client.sessions.remove(&id);
            client.lost.insert(id, kept);
        }
        self.check_windows(id);
        seldom!(info, "{id} of uid {} did not make room in time and has ended", session.tenant.0);
        let body = wire::Opened { session: id.number.into() };
        self.tell(session.client, Event::SessionLost, id.number, &body);
    }

    /// The client knows that it has lost the session, and does not write in its blocks any more.
    pub(super) fn forget_lost(&mut self, client: ClientId, id: SessionId) -> bool {
        let lost = self.state.clients.get_mut(&client).and_then(|c| c.lost.remove(&id));
        let Some(blocks) = lost else { return false };
        self.free_suspects(client, blocks);
        self.reap_windows_of(id);
        true
    }

    pub(super) fn free_suspects(&mut self, client: ClientId, blocks: Vec<BlockId>) {
        for block in blocks {
            // The extent may have been emptied meanwhile; then it has another name.
            if self.state.pool.check_claim(block) == Ok(Block::Suspect(client)) {
                self.state.pool.clear_suspect(block.place);
                self.state.pool.release_if_idle(block.place.extent);
            }
        }
    }

    /// The verb `admit`.
    pub(super) fn admit_verb(
        &mut self,
        client: ClientId,
        id: SessionId,
        admit: &wire::Admit,
    ) -> Result<Option<Reply>, Refused> {
        let s = self.session(client, id)?;
        let profile = &self.state.formats[&s.format].profile;
        let tokens = admit.tokens.get();
        let needed = profile.blocks_for(tokens);
        // A block that is shared and not full is copied before it is written.
        let copied = u64::from(s.tokens < u64::from(s.sealed()) * u64::from(profile.tokens_per_block()));
        let more = (needed + copied).saturating_sub(u64::from(s.end()));
        let Ok(more) = u32::try_from(more) else {
            let text = format!("{tokens} tokens are more than one sequence can have");
            return Err(Refused::new(Fault::NeverFits, text));
        };
        let Some(decision) = self.decide(id, more, admit.flags.get() & wire::MAY_EVICT != 0) else {
            return Ok(None);
        };
        let mut reply = Reply::default();
        reply.body.put(&wire::Admission {
            verdict: (decision.verdict as u16 as u32).into(),
            promised: self.state.sessions[&id].promised.into(),
            blocks: decision.blocks.into(),
        });
        Ok(Some(reply))
    }
}

/// What a tenant could have of extents that are without a block in use.
struct Emptied {
    /// For whom.
    tenant: Tenant,
    /// How many extents other tenants can still spare.
    surplus: BTreeMap<Tenant, u32>,
    /// What it could have, in the order in which it is found.
    extents: Vec<ExtentId>,
}

impl Emptied {
    fn new(broker: &Broker, tenant: Tenant, extents: impl IntoIterator<Item = ExtentId>) -> Self {
        let mut emptied = Emptied { tenant, surplus: BTreeMap::new(), extents: Vec::new() };
        emptied.count(broker, extents);
        emptied
    }

    /// These are without a block in use. The tenant gets others' only as far as these have more than they must keep.
    fn count(&mut self, broker: &Broker, extents: impl IntoIterator<Item = ExtentId>) {
        for extent in extents {
            let Some(owner) = broker.state.pool.extents()[&extent].owned().map(|o| o.tenant) else {
                continue;
            };
            let surplus = self.surplus.entry(owner).or_insert_with(|| broker.surplus(owner));
            if owner == self.tenant || *surplus > 0 {
                *surplus = surplus.saturating_sub(1);
                self.extents.push(extent);
            }
        }
    }
}
