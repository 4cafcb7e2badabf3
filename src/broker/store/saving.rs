//! Pinned prefixes on their way into files.
//!
//! Owns nothing: which heads are under way is in the task. Invariant: what is being written stays pinned until it is written,
//! whoever unpins it meanwhile; a chain with a gap is named, and not passed over.

use super::{StoreOutcome, StoreRefusal, StoredReport, Task, Work, reported};
use crate::broker::prefix::chains::digits;
use crate::broker::prefix::{self, Digest, Pin};
use crate::broker::{Broker, Job};
use crate::quote::plain;
use crate::store::{Entry, Head, Hex, Order, Saved, Source, StoreError};

/// Pins what is being written to a file. No chain has this name: nobody knows what hashes to it.
pub(super) const SAVING: Digest = [0; 32];

impl Broker {
    /// Writes every pinned prefix that the policy covers to its file, and removes the files of those that were stored and
    /// are not pinned any more.
    pub fn save_prefixes(&mut self) -> Result<u64, StoreRefusal> {
        let (number, location) = self.begin(Work::Save { heads: Vec::new() })?;
        let Some(store) = &self.store else { return Err(StoreRefusal::NotConfigured) };
        let prefixes = &self.state.prefixes;
        let still = |chain: &Digest| prefixes.pins().any(|(pinned, _)| pinned == chain);
        let gone = store.known.iter().filter(|c| !still(c)).map(|c| Hex(*c)).collect();
        let pins = prefixes.pins().filter(|(_, pin)| store.policy.covers(pin.tenant, &pin.label));
        let pins: Vec<(Digest, Pin)> = pins.map(|(chain, pin)| (*chain, pin.clone())).collect();
        let mut chains = Vec::new();
        for (chain, pin) in pins {
            let Some(source) = self.to_be_saved(&chain, &pin) else {
                self.refuse_gap(&chain, &pin);
                continue;
            };
            for entry in &source.head.blocks {
                self.set_pinned(&entry.name.0, SAVING, true);
            }
            chains.push(source);
        }
        if let Some(Task { work: Work::Save { heads }, .. }) =
            self.store.as_mut().and_then(|s| s.task.as_mut())
        {
            heads.extend(chains.iter().map(|source| source.head.clone()));
        }
        self.jobs.push_back(Job::Store(Order::Save { to: location, chains, gone }));
        Ok(number)
    }

    /// Says of a pinned chain that it is not saved because it is not whole.
    fn refuse_gap(&mut self, chain: &Digest, pin: &Pin) {
        let there = self.state.prefixes.chain(chain).len().min(pin.blocks as usize);
        let path = self.path_of_chain(&Hex(*chain));
        let what = match pin.blocks as usize - there {
            0 => "a block of it cannot be read".into(),
            last => format!("its block {last} of {} is gone (found damaged, or dropped)", pin.blocks),
        };
        let why = format!(
            "{}: {what}, so it is not saved, and what was stored before stays; compute the prompt anew and pin it again, or \
             let go of it: kvbctl unpin {}",
            path.display(),
            digits(chain)
        );
        let (uid, label, why) = (Some(pin.tenant.0), pin.label.clone(), Some(why));
        let (blocks, tokens, outcome) = (pin.blocks, pin.tokens, StoreOutcome::Refused);
        self.report(StoredReport { file: path, uid, label, blocks, tokens, bytes: 0, outcome, why });
    }

    /// What is to be written of a pinned chain; `None` if a block of it is missing.
    fn to_be_saved(&self, chain: &Digest, pin: &Pin) -> Option<Source> {
        let prefixes = &self.state.prefixes;
        let mut names = prefixes.chain(chain);
        names.truncate(pin.blocks as usize);
        names.reverse();
        let first = names.first().filter(|_| names.len() == pin.blocks as usize)?;
        let format = self.state.pool.format_of(prefixes.get(first)?.place)?;
        let profile = self.state.formats.get(&format)?.profile.clone();
        let pieces = names.iter().map(|name| {
            let (buffer, range) = self.piece(prefixes.get(name)?)?;
            Some((buffer, range.start))
        });
        let head = Head {
            tenant: pin.tenant.0,
            model: Hex(pin.model),
            root: Hex(prefix::root(pin.tenant, &pin.model, &profile)),
            before: prefixes.parent(first).map(Hex),
            label: plain(&pin.label),
            tokens: pin.tokens,
            block_bytes: profile.block_bytes(0),
            profile,
            blocks: names.iter().map(|n| Entry { name: Hex(*n), sha256: Hex([0; 32]) }).collect(),
        };
        let pieces = pieces.collect::<Option<_>>()?;
        let sums = names.iter().map(|name| prefixes.checksum(prefixes.get(name)?)?).collect();
        Some(Source { head, pieces, summed: self.state.formats.get(&format)?.cut.slot_bytes, sums })
    }

    pub(super) fn saved(&mut self, all: Vec<Saved>) {
        let Some(Task { work: Work::Save { heads }, .. }) = self.store.as_mut().and_then(|s| s.task.as_mut())
        else {
            return;
        };
        let heads = std::mem::take(heads);
        for entry in heads.iter().flat_map(|head| &head.blocks) {
            self.set_pinned(&entry.name.0, SAVING, false);
        }
        for Saved { chain, path, result } in all {
            let head = heads.iter().find(|h| h.chain() == chain);
            let mut line = reported(path, head, StoreOutcome::Removed);
            match result {
                Ok(Some(bytes)) => (line.outcome, line.bytes) = (StoreOutcome::Saved, bytes),
                Ok(None) => {}
                Err(why) => {
                    if let (StoreError::Sealed { block, .. }, Some(head)) = (&why, head) {
                        let name = head.blocks.get(*block).map(|entry| entry.name.0);
                        if let Some(block) = name.and_then(|name| self.state.prefixes.get(&name)) {
                            self.drop_damaged(block);
                        }
                    }
                    (line.outcome, line.why) = (StoreOutcome::Refused, Some(why.to_string()));
                }
            }
            if let Some(store) = &mut self.store {
                match line.outcome {
                    StoreOutcome::Saved => _ = store.known.insert(chain.0),
                    StoreOutcome::Removed => _ = store.known.remove(&chain.0),
                    _ => {}
                }
            }
            self.report(line);
        }
        self.end_task();
    }
}
