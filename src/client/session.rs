//! A token sequence: its block table, and everything an engine does with it.
//!
//! Owns the table as this process has it. Invariants: entry `i` of the table is where block `i` lies, also when the
//! broker does not know yet; the blocks that hold tokens at or beyond the end of what is written are private, so that
//! writing there changes nobody else's tokens; a call that returns an error has changed nothing.

#![allow(unsafe_code)]

mod skip;
mod window;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use window::{Batch, StagingStats, Window, WindowOptions, WindowPlace};

use super::credit::Spare;
use super::trust;
use super::view::View;
use super::{Error, Format, ParsedGrant, PlaneView, Shared, read_one};
use crate::attention::{PAGE_SHIFT, Paged};
use crate::id::BlockId;
use crate::profile::{Kv, Plane, Profile};
use crate::wire::{self, MAX_BLOCKS, MAX_FDS, MAX_TOKENS, Verb, Writer};

/// The most blocks that one request names, so that it stays far below the longest message.
const REPORT_BLOCKS: usize = MAX_BLOCKS / 2;

/// One entry of the table, beside its page offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    block: BlockId,
    /// Sealed, or in another table too: to be copied before it is written.
    shared: bool,
}

/// Counts of one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionStats {
    /// Tokens.
    pub tokens: usize,
    /// Blocks that only this session holds.
    pub blocks_private: usize,
    /// Blocks that are sealed, or that another session holds too.
    pub blocks_shared: usize,
    /// Blocks that this process has ahead of need, for all its sessions of this profile.
    pub blocks_credit: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
}

/// A token sequence. Its blocks go back when it is dropped.
#[derive(Debug)]
pub struct Session {
    client: Arc<Shared>,
    format: Arc<Format>,
    id: u64,
    zero: bool,
    tokens: usize,
    /// Whole blocks dropped at the head. Their entries stay, and mean nothing.
    head: usize,
    table: Vec<u32>,
    entries: Vec<Entry>,
    /// The broker knows the entries below.
    reported: usize,
    /// The block that was taken last: its neighbour is the one to take next.
    last: Option<Spare>,
    sealed: usize,
    views: Vec<View>,
}

impl Session {
    pub(super) fn new(client: Arc<Shared>, format: Arc<Format>, id: u64, zero: bool) -> Self {
        format.sessions.fetch_add(1, Ordering::Relaxed);
        Session {
            client,
            format,
            id,
            zero,
            tokens: 0,
            head: 0,
            table: Vec::new(),
            entries: Vec::new(),
            reported: 0,
            last: None,
            sealed: 0,
            views: Vec::new(),
        }
    }

    /// The session's number at the broker, as `kvbctl sessions` shows it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// When the broker ends this session to make room for one of higher priority, if it has asked: until then it is to be
    /// dropped or trimmed. Events are taken in by every call, and by [`Client::poll`](super::Client::poll). `None` when it has
    /// ended ([`is_lost`](Self::is_lost)).
    pub fn wanted_back(&self) -> Option<std::time::Instant> {
        /// An end that has not come by so long after its time does not come: whoever needed the room has it, or has gone.
        const LATE: std::time::Duration = std::time::Duration::from_secs(1);
        let until = super::lock(&self.client.wanted).get(&self.id).copied()?;
        (std::time::Instant::now() < until + LATE).then_some(until)
    }

    /// Whether the broker has ended this session to make room for one of higher priority, as far as this process knows:
    /// events are taken in as for [`wanted_back`](Self::wanted_back). From then on every call is refused with
    /// [`Fault::SessionLost`](wire::Fault::SessionLost). Who has the address of a row, a view or a window still may read and write
    /// there until the session is dropped, and disturbs nobody: but what is read is what was there, zeros, or, where the
    /// rows were sealed, what another session of the same user has there by now.
    pub fn is_lost(&self) -> bool {
        self.client.has_lost(self.id)
    }

    /// Refuses what cannot be done with a session that has ended.
    #[inline]
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        match self.is_lost() {
            false => Ok(()),
            true => Err(self.ended()),
        }
    }

    #[cold]
    fn ended(&self) -> Error {
        let text = format!(
            "session {} was ended to make room for one of higher priority: close it, and open another one",
            self.id
        );
        Error::Refused { fault: wire::Fault::SessionLost, needed: 0, available: 0, text }
    }

    /// The first token whose rows are not what they were when they were sealed, if the broker has found such: what comes
    /// from there on is to be computed anew, after [`trim`](Self::trim). Events are taken in by every call, and by
    /// [`Client::poll`](super::Client::poll).
    pub fn damaged_from(&self) -> Option<usize> {
        let block = super::lock(&self.client.damaged).get(&self.id).copied()?;
        Some((block as usize) << self.shift())
    }

    /// Asks for a promise that the session can grow to `tokens` tokens: the prompt and the longest answer, best after
    /// [`attach`](Self::attach). `may_evict`: cached prefixes of this tenant may go for it. A length that the session has
    /// already, such as 0, gives the promise back.
    pub fn admit(&mut self, tokens: usize, may_evict: bool) -> Result<super::Admission, Error> {
        // What the table has is not to be promised once more.
        self.call(Verb::Grow, |w, report, blocks| {
            w.put(&wire::Grow { report, want: 0.into(), least: 0.into() });
            w.put_blocks(blocks.iter().copied());
        })?;
        let flags = if may_evict { wire::MAY_EVICT } else { 0 };
        let admit = wire::Admit { tokens: (tokens as u64).into(), flags: flags.into(), reserved: 0.into() };
        let reply = self.client.call(Verb::Admit, self.id, |w| {
            w.put(&admit);
        })?;
        super::Admission::of(&read_one(&reply)?)
    }

    /// The geometry.
    pub fn profile(&self) -> &Profile {
        &self.format.profile
    }

    /// Tokens that the session holds.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens at the start that have been dropped ([`trim_head`](Self::trim_head)).
    pub fn first_token(&self) -> usize {
        self.head << self.shift()
    }

    /// Counts.
    pub fn stats(&self) -> SessionStats {
        let shared = self.entries[self.head..].iter().filter(|e| e.shared).count();
        SessionStats {
            tokens: self.tokens,
            blocks_private: self.entries.len() - self.head - shared,
            blocks_shared: shared,
            blocks_credit: self.format.credits.count() as usize,
            block_bytes: self.format.slot_bytes,
        }
    }

    /// Blocks that this process has ahead of need when nothing is amiss.
    pub(super) fn credit_ahead(&self) -> usize {
        self.client.options.credit_ahead as usize
    }

    fn shift(&self) -> u32 {
        self.format.profile.block_shift()
    }

    fn per_block(&self) -> usize {
        1 << self.shift()
    }

    /// Makes room for `tokens` tokens in all: the rows from the old length on may then be written, through
    /// [`row_mut`](Self::row_mut) or [`write_row`](Self::write_row). While credit lasts this makes no system call
    /// (plane views apart, which map what is new). A refusal comes before anything has changed.
    #[inline]
    pub fn ensure(&mut self, tokens: usize) -> Result<(), Error> {
        self.check_alive()?;
        if tokens <= self.tokens {
            return Ok(());
        }
        let room = self.entries.len() << self.shift();
        let tail_is_private = self.entries.get(self.tokens >> self.shift()).is_none_or(|e| !e.shared);
        if tokens > room || !tail_is_private {
            self.grow(tokens)?;
        }
        self.tokens = tokens;
        Ok(())
    }

    fn grow(&mut self, tokens: usize) -> Result<(), Error> {
        let blocks = tokens.div_ceil(self.per_block());
        if blocks > self.view_blocks() {
            let most = self.view_blocks() << self.shift();
            return Err(Error::Invalid(format!(
                "{tokens} tokens: a plane view of this session holds {most}"
            )));
        }
        let more = blocks.saturating_sub(self.entries.len());
        let copies = self.shared_in(self.tokens..tokens);
        let spares = self.take(more + copies.len())?;
        let (for_copies, for_more) = spares.split_at(copies.len());
        self.last = for_more.last().copied().or(self.last);
        self.replace_all(&copies, for_copies)?;
        for (i, spare) in for_more.iter().enumerate() {
            if self.zero && !spare.zero {
                self.zero_block(*spare);
            }
            if let Err(e) = self.push(*spare, false) {
                self.give_back(&for_more[i..]);
                return Err(e);
            }
        }
        // The next one is asked for now, so that it is there in time.
        if !spares.is_empty() {
            self.ask_ahead();
        }
        Ok(())
    }

    /// Blocks that fit the smallest view.
    fn view_blocks(&self) -> usize {
        self.views.iter().map(View::blocks).min().unwrap_or(usize::MAX)
    }

    /// Entries that hold tokens of the range and may not be written as they are.
    fn shared_in(&self, tokens: Range<usize>) -> Vec<usize> {
        let first = (tokens.start >> self.shift()).max(self.head);
        let end = tokens.end.div_ceil(self.per_block()).min(self.entries.len());
        (first..end).filter(|&i| self.entries[i].shared).collect()
    }

    /// Makes the rows of `tokens` writable: what is shared among them becomes this session's own copy. `ensure` does it
    /// for rows beyond the length; this is for rows that are there already.
    pub fn writable(&mut self, tokens: Range<usize>) -> Result<(), Error> {
        self.check_alive()?;
        self.check_range(&tokens)?;
        let copies = self.shared_in(tokens);
        let spares = self.take(copies.len())?;
        self.replace_all(&copies, &spares)
    }

    fn replace_all(&mut self, copies: &[usize], spares: &[Spare]) -> Result<(), Error> {
        for (i, (&index, spare)) in copies.iter().zip(spares).enumerate() {
            if let Err(e) = self.replace(index, *spare) {
                self.give_back(&spares[i..]);
                return Err(e);
            }
        }
        Ok(())
    }

    /// Blocks that were taken, and perhaps written, become credit again.
    fn give_back(&self, spares: &[Spare]) {
        spares.iter().for_each(|s| self.format.credits.give(Spare { zero: false, ..*s }));
    }

    fn check_range(&self, tokens: &Range<usize>) -> Result<(), Error> {
        if tokens.start < self.first_token() || tokens.end > self.tokens || tokens.start > tokens.end {
            let text = format!("tokens {tokens:?}: the session holds {:?}", self.first_token()..self.tokens);
            return Err(Error::Invalid(text));
        }
        Ok(())
    }

    /// Takes blocks: from credit, and what is missing from the broker. All or none.
    fn take(&mut self, count: usize) -> Result<Vec<Spare>, Error> {
        if count > MAX_FDS && count > self.format.credits.count() as usize {
            let (kept, ready) = (self.entries.len() - self.head, self.format.credits.count());
            let short = self.client.refuse_if_short(&self.format, self.id, count, kept, ready);
            // Others may have to make room: all of it is promised to this session, or none is taken.
            if let Err(why) = short {
                let tokens = (self.entries.len() + count - ready as usize) << self.shift();
                let busy = why.fault() == Some(wire::Fault::Busy);
                if !busy || self.admit(tokens, true)? != super::Admission::Admitted {
                    return Err(why);
                }
            }
        }
        let credits = &self.format.credits;
        let mut got: Vec<Spare> = Vec::with_capacity(count);
        let from_credit = |got: &mut Vec<Spare>| {
            while got.len() < count {
                // Its own neighbour first: then a session's blocks lie side by side, and leave whole extents when it ends.
                let last = got.last().copied().or(self.last);
                let next = last.and_then(|s| credits.take_at(s.position, s.slot + 1));
                match next.or_else(|| credits.take()) {
                    Some(spare) => got.push(spare),
                    None => break,
                }
            }
        };
        from_credit(&mut got);
        if got.len() < count && self.client.is_asked(&self.format) {
            if let Err(e) = self.client.poll() {
                got.into_iter().for_each(|spare| self.format.credits.give(spare));
                return Err(e);
            }
            from_credit(&mut got);
        }
        let had = got.len();
        while got.len() < count {
            match self.refill(count - got.len()) {
                Ok(spares) => {
                    let missing = count - got.len();
                    let (ours, ahead) = spares.split_at(missing.min(spares.len()));
                    got.extend(ours);
                    ahead.iter().for_each(|spare| self.format.credits.give(*spare));
                }
                Err(e) => {
                    // What came for this call goes back: as credit, a refusal would keep it from everybody else.
                    let came = got.split_off(had);
                    got.into_iter().for_each(|spare| self.format.credits.give(spare));
                    if let Err(why) = self.client.free(&self.format, came) {
                        log::debug!("session {}: blocks stay credit: {why}", self.id);
                    }
                    return Err(e);
                }
            }
        }
        Ok(got)
    }

    /// Asks the broker for blocks and waits. What was asked for ahead counts.
    fn refill(&mut self, missing: usize) -> Result<Vec<Spare>, Error> {
        self.report_all()?;
        let least = missing.min(MAX_FDS);
        let want = (missing + self.credit_ahead()).min(MAX_FDS);
        let (report, blocks) = self.report();
        let got = self.client.request_blocks(&self.format, Verb::Grow, self.id, |w| {
            w.put(&wire::Grow { report, want: (want as u32).into(), least: (least as u32).into() });
            w.put_blocks(blocks.iter().copied());
        })?;
        self.reported = self.entries.len();
        Ok(got)
    }

    /// Asks for what this session will need next, unless all sessions together have as much ahead as they may.
    fn ask_ahead(&mut self) {
        let want = self.client.options.credit_ahead;
        let most = want.saturating_mul(self.format.sessions.load(Ordering::Relaxed) as u32);
        if want == 0 || self.client.has_asked(self.id) || self.format.credits.count() >= most {
            return;
        }
        if self.entries.len() - self.reported > REPORT_BLOCKS {
            return;
        }
        let (report, blocks) = self.report();
        let asked = self.client.ask_ahead(&self.format, self.id, |w| {
            w.put(&wire::Grow { report, want: want.into(), least: 0.into() });
            w.put_blocks(blocks.iter().copied());
        });
        match asked {
            Ok(()) => self.reported = self.entries.len(),
            // Not needed yet: whoever needs it will ask again and be told.
            Err(e) => log::debug!("session {}: asking ahead: {e}", self.id),
        }
    }

    /// The part of the table that the broker does not know.
    fn report(&self) -> (wire::Report, Vec<BlockId>) {
        let end = self.entries.len();
        self.report_of(self.reported.min(end).max(self.head)..end)
    }

    /// These entries, and the tokens up to their end.
    fn report_of(&self, entries: Range<usize>) -> (wire::Report, Vec<BlockId>) {
        let blocks: Vec<_> = self.entries[entries.clone()].iter().map(|e| e.block).collect();
        // Tokens of a block whose report is still to come are not the broker's business yet.
        let tokens = self.tokens.min(entries.end << self.shift());
        let report = wire::Report {
            tokens: (tokens as u64).into(),
            first: (entries.start as u32).into(),
            used: (blocks.len() as u32).into(),
        };
        (report, blocks)
    }

    /// Reports in several messages what is too long for one.
    fn report_all(&mut self) -> Result<(), Error> {
        while self.entries.len() - self.reported.max(self.head) > REPORT_BLOCKS {
            let first = self.reported.max(self.head);
            let end = first + REPORT_BLOCKS;
            let (report, blocks) = self.report_of(first..end);
            self.client.call(Verb::Grow, self.id, |w| {
                w.put(&wire::Grow { report, want: 0.into(), least: 0.into() });
                w.put_blocks(blocks.iter().copied());
            })?;
            self.reported = end;
        }
        Ok(())
    }

    /// A verb about this session, with the report that starts its body.
    fn call(
        &mut self,
        verb: Verb,
        fill: impl FnOnce(&mut Writer, wire::Report, &[BlockId]),
    ) -> Result<super::Message, Error> {
        self.report_all()?;
        let (report, blocks) = self.report();
        let reply = self.client.call(verb, self.id, |w| fill(w, report, &blocks))?;
        self.reported = self.entries.len();
        Ok(reply)
    }

    fn block_page(&self, spare: Spare) -> u32 {
        self.client.arena.page(spare.position, spare.slot as usize * self.format.slot_bytes)
    }

    fn entry(&self, spare: Spare, shared: bool) -> Result<Entry, Error> {
        let name = self.client.name(spare.position, spare.slot, spare.generation);
        let block = name.ok_or_else(|| Error::Protocol("a block lies in no extent".into()))?;
        Ok(Entry { block, shared })
    }

    fn push(&mut self, spare: Spare, shared: bool) -> Result<(), Error> {
        let (entry, page) = (self.entry(spare, shared)?, self.block_page(spare));
        self.client.arena.name(page);
        self.table.push(page);
        self.entries.push(entry);
        let shown = self.show(self.entries.len() - 1);
        if shown.is_err() {
            self.cut(self.entries.len() - 1);
        }
        shown
    }

    /// The table ends there: what comes behind is named no more. `end`: at or behind the head.
    fn cut(&mut self, end: usize) {
        self.unname(end..self.entries.len());
        self.entries.truncate(end);
        self.table.truncate(end);
    }

    /// Blocks that are in the table no more, or will not be when this returns.
    fn unname(&self, entries: Range<usize>) {
        let arena = &self.client.arena;
        self.table[entries].iter().for_each(|page| arena.unname(*page));
    }

    /// A shared block becomes a private copy.
    fn replace(&mut self, index: usize, spare: Spare) -> Result<(), Error> {
        let (from, to) = (self.block_at(index), self.pointer(self.block_page(spare)));
        // SAFETY: both are whole blocks in mapped extents; the new one is this session's alone, so they differ.
        unsafe { to.copy_from_nonoverlapping(from, self.format.slot_bytes) };
        let old = (self.entries[index], self.table[index]);
        self.entries[index] = self.entry(spare, false)?;
        self.table[index] = self.block_page(spare);
        self.client.arena.name(self.table[index]);
        if let Err(e) = self.show(index) {
            self.unname(index..index + 1);
            (self.entries[index], self.table[index]) = old;
            return Err(e);
        }
        self.client.arena.unname(old.1);
        self.reported = self.reported.min(index);
        self.sealed = self.sealed.min(index);
        Ok(())
    }

    fn zero_block(&self, spare: Spare) {
        let at = self.pointer(self.block_page(spare));
        // SAFETY: a whole block in a mapped extent, just taken from credit, so this session's alone.
        unsafe { at.write_bytes(0, self.format.slot_bytes) };
    }

    fn pointer(&self, page: u32) -> *mut u8 {
        self.client.arena.base().wrapping_add((page as usize) << PAGE_SHIFT)
    }

    fn block_at(&self, index: usize) -> *mut u8 {
        self.pointer(self.table[index])
    }

    /// Base address of the table's offsets.
    pub fn base(&self) -> *mut u8 {
        self.client.arena.base()
    }

    /// Where each block lies, as an offset from [`base`](Self::base) in units of 4 KiB. Entries of dropped head blocks
    /// mean nothing.
    pub fn table(&self) -> &[u32] {
        &self.table
    }

    /// K and V of one layer, for [`attention`](crate::attention::attention).
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn paged(&self, layer: usize) -> Paged<'_> {
        let [k, v] = self.format.planes[layer];
        Paged { base: self.base(), table: &self.table, shift: self.shift(), k, v }
    }

    /// The address of one row. It is there for as many bytes as the profile says of the layer's K or V; it may be written if
    /// `ensure` has made room for the token and the token has not been sealed or shared since.
    ///
    /// # Panics
    /// If the session has no room for the token, or there is no such layer.
    #[inline]
    pub fn row_mut(&mut self, token: usize, layer: usize, kv: Kv) -> *mut u8 {
        self.row(token, layer, kv).cast_mut()
    }

    /// The address of one row, for reading.
    ///
    /// # Panics
    /// If the session has no room for the token, or there is no such layer.
    #[inline]
    pub fn row(&self, token: usize, layer: usize, kv: Kv) -> *const u8 {
        let plane = self.format.planes[layer][kv as usize];
        let within = token & (self.per_block() - 1);
        self.block_at(token >> self.shift()).wrapping_add(plane.offset + within * plane.stride)
    }

    fn plane_of(&self, layer: usize, kv: Kv) -> Result<Plane, Error> {
        let planes = self.format.planes.get(layer);
        planes.map(|p| p[kv as usize]).ok_or_else(|| Error::Invalid(format!("there is no layer {layer}")))
    }

    /// The address of one row, which is there, and as long as `bytes` says.
    pub(crate) fn checked_row(
        &self,
        token: usize,
        layer: usize,
        kv: Kv,
        bytes: usize,
    ) -> Result<*const u8, Error> {
        self.check_alive()?;
        self.check_range(&(token..token.saturating_add(1)))?;
        let row = self.plane_of(layer, kv)?.row;
        if bytes != row {
            return Err(Error::Invalid(format!("{bytes} bytes for a row of {row}: {kv:?} of this layer")));
        }
        Ok(self.row(token, layer, kv))
    }

    /// Copies one row in. Refused for a token that is shared.
    pub fn write_row(&mut self, token: usize, layer: usize, kv: Kv, row: &[u8]) -> Result<(), Error> {
        let to = self.checked_row(token, layer, kv, row.len())?.cast_mut();
        if self.entries[token >> self.shift()].shared {
            return Err(Error::Invalid(format!("token {token} is shared: make it writable first")));
        }
        // SAFETY: the token is in the table and the row has the plane's length, so it lies in one mapped block; the
        // source is ours and the pool is mapped elsewhere.
        unsafe { to.copy_from_nonoverlapping(row.as_ptr(), row.len()) };
        Ok(())
    }

    /// Copies one row out.
    pub fn read_row(&self, token: usize, layer: usize, kv: Kv, row: &mut [u8]) -> Result<(), Error> {
        let from = self.checked_row(token, layer, kv, row.len())?;
        // SAFETY: as in write_row.
        unsafe { row.as_mut_ptr().copy_from_nonoverlapping(from, row.len()) };
        Ok(())
    }

    /// Drops the tokens from `tokens` on. Whole blocks go back.
    pub fn trim(&mut self, tokens: usize) -> Result<(), Error> {
        if tokens > self.tokens || tokens < self.first_token() {
            let text =
                format!("cannot trim to {tokens}: the session holds {:?}", self.first_token()..self.tokens);
            return Err(Error::Invalid(text));
        }
        let keep = tokens.div_ceil(self.per_block()).max(self.head);
        if keep < self.entries.len() {
            self.hide_all(keep..self.entries.len())?;
            // As many as are kept ahead of need anyway stay credit: going back and forth over a block's end costs nothing.
            let release = self.entries.len() - keep > self.credit_ahead();
            if let Err(e) = self.send_trim(tokens, self.head, release) {
                self.show_again(keep..self.entries.len());
                return Err(e);
            }
            self.cut(keep);
            self.reported = self.reported.min(keep);
            self.sealed = self.sealed.min(keep);
        }
        self.tokens = tokens;
        if self.damaged_from().is_some_and(|damaged| damaged >= tokens) {
            super::lock(&self.client.damaged).remove(&self.id);
        }
        Ok(())
    }

    /// Drops the tokens before `first`, as far as they fill whole blocks (sliding window). Returns the first token that
    /// is still there.
    pub fn trim_head(&mut self, first: usize) -> Result<usize, Error> {
        self.trim_head_keeping(first, self.credit_ahead())
    }

    /// [`trim_head`](Self::trim_head) of which up to `keep` blocks become credit; if there are more, all go back.
    pub(super) fn trim_head_keeping(&mut self, first: usize, keep: usize) -> Result<usize, Error> {
        if first > self.tokens {
            return Err(Error::Invalid(format!(
                "cannot drop {first} tokens: the session holds {}",
                self.tokens
            )));
        }
        let head = first >> self.shift();
        if head > self.head {
            self.hide_all(self.head..head)?;
            if let Err(e) = self.send_trim(self.tokens, head, head - self.head > keep) {
                self.show_again(self.head..head);
                return Err(e);
            }
            self.unname(self.head..head);
            self.head = head;
        }
        Ok(self.first_token())
    }

    fn send_trim(&mut self, tokens: usize, head: usize, release: bool) -> Result<(), Error> {
        let reply = self.call(Verb::Trim, |w, report, blocks| {
            w.put(&wire::Trim {
                report,
                tokens: (tokens as u64).into(),
                head: (head as u32).into(),
                release: u32::from(release).into(),
            });
            w.put_blocks(blocks.iter().copied());
        });
        match reply {
            Ok(reply) => {
                for (spare, _) in reply.granted()?.1 {
                    self.format.credits.give(Spare { zero: false, ..spare });
                }
                Ok(())
            }
            // Nobody is there to take them, or nobody knows whether they were taken: what is dropped is simply unused
            // until this process ends. The next call that needs the broker says what is wrong.
            Err(Error::Lost(_) | Error::Timeout(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// A second session over the same tokens. Nothing is copied: whoever writes first, beyond the length that both
    /// have, gets a copy of the block that it writes in. Refused (`busy`) while a device that is not coherent imports blocks
    /// of it by a window of the kind run, and they are not sealed.
    pub fn fork(&mut self) -> Result<Session, Error> {
        let head = self.head;
        let protected = self.protect(head..self.entries.len())?;
        let reply = self.call(Verb::Fork, |w, report, blocks| {
            w.put(&report);
            w.put_blocks(blocks.iter().copied());
        });
        // Without an answer there may be a twin at the broker: nobody here uses it.
        let opened = reply.and_then(|reply| read_one::<wire::Opened>(&reply));
        let opened = opened.inspect_err(|_| self.unprotect(&protected))?;
        let mut twin =
            Session::new(self.client.clone(), self.format.clone(), opened.session.get(), self.zero);
        twin.tokens = self.tokens;
        twin.head = head;
        twin.table.clone_from(&self.table);
        twin.entries.clone_from(&self.entries);
        twin.table[head..].iter().for_each(|page| self.client.arena.name(*page));
        twin.reported = self.entries.len();
        twin.sealed = self.sealed;
        Ok(twin)
    }

    /// Publishes the whole blocks among the first `ids.len()` tokens, whose token ids these are: they are never written
    /// again, and other sessions of the tenant with the same model find them ([`attach`](Self::attach)). Returns how
    /// many tokens are sealed now.
    pub fn seal(&mut self, ids: &[u32]) -> Result<usize, Error> {
        if ids.len() > self.tokens {
            let text = format!("{} token ids, but the session holds {} tokens", ids.len(), self.tokens);
            return Err(Error::Invalid(text));
        }
        let (shift, end) = (self.shift(), ids.len() >> self.shift());
        if self.sealed < self.head {
            if end <= self.head {
                return Ok(self.sealed << shift);
            }
            self.name_dropped(ids)?;
        }
        // First here, where it may fail for want of mappings: what the broker has published must not be written any more.
        let protected = self.protect(self.sealed.min(end)..end)?;
        while self.sealed < end {
            let from = self.sealed;
            let to = end.min(from + (MAX_TOKENS >> shift).max(1));
            let tokens = &ids[from << shift..to << shift];
            let sealed = self.call(Verb::Seal, |w, report, blocks| {
                let (from, count) = (from as u32, tokens.len() as u32);
                w.put(&wire::Seal { report, from: from.into(), count: count.into() });
                w.put_tokens(tokens).put_blocks(blocks.iter().copied());
            });
            if let Err(e) = sealed {
                // Without an answer these may be published: then they must not be written here either.
                let doubtful = matches!(e, Error::Lost(_) | Error::Timeout(_) | Error::Protocol(_));
                let open = if doubtful { to } else { from };
                self.unprotect(&protected[protected.partition_point(|index| *index < open)..]);
                return Err(e);
            }
            self.sealed = to;
        }
        Ok(self.sealed << shift)
    }

    /// Shares the longest published prefix of a prompt, at the start of a session. Returns how many tokens of it the
    /// session holds then: at most `ids.len() - 1`, because the last token has to be computed for its logits.
    pub fn attach(&mut self, ids: &[u32]) -> Result<usize, Error> {
        if self.tokens > 0 {
            return Err(Error::Invalid(format!("the session holds {} tokens already", self.tokens)));
        }
        self.attach_on(ids, false)
    }

    /// Shares what is published of a prompt from where the table ends, which holds whole sealed blocks only. `open`: the
    /// prompt goes on after `ids`, so that its last token need not be left out.
    fn attach_on(&mut self, ids: &[u32], open: bool) -> Result<usize, Error> {
        let ids = &ids[..ids.len().min(self.view_blocks().saturating_mul(self.per_block()))];
        let most = MAX_TOKENS & !(self.per_block() - 1);
        loop {
            let rest = ids.get(self.entries.len() << self.shift()..).unwrap_or_default();
            let some = &rest[..rest.len().min(most)];
            let more = open || some.len() < rest.len();
            let reply = self.client.call(Verb::Attach, self.id, |w| {
                w.put(&wire::Attach { count: (some.len() as u32).into(), more: u32::from(more).into() });
                w.put_tokens(some);
            })?;
            let grant = ParsedGrant::parse(&reply)?;
            let all = self.entries.len() + grant.blocks.len();
            trust::attached(grant.tokens, all, self.shift(), ids.len())
                .map_err(|why| self.client.broken(why))?;
            let extents = grant.extents;
            let before = self.entries.len();
            let taken = reply.granted().and_then(|(tokens, blocks)| {
                blocks.iter().try_for_each(|(spare, _)| self.push(*spare, true))?;
                Ok((tokens, blocks.len()))
            });
            let (tokens, found) = match taken {
                Ok(taken) => taken,
                Err(e) => {
                    let _ = self.hide_all(before..self.entries.len());
                    self.cut(before);
                    self.forget_from(before)?;
                    self.client.return_unmapped(&extents)?;
                    return Err(e);
                }
            };
            self.reported = self.entries.len();
            self.sealed = self.entries.len();
            self.tokens = tokens as usize;
            // Further on while whole blocks match and there are more to look up.
            let whole = self.tokens == self.entries.len() << self.shift();
            if found == 0 || !whole || self.tokens + usize::from(!open) >= ids.len() {
                return Ok(self.tokens);
            }
        }
    }

    /// Tells the broker to drop what it has in the table beyond `keep` blocks, which this process cannot use.
    fn forget_from(&mut self, keep: usize) -> Result<(), Error> {
        let tokens = (keep << self.shift()) as u64;
        let report = wire::Report { tokens: tokens.into(), first: (keep as u32).into(), used: 0.into() };
        let (head, release) = ((self.head as u32).into(), 1.into());
        let trim = wire::Trim { report, tokens: tokens.into(), head, release };
        self.client.call(Verb::Trim, self.id, |w| {
            w.put(&trim);
        })?;
        Ok(())
    }

    fn send_pin(&mut self, tokens: usize, on: bool) -> Result<usize, Error> {
        let blocks = tokens >> self.shift();
        let reply = self.call(Verb::Pin, |w, report, used| {
            w.put(&wire::Pin { report, blocks: (blocks as u32).into(), on: u32::from(on).into() });
            w.put_blocks(used.iter().copied());
        })?;
        Ok(read_one::<wire::Counted>(&reply)?.blocks.get() as usize)
    }

    /// Keeps the sealed blocks among the first `tokens` tokens for ever, whoever comes and goes; of a profile with a
    /// window, those that the token after them sees. Returns how many blocks were not pinned before.
    pub fn pin(&mut self, tokens: usize) -> Result<usize, Error> {
        self.send_pin(tokens, true)
    }

    /// Lets them go again: a pin of exactly as many whole blocks, not a part of a longer one. Returns how many blocks nobody
    /// pins any more.
    pub fn unpin(&mut self, tokens: usize) -> Result<usize, Error> {
        self.send_pin(tokens, false)
    }

    /// One plane in token order at an address that stays the same for the session's life: what an engine with
    /// contiguous tensors needs. `capacity` tokens of address space are reserved, at `address` if it is given (and
    /// free); blocks appear in it as the session grows; the rest reads as zero and must not be written.
    pub fn plane(
        &mut self,
        layer: usize,
        kv: Kv,
        capacity: usize,
        address: Option<*mut u8>,
    ) -> Result<PlaneView, Error> {
        let plane = self.plane_of(layer, kv)?;
        let blocks = capacity.div_ceil(self.per_block());
        if blocks < self.entries.len() {
            let text = format!("a view of {capacity} tokens: the session holds {} already", self.tokens);
            return Err(Error::Invalid(text));
        }
        let view = View::reserve(&self.format.profile, plane, blocks, address)?;
        let described = view.describe();
        self.views.push(view);
        let filled = (self.head..self.entries.len()).try_for_each(|i| self.show_in(self.views.len() - 1, i));
        if let Err(e) = filled {
            self.views.pop();
            return Err(e);
        }
        Ok(described)
    }

    /// Makes block `index` visible in all views.
    fn show(&mut self, index: usize) -> Result<(), Error> {
        (0..self.views.len()).try_for_each(|view| self.show_in(view, index))
    }

    fn show_in(&self, view: usize, index: usize) -> Result<(), Error> {
        let Entry { block, shared, .. } = self.entries[index];
        let offset = block.place.slot as usize * self.format.slot_bytes;
        self.views[view].show(&self.client.arena, block.place.extent, offset, index, !shared)
    }

    /// Makes private blocks shared, in the table and in all views, or none of them. Returns which they are.
    fn protect(&mut self, range: Range<usize>) -> Result<Vec<usize>, Error> {
        let private: Vec<usize> = range.filter(|&index| !self.entries[index].shared).collect();
        private.iter().for_each(|&index| self.entries[index].shared = true);
        let places =
            || private.iter().flat_map(|&index| (0..self.views.len()).map(move |view| (view, index)));
        let refused =
            places().enumerate().find_map(|(n, (view, index))| Some((n, self.show_in(view, index).err()?)));
        let Some((shown, e)) = refused else { return Ok(private) };
        let shown: Vec<_> = places().take(shown).collect();
        private.iter().for_each(|&index| self.entries[index].shared = false);
        for (view, index) in shown {
            if let Err(e) = self.show_in(view, index) {
                log::error!("session {}: block {index} of a view: {e}", self.id);
            }
        }
        Err(e)
    }

    /// Undoes [`protect`](Self::protect).
    fn unprotect(&mut self, blocks: &[usize]) {
        for &index in blocks {
            self.entries[index].shared = false;
            self.show_again(index..index + 1);
        }
    }

    /// Makes blocks invisible in all views, or none of them.
    fn hide_all(&mut self, range: Range<usize>) -> Result<(), Error> {
        let hidden = range.clone().try_for_each(|i| self.views.iter().try_for_each(|view| view.hide(i)));
        if hidden.is_err() {
            self.show_again(range);
        }
        hidden
    }

    fn show_again(&mut self, range: Range<usize>) {
        for index in range {
            if let Err(e) = self.show(index) {
                log::error!("session {}: block {index} of a view: {e}", self.id);
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Views first: nothing may be visible through them once the blocks are somebody else's.
        self.views.clear();
        let closed = self.call(Verb::Close, |w, report, blocks| {
            w.put(&report);
            w.put_blocks(blocks.iter().copied());
        });
        self.cut(self.head);
        self.client.forget(self.id);
        // A process without sessions needs nothing ahead; one with others keeps what they would ask for anyway.
        let others = self.format.sessions.fetch_sub(1, Ordering::Relaxed) - 1;
        let keep = self.client.options.credit_ahead.saturating_mul(others as u32);
        let next = self.last.and_then(|s| self.format.credits.take_at(s.position, s.slot + 1));
        let surplus = closed.and_then(|_| self.client.release_surplus(&self.format, keep, next));
        match surplus {
            Ok(()) | Err(Error::Lost(_) | Error::Forked) => {}
            Err(e) => log::warn!("session {} was not closed: {e}", self.id),
        }
    }
}
