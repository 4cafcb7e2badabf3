//! Between text and token ids: the tokenizer and the chat template that come with a model.
//!
//! Invariant: ids are those of the model's own tokenizer, to the id. A GGUF tokenizer of a kind that has not been
//! checked against llama.cpp is refused, because one wrong split makes a model quietly worse.

use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde::{Deserialize, Serialize};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

use crate::config::{gguf_count, gguf_string};
use crate::error::{Error, Result};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into() }
    }
}

/// A model's tokenizer and chat template.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    template: Environment<'static>,
    bos: String,
    eos: String,
}

const CHAT: &str = "chat";

impl Text {
    /// From the header of a GGUF file.
    pub fn from_gguf(content: &Content) -> Result<Self> {
        let (model, pre) =
            (gguf_string(content, "tokenizer.ggml.model")?, gguf_string(content, "tokenizer.ggml.pre")?);
        if (model, pre) != ("gpt2", "smollm") {
            return Err(Error::Tokenizer(format!(
                "the file's is {model} with pre-tokenizer {pre}; from a GGUF file only gpt2 with smollm is known. \
                 Load the model from a directory with tokenizer.json"
            )));
        }
        let tokens = strings(content, "tokenizer.ggml.tokens")?;
        let merges = strings(content, "tokenizer.ggml.merges")?
            .into_iter()
            .map(|m| match m.split_once(' ') {
                Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
                None => Err(Error::Tokenizer(format!("the merge {m:?} has no two parts"))),
            })
            .collect::<Result<Vec<_>>>()?;
        let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
        let bpe = BPE::builder().vocab_and_merges(vocab, merges).build().map_err(tokenizer_error)?;
        let mut tokenizer = Tokenizer::new(bpe);
        // llama.cpp's `smollm`: every digit by itself, then GPT-2's split, without a space added in front.
        let bytes = ByteLevel::new(false, true, true);
        tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![Digits::new(true).into(), bytes.into()])));
        tokenizer.with_decoder(Some(bytes));
        let special: Vec<AddedToken> = match content.metadata.get("tokenizer.ggml.token_type") {
            // 3 is "control" and 4 "user defined" in llama.cpp's llama_token_type.
            Some(Value::Array(types)) => types
                .iter()
                .zip(&tokens)
                .filter(|(t, _)| matches!(t, Value::I32(3 | 4) | Value::U32(3 | 4)))
                .map(|(_, token)| AddedToken::from(token.clone(), true).normalized(false))
                .collect(),
            _ => return Err(Error::NoMetadata("tokenizer.ggml.token_type".into())),
        };
        tokenizer.add_special_tokens(&special);
        let named = |key| {
            let id = gguf_count(content, key).ok();
            id.and_then(|id| tokens.get(id)).cloned().unwrap_or_default()
        };
        let template = gguf_string(content, "tokenizer.chat_template").ok().map(str::to_owned);
        Text::new(
            tokenizer,
            template,
            named("tokenizer.ggml.bos_token_id"),
            named("tokenizer.ggml.eos_token_id"),
        )
    }

    /// From a model directory: `tokenizer.json`, and `tokenizer_config.json` or `chat_template.jinja` for the template.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let tokenizer =
            Tokenizer::from_file(&path).map_err(|e| Error::Tokenizer(format!("{}: {e}", path.display())))?;
        let path = dir.join("tokenizer_config.json");
        let config: TokenizerConfig = match std::fs::read_to_string(&path) {
            Ok(json) => serde_json::from_str(&json)
                .map_err(|e| Error::Tokenizer(format!("{}: {e}", path.display())))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => TokenizerConfig::default(),
            Err(source) => return Err(Error::Read { path, source }),
        };
        let template = match std::fs::read_to_string(dir.join("chat_template.jinja")) {
            Ok(template) => Some(template),
            Err(_) => config.chat_template.and_then(Template::pick),
        };
        let text = |t: Option<Special>| t.map(Special::text).unwrap_or_default();
        Text::new(tokenizer, template, text(config.bos_token), text(config.eos_token))
    }

    fn new(tokenizer: Tokenizer, template: Option<String>, bos: String, eos: String) -> Result<Self> {
        let mut env = Environment::new();
        // What transformers gives a template: Python's methods, trimmed blocks, a way to refuse.
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(template_error)?;
        env.set_syntax(syntax);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |why: String| -> std::result::Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        if let Some(template) = template {
            env.add_template_owned(CHAT, template).map_err(template_error)?;
        }
        Ok(Text { tokenizer, template: env, bos, eos })
    }

    /// The conversation as the model was trained to read it; with `answer`, up to where its answer begins.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let template = self
            .template
            .get_template(CHAT)
            .map_err(|_| Error::Template("the model has none: it is no chat model".into()))?;
        let turn =
            |m: &Message| Jinja::from_pairs([("role", m.role.as_str()), ("content", m.content.as_str())]);
        let values = minijinja::context! {
            messages => messages.iter().map(turn).collect::<Jinja>(), add_generation_prompt => answer,
            bos_token => self.bos.as_str(), eos_token => self.eos.as_str(),
        };
        template.render(values).map_err(template_error)
    }

    /// The ids of rendered text, in which special tokens are written out.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_fast(text, false).map_err(tokenizer_error)?.get_ids().to_vec())
    }

    /// The text of `ids`, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(tokenizer_error)
    }

    /// The id of a token by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Text that grows token by token.
    pub fn stream(&self) -> Stream<'_> {
        Stream { text: self, ids: Vec::new(), shown: 0 }
    }
}

/// Turns tokens into text as they come: a character of several tokens appears when it is whole.
#[derive(Debug)]
pub struct Stream<'a> {
    text: &'a Text,
    /// The tokens since the last point where everything was shown.
    ids: Vec<u32>,
    /// Bytes of their text already shown.
    shown: usize,
}

impl Stream<'_> {
    /// What `id` adds to the text; empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let all = self.text.decode(&self.ids)?;
        if all.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        let new = all.get(self.shown..).unwrap_or_default().to_owned();
        // One token is kept, so that a decoder that looks at its predecessor sees one.
        self.ids.drain(..self.ids.len() - 1);
        self.shown = self.text.decode(&self.ids)?.len();
        Ok(new)
    }
}

#[derive(Deserialize, Default)]
struct TokenizerConfig {
    chat_template: Option<Template>,
    bos_token: Option<Special>,
    eos_token: Option<Special>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Template {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Template {
    fn pick(self) -> Option<String> {
        match self {
            Template::One(template) => Some(template),
            Template::Named(all) => all.into_iter().find(|t| t.name == "default").map(|t| t.template),
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Special {
    Text(String),
    Token { content: String },
}

impl Special {
    fn text(self) -> String {
        match self {
            Special::Text(t) | Special::Token { content: t } => t,
        }
    }
}

fn strings(content: &Content, key: &str) -> Result<Vec<String>> {
    let missing = || Error::NoMetadata(key.into());
    let Some(Value::Array(values)) = content.metadata.get(key) else { return Err(missing()) };
    values
        .iter()
        .map(|v| match v {
            Value::String(s) => Ok(s.clone()),
            _ => Err(missing()),
        })
        .collect()
}

fn tokenizer_error(e: tokenizers::Error) -> Error {
    Error::Tokenizer(e.to_string())
}

fn template_error(e: minijinja::Error) -> Error {
    Error::Template(format!("{e:#}"))
}
