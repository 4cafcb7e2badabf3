//! Choosing the next token from logits. Invariant: the same seed and the same logits give the same tokens.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Greedy, or by temperature from a seeded generator.
#[derive(Debug)]
pub struct Sampler {
    temperature: f32,
    rng: StdRng,
}

impl Sampler {
    /// `temperature` 0 (or less) takes the most probable token always.
    pub fn new(temperature: f32, seed: u64) -> Self {
        Sampler { temperature, rng: StdRng::seed_from_u64(seed) }
    }

    /// The next token, as an index into `logits`.
    pub fn pick(&mut self, logits: &[f32]) -> u32 {
        let (best, top) = argmax(logits);
        // Also what is left when the logits hold no number: there is nothing to choose by.
        if self.temperature <= 0.0 || !top.is_finite() {
            return best;
        }
        let weight = |l: &f32| f64::from((l - top) / self.temperature).exp();
        let total: f64 = logits.iter().map(weight).sum();
        let mut left = self.rng.random::<f64>() * total;
        for (token, l) in logits.iter().enumerate() {
            left -= weight(l);
            if left < 0.0 {
                return token as u32;
            }
        }
        best
    }
}

/// The largest logit and where it is; the first of equals.
pub fn argmax(logits: &[f32]) -> (u32, f32) {
    logits.iter().enumerate().fold(
        (0, f32::NEG_INFINITY),
        |best, (token, &l)| {
            if l > best.1 { (token as u32, l) } else { best }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_takes_the_most_probable_token() {
        assert_eq!(Sampler::new(0.0, 1).pick(&[0.5, 2.0, 2.0, -1.0]), 1);
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        // Softmax of [ln 1, ln 2, ln 5] at temperature 1: 1/8, 2/8, 5/8.
        let logits = [1f32.ln(), 2f32.ln(), 5f32.ln()];
        let mut sampler = Sampler::new(1.0, 7);
        let mut seen = [0u32; 3];
        for _ in 0..80_000 {
            seen[sampler.pick(&logits) as usize] += 1;
        }
        for (seen, expected) in seen.into_iter().zip([10_000.0, 20_000.0, 50_000.0]) {
            assert!((f64::from(seen) - expected).abs() < 800.0, "{seen} of {expected}");
        }
    }

    #[test]
    fn a_seed_repeats_its_tokens_and_another_seed_does_not() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32 * 0.3).collect();
        let run = |seed| {
            let mut s = Sampler::new(0.8, seed);
            (0..20).map(|_| s.pick(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
    }
}
