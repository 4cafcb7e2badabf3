//! Qwen2, Qwen3, Llama and Gemma 3 from a directory, with weights from a seeded generator, against candle's models.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{gemma3, llama, qwen2, qwen3};
use infer::config::{Config, Family};
use infer::kv::Twin;
use infer::model::Model;
use infer::weights::{Precision, Source};
use kvbroker::attention::Element;
use oracle::{DECODED, Reference};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

const CPU: Device = Device::Cpu;
const PROMPT: usize = 75;

/// A model's shape: (hidden, intermediate, layers, query heads, KV heads, head dimension).
type Shape = (usize, usize, usize, usize, usize, usize);

fn config(family: &str, shape: Shape, tied: bool, extra: serde_json::Value) -> String {
    let (hidden, intermediate, layers, heads, kv_heads, head_dim) = shape;
    let mut config = json!({
        "model_type": family, "vocab_size": 331, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "hidden_act": "silu", "attention_bias": false, "use_sliding_window": false,
        "sliding_window": 512, "max_window_layers": layers,
    });
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

/// Makes the weights that `config` asks for: normal, wide enough that attention is far from uniform.
fn generate(config: &Config, seed: u64) -> HashMap<String, Tensor> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut normal = |dims: &[usize], mean: f32, deviation: f32| {
        let values: Vec<f32> = (0..dims.iter().product())
            .map(|_| {
                // Box and Muller's transform.
                let (u, v): (f32, f32) = (1.0 - rng.random::<f32>(), rng.random());
                mean + deviation * (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
            })
            .collect();
        Tensor::from_vec(values, dims, &CPU).unwrap()
    };
    let c = config;
    let (q, kv) = (c.heads * c.head_dim, c.kv_row());
    let mut tensors = HashMap::new();
    for n in 0..c.layers {
        let mut add = |name: &str, tensor: Tensor| tensors.insert(format!("model.layers.{n}.{name}"), tensor);
        let wide = |inputs: usize| 1.5 / (inputs as f32).sqrt();
        add("self_attn.q_proj.weight", normal(&[q, c.hidden], 0.0, wide(c.hidden)));
        add("self_attn.k_proj.weight", normal(&[kv, c.hidden], 0.0, wide(c.hidden)));
        add("self_attn.v_proj.weight", normal(&[kv, c.hidden], 0.0, wide(c.hidden)));
        add("self_attn.o_proj.weight", normal(&[c.hidden, q], 0.0, wide(q)));
        add("mlp.gate_proj.weight", normal(&[c.intermediate, c.hidden], 0.0, wide(c.hidden)));
        add("mlp.up_proj.weight", normal(&[c.intermediate, c.hidden], 0.0, wide(c.hidden)));
        add("mlp.down_proj.weight", normal(&[c.hidden, c.intermediate], 0.0, wide(c.intermediate)));
        if c.family != Family::Gemma3 {
            add("input_layernorm.weight", normal(&[c.hidden], 1.0, 0.2));
            add("post_attention_layernorm.weight", normal(&[c.hidden], 1.0, 0.2));
        }
        if c.family == Family::Qwen2 {
            add("self_attn.q_proj.bias", normal(&[q], 0.0, 0.5));
            add("self_attn.k_proj.bias", normal(&[kv], 0.0, 0.5));
            add("self_attn.v_proj.bias", normal(&[kv], 0.0, 0.5));
        }
        if c.family == Family::Gemma3 {
            // What is added to 1.
            add("self_attn.q_norm.weight", normal(&[c.head_dim], 0.5, 0.3));
            add("self_attn.k_norm.weight", normal(&[c.head_dim], 0.5, 0.3));
            for name in ["input", "post_attention", "pre_feedforward", "post_feedforward"] {
                add(&format!("{name}_layernorm.weight"), normal(&[c.hidden], 0.0, 0.2));
            }
        }
        if c.family == Family::Qwen3 {
            add("self_attn.q_norm.weight", normal(&[c.head_dim], 1.5, 0.3));
            add("self_attn.k_norm.weight", normal(&[c.head_dim], 1.5, 0.3));
        }
    }
    let head = 2.0 / (c.hidden as f32).sqrt();
    tensors.insert("model.embed_tokens.weight".to_owned(), normal(&[c.vocab, c.hidden], 0.0, head));
    let mean = if c.family == Family::Gemma3 { 0.0 } else { 1.0 };
    tensors.insert("model.norm.weight".to_owned(), normal(&[c.hidden], mean, 0.2));
    if !c.tied {
        tensors.insert("lm_head.weight".to_owned(), normal(&[c.vocab, c.hidden], 0.0, head));
    }
    tensors
}

/// The same weights, each matrix rounded to what q8_0 can hold.
fn rounded(tensors: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    // A q8_0 block is 32 values of one row: a matrix of other rows stays as it is, in the engine too.
    let round = |t: &Tensor| match t.dims() {
        [_, cols] if cols % 32 == 0 => {
            QTensor::quantize(t, GgmlDType::Q8_0).unwrap().dequantize(&CPU).unwrap()
        }
        _ => t.clone(),
    };
    tensors.iter().map(|(name, t)| (name.clone(), round(t))).collect()
}

fn record(family: Family, json: &str, file: &Path, prompt: &[u32]) -> Reference {
    // SAFETY: the test wrote the file itself and nobody changes it.
    let weights = unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &CPU) }.unwrap();
    let input = |tokens: &[u32]| Tensor::new(tokens, &CPU)?.unsqueeze(0);
    match family {
        Family::Qwen2 => {
            let config: qwen2::Config = serde_json::from_str(json).unwrap();
            let mut model = qwen2::ModelForCausalLM::new(&config, weights).unwrap();
            Reference::record(prompt, &mut |tokens, start| {
                model.forward(&input(tokens)?, start)?.flatten_all()?.to_vec1()
            })
        }
        Family::Qwen3 => {
            let config: qwen3::Config = serde_json::from_str(json).unwrap();
            let mut model = qwen3::ModelForCausalLM::new(&config, weights).unwrap();
            Reference::record(prompt, &mut |tokens, start| {
                model.forward(&input(tokens)?, start)?.flatten_all()?.to_vec1()
            })
        }
        // Token by token: over a whole prompt candle's mask shows a local layer one token more than its window has, and
        // one more than its own cache shows it afterwards.
        Family::Gemma3 => {
            let config: gemma3::Config = serde_json::from_str(json).unwrap();
            let mut model = gemma3::Model::new(false, &config, weights).unwrap();
            Reference::record(prompt, &mut |tokens, start| {
                let mut last = Vec::new();
                for (n, token) in tokens.iter().enumerate() {
                    last = model.forward(&input(&[*token])?, start + n)?.flatten_all()?.to_vec1()?;
                }
                Ok(last)
            })
        }
        Family::Llama => {
            let config: llama::LlamaConfig = serde_json::from_str(json).unwrap();
            let config = config.into_config(false);
            let model = llama::Llama::load(weights, &config).unwrap();
            let mut cache = llama::Cache::new(true, DType::F32, &config, &CPU).unwrap();
            Reference::record(prompt, &mut |tokens, start| {
                model.forward(&input(tokens)?, start, &mut cache)?.flatten_all()?.to_vec1()
            })
        }
    }
}

fn check(family: &str, shape: Shape, tied: bool, extra: serde_json::Value) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    let json = config(family, shape, tied, extra);
    let config = Config::from_hf(&json).unwrap();
    let weights = generate(&config, 20);
    candle_core::safetensors::save(&weights, &file).unwrap();
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| (i * i * 7 + i * 13 + 5) % 331).collect();
    let reference = record(config.family, &json, &file, &prompt);

    let engine = |file: &Path, precision| {
        Model::load(config.clone(), &mut Source::safetensors(&[file]).unwrap(), precision).unwrap()
    };
    let model = engine(&file, Precision::File);
    let twin = |element| Twin::new(model.geometry(), element, PROMPT + DECODED);
    let exact = reference.figures(&reference.rerun_engine(&model, &mut twin(Element::F32), 32));
    println!("{family} {shape:?}, f32 KV: {exact}");
    assert!(exact.max_diff <= 1e-3 && exact.same_choices(), "{family} {shape:?}: {exact}");
    assert!(exact.min_spread > 0.5, "{family} {shape:?}: {exact}");

    let half = reference.figures(&reference.rerun_engine(&model, &mut twin(Element::F16), 32));
    println!("{family} {shape:?}, f16 KV: {half}");
    assert!(half.mean_kl() <= 1e-4 && half.same_choices(), "{family} {shape:?}: {half}");

    // candle gets the rounded weights in f32: what is left is the rounding of activations to 8 bits in q8_0 products.
    let file = dir.path().join("rounded.safetensors");
    candle_core::safetensors::save(&rounded(&weights), &file).unwrap();
    let reference = record(config.family, &json, &file, &prompt);
    let quantised = reference.figures(&reference.rerun_engine(
        &engine(&file, Precision::Q8),
        &mut twin(Element::F32),
        32,
    ));
    println!("{family} {shape:?}, q8_0 weights: {quantised}");
    assert!(quantised.mean_kl() <= 1e-2 && quantised.same_choices(), "{family} {shape:?}: {quantised}");
}

#[test]
fn qwen2_with_its_biases_gives_the_logits_of_candle() {
    check("qwen2", (896, 1024, 2, 14, 2, 64), true, json!({}));
    check("qwen2", (160, 320, 3, 5, 1, 32), false, json!({ "rope_theta": 1e6 }));
    check("qwen2", (192, 256, 2, 6, 6, 32), true, json!({}));
}

#[test]
fn qwen3_with_its_head_norms_gives_the_logits_of_candle() {
    check("qwen3", (256, 512, 2, 16, 8, 128), true, json!({ "rope_theta": 1e6 }));
    check("qwen3", (96, 160, 3, 9, 3, 64), false, json!({}));
    check("qwen3", (128, 192, 2, 7, 7, 16), true, json!({}));
}

#[test]
fn gemma_3_with_its_windows_gives_the_logits_of_candle() {
    let extra = |window, every, dim| {
        json!({ "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": dim, "sliding_window": window,
            "sliding_window_pattern": every, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "attn_logit_softcapping": null, "final_logit_softcapping": null, "hidden_act": "gelu_pytorch_tanh" })
    };
    check("gemma3_text", (160, 256, 7, 4, 1, 64), true, extra(24, 3, 64));
    check("gemma3_text", (128, 192, 6, 4, 2, 32), true, extra(16, 6, 32));
    check("gemma3_text", (96, 160, 4, 3, 3, 128), true, extra(200, 2, 128));
}

#[test]
fn llama_gives_the_logits_of_candle_also_with_llama3_s_scaled_rotation() {
    check("llama", (576, 768, 2, 9, 3, 64), true, json!({}));
    check("llama", (352, 416, 2, 11, 1, 32), false, json!({}));
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    check("llama", (256, 512, 3, 4, 2, 64), true, json!({ "rope_theta": 500000.0, "rope_scaling": scaling }));
}
