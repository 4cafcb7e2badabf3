//! What a model's files say about its shape, from a Hugging Face `config.json` or a GGUF header.
//!
//! Owns no weights. Invariant: a [`Config`] that exists has been checked: no count is zero, query heads are a
//! multiple of KV heads, the head dimension is even, so that no later code divides by zero or splits a pair.

use candle_core::quantized::gguf_file::{Content, Value};
use serde::Deserialize;

use crate::error::{Error, Result};

/// The families of decoder-only models that the engine runs. They differ in three places only: biases on Q, K and V
/// (Qwen2), a norm over each head of Q and K (Qwen3), and the order of rotated pairs (GGUF's llama).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 1 to 3, SmolLM2, Mistral without a window.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
}

impl Family {
    /// The family's name in `config.json` and in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }
}

/// Which two elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// `(2i, 2i + 1)`: GGUF files of the llama family, whose Q and K rows were permuted when they were converted.
    Adjacent,
    /// `(i, i + dim/2)`: Hugging Face checkpoints.
    Halves,
}

/// Llama 3's stretching of slow rotations: waves longer than the old context are slowed by `factor`, short ones stay.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Llama3Scaling {
    /// By how much the longest waves are slowed.
    pub factor: f32,
    /// Waves longer than the old context divided by this are slowed in full.
    pub low_freq_factor: f32,
    /// Waves shorter than the old context divided by this stay.
    pub high_freq_factor: f32,
    /// The context that the model was first trained for, in tokens.
    pub original_max_position_embeddings: f32,
}

/// The shape of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Its family.
    pub family: Family,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward part.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads: each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_eps: f32,
    /// Base of the rotation frequencies.
    pub rope_theta: f64,
    /// Which elements rotate together.
    pub pairs: Pairs,
    /// Llama 3's scaling of frequencies, if the model has it.
    pub rope_scaling: Option<Llama3Scaling>,
    /// The longest context that the model was trained for, in tokens.
    pub max_context: usize,
    /// Whether the output layer is the embedding table.
    pub tied: bool,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

/// `config.json` as Hugging Face writes it: only the keys that change the computation.
#[derive(Deserialize)]
struct Hf {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    max_position_embeddings: usize,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<OneOrMore>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
}

impl Config {
    /// Reads a Hugging Face `config.json`. What the engine does not compute (windows, other scalings, other
    /// activations) is refused rather than ignored: a wrong answer is worse than none.
    pub fn from_hf(json: &str) -> Result<Self> {
        let hf: Hf = serde_json::from_str(json).map_err(|e| Error::Config {
            what: "config.json",
            found: e.to_string(),
            needs: "the keys of a Llama, Qwen2 or Qwen3 model",
        })?;
        let family = match hf.model_type.as_str() {
            "llama" => Family::Llama,
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            _ => return refuse("model_type", hf.model_type, "llama, qwen2 or qwen3"),
        };
        if let Some(act) = hf.hidden_act.filter(|a| a != "silu") {
            return refuse("hidden_act", act, "silu");
        }
        if hf.attention_bias == Some(true) || hf.mlp_bias == Some(true) {
            return refuse("attention_bias or mlp_bias", "true".into(), "false");
        }
        // Qwen2 states a window and switches it off beside it; Llama files have neither key.
        let window = hf.sliding_window.filter(|_| hf.use_sliding_window.unwrap_or(true));
        if let Some(window) = window.filter(|w| *w < hf.max_position_embeddings) {
            return refuse("sliding_window", window.to_string(), "full attention");
        }
        let rope_scaling = match hf.rope_scaling.filter(|s| !s.is_null()) {
            None => None,
            Some(s) => scaling_from_hf(s)?,
        };
        if hf.num_attention_heads == 0 {
            return refuse("num_attention_heads", "0".into(), "at least one head");
        }
        Config {
            family,
            vocab: hf.vocab_size,
            hidden: hf.hidden_size,
            intermediate: hf.intermediate_size,
            layers: hf.num_hidden_layers,
            heads: hf.num_attention_heads,
            kv_heads: hf.num_key_value_heads.unwrap_or(hf.num_attention_heads),
            head_dim: hf.head_dim.unwrap_or(hf.hidden_size / hf.num_attention_heads),
            rms_eps: hf.rms_norm_eps,
            rope_theta: hf.rope_theta.unwrap_or(10_000.0),
            pairs: Pairs::Halves,
            rope_scaling,
            max_context: hf.max_position_embeddings,
            tied: hf.tie_word_embeddings.unwrap_or(false),
            end_tokens: match hf.eos_token_id {
                None => Vec::new(),
                Some(OneOrMore::One(id)) => vec![id],
                Some(OneOrMore::More(ids)) => ids,
            },
        }
        .checked()
    }

    /// Reads the header of a GGUF file of the llama architecture.
    pub fn from_gguf(content: &Content) -> Result<Self> {
        let arch = gguf_string(content, "general.architecture")?;
        if arch != "llama" {
            return refuse("general.architecture", arch.into(), "llama (others load from a directory)");
        }
        if content.metadata.contains_key("llama.rope.scaling.type") {
            let kind = gguf_string(content, "llama.rope.scaling.type")?;
            if kind != "none" {
                return refuse("llama.rope.scaling.type", kind.into(), "none");
            }
        }
        if let Some(experts) = gguf_count(content, "llama.expert_count").ok().filter(|n| *n > 1) {
            return refuse("llama.expert_count", experts.to_string(), "a dense model");
        }
        let heads = gguf_count(content, "llama.attention.head_count")?;
        let hidden = gguf_count(content, "llama.embedding_length")?;
        if heads == 0 {
            return refuse("llama.attention.head_count", "0".into(), "at least one head");
        }
        let head_dim = gguf_count(content, "llama.attention.key_length").unwrap_or(hidden / heads);
        if let Ok(rotated) = gguf_count(content, "llama.rope.dimension_count") {
            if rotated != head_dim {
                return refuse("llama.rope.dimension_count", rotated.to_string(), "the whole head rotated");
            }
        }
        let embedding = content
            .tensor_infos
            .get("token_embd.weight")
            .ok_or(Error::NoTensor("token_embd.weight".into()))?;
        Config {
            family: Family::Llama,
            vocab: embedding.shape.dims().first().copied().unwrap_or(0),
            hidden,
            intermediate: gguf_count(content, "llama.feed_forward_length")?,
            layers: gguf_count(content, "llama.block_count")?,
            heads,
            kv_heads: gguf_count(content, "llama.attention.head_count_kv").unwrap_or(heads),
            head_dim,
            rms_eps: gguf_float(content, "llama.attention.layer_norm_rms_epsilon")?,
            rope_theta: gguf_float(content, "llama.rope.freq_base").map_or(10_000.0, f64::from),
            pairs: Pairs::Adjacent,
            rope_scaling: None,
            max_context: gguf_count(content, "llama.context_length")?,
            tied: !content.tensor_infos.contains_key("output.weight"),
            end_tokens: gguf_count(content, "tokenizer.ggml.eos_token_id")
                .map(|id| vec![id as u32])
                .unwrap_or_default(),
        }
        .checked()
    }

    /// Elements of one token's K row, and of its V row, in one layer.
    pub fn kv_row(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn checked(self) -> Result<Self> {
        let counts = [
            ("the vocabulary", self.vocab),
            ("the hidden size", self.hidden),
            ("the intermediate size", self.intermediate),
            ("the number of layers", self.layers),
            ("the number of KV heads", self.kv_heads),
            ("the head dimension", self.head_dim),
            ("the context", self.max_context),
        ];
        if let Some((what, _)) = counts.iter().find(|(_, n)| *n == 0) {
            return refuse(what, "0".into(), "at least 1");
        }
        if let Some((what, n)) = counts.iter().find(|(_, n)| *n > 1 << 24) {
            return refuse(what, n.to_string(), "at most 16,777,216");
        }
        if self.heads % self.kv_heads != 0 {
            let found = format!("{} for {} KV heads", self.heads, self.kv_heads);
            return refuse("the number of heads", found, "a multiple of the KV heads");
        }
        if self.head_dim % 2 != 0 {
            return refuse("the head dimension", self.head_dim.to_string(), "an even number");
        }
        if !(self.rms_eps > 0.0 && self.rope_theta > 1.0) {
            let found = format!("{} and {}", self.rms_eps, self.rope_theta);
            return refuse("the norm's epsilon or the rotation's base", found, "values above 0 and 1");
        }
        Ok(self)
    }
}

fn refuse<T>(what: &'static str, found: String, needs: &'static str) -> Result<T> {
    Err(Error::Config { what, found, needs })
}

/// `rope_scaling` in the two spellings in use (`rope_type`, and `type` before it).
fn scaling_from_hf(value: serde_json::Value) -> Result<Option<Llama3Scaling>> {
    let kind =
        value.get("rope_type").or_else(|| value.get("type")).and_then(|t| t.as_str()).unwrap_or("default");
    match kind {
        "default" => Ok(None),
        "llama3" => serde_json::from_value(value).map(Some).map_err(|e| Error::Config {
            what: "rope_scaling",
            found: e.to_string(),
            needs: "the four numbers of llama3 scaling",
        }),
        _ => refuse("rope_scaling", kind.into(), "default or llama3"),
    }
}

/// A string of a GGUF header.
pub(crate) fn gguf_string<'a>(content: &'a Content, key: &str) -> Result<&'a str> {
    match content.metadata.get(key) {
        Some(Value::String(s)) => Ok(s),
        _ => Err(Error::NoMetadata(key.into())),
    }
}

/// A whole number of a GGUF header, whatever its width.
pub(crate) fn gguf_count(content: &Content, key: &str) -> Result<usize> {
    let value = content.metadata.get(key).ok_or_else(|| Error::NoMetadata(key.into()))?;
    let n = match *value {
        Value::U8(n) => u64::from(n),
        Value::U16(n) => u64::from(n),
        Value::U32(n) => u64::from(n),
        Value::U64(n) => n,
        Value::I8(n) => u64::try_from(n).unwrap_or(u64::MAX),
        Value::I16(n) => u64::try_from(n).unwrap_or(u64::MAX),
        Value::I32(n) => u64::try_from(n).unwrap_or(u64::MAX),
        Value::I64(n) => u64::try_from(n).unwrap_or(u64::MAX),
        _ => u64::MAX,
    };
    u32::try_from(n).map(|n| n as usize).map_err(|_| Error::NoMetadata(format!("whole number {key}")))
}

fn gguf_float(content: &Content, key: &str) -> Result<f32> {
    match content.metadata.get(key) {
        Some(Value::F32(x)) => Ok(*x),
        Some(Value::F64(x)) => Ok(*x as f32),
        _ => Err(Error::NoMetadata(key.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN25: &str = r#"{"model_type":"qwen2","vocab_size":151936,"hidden_size":896,"intermediate_size":4864,
        "num_hidden_layers":24,"num_attention_heads":14,"num_key_value_heads":2,"rms_norm_eps":1e-6,
        "rope_theta":1000000.0,"max_position_embeddings":32768,"tie_word_embeddings":true,"eos_token_id":151645,
        "hidden_act":"silu","use_sliding_window":false,"sliding_window":32768}"#;

    #[test]
    fn the_configuration_of_qwen2_5_0_5b_gives_its_geometry() {
        let c = Config::from_hf(QWEN25).unwrap();
        assert_eq!((c.layers, c.heads, c.kv_heads, c.head_dim, c.kv_row()), (24, 14, 2, 64, 128));
        assert_eq!((c.end_tokens.as_slice(), c.tied, c.pairs), (&[151645][..], true, Pairs::Halves));
    }

    #[test]
    fn what_the_engine_does_not_compute_is_refused_by_name() {
        let refused = |from: &str, to: &str, says: &str| {
            let json = QWEN25.replace(from, to);
            assert_ne!(json, QWEN25);
            let error = Config::from_hf(&json).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        refused("\"qwen2\"", "\"gemma3\"", "model_type says gemma3");
        refused("\"silu\"", "\"gelu\"", "hidden_act says gelu");
        refused(
            "\"use_sliding_window\":false,\"sliding_window\":32768",
            "\"sliding_window\":512",
            "sliding_window",
        );
        refused(
            "\"hidden_act\"",
            "\"rope_scaling\":{\"type\":\"yarn\"},\"hidden_act\"",
            "rope_scaling says yarn",
        );
        refused("\"num_key_value_heads\":2", "\"num_key_value_heads\":0", "KV heads says 0");
        refused("\"num_key_value_heads\":2", "\"num_key_value_heads\":3", "14 for 3 KV heads");
        refused("\"num_attention_heads\":14", "\"num_attention_heads\":0", "num_attention_heads says 0");
        refused(
            "\"num_attention_heads\":14",
            "\"num_attention_heads\":14,\"head_dim\":63",
            "head dimension says 63",
        );
        refused("\"vocab_size\":151936,", "", "vocab_size");
    }
}
