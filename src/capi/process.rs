//! Whether this process is still the one that a handle was made in.
//!
//! Owns the count of forks. Invariant: a handle made before a fork is not [`Birth::here`] in the child, which is told
//! without a system call, because every call asks.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Failure;
use crate::client::Error;

/// How many forks lie between the process that loaded the library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Where a handle was made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Birth(u32);

impl Birth {
    /// This process.
    pub fn now() -> Self {
        // SAFETY: the handler only counts. Should it not be registered for want of memory, forks go unseen here, and the
        // client still refuses to talk to the broker.
        WATCH.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
        Birth(FORKS.load(Ordering::Relaxed))
    }

    /// An error in a forked child.
    #[inline]
    pub fn here(self) -> Result<(), Failure> {
        if self.0 == FORKS.load(Ordering::Relaxed) { Ok(()) } else { Err(Error::Forked.into()) }
    }
}
