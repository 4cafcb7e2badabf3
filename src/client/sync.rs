//! The atomics that this process's threads share credit by.
//!
//! Owns nothing. They stand in a module of their own so that `loom/`, which includes [`credit`](super::credit) as it
//! is, can put loom's atomics in their place and try every order in which threads can take turns.

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
