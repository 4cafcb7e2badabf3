//! The KV geometry of a model: how many bytes a token's K row and V row take in each layer, how many tokens
//! a block holds, and where in a block each row lies.
//!
//! Owns no memory. Invariant: every [`Profile`] that exists has been checked, so that no size derived from it
//! overflows, every block holds at least one byte per token, and tokens per block is a power of two.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The most layers a profile may have. The deepest models that fit an edge board have about 80.
pub const MAX_LAYERS: usize = 1024;
/// The most tokens a block may hold.
pub const MAX_TOKENS_PER_BLOCK: u32 = 1 << 16;
/// Tokens per block where nobody says how many: planes of the usual models are whole pages then, and few tokens of a
/// session's last block are idle.
pub const USUAL_TOKENS_PER_BLOCK: u32 = 16;
/// The largest block, in bytes. A block is one unit of allocation: beyond this it no longer is a small one.
pub const MAX_BLOCK_BYTES: u64 = 1 << 30;

/// Why a geometry is no profile. The fault is always that of whoever wrote the numbers.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum ProfileError {
    #[error("the profile has no layers: give at least one layer with the bytes of its K row")]
    NoLayers,
    #[error("the profile has {0} layers, more than the {MAX_LAYERS} a profile may have")]
    TooManyLayers(usize),
    #[error(
        "layer {layer} has a K row of 0 bytes: a row that holds nothing cannot be paged (a latent cache has its row in K, and 0 in V)"
    )]
    EmptyRow { layer: u32 },
    #[error("{0} tokens per block: it must be a power of two from 1 to {MAX_TOKENS_PER_BLOCK}")]
    TokensPerBlock(u32),
    #[error(
        "a block of {tokens} tokens would take {bytes} bytes, more than the {MAX_BLOCK_BYTES} a block may have: use fewer tokens per block"
    )]
    BlockTooLarge { tokens: u32, bytes: u64 },
    #[error(
        "layer {layer} is there twice, or behind one of a higher number: each layer once, in the order of the model"
    )]
    LayerOrder { layer: u32 },
    #[error("a layer's window of 0 tokens keeps nothing: leave the window out for full attention")]
    EmptyWindow,
}

/// The order of rows inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// `[layer][K|V][token][row]`: a layer's tokens lie in one run. What kernels, NPU tiles and plane views need.
    #[default]
    PlaneMajor,
    /// `[token][layer][K|V][row]`: all of a token lies in one run.
    TokenMajor,
}

/// Which of a layer's two planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kv {
    /// The keys.
    K,
    /// The values.
    V,
}

/// One layer's share of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layer {
    /// Bytes of one token's K row.
    pub k_row: u32,
    /// Bytes of one token's V row; 0 for a latent cache, which keeps everything in K.
    pub v_row: u32,
}

/// Layers that keep the same tokens, and so share one block table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// Each layer by its number in the model, ascending.
    pub layers: Vec<(u32, Layer)>,
    /// Sliding window in tokens; `None` for full attention.
    pub window: Option<u32>,
}

/// Where one plane lies inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Plane {
    /// Bytes from the start of the block to the plane's first row.
    pub offset: usize,
    /// Bytes from one token's row to the next token's.
    pub stride: usize,
    /// Bytes of one row.
    pub row: usize,
}

/// The KV geometry of one model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Unchecked", into = "Unchecked")]
pub struct Profile {
    name: String,
    element: String,
    layout: Layout,
    tokens_per_block: u32,
    groups: Vec<Group>,
}

/// What a profile is written as; becomes a [`Profile`] only through [`Profile::new`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    name: String,
    element: String,
    layout: Layout,
    tokens_per_block: u32,
    groups: Vec<Group>,
}

impl TryFrom<Unchecked> for Profile {
    type Error = ProfileError;
    fn try_from(u: Unchecked) -> Result<Self, ProfileError> {
        Profile::new(u.name, u.element, u.layout, u.tokens_per_block, u.groups)
    }
}

impl From<Profile> for Unchecked {
    fn from(p: Profile) -> Self {
        Unchecked {
            name: p.name,
            element: p.element,
            layout: p.layout,
            tokens_per_block: p.tokens_per_block,
            groups: p.groups,
        }
    }
}

impl Profile {
    /// Checks a geometry. `name` and `element` are labels for people and kernels; only row bytes decide sizes.
    pub fn new(
        name: impl Into<String>,
        element: impl Into<String>,
        layout: Layout,
        tokens_per_block: u32,
        groups: Vec<Group>,
    ) -> Result<Self, ProfileError> {
        if !tokens_per_block.is_power_of_two() || tokens_per_block > MAX_TOKENS_PER_BLOCK {
            return Err(ProfileError::TokensPerBlock(tokens_per_block));
        }
        let layers = groups.iter().map(|g| g.layers.len()).sum::<usize>();
        if layers == 0 || groups.iter().any(|g| g.layers.is_empty()) {
            return Err(ProfileError::NoLayers);
        }
        if layers > MAX_LAYERS {
            return Err(ProfileError::TooManyLayers(layers));
        }
        if groups.iter().any(|g| g.window == Some(0)) {
            return Err(ProfileError::EmptyWindow);
        }
        if let Some((layer, _)) = groups.iter().flat_map(|g| &g.layers).find(|(_, l)| l.k_row == 0) {
            return Err(ProfileError::EmptyRow { layer: *layer });
        }
        // Who looks for a layer by its number finds one, and the same one in every process.
        let mut numbers = std::collections::BTreeSet::new();
        for group in &groups {
            let behind = group.layers.windows(2).find(|pair| pair[1].0 <= pair[0].0).map(|pair| pair[1].0);
            let twice = group.layers.iter().map(|(n, _)| *n).find(|n| !numbers.insert(*n));
            if let Some(layer) = behind.or(twice) {
                return Err(ProfileError::LayerOrder { layer });
            }
        }
        let profile =
            Profile { name: name.into(), element: element.into(), layout, tokens_per_block, groups };
        for group in 0..profile.groups.len() {
            // At most 1024 layers x 8 GiB x 65,536 tokens: below 2^60, so u64 cannot overflow here.
            let bytes = profile.group_bytes_per_token(group) * u64::from(tokens_per_block);
            if bytes > MAX_BLOCK_BYTES {
                return Err(ProfileError::BlockTooLarge { tokens: tokens_per_block, bytes });
            }
        }
        Ok(profile)
    }

    /// `layers` equal layers in one group of full attention: what most small models are.
    pub fn uniform(
        name: impl Into<String>,
        element: impl Into<String>,
        layers: u32,
        k_row: u32,
        v_row: u32,
        tokens_per_block: u32,
    ) -> Result<Self, ProfileError> {
        if layers as usize > MAX_LAYERS {
            return Err(ProfileError::TooManyLayers(layers as usize));
        }
        let layers = (0..layers).map(|n| (n, Layer { k_row, v_row })).collect();
        let group = Group { layers, window: None };
        Profile::new(name, element, Layout::PlaneMajor, tokens_per_block, vec![group])
    }

    /// The model that the project's figures are stated for: 24 layers, 2 KV heads of dimension 128, f16, 16 tokens
    /// per block: 24 KiB per token, 384 KiB per block.
    pub fn reference() -> Self {
        Profile::uniform("reference", "f16", 24, 512, 512, USUAL_TOKENS_PER_BLOCK)
            .expect("the reference geometry is valid")
    }

    /// The same geometry with another order of rows.
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// The model's name, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type's label, such as `f16` or `q8_0`.
    pub fn element(&self) -> &str {
        &self.element
    }

    /// The order of rows inside a block.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Tokens in one block: a power of two.
    pub fn tokens_per_block(&self) -> u32 {
        self.tokens_per_block
    }

    /// log2 of [`tokens_per_block`](Self::tokens_per_block).
    pub fn block_shift(&self) -> u32 {
        self.tokens_per_block.trailing_zeros()
    }

    /// The layer groups; the first one is the only one of a model whose layers all keep all tokens.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The geometry of one group by itself: what the broker calls a format. Sharing prefixes, it is another one than that
    /// of a group of other layers, or with another window.
    pub fn group_alone(&self, group: usize) -> Result<Profile, ProfileError> {
        let groups = vec![self.groups[group].clone()];
        Profile::new(self.name.clone(), self.element.clone(), self.layout, self.tokens_per_block, groups)
    }

    /// Bytes that one token takes in the layers of `group`.
    pub fn group_bytes_per_token(&self, group: usize) -> u64 {
        self.groups[group].layers.iter().map(|(_, l)| u64::from(l.k_row) + u64::from(l.v_row)).sum()
    }

    /// Bytes that one token takes in all layers.
    pub fn bytes_per_token(&self) -> u64 {
        (0..self.groups.len()).map(|g| self.group_bytes_per_token(g)).sum()
    }

    /// Bytes of one block of `group`, without the padding of [`slot_bytes`](Self::slot_bytes).
    pub fn block_bytes(&self, group: usize) -> u64 {
        self.group_bytes_per_token(group) * u64::from(self.tokens_per_block)
    }

    /// Bytes that one block of `group` occupies in an extent: a whole number of pages of `page` bytes.
    pub fn slot_bytes(&self, group: usize, page: u64) -> u64 {
        self.block_bytes(group).next_multiple_of(page)
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.tokens_per_block))
    }

    /// Bytes that `tokens` tokens of one sequence need, to the token: a group with a window keeps no more than it.
    pub fn bytes_at(&self, tokens: u64) -> u64 {
        (0..self.groups.len())
            .map(|g| {
                let kept = self.groups[g].window.map_or(tokens, |w| tokens.min(u64::from(w)));
                kept * self.group_bytes_per_token(g)
            })
            .sum()
    }

    /// The first token that the one at `position` sees in `group`: a window of W tokens has the token itself in it.
    pub fn first_visible(&self, group: usize, position: u64) -> u64 {
        self.groups[group].window.map_or(0, |w| (position + 1).saturating_sub(w.into()))
    }

    /// The most blocks of `group` that one sequence of `tokens` tokens holds. A window of W tokens lies in one block
    /// more than it fills when it begins in the middle of one.
    pub fn group_blocks_at(&self, group: usize, tokens: u64) -> u64 {
        let all = self.blocks_for(tokens);
        let per_block = u64::from(self.tokens_per_block);
        self.groups[group].window.map_or(all, |w| all.min((per_block - 1 + u64::from(w)).div_ceil(per_block)))
    }

    /// Where the planes of `group` lie in a block: for each of its layers, in order, K and V.
    pub fn planes(&self, group: usize) -> Vec<[Plane; 2]> {
        let tokens = self.tokens_per_block as usize;
        let token_bytes = self.group_bytes_per_token(group) as usize;
        let mut at = 0;
        let mut place = |row: u32| {
            let row = row as usize;
            let plane = match self.layout {
                Layout::PlaneMajor => Plane { offset: at, stride: row, row },
                Layout::TokenMajor => Plane { offset: at, stride: token_bytes, row },
            };
            at += match self.layout {
                Layout::PlaneMajor => row * tokens,
                Layout::TokenMajor => row,
            };
            plane
        };
        self.groups[group].layers.iter().map(|(_, l)| [place(l.k_row), place(l.v_row)]).collect()
    }

    /// The smallest tokens per block that makes every plane a whole number of pages, which plane views need;
    /// `None` if even the largest block would not do.
    pub fn plane_view_tokens(&self, page: u64) -> Option<u32> {
        let rows = || self.groups.iter().flat_map(|g| &g.layers).flat_map(|(_, l)| [l.k_row, l.v_row]);
        (0..=MAX_TOKENS_PER_BLOCK.ilog2())
            .map(|shift| 1u32 << shift)
            .find(|t| rows().all(|row| (u64::from(row) * u64::from(*t)) % page == 0))
    }

    /// Whether plane views work with this profile as it is.
    pub fn has_plane_views(&self, page: u64) -> bool {
        self.layout == Layout::PlaneMajor
            && self.plane_view_tokens(page).is_some_and(|t| t <= self.tokens_per_block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_model_takes_24_kib_per_token_and_384_kib_per_block() {
        let p = Profile::reference();
        assert_eq!(p.bytes_per_token(), 24 << 10);
        assert_eq!(p.block_bytes(0), 384 << 10);
        assert_eq!(p.bytes_at(512), 12 << 20);
        assert_eq!(p.bytes_at(2048), 48 << 20);
        assert_eq!(p.plane_view_tokens(4096), Some(8));
        assert!(p.has_plane_views(4096) && p.has_plane_views(8192) && !p.has_plane_views(16384));
        assert_eq!((p.blocks_for(0), p.blocks_for(1), p.blocks_for(16), p.blocks_for(17)), (0, 1, 1, 2));
    }

    #[test]
    fn rows_of_both_layouts_cover_the_block_without_overlap() {
        let layers = vec![(0, Layer { k_row: 68, v_row: 40 }), (1, Layer { k_row: 12, v_row: 0 })];
        for layout in [Layout::PlaneMajor, Layout::TokenMajor] {
            let groups = vec![Group { layers: layers.clone(), window: None }];
            let p = Profile::new("odd", "q8_0", layout, 4, groups).unwrap();
            let mut covered = vec![0u8; p.block_bytes(0) as usize];
            for plane in p.planes(0).into_iter().flatten() {
                for token in 0..4 {
                    for byte in 0..plane.row {
                        covered[plane.offset + token * plane.stride + byte] += 1;
                    }
                }
            }
            assert!(covered.iter().all(|&times| times == 1), "{layout:?}");
        }
    }

    #[test]
    fn plane_views_need_the_tokens_per_block_that_the_row_sizes_ask_for() {
        let tokens = |row| Profile::uniform("m", "x", 2, row, row, 16).unwrap().plane_view_tokens(4096);
        assert_eq!(tokens(256), Some(16));
        assert_eq!(tokens(128), Some(32));
        assert_eq!(tokens(136), Some(512));
        assert_eq!(tokens(384), Some(32));
        assert_eq!(tokens(512), Some(8));
    }

    #[test]
    fn a_window_bounds_what_a_sequence_keeps() {
        let layer = |n| (n, Layer { k_row: 512, v_row: 512 });
        let groups = vec![
            Group { layers: (0..4).map(layer).collect(), window: None },
            Group { layers: (4..26).map(layer).collect(), window: Some(512) },
        ];
        let p = Profile::new("gemma-3-1b", "f16", Layout::PlaneMajor, 16, groups).unwrap();
        assert_eq!(p.bytes_per_token(), 26 << 10);
        assert_eq!(p.bytes_at(4096), 27 << 20);
        let held = |tokens| (p.group_blocks_at(0, tokens), p.group_blocks_at(1, tokens));
        assert_eq!((held(0), held(512), held(513), held(4096)), ((0, 0), (32, 32), (33, 33), (256, 33)));
    }

    #[test]
    fn absurd_geometries_are_refused_in_words() {
        assert_eq!(Profile::uniform("m", "f16", 0, 1, 1, 16), Err(ProfileError::NoLayers));
        assert_eq!(Profile::uniform("m", "f16", 2, 0, 8, 16), Err(ProfileError::EmptyRow { layer: 0 }));
        assert_eq!(Profile::uniform("m", "f16", 2, 8, 8, 0), Err(ProfileError::TokensPerBlock(0)));
        assert_eq!(Profile::uniform("m", "f16", 2, 8, 8, 24), Err(ProfileError::TokensPerBlock(24)));
        assert_eq!(Profile::uniform("m", "f16", 1025, 8, 8, 16), Err(ProfileError::TooManyLayers(1025)));
        let huge = Profile::uniform("m", "f16", 1024, u32::MAX, u32::MAX, 1 << 16);
        assert!(matches!(huge, Err(ProfileError::BlockTooLarge { .. })));
        assert!(Profile::uniform("latent", "f16", 2, 576, 0, 16).is_ok());
    }

    #[test]
    fn a_profile_read_from_json_is_checked_too() {
        let good = serde_json::to_string(&Profile::reference()).unwrap();
        assert_eq!(serde_json::from_str::<Profile>(&good).unwrap(), Profile::reference());
        let bad = good.replace("\"tokens_per_block\":16", "\"tokens_per_block\":17");
        assert!(
            serde_json::from_str::<Profile>(&bad).unwrap_err().to_string().contains("17 tokens per block")
        );
    }
}
