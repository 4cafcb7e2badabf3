//! How a pinned chain is copied: which is next, the worker's pieces of it, and what becomes of them.
//!
//! Owns the one copy that is being made. Invariants: one chain is copied at a time, of another donor than the last one where
//! there is one; what is copied is pinned meanwhile, and its checksums are compared with those of the seals, so a copy is as it
//! was sealed, or there is none.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Copied;
use crate::broker::prefix::Digest;
use crate::broker::prefix::chains::digits;
use crate::broker::{Broker, Job};
use crate::heap::ReadOnlyCopy;
use crate::id::{BlockId, ExtentId, Tenant};
use crate::seldom::seldom;

/// Pins what is being copied. No chain has this name: nobody knows what hashes to it.
pub(super) const COPYING: Digest = [1; 32];

/// What is being copied.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) ticket: u64,
    pub(super) chain: Digest,
    /// For whom: if that changes meanwhile, it is begun anew.
    pub(super) readers: BTreeSet<Tenant>,
    /// Blocks of the chain of which these readers have no copy yet.
    pub(super) names: Vec<Digest>,
    /// Blocks of one extent.
    pub(super) slots: usize,
    /// Blocks of which the worker is through, or has.
    pub(super) asked: usize,
    pub(super) made: Vec<ReadOnlyCopy>,
}

impl Broker {
    /// The next chain to be copied: of another donor than the last one, if there is one, so that none can keep the others
    /// waiting by pinning and unpinning.
    pub(super) fn next_wanted(&self, later: &BTreeSet<Digest>) -> Option<(Tenant, Digest)> {
        let last = self.common.last;
        let mut wanted = self.common.wanted.iter().filter(|(_, chain)| !later.contains(chain));
        let after = wanted.clone().find(|(donor, _)| last.is_none_or(|last| *donor > last));
        after.or_else(|| wanted.next()).copied()
    }

    pub(super) fn begin_copy(&mut self) {
        // Those whose sums are still on their way: nobody else waits for them.
        let mut later = BTreeSet::new();
        while self.common.copying.is_none() {
            let Some((donor, chain)) = self.next_wanted(&later) else { return };
            let pin = self.state.prefixes.pins().find(|(c, _)| **c == chain).map(|(_, pin)| pin);
            let readers = pin.map(|pin| self.readers_of(pin)).unwrap_or_default();
            let Some(mut names) = self.pinned_names(&chain).filter(|_| !readers.is_empty()) else {
                self.common.wanted.remove(&(donor, chain));
                self.refuse_copy(chain, "a block of it is gone".into());
                continue;
            };
            let slots = self.blocks_per_copy(&names);
            names.retain(|name| self.copy_for(name, &readers).is_none());
            let prefixes = &self.state.prefixes;
            let unread = |name: &Digest| prefixes.get(name).and_then(|b| prefixes.checksum(b)) == Some(None);
            if self.policy.checksums && self.is_summing() && names.iter().any(unread) {
                later.insert(chain);
                continue;
            }
            self.common.wanted.remove(&(donor, chain));
            if names.is_empty() {
                self.common.complete.insert(chain, readers);
                continue;
            }
            let needed = u32::try_from(names.len().div_ceil(slots)).unwrap_or(u32::MAX);
            let used = self.state.common.extents_of(donor);
            let most = self.common_parts().get(&donor).copied().unwrap_or(0);
            if used.saturating_add(needed) > most {
                let why = format!(
                    "{needed} extents of copies are needed, and {used} of the {most} that are uid {}'s part of \
                     prefix.common-limit are in use",
                    donor.0
                );
                self.refuse_copy(chain, why);
                continue;
            }
            for name in &names {
                self.set_pinned(name, COPYING, true);
            }
            let (ticket, asked, made) = (self.next_ticket, 0, Vec::new());
            self.next_ticket += 1;
            self.common.last = Some(donor);
            self.common.copying = Some(Copying { ticket, chain, readers, names, slots, asked, made });
            self.copy_on();
        }
    }

    /// The names of a pinned chain that are its own, first to last.
    pub(super) fn pinned_names(&self, chain: &Digest) -> Option<Vec<Digest>> {
        let (_, pin) = self.state.prefixes.pins().find(|(c, _)| *c == chain)?;
        let mut names = self.state.prefixes.chain(chain);
        names.truncate(pin.blocks as usize);
        names.reverse();
        (!names.is_empty() && names.len() == pin.blocks as usize).then_some(names)
    }

    fn blocks_per_copy(&self, names: &[Digest]) -> usize {
        let format = names.first().and_then(|n| self.state.prefixes.get(n));
        let format = format.and_then(|block| self.state.pool.format_of(block.place));
        format.and_then(|f| self.state.formats.get(&f)).map_or(1, |f| f.cut.slots.max(1) as usize)
    }

    /// Orders the next extent of the copy.
    fn copy_on(&mut self) {
        let Some(Copying { ticket, names, slots, asked, .. }) = &self.common.copying else { return };
        let until = names.len().min(asked + slots);
        let piece = |name: &Digest| self.piece(self.state.prefixes.get(name)?);
        let pieces: Option<Vec<_>> = names[*asked..until].iter().map(piece).collect();
        let ticket = *ticket;
        match pieces {
            Some(pieces) => {
                if let Some(copying) = &mut self.common.copying {
                    copying.asked = until;
                }
                self.jobs.push_back(Job::Copy { ticket, pieces });
            }
            None => self.end_copy(Err("a block of it is gone".into())),
        }
    }

    /// The worker has copied an extent, or not.
    pub(in crate::broker) fn copied(&mut self, ticket: u64, result: Result<ReadOnlyCopy, String>) {
        let Some(copying) = self.common.copying.as_mut().filter(|c| c.ticket == ticket) else { return };
        let copy = match result {
            Ok(copy) => copy,
            Err(why) => return self.end_copy(Err(why)),
        };
        let first = copying.made.len() * copying.slots;
        let blocks = copying.names[first..copying.asked].iter().map(|n| self.state.prefixes.get(n));
        let differs = |(block, sum): (Option<BlockId>, &u32)| {
            let sealed = self.state.prefixes.checksum(block?)??;
            (sealed != *sum).then_some(block?)
        };
        if let Some(block) = blocks.zip(&copy.sums).find_map(differs) {
            self.end_copy(Err("a block of it is not what was sealed".into()));
            self.drop_damaged(block);
            return;
        }
        copying.made.push(copy);
        if copying.asked < copying.names.len() {
            return self.copy_on();
        }
        self.end_copy(Ok(()));
    }

    fn end_copy(&mut self, result: Result<(), String>) {
        let Some(Copying { chain, readers, names, slots, made, .. }) = self.common.copying.take() else {
            return;
        };
        for name in &names {
            self.set_pinned(name, COPYING, false);
        }
        // Whoever waited with a look-up for it.
        self.stirred = true;
        // It may have been unpinned meanwhile.
        let pin = self.state.prefixes.pins().find(|(c, _)| **c == chain).map(|(_, pin)| pin.clone());
        let Some(pin) = pin else { return };
        if let Err(why) = result {
            return self.refuse_copy(chain, why);
        }
        self.common.stirred = true;
        // Pinned anew meanwhile, under a label that names others, or nobody.
        if self.readers_of(&pin) != readers {
            return;
        }
        seldom!(
            info,
            "{} blocks of uid {} are common to {} tenants",
            names.len(),
            pin.tenant.0,
            readers.len()
        );
        for (copy, names) in made.into_iter().zip(names.chunks(slots)) {
            let common = &mut self.state.common;
            let extent = ExtentId::of_copy(common.next);
            common.next += 1;
            let (donor, label, names) = (pin.tenant, pin.label.clone(), names.to_vec());
            let (holders, told) = (BTreeSet::new(), BTreeSet::new());
            let (readers, bytes, live) = (readers.clone(), copy.bytes, true);
            common
                .extents
                .insert(extent, Copied { chain, donor, label, readers, names, bytes, live, holders, told });
            self.common.files.insert(extent, Arc::new(copy.file));
        }
    }

    fn refuse_copy(&mut self, chain: Digest, why: String) {
        if self.common.said.get(&chain) != Some(&why) {
            let name = digits(&chain);
            seldom!(warn, "chain {name} is not common to the tenants that prefix.common names: {why}");
        }
        self.common.refused.insert(chain, why);
        self.stirred = true;
    }
}
