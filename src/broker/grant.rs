//! Grants: which blocks a client gets, and what is done when there are none.
//!
//! Owns no state. Invariant: a grant hands over all of `least` blocks or none, never more than the tenant's limit, and
//! takes a new extent only for blocks without which the grant would be of no use.

use std::collections::BTreeSet;

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
}

/// What came of it.
pub(super) enum Granted {
    Blocks(Vec<Taken>),
    Later,
}

impl Broker {
    /// Extents that the tenant may own.
    pub(super) fn extent_limit(&self, tenant: Tenant) -> u32 {
        let own = self.policy.extents_of.get(&tenant).copied();
        own.or(self.policy.extents_per_tenant).unwrap_or(u32::MAX)
    }

    /// The most blocks of a format that the tenant could ever hold.
    pub(super) fn capacity(&self, tenant: Tenant, cut: &Cut) -> u64 {
        // Those that were lent count: they come back. So do those that are on their way.
        let extents = self.state.pool.extents().len() as u32 + self.expected_back();
        let extents = extents.min(self.extent_limit(tenant));
        extents as u64 * u64::from(cut.slots)
    }

    /// Blocks that could be granted to the tenant now, and how many once the worker has renewed what waits for it.
    pub(super) fn available(&self, tenant: Tenant, cut: &Cut) -> (u64, u64) {
        let pool = &self.state.pool;
        let may = self.extent_limit(tenant).saturating_sub(self.charged_extents(tenant));
        let blocks = |extents: u32| u64::from(extents.min(may)) * u64::from(cut.slots);
        let free = pool.free_places(tenant, cut.format);
        let clean = pool.clean_extents();
        (free + blocks(clean), free + blocks(self.soon_there() + self.elastic_extents()))
    }

    /// Clean extents, those that become clean, and those that come back from a loan, but not those that holds wait for.
    fn soon_there(&self) -> u32 {
        let pool = &self.state.pool;
        let soon = pool.clean_extents() + pool.soon_clean() + self.expected_back();
        soon.saturating_sub(self.owed_to_holds())
    }

    pub(super) fn grant(&mut self, client: ClientId, want: Want) -> Result<Granted, Refused> {
        let tenant = self.client(client).tenant;
        let cut = self.format(client, want.format)?.cut;
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
        let least = u64::from(want.least);
        self.rest_unanswered();
        if self.available(tenant, &cut).1 < least {
            self.withdraw(tenant, &cut, least);
        }
        if self.available(tenant, &cut).0 < least {
            self.make_room(tenant, &cut, least);
            let (now, soon) = self.available(tenant, &cut);
            if now < least && soon >= least {
                return Ok(Granted::Later);
            }
            if now < least {
                return Err(self.busy(tenant, &cut, least, now));
            }
        }
        let mut taken = Vec::with_capacity(want.want as usize);
        let mut near = want.near;
        let mut descriptors = BTreeSet::new();
        while taken.len() < want.want as usize {
            let pressing = taken.len() < want.least as usize;
            let may = self.extent_limit(tenant).saturating_sub(self.charged_extents(tenant));
            let take = Take {
                tenant,
                client,
                cut,
                near,
                new_extents: if pressing { may } else { 0 },
                new_descriptors: (MAX_FDS - descriptors.len()) as u32,
            };
            let Some(one) = self.state.pool.take(&take) else { break };
            let extent = one.block.place.extent;
            if self.state.pool.add_holder(extent, client) {
                descriptors.insert(extent);
            }
            near = Some(one.block.place);
            taken.push(one);
        }
        assert!(taken.len() as u64 >= least, "what was available has been taken");
        self.state.counters.granted += taken.len() as u64;
        self.fresh_descriptors.extend(descriptors);
        Ok(Granted::Blocks(taken))
    }

    /// Takes back extents in which nobody has a block in use, as many as are needed.
    fn make_room(&mut self, tenant: Tenant, cut: &Cut, least: u64) {
        let pool = &self.state.pool;
        let is_own = |e: &ExtentId| pool.extents()[e].owned().is_some_and(|o| o.tenant == tenant);
        // The tenant's own first: at its limit, nothing else helps.
        let (own, others): (Vec<_>, Vec<_>) = pool.idle(tenant, cut.format).into_iter().partition(is_own);
        let may = self.extent_limit(tenant).saturating_sub(self.charged_extents(tenant) - own.len() as u32);
        let idle = self.soon_there() + self.elastic_extents() + (own.len() + others.len()) as u32;
        let reach = pool.free_places(tenant, cut.format) + u64::from(idle.min(may)) * u64::from(cut.slots);
        if reach + self.asked_blocks(cut) < least {
            // Nobody loses an extent for a request that is refused all the same.
            return;
        }
        for extent in own.into_iter().chain(others) {
            if self.available(tenant, cut).1 + self.asked_blocks(cut) >= least {
                return;
            }
            if self.heap.revokes() {
                let holders = self.state.pool.seize(extent);
                self.state.counters.seized += 1;
                self.tell_to_give_back(extent, holders, 0);
            } else {
                self.ask_for(extent);
            }
        }
    }

    /// Says what would help, naming only the asker's own.
    fn busy(&self, tenant: Tenant, cut: &Cut, needed: u64, available: u64) -> Refused {
        let pool = &self.state.pool;
        let (owned, limit) = (pool.extents_of(tenant), self.extent_limit(tenant));
        let at_limit = self.charged_extents(tenant) >= limit && pool.clean_extents() + pool.soon_clean() > 0;
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
        for e in &extents {
            reply.body.put(&ExtentInfo { extent: e.0.into(), reserved: 0.into() });
        }
        for (block, flags) in blocks {
            reply.body.put(&GrantedBlock { block: block.into(), flags: flags.into(), reserved: 0.into() });
        }
        reply.extents = extents;
        reply
    }
}
