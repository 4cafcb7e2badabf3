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

    /// Takes the block at a place, if it is credit.
    #[inline]
    pub fn take_at(&self, position: Position, slot: u32) -> Option<Spare> {
        if slot >= self.slots {
            return None;
        }
        let (word, bit) = self.word(position, slot);
        self.take_among(word, bit)
    }

    #[inline]
    fn take_from(&self, word: usize) -> Option<Spare> {
        self.take_among(word, u64::MAX)
    }

    /// Takes any block of a word that is among `which`.
    #[inline]
    fn take_among(&self, word: usize, which: u64) -> Option<Spare> {
        let bits = &self.bits[word];
        let mut seen = bits.load(Ordering::Relaxed) & which;
        while seen != 0 {
            let bit = seen & seen.wrapping_neg();
            // Acquire: what was written before the bit was set (life, zeros) is seen by whoever clears it.
            seen = bits.fetch_and(!bit, Ordering::Acquire) & which;
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    const EXTENTS: u32 = 3;
    const SLOTS: u32 = 70;

    /// What the owner of a block, and nobody else, does with it.
    #[derive(Default)]
    struct Place {
        owned: AtomicBool,
        /// The life that its last owner gave it.
        life: AtomicU64,
    }

    /// No lock and no order of their own: what a thread sees of a place comes by way of the bitmap.
    #[test]
    fn threads_that_take_and_give_never_hold_one_block_twice_and_see_its_latest_life() {
        let credits = Credits::new(EXTENTS, SLOTS);
        let places: Vec<Place> = (0..EXTENTS * SLOTS).map(|_| Place::default()).collect();
        for place in 0..EXTENTS * SLOTS {
            credits.give(Spare { position: place / SLOTS, slot: place % SLOTS, generation: 0, zero: true });
        }
        assert_eq!(credits.count(), EXTENTS * SLOTS);
        // Fewer turns where an interpreter takes them.
        let turns = if cfg!(miri) { 200 } else { 20_000 };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut mine = Vec::new();
                    for turn in 0..turns {
                        if let Some(spare) = credits.take() {
                            let place = &places[(spare.position * SLOTS + spare.slot) as usize];
                            assert!(!place.owned.swap(true, Ordering::Relaxed), "{spare:?} is held already");
                            assert_eq!(spare.generation, place.life.load(Ordering::Relaxed), "{spare:?}");
                            assert_eq!(spare.zero, spare.generation % 2 == 0, "{spare:?}");
                            mine.push(spare);
                        }
                        // Now and then one has many and the others look for some.
                        let keep = if turn % 64 < 32 { 60 } else { 2 };
                        while mine.len() > keep {
                            let spare = mine.swap_remove(turn % mine.len());
                            let place = &places[(spare.position * SLOTS + spare.slot) as usize];
                            let generation = spare.generation + 1;
                            place.life.store(generation, Ordering::Relaxed);
                            place.owned.store(false, Ordering::Relaxed);
                            credits.give(Spare { generation, zero: generation % 2 == 0, ..spare });
                        }
                    }
                    for spare in mine {
                        let place = &places[(spare.position * SLOTS + spare.slot) as usize];
                        place.owned.store(false, Ordering::Relaxed);
                        credits.give(spare);
                    }
                });
            }
        });
        assert_eq!(credits.count(), EXTENTS * SLOTS);
        let taken = std::iter::from_fn(|| credits.take()).map(|s| (s.position, s.slot));
        let taken: std::collections::BTreeSet<_> = taken.collect();
        assert_eq!(taken.len(), (EXTENTS * SLOTS) as usize);
        assert!(credits.count() == 0 && credits.take().is_none());
    }
}
