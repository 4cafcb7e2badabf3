//! How a pool is cut into extents and an extent into blocks: pure arithmetic, no memory.
//!
//! Owns the choice of the pool's one extent size. Invariant: a count computed here is reached by a fresh pool, so
//! nobody has to probe the kernel until it fails; every byte of the pool is either in a block or named in
//! [`Waste`].
//!
//! The CMA heap starts each buffer on a boundary of min(order of its size, `CONFIG_CMA_ALIGNMENT`) (Linux,
//! drivers/dma-buf/heaps/cma_heap.c). So 384 KiB buffers sit 512 KiB apart and only 512 of them fit 256 MiB, while
//! 3 MiB extents of 8 such blocks lie side by side: 85 extents, 680 blocks.

use crate::profile::Profile;
use crate::size::{Size, SizeError};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// `CONFIG_CMA_ALIGNMENT` of nearly every kernel: 2^8 pages, 1 MiB with pages of 4 KiB.
pub const CMA_ALIGNMENT_ORDER: u32 = 8;
/// The range that the kernel allows for `CONFIG_CMA_ALIGNMENT` (kernel/dma/Kconfig).
pub const CMA_ALIGNMENT_ORDERS: std::ops::RangeInclusive<u32> = 2..=12;
/// The smallest extent that [`ExtentSize::Auto`] takes: smaller ones cost file descriptors.
pub const AUTO_MIN: u64 = 1 << 20;
/// The largest extent that [`ExtentSize::Auto`] takes, but for a block that is larger itself: an extent belongs to
/// one tenant, so larger ones strand more memory.
pub const AUTO_MAX: u64 = 8 << 20;
/// The largest extent that may be asked for.
pub const MAX_EXTENT_BYTES: u64 = 1 << 40;

/// Where the kernel may put an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placement {
    page: u64,
    cma_order: Option<u32>,
}

/// The configured extent size: `auto`, `block`, or a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ExtentSize {
    /// The smallest size from 1 MiB to 8 MiB that packs within 1 % of the best.
    #[default]
    Auto,
    /// Strict mode: each extent, and so each file descriptor, is exactly one block.
    Block,
    /// This many bytes, a whole number of pages.
    Bytes(u64),
}

/// Why a pool cannot be cut as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum PackingError {
    #[error("pages of {0} bytes: a page size is a power of two from 512 bytes to 1 MiB")]
    Page(u64),
    #[error("CMA alignment order {0}: the kernel's CONFIG_CMA_ALIGNMENT goes from 2 to 12")]
    CmaOrder(u32),
    #[error("no profile to cut extents for: configure at least one")]
    NoBlocks,
    #[error("a block of 0 bytes: there is nothing to pack")]
    EmptyBlock,
    #[error(
        "an extent of {} is not a whole number of {page}-byte pages: use {}",
        Size::from_bytes(*.extent).exact(),
        whole_pages(*.extent, *.page)
    )]
    NotPages { extent: u64, page: u64 },
    #[error("an extent of {} is too large: the most is {}", Size::from_bytes(*.0), Size::from_bytes(MAX_EXTENT_BYTES))]
    ExtentTooLarge(u64),
    #[error("a block of {} never fits an extent of {}: set extent = \"auto\", or at least \"{}\"",
        Size::from_bytes(*.block), Size::from_bytes(*.extent), Size::from_bytes(*.would_do).exact())]
    NeverFits { block: u64, extent: u64, would_do: u64 },
    #[error("a pool of {} holds no extent of {}: make the pool larger, or use fewer tokens per block",
        Size::from_bytes(*.pool), Size::from_bytes(*.extent))]
    PoolTooSmall { pool: u64, extent: u64 },
}

/// The sizes next to `extent` (at most [`MAX_EXTENT_BYTES`]) that are whole pages, and not none.
fn whole_pages(extent: u64, page: u64) -> String {
    let exact = |bytes| Size::from_bytes(bytes).exact();
    match extent / page * page {
        0 => exact(page),
        lower => format!("{} or {}", exact(lower), exact(extent.next_multiple_of(page))),
    }
}

/// A pool cut into extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Bytes of the pool.
    pub pool: u64,
    /// Bytes of one extent: a whole number of pages.
    pub bytes: u64,
    /// Bytes from the start of one extent to the next one's: more than `bytes` where alignment leaves a gap.
    pub stride: u64,
    /// Extents that fit. A daemon that was given fewer by the kernel lowers it.
    pub count: u64,
    /// Whether an extent holds exactly one block whatever its size ([`ExtentSize::Block`]).
    pub one_block: bool,
    /// Where the kernel puts them.
    pub placement: Placement,
}

/// What one block size makes of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Bytes of the block itself.
    pub block_bytes: u64,
    /// Bytes that it occupies: whole pages.
    pub slot_bytes: u64,
    /// Bytes of an extent.
    pub extent_bytes: u64,
    /// Extents in the pool.
    pub extents: u64,
    /// Blocks in an extent.
    pub blocks_per_extent: u64,
    /// Blocks in the pool.
    pub blocks: u64,
    /// Blocks on paper: pool bytes over block bytes.
    pub blocks_ideal: u64,
    /// The pool's bytes that are in no block.
    pub waste: Waste,
    /// Whether an extent is one physically contiguous range (CMA).
    pub contiguous: bool,
}

/// The pool's bytes that are in no block, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Waste {
    /// Gaps between extents, because the kernel aligns each one's start.
    pub alignment: u64,
    /// The ends of extents, where no further block fits.
    pub extent_tail: u64,
    /// The ends of blocks, where they do not fill their last page.
    pub page_padding: u64,
    /// The end of the pool, where no further extent fits.
    pub pool_tail: u64,
}

impl Waste {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.alignment + self.extent_tail + self.page_padding + self.pool_tail
    }
}

impl Packing {
    /// Waste in per cent of `pool`.
    pub fn waste_percent(&self, pool: u64) -> f64 {
        percent(self.waste.total(), pool)
    }
}

/// `part` in per cent of `whole`; 0 of nothing.
pub fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

impl Placement {
    /// Anywhere, page by page: memfd, udmabuf and the system heap.
    pub fn pages(page: u64) -> Result<Self, PackingError> {
        if !page.is_power_of_two() || !(512..=1 << 20).contains(&page) {
            return Err(PackingError::Page(page));
        }
        Ok(Placement { page, cma_order: None })
    }

    /// In a CMA region, contiguous and aligned. `order` is `CONFIG_CMA_ALIGNMENT`, normally
    /// [`CMA_ALIGNMENT_ORDER`].
    pub fn cma(page: u64, order: u32) -> Result<Self, PackingError> {
        if !CMA_ALIGNMENT_ORDERS.contains(&order) {
            return Err(PackingError::CmaOrder(order));
        }
        Ok(Placement { cma_order: Some(order), ..Placement::pages(page)? })
    }

    /// Bytes of a page.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// Whether extents are physically contiguous.
    pub fn contiguous(&self) -> bool {
        self.cma_order.is_some()
    }

    /// The boundary on which an extent of `extent_bytes` starts.
    pub fn align_for(&self, extent_bytes: u64) -> u64 {
        self.cma_order.map_or(self.page, |order| align_for(extent_bytes, self.page, order))
    }
}

/// The boundary on which the CMA heap starts a buffer: its size rounded up to a power of two of pages, at most
/// 2^`cma_alignment_order` pages. `extent_bytes` is at most [`MAX_EXTENT_BYTES`], `page` a power of two.
fn align_for(extent_bytes: u64, page: u64, cma_alignment_order: u32) -> u64 {
    let pages = extent_bytes.div_ceil(page).max(1);
    page * pages.next_power_of_two().min(1 << cma_alignment_order)
}

/// Block sizes, in bytes, of all groups of `profiles`: each group packs as a size of its own.
pub fn block_sizes<'a>(profiles: impl IntoIterator<Item = &'a Profile>) -> Vec<u64> {
    profiles.into_iter().flat_map(|p| (0..p.groups().len()).map(|g| p.block_bytes(g))).collect()
}

impl Extents {
    /// Cuts `pool` bytes into as many extents of `bytes` as fit.
    pub fn of(pool: u64, bytes: u64, placement: Placement) -> Result<Self, PackingError> {
        let page = placement.page;
        if bytes > MAX_EXTENT_BYTES {
            return Err(PackingError::ExtentTooLarge(bytes));
        }
        if bytes == 0 || bytes % page != 0 {
            return Err(PackingError::NotPages { extent: bytes, page });
        }
        if bytes > pool {
            return Err(PackingError::PoolTooSmall { pool, extent: bytes });
        }
        let stride = bytes.next_multiple_of(placement.align_for(bytes));
        // The last extent needs no room up to the next boundary.
        let count = (pool - bytes) / stride + 1;
        Ok(Extents { pool, bytes, stride, count, one_block: false, placement })
    }

    /// Cuts `pool` for blocks of the sizes `blocks`: those of all groups of all profiles that shall fit
    /// ([`block_sizes`]).
    ///
    /// `Auto` weighs the sizes that are N blocks of one of `blocks`, from [`AUTO_MIN`] to [`AUTO_MAX`] (a larger block
    /// is an extent of its own), by the worst share of the paper count that any of `blocks` reaches, and takes the
    /// smallest within 1 % of the best. In a pool that is smaller than all of those it takes one extent of as many
    /// blocks as fit. `Block` takes the largest block; a smaller one then has an extent of its own too.
    pub fn choose(
        pool: u64,
        extent: ExtentSize,
        blocks: &[u64],
        placement: Placement,
    ) -> Result<Self, PackingError> {
        let page = placement.page;
        if blocks.contains(&0) {
            return Err(PackingError::EmptyBlock);
        }
        if let Some(large) = blocks.iter().find(|b| **b > MAX_EXTENT_BYTES) {
            return Err(PackingError::ExtentTooLarge(*large));
        }
        let mut slots: Vec<u64> = blocks.iter().map(|b| b.next_multiple_of(page)).collect();
        slots.sort_unstable();
        slots.dedup();
        let largest = *slots.last().ok_or(PackingError::NoBlocks)?;
        match extent {
            ExtentSize::Block => Ok(Extents { one_block: true, ..Extents::of(pool, largest, placement)? }),
            ExtentSize::Bytes(bytes) => {
                let extents = Extents::of(pool, bytes, placement)?;
                if largest > bytes {
                    return Err(PackingError::NeverFits { block: largest, extent: bytes, would_do: largest });
                }
                Ok(extents)
            }
            ExtentSize::Auto => Extents::auto(pool, &slots, largest, placement),
        }
    }

    fn auto(pool: u64, slots: &[u64], largest: u64, placement: Placement) -> Result<Self, PackingError> {
        let mut sizes: Vec<u64> = slots
            .iter()
            .flat_map(|&slot| {
                let most = (AUTO_MAX / slot).max(1);
                (AUTO_MIN.div_ceil(slot).min(most)..=most).map(move |n| n * slot)
            })
            .filter(|&size| size >= largest)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut cuts: Vec<(Extents, Share)> = Vec::new();
        for size in sizes.into_iter().filter(|&size| size <= pool) {
            let extents = Extents::of(pool, size, placement)?;
            cuts.push((extents, extents.worst_share(slots)));
        }
        let Some(best) = cuts.iter().map(|(_, share)| *share).max_by(Share::order) else {
            // Nothing of the usual sizes fits. A pool this small is a test's or an embedded one's.
            let most = (pool / largest).max(1);
            return Extents::of(pool, most * largest, placement);
        };
        let (extents, _) = cuts
            .into_iter()
            .find(|(_, share)| share.within_one_percent_of(best))
            .expect("the best one is within 1 % of itself");
        Ok(extents)
    }

    /// The smallest share of its paper count that any of the block sizes reaches.
    fn worst_share(&self, slots: &[u64]) -> Share {
        slots
            .iter()
            .map(|slot| Share { got: self.count * (self.bytes / slot), of: self.pool / slot })
            .min_by(Share::order)
            .unwrap_or(Share { got: 0, of: 1 })
    }

    /// What blocks of `block_bytes` make of these extents; 0 blocks if one does not fit.
    pub fn pack(&self, block_bytes: u64) -> Packing {
        let slot = block_bytes.max(1).next_multiple_of(self.placement.page);
        let fit = self.bytes / slot;
        let per_extent = if self.one_block { fit.min(1) } else { fit };
        let blocks = self.count * per_extent;
        let spanned =
            self.count.saturating_sub(1) * self.stride + if self.count > 0 { self.bytes } else { 0 };
        Packing {
            block_bytes,
            slot_bytes: slot,
            extent_bytes: self.bytes,
            extents: self.count,
            blocks_per_extent: per_extent,
            blocks,
            blocks_ideal: self.pool / block_bytes.max(1),
            waste: Waste {
                alignment: self.count.saturating_sub(1) * (self.stride - self.bytes),
                extent_tail: self.count * (self.bytes - per_extent * slot),
                page_padding: blocks * (slot - block_bytes),
                pool_tail: self.pool - spanned,
            },
            contiguous: self.placement.contiguous(),
        }
    }

    /// Extents that hold, for each group with its block size, that many blocks: `(block_bytes, blocks)`. `None` if
    /// a block does not fit an extent, or if the number exceeds 64 bits.
    pub fn needed(&self, groups: &[(u64, u64)]) -> Option<u64> {
        groups.iter().try_fold(0u64, |sum, &(block_bytes, blocks)| {
            let per_extent = self.pack(block_bytes).blocks_per_extent;
            if per_extent == 0 { None } else { sum.checked_add(blocks.div_ceil(per_extent)) }
        })
    }

    /// The most times that one set of blocks, `(block_bytes, blocks)` for each group, fits the pool at once. With one
    /// block of each group it is how many blocks' worth of tokens the pool holds in all layers.
    pub fn sets(&self, groups: &[(u64, u64)]) -> u64 {
        let fits = |n: u64| {
            let times: Option<Vec<_>> =
                groups.iter().map(|&(bytes, blocks)| Some((bytes, blocks.checked_mul(n)?))).collect();
            times.and_then(|g| self.needed(&g)).is_some_and(|extents| extents <= self.count)
        };
        if groups.iter().all(|&(_, blocks)| blocks == 0) || !fits(1) {
            return 0;
        }
        // The need grows with n: find the last n that fits by halving. No page is smaller than 512 bytes, so the
        // pool's bytes bound n from above.
        let (mut low, mut high) = (1, self.pool);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }
}

/// A share of a paper count, compared exactly.
#[derive(Debug, Clone, Copy)]
struct Share {
    got: u64,
    of: u64,
}

impl Share {
    fn order(&self, other: &Share) -> std::cmp::Ordering {
        let left = u128::from(self.got) * u128::from(other.of);
        left.cmp(&(u128::from(other.got) * u128::from(self.of)))
    }

    fn within_one_percent_of(&self, best: Share) -> bool {
        u128::from(self.got) * u128::from(best.of) * 100 >= u128::from(best.got) * u128::from(self.of) * 99
    }
}

impl FromStr for ExtentSize {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<Self, SizeError> {
        match text {
            "auto" => Ok(ExtentSize::Auto),
            "block" => Ok(ExtentSize::Block),
            _ => text.parse::<Size>().map(|s| ExtentSize::Bytes(s.bytes())),
        }
    }
}

impl fmt::Display for ExtentSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExtentSize::Auto => f.write_str("auto"),
            ExtentSize::Block => f.write_str("block"),
            ExtentSize::Bytes(bytes) => f.write_str(&Size::from_bytes(*bytes).exact()),
        }
    }
}

impl Serialize for ExtentSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ExtentSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|e: SizeError| de::Error::custom(format!("{e}; or \"auto\", or \"block\"")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn cma() -> Placement {
        Placement::cma(4096, CMA_ALIGNMENT_ORDER).unwrap()
    }

    /// Pool in MiB, block in KiB; gives blocks per extent, extents, blocks.
    fn auto(pool: u64, block: u64) -> (u64, u64, u64) {
        let extents = Extents::choose(pool * MIB, ExtentSize::Auto, &[block * KIB], cma()).unwrap();
        let p = extents.pack(block * KIB);
        (p.blocks_per_extent, p.extents, p.blocks)
    }

    #[test]
    fn the_models_of_the_design_pack_into_the_extents_it_states() {
        assert_eq!(auto(256, 384), (8, 85, 680), "reference");
        assert_eq!(auto(256, 192), (16, 85, 1360), "Qwen2.5-0.5B");
        assert_eq!(auto(256, 448), (9, 64, 576), "Qwen2.5-1.5B");
        assert_eq!(auto(256, 1792), (4, 36, 144), "Qwen3-0.6B");
        assert_eq!(auto(256, 64), (16, 256, 4096));
        assert_eq!(auto(192, 384), (8, 64, 512), "reference, 192 MiB");
    }

    #[test]
    fn buffers_of_one_block_sit_on_the_boundaries_that_were_measured() {
        // Measured on Linux 6.12 with CONFIG_CMA_ALIGNMENT=8 and cma=256M.
        for (kib, buffers) in [
            (384, 512),
            (512, 512),
            (768, 256),
            (1024, 256),
            (1536, 128),
            (3072, 85),
            (128, 2048),
            (96, 2048),
        ] {
            assert_eq!(Extents::of(256 * MIB, kib * KIB, cma()).unwrap().count, buffers, "{kib} KiB");
        }
        assert_eq!(Extents::of(256 * MIB, 255 * MIB, cma()).unwrap().count, 1);
        assert_eq!(Extents::of(256 * MIB, 256 * MIB, cma()).unwrap().count, 1);
        let fine = Placement::cma(4096, 5).unwrap();
        assert_eq!(Extents::of(256 * MIB, 384 * KIB, fine).unwrap().count, 682);
    }

    #[test]
    fn alignment_stops_at_the_kernels_limit_and_follows_the_page_size() {
        assert_eq!(align_for(384 * KIB, 4096, 8), 512 * KIB);
        assert_eq!(align_for(384 * KIB, 16384, 8), 512 * KIB);
        assert_eq!(align_for(384 * KIB, 65536, 8), 512 * KIB);
        assert_eq!(align_for(3 * MIB, 4096, 8), MIB);
        assert_eq!(align_for(3 * MIB, 16384, 8), 4 * MIB);
        assert_eq!(align_for(1, 4096, 8), 4096);
    }

    #[test]
    fn strict_mode_gives_each_block_a_descriptor_and_pays_for_alignment() {
        let extents = Extents::choose(256 * MIB, ExtentSize::Block, &[384 * KIB], cma()).unwrap();
        let p = extents.pack(384 * KIB);
        assert_eq!((p.blocks_per_extent, p.blocks, p.blocks_ideal), (1, 512, 682));
        assert_eq!(p.waste.alignment, 511 * 128 * KIB);
        let pages = Placement::pages(4096).unwrap();
        let extents = Extents::choose(256 * MIB, ExtentSize::Block, &[384 * KIB], pages).unwrap();
        assert_eq!(extents.pack(384 * KIB).blocks, 682);
        let two = Extents::choose(256 * MIB, ExtentSize::Block, &[64 * KIB, 352 * KIB], cma()).unwrap();
        assert_eq!(two.bytes, 352 * KIB);
        assert_eq!(two.pack(64 * KIB).blocks_per_extent, 1, "one descriptor is one block, of whatever size");
    }

    #[test]
    fn a_profile_in_extents_made_for_another_shows_its_waste() {
        let extents = Extents::of(256 * MIB, 3 * MIB, cma()).unwrap();
        let p = extents.pack(1792 * KIB);
        assert_eq!((p.blocks_per_extent, p.blocks), (1, 85));
        assert_eq!(p.waste_percent(256 * MIB).round(), 42.0);
    }

    #[test]
    fn several_profiles_get_the_extent_that_is_best_for_the_worst_of_them() {
        let sizes = [384 * KIB, 1792 * KIB];
        let extents = Extents::choose(256 * MIB, ExtentSize::Auto, &sizes, cma()).unwrap();
        let worst =
            |e: &Extents| sizes.map(|b| e.pack(b).waste_percent(256 * MIB)).into_iter().fold(0.0, f64::max);
        assert!(worst(&extents) < 10.0, "{extents:?}: {}", worst(&extents));
        assert!(worst(&Extents::of(256 * MIB, 3 * MIB, cma()).unwrap()) > 40.0);
    }

    #[test]
    fn a_block_above_8_mib_is_an_extent_of_its_own() {
        let extents = Extents::choose(256 * MIB, ExtentSize::Auto, &[10 * MIB], cma()).unwrap();
        assert_eq!((extents.bytes, extents.count), (10 * MIB, 25));
        let both = Extents::choose(256 * MIB, ExtentSize::Auto, &[384 * KIB, 10 * MIB], cma()).unwrap();
        assert_eq!((both.bytes, both.pack(384 * KIB).blocks_per_extent), (10 * MIB, 26));
    }

    #[test]
    fn a_pool_smaller_than_an_extent_still_serves_what_fits() {
        let extents = Extents::choose(MIB, ExtentSize::Auto, &[384 * KIB], cma()).unwrap();
        assert_eq!((extents.bytes, extents.count), (768 * KIB, 1));
    }

    #[test]
    fn what_cannot_be_cut_is_refused_with_what_would_do() {
        let choose = |pool, extent, blocks: &[u64]| Extents::choose(pool, extent, blocks, cma());
        let said = choose(256 * MIB, ExtentSize::Bytes(MIB), &[1792 * KIB]).unwrap_err().to_string();
        assert!(said.contains("never fits") && said.contains("\"1792K\""), "{said}");
        let said = choose(256 * MIB, ExtentSize::Bytes(MIB + 1), &[4096]).unwrap_err().to_string();
        assert!(said.contains("use 1M or 1028K"), "{said}");
        assert!(matches!(choose(KIB, ExtentSize::Auto, &[4096]), Err(PackingError::PoolTooSmall { .. })));
        assert_eq!(choose(MIB, ExtentSize::Auto, &[]), Err(PackingError::NoBlocks));
        assert_eq!(choose(MIB, ExtentSize::Auto, &[0]), Err(PackingError::EmptyBlock));
        assert!(matches!(
            choose(u64::MAX, ExtentSize::Auto, &[u64::MAX]),
            Err(PackingError::ExtentTooLarge(_))
        ));
        for none in [0, 1] {
            let said = choose(MIB, ExtentSize::Bytes(none), &[4096]).unwrap_err().to_string();
            assert!(said.ends_with("pages: use 4K"), "{said}");
        }
        assert_eq!(Placement::pages(4095), Err(PackingError::Page(4095)));
        assert_eq!(Placement::cma(4096, 13), Err(PackingError::CmaOrder(13)));
    }

    #[test]
    fn sets_of_two_groups_share_the_extents() {
        let extents = Extents::of(10 * MIB, MIB, cma()).unwrap();
        // 16 small or 2 large blocks in an extent: 16 sets need 1 + 8 extents, 17 need 2 + 9.
        let groups = [(64 * KIB, 1), (352 * KIB, 1)];
        assert_eq!(extents.sets(&groups), 16);
        assert_eq!(extents.needed(&[(64 * KIB, 16), (352 * KIB, 16)]), Some(9));
        assert_eq!(extents.sets(&[(2 * MIB, 1)]), 0);
        assert_eq!(extents.sets(&[(64 * KIB, 0)]), 0);
    }

    #[test]
    fn extent_sizes_read_from_a_configuration() {
        let read = |text: &str| serde_json::from_str::<ExtentSize>(text);
        assert_eq!(read("\"auto\"").unwrap(), ExtentSize::Auto);
        assert_eq!(read("\"block\"").unwrap(), ExtentSize::Block);
        assert_eq!(read("\"3M\"").unwrap(), ExtentSize::Bytes(3 * MIB));
        assert!(read("\"3\"").unwrap_err().to_string().contains("without unit"));
        assert_eq!(serde_json::to_string(&ExtentSize::Bytes(3 * MIB)).unwrap(), "\"3M\"");
    }

    /// Places extents page by page, as someone without arithmetic would.
    fn naive_extents(pool: u64, bytes: u64, page: u64, order: Option<u32>) -> u64 {
        let mut align = page;
        if let Some(order) = order {
            while align < bytes && align < page << order {
                align *= 2;
            }
        }
        let (mut at, mut count) = (0, 0);
        while at + bytes <= pool {
            count += 1;
            at += bytes;
            while at % align != 0 {
                at += page;
            }
        }
        count
    }

    fn naive_blocks(extent: u64, slot: u64) -> u64 {
        let (mut at, mut count) = (0, 0);
        while at + slot <= extent {
            at += slot;
            count += 1;
        }
        count
    }

    fn placement(page: u64, order: Option<u32>) -> Placement {
        order.map_or_else(|| Placement::pages(page), |o| Placement::cma(page, o)).unwrap()
    }

    fn orders() -> impl Strategy<Value = Option<u32>> {
        proptest::option::of(CMA_ALIGNMENT_ORDERS)
    }

    proptest! {
        #[test]
        fn counts_equal_those_of_placing_one_by_one(
            shift in 12u32..=16, order in orders(), pool in 0u64..64 * MIB, pages in 1u64..600, block in 1u64..9 * MIB,
        ) {
            let page = 1 << shift;
            let bytes = pages * page;
            let cut = Extents::of(pool, bytes, placement(page, order));
            let expected = naive_extents(pool, bytes, page, order);
            if let Ok(extents) = cut {
                prop_assert_eq!(extents.count, expected);
                let p = extents.pack(block);
                let mut slot = block;
                while slot % page != 0 {
                    slot += 1;
                }
                prop_assert_eq!(p.blocks, expected * naive_blocks(bytes, slot));
                prop_assert!(p.blocks <= p.blocks_ideal);
                prop_assert_eq!(p.blocks * block + p.waste.total(), pool, "every byte has a name");
            } else {
                prop_assert_eq!(expected, 0);
            }
        }

        #[test]
        fn auto_takes_the_smallest_extent_within_one_percent_of_the_best(
            order in orders(), pool_mib in 9u64..80, blocks in proptest::collection::vec(1u64..40, 1..4),
        ) {
            // Block sizes in units of 64 KiB, which are the pages here: few enough sizes to try them all.
            let page = 64 * KIB;
            let pool = pool_mib * MIB;
            let sizes: Vec<u64> = blocks.iter().map(|b| b * page).collect();
            let chosen = Extents::choose(pool, ExtentSize::Auto, &sizes, placement(page, order)).unwrap();
            let score = |bytes: u64| {
                let extents = naive_extents(pool, bytes, page, order);
                sizes
                    .iter()
                    .map(|slot| (extents * naive_blocks(bytes, *slot)) as f64 / (pool / slot) as f64)
                    .fold(f64::INFINITY, f64::min)
            };
            let candidates: Vec<u64> = (16..=128)
                .map(|n| n * page)
                .filter(|size| sizes.iter().any(|slot| size % slot == 0) && *size <= pool)
                .collect();
            let best = candidates.iter().map(|size| score(*size)).fold(0.0, f64::max);
            let bar = best * 0.99;
            let expected = candidates.iter().find(|size| score(**size) >= bar - 1e-12);
            prop_assert_eq!(Some(&chosen.bytes), expected);
        }

        #[test]
        fn the_number_of_sets_is_the_last_that_fits(
            pool_mib in 1u64..64, a in 1u64..40, b in 1u64..40, per_a in 1u64..9, per_b in 0u64..9,
        ) {
            let extents = Extents::of(pool_mib * MIB, MIB, cma()).unwrap();
            let groups = [(a * 64 * KIB, per_a), (b * 64 * KIB, per_b)];
            let fits = |n: u64| {
                extents.needed(&groups.map(|(bytes, k)| (bytes, k * n))).is_some_and(|e| e <= extents.count)
            };
            let mut expected = 0;
            while fits(expected + 1) {
                expected += 1;
            }
            prop_assert_eq!(extents.sets(&groups), expected);
        }
    }
}
