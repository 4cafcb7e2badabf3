//! What a pool and a policy would do with a stream of requests: the broker itself, over memory that is not there.
//!
//! Owns the virtual clock and the account of a replay. Invariants: what decides is [`crate::broker::Broker`], the very
//! one that the daemon runs, so a figure from here is what a board would see; the same trace and options give the same
//! figures on every machine; a request is counted by its full blocks, whether it was served or refused.

mod replay;
mod shop_floor;
mod trace;

use serde::Serialize;
use thiserror::Error;

use crate::broker::Eviction;

pub use replay::replay;
pub use shop_floor::{SHOP_FLOOR_BLOCK, shop_floor};
pub use trace::{Request, TRACE_BLOCK, TraceError, read, write};

/// The most blocks of a pool, and of a request. A simulated block takes 310 bytes of real memory, and another 900 when
/// it is in use (measured): with the trace ([`MOST_TRACE`]) a replay takes 300 MiB at most.
pub const MOST_BLOCKS: u64 = 1 << 18;
/// The most bytes that the requests of a trace may take in memory: 8 for each block of each prompt.
pub const MOST_TRACE: usize = 64 << 20;

/// How much there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// As much as the trace needs.
    Unlimited,
    /// So many blocks, each an extent of its own.
    Blocks(u32),
    /// So many extents of so many blocks.
    Extents {
        /// Extents.
        extents: u32,
        /// Blocks in each.
        slots: u32,
    },
}

/// What is replayed on what.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The pool.
    pub capacity: Capacity,
    /// Tokens in one of the trace's blocks: what a hash id names.
    pub trace_block: u32,
    /// Tokens in one block of the pool: divides `trace_block`.
    pub tokens_per_block: u32,
    /// Bytes of one block of the pool.
    pub block_bytes: u64,
    /// Requests are dealt out to so many tenants, one after the other.
    pub tenants: u32,
    /// Extents that each tenant is sure of.
    pub reserve: u32,
    /// Extents that each tenant may own at most; `None` for all.
    pub limit: Option<u32>,
    /// Tokens per second of an answer. Then a session holds its blocks until the answer is complete, which takes blocks
    /// as well; `None`: a session is over as soon as its prompt is in.
    pub speed: Option<f64>,
    /// Which cached prefixes go first.
    pub eviction: Eviction,
}

/// Why a replay cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum OptionsError {
    #[error(
        "{pool} tokens per block of the pool: the trace's blocks of {trace} tokens must be a multiple of it"
    )]
    Blocks { pool: u32, trace: u32 },
    #[error("the pool has no block: {0}")]
    NoPool(&'static str),
    #[error("{tenants} tenants with {reserve} extents each are more than the pool's {extents}")]
    Reserves { tenants: u32, reserve: u32, extents: u32 },
    #[error("{0} tenants: from 1 to 1000 can be simulated")]
    Tenants(u32),
    #[error("{0} tokens per second: it must be above 0")]
    Speed(String),
    #[error("hash id {0}: with blocks this small, ids up to {1} can be told apart")]
    HashId(u64, u64),
    #[error(
        "a pool of {0} blocks: at most {MOST_BLOCKS} can be simulated; make the pool smaller, or its blocks larger"
    )]
    Pool(u64),
    #[error(
        "request {request} of the trace has {blocks} blocks, more than the {MOST_BLOCKS} of any pool that can be simulated"
    )]
    Request { request: usize, blocks: u64 },
    #[error("a block of {0} bytes cannot be described: use at most 4 GiB in whole pages")]
    BlockBytes(u64),
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outcome {
    /// Requests of the trace.
    pub requests: u64,
    /// Full blocks of their prompts.
    pub blocks: u64,
    /// Of these, found in the pool.
    pub hits: u64,
    /// `hits / blocks`; 0 without blocks.
    pub hit_rate: f64,
    /// Cached blocks that had to go.
    pub evictions: u64,
    /// Requests that got nothing, since they were too long or what they needed was in use.
    pub refusals: u64,
    /// Answers that ended early, since no block was left for them.
    pub cut: u64,
    /// Blocks in the pool; with unlimited memory, those that were used.
    pub pool_blocks: u64,
    /// Bytes held, what is granted and not used included, over the bytes of live tokens, mean over time; `None` where
    /// sessions hold nothing for any time.
    pub held_over_live: Option<f64>,
}
