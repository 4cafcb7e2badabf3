//! Plane views: K or V of one layer, in token order, at one address.
//!
//! Owns an address range per view. Invariants: the range is mapped whole for the view's life: where the session has a
//! block, that block's plane; elsewhere zeros that cannot be written. A block that is shared is mapped read-only. The
//! mappings that all views of the process may come to need never exceed what the kernel allows, so a view that exists
//! can grow to its capacity.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Error;
use super::arena::{self, Arena};
use crate::id::ExtentId;
use crate::map::page_bytes;
use crate::profile::{Layout, Plane, Profile};

/// Mappings that views of this process hold or may come to hold.
static PROMISED: AtomicUsize = AtomicUsize::new(0);
/// Mappings left to everything else in the process.
const HEADROOM: usize = 1024;

/// Where a view is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneView {
    /// Address of token 0's row.
    pub address: *mut u8,
    /// Bytes of the range.
    pub bytes: usize,
    /// Bytes from one token's row to the next one's.
    pub row: usize,
    /// Tokens that fit.
    pub capacity: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct View {
    base: *mut u8,
    plane: Plane,
    block_bytes: usize,
    blocks: usize,
    tokens_per_block: usize,
    made_by: u32,
    _promise: Promise,
}

// SAFETY: the range belongs to the view alone; it is only mapped and unmapped by the session that owns the view.
unsafe impl Send for View {}

impl View {
    /// Reserves the address range of a view of `blocks` blocks.
    pub fn reserve(
        profile: &Profile,
        plane: Plane,
        blocks: usize,
        address: Option<*mut u8>,
    ) -> Result<Self, Error> {
        let page = page_bytes();
        let tokens_per_block = profile.tokens_per_block() as usize;
        let block_bytes = plane.row * tokens_per_block;
        if profile.layout() != Layout::PlaneMajor || block_bytes % page != 0 || plane.offset % page != 0 {
            let enough = profile.plane_view_tokens(page as u64);
            let advice = match enough {
                Some(tokens) => format!("{tokens} tokens per block and the plane-major layout would do"),
                None => "no number of tokens per block would do".into(),
            };
            let text =
                format!("a plane of {block_bytes} bytes per block is no whole number of pages: {advice}");
            return Err(Error::Invalid(text));
        }
        if address.is_some_and(|a| a as usize % page != 0) {
            return Err(Error::Invalid("a view's address is a whole number of pages".into()));
        }
        let bytes = match blocks.checked_mul(block_bytes) {
            Some(0) => return Err(Error::Invalid("a view of no tokens: say how many it is to hold".into())),
            Some(bytes) => bytes,
            None => {
                let text = format!("a view of {blocks} blocks, more than there are addresses for");
                return Err(Error::Invalid(text));
            }
        };
        let promise = Promise::new(blocks + 1)?;
        let map = |source| Error::Map { what: format!("a view of {bytes} bytes"), source };
        // SAFETY: the range is new; at a given address it only succeeds where nothing is mapped.
        let base = unsafe { arena::map_zero(address, bytes, false) }.map_err(map)?.as_ptr();
        let made_by = std::process::id();
        Ok(View { base, plane, block_bytes, blocks, tokens_per_block, made_by, _promise: promise })
    }

    /// What the engine is told.
    pub fn describe(&self) -> PlaneView {
        let (row, capacity) = (self.plane.row, self.blocks * self.tokens_per_block);
        PlaneView { address: self.base, bytes: self.blocks * self.block_bytes, row, capacity }
    }

    /// Blocks that fit.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn place(&self, index: usize) -> Result<*mut u8, Error> {
        if index >= self.blocks {
            let text = format!("a view of {} tokens is full", self.blocks * self.tokens_per_block);
            return Err(Error::Invalid(text));
        }
        Ok(self.base.wrapping_add(index * self.block_bytes))
    }

    /// Shows the plane of the block at `offset` of `extent` as block `index`.
    pub fn show(
        &self,
        arena: &Arena,
        extent: ExtentId,
        offset: usize,
        index: usize,
        writable: bool,
    ) -> Result<(), Error> {
        let at = self.place(index)?;
        // SAFETY: the place is inside this view's range, which nothing else uses.
        unsafe { arena.alias(extent, offset + self.plane.offset, self.block_bytes, at, writable) }
            .map_err(|source| Error::Map { what: format!("block {index} of a view"), source })
    }

    /// Shows zeros instead of block `index`.
    pub fn hide(&self, index: usize) -> Result<(), Error> {
        let at = self.place(index)?;
        // SAFETY: as in show.
        unsafe { arena::map_zero(Some(at), self.block_bytes, true) }
            .map(|_| ())
            .map_err(|source| Error::Map { what: format!("zeros over block {index} of a view"), source })
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // In a forked child the range is not mapped, and something else may be where it was.
        if std::process::id() != self.made_by {
            return;
        }
        // SAFETY: the range is this view's; the session hands out its address for its own life only.
        unsafe { arena::unmap(self.base, self.blocks * self.block_bytes) };
    }
}

/// Mappings that are counted in until this is dropped.
#[derive(Debug)]
pub(super) struct Promise(usize);

impl Promise {
    /// Counts mappings in, if the kernel will allow them.
    pub fn new(needed: usize) -> Result<Self, Error> {
        let limit = mappings_limit();
        let used = PROMISED.fetch_add(needed, Ordering::Relaxed);
        let promise = Promise(needed);
        if used + needed > limit {
            return Err(Error::TooManyMappings { needed, used, limit });
        }
        Ok(promise)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        PROMISED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Mappings that can still be promised.
pub(super) fn mappings_left() -> usize {
    mappings_limit().saturating_sub(mappings_promised())
}

/// Mappings that have been promised.
pub(super) fn mappings_promised() -> usize {
    PROMISED.load(Ordering::Relaxed)
}

fn mappings_limit() -> usize {
    max_map_count().saturating_sub(HEADROOM)
}

fn max_map_count() -> usize {
    const DEFAULT: usize = 65530;
    let read = || -> io::Result<Option<usize>> {
        Ok(std::fs::read_to_string("/proc/sys/vm/max_map_count")?.trim().parse().ok())
    };
    read().ok().flatten().unwrap_or(DEFAULT)
}
