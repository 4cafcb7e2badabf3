//! Prefixes of layers with a sliding window: whoever goes on after such a prefix reads its last window only, so that is
//! all that has to be there.
//!
//! Owns no state of its own. Invariant: where the table begins is the same here and at the broker when a call returns
//! without an error; after an error, [`Session::clear`] makes it so again.

use std::ops::Range;

use super::{Entry, Error, Session};
use crate::id::{BlockId, ExtentId, Place};
use crate::wire::{self, MAX_TOKENS, Reader, Verb};

/// Stands for a block that the table does not have.
const HOLE: Entry =
    Entry { block: BlockId { place: Place { extent: ExtentId(0), slot: 0 }, generation: 0 }, shared: false };

impl Session {
    /// Which whole blocks of a prompt are published, one by one from its start. The session must not hold tokens, and
    /// is given a place to begin ([`attach_window`](Self::attach_window), [`clear`](Self::clear)) before it grows.
    pub(in crate::client) fn look_up(&mut self, ids: &[u32]) -> Result<Vec<bool>, Error> {
        self.clear()?;
        let whole = ids.len() >> self.shift();
        let mut present = Vec::with_capacity(whole);
        self.skip_all(0..whole, ids, |some| present.extend(some))?;
        Ok(present)
    }

    /// Shares blocks of a prompt that are published, as far as they still are; the table begins with the first one.
    /// Returns how many tokens the session holds then, those before its first block counted in: if all blocks are
    /// there, up to the end of the last one, and at most all of the prompt's but one.
    pub(in crate::client) fn attach_window(
        &mut self,
        ids: &[u32],
        blocks: Range<usize>,
    ) -> Result<usize, Error> {
        self.clear()?;
        let (shift, first) = (self.shift(), blocks.start);
        self.skip_all(0..first, ids, drop)?;
        self.entries.resize(first, HOLE);
        self.table.resize(first, 0);
        (self.head, self.reported, self.sealed, self.tokens) = (first, first, first, first << shift);
        let end = (blocks.end << shift).min(ids.len());
        self.attach_on(&ids[..end], end < ids.len())
    }

    /// Drops all tokens: the sequence starts anew.
    pub(in crate::client) fn clear(&mut self) -> Result<(), Error> {
        self.trim(self.first_token())?;
        self.skip(0, &[])?;
        self.cut(self.head);
        self.entries.clear();
        self.table.clear();
        (self.head, self.reported, self.sealed, self.tokens) = (0, 0, 0, 0);
        Ok(())
    }

    /// Names the blocks that were dropped before they were sealed: the name of each goes into the next one's.
    pub(super) fn name_dropped(&mut self, ids: &[u32]) -> Result<(), Error> {
        self.skip_all(self.sealed..self.head, ids, drop)?;
        self.sealed = self.head;
        Ok(())
    }

    fn skip_all(
        &self,
        blocks: Range<usize>,
        ids: &[u32],
        mut take: impl FnMut(Vec<bool>),
    ) -> Result<(), Error> {
        let most = (MAX_TOKENS >> self.shift()).max(1);
        for from in blocks.clone().step_by(most) {
            let to = blocks.end.min(from + most);
            take(self.skip(from, &ids[from << self.shift()..to << self.shift()])?);
        }
        Ok(())
    }

    fn skip(&self, from: usize, ids: &[u32]) -> Result<Vec<bool>, Error> {
        let reply = self.client.call(Verb::Skip, self.id, |w| {
            w.put(&wire::Skip { from: (from as u32).into(), count: (ids.len() as u32).into() });
            w.put_tokens(ids);
        })?;
        let wrong = |e: wire::WireError| Error::Protocol(e.to_string());
        let mut r = Reader::new("the reply to skip", &reply.body);
        let head: wire::Present = *r.one().map_err(wrong)?;
        let present = r.many::<u8>(head.blocks.get(), MAX_TOKENS).map_err(wrong)?;
        r.end().map_err(wrong)?;
        if present.len() != ids.len() >> self.shift() {
            let (said, asked) = (present.len(), ids.len() >> self.shift());
            return Err(Error::Protocol(format!("{said} blocks are told of where {asked} were asked for")));
        }
        Ok(present.iter().map(|p| *p != 0).collect())
    }
}
