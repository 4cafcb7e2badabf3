//! What sealed blocks are called in the prefix index, and the pins that keep them.
//!
//! Owns no state beyond that index. Invariants: a tenant's block gets a name only if nobody has it, and a block of a copy
//! never gets one, since its name is its donor's; a block is pinned in the pool exactly while a chain through it is pinned in
//! the index.

use super::Broker;
use super::prefix::{self, Publication};
use crate::id::{BlockId, ClientId, SessionId};
use crate::pool::Dropped;

impl Broker {
    /// Publishes a sealed block of a session's table; `false` if the name is taken, or is not the tenant's to give.
    pub(super) fn publish(
        &mut self,
        id: SessionId,
        name: prefix::Digest,
        parent: Option<prefix::Digest>,
        block: BlockId,
    ) -> bool {
        if block.place.extent.is_copy() {
            return false;
        }
        let s = &self.state.sessions[&id];
        let (tenant, format, priority) = (s.tenant, s.format, s.priority);
        let windowed = self.is_windowed(format);
        let published = self.state.prefixes.publish(Publication {
            name,
            parent,
            block,
            tenant,
            format,
            priority,
            windowed,
        });
        if published {
            self.sum_later(block);
        }
        published
    }

    /// Sealed blocks of the table take the names that are free: whoever published them first may have gone, and what is
    /// published after them could not be found without them.
    pub(super) fn publish_again(&mut self, id: SessionId) {
        let s = &self.state.sessions[&id];
        let mut missing = Vec::new();
        for (i, name) in s.names.iter().enumerate().rev() {
            let Some(block) = s.block(s.names_from + i as u32) else { break };
            // A common block has its donor's name.
            if block.place.extent.is_copy() || self.state.prefixes.get(name).is_some() {
                break;
            }
            let first = s.names_from == 0 && i == 0;
            match (first, i.checked_sub(1)) {
                (true, _) => missing.push((*name, None, block)),
                (false, Some(before)) => missing.push((*name, Some(s.names[before]), block)),
                // Its parent's name is not kept: it cannot be told where it belongs.
                (false, None) => break,
            }
        }
        for (name, parent, block) in missing.into_iter().rev() {
            self.publish(id, name, parent, block);
        }
    }

    /// Notes who pinned a chain, or that nobody does any more.
    pub(super) fn set_pin(&mut self, chain: prefix::Digest, pin: Option<prefix::Pin>) -> Option<prefix::Pin> {
        self.common.stirred = true;
        let before = self.state.prefixes.set_pin(chain, pin.clone());
        self.tables.change_pin(before.as_ref(), pin.as_ref());
        before
    }

    pub(super) fn pin_label(&self, client: ClientId, id: SessionId) -> String {
        let (program, session) = (&self.client(client).label, &self.state.sessions[&id].label);
        if session.is_empty() { program.clone() } else { format!("{program}/{session}") }
    }

    /// Pins or unpins one block for a chain; whether anything changed for the block.
    pub(super) fn set_pinned(&mut self, name: &prefix::Digest, chain: prefix::Digest, on: bool) -> bool {
        let Some(block) = self.state.prefixes.pin(name, chain, on) else { return false };
        match self.state.pool.pin(block.place, on) {
            Dropped::Cached => _ = self.state.prefixes.let_go(block.place),
            _ => self.state.prefixes.hold(block.place),
        }
        true
    }

    /// [`unpin`](Self::unpin) for the chain whose name begins with these digits; `false` if there is none.
    pub fn unpin_named(&mut self, digits: &str) -> bool {
        let begins = |chain: &prefix::Digest| {
            chain.iter().map(|b| format!("{b:02x}")).collect::<String>().starts_with(digits)
        };
        let chain = self.state.prefixes.pins().map(|(chain, _)| *chain).find(begins);
        chain.is_some_and(|chain| self.unpin(&chain).is_some())
    }

    /// Unpins a chain, whoever pinned it: what an operator does. Blocks that nobody else pins and no session holds are
    /// cached from then on. `None` if there is no such chain.
    pub fn unpin(&mut self, chain: &prefix::Digest) -> Option<prefix::Pin> {
        let pin = self.lift_pin(chain)?;
        self.settle();
        Some(pin)
    }

    pub(super) fn lift_pin(&mut self, chain: &prefix::Digest) -> Option<prefix::Pin> {
        let pin = self.set_pin(*chain, None)?;
        for name in self.state.prefixes.pinned_for(chain) {
            self.set_pinned(&name, *chain, false);
        }
        Some(pin)
    }
}
