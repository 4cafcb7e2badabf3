//! Row `first-token`: the time from a question to its first token's logits, when most of the prompt is shared.
//!
//! Three sides, in turn: the whole prompt computed, the shared prefix attached and the rest computed, and the same
//! rest computed over a contiguous cache that holds the prefix already. The first two open their sequence within
//! the time, as a request does.

use std::time::Duration;

use anyhow::{Result, ensure};
use infer::generate::CHUNK;
use infer::kv::{Broker, KvOptions, KvStore, Twin};
use infer::load::{Loaded, cached_smollm2, load};
use infer::model::Logits;
use infer::weights::Precision;
use kvbroker::client::{Client, EmbeddedOptions, GroupedProfile};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::figure::{at_least, at_most, reported};
use crate::sequence;

const PROMPT: usize = 320;
/// 70 % of the prompt, and 7 whole blocks of SmolLM2's 32 tokens.
const SHARED: usize = 224;
/// Of an odd number the median is a sample.
const ROUNDS: usize = 7;

/// Prints the row's figures.
pub fn run() -> Result<()> {
    for (name, precision) in [("quantised", Precision::File), ("f32", Precision::F32)] {
        weights(name, precision)?;
    }
    Ok(())
}

fn weights(name: &str, precision: Precision) -> Result<()> {
    let loaded = load(&cached_smollm2()?, precision)?;
    let options = sequence::options(&loaded, PROMPT);
    let client = Client::embedded(EmbeddedOptions::default())?;
    let profile = options.register(&client)?;
    let text = loaded.text.encode(include_str!("../../prompts/system.txt"))?;
    let shared: Vec<u32> = text.iter().copied().cycle().take(SHARED).collect();
    // The cold prompt begins with another token, so that none of it is published.
    let [cold, warm] = [1, 0].map(|skip| {
        let own = text.iter().rev().copied().cycle().take(PROMPT - SHARED);
        shared
            .iter()
            .copied()
            .chain(own)
            .skip(skip)
            .chain(text.iter().copied().take(skip))
            .collect::<Vec<_>>()
    });

    let mut publisher = Broker::open_on(&client, &profile, &options)?;
    compute(&loaded, &mut publisher, &shared, 0)?;
    ensure!(publisher.seal(&shared)? == SHARED, "the prefix is not whole blocks");
    let mut twin = Twin::new(options.geometry, options.element, PROMPT);
    compute(&loaded, &mut twin, &shared, 0)?;

    let samples = interleaved([
        &mut || open_and_compute(&loaded, &client, &profile, &options, &cold, 0).map(drop),
        &mut || open_and_compute(&loaded, &client, &profile, &options, &warm, SHARED).map(drop),
        &mut || compute(&loaded, &mut twin, &warm, SHARED).map(drop),
    ])?;
    let [cold_median, attached, contiguous] = samples.map(|s| s[s.len() / 2].as_secs_f64());
    let same = open_and_compute(&loaded, &client, &profile, &options, &warm, SHARED)?
        == compute(&loaded, &mut twin, &warm, SHARED)?;
    ensure!(same, "the first token's logits over the attached and over the contiguous prefix differ");

    let seconds = format!(
        "{cold_median:.3} s whole, {attached:.3} s attached, {contiguous:.3} s contiguous; medians of {ROUNDS}, \
         processor time of one thread; SmolLM2, {SHARED} of {PROMPT} tokens shared, KV f16"
    );
    at_most(
        &format!("first-token/attached-{name}"),
        attached / contiguous,
        "x",
        1.03,
        &format!("open, attach and suffix / the same suffix over filled contiguous KV: {seconds}"),
    );
    at_least(
        &format!("first-token/saved-{name}"),
        1.0 - attached / cold_median,
        "x",
        0.65,
        &format!("1 - attached / whole prompt: {seconds}"),
    );
    reported(
        &format!("first-token/saved-contiguous-{name}"),
        1.0 - contiguous / cold_median,
        "x",
        "1 - suffix over filled contiguous KV / whole prompt: the most that any sharing saves here",
    );
    Ok(())
}

/// A request: opens a sequence, takes over what is published, computes the rest. Returns the last token's logits.
fn open_and_compute(
    loaded: &Loaded,
    client: &Client,
    profile: &GroupedProfile,
    options: &KvOptions,
    ids: &[u32],
    published: usize,
) -> Result<Vec<f32>> {
    let mut kv = Broker::open_on(client, profile, options)?;
    let held = kv.attach(ids)?;
    ensure!(held == published, "{held} tokens are shared, not {published}");
    compute(loaded, &mut kv, ids, held)
}

/// The prompt from token `held` on, in the engine's chunks.
pub fn compute<K: KvStore>(loaded: &Loaded, kv: &mut K, ids: &[u32], held: usize) -> Result<Vec<f32>> {
    let mut logits = Vec::new();
    let mut at = held;
    while at < ids.len() {
        let end = ids.len().min(at + CHUNK);
        let want = if end == ids.len() { Logits::Last } else { Logits::None };
        logits = loaded.model.step(kv, &ids[at..end], at, want)?;
        at = end;
    }
    Ok(logits)
}

/// The sides' times, each sorted. As in the rest of the bench: in turn, so that a slow spell meets all of them, every
/// other round backwards, and after a round that warms up.
fn interleaved<const N: usize>(sides: [&mut dyn FnMut() -> Result<()>; N]) -> Result<[Vec<Duration>; N]> {
    let mut samples = [const { Vec::new() }; N];
    let mut order: Vec<usize> = (0..N).collect();
    for round in 0..=ROUNDS {
        for &side in &order {
            let start = processor_time()?;
            sides[side]()?;
            let took = processor_time()? - start;
            if round > 0 {
                samples[side].push(took);
            }
        }
        order.reverse();
    }
    samples.iter_mut().for_each(|s| s.sort_unstable());
    Ok(samples)
}

/// The time that this process has computed, in itself and in the kernel: on a shared machine the time that passes is
/// also the others'.
fn processor_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = usage.user_time() + usage.system_time();
    Ok(Duration::from_micros(u64::try_from(time.num_microseconds())?))
}
