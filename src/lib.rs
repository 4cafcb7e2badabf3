//! kvbroker: one owner for the attention KV cache of an edge board.

pub mod model;
pub mod packing;
pub mod plan;
pub mod profile;
pub mod size;
