//! How windows end: when one is closed, and when nobody can reach its blocks through it any more.
//!
//! Owns when that is looked at. Invariant: a block is let go only once the window over it is provably nobody's; what cannot be
//! proven keeps its blocks, and is looked at again, later each time, only while there is something to look at.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::Duration;

use super::{Hold, Making, Object, Pending};
use crate::broker::{Broker, Job};
use crate::id::{ClientId, Place, SessionId, Tenant};
use crate::window::How;

/// How soon a window that somebody still holds is looked at again, at first and at most.
const RECHECK: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

impl Broker {
    /// A window's owner is done with it, or gone (`orphan`): its blocks are let go as soon as nobody reaches them.
    pub(super) fn close_window(&mut self, window: u64, orphan: bool) {
        let Some(hold) = self.state.windows.get_mut(&window) else { return };
        hold.orphan |= orphan;
        if hold.closing {
            return;
        }
        hold.closing = true;
        let client = hold.client;
        if self.windows.pending.values().any(|p| p.window == Some(window)) {
            // The worker is at it: when it is done, this goes on.
            return;
        }
        match self.windows.objects.get_mut(&window) {
            Some(Object::Mapped { space, iova, mappings, .. }) => {
                let (space, iova, mappings) = (space.clone(), *iova, std::mem::take(mappings));
                self.windows.objects.insert(window, Object::Leaving { iova });
                let ticket = self.next_ticket;
                self.next_ticket += 1;
                let tenant = self.state.windows[&window].tenant;
                let pending = Pending { client, tenant, how: How::Iommu, window: Some(window), before: None };
                self.windows.pending.insert(ticket, pending);
                self.jobs.push_back(Job::Window { ticket, making: Making::Unmap(space, mappings) });
            }
            Some(Object::Leaving { .. }) => {}
            Some(Object::Buffer(_)) | None => {
                self.windows.patience = Some(RECHECK.0);
                self.reap(window);
            }
        }
        self.drop_staging(client);
    }

    /// A process whose last staged window is closed needs no buffer.
    fn drop_staging(&mut self, client: ClientId) {
        let staged = |h: &Hold| h.client == client && h.how == How::Bounce && !h.closing;
        if self.state.windows.values().any(staged) {
            return;
        }
        if let Some(buffer) = self.windows.staging.remove(&client) {
            self.windows.leaving.push(buffer);
            self.windows.patience = Some(RECHECK.0);
        }
    }

    /// Ends a closed window if nobody can reach its blocks through it any more.
    fn reap(&mut self, window: u64) {
        let Some(hold) = self.state.windows.get(&window).filter(|h| h.closing) else { return };
        let free = match (hold.how, self.windows.objects.get(&window)) {
            (How::Bounce, _) => true,
            // Its owner has said that the device is done; only the owner's word can be had while it lives, and nobody
            // else's needs to. Of an owner that is gone, the extent itself must be free of holders.
            (How::Run, _) => match hold.orphan {
                true => hold.blocks.iter().all(|b| self.is_only_ours(b.place)),
                // A session that the broker has ended: its owner has not said so yet.
                false => !self.is_lost(hold.client, hold.session),
            },
            (_, Some(Object::Buffer(fd))) => (self.windows.count.0)(fd.as_fd()) == Some(1),
            // Made by an earlier run of the broker, or on its way: no proof.
            _ => false,
        };
        if free {
            self.forget_window(window);
        }
    }

    pub(super) fn is_lost(&self, client: ClientId, session: SessionId) -> bool {
        self.state.clients.get(&client).is_some_and(|c| c.lost.contains_key(&session))
    }

    fn is_only_ours(&self, place: Place) -> bool {
        self.buffers.get(&place.extent).is_none_or(|b| (self.windows.sole.0)(b))
    }

    pub(super) fn forget_window(&mut self, window: u64) {
        if let Some(Object::Mapped { iova, .. } | Object::Leaving { iova }) =
            self.windows.objects.remove(&window)
        {
            let tenant = self.state.windows[&window].tenant;
            if let Some(space) = self.windows.spaces.get_mut(&tenant) {
                space.iovas.give(iova);
            }
        }
        self.windows.replaced.remove(&window);
        let Some(hold) = self.state.windows.remove(&window) else { return };
        if hold.alone {
            self.set_extents_aside(&hold.blocks);
        }
        for block in hold.blocks.into_iter().rev() {
            self.uncover(block, (hold.client, hold.session));
        }
    }

    /// Closes the windows of a session whose table no longer has what is under them.
    pub(in crate::broker) fn check_windows(&mut self, id: SessionId) {
        let table = self.state.sessions.get(&id);
        let stands = |h: &Hold| {
            let of = |i: usize| table.and_then(|s| s.block(h.first + i as u32));
            h.blocks.iter().enumerate().all(|(i, b)| of(i) == Some(*b)) && table.is_some()
        };
        let mine = self.state.windows.iter().filter(|(_, h)| h.session == id && !h.closing);
        let gone: Vec<u64> = mine.filter(|(_, h)| !stands(h)).map(|(w, _)| *w).collect();
        for window in gone {
            self.close_window(window, false);
        }
    }

    /// A process has let go of a session that the broker had ended, and so of its windows.
    pub(in crate::broker) fn reap_windows_of(&mut self, id: SessionId) {
        let mine = self.state.windows.iter().filter(|(_, h)| h.session == id && h.closing);
        for window in mine.map(|(w, _)| *w).collect::<Vec<_>>() {
            self.reap(window);
        }
    }

    /// The owner of windows is gone.
    pub(in crate::broker) fn orphan_windows(&mut self, client: ClientId) {
        let mine = self.state.windows.iter().filter(|(_, h)| h.client == client);
        for window in mine.map(|(w, _)| *w).collect::<Vec<_>>() {
            self.close_window(window, true);
        }
        self.drop_staging(client);
        for space in self.windows.spaces.values_mut() {
            space.sent.remove(&client);
        }
    }

    /// After how long [`recheck_windows`](Self::recheck_windows) is to be called; `None` while nothing waits for it.
    pub fn recheck_after(&self) -> Option<Duration> {
        self.windows.patience
    }

    /// Looks again at what somebody may still hold.
    pub fn recheck_windows(&mut self) {
        let closing = self.state.windows.iter().filter(|(_, h)| h.closing).map(|(w, _)| *w);
        for window in closing.collect::<Vec<_>>() {
            self.reap(window);
        }
        self.windows.leaving.retain(|b| !b.is_only_ours());
        // What the kernel is to take out of a device's reach is told by the worker, not found by looking.
        let objects = &self.windows.objects;
        let waits = |w: &u64, h: &Hold| h.closing && !matches!(objects.get(w), Some(Object::Leaving { .. }));
        let left = self.state.windows.iter().any(|(w, h)| waits(w, h)) || !self.windows.leaving.is_empty();
        self.windows.patience = left.then(|| {
            let before = self.windows.patience.unwrap_or(RECHECK.0);
            (before * 2).clamp(RECHECK.0, RECHECK.1)
        });
        self.settle();
    }

    /// A device in whose address space nothing is any more, and that no client has, is nobody's: the broker lets go of it, and
    /// whoever binds it next proves that all others have.
    pub(in crate::broker) fn let_go_of_devices(&mut self) {
        let used: BTreeSet<Tenant> = self
            .state
            .windows
            .values()
            .filter(|h| h.how == How::Iommu)
            .map(|h| h.tenant)
            .chain(self.windows.pending.values().map(|p| p.tenant))
            .collect();
        self.windows.spaces.retain(|tenant, s| !s.sent.is_empty() || used.contains(tenant));
    }
}
