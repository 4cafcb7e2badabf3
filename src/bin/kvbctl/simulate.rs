//! `kvbctl simulate`: from a trace and options to what [`kvbroker::simulate`] makes of them.

use super::{Failure, print_json};
use clap::ValueEnum;
use kvbroker::broker::Eviction;
use kvbroker::map::page_bytes;
use kvbroker::model::{KvType, ModelShape};
use kvbroker::profile::Profile;
use kvbroker::simulate::{
    self, Capacity, Options, Outcome, Request, SHOP_FLOOR_BLOCK, TRACE_BLOCK, replay, shop_floor,
};
use kvbroker::size::Size;
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The options of `kvbctl simulate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A trace: one JSON object per line with timestamp (ms), input_length, output_length (tokens) and hash_ids, as the
    /// Mooncake project publishes them; - for standard input
    #[arg(required_unless_present = "shop_floor", conflicts_with = "shop_floor", value_name = "TRACE")]
    trace: Option<PathBuf>,
    /// Instead of a trace from a file: so many shifts of eight hours on a shop floor, at most 100
    #[arg(long, value_name = "SHIFTS", value_parser = clap::value_parser!(u64).range(1..=100))]
    shop_floor: Option<u64>,
    /// What the shop floor's chances are drawn from
    #[arg(long, default_value_t = 1, value_name = "N", requires = "shop_floor")]
    seed: u64,
    /// Write the trace to this file, and do no more
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// The pool: a size, or unlimited. At most 262144 blocks can be simulated, which take 300 MiB of real memory with the
    /// longest trace; 682 blocks take 15 MiB
    #[arg(long, default_value = "256M", value_name = "SIZE|unlimited", conflicts_with = "pool_blocks")]
    pool: Pool,
    /// The pool, in blocks of the trace
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pool_blocks: Option<u32>,
    /// Tokens that one hash id stands for [default: 512; of a shop floor: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    trace_block: Option<u32>,
    /// Tokens in one block of the pool [default: those of a trace's block]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens_per_block: Option<u32>,
    /// The model, for the size of a token: a config.json, a directory that holds one, or a GGUF file [default: the
    /// reference model, 24 KiB]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Element type of K and V
    #[arg(long, default_value_t = KvType::F16, value_name = "TYPE", requires = "config")]
    kv_type: KvType,
    /// Deal the requests out to so many tenants, who find nothing of each other's
    #[arg(long, default_value_t = 1, value_name = "N")]
    tenants: u32,
    /// What each tenant is sure of
    #[arg(long, value_name = "SIZE")]
    reserve: Option<Size>,
    /// What each tenant may own
    #[arg(long, value_name = "SIZE")]
    limit: Option<Size>,
    /// Hold each session's blocks while its answer is made, at so many tokens per second; otherwise a session is over
    /// when its prompt is in
    #[arg(long, value_name = "TOKENS")]
    speed: Option<f64>,
    /// Which cached prefixes go first
    #[arg(long, value_enum, default_value_t = Policy::Default)]
    policy: Policy,
    /// Print JSON; sizes are in bytes
    #[arg(long)]
    json: bool,
}

/// `--policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// What the broker does: lru
    Default,
    /// The least recently used
    Lru,
    /// Blocks that were never found again, then the least recently used
    Found,
}

/// `--pool`.
#[derive(Debug, Clone, Copy)]
enum Pool {
    Unlimited,
    Size(Size),
}

impl std::str::FromStr for Pool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "unlimited" => Ok(Pool::Unlimited),
            _ => text.parse().map(Pool::Size).map_err(|e: kvbroker::size::SizeError| e.to_string()),
        }
    }
}

#[derive(Debug, Serialize)]
struct Answer {
    policy: Eviction,
    block_tokens: u32,
    block_bytes: u64,
    #[serde(flatten)]
    outcome: Outcome,
    /// The same by plain LRU.
    lru: Outcome,
}

impl Args {
    /// Replays, and prints what came of it.
    pub fn run(self, out: &mut impl Write) -> Result<(), Failure> {
        let trace_block = self.trace_block.unwrap_or(if self.shop_floor.is_some() {
            SHOP_FLOOR_BLOCK
        } else {
            TRACE_BLOCK
        });
        let trace = self.trace(trace_block)?;
        if let Some(path) = &self.write {
            return write_trace(&trace, path)
                .map_err(|e| Failure::Refused(format!("{}: {e}", path.display())));
        }
        let options = self.options(trace_block)?;
        let refused = |e: simulate::OptionsError| Failure::Refused(e.to_string());
        let outcome = replay(&trace, &options).map_err(refused)?;
        let lru = match options.eviction {
            Eviction::Lru => outcome,
            Eviction::Found => {
                replay(&trace, &Options { eviction: Eviction::Lru, ..options.clone() }).map_err(refused)?
            }
        };
        if self.json {
            let policy = options.eviction;
            let (block_tokens, block_bytes) = (options.tokens_per_block, options.block_bytes);
            return print_json(out, &Answer { policy, block_tokens, block_bytes, outcome, lru });
        }
        table(&options, &outcome, &lru, out)
    }

    fn trace(&self, block: u32) -> Result<Vec<Request>, Failure> {
        if let Some(shifts) = self.shop_floor {
            return Ok(shop_floor(self.seed, shifts));
        }
        let path = self.trace.as_deref().unwrap_or(std::path::Path::new("-"));
        let read = if path.as_os_str() == "-" {
            simulate::read(std::io::stdin().lock(), block)
        } else {
            let file = File::open(path).map_err(|e| Failure::Refused(format!("{}: {e}", path.display())))?;
            simulate::read(BufReader::new(file), block)
        };
        read.map_err(|e| Failure::Refused(format!("{}: {e}", path.display())))
    }

    fn options(&self, trace_block: u32) -> Result<Options, Failure> {
        let profile = match &self.config {
            None => Profile::reference(),
            Some(path) => {
                let shape = ModelShape::from_path(path).map_err(|e| Failure::Refused(e.to_string()))?;
                shape.profile(self.kv_type, 16).map_err(|e| Failure::Refused(e.to_string()))?
            }
        };
        let tokens_per_block = self.tokens_per_block.unwrap_or(trace_block);
        // Whole pages, as a block's place in an extent is.
        let page = page_bytes() as u64;
        let block_bytes = (profile.bytes_per_token() * u64::from(tokens_per_block)).div_ceil(page) * page;
        let capacity = match (self.pool_blocks, self.pool) {
            (Some(blocks), _) => {
                Capacity::Blocks(blocks.saturating_mul(trace_block / tokens_per_block.max(1)))
            }
            (None, Pool::Unlimited) => Capacity::Unlimited,
            (None, Pool::Size(pool)) => {
                Capacity::Blocks(u32::try_from(pool.bytes() / block_bytes).unwrap_or(u32::MAX))
            }
        };
        let extents = |size: Size| u32::try_from(size.bytes() / block_bytes).unwrap_or(u32::MAX);
        Ok(Options {
            capacity,
            trace_block,
            tokens_per_block,
            block_bytes,
            tenants: self.tenants,
            reserve: self.reserve.map_or(0, extents),
            limit: self.limit.map(extents),
            speed: self.speed,
            eviction: match self.policy {
                Policy::Default => Eviction::default(),
                Policy::Lru => Eviction::Lru,
                Policy::Found => Eviction::Found,
            },
        })
    }
}

/// Writes a trace: a file is as it was, or has all of it. What is no file, such as a pipe, is written as it is.
fn write_trace(trace: &[Request], path: &Path) -> io::Result<()> {
    let write = |file: File| {
        let mut file = BufWriter::new(file);
        simulate::write(trace, &mut file)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)
    };
    let before = std::fs::metadata(path).ok();
    if before.as_ref().is_some_and(|m| !m.is_file()) {
        return write(File::options().write(true).open(path)?).map(|_| ());
    }
    // Where a link leads, if there is something: the link stays one.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let mut beside = path.clone().into_os_string();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    let file = File::options().write(true).create_new(true).open(&beside)?;
    let done = write(file).and_then(|file| {
        before.map_or(Ok(()), |m| file.set_permissions(m.permissions()))?;
        file.sync_all()?;
        std::fs::rename(&beside, &path)
    });
    if done.is_err() {
        // It is of no use; what went wrong is said.
        let _ = std::fs::remove_file(&beside);
    }
    done
}

fn table(options: &Options, outcome: &Outcome, lru: &Outcome, out: &mut impl Write) -> Result<(), Failure> {
    writeln!(
        out,
        "{} requests on {} blocks of {} tokens ({} each)",
        outcome.requests,
        outcome.pool_blocks,
        options.tokens_per_block,
        Size::from_bytes(options.block_bytes),
    )?;
    let row = |name: &str, of: &dyn Fn(&Outcome) -> String, out: &mut dyn Write| match options.eviction {
        Eviction::Lru => writeln!(out, "{name:<22}{:>14}", of(outcome)),
        Eviction::Found => writeln!(out, "{name:<22}{:>14}{:>14}", of(outcome), of(lru)),
    };
    let header = match options.eviction {
        Eviction::Lru => format!("{:<22}{:>14}", "", "lru"),
        Eviction::Found => format!("{:<22}{:>14}{:>14}", "", "found", "lru"),
    };
    writeln!(out, "{header}")?;
    row("full blocks", &|o| o.blocks.to_string(), out)?;
    row("found", &|o| o.hits.to_string(), out)?;
    row("hit rate", &|o| format!("{:.2} %", 100.0 * o.hit_rate), out)?;
    row("evicted", &|o| o.evictions.to_string(), out)?;
    row("requests refused", &|o| o.refusals.to_string(), out)?;
    if options.speed.is_some() {
        row("answers cut short", &|o| o.cut.to_string(), out)?;
        let ratio = |o: &Outcome| o.held_over_live.map_or_else(|| "-".into(), |r| format!("{r:.3}"));
        row("held / live bytes", &ratio, out)?;
    }
    Ok(())
}
