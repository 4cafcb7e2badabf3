//! Row `prefix`: what finding, taking back and letting go of a prompt's blocks costs, per block, against the crate
//! kvbm-logical in the same run: the same chains, the same pool size, ends of chains evicted first on both sides.
//!
//! Hashing is apart: the bar is for blocks whose names are known already; with hashing both sides are shown, each by
//! its own hash (SHA-256 here, because names keep tenants apart; xxh3 there).

use std::hint::black_box;
use std::time::Duration;

use dynamo_tokens::TokenBlockSequence;
use kvbm_logical::blocks::ImmutableBlock;
use kvbm_logical::manager::{FrequencyTrackingCapacity, LineageEviction};
use kvbm_logical::{BlockManager, BlockRegistry, KvbmSequenceHashProvider, SequenceHash};
use kvbroker::broker::prefix::{Digest, Eviction, Prefixes, Publication, child, root};
use kvbroker::id::{BlockId, ClientId, FormatId, Tenant};
use kvbroker::pool::{Cut, Pool, Take};
use kvbroker::profile::Profile;
use kvbroker_bench::{Clock, Samples, at_most, reported};

const PER_BLOCK: usize = 16;
/// Blocks of one prompt: 1024 tokens.
const BLOCKS: usize = 64;
/// Prompts in the pool: 640 of the 680 blocks that 256 MiB have.
const CHAINS: usize = 10;
const TENANT: Tenant = Tenant(1000);
const FORMAT: FormatId = FormatId(1);
const BAR: f64 = 0.33;

fn main() {
    let prompts: Vec<Vec<u32>> = (0..CHAINS)
        .map(|c| (0..(BLOCKS * PER_BLOCK) as u32).map(|t| t * 7 + c as u32 * 100_003).collect())
        .collect();
    let (mut ours, mut theirs) = (Ours::new(&prompts), Theirs::new(&prompts));
    matching(&mut ours, &mut theirs);
    resurrecting(&mut ours, &mut theirs);
    hashing(&prompts);
}

fn cpu(sides: &mut [&mut dyn FnMut()]) -> Samples {
    Samples::interleaved(Clock::Cpu, 400, Duration::from_secs(2), sides)
}

/// Nanoseconds for one block.
fn per_block(samples: &Samples, side: usize) -> f64 {
    samples.median(side) / (BLOCKS * CHAINS) as f64 * 1e9
}

/// Somebody holds every block; one more finds them all, and lets them go.
fn matching(ours: &mut Ours, theirs: &mut Theirs) {
    let held: Vec<_> = (0..CHAINS).map(|c| theirs.find(c)).collect();
    (0..CHAINS).for_each(|c| ours.find(c));
    let samples = cpu(&mut [
        &mut || {
            for chain in 0..CHAINS {
                ours.find(chain);
                ours.let_go(chain);
            }
        },
        &mut || {
            for chain in 0..CHAINS {
                drop(black_box(theirs.find(chain)));
            }
        },
    ]);
    drop(held);
    (0..CHAINS).for_each(|c| ours.let_go(c));
    let (a, b) = (per_block(&samples, 0), per_block(&samples, 1));
    let note = format!(
        "{a:.0} ns against {b:.0} ns a block; found, taken and let go while others hold it; median of {}",
        samples.count()
    );
    at_most("prefix/match", a / b, BAR, note);
}

/// Nobody holds any block: it is taken out of the cache, and put back.
fn resurrecting(ours: &mut Ours, theirs: &mut Theirs) {
    // What is taken must be put back between two samples, so the two halves are timed by hand, in turn.
    let mut times = [const { Vec::new() }; 4];
    for round in 0..400 {
        let mut time = |side: usize, what: &mut dyn FnMut()| {
            let began = std::time::Instant::now();
            what();
            if round >= 2 {
                times[side].push(began.elapsed());
            }
        };
        time(0, &mut || (0..CHAINS).for_each(|c| ours.find(c)));
        time(1, &mut || (0..CHAINS).for_each(|c| ours.let_go(c)));
        time(2, &mut || theirs.held = (0..CHAINS).map(|c| theirs.find(c)).collect());
        time(3, &mut || theirs.held.clear());
    }
    times.iter_mut().for_each(|t| t.sort_unstable());
    let each =
        |side: usize| times[side][times[side].len() / 2].as_secs_f64() / (BLOCKS * CHAINS) as f64 * 1e9;
    for (name, a, b) in [("resurrect", each(0), each(2)), ("release", each(1), each(3))] {
        let note = format!("{a:.0} ns against {b:.0} ns a block; medians of {}", times[0].len());
        at_most(format!("prefix/{name}"), a / b, BAR, note);
    }
}

/// From token ids to names.
fn hashing(prompts: &[Vec<u32>]) {
    let start = root(TENANT, &[0; 32], &Profile::reference());
    let samples = cpu(&mut [
        &mut || {
            for prompt in prompts {
                let mut name = start;
                for tokens in prompt.chunks_exact(PER_BLOCK) {
                    name = child(&name, tokens);
                }
                black_box(name);
            }
        },
        &mut || {
            for prompt in prompts {
                black_box(hashes(prompt));
            }
        },
    ]);
    reported(
        "prefix/hash-ours",
        per_block(&samples, 0),
        "ns",
        "SHA-256 over the parent's name and 16 token ids",
    );
    reported(
        "prefix/hash-theirs",
        per_block(&samples, 1),
        "ns",
        "xxh3, with the blocks of tokens that kvbm-logical makes for it",
    );
}

/// The index and the pool, driven as the broker drives them (`Broker::share`, `Broker::let_go`).
struct Ours {
    pool: Pool,
    index: Prefixes,
    names: Vec<Vec<Digest>>,
    blocks: Vec<Vec<BlockId>>,
}

impl Ours {
    fn new(prompts: &[Vec<u32>]) -> Self {
        let profile = Profile::reference();
        let cut = Cut { format: FORMAT, slot_bytes: profile.slot_bytes(0, 4096), slots: 8 };
        let mut pool = Pool::new(3 << 20);
        (0..85).for_each(|_| _ = pool.add());
        let mut index = Prefixes::new(Eviction::default());
        let client = ClientId(1);
        let (mut names, mut blocks) = (Vec::new(), Vec::new());
        for prompt in prompts {
            let (mut name, mut parent) = (root(TENANT, &[0; 32], &profile), None);
            let (mut chain, mut own) = (Vec::new(), Vec::new());
            for tokens in prompt.chunks_exact(PER_BLOCK) {
                name = child(&name, tokens);
                let take = Take {
                    tenant: TENANT,
                    client,
                    cut,
                    near: None,
                    whole: false,
                    new_extents: 85,
                    new_descriptors: 85,
                };
                let mut taken = Vec::new();
                pool.take(&take, 1, &mut taken).expect("the pool has room");
                let block = taken[0].block;
                pool.add_holder(block.place.extent, client);
                pool.hold(block, client).expect("it is credit");
                pool.seal(block.place);
                let (tenant, format) = (TENANT, FORMAT);
                let (priority, windowed) = (100, false);
                assert!(index.publish(Publication {
                    name,
                    parent,
                    block,
                    tenant,
                    format,
                    priority,
                    windowed
                }));
                parent = Some(name);
                chain.push(name);
                own.push(block);
            }
            names.push(chain);
            blocks.push(own);
        }
        let mut ours = Ours { pool, index, names, blocks };
        (0..CHAINS).for_each(|c| ours.let_go(c));
        ours
    }

    /// All blocks of a chain, by their names, one table more in which they stand.
    fn find(&mut self, chain: usize) {
        let Ours { pool, index, names, .. } = self;
        let found: Vec<BlockId> = names[chain]
            .iter()
            .map(|name| index.look_up(black_box(name)).expect("it is published"))
            .collect();
        pool.share(found.iter().map(|block| block.place), |place| index.hold(place));
        black_box(found);
    }

    fn let_go(&mut self, chain: usize) {
        let Ours { pool, index, blocks, .. } = self;
        let blocks = blocks[chain].iter().rev().copied();
        pool.drop_refs(blocks, None, |place| index.let_go(place), |_, _| ());
    }
}

#[derive(Debug, Clone)]
struct Memory;

/// kvbm-logical, which evicts leaves first too.
struct Theirs {
    manager: BlockManager<Memory>,
    hashes: Vec<Vec<SequenceHash>>,
    held: Vec<Vec<ImmutableBlock<Memory>>>,
}

fn hashes(prompt: &[u32]) -> Vec<SequenceHash> {
    let sequence = TokenBlockSequence::from_slice(prompt, PER_BLOCK as u32, Some(TENANT.0.into()));
    sequence.blocks().iter().map(KvbmSequenceHashProvider::kvbm_sequence_hash).collect()
}

impl Theirs {
    fn new(prompts: &[Vec<u32>]) -> Self {
        let tracker = FrequencyTrackingCapacity::Medium.create_tracker();
        let manager = BlockManager::<Memory>::builder()
            .block_count(680)
            .block_size(PER_BLOCK)
            .registry(BlockRegistry::builder().frequency_tracker(tracker).build())
            .with_lineage_backend_eviction(LineageEviction::Tick)
            .build()
            .expect("680 blocks");
        let mut all = Vec::new();
        for prompt in prompts {
            let sequence = TokenBlockSequence::from_slice(prompt, PER_BLOCK as u32, Some(TENANT.0.into()));
            let blocks = manager.allocate_blocks(BLOCKS).expect("there is room");
            let complete = blocks
                .into_iter()
                .zip(sequence.blocks())
                .map(|(b, tokens)| b.complete(tokens).expect("16 tokens"));
            drop(manager.register_blocks(complete.collect()));
            all.push(hashes(prompt));
        }
        Theirs { manager, hashes: all, held: Vec::new() }
    }

    fn find(&self, chain: usize) -> Vec<ImmutableBlock<Memory>> {
        let found = self.manager.match_blocks(black_box(&self.hashes[chain]));
        assert_eq!(found.len(), BLOCKS);
        found
    }
}
