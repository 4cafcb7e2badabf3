//! Row `attention-candle`: the contiguous twin's speed against candle's matmul-softmax attention, f32, one thread
//! each, on the same values. A slow kernel would hide the price of paging: this is its floor.
//!
//! candle gets what suits it: K and V head by head without gaps (as its models cache them), the scale in the queries,
//! the mask made beforehand; and of the two customary ways to serve grouped heads (repeat K and V, or fold the group
//! into the rows) the one that is quicker in this run.

use std::hint::black_box;
use std::time::Duration;

use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use kvbroker::attention::{Contiguous, Element, Scratch, Shape, attention};
use kvbroker_bench::kv::Model;
use kvbroker_bench::{Clock, Samples, Values, at_least, reported};

fn main() -> Result<()> {
    // SAFETY: no other thread exists yet. candle and the pool under it read this when first used.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", "1") };
    for model in Model::all() {
        for queries in [1, 2048] {
            compare(&model, queries)?;
        }
    }
    Ok(())
}

/// The tensors of one call, as candle wants them: `[1][head][token][dim]`.
struct Candle {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// `[query][token]`: 0 or minus infinity. None for one query, which sees all.
    mask: Option<Tensor>,
    group: usize,
}

impl Candle {
    fn weights(&self, scores: Tensor) -> Result<Tensor> {
        match &self.mask {
            Some(mask) => softmax_last_dim(&scores.broadcast_add(mask)?),
            None => softmax_last_dim(&scores),
        }
    }

    /// As most of candle's models do it: each KV head repeated for its query heads.
    fn repeated(&self) -> Result<Tensor> {
        let repeat = |x: &Tensor| {
            let (b, heads, tokens, dim) = x.dims4()?;
            Tensor::cat(&vec![x; self.group], 2)?.reshape((b, heads * self.group, tokens, dim))
        };
        let (k, v) = (repeat(&self.k)?, repeat(&self.v)?);
        self.weights(self.q.matmul(&k.transpose(2, 3)?)?)?.matmul(&v)
    }

    /// No repetition: the query heads of a KV head are rows of one matrix.
    fn folded(&self) -> Result<Tensor> {
        let (_, heads, queries, dim) = self.q.dims4()?;
        let tokens = self.k.dim(2)?;
        let kv_heads = heads / self.group;
        let q = self.q.reshape((kv_heads, self.group * queries, dim))?;
        let scores = q.matmul(&self.k.squeeze(0)?.transpose(1, 2)?)?;
        let weights = self.weights(scores.reshape((kv_heads, self.group, queries, tokens))?)?;
        let weights = weights.reshape((kv_heads, self.group * queries, tokens))?;
        weights.matmul(&self.v.squeeze(0)?)?.reshape((1, heads, queries, dim))
    }
}

fn compare(model: &Model, queries: usize) -> Result<()> {
    const TOKENS: usize = 2048;
    let shape = &model.shape;
    let Shape { query_heads, kv_heads, head_dim, scale, .. } = *shape;
    let mut values = Values(1);
    let q = values.many(queries * query_heads * head_dim);
    let k = values.many(TOKENS * shape.kv_row());
    let v = values.many(TOKENS * shape.kv_row());

    let device = Device::Cpu;
    let by_head = |x: &[f32], tokens: usize, heads: usize| {
        Tensor::from_slice(x, (1, tokens, heads, head_dim), &device)?.transpose(1, 2)?.contiguous()
    };
    let candle = Candle {
        q: (by_head(&q, queries, query_heads)? * f64::from(scale))?,
        k: by_head(&k, TOKENS, kv_heads)?,
        v: by_head(&v, TOKENS, kv_heads)?,
        mask: if queries == 1 { None } else { Some(causal_mask(queries, TOKENS, &device)?) },
        group: shape.group(),
    };
    let stride = shape.kv_row() * Element::F32.bytes();
    let kv = Contiguous {
        k: k.as_ptr().cast(),
        v: v.as_ptr().cast(),
        k_stride: stride,
        v_stride: stride,
        run: 16,
    };
    let (mut out, mut scratch) = (vec![0.0; q.len()], Scratch::new());
    let mut ours = |out: &mut [f32]| {
        // SAFETY: the arrays hold a row for each token.
        unsafe { attention(shape, Element::F32, &kv, TOKENS, &q, out, &mut scratch) };
    };

    ours(&mut out);
    for theirs in [candle.repeated()?, candle.folded()?] {
        let theirs = theirs.transpose(1, 2)?.flatten_all()?;
        let off = (theirs - Tensor::from_slice(&out, out.len(), &device)?)?.abs()?.max(D::Minus1)?;
        let off = off.to_scalar::<f32>()?;
        assert!(off < 1e-4, "candle and the twin differ by {off}: they do not compute the same");
    }

    let rounds = if queries == 1 { 101 } else { 7 };
    let samples = Samples::interleaved(
        Clock::Cpu,
        rounds,
        Duration::from_secs(2),
        &mut [
            &mut || ours(black_box(&mut out)),
            &mut || _ = black_box(candle.repeated().expect("it ran before")),
            &mut || _ = black_box(candle.folded().expect("it ran before")),
        ],
    );
    let side = if samples.median(1) < samples.median(2) { 1 } else { 2 };
    let how = ["", "repeated K and V", "folded heads"][side];
    let name = |what: &str| format!("attention-candle/{what}-{}-{queries}", model.name);
    let note = format!(
        "f32, {queries} queries, {TOKENS} tokens; {}; median of {}",
        model.describe(),
        samples.count()
    );
    at_least(
        name("speed"),
        samples.median(side) / samples.median(0),
        1.0,
        format!("candle with {how} / contiguous twin, one thread; {note}"),
    );
    reported(name("twin"), samples.median(0) * 1e3, "ms", format!("one layer; {note}"));
    let products = (1..=TOKENS).rev().take(queries).sum::<usize>() * query_heads * head_dim * 2;
    reported(
        name("rate"),
        products as f64 * 2.0 / samples.median(0) * 1e-9,
        "GFLOP/s",
        format!("of the twin, masked products left out; {note}"),
    );
    Ok(())
}

fn causal_mask(queries: usize, tokens: usize, device: &Device) -> Result<Tensor> {
    let hidden = |query, token| token > tokens - queries + query;
    let mask: Vec<f32> = (0..queries * tokens)
        .map(|n| if hidden(n / tokens, n % tokens) { f32::NEG_INFINITY } else { 0.0 })
        .collect();
    Tensor::from_vec(mask, (queries, tokens), device)
}
