//! Gemma 3 270M against candle's `gemma3`, over a prompt longer than the window. The model is not fetched by default
//! (its licence is not for shipping): `scripts/fetch-model gemma`, then `cargo test -p oracle --test gemma3 -- --ignored`.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;

use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::gemma3;
use infer::kv::Twin;
use infer::load::{cached_gemma3, load_weights};
use infer::weights::Precision;
use kvbroker::attention::Element;
use oracle::{DECODED, Reference};
use serde_json::json;

const CPU: Device = Device::Cpu;
/// 40 tokens beyond the window.
const PROMPT: usize = 552;

/// The file's weights, widened, under the names and with the conventions of a Hugging Face checkpoint.
fn checkpoint() -> HashMap<String, Tensor> {
    let mut file = BufReader::new(File::open(cached_gemma3().unwrap_or_else(|e| panic!("{e}"))).unwrap());
    let content = gguf_file::Content::read(&mut file).unwrap();
    let parts = [
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    let mut names = vec![
        ("token_embd.weight".to_owned(), "model.embed_tokens.weight".to_owned()),
        ("output_norm.weight".to_owned(), "model.norm.weight".to_owned()),
    ];
    for layer in 0..18 {
        let both = parts.map(|(theirs, ours)| {
            (format!("blk.{layer}.{theirs}.weight"), format!("model.layers.{layer}.{ours}.weight"))
        });
        names.extend(both);
    }
    let tensor = |(theirs, ours): (String, String)| {
        let tensor = content.tensor(&mut file, &theirs, &CPU).unwrap().dequantize(&CPU).unwrap();
        let tensor = if tensor.dims().len() == 1 { (tensor - 1.0).unwrap() } else { tensor };
        (ours, tensor)
    };
    names.into_iter().map(tensor).collect()
}

#[test]
#[ignore = "the model is fetched by scripts/fetch-model gemma only"]
fn the_logits_are_those_of_candle_beyond_the_window() {
    let config = json!({
        "attention_bias": false, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
        "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262144,
        "final_logit_softcapping": null, "attn_logit_softcapping": null, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 1024,
    });
    let config: gemma3::Config = serde_json::from_value(config).unwrap();
    let weights = VarBuilder::from_tensors(checkpoint(), DType::F32, &CPU);
    let mut candle = gemma3::Model::new(false, &config, weights).unwrap();
    // Text has a token for the beginning, then tokens of words.
    let prompt: Vec<u32> =
        (0..PROMPT as u32).map(|i| if i == 0 { 2 } else { 500 + (i * 37) % 211 }).collect();
    // Token by token: see families.rs.
    let exact = Reference::record(&prompt, &mut |tokens, start| {
        let mut last = Vec::new();
        for (n, token) in tokens.iter().enumerate() {
            let token = Tensor::new(&[*token], &CPU)?.unsqueeze(0)?;
            last = candle.forward(&token, start + n)?.flatten_all()?.to_vec1()?;
        }
        Ok(last)
    });
    let engine = load_weights(&cached_gemma3().unwrap(), Precision::F32).unwrap();
    let twin = |element| Twin::new(engine.geometry(), element, PROMPT + DECODED);
    let same = exact.figures(&exact.rerun_engine(&engine, &mut twin(Element::F32), 100));
    println!("Gemma 3 270M, f32 weights, f32 KV: {same}");
    assert!(same.max_diff <= 1e-2 && same.mean_kl() <= 1e-8 && same.same_choices(), "{same}");
    assert!(same.min_spread > 1.0, "{same}");
    let half = exact.figures(&exact.rerun_engine(&engine, &mut twin(Element::F16), 100));
    println!("Gemma 3 270M, f32 weights, f16 KV: {half}");
    assert!(half.mean_kl() <= 1e-3 && half.same_choices(), "{half}");
}
