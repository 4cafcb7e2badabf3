//! How a copy goes that nobody is to find any more.
//!
//! Owns which retired copies somebody has open still, and when the kernel is asked again. Invariants: who has one and uses it
//! in no table is asked for it once; its memory counts until the kernel says that nobody has it open
//! ([`Sealed::take_back`](crate::heap::Sealed::take_back)); there is a time to wake up for only while there is such a copy.

use std::time::{Duration, Instant};

use super::Copied;
use super::copying::COPYING;
use crate::broker::Broker;
use crate::broker::prefix::Digest;
use crate::broker::quarantine::{FIRST, GRACE, LONGEST};
use crate::id::{ClientId, ExtentId, Tenant};
use crate::seldom::seldom;

/// A retired copy that all its holders have given back, as they say, and that somebody has open still.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) wait: Duration,
    pub(super) due: Instant,
    /// The log knows of it.
    pub(super) said: bool,
}

/// Milliseconds that a reader gets to close a copy that is not in use any more. Nothing happens when they are over.
const DEADLINE_MS: u32 = 2000;

impl Broker {
    /// Takes back retired copies that nobody says to have any more, if nobody has them. Whether any came back.
    pub(super) fn take_back_retired(&mut self) -> bool {
        let (now, kept) = (self.absent.clock, &self.common.kept);
        let is_due = |(id, e): &(&ExtentId, &Copied)| {
            !e.live && e.holders.is_empty() && kept.get(id).is_none_or(|k| k.due <= now)
        };
        let due: Vec<ExtentId> = self.state.common.extents.iter().filter(is_due).map(|(id, _)| *id).collect();
        let mut any = false;
        for extent in due {
            // After a restart there is no file to ask about: what a client of the last run keeps is not known.
            match self.common.files.get(&extent).map_or(Ok(true), |file| file.take_back()) {
                Ok(true) => {
                    self.state.common.extents.remove(&extent);
                    self.common.files.remove(&extent);
                    self.common.kept.remove(&extent);
                    any = true;
                }
                Ok(false) => self.keep_copy(extent, None),
                Err(e) => self.keep_copy(extent, Some(e)),
            }
        }
        any
    }

    /// Somebody has it open still, or the kernel does not say.
    fn keep_copy(&mut self, extent: ExtentId, error: Option<std::io::Error>) {
        let Some(e) = self.state.common.extents.get(&extent) else { return };
        let now = self.absent.clock;
        let kept =
            self.common.kept.entry(extent).or_insert(Kept { wait: Duration::ZERO, due: now, said: false });
        let first = kept.wait.is_zero();
        kept.wait = if first { GRACE } else { (kept.wait * 2).clamp(FIRST, LONGEST) };
        kept.due = now + kept.wait;
        if first || std::mem::replace(&mut kept.said, true) {
            return;
        }
        let (donor, readers) =
            (e.donor.0, e.readers.iter().map(|t| t.0.to_string()).collect::<Vec<_>>().join(", "));
        let why = error
            .map_or("somebody has it open still".into(), |e| format!("who has it open cannot be told: {e}"));
        seldom!(
            warn,
            "{extent}, a copy of a prompt of uid {donor} for uid {readers}, has been given back by all, and {why}; it counts \
             against the part of uid {donor} until it is closed"
        );
    }

    /// A connection of this tenant has ended: what it kept may be closed with it.
    pub(in crate::broker) fn look_for_kept_copies_of(&mut self, tenant: Tenant) {
        for (extent, kept) in &mut self.common.kept {
            if self.state.common.extents.get(extent).is_some_and(|e| e.readers.contains(&tenant)) {
                (kept.wait, kept.due) = (Duration::ZERO, self.absent.clock);
            }
        }
    }

    /// Asks again about copies that are kept, if it is time.
    pub(in crate::broker) fn look_for_kept_copies(&mut self) {
        if self.next_look_for_copies().is_some_and(|due| due <= self.absent.clock) {
            self.settle();
        }
    }

    /// When it is; `None` while no copy is kept.
    pub(in crate::broker) fn next_look_for_copies(&self) -> Option<Instant> {
        self.common.kept.values().map(|k| k.due).min()
    }

    /// Whoever has a retired copy and does not use it any more is asked to close it.
    pub(super) fn ask_for_retired(&mut self) {
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

    /// After a restart the copies' files are gone: who has one keeps it, nobody else gets it.
    pub(in crate::broker) fn retire_copies(&mut self) {
        let names: Vec<Digest> = self.state.prefixes.iter().map(|(name, ..)| *name).collect();
        for name in names {
            self.set_pinned(&name, COPYING, false);
        }
        self.state.common.extents.values_mut().for_each(|e| e.live = false);
        self.state.common.extents.retain(|_, e| !e.holders.is_empty());
        self.common.stirred = true;
    }
}
