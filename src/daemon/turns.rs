//! Whose request is served next.
//!
//! Owns nothing but the order. Invariants:
//! - of those who have something to say, every tenant is served once before any tenant is served again: whoever opens
//!   many connections gets no more of the broker's time than one that has one;
//! - within a tenant, whoever was served longest ago goes first, so none of its connections waits for ever.
//!
//! So between two requests of a connection whose tenant has no other, at most one request of each other tenant is served,
//! however many connections there are, and however long their requests take.

use std::collections::BTreeMap;

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

#[cfg(test)]
mod tests {
    use super::*;

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
