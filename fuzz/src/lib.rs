//! Hostile input for everything that reads bytes from outside: one function for each kind, which libFuzzer calls in
//! the long run (`scripts/fuzz`) and `tests/fuzz.rs` with seeded mutations in every run of the tests.
//!
//! Owns the oracles. Invariant: each function panics exactly when the product breaks a promise: it panicked itself,
//! allocated more than the input can justify, gave an error without words or with endless ones, or did not read back
//! what it had accepted.

pub mod alloc;
pub mod broker;
pub mod config;
pub mod gguf;
pub mod hf;
pub mod mutate;
pub mod prefix_file;
pub mod random;
pub mod record;
pub mod trace;
pub mod wire;

/// One reader of bytes from outside.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name: that of the program in `fuzz_targets` too.
    pub name: &'static str,
    /// Reads the input and checks what comes of it. Whether the input was accepted.
    pub run: fn(&[u8]) -> bool,
    /// Inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Bytes or words that mean something to this reader.
    pub words: &'static [&'static [u8]],
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "wire", run: wire::run, seeds: wire::seeds, words: &[] },
    Target { name: "broker", run: broker::run, seeds: broker::seeds, words: &[] },
    Target { name: "config", run: config::run, seeds: config::seeds, words: config::WORDS },
    Target { name: "hf", run: hf::run, seeds: hf::seeds, words: hf::WORDS },
    Target { name: "gguf", run: gguf::run, seeds: gguf::seeds, words: gguf::WORDS },
    Target {
        name: "prefix_file",
        run: prefix_file::run,
        seeds: prefix_file::seeds,
        words: prefix_file::WORDS,
    },
    Target { name: "trace", run: trace::run, seeds: trace::seeds, words: trace::WORDS },
    Target { name: "record", run: record::run, seeds: record::seeds, words: &[] },
];

/// The longest message that an error may have: a screenful. What it quotes of the input it must cut.
const LONGEST_MESSAGE: usize = 2000;

/// Checks the words of an error.
fn check_words(error: &dyn std::fmt::Display) {
    let text = error.to_string();
    assert!(!text.trim().is_empty(), "an error without words");
    assert!(
        text.len() <= LONGEST_MESSAGE,
        "an error of {} bytes: {}...",
        text.len(),
        text.chars().take(200).collect::<String>()
    );
    let control = text.chars().find(|c| c.is_control() && *c != '\n');
    assert!(control.is_none(), "an error with the control character {control:?}: {text:?}");
}
