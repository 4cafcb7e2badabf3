//! Long walks, each made once for all who ask the same: over the tables of all sessions, and over the cached blocks of extents
//! with nothing else in them.
//!
//! Owns what was found, and of which state of the pool and the index it is true. Invariant: nothing is read here that was found
//! before either changed: so sixty requests that wait cost one walk, not sixty, whatever their priorities
//! (`cargo test --lib walks`).

use std::cell::RefMut;
use std::collections::{BTreeMap, HashMap};

use foldhash::fast::RandomState;

use super::{Broker, Session, State};
use crate::id::{ExtentId, Place, SessionId};
use crate::pool::{Block, Slot};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Walks {
    /// When all of this was found: the changes of the pool and of the index until then.
    at: (u64, u64),
    held: Option<Held>,
    /// Whether every cached block of these can be evicted.
    evictable: BTreeMap<ExtentId, bool>,
    /// Names in tables, and cached blocks, that were looked at.
    #[cfg(test)]
    pub looked: u64,
}

/// Who holds what. An extent stands in one of both, or in none where something holds a block of it that is no table.
#[derive(Debug, Default)]
struct Held {
    /// Without a block in use.
    idle: Vec<ExtentId>,
    /// With blocks that sessions hold, and nobody else.
    by_sessions: Vec<(ExtentId, Sessions)>,
}

/// The sessions that hold blocks of an extent.
#[derive(Debug, Clone, Copy)]
struct Sessions {
    /// The highest priority of them.
    priority: u8,
    /// All of them have been asked to make room.
    asked: bool,
}

/// Which sessions are thought to have ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum Without {
    /// None.
    None,
    /// Those below this priority that were asked to make room.
    Asked(u8),
    /// All below this priority.
    Below(u8),
}

impl Broker {
    /// What was found in the state as it is now.
    fn walks(&self) -> RefMut<'_, Walks> {
        let at = (self.state.pool.changes(), self.state.prefixes.changes());
        let mut walks = self.walks.borrow_mut();
        if walks.at != at {
            walks.at = at;
            walks.held = None;
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

    /// Sessions have been asked to make room that had not been, or are asked no more.
    pub(super) fn others_are_asked(&mut self) {
        self.walks.get_mut().held = None;
    }

    /// The extents without a block in use if these sessions had ended.
    pub(super) fn emptied(&self, without: Without) -> Vec<ExtentId> {
        let mut walks = self.walks();
        if walks.held.is_none() {
            let mut tables = Tables::new(&self.state);
            for (id, s) in &self.state.sessions {
                tables.without(&self.state, s, self.reclaims.contains_key(id));
            }
            #[cfg(test)]
            {
                walks.looked += tables.looked;
            }
            walks.held = Some(tables.into_held());
        }
        let Some(Held { idle, by_sessions }) = &walks.held else { return Vec::new() };
        let goes = |sessions: &Sessions| match without {
            Without::None => false,
            Without::Asked(below) => sessions.asked && sessions.priority < below,
            Without::Below(below) => sessions.priority < below,
        };
        let theirs = by_sessions.iter().filter(|(_, sessions)| goes(sessions)).map(|(extent, _)| extent);
        idle.iter().chain(theirs).copied().collect()
    }

    /// Which extents are without a block in use after each of these sessions, if they end in this order: those that were not
    /// before. Looks at a table when it is asked for the step.
    pub(super) fn endings(&self, order: Vec<SessionId>) -> impl Iterator<Item = (SessionId, Vec<ExtentId>)> {
        let mut tables = Tables::new(&self.state);
        order.into_iter().map(move |id| {
            let emptied = tables.without(&self.state, &self.state.sessions[&id], false);
            #[cfg(test)]
            {
                self.walks.borrow_mut().looked += std::mem::take(&mut tables.looked);
            }
            (id, emptied)
        })
    }
}

/// Tables, taken away one after the other.
struct Tables {
    idle: Vec<ExtentId>,
    in_use: HashMap<ExtentId, InUse, RandomState>,
    #[cfg(test)]
    looked: u64,
}

/// An extent with blocks that tables or windows hold.
struct InUse {
    /// So many.
    blocks: u32,
    /// How many of its references each slot has lost.
    lost: Vec<u32>,
    sessions: Sessions,
}

impl Tables {
    /// All of them are there. Extents with credit or pinned blocks are left out: no session's end empties them.
    fn new(state: &State) -> Self {
        let (mut idle, mut in_use) = (Vec::new(), HashMap::default());
        for (&extent, e) in state.pool.extents().iter() {
            let Some(o) = e.owned() else { continue };
            let stays = |s: &Slot| matches!(s.block, Block::Credit(_) | Block::Held { pinned: true, .. });
            if o.slots.iter().any(stays) {
                continue;
            }
            let is_held = |s: &&Slot| matches!(s.block, Block::Held { refs: 1.., .. });
            let blocks = o.slots.iter().filter(is_held).count() as u32;
            if blocks == 0 {
                idle.push(extent);
                continue;
            }
            let (lost, sessions) = (vec![0; o.slots.len()], Sessions { priority: 0, asked: true });
            in_use.insert(extent, InUse { blocks, lost, sessions });
        }
        Tables {
            idle,
            in_use,
            #[cfg(test)]
            looked: 0,
        }
    }

    /// A table goes. The extents that are without a block in use with that.
    fn without(&mut self, state: &State, session: &Session, asked: bool) -> Vec<ExtentId> {
        let mut emptied = Vec::new();
        for place in session.table.iter().map(|block| block.place) {
            #[cfg(test)]
            {
                self.looked += 1;
            }
            let Some(in_use) = self.in_use.get_mut(&place.extent) else { continue };
            in_use.sessions.priority = in_use.sessions.priority.max(session.priority);
            in_use.sessions.asked &= asked;
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

    /// All of them have gone.
    fn into_held(self) -> Held {
        let emptied = self.in_use.into_iter().filter(|(_, in_use)| in_use.blocks == 0);
        let by_sessions: BTreeMap<_, _> = emptied.map(|(extent, in_use)| (extent, in_use.sessions)).collect();
        Held { idle: self.idle, by_sessions: by_sessions.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests;
