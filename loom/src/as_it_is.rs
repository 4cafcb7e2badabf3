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

/// See the module.
#[derive(Debug)]
pub struct Credits(credit::Credits);

impl super::Bitmap for Credits {
    fn new(slots: u32) -> Self {
        Credits(credit::Credits::new(1, slots))
    }

    fn give(&self, super::Spare { slot, generation, zero }: super::Spare) {
        self.0.give(credit::Spare { position: 0, slot, generation, zero });
    }

    fn take(&self) -> Option<super::Spare> {
        let credit::Spare { slot, generation, zero, .. } = self.0.take()?;
        Some(super::Spare { slot, generation, zero })
    }

    fn count(&self) -> u32 {
        self.0.count()
    }
}
