use super::*;
use crate::profile::{Layer, Layout, Plane, Profile};
use proptest::prelude::*;

/// Repeatable values, roughly normal: the sum of four uniform ones.
struct Values(u64);

impl Values {
    fn next(&mut self) -> f32 {
        (0..4)
            .map(|_| {
                self.0 =
                    self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5
            })
            .sum::<f32>()
            * 1.7
    }

    fn many(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// K and V of one sequence of one layer, kept as blocks in random places of a pool: the middle one of three layers,
/// so that planes have neighbours.
struct Blocks {
    memory: Vec<u8>,
    table: Vec<u32>,
    shift: u32,
    k: Plane,
    v: Plane,
}

impl Blocks {
    fn new(shape: &Shape, element: Element, layout: Layout, shift: u32, k: &[f32], v: &[f32]) -> Self {
        let row = shape.kv_row();
        let bytes = (row * element.bytes()) as u32;
        let layer = Layer { k_row: bytes, v_row: bytes };
        let groups =
            vec![crate::profile::Group { layers: (0..3).map(|n| (n, layer)).collect(), window: None }];
        let profile = Profile::new("test", "x", layout, 1 << shift, groups).unwrap();
        let [k_plane, v_plane] = profile.planes(0)[1];
        let pages = (profile.slot_bytes(0, 4096) >> PAGE_SHIFT) as u32;
        let count = (k.len() / row).div_ceil(1 << shift) as u32;
        // Slots in an order that is neither ascending nor descending, with every other slot left out. All that no
        // row is stored in is NaN, in both element types.
        let table = (0..count).map(|n| pages * (1 + 2 * (n * 7919 % next_prime(count)))).collect::<Vec<_>>();
        let memory = vec![0xff; (table.iter().max().unwrap() + pages) as usize * 4096];
        let mut blocks = Blocks { memory, table, shift, k: k_plane, v: v_plane };
        for (token, (k, v)) in k.chunks_exact(row).zip(v.chunks_exact(row)).enumerate() {
            let (at_k, at_v) = (blocks.at(token, k_plane), blocks.at(token, v_plane));
            // SAFETY: both rows are within a block of the pool.
            unsafe {
                store_row(element, blocks.memory[at_k..at_k + bytes as usize].as_mut_ptr(), k);
                store_row(element, blocks.memory[at_v..at_v + bytes as usize].as_mut_ptr(), v);
            }
        }
        blocks
    }

    fn at(&self, token: usize, plane: Plane) -> usize {
        let (block, within) = (token >> self.shift, token & ((1 << self.shift) - 1));
        ((self.table[block] as usize) << PAGE_SHIFT) + plane.offset + within * plane.stride
    }

    fn paged(&self) -> Paged<'_> {
        Paged { base: self.memory.as_ptr(), table: &self.table, shift: self.shift, k: self.k, v: self.v }
    }
}

/// A number above `n` that 7919 does not divide, so that multiples of 7919 modulo it are all different.
fn next_prime(n: u32) -> u32 {
    (n + 1..).find(|&p| p > 1 && (2..p).all(|d| p % d != 0) && p != 7919).unwrap()
}

fn stored(element: Element, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * element.bytes()];
    // SAFETY: the vector has as many bytes as the row takes.
    unsafe { store_row(element, bytes.as_mut_ptr(), values) };
    bytes
}

/// What the stored values really are.
fn rounded(element: Element, values: &[f32]) -> Vec<f32> {
    let mut back = vec![0.0; values.len()];
    // SAFETY: the row was just stored with this length.
    unsafe { load_row(element, stored(element, values).as_ptr(), &mut back) };
    back
}

fn contiguous(shape: &Shape, element: Element, k: &[u8], v: &[u8], run: usize) -> Contiguous {
    let stride = shape.kv_row() * element.bytes();
    Contiguous { k: k.as_ptr(), v: v.as_ptr(), k_stride: stride, v_stride: stride, run }
}

/// The definition, in f64.
fn by_definition(shape: &Shape, tokens: usize, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
    let (dim, row) = (shape.head_dim, shape.kv_row());
    let queries = q.len() / (shape.query_heads * dim);
    let mut out = Vec::new();
    for (n, q) in q.chunks_exact(dim).enumerate() {
        let (query, head) = (n / shape.query_heads, n % shape.query_heads / shape.group());
        let position = tokens - queries + query;
        let seen = (0..=position).filter(|t| shape.window.is_none_or(|w| position - t < w));
        let of = |x: &[f32], t: usize, d: usize| f64::from(x[t * row + head * dim + d]);
        let scores: Vec<(usize, f64)> = seen
            .map(|t| {
                (t, (0..dim).map(|d| f64::from(q[d]) * of(k, t, d)).sum::<f64>() * f64::from(shape.scale))
            })
            .collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(s.1));
        let total: f64 = scores.iter().map(|s| (s.1 - max).exp()).sum();
        for d in 0..dim {
            out.push(scores.iter().map(|&(t, s)| (s - max).exp() / total * of(v, t, d)).sum());
        }
    }
    out
}

/// Runs a call on a scratch that has seen another shape, filled with what must not come through.
fn run<S: KvSource>(shape: &Shape, element: Element, kv: &S, tokens: usize, q: &[f32]) -> Vec<f32> {
    let mut scratch = Scratch::new();
    scratch.0.poison();
    let mut out = vec![f32::NAN; q.len()];
    // SAFETY: the tests' sources hold `tokens` rows.
    unsafe { attention(shape, element, kv, tokens, q, &mut out, &mut scratch) };
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// All ways to the same answer, against the definition and against each other. Returns the answer.
fn check(shape: &Shape, element: Element, shift: u32, tokens: usize, queries: usize, seed: u64) -> Vec<f32> {
    let mut values = Values(seed);
    let k = values.many(tokens * shape.kv_row());
    let v = values.many(tokens * shape.kv_row());
    let q = values.many(queries * shape.query_heads * shape.head_dim);

    let blocks = Blocks::new(shape, element, Layout::PlaneMajor, shift, &k, &v);
    let answer = run(shape, element, &blocks.paged(), tokens, &q);

    // What a machine without fused multiply-add runs.
    let mut unfused = vec![f32::NAN; q.len()];
    let kv = &blocks.paged();
    let call = kernel::Call { shape, kv, kv_tokens: tokens, heads: 0..shape.kv_heads, queries, q: &q };
    // SAFETY: the blocks hold `tokens` rows.
    unsafe { kernel::run_plain::<false>(&call, element, &mut unfused, &mut kernel::Scratch::default()) };

    let want = by_definition(shape, tokens, &q, &rounded(element, &k), &rounded(element, &v));
    for (n, (got, want)) in answer.iter().zip(&want).enumerate() {
        let off = (f64::from(*got) - want).abs();
        assert!(off <= 4e-6, "{shape:?} {element:?}: value {n} is {got}, not {want}");
        let off = (f64::from(unfused[n]) - want).abs();
        assert!(off <= 4e-6, "{shape:?} {element:?}: value {n} is {} without fusing, not {want}", unfused[n]);
    }

    let rows = Blocks::new(shape, element, Layout::TokenMajor, shift, &k, &v);
    let token_major = run(shape, element, &rows.paged(), tokens, &q);
    assert_eq!(bits(&token_major), bits(&answer), "token-major differs: {shape:?} {element:?}");
    let (k, v) = (stored(element, &k), stored(element, &v));
    for run_tokens in [1 << shift, 1, 8, 1 << 20] {
        let twin = run(shape, element, &contiguous(shape, element, &k, &v, run_tokens), tokens, &q);
        assert_eq!(bits(&twin), bits(&answer), "contiguous by {run_tokens} differs: {shape:?} {element:?}");
    }
    answer
}

#[test]
fn real_geometries_give_the_defined_answer_and_the_same_bits_paged_or_not() {
    for (query_heads, kv_heads, head_dim) in [
        (12, 2, 128), // the reference, and Qwen2.5-1.5B
        (9, 3, 64),   // SmolLM2-135M
        (14, 2, 64),  // Qwen2.5-0.5B
        (4, 1, 256),  // Gemma-3-1B
        (4, 4, 96),   // Phi-3's head, no grouping
        (5, 5, 80),   // an odd count of heads
        (3, 1, 100),  // no whole number of lanes
        (2, 2, 1),
        (7, 1, 17),
    ] {
        if cfg!(miri) && head_dim > 20 {
            continue;
        }
        let shape = Shape::new(query_heads, kv_heads, head_dim);
        for element in Element::ALL {
            for (tokens, queries) in [(1, 1), (31, 1), (33, 33), (100, 1), (100, 3), (150, 70)] {
                if cfg!(miri) && queries > 3 {
                    continue;
                }
                check(&shape, element, 4, tokens, queries, 1);
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "hours: the other tests go through the same code")]
fn a_long_sequence_is_summed_as_exactly_as_a_short_one() {
    check(&Shape::new(9, 3, 64), Element::F16, 4, 2048, 1, 2);
    check(&Shape::new(12, 2, 128), Element::F32, 4, 2048, 2, 3);
}

#[test]
fn a_query_sees_no_more_than_its_window() {
    for window in [1, 2, 16, 31, 32, 33, 64, 1000] {
        let shape = Shape { window: Some(window), ..Shape::new(6, 2, 32) };
        for (tokens, queries) in [(1, 1), (100, 1), (100, 100), (129, 40)] {
            if cfg!(miri) && queries > 1 {
                continue;
            }
            check(&shape, Element::F16, 3, tokens, queries, window as u64);
        }
    }
}

/// A source that knows which tokens it may be asked for.
struct Trimmed<'a>(Paged<'a>, usize);

impl KvSource for Trimmed<'_> {
    fn run(&self, token: usize) -> Run {
        assert!(token >= self.1, "asked for token {token}, which was given back");
        self.0.run(token)
    }
}

#[test]
fn blocks_that_slid_out_of_the_window_may_be_given_back() {
    let shape = Shape { window: Some(40), ..Shape::new(6, 2, 32) };
    let (tokens, queries) = (200, 3);
    let mut values = Values(7);
    let k = values.many(tokens * shape.kv_row());
    let v = values.many(tokens * shape.kv_row());
    let q = values.many(queries * shape.query_heads * shape.head_dim);
    let blocks = Blocks::new(&shape, Element::F16, Layout::PlaneMajor, 4, &k, &v);
    let want = run(&shape, Element::F16, &blocks.paged(), tokens, &q);
    let first = 197 - 39;
    let mut table = blocks.table.clone();
    table[..first / 16].fill(u32::MAX);
    let paged = Paged { table: &table, ..blocks.paged() };
    assert_eq!(bits(&run(&shape, Element::F16, &Trimmed(paged, first), tokens, &q)), bits(&want));
}

#[test]
#[cfg_attr(miri, ignore = "hours: the other tests go through the same code")]
fn a_prompt_gives_the_same_bits_whole_in_pieces_or_token_by_token() {
    for shape in [Shape::new(9, 3, 64), Shape { window: Some(50), ..Shape::new(4, 4, 32) }] {
        let tokens = 140;
        let mut values = Values(11);
        let k = values.many(tokens * shape.kv_row());
        let v = values.many(tokens * shape.kv_row());
        let q = values.many(tokens * shape.query_heads * shape.head_dim);
        let blocks = Blocks::new(&shape, Element::F16, Layout::PlaneMajor, 4, &k, &v);
        let row = shape.query_heads * shape.head_dim;
        let whole = run(&shape, Element::F16, &blocks.paged(), tokens, &q);
        for piece in [1, 7, 64, 100] {
            let mut pieces = Vec::new();
            for from in (0..tokens).step_by(piece) {
                let end = tokens.min(from + piece);
                pieces.extend(run(&shape, Element::F16, &blocks.paged(), end, &q[from * row..end * row]));
            }
            assert_eq!(bits(&pieces), bits(&whole), "in pieces of {piece}: {shape:?}");
        }
    }
}

#[test]
fn threads_that_share_the_heads_give_the_same_bits_as_one() {
    let shape = Shape::new(10, 5, 48);
    for (tokens, queries) in [(90, 1), (90, 33)] {
        let mut values = Values(13);
        let k = stored(Element::F16, &values.many(tokens * shape.kv_row()));
        let v = stored(Element::F16, &values.many(tokens * shape.kv_row()));
        let q = values.many(queries * shape.query_heads * shape.head_dim);
        let kv = contiguous(&shape, Element::F16, &k, &v, 16);
        let whole = run(&shape, Element::F16, &kv, tokens, &q);
        for heads in [0..1, 1..5, 2..3, 0..5] {
            let mut part = vec![f32::NAN; queries * heads.len() * 2 * 48];
            let mut scratch = Scratch::new();
            // SAFETY: the arrays hold `tokens` rows.
            unsafe {
                attention_heads(
                    &shape,
                    Element::F16,
                    &kv,
                    tokens,
                    heads.clone(),
                    &q,
                    &mut part,
                    &mut scratch,
                );
            }
            let want: Vec<f32> = whole
                .chunks_exact(10 * 48)
                .flat_map(|row| &row[heads.start * 2 * 48..heads.end * 2 * 48])
                .copied()
                .collect();
            assert_eq!(bits(&part), bits(&want), "KV heads {heads:?}");
        }
        let mut scratch = Scratch::new();
        // SAFETY: no head is asked for, so no row is read.
        unsafe { attention_heads(&shape, Element::F16, &kv, tokens, 3..3, &q, &mut [], &mut scratch) };
    }
}

#[test]
fn scores_of_any_size_neither_overflow_nor_vanish() {
    let shape = Shape { scale: 1.0, ..Shape::new(1, 1, 16) };
    for size in [1e-20f32, 1.0, 1e4, 1e15] {
        let tokens = 70;
        let k: Vec<f32> = (0..tokens * 16).map(|n| if n / 16 % 2 == 0 { size } else { -size }).collect();
        let v: Vec<f32> = (0..tokens * 16).map(|n| (n / 16) as f32).collect();
        for sign in [1.0f32, -1.0] {
            let q = vec![sign * size.min(1e15); 16];
            let (k8, v8) = (stored(Element::F32, &k), stored(Element::F32, &v));
            let got = run(&shape, Element::F32, &contiguous(&shape, Element::F32, &k8, &v8, 16), tokens, &q);
            let want = by_definition(&shape, tokens, &q, &k, &v);
            assert!((f64::from(got[0]) - want[0]).abs() < 1e-4, "{size}: {} is not {}", got[0], want[0]);
        }
    }
}

#[test]
fn a_row_that_is_not_a_number_shows_in_the_answer_of_those_who_see_it_only() {
    let shape = Shape { window: Some(20), ..Shape::new(2, 1, 16) };
    let tokens = 80;
    let mut values = Values(17);
    let k = values.many(tokens * 16);
    let v = values.many(tokens * 16);
    let q = values.many(2 * tokens * 16);
    let mut spoilt = [k, v];
    for (n, value) in [(0, f32::NAN), (1, f32::NAN), (1, f32::INFINITY)] {
        let good = std::mem::replace(&mut spoilt[n][50 * 16], value);
        let [k, v] = [0, 1].map(|n| stored(Element::F16, &spoilt[n]));
        let out = run(&shape, Element::F16, &contiguous(&shape, Element::F16, &k, &v, 16), tokens, &q);
        for (query, row) in out.chunks_exact(2 * 16).enumerate() {
            let seen = (50..70).contains(&query);
            assert_eq!(row.iter().any(|o| !o.is_finite()), seen, "query {query}, plane {n}, {value}");
        }
        spoilt[n][50 * 16] = good;
    }
}

#[test]
#[should_panic(expected = "3 queries, but only 2 tokens")]
fn more_queries_than_tokens_are_refused() {
    let row = [0u8; 64];
    let shape = Shape::new(1, 1, 8);
    run(&shape, Element::F32, &contiguous(&shape, Element::F32, &row, &row, 1), 2, &[0.0; 24]);
}

#[test]
#[should_panic(expected = "no multiple of KV heads")]
fn heads_that_do_not_divide_are_refused() {
    let row = [0u8; 64];
    let shape = Shape::new(3, 2, 8);
    run(&shape, Element::F32, &contiguous(&shape, Element::F32, &row, &row, 1), 1, &[0.0; 24]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    #[cfg_attr(miri, ignore = "hours: the other tests go through the same code")]
    fn any_geometry_gives_the_defined_answer(
        (kv_heads, group, head_dim) in (1usize..5, 1usize..10, 1usize..70),
        (shift, tokens, queries) in (0u32..7, 1usize..200, 1usize..60),
        window in proptest::option::of(1usize..220),
        element in proptest::sample::select(Element::ALL.to_vec()),
        seed: u64,
    ) {
        let shape = Shape { window, ..Shape::new(kv_heads * group, kv_heads, head_dim) };
        check(&shape, element, shift, tokens, queries.min(tokens), seed);
    }
}
