//! One answer: prompt in, text out, with the times and counts that people ask about.
//!
//! Invariant: position `n` of the sequence is `tokens()[n]`; a token is in the KV store once [`Answer`] has stepped
//! over it, so a store that already holds the first tokens (a shared prefix) gives the same answer.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::kv::KvStore;
use crate::load::Loaded;
use crate::model::Logits;
use crate::sampler::Sampler;
use crate::text::{Message, Text};

/// Tokens per step of a prompt. Larger chunks gain nothing on a CPU and hold more activations.
pub const CHUNK: usize = 256;

/// A rendered and tokenised conversation.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Its tokens, up to where the answer begins.
    pub ids: Vec<u32>,
    /// The first tokens that every conversation with this system prompt has in common: what is worth sharing.
    pub common: usize,
}

impl Prompt {
    /// A conversation of an optional system prompt and one question.
    pub fn new(text: &Text, system: Option<&str>, question: &str) -> Result<Self> {
        let encode = |question: &str| {
            let system = system.map(|s| Message::new("system", s));
            let chat: Vec<_> = system.into_iter().chain([Message::new("user", question)]).collect();
            text.encode(&text.render(&chat, true)?)
        };
        // Where two other questions part from this one, whatever the template does with a system prompt.
        let ids = encode(question)?;
        let same = |other: Vec<u32>| ids.iter().zip(other).take_while(|(a, b)| **a == *b).count();
        let common = same(encode("0")?).min(same(encode("X")?));
        Ok(Prompt { ids, common })
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model ended its turn.
    End,
    /// It reached the number of tokens asked for.
    MaxTokens,
    /// It reached the length of the context.
    Context,
}

impl Stop {
    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Stop::End => "end",
            Stop::MaxTokens => "max-tokens",
            Stop::Context => "context",
        }
    }
}

/// What an answer took.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// Tokens of the answer, its end token left out.
    pub generated: usize,
    /// From the start to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Why it ended.
    pub stop: Stop,
}

impl Outcome {
    /// Tokens decoded per second, the first left out: it belongs to the prompt.
    pub fn tokens_per_second(&self) -> f64 {
        self.generated.saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// An answer in the making.
#[derive(Debug)]
pub struct Answer<'a, K> {
    loaded: &'a Loaded,
    kv: &'a mut K,
    tokens: Vec<u32>,
    context: usize,
    began: Instant,
    logits: Vec<f32>,
}

impl<'a, K: KvStore> Answer<'a, K> {
    /// Computes the prompt from token `held` on; `kv` already holds those before it. `began` is when the time to the
    /// first token starts to count. `at_common` is called when the store ends with the prompt's common part: the time to
    /// publish it, since layers with a window soon drop what is read after it.
    pub fn begin(
        loaded: &'a Loaded,
        kv: &'a mut K,
        prompt: &Prompt,
        held: usize,
        context: usize,
        began: Instant,
        at_common: impl FnOnce(&mut K) -> Result<()>,
    ) -> Result<Self> {
        let ids = &prompt.ids;
        if ids.is_empty() || ids.len() >= context {
            return Err(Error::Context { start: 0, tokens: ids.len() + 1, limit: context });
        }
        kv.reserve(ids.len(), CHUNK)?;
        let mut logits = Vec::new();
        let mut at = held.min(ids.len() - 1);
        let mut at_common = Some(at_common);
        while at < ids.len() {
            let mut end = ids.len().min(at + CHUNK);
            if at < prompt.common {
                end = end.min(prompt.common);
            } else if let Some(at_common) = at_common.take() {
                at_common(kv)?;
            }
            let want = if end == ids.len() { Logits::Last } else { Logits::None };
            logits = loaded.model.step(kv, &ids[at..end], at, want)?;
            at = end;
        }
        Ok(Answer { loaded, kv, tokens: ids.clone(), context, began, logits })
    }

    /// Decodes up to `max_tokens` tokens and hands each piece of text to `show`.
    pub fn decode(
        mut self,
        sampler: &mut Sampler,
        max_tokens: usize,
        mut show: impl FnMut(&str),
    ) -> Result<Outcome> {
        let mut stream = self.loaded.text.stream();
        let mut token = sampler.pick(&self.logits);
        let first = Instant::now();
        let mut generated = 0;
        let stop = loop {
            if self.loaded.model.config().end_tokens.contains(&token) {
                break Stop::End;
            }
            generated += 1;
            show(&stream.push(token)?);
            if generated >= max_tokens {
                break Stop::MaxTokens;
            }
            let at = self.tokens.len();
            if at + 1 >= self.context {
                break Stop::Context;
            }
            self.tokens.push(token);
            self.logits = self.loaded.model.step(self.kv, &[token], at, Logits::Last)?;
            token = sampler.pick(&self.logits);
        };
        Ok(Outcome { generated, first_token: first - self.began, decode: first.elapsed(), stop })
    }
}
