//! The kernel: softmax(q K^T) V in one pass over the tokens, chunk by chunk, with the running maximum and sum of the
//! online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//!
//! A tile is some queries of some KV heads. Per chunk of tokens (outer loop) and KV head (inner loop) the kernel
//! stages K as f32, scores it against all the tile's rows of that head, stages V, adds it up. So a K or V row is
//! fetched and converted once per tile, and serves every query head of its group and every query of the tile.
//!
//! Invariant: chunks begin at multiples of [`CHUNK`], counted from token 0 of the sequence, and a row's sums run over
//! tokens in ascending order, and over dimensions in an order that is the same for all rows. Tokens that a row does
//! not see weigh exactly 0. Hence the bits of a row depend on no other row and on no block size.

use std::ops::Range;

use super::element::{Element, F16, F32, Stored};
use super::{KvSource, Shape};

/// Values that are computed side by side: one AVX register, two of NEON.
const LANES: usize = 8;
/// What a row is made of: rows are padded with zeros to whole pairs of these.
type Lanes = [f32; LANES];
/// Tokens between two updates of the running maximum. K or V of a chunk, 16 KiB with 128 dimensions, stays in the
/// first-level cache.
const CHUNK: usize = 32;
/// The most rows (query heads times queries) of a tile, unless one query of one KV head has more.
const TILE_ROWS: usize = 64;
/// Rows that a microkernel takes at a time.
const ROWS: usize = 4;
/// Tokens that the score microkernel takes at a time: divides `CHUNK`.
const TOKENS: usize = 2;

/// One checked call.
pub(super) struct Call<'a, S> {
    pub shape: &'a Shape,
    pub kv: &'a S,
    pub kv_tokens: usize,
    pub heads: Range<usize>,
    pub queries: usize,
    pub q: &'a [f32],
}

/// A tile's working memory. Rows are `[KV head][query][query head of the group]`.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Scaled queries, `[row][width]`.
    q: Vec<Lanes>,
    /// The weighted sums of V, `[row][width]`.
    acc: Vec<Lanes>,
    /// Scores, then weights, of one KV head's rows: `[row][CHUNK]`.
    weights: Vec<[f32; CHUNK]>,
    /// K, then V, of a chunk of one KV head: `[token][width]`.
    staged: Vec<Lanes>,
    /// Per row: the greatest score so far.
    max: Vec<f32>,
    /// Per row: the sum of the weights so far, relative to that maximum.
    sum: Vec<f32>,
}

impl Scratch {
    fn fit(&mut self, rows: usize, width: usize) {
        fn grow<T: Clone>(v: &mut Vec<T>, len: usize, value: T) {
            if v.len() < len {
                v.resize(len, value);
            }
        }
        grow(&mut self.q, rows * width, [0.0; LANES]);
        grow(&mut self.acc, rows * width, [0.0; LANES]);
        grow(&mut self.weights, rows, [0.0; CHUNK]);
        grow(&mut self.staged, CHUNK * width, [0.0; LANES]);
        grow(&mut self.max, rows, 0.0);
        grow(&mut self.sum, rows, 0.0);
    }

    /// Fills all of it, for any test's shape, with NaN.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.fit(TILE_ROWS, 64);
        self.q.fill([f32::NAN; LANES]);
        self.acc.fill([f32::NAN; LANES]);
        self.weights.fill([f32::NAN; CHUNK]);
        self.staged.fill([f32::NAN; LANES]);
        self.max.fill(f32::NAN);
        self.sum.fill(f32::NAN);
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
    let width = call.shape.head_dim.div_ceil(2 * LANES) * 2;
    scratch.fit(heads * queries * group, width);
    for head in call.heads.clone().step_by(heads) {
        for query in (0..call.queries).step_by(queries) {
            let tile = Tile {
                heads: head..call.heads.end.min(head + heads),
                queries: query..call.queries.min(query + queries),
                width,
            };
            // SAFETY: the caller's promise.
            unsafe { tile.run::<S, E, FMA>(call, out, scratch) };
        }
    }
}

struct Tile {
    heads: Range<usize>,
    queries: Range<usize>,
    width: usize,
}

impl Tile {
    /// # Safety
    /// As [`run`].
    #[inline(always)]
    unsafe fn run<S: KvSource, E: Stored, const FMA: bool>(
        &self,
        call: &Call<S>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (shape, width) = (call.shape, self.width);
        let group = shape.group();
        let rows = self.queries.len() * group; // of one KV head
        self.begin(call, scratch);
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
                let at = (self.heads.start + n) * shape.head_dim * E::BYTES;
                let of_head = n * rows..(n + 1) * rows;
                let q = &scratch.q[of_head.start * width..of_head.end * width];
                let acc = &mut scratch.acc[of_head.start * width..of_head.end * width];
                let max = &mut scratch.max[of_head.clone()];
                let sum = &mut scratch.sum[of_head];
                let weights = &mut scratch.weights[..rows];
                let staged = &mut scratch.staged[..CHUNK * width];

                // SAFETY: some query of the tile sees each of `tokens`, so the caller vouches for their rows, and
                // the head's part of a row is within it.
                unsafe {
                    stage::<S, E>(call.kv, Plane::K, tokens.clone(), chunk, at, shape.head_dim, width, staged)
                };
                by_rows(rows, |from, count| {
                    let seen = visible(from).start..visible(from + count - 1).end;
                    scores::<FMA>(
                        &q[from * width..],
                        staged,
                        width,
                        seen,
                        count,
                        &mut weights[from..from + count],
                    );
                });
                for row in 0..rows {
                    let acc = &mut acc[row * width..(row + 1) * width];
                    softmax::<FMA>(&mut weights[row], visible(row), &mut max[row], &mut sum[row], acc);
                }
                // SAFETY: as for K.
                unsafe {
                    stage::<S, E>(call.kv, Plane::V, tokens.clone(), chunk, at, shape.head_dim, width, staged)
                };
                by_rows(rows, |from, count| {
                    let seen = visible(from).start..visible(from + count - 1).end;
                    let acc = &mut acc[from * width..(from + count) * width];
                    weigh::<FMA>(&weights[from..from + count], staged, width, seen, acc);
                });
            }
        }
        self.finish(call, out, scratch);
    }

    /// Takes in the queries, scaled and padded.
    fn begin<S>(&self, call: &Call<S>, scratch: &mut Scratch) {
        let (shape, width) = (call.shape, self.width);
        let (group, dim) = (shape.group(), shape.head_dim);
        let mut row = 0;
        for head in self.heads.clone() {
            for query in self.queries.clone() {
                for member in 0..group {
                    let at = (query * shape.query_heads + head * group + member) * dim;
                    let to = scratch.q[row * width..(row + 1) * width].as_flattened_mut();
                    for (to, from) in to.iter_mut().zip(&call.q[at..at + dim]) {
                        *to = from * shape.scale;
                    }
                    to[dim..].fill(0.0);
                    row += 1;
                }
            }
        }
        scratch.acc[..row * width].fill([0.0; LANES]);
        scratch.max[..row].fill(f32::NEG_INFINITY);
        scratch.sum[..row].fill(0.0);
        // Padding between the rows: other shapes may have used it for values.
        scratch.staged[..CHUNK * width].fill([0.0; LANES]);
    }

    /// Gives the results out.
    fn finish<S>(&self, call: &Call<S>, out: &mut [f32], scratch: &Scratch) {
        let (group, dim) = (call.shape.group(), call.shape.head_dim);
        let out_heads = call.heads.len() * group;
        let mut row = 0;
        for head in self.heads.clone() {
            for query in self.queries.clone() {
                for member in 0..group {
                    let at = (query * out_heads + (head - call.heads.start) * group + member) * dim;
                    let acc = scratch.acc[row * self.width..(row + 1) * self.width].as_flattened();
                    for (out, acc) in out[at..at + dim].iter_mut().zip(acc) {
                        *out = acc / scratch.sum[row];
                    }
                    row += 1;
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

/// Calls `f(first, count)` for groups of at most [`ROWS`] rows.
#[inline(always)]
fn by_rows(rows: usize, mut f: impl FnMut(usize, usize)) {
    for from in (0..rows).step_by(ROWS) {
        f(from, ROWS.min(rows - from));
    }
}

/// Scores `count` rows of `q` against the staged keys. Tokens outside of `seen`, rounded to whole steps, stay as they
/// are.
#[inline(always)]
fn scores<const FMA: bool>(
    q: &[Lanes],
    k: &[Lanes],
    width: usize,
    seen: Range<usize>,
    count: usize,
    out: &mut [[f32; CHUNK]],
) {
    let steps = (seen.start / TOKENS * TOKENS..seen.end).step_by(TOKENS);
    for token in steps {
        match count {
            4 => score_tile::<4, FMA>(q, k, width, token, out),
            3 => score_tile::<3, FMA>(q, k, width, token, out),
            2 => score_tile::<2, FMA>(q, k, width, token, out),
            _ => score_tile::<1, FMA>(q, k, width, token, out),
        }
    }
}

/// `R` rows against `TOKENS` tokens: each value loaded serves several products.
#[inline(always)]
fn score_tile<const R: usize, const FMA: bool>(
    q: &[Lanes],
    k: &[Lanes],
    width: usize,
    token: usize,
    out: &mut [[f32; CHUNK]],
) {
    let q: [&[Lanes]; R] = std::array::from_fn(|r| &q[r * width..(r + 1) * width]);
    let k: [&[Lanes]; TOKENS] = std::array::from_fn(|t| &k[(token + t) * width..(token + t + 1) * width]);
    let mut sums = [[[0.0f32; LANES]; TOKENS]; R];
    for n in 0..width {
        for r in 0..R {
            for t in 0..TOKENS {
                for lane in 0..LANES {
                    sums[r][t][lane] = mul_add::<FMA>(q[r][n][lane], k[t][n][lane], sums[r][t][lane]);
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..TOKENS {
            out[r][token + t] = total(sums[r][t]);
        }
    }
}

/// Turns one row's scores into weights, and rescales what the row has summed up if its maximum grew.
#[inline(always)]
fn softmax<const FMA: bool>(
    weights: &mut [f32; CHUNK],
    seen: Range<usize>,
    max: &mut f32,
    sum: &mut f32,
    acc: &mut [Lanes],
) {
    weights[..seen.start].fill(f32::NEG_INFINITY);
    weights[seen.end..].fill(f32::NEG_INFINITY);
    let greatest = weights.iter().fold(*max, |a, &b| if b > a { b } else { a });
    if greatest == f32::NEG_INFINITY {
        weights.fill(0.0); // sees nothing of this chunk
        return;
    }
    if greatest > *max {
        let shrink = exp::<FMA>(*max - greatest);
        *sum *= shrink;
        acc.as_flattened_mut().iter_mut().for_each(|a| *a *= shrink);
        *max = greatest;
    }
    let mut sums = [0.0f32; LANES];
    for lanes in weights.chunks_exact_mut(LANES) {
        for (weight, sum) in lanes.iter_mut().zip(&mut sums) {
            *weight = exp::<FMA>(*weight - greatest);
            *sum += *weight;
        }
    }
    *sum += total(sums);
}

/// Adds the staged values of the tokens `seen`, weighted, to the rows of `acc`.
#[inline(always)]
fn weigh<const FMA: bool>(
    weights: &[[f32; CHUNK]],
    v: &[Lanes],
    width: usize,
    seen: Range<usize>,
    acc: &mut [Lanes],
) {
    for column in (0..width).step_by(2) {
        match weights.len() {
            4 => weigh_tile::<4, FMA>(weights, v, width, seen.clone(), column, acc),
            3 => weigh_tile::<3, FMA>(weights, v, width, seen.clone(), column, acc),
            2 => weigh_tile::<2, FMA>(weights, v, width, seen.clone(), column, acc),
            _ => weigh_tile::<1, FMA>(weights, v, width, seen.clone(), column, acc),
        }
    }
}

/// `R` rows, two columns of lanes: the sums stay in registers over all tokens.
#[inline(always)]
fn weigh_tile<const R: usize, const FMA: bool>(
    weights: &[[f32; CHUNK]],
    v: &[Lanes],
    width: usize,
    seen: Range<usize>,
    column: usize,
    acc: &mut [Lanes],
) {
    let weights: &[[f32; CHUNK]; R] = weights.try_into().expect("R rows of weights");
    let mut sums: [[Lanes; 2]; R] =
        std::array::from_fn(|r| [acc[r * width + column], acc[r * width + column + 1]]);
    for token in seen {
        let v = &v[token * width..(token + 1) * width];
        let v = [&v[column], &v[column + 1]];
        for r in 0..R {
            let weight = weights[r][token];
            for c in 0..2 {
                for lane in 0..LANES {
                    sums[r][c][lane] = mul_add::<FMA>(weight, v[c][lane], sums[r][c][lane]);
                }
            }
        }
    }
    for r in 0..R {
        acc[r * width + column] = sums[r][0];
        acc[r * width + column + 1] = sums[r][1];
    }
}

/// `a * b + c`: with one rounding where the machine does that in one instruction. Elsewhere `mul_add` would be a call
/// into the C library for each value.
#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// The sum of the lanes, as a tree.
#[inline(always)]
fn total(l: Lanes) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
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
