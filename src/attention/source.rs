//! Where the K and V rows of a sequence lie: in blocks reached through a table, or in two arrays.
//!
//! Invariant: both sources yield the same thing, runs of equally spaced rows, so that the kernel cannot tell them
//! apart and their difference in cost is the price of paging alone.

use crate::profile::Plane;

/// Block tables hold offsets in units of 4 KiB, whatever the machine's page size.
pub const PAGE_SHIFT: u32 = 12;

/// Rows of consecutive tokens, equally spaced.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// The K row of the first token.
    pub k: *const u8,
    /// The V row of the first token.
    pub v: *const u8,
    /// Bytes from one K row to the next.
    pub k_stride: usize,
    /// Bytes from one V row to the next.
    pub v_stride: usize,
    /// Tokens in the run, at least one. It may reach past the tokens that exist: the kernel stops in time.
    pub tokens: usize,
}

/// K and V of one layer of one sequence.
pub trait KvSource {
    /// The run that begins with `token` and ends with its block.
    fn run(&self, token: usize) -> Run;
}

/// K and V reached through a block table. Token `t` is at
/// `base + (table[t >> shift] << PAGE_SHIFT) + plane.offset + (t & (2^shift - 1)) * plane.stride`.
#[derive(Clone, Copy, Debug)]
pub struct Paged<'a> {
    /// What the table's offsets count from.
    pub base: *const u8,
    /// The blocks in token order, each as an offset in units of `1 << PAGE_SHIFT` bytes.
    pub table: &'a [u32],
    /// log2 of the tokens in a block.
    pub shift: u32,
    /// The K plane inside a block.
    pub k: Plane,
    /// The V plane inside a block.
    pub v: Plane,
}

impl KvSource for Paged<'_> {
    #[inline(always)]
    fn run(&self, token: usize) -> Run {
        let in_block = token & ((1 << self.shift) - 1);
        let block = self.base.wrapping_add((self.table[token >> self.shift] as usize) << PAGE_SHIFT);
        Run {
            k: block.wrapping_add(self.k.offset + in_block * self.k.stride),
            v: block.wrapping_add(self.v.offset + in_block * self.v.stride),
            k_stride: self.k.stride,
            v_stride: self.v.stride,
            tokens: (1 << self.shift) - in_block,
        }
    }
}

/// K and V in two arrays, as an engine without paging keeps them: the twin that paging is measured against.
#[derive(Clone, Copy, Debug)]
pub struct Contiguous {
    /// The K row of token 0.
    pub k: *const u8,
    /// The V row of token 0.
    pub v: *const u8,
    /// Bytes from one K row to the next.
    pub k_stride: usize,
    /// Bytes from one V row to the next.
    pub v_stride: usize,
    /// Tokens per run that the arrays are walked in: a power of two. The tokens per block of the paged twin give the
    /// same walk; a larger number, fewer steps. The result is the same for all.
    pub run: usize,
}

impl KvSource for Contiguous {
    #[inline(always)]
    fn run(&self, token: usize) -> Run {
        Run {
            k: self.k.wrapping_add(token * self.k_stride),
            v: self.v.wrapping_add(token * self.v_stride),
            k_stride: self.k_stride,
            v_stride: self.v_stride,
            tokens: self.run - (token & (self.run - 1)),
        }
    }
}
