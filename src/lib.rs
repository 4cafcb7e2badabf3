//! kvbroker: one owner for the attention KV cache of an edge board.
//!
//! The library has two faces. An engine uses [`client`]: sessions whose KV cache lies in blocks that a broker hands out,
//! and [`attention`] over them. The daemon `kvbrokerd` is [`broker`] (what is decided) over [`pool`] (what there is) over
//! [`heap`] (where it comes from), behind sockets that speak [`wire`]. Both share [`profile`], the geometry of a model's
//! KV. `docs/architecture.md` shows the rooms and the way of a request through them.

#![deny(unsafe_code)]

pub mod attention;
pub mod broker;
pub mod capi;
pub mod client;
#[cfg(feature = "daemon")]
pub mod daemon;
#[cfg(feature = "daemon")]
pub mod doctor;
pub mod heap;
pub mod id;
pub mod map;
pub mod model;
pub mod packing;
pub mod plan;
pub mod pool;
pub mod profile;
pub mod quote;
mod seldom;
pub mod seqpacket;
#[cfg(feature = "daemon")]
pub mod simulate;
pub mod size;
pub mod store;
pub mod window;
pub mod wire;
