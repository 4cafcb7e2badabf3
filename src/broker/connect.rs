//! Who may connect, and what a connection leaves behind: nothing.
//!
//! Owns nothing: connections are part of the state. Invariants: a tenant is a uid that the kernel knows; connections that are kept
//! for tenants with a reserve are nobody else's; what a connection had is free, or on its way to be, when
//! [`Broker::disconnect`] returns.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use super::{Broker, Client, Output};
use crate::id::{ClientId, FormatId, Tenant};
use crate::wire::{self, Writer};

/// See [`Tenant::OVERFLOW`].
pub(super) const OVERFLOW_UID: u32 = Tenant::OVERFLOW.0;

/// Who is at the other end, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The uid: the tenant.
    pub uid: u32,
    /// The process, for people only.
    pub pid: i32,
}

/// Why somebody may not connect.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum ConnectError {
    #[error("uid {OVERFLOW_UID} stands for users that this namespace does not know; it can be no tenant")]
    Nobody,
    #[error("{0} connections are open, as many as limits.connections allows")]
    Full(u32),
    #[error(
        "no connection is left: of the {0} that limits.connections allows, those that are not open are kept for tenants with a reserve"
    )]
    Kept(u32),
    #[error("uid {uid} has {count} connections open, as many as limits.connections-per-tenant allows")]
    TenantFull { uid: u32, count: u32 },
}

impl Broker {
    /// Somebody connects.
    pub fn connect(&mut self, peer: Peer) -> Result<ClientId, ConnectError> {
        if peer.uid == OVERFLOW_UID {
            return Err(ConnectError::Nobody);
        }
        if self.state.clients.len() as u32 >= self.policy.connections {
            return Err(ConnectError::Full(self.policy.connections));
        }
        let tenant = Tenant(peer.uid);
        let count = self.state.clients.values().filter(|c| c.tenant == tenant).count() as u32;
        if count >= self.policy.connections_per_tenant {
            return Err(ConnectError::TenantFull { uid: peer.uid, count });
        }
        let kept = self.connections_kept_for_others(tenant);
        if (self.state.clients.len() as u32).saturating_add(kept) >= self.policy.connections {
            return Err(ConnectError::Kept(self.policy.connections));
        }
        let id = ClientId(self.state.next_client);
        self.state.next_client += 1;
        let client = Client {
            tenant,
            pid: peer.pid,
            label: String::new(),
            greeted: false,
            formats: Vec::new(),
            sessions: BTreeSet::new(),
            lost: BTreeMap::new(),
        };
        self.state.clients.insert(id, client);
        Ok(id)
    }

    /// Whether hello has been said on a connection.
    pub fn has_greeted(&self, client: ClientId) -> bool {
        self.state.clients.get(&client).is_some_and(|c| c.greeted)
    }

    /// A connection on which nobody has said hello in time has been ended.
    pub fn count_silent(&mut self) {
        self.state.counters.silent += 1;
    }

    /// A connection has ended: what it had is free again when this returns.
    pub fn disconnect(&mut self, id: ClientId) {
        let Some(client) = self.state.clients.remove(&id) else { return };
        self.waiting.remove(&id);
        let last = self.state.clients.values().all(|c| c.tenant != client.tenant);
        self.stirred |= self.waits.forget(id, client.tenant, last, self.absent.clock);
        self.orphan_windows(id);
        for session in client.sessions {
            self.end_session(session);
        }
        for blocks in client.lost.into_values() {
            self.free_suspects(id, blocks);
        }
        for block in self.state.pool.credit_of(id) {
            let freed = self.state.pool.free_credit(block, id);
            debug_assert_eq!(freed, Ok(()));
        }
        for extent in self.state.pool.held_by(id) {
            self.state.pool.remove_holder(extent, id);
        }
        self.state.common.forget_client(id);
        self.look_for_kept_copies_of(client.tenant);
        for format in client.formats {
            self.forget_format(format);
        }
        self.settle();
    }

    /// Forgets a geometry that nobody uses.
    pub(super) fn forget_format(&mut self, format: FormatId) {
        let used = self.state.clients.values().any(|c| c.formats.contains(&format))
            || self.state.pool.extents().values().any(|e| e.owned().is_some_and(|o| o.format == format));
        if !used {
            self.state.formats.remove(&format);
        }
    }

    /// Tells every client that the broker goes away.
    pub fn say_goodbye(&mut self) {
        for &to in self.state.clients.keys() {
            let message = Writer::start(wire::EVENT | wire::Event::Goodbye as u16, 0, 0, 0);
            self.outbox.push_back(Output { last: true, ..Output::plain(to, message) });
        }
    }
}
