//! Vectors of f32 and memory for them.
//!
//! Invariant: the memory begins on a cache line. Left to the allocator, it may begin 16 bytes into one, and then every
//! other vector lies across two lines: the same code was half as fast again or not, as the allocator pleased.

use std::ops::{Deref, DerefMut};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Values that are computed side by side: one AVX register, two of NEON.
pub(super) const LANES: usize = 8;
/// A vector.
pub(super) type Lanes = [f32; LANES];

/// A cache line.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
struct Line([Lanes; 2]);

/// Working memory: a slice of vectors that grows.
#[derive(Debug, Default)]
pub(super) struct Vectors(Vec<Line>);

impl Vectors {
    /// Makes it at least `len` vectors long. What it holds is left over from earlier uses.
    pub(super) fn fit(&mut self, len: usize) {
        if self.0.len() < len.div_ceil(2) {
            self.0.resize(len.div_ceil(2), Line([[0.0; LANES]; 2]));
        }
    }
}

impl Deref for Vectors {
    type Target = [Lanes];
    fn deref(&self) -> &[Lanes] {
        <[Lanes]>::ref_from_bytes(self.0.as_bytes()).expect("a line is two vectors")
    }
}

impl DerefMut for Vectors {
    fn deref_mut(&mut self) -> &mut [Lanes] {
        <[Lanes]>::mut_from_bytes(self.0.as_mut_bytes()).expect("a line is two vectors")
    }
}

/// A slice whose length is known.
#[inline(always)]
pub(super) fn exactly<const N: usize>(slice: &[Lanes]) -> &[Lanes; N] {
    slice.try_into().expect("a slice of this length")
}
