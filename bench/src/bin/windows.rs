//! Row `windows`: how often blocks lie side by side under the mixed load, what staging costs beside a plain copy, and what a
//! plane view costs attention beside the block table.
//!
//! What the kernel's own objects cost (udmabuf, iommu) is measured where there are some: `scripts/vm`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use kvbroker::attention::{Contiguous, Element, Scratch, Shape, attention};
use kvbroker::broker::{Broker, Policy};
use kvbroker::client::{Client, ClientOptions, Embedded, EmbeddedOptions, OpenOptions, Session};
use kvbroker::heap::Memfd;
use kvbroker::profile::{Kv, Profile};
use kvbroker::window::{Access, How, Means, StagingMeans, What};
use kvbroker_bench::{Clock, Samples, Values, at_most, reported};

const EXTENT: u64 = 3 << 20;
/// Blocks of the reference profile in an extent.
const SLOTS: usize = 8;

fn main() {
    runs();
    staging();
    views();
}

/// Pieces of the pool that a session's blocks make: neighbours within one extent are one.
fn pieces(session: &Session, slot_pages: u32, extent_pages: u32) -> usize {
    let table = session.table();
    let breaks = |w: &&[u32]| w[1] != w[0] + slot_pages || w[1] / extent_pages != w[0] / extent_pages;
    1 + table.windows(2).filter(breaks).count()
}

/// Eight sessions in steady churn, lengths log-uniform from 16 to 2048 tokens, half of it prompt.
fn runs() {
    const SESSIONS: usize = 2000;
    let client = Client::embedded(EmbeddedOptions { pool_bytes: 256 << 20, extent_bytes: EXTENT });
    let client = client.expect("a pool of 256 MiB");
    let profile = client.profile(&Profile::reference()).expect("the reference profile fits");
    let (slot_pages, extent_pages) = ((profile.slot_bytes() >> 12) as u32, (EXTENT >> 12) as u32);
    let mut values = Values(7);
    let mut uniform = || f64::from(values.bits()) / f64::from(1u32 << 31);
    let mut live: Vec<(Session, usize)> = Vec::new();
    let (mut whole, mut short, mut short_whole, mut found, mut least, mut refused) = (0, 0, 0, 0, 0, 0);
    let mut ended = 0;
    while ended < SESSIONS {
        // One that is refused tries again with another length; a pool that is full for all waits for an end.
        for _ in 0..32 {
            if live.len() == 8 {
                break;
            }
            let length = (16.0 * 128f64.powf(uniform())) as usize;
            let options = OpenOptions { zero: false, ..OpenOptions::default() };
            let mut session = client.open(&profile, options).expect("a session");
            match session.ensure(length / 2) {
                Ok(()) => live.push((session, length)),
                Err(_) => refused += 1,
            }
        }
        // All of them decode a token in turn.
        live.retain_mut(|(session, length)| {
            let next = session.tokens() + 1;
            if next <= *length {
                match session.ensure(next) {
                    Ok(()) => return true,
                    Err(_) => refused += 1,
                }
            }
            let blocks = session.table().len();
            let pieces = pieces(session, slot_pages, extent_pages);
            ended += 1;
            whole += usize::from(pieces == 1);
            short += usize::from(blocks <= SLOTS);
            short_whole += usize::from(blocks <= SLOTS && pieces == 1);
            found += pieces;
            least += blocks.div_ceil(SLOTS);
            false
        });
    }
    let share = |part: usize, of: usize| 100.0 * part as f64 / of.max(1) as f64;
    let note = format!("{ended} sessions, 8 at a time, lengths log-uniform 16 to 2048; {refused} refusals");
    reported("windows/run-whole", share(whole, ended), "%", format!("sessions that end as one run: {note}"));
    reported(
        "windows/run-short",
        share(short_whole, short),
        "%",
        format!("of the {short} sessions that fit one extent at all (128 tokens)"),
    );
    reported(
        "windows/run-pieces",
        found as f64 / least as f64,
        "x",
        "pieces of a session's table over the least possible, one per extent".to_string(),
    );
}

/// Filling a plane's window through the staging buffer, against copying the same bytes without a broker.
fn staging() {
    const TOKENS: usize = 2048;
    let mut broker =
        Broker::new(Arc::new(Memfd::new(false)), EXTENT, 85, 85, Policy::default()).expect("a pool");
    let heap = Arc::new(Memfd::new(false));
    let means = StagingMeans { heap, bytes: 2 << 20, total: 2 << 20 };
    broker.set_means(Means { access: Access::Contiguous, staging: Ok(means), ..Means::default() });
    let client = Client::on(&Embedded::new(broker), 1000, ClientOptions::default()).expect("a client");
    let profile = client.profile(&Profile::reference()).expect("the reference profile fits");
    let open = || client.open(&profile, OpenOptions::default()).expect("a session");
    let (mut session, mut other) = (open(), open());
    for tokens in (16..=TOKENS).step_by(16) {
        session.ensure(tokens).expect("room");
        // Scatters the first one's blocks.
        other.ensure(tokens / 2).expect("room");
    }
    let what = What::Plane { layer: 11, kv: Kv::V };
    let window = session.window(0..TOKENS, what, Some(How::Bounce)).expect("a window");
    let bytes = window.bytes();
    let plane = profile.planes(11)[1];
    let (base, table) = (session.base(), session.table().to_vec());
    let mut target = vec![0u8; bytes];
    let staged = || {
        let mut at = 0;
        while at < bytes {
            let batch = session.load(&window, None, at).expect("loaded").expect("a half");
            at += batch.bytes();
        }
    };
    let length = plane.row * 16;
    let plain = || {
        for (block, to) in table.iter().zip(target.chunks_exact_mut(length)) {
            let from = base.wrapping_add(((*block as usize) << 12) + plane.offset);
            // SAFETY: a plane of a block in the session's table, mapped; the target is our own.
            unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, length) };
        }
        black_box(&mut target);
    };
    let (mut staged, mut plain) = (staged, plain);
    let samples =
        Samples::interleaved(Clock::Cpu, 200, Duration::from_secs(2), &mut [&mut staged, &mut plain]);
    let note = format!(
        "{} KiB of one plane out of 128 scattered blocks, {:.0} us; median of {}; memory without a device, so no cache \
         maintenance",
        bytes >> 10,
        samples.median(0) * 1e6,
        samples.count()
    );
    at_most(
        "windows/bounce-copy",
        samples.median(0) / samples.median(1),
        1.15,
        format!("staging / memcpy: {note}"),
    );
    let all = TOKENS * profile.profile().bytes_per_token() as usize;
    reported(
        "windows/bounce-bytes",
        all as f64 / 1024.0 / 1024.0,
        "MiB",
        "that a bounce moves for each token at 2048 tokens, all K and V; udmabuf and iommu windows move none",
    );
}

/// A decode step's attention over plane views, against the block table.
fn views() {
    const TOKENS: usize = 2048;
    const LAYERS: usize = 4;
    let client =
        Client::embedded(EmbeddedOptions { pool_bytes: 96 << 20, extent_bytes: EXTENT }).expect("a pool");
    let profile = Profile::uniform("views", "f16", LAYERS as u32, 512, 512, 16).expect("a profile");
    let profile = client.profile(&profile).expect("it fits");
    let open = || client.open(&profile, OpenOptions::default()).expect("a session");
    let (mut session, mut other) = (open(), open());
    for tokens in (16..=TOKENS).step_by(16) {
        session.ensure(tokens).expect("room");
        other.ensure(tokens / 2).expect("room");
    }
    let shape = Shape::new(12, 2, 128);
    let mut values = Values(3);
    for token in 0..TOKENS {
        for layer in 0..LAYERS {
            for kv in [Kv::K, Kv::V] {
                let row = values.many(shape.kv_row());
                // SAFETY: the row is this session's and has the bytes of so many f16.
                unsafe {
                    kvbroker::attention::store_row(Element::F16, session.row_mut(token, layer, kv), &row)
                };
            }
        }
    }
    let view = |session: &mut Session, layer, kv| session.plane(layer, kv, TOKENS, None).expect("a view");
    let views: Vec<_> =
        (0..LAYERS).map(|l| [Kv::K, Kv::V].map(|kv| view(&mut session, l, kv).address)).collect();
    let q = values.many(shape.query_heads * shape.head_dim);
    let mut outs = [vec![0f32; q.len()], vec![0f32; q.len()]];
    let mut scratches = [Scratch::new(), Scratch::new()];
    let [out_a, out_b] = &mut outs;
    let [scratch_a, scratch_b] = &mut scratches;
    let mut over_table = || {
        for layer in 0..LAYERS {
            // SAFETY: the session holds the rows of every token.
            unsafe { attention(&shape, Element::F16, &session.paged(layer), TOKENS, &q, out_a, scratch_a) };
        }
    };
    let mut over_view = || {
        for [k, v] in &views {
            let source = Contiguous { k: *k, v: *v, k_stride: 512, v_stride: 512, run: 1 << 30 };
            // SAFETY: the views show the rows of every token.
            unsafe { attention(&shape, Element::F16, &source, TOKENS, &q, out_b, scratch_b) };
        }
    };
    let samples =
        Samples::interleaved(Clock::Cpu, 60, Duration::from_secs(2), &mut [&mut over_view, &mut over_table]);
    let note = format!("2048 tokens, f16, one decode step; median of {}", samples.count());
    reported(
        "windows/view-attention",
        samples.median(0) / samples.median(1),
        "x",
        format!("over plane views / over the block table: {note}"),
    );
    assert_eq!(outs[0], outs[1], "the sides do not do the same work");
}
