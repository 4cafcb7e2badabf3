//! Memory that is with the kernel for a while: lent to a hold, while a program that allocates for itself runs, or given
//! back because the machine is short of it.
//!
//! Owns who has borrowed what, and what is still on its way. Invariants:
//! - only a clean extent is lent: nobody has ever had its descriptor, so closing it gives all of its pages back;
//! - what tenants are guaranteed is not lent, and nothing is taken from a block in use;
//! - a hold is in force when all of it is with the kernel, never with a part of it, and is refused, with where the memory
//!   is, when that does not come about within its time;
//! - what a loan took out of service is missing from the moment it ends, and so asked of the kernel again, later each time
//!   that there is no memory for it;
//! - while a hold lacks extents, those that become clean are its, and no request is told to wait for them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Broker, Job, OVERFLOW_UID};
use crate::heap::{Backend, Buffer};
use crate::id::{ExtentId, FormatId, Tenant};
use crate::pool::{Cut, Use};
use crate::size::Size;

/// How long a hold may wait for extents: clients that are asked for theirs have two seconds to answer, and the worker
/// needs some time for what they give back.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);
/// Holds at one time.
const MOST_HOLDS: usize = 16;

/// A tenant that owns nothing, and a geometry that nobody has: for whom a loan is.
const NOBODY: Tenant = Tenant(OVERFLOW_UID);
const NO_CUT: Cut = Cut { format: FormatId(0), slot_bytes: 0, slots: 0 };

/// Why memory goes back to the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Borrower {
    /// Who asked for it, by the kernel's word.
    pub uid: u32,
    /// The process that holds the lease.
    pub pid: i32,
    /// What runs with it, as it says: for people only.
    pub command: String,
}

/// One hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(pub u64);

/// A hold, in `kvbctl status` and in the answer to whoever asked for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldReport {
    /// Its number.
    pub hold: u64,
    /// Bytes that it holds, or is to hold: whole extents.
    pub bytes: u64,
    /// As extents.
    pub extents: u32,
    /// All of it is with the kernel.
    pub in_force: bool,
    /// Who asked for it.
    pub uid: u32,
    /// The process that holds the lease.
    pub pid: i32,
    /// What runs with it, as that process says.
    pub command: String,
    /// What should be known about this kind of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How far a hold has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HoldProgress {
    /// Extents are on their way.
    Waiting,
    /// All of it is with the kernel.
    InForce(HoldReport),
    /// It did not come about; the text says where the memory is.
    Refused(String),
}

/// Why there is no hold.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum HoldError {
    #[error("a hold of nothing makes no room: say how much, such as 96M")]
    Nothing,
    #[error("{0} holds are running, as many as there can be; end one of them")]
    TooMany(usize),
    #[error("the broker's books do not add up; it lends nothing until a restart")]
    Frozen,
    #[error("{bytes} ({asked} extents of {each}) cannot be lent, {can} extents can: {whereabouts}", bytes = Size::from_bytes(asked.saturating_mul(*extent_bytes)), each = Size::from_bytes(*extent_bytes))]
    TooMuch { asked: u64, can: u64, extent_bytes: u64, whereabouts: String },
}

#[derive(Debug)]
struct Hold {
    borrower: Borrower,
    wanted: u32,
    /// What it has, and whether the worker has closed it.
    extents: BTreeMap<ExtentId, bool>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Waiting { until: Instant },
    InForce,
    Refused(String),
}

impl Hold {
    /// Extents that it still lacks.
    fn lacks(&self) -> u32 {
        match self.stage {
            Stage::Waiting { .. } => self.wanted - self.extents.len() as u32,
            _ => 0,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lent {
    next: u64,
    holds: BTreeMap<HoldId, Hold>,
    /// Given back because memory is short.
    elastic: BTreeSet<ExtentId>,
}

impl Broker {
    /// Takes at least `bytes`, in whole extents, out of service and gives them to the kernel. See
    /// [`hold_progress`](Self::hold_progress) for when that has happened; the hold lasts until
    /// [`end_hold`](Self::end_hold).
    pub fn hold(&mut self, bytes: u64, borrower: Borrower) -> Result<HoldId, HoldError> {
        if self.frozen {
            return Err(HoldError::Frozen);
        }
        if self.lent.holds.len() >= MOST_HOLDS {
            return Err(HoldError::TooMany(MOST_HOLDS));
        }
        let extent_bytes = self.state.pool.extent_bytes();
        let asked = bytes.div_ceil(extent_bytes);
        if asked == 0 {
            return Err(HoldError::Nothing);
        }
        self.rest_unanswered();
        let can = u64::from(self.lendable());
        let Some(wanted) = u32::try_from(asked).ok().filter(|_| asked <= can) else {
            let whereabouts = self.whereabouts();
            return Err(HoldError::TooMuch { asked, can, extent_bytes, whereabouts });
        };
        self.lent.next += 1;
        let id = HoldId(self.lent.next);
        let stage = Stage::Waiting { until: self.absent.clock + PATIENCE };
        self.lent.holds.insert(id, Hold { borrower, wanted, extents: BTreeMap::new(), stage });
        self.serve_holds();
        self.empty_for_holds();
        self.settle();
        Ok(id)
    }

    /// How far a hold has come; `None` if there is none of this number.
    pub fn hold_progress(&self, id: HoldId) -> Option<HoldProgress> {
        let hold = self.lent.holds.get(&id)?;
        Some(match &hold.stage {
            Stage::Waiting { .. } => HoldProgress::Waiting,
            Stage::InForce => HoldProgress::InForce(self.hold_report(id, hold)),
            Stage::Refused(why) => HoldProgress::Refused(why.clone()),
        })
    }

    /// Ends a hold, in force or not: its extents are asked of the kernel again.
    pub fn end_hold(&mut self, id: HoldId) {
        let Some(hold) = self.lent.holds.remove(&id) else { return };
        self.end_loans(hold.extents.into_keys());
        self.settle();
    }

    /// Every hold, by number.
    pub fn holds(&self) -> Vec<HoldReport> {
        let refused = |h: &Hold| matches!(h.stage, Stage::Refused(_));
        let all = self.lent.holds.iter().filter(|(_, h)| !refused(h));
        all.map(|(id, h)| self.hold_report(*id, h)).collect()
    }

    fn hold_report(&self, id: HoldId, hold: &Hold) -> HoldReport {
        HoldReport {
            hold: id.0,
            bytes: u64::from(hold.wanted) * self.state.pool.extent_bytes(),
            extents: hold.wanted,
            in_force: matches!(hold.stage, Stage::InForce),
            uid: hold.borrower.uid,
            pid: hold.borrower.pid,
            command: hold.borrower.command.clone(),
            note: self.lending_note(),
        }
    }

    /// What a program gains by memory of this kind. CMA pages serve whoever asks for movable ones: page cache and the
    /// memory of processes, not a driver that wants buffers.
    fn lending_note(&self) -> Option<String> {
        let name = self.heap.name();
        let ordinary = name.rsplit('/').next().is_some_and(|n| n.starts_with("system"));
        (self.heap.backend() == Backend::DmaHeap && !ordinary).then(|| {
            format!(
                "{name} is CMA memory: given back, it serves only movable allocations (the memory of processes, the page \
                 cache), so it helps only indirectly; what a driver allocates does not come from it"
            )
        })
    }

    /// Clean extents that nobody is guaranteed.
    pub(super) fn spare(&self) -> u32 {
        self.state.pool.clean_extents().saturating_sub(self.kept_for_others(NOBODY))
    }

    /// Extents of tenants that have no block in use, and then those with nothing but cached blocks: what may be taken, or
    /// asked for, without touching a reserve or a promise.
    fn takeable_extents(&self) -> Vec<ExtentId> {
        let (idle, cold) = self.candidates(NOBODY, &NO_CUT);
        let may = |e: &ExtentId| self.heap.revokes() || !self.asked_back.contains_key(e);
        idle.into_iter().chain(cold).map(|(_, extent)| extent).filter(may).collect()
    }

    /// Extents that could be lent, at once or once they have been emptied and renewed.
    fn lendable(&self) -> u32 {
        let clean = self.state.pool.clean_extents() + self.state.pool.soon_clean();
        let there = clean.saturating_sub(self.kept_for_others(NOBODY)) + self.takeable_extents().len() as u32;
        there.saturating_sub(self.owed_to_holds())
    }

    /// Extents that holds still lack.
    pub(super) fn owed_to_holds(&self) -> u32 {
        self.lent.holds.values().map(Hold::lacks).sum()
    }

    /// Gives clean extents to holds that lack some, the oldest first.
    pub(super) fn serve_holds(&mut self) {
        let waiting = |(id, h): (&HoldId, &Hold)| (h.lacks() > 0).then_some(*id);
        let waiting: Vec<_> = self.lent.holds.iter().filter_map(waiting).collect();
        for id in waiting {
            while self.spare() > 0 && self.lent.holds[&id].lacks() > 0 {
                let Some(extent) = self.lend() else { return };
                if let Some(hold) = self.lent.holds.get_mut(&id) {
                    hold.extents.insert(extent, false);
                }
            }
        }
    }

    /// Takes a clean extent out of service; the worker closes it.
    fn lend(&mut self) -> Option<ExtentId> {
        let extent = self.state.pool.lend()?;
        let buffer = self.buffers.remove(&extent).expect("a clean extent has its buffer");
        self.jobs.push_back(Job::GiveBack { extent, buffer });
        Some(extent)
    }

    /// Takes from tenants what they do not use, or asks for it, as many extents as holds lack beyond what comes anyway.
    fn empty_for_holds(&mut self) {
        let pool = &self.state.pool;
        let coming = (pool.clean_extents() + pool.soon_clean()).saturating_sub(self.kept_for_others(NOBODY));
        let lacking = self.owed_to_holds().saturating_sub(coming) as usize;
        for extent in self.takeable_extents().into_iter().take(lacking) {
            if self.state.pool.extents()[&extent].owned().is_none() {
                // Emptied with another one, whose blocks its own continued.
                continue;
            }
            let touched = self.evict_all_in(extent);
            self.take_back(extent);
            for other in touched.into_iter().filter(|e| *e != extent) {
                self.state.pool.release_if_idle(other);
            }
        }
    }

    /// Takes a clean extent out of service because memory is short.
    pub(super) fn lend_elastic(&mut self) -> Option<()> {
        let extent = self.lend()?;
        self.lent.elastic.insert(extent);
        Some(())
    }

    /// Extents that were given back because memory is short.
    pub fn elastic_extents(&self) -> u32 {
        self.lent.elastic.len() as u32
    }

    /// Asks the kernel again for as many of those that were given back.
    pub(super) fn recall(&mut self, extents: u32) {
        let recalled: Vec<_> = self.lent.elastic.iter().copied().take(extents as usize).collect();
        recalled.iter().for_each(|e| _ = self.lent.elastic.remove(e));
        self.end_loans(recalled);
    }

    /// The worker has closed the buffer of an extent that was lent.
    pub(super) fn given_back(&mut self, extent: ExtentId) {
        for hold in self.lent.holds.values_mut() {
            if let Some(closed) = hold.extents.get_mut(&extent) {
                *closed = true;
            }
            let complete = hold.extents.len() as u32 == hold.wanted && hold.extents.values().all(|c| *c);
            if complete && matches!(hold.stage, Stage::Waiting { .. }) {
                hold.stage = Stage::InForce;
            }
        }
    }

    /// Holds whose time is up are refused, and what they had got comes back.
    pub(super) fn give_up_holds(&mut self) {
        let now = self.absent.clock;
        let late = |h: &Hold| h.lacks() > 0 && matches!(h.stage, Stage::Waiting { until } if until <= now);
        let late: Vec<_> = self.lent.holds.iter().filter(|(_, h)| late(h)).map(|(id, _)| *id).collect();
        if !late.is_empty() {
            self.rest_unanswered();
        }
        for id in late {
            let whereabouts = self.whereabouts();
            let extent_bytes = self.state.pool.extent_bytes();
            let Some(hold) = self.lent.holds.get_mut(&id) else { continue };
            let (asked, can) = (u64::from(hold.wanted), hold.extents.len() as u64);
            let why = HoldError::TooMuch { asked, can, extent_bytes, whereabouts };
            hold.stage = Stage::Refused(format!("{why}; it did not become free in time"));
            let extents = std::mem::take(&mut hold.extents);
            self.end_loans(extents.into_keys());
        }
    }

    /// When holds that wait are to be looked at.
    pub(super) fn next_hold_deadline(&self) -> Option<Instant> {
        let until = |h: &Hold| match h.stage {
            Stage::Waiting { until } if h.lacks() > 0 => Some(until),
            _ => None,
        };
        self.lent.holds.values().filter_map(until).min()
    }

    fn end_loans(&mut self, extents: impl IntoIterator<Item = ExtentId>) {
        let ended = extents.into_iter().filter(|e| self.state.pool.end_loan(*e)).count();
        self.expect_back(ended as u32);
    }

    /// After a restart nobody has a lease: what was lent is missing.
    pub(super) fn forget_loans(&mut self) {
        let lent = |(id, e): (&ExtentId, &crate::pool::Extent)| (e.usage == Use::Lent).then_some(*id);
        let lent: Vec<_> = self.state.pool.extents().iter().filter_map(lent).collect();
        self.end_loans(lent);
    }

    /// Where the pool's extents are, in numbers, for whoever cannot have as many.
    fn whereabouts(&self) -> String {
        let pool = &self.state.pool;
        let mut text = format!("of the pool's {} extents", self.state.wanted_extents);
        let mut say = |n: u32, what: &str| {
            if n > 0 {
                let _ = write!(text, " {n} are {what},");
            }
        };
        let free = pool.clean_extents() + pool.soon_clean();
        let kept = free.min(self.kept_for_others(NOBODY));
        say(free - kept, "free");
        say(kept, "free and kept for what tenants are guaranteed");
        say(self.owed_to_holds(), "free, or about to be, for other holds");
        let mut owned: BTreeMap<Tenant, [u32; 3]> = BTreeMap::new();
        for o in pool.extents().values().filter_map(|e| e.owned()) {
            let slots = o.slots.len() as u32;
            let how =
                usize::from(o.free == slots) + 2 * usize::from(o.free < slots && o.free + o.cached == slots);
            owned.entry(o.tenant).or_default()[how] += 1;
        }
        for (tenant, [used, empty, cached]) in owned {
            say(used, &format!("in use by uid {}", tenant.0));
            say(empty, &format!("kept by uid {} without a block in use", tenant.0));
            say(cached, &format!("of uid {} with nothing but cached prefixes", tenant.0));
        }
        say(pool.quarantined(), "in quarantine");
        let elastic = self.lent.elastic.len() as u32;
        say(pool.lent() - elastic, "lent to holds");
        say(elastic, "given back because memory is short");
        say(self.missing_extents(), "missing");
        text.trim_end_matches(',').to_owned()
    }

    /// Whether what is lent is what the pool says.
    pub(super) fn check_loans(&self) -> Result<(), String> {
        let holds = self.lent.holds.values().flat_map(|h| h.extents.keys());
        let mut loans = 0;
        for extent in holds.chain(&self.lent.elastic) {
            loans += 1;
            if self.state.pool.extents().get(extent).is_none_or(|e| e.usage != Use::Lent) {
                return Err(format!("{extent} counts as lent and the pool has it"));
            }
        }
        if loans != self.state.pool.lent() {
            return Err(format!("{loans} extents are lent, the pool says {}", self.state.pool.lent()));
        }
        match self.lent.holds.values().find(|h| h.extents.len() as u32 > h.wanted) {
            Some(h) => Err(format!("the hold of pid {} has more than it asked for", h.borrower.pid)),
            None => Ok(()),
        }
    }
}

/// What the worker does with an extent that is lent: closed, its pages are the kernel's.
pub(super) fn give_back(buffer: std::sync::Arc<Buffer>) {
    // Nobody has ever been given it, so this is the last reference, and dropping it empties it.
    debug_assert_eq!(std::sync::Arc::strong_count(&buffer), 1);
    drop(buffer);
}

#[cfg(test)]
mod tests;
