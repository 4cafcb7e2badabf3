//! Pressure: what the broker does when the machine is short of memory, and when it is not any more.
//!
//! Owns no state beyond the loans in [`lent`](super::lent). Invariants: sessions lose nothing; what tenants are
//! guaranteed stays; the pool keeps its floor; and what was given back comes back when somebody asks for blocks or when
//! the pressure is gone, if the kernel has memory for it then, and is missing and asked for again if not.

use super::{Broker, Waiting};
use crate::seldom::seldom;

impl Broker {
    /// The machine is short of memory: gives half of what can be given, so that a short spell costs little and a long one
    /// gets everything within a few calls. Cached prefixes go first; what they leave empty can go back to the kernel at the
    /// next call. Returns the extents that go back to the kernel.
    pub fn pressed(&mut self) -> u32 {
        self.state.counters.pressed += 1;
        let extents = self.can_give_back().div_ceil(2);
        for _ in 0..self.state.prefixes.evictable_of_all().div_ceil(2) {
            let Some(block) = self.state.prefixes.evict_any() else { break };
            self.state.pool.evict(block.place);
            self.state.pool.release_if_idle(block.place.extent);
        }
        let given = (0..extents).map_while(|_| self.lend_elastic()).count() as u32;
        self.state.counters.given_back += u64::from(given);
        if given > 0 {
            seldom!(info, "memory is short: {given} free extents go back to the kernel");
        }
        self.settle();
        given
    }

    /// The machine has memory again: what was given back is asked for. Returns how many extents.
    pub fn relieved(&mut self) -> u32 {
        let extents = self.elastic_extents();
        self.recall(extents);
        self.settle();
        extents
    }

    /// Whether a call of [`pressed`](Self::pressed) would give anything.
    pub fn has_slack(&self) -> bool {
        self.state.prefixes.evictable_of_all() > 0 || self.can_give_back() > 0
    }

    /// While a request waits for extents and none is on its way, the next one that was given back is asked for.
    pub(super) fn recall_for_waiting(&mut self) {
        let none_comes = self.state.pool.soon_clean() == 0 && self.expected_back() == 0;
        if self.elastic_extents() > 0 && none_comes && self.somebody_waits() {
            self.recall(1);
        }
    }

    fn somebody_waits(&self) -> bool {
        self.waiting.values().any(|w| matches!(w, Waiting::Extents(_)))
    }

    /// Free extents above the floor that nobody is guaranteed.
    fn can_give_back(&self) -> u32 {
        // Those that have come for a request which waits for more are spoken for.
        if !self.policy.elastic || self.somebody_waits() {
            return 0;
        }
        let pool = &self.state.pool;
        let there = pool.extents().len() as u32 - pool.lent();
        self.spare().saturating_sub(self.owed_to_holds()).min(there.saturating_sub(self.policy.floor_extents))
    }
}
