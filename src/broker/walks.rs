//! Long walks, each made once for all who ask the same: over the tables of sessions that may be asked to end, and over the
//! cached blocks of extents with nothing else in them.
//!
//! Owns what was found, and of which state of the pool and the index it is true. Invariant: nothing is read here that was found
//! before either changed: so sixty requests that wait cost one walk, not sixty
//! (`cargo test --lib walks`).

use std::cell::RefMut;
use std::collections::{BTreeMap, HashMap, VecDeque};

use foldhash::fast::RandomState;

use super::{Broker, State};
use crate::id::{ExtentId, Place, SessionId};
use crate::pool::{Block, Slot};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Walks {
    /// When all of this was found: the changes of the pool and of the index until then.
    at: (u64, u64),
    /// By how many sessions may be asked: without a change of the pool that says which.
    endings: BTreeMap<usize, Endings>,
    /// Whether every cached block of these can be evicted.
    evictable: BTreeMap<ExtentId, bool>,
    /// Cached blocks that were looked at, and names in tables.
    #[cfg(test)]
    pub looked: u64,
}

impl Walks {
    /// Extents without a block in use, before any of as many `sessions` as may be asked has ended. They end as `order` says.
    pub fn idle(
        &mut self,
        state: &State,
        sessions: usize,
        order: impl FnOnce() -> VecDeque<SessionId>,
    ) -> &[ExtentId] {
        &self.endings.entry(sessions).or_insert_with(|| Endings::new(state, order())).idle
    }

    /// Which of these `sessions` ends as the `n`th from 0, and the extents that are without a block in use then and were not
    /// before. `None` when there is none any more.
    pub fn step(&mut self, state: &State, sessions: usize, n: usize) -> Option<&(SessionId, Vec<ExtentId>)> {
        let endings = self.endings.get_mut(&sessions)?;
        while endings.steps.len() <= n {
            let id = endings.rest.pop_front()?;
            #[cfg(test)]
            {
                self.looked += state.sessions[&id].table.len() as u64;
            }
            let emptied = endings.without(state, id);
            endings.steps.push((id, emptied));
        }
        endings.steps.get(n)
    }

    /// Sessions have been asked that had not been: from now on they are asked in another order.
    pub fn reorder(&mut self) {
        self.endings.clear();
    }
}

impl Broker {
    /// What was found in the state as it is now.
    pub(super) fn walks(&self) -> RefMut<'_, Walks> {
        let at = (self.state.pool.changes(), self.state.prefixes.changes());
        let mut walks = self.walks.borrow_mut();
        if walks.at != at {
            walks.at = at;
            walks.endings.clear();
            walks.evictable.clear();
        }
        walks
    }

    /// Whether all that is in an extent may go: it has cached blocks, and nothing that continues one of them is in use.
    pub(super) fn all_evictable(&self, extent: ExtentId) -> bool {
        let mut walks = self.walks();
        if let Some(known) = walks.evictable.get(&extent) {
            return *known;
        }
        let goes = |slot| self.state.prefixes.is_evictable(Place { extent, slot });
        let found = self.state.pool.extents()[&extent].owned().is_some_and(|o| {
            #[cfg(test)]
            {
                walks.looked += o.cached_slots().count() as u64;
            }
            o.cached_slots().all(goes)
        });
        walks.evictable.insert(extent, found);
        found
    }
}

/// Which extents are without a block in use, after each of some sessions that may be asked to end. One look at the pool, and
/// then at one table after the other, as far as somebody wants to know.
#[derive(Debug)]
struct Endings {
    /// Without any session's end.
    idle: Vec<ExtentId>,
    /// Those looked at so far, with the extents that nobody else has a block in use of.
    steps: Vec<(SessionId, Vec<ExtentId>)>,
    /// Those not looked at yet.
    rest: VecDeque<SessionId>,
    /// Extents that only tables and windows keep in use.
    in_use: HashMap<ExtentId, InUse, RandomState>,
}

#[derive(Debug)]
struct InUse {
    /// Blocks of it.
    blocks: u32,
    /// How many of its references each slot has lost.
    lost: Vec<u32>,
}

impl Endings {
    fn new(state: &State, rest: VecDeque<SessionId>) -> Self {
        let (mut idle, mut in_use) = (Vec::new(), HashMap::default());
        for (&extent, e) in state.pool.extents().iter() {
            let Some(o) = e.owned() else { continue };
            let stays = |s: &Slot| matches!(s.block, Block::Credit(_) | Block::Held { pinned: true, .. });
            if o.slots.iter().any(stays) {
                continue;
            }
            let is_held = |s: &&Slot| matches!(s.block, Block::Held { refs: 1.., .. });
            match o.slots.iter().filter(is_held).count() as u32 {
                0 => idle.push(extent),
                blocks => {
                    _ = in_use.insert(extent, InUse { blocks, lost: vec![0; o.slots.len()] });
                }
            }
        }
        Endings { idle, steps: Vec::new(), rest, in_use }
    }

    /// A table goes.
    fn without(&mut self, state: &State, id: SessionId) -> Vec<ExtentId> {
        let mut emptied = Vec::new();
        for place in state.sessions[&id].table.iter().map(|block| block.place) {
            let Some(in_use) = self.in_use.get_mut(&place.extent) else { continue };
            let Some(lost) = in_use.lost.get_mut(place.slot as usize) else { continue };
            let Some(Slot { block: Block::Held { refs, .. }, .. }) = state.pool.slot(place) else { continue };
            *lost += 1;
            if *lost != *refs {
                continue;
            }
            in_use.blocks -= 1;
            if in_use.blocks == 0 {
                emptied.push(place.extent);
            }
        }
        emptied
    }
}

#[cfg(test)]
mod tests;
