//! Checksums of sealed blocks: taken after the seal, and compared when an operator asks (`kvbctl fsck`).
//!
//! Owns the queue of blocks that are to be read. Invariants: the worker has one piece of one block at most, so that
//! zeros and renewals never wait for more than that; a sum is kept for, and compared with, the very life of the place
//! that was read; a block that is found damaged is found by no look-up any more, and is published by nobody again, from
//! the step on in which its holders are told.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{Broker, Job};
use crate::id::{BlockId, SessionId};
use crate::pool::Block;
use crate::seldom::seldom;
use crate::wire::{self, Event};

/// Bytes that the worker reads at a time.
const PIECE: u64 = 256 << 10;
/// Damaged blocks that a report names; it counts all.
const MOST_NAMED: usize = 64;

/// What a check has found so far: `kvbctl fsck`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FsckReport {
    /// Which check since the start; 0 before the first.
    pub run: u64,
    /// It is not through yet.
    pub running: bool,
    /// Sealed blocks that it looks at: those that could be found when it began.
    pub blocks: u64,
    /// Of these, as they were when they were sealed.
    pub intact: u64,
    /// Read for the first time: their sums are known from now on.
    pub first: u64,
    /// Freed before they were read.
    pub gone: u64,
    /// Could not be read; the log says why.
    pub unreadable: u64,
    /// Not what was sealed: dropped, and their holders told.
    pub damaged: u64,
    /// The first of these.
    pub found: Vec<DamageReport>,
}

/// A damaged block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamageReport {
    /// The extent.
    pub extent: u32,
    /// The slot in it.
    pub slot: u32,
    /// Whose it is.
    pub uid: u32,
    /// Sessions that have it in their tables.
    pub sessions: Vec<u64>,
    /// Pinned chains that it was part of, which are pinned no more.
    pub unpinned: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// Sealed, and not read yet.
    fresh: VecDeque<BlockId>,
    /// To be compared.
    check: VecDeque<BlockId>,
    reading: Option<Reading>,
    report: FsckReport,
}

/// The block that the worker reads.
#[derive(Debug)]
struct Reading {
    block: BlockId,
    for_check: bool,
    /// The sum of what has been read, and where the next piece ends.
    sum: u32,
    next: u64,
}

impl Broker {
    /// A block has got a name: its sum is taken when the worker has time.
    pub(super) fn sum_later(&mut self, block: BlockId) {
        if self.policy.checksums {
            self.sums.fresh.push_back(block);
        }
    }

    /// The same for all whose sum is not known, as after a restart.
    pub(super) fn sum_all_later(&mut self) {
        let without =
            |(_, block, ..): &(_, BlockId, _, _)| self.state.prefixes.checksum(*block) == Some(None);
        let blocks: Vec<BlockId> = self.state.prefixes.iter().filter(without).map(|(_, b, ..)| b).collect();
        blocks.into_iter().for_each(|block| self.sum_later(block));
    }

    /// Begins to verify every sealed block that can be found, unless that is being done.
    pub fn begin_fsck(&mut self) -> FsckReport {
        if !self.sums.report.running {
            self.sums.check = self.state.prefixes.iter().map(|(_, block, ..)| block).collect();
            let (run, blocks) = (self.sums.report.run + 1, self.sums.check.len() as u64);
            self.sums.report = FsckReport { run, running: true, blocks, ..FsckReport::default() };
            self.settle();
        }
        self.fsck()
    }

    /// How far it is.
    pub fn fsck(&self) -> FsckReport {
        self.sums.report.clone()
    }

    /// Whether sums of what was sealed are still to be taken.
    pub(super) fn is_summing(&self) -> bool {
        self.sums.reading.is_some() || !self.sums.fresh.is_empty()
    }

    /// Gives the worker something to read if it has nothing.
    pub(super) fn order_sum(&mut self) {
        while self.sums.reading.is_none() {
            let (block, for_check) = match (self.sums.fresh.pop_front(), self.sums.report.running) {
                (Some(block), _) => (block, false),
                (None, true) => match self.sums.check.pop_front() {
                    Some(block) => (block, true),
                    None => {
                        self.sums.report.running = false;
                        return;
                    }
                },
                (None, false) => return,
            };
            self.sums.reading = Some(Reading { block, for_check, sum: 0, next: 0 });
            self.read_on();
        }
    }

    /// Orders the next piece of the block that is being read, unless it is gone.
    fn read_on(&mut self) {
        let Some(Reading { block, sum, next, .. }) = self.sums.reading else { return };
        let known = self.state.prefixes.checksum(block).is_some();
        let Some((buffer, range)) = self.piece(block).filter(|_| known) else {
            return self.end_reading(|report| report.gone += 1);
        };
        let from = range.start + next;
        let piece = from..range.end.min(from + PIECE);
        if let Some(reading) = &mut self.sums.reading {
            reading.next = piece.end - range.start;
        }
        self.jobs.push_back(Job::Sum { block, buffer, piece, sum });
    }

    fn end_reading(&mut self, count: impl FnOnce(&mut FsckReport)) {
        if self.sums.reading.take().is_some_and(|r| r.for_check) {
            count(&mut self.sums.report);
        }
    }

    /// The worker has read a piece.
    pub(super) fn summed(&mut self, block: BlockId, result: Result<u32, String>) {
        let Some(reading) = self.sums.reading.as_mut().filter(|r| r.block == block) else { return };
        let sum = match result {
            Ok(sum) => sum,
            Err(why) => {
                seldom!(warn, "{block} cannot be read for its checksum: {why}");
                return self.end_reading(|report| report.unreadable += 1);
            }
        };
        reading.sum = sum;
        let read = reading.next;
        let Some((_, range)) = self.piece(block) else { return self.end_reading(|report| report.gone += 1) };
        if read < range.end - range.start {
            return self.read_on();
        }
        match self.state.prefixes.checksum(block) {
            None => self.end_reading(|report| report.gone += 1),
            Some(None) => {
                self.state.prefixes.set_checksum(block, sum);
                self.end_reading(|report| report.first += 1);
            }
            Some(Some(sealed)) if sealed == sum => self.end_reading(|report| report.intact += 1),
            Some(Some(_)) => {
                let damage = self.drop_damaged(block);
                self.end_reading(|report| {
                    report.damaged += 1;
                    if report.found.len() < MOST_NAMED {
                        report.found.push(damage);
                    }
                });
            }
        }
    }

    /// Nobody finds the block any more, what pinned it is lifted, and who has it is told.
    pub(super) fn drop_damaged(&mut self, block: BlockId) -> DamageReport {
        let BlockId { place, .. } = block;
        let tenant = self.state.pool.extents().get(&place.extent).and_then(|e| e.owned()).map(|o| o.tenant);
        let chains = self.state.prefixes.pins_of(block);
        for chain in &chains {
            self.lift_pin(chain);
        }
        // What the broker itself pinned, to copy or to save it, is nobody's chain.
        for own in self.state.prefixes.pins_of(block) {
            if let Some(name) = self.state.prefixes.name_of(block) {
                self.set_pinned(&name, own, false);
            }
        }
        let number = |s: &super::Session| s.table.iter().position(|b| *b == block).map(|i| s.head + i as u32);
        let holders: Vec<(SessionId, u32)> =
            self.state.sessions.iter().filter_map(|(id, s)| Some((*id, number(s)?))).collect();
        seldom!(
            error,
            "{block} of uid {} is not what was sealed: it is dropped; {} sessions have it, {} pins are lifted",
            tenant.map_or(0, |t| t.0),
            holders.len(),
            chains.len()
        );
        self.state.counters.damaged += 1;
        if self.state.pool.slot(place).is_some_and(|s| s.block.is_cached()) {
            self.state.prefixes.forget(place);
            self.state.pool.evict(place);
            self.state.pool.release_if_idle(place.extent);
        } else {
            self.state.prefixes.forget(place);
            // Marks of blocks that have gone meanwhile need not be kept.
            let pool = &self.state.pool;
            let lives = |b: &BlockId| matches!(pool.check_claim(*b), Ok(Block::Held { .. }));
            self.state.prefixes.mark_damaged(block, lives);
        }
        for (id, block) in &holders {
            let (session, block) = (id.number.into(), (*block).into());
            let body = wire::Damaged { session, block, reserved: 0.into() };
            self.tell(self.state.sessions[id].client, Event::PrefixDamaged, id.number, &body);
        }
        DamageReport {
            extent: place.extent.0,
            slot: place.slot,
            uid: tenant.map_or(0, |t| t.0),
            sessions: holders.iter().map(|(id, _)| id.number).collect(),
            unpinned: chains.len() as u32,
        }
    }
}
