//! Row `credit`: a block taken from credit and given back, and `ensure` within credit, against a bare bitmap pair: find
//! the first set bit of one word, clear it, set it again.

use std::hint::black_box;
use std::time::Duration;

use kvbroker::client::{Client, ClientOptions, EmbeddedOptions, OpenOptions};
use kvbroker::profile::Profile;
use kvbroker_bench::{Clock, Samples, at_most, reported};

/// Pairs in one sample, so that reading the clock does not count.
const PAIRS: usize = 20_000;
/// Blocks that a session takes and drops again in one sample of `ensure`.
const BLOCKS: usize = 64;

fn main() {
    let client = Client::embedded(EmbeddedOptions { pool_bytes: 48 << 20, extent_bytes: 3 << 20 });
    let client = client.expect("an embedded pool of 48 MiB");
    let profile = client.profile(&Profile::reference()).expect("the reference profile fits");
    profile.reserve(128).expect("the pool has 128 blocks");

    let mut word = u64::MAX;
    let samples = Samples::interleaved(
        Clock::Cpu,
        200,
        Duration::from_secs(2),
        &mut [
            &mut || {
                for _ in 0..PAIRS {
                    assert!(black_box(profile.take_and_give_back()));
                }
            },
            &mut || {
                for _ in 0..PAIRS {
                    let w = black_box(&mut word);
                    let bit = *w & w.wrapping_neg();
                    *w &= !bit;
                    let taken = black_box(bit);
                    *black_box(&mut word) |= taken;
                }
            },
        ],
    );
    let each = |side: usize| samples.median(side) / PAIRS as f64 * 1e9;
    let note = format!("{:.1} ns against {:.2} ns; median of {}", each(0), each(1), samples.count());
    at_most(
        "credit/take-and-give",
        each(0) / each(1),
        8.0,
        format!("atomic, shared by threads, against a bare bitmap pair: {note}"),
    );

    // A session that grows block by block within credit. Its end goes through the broker and is not timed.
    drop(profile);
    let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
    let broker = kvbroker::broker::Broker::new(
        std::sync::Arc::new(kvbroker::heap::Memfd::new(false)),
        3 << 20,
        16,
        16,
        kvbroker::broker::Policy::default(),
    );
    let broker = kvbroker::client::Embedded::new(broker.expect("48 MiB"));
    let client = Client::on(&broker, 1000, options).expect("an embedded broker");
    let profile = client.profile(&Profile::reference()).expect("the reference profile fits");
    let mut times = Vec::new();
    for _ in 0..300 {
        profile.reserve(BLOCKS as u32).expect("the pool has them");
        let open = OpenOptions { zero: false, ..OpenOptions::default() };
        let mut session = client.open(&profile, open).expect("a session");
        let began = std::time::Instant::now();
        for block in 1..=BLOCKS {
            session.ensure(block * 16).expect("within credit");
        }
        times.push(began.elapsed());
    }
    times.sort_unstable();
    let ensure = times[times.len() / 2].as_secs_f64() / BLOCKS as f64 * 1e9;
    reported(
        "credit/ensure",
        ensure,
        "ns",
        format!("one block more, within credit, zeroing apart; {:.1} times the bare pair", ensure / each(1)),
    );
}
