//! The kernel: softmax(q K^T) V in one pass over the tokens, chunk by chunk, with the running maximum and sum of the
//! online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//!
//! A tile is some queries of some KV heads. Per chunk of tokens (outer loop) the kernel stages K of these heads as
//! f32, scores it head by head (inner loop) against all the tile's rows, stages V, adds it up. So a K or V row is
//! fetched and converted once per tile, in one sweep over each block, and serves every query head of its group and
//! every query of the tile.
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
use super::prefetch::prefetch;
use super::vectors::{LANES, Lanes, Vectors, exactly};
use super::{KvSource, PAGE_SHIFT, Run, Shape};

/// Tokens between two updates of the running maximum.
const CHUNK: usize = 32;
/// The most vectors of K or V that are staged at a time, unless one KV head needs more: 32 KiB, which the caches
/// nearest to the processor hold.
const STAGED: usize = 1024;
/// The most rows (query heads times queries) of a tile, unless one query of one KV head has more.
const TILE_ROWS: usize = 64;
/// Vectors that the microkernels sum up at a time: enough to hide the latency of multiply-add, few enough for the 16
/// registers of AVX.
const SUMS: usize = 8;

/// One checked call.
pub(super) struct Call<'a> {
    pub shape: &'a Shape,
    /// Not a type parameter: so there is one kernel, and two sources differ by what they do themselves.
    pub kv: &'a dyn KvSource,
    pub kv_tokens: usize,
    pub heads: Range<usize>,
    pub queries: usize,
    pub q: &'a [f32],
}

/// A tile's working memory. Rows are `[KV head][query][query head of the group]`; those of one KV head are cut into
/// panels of `P` vectors, the last one padded.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Scaled queries, `[KV head][panel][width * LANES][P]`: the transpose of their rows.
    q: Vectors,
    /// Weighted sums of V, `[row][width]`, where `width` vectors hold one head's dimensions.
    acc: Vectors,
    /// Scores, then weights, `[KV head][panel][CHUNK][P]`.
    weights: Vectors,
    /// K, then V, of a chunk: `[CHUNK][KV head][width]`.
    staged: Vectors,
    /// Per row the greatest score so far, `[KV head][panel][P]`.
    max: Vectors,
    /// Per row the sum of the weights so far, relative to that maximum; as `max`.
    sum: Vectors,
}

impl Scratch {
    /// Fills it, as large as any test needs it, with NaN.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        let Scratch { q, acc, weights, staged, max, sum } = self;
        for part in [q, acc, weights, staged, max, sum] {
            part.fit(1 << 14);
            part.fill([f32::NAN; LANES]);
        }
    }
}

/// Picks the version for this machine.
///
/// # Safety
/// The K and V rows of every token that a query sees are readable.
pub(super) unsafe fn run(call: &Call, element: Element, out: &mut [f32], scratch: &mut Scratch) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the machine has what the function is compiled for; the rest is the caller's promise.
        return unsafe { run_avx2(call, element, out, scratch) };
    }
    const FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
    // SAFETY: the caller's promise.
    unsafe { run_plain::<FMA>(call, element, out, scratch) }
}

/// The same code, compiled for AVX2 and FMA, so that an engine built for any x86-64 gets them.
///
/// # Safety
/// As [`run`], on a machine with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2(call: &Call, element: Element, out: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's promise.
    unsafe { run_plain::<true>(call, element, out, scratch) }
}

/// The kernel, with multiply-add in one instruction or in two.
///
/// # Safety
/// As [`run`].
#[inline(always)]
pub(super) unsafe fn run_plain<const FMA: bool>(
    call: &Call,
    element: Element,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    match element {
        // SAFETY: the caller's promise.
        Element::F16 => unsafe { tiles::<F16, FMA>(call, out, scratch) },
        // SAFETY: the caller's promise.
        Element::F32 => unsafe { tiles::<F32, FMA>(call, out, scratch) },
    }
}

/// Cuts the call into tiles: as many queries of one KV head as fit; and if all do, as many KV heads.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn tiles<E: Stored, const FMA: bool>(call: &Call, out: &mut [f32], scratch: &mut Scratch) {
    let group = call.shape.group();
    let width = call.shape.head_dim.div_ceil(2 * LANES) * 2;
    let queries = (TILE_ROWS / group).clamp(1, call.queries);
    let heads = (TILE_ROWS / (group * queries)).min(STAGED / (CHUNK * width)).clamp(1, call.heads.len());
    for head in call.heads.clone().step_by(heads) {
        for query in (0..call.queries).step_by(queries) {
            let heads = head..call.heads.end.min(head + heads);
            let queries = query..call.queries.min(query + queries);
            let rows = queries.len() * group;
            // A decode step has few rows: one vector of them, most often. Two, if there are more, share the loads.
            // SAFETY: the caller's promise.
            unsafe {
                if rows <= LANES {
                    Tile::<1> { call, heads, queries, rows, panels: 1, width }.run::<E, FMA>(out, scratch)
                } else {
                    let panels = rows.div_ceil(2 * LANES);
                    Tile::<2> { call, heads, queries, rows, panels, width }.run::<E, FMA>(out, scratch)
                }
            }
        }
    }
}

/// Some queries of some KV heads, their rows in panels of `P` vectors.
struct Tile<'a, const P: usize> {
    call: &'a Call<'a>,
    heads: Range<usize>,
    queries: Range<usize>,
    /// Rows of each KV head.
    rows: usize,
    /// Panels of each KV head.
    panels: usize,
    /// Vectors that one head's dimensions take: an even number.
    width: usize,
}

impl<const P: usize> Tile<'_, P> {
    /// # Safety
    /// As [`run`].
    #[inline(always)]
    unsafe fn run<E: Stored, const FMA: bool>(&self, out: &mut [f32], scratch: &mut Scratch) {
        self.begin(scratch);
        // Positions only grow: the first query sees the earliest tokens, the last one the latest.
        let first = self.visible(0).start;
        let end = self.visible(self.rows - 1).end;
        for chunk in (first / CHUNK * CHUNK..end).step_by(CHUNK) {
            let tokens = chunk.max(first)..end.min(chunk + CHUNK);
            // While K is staged, V of the same tokens is asked for, and with V the next chunk's K. The translations of
            // their pages, which take longest, were asked for earlier.
            let kv = self.call.kv;
            let next = |token| if token + CHUNK < end { Some(kv.run(token + CHUNK)) } else { None };
            // SAFETY: some query of the tile sees each of `tokens`, so the caller vouches for their rows.
            unsafe {
                let ahead = |_, run: &Run| Some((run.v, run.v_stride));
                self.stage::<E>(
                    tokens.clone(),
                    chunk,
                    |run| (run.k, run.k_stride),
                    ahead,
                    &mut scratch.staged,
                );
            }
            self.ask_for_pages::<E>(tokens.start + 2 * CHUNK..end.min(tokens.end + 2 * CHUNK));
            self.score::<FMA>(chunk, scratch);
            // SAFETY: as for K.
            unsafe {
                let ahead = |token, _: &Run| next(token).map(|run| (run.k, run.k_stride));
                self.stage::<E>(tokens, chunk, |run| (run.v, run.v_stride), ahead, &mut scratch.staged);
            }
            self.weigh::<FMA>(chunk, scratch);
        }
        self.finish(out, scratch);
    }

    /// The tokens that a row sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> Range<usize> {
        let query = self.queries.start + row / self.call.shape.group();
        self.call.shape.visible(self.call.kv_tokens - self.call.queries + query)
    }

    /// What it sees of a chunk, counted from the chunk's start.
    #[inline(always)]
    fn visible_in(&self, chunk: usize, row: usize) -> Range<usize> {
        let seen = self.visible(row);
        let from = seen.start.clamp(chunk, chunk + CHUNK) - chunk;
        from..(seen.end.clamp(chunk, chunk + CHUNK) - chunk).max(from)
    }

    /// Takes in the queries, scaled, and clears what the last tile left.
    #[inline(always)]
    fn begin(&self, scratch: &mut Scratch) {
        let Scratch { q, acc, weights, staged, max, sum } = scratch;
        let (shape, dim, padded) = (self.call.shape, self.call.shape.head_dim, self.width * LANES);
        let vectors = self.heads.len() * self.panels * P;
        q.fit(vectors * padded);
        q[..vectors * padded].fill([0.0; LANES]);
        acc.fit(self.heads.len() * self.rows * self.width);
        acc[..self.heads.len() * self.rows * self.width].fill([0.0; LANES]);
        max.fit(vectors);
        max[..vectors].fill([f32::NEG_INFINITY; LANES]);
        sum.fit(vectors);
        sum[..vectors].fill([0.0; LANES]);
        weights.fit(vectors * CHUNK);
        // The padding of its rows stays zero; other shapes may have used it for values.
        staged.fit(CHUNK * self.heads.len() * self.width);
        staged[..CHUNK * self.heads.len() * self.width].fill([0.0; LANES]);
        let q = q.as_flattened_mut();
        self.each_row(|n, row, query, head| {
            let from = &self.call.q[(query * shape.query_heads + head) * dim..][..dim];
            let (panel, lane) = (row / (P * LANES), row % (P * LANES));
            let to = &mut q[(n * self.panels + panel) * padded * P * LANES + lane..];
            for (to, from) in to.iter_mut().step_by(P * LANES).zip(from) {
                *to = from * shape.scale;
            }
        });
    }

    /// Gives the results out.
    #[inline(always)]
    fn finish(&self, out: &mut [f32], scratch: &Scratch) {
        let (call, dim, group) = (self.call, self.call.shape.head_dim, self.call.shape.group());
        self.each_row(|n, row, query, head| {
            let at = (query * call.heads.len() + (head / group - call.heads.start)) * group + head % group;
            let acc = scratch.acc[(n * self.rows + row) * self.width..][..self.width].as_flattened();
            let sum = scratch.sum[n * self.panels * P + row / LANES][row % LANES];
            for (out, acc) in out[at * dim..(at + 1) * dim].iter_mut().zip(acc) {
                *out = acc / sum;
            }
        });
    }

    /// Calls `f` with each KV head's number in the tile, row, query and query head.
    #[inline(always)]
    fn each_row(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        let group = self.call.shape.group();
        for (n, head) in self.heads.clone().enumerate() {
            for (q, query) in self.queries.clone().enumerate() {
                for member in 0..group {
                    f(n, q * group + member, query, head * group + member);
                }
            }
        }
    }

    /// Copies the tile's heads of one plane's rows of `tokens` into `staged`, as f32; the row of token `chunk` is the
    /// first there.
    ///
    /// # Safety
    /// The plane's rows of `tokens` are readable.
    #[inline(always)]
    unsafe fn stage<E: Stored>(
        &self,
        tokens: Range<usize>,
        chunk: usize,
        plane: impl Fn(&Run) -> (*const u8, usize),
        ahead: impl Fn(usize, &Run) -> Option<(*const u8, usize)>,
        staged: &mut [Lanes],
    ) {
        let dim = self.call.shape.head_dim;
        let row_width = self.heads.len() * self.width;
        let at = self.heads.start * dim * E::BYTES;
        let mut token = tokens.start;
        while token < tokens.end {
            let run = self.call.kv.run(token);
            let (row, stride) = plane(&run);
            let ahead = ahead(token, &run);
            let count = run.tokens.min(tokens.end - token);
            let staged = &mut staged[(token - chunk) * row_width..(token - chunk + count) * row_width];
            for (n, to) in staged.chunks_exact_mut(row_width).enumerate() {
                if let Some((row, stride)) = ahead {
                    prefetch(row.wrapping_add(n * stride + at), self.heads.len() * dim * E::BYTES);
                }
                let from = row.wrapping_add(n * stride + at);
                let to = to.as_flattened_mut();
                if dim == self.width * LANES {
                    // SAFETY: the caller vouches for the row of this token; the heads lie in it one after the other.
                    unsafe { E::load(from, to) };
                } else {
                    for (n, to) in to.chunks_exact_mut(self.width * LANES).enumerate() {
                        // SAFETY: as above, head by head.
                        unsafe { E::load(from.wrapping_add(n * dim * E::BYTES), &mut to[..dim]) };
                    }
                }
            }
            token += count;
        }
    }

    /// Touches each page that the rows of `tokens` begin or end in.
    #[inline(always)]
    fn ask_for_pages<E: Stored>(&self, tokens: Range<usize>) {
        const PAGE: usize = 1 << PAGE_SHIFT;
        let dim = self.call.shape.head_dim;
        let at = self.heads.start * dim * E::BYTES;
        let last = self.heads.len() * dim * E::BYTES - 1;
        let mut token = tokens.start;
        while token < tokens.end {
            let run = self.call.kv.run(token);
            let count = run.tokens.min(tokens.end - token);
            for (row, stride) in [(run.k, run.k_stride), (run.v, run.v_stride)] {
                let row = row.wrapping_add(at);
                let span = (count - 1) * stride + last;
                for at in (0..span).step_by(stride.max(PAGE)) {
                    prefetch(row.wrapping_add(at), 1);
                }
                prefetch(row.wrapping_add(span), 1);
            }
            token += count;
        }
    }

    /// Scores the staged K and turns the scores into weights.
    #[inline(always)]
    fn score<const FMA: bool>(&self, chunk: usize, scratch: &mut Scratch) {
        let Scratch { q, acc, weights, staged, max, sum } = scratch;
        let width = self.width;
        let row_width = self.heads.len() * width;
        for n in 0..self.heads.len() {
            for panel in 0..self.panels {
                let rows = panel * P * LANES..self.rows.min((panel + 1) * P * LANES);
                let seen = self.visible_in(chunk, rows.start).start..self.visible_in(chunk, rows.end - 1).end;
                if seen.is_empty() {
                    continue;
                }
                let panel = n * self.panels + panel;
                let q = &q[panel * width * LANES * P..(panel + 1) * width * LANES * P];
                let k = &staged[n * width..];
                let weights = &mut weights[panel * CHUNK * P..(panel + 1) * CHUNK * P];
                match P {
                    1 => scores::<SUMS, P, FMA>(q, k, row_width, seen, weights),
                    _ => scores::<{ SUMS / 2 }, P, FMA>(q, k, row_width, seen, weights),
                }
                mask::<P>(weights, rows.clone().map(|row| self.visible_in(chunk, row)));
                let state = panel * P..(panel + 1) * P;
                let acc = &mut acc[(n * self.rows + rows.start) * width..(n * self.rows + rows.end) * width];
                softmax::<P, FMA>(weights, &mut max[state.clone()], &mut sum[state], acc, width);
            }
        }
    }

    /// Adds up the staged V by the weights.
    #[inline(always)]
    fn weigh<const FMA: bool>(&self, chunk: usize, scratch: &mut Scratch) {
        let Scratch { acc, weights, staged, .. } = scratch;
        let width = self.width;
        let row_width = self.heads.len() * width;
        for n in 0..self.heads.len() {
            let mut row = 0;
            while row < self.rows {
                // Rows that see the same tokens, up to four, of one panel.
                let seen = self.visible_in(chunk, row);
                let (panel, lane) = (n * self.panels + row / (P * LANES), row % (P * LANES));
                let most = 4.min(self.rows - row).min(P * LANES - lane);
                let count = (1..most).take_while(|&n| self.visible_in(chunk, row + n) == seen).count() + 1;
                let acc = &mut acc[(n * self.rows + row) * width..(n * self.rows + row + count) * width];
                if !seen.is_empty() {
                    let from = panel * CHUNK + seen.start;
                    let weights = &weights[from * P..(from + seen.len()) * P];
                    let v = &staged[seen.start * row_width..seen.end * row_width];
                    let v = Columns { v, row_width, from: n * width };
                    match count {
                        4 => sums::<4, 2, P, FMA>(weights, lane, v, acc),
                        3 => sums::<3, 2, P, FMA>(weights, lane, v, acc),
                        2 => sums::<2, 4, P, FMA>(weights, lane, v, acc),
                        _ => sums::<1, 4, P, FMA>(weights, lane, v, acc),
                    }
                }
                row += count;
            }
        }
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

/// Scores a panel of queries, `[width * LANES][P]`, against one head's keys, which lie `row_width` vectors apart, of the tokens
/// `seen`, `T` at a time. What is before and after those, up to a whole step, is overwritten; `T` divides [`CHUNK`].
#[inline(always)]
fn scores<const T: usize, const P: usize, const FMA: bool>(
    q: &[Lanes],
    k: &[Lanes],
    row_width: usize,
    seen: Range<usize>,
    out: &mut [Lanes],
) {
    for token in (seen.start / T * T..seen.end).step_by(T) {
        let k: [&[Lanes]; T] =
            std::array::from_fn(|t| &k[(token + t) * row_width..][..q.len() / (P * LANES)]);
        let mut sums = [[[0.0; LANES]; P]; T];
        for (n, q) in q.chunks_exact(P * LANES).enumerate() {
            let k: [&Lanes; T] = std::array::from_fn(|t| &k[t][n]);
            for d in 0..LANES {
                multiply::<T, P, FMA>(&mut sums, std::array::from_fn(|t| k[t][d]), exactly(&q[d * P..][..P]));
            }
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
    let mut greatest: [Lanes; P] = *exactly(max);
    for weights in weights.chunks_exact(P) {
        for (greatest, weight) in greatest.as_flattened_mut().iter_mut().zip(weights.as_flattened()) {
            *greatest = if *weight > *greatest { *weight } else { *greatest };
        }
    }
    // A row that has seen no token yet has no maximum; any finite one keeps its weights 0.
    let mut base = greatest;
    for base in base.as_flattened_mut() {
        *base = if *base == f32::NEG_INFINITY { 0.0 } else { *base };
    }
    if greatest != *exactly(max) {
        let mut shrink: [Lanes; P] = *exactly(max);
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
    let mut sums: [Lanes; P] = *exactly(sum);
    for weights in weights.chunks_exact(P) {
        for (sum, weight) in sums.as_flattened_mut().iter_mut().zip(weights.as_flattened()) {
            *sum += weight;
        }
    }
    sum.copy_from_slice(&sums);
}

/// One head's values: vectors `from..` of rows that are `row_width` vectors wide.
#[derive(Clone, Copy)]
struct Columns<'a> {
    v: &'a [Lanes],
    row_width: usize,
    from: usize,
}

/// Adds the values, weighted by the lanes from `lane` on of a panel, `[token][P]`, to the `R` rows of `acc`, `C` vectors
/// at a time.
#[inline(always)]
fn sums<const R: usize, const C: usize, const P: usize, const FMA: bool>(
    weights: &[Lanes],
    lane: usize,
    v: Columns,
    acc: &mut [Lanes],
) {
    let width = acc.len() / R;
    let whole = width / C * C;
    for column in (0..whole).step_by(C) {
        sums_of::<R, C, P, FMA>(weights, lane, v, column, acc);
    }
    for column in (whole..width).step_by(2) {
        sums_of::<R, 2, P, FMA>(weights, lane, v, column, acc);
    }
}

/// [`sums`] for the `C` vectors from `column` on.
#[inline(always)]
fn sums_of<const R: usize, const C: usize, const P: usize, const FMA: bool>(
    weights: &[Lanes],
    lane: usize,
    v: Columns,
    column: usize,
    acc: &mut [Lanes],
) {
    let width = acc.len() / R;
    let mut sums: [[Lanes; C]; R] = std::array::from_fn(|r| *exactly(&acc[r * width + column..][..C]));
    let weights = weights.as_flattened().chunks_exact(P * LANES);
    for (weights, v_row) in weights.zip(v.v.chunks_exact(v.row_width)) {
        let weights = weights[lane..lane + R].try_into().expect("R weights");
        multiply::<R, C, FMA>(&mut sums, weights, exactly(&v_row[v.from + column..][..C]));
    }
    for (r, sums) in sums.iter().enumerate() {
        acc[r * width + column..][..C].copy_from_slice(sums);
    }
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
        // Under Miri fewer: each costs a thousand times as much.
        for n in (0..200_000u32).step_by(if cfg!(miri) { 499 } else { 1 }) {
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
