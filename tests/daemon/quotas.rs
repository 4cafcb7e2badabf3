//! Limits beside what is cached: a quota that equals a bound of the cache must not stop everything.

use crate::support::{BLOCK, CONFIG, EXTENT, PER_BLOCK, Place};

const A: u32 = 4001;

#[test]
fn a_tenant_at_its_limit_makes_room_from_its_own_cached_prefixes_whatever_the_caches_bound() {
    const LIMIT: u64 = 4 * EXTENT;
    // The bound of the cache, from half of the limit to one and a half times it, and none.
    for bound in [Some(4), Some(6), Some(7), Some(8), Some(9), Some(12), None] {
        let bound = bound.map(|eighths| LIMIT / 8 * eighths);
        let cache = bound.map_or(String::new(), |bytes| format!("[cache]\nlimit = \"{}K\"\n", bytes >> 10));
        let config = format!("{CONFIG}\n{cache}[[tenant]]\nuid = {A}\nlimit = \"{}K\"\n", LIMIT >> 10);
        let daemon = Place::new(&config).start();
        let mut client = daemon.helper(A);
        let tokens = (LIMIT / BLOCK) as usize * PER_BLOCK;
        for round in 0..6 {
            // All that it may have, published, let go, and wanted again with other rows.
            client.must("open");
            client.must(&format!("ensure {round} {tokens}"));
            client.must(&format!("fill {round} 0 {tokens} {}", round + 1));
            client.must(&format!("holds {round} 0 {tokens} {}", round + 1));
            client.must(&format!("seal {round} {}", tokens - PER_BLOCK * (round + 1)));
            client.must(&format!("close {round}"));
            let now = daemon.ledger();
            let cached = now["cached"].as_u64().unwrap();
            assert!(cached <= bound.unwrap_or(u64::MAX), "round {round}: {cached} cached, bound {bound:?}");
            assert_eq!(now["private"], 0, "round {round}");
        }
        drop(client);
    }
}
