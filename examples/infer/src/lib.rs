//! A small LLM engine whose KV cache lives in kvbroker's blocks: the example for authors of engines.
//!
//! What an engine must do to use kvbroker is all in [`kv`]; the rest is an ordinary engine on the field's crates:
//! candle for GGUF files and quantised matrix products, tokenizers, minijinja for chat templates.

pub mod config;
pub mod error;
pub mod generate;
pub mod kv;
pub mod load;
pub mod model;
pub mod rope;
pub mod sampler;
pub mod text;
pub mod weights;
