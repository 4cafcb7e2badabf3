//! The account for people: plain text in aligned columns.
//!
//! Owns nothing. Invariant: no figure that decides anything is computed here: a line is a field of [`Plan`], with what it
//! means beside it.

use super::{GroupPlan, Plan};
use crate::size::Size;
use std::fmt::{self, Display, Formatter};

/// A line: what, how much, and why.
fn row(f: &mut Formatter<'_>, label: impl Display, value: impl Display, why: impl Display) -> fmt::Result {
    let (label, value, why) = (label.to_string(), value.to_string(), why.to_string());
    if why.is_empty() {
        writeln!(f, "  {label:<30}{value:>14}")
    } else {
        writeln!(f, "  {label:<30}{value:>14}   {why}")
    }
}

fn size(bytes: u64) -> Size {
    Size::from_bytes(bytes)
}

/// A size that may be short of nothing.
fn signed(bytes: i64) -> String {
    let shown = size(bytes.unsigned_abs());
    if bytes < 0 { format!("-{shown}") } else { shown.to_string() }
}

/// `1 block`, `2 blocks`.
fn count(number: u64, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.model(f)?;
        self.pool(f)?;
        self.sessions(f)?;
        if self.board.is_some() {
            self.board(f)?;
        }
        self.views(f)?;
        for (title, lines) in [("Warnings", &self.warnings), ("Assumed", &self.notes)] {
            if !lines.is_empty() {
                writeln!(f, "\n{title}")?;
            }
            for line in lines {
                writeln!(f, "  - {line}")?;
            }
        }
        Ok(())
    }
}

impl Plan {
    fn model(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let heads = match (self.kv_heads, self.head_dim) {
            (Some(heads), Some(dim)) => format!("{} of dimension {dim}", count(heads.into(), "KV head")),
            _ => "KV heads that differ by layer".to_owned(),
        };
        writeln!(
            f,
            "{} ({}): {}, {}, {heads}; K and V in {}",
            self.model,
            self.family,
            count(self.layers as u64, "layer"),
            count(self.heads.into(), "attention head"),
            self.kv_type,
        )?;
        writeln!(f, "\nKV cache")?;
        row(f, "one token", size(self.bytes_per_token), "")?;
        row(f, "one block", size(self.bytes_per_block), count(self.tokens_per_block.into(), "token"))?;
        row(f, "512 tokens", size(self.bytes_at_512), "")?;
        row(f, "2048 tokens", size(self.bytes_at_2048), "")?;
        if !matches!(self.context, 512 | 2048) {
            row(f, format_args!("{} tokens", self.context), size(self.bytes_at_context), "")?;
        }
        if self.groups.len() > 1 {
            for group in &self.groups {
                self.group(f, group)?;
            }
            row(
                f,
                "in blocks",
                size(self.held_bytes_at_context),
                format_args!(
                    "what a session of {} tokens holds; {} if no layer had a window",
                    self.context,
                    size(self.bytes_at_context_without_windows)
                ),
            )?;
        }
        Ok(())
    }

    fn group(&self, f: &mut Formatter<'_>, group: &GroupPlan) -> fmt::Result {
        let kept = match group.window {
            None => "all tokens".to_owned(),
            Some(window) => format!("the last {window}"),
        };
        row(
            f,
            format_args!("{} keeping {kept}", count(group.layers as u64, "layer")),
            size(group.bytes_at_context),
            format_args!(
                "at {} tokens; {} a token, {} a block; {} held",
                self.context,
                size(group.bytes_per_token),
                size(group.bytes_per_block),
                count(group.blocks_at_context, "block"),
            ),
        )
    }

    fn pool(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nPool of {}: {}, pages of {}",
            size(self.pool_bytes),
            if self.contiguous { "contiguous memory (CMA)" } else { "scattered pages" },
            size(self.page_bytes)
        )?;
        let unit = if self.groups.len() == 1 { "" } else { "; one block of each group counts as one" };
        row(
            f,
            "on paper",
            count(self.blocks_ideal, "block"),
            format_args!("{} / {}{unit}", size(self.pool_bytes), size(self.bytes_per_block)),
        )?;
        let each = match self.blocks_per_extent {
            Some(each) => format!(", {} in each", count(each, "block")),
            None => String::new(),
        };
        row(
            f,
            "after packing",
            count(self.blocks, "block"),
            format_args!(
                "{} of {}{each} (extent = {})",
                count(self.extents, "extent"),
                size(self.extent_bytes),
                self.extent
            ),
        )?;
        row(
            f,
            "in no block",
            size(self.waste_bytes),
            format_args!("{:.1} % of the pool", self.waste_percent),
        )?;
        self.waste(f)?;
        self.strict(f)?;
        self.neighbours(f)
    }

    /// Where what is in no block has gone, by layer group.
    fn waste(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for group in &self.groups {
            if self.groups.len() > 1 {
                row(
                    f,
                    format_args!("  blocks of {}", size(group.bytes_per_block)),
                    format_args!("{} in each", group.blocks_per_extent),
                    format_args!(
                        "alone: {}, {:.1} % in no block",
                        count(group.blocks, "block"),
                        group.waste_percent
                    ),
                )?;
            }
            self.causes(f, group)?;
        }
        Ok(())
    }

    /// What a descriptor for each block would leave.
    fn strict(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.blocks_strict != self.blocks {
            let why = if self.blocks_strict < self.blocks && self.contiguous {
                format!(
                    "each would start on a {} boundary: this is why blocks share extents",
                    size(self.strict_align_bytes)
                )
            } else {
                "as extent = \"block\" would give".to_owned()
            };
            row(f, "a buffer for each block", count(self.blocks_strict, "block"), why)?;
        }
        Ok(())
    }

    /// The other models that share the pool.
    fn neighbours(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for other in &self.beside {
            for group in &other.groups {
                row(
                    f,
                    format_args!("beside it: {}", other.model),
                    count(group.blocks, "block"),
                    format_args!(
                        "of {}, {} in each extent; alone {:.1} % in no block",
                        size(group.bytes_per_block),
                        group.blocks_per_extent,
                        group.waste_percent
                    ),
                )?;
            }
        }
        Ok(())
    }

    fn causes(&self, f: &mut Formatter<'_>, group: &GroupPlan) -> fmt::Result {
        let waste = &group.waste;
        let gap = format!("each extent starts on a {} boundary", size(self.extent_align_bytes));
        let rest = self.extent_bytes - group.blocks_per_extent * group.slot_bytes;
        let tail = format!(
            "an extent of {} ends in {} that no further block fits",
            size(self.extent_bytes),
            size(rest)
        );
        let padding = format!(
            "a block takes whole pages: {} for {}",
            size(group.slot_bytes),
            size(group.bytes_per_block)
        );
        let causes = [
            ("    between extents", waste.alignment, gap),
            ("    ends of extents", waste.extent_tail, tail),
            ("    ends of blocks", waste.page_padding, padding),
            ("    end of the pool", waste.pool_tail, "too short for another extent".to_owned()),
        ];
        for (label, bytes, why) in causes.into_iter().filter(|(_, bytes, _)| *bytes > 0) {
            row(f, label, size(bytes), why)?;
        }
        Ok(())
    }

    fn sessions(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{} of up to {} tokens", count(self.sessions.into(), "session"), self.context)?;
        row(f, "reserved statically", size(self.static_bytes), "the longest context for each")?;
        row(
            f,
            "paged",
            size(self.paged_bytes),
            format_args!(
                "{} in each: {} in {} ({})",
                count(self.live_tokens.into(), "live token"),
                count(self.paged_blocks, "block"),
                count(self.paged_extents, "extent"),
                size(self.paged_extent_bytes),
            ),
        )?;
        if self.groups.iter().all(|g| g.window.is_none()) {
            return row(
                f,
                "the pool holds",
                count(self.pool_tokens, "token"),
                format_args!(
                    "or {} at full length; beyond that the broker refuses",
                    count(self.sessions_at_context, "session")
                ),
            );
        }
        row(
            f,
            "the pool holds",
            count(self.sessions_at_context, "session"),
            "at full length; beyond that the broker refuses",
        )?;
        let most = match self.longest_session_tokens {
            tokens if tokens == u64::from(super::MAX_CONTEXT) => "any length".to_owned(),
            tokens => count(tokens, "token"),
        };
        row(f, "or one session of", most, "growing token by token")
    }

    fn board(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(board) = &self.board else { return Ok(()) };
        writeln!(f, "\nBoard of {}", size(board.ram_bytes))?;
        row(f, "system and applications", size(board.base_bytes), "")?;
        row(f, "weights", size(board.weights_bytes), "")?;
        row(
            f,
            "left, reserved statically",
            signed(board.left_static_bytes),
            format_args!("after {} of KV cache", size(self.static_bytes)),
        )?;
        row(
            f,
            "left, paged",
            signed(board.left_paged_bytes),
            format_args!("after the whole pool of {}", size(self.pool_bytes)),
        )
    }

    fn views(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nViews and devices")?;
        match self.plane_view_tokens_per_block {
            Some(least) => row(
                f,
                "plane views",
                if self.plane_views { "yes" } else { "no" },
                format_args!("a plane is whole pages from {} per block on", count(least.into(), "token")),
            )?,
            None => row(f, "plane views", "no", "no number of tokens per block makes planes whole pages")?,
        }
        if self.plane_views {
            row(
                f,
                "  mappings of a session",
                self.vmas_per_session,
                format_args!(
                    "one for each block and plane at {} tokens; {} in one process: {} of {}",
                    self.context,
                    count(self.sessions.into(), "session"),
                    self.vmas,
                    self.vma_limit
                ),
            )?;
        }
        for tile in &self.npu_tiles {
            let fit = if tile.whole {
                "a block is whole tiles".to_owned()
            } else {
                format!("a block of {} is not whole tiles", self.tokens_per_block)
            };
            row(f, format_args!("NPU tiles, {}", tile.element), count(tile.tokens.into(), "token"), fit)?;
        }
        Ok(())
    }
}
