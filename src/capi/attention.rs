//! Attention over a session's layer.
//!
//! Owns the scratch handle. Invariant: the kernel runs only on numbers under which it reads rows that are there and
//! writes what the caller has room for; everything that would make it panic is refused before.

use std::ops::Range;
use std::sync::Mutex;

use super::client::layer_number;
use super::error::Code;
use super::process::Birth;
use super::session::{first_of, kvb_session, read};
use super::sized::{self, versioned};
use super::{Failure, aligned, at, elements, hand_out, number, status, take_back};
use crate::attention::{Element, Scratch, Shape, attention_heads};
use crate::client::GroupedSession;

/// Working memory of one thread.
#[derive(Debug)]
pub struct kvb_scratch {
    birth: Birth,
    scratch: Mutex<Scratch>,
}

versioned! {
    /// See the header.
    struct kvb_attention_call {
        q: *const f32,
        out: *mut f32,
        queries: u64,
        kv_tokens: u64,
        window: u64,
        layer: u32,
        element: u32,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        first_kv_head: u32,
        kv_head_count: u32,
        scale: f32,
    }
}

/// What C calls an element type.
fn c_name(element: Element) -> String {
    format!("KVB_{}", element.name().to_uppercase())
}

/// The element type that a number of the header means: its place among all.
fn element(number: u32) -> Result<Element, Failure> {
    Element::ALL.get(number as usize).copied().ok_or_else(|| {
        let known = Element::ALL.iter().enumerate().map(|(n, e)| format!("{} is {n}", c_name(*e)));
        Failure::invalid(format!("element {number}: {}", known.collect::<Vec<_>>().join(", ")))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_scratch_new(out: *mut *mut kvb_scratch) -> i32 {
    status(|| {
        aligned(out, "out")?;
        let scratch = kvb_scratch { birth: Birth::now(), scratch: Mutex::new(Scratch::new()) };
        // SAFETY: checked first of all.
        unsafe { hand_out(out, scratch) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_scratch_free(scratch: *mut kvb_scratch) -> i32 {
    status(|| {
        if scratch.is_null() {
            return Ok(());
        }
        // SAFETY: the header asks for a scratch that is not freed, and takes it.
        unsafe {
            at(scratch.cast_const(), "scratch")?.birth.here()?;
            take_back(scratch);
        }
        Ok(())
    })
}

/// The numbers of a call, checked against the session: what the kernel may read and write under them is there.
struct Plan {
    layer: usize,
    element: Element,
    shape: Shape,
    queries: usize,
    kv_tokens: usize,
    kv_heads: Range<usize>,
    q_len: usize,
    out_len: usize,
}

impl Plan {
    fn of(c: &kvb_attention_call, session: &GroupedSession) -> Result<Plan, Failure> {
        session.check_alive()?;
        let element = element(c.element)?;
        let layer = layer_number(session.profile(), c.layer)?;
        let mut shape = heads(c)?;
        let kv = session.paged(layer);
        let row = shape.kv_heads.checked_mul(shape.head_dim).and_then(|n| n.checked_mul(element.bytes()));
        if row != Some(kv.k.row) || row != Some(kv.v.row) {
            return Err(Failure::invalid(format!(
                "{} heads of {} do not fill the rows of layer {}, {} and {} bytes",
                c.kv_heads, c.head_dim, c.layer, kv.k.row, kv.v.row
            )));
        }
        if c.scale.is_nan() {
            return Err(Failure::invalid("scale is NaN: a number, or 0 for 1 / sqrt(head_dim)"));
        }
        if c.scale != 0.0 {
            shape.scale = c.scale;
        }
        shape.window = Some(number(c.window, "window")?).filter(|w| *w > 0).or(session.window(layer));
        let (queries, kv_tokens) = tokens(c, session)?;
        let first_seen = shape.visible(kv_tokens - queries).start;
        let first_held = first_of(session, layer);
        if queries > 0 && first_seen < first_held {
            return Err(Failure::invalid(format!(
                "token {first_seen} is to be seen, but the tokens before {first_held} have been dropped"
            )));
        }
        let kv_heads = part(c)?;
        let values = |heads: usize| {
            let all = queries.checked_mul(heads)?.checked_mul(shape.head_dim)?;
            (all <= isize::MAX as usize / size_of::<f32>()).then_some(all)
        };
        let too_many = || Failure::invalid(format!("{queries} queries do not fit the address space"));
        let q_len = values(shape.query_heads).ok_or_else(too_many)?;
        let out_len = values(kv_heads.len() * shape.group()).ok_or_else(too_many)?;
        Ok(Plan { layer, element, shape, queries, kv_tokens, kv_heads, q_len, out_len })
    }
}

fn heads(c: &kvb_attention_call) -> Result<Shape, Failure> {
    let (query, kv, dim) = (c.query_heads as usize, c.kv_heads as usize, c.head_dim as usize);
    if kv == 0 || dim == 0 || query == 0 || query % kv != 0 {
        return Err(Failure::invalid(format!(
            "{query} query heads, {kv} KV heads of {dim}: none may be 0, and query heads are a multiple of KV heads"
        )));
    }
    Ok(Shape::new(query, kv, dim))
}

/// How many queries there are, over how many tokens.
fn tokens(c: &kvb_attention_call, session: &GroupedSession) -> Result<(usize, usize), Failure> {
    let kv_tokens = match c.kv_tokens {
        0 => session.tokens(),
        n => number(n, "kv_tokens")?,
    };
    let queries = number(c.queries, "queries")?;
    if kv_tokens > session.tokens() || queries > kv_tokens {
        return Err(Failure::invalid(format!(
            "{queries} queries over {kv_tokens} tokens: the session holds {}",
            session.tokens()
        )));
    }
    Ok((queries, kv_tokens))
}

/// The KV heads that this call is to do.
fn part(c: &kvb_attention_call) -> Result<Range<usize>, Failure> {
    let (all, first) = (c.kv_heads as usize, c.first_kv_head as usize);
    let count = match c.kv_head_count as usize {
        0 if first == 0 => all,
        n => n,
    };
    let part = first..first.saturating_add(count);
    if part.end > all || part.is_empty() {
        return Err(Failure::invalid(format!("KV heads {part:?} of {all}")));
    }
    Ok(part)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_attention(
    session: *const kvb_session,
    call: *const kvb_attention_call,
    scratch: *mut kvb_scratch,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for handles that are not closed.
        let (session, scratch) = unsafe { (read(session)?, at(scratch.cast_const(), "scratch")?) };
        let in_use = |_| Failure::new(Code::InUse, "another thread uses this scratch: each needs its own");
        let mut scratch = scratch.scratch.try_lock().map_err(in_use)?;
        aligned(call, "call")?;
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        let c = unsafe { sized::read(call, "kvb_attention_call")? };
        let plan = Plan::of(&c, &session)?;
        if plan.queries == 0 {
            return Ok(());
        }
        aligned(c.out, "out")?;
        aligned(c.q, "q")?;
        let (q_at, out_at) = (c.q as usize, c.out as usize);
        if q_at < out_at.saturating_add(4 * plan.out_len) && out_at < q_at.saturating_add(4 * plan.q_len) {
            return Err(Failure::invalid("q and out overlap"));
        }
        // SAFETY: not NULL, aligned and apart; the header asks for so many values of the caller's own memory. They are
        // zeroed first because C need not have written them.
        let (q, out) = unsafe {
            c.out.write_bytes(0, plan.out_len);
            (elements(c.q, plan.q_len, "q")?, std::slice::from_raw_parts_mut(c.out, plan.out_len))
        };
        let kv = session.paged(plan.layer);
        let Plan { shape, element, kv_tokens, kv_heads, .. } = plan;
        // SAFETY: every token that a query sees is in the session's table, whose blocks stay mapped while it is locked, and
        // a row has as many bytes as the shape reads.
        unsafe { attention_heads(&shape, element, &kv, kv_tokens, kv_heads, q, out, &mut scratch) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_every_element_type_of_the_kernel_under_its_number() {
        let header = include_str!("../../include/kvbroker.h");
        let all = Element::ALL.iter().enumerate().map(|(n, e)| format!("{} = {n}", c_name(*e)));
        let line = format!("enum {{ {} }};", all.collect::<Vec<_>>().join(", "));
        assert!(header.contains(&line), "kvbroker.h lacks: {line}");
        assert_eq!(element(1).ok(), Some(Element::F32));
        assert!(element(Element::ALL.len() as u32).is_err());
    }
}
