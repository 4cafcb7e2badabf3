//! What a model's files say about its shape, from a Hugging Face `config.json` or a GGUF header.
//!
//! Owns no weights. Invariant: a [`Config`] that exists has been checked: no count is zero, query heads are a
//! multiple of KV heads, the head dimension is even, so that no later code divides by zero or splits a pair.

use candle_core::quantized::gguf_file::{Content, Value};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::kv::Window;

/// The families of decoder-only models that the engine runs. The first three differ in three places only: biases on Q, K
/// and V (Qwen2), a norm over each head of Q and K (Qwen3), and the order of rotated pairs (GGUF's llama). Gemma 3 has
/// the head norms too, and layers with a sliding window that rotate by another base, norms after as well as before each
/// part, GELU, and scaled embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 1 to 3, SmolLM2, Mistral without a window.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Gemma 3, text only.
    Gemma3,
}

impl Family {
    /// The family's name in `config.json` and in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Gemma3 => "gemma3",
        }
    }
}

/// What Transformers and llama.cpp take for Gemma 3 where a file says nothing.
mod gemma3 {
    pub const ROPE_THETA: f64 = 1e6;
    pub const LOCAL_ROPE_THETA: f64 = 1e4;
    /// One layer of so many sees all tokens.
    pub const EVERY: usize = 6;
    /// Layers of the 27B model, which alone scales its scores by something else than the head's dimension.
    pub const LAYERS_OF_27B: usize = 62;
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
    /// The same in layers with a window.
    pub local_rope_theta: f64,
    /// The sliding window, if some layers have one.
    pub window: Option<Window>,
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
    hidden_activation: Option<String>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<bool>,
    rope_local_base_freq: Option<f64>,
    rope_parameters: Option<serde_json::Value>,
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
}

impl Hf {
    /// Gemma's window, and which layers are without.
    fn window(&self) -> Result<Window> {
        let Some(tokens) = self.sliding_window.filter(|w| *w > 0) else {
            return refuse("sliding_window", "nothing".into(), "the window of Gemma's local layers");
        };
        let every = match &self.layer_types {
            None => self.sliding_window_pattern.unwrap_or(gemma3::EVERY),
            Some(types) => {
                let full = |t: &String| t == "full_attention";
                let every = types.iter().position(full).map_or(types.len() + 1, |first| first + 1);
                let other = types.iter().enumerate().find(|(n, t)| full(t) != ((n + 1) % every == 0));
                if let Some((n, t)) = other.filter(|_| types.len() == self.num_hidden_layers) {
                    return refuse("layer_types", format!("{t} at layer {n}"), "every n-th layer in full");
                }
                if types.len() != self.num_hidden_layers {
                    return refuse("layer_types", types.len().to_string(), "one for each layer");
                }
                every
            }
        };
        Ok(Window { tokens, every })
    }

    /// Refuses what only some of Gemma's models have.
    fn is_plain_gemma(&self) -> Result<()> {
        let head_dim = self.head_dim.map_or(f64::NAN, |d| d as f64);
        if self.query_pre_attn_scalar.is_some_and(|s| s != head_dim) || self.head_dim.is_none() {
            let found = format!("{:?}", self.query_pre_attn_scalar);
            return refuse("query_pre_attn_scalar", found, "the head dimension, stated as head_dim");
        }
        if self.attn_logit_softcapping.or(self.final_logit_softcapping).is_some() {
            return refuse("logit softcapping", "a number".into(), "none");
        }
        if self.use_bidirectional_attention == Some(true) {
            return refuse("use_bidirectional_attention", "true".into(), "causal attention");
        }
        if self.rope_parameters.as_ref().is_some_and(|p| !p.is_null()) {
            return refuse("rope_parameters", "an object".into(), "rope_theta and rope_local_base_freq");
        }
        Ok(())
    }
}

impl Config {
    /// Reads a Hugging Face `config.json`. What the engine does not compute (windows outside Gemma, other scalings,
    /// other activations) is refused rather than ignored: a wrong answer is worse than none.
    pub fn from_hf(json: &str) -> Result<Self> {
        let hf: Hf = serde_json::from_str(json).map_err(|e| Error::Config {
            what: "config.json",
            found: e.to_string(),
            needs: "the keys of a Llama, Qwen2, Qwen3 or Gemma 3 model",
        })?;
        let family = match hf.model_type.as_str() {
            "llama" => Family::Llama,
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            "gemma3_text" => Family::Gemma3,
            _ => return refuse("model_type", hf.model_type, "llama, qwen2, qwen3 or gemma3_text"),
        };
        let gemma = family == Family::Gemma3;
        // Gemma's files have either key, or both, of which the second one counts.
        let activation = if gemma { hf.hidden_activation.as_ref() } else { hf.hidden_act.as_ref() };
        let known = if gemma { "gelu_pytorch_tanh" } else { "silu" };
        if let Some(act) = activation.filter(|a| *a != known) {
            return refuse("hidden_act", act.clone(), known);
        }
        if hf.attention_bias == Some(true) || hf.mlp_bias == Some(true) {
            return refuse("attention_bias or mlp_bias", "true".into(), "false");
        }
        // Qwen2 states a window and switches it off beside it; Llama files have neither key.
        let window = hf.sliding_window.filter(|_| hf.use_sliding_window.unwrap_or(true));
        if let Some(window) = window.filter(|w| *w < hf.max_position_embeddings && !gemma) {
            return refuse("sliding_window", window.to_string(), "full attention");
        }
        let window = if gemma { Some(hf.window()?) } else { None };
        if gemma {
            hf.is_plain_gemma()?;
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
            rope_theta: hf.rope_theta.unwrap_or(if gemma { gemma3::ROPE_THETA } else { 10_000.0 }),
            local_rope_theta: hf.rope_local_base_freq.unwrap_or(gemma3::LOCAL_ROPE_THETA),
            window,
            pairs: Pairs::Halves,
            rope_scaling,
            max_context: hf.max_position_embeddings,
            tied: hf.tie_word_embeddings.unwrap_or(gemma),
            end_tokens: match hf.eos_token_id {
                None => Vec::new(),
                Some(OneOrMore::One(id)) => vec![id],
                Some(OneOrMore::More(ids)) => ids,
            },
        }
        .checked()
    }

    /// Reads the header of a GGUF file of the llama or the gemma3 architecture.
    pub fn from_gguf(content: &Content) -> Result<Self> {
        let arch = gguf_string(content, "general.architecture")?;
        let family = match arch {
            "llama" => Family::Llama,
            "gemma3" => Family::Gemma3,
            _ => {
                let needs = "llama or gemma3 (others load from a directory)";
                return refuse("general.architecture", arch.into(), needs);
            }
        };
        let gemma = family == Family::Gemma3;
        let key = |name: &str| format!("{arch}.{name}");
        let count = |name: &str| gguf_count(content, &key(name));
        let float = |name: &str| gguf_float(content, &key(name)).map(f64::from);
        if content.metadata.contains_key(&key("rope.scaling.type")) {
            let kind = gguf_string(content, &key("rope.scaling.type"))?;
            if kind != "none" {
                return refuse("rope.scaling.type", kind.into(), "none");
            }
        }
        if let Some(experts) = count("expert_count").ok().filter(|n| *n > 1) {
            return refuse("expert_count", experts.to_string(), "a dense model");
        }
        let heads = count("attention.head_count")?;
        let hidden = count("embedding_length")?;
        let layers = count("block_count")?;
        if heads == 0 {
            return refuse("attention.head_count", "0".into(), "at least one head");
        }
        if gemma && layers == gemma3::LAYERS_OF_27B {
            return refuse("block_count", layers.to_string(), "a model of Gemma 3 below 27B");
        }
        let head_dim = count("attention.key_length").unwrap_or(hidden / heads);
        if let Some(value) = count("attention.value_length").ok().filter(|n| *n != head_dim) {
            return refuse("attention.value_length", value.to_string(), "that of K");
        }
        if let Some(rotated) = count("rope.dimension_count").ok().filter(|n| *n != head_dim) {
            return refuse("rope.dimension_count", rotated.to_string(), "the whole head rotated");
        }
        let window = match gemma {
            true => {
                if content.metadata.get(&key("attention.sliding_window_pattern")).is_some_and(is_list) {
                    return refuse("attention.sliding_window_pattern", "a list".into(), "a number");
                }
                let every = count("attention.sliding_window_pattern").unwrap_or(gemma3::EVERY);
                Some(Window { tokens: count("attention.sliding_window")?, every })
            }
            false => None,
        };
        let embedding = content
            .tensor_infos
            .get("token_embd.weight")
            .ok_or(Error::NoTensor("token_embd.weight".into()))?;
        Config {
            family,
            vocab: embedding.shape.dims().first().copied().unwrap_or(0),
            hidden,
            intermediate: count("feed_forward_length")?,
            layers,
            heads,
            kv_heads: count("attention.head_count_kv").unwrap_or(heads),
            head_dim,
            rms_eps: gguf_float(content, &key("attention.layer_norm_rms_epsilon"))?,
            rope_theta: float("rope.freq_base").unwrap_or(if gemma { gemma3::ROPE_THETA } else { 10_000.0 }),
            local_rope_theta: float("rope.freq_base_swa").unwrap_or(gemma3::LOCAL_ROPE_THETA),
            window,
            pairs: if gemma { Pairs::Halves } else { Pairs::Adjacent },
            rope_scaling: None,
            max_context: count("context_length")?,
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
        if let Some(w) = self.window.filter(|w| w.tokens == 0 || w.every < 2) {
            let found = format!("{} tokens, one layer of {} without", w.tokens, w.every);
            return refuse("the sliding window", found, "at least one token, and one layer of two with it");
        }
        if !(self.rms_eps > 0.0 && self.rope_theta > 1.0 && self.local_rope_theta > 1.0) {
            let found = format!("{} and {}", self.rms_eps, self.rope_theta);
            return refuse("the norm's epsilon or the rotation's base", found, "values above 0 and 1");
        }
        Ok(self)
    }
}

fn is_list(value: &Value) -> bool {
    matches!(value, Value::Array(_))
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

    const GEMMA3: &str = r#"{"model_type":"gemma3_text","vocab_size":262144,"hidden_size":640,"intermediate_size":2048,
        "num_hidden_layers":18,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"rms_norm_eps":1e-6,
        "rope_theta":1000000.0,"rope_local_base_freq":10000.0,"max_position_embeddings":32768,"eos_token_id":1,
        "hidden_activation":"gelu_pytorch_tanh","query_pre_attn_scalar":256,"sliding_window":512,
        "attn_logit_softcapping":null,"final_logit_softcapping":null,"use_bidirectional_attention":false}"#;

    #[test]
    fn gemma_3_has_a_window_in_five_layers_of_six_however_its_file_says_so() {
        let window = |json: &str| Config::from_hf(json).unwrap().window;
        let expected = Some(Window { tokens: 512, every: 6 });
        assert_eq!(window(GEMMA3), expected);
        let types = |full: &[usize]| {
            let name = |n| if full.contains(&n) { "\"full_attention\"" } else { "\"sliding_attention\"" };
            let list = (0..18).map(name).collect::<Vec<_>>().join(",");
            GEMMA3.replace("\"head_dim\"", &format!("\"layer_types\":[{list}],\"head_dim\""))
        };
        assert_eq!(window(&types(&[5, 11, 17])), expected);
        let odd = Config::from_hf(&types(&[5, 10])).unwrap_err().to_string();
        assert!(odd.contains("layer_types says full_attention at layer 10"), "{odd}");
        let refused = |from: &str, to: &str, says: &str| {
            let error = Config::from_hf(&GEMMA3.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        refused("\"query_pre_attn_scalar\":256", "\"query_pre_attn_scalar\":168", "query_pre_attn_scalar");
        refused("\"final_logit_softcapping\":null", "\"final_logit_softcapping\":30.0", "softcapping");
        refused("gelu_pytorch_tanh", "silu", "hidden_act says silu");
        refused("\"sliding_window\":512", "\"sliding_window\":null", "sliding_window says nothing");
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
