//! Memory that is not there just now: extents that somebody holds to whom they do not belong, and extents that the kernel
//! had no memory for.
//!
//! Owns the buffers of extents in quarantine, and when to look again. Invariants:
//! - an extent whose tenant is gone and that others still hold is nobody's: it is booked as quarantined, shown with whom
//!   it was granted to last, and looked at again until it comes back; it is never granted and never forgotten;
//! - extents that are missing from what was wanted are asked of the kernel again, one at a time;
//! - extents that a tenant keeps in quarantine count against its limit: nobody gains by keeping what it gave back;
//! - there is a time to wake up for exactly while there is something to look at;
//! - whoever waits is tried again once for all that has come in a turn: each try may walk over every table.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Broker, Job};
use crate::heap::{Buffer, HeapError, Held, Renewal};
use crate::id::{ClientId, ExtentId, Tenant};
use crate::pool::Use;
use crate::seldom::seldom;

/// A process that dies closes its connection before the last of its buffers: so long nothing is wrong.
pub(super) const GRACE: Duration = Duration::from_millis(5);
/// The first time after which an extent in quarantine, or a missing one, is looked at again; it doubles each time.
pub(super) const FIRST: Duration = Duration::from_millis(100);
/// The longest.
pub(super) const LONGEST: Duration = Duration::from_secs(30);

/// To whom an extent was granted last: for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastGranted {
    /// The tenant.
    pub uid: u32,
    /// The process.
    pub pid: i32,
    /// Its name, as it said.
    pub label: String,
}

/// An extent in quarantine, in `kvbctl status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineReport {
    /// The extent.
    pub extent: u32,
    /// References to it beside the broker's own, when it was last looked at.
    pub others: u64,
    /// Whom it was granted to last.
    pub last_granted: Option<LastGranted>,
}

#[derive(Debug)]
struct Kept {
    /// `None` while the worker looks at it.
    buffer: Option<Arc<Buffer>>,
    others: u64,
    wait: Duration,
    due: Instant,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Absent {
    /// What the clock said last; [`Broker::tick`] sets it.
    pub clock: Instant,
    kept: BTreeMap<ExtentId, Kept>,
    missing: Missing,
}

#[derive(Debug)]
struct Missing {
    /// How many the log knows of.
    said: u32,
    wait: Duration,
    /// When to ask the kernel again; `None` while the worker asks, or nothing is missing.
    due: Option<Instant>,
    /// The worker asks.
    asking: bool,
    /// Extents of those that were lent and should be there at once: requests wait for them until the kernel says no.
    expected: u32,
}

impl Missing {
    const NONE: Missing = Missing { said: 0, wait: FIRST, due: None, asking: false, expected: 0 };
}

impl Absent {
    pub fn new() -> Self {
        Absent { clock: Instant::now(), kept: BTreeMap::new(), missing: Missing::NONE }
    }
}

impl Broker {
    /// What time it is, as the driver sees it: deadlines and back-offs go by this. Orders what is due.
    pub fn tick(&mut self, now: Instant) {
        self.absent.clock = self.absent.clock.max(now);
        let now = self.absent.clock;
        let bytes = self.state.pool.extent_bytes();
        for (extent, kept) in &mut self.absent.kept {
            if kept.due > now {
                continue;
            }
            if let Some(buffer) = kept.buffer.take() {
                self.jobs.push_back(Job::Renew { extent: *extent, old: Some(buffer), bytes });
            }
        }
        if self.absent.missing.due.is_some_and(|due| due <= now) {
            self.absent.missing.due = None;
            self.absent.missing.asking = true;
            self.jobs.push_back(Job::Allocate { bytes });
        }
        self.end_late_sessions(now);
        self.end_late_hold(now);
        self.give_up_holds();
        self.end_late_lookups(now);
        self.look_for_kept_copies();
        self.end_rest(now);
    }

    /// When [`tick`](Self::tick) must be called next; `None` while there is nothing to look at.
    pub fn next_wake(&self) -> Option<Instant> {
        let kept = self.absent.kept.values().filter(|k| k.buffer.is_some()).map(|k| k.due);
        let deadlines =
            self.next_reclaim().into_iter().chain(self.next_hold_deadline()).chain(self.lookups_wait_until());
        let others =
            self.next_look_for_copies().into_iter().chain(self.next_rest()).chain(self.waits.next_end());
        kept.chain(self.absent.missing.due).chain(deadlines).chain(others).min()
    }

    /// Extents that were lent are to come back: they are missing, and the kernel is asked at once.
    pub(super) fn expect_back(&mut self, extents: u32) {
        if extents == 0 {
            return;
        }
        let m = &mut self.absent.missing;
        m.expected += extents;
        m.wait = FIRST;
        if !m.asking {
            m.due = Some(self.absent.clock);
        }
    }

    /// Extents that were lent and are on their way back, as far as is known.
    pub(super) fn expected_back(&self) -> u32 {
        self.absent.missing.expected
    }

    /// Extents that were to be taken and are not there.
    pub(super) fn missing_extents(&self) -> u32 {
        self.state.wanted_extents.saturating_sub(self.state.pool.extents().len() as u32)
    }

    /// Extents that count against the tenant's limit: its own, and those that it had last and that are in quarantine.
    pub(super) fn charged_extents(&self, tenant: Tenant) -> u32 {
        let pool = &self.state.pool;
        let its = |extent: &&ExtentId| {
            let quarantined = pool.extents().get(extent).is_some_and(|e| e.usage == Use::Quarantined);
            quarantined && self.state.last_granted.get(extent).is_some_and(|l| l.uid == tenant.0)
        };
        pool.extents_of(tenant) + self.absent.kept.keys().filter(its).count() as u32
    }

    /// Buffers that are in neither the pool's hands nor the worker's.
    pub(super) fn kept_extents(&self) -> usize {
        self.absent.kept.len()
    }

    /// The buffers of extents in quarantine that a record needs beside the pool's.
    #[cfg(test)]
    pub(super) fn kept_buffers(&self) -> impl Iterator<Item = ExtentId> {
        self.absent.kept.iter().filter(|(_, k)| k.buffer.is_some()).map(|(id, _)| *id)
    }

    /// After a restart: extents in quarantine are looked at at once. Those without a buffer are begun anew.
    pub(super) fn take_up_quarantine(&mut self) {
        let in_quarantine =
            |(id, e): (&ExtentId, &crate::pool::Extent)| (e.usage == Use::Quarantined).then_some(*id);
        let all: Vec<_> = self.state.pool.extents().iter().filter_map(in_quarantine).collect();
        for extent in all {
            match self.buffers.remove(&extent) {
                Some(buffer) => {
                    let due = self.absent.clock;
                    let kept = Kept { buffer: Some(buffer), others: 0, wait: FIRST, due };
                    self.absent.kept.insert(extent, kept);
                }
                None => self.state.pool.renew_quarantined(extent),
            }
        }
        self.look_for_missing();
    }

    /// Notes whose hands the descriptors of these extents go into.
    pub(super) fn note_granted(&mut self, client: ClientId, extents: &[ExtentId]) {
        let Some(c) = self.state.clients.get(&client).filter(|_| !extents.is_empty()) else { return };
        let last = LastGranted { uid: c.tenant.0, pid: c.pid, label: c.label.clone() };
        for extent in extents {
            self.state.last_granted.insert(*extent, last.clone());
        }
    }

    /// The worker has tried to renew an extent.
    pub(super) fn renewed(&mut self, extent: ExtentId, result: Renewal) {
        match result {
            Renewal::Ready { buffer, reused } => {
                self.gone(extent);
                self.state.counters.renewed += 1;
                self.state.counters.reused += u64::from(reused);
                if let Some(id) = self.state.pool.end_renewal(extent, true) {
                    self.buffers.insert(id, Arc::new(buffer));
                }
                // Where one has come back, there may be room for those that are missing.
                self.absent.missing.wait = FIRST;
                self.serve_holds();
                self.stirred = true;
            }
            Renewal::Held(held) => self.keep(extent, held),
            Renewal::Missing(error) => {
                self.gone(extent);
                self.state.pool.end_renewal(extent, false);
                self.note_missing(&error);
                self.stirred = true;
            }
        }
    }

    fn gone(&mut self, extent: ExtentId) {
        if let Some(kept) = self.absent.kept.remove(&extent) {
            if kept.wait > GRACE {
                seldom!(info, "{extent} has come back out of quarantine");
            }
        }
        self.state.last_granted.remove(&extent);
    }

    /// Somebody else holds it still.
    fn keep(&mut self, extent: ExtentId, held: Held) {
        let now = self.absent.clock;
        let others = held.count.saturating_sub(1);
        let wait = match self.absent.kept.get(&extent) {
            None => GRACE,
            Some(kept) => (kept.wait * 2).clamp(FIRST, LONGEST),
        };
        let kept = Kept { buffer: Some(held.buffer), others, wait, due: now + wait };
        let first = self.absent.kept.insert(extent, kept).is_none();
        if !first && self.state.pool.quarantine(extent) {
            let whose = match self.state.last_granted.get(&extent) {
                Some(l) => format!("last granted to pid {} ({}), uid {}", l.pid, l.label, l.uid),
                None => "nobody knows whose it was".into(),
            };
            seldom!(
                warn,
                "{extent} is in quarantine: {others} references to it are not the broker's; {whose}"
            );
            // Whoever waits for it is told that it does not come.
            self.stirred = true;
        }
    }

    /// Sees to it that the kernel is asked for what is missing, and later each time.
    pub(super) fn look_for_missing(&mut self) {
        let missing = self.missing_extents();
        let m = &mut self.absent.missing;
        if missing == 0 {
            *m = Missing::NONE;
            return;
        }
        // Of those that are expected nothing is said until the kernel has refused one.
        m.said = if m.expected > 0 { m.said.min(missing) } else { missing };
        let at_once = m.expected > 0 && m.due.is_some();
        if !m.asking && !at_once {
            m.due = Some(self.absent.clock + m.wait);
            m.wait = (m.wait * 2).min(LONGEST);
        }
    }

    fn note_missing(&mut self, error: &HeapError) {
        let missing = self.missing_extents();
        if missing > self.absent.missing.said {
            seldom!(
                warn,
                "{missing} of {} extents are missing, and are asked for again: {error}",
                self.state.wanted_extents
            );
        }
        self.look_for_missing();
    }

    /// The kernel has answered for one that was missing.
    pub(super) fn allocated(&mut self, result: Result<Buffer, HeapError>) {
        self.absent.missing.asking = false;
        match result {
            // Enough have come meanwhile: it is given back to the kernel.
            Ok(_) if self.missing_extents() == 0 => self.look_for_missing(),
            Ok(buffer) => {
                self.take_in(buffer);
                let expected = &mut self.absent.missing.expected;
                *expected = expected.saturating_sub(1);
                let missing = self.missing_extents();
                seldom!(
                    info,
                    "an extent that was missing is there; {missing} of {} are not",
                    self.state.wanted_extents
                );
                self.look_for_missing();
                self.absent.missing.wait = FIRST;
                if missing > 0 {
                    // The next one at once.
                    self.absent.missing.due = Some(self.absent.clock);
                }
                self.serve_holds();
                self.stirred = true;
            }
            Err(e) => {
                log::debug!("an extent is still missing: {e}");
                let waited_for = std::mem::take(&mut self.absent.missing.expected) > 0;
                self.note_missing(&e);
                if waited_for {
                    // Whoever waits for it is told that it does not come.
                    self.stirred = true;
                }
            }
        }
    }

    /// The extents in quarantine, for people.
    pub(super) fn quarantined(&self) -> Vec<QuarantineReport> {
        let in_quarantine = |(id, _): &(&ExtentId, &Kept)| {
            self.state.pool.extents().get(id).is_some_and(|e| e.usage == Use::Quarantined)
        };
        let report = |(id, kept): (&ExtentId, &Kept)| QuarantineReport {
            extent: id.0,
            others: kept.others,
            last_granted: self.state.last_granted.get(id).cloned(),
        };
        self.absent.kept.iter().filter(in_quarantine).map(report).collect()
    }
}
