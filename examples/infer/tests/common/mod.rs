//! What several tests need.

use infer::kv::KvStore;
use infer::load::{Loaded, cached_smollm2, load};
use infer::model::Logits;
use infer::weights::Precision;

/// The bits of all logits: of a prompt in two uneven chunks, then of decoded tokens one by one.
pub fn bits(engine: &Loaded, kv: &mut impl KvStore, prompt: &[u32], decoded: usize) -> Vec<u32> {
    let mut bits = Vec::new();
    let mut step = |tokens: &[u32], start| {
        let logits = engine.model.step(kv, tokens, start, Logits::Last).unwrap();
        assert!(logits.iter().all(|l| l.is_finite()));
        bits.extend(logits.iter().map(|l| l.to_bits()));
        infer::sampler::argmax(&logits).0
    };
    let (first, rest) = prompt.split_at(prompt.len() / 3);
    step(first, 0);
    let mut token = step(rest, first.len());
    for n in 0..decoded {
        token = step(&[token], prompt.len() + n);
    }
    bits
}

pub fn engine(precision: Precision) -> (Loaded, Vec<u32>) {
    let engine = load(&cached_smollm2().unwrap_or_else(|e| panic!("{e}")), precision).unwrap();
    let prompt = engine.text.encode(include_str!("../../prompts/system.txt")).unwrap()[..100].to_vec();
    (engine, prompt)
}
