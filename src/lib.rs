//! kvbroker: one owner for the attention KV cache of an edge board.

pub mod attention;
pub mod profile;
