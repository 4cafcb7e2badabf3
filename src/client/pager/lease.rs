//! A pager's blocks at one broker.
//!
//! Owns a session there, whose table is the list of units in the order in which they were granted. Invariants: a block
//! is in the table, in `spare`, or on its way to the broker; the broker knows the first `reported` entries. A lease
//! whose connection is lost keeps its blocks mapped and mends nothing: the kernel keeps them for this process.

use std::sync::Arc;

use super::layout::Layout;
use super::{PagerOptions, PagerPlane};
use crate::client::credit::Spare;
use crate::client::{Client, Error, Format, lock, read_one};
use crate::id::BlockId;
use crate::profile::Plane;
use crate::wire::{self, MAX_BLOCKS, Verb, Writer};
use sha2::{Digest, Sha256};

/// Entries that one message names, so that it and its reply stay far below the longest.
const PART: usize = MAX_BLOCKS / 2;

/// A block that is in no table yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Taken {
    spare: Spare,
    block: BlockId,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lease {
    client: Client,
    format: Arc<Format>,
    planes: Vec<Plane>,
    session: u64,
    tokens_per_block: usize,
    entries: Vec<(usize, BlockId)>,
    reported: usize,
    /// Blocks for units to come, with [`PagerOptions::whole`].
    spare: std::sync::Mutex<Vec<Spare>>,
    keep: bool,
}

impl Lease {
    /// Registers the geometry and opens a session.
    pub fn open(
        client: Client,
        layout: &Layout,
        planes: &[PagerPlane],
        options: &PagerOptions,
    ) -> Result<Self, Error> {
        let profile = layout.profile(&options.name, &options.element, planes)?;
        let tokens_per_block = profile.tokens_per_block() as usize;
        let known = client.profile(&profile)?;
        let open = wire::Open {
            format: known.format.id.into(),
            priority: 0.into(),
            max_tokens: 0.into(),
            model: Sha256::digest("pager").into(),
            label: wire::label(&options.label),
        };
        let reply = client.shared.call(Verb::Open, 0, |w| {
            w.put(&open);
        })?;
        let opened: wire::Opened = read_one(&reply)?;
        let places = known.format.planes.iter().flatten().copied().filter(|p| p.row > 0).collect();
        Ok(Lease {
            client,
            format: known.format,
            planes: places,
            session: opened.session.get(),
            tokens_per_block,
            entries: Vec::new(),
            reported: 0,
            spare: Vec::new().into(),
            keep: options.whole,
        })
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Units in the table.
    pub fn held(&self) -> usize {
        self.entries.len()
    }

    /// These.
    pub fn units(&self) -> Vec<usize> {
        self.entries.iter().map(|(unit, _)| *unit).collect()
    }

    /// Whether the broker will end the session to make room for one of higher priority.
    pub fn is_wanted_back(&self) -> bool {
        lock(&self.client.shared.wanted).contains_key(&self.session)
    }

    /// It has made room.
    pub fn forget_request(&self) {
        lock(&self.client.shared.wanted).remove(&self.session);
    }

    /// Whether it has.
    pub fn is_taken(&self) -> bool {
        self.client.shared.has_lost(self.session)
    }

    /// Refuses when not even one block can be had.
    pub fn admit_one(&self) -> Result<(), Error> {
        let room = self.client.shared.room(&self.format, 0)?;
        if room.free == 0 {
            let (needed, available) = (1, 0);
            let text = format!(
                "no block of {} bytes can be granted now: the pool, or this tenant's share of it, is in use",
                self.format.slot_bytes
            );
            return Err(Error::Refused { fault: wire::Fault::Busy, needed, available, text });
        }
        Ok(())
    }

    /// Takes blocks for all units now.
    pub fn reserve(&self, units: usize) -> Result<(), Error> {
        let room = self.client.shared.room(&self.format, 0)?;
        let (needed, free) = (units as u64, room.free);
        if needed > free {
            let never = needed > room.capacity;
            let fault = if never { wire::Fault::NeverFits } else { wire::Fault::Busy };
            let available = if never { room.capacity } else { free };
            let bytes = self.format.slot_bytes;
            let text = format!(
                "the whole context takes {needed} blocks of {bytes} bytes, {available} {}: use a shorter context or fewer slots, or leave KVBROKER_ADMIT unset to be granted what is written",
                if never { "is the most that this tenant can hold" } else { "can be granted now" }
            );
            return Err(Error::Refused { fault, needed, available, text });
        }
        let got = self.client.shared.reserve(&self.format, units)?;
        lock(&self.spare).extend(got);
        Ok(())
    }

    /// Takes blocks: from what is reserved, from late answers, and the rest from the broker. All or none.
    pub fn take(&mut self, count: usize) -> Result<Vec<Taken>, Error> {
        let mut got: Vec<Spare> = Vec::with_capacity(count);
        {
            let mut spare = lock(&self.spare);
            let keep = spare.len().saturating_sub(count);
            got.extend(spare.drain(keep..));
        }
        while got.len() < count {
            match self.format.credits.take() {
                Some(late) => got.push(late),
                None => break,
            }
        }
        match self.client.shared.reserve(&self.format, count - got.len()) {
            Ok(more) => got.extend(more),
            Err(e) => {
                self.free(got);
                return Err(e);
            }
        }
        let named = |spare: &Spare| {
            let block = self.client.shared.name(spare.position, spare.slot, spare.generation)?;
            Some(Taken { spare: *spare, block })
        };
        let all: Option<Vec<Taken>> = got.iter().map(named).collect();
        all.ok_or_else(|| Error::Protocol("a block lies in no extent".into()))
    }

    /// Blocks of [`take`](Self::take) that were not used after all.
    pub fn put_back(&self, blocks: &[Taken]) {
        self.free(blocks.iter().map(|t| Spare { zero: false, ..t.spare }).collect());
    }

    fn free(&self, spares: Vec<Spare>) {
        if self.keep {
            lock(&self.spare).extend(spares);
        } else if let Err(e) = self.client.shared.free(&self.format, spares) {
            // They stay credit of this process, and are taken next.
            log::debug!("a pager's blocks were not given back: {e}");
        }
    }

    fn offset(&self, block: &Taken) -> usize {
        block.spare.slot as usize * self.format.slot_bytes
    }

    /// Makes a block read as zero.
    pub fn zero(&self, block: &Taken) {
        if block.spare.zero {
            return;
        }
        let arena = &self.client.shared.arena;
        let page = arena.page(block.spare.position, self.offset(block)) as usize;
        let at = arena.base().wrapping_add(page << crate::attention::PAGE_SHIFT);
        // SAFETY: a whole block in a mapped extent, and in no table yet, so nobody else's.
        unsafe { at.write_bytes(0, self.format.slot_bytes) };
    }

    /// Maps one plane of a block at `at`.
    ///
    /// # Safety
    /// `at..at + bytes` is the caller's, and nothing refers to what was mapped there.
    pub unsafe fn alias(&self, block: &Taken, plane: usize, at: *mut u8, bytes: usize) -> Result<(), Error> {
        let offset = self.offset(block) + self.planes[plane].offset;
        // SAFETY: passed on to the caller.
        unsafe { self.client.shared.arena.alias(block.block.place.extent, offset, bytes, at, true) }
            .map_err(|source| Error::Map { what: format!("{} for a pager", block.block), source })
    }

    /// The block is the unit's from now on.
    pub fn hold(&mut self, unit: usize, block: &Taken) {
        self.entries.push((unit, block.block));
    }

    /// Tells the broker in which table the blocks are that it gave.
    pub fn report(&mut self) {
        if let Err(e) = self.try_report() {
            // With the next grant, then.
            log::debug!("a pager's table was not reported: {e}");
        }
    }

    fn try_report(&mut self) -> Result<(), Error> {
        while self.reported < self.entries.len() {
            let end = self.entries.len().min(self.reported + PART);
            self.send(Verb::Grow, self.reported..end, |w, report| {
                w.put(&wire::Grow { report, want: 0.into(), least: 0.into() });
            })?;
            self.reported = end;
        }
        Ok(())
    }

    fn send(
        &self,
        verb: Verb,
        some: std::ops::Range<usize>,
        body: impl FnOnce(&mut Writer, wire::Report),
    ) -> Result<crate::client::Message, Error> {
        let report = wire::Report {
            tokens: ((some.end * self.tokens_per_block) as u64).into(),
            first: (some.start as u32).into(),
            used: (some.len() as u32).into(),
        };
        let blocks = self.entries[some].iter().map(|(_, block)| *block);
        self.client.shared.call(verb, self.session, |w| {
            body(w, report);
            w.put_blocks(blocks);
        })
    }

    /// Gives back all blocks: nothing of them is mapped any more.
    pub fn drop_all(&mut self) {
        self.drop_from(0, &[]);
    }

    /// Gives back the blocks of `units`, which are mapped nowhere any more.
    pub fn drop_units(&mut self, units: &[usize]) {
        let first = self.entries.iter().position(|(unit, _)| units.contains(unit));
        let Some(first) = first else { return };
        let kept: Vec<_> =
            self.entries[first..].iter().copied().filter(|(unit, _)| !units.contains(unit)).collect();
        self.drop_from(first, &kept);
    }

    /// The table ends at `first`, and goes on with `kept`, which were in it before.
    fn drop_from(&mut self, first: usize, kept: &[(usize, BlockId)]) {
        if let Err(e) = self.try_drop_from(first, kept) {
            // Without a broker there is nobody to take them: they are unused until this lease ends.
            log::debug!("a pager's blocks were not given back: {e}");
        }
        self.entries.truncate(first);
        self.entries.extend_from_slice(kept);
        self.reported = self.reported.min(first);
        if !kept.is_empty() {
            self.report();
        }
    }

    fn try_drop_from(&mut self, first: usize, kept: &[(usize, BlockId)]) -> Result<(), Error> {
        self.try_report()?;
        // As credit, so that what stays can enter the table again; or all the way.
        let to_credit = self.keep || !kept.is_empty();
        let mut end = self.entries.len();
        while end > first {
            let next = first.max(end.saturating_sub(PART));
            let tokens = (next * self.tokens_per_block) as u64;
            let reply = self.send(Verb::Trim, end..end, |w, report| {
                let (head, release) = (0.into(), u32::from(!to_credit).into());
                w.put(&wire::Trim { report, tokens: tokens.into(), head, release });
            })?;
            end = next;
            self.reported = self.reported.min(end);
            let returned = reply.granted()?.1;
            let (mut unused, keeps) = (Vec::new(), |block| kept.iter().any(|(_, k)| Some(*k) == block));
            for (spare, _) in returned {
                let name = self.client.shared.name(spare.position, spare.slot, spare.generation);
                if !keeps(name) {
                    unused.push(Spare { zero: false, ..spare });
                }
            }
            self.free(unused);
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let closed = self.try_report().and_then(|()| {
            let end = self.entries.len();
            self.send(Verb::Close, end..end, |w, report| {
                w.put(&report);
            })
        });
        let spares: Vec<Spare> = std::mem::take(&mut *lock(&self.spare));
        let freed = closed.and_then(|_| self.client.shared.free(&self.format, spares));
        self.client.shared.forget(self.session);
        match freed {
            Ok(()) | Err(Error::Lost(_) | Error::Forked) => {}
            Err(e) => log::warn!("a pager's session {} was not closed: {e}", self.session),
        }
    }
}
