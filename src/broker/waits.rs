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
//! - of several that are due, of one tenant or of all, the one that is tried first is the one for whom the others wait.
//!
//! Whoever is due is answered before long: a request waits only while what it lacks is on its way, or was asked for with a
//! deadline, and is refused once that is no longer so. Its own tenant waits for it as long as that takes. But a deadline is
//! somebody's word, and may be that of the same tenant's: so *other* tenants wait [`HOLD`] at once at most, then not again until
//! [`REST`] times as long has passed, and whoever it is for, half the time nobody waits for another tenant's.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Broker;
use crate::id::{ClientId, FormatId, Tenant};

/// How often others may take what a waiting request could use, before it is due. Few, since whoever waits may need what 253
/// others give up one by one; and some, since while one is due, what has come for it lies idle.
const TURNS: u32 = 8;

/// How long other tenants wait for a request that is due. Renewing a whole pool takes about as long on a small board.
const HOLD: Duration = Duration::from_millis(250);

/// How many times as long as others have waited for one of a tenant's requests they do not wait for the next: so one tenant's
/// neighbours spend an eighth of their time waiting for it at most.
const REST: u32 = 7;

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
    /// The request that other tenants wait for, and since when.
    hold: Option<(ClientId, Tenant, Instant)>,
    /// Until when nobody waits for another tenant's request.
    quiet: Option<Instant>,
    /// Until when nobody waits for one of these tenants' but they themselves.
    rest: BTreeMap<Tenant, Instant>,
}

impl Waits {
    /// A request finds too little and will have to wait for it.
    pub fn lack(&mut self, client: ClientId, lack: Lack) {
        self.lacking.entry(client).or_insert(Lacking { lack, overtaken: 0 }).lack = lack;
    }

    /// The highest priority of those who lack something.
    pub fn highest_priority(&self) -> Option<u8> {
        self.lacking.values().map(|l| l.lack.priority).max()
    }

    /// Blocks were granted to `client`, from `clean` extents or not.
    pub fn overtake(&mut self, client: ClientId, tenant: Tenant, format: FormatId, clean: bool) {
        for (other, l) in &mut self.lacking {
            let could_use = clean || (l.lack.tenant, l.lack.format) == (tenant, format);
            l.overtaken = l.overtaken.saturating_add(u32::from(could_use && *other != client));
        }
    }

    /// Those that are due, the one that is tried first at the front.
    fn due(&self) -> Vec<(ClientId, Lack)> {
        let mut due: Vec<_> = self.lacking.iter().filter(|(_, l)| l.overtaken >= TURNS).collect();
        due.sort_by_key(|(client, l)| {
            let served = self.served.get(&l.lack.tenant).copied().unwrap_or(0);
            (served, self.since.get(client).copied().unwrap_or(0), **client)
        });
        due.into_iter().map(|(client, l)| (*client, l.lack)).collect()
    }

    /// The request of another tenant for which this one's wait.
    fn due_of_others(&self, tenant: Tenant, now: Instant) -> Option<(ClientId, Lack)> {
        if let Some((client, of, since)) = self.hold {
            let lack = self.lacking.get(&client)?.lack;
            return (of != tenant && now < since + HOLD).then_some((client, lack));
        }
        if self.quiet.is_some_and(|until| now < until) {
            return None;
        }
        let rests = |tenant| self.rest.get(&tenant).is_some_and(|until| now < *until);
        let first = self.due().into_iter().find(|(_, lack)| !rests(lack.tenant))?;
        (first.1.tenant != tenant).then_some(first)
    }

    /// The request of the same tenant for which this one's wait.
    fn due_of_its_own(&self, tenant: Tenant) -> Option<(ClientId, Lack)> {
        self.due().into_iter().find(|(_, lack)| lack.tenant == tenant)
    }

    /// Another tenant waits for this one.
    fn begin_hold(&mut self, client: ClientId, tenant: Tenant, now: Instant) {
        self.rest.retain(|_, until| now < *until);
        self.hold.get_or_insert((client, tenant, now));
    }

    /// Nobody waits any more for the request that other tenants waited for. Whether there was one.
    fn end_hold(&mut self, now: Instant) -> bool {
        let Some((_, tenant, since)) = self.hold.take() else { return false };
        let held = now.saturating_duration_since(since).min(HOLD);
        self.quiet = Some(now + held);
        self.rest.insert(tenant, now + held * REST);
        true
    }

    /// When other tenants have waited long enough.
    pub fn next_end(&self) -> Option<Instant> {
        self.hold.map(|(.., since)| since + HOLD)
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
    pub fn serve(&mut self, client: ClientId, tenant: Tenant, now: Instant) -> bool {
        self.clock += 1;
        self.since.remove(&client);
        self.served.insert(tenant, self.clock);
        self.is_over(client, now)
    }

    /// A client has gone, and `last` says whether it was its tenant's only one. Whether others may have waited for that.
    #[must_use]
    pub fn forget(&mut self, client: ClientId, tenant: Tenant, last: bool, now: Instant) -> bool {
        self.since.remove(&client);
        if last {
            self.served.remove(&tenant);
        }
        self.is_over(client, now)
    }

    fn is_over(&mut self, client: ClientId, now: Instant) -> bool {
        if self.hold.is_some_and(|(held_for, ..)| held_for == client) {
            self.end_hold(now);
        }
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
        let due = self.hold.map(|(client, ..)| client).or_else(|| Some(self.due().first()?.0));
        all.sort_unstable_by_key(|(round, served, since, c)| (Some(*c) != due, *round, *served, *since, *c));
        all.into_iter().map(|(.., client)| client).collect()
    }
}

impl Broker {
    /// Whether a request for `least` blocks, `own` of which are promised to it, has to wait until one that is due has been
    /// answered.
    pub(super) fn steps_aside(&mut self, client: ClientId, wants: Lack, own: u32, least: u64) -> bool {
        if least > 0 && u64::from(own) >= least {
            return false;
        }
        let goes_first = |broker: &Broker, (due, lack): &(ClientId, Lack)| {
            *due != client && wants.priority <= lack.priority && broker.could_use(lack, wants, own, least)
        };
        let its_own = self.waits.due_of_its_own(wants.tenant);
        if its_own.is_some_and(|due| goes_first(self, &due)) {
            return true;
        }
        let now = self.absent.clock;
        let others = self.waits.due_of_others(wants.tenant, now).filter(|due| goes_first(self, due));
        if let Some((due, lack)) = others {
            self.waits.begin_hold(due, lack.tenant, now);
        }
        others.is_some()
    }

    /// Whether one who lacks could use what a request for `least` blocks would get.
    fn could_use(&self, lack: &Lack, wants: Lack, own: u32, least: u64) -> bool {
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

    /// Other tenants have waited long enough for one that is due.
    pub(super) fn end_late_hold(&mut self, now: Instant) {
        if self.waits.next_end().is_some_and(|end| end <= now) && self.waits.end_hold(now) {
            self.stirred = true;
            self.settle();
        }
    }
}

#[cfg(test)]
mod tests;
