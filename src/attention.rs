//! Attention of queries over the keys and values of one layer, paged or contiguous, of any [`Element`], with grouped query
//! heads, a causal mask and an optional sliding window. Products and sums are f32.
//!
//! Owned here: the way from a block table to rows ([`KvSource`]), the conversion of rows ([`store_row`],
//! [`load_row`]), and the kernel. The kernel stages a piece of K, then of V, of one KV head as f32 in its own
//! [`Scratch`], and works on that copy only; staging is the one place that reads the KV memory, by raw pointers,
//! because other processes may write there.
//!
//! Invariant: **an output row depends on the values of its query and of the rows it sees, and on nothing else.** Not
//! on where the rows lie (paged, contiguous, either layout, any block size), not on which queries or heads share the
//! call, so not on the number of threads, nor on how a prompt is cut into calls. It holds bit for bit
//! because every sum runs in an order that the token's absolute position fixes.

#![allow(unsafe_code)]

mod element;
mod kernel;
mod prefetch;
mod source;
#[cfg(test)]
mod tests;
mod vectors;

use std::ops::Range;

pub use element::{Element, load_row, store_row};
pub use source::{Contiguous, KvSource, PAGE_SHIFT, Paged, Run};

/// The heads of one attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Query heads: a multiple of `kv_heads`. Query head `h` reads KV head `h / (query_heads / kv_heads)`.
    pub query_heads: usize,
    /// KV heads: a row of K or V is `[kv_heads][head_dim]`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Factor of the scores, before the softmax: usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// The most tokens that a query sees, itself included; `None` for all. Tokens that no query of a call sees are
    /// not read, so their blocks may be gone.
    pub window: Option<usize>,
}

impl Shape {
    /// Full attention with the usual scale, `1 / sqrt(head_dim)`.
    pub fn new(query_heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Shape { query_heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window: None }
    }

    /// Query heads that share one KV head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Elements of one K or V row.
    pub fn kv_row(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The tokens that the query at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        end.saturating_sub(self.window.unwrap_or(end))..end
    }
}

/// Working memory of [`attention`], reused from call to call: it grows to what the largest call needs (about 100 KiB
/// with heads of 128 dimensions), after which a call allocates nothing. One per thread.
#[derive(Debug, Default)]
pub struct Scratch(kernel::Scratch);

impl Scratch {
    /// Empty; the first call sizes it.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Attention of the last `n` tokens of a sequence over its first `kv_tokens` tokens.
///
/// `q` and `out` are `[n][query_heads][head_dim]`, f32. Query `i` is at position `kv_tokens - n + i` and sees the
/// tokens up to and including that one, at most [`Shape::window`] of them.
///
/// Threads split the work by queries or by KV heads, and the bits stay the same: queries `a..b` of a call are a call
/// of their own, with `kv_tokens - n + b` for `kv_tokens`; KV heads are split by [`attention_heads`].
///
/// # Panics
/// If the shape has no heads, a window of 0 or query heads that are no multiple of the KV heads; if `q` and `out` are
/// no whole number of queries, the same one; if there are more queries than tokens; if a block table is too short.
///
/// # Safety
/// The K and V rows (of `kv_heads * head_dim` elements) of every token that a query sees are readable through `kv`
/// for the whole call. Other processes may write there meanwhile: that spoils values, nothing else.
pub unsafe fn attention<S: KvSource>(
    shape: &Shape,
    element: Element,
    kv: &S,
    kv_tokens: usize,
    q: &[f32],
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's promise is the one that attention_heads asks for.
    unsafe { attention_heads(shape, element, kv, kv_tokens, 0..shape.kv_heads, q, out, scratch) }
}

/// [`attention`] for the query heads of the KV heads `heads` only, so that threads can share a decode step.
///
/// `q` is whole, `[n][query_heads][head_dim]`; `out` is `[n][heads.len() * group][head_dim]`. With one query that is
/// the plain sub-slice of the whole output: split it with `split_at_mut` and give each thread its part.
///
/// # Panics
/// As [`attention`], and if `heads` is not within the KV heads.
///
/// # Safety
/// As [`attention`].
#[allow(clippy::too_many_arguments)]
pub unsafe fn attention_heads<S: KvSource>(
    shape: &Shape,
    element: Element,
    kv: &S,
    kv_tokens: usize,
    heads: Range<usize>,
    q: &[f32],
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let Shape { query_heads, kv_heads, head_dim, window, .. } = *shape;
    assert!(kv_heads > 0 && head_dim > 0 && window != Some(0), "a shape without heads or tokens: {shape:?}");
    assert!(
        query_heads > 0 && query_heads % kv_heads == 0,
        "query heads are no multiple of KV heads: {shape:?}"
    );
    assert!(heads.start <= heads.end && heads.end <= kv_heads, "KV heads {heads:?} of {kv_heads}");
    let queries = q.len() / (query_heads * head_dim);
    assert_eq!(q.len(), queries * query_heads * head_dim, "q holds no whole number of queries: {shape:?}");
    let out_row = heads.len() * shape.group() * head_dim;
    assert_eq!(out.len(), queries * out_row, "out does not have the queries of q: {shape:?}");
    assert!(queries <= kv_tokens, "{queries} queries, but only {kv_tokens} tokens");
    if out.is_empty() {
        return;
    }
    let call = kernel::Call { shape, kv, kv_tokens, heads, queries, q };
    // SAFETY: the caller promises readable rows; the rest was checked above.
    unsafe { kernel::run(&call, element, out, &mut scratch.0) }
}
