//! Seeded mutations of small corpora through the very functions that the fuzzer runs for long (`fuzz/`,
//! `scripts/fuzz`). No clock, no coverage: the same inputs in every run and on every machine.

#[path = "../fuzz/src/lib.rs"]
mod fuzz;

use std::panic::{AssertUnwindSafe, catch_unwind};

use fuzz::mutate::{Random, mutate};
use kvbroker::wire::Verb;

/// A number from the environment: for a run that is longer (so many times the usual executions), or another one (its
/// seed). `scripts/fuzz` uses libFuzzer instead; this needs nothing but the tests.
fn from_environment(name: &str, usual: u64) -> u64 {
    std::env::var(name)
        .map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Runs a target so many times. What is accepted is mutated further, so that inputs stay close to right ones.
fn hammer(name: &str, runs: usize) {
    let target = fuzz::TARGETS.iter().find(|t| t.name == name).unwrap();
    let runs = runs * from_environment("KVBROKER_FUZZ_TIMES", 1) as usize;
    let mut random = Random::new(from_environment("KVBROKER_FUZZ_SEED", 0x6b76_6272_6f6b_6572));
    let mut corpus = (target.seeds)();
    for (n, seed) in corpus.iter().enumerate() {
        (target.run)(seed);
        assert!(!seed.is_empty(), "seed {n} of {name}");
    }
    let mut accepted = 0;
    for run in 0..runs {
        let other = &corpus[random.below(corpus.len())];
        let mut input = corpus[random.below(corpus.len())].clone();
        mutate(&mut random, &mut input, other, target.words);
        match catch_unwind(AssertUnwindSafe(|| (target.run)(&input))) {
            Ok(false) => {}
            Ok(true) => {
                accepted += 1;
                let at = random.below(64);
                if corpus.len() < 64 {
                    corpus.push(input);
                } else if at >= 16 {
                    corpus[at] = input;
                }
            }
            Err(_) => {
                panic!("run {run} of {name}, with the input above, broke a promise: {}", input.escape_ascii())
            }
        }
    }
    println!("{name}: {runs} inputs, {accepted} accepted");
    // A corpus that nothing accepts would show only that refusing works.
    assert!(accepted > runs / 100 && accepted < runs, "{accepted} of {runs} inputs were accepted");
}

macro_rules! targets {
    ($($test:ident: $name:literal, $runs:literal;)*) => {
        $(#[test] fn $test() { hammer($name, $runs); })*

        #[test]
        fn every_target_is_hammered_here() {
            let here = [$($name),*];
            assert!(fuzz::TARGETS.iter().all(|t| here.contains(&t.name)));
        }
    };
}

targets! {
    no_bytes_make_a_message_decoder_panic_or_read_past_their_end: "wire", 40_000;
    no_sequence_of_messages_breaks_the_books_of_the_broker: "broker", 1_500;
    no_configuration_file_makes_the_daemon_panic: "config", 20_000;
    no_config_json_makes_the_model_reader_panic_or_hoard: "hf", 20_000;
    no_gguf_header_makes_the_model_reader_panic_or_hoard: "gguf", 20_000;
    no_prefix_file_is_believed_that_lies: "prefix_file", 20_000;
    no_trace_makes_the_simulator_panic: "trace", 20_000;
    no_record_makes_a_broker_that_does_not_add_up: "record", 20_000;
}

/// Without it, the sequences would show little: most of them would be refused at the door.
#[test]
fn the_scripts_that_sequences_begin_with_reach_every_verb() {
    let mut granted = std::collections::BTreeMap::new();
    for seed in fuzz::broker::seeds() {
        let mut world = fuzz::broker::World::new();
        world.play(&seed);
        for (verb, times) in world.granted {
            *granted.entry(verb).or_insert(0) += times;
        }
    }
    let names: Vec<_> =
        granted.iter().map(|(verb, times)| (Verb::from_code(*verb).unwrap().name(), times)).collect();
    println!("{names:?}");
    let missing: Vec<_> = Verb::ALL.iter().filter(|verb| !granted.contains_key(&(**verb as u16))).collect();
    assert!(missing.is_empty(), "never granted: {missing:?}");
}

/// Whatever asks for each verb, and what is asked for elsewhere: how a verb is added, in `docs/architecture.md`, counts on
/// this test where the compiler does not lead.
#[test]
fn a_verb_that_the_model_the_deaths_or_the_claims_do_not_ask_for_is_missed() {
    let read = |file: &str| {
        std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
    };
    let places: [(&str, &[Verb]); 4] = [
        // Windows have a model of their own.
        ("src/broker/model_test.rs", &[Verb::Window, Verb::CloseWindow]),
        ("fuzz/src/broker.rs", &[]),
        // What a client that dies in them leaves is what it had before.
        ("tests/daemon/deaths.rs", &[Verb::ReturnExtent, Verb::Query, Verb::CloseWindow, Verb::Skip]),
        // They name nothing that could be another's but a window, whose claims are in `window_test`.
        ("tests/daemon/claims.rs", &[Verb::Hello, Verb::Reserve, Verb::CloseWindow]),
    ];
    for (file, elsewhere) in places {
        let text = read(file);
        let asked = |verb: &Verb| text.contains(&format!("Verb::{verb:?}"));
        let missing: Vec<_> = Verb::ALL.iter().filter(|v| !asked(v) && !elsewhere.contains(v)).collect();
        assert!(missing.is_empty(), "{file} does not ask for {missing:?}");
    }
    let (wire, shapes) = (read("src/wire.rs"), read("fuzz/src/wire.rs"));
    let structures = wire.lines().filter_map(|l| l.strip_prefix("    struct ")?.strip_suffix(" {"));
    // Every message begins with the one; the other stands in a grant, before its blocks.
    let mut missing = structures.filter(|name| {
        !["Header", "ExtentInfo"].contains(name) && !shapes.contains(&format!("wire::{name}"))
    });
    assert_eq!(missing.next(), None, "fuzz/src/wire.rs has no shape of it");
}
