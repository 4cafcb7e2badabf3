//! `config.json` of Hugging Face models.

use kvbroker::model::{KvType, ModelShape, hf};
use serde_json::Value;

/// What stands in such files.
pub const WORDS: &[&[u8]] = &[
    b"\"model_type\"",
    b"\"num_hidden_layers\"",
    b"\"num_attention_heads\"",
    b"\"num_key_value_heads\"",
    b"\"head_dim\"",
    b"\"hidden_size\"",
    b"\"sliding_window\"",
    b"\"sliding_window_pattern\"",
    b"\"use_sliding_window\"",
    b"\"max_window_layers\"",
    b"\"layer_types\"",
    b"\"text_config\"",
    b"\"gemma3\"",
    b"\"qwen2\"",
    b"\"mistral\"",
    b"null",
    b"true",
    b"[",
    b"{",
    b":",
    b",",
];

/// Files of each family.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "smollm3"]
        .iter()
        .map(|family| {
            format!(
                r#"{{"model_type":"{family}","num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":64,"hidden_size":512,"max_position_embeddings":4096,"sliding_window":128,"use_sliding_window":true,"max_window_layers":2,"_name_or_path":"a/b"}}"#
            )
            .into_bytes()
        })
        .collect();
    seeds.push(br#"{"model_type":"gemma3","text_config":{"num_hidden_layers":2,"hidden_size":64,"sliding_window":8,"layer_types":["full_attention","sliding_attention"]}}"#.to_vec());
    seeds
}

/// The layers of a shape must be those of the profile that is made of it.
pub(super) fn check_shape(shape: &ModelShape) {
    assert!(!shape.layers.is_empty() && !shape.name.chars().any(char::is_control));
    for kv in KvType::ALL {
        for tokens in [1, 16, 3, 1 << 16, u32::MAX] {
            match shape.profile(kv, tokens) {
                Ok(profile) => {
                    let layers: usize = profile.groups().iter().map(|g| g.layers.len()).sum();
                    assert_eq!(layers, shape.layers.len());
                    let _ = profile.bytes_at(u64::from(u32::MAX));
                }
                Err(e) => super::check_words(&e),
            }
        }
    }
}

/// A file says the same however its JSON is laid out.
pub fn run(data: &[u8]) -> bool {
    let most = (4 << 20) + 64 * data.len();
    match super::alloc::at_most(most, "reading a config.json", || hf::parse(data, "fallback")) {
        Ok(shape) => {
            check_shape(&shape);
            let value: Value = serde_json::from_slice(data).expect("it was read as JSON before");
            let pretty = serde_json::to_vec_pretty(&value).expect("JSON can be written");
            let again = hf::parse(&pretty, "fallback").expect("the same values are accepted again");
            assert_eq!(format!("{again:?}"), format!("{shape:?}"));
            true
        }
        Err(e) => {
            super::check_words(&e);
            false
        }
    }
}
