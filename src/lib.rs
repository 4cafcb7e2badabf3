//! kvbroker: one owner for the attention KV cache of an edge board.

pub mod attention;
pub mod broker;
pub mod capi;
pub mod client;
#[cfg(feature = "daemon")]
pub mod daemon;
pub mod heap;
pub mod id;
pub mod map;
pub mod model;
pub mod packing;
pub mod plan;
pub mod pool;
pub mod profile;
pub mod seqpacket;
pub mod size;
pub mod wire;
