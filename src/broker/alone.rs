//! Coherency: an extent that a device imports which is not coherent has at most one session that writes it.
//!
//! A dma-buf's cache maintenance is of the whole buffer: importing a run's extent, or taking it back for the CPU
//! (`DMA_BUF_IOCTL_SYNC`), throws away what any CPU cache holds of it and has not written back, a neighbour's rows among
//! them. Owns no state: a window says in the books whether it is `alone`, and the pool says which extents are set aside for
//! one. Invariants, while a window is alone: each block of its extents that may be written stands in its session's table
//! and in no other; nobody is granted a block of them, but that session, and then only what enters its table at once and
//! what the broker need not zero before. Sealed blocks may be anybody's: they are not written any more.
//!
//! Other windows need none of this: a udmabuf is made of the pages of one session's own blocks and nothing else, the
//! staging buffer is outside the pool, and VFIO binds only devices that are coherent (`vfio_main.c` asks for
//! `IOMMU_CAP_CACHE_COHERENCY`).

use std::collections::BTreeSet;

use super::{Broker, Refused};
use crate::id::{BlockId, ClientId, ExtentId, Place, SessionId, Tenant};
use crate::pool::{Block, Cut};
use crate::wire::Fault;

/// What a session whose extents are set aside may still have of them, while it is being granted blocks.
#[must_use = "the extents are to be set aside again"]
pub(super) struct Lifted(Vec<ExtentId>);

impl Lifted {
    /// Whether the grant may be of such an extent: then it must not be larger than what is used at once.
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }
}

impl Broker {
    /// Whether a device that imports an extent of this pool needs it alone.
    pub(super) fn imports_need_one_writer(&self) -> bool {
        !self.windows.coherent() && self.heap.backend().is_dma_buf()
    }

    /// Why `session` is not the only one that writes the extents of `blocks`, which are all of its table; `None` if it is.
    pub(super) fn another_writer(&self, session: SessionId, blocks: &[BlockId]) -> Option<String> {
        let table: BTreeSet<Place> =
            self.state.sessions.get(&session)?.table.iter().map(|b| b.place).collect();
        let extents: BTreeSet<ExtentId> = blocks.iter().map(|b| b.place.extent).collect();
        for extent in extents {
            if self.alone_in(extent).is_some_and(|other| other != session) {
                return Some(format!("{extent} is imported for another session's window"));
            }
            let slots = &self.state.pool.extents().get(&extent)?.owned()?.slots;
            let (mut others, mut ahead) = (0, 0);
            for (slot, s) in slots.iter().enumerate() {
                let place = Place { extent, slot: slot as u32 };
                match s.block {
                    Block::Free | Block::Held { sealed: true, .. } => {}
                    Block::Held { refs, .. }
                        if table.contains(&place) && refs - self.windows.over(place) == 1 => {}
                    Block::Held { .. } | Block::Suspect(_) => others += 1,
                    Block::Credit(_) => ahead += 1,
                }
            }
            if others + ahead > 0 {
                return Some(format!(
                    "{extent} has {others} blocks that others may write and {ahead} of credit"
                ));
            }
        }
        None
    }

    /// How many free places of the extents of `blocks` cannot be set aside, because they back what was promised to
    /// sessions.
    pub(super) fn promised_in(&self, tenant: Tenant, cut: &Cut, blocks: &[BlockId]) -> u64 {
        let extents: BTreeSet<ExtentId> = blocks.iter().map(|b| b.place.extent).collect();
        let owned = extents.iter().filter_map(|e| self.state.pool.extents().get(e)?.owned());
        let free: u64 = owned.filter(|o| !o.aside).map(|o| u64::from(o.free)).sum();
        free.saturating_sub(self.available(tenant, cut, 0).0)
    }

    /// The session that has an extent to itself.
    fn alone_in(&self, extent: ExtentId) -> Option<SessionId> {
        let mut alone = self.state.windows.values().filter(|h| h.is_alone_in(extent));
        alone.next().map(|h| h.session())
    }

    /// Sets the extents of blocks aside, or no longer, by what windows there are now.
    pub(super) fn set_extents_aside(&mut self, blocks: &[BlockId]) {
        let extents: BTreeSet<ExtentId> = blocks.iter().map(|b| b.place.extent).collect();
        for extent in extents {
            let on = self.alone_in(extent).is_some();
            if self.state.pool.is_aside(extent) && !on {
                // Whoever waits for room may have it now.
                self.stirred = true;
            }
            self.state.pool.set_aside(extent, on);
        }
    }

    /// For a grant of `least` blocks to `session`, its own extents are granted from: until [`Self::set_down`].
    pub(super) fn lift(&mut self, client: ClientId, session: SessionId, least: u32) -> Lifted {
        // What is more than that would be credit, which any session of the process may take.
        if least == 0 || self.policy.scrub_always {
            return Lifted(Vec::new());
        }
        let mine = self.state.windows.values().filter(|h| h.is_alone() && h.session() == session);
        let mut extents: Vec<ExtentId> = mine.flat_map(|h| h.extents()).collect();
        extents.sort_unstable();
        extents.dedup();
        // The broker's zeroing of a block would be another writer.
        let clean = |e: &ExtentId| {
            let owned = self.state.pool.extents().get(e).and_then(|e| e.owned());
            owned.is_some_and(|o| {
                let mut free = o.slots.iter().filter(|s| s.block == Block::Free);
                free.all(|s| s.written_by.is_none_or(|by| by == client))
            })
        };
        extents.retain(clean);
        extents.iter().for_each(|e| self.state.pool.set_aside(*e, false));
        Lifted(extents)
    }

    /// The grant has been made.
    pub(super) fn set_down(&mut self, lifted: Lifted) {
        lifted.0.into_iter().for_each(|e| self.state.pool.set_aside(e, true));
    }

    /// Refuses a twin of a session that has an extent to itself: either of the two could come to write blocks that both
    /// have now.
    pub(super) fn may_fork(&self, session: SessionId, table: &[BlockId]) -> Result<(), Refused> {
        let written = |b: &&BlockId| {
            let slot = self.state.pool.slot(b.place);
            slot.is_some_and(|s| matches!(s.block, Block::Held { sealed: false, .. }))
        };
        match table.iter().filter(written).find(|b| self.state.pool.is_aside(b.place.extent)) {
            None => Ok(()),
            Some(block) => Err(Refused::new(
                Fault::Busy,
                format!(
                    "{session} cannot be forked: {} of its {block} is imported by a device that is not coherent, so only one session may write it; close the window, or seal the blocks first",
                    block.place.extent
                ),
            )),
        }
    }

    /// What is set aside and what windows say are the same; what is wrong otherwise.
    pub(super) fn check_alone(&self) -> Result<(), String> {
        for (extent, e) in self.state.pool.extents().iter() {
            let Some(owned) = e.owned() else { continue };
            let Some(session) = self.alone_in(*extent) else {
                if owned.aside {
                    return Err(format!("{extent} is set aside for no window"));
                }
                continue;
            };
            if !owned.aside {
                return Err(format!("{extent} is imported alone and not set aside"));
            }
            // A session that has ended leaves the window's own references, until nobody has the extent.
            for (id, s) in self.state.sessions.iter().filter(|(id, _)| **id != session) {
                let written = |b: &&BlockId| {
                    let block = self.state.pool.slot(b.place).map(|s| s.block);
                    b.place.extent == *extent && matches!(block, Some(Block::Held { sealed: false, .. }))
                };
                if let Some(block) = s.table.iter().find(written) {
                    return Err(format!("{id} may write {block}, whose extent is {session}'s alone"));
                }
            }
            // Blocks granted to the session are credit until it reports them.
            let client = self.state.sessions.get(&session).map(|s| s.client);
            if owned.slots.iter().any(|s| matches!(s.block, Block::Credit(c) if Some(c) != client)) {
                return Err(format!("{extent} is {session}'s alone and has another process's credit"));
            }
        }
        Ok(())
    }
}
