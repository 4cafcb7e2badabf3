//! The forward pass: tokens in, logits out, keys and values to wherever the caller keeps them.
//!
//! Owns the weights, not the KV cache. Invariant: a step reads and writes the cache only through [`KvStore`], writes
//! exactly the rows of its own tokens, and does so before it attends to them; so the same weights, tokens and chunks
//! give the same bits whatever holds the rows.

use candle_core::{Device, Tensor};

use crate::config::{Config, Family};
use crate::error::{Error, Result};
use crate::kv::{Geometry, Kv, KvStore};
use crate::rope::Rope;
use crate::weights::{Embedding, Matrix, Precision, Source};

/// Which logits a step returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// None: a chunk of the prompt before its last one.
    None,
    /// Those after the step's last token, `[vocab]`.
    Last,
    /// Those after each token, `[token][vocab]`.
    All,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    /// Qwen2's biases on Q, K and V.
    biases: Option<[Vec<f32>; 3]>,
    /// Qwen3's and Gemma 3's norms over a head of Q and of K.
    head_norms: Option<[Vec<f32>; 2]>,
    /// Gemma 3's norms after attention and after the feed-forward part, before each is added.
    after_norms: Option<[Vec<f32>; 2]>,
    out: Matrix,
    mlp_norm: Vec<f32>,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

/// A model ready to run.
#[derive(Debug)]
pub struct Model {
    config: Config,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    output: Matrix,
    rope: Rope,
    /// Of layers with a window.
    local_rope: Option<Rope>,
}

impl Model {
    /// Loads the weights that `config` describes.
    pub fn load(config: Config, source: &mut Source, precision: Precision) -> Result<Self> {
        let names = Names::of(source);
        let c = &config;
        let (q_rows, kv_rows) = (c.heads * c.head_dim, c.kv_row());
        let mut layers = Vec::with_capacity(c.layers);
        for n in 0..c.layers {
            let name = |part: &str, suffix: &str| names.layer(n, part, suffix);
            let mut matrix =
                |part: &str, rows, cols| source.matrix(&name(part, "weight"), rows, cols, precision);
            let q = matrix(names.q, q_rows, c.hidden)?;
            let k = matrix(names.k, kv_rows, c.hidden)?;
            let v = matrix(names.v, kv_rows, c.hidden)?;
            let out = matrix(names.out, c.hidden, q_rows)?;
            let gate = matrix(names.gate, c.intermediate, c.hidden)?;
            let up = matrix(names.up, c.intermediate, c.hidden)?;
            let down = matrix(names.down, c.hidden, c.intermediate)?;
            let biases = match c.family {
                Family::Qwen2 => Some([
                    source.vector(&name(names.q, "bias"), q_rows)?,
                    source.vector(&name(names.k, "bias"), kv_rows)?,
                    source.vector(&name(names.v, "bias"), kv_rows)?,
                ]),
                Family::Llama | Family::Qwen3 | Family::Gemma3 => None,
            };
            let mut norm = |part: &str, len| norm_weight(source, c.family, &name(part, "weight"), len);
            let head_norms = match c.family {
                Family::Qwen3 | Family::Gemma3 => {
                    Some([norm(names.q_norm, c.head_dim)?, norm(names.k_norm, c.head_dim)?])
                }
                Family::Llama | Family::Qwen2 => None,
            };
            let attention_norm = norm(names.attention_norm, c.hidden)?;
            // The same name stands for two things in Hugging Face's files: in the older families it is the norm before
            // the feed-forward part.
            let (mlp_norm, after_norms) = match c.family {
                Family::Gemma3 => {
                    let [after_attention, before_mlp, after_mlp] = names.sandwich;
                    let after = [norm(after_attention, c.hidden)?, norm(after_mlp, c.hidden)?];
                    (norm(before_mlp, c.hidden)?, Some(after))
                }
                Family::Llama | Family::Qwen2 | Family::Qwen3 => (norm(names.mlp_norm, c.hidden)?, None),
            };
            layers.push(Layer {
                attention_norm,
                q,
                k,
                v,
                biases,
                head_norms,
                after_norms,
                out,
                mlp_norm,
                gate,
                up,
                down,
            });
        }
        let embedding = source.embedding(names.embedding, c.vocab, c.hidden, precision)?;
        let output = if c.tied {
            embedding.as_matrix()?
        } else {
            source.matrix(names.output, c.vocab, c.hidden, precision)?
        };
        let norm = norm_weight(source, c.family, names.norm, c.hidden)?;
        let factors = match source.has("rope_freqs.weight") {
            true => Some(source.vector("rope_freqs.weight", c.head_dim / 2)?),
            false => None,
        };
        let rope = Rope::new(c, c.rope_theta, factors.as_deref());
        let local_rope = c.window.map(|_| Rope::new(c, c.local_rope_theta, None));
        Ok(Model { config, embedding, layers, norm, output, rope, local_rope })
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the KV cache must hold per token.
    pub fn geometry(&self) -> Geometry {
        let c = &self.config;
        Geometry {
            layers: c.layers,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            window: c.window,
        }
    }

    /// Runs `tokens` at positions `start..`: writes their keys and values to `kv` and returns the logits asked for.
    ///
    /// Positions below `start` must have been written; room for the new ones is asked of `kv` first, so that a
    /// refusal comes before anything is computed or written.
    pub fn step<K: KvStore>(
        &self,
        kv: &mut K,
        tokens: &[u32],
        start: usize,
        want: Logits,
    ) -> Result<Vec<f32>> {
        let c = &self.config;
        let end = start + tokens.len();
        if end > c.max_context {
            return Err(Error::Context { start, tokens: end, limit: c.max_context });
        }
        let mut x = self.embedding.rows(tokens)?;
        if c.family == Family::Gemma3 {
            let scale = (c.hidden as f32).sqrt();
            x.iter_mut().for_each(|v| *v *= scale);
        }
        kv.ensure(end)?;
        let geometry = self.geometry();
        let angles = self.rope.angles(start, tokens.len());
        let local_angles = self.local_rope.as_ref().map(|rope| rope.angles(start, tokens.len()));
        let mut attended = vec![0.0; tokens.len() * c.heads * c.head_dim];
        for (n, layer) in self.layers.iter().enumerate() {
            let h = activations(rms_norm(&x, &layer.attention_norm, c.rms_eps), c.hidden)?;
            let (mut q, mut k, mut v) = (layer.q.apply(&h)?, layer.k.apply(&h)?, layer.v.apply(&h)?);
            if let Some([bq, bk, bv]) = &layer.biases {
                add_rows(&mut q, bq);
                add_rows(&mut k, bk);
                add_rows(&mut v, bv);
            }
            if let Some([nq, nk]) = &layer.head_norms {
                q = rms_norm(&q, nq, c.rms_eps);
                k = rms_norm(&k, nk, c.rms_eps);
            }
            let angles = match &local_angles {
                Some(local) if geometry.window(n).is_some() => local,
                _ => &angles,
            };
            angles.rotate(&mut q, c.heads);
            angles.rotate(&mut k, c.kv_heads);
            for (i, (k, v)) in k.chunks_exact(c.kv_row()).zip(v.chunks_exact(c.kv_row())).enumerate() {
                kv.store(start + i, n, Kv::K, k);
                kv.store(start + i, n, Kv::V, v);
            }
            kv.attend(n, end, &q, &mut attended);
            let h = activations(attended.clone(), c.heads * c.head_dim)?;
            let mut h = layer.out.apply(&h)?;
            if let Some([norm, _]) = &layer.after_norms {
                h = rms_norm(&h, norm, c.rms_eps);
            }
            add(&mut x, &h);

            let h = activations(rms_norm(&x, &layer.mlp_norm, c.rms_eps), c.hidden)?;
            let mut gate = layer.gate.apply(&h)?;
            let activate = if c.family == Family::Gemma3 { gelu } else { silu };
            for (g, u) in gate.iter_mut().zip(layer.up.apply(&h)?) {
                *g = activate(*g) * u;
            }
            let mut h = layer.down.apply(&activations(gate, c.intermediate)?)?;
            if let Some([_, norm]) = &layer.after_norms {
                h = rms_norm(&h, norm, c.rms_eps);
            }
            add(&mut x, &h);
        }
        let from = match want {
            Logits::None => return Ok(Vec::new()),
            Logits::Last => x.len().saturating_sub(c.hidden),
            Logits::All => 0,
        };
        self.output.apply(&activations(rms_norm(&x[from..], &self.norm, c.rms_eps), c.hidden)?)
    }
}

/// The names of the weights in the two kinds of files.
struct Names {
    layers: &'static str,
    q: &'static str,
    k: &'static str,
    v: &'static str,
    out: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    q_norm: &'static str,
    k_norm: &'static str,
    attention_norm: &'static str,
    mlp_norm: &'static str,
    /// Gemma 3's: after attention, before and after the feed-forward part.
    sandwich: [&'static str; 3],
    embedding: &'static str,
    norm: &'static str,
    output: &'static str,
}

impl Names {
    fn of(source: &Source) -> Self {
        match source {
            Source::Gguf(..) => Names {
                layers: "blk",
                q: "attn_q",
                k: "attn_k",
                v: "attn_v",
                out: "attn_output",
                gate: "ffn_gate",
                up: "ffn_up",
                down: "ffn_down",
                q_norm: "attn_q_norm",
                k_norm: "attn_k_norm",
                attention_norm: "attn_norm",
                mlp_norm: "ffn_norm",
                sandwich: ["post_attention_norm", "ffn_norm", "post_ffw_norm"],
                embedding: "token_embd.weight",
                norm: "output_norm.weight",
                output: "output.weight",
            },
            Source::Safetensors(_) => Names {
                layers: "model.layers",
                q: "self_attn.q_proj",
                k: "self_attn.k_proj",
                v: "self_attn.v_proj",
                out: "self_attn.o_proj",
                gate: "mlp.gate_proj",
                up: "mlp.up_proj",
                down: "mlp.down_proj",
                q_norm: "self_attn.q_norm",
                k_norm: "self_attn.k_norm",
                attention_norm: "input_layernorm",
                mlp_norm: "post_attention_layernorm",
                sandwich: [
                    "post_attention_layernorm",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                ],
                embedding: "model.embed_tokens.weight",
                norm: "model.norm.weight",
                output: "lm_head.weight",
            },
        }
    }

    fn layer(&self, n: usize, part: &str, suffix: &str) -> String {
        format!("{}.{n}.{part}.{suffix}", self.layers)
    }
}

/// The weight of a norm. Gemma's checkpoints keep what is added to 1; its GGUF files have it added already.
fn norm_weight(source: &mut Source, family: Family, name: &str, len: usize) -> Result<Vec<f32>> {
    let mut weight = source.vector(name, len)?;
    if family == Family::Gemma3 && matches!(source, Source::Safetensors(_)) {
        weight.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(weight)
}

/// x * sigmoid(x) (Elfwing et al. 2017, arXiv 1702.03118).
fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// GELU by its tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415), which is what Gemma was trained with.
fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x)).tanh())
}

/// `[token][width]` as a tensor, for the matrix products.
fn activations(values: Vec<f32>, width: usize) -> Result<Tensor> {
    let tokens = values.len() / width;
    Ok(Tensor::from_vec(values, (tokens, width), &Device::Cpu)?)
}

/// Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467) of each row of `weight.len()` elements.
fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean = row.iter().map(|v| v * v).sum::<f32>() / weight.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        out.extend(row.iter().zip(weight).map(|(v, w)| v * scale * w));
    }
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

fn add_rows(x: &mut [f32], bias: &[f32]) {
    for row in x.chunks_exact_mut(bias.len()) {
        add(row, bias);
    }
}
