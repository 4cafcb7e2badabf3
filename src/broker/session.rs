//! One token sequence, as the broker knows it.
//!
//! Owns the block table that counts: a block stands in as many tables as it has references in the pool. Invariants:
//! entries below `sealed` are sealed blocks and `names` has the name of each that is still there, and of the one before
//! them, so that a sliding window can go on for ever in bounded memory; a table names only blocks in use.

use serde::{Deserialize, Serialize};

use super::common::Walk;
use super::prefix::Digest;
use crate::id::{BlockId, ClientId, FormatId, Tenant};

/// Entries that a table may have room for whatever is in it.
const LITTLE: usize = 16;

/// Gives back room that was needed when there was more. What a tenant may name is bounded by what its tables name now
/// ([`tables`](super::tables)), so room that is kept beyond that is bounded by nothing. Four times what is in use may stay, so that
/// what grows again is not moved each time.
fn slim<T>(of: &mut Vec<T>) {
    if of.capacity() / 4 > of.len().max(LITTLE) {
        of.shrink_to(of.len().max(LITTLE) * 2);
    }
}

/// A session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Whose connection it is on.
    pub client: ClientId,
    /// Whose memory it uses.
    pub tenant: Tenant,
    /// What its blocks are.
    pub format: FormatId,
    /// Its name for people.
    pub label: String,
    /// The model's fingerprint.
    pub model: Digest,
    /// Tokens written, as last reported.
    pub tokens: u64,
    /// Blocks dropped at the head: the first entry of `table` is block number `head` of the sequence.
    pub head: u32,
    /// The blocks from `head` on.
    pub table: Vec<BlockId>,
    /// Names of the sealed blocks from number `names_from` on.
    pub names: Vec<Digest>,
    /// From 0 to 255; never above the tenant's.
    pub priority: u8,
    /// Blocks that the session was admitted with and has not been granted yet, and how many it was at first.
    pub promised: u32,
    /// See `promised`.
    pub admitted: u32,
    /// Grows from each session to the next one, whosever they are: tells the younger of two. Nobody is told.
    pub born: u64,
    /// Sealed blocks whose names are not kept: they are dropped, and so is their successor.
    pub names_from: u32,
    /// Where a look-up goes on in the chains that are common to several tenants.
    pub walk: Walk,
}

impl Session {
    /// Number of the first block that has not been sealed.
    pub fn sealed(&self) -> u32 {
        self.names_from + self.names.len() as u32
    }

    /// Blocks from this number on are not sealed.
    pub fn unseal_from(&mut self, number: u32) {
        self.walk.end_at(number);
        self.names.truncate(number.saturating_sub(self.names_from) as usize);
        slim(&mut self.names);
    }

    /// Drops blocks before this number from the head of the table.
    pub fn drop_head(&mut self, head: u32) -> Vec<BlockId> {
        let dropped = self.table.drain(..(head - self.head) as usize).collect();
        self.head = head;
        // The name before the first one that is there is the parent of what is sealed next.
        let needless = head.saturating_sub(1).min(self.sealed().saturating_sub(1));
        let needless = needless.saturating_sub(self.names_from);
        self.names.drain(..needless as usize);
        self.names_from += needless;
        slim(&mut self.table);
        slim(&mut self.names);
        dropped
    }

    /// Number of the block after the last one of the table.
    pub fn end(&self) -> u32 {
        self.head + self.table.len() as u32
    }

    /// The block with this number, if the table has it.
    pub fn block(&self, number: u32) -> Option<BlockId> {
        self.table.get(number.checked_sub(self.head)? as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ExtentId, Place};

    #[test]
    fn a_session_that_has_been_long_and_is_short_again_keeps_no_room_for_a_long_one() {
        let block = |slot| BlockId { place: Place { extent: ExtentId(1), slot }, generation: 1 };
        let mut session = Session {
            client: ClientId(1),
            tenant: Tenant(1000),
            format: FormatId(1),
            label: String::new(),
            model: [0; 32],
            tokens: 10_000,
            head: 0,
            table: (0..10_000).map(block).collect(),
            names: vec![[7; 32]; 10_000],
            priority: 100,
            promised: 0,
            admitted: 0,
            born: 1,
            names_from: 0,
            walk: Walk::default(),
        };
        // As `trim` does it: the tail goes, then the head.
        session.table.truncate(1000);
        session.unseal_from(1000);
        session.drop_head(0);
        assert!(session.table.capacity() <= 4000 && session.names.capacity() <= 4000);
        session.drop_head(990);
        let left = (session.table.len(), session.names.len(), session.names_from);
        assert_eq!(left, (10, 11, 989));
        assert!(session.table.capacity() <= 4 * LITTLE && session.names.capacity() <= 4 * LITTLE);
    }
}
