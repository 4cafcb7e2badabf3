//! Who of those whose requests wait for extents is tried first when one has come.
//!
//! Owns since when each waits, and when each tenant was served last. Invariants: one request of each tenant is tried before
//! a second one of any, the tenant's that was served longest ago first; of one tenant whoever has waited longest is first. So
//! nobody waits for ever because others ask again as soon as they are served, whoever connected first.

use std::collections::BTreeMap;

use crate::id::{ClientId, Tenant};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Counts what happens here.
    clock: u64,
    since: BTreeMap<ClientId, u64>,
    served: BTreeMap<Tenant, u64>,
}

impl Waits {
    /// A request has to wait, or still has to. A tenant that is not known yet counts as served just now: else whoever leaves
    /// and comes again would be first each time.
    pub fn begin(&mut self, client: ClientId, tenant: Tenant) {
        self.clock += 1;
        self.since.entry(client).or_insert(self.clock);
        self.served.entry(tenant).or_insert(self.clock);
    }

    /// A request that has waited is answered.
    pub fn serve(&mut self, client: ClientId, tenant: Tenant) {
        self.clock += 1;
        self.since.remove(&client);
        self.served.insert(tenant, self.clock);
    }

    /// A client has gone, and `last` says whether it was its tenant's only one.
    pub fn forget(&mut self, client: ClientId, tenant: Tenant, last: bool) {
        self.since.remove(&client);
        if last {
            self.served.remove(&tenant);
        }
    }

    /// These, in the order in which they are to be tried.
    pub fn order(&self, waiting: impl Iterator<Item = (Tenant, ClientId)>) -> Vec<ClientId> {
        let since = |client: &ClientId| self.since.get(client).copied().unwrap_or(0);
        let mut of_tenants: BTreeMap<Tenant, Vec<(u64, ClientId)>> = BTreeMap::new();
        waiting.for_each(|(t, client)| of_tenants.entry(t).or_default().push((since(&client), client)));
        let mut all = Vec::new();
        for (tenant, mut clients) in of_tenants {
            clients.sort_unstable();
            let served = self.served.get(&tenant).copied().unwrap_or(0);
            all.extend(clients.into_iter().enumerate().map(|(round, (since, c))| (round, served, since, c)));
        }
        all.sort_unstable();
        all.into_iter().map(|(.., client)| client).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_mine_is_tried_before_a_second_of_anybody_however_many_came_before_me() {
        let mut waits = Waits::default();
        let (many, me) = (Tenant(4001), Tenant(4002));
        let mut waiting: Vec<(Tenant, ClientId)> = (1..=40).map(|id| (many, ClientId(id))).collect();
        waiting.push((me, ClientId(41)));
        waiting.iter().for_each(|(tenant, client)| waits.begin(*client, *tenant));
        let mut mine = 0;
        for turn in 1..=20 {
            // One extent has come: the first one gets it, and asks for the next at once.
            let first = waits.order(waiting.iter().copied())[0];
            let tenant = if first == ClientId(41) { me } else { many };
            mine += u32::from(tenant == me);
            assert!((mine * 2).abs_diff(turn) <= 1, "of {turn} extents {mine} were mine");
            waits.serve(first, tenant);
            waits.begin(first, tenant);
        }
    }

    #[test]
    fn who_leaves_and_comes_again_is_not_first_because_of_it() {
        let mut waits = Waits::default();
        let (me, other) = ((Tenant(4002), ClientId(1)), Tenant(4001));
        waits.begin(me.1, me.0);
        for id in 2..=10 {
            let again = (other, ClientId(id));
            waits.begin(again.1, again.0);
            assert_eq!(waits.order([again, me].into_iter()), [me.1, again.1]);
            waits.serve(again.1, other);
            waits.forget(again.1, other, true);
        }
        assert!(waits.since.len() == 1 && waits.served.len() == 1, "nothing is kept of who is gone");
    }

    #[test]
    fn of_one_tenant_whoever_waits_longest_is_first_although_it_was_tried_before() {
        let mut waits = Waits::default();
        for id in [3, 1, 2, 3] {
            waits.begin(ClientId(id), Tenant(7));
        }
        let all = || [1, 2, 3].map(|id| (Tenant(7), ClientId(id))).into_iter();
        assert_eq!(waits.order(all()), [3, 1, 2].map(ClientId));
        waits.serve(ClientId(3), Tenant(7));
        waits.begin(ClientId(3), Tenant(7));
        assert_eq!(waits.order(all()), [1, 2, 3].map(ClientId));
    }
}
