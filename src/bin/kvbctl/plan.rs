//! `kvbctl plan`: from options and model files to the account that [`kvbroker::plan`] makes.

use super::{Failure, print_json};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kvbroker::heap::Backend;
use kvbroker::map::page_bytes;
use kvbroker::model::{KvType, ModelShape};
use kvbroker::packing::{CMA_ALIGNMENT_ORDER, ExtentSize, PackingError, Placement};
use kvbroker::plan::{Board, Options, Plan};
use kvbroker::profile::USUAL_TOKENS_PER_BLOCK;
use kvbroker::size::Size;
use std::io::Write;
use std::path::PathBuf;

/// The options of `kvbctl plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a Hugging Face config.json, a directory that holds one, or a GGUF file. Given again: further models
    /// that share the pool
    #[arg(long, required = true, value_name = "FILE")]
    config: Vec<PathBuf>,
    /// The pool
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    pool: Size,
    /// Tokens in a block: a power of two
    #[arg(long, default_value_t = USUAL_TOKENS_PER_BLOCK, value_name = "N")]
    tokens_per_block: u32,
    /// The longest session, in tokens
    #[arg(long, default_value_t = 2048, value_name = "TOKENS")]
    context: u32,
    /// Sessions at the same time
    #[arg(long, default_value_t = 4, value_name = "N")]
    sessions: u32,
    /// Tokens that a session holds at a time, for the paged account [default: a quarter of --context]
    #[arg(long, value_name = "TOKENS")]
    live: Option<u32>,
    #[arg(long, default_value_t = KvType::F16, value_name = "TYPE",
          help = format!("Element type of K and V: {}", KvType::names()))]
    kv_type: KvType,
    /// Extent size: auto, block (one file descriptor for each block), or a size
    #[arg(long, default_value_t = ExtentSize::Auto, value_name = "auto|block|SIZE")]
    extent: ExtentSize,
    /// Where the pool lies
    #[arg(long, default_value = Backend::DmaHeap.name(), value_parser = Memory::parser())]
    backend: Memory,
    /// The board's page size [default: this machine's]
    #[arg(long, value_name = "SIZE")]
    page_size: Option<Size>,
    /// The board's CONFIG_CMA_ALIGNMENT: buffers start on a boundary of up to 2^N pages
    #[arg(long, default_value_t = CMA_ALIGNMENT_ORDER, value_name = "N")]
    cma_alignment: u32,
    /// All memory of the board, for the account of the whole board
    #[arg(long, value_name = "SIZE", requires_all = ["base", "weights"])]
    ram: Option<Size>,
    /// What the system and its applications take of it
    #[arg(long, value_name = "SIZE", requires = "ram")]
    base: Option<Size>,
    /// What the model's weights take of it
    #[arg(long, value_name = "SIZE", requires = "ram")]
    weights: Option<Size>,
    /// Print JSON; sizes are in bytes
    #[arg(long)]
    json: bool,
}

/// What the kernel makes extents of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// A kind that the broker knows.
    Of(Backend),
    /// The system dma-heap. To the broker it is a dma-heap like any other, but its pages are scattered.
    System,
}

impl Memory {
    const SYSTEM: &str = "system";

    fn parser() -> impl TypedValueParser<Value = Memory> {
        let of = |b: Backend| PossibleValue::new(b.name()).help(b.about());
        let system = PossibleValue::new(Self::SYSTEM).help("The system dma-heap: scattered pages");
        let all = Backend::CONFIGURABLE.map(of).into_iter().chain([system]);
        PossibleValuesParser::new(all)
            .map(|name| Backend::configurable(&name).map_or(Memory::System, Memory::Of))
    }
}

impl Args {
    pub fn run(self, out: &mut impl Write) -> Result<(), Failure> {
        let options = self.options()?;
        let models = self
            .config
            .iter()
            .map(|path| ModelShape::from_path(path).map_err(refuse))
            .collect::<Result<Vec<_>, _>>()?;
        let Some((model, beside)) = models.split_first() else {
            return Err(Failure::Refused("no model given".to_owned()));
        };
        let plan = Plan::new(model, beside, &options).map_err(refuse)?;
        if self.json { print_json(out, &plan) } else { Ok(write!(out, "{plan}")?) }
    }

    fn options(&self) -> Result<Options, Failure> {
        let board = match (self.ram, self.base, self.weights) {
            (Some(ram), Some(base), Some(weights)) => {
                Some(Board { ram: ram.bytes(), base: base.bytes(), weights: weights.bytes() })
            }
            _ => None,
        };
        Ok(Options {
            pool: self.pool.bytes(),
            placement: self.placement().map_err(refuse)?,
            extent: self.extent,
            tokens_per_block: self.tokens_per_block,
            context: self.context,
            sessions: self.sessions,
            live: self.live,
            kv: self.kv_type,
            board,
        })
    }

    fn placement(&self) -> Result<Placement, PackingError> {
        let page = self.page_size.map_or(page_bytes() as u64, Size::bytes);
        match self.backend {
            Memory::Of(backend) if !backend.is_scattered() => Placement::cma(page, self.cma_alignment),
            Memory::Of(_) | Memory::System => Placement::pages(page),
        }
    }
}

fn refuse(error: impl std::error::Error) -> Failure {
    Failure::Refused(error.to_string())
}
