//! Who of those whose requests wait for extents is tried first when one has come, and who lets whom go first.
//!
//! Owns since when each waits, for what, how often others were served meanwhile, and when each tenant was served last.
//! Invariants: one request of each tenant is tried before a second one of any, the tenant's that was served longest ago first;
//! of one tenant whoever has waited longest is first. So nobody waits for ever because others ask again as soon as they are
//! served, whoever connected first. And a request that needs several extents is overtaken by those that need one [`TURNS`]
//! times at most: from then on it is *due*, and until it is answered, whichever way, nobody takes what it could use:
//! - a request for the same tenant and format waits until then, one for another that would need clean extents likewise;
//! - but never one that finds places in extents of its own, takes what was promised to its session, or what its tenant lacks
//!   of its reserve: that was never the other's to use; nor one of higher priority;
//! - of several that are due, the one that is tried first is the one for whom the others wait.
//!
//! Whoever is due is answered before long: a request waits only while what it lacks is on its way, or was asked for with a
//! deadline, and is refused once that is no longer so.

use std::collections::BTreeMap;

use super::Broker;
use crate::id::{ClientId, FormatId, Tenant};

/// How often others may take what a waiting request could use, before it is due. Few, since whoever waits may need what 253
/// others give up one by one; and some, since while one is due, what has come for it lies idle.
const TURNS: u32 = 8;

/// For what a request waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lack {
    pub tenant: Tenant,
    pub format: FormatId,
    pub priority: u8,
}

/// One that waits for blocks.
#[derive(Debug, Clone, Copy)]
struct Lacking {
    lack: Lack,
    /// Grants to others, meanwhile, of what it could use.
    overtaken: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Counts what happens here.
    clock: u64,
    since: BTreeMap<ClientId, u64>,
    served: BTreeMap<Tenant, u64>,
    /// Those who wait for blocks; others wait for stored prefixes to be read.
    lacking: BTreeMap<ClientId, Lacking>,
}

impl Waits {
    /// A request finds too little and will have to wait for it.
    pub fn lack(&mut self, client: ClientId, lack: Lack) {
        self.lacking.entry(client).or_insert(Lacking { lack, overtaken: 0 }).lack = lack;
    }

    /// Blocks were granted to `client`, from `clean` extents or not.
    pub fn overtake(&mut self, client: ClientId, tenant: Tenant, format: FormatId, clean: bool) {
        for (other, l) in &mut self.lacking {
            let could_use = clean || (l.lack.tenant, l.lack.format) == (tenant, format);
            l.overtaken = l.overtaken.saturating_add(u32::from(could_use && *other != client));
        }
    }

    /// The request for which others wait.
    pub fn due(&self) -> Option<(ClientId, Lack)> {
        let due = self.lacking.iter().filter(|(_, l)| l.overtaken >= TURNS);
        let rank = |(client, l): &(&ClientId, &Lacking)| {
            let served = self.served.get(&l.lack.tenant).copied().unwrap_or(0);
            (served, self.since.get(client).copied().unwrap_or(0), **client)
        };
        due.min_by_key(rank).map(|(client, l)| (*client, l.lack))
    }

    /// A request has to wait, or still has to. A tenant that is not known yet counts as served just now: else whoever leaves
    /// and comes again would be first each time.
    pub fn begin(&mut self, client: ClientId, tenant: Tenant) {
        self.clock += 1;
        self.since.entry(client).or_insert(self.clock);
        self.served.entry(tenant).or_insert(self.clock);
    }

    /// A request that has waited is answered. Whether others may have waited for that.
    #[must_use]
    pub fn serve(&mut self, client: ClientId, tenant: Tenant) -> bool {
        self.clock += 1;
        self.since.remove(&client);
        self.served.insert(tenant, self.clock);
        self.is_over(client)
    }

    /// A client has gone, and `last` says whether it was its tenant's only one. Whether others may have waited for that.
    #[must_use]
    pub fn forget(&mut self, client: ClientId, tenant: Tenant, last: bool) -> bool {
        self.since.remove(&client);
        if last {
            self.served.remove(&tenant);
        }
        self.is_over(client)
    }

    fn is_over(&mut self, client: ClientId) -> bool {
        self.lacking.remove(&client).is_some_and(|l| l.overtaken >= TURNS)
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
        // Whoever is due comes before all: what the others would take waits for it.
        let due = self.due().map(|(client, _)| client);
        all.sort_unstable_by_key(|(round, served, since, c)| (Some(*c) != due, *round, *served, *since, *c));
        all.into_iter().map(|(.., client)| client).collect()
    }
}

impl Broker {
    /// Whether a request for `least` blocks, `own` of which are promised to it, has to wait until the one that is due has been
    /// answered.
    pub(super) fn steps_aside(&self, client: ClientId, wants: Lack, own: u32, least: u64) -> bool {
        let Some((due, lack)) = self.waits.due() else { return false };
        if due == client || wants.priority > lack.priority || (least > 0 && u64::from(own) >= least) {
            return false;
        }
        let Lack { tenant, format, .. } = wants;
        if (lack.tenant, lack.format) == (tenant, format) {
            return true;
        }
        let promised = self.promised(tenant, format) - u64::from(own);
        let places = self.state.pool.free_places(tenant, format).saturating_sub(promised);
        let slots = self.state.formats.get(&format).map_or(1, |f| f.cut.slots.max(1));
        let extents = least.saturating_sub(places).div_ceil(slots.into());
        let reserve = self.state.tenancy.of(tenant).reserve;
        let within = u64::from(self.state.pool.extents_of(tenant)) + extents <= u64::from(reserve);
        // At its limit the other could not use a clean extent, and waits for one of its own.
        extents > 0 && !(within && tenant != lack.tenant) && self.may_get(lack.tenant) > 0
    }
}

#[cfg(test)]
mod tests;
