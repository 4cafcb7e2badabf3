//! Whose request is served next.
//!
//! Owns the order, and who rests. Invariants:
//! - of those who have something to say, every tenant is served once before any tenant is served again: whoever opens
//!   many connections gets no more of the broker's time than one that has one;
//! - within a tenant, whoever was served longest ago goes first, so none of its connections waits for ever.
//!
//! So between two requests of a connection whose tenant has no other, at most one request of each other tenant is served,
//! however many connections there are, and however long their requests take.
//!
//! But a request may take as long as its tenant's tables are, and turns alone would leave its neighbours one short request for each
//! of its long ones. So a tenant whose request took long *rests* while others are connected: nothing of its is read for three
//! times as long, which leaves it a quarter of the loop's time. Several such tenants could take all of it by turns: so after each
//! long request nothing is read of any of them for as long as it took, and those who ask for little have half the time,
//! however many the others are. A rest is [`LONGEST`] at most, and ends by itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::id::ClientId;

/// One connection that has something to say: whose it is, when it was served last, and which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    pub uid: u32,
    /// The turn in which it was served last; 0 for never.
    pub served: u64,
    pub id: ClientId,
}

/// Who is served in this turn: one connection of each tenant, in the order of the tenants' waiting, longest first.
pub(super) fn choose(ready: impl IntoIterator<Item = Ready>) -> Vec<ClientId> {
    let mut chosen: BTreeMap<u32, Ready> = BTreeMap::new();
    for r in ready {
        let first = chosen.entry(r.uid).or_insert(r);
        if (r.served, r.id) < (first.served, first.id) {
            *first = r;
        }
    }
    let mut chosen: Vec<Ready> = chosen.into_values().collect();
    chosen.sort_unstable_by_key(|r| (r.served, r.id));
    chosen.into_iter().map(|r| r.id).collect()
}

/// A request that takes longer is long. Ten times what those of a decoding engine take on a small board, so that none of these ever
/// rests; and still as little as nobody misses who waits for one of them.
const LONG: Duration = Duration::from_millis(1);
/// How many times as long as a long request took its tenant rests.
const TIMES: u32 = 3;
/// The longest rest: nobody is thought dead over it.
const LONGEST: Duration = Duration::from_millis(250);
/// How long a tenant counts as one of those whose requests take long. Much longer than a rest: else it would be a new one each
/// time.
const KNOWN: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Rest {
    /// Until when it rests for its own request.
    until: Instant,
    /// Until when it rests also for those of others.
    known: Instant,
}

/// Of whom nothing is read for a while. See the module.
#[derive(Debug, Default)]
pub(super) struct Rests {
    /// Those whose requests took long lately.
    tenants: BTreeMap<u32, Rest>,
    /// Until when all of them rest.
    quiet: Option<Instant>,
}

impl Rests {
    /// Whether a request that took so long makes its tenant rest.
    pub fn is_long(took: Duration) -> bool {
        took > LONG
    }

    /// A long request of a tenant has been served, and others are connected.
    pub fn begin(&mut self, uid: u32, took: Duration, now: Instant) {
        self.tenants.retain(|_, rest| now < rest.known);
        let rest = Rest { until: now + (took * TIMES).min(LONGEST), known: now + KNOWN };
        self.tenants.insert(uid, rest);
        self.quiet = self.quiet.max(Some(now + took.min(LONGEST)));
    }

    /// Until when nothing is read of a tenant, if it rests.
    pub fn until(&self, uid: u32, now: Instant) -> Option<Instant> {
        let rest = self.tenants.get(&uid).filter(|rest| now < rest.known)?;
        self.quiet.max(Some(rest.until)).filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each of these has of the loop in the time of a thousand long requests, if everybody always has something to say and those
    /// of the first take `long` each. A short request takes a twentieth of that, and is short.
    fn shares(heavy: u32, light: u32, long: Duration) -> Vec<Duration> {
        let short = (long / 20).min(LONG);
        let (begin, mut now) = (Instant::now(), Instant::now());
        let end = begin + long * 1000;
        let mut rests = Rests::default();
        let tenants = 0..heavy + light;
        let mut ready: Vec<Ready> =
            tenants.map(|uid| Ready { uid, served: 0, id: ClientId(uid.into()) }).collect();
        let mut had = vec![Duration::ZERO; ready.len()];
        let mut turn = 0;
        while now < end {
            turn += 1;
            let awake = ready.iter().copied().filter(|r| rests.until(r.uid, now).is_none());
            let chosen = choose(awake);
            if chosen.is_empty() {
                now += short;
            }
            for id in chosen {
                let r = ready.iter_mut().find(|r| r.id == id).unwrap();
                if rests.until(r.uid, now).is_some() {
                    continue;
                }
                let took = if r.uid < heavy { long } else { short };
                now += took;
                r.served = turn;
                had[r.uid as usize] += took;
                if Rests::is_long(took) {
                    rests.begin(r.uid, took, now);
                }
            }
        }
        had
    }

    #[test]
    fn a_tenant_whose_requests_take_long_has_a_quarter_of_the_loop_and_many_have_half() {
        for ms in [2, 5, 40] {
            let long = Duration::from_millis(ms);
            // What is begun may end behind the end.
            let all = long * 1000;
            for heavy in [1, 2, 3, 8, 30] {
                let had = shares(heavy, 2, long);
                let theirs: Duration = had[..heavy as usize].iter().sum();
                // The first request of each is not known to be long.
                let most = if heavy == 1 { all / 4 } else { all / 2 } + long * (heavy + 1);
                assert!(theirs <= most, "{heavy} of {ms} ms: {theirs:?}");
                // And nobody of them is left out.
                let least = had[..heavy as usize].iter().min().unwrap();
                let part = all / (4 * heavy);
                assert!(*least + 4 * long >= part.min(all / 5), "{heavy} of {ms} ms: {had:?}");
            }
        }
    }

    #[test]
    fn whoever_asks_for_little_never_rests_and_a_rest_is_forgotten() {
        let now = Instant::now();
        let mut rests = Rests::default();
        assert!(!Rests::is_long(LONG));
        rests.begin(1, Duration::from_secs(9), now);
        assert_eq!(rests.until(1, now), Some(now + LONGEST));
        assert_eq!(rests.until(2, now), None);
        assert_eq!(rests.until(1, now + LONGEST), None);
        // One of another makes it rest again while it is known, and not afterwards.
        let later = now + KNOWN - Duration::from_millis(1);
        rests.begin(2, 2 * LONG, later);
        assert_eq!(rests.until(1, later), Some(later + 2 * LONG));
        assert_eq!(rests.until(2, later), Some(later + 6 * LONG));
        assert_eq!(rests.until(1, now + KNOWN), None);
    }

    /// Turns in which everybody always has something to say, by whoever was served in each.
    fn turns(of: &[(u32, u64)], count: u64) -> Vec<Vec<ClientId>> {
        let mut ready: Vec<Ready> =
            of.iter().map(|(uid, id)| Ready { uid: *uid, served: 0, id: ClientId(*id) }).collect();
        let turn = |turn: u64| {
            let chosen = choose(ready.iter().copied());
            ready.iter_mut().filter(|r| chosen.contains(&r.id)).for_each(|r| r.served = turn);
            chosen
        };
        (1..=count).map(turn).collect()
    }

    #[test]
    fn between_two_requests_of_mine_at_most_one_of_each_other_tenant_is_served() {
        // Sixty connections of one tenant, two of another, and mine, which came last.
        let mut of: Vec<(u32, u64)> = (1..=60).map(|id| (4001, id)).collect();
        of.extend([(4002, 61), (4002, 62), (4003, 63)]);
        let order: Vec<ClientId> = turns(&of, 200).concat();
        let mine: Vec<usize> = (0..order.len()).filter(|i| order[*i] == ClientId(63)).collect();
        assert_eq!(mine.len(), 200);
        assert!(mine[0] <= 2 && mine.windows(2).all(|w| w[1] - w[0] <= 3), "{mine:?}");
    }

    #[test]
    fn every_connection_of_a_tenant_gets_its_turn() {
        let of: Vec<(u32, u64)> = (1..=60).map(|id| (4001, id)).chain([(4002, 61)]).collect();
        let order: Vec<ClientId> = turns(&of, 120).concat();
        for id in 1..=60 {
            assert_eq!(order.iter().filter(|c| c.0 == id).count(), 2, "connection {id}");
        }
    }
}
