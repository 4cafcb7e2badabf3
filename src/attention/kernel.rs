//! The kernel: softmax(q K^T) V in one pass over the tokens, chunk by chunk, with the running maximum and sum of the
//! online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//!
//! A tile is some queries of some KV heads. Per chunk of tokens (outer loop) and KV head (inner loop) the kernel
//! stages K as f32, scores it against all the tile's rows of that head, stages V, adds it up. So a K or V row is
//! fetched and converted once per tile, and serves every query head of its group and every query of the tile.
//!
//! Both products are sums of outer products, [`multiply`]: a few values, each times the same few vectors, summed in
//! registers. For the scores the vectors are rows (a query head of a query each), side by side, and the values those
//! of K; so no sum runs across a vector, which compilers do badly. For the result the vectors are dimensions of V and
//! the values are weights. This is what makes plain loops reach the speed of tuned libraries.
//!
//! Invariant: chunks begin at multiples of [`CHUNK`], counted from token 0 of the sequence, and a row's sums run over
//! tokens and over dimensions in ascending order. Tokens that a row does not see add nothing. Hence the bits of a row
//! depend on no other row and on no block size.

use std::ops::Range;

use super::element::{Element, F16, F32, Stored};
use super::{KvSource, Shape};

/// Values that are computed side by side: one AVX register, two of NEON.
const LANES: usize = 8;
/// A vector.
type Lanes = [f32; LANES];
/// Tokens between two updates of the running maximum. K or V of a chunk, 16 KiB with 128 dimensions, stays in the
/// first-level cache.
const CHUNK: usize = 32;
/// The most rows (query heads times queries) of a tile, unless one query of one KV head has more.
const TILE_ROWS: usize = 64;
/// Vectors that the microkernels sum up at a time: enough to hide the latency of multiply-add, few enough for the 16
/// registers of AVX.
const SUMS: usize = 8;

/// One checked call.
pub(super) struct Call<'a, S> {
    pub shape: &'a Shape,
    pub kv: &'a S,
    pub kv_tokens: usize,
    pub heads: Range<usize>,
    pub queries: usize,
    pub q: &'a [f32],
}

/// A tile's working memory. Rows are `[KV head][query][query head of the group]`; those of one KV head are cut into
/// panels of `P` vectors, the last one padded.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Scaled queries, `[KV head][panel][dim][P]`.
    q: Vec<Lanes>,
    /// Weighted sums of V, `[row][width]`, where `width` vectors hold one head's dimensions.
    acc: Vec<Lanes>,
    /// Scores, then weights, of one KV head's rows: `[panel][CHUNK][P]`.
    weights: Vec<Lanes>,
    /// K, then V, of a chunk of one KV head: `[CHUNK][width]`.
    staged: Vec<Lanes>,
    /// Per row the greatest score so far, `[KV head][panel][P]`.
    max: Vec<Lanes>,
    /// Per row the sum of the weights so far, relative to that maximum; as `max`.
    sum: Vec<Lanes>,
}

impl Scratch {
    /// Makes it large enough; what it holds is left over from earlier calls.
    fn fit(&mut self, heads: usize, rows: usize, vectors: usize, dim: usize, width: usize) {
        fn grow(v: &mut Vec<Lanes>, len: usize) {
            if v.len() < len {
                v.resize(len, [0.0; LANES]);
            }
        }
        grow(&mut self.q, heads * vectors * dim);
        grow(&mut self.acc, heads * rows * width);
        grow(&mut self.weights, vectors * CHUNK);
        grow(&mut self.staged, CHUNK * width);
        grow(&mut self.max, heads * vectors);
        grow(&mut self.sum, heads * vectors);
    }

    /// Fills all of it, for any test's shape, with NaN.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.fit(1, 2 * TILE_ROWS, 2 * TILE_ROWS, 256, 32);
        let Scratch { q, acc, weights, staged, max, sum } = self;
        for part in [q, acc, weights, staged, max, sum] {
            part.fill([f32::NAN; LANES]);
        }
    }
}

/// Picks the version for this machine.
///
/// # Safety
/// The K and V rows of every token that a query sees are readable.
pub(super) unsafe fn run<S: KvSource>(
    call: &Call<S>,
    element: Element,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the machine has what the function is compiled for; the rest is the caller's promise.
        return unsafe { run_avx2(call, element, out, scratch) };
    }
    const FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
    // SAFETY: the caller's promise.
    unsafe { run_plain::<S, FMA>(call, element, out, scratch) }
}

/// The same code, compiled for AVX2 and FMA, so that an engine built for any x86-64 gets them.
///
/// # Safety
/// As [`run`], on a machine with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<S: KvSource>(call: &Call<S>, element: Element, out: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's promise.
    unsafe { run_plain::<S, true>(call, element, out, scratch) }
}

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn run_plain<S: KvSource, const FMA: bool>(
    call: &Call<S>,
    element: Element,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    match element {
        // SAFETY: the caller's promise.
        Element::F16 => unsafe { tiles::<S, F16, FMA>(call, out, scratch) },
        // SAFETY: the caller's promise.
        Element::F32 => unsafe { tiles::<S, F32, FMA>(call, out, scratch) },
    }
}

/// Cuts the call into tiles: as many queries of one KV head as fit; and if all do, as many KV heads.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn tiles<S: KvSource, E: Stored, const FMA: bool>(
    call: &Call<S>,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let group = call.shape.group();
    let queries = (TILE_ROWS / group).clamp(1, call.queries);
    let heads = (TILE_ROWS / (group * queries)).clamp(1, call.heads.len());
    for head in call.heads.clone().step_by(heads) {
        for query in (0..call.queries).step_by(queries) {
            let heads = head..call.heads.end.min(head + heads);
            let queries = query..call.queries.min(query + queries);
            let rows = queries.len() * group;
            let width = call.shape.head_dim.div_ceil(2 * LANES) * 2;
            let tile = Tile { heads, queries, rows, width };
            // A decode step has few rows: one vector of them, most often. Two, if there are more, share the loads.
            // SAFETY: the caller's promise.
            unsafe {
                if rows <= LANES {
                    tile.run::<S, E, 1, FMA>(call, out, scratch)
                } else {
                    tile.run::<S, E, 2, FMA>(call, out, scratch)
                }
            }
        }
    }
}

struct Tile {
    heads: Range<usize>,
    queries: Range<usize>,
    /// Rows of each KV head.
    rows: usize,
    /// Vectors that one head's dimensions take: an even number.
    width: usize,
}

impl Tile {
    /// # Safety
    /// As [`run`].
    #[inline(always)]
    unsafe fn run<S: KvSource, E: Stored, const P: usize, const FMA: bool>(
        &self,
        call: &Call<S>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (shape, rows, width) = (call.shape, self.rows, self.width);
        let (group, dim) = (shape.group(), shape.head_dim);
        let panels = rows.div_ceil(P * LANES);
        scratch.fit(self.heads.len(), rows, panels * P, dim, width);
        self.begin::<S, P>(call, scratch);
        // Positions only grow: the first query sees the earliest tokens, the last one the latest.
        let position = |query: usize| call.kv_tokens - call.queries + query;
        let first = shape.visible(position(self.queries.start)).start;
        let end = position(self.queries.end);
        for chunk in (first / CHUNK * CHUNK..end).step_by(CHUNK) {
            let tokens = chunk.max(first)..end.min(chunk + CHUNK);
            // What a row sees of the chunk, counted from its start.
            let visible = |row: usize| {
                let seen = shape.visible(position(self.queries.start + row / group));
                let from = seen.start.clamp(chunk, chunk + CHUNK) - chunk;
                from..(seen.end.clamp(chunk, chunk + CHUNK) - chunk).max(from)
            };
            for n in 0..self.heads.len() {
                let at = (self.heads.start + n) * dim * E::BYTES;
                let q = &scratch.q[n * panels * dim * P..(n + 1) * panels * dim * P];
                let acc = &mut scratch.acc[n * rows * width..(n + 1) * rows * width];
                let max = &mut scratch.max[n * panels * P..(n + 1) * panels * P];
                let sum = &mut scratch.sum[n * panels * P..(n + 1) * panels * P];
                let weights = &mut scratch.weights[..panels * CHUNK * P];
                let staged = &mut scratch.staged[..CHUNK * width];

                // SAFETY: some query of the tile sees each of `tokens`, so the caller vouches for their rows, and
                // the head's part of a row is within it.
                unsafe { stage::<S, E>(call.kv, Plane::K, tokens.clone(), chunk, at, dim, width, staged) };
                for panel in 0..panels {
                    let members = panel * P * LANES..rows.min((panel + 1) * P * LANES);
                    let seen = visible(members.start).start..visible(members.end - 1).end;
                    if seen.is_empty() {
                        continue;
                    }
                    let weights = &mut weights[panel * CHUNK * P..(panel + 1) * CHUNK * P];
                    let state = panel * P..(panel + 1) * P;
                    score::<P, FMA>(&q[panel * dim * P..(panel + 1) * dim * P], staged, width, seen, weights);
                    mask::<P>(weights, members.clone().map(visible));
                    let acc = &mut acc[members.start * width..members.end * width];
                    softmax::<P, FMA>(weights, &mut max[state.clone()], &mut sum[state], acc, width);
                }
                // SAFETY: as for K.
                unsafe { stage::<S, E>(call.kv, Plane::V, tokens.clone(), chunk, at, dim, width, staged) };
                let mut row = 0;
                while row < rows {
                    // Rows that see the same tokens, up to four, of one panel.
                    let seen = visible(row);
                    let (panel, lane) = (row / (P * LANES), row % (P * LANES));
                    let most = 4.min(rows - row).min(P * LANES - lane);
                    let count = (1..most).take_while(|&n| visible(row + n) == seen).count() + 1;
                    let from = (panel * CHUNK + seen.start) * P * LANES;
                    let weights = &weights.as_flattened()[from..from + seen.len() * P * LANES];
                    let staged = &staged[seen.start * width..seen.end * width];
                    let acc = &mut acc[row * width..(row + count) * width];
                    match count {
                        4 => weigh::<4, 2, P, FMA>(weights, lane, staged, width, acc),
                        3 => weigh::<3, 2, P, FMA>(weights, lane, staged, width, acc),
                        2 => weigh::<2, 4, P, FMA>(weights, lane, staged, width, acc),
                        _ => weigh::<1, 4, P, FMA>(weights, lane, staged, width, acc),
                    }
                    row += count;
                }
            }
        }
        self.finish::<S, P>(call, out, scratch);
    }

    /// Takes in the queries, scaled, and clears what the last tile left.
    #[inline(always)]
    fn begin<S, const P: usize>(&self, call: &Call<S>, scratch: &mut Scratch) {
        let (dim, heads) = (call.shape.head_dim, self.heads.len());
        let vectors = self.rows.div_ceil(P * LANES) * P;
        let q = scratch.q[..heads * vectors * dim].as_flattened_mut();
        q.fill(0.0);
        self.each_row(call.shape, |n, row, query, head| {
            let from = &call.q[(query * call.shape.query_heads + head) * dim..][..dim];
            let (panel, lane) = (row / (P * LANES), row % (P * LANES));
            let to = &mut q[(n * vectors + panel * P) * dim * LANES + lane..];
            for (to, from) in to.iter_mut().step_by(P * LANES).zip(from) {
                *to = from * call.shape.scale;
            }
        });
        scratch.acc[..heads * self.rows * self.width].fill([0.0; LANES]);
        scratch.max[..heads * vectors].fill([f32::NEG_INFINITY; LANES]);
        scratch.sum[..heads * vectors].fill([0.0; LANES]);
        // The padding of its rows stays zero; other shapes may have used it for values.
        scratch.staged[..CHUNK * self.width].fill([0.0; LANES]);
    }

    /// Gives the results out.
    #[inline(always)]
    fn finish<S, const P: usize>(&self, call: &Call<S>, out: &mut [f32], scratch: &Scratch) {
        let (dim, group) = (call.shape.head_dim, call.shape.group());
        let vectors = self.rows.div_ceil(P * LANES) * P;
        self.each_row(call.shape, |n, row, query, head| {
            let at = (query * call.heads.len() + (head / group - call.heads.start)) * group + head % group;
            let acc = scratch.acc[(n * self.rows + row) * self.width..][..self.width].as_flattened();
            let sum = scratch.sum[n * vectors + row / LANES][row % LANES];
            for (out, acc) in out[at * dim..(at + 1) * dim].iter_mut().zip(acc) {
                *out = acc / sum;
            }
        });
    }

    /// Calls `f` with each KV head's number in the tile, row, query and query head.
    #[inline(always)]
    fn each_row(&self, shape: &Shape, mut f: impl FnMut(usize, usize, usize, usize)) {
        let group = shape.group();
        for (n, head) in self.heads.clone().enumerate() {
            for (q, query) in self.queries.clone().enumerate() {
                for member in 0..group {
                    f(n, q * group + member, query, head * group + member);
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Plane {
    K,
    V,
}

/// Copies one head's part of the rows of `tokens` into `staged`, as f32; the row of token `chunk` is the first there.
///
/// # Safety
/// The rows of `tokens` are readable from `at` for `dim` values.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn stage<S: KvSource, E: Stored>(
    kv: &S,
    plane: Plane,
    tokens: Range<usize>,
    chunk: usize,
    at: usize,
    dim: usize,
    width: usize,
    staged: &mut [Lanes],
) {
    let mut token = tokens.start;
    while token < tokens.end {
        let run = kv.run(token);
        let (mut row, stride) = match plane {
            Plane::K => (run.k, run.k_stride),
            Plane::V => (run.v, run.v_stride),
        };
        let count = run.tokens.min(tokens.end - token);
        let staged = &mut staged[(token - chunk) * width..(token - chunk + count) * width];
        for to in staged.chunks_exact_mut(width) {
            // SAFETY: the caller vouches for `dim` values from `at` in this token's row.
            unsafe { E::load(row.wrapping_add(at), &mut to.as_flattened_mut()[..dim]) };
            row = row.wrapping_add(stride);
        }
        token += count;
    }
}

/// Adds to `sums[r][c]` the vector `b[c]`, `a[r]` times.
#[inline(always)]
fn multiply<const R: usize, const C: usize, const FMA: bool>(
    sums: &mut [[Lanes; C]; R],
    a: [f32; R],
    b: &[Lanes; C],
) {
    for r in 0..R {
        for c in 0..C {
            for lane in 0..LANES {
                sums[r][c][lane] = mul_add::<FMA>(a[r], b[c][lane], sums[r][c][lane]);
            }
        }
    }
}

/// Scores a panel of queries, `[dim][P]`, against the staged keys of the tokens `seen`, rounded to whole steps.
#[inline(always)]
fn score<const P: usize, const FMA: bool>(
    q: &[Lanes],
    k: &[Lanes],
    width: usize,
    seen: Range<usize>,
    out: &mut [Lanes],
) {
    match P {
        1 => score_by::<SUMS, P, FMA>(q, k, width, seen, out),
        _ => score_by::<{ SUMS / 2 }, P, FMA>(q, k, width, seen, out),
    }
}

/// [`score`] by `T` tokens at a time; `T` divides [`CHUNK`].
#[inline(always)]
fn score_by<const T: usize, const P: usize, const FMA: bool>(
    q: &[Lanes],
    k: &[Lanes],
    width: usize,
    seen: Range<usize>,
    out: &mut [Lanes],
) {
    let dim = q.len() / P;
    for token in (seen.start / T * T..seen.end).step_by(T) {
        let k: [&[f32]; T] =
            std::array::from_fn(|t| &k[(token + t) * width..(token + t + 1) * width].as_flattened()[..dim]);
        let mut sums = [[[0.0; LANES]; P]; T];
        for (d, q) in q.chunks_exact(P).enumerate() {
            multiply::<T, P, FMA>(&mut sums, std::array::from_fn(|t| k[t][d]), vectors(q));
        }
        out[token * P..(token + T) * P].copy_from_slice(sums.as_flattened());
    }
}

/// Hides from each row of a panel the tokens that it does not see.
#[inline(always)]
fn mask<const P: usize>(weights: &mut [Lanes], visible: impl Iterator<Item = Range<usize>>) {
    let weights = weights.as_flattened_mut();
    for (lane, seen) in visible.enumerate() {
        for token in (0..seen.start).chain(seen.end..CHUNK) {
            weights[token * P * LANES + lane] = f32::NEG_INFINITY;
        }
    }
}

/// Turns a panel's scores, `[CHUNK][P]`, into weights, and rescales what those rows have summed up whose maximum grew.
#[inline(always)]
fn softmax<const P: usize, const FMA: bool>(
    weights: &mut [Lanes],
    max: &mut [Lanes],
    sum: &mut [Lanes],
    acc: &mut [Lanes],
    width: usize,
) {
    let mut greatest: [Lanes; P] = *vectors(max);
    for weights in weights.chunks_exact(P) {
        for (greatest, weight) in greatest.as_flattened_mut().iter_mut().zip(weights.as_flattened()) {
            *greatest = if *weight > *greatest { *weight } else { *greatest };
        }
    }
    // A row that has seen no token yet has no maximum; any finite one keeps its weights 0.
    let base = greatest.map(|g| g.map(|g| if g == f32::NEG_INFINITY { 0.0 } else { g }));
    if greatest != *vectors(max) {
        let mut shrink: [Lanes; P] = *vectors(max);
        for (shrink, base) in shrink.as_flattened_mut().iter_mut().zip(base.as_flattened()) {
            *shrink = exp::<FMA>(*shrink - base);
        }
        for (sum, shrink) in sum.as_flattened_mut().iter_mut().zip(shrink.as_flattened()) {
            *sum *= shrink;
        }
        for (acc, shrink) in acc.chunks_exact_mut(width).zip(shrink.as_flattened()) {
            if *shrink != 1.0 {
                acc.as_flattened_mut().iter_mut().for_each(|a| *a *= shrink);
            }
        }
        max.copy_from_slice(&greatest);
    }
    for weights in weights.chunks_exact_mut(P) {
        for (weight, base) in weights.as_flattened_mut().iter_mut().zip(base.as_flattened()) {
            *weight -= base;
        }
    }
    weights.as_flattened_mut().iter_mut().for_each(|w| *w = exp::<FMA>(*w));
    for weights in weights.chunks_exact(P) {
        for (sum, weight) in sum.as_flattened_mut().iter_mut().zip(weights.as_flattened()) {
            *sum += weight;
        }
    }
}

/// Adds the staged values, weighted by the lanes from `lane` on of a panel, to `R` rows of `acc`, `C` vectors at a time.
#[inline(always)]
fn weigh<const R: usize, const C: usize, const P: usize, const FMA: bool>(
    weights: &[f32],
    lane: usize,
    v: &[Lanes],
    width: usize,
    acc: &mut [Lanes],
) {
    let whole = width / C * C;
    for column in (0..whole).step_by(C) {
        weigh_column::<R, C, P, FMA>(weights, lane, v, width, column, acc);
    }
    for column in (whole..width).step_by(2) {
        weigh_column::<R, 2, P, FMA>(weights, lane, v, width, column, acc);
    }
}

/// [`weigh`] for the `C` vectors from `column` on.
#[inline(always)]
fn weigh_column<const R: usize, const C: usize, const P: usize, const FMA: bool>(
    weights: &[f32],
    lane: usize,
    v: &[Lanes],
    width: usize,
    column: usize,
    acc: &mut [Lanes],
) {
    let mut sums: [[Lanes; C]; R] = std::array::from_fn(|r| *vectors(&acc[r * width + column..][..C]));
    for (weights, v) in weights.chunks_exact(P * LANES).zip(v.chunks_exact(width)) {
        let weights = weights[lane..lane + R].try_into().expect("R weights");
        multiply::<R, C, FMA>(&mut sums, weights, vectors(&v[column..column + C]));
    }
    for (r, sums) in sums.iter().enumerate() {
        acc[r * width + column..][..C].copy_from_slice(sums);
    }
}

/// A slice whose length is known.
#[inline(always)]
fn vectors<const N: usize>(slice: &[Lanes]) -> &[Lanes; N] {
    slice.try_into().expect("a slice of this length")
}

/// `a * b + c`: with one rounding where the machine does that in one instruction. Elsewhere `mul_add` would be a call
/// into the C library for each value.
#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e^x for x <= 0, to 2 units in the last place; 0 below -87, where the result would be subnormal; NaN for NaN.
/// Branch-free, so that it vectorises. x = n ln 2 + r with |r| <= ln 2 / 2: 2^n by its exponent, e^r by its Taylor series
/// up to r^7 / 7! (the rest is below 6e-9).
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it leaves the nearest integer in the last bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first has so few bits that its product with n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = mul_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FMA>(n, -LN2_LOW, mul_add::<FMA>(n, -LN2_HIGH, x));
    let mut series = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = mul_add::<FMA>(series, r, factor);
    }
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { series * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_within_two_units_in_the_last_place() {
        for n in 0..200_000u32 {
            let x = -(n as f32) * (87.0 / 200_000.0);
            let want = f64::from(x).exp();
            for got in [exp::<true>(x), exp::<false>(x)] {
                let unit = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
                assert!((f64::from(got) - want).abs() <= 2.0 * unit, "e^{x} is not {got}");
            }
        }
        assert_eq!(exp::<true>(0.0), 1.0);
        assert_eq!(exp::<true>(-87.1), 0.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert!(exp::<true>(f32::NAN).is_nan());
    }
}
