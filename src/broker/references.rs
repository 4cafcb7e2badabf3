//! How blocks enter tables, and leave them.
//!
//! Owns nothing. Invariant: the pool counts one reference for each table and each window that a block is in; with the last one a
//! published block is cached, and any other is free; of a copy of a common prompt nothing is counted but the tables.

use super::{Broker, State};
use crate::id::{BlockId, ClientId, SessionId};
use crate::pool::{Account, Dropped};

impl Broker {
    pub(super) fn end_session(&mut self, id: SessionId) {
        self.end_promise(id);
        self.stirred |= self.reclaims.remove(&id).is_some();
        let Some(session) = self.state.sessions.remove(&id) else { return };
        self.tables.change(session.tenant, session.table.len(), 0);
        if let Some(client) = self.state.clients.get_mut(&session.client) {
            client.sessions.remove(&id);
        }
        // From the tail: of a chain that goes altogether, no block is left without its parent in between. Of layers with a
        // window it is the other way round: the end is what is still of use.
        if self.is_windowed(session.format) {
            self.let_all_go(session.table.iter().copied());
        } else {
            self.let_all_go(session.table.iter().rev().copied());
        }
        self.check_windows(id);
    }

    /// A block leaves a table. A published one that nobody holds any more is cached.
    pub(super) fn let_go(&mut self, block: BlockId, to_credit: Option<ClientId>) -> Dropped {
        let State { pool, prefixes, .. } = &mut self.state;
        let mut became = Dropped::Kept;
        // Tables are all the references to a copy that are counted.
        let of_pool = Some(block).filter(|block| !block.place.extent.is_copy());
        pool.drop_refs(of_pool, to_credit, |place| prefixes.let_go(place), |_, what| became = what);
        if became == Dropped::Freed {
            self.freed(block);
        }
        became
    }

    /// All blocks of a table leave it, in this order.
    fn let_all_go(&mut self, blocks: impl Iterator<Item = BlockId>) {
        let State { pool, prefixes, .. } = &mut self.state;
        let mut freed = Vec::new();
        let of_pool = blocks.filter(|block| !block.place.extent.is_copy());
        pool.drop_refs(
            of_pool,
            None,
            |place| prefixes.let_go(place),
            |block, what| freed.extend((what == Dropped::Freed).then_some(block)),
        );
        freed.into_iter().for_each(|block| self.freed(block));
    }

    /// Blocks enter one more table.
    pub(super) fn share(&mut self, blocks: &[BlockId]) {
        let State { pool, prefixes, .. } = &mut self.state;
        let of_pool = blocks.iter().map(|block| block.place).filter(|place| !place.extent.is_copy());
        pool.share(of_pool, |place| prefixes.hold(place));
    }

    pub(super) fn freed(&mut self, block: BlockId) {
        self.state.prefixes.forget(block.place);
        self.state.pool.release_if_idle(block.place.extent);
    }

    /// Keeps the cache within its bound.
    pub(super) fn shrink_cache(&mut self) {
        let Some(most) = self.policy.cache_bytes else { return };
        while self.state.pool.ledger()[Account::Cached] > most {
            let Some(block) = self.state.prefixes.evict_any() else { return };
            self.state.pool.evict(block.place);
            self.state.pool.release_if_idle(block.place.extent);
        }
    }
}
