//! Rest: extents that a tenant has not used for a while go back to the pool before anybody has to ask for them.
//!
//! What a session leaves behind is most often what the next one needs, so an extent stays with its tenant for a moment. After
//! that it only costs: others wait for consent to it where the kernel cannot take it, and none of it can be given back to
//! the kernel.
//!
//! Owns which extents were found idle, and when to look again. Invariants: nothing is looked at while no extent is idle
//! (`tests/client.rs::an_extent_that_nobody_has_used_for_a_while_goes_back_to_the_pool`); an extent whose holders do not answer
//! is asked for once, and again only after it has been used; what was promised to a session stays where it is.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Broker;
use crate::id::ExtentId;

/// Idle extents, each with its life: whoever has used one since has begun another.
type Lives = BTreeMap<ExtentId, u64>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// Found at the last look.
    found: Lives,
    /// Asked for, and still there.
    refused: Lives,
    next_look: Option<Instant>,
}

impl Broker {
    /// When to look next.
    pub(super) fn next_rest(&self) -> Option<Instant> {
        self.rest.next_look
    }

    /// After every change: sees to it that idle extents are looked at.
    pub(super) fn watch_idle(&mut self) {
        if self.rest.next_look.is_some() || self.policy.rest_ms == 0 {
            return;
        }
        if self.at_rest().next().is_some() {
            let wait = Duration::from_millis(self.policy.rest_ms.into());
            self.rest.next_look = Some(self.absent.clock + wait);
        }
    }

    /// Idle extents with their lives, but for those that have been asked for already and those that a promise is kept from.
    fn at_rest(&self) -> impl Iterator<Item = (ExtentId, u64)> {
        let idle = self.state.pool.all_idle().filter(|(_, o)| self.promised(o.tenant, o.format) == 0);
        let lives = idle.map(|(extent, _)| (extent, self.state.pool.extents()[&extent].last_generation));
        lives.filter(|(extent, life)| self.rest.refused.get(extent) != Some(life))
    }

    /// Takes back what was idle at the last look and is so still.
    pub(super) fn end_rest(&mut self, now: Instant) {
        if self.rest.next_look.is_none_or(|at| at > now) {
            return;
        }
        self.rest.next_look = None;
        let found: Lives = self.at_rest().collect();
        let before = std::mem::replace(&mut self.rest.found, found);
        let still: Vec<(ExtentId, u64)> =
            before.into_iter().filter(|(e, life)| self.rest.found.get(e) == Some(life)).collect();
        for (extent, life) in still {
            self.rest.found.remove(&extent);
            self.take_back(extent);
            // Who has not answered lately is left in peace for a while (consent): then it is asked at a later look.
            if self.state.pool.is_wanted_back(extent) {
                self.rest.refused.insert(extent, life);
            }
        }
        let pool = &self.state.pool;
        let is_there =
            |e: &ExtentId, life: &u64| pool.extents().get(e).is_some_and(|x| x.last_generation == *life);
        self.rest.refused.retain(|e, life| is_there(e, life));
        self.settle();
    }
}
