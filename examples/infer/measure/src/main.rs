//! The rows of `scripts/bench` that need a whole engine: `measure addressing`, `first-token` and `stored-prompt`.
//!
//! Each prints one figure per line, as the rows of the bench package do, and nothing else on standard output. Every
//! ratio is of two sides taken in one run: the engine over kvbroker's blocks, and the same engine over its
//! contiguous [`Twin`](infer::kv::Twin), or with and without something of the broker's. Invariant: both sides are asserted to give the same logits, bit for bit, so
//! neither can be quicker by computing less.

mod addressing;
mod figure;
mod first_token;
mod sequence;
mod stored_prompt;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["addressing"] => addressing::run(),
        ["first-token"] => {
            one_thread()?;
            first_token::run()
        }
        ["stored-prompt"] => {
            one_thread()?;
            stored_prompt::run()
        }
        ["counted", weights, held, store] => {
            one_thread()?;
            addressing::counted(weights, held, store)
        }
        _ => bail!("usage: measure addressing|first-token|stored-prompt"),
    }
}

/// Makes this thread the only one that computes, so that no waiting or waking is counted.
fn one_thread() -> Result<()> {
    // candle counts its threads by this variable, and rayon's pool does not tell it otherwise.
    if std::env::var("RAYON_NUM_THREADS").as_deref() != Ok("1") {
        bail!("measured on one thread only: set RAYON_NUM_THREADS=1");
    }
    Ok(rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global()?)
}
