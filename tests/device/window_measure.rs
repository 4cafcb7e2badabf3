//! What windows cost while a session decodes 128 tokens: requests to the kernel, pinned pages, bytes moved. Rows for
//! `scripts/bench`, one JSON object a line, and the promises that do not depend on the machine.
//!
//! Run by `scripts/vm measure`.

use kvbroker::client::{Session, Window};
use kvbroker::profile::{Kv, Profile};
use kvbroker::window::{Access, How, What};

use crate::support::BLOCK;
use crate::window::{client, large_memfd_pool, open, pinned, pins};

/// Tokens that are decoded, and the blocks that they fill.
const DECODED: usize = 128;
const GROWTH: usize = DECODED / 16;
const PLANE_PAGES: usize = 2;

fn figure(name: &str, value: f64, unit: &str, bar: Option<f64>, note: &str) {
    let line = serde_json::json!({
        "name": name, "value": value, "unit": unit, "bar": bar, "cmp": "<=", "note": note,
    });
    // The test harness has begun a line with the test's name.
    println!("\n{line}");
}

/// What growing cost, per plane.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    requests: u64,
    /// Pages of blocks that the window showed before, pinned again.
    again: i64,
}

/// Windows over K and V of one layer, grown token by token.
fn grow(session: &mut Session, windows: &mut [Window], to: usize) -> Cost {
    let mut cost = Cost::default();
    while session.tokens() < to {
        let next = session.tokens() + 1;
        session.ensure(next).expect("room");
        for window in windows.iter_mut() {
            let (requests, shown, before) = (window.requests(), window.tokens().len(), pins().0);
            session.extend_window(window, next).expect("growth");
            let new = (PLANE_PAGES * (window.tokens().len() - shown) / 16) as i64;
            cost.requests += window.requests() - requests;
            cost.again += pins().0 - before - new;
        }
    }
    let planes = windows.len();
    Cost { requests: cost.requests / planes as u64, again: cost.again / planes as i64 }
}

#[test]
fn windows_follow_a_session_that_decodes_by_few_requests_and_few_pages() {
    for (access, how) in [(Access::Scatter, How::Udmabuf), (Access::Iommu, How::Iommu)] {
        for blocks in [8, 32, 128] {
            let broker = large_memfd_pool(access);
            let client = client(&broker, 1001);
            let (mut session, mut other) = (open(&client), open(&client));
            for tokens in (16..=blocks * 16).step_by(16) {
                session.ensure(tokens).expect("room");
                // Half as many of somebody else's between them.
                other.ensure(tokens / 2).expect("room");
            }
            let before = pinned();
            let plane = |kv| What::Plane { layer: 7, kv };
            let mut windows =
                [Kv::K, Kv::V].map(|kv| session.window(0..blocks * 16, plane(kv), None).expect("a window"));
            assert!(windows.iter().all(|w| w.how() == how));
            let final_blocks = blocks + GROWTH;
            let Cost { requests, again } = grow(&mut session, &mut windows, final_blocks * 16);
            // A window that was replaced is let go when the broker looks next: the daemon does within 20 ms.
            broker.with(|b| b.recheck_windows());
            let pages = (pinned() - before) / windows.len() as i64;
            let name = |what: &str| format!("windows/{how}-{blocks}-{what}");
            let most = (GROWTH as f64).log2() + 2.0;
            figure(
                &name("requests"),
                requests as f64,
                "",
                Some(most),
                "per plane, each one call of the kernel, for 128 decoded tokens",
            );
            let most_pages = 2 * PLANE_PAGES * final_blocks;
            let ratio = pages as f64 / (PLANE_PAGES * final_blocks) as f64;
            figure(
                &name("pinned"),
                ratio,
                "x",
                Some(2.0),
                "pages pinned per plane at the end, over those of the final size",
            );
            let touched = again as f64 / (PLANE_PAGES * blocks) as f64;
            figure(
                &name("touched"),
                touched,
                "x",
                (how == How::Iommu).then_some(0.0),
                "pages of blocks that were there before, pinned again while 8 blocks were added, over all of them",
            );
            assert!(requests as f64 <= most, "{requests} requests");
            // A udmabuf is made anew when it grows, at most so often; what is mapped by address is left alone.
            assert!(
                again as f64 <= if how == How::Iommu { 0.0 } else { most * (pages as f64) },
                "{again} pages"
            );
            assert!(pages as usize <= most_pages, "{pages} pages");
        }
    }
    let per_token = Profile::reference().bytes_per_token() as usize;
    for blocks in [8, 32, 128] {
        let moved: usize = (0..DECODED).map(|t| (blocks * 16 + t + 1) * per_token).sum();
        figure(
            &format!("windows/bounce-{blocks}-moved"),
            moved as f64 / (1 << 20) as f64,
            "MiB",
            None,
            "all K and V for each of 128 tokens, which a bounce copies and a udmabuf or iommu window does not",
        );
    }
    assert_eq!(per_token * 16, BLOCK);
}
