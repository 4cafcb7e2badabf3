//! `kvbctl simulate` and the replay behind it: against a model that is as simple as it can be, and as a user sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output};

use kvbroker::broker::Eviction;
use kvbroker::simulate::{
    Capacity, MOST_TRACE, Options, OptionsError, Outcome, Request, TRACE_BLOCK, replay, shop_floor,
};

fn options(capacity: Capacity) -> Options {
    Options {
        capacity,
        trace_block: TRACE_BLOCK,
        tokens_per_block: TRACE_BLOCK,
        block_bytes: 12 << 20,
        tenants: 1,
        reserve: 0,
        limit: None,
        speed: None,
        eviction: Eviction::Lru,
    }
}

fn request(ids: &[u64]) -> Request {
    let input_length = ids.len() as u64 * u64::from(TRACE_BLOCK);
    Request { timestamp: 0, input_length, output_length: 1, hash_ids: ids.to_vec() }
}

/// Hits, evictions and refusals by leaf-first LRU, worked out with nothing but maps and full scans.
fn naive(trace: &[Request], capacity: usize) -> (u64, u64, u64) {
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    let mut parents: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut clock, mut hits, mut evictions, mut refusals) = (0, 0, 0, 0);
    for r in trace {
        let ids = &r.hash_ids[..(r.input_length / u64::from(TRACE_BLOCK)) as usize];
        if ids.len() > capacity {
            refusals += 1;
            continue;
        }
        let found = ids.iter().take_while(|id| last.contains_key(id)).count();
        hits += found as u64;
        let mut held: BTreeSet<u64> = ids[..found].iter().copied().collect();
        for (i, id) in ids.iter().enumerate().skip(found) {
            if last.len() == capacity {
                let has_child = |id: &u64| last.keys().any(|other| parents.get(other) == Some(id));
                let leaves = last.iter().filter(|(id, _)| !held.contains(id) && !has_child(id));
                let oldest = *leaves.min_by_key(|(_, at)| **at).expect("what is held fits").0;
                last.remove(&oldest);
                evictions += 1;
            }
            last.insert(*id, 0);
            held.insert(*id);
            if i > 0 {
                parents.insert(*id, ids[i - 1]);
            }
        }
        for id in ids.iter().rev() {
            clock += 1;
            last.insert(*id, clock);
        }
    }
    (hits, evictions, refusals)
}

/// Chains that branch now and then: each block's name is that of the chain up to it.
fn branching(seed: u64, requests: usize) -> Vec<Request> {
    let mut state = seed;
    let mut dice = move |sides: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % sides
    };
    let mut names: BTreeMap<Vec<u64>, u64> = BTreeMap::new();
    (0..requests)
        .map(|_| {
            let mut chain = Vec::new();
            let length = dice(9);
            let ids: Vec<u64> = (0..length)
                .map(|_| {
                    chain.push(dice(3).saturating_sub(1));
                    let next = names.len() as u64;
                    *names.entry(chain.clone()).or_insert(next)
                })
                .collect();
            let mut r = request(&ids);
            // A partial block at the end is neither looked for nor kept.
            r.input_length += dice(2) * 100;
            r
        })
        .collect()
}

#[test]
fn the_broker_finds_evicts_and_refuses_what_a_naive_lru_does() {
    for seed in 0..40 {
        let trace = branching(seed, 60);
        for capacity in [1, 2, 3, 5, 8, 13, 40] {
            let got = replay(&trace, &options(Capacity::Blocks(capacity))).unwrap();
            let want = naive(&trace, capacity as usize);
            assert_eq!((got.hits, got.evictions, got.refusals), want, "seed {seed}, {capacity} blocks");
            assert_eq!(got.requests, 60);
        }
        let all: BTreeSet<u64> = trace.iter().flat_map(|r| r.hash_ids.iter().copied()).collect();
        let blocks: usize = trace.iter().map(|r| r.hash_ids.len()).sum();
        let got = replay(&trace, &options(Capacity::Unlimited)).unwrap();
        assert_eq!(got.hits as usize, blocks - all.len(), "with enough memory each block is missed once");
        assert_eq!((got.evictions, got.refusals, got.pool_blocks as usize), (0, 0, all.len()));
    }
}

#[test]
fn tenants_find_nothing_of_each_other_and_keep_to_their_limits() {
    let trace: Vec<Request> = (0..8).map(|_| request(&[1, 2, 3])).collect();
    let alone = replay(&trace, &options(Capacity::Blocks(12))).unwrap();
    assert_eq!(alone.hits, 21);
    let two = replay(&trace, &Options { tenants: 2, ..options(Capacity::Blocks(12)) }).unwrap();
    assert_eq!(two.hits, 18, "each of the two misses its first");
    let tight = Options { tenants: 2, limit: Some(2), ..options(Capacity::Blocks(12)) };
    assert_eq!(replay(&trace, &tight).unwrap().refusals, 8, "three blocks never fit a limit of two");
    let reserved = Options { tenants: 4, reserve: 4, ..options(Capacity::Blocks(12)) };
    assert_eq!(
        replay(&trace, &reserved),
        Err(OptionsError::Reserves { tenants: 4, reserve: 4, extents: 12 })
    );
}

#[test]
fn answers_hold_blocks_for_their_time_and_make_room_when_they_end() {
    // Two prompts of two blocks that do not share, answers of one block, 512 tokens a second, in a pool of five blocks.
    let at = |timestamp, ids: &[u64]| Request { timestamp, output_length: 512, ..request(ids) };
    let speed = Some(512.0);
    let five = Options { speed, ..options(Capacity::Blocks(5)) };
    let apart = replay(&[at(0, &[1, 2]), at(2000, &[3, 4])], &five).unwrap();
    assert_eq!((apart.refusals, apart.cut), (0, 0));
    let together = replay(&[at(0, &[1, 2]), at(500, &[3, 4])], &five).unwrap();
    assert_eq!((together.refusals, together.cut), (0, 1), "the second answer finds no block");
    let four = Options { speed, ..options(Capacity::Blocks(4)) };
    let refused = replay(&[at(0, &[1, 2]), at(500, &[3, 4])], &four).unwrap();
    assert_eq!((refused.refusals, refused.cut), (1, 0), "the second prompt finds one block of two");
    let ratio = apart.held_over_live.unwrap();
    assert!((1.0..2.0).contains(&ratio), "{ratio}");
    assert_eq!(replay(&[at(0, &[1, 2])], &options(Capacity::Blocks(5))).unwrap().held_over_live, None);
}

#[test]
fn options_that_make_no_sense_are_refused_in_words() {
    let trace = [request(&[1])];
    let says = |o: Options| replay(&trace, &o).unwrap_err().to_string();
    let base = options(Capacity::Blocks(4));
    assert_eq!(
        says(Options { tokens_per_block: 100, ..base.clone() }),
        "100 tokens per block of the pool: the trace's blocks of 512 tokens must be a multiple of it"
    );
    assert!(says(Options { tokens_per_block: 0, ..base.clone() }).starts_with("0 tokens per block"));
    assert!(says(Options { tenants: 0, ..base.clone() }).starts_with("0 tenants"));
    assert!(says(Options { speed: Some(-1.0), ..base.clone() }).starts_with("-1 tokens per second"));
    assert!(says(options(Capacity::Blocks(0))).starts_with("the pool has no block"));
    let far = replay(&[request(&[u64::MAX])], &base).unwrap_err().to_string();
    assert!(far.starts_with("hash id 18446744073709551615"), "{far}");
}

#[test]
fn a_smaller_block_finds_no_less_of_the_same_trace() {
    let trace = shop_floor(3, 1);
    let at = |tokens_per_block| {
        let o = Options {
            trace_block: 16,
            tokens_per_block,
            block_bytes: 24576 * u64::from(tokens_per_block),
            ..options(Capacity::Unlimited)
        };
        let Outcome { hits, .. } = replay(&trace, &o).unwrap();
        hits * u64::from(tokens_per_block)
    };
    assert_eq!(at(16), at(8), "the trace cannot tell halves of its blocks apart");
}

fn kvbctl(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvbctl")).arg("simulate").args(arguments).output().unwrap()
}

#[test]
fn the_tool_prints_a_table_and_json_and_names_a_bad_line() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/trace.jsonl");
    let table = kvbctl(&[trace, "--pool-blocks", "5"]);
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(text.contains("hit rate") && text.contains("lru"), "{text}");
    let json = kvbctl(&[trace, "--pool-blocks", "5", "--policy", "lru", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    // Worked out by hand: see the trace.
    assert_eq!(json["blocks"], 19);
    assert_eq!(json["hits"], 6);
    assert_eq!(json["hit_rate"], 6.0 / 19.0);
    assert_eq!(json["refusals"], 1);
    assert_eq!(json["evictions"], 1);
    assert_eq!(json["lru"]["hits"], 6);
    let pool = kvbctl(&[trace, "--pool", "256M", "--json"]);
    let pool: serde_json::Value = serde_json::from_slice(&pool.stdout).unwrap();
    assert_eq!(pool["pool_blocks"], 21, "256 MiB of the reference model in blocks of 512 tokens");

    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.jsonl");
    std::fs::write(&bad, "{\"timestamp\": 0}\n").unwrap();
    let output = kvbctl(&[bad.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("bad.jsonl: line 1 is no request"), "{text}");
    let written = folder.path().join("floor.jsonl");
    let path = written.to_str().unwrap();
    assert!(kvbctl(&["--shop-floor", "1", "--write", path]).status.success());
    assert!(kvbctl(&[path, "--trace-block", "16", "--pool", "unlimited"]).status.success());
}

#[test]
fn a_trace_that_cannot_be_written_leaves_the_file_as_it_was() {
    use std::os::unix::process::CommandExt;
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("floor.jsonl"), folder.path().join("link.jsonl"));
    std::fs::write(&file, "before").unwrap();
    std::os::unix::fs::symlink("floor.jsonl", &link).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    command.args(["simulate", "--shop-floor", "1", "--write"]).arg(&link);
    // SAFETY: both calls may be made between fork and exec.
    unsafe {
        // A file that may have no more bytes fails as on a full disk.
        command.pre_exec(|| {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
            match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "before");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside it");
    assert!(kvbctl(&["--shop-floor", "1", "--write", link.to_str().unwrap()]).status.success());
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::metadata(&file).unwrap().len() > 4096);
    // What is no file is no more replaced than a link is.
    let output = kvbctl(&["--shop-floor", "1", "--write", "/dev/stdout"]);
    assert_eq!(output.stdout, std::fs::read(&file).unwrap());
}

#[test]
fn the_largest_replay_that_is_not_refused_takes_no_more_memory_than_the_help_says() {
    // Prompts that have nothing in common: every block is filled, and some are evicted.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.jsonl");
    let line = |n: u64| {
        let ids: Vec<String> = (n * 4000..(n + 1) * 4000).map(|id| id.to_string()).collect();
        let head = format!("\"timestamp\":{n},\"input_length\":{},\"output_length\":1", 4000 * 16);
        format!("{{{head},\"hash_ids\":[{}]}}\n", ids.join(","))
    };
    std::fs::write(&path, (0..70).map(line).collect::<String>()).unwrap();
    // Beside the longest trace.
    let limit = (300 << 20) - MOST_TRACE;
    let mut command = Command::new("prlimit");
    command.arg(format!("--data={limit}")).arg(env!("CARGO_BIN_EXE_kvbctl")).arg("simulate").arg(&path);
    command.args(["--trace-block", "16", "--pool-blocks", "262144", "--json"]);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(outcome["evictions"].as_u64().unwrap() > 0, "every block is in use: {outcome}");
    let help = kvbctl(&["--help"]);
    assert!(String::from_utf8(help.stdout).unwrap().contains("300 MiB"));
}

#[test]
fn what_no_machine_could_replay_is_refused_in_words_and_takes_no_memory() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/trace.jsonl");
    // A machine of a kind that would not survive it: 1 GiB of addresses.
    let bounded = |arguments: &[&str]| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--as={}", 1u64 << 30)).arg(env!("CARGO_BIN_EXE_kvbctl")).arg("simulate");
        let output = command.args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = bounded(&[trace, "--pool", "8388607T"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("at most 262144 can be simulated"), "{said}");
    let (code, said) = bounded(&["--shop-floor", "1", "--pool", "8T"]);
    assert_eq!((code, said.contains("at most 262144")), (Some(1), true), "{said}");
    for shifts in ["0", "101", "18446744073709551615"] {
        let (code, said) = bounded(&["--shop-floor", shifts]);
        assert_eq!((code, said.contains("1..=100")), (Some(2), true), "{said}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absurd.jsonl");
    let says = |line: &str, more: &[&str]| {
        std::fs::write(&path, format!("{line}\n")).unwrap();
        bounded(&[&[path.to_str().unwrap()], more].concat())
    };
    let request = |input: u64, output: u64, ids: &str| {
        format!(
            "{{\"timestamp\":0,\"input_length\":{input},\"output_length\":{output},\"hash_ids\":[{ids}]}}"
        )
    };
    let (code, said) = says(&request(1, u64::MAX, "0"), &["--pool", "unlimited"]);
    assert_eq!((code, said.contains("line 1: output_length")), (Some(1), true), "{said}");
    // One id that is to stand for a thousand million tokens of a block each.
    let (code, said) =
        says(&request(1 << 30, 1, "0"), &["--trace-block", "1073741824", "--tokens-per-block", "1"]);
    assert_eq!(
        (code, said.contains("request 1 of the trace has 1073741824 blocks")),
        (Some(1), true),
        "{said}"
    );
    let (code, said) = says(&" ".repeat(2 << 20), &[]);
    assert_eq!((code, said.contains("line 1 has more than the 1048576 bytes")), (Some(1), true), "{said}");
}
