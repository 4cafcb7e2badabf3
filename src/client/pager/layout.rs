//! How the planes of a pager are cut into units.
//!
//! Owns no state. Invariants: every unit of every plane is a whole number of pages; the places of two planes never
//! overlap; the mappings that the pager can ever need are within what the caller allows.

use super::{Error, PagerPlane};
use crate::profile::{Group, Kv, Layer, Layout as BlockLayout, MAX_TOKENS_PER_BLOCK, Profile};

/// Tokens after which half a unit of slack is as dear as the same share of anything else: the length of a short chat.
const TYPICAL_TOKENS: f64 = 512.0;
/// What the kernel keeps for one mapping: a `vm_area_struct` with its node of the maple tree, rounded up (6.12, x86-64).
const MAPPING_BYTES: f64 = 256.0;
/// Bytes of a token's rows that a unit may cover, as multiples of it; [`Layout::choose`] takes the best one.
const CANDIDATES: [usize; 14] = [8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512];

/// One plane's runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Runs {
    /// Bytes from the region's start to the plane.
    pub start: usize,
    /// Bytes of one run: unit `i` is `start + i * unit ..`.
    pub unit: usize,
    /// How many.
    pub count: usize,
    /// K or V.
    pub kv: Kv,
}

impl Runs {
    /// First byte after the plane's place.
    pub fn end(&self) -> usize {
        self.start + self.unit * self.count
    }
}

/// See the module.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layout {
    pub planes: Vec<Runs>,
    /// Units of the plane that has most.
    pub units: usize,
    /// Bytes of the region.
    pub bytes: usize,
    /// Bytes of one block: a run of every plane.
    pub block_bytes: usize,
    /// Whole tokens that every run of a unit holds, if that is what they are: a power of two.
    pub whole_tokens: Option<u32>,
}

impl Layout {
    /// Chooses the unit: small enough for a block of it to fit an extent, large enough for `mappings`, and among those
    /// the one that costs least in slack at a sequence's end, in the tail of extents, and in the kernel's own memory.
    pub fn choose(planes: &[PagerPlane], page: usize, extent: usize, mappings: usize) -> Result<Self, Error> {
        if planes.is_empty() || planes.iter().any(|p| p.bytes == 0 || p.row == 0) {
            return Err(Error::Invalid("a pager has at least one plane, and a plane has bytes".into()));
        }
        let mut best: Option<(f64, Layout)> = None;
        let (mut smallest, mut fewest) = (usize::MAX, usize::MAX);
        for tokens in CANDIDATES {
            let Some(layout) = Layout::with_units(planes, page, tokens) else { continue };
            smallest = smallest.min(layout.block_bytes);
            if layout.block_bytes > extent {
                continue;
            }
            fewest = fewest.min(layout.mappings());
            if layout.mappings() > mappings {
                continue;
            }
            let cost = layout.cost(planes, extent);
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, layout));
            }
        }
        best.map(|(_, layout)| layout).ok_or_else(|| match fewest {
            usize::MAX => Error::Invalid(format!(
                "one page of each of {} planes takes {smallest} bytes, and an extent of this pool has {extent}: configure extents of at least {smallest} bytes",
                planes.len()
            )),
            needed => Error::TooManyMappings { needed, used: 0, limit: mappings },
        })
    }

    /// Runs of about `tokens` tokens; `None` if the sizes overflow.
    fn with_units(planes: &[PagerPlane], page: usize, tokens: usize) -> Option<Self> {
        let mut runs = Vec::with_capacity(planes.len());
        let (mut start, mut block_bytes) = (0usize, 0usize);
        for p in planes {
            let unit = p.row.checked_mul(tokens)?.checked_next_multiple_of(page)?;
            let count = p.bytes.div_ceil(unit);
            let place = Runs { start, unit, count, kv: p.kv };
            start = start.checked_add(unit.checked_mul(count)?)?;
            block_bytes = block_bytes.checked_add(unit)?;
            runs.push(place);
        }
        let whole = planes.iter().zip(&runs).all(|(p, r)| r.unit == p.row * tokens);
        let whole_tokens = u32::try_from(tokens).ok().filter(|t| whole && t.is_power_of_two());
        let units = runs.iter().map(|r| r.count).max()?;
        Some(Layout {
            planes: runs,
            units,
            bytes: start,
            block_bytes,
            whole_tokens: whole_tokens.filter(|t| *t <= MAX_TOKENS_PER_BLOCK),
        })
    }

    /// Mappings if every unit is granted, with the zeros around.
    pub fn mappings(&self) -> usize {
        self.planes.iter().map(|p| p.count).sum::<usize>() + self.planes.len() + 1
    }

    /// Share of the memory that this choice wastes, as far as it can be foreseen.
    fn cost(&self, planes: &[PagerPlane], extent: usize) -> f64 {
        let tokens = |(p, r): (&PagerPlane, &Runs)| r.unit as f64 / p.row as f64;
        let tokens = planes.iter().zip(&self.planes).map(tokens).fold(f64::INFINITY, f64::min);
        let row: usize = planes.iter().map(|p| p.row).sum();
        let used = (extent / self.block_bytes) as f64 * tokens * row as f64 / extent as f64;
        let slack = tokens / 2.0 / TYPICAL_TOKENS;
        let kernel = MAPPING_BYTES * self.planes.len() as f64 / self.block_bytes as f64;
        // A stream that does not begin with a unit shares its first one with its neighbour.
        let straddles = |(p, r): (&PagerPlane, &Runs)| {
            p.stream_bytes > 0 && p.stream_bytes < p.bytes && p.stream_bytes % r.unit != 0
        };
        let straddle = if planes.iter().zip(&self.planes).any(straddles) { slack } else { 0.0 };
        // Between equals, the one in which people see the model's tokens.
        let obscure = if self.whole_tokens.is_none() { 0.005 } else { 0.0 };
        (1.0 - used) + slack + kernel + straddle + obscure
    }

    /// The geometry as the broker knows it. Where units hold no whole tokens, a "token" of it is a unit.
    pub fn profile(&self, name: &str, element: &str, planes: &[PagerPlane]) -> Result<Profile, Error> {
        let tokens = self.whole_tokens.unwrap_or(1);
        let mut layers: Vec<(u32, Layer)> = Vec::new();
        let invalid = |text: String| Error::Invalid(text);
        let mut open = false;
        for (p, r) in planes.iter().zip(&self.planes) {
            let row = u32::try_from(r.unit / tokens as usize)
                .map_err(|_| invalid(format!("a run of {} bytes is too long", r.unit)))?;
            // K opens a layer, V right behind it joins it; whatever else comes is a layer of its own.
            match (p.kv, layers.last_mut()) {
                (Kv::V, Some((_, last))) if open => {
                    last.v_row = row;
                    open = false;
                }
                (kv, _) => {
                    layers.push((layers.len() as u32, Layer { k_row: row, v_row: 0 }));
                    open = kv == Kv::K;
                }
            }
        }
        let groups = vec![Group { layers, window: None }];
        Profile::new(name, element, BlockLayout::PlaneMajor, tokens, groups)
            .map_err(|e| invalid(e.to_string()))
    }

    /// The plane and the unit in which an offset of the region lies. Called by the fault handler: no allocation, no
    /// panic.
    pub fn find(planes: &[Runs], offset: usize) -> Option<(usize, usize)> {
        let after = planes.partition_point(|p| p.start <= offset);
        let plane = after.checked_sub(1)?;
        let runs = planes.get(plane)?;
        let unit = (offset - runs.start).checked_div(runs.unit)?;
        (unit < runs.count).then_some((plane, unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const EXTENT: usize = 3 << 20;

    fn planes(layers: usize, k_row: usize, v_row: usize, tokens: usize, streams: usize) -> Vec<PagerPlane> {
        let plane =
            |kv, row| PagerPlane { kv, row, bytes: row * tokens * streams, stream_bytes: row * tokens };
        (0..layers).flat_map(|_| [plane(Kv::K, k_row), plane(Kv::V, v_row)]).collect()
    }

    #[test]
    fn a_small_model_gets_units_of_few_tokens_not_of_megabytes() {
        let smol = planes(30, 384, 384, 2048, 4);
        let l = Layout::choose(&smol, PAGE, EXTENT, 60_000).unwrap();
        let tokens = l.planes[0].unit / 384;
        assert!((10..=32).contains(&tokens), "{tokens} tokens in {} bytes", l.planes[0].unit);
        assert!(l.block_bytes < 1 << 20);
        // A slot's first token begins a unit.
        assert_eq!(384 * 2048 % l.planes[0].unit, 0);
    }

    #[test]
    fn quantised_rows_page_as_finely_as_f16_and_nothing_is_lost() {
        let q8 = planes(30, 204, 204, 2048, 1);
        let l = Layout::choose(&q8, PAGE, EXTENT, 60_000).unwrap();
        assert!(l.planes[0].unit <= 12288 && l.planes[0].unit % PAGE == 0);
        assert_eq!(l.whole_tokens, None);
        let p = l.profile("m", "q8_0", &q8).unwrap();
        assert_eq!((p.tokens_per_block(), p.block_bytes(0)), (1, l.block_bytes as u64));
    }

    #[test]
    fn planes_of_different_types_cover_about_the_same_tokens_in_a_unit() {
        let mixed = planes(30, 384, 204, 2048, 1);
        let l = Layout::choose(&mixed, PAGE, EXTENT, 60_000).unwrap();
        let tokens = |i: usize, row: f64| l.planes[i].unit as f64 / row;
        let (k, v) = (tokens(0, 384.0), tokens(1, 204.0));
        assert!((k / v).max(v / k) < 1.3, "{k} and {v} tokens");
    }

    #[test]
    fn a_long_context_gets_larger_units_rather_than_more_mappings_than_there_may_be() {
        let long = planes(24, 512, 512, 131_072, 1);
        let l = Layout::choose(&long, PAGE, EXTENT, 60_000).unwrap();
        assert!(l.mappings() <= 60_000, "{}", l.mappings());
        let e = Layout::choose(&long, PAGE, EXTENT, 500).unwrap_err();
        assert!(matches!(e, Error::TooManyMappings { limit: 500, .. }), "{e}");
        let e = Layout::choose(&planes(80, 512, 512, 2048, 1), PAGE, 256 << 10, 60_000).unwrap_err();
        assert!(e.to_string().contains("configure extents"), "{e}");
        assert!(Layout::choose(&[], PAGE, EXTENT, 60_000).is_err());
    }

    #[test]
    fn every_byte_of_a_plane_is_found_in_its_unit_and_the_planes_do_not_overlap() {
        let mixed = planes(3, 384, 204, 1000, 1);
        let l = Layout::choose(&mixed, PAGE, EXTENT, 60_000).unwrap();
        let mut at = 0;
        for (p, r) in l.planes.iter().enumerate() {
            assert_eq!(r.start, at);
            assert!(r.end() - r.start >= mixed[p].bytes);
            at = r.end();
            for unit in 0..r.count {
                for offset in [0, 1, r.unit - 1] {
                    assert_eq!(Layout::find(&l.planes, r.start + unit * r.unit + offset), Some((p, unit)));
                }
            }
        }
        assert_eq!(at, l.bytes);
        assert_eq!(Layout::find(&l.planes, at), None);
    }

    #[test]
    fn the_broker_sees_the_model_where_units_hold_whole_tokens() {
        let qwen = planes(24, 256, 256, 4096, 1);
        let l = Layout::choose(&qwen, PAGE, EXTENT, 60_000).unwrap();
        let tokens = l.whole_tokens.expect("16 or 32 rows of 256 bytes are whole pages");
        let p = l.profile("m", "f16", &qwen).unwrap();
        assert_eq!((p.tokens_per_block(), p.bytes_per_token()), (tokens, 24 * 512));
        assert_eq!(p.planes(0)[1][1].offset, l.planes[0].unit * 3);
        // A latent cache has K alone.
        let latent: Vec<_> = qwen.iter().copied().filter(|p| p.kv == Kv::K).collect();
        let l = Layout::choose(&latent, PAGE, EXTENT, 60_000).unwrap();
        assert_eq!(l.profile("m", "f16", &latent).unwrap().planes(0).len(), 24);
    }
}
