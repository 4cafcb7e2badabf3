//! The account of a model's KV cache on a board: what a token takes, how a pool packs, what paging saves.
//!
//! Owns no memory and asks nobody: everything follows from a [`ModelShape`] and [`Options`]. Invariant: every figure
//! is computed from the same [`Profile`] and [`Extents`] that the daemon uses, so what is printed is what a fresh
//! pool gives.

mod text;

use crate::model::{KvType, ModelShape, ShapeError};
use crate::packing::{
    CMA_ALIGNMENT_ORDER, ExtentSize, Extents, Packing, PackingError, Placement, Waste, block_sizes, percent,
};
use crate::profile::{Profile, USUAL_TOKENS_PER_BLOCK};
use crate::size::Size;
use serde::Serialize;
use thiserror::Error;

/// Waste from which on a plan warns, in per cent of the pool.
const WASTE_WARNING_PERCENT: f64 = 10.0;
/// Mappings that a process may have: Linux' default of vm.max_map_count.
const VMA_LIMIT: u64 = 65_530;
/// File descriptors that a process may have: the usual soft RLIMIT_NOFILE.
const FD_LIMIT: u64 = 1024;
/// The longest context, in tokens: with it, the bytes of the largest profile stay within 64 bits (2^10 groups of at
/// most 2^30 bytes per token).
pub const MAX_CONTEXT: u32 = (1 << 24) - 1;
/// The largest amount of a board's memory that is accounted, in bytes.
const MAX_RAM: i64 = 1 << 50;

/// Tokens that tiles of the RK3588 NPU take at once, by element type. In Q K^T the tokens are N, a multiple of 16
/// for f16, 32 for int8 and 64 for int4; in P V they are K, a multiple of 32 at every type (rknn_matmul_api.h).
const NPU_TILES: [(&str, u32); 3] = [("f16", 32), ("int8", 32), ("int4", 64)];
/// What a head's dimension must be a multiple of on that NPU: it is K in Q K^T.
const NPU_DIM: u32 = 32;

/// What to account for. The defaults are those of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the pool.
    pub pool: u64,
    /// Where extents may lie.
    pub placement: Placement,
    /// The configured extent size.
    pub extent: ExtentSize,
    /// Tokens in a block: a power of two.
    pub tokens_per_block: u32,
    /// The longest session, in tokens: at most [`MAX_CONTEXT`].
    pub context: u32,
    /// Sessions at the same time.
    pub sessions: u32,
    /// Tokens that a session holds at a time; a quarter of the context unless stated.
    pub live: Option<u32>,
    /// Element type of K and V.
    pub kv: KvType,
    /// The board's memory.
    pub board: Option<Board>,
}

/// A board's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Board {
    /// All of it.
    pub ram: u64,
    /// What the system and its applications take.
    pub base: u64,
    /// What the model's weights take.
    pub weights: u64,
}

impl Default for Options {
    fn default() -> Self {
        let placement =
            Placement::cma(4096, CMA_ALIGNMENT_ORDER).expect("the usual kernel's values are valid");
        Options {
            pool: 256 << 20,
            placement,
            extent: ExtentSize::Auto,
            tokens_per_block: USUAL_TOKENS_PER_BLOCK,
            context: 2048,
            sessions: 4,
            live: None,
            kv: KvType::default(),
            board: None,
        }
    }
}

/// Why there is no account.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("{model}: {source}")]
    Shape { model: String, source: ShapeError },
    #[error(transparent)]
    Packing(#[from] PackingError),
    #[error("a context of {0} tokens: it must be from 1 to {MAX_CONTEXT}")]
    Context(u32),
    #[error("{live} live tokens in a session of at most {context}: use a number from 1 to {context}")]
    Live { live: u32, context: u32 },
    #[error("0 sessions: there is nothing to compare")]
    NoSessions,
    #[error("the account exceeds 64 bits: use fewer sessions, a shorter context or less memory")]
    TooLarge,
}

/// The account. Serialises to what `kvbctl plan --json` prints; sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The model's name.
    pub model: String,
    /// The model's family.
    pub family: &'static str,
    /// Layers.
    pub layers: usize,
    /// Attention heads.
    pub heads: u32,
    /// KV heads of a layer; `null` if layers differ.
    pub kv_heads: Option<u32>,
    /// Dimension of a K head; `null` if layers differ.
    pub head_dim: Option<u32>,
    /// Element type of K and V.
    pub kv_type: &'static str,
    /// Tokens in a block.
    pub tokens_per_block: u32,
    /// Bytes of a token in all layers.
    pub bytes_per_token: u64,
    /// Bytes of one block of each group together.
    pub bytes_per_block: u64,
    /// Bytes of a sequence of 512 tokens; windows are honoured, here and below.
    pub bytes_at_512: u64,
    /// Bytes of a sequence of 2048 tokens.
    pub bytes_at_2048: u64,
    /// The longest session, in tokens.
    pub context: u32,
    /// Bytes of a sequence that long.
    pub bytes_at_context: u64,
    /// Bytes of the blocks that it holds, of all groups: windows begin and end within blocks.
    pub held_bytes_at_context: u64,
    /// Bytes of a sequence that long if layers with a window kept all tokens.
    pub bytes_at_context_without_windows: u64,
    /// Layers by the tokens that they keep; those that keep all come first.
    pub groups: Vec<GroupPlan>,

    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Whether extents are physically contiguous (CMA).
    pub contiguous: bool,
    /// The configured extent size.
    pub extent: ExtentSize,
    /// Bytes of an extent.
    pub extent_bytes: u64,
    /// The boundary on which the kernel starts an extent.
    pub extent_align_bytes: u64,
    /// Extents in the pool.
    pub extents: u64,
    /// Blocks in an extent; `null` with several groups, each of which has its own.
    pub blocks_per_extent: Option<u64>,
    /// Blocks on paper: pool over block. With several groups, one block of each counts as one.
    pub blocks_ideal: u64,
    /// Blocks after packing, counted likewise.
    pub blocks: u64,
    /// Blocks if each were a buffer of its own (`extent = "block"`).
    pub blocks_strict: u64,
    /// The boundary on which the kernel would start each of these.
    pub strict_align_bytes: u64,
    /// Bytes of the pool in none of `blocks`.
    pub waste_bytes: u64,
    /// The same in per cent of the pool.
    pub waste_percent: f64,
    /// Other models that draw on the same pool.
    pub beside: Vec<Beside>,

    /// Sessions at the same time.
    pub sessions: u32,
    /// Bytes if each session reserves its longest context.
    pub static_bytes: u64,
    /// Tokens that each session is taken to hold.
    pub live_tokens: u32,
    /// Blocks that the sessions then hold, of all groups.
    pub paged_blocks: u64,
    /// Bytes of these blocks.
    pub paged_bytes: u64,
    /// Extents that hold these blocks.
    pub paged_extents: u64,
    /// Bytes of these extents.
    pub paged_extent_bytes: u64,
    /// Tokens that fit the pool, in all layers and without windows.
    pub pool_tokens: u64,
    /// Sessions of the full context that fit the pool at once.
    pub sessions_at_context: u64,
    /// The most tokens of one session that has the pool for itself, up to [`MAX_CONTEXT`]; windows are honoured.
    pub longest_session_tokens: u64,

    /// The smallest tokens per block with which plane views work; `null` if none does.
    pub plane_view_tokens_per_block: Option<u32>,
    /// Whether they work with the tokens per block at hand.
    pub plane_views: bool,
    /// Mappings of a session of the full context in plane views: one for each block and plane.
    pub vmas_per_session: u64,
    /// Mappings of all sessions in one process.
    pub vmas: u64,
    /// Mappings that a process may have by default.
    pub vma_limit: u64,
    /// Tokens that NPU tiles take.
    pub npu_tiles: Vec<NpuTile>,

    /// What is left on the board.
    pub board: Option<BoardPlan>,
    /// What the operator should know before using this.
    pub warnings: Vec<String>,
    /// What was assumed about the model.
    pub notes: Vec<String>,
}

/// The layers that keep the same tokens. Counts are for a pool used by this group alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupPlan {
    /// Layers.
    pub layers: usize,
    /// Their numbers in the model.
    pub layer_numbers: Vec<u32>,
    /// Sliding window in tokens; `null` keeps all.
    pub window: Option<u32>,
    /// Bytes of a token.
    pub bytes_per_token: u64,
    /// Bytes of a block.
    pub bytes_per_block: u64,
    /// Bytes that a block occupies: whole pages.
    pub slot_bytes: u64,
    /// Bytes of a sequence of the full context.
    pub bytes_at_context: u64,
    /// The most blocks that it holds.
    pub blocks_at_context: u64,
    /// Bytes of these blocks.
    pub held_bytes_at_context: u64,
    /// Planes with bytes in them: K and V of each layer.
    pub planes: u64,
    /// Blocks in an extent.
    pub blocks_per_extent: u64,
    /// Blocks on paper.
    pub blocks_ideal: u64,
    /// Blocks after packing.
    pub blocks: u64,
    /// Bytes of the pool in no block.
    pub waste_bytes: u64,
    /// The same in per cent of the pool.
    pub waste_percent: f64,
    /// The same by cause.
    pub waste: Waste,
}

/// Another model in the same extents.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Beside {
    /// Its name.
    pub model: String,
    /// Its groups.
    pub groups: Vec<GroupPlan>,
}

/// Whether a block is whole tiles of an NPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct NpuTile {
    /// Element type of the matrix multiplication.
    pub element: &'static str,
    /// Tokens in a tile.
    pub tokens: u32,
    /// Whether a block is whole tiles.
    pub whole: bool,
}

/// A board's account, in bytes; negative where memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BoardPlan {
    /// All memory.
    pub ram_bytes: u64,
    /// Taken by the system and its applications.
    pub base_bytes: u64,
    /// Taken by weights.
    pub weights_bytes: u64,
    /// Left if each session reserves its longest context.
    pub left_static_bytes: i64,
    /// Left if the pool serves the sessions: all of the pool is gone, whatever they hold.
    pub left_paged_bytes: i64,
}

impl Plan {
    /// The account of `model`; `beside` are other models that shall fit the same extents.
    pub fn new(model: &ModelShape, beside: &[ModelShape], options: &Options) -> Result<Self, PlanError> {
        let o = options;
        if o.context == 0 || o.context > MAX_CONTEXT {
            return Err(PlanError::Context(o.context));
        }
        let live = o.live.unwrap_or(o.context.div_ceil(4));
        if live == 0 || live > o.context {
            return Err(PlanError::Live { live, context: o.context });
        }
        if o.sessions == 0 {
            return Err(PlanError::NoSessions);
        }
        let profile_of = |m: &ModelShape| {
            m.profile(o.kv, o.tokens_per_block)
                .map_err(|source| PlanError::Shape { model: m.name.clone(), source })
        };
        let profile = profile_of(model)?;
        let others = beside.iter().map(profile_of).collect::<Result<Vec<_>, _>>()?;

        let sizes = block_sizes(std::iter::once(&profile).chain(&others));
        let extents = Extents::choose(o.pool, o.extent, &sizes, o.placement)?;
        let strict = Extents::choose(o.pool, ExtentSize::Block, &block_sizes([&profile]), o.placement)?;
        let context = u64::from(o.context);
        let groups = group_plans(&profile, &extents, context);
        let one_of_each: Vec<_> = groups.iter().map(|g| (g.bytes_per_block, 1)).collect();
        let bytes_per_block: u64 = groups.iter().map(|g| g.bytes_per_block).sum();
        let blocks = extents.sets(&one_of_each);
        let waste_bytes = o.pool - blocks * bytes_per_block;

        let demand = Demand::new(&profile, &extents, u64::from(live), o.sessions)?;
        let at_context: Vec<_> = (0..groups.len())
            .map(|g| (groups[g].bytes_per_block, profile.group_blocks_at(g, context)))
            .collect();
        let static_bytes = times(profile.bytes_at(context), o.sessions)?;
        let vmas_per_session =
            groups.iter().zip(&at_context).map(|(g, (_, blocks))| g.planes * blocks).sum::<u64>();

        let mut plan = Plan {
            model: model.name.clone(),
            family: model.family.name(),
            layers: model.layers.len(),
            heads: model.heads,
            kv_heads: same(model.layers.iter().map(|l| l.kv_heads)),
            head_dim: same(model.layers.iter().map(|l| l.k_dim)),
            kv_type: o.kv.name(),
            tokens_per_block: o.tokens_per_block,
            bytes_per_token: profile.bytes_per_token(),
            bytes_per_block,
            bytes_at_512: profile.bytes_at(512),
            bytes_at_2048: profile.bytes_at(2048),
            context: o.context,
            bytes_at_context: profile.bytes_at(context),
            held_bytes_at_context: groups.iter().map(|g| g.held_bytes_at_context).sum(),
            bytes_at_context_without_windows: profile.bytes_per_token() * context,
            pool_bytes: o.pool,
            page_bytes: o.placement.page(),
            contiguous: o.placement.contiguous(),
            extent: o.extent,
            extent_bytes: extents.bytes,
            extent_align_bytes: o.placement.align_for(extents.bytes),
            extents: extents.count,
            blocks_per_extent: if let [only] = &groups[..] { Some(only.blocks_per_extent) } else { None },
            blocks_ideal: o.pool / bytes_per_block,
            blocks,
            blocks_strict: strict.sets(&one_of_each),
            strict_align_bytes: o.placement.align_for(strict.bytes),
            waste_bytes,
            waste_percent: tenths(percent(waste_bytes, o.pool)),
            beside: beside
                .iter()
                .zip(&others)
                .map(|(m, p)| Beside { model: m.name.clone(), groups: group_plans(p, &extents, context) })
                .collect(),
            sessions: o.sessions,
            static_bytes,
            live_tokens: live,
            paged_blocks: demand.blocks,
            paged_bytes: demand.bytes,
            paged_extents: demand.extents,
            paged_extent_bytes: demand.extents.checked_mul(extents.bytes).ok_or(PlanError::TooLarge)?,
            pool_tokens: blocks * u64::from(o.tokens_per_block),
            sessions_at_context: extents.sets(&at_context),
            longest_session_tokens: longest_session(&profile, &extents),
            plane_view_tokens_per_block: profile.plane_view_tokens(o.placement.page()),
            plane_views: profile.has_plane_views(o.placement.page()),
            vmas_per_session,
            vmas: times(vmas_per_session, o.sessions)?,
            vma_limit: VMA_LIMIT,
            npu_tiles: NPU_TILES
                .map(|(element, tokens)| NpuTile { element, tokens, whole: o.tokens_per_block % tokens == 0 })
                .to_vec(),
            board: o.board.map(|b| b.account(static_bytes, o.pool)).transpose()?,
            warnings: Vec::new(),
            notes: model.notes.clone(),
            groups,
        };
        plan.warnings = plan.warn(model);
        if o.live.is_none() {
            plan.notes.push(format!(
                "a session holds {live} tokens at a time, a quarter of its longest: state yours (--live)"
            ));
        }
        Ok(plan)
    }

    fn warn(&self, model: &ModelShape) -> Vec<String> {
        let mut said = Vec::new();
        let own = (&self.model, &self.groups);
        for (name, groups) in std::iter::once(own).chain(self.beside.iter().map(|b| (&b.model, &b.groups))) {
            for group in groups.iter().filter(|g| g.waste_percent >= WASTE_WARNING_PERCENT) {
                said.push(format!(
                    "{name}: blocks of {} in extents of {} waste {:.0} % of the pool",
                    Size::from_bytes(group.bytes_per_block),
                    Size::from_bytes(self.extent_bytes),
                    group.waste_percent
                ));
            }
        }
        if self.paged_extents > self.extents {
            said.push(format!(
                "{} sessions of {} tokens need {} extents and the pool has {}: the broker will refuse some",
                self.sessions, self.live_tokens, self.paged_extents, self.extents
            ));
        }
        if self.plane_views && self.vmas > self.vma_limit {
            said.push(format!(
                "plane views of all sessions in one process need {} mappings, more than the {} of vm.max_map_count: raise it, or use more tokens per block",
                self.vmas, self.vma_limit
            ));
        }
        if self.extents > FD_LIMIT {
            said.push(format!(
                "a process that holds all {} extents needs as many file descriptors, more than the usual limit of {FD_LIMIT}: use larger extents, or raise RLIMIT_NOFILE",
                self.extents
            ));
        }
        if let Some(most) = model.context.filter(|most| self.context > *most) {
            said.push(format!(
                "the model file states a context of {most} tokens, less than the {} asked for",
                self.context
            ));
        }
        if let Some(odd) = model.layers.iter().flat_map(|l| [l.k_dim, l.v_dim]).find(|d| d % NPU_DIM != 0) {
            said.push(format!(
                "a head dimension of {odd} is no multiple of {NPU_DIM}: NPU tiles pad it to {}",
                odd.next_multiple_of(NPU_DIM)
            ));
        }
        if let Some(board) = &self.board {
            for (left, how) in [
                (board.left_static_bytes, "with static reservation"),
                (board.left_paged_bytes, "with the pool"),
            ] {
                if left < 0 {
                    let short = Size::from_bytes(left.unsigned_abs());
                    said.push(format!("{how} the board is short of {short}: the OOM killer would decide"));
                }
            }
        }
        said
    }
}

/// What a number of sessions of one length holds.
struct Demand {
    blocks: u64,
    bytes: u64,
    extents: u64,
}

impl Demand {
    fn new(profile: &Profile, extents: &Extents, tokens: u64, sessions: u32) -> Result<Self, PlanError> {
        let mut demand = Demand { blocks: 0, bytes: 0, extents: 0 };
        let mut groups = Vec::new();
        for group in 0..profile.groups().len() {
            let blocks = times(profile.group_blocks_at(group, tokens), sessions)?;
            let block = profile.block_bytes(group);
            let bytes = blocks.checked_mul(block).ok_or(PlanError::TooLarge)?;
            demand.blocks = demand.blocks.checked_add(blocks).ok_or(PlanError::TooLarge)?;
            demand.bytes = demand.bytes.checked_add(bytes).ok_or(PlanError::TooLarge)?;
            groups.push((block, blocks));
        }
        demand.extents = extents.needed(&groups).ok_or(PlanError::TooLarge)?;
        Ok(demand)
    }
}

impl Board {
    fn account(self, static_bytes: u64, pool: u64) -> Result<BoardPlan, PlanError> {
        // Each at most 2^50 bytes, so that no sum of them leaves 64 bits.
        let within =
            |bytes: u64| i64::try_from(bytes).ok().filter(|b| *b <= MAX_RAM).ok_or(PlanError::TooLarge);
        let free = within(self.ram)? - within(self.base)? - within(self.weights)?;
        Ok(BoardPlan {
            ram_bytes: self.ram,
            base_bytes: self.base,
            weights_bytes: self.weights,
            left_static_bytes: free - within(static_bytes)?,
            left_paged_bytes: free - within(pool)?,
        })
    }
}

fn group_plans(profile: &Profile, extents: &Extents, context: u64) -> Vec<GroupPlan> {
    let plan = |(number, group): (usize, &crate::profile::Group)| {
        let (block, held) = (profile.block_bytes(number), profile.group_blocks_at(number, context));
        let Packing { slot_bytes, blocks_per_extent, blocks, blocks_ideal, waste, .. } = extents.pack(block);
        let bytes_per_token = profile.group_bytes_per_token(number);
        let kept = group.window.map_or(context, |w| context.min(u64::from(w)));
        let planes = group.layers.iter().map(|(_, l)| 1 + u64::from(l.v_row > 0)).sum();
        GroupPlan {
            layers: group.layers.len(),
            layer_numbers: group.layers.iter().map(|(n, _)| *n).collect(),
            window: group.window,
            bytes_per_token,
            bytes_per_block: block,
            slot_bytes,
            bytes_at_context: kept * bytes_per_token,
            blocks_at_context: held,
            held_bytes_at_context: held * block,
            planes,
            blocks_per_extent,
            blocks_ideal,
            blocks,
            waste_bytes: waste.total(),
            waste_percent: tenths(percent(waste.total(), extents.pool)),
            waste,
        }
    };
    profile.groups().iter().enumerate().map(plan).collect()
}

/// The most tokens of one sequence whose blocks of all groups fit the pool.
fn longest_session(profile: &Profile, extents: &Extents) -> u64 {
    let fits = |tokens: u64| {
        let held = |g| (profile.block_bytes(g), profile.group_blocks_at(g, tokens));
        let groups: Vec<_> = (0..profile.groups().len()).map(held).collect();
        extents.needed(&groups).is_some_and(|needed| needed <= extents.count)
    };
    let (mut low, mut high) = (0, u64::from(MAX_CONTEXT));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// The value that all have.
fn same(mut values: impl Iterator<Item = u32>) -> Option<u32> {
    let first = values.next()?;
    values.all(|v| v == first).then_some(first)
}

fn times(bytes: u64, sessions: u32) -> Result<u64, PlanError> {
    bytes.checked_mul(u64::from(sessions)).ok_or(PlanError::TooLarge)
}

/// Rounded to one decimal, so that JSON has no noise.
fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Family, LayerShape};
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn shape(layers: u32, kv_heads: u32, dim: u32) -> ModelShape {
        let layer = LayerShape { kv_heads, k_dim: dim, v_dim: dim, window: None };
        ModelShape {
            family: Family::Llama,
            name: "m".to_owned(),
            heads: kv_heads,
            context: Some(8192),
            layers: vec![layer; layers as usize],
            notes: vec![],
        }
    }

    fn reference() -> ModelShape {
        shape(24, 2, 128)
    }

    fn gemma() -> ModelShape {
        let mut shape = shape(26, 1, 256);
        for (n, layer) in shape.layers.iter_mut().enumerate() {
            layer.window = (n % 6 != 5).then_some(512);
        }
        shape
    }

    fn plan(shape: &ModelShape, options: Options) -> Plan {
        Plan::new(shape, &[], &options).unwrap()
    }

    #[test]
    fn the_reference_model_has_the_figures_that_the_project_states() {
        let p = plan(&reference(), Options::default());
        assert_eq!((p.bytes_per_token, p.bytes_per_block), (24 << 10, 384 << 10));
        assert_eq!((p.bytes_at_512, p.bytes_at_2048), (12 * MIB, 48 * MIB));
        assert_eq!((p.blocks_ideal, p.blocks, p.blocks_strict), (682, 680, 512));
        assert_eq!((p.blocks_per_extent, p.extent_bytes, p.extents), (Some(8), 3 * MIB, 85));
        assert_eq!((p.waste_bytes, p.waste_percent), (MIB, 0.4));
        assert_eq!(p.groups[0].waste.pool_tail, MIB);
        assert_eq!(p.pool_tokens, 10_880);
        assert_eq!((p.plane_view_tokens_per_block, p.plane_views), (Some(8), true));
        assert_eq!((p.vmas_per_session, p.vmas), (48 * 128, 4 * 48 * 128));
        assert!(p.warnings.is_empty(), "{:?}", p.warnings);
        assert_eq!((p.kv_heads, p.head_dim), (Some(2), Some(128)));
        assert!(p.notes[0].contains("512 tokens at a time"), "the assumption is said: {:?}", p.notes);
    }

    #[test]
    fn seven_static_sessions_of_4096_tokens_reserve_672_mib_and_paging_holds_what_lives() {
        let options = Options { sessions: 7, context: 4096, ..Options::default() };
        let p = plan(&reference(), options);
        assert_eq!(p.static_bytes, 672 * MIB);
        // 1024 tokens live in each: 64 blocks.
        assert_eq!((p.live_tokens, p.paged_blocks, p.paged_bytes), (1024, 448, 168 * MIB));
        assert_eq!((p.paged_extents, p.paged_extent_bytes), (56, 168 * MIB));
        assert_eq!(p.sessions_at_context, 2, "680 blocks, 256 a session");
        let short = Options { sessions: 7, context: 4096, live: Some(1), ..Options::default() };
        assert_eq!(plan(&reference(), short).paged_extents, 1, "7 blocks in one extent of 8");
    }

    #[test]
    fn gemma_has_two_groups_and_its_window_is_honoured() {
        let p = plan(&gemma(), Options { context: 4096, ..Options::default() });
        assert_eq!((p.bytes_per_token, p.bytes_at_context), (26 << 10, 27 * MIB));
        assert_eq!((p.groups.len(), p.blocks_per_extent, p.blocks_ideal), (2, None, 630));
        assert_eq!((p.groups[0].window, p.groups[0].layer_numbers.clone()), (None, vec![5, 11, 17, 23]));
        assert_eq!((p.groups[1].window, p.groups[1].bytes_per_token), (Some(512), 22 << 10));
        assert_eq!((p.groups[0].bytes_at_context, p.groups[1].bytes_at_context), (16 * MIB, 11 * MIB));
        assert!(p.blocks <= 630 && p.blocks >= 567, "{}", p.blocks);
        assert_eq!(p.waste_bytes, 256 * MIB - p.blocks * p.bytes_per_block);
        // 256 blocks of 8 planes, and a window of 512 tokens in at most 33 blocks of 44.
        assert_eq!(p.vmas_per_session, 256 * 8 + 33 * 44);
        // 1024 tokens live: 64 blocks, and 33 of the window's.
        assert_eq!(p.paged_blocks, 4 * (64 + 33));
    }

    #[test]
    fn a_profile_that_wastes_a_tenth_of_the_pool_is_warned_about() {
        let options = Options { extent: ExtentSize::Bytes(3 * MIB), ..Options::default() };
        let p = plan(&shape(28, 8, 128), options.clone());
        assert_eq!(p.waste_percent.round(), 42.0);
        assert!(p.warnings.iter().any(|w| w.contains("waste 42 %")), "{:?}", p.warnings);
        let beside = Plan::new(&reference(), &[shape(28, 8, 128)], &options).unwrap();
        assert!(beside.warnings.iter().any(|w| w.contains("waste 42 %")), "{:?}", beside.warnings);
        assert_eq!(beside.beside[0].groups[0].blocks, 85);
        let strict = plan(&reference(), Options { extent: ExtentSize::Block, ..Options::default() });
        assert_eq!((strict.blocks, strict.blocks_per_extent), (512, Some(1)));
        assert!(strict.warnings.iter().any(|w| w.contains("waste 25 %")), "{:?}", strict.warnings);
    }

    #[test]
    fn a_pool_too_small_for_the_sessions_says_that_the_broker_will_refuse() {
        let options = Options { sessions: 40, live: Some(2048), ..Options::default() };
        let p = plan(&reference(), options);
        assert!(p.warnings.iter().any(|w| w.contains("will refuse")), "{:?}", p.warnings);
        assert!(p.warnings.iter().any(|w| w.contains("vm.max_map_count")), "{:?}", p.warnings);
        // 85 sessions of 8 blocks are exactly the pool's 85 extents.
        let exact = plan(&reference(), Options { sessions: 85, live: Some(128), ..Options::default() });
        assert_eq!((exact.paged_extents, exact.extents), (85, 85));
        assert!(!exact.warnings.iter().any(|w| w.contains("will refuse")), "{:?}", exact.warnings);
    }

    #[test]
    fn a_latent_cache_has_one_plane_for_each_layer() {
        let mut latent = shape(4, 1, 576);
        for layer in &mut latent.layers {
            layer.v_dim = 0;
        }
        let p = plan(&latent, Options { tokens_per_block: 32, ..Options::default() });
        assert_eq!((p.bytes_per_token, p.groups[0].planes, p.vmas_per_session), (4 * 1152, 4, 4 * 64));
    }

    #[test]
    fn the_board_is_accounted_in_both_cases_and_may_be_short() {
        let gib = 1 << 30;
        let board = Some(Board { ram: 4 * gib, base: 2 * gib, weights: gib });
        let options = Options { sessions: 7, context: 4096, board, ..Options::default() };
        let left = plan(&reference(), options.clone()).board.unwrap();
        assert_eq!(left.left_static_bytes, 352 << 20);
        assert_eq!(left.left_paged_bytes, 768 << 20);
        let p = plan(&reference(), Options { sessions: 14, ..options.clone() });
        assert_eq!(p.board.unwrap().left_static_bytes, -(320 << 20));
        assert!(p.warnings.iter().any(|w| w.contains("short of 320 MiB")), "{:?}", p.warnings);
        let absurd = Some(Board { ram: u64::MAX, base: 0, weights: 0 });
        let refused = Plan::new(&reference(), &[], &Options { board: absurd, ..options });
        assert_eq!(refused, Err(PlanError::TooLarge));
    }

    #[test]
    fn a_context_longer_than_the_models_and_odd_heads_are_warned_about() {
        let p = plan(&shape(2, 1, 80), Options { context: 10_000, ..Options::default() });
        assert!(p.warnings.iter().any(|w| w.contains("context of 8192")), "{:?}", p.warnings);
        assert!(p.warnings.iter().any(|w| w.contains("pad it to 96")), "{:?}", p.warnings);
    }

    #[test]
    fn npu_tiles_want_32_tokens_for_int8_and_64_for_int4() {
        let whole = |tokens| {
            plan(&reference(), Options { tokens_per_block: tokens, ..Options::default() })
                .npu_tiles
                .iter()
                .map(|t| t.whole)
                .collect::<Vec<_>>()
        };
        assert_eq!(whole(16), [false, false, false]);
        assert_eq!(whole(32), [true, true, false]);
        assert_eq!(whole(64), [true, true, true]);
    }

    #[test]
    fn impossible_requests_are_refused() {
        let refused = |options| Plan::new(&reference(), &[], &options).unwrap_err();
        assert_eq!(refused(Options { context: 0, ..Options::default() }), PlanError::Context(0));
        assert_eq!(refused(Options { sessions: 0, ..Options::default() }), PlanError::NoSessions);
        let live = refused(Options { live: Some(4096), ..Options::default() });
        assert_eq!(live, PlanError::Live { live: 4096, context: 2048 });
        assert!(matches!(
            refused(Options { tokens_per_block: 17, ..Options::default() }),
            PlanError::Shape { .. }
        ));
        let small = refused(Options { pool: 1000, ..Options::default() });
        assert!(matches!(small, PlanError::Packing(PackingError::PoolTooSmall { .. })));
    }

    #[test]
    fn the_text_says_why_there_are_fewer_blocks_than_on_paper() {
        let said = plan(&reference(), Options::default()).to_string();
        for part in
            ["682 blocks", "680 blocks", "85 extents of 3 MiB", "512 KiB boundary", "12 MiB", "48 MiB"]
        {
            assert!(said.contains(part), "{part} in:\n{said}");
        }
        assert!(said.lines().all(|l| l == l.trim_end()), "no trailing blanks:\n{said}");
    }

    proptest! {
        #[test]
        fn no_numbers_make_the_account_panic(
            layers in 1u32..1025, heads in 1u32..4097, dim in 1u32..16385, shift in 0u32..17, context: u32,
            sessions: u32, pool: u64, narrow in 0u32..64, kv in 0usize..6, ram: u64, contiguous: bool,
        ) {
            let placement = if contiguous { Placement::cma(16384, 12) } else { Placement::pages(4096) }.unwrap();
            let options = Options {
                pool: pool >> narrow,
                placement,
                tokens_per_block: 1 << shift,
                context: context >> (narrow % 32),
                sessions: sessions >> (narrow % 32),
                kv: KvType::ALL[kv],
                board: Some(Board { ram, base: ram >> narrow, weights: ram >> (narrow / 2) }),
                ..Options::default()
            };
            if let Ok(plan) = Plan::new(&shape(layers, heads, dim), &[gemma()], &options) {
                prop_assert!(plan.blocks <= plan.blocks_ideal);
                prop_assert_eq!(plan.blocks * plan.bytes_per_block + plan.waste_bytes, options.pool);
                prop_assert!(!plan.to_string().is_empty());
            }
        }
    }
}
