//! Holds the engine's logits against candle's own models: how the two are run on the same tokens, and by what
//! figures they are compared. The checks themselves are this package's tests.

use infer::kv::KvStore;
use infer::model::{Logits, Model};
use infer::sampler::argmax;

/// Tokens decoded after the prompt.
pub const DECODED: usize = 64;

/// A candle model: logits after the last of `tokens`, which stand at position `start` and after.
pub type Oracle<'a> = dyn FnMut(&[u32], usize) -> candle_core::Result<Vec<f32>> + 'a;

/// What the oracle said: the tokens it was fed, and its logits after the prompt and after each decoded token.
pub struct Reference {
    prompt: Vec<u32>,
    decoded: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

impl Reference {
    /// Feeds `prompt` in one piece, then [`DECODED`] tokens, each the most probable one.
    pub fn record(prompt: &[u32], oracle: &mut Oracle) -> Self {
        let mut logits = vec![oracle(prompt, 0).expect("the oracle runs")];
        let mut decoded = Vec::new();
        for n in 0..DECODED {
            let token = argmax(&logits[n]).0;
            decoded.push(token);
            logits.push(oracle(&[token], prompt.len() + n).expect("the oracle runs"));
        }
        Reference { prompt: prompt.to_vec(), decoded, logits }
    }

    /// Feeds the same tokens to another model, the prompt in chunks of `chunk`.
    pub fn rerun(&self, other: &mut Oracle, chunk: usize) -> Self {
        let mut last = Vec::new();
        for (n, tokens) in self.prompt.chunks(chunk).enumerate() {
            last = other(tokens, n * chunk).expect("the model runs");
        }
        let mut logits = vec![last];
        for (n, token) in self.decoded.iter().enumerate() {
            logits.push(other(&[*token], self.prompt.len() + n).expect("the model runs"));
        }
        Reference { prompt: self.prompt.clone(), decoded: self.decoded.clone(), logits }
    }

    /// Feeds the same tokens to the engine.
    pub fn rerun_engine(&self, model: &Model, kv: &mut impl KvStore, chunk: usize) -> Self {
        let mut run =
            |tokens: &[u32], start| Ok(model.step(kv, tokens, start, Logits::Last).expect("the engine runs"));
        self.rerun(&mut run, chunk)
    }

    /// How far `other` lies from this one.
    pub fn figures(&self, other: &Reference) -> Figures {
        assert!(self.decoded == other.decoded, "two runs over different tokens");
        let mut figures = Figures::default();
        for (ours, theirs) in self.logits.iter().zip(&other.logits) {
            figures.add(ours, theirs);
        }
        figures
    }
}

/// How far the engine's logits lie from the oracle's.
#[derive(Debug, Default, Clone)]
pub struct Figures {
    /// Positions compared.
    pub positions: usize,
    /// The largest difference of two logits.
    pub max_diff: f32,
    /// Sum over the positions of KL(oracle || other), in nats.
    kl: f64,
    /// The oracle's lead of its best over its second token, wherever the engine prefers another token.
    disagreements: Vec<f32>,
    /// The smallest standard deviation of the oracle's logits at a position: near 0, nothing would be shown.
    pub min_spread: f64,
}

impl Figures {
    /// Mean KL divergence per position, in nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.positions as f64
    }

    /// Whether the engine's choice differs only where the oracle's first two lie closer than the largest difference.
    pub fn same_choices(&self) -> bool {
        self.disagreements.iter().all(|lead| *lead < self.max_diff)
    }

    fn add(&mut self, oracle: &[f32], engine: &[f32]) {
        assert_eq!(oracle.len(), engine.len(), "vocabularies differ");
        let diff = oracle.iter().zip(engine).map(|(a, b)| (a - b).abs());
        self.max_diff = diff.fold(self.max_diff, |m, d| if d > m || d.is_nan() { d } else { m });
        let (p, q) = (log_softmax(oracle), log_softmax(engine));
        self.kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        let (best, top) = argmax(oracle);
        if argmax(engine).0 != best {
            let others = oracle.iter().enumerate().filter(|(n, _)| *n != best as usize);
            let second = others.fold(f32::NEG_INFINITY, |m, (_, l)| m.max(*l));
            self.disagreements.push(top - second);
        }
        let n = oracle.len() as f64;
        let mean = oracle.iter().map(|l| f64::from(*l)).sum::<f64>() / n;
        let spread = (oracle.iter().map(|l| (f64::from(*l) - mean).powi(2)).sum::<f64>() / n).sqrt();
        self.min_spread = if self.positions == 0 { spread } else { self.min_spread.min(spread) };
        self.positions += 1;
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} positions: max |difference| {:.3e}, mean KL {:.3e}, other choice at {} (leads {:?}), spread >= {:.2}",
            self.positions,
            self.max_diff,
            self.mean_kl(),
            self.disagreements.len(),
            self.disagreements,
            self.min_spread
        )
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = f64::from(argmax(logits).1);
    let sum: f64 = logits.iter().map(|l| (f64::from(*l) - top).exp()).sum();
    logits.iter().map(|l| f64::from(*l) - top - sum.ln()).collect()
}
