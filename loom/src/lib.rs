//! kvbroker's credit bitmap over loom's atomics: `src/client/credit.rs`, the very file, in models small enough that loom
//! can try every order of their threads, and every value that a weak memory may show them.
//!
//! Owns the models. Invariant: what a thread does with a block that it has taken is a plain, unsynchronised access, so
//! two owners at a time, or an owner who does not see what the one before has done, is a data race that loom reports.

/// The same face for both: each has types of its own, from a `credit` module of its own.
macro_rules! bitmap {
    () => {
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
    };
}
use bitmap;

pub mod as_it_is;
pub mod relaxed;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A block of credit, as both variants have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spare {
    /// The slot in the only extent.
    pub slot: u32,
    /// Which life of its place.
    pub generation: u64,
    /// It reads as zero.
    pub zero: bool,
}

/// The bitmap in one of its variants.
pub trait Bitmap: Send + Sync + 'static {
    /// One extent of so many slots, without credit.
    fn new(slots: u32) -> Self;
    /// Makes a block credit.
    fn give(&self, spare: Spare);
    /// Takes any block.
    fn take(&self) -> Option<Spare>;
    /// How many there are.
    fn count(&self) -> u32;
}

/// The bytes behind each slot, which only its owner may touch: they hold the life that was written last.
struct Memory<B> {
    bitmap: B,
    bytes: Vec<UnsafeCell<u64>>,
}

// SAFETY: whether the cells are really touched by one thread at a time is what the models find out; loom checks each
// access and ends the model where it is not so.
unsafe impl<B: Sync> Sync for Memory<B> {}
// SAFETY: the cells hold plain numbers.
unsafe impl<B: Send> Send for Memory<B> {}

impl<B: Bitmap> Memory<B> {
    /// `slots` slots, all of them credit in life 1.
    fn new(slots: u32) -> Arc<Self> {
        let bytes = (0..slots).map(|_| UnsafeCell::new(1)).collect();
        let memory = Memory { bitmap: B::new(slots), bytes };
        (0..slots).for_each(|slot| memory.bitmap.give(Spare { slot, generation: 1, zero: false }));
        Arc::new(memory)
    }

    /// Takes a block, checks that it is as its giver left it, and writes to it.
    fn own(&self) -> Option<Spare> {
        let spare = self.bitmap.take()?;
        // SAFETY: see `Memory`.
        let found = self.bytes[spare.slot as usize].with(|byte| unsafe { *byte });
        assert_eq!(found, spare.generation, "slot {} is in another life than it says", spare.slot);
        assert_eq!(spare.zero, found % 2 == 0, "slot {}: somebody else's word on its zeros", spare.slot);
        Some(spare)
    }

    /// The block's next life: even ones read as zero.
    fn give_back(&self, spare: Spare) {
        let generation = spare.generation + 1;
        // SAFETY: see `Memory`.
        self.bytes[spare.slot as usize].with_mut(|byte| unsafe { *byte = generation });
        self.bitmap.give(Spare { generation, zero: generation % 2 == 0, ..spare });
    }
}

/// Two threads take the only block: one of them gets it.
pub fn two_threads_and_one_block<B: Bitmap>() {
    loom::model(|| {
        let memory = Memory::<B>::new(1);
        let other = memory.clone();
        let thread = thread::spawn(move || other.own());
        let here = memory.own();
        let there = thread.join().expect("the thread ends");
        assert!(here.is_some() != there.is_some(), "the block went to {here:?} and {there:?}");
        assert_eq!(memory.bitmap.count(), 0);
    });
}

/// Two threads take one of two blocks each: neither goes without, and they have not the same one.
pub fn two_threads_and_two_blocks<B: Bitmap>() {
    loom::model(|| {
        let memory = Memory::<B>::new(2);
        let other = memory.clone();
        let thread = thread::spawn(move || other.own().expect("there are two").slot);
        let here = memory.own().expect("there are two").slot;
        assert_ne!(here, thread.join().expect("the thread ends"));
    });
}

/// Two threads take a block and give it back in its next life, one of them twice: whoever has it next sees that life.
pub fn blocks_go_from_hand_to_hand<B: Bitmap>() {
    loom::model(|| {
        let memory = Memory::<B>::new(2);
        let other = memory.clone();
        let turn = |memory: &Memory<B>| {
            if let Some(spare) = memory.own() {
                memory.give_back(spare);
            }
        };
        let thread = thread::spawn(move || turn(&other));
        turn(&memory);
        turn(&memory);
        thread.join().expect("the thread ends");
        assert_eq!(memory.bitmap.count(), 2);
        let last: Vec<_> = std::iter::from_fn(|| memory.own()).collect();
        let turns: u64 = last.iter().map(|spare| spare.generation - 1).sum();
        assert_eq!((last.len(), turns), (2, 3), "every turn began a new life of one block");
    });
}

/// What one thread gives, another one takes: with everything that was written before.
pub fn what_is_given_comes_with_its_bytes<B: Bitmap>() {
    loom::model(|| {
        let memory = Memory::<B>::new(1);
        let first = memory.own().expect("there is one");
        let other = memory.clone();
        let giver = thread::spawn(move || other.give_back(first));
        // It may be too early: then there is nothing, and never half of it.
        let early = memory.own();
        giver.join().expect("the thread ends");
        let late = memory.own();
        assert!(early.is_some() != late.is_some());
        assert_eq!(early.or(late).map(|spare| (spare.generation, spare.zero)), Some((2, true)));
    });
}
