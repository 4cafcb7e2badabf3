//! What the rows of the bench share: how a result is said, how two things are timed against each other, and the KV
//! memory that attention is measured on.
//!
//! A row is a binary that prints one [`Figure`] per line and nothing else on standard output; `scripts/bench` runs
//! it, and the binary `report` collects the lines. Figures that carry a bar are ratios whose two sides were taken in
//! one run. Nothing here fails because of a time: the report says "missed", and that is all.

pub mod kv;
pub mod placement;

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Which side of the bar is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cmp {
    /// At most the bar.
    #[serde(rename = "<=")]
    AtMost,
    /// At least the bar.
    #[serde(rename = ">=")]
    AtLeast,
}

/// One measured value.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// `row/what`.
    pub name: String,
    /// The value, in `unit`.
    pub value: f64,
    /// `x` for a ratio.
    pub unit: String,
    /// What is promised; none if the figure is there to be read only.
    pub bar: Option<f64>,
    /// On which side of the bar the value should be.
    pub cmp: Cmp,
    /// What it was taken on, in words.
    pub note: String,
}

impl Figure {
    /// Whether the promise is kept; `None` without one.
    pub fn met(&self) -> Option<bool> {
        self.bar.map(|bar| match self.cmp {
            Cmp::AtMost => self.value <= bar,
            Cmp::AtLeast => self.value >= bar,
        })
    }

    /// Hands the figure to the report.
    pub fn print(&self) {
        println!("{}", serde_json::to_string(self).expect("a figure is plain data"));
    }
}

/// Prints a ratio that must be at most `bar`.
pub fn at_most(name: impl Into<String>, value: f64, bar: f64, note: impl Into<String>) {
    let (name, note, unit) = (name.into(), note.into(), "x".into());
    Figure { name, value, unit, bar: Some(bar), cmp: Cmp::AtMost, note }.print();
}

/// Prints a ratio that must be at least `bar`.
pub fn at_least(name: impl Into<String>, value: f64, bar: f64, note: impl Into<String>) {
    let (name, note, unit) = (name.into(), note.into(), "x".into());
    Figure { name, value, unit, bar: Some(bar), cmp: Cmp::AtLeast, note }.print();
}

/// Prints a value that nothing is promised about.
pub fn reported(name: impl Into<String>, value: f64, unit: &str, note: impl Into<String>) {
    let (name, note, unit) = (name.into(), note.into(), unit.into());
    Figure { name, value, unit, bar: None, cmp: Cmp::AtMost, note }.print();
}

/// What is read before and after a side runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// The time that passes: for what waits, wakes or sends.
    Wall,
    /// The processor time of this process, all threads: for computing, which on a shared machine is interrupted.
    Cpu,
}

impl Clock {
    /// Its reading.
    pub fn now(self) -> Duration {
        let id = match self {
            Clock::Wall => ClockId::CLOCK_MONOTONIC,
            Clock::Cpu => ClockId::CLOCK_PROCESS_CPUTIME_ID,
        };
        clock_gettime(id).expect("Linux has this clock").into()
    }
}

/// The sides' durations, `[side][sample]`, each sorted.
#[derive(Debug)]
pub struct Samples(Vec<Vec<Duration>>);

impl Samples {
    /// Times the sides in turn, so that a slow spell of the machine meets all of them; every other round goes
    /// backwards, so that none always follows the same one. The first two rounds warm up and do not count. Goes on
    /// until `rounds` rounds are done and `least` has passed.
    pub fn interleaved(clock: Clock, rounds: usize, least: Duration, sides: &mut [&mut dyn FnMut()]) -> Self {
        const WARM_UP: usize = 2;
        let mut samples = vec![Vec::new(); sides.len()];
        let mut order: Vec<usize> = (0..sides.len()).collect();
        let began = Instant::now();
        let mut round = 0;
        while round < WARM_UP + rounds || began.elapsed() < least {
            for &side in &order {
                let start = clock.now();
                sides[side]();
                let took = clock.now() - start;
                if round >= WARM_UP {
                    samples[side].push(took);
                }
            }
            order.reverse();
            round += 1;
        }
        samples.iter_mut().for_each(|s| s.sort_unstable());
        Samples(samples)
    }

    /// The median of a side, in seconds.
    pub fn median(&self, side: usize) -> f64 {
        self.0[side][self.0[side].len() / 2].as_secs_f64()
    }

    /// The quickest sample of a side, in seconds.
    pub fn least(&self, side: usize) -> f64 {
        self.0[side][0].as_secs_f64()
    }

    /// How many samples each side has.
    pub fn count(&self) -> usize {
        self.0[0].len()
    }
}

/// Repeatable values, roughly normal (a sum of four uniform ones), for queries, keys and values.
#[derive(Debug)]
pub struct Values(pub u64);

impl Values {
    /// The next raw number.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// The next `count` values.
    pub fn many(&mut self, count: usize) -> Vec<f32> {
        let mut next = || (0..4).map(|_| self.bits() as f32 / (1u32 << 31) as f32 - 0.5).sum::<f32>() * 1.7;
        (0..count).map(|_| next()).collect()
    }
}
