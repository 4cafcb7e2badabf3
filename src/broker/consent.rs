//! Consent: asking clients for extents that they hold and do not use, where the kernel cannot take them.
//!
//! Owns what has been asked and when. Invariants:
//! - only an extent without a block in use is asked for, and no block of it is granted while it is asked for;
//! - the request is withdrawn when its owner needs blocks and nothing else can serve it, and rests after a deadline
//!   without an answer, each time for longer: a client that does not answer keeps what it has;
//! - a client that was told to close an extent gets its descriptor again with the next block of it, whichever of its
//!   answer and that grant is under way first.

use std::time::{Duration, Instant};

use super::Broker;
use crate::id::{ClientId, ExtentId, Tenant};
use crate::pool::Cut;
use crate::seldom::seldom;
use crate::wire::{self, Event};

/// How long a client may take to give back an extent that is asked back.
const DEADLINE: Duration = Duration::from_millis(2000);
/// How long one that did not answer is left in peace at most.
const LONGEST_REST: Duration = Duration::from_secs(64);

/// One extent that was asked for.
#[derive(Debug)]
pub(super) struct Asked {
    /// The deadline; `None` when it has passed without an answer.
    until: Option<Instant>,
    /// Then it is not asked for again before this.
    rests_until: Instant,
    rest: Duration,
}

impl Broker {
    /// Requests whose deadline has passed come to rest: the owner may have blocks of these extents again.
    pub(super) fn rest_unanswered(&mut self) {
        let now = self.absent.clock;
        for (extent, asked) in &mut self.asked_back {
            if asked.until.is_some_and(|t| t <= now) {
                asked.until = None;
                asked.rests_until = now + asked.rest;
                asked.rest = (asked.rest * 2).min(LONGEST_REST);
                self.state.pool.let_back(*extent);
                seldom!(info, "{extent} was asked back and nobody answered; it stays where it is");
            }
        }
    }

    /// Extents that are asked for now.
    fn asked_extents(&self) -> usize {
        // One whose last holder has just gone has come back already, and is counted where it is now.
        let is_asked = |(extent, asked): &(&ExtentId, &Asked)| {
            asked.until.is_some() && self.state.pool.is_wanted_back(**extent)
        };
        self.asked_back.iter().filter(is_asked).count()
    }

    /// Blocks of this cut that will be there if everybody gives back what is asked for now.
    pub(super) fn asked_blocks(&self, cut: &Cut) -> u64 {
        self.asked_extents() as u64 * u64::from(cut.slots)
    }

    /// The tenant needs blocks that nothing else can give: what it was asked for stays with it, as much as is needed.
    /// Nothing is withdrawn if that would not be enough.
    pub(super) fn withdraw(&mut self, tenant: Tenant, cut: &Cut, own_promise: u32, least: u64) {
        let own = |(id, o): (ExtentId, &crate::pool::Owned)| {
            ((o.tenant, o.format) == (tenant, cut.format)).then_some(id)
        };
        let own: Vec<_> = self.state.pool.wanted_back().filter_map(own).collect();
        if self.available(tenant, cut, own_promise).0 + own.len() as u64 * u64::from(cut.slots) < least {
            return;
        }
        for extent in own {
            if self.available(tenant, cut, own_promise).0 >= least {
                return;
            }
            self.asked_back.remove(&extent);
            self.state.pool.let_back(extent);
        }
    }

    /// Asks all holders of an extent without a block in use for it. `false` while it rests.
    pub(super) fn ask_for(&mut self, extent: ExtentId) -> bool {
        let now = self.absent.clock;
        let asked =
            self.asked_back.entry(extent).or_insert(Asked { until: None, rests_until: now, rest: DEADLINE });
        if asked.until.is_some() || asked.rests_until > now {
            return false;
        }
        asked.until = Some(now + DEADLINE);
        let holders = self.state.pool.want_back(extent);
        self.tell_to_give_back(extent, holders, DEADLINE.as_millis() as u32);
        true
    }

    /// The event `give back extent`. Deadline 0: it is gone already.
    pub(super) fn tell_to_give_back(
        &mut self,
        extent: ExtentId,
        holders: impl IntoIterator<Item = ClientId>,
        deadline_ms: u32,
    ) {
        for to in holders {
            let body = wire::GiveBack { extent: extent.0.into(), deadline_ms: deadline_ms.into() };
            self.tell(to, Event::GiveBack, 0, &body);
        }
    }

    /// After a restart nobody knows what was asked and when: it is asked again when it is needed.
    pub(super) fn forget_requests(&mut self) {
        let all: Vec<_> = self.state.pool.wanted_back().map(|(id, _)| id).collect();
        for extent in all {
            self.state.pool.let_back(extent);
        }
    }

    /// Whether what is asked for is what the pool keeps back.
    pub(super) fn check_consent(&self) -> Result<(), String> {
        for (extent, _) in self.state.pool.wanted_back() {
            if self.asked_back.get(&extent).is_none_or(|a| a.until.is_none()) {
                return Err(format!("{extent} is kept back and nobody is asked for it"));
            }
        }
        let is_kept = |e: &ExtentId| self.state.pool.is_wanted_back(*e);
        match self.asked_back.iter().find(|(id, a)| a.until.is_some() && !is_kept(id)) {
            Some((id, _)) => Err(format!("{id} is asked for and blocks of it can be granted")),
            None => Ok(()),
        }
    }
}
