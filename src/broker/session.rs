//! One token sequence, as the broker knows it.
//!
//! Owns the block table that counts: a block stands in as many tables as it has references in the pool. Invariants:
//! entries below `sealed` are sealed blocks and `names` has the name of each; a table names only blocks in use.

use serde::{Deserialize, Serialize};

use super::prefix::Digest;
use crate::id::{BlockId, ClientId, FormatId, Tenant};

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
    /// Names of the sealed blocks from the start of the sequence, dropped ones included.
    pub names: Vec<Digest>,
}

impl Session {
    /// Number of the first block that has not been sealed.
    pub fn sealed(&self) -> u32 {
        self.names.len() as u32
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
