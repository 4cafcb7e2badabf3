//! Why a model cannot be loaded or run, in words for the person who started it.

use std::path::PathBuf;

use thiserror::Error;

use crate::kv::KvError;

/// What went wrong, and with which file or tensor.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error(
        "there is no {0}: run scripts/fetch-model, which downloads it (with the argument gemma, if it is Gemma)"
    )]
    NoModel(PathBuf),
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is no model that this engine can load: {why}")]
    Unsupported { path: PathBuf, why: String },
    #[error("{what} says {found}; this engine needs {needs}")]
    Config { what: &'static str, found: String, needs: &'static str },
    #[error("the model's tensor {name} has shape {found:?}, its configuration asks for {expected:?}")]
    TensorShape { name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("the model has no tensor {0}")]
    NoTensor(String),
    #[error("the model's metadata has no {0}")]
    NoMetadata(String),
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token { token: u32, vocab: usize },
    #[error("a step from token {start} on needs {tokens} tokens of context, the model was made for {limit}")]
    Context { start: usize, tokens: usize, limit: usize },
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    #[error("chat template: {0}")]
    Template(String),
    #[error(transparent)]
    Kv(#[from] KvError),
    #[error("tensor library: {0}")]
    Candle(#[from] candle_core::Error),
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;
