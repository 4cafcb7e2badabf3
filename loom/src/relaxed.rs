//! The bitmap with every order weakened to Relaxed: a control that must fail, or the models would show nothing.

mod arena {
    pub(super) type Position = u32;
}

mod sync {
    pub(super) use loom::sync::atomic::{AtomicUsize, Ordering};

    /// Forgets which order it was asked for.
    #[derive(Debug, Default)]
    pub(super) struct AtomicU64(loom::sync::atomic::AtomicU64);

    impl AtomicU64 {
        pub fn load(&self, _: Ordering) -> u64 {
            self.0.load(Ordering::Relaxed)
        }

        pub fn store(&self, value: u64, _: Ordering) {
            self.0.store(value, Ordering::Relaxed);
        }

        pub fn fetch_and(&self, value: u64, _: Ordering) -> u64 {
            self.0.fetch_and(value, Ordering::Relaxed)
        }

        pub fn fetch_or(&self, value: u64, _: Ordering) -> u64 {
            self.0.fetch_or(value, Ordering::Relaxed)
        }
    }
}

#[allow(dead_code, reason = "the models use a part of it")]
#[path = "../../src/client/credit.rs"]
mod credit;

super::bitmap!();
