//! Opening a model: a GGUF file, or a directory with config.json, model.safetensors and tokenizer.json.
//!
//! Invariant: two loads have the same fingerprint only if their keys and values are interchangeable: the same bytes
//! of weights, read at the same precision, by the same computation.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::text::Text;
use crate::weights::{Precision, Source};

/// Changes whenever the engine's arithmetic does: KV of two versions must not be mixed.
const COMPUTATION: &str = "infer-1";

/// A model with its text side.
#[derive(Debug)]
pub struct Loaded {
    /// The weights.
    pub model: Model,
    /// Tokenizer and chat template.
    pub text: Text,
    /// What the broker shares prefixes by.
    pub fingerprint: String,
    /// The file's or directory's name, for people.
    pub name: String,
}

/// Opens the GGUF file or model directory at `path`.
pub fn load(path: &Path, precision: Precision) -> Result<Loaded> {
    let (mut source, config, text, hashed) = if path.is_dir() {
        let files = safetensors_in(path)?;
        let config_path = path.join("config.json");
        let mut config = Config::from_hf(&read(&config_path)?)?;
        let text = Text::from_dir(path)?;
        end_tokens_of_generation(path, &mut config);
        let mut hashed = files.clone();
        hashed.push(config_path);
        (Source::safetensors(&files)?, config, text, hashed)
    } else {
        let mut file = BufReader::new(open(path)?);
        let content = Content::read(&mut file)
            .map_err(|e| Error::Unsupported { path: path.into(), why: format!("not a GGUF file ({e})") })?;
        let mut config = Config::from_gguf(&content)?;
        let text = Text::from_gguf(&content)?;
        // Chat models end a turn with this token, whatever the file calls its end of text.
        for id in ["<|im_end|>", "<|endoftext|>"].iter().filter_map(|t| text.id(t)) {
            if !config.end_tokens.contains(&id) {
                config.end_tokens.push(id);
            }
        }
        (Source::Gguf(Box::new(content), file), config, text, vec![path.to_owned()])
    };
    let model = Model::load(config, &mut source, precision)?;
    let fingerprint = fingerprint(&hashed, precision)?;
    let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(Loaded { model, text, fingerprint, name })
}

fn fingerprint(files: &[PathBuf], precision: Precision) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{COMPUTATION} {precision:?} {} files", files.len()));
    let mut buffer = vec![0; 1 << 20];
    for path in files {
        let mut file = open(path)?;
        let length = file.metadata().map_err(|source| Error::Read { path: path.clone(), source })?.len();
        hash.update(length.to_le_bytes());
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => hash.update(&buffer[..n]),
                Err(source) => return Err(Error::Read { path: path.clone(), source }),
            }
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// `model.safetensors`, or the shards that `model.safetensors.index.json` names.
fn safetensors_in(dir: &Path) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let whole = dir.join("model.safetensors");
    let index = dir.join("model.safetensors.index.json");
    if whole.exists() || !index.exists() {
        open(&whole)?;
        return Ok(vec![whole]);
    }
    let parsed: Index = serde_json::from_str(&read(&index)?)
        .map_err(|e| Error::Unsupported { path: index.clone(), why: e.to_string() })?;
    let mut names: Vec<String> = parsed.weight_map.into_values().collect();
    names.sort();
    names.dedup();
    // A shard is a file beside its index, never a way out of the directory.
    if let Some(name) = names.iter().find(|n| Path::new(n).components().count() != 1 || n.starts_with("..")) {
        return Err(Error::Unsupported { path: index, why: format!("it names the shard {name:?}") });
    }
    Ok(names.into_iter().map(|n| dir.join(n)).collect())
}

/// `generation_config.json` names the tokens that end a turn; `config.json` often only the end of text.
fn end_tokens_of_generation(dir: &Path, config: &mut Config) {
    let Ok(json) = std::fs::read_to_string(dir.join("generation_config.json")) else { return };
    let Ok(value) = serde_json::from_str::<serde_json::Value>(&json) else { return };
    let ids = match &value["eos_token_id"] {
        serde_json::Value::Array(ids) => ids.as_slice(),
        one => std::slice::from_ref(one),
    };
    for id in ids.iter().filter_map(|id| id.as_u64()).filter_map(|id| u32::try_from(id).ok()) {
        if !config.end_tokens.contains(&id) {
            config.end_tokens.push(id);
        }
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| Error::Read { path: path.into(), source })
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.into(), source })
}

/// Opens the weights of a GGUF file alone, without its tokenizer.
pub fn load_weights(path: &Path, precision: Precision) -> Result<Model> {
    let mut file = BufReader::new(open(path)?);
    let content = Content::read(&mut file)
        .map_err(|e| Error::Unsupported { path: path.into(), why: format!("not a GGUF file ({e})") })?;
    let config = Config::from_gguf(&content)?;
    Model::load(config, &mut Source::Gguf(Box::new(content), file), precision)
}

/// The file that `scripts/fetch-model` puts into the cache.
pub const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// The file that `scripts/fetch-model gemma` puts there.
pub const GEMMA3: &str = "gemma-3-270m-q4_k_m.gguf";

/// The SmolLM2 in the cache, `${KVBROKER_CACHE:-$HOME/.cache/kvbroker}/models`.
pub fn cached_smollm2() -> Result<PathBuf> {
    cached(SMOLLM2)
}

/// The Gemma 3 270M in the cache.
pub fn cached_gemma3() -> Result<PathBuf> {
    cached(GEMMA3)
}

fn cached(name: &str) -> Result<PathBuf> {
    let cache = match std::env::var_os("KVBROKER_CACHE") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/kvbroker"),
    };
    let path = cache.join("models").join(name);
    if path.exists() { Ok(path) } else { Err(Error::NoModel(path)) }
}
