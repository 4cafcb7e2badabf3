//! The check of the books: as a whole, and a piece at a time, so that nobody waits for it long.
//!
//! Owns where the check is. Invariants:
//! - one call of [`Broker::check_some`] visits at most [`PER_CALL`] things (entries of tables, blocks under windows,
//!   places), whatever clients hold;
//! - what a piece finds wrong is a suspicion: the whole is counted anew at once ([`Broker::verify`]), and only what that
//!   finds stops grants. So a change between two pieces can cost time, and never raises a false alarm.
//!
//! What fits into one call is checked as a whole. What does not is swept with a cursor: first tables, then windows, then
//! places. Each thing is held against the others that it names, which is true at any moment. Sums over all of it (how many
//! tables a place stands in, the ledger) are compared at the end of a sweep only if nothing has changed since it began;
//! whoever changes something voids them, and the next sweep begins new ones. Indices that are derived from the rest are
//! compared by the whole check alone: at an operator's word (`kvbctl check`), when a record is read, and in tests.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Broker, Session, State, tables};
use crate::id::{BlockId, ExtentId, Place, SessionId};
use crate::pool::{Account, Block, Extent, Ledger, Owned, Slot, Use};

/// Things that one call visits at most. A pool of 256M that is full of the reference model's blocks has some 2700, so there
/// one call is all of it.
pub(super) const PER_CALL: usize = 8192;

/// What one call has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// Things that it visited.
    pub visited: usize,
    /// Nothing is left to be visited by this sweep.
    pub through: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Audit {
    /// Counts the ends of changes: between two moments with the same count nothing has been changed.
    changes: u64,
    sweep: Option<Sweep>,
    /// Suspicions that the whole check did not share.
    false_alarms: u64,
}

impl Audit {
    /// Something may have changed.
    pub fn changed(&mut self) {
        self.changes += 1;
    }
}

/// Where a sweep is: what comes next.
#[derive(Debug, Clone, Copy)]
enum At {
    /// An entry of the table of this session, or of the next one.
    Table(SessionId, usize),
    /// A block under this window, or under the next one.
    Window(u64, usize),
    /// A place of this extent, or of the next one.
    Place(ExtentId, usize),
}

#[derive(Debug)]
struct Sweep {
    at: At,
    /// The changes that there were when the sums were begun.
    since: u64,
    /// Void once something has changed.
    sums: Option<Sums>,
    /// The counts of the extent that the sweep is in, and the changes that there were when they were begun.
    extent: (u64, Counts),
}

/// Tables and windows that each place stands in or under, and where the bytes of the pool are.
#[derive(Debug, Default)]
struct Sums {
    refs: BTreeMap<Place, u32>,
    entries: u64,
    ledger: Ledger,
}

/// Places of one extent that are free, cached, suspect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts([u32; 3]);

impl Counts {
    fn add(&mut self, block: Block) {
        let [free, cached, suspect] = &mut self.0;
        *free += u32::from(block == Block::Free);
        *cached += u32::from(block.is_cached());
        *suspect += u32::from(matches!(block, Block::Suspect(_)));
    }
}

impl Broker {
    /// Checks every invariant, however long that takes: see [`check_some`](Self::check_some). A violation is logged with the last requests and stops new grants; releases go on.
    pub fn check(&mut self) {
        if self.frozen {
            return;
        }
        if let Err(what) = self.verify() {
            self.frozen = true;
            log::error!("the broker's books do not add up: {what}; no more grants until a restart");
            for (client, verb, session) in &self.recorder {
                log::error!("before that: client {} {} session {session}", client.0, verb.name());
            }
        }
    }

    /// Counts everything anew. The error says what does not add up.
    pub fn verify(&self) -> Result<(), String> {
        self.verify_state()?;
        let pool = &self.state.pool;
        let absent = (pool.renewing() + pool.quarantined()) as usize;
        if self.buffers.len() + absent + pool.lent() as usize != pool.extents().len() {
            return Err(format!("{} buffers for {} extents", self.buffers.len(), pool.extents().len()));
        }
        if (self.kept_extents() as u32) < pool.quarantined() || self.kept_extents() > absent {
            return Err(format!(
                "{} buffers kept, {} in quarantine",
                self.kept_extents(),
                pool.quarantined()
            ));
        }
        if tables::Tables::count(&self.state) != self.tables {
            return Err(
                "the count of table entries and of names of pins differs from the tables and the pins".into(),
            );
        }
        self.check_loans()?;
        self.check_copies()?;
        self.check_alone()?;
        self.check_consent()
    }

    /// The part of it that a record can be held to: all but the buffers, and what a restart forgets.
    pub(super) fn verify_state(&self) -> Result<(), String> {
        let State { pool, formats, sessions, prefixes, .. } = &self.state;
        pool.check()?;
        if let Some((id, _)) =
            pool.extents().iter().find(|(_, e)| e.owned().is_some_and(|o| !formats.contains_key(&o.format)))
        {
            return Err(format!("{id} holds blocks of no format"));
        }
        let mut refs: BTreeMap<_, u32> = BTreeMap::new();
        for (id, s) in sessions {
            self.check_session(*id, s)?;
            for (at, block) in s.table.iter().enumerate() {
                self.check_entry(*id, s, at, *block)?;
                if !block.place.extent.is_copy() {
                    *refs.entry(block.place).or_default() += 1;
                }
            }
        }
        for (place, windows) in self.window_refs()? {
            *refs.entry(place).or_default() += windows;
        }
        for (&extent, e) in pool.extents().iter() {
            for (slot, s) in e.owned().iter().flat_map(|o| o.slots.iter().enumerate()) {
                let place = Place { extent, slot: slot as u32 };
                check_slot(place, s, e, Some(refs.get(&place).copied().unwrap_or(0)))?;
            }
        }
        for (_, block, _, pinned) in prefixes.iter() {
            match pool.check_claim(block) {
                Ok(Block::Held { sealed: true, pinned: p, .. }) if p == pinned => {}
                other => return Err(format!("the prefix index names {block}: {other:?}, pinned {pinned}")),
            }
        }
        prefixes.check()?;
        for (name, block, _, _) in prefixes.iter() {
            let cached = pool.slot(block.place).is_some_and(|s| s.block.is_cached());
            if cached != prefixes.is_idle(name) {
                return Err(format!("{block} is cached: {cached}, by the index {}", !cached));
            }
        }
        let cached: u64 =
            pool.extents().values().filter_map(|e| e.owned()).map(|o| u64::from(o.cached)).sum();
        if prefixes.iter().filter(|(name, ..)| prefixes.is_idle(name)).count() as u64 != cached {
            return Err(format!("{cached} blocks are cached that nobody can find"));
        }
        self.check_promises()
    }

    /// What is true of a session whatever is in its table.
    fn check_session(&self, id: SessionId, s: &Session) -> Result<(), String> {
        let (end, sealed) = (u64::from(s.head) + s.table.len() as u64, s.names.len() as u64);
        let known = self.state.formats.contains_key(&s.format);
        if end.max(u64::from(s.names_from) + sealed) > u32::MAX.into() || !known {
            return Err(format!("{id} has {end} blocks, {sealed} of them sealed, of format {}", s.format.0));
        }
        let youngest = self.state.session_numbers.get(&id.tenant);
        if id.tenant != s.tenant
            || youngest.is_none_or(|n| id.number > *n)
            || s.born > self.state.sessions_born
        {
            return Err(format!("{id} of uid {} has a number that was never given", s.tenant.0));
        }
        if !self.state.clients.get(&s.client).is_some_and(|c| c.sessions.contains(&id)) {
            return Err(format!("{id} is on no connection"));
        }
        Ok(())
    }

    /// What is true of one entry of its table.
    fn check_entry(&self, id: SessionId, s: &Session, at: usize, block: BlockId) -> Result<(), String> {
        if block.place.extent.is_copy() {
            return match self.state.common.is_held(block, s.client) {
                true => Ok(()),
                false => Err(format!("{id} has {block} of a copy in its table, which it has not got")),
            };
        }
        let sealed_by_session = at < s.sealed().saturating_sub(s.head) as usize;
        match self.state.pool.check_claim(block) {
            Ok(Block::Held { sealed, .. }) if self.state.pool.is_holder(block.place.extent, s.client) => {
                match sealed_by_session && !sealed {
                    true => Err(format!("{id} counts {block} as sealed")),
                    false => Ok(()),
                }
            }
            other => Err(format!("{id} has {block} in its table: {other:?}")),
        }
    }

    /// Checks all invariants if that is little work, else some of them, and goes on there when it is called again. Like
    /// [`check`](Self::check) it logs what is violated, and stops new grants.
    pub fn check_some(&mut self) -> Checked {
        self.check_at_most(PER_CALL)
    }

    /// The same with another bound than [`PER_CALL`].
    pub(super) fn check_at_most(&mut self, most: usize) -> Checked {
        let size = self.size_of_books();
        if self.frozen || (self.audit.sweep.is_none() && size <= most) {
            self.check();
            return Checked { visited: if self.frozen { 0 } else { size }, through: true };
        }
        let now = self.audit.changes;
        let mut sweep = self.audit.sweep.take().unwrap_or_else(|| Sweep {
            at: At::Table(SessionId::FIRST, 0),
            since: now,
            sums: Some(Sums::default()),
            extent: (now, Counts::default()),
        });
        if sweep.since != now {
            sweep.sums = None;
        }
        let mut left = most;
        match self.sweep(&mut sweep, &mut left) {
            Ok(through) => {
                self.audit.sweep = (!through).then_some(sweep);
                Checked { visited: most - left, through }
            }
            Err(what) => {
                self.check();
                if !self.frozen {
                    self.audit.false_alarms += 1;
                    log::warn!("a part of the check found that {what}; all of it, counted anew, adds up");
                }
                Checked { visited: most - left, through: true }
            }
        }
    }

    /// Suspicions so far that the whole check did not share: each one is a fault of the sweep.
    #[cfg(test)]
    pub(super) fn false_alarms(&self) -> u64 {
        self.audit.false_alarms
    }

    /// Whether a sweep has begun and is not through.
    pub fn is_checking(&self) -> bool {
        self.audit.sweep.is_some()
    }

    /// Things that the whole check visits.
    fn size_of_books(&self) -> usize {
        let state = &self.state;
        let owned = state.pool.extents().values().filter_map(Extent::owned);
        let places: usize = owned.map(|o| o.slots.len()).sum();
        // Each block knows the chains that it is pinned for.
        let pins: usize = state.prefixes.pins().map(|(_, pin)| pin.blocks as usize).sum();
        let windows: usize = state.windows.values().map(|h| 1 + h.blocks().len()).sum();
        let tables = state.sessions.len() + self.tables.total() as usize;
        // Places are visited by the pool's part and by that of the prefixes.
        state.pool.extents().len() + 2 * places + pins + windows + tables
    }

    /// Visits `left` things and counts them down; whether the sweep is through.
    fn sweep(&self, sweep: &mut Sweep, left: &mut usize) -> Result<bool, String> {
        while *left > 0 {
            let next = match sweep.at {
                At::Table(id, from) => self.sweep_table(&mut sweep.sums, id, from, left)?,
                At::Window(id, from) => self.sweep_window(&mut sweep.sums, id, from, left)?,
                At::Place(id, from) => self.sweep_places(sweep, id, from, left)?,
            };
            match next {
                Some(next) => sweep.at = next,
                None => return self.compare(sweep.sums.take()).map(|()| true),
            }
        }
        Ok(false)
    }

    fn sweep_table(
        &self,
        sums: &mut Option<Sums>,
        id: SessionId,
        from: usize,
        left: &mut usize,
    ) -> Result<Option<At>, String> {
        let Some((&found, s)) = self.state.sessions.range(id..).next() else {
            return Ok(Some(At::Window(0, 0)));
        };
        // The session that it was in has ended meanwhile.
        let from = if found == id { from.min(s.table.len()) } else { 0 };
        *left -= 1;
        self.check_session(found, s)?;
        let until = piece(from, s.table.len(), left);
        for (i, block) in s.table[from..until].iter().enumerate() {
            self.check_entry(found, s, from + i, *block)?;
            count_ref(sums, *block);
        }
        if let Some(sums) = sums {
            sums.entries += (until - from) as u64;
        }
        Ok(Some(match until == s.table.len() {
            true => At::Table(found.next(), 0),
            false => At::Table(found, until),
        }))
    }

    fn sweep_window(
        &self,
        sums: &mut Option<Sums>,
        id: u64,
        from: usize,
        left: &mut usize,
    ) -> Result<Option<At>, String> {
        let Some((&found, h)) = self.state.windows.range(id..).next() else {
            return Ok(Some(At::Place(ExtentId(0), 0)));
        };
        let blocks = h.blocks();
        let from = if found == id { from.min(blocks.len()) } else { 0 };
        *left -= 1;
        self.check_window(found, h)?;
        let until = piece(from, blocks.len(), left);
        for block in &blocks[from..until] {
            self.check_under(found, *block)?;
            if self.windows.over(block.place) == 0 {
                return Err(format!("{block} is under window {found}, which is not counted"));
            }
            count_ref(sums, *block);
        }
        Ok(Some(match until == blocks.len() {
            true => At::Window(found + 1, 0),
            false => At::Window(found, until),
        }))
    }

    /// From a place of extent `id` on, as far as `left` goes.
    fn sweep_places(
        &self,
        sweep: &mut Sweep,
        id: ExtentId,
        from: usize,
        left: &mut usize,
    ) -> Result<Option<At>, String> {
        for (&found, e) in self.state.pool.extents().iter_from(id) {
            if *left == 0 {
                return Ok(Some(At::Place(found, 0)));
            }
            *left -= 1;
            if !e.told.is_subset(&e.holders) {
                return Err(format!("{found} is wanted from a client that has not got it"));
            }
            match e.owned() {
                None => self.sum_unowned(e, &mut sweep.sums),
                Some(o) => {
                    let from = if found == id { from.min(o.slots.len()) } else { 0 };
                    let until = piece(from, o.slots.len(), left);
                    self.sweep_owned(sweep, found, (e, o), from..until)?;
                    if until < o.slots.len() {
                        return Ok(Some(At::Place(found, until)));
                    }
                }
            }
        }
        Ok(None)
    }

    fn sum_unowned(&self, e: &Extent, sums: &mut Option<Sums>) {
        let Some(sums) = sums else { return };
        let account = match e.usage {
            Use::Quarantined => Account::Quarantined,
            Use::Lent => Account::Lent,
            _ => Account::Free,
        };
        sums.ledger[account] += self.state.pool.extent_bytes();
    }

    /// Some places of an extent; with the last one, what it counts of all of them.
    fn sweep_owned(
        &self,
        sweep: &mut Sweep,
        id: ExtentId,
        (e, o): (&Extent, &Owned),
        slots: Range<usize>,
    ) -> Result<(), String> {
        if slots.start == 0 {
            sweep.extent = (self.audit.changes, Counts::default());
        }
        for slot in slots.clone() {
            let place = Place { extent: id, slot: slot as u32 };
            self.check_place(place, e, o, &sweep.sums)?;
            let block = o.slots[slot].block;
            sweep.extent.1.add(block);
            if let Some(sums) = &mut sweep.sums {
                sums.ledger[block.account()] += o.slot_bytes;
            }
        }
        if slots.end < o.slots.len() {
            return Ok(());
        }
        if let Some(sums) = &mut sweep.sums {
            sums.ledger[Account::Waste] +=
                self.state.pool.extent_bytes() - o.slot_bytes * o.slots.len() as u64;
        }
        let (since, counted) = sweep.extent;
        let said = Counts([o.free, o.cached, o.suspect]);
        match since == self.audit.changes && counted != said {
            true => Err(format!(
                "{id} counts {:?} places that are free, cached, suspect; it has {:?}",
                said.0, counted.0
            )),
            false => Ok(()),
        }
    }

    /// One place against the tables, if they are counted, and against the index of prefixes.
    fn check_place(&self, place: Place, e: &Extent, o: &Owned, sums: &Option<Sums>) -> Result<(), String> {
        let s = &o.slots[place.slot as usize];
        let stands = sums.as_ref().map(|sums| sums.refs.get(&place).copied().unwrap_or(0));
        check_slot(place, s, e, stands)?;
        if s.generation > e.last_generation {
            return Err(format!("{place:?} is in a life beyond {}", e.last_generation));
        }
        if o.wanted_back && s.block != Block::Free {
            return Err(format!("{place:?} is wanted back and in use"));
        }
        let prefixes = &self.state.prefixes;
        let name = prefixes.name_of(BlockId { place, generation: s.generation });
        let right = match (s.block, name) {
            (Block::Held { sealed, pinned, .. }, Some(name)) => {
                sealed
                    && pinned == prefixes.is_pinned(&name)
                    && s.block.is_cached() == prefixes.is_idle(&name)
            }
            (Block::Held { refs, sealed, .. }, None) => !s.block.is_cached() && (refs > 0 || sealed),
            (_, name) => name.is_none() && !prefixes.is_published(place),
        };
        match right {
            true => Ok(()),
            false => Err(format!("{place:?} holds {:?}, which the prefix index sees otherwise", s.block)),
        }
    }

    /// What was summed over the whole sweep.
    fn compare(&self, sums: Option<Sums>) -> Result<(), String> {
        let Some(sums) = sums else { return Ok(()) };
        if sums.entries != self.tables.total() {
            return Err(format!("tables have {} entries, {} are counted", sums.entries, self.tables.total()));
        }
        match sums.ledger == *self.state.pool.ledger() {
            true => Ok(()),
            false => Err(format!("ledger {:?}, counted {:?}", self.state.pool.ledger(), sums.ledger)),
        }
    }
}

/// What is true of one place; `stands`: in how many tables and under how many windows it stands, if that is known.
fn check_slot(place: Place, s: &Slot, e: &Extent, stands: Option<u32>) -> Result<(), String> {
    match (s.block, stands) {
        (Block::Held { refs, .. }, Some(stands)) if refs != stands => {
            Err(format!("{place:?} counts {refs} tables, it stands in {stands}"))
        }
        (Block::Credit(client), _) if !e.holders.contains(&client) => {
            Err(format!("{place:?} is credit of client {}, which has not its extent", client.0))
        }
        _ => Ok(()),
    }
}

/// How far a sweep gets this time from entry `from` of `len`; what it visits is counted down.
fn piece(from: usize, len: usize, left: &mut usize) -> usize {
    let until = len.min(from + *left);
    *left -= until - from;
    until
}

fn count_ref(sums: &mut Option<Sums>, block: BlockId) {
    if let Some(sums) = sums.as_mut().filter(|_| !block.place.extent.is_copy()) {
        *sums.refs.entry(block.place).or_default() += 1;
    }
}
