//! What a model's own files say about its KV geometry: from a Hugging Face `config.json` or a GGUF header to a
//! [`Profile`].
//!
//! Owns the list of families it understands. Invariant: files are from outside. Nothing in them makes the reader
//! panic, loop, or allocate more than a fixed amount; a family or a field it does not understand is refused by name,
//! never guessed; whatever it had to assume stands in [`ModelShape::notes`].

pub mod gguf;
pub mod hf;

use crate::profile::{Group, Layer, Layout, MAX_LAYERS, Profile, ProfileError};
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// The largest `config.json` that is read. Real ones have a few KiB.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The most attention heads, and KV heads, of a layer.
pub const MAX_HEADS: u32 = 1 << 12;
/// The largest dimension of a head.
pub const MAX_HEAD_DIM: u32 = 1 << 14;
/// The largest embedding, sliding window or context, in elements or tokens.
pub const MAX_LENGTH: u32 = 1 << 30;

/// A model file that could not be used, and why.
#[derive(Debug, Error)]
#[error("{}: {fault}", .path.display())]
pub struct ModelError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Fault,
}

/// What is wrong with a model's description. Fields are named as the file names them.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum Fault {
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("is no regular file: give a config.json, a directory that holds one, or a GGUF file")]
    NotAFile,
    #[error("the directory holds no config.json: give the file itself")]
    NoConfig,
    #[error("is empty: expected a config.json or a GGUF file")]
    Empty,
    #[error(
        "has {bytes} bytes, more than the {MAX_CONFIG_BYTES} of a config.json, and does not begin with GGUF"
    )]
    TooLarge { bytes: u64 },
    #[error("begins with a byte order mark, which JSON does not allow: save it as UTF-8 without one")]
    ByteOrderMark,
    #[error("is no valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the field {field} is missing{hint}")]
    Missing { field: String, hint: &'static str },
    #[error("the field {field} is {found}: expected {expected}")]
    Wrong { field: String, found: String, expected: String },
    #[error("{field} is {value}, a family that is not known here: known are {known}", known = Family::known())]
    UnknownFamily { field: &'static str, value: String },
    #[error("ends at byte {offset}, within {what}: the file is cut short")]
    Truncated { offset: u64, what: String },
    #[error("is no usable GGUF file: at byte {offset}, {what}")]
    Gguf { offset: u64, what: String },
}

/// Why a model with a KV element type is no profile.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum ShapeError {
    #[error("layer {layer}: {source}")]
    Row { layer: u32, source: RowError },
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// Why a row has no size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum RowError {
    #[error("a row of {values} values is not a whole number of {kv} blocks of {block}: use f16 or int8")]
    NotWholeBlocks { kv: KvType, values: u64, block: u64 },
    #[error("a row of {values} values in {kv} takes more than 32 bits of bytes")]
    TooLarge { kv: KvType, values: u64 },
}

/// The element type of K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvType {
    /// IEEE half precision, 2 bytes.
    #[default]
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE single precision, 4 bytes.
    F32,
    /// One byte each; scales are kept elsewhere.
    Int8,
    /// ggml's 8-bit blocks: 32 values and an f16 scale in 34 bytes.
    Q8_0,
    /// ggml's 4-bit blocks: 32 values and an f16 scale in 18 bytes.
    Q4_0,
}

impl KvType {
    /// All of them.
    pub const ALL: [KvType; 6] =
        [KvType::F16, KvType::Bf16, KvType::F32, KvType::Int8, KvType::Q8_0, KvType::Q4_0];

    /// Their names, for people.
    pub fn names() -> String {
        let [others @ .., last] = Self::ALL.map(KvType::name);
        format!("{} or {last}", others.join(", "))
    }

    /// Its name, and `(values, bytes)` of the smallest unit: ggml-common.h's `block_q8_0` and `block_q4_0` for the block
    /// formats.
    const fn facts(self) -> (&'static str, (u64, u64)) {
        match self {
            KvType::F16 => ("f16", (1, 2)),
            KvType::Bf16 => ("bf16", (1, 2)),
            KvType::F32 => ("f32", (1, 4)),
            KvType::Int8 => ("int8", (1, 1)),
            KvType::Q8_0 => ("q8_0", (32, 34)),
            KvType::Q4_0 => ("q4_0", (32, 18)),
        }
    }

    /// The name on the command line and in a profile.
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// Bytes of a row of `values` values. Block formats need whole blocks of 32.
    pub fn row_bytes(self, values: u64) -> Result<u32, RowError> {
        let (block, bytes) = self.facts().1;
        if values % block != 0 {
            return Err(RowError::NotWholeBlocks { kv: self, values, block });
        }
        (values / block)
            .checked_mul(bytes)
            .and_then(|b| u32::try_from(b).ok())
            .ok_or(RowError::TooLarge { kv: self, values })
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that is no [`KvType`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{:?} is no KV element type: use {}", .0, KvType::names())]
pub struct UnknownKvType(String);

impl FromStr for KvType {
    type Err = UnknownKvType;
    fn from_str(text: &str) -> Result<Self, UnknownKvType> {
        KvType::ALL
            .into_iter()
            .find(|kv| kv.name() == text)
            .ok_or_else(|| UnknownKvType(text.chars().take(40).collect()))
    }
}

/// The families whose attention is understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 2 and 3, TinyLlama, SmolLM2 and the many models that call themselves `llama`.
    Llama,
    /// Mistral.
    Mistral,
    /// SmolLM3.
    SmolLm3,
    /// Qwen1.5, Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Gemma 2: every second layer has a sliding window.
    Gemma2,
    /// Gemma 3: five layers of six have a sliding window.
    Gemma3,
}

impl Family {
    /// `(tag, family)`: `model_type` of a config.json, or `general.architecture` of a GGUF file.
    const TAGS: [(&'static str, Family); 8] = [
        ("llama", Family::Llama),
        ("mistral", Family::Mistral),
        ("smollm3", Family::SmolLm3),
        ("qwen2", Family::Qwen2),
        ("qwen3", Family::Qwen3),
        ("gemma2", Family::Gemma2),
        ("gemma3", Family::Gemma3),
        ("gemma3_text", Family::Gemma3),
    ];

    fn from_tag(field: &'static str, tag: &str) -> Result<Self, Fault> {
        Family::TAGS
            .iter()
            .find(|(known, _)| *known == tag)
            .map(|(_, family)| *family)
            .ok_or_else(|| Fault::UnknownFamily { field, value: quote(tag) })
    }

    fn known() -> String {
        Family::TAGS.map(|(tag, _)| tag).join(", ")
    }

    /// The tag by which files name the family.
    pub fn name(self) -> &'static str {
        Family::TAGS.iter().find(|(_, family)| *family == self).map_or("", |(tag, _)| tag)
    }

    /// Every how many layers one keeps all tokens, where the family alternates and the file does not say.
    fn global_every(self) -> Option<u32> {
        match self {
            Family::Gemma2 => Some(2),
            Family::Gemma3 => Some(6),
            _ => None,
        }
    }
}

/// One layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerShape {
    /// KV heads.
    pub kv_heads: u32,
    /// Dimension of a K head.
    pub k_dim: u32,
    /// Dimension of a V head.
    pub v_dim: u32,
    /// Sliding window in tokens; `None` keeps all.
    pub window: Option<u32>,
}

/// What a model file says about attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    /// The family.
    pub family: Family,
    /// The model's name: printable, and short.
    pub name: String,
    /// Query heads.
    pub heads: u32,
    /// The longest context that the file states.
    pub context: Option<u32>,
    /// The layers in order: 1 to [`MAX_LAYERS`].
    pub layers: Vec<LayerShape>,
    /// What was assumed because the file does not say it, in sentences.
    pub notes: Vec<String>,
}

impl ModelShape {
    /// Reads a `config.json`, the one in a directory, or the header of a GGUF file, told apart by its first bytes.
    pub fn from_path(path: &Path) -> Result<Self, ModelError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |fault: Fault| ModelError { path, fault }
        };
        let meta = std::fs::metadata(path).map_err(|e| at(path)(e.into()))?;
        if !meta.is_dir() {
            return read_file(path).map_err(at(path));
        }
        let config = path.join("config.json");
        if !config.exists() {
            return Err(at(path)(Fault::NoConfig));
        }
        read_file(&config).map_err(at(&config))
    }

    /// The profile of this model with K and V in `kv`: layers that keep the same tokens form a group, those that
    /// keep all first.
    pub fn profile(&self, kv: KvType, tokens_per_block: u32) -> Result<Profile, ShapeError> {
        let mut windows: Vec<Option<u32>> = self.layers.iter().map(|l| l.window).collect();
        windows.sort_unstable();
        windows.dedup();
        let mut groups = Vec::with_capacity(windows.len());
        for window in windows {
            let mut layers = Vec::new();
            for (number, layer) in (0u32..).zip(&self.layers).filter(|(_, l)| l.window == window) {
                let row = |dim: u32| {
                    kv.row_bytes(u64::from(layer.kv_heads) * u64::from(dim))
                        .map_err(|source| ShapeError::Row { layer: number, source })
                };
                layers.push((number, Layer { k_row: row(layer.k_dim)?, v_row: row(layer.v_dim)? }));
            }
            groups.push(Group { layers, window });
        }
        Ok(Profile::new(&*self.name, kv.name(), Layout::PlaneMajor, tokens_per_block, groups)?)
    }
}

fn read_file(path: &Path) -> Result<ModelShape, Fault> {
    // Looked at before it is opened: opening a FIFO would wait for a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(Fault::NotAFile);
    }
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    if bytes == 0 {
        return Err(Fault::Empty);
    }
    let mut magic = [0; 4];
    let is_gguf = bytes >= 4 && file.read_exact(&mut magic).is_ok() && magic == gguf::MAGIC;
    file.seek(SeekFrom::Start(0))?;
    let name = fallback_name(path);
    if is_gguf {
        return gguf::parse(BufReader::new(file), bytes, &name);
    }
    if bytes > MAX_CONFIG_BYTES {
        return Err(Fault::TooLarge { bytes });
    }
    let mut text = Vec::new();
    // The file may grow while it is read.
    file.take(MAX_CONFIG_BYTES).read_to_end(&mut text)?;
    hf::parse(&text, &name)
}

/// What to call a model whose file has no name for it: the directory of a `config.json`, else the file's stem.
fn fallback_name(path: &Path) -> String {
    let stem = path.file_stem();
    let directory = path.parent().and_then(Path::file_name);
    let chosen = if path.file_name().is_some_and(|n| n == "config.json") { directory.or(stem) } else { stem };
    printable(&chosen.unwrap_or_default().to_string_lossy()).unwrap_or_else(|| "model".to_owned())
}

/// A name from outside, fit for a terminal: at most 80 characters, none of them a control. `None` if nothing is left.
fn printable(name: &str) -> Option<String> {
    let kept: String = name.chars().filter(|c| !crate::quote::is_tricky(*c)).take(80).collect();
    let kept = kept.trim();
    if kept.is_empty() { None } else { Some(kept.to_owned()) }
}

/// A text from outside in quotes, cut and escaped so that it can stand in a message.
fn quote(text: &str) -> String {
    let cut: String = text.chars().take(40).collect();
    let dots = if cut.len() < text.len() { "..." } else { "" };
    format!("\"{}\"{dots}", cut.escape_debug())
}

/// What both formats say, once read from their fields.
struct Parts {
    family: Family,
    name: String,
    heads: u32,
    context: Option<u32>,
    kv_heads: Vec<u32>,
    k_dim: u32,
    v_dim: u32,
    windows: Vec<Option<u32>>,
    notes: Vec<String>,
}

impl Parts {
    /// Joins what was read; `field` names the count of KV heads in the file at hand.
    fn join(self, field: &str) -> Result<ModelShape, Fault> {
        if let Some(odd) = self.kv_heads.iter().find(|kv| **kv == 0 || self.heads % **kv != 0) {
            return Err(Fault::Wrong {
                field: field.to_owned(),
                found: odd.to_string(),
                expected: format!("a divisor of the {} attention heads", self.heads),
            });
        }
        let layers = self
            .kv_heads
            .iter()
            .zip(&self.windows)
            .map(|(&kv_heads, &window)| LayerShape { kv_heads, k_dim: self.k_dim, v_dim: self.v_dim, window })
            .collect();
        Ok(ModelShape {
            family: self.family,
            name: self.name,
            heads: self.heads,
            context: self.context,
            layers,
            notes: self.notes,
        })
    }
}

/// The window of each of `layers` layers when every `every`-th keeps all tokens.
fn alternate(layers: u32, every: u32, window: u32) -> Vec<Option<u32>> {
    (1..=layers).map(|n| if n % every == 0 { None } else { Some(window) }).collect()
}

/// A number of a field, within its bounds.
fn within(field: &str, number: u64, most: u32) -> Result<u32, Fault> {
    u32::try_from(number)
        .ok()
        .filter(|n| (1..=most).contains(n))
        .ok_or_else(|| wrong_number(field, number.to_string(), most))
}

fn wrong_number(field: &str, found: String, most: u32) -> Fault {
    Fault::Wrong { field: field.to_owned(), found, expected: format!("a whole number from 1 to {most}") }
}

/// The head dimension of a file that does not state it.
fn derived_head_dim(field: &str, embedding: u32, heads: u32) -> Result<u32, Fault> {
    if embedding % heads != 0 {
        return Err(Fault::Wrong {
            field: field.to_owned(),
            found: embedding.to_string(),
            expected: format!(
                "a multiple of the {heads} attention heads, or the head dimension in a field of its own"
            ),
        });
    }
    Ok(embedding / heads)
}

const MOST_LAYERS: u32 = MAX_LAYERS as u32;

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(layers: Vec<LayerShape>) -> ModelShape {
        ModelShape { family: Family::Llama, name: "m".into(), heads: 4, context: None, layers, notes: vec![] }
    }

    #[test]
    fn rows_have_the_bytes_of_their_element_type() {
        let rows = |kv: KvType| (kv.row_bytes(128).unwrap(), kv.row_bytes(192).unwrap());
        assert_eq!(rows(KvType::F16), (256, 384));
        assert_eq!(rows(KvType::Bf16), (256, 384));
        assert_eq!(rows(KvType::F32), (512, 768));
        assert_eq!(rows(KvType::Int8), (128, 192));
        assert_eq!(rows(KvType::Q8_0), (136, 204));
        assert_eq!(rows(KvType::Q4_0), (72, 108));
        let odd = KvType::Q8_0.row_bytes(80);
        assert_eq!(odd, Err(RowError::NotWholeBlocks { kv: KvType::Q8_0, values: 80, block: 32 }));
        assert!(KvType::F32.row_bytes(u64::MAX).is_err());
    }

    #[test]
    fn element_types_read_by_name() {
        for kv in KvType::ALL {
            assert_eq!(kv.name().parse(), Ok(kv));
        }
        assert!("fp16".parse::<KvType>().unwrap_err().to_string().contains("use f16"));
    }

    #[test]
    fn layers_that_keep_the_same_tokens_form_a_group_and_those_that_keep_all_come_first() {
        let layer = |window| LayerShape { kv_heads: 1, k_dim: 64, v_dim: 32, window };
        let p = shape(vec![layer(Some(8)), layer(None), layer(Some(8))]).profile(KvType::F16, 16).unwrap();
        assert_eq!(p.groups()[0], Group { layers: vec![(1, Layer { k_row: 128, v_row: 64 })], window: None });
        assert_eq!(p.groups()[1].layers.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(p.groups()[1].window, Some(8));
        assert_eq!(p.element(), "f16");
    }

    #[test]
    fn a_block_format_that_does_not_fit_the_row_names_the_layer() {
        let layers = vec![LayerShape { kv_heads: 1, k_dim: 80, v_dim: 80, window: None }];
        let said = shape(layers).profile(KvType::Q4_0, 16).unwrap_err().to_string();
        assert!(said.contains("layer 0") && said.contains("80 values") && said.contains("q4_0"), "{said}");
    }

    #[test]
    fn a_name_from_a_file_cannot_write_to_the_terminal() {
        assert_eq!(printable("\u{1b}[2Jmodel\n").as_deref(), Some("[2Jmodel"));
        assert_eq!(printable("\n\t "), None);
        assert_eq!(printable(&"x".repeat(1000)).map(|n| n.len()), Some(80));
        assert_eq!(quote("a\u{1b}b"), "\"a\\u{1b}b\"");
    }
}
