//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864).
//!
//! Holds one frequency per pair of elements. Invariant: the same position always gets the same bits, whatever chunk
//! it is computed in, because an angle is `position * frequency` in f32 and nothing is accumulated.

use std::f32::consts::TAU;

use crate::config::{Config, Llama3Scaling, Pairs};

/// The frequencies of a model.
#[derive(Debug, Clone)]
pub struct Rope {
    frequencies: Vec<f32>,
    pairs: Pairs,
}

/// Sines and cosines of the positions of one step: the same for all its layers and heads.
#[derive(Debug, Clone)]
pub struct Angles {
    /// `[token][pair]` of (cosine, sine).
    turns: Vec<(f32, f32)>,
    half: usize,
    pairs: Pairs,
}

impl Rope {
    /// The frequencies of base `theta`, stretched as `config` asks for. `factors`, if the file has them (GGUF's
    /// `rope_freqs.weight`), divide them one by one.
    pub fn new(config: &Config, theta: f64, factors: Option<&[f32]>) -> Self {
        let dim = config.head_dim;
        let mut frequencies: Vec<f32> = (0..dim / 2)
            .map(|i| (1.0 / theta.powf((2 * i) as f64 / dim as f64)) as f32)
            .map(|f| config.rope_scaling.map_or(f, |s| stretch(f, s)))
            .collect();
        for (f, factor) in frequencies.iter_mut().zip(factors.into_iter().flatten()) {
            *f /= factor;
        }
        Rope { frequencies, pairs: config.pairs }
    }

    /// Sines and cosines of positions `start..start + tokens`.
    pub fn angles(&self, start: usize, tokens: usize) -> Angles {
        let turns = (start..start + tokens)
            .flat_map(|position| self.frequencies.iter().map(move |f| position as f32 * f))
            .map(|angle| (angle.cos(), angle.sin()))
            .collect();
        Angles { turns, half: self.frequencies.len(), pairs: self.pairs }
    }
}

/// Llama 3's rule (transformers, `_compute_llama3_parameters`).
fn stretch(frequency: f32, s: Llama3Scaling) -> f32 {
    let wave = TAU / frequency;
    let old = s.original_max_position_embeddings;
    if wave < old / s.high_freq_factor {
        frequency
    } else if wave > old / s.low_freq_factor {
        frequency / s.factor
    } else {
        let smooth = (old / wave - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
        (1.0 - smooth) * frequency / s.factor + smooth * frequency
    }
}

impl Angles {
    /// Rotates every head of `rows`, `[token][head][dim]` with `heads` heads, in place.
    pub fn rotate(&self, rows: &mut [f32], heads: usize) {
        let dim = 2 * self.half;
        for (token, turns) in rows.chunks_exact_mut(heads * dim).zip(self.turns.chunks_exact(self.half)) {
            for head in token.chunks_exact_mut(dim) {
                match self.pairs {
                    Pairs::Adjacent => {
                        for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(turns) {
                            let (a, b) = (pair[0], pair[1]);
                            pair[0] = a * cos - b * sin;
                            pair[1] = a * sin + b * cos;
                        }
                    }
                    Pairs::Halves => {
                        let (low, high) = head.split_at_mut(self.half);
                        for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(turns) {
                            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                        }
                    }
                }
            }
        }
    }
}
