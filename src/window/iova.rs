//! Addresses for windows in a device's address space.
//!
//! Owns which ranges of one address space are taken. Invariants: taken ranges do not overlap and keep a gap of at least
//! [`GUARD`] bytes, so that a device which runs over a window's end faults instead of reaching the next one; every range
//! lies inside what the IOMMU allows; a range given back can be taken again.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Bytes between two windows that are never mapped. One page would do for an overrun by one; a transfer of a whole tile
/// or of one of the device's own buffers must fault too.
pub const GUARD: u64 = 1 << 20;

/// The taken ranges of one address space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Iovas {
    allowed: Vec<RangeInclusive<u64>>,
    /// Start to length.
    taken: BTreeMap<u64, u64>,
}

impl Iovas {
    /// An address space in which only `allowed` can be used, and of it only what lies below `2^bits` and above address 0
    /// (which drivers take for "none").
    pub fn new(allowed: &[RangeInclusive<u64>], bits: u32) -> Self {
        let top = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
        let cut = |r: &RangeInclusive<u64>| (*r.start()).max(GUARD)..=(*r.end()).min(top);
        let mut allowed: Vec<_> = allowed.iter().map(cut).filter(|r| !r.is_empty()).collect();
        allowed.sort_by_key(|r| *r.start());
        Iovas { allowed, taken: BTreeMap::new() }
    }

    /// Takes `bytes` bytes at a multiple of `align` (a power of two): the lowest that are free. `None` when there is no such
    /// range left.
    pub fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        debug_assert!(align.is_power_of_two());
        if bytes == 0 {
            return None;
        }
        let up = |at: u64| at.checked_add(align - 1).map(|a| a & !(align - 1));
        for range in &self.allowed {
            let mut at = up(*range.start());
            // Everything that could be in the way, in order.
            for (&start, &length) in &self.taken {
                let Some(from) = at else { break };
                let behind = start.saturating_add(length).saturating_add(GUARD);
                let before = from.checked_add(bytes).and_then(|e| e.checked_add(GUARD));
                if before.is_none_or(|end| end > start) && behind > from {
                    at = up(behind);
                }
            }
            let Some(from) = at else { continue };
            if from.checked_add(bytes - 1).is_some_and(|last| last <= *range.end()) {
                self.taken.insert(from, bytes);
                return Some(from);
            }
        }
        None
    }

    /// Gives a range back. `false` when no range starts there.
    pub fn give(&mut self, start: u64) -> bool {
        self.taken.remove(&start).is_some()
    }

    /// Ranges that are taken.
    pub fn count(&self) -> usize {
        self.taken.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn windows_keep_a_gap_and_stay_below_what_the_device_can_address() {
        let mut iovas = Iovas::new(&[0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX], 32);
        let first = iovas.take(3 << 20, 4096).unwrap();
        let second = iovas.take(3 << 20, 4096).unwrap();
        assert_eq!(first, GUARD);
        assert_eq!(second, first + (3 << 20) + GUARD);
        assert_eq!(iovas.take(4 << 30, 4096), None, "more than 32 bits");
        assert!(iovas.give(first) && !iovas.give(first));
        assert_eq!(iovas.take(1 << 20, 4096), Some(first), "given back, taken again");
    }

    #[test]
    fn an_exhausted_address_space_says_so_and_serves_again_after_a_return() {
        let mut iovas = Iovas::new(&[0..=(64 << 20) - 1], 32);
        let all: Vec<u64> = std::iter::from_fn(|| iovas.take(7 << 20, 1 << 20)).collect();
        assert_eq!(all.len(), 8, "8 MiB each with its gap, from the first MiB on");
        assert_eq!(iovas.take(4096, 4096), None);
        assert!(iovas.give(all[3]));
        assert_eq!(iovas.take(7 << 20, 1 << 20), Some(all[3]));
        assert_eq!(iovas.take(0, 4096), None, "a window of nothing");
        assert_eq!(iovas.take(u64::MAX, 4096), None);
    }

    proptest! {
        #[test]
        fn whatever_is_taken_and_given_back_ranges_keep_apart(
            steps in prop::collection::vec((1u64..20, 0u32..4, any::<bool>()), 1..60),
        ) {
            let mut iovas = Iovas::new(&[0..=(1 << 26) - 1, (1 << 27)..=(1 << 28)], 28);
            let mut mine: Vec<(u64, u64)> = Vec::new();
            for (pages, order, give) in steps {
                if give && !mine.is_empty() {
                    let (start, _) = mine.remove(pages as usize % mine.len());
                    prop_assert!(iovas.give(start));
                    continue;
                }
                let (bytes, align) = (pages << 16, 4096 << order);
                if let Some(start) = iovas.take(bytes, align) {
                    prop_assert_eq!(start % align, 0);
                    let inside = |r: &RangeInclusive<u64>| r.contains(&start) && r.contains(&(start + bytes - 1));
                    prop_assert!(iovas.allowed.iter().any(inside));
                    for &(other, length) in &mine {
                        prop_assert!(start + bytes + GUARD <= other || other + length + GUARD <= start);
                    }
                    mine.push((start, bytes));
                }
                prop_assert_eq!(iovas.count(), mine.len());
            }
        }
    }
}
