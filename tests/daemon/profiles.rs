//! Several models on one pool: blocks of different sizes draw on the same extents.

use kvbroker::client::{Client, ClientOptions, GroupedSession, OpenOptions};
use kvbroker::profile::{Group, Kv, Layer, Layout, Profile};
use kvbroker::wire::Fault;

use crate::support::{Daemon, EXTENT, POOL, ROW, profile};

/// A pool that several models take turns on.
struct Models {
    daemon: Daemon,
    clients: Vec<(Client, Profile)>,
}

impl Models {
    /// A process each: 32 KiB blocks; 48 KiB, two in an extent and a rest; and layers of two kinds, 32 and 64 KiB.
    fn new() -> Self {
        let daemon = Daemon::new();
        let three = Profile::uniform("three", "f16", 3, ROW as u32, ROW as u32, 16).unwrap();
        let layers = |numbers: &[u32]| {
            numbers.iter().map(|n| (*n, Layer { k_row: ROW as u32, v_row: ROW as u32 })).collect()
        };
        let groups = vec![
            Group { layers: layers(&[1, 3]), window: None },
            Group { layers: layers(&[0, 2, 4, 5]), window: Some(64) },
        ];
        let hybrid = Profile::new("hybrid", "f16", Layout::PlaneMajor, 16, groups).unwrap();
        let connect = |profile| {
            let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
            (Client::connect_to(&daemon.place.socket(), options).unwrap(), profile)
        };
        let clients = [profile(), three, hybrid].map(connect).into();
        Models { daemon, clients }
    }

    fn open(&self, model: usize) -> GroupedSession {
        let (client, profile) = &self.clients[model];
        let profile = client.grouped_profile(profile).unwrap();
        client.open_grouped(&profile, OpenOptions::default()).unwrap()
    }

    /// Bytes that clients hold. Looking counts the ledger anew and adds it up.
    fn held(&self) -> u64 {
        let ledger = self.daemon.ledger();
        let sum: u64 = ledger.as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(sum, POOL, "{ledger}");
        ["private", "shared", "credit"].iter().map(|a| ledger[a].as_u64().unwrap()).sum()
    }
}

fn row(token: usize, layer: usize, kv: Kv, who: u8) -> Vec<u8> {
    (0..ROW).map(|i| (i + 3 * token + 7 * layer + 11 * kv as usize) as u8 ^ who).collect()
}

/// Grows to `tokens` tokens, a block at a time, and writes them all.
fn run(s: &mut GroupedSession, tokens: usize, who: u8) {
    while s.tokens() < tokens {
        let from = s.tokens();
        s.ensure((from + 16).min(tokens)).unwrap();
        let layers: Vec<usize> = s.profile().layers().map(|l| l as usize).collect();
        for token in from..s.tokens() {
            for &layer in &layers {
                s.write_row(token, layer, Kv::K, &row(token, layer, Kv::K, who)).unwrap();
                s.write_row(token, layer, Kv::V, &row(token, layer, Kv::V, who)).unwrap();
            }
        }
    }
}

fn holds(s: &GroupedSession, who: u8) {
    let mut got = [0; ROW];
    for layer in s.profile().layers().map(|l| l as usize) {
        let first = (s.tokens() + 1).saturating_sub(s.window(layer).unwrap_or(usize::MAX));
        for token in first..s.tokens() {
            s.read_row(token, layer, Kv::V, &mut got).unwrap();
            assert_eq!(got[..], row(token, layer, Kv::V, who), "token {token} layer {layer}");
        }
    }
}

#[test]
fn models_of_different_blocks_take_turns_on_all_of_the_pool_and_the_ledger_adds_up() {
    let models = Models::new();
    for turn in 0..4u8 {
        // 4 blocks in each of 8 extents.
        let mut small = models.open(0);
        run(&mut small, 32 * 16, turn);
        assert_eq!(models.held(), POOL);
        let refused = models.open(1).ensure(1).unwrap_err();
        assert_eq!(refused.fault(), Some(Fault::Busy), "{refused}");
        holds(&small, turn);
        drop(small);
        assert_eq!(models.held(), 0);

        // 2 blocks of 48 KiB in each: the rest of an extent is waste.
        let mut three = models.open(1);
        run(&mut three, 16 * 16, turn ^ 0x55);
        assert_eq!(models.held(), 16 * (48 << 10));
        assert_eq!(models.daemon.account("waste"), POOL - 16 * (48 << 10));
        holds(&three, turn ^ 0x55);
        drop(three);

        // 20 blocks of full attention in 5 extents, the window's 5 blocks at most in 3.
        let mut hybrid = models.open(2);
        run(&mut hybrid, 20 * 16, turn ^ 0xaa);
        assert!(models.held() <= 20 * (32 << 10) + 5 * (64 << 10));
        holds(&hybrid, turn ^ 0xaa);
        let refused = hybrid.ensure(21 * 16).unwrap_err();
        assert_eq!(refused.fault(), Some(Fault::Busy), "{refused}");
        holds(&hybrid, turn ^ 0xaa);
        drop(hybrid);
        assert_eq!(models.held(), 0);
    }
    drop(models.clients);
    crate::support::until("all is free", || models.daemon.account("free") == POOL);
}

#[test]
fn models_that_run_beside_each_other_keep_to_extents_of_their_own() {
    let models = Models::new();
    let mut sessions: Vec<_> = (0..3).map(|model| models.open(model)).collect();
    for tokens in (16..=64).step_by(16) {
        for (who, session) in sessions.iter_mut().enumerate() {
            run(session, tokens, who as u8);
        }
        for (who, session) in sessions.iter().enumerate() {
            holds(session, who as u8);
        }
    }
    // 4 blocks of 32 KiB, 4 of 48, and 4 of 32 beside 4 of 64: 1 + 2 + 1 + 2 extents of 8.
    assert_eq!(models.held(), (4 * (32 + 48 + 32 + 64)) << 10);
    assert_eq!(models.daemon.account("free"), 2 * EXTENT);
    // Whoever goes leaves whole extents to whoever stays.
    sessions.remove(2);
    run(&mut sessions[0], 20 * 16, 0);
    holds(&sessions[0], 0);
    holds(&sessions[1], 1);
}
