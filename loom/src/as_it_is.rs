//! The bitmap as the client library has it.

mod arena {
    pub(super) type Position = u32;
}

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
}

#[allow(dead_code, reason = "the models use a part of it")]
#[path = "../../src/client/credit.rs"]
mod credit;

super::bitmap!();
