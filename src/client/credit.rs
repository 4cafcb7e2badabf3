//! Credit: the blocks that this process has ahead of need, as a bitmap that its threads share.
//!
//! Owns, for one format, one bit per block that the process could hold. Invariants: a bit is set exactly while the
//! block is credit here; whoever clears a bit owns the block alone; a block's life is written before its bit is set
//! and does not change while it is. `loom/` checks these over every order in which threads can take turns; the test here
//! has real threads.

use super::arena::Position;
use super::sync::{AtomicU64, AtomicUsize, Ordering};

/// A block taken from credit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spare {
    pub position: Position,
    pub slot: u32,
    pub generation: u64,
    /// It reads as zero.
    pub zero: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Credits {
    slots: u32,
    words_per_extent: usize,
    bits: Box<[AtomicU64]>,
    zero: Box<[AtomicU64]>,
    lives: Box<[AtomicU64]>,
    /// The word in which a block was found last. Only a hint: any value is right.
    hint: AtomicUsize,
}

fn words(count: usize) -> Box<[AtomicU64]> {
    std::iter::repeat_with(AtomicU64::default).take(count).collect()
}

impl Credits {
    /// Room for `extents` extents of `slots` blocks each.
    pub fn new(extents: u32, slots: u32) -> Self {
        let words_per_extent = (slots as usize).div_ceil(64);
        let all = extents as usize * words_per_extent;
        Credits {
            slots,
            words_per_extent,
            bits: words(all),
            zero: words(all),
            lives: words(extents as usize * slots as usize),
            hint: AtomicUsize::new(0),
        }
    }

    fn word(&self, position: Position, slot: u32) -> (usize, u64) {
        (position as usize * self.words_per_extent + slot as usize / 64, 1 << (slot % 64))
    }

    fn life(&self, position: Position, slot: u32) -> &AtomicU64 {
        &self.lives[position as usize * self.slots as usize + slot as usize]
    }

    /// Takes any block; `None` when there is none.
    #[inline]
    pub fn take(&self) -> Option<Spare> {
        let hint = self.hint.load(Ordering::Relaxed);
        self.take_from(hint).or_else(|| self.search())
    }

    #[inline]
    fn take_from(&self, word: usize) -> Option<Spare> {
        let bits = &self.bits[word];
        let mut seen = bits.load(Ordering::Relaxed);
        while seen != 0 {
            let bit = seen & seen.wrapping_neg();
            // Acquire: what was written before the bit was set (life, zeros) is seen by whoever clears it.
            seen = bits.fetch_and(!bit, Ordering::Acquire);
            if seen & bit != 0 {
                let position = (word / self.words_per_extent) as Position;
                let slot = (word % self.words_per_extent) as u32 * 64 + bit.trailing_zeros();
                let zero = self.zero[word].load(Ordering::Relaxed) & bit != 0;
                let generation = self.life(position, slot).load(Ordering::Relaxed);
                return Some(Spare { position, slot, generation, zero });
            }
        }
        None
    }

    #[cold]
    fn search(&self) -> Option<Spare> {
        (0..self.bits.len()).find_map(|word| {
            let spare = self.take_from(word)?;
            self.hint.store(word, Ordering::Relaxed);
            Some(spare)
        })
    }

    /// Makes a block credit.
    #[inline]
    pub fn give(&self, spare: Spare) {
        let (word, bit) = self.word(spare.position, spare.slot);
        let life = self.life(spare.position, spare.slot);
        if life.load(Ordering::Relaxed) != spare.generation {
            life.store(spare.generation, Ordering::Relaxed);
        }
        let was_zero = self.zero[word].load(Ordering::Relaxed) & bit != 0;
        if was_zero != spare.zero {
            match spare.zero {
                true => self.zero[word].fetch_or(bit, Ordering::Relaxed),
                false => self.zero[word].fetch_and(!bit, Ordering::Relaxed),
            };
        }
        let before = self.bits[word].fetch_or(bit, Ordering::Release);
        debug_assert_eq!(before & bit, 0, "a block is given back twice");
    }

    /// How many blocks there are. Other threads may change it at any time.
    pub fn count(&self) -> u32 {
        self.bits.iter().map(|w| w.load(Ordering::Relaxed).count_ones()).sum()
    }

    /// Whether there are none, without counting.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|w| w.load(Ordering::Relaxed) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Mutex;

    #[test]
    fn threads_that_take_and_give_never_hold_one_block_twice() {
        let credits = Credits::new(3, 70);
        let all: Vec<_> = (0..3).flat_map(|p| (0..70).map(move |s| (p, s))).collect();
        for &(position, slot) in &all {
            credits.give(Spare { position, slot, generation: 7, zero: slot % 2 == 0 });
        }
        assert_eq!(credits.count(), 210);
        let held = Mutex::new(HashSet::new());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let Some(spare) = credits.take() else { continue };
                        let place = (spare.position, spare.slot);
                        assert_eq!(spare.generation, 7);
                        assert_eq!(spare.zero, spare.slot % 2 == 0);
                        assert!(held.lock().unwrap().insert(place), "{place:?} is held already");
                        assert!(held.lock().unwrap().remove(&place));
                        credits.give(spare);
                    }
                });
            }
        });
        assert_eq!(credits.count(), 210);
        let taken: HashSet<_> = std::iter::from_fn(|| credits.take()).map(|s| (s.position, s.slot)).collect();
        assert_eq!(taken.len(), 210);
        assert!(credits.is_empty() && credits.take().is_none());
    }
}
