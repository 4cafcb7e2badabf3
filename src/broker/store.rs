//! Pinned prefixes that survive a restart: what is written to files, and what is taken in from them.
//!
//! Owns the one task on files that is under way, and what came of the last one. The files themselves are
//! [`crate::store`]'s, and are read and written by the driver's worker, never here. Invariants:
//! - a prefix that comes from a file is taken in as a whole or not at all: its blocks are credit of the broker itself until
//!   every checksum has been compared, and only then sealed, published under their names and pinned;
//! - it takes room as its tenant would, within its limits, and evicts nothing;
//! - what is being written to a file stays pinned until it is written, whoever unpins it meanwhile;
//! - look-ups wait for what is being taken in at the start, but for no longer than [`PATIENCE`].

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::grant::Want;
use super::prefix::chains::digits;
use super::prefix::{self, Digest, Pin, Publication};
use super::{Broker, Format, Job};
use crate::id::{BlockId, ClientId, FormatId, Tenant};
use crate::quote::plain;
use crate::size::Size;
use crate::store::{Entry, Finished, Head, Hex, Listing, Location, Order, Saved, Source, StoreError};

/// Whose credit the blocks are that are being filled from a file: the broker's own. Connections are numbered from 1.
const OWN: ClientId = ClientId(0);
/// Pins what is being written to a file. No chain has this name: nobody knows what hashes to it.
const SAVING: Digest = [0; 32];
/// How long look-ups wait for the prefixes that are taken in at the start. A client waits 5 s for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the operator wants stored, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorePolicy {
    /// The directory, and how much it may hold.
    pub location: Location,
    /// Whose prefixes; `None` for everybody's.
    pub tenants: Option<BTreeSet<Tenant>>,
    /// Those whose labels begin with the segments of one of these ([`super::label_begins`]); all if there are none.
    pub labels: Vec<String>,
}

impl StorePolicy {
    /// Whether a prefix of this tenant with this label is stored.
    pub fn covers(&self, tenant: Tenant, label: &str) -> bool {
        self.tenants.as_ref().is_none_or(|all| all.contains(&tenant))
            && (self.labels.is_empty() || self.labels.iter().any(|l| super::label_begins(label, l)))
    }
}

/// Why nothing is saved or loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum StoreRefusal {
    /// There is no place for it.
    #[error("no directory for stored prefixes is configured; set prefix.store.directory")]
    NotConfigured,
    /// One thing at a time.
    #[error("stored prefixes are being read or written just now; ask again when that is done")]
    Busy,
}

/// What became of one prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreOutcome {
    /// It is in its file.
    Saved,
    /// It is not pinned any more, and its file is gone.
    Removed,
    /// It is in the pool, pinned.
    Loaded,
    /// It was in the pool already, pinned.
    Present,
    /// Neither; the reason is said.
    Refused,
}

/// One prefix of a [`StoreReport`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredReport {
    /// The file, or what the refusal is about.
    pub file: PathBuf,
    /// Whose it is, if that is known.
    pub uid: Option<u32>,
    /// Who pinned it, as they said.
    pub label: String,
    /// Stored blocks.
    pub blocks: u32,
    /// Tokens of the chain.
    pub tokens: u64,
    /// Bytes: of the file when saving, of the blocks when loading.
    pub bytes: u64,
    /// What became of it.
    pub outcome: StoreOutcome,
    /// Why it was refused.
    pub why: Option<String>,
}

/// `kvbctl save` and `kvbctl load`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreReport {
    /// Where the files are.
    pub directory: PathBuf,
    /// One by one.
    pub prefixes: Vec<StoredReport>,
}

/// A prefix on its way from its file into the pool.
#[derive(Debug)]
struct Loading {
    head: Head,
    tenant: Tenant,
    format: FormatId,
    /// The block that each name gets; `None` where there is one of this name already.
    blocks: Vec<Option<BlockId>>,
    /// The job after which nothing that was ordered earlier touches these blocks any more.
    cleared: u64,
}

#[derive(Debug)]
enum Work {
    Load { rest: VecDeque<Head>, current: Option<Box<Loading>> },
    Save { heads: Vec<Head> },
}

#[derive(Debug)]
struct Task {
    number: u64,
    work: Work,
    report: StoreReport,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Store {
    policy: StorePolicy,
    task: Option<Task>,
    next_task: u64,
    finished: Option<(u64, StoreReport)>,
    /// Look-ups wait until then.
    until: Option<Instant>,
    /// Chains whose files this run has written or taken in: those that are not pinned any more go with the next save.
    known: BTreeSet<Digest>,
}

impl Broker {
    /// Where pinned prefixes are stored. Before this nothing is.
    pub fn set_store(&mut self, policy: StorePolicy) {
        let (task, finished, until, known) = (None, None, None, BTreeSet::new());
        self.store = Some(Store { policy, task, next_task: 1, finished, until, known });
    }

    /// [`load_prefixes`](Self::load_prefixes) at the start: look-ups wait for it.
    pub fn load_at_start(&mut self, now: Instant) {
        if self.load_prefixes().is_ok() {
            if let Some(store) = &mut self.store {
                store.until = Some(now + PATIENCE);
            }
        }
    }

    /// Takes in every stored prefix that is not there yet. Returns the number to ask [`stored`](Self::stored) with.
    pub fn load_prefixes(&mut self) -> Result<u64, StoreRefusal> {
        let work = Work::Load { rest: VecDeque::new(), current: None };
        let (number, location) = self.begin(work)?;
        self.jobs.push_back(Job::Store(Order::List(location)));
        Ok(number)
    }

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

    /// What came of the task with this number, once.
    pub fn stored(&mut self, number: u64) -> Option<StoreReport> {
        let finished = &mut self.store.as_mut()?.finished;
        finished.take_if(|(n, _)| *n == number).map(|(_, report)| report)
    }

    /// Whether a task with this number is under way.
    pub fn is_storing(&self, number: u64) -> bool {
        self.store.as_ref().and_then(|s| s.task.as_ref()).is_some_and(|t| t.number == number)
    }

    fn begin(&mut self, work: Work) -> Result<(u64, Location), StoreRefusal> {
        let store = self.store.as_mut().ok_or(StoreRefusal::NotConfigured)?;
        if store.task.is_some() {
            return Err(StoreRefusal::Busy);
        }
        let (number, location) = (store.next_task, store.policy.location.clone());
        store.next_task += 1;
        let report = StoreReport { directory: location.path.clone(), prefixes: Vec::new() };
        store.task = Some(Task { number, work, report });
        Ok((number, location))
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

    /// The worker has done something with files.
    pub(super) fn store_finished(&mut self, finished: Finished) {
        match finished {
            Finished::Listed(listing) => self.listed(listing),
            Finished::Read(result) => self.read(result),
            Finished::Saved(all) => self.saved(all),
        }
    }

    fn saved(&mut self, all: Vec<Saved>) {
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

    fn listed(&mut self, listing: Result<Listing, StoreError>) {
        match listing {
            // Nothing has been stored yet.
            Err(StoreError::NoDirectory { .. }) => {}
            Err(why) => {
                let path = self.store.as_ref().map(|s| s.policy.location.path.clone()).unwrap_or_default();
                self.refuse_file(path, None, why.to_string());
            }
            Ok(listing) => {
                let mut heads = VecDeque::new();
                for (path, head) in listing {
                    match head {
                        Ok(head) => heads.push_back(head),
                        Err(why) => self.refuse_file(path, None, why.to_string()),
                    }
                }
                // Where not everything fits, those of the highest priority come in, and the longest one of a tenant's
                // first: others may be its beginning.
                let priority = |h: &Head| self.state.tenancy.of(Tenant(h.tenant)).priority;
                heads.make_contiguous().sort_by_key(|h| std::cmp::Reverse((priority(h), h.blocks.len())));
                if let Some(Task { work: Work::Load { rest, .. }, .. }) =
                    self.store.as_mut().and_then(|s| s.task.as_mut())
                {
                    *rest = heads;
                }
            }
        }
        self.load_next();
    }

    /// Goes on with the next file, until one needs the worker or there are none.
    fn load_next(&mut self) {
        loop {
            let Some(Task { work: Work::Load { rest, .. }, .. }) =
                self.store.as_mut().and_then(|s| s.task.as_mut())
            else {
                return;
            };
            let Some(head) = rest.pop_front() else { return self.end_task() };
            let path = self.path_of(&head);
            match self.make_way(&head) {
                Ok(Some(loading)) => {
                    if let Some(Task { work: Work::Load { current, .. }, .. }) =
                        self.store.as_mut().and_then(|s| s.task.as_mut())
                    {
                        *current = Some(Box::new(loading));
                    }
                    return;
                }
                Ok(None) => {
                    if let Some(store) = &mut self.store {
                        store.known.insert(head.chain().0);
                    }
                    self.report(reported(path, Some(&head), StoreOutcome::Present));
                }
                Err(why) => self.refuse_file(path, Some(&head), why),
            }
        }
    }

    /// Takes the blocks that a prefix needs, and has them cleared; `None` if it is there.
    fn make_way(&mut self, head: &Head) -> Result<Option<Loading>, String> {
        let tenant = Tenant(head.tenant);
        let covered = self.store.as_ref().is_some_and(|s| s.policy.covers(tenant, &head.label));
        if !covered {
            return Err(format!(
                "prefix.store does not name uid {} with the label {:?}; it stays in its file",
                head.tenant,
                plain(&head.label)
            ));
        }
        if self.frozen {
            return Err("the broker's books do not add up; it grants nothing more".into());
        }
        if prefix::root(tenant, &head.model.0, &head.profile) != head.root.0 {
            return Err("it is foreign: its names are not made of the tenant, the model and the geometry that it says; \
                 remove it, and save the prefix again"
                .into());
        }
        let chain = head.chain().0;
        if self.state.prefixes.pins().any(|(pinned, _)| *pinned == chain) {
            return Ok(None);
        }
        let known = self.state.formats.iter().find(|(_, f)| f.profile == head.profile).map(|(id, _)| *id);
        let format = known.unwrap_or(FormatId(self.state.next_format));
        let cut = self.cut(format, &head.profile);
        if cut.slots == 0 {
            let [need, have] = [cut.slot_bytes, self.state.pool.extent_bytes()].map(Size::from_bytes);
            return Err(format!(
                "a block of {need} never fits an extent of {have}: configure larger extents"
            ));
        }
        let mut missing = 0;
        let mut unpinned = 0;
        for entry in &head.blocks {
            match self.state.prefixes.get(&entry.name.0) {
                None => missing += 1,
                Some(block) => {
                    let extent = self.state.pool.extents().get(&block.place.extent);
                    if extent.and_then(|e| e.owned()).is_none_or(|o| o.tenant != tenant) {
                        return Err("it is foreign: it names a block of another tenant".into());
                    }
                    unpinned += u64::from(!self.state.prefixes.is_pinned(&entry.name.0));
                }
            }
        }
        let bytes = (unpinned + u64::from(missing)) * cut.slot_bytes;
        let (pinned, most) = (self.state.pool.pinned_bytes(tenant), self.state.tenancy.of(tenant).pinned);
        if pinned.saturating_add(bytes) > most {
            let [bytes, pinned, most] = [bytes, pinned, most].map(Size::from_bytes);
            return Err(format!(
                "it does not fit: {bytes} more would be pinned, this tenant has {pinned} pinned and its limit is {most} (limits.pinned)"
            ));
        }
        if let Err(refused) = self.may_name(tenant, head.blocks.len(), "remove its file") {
            return Err(format!("it does not fit: {}", refused.text));
        }
        let (now, _) = self.available(tenant, &cut, 0);
        if now < u64::from(missing) {
            return Err(format!(
                "it does not fit: {missing} blocks are needed, and its tenant can be granted {now} now; free some, and load it again"
            ));
        }
        if known.is_none() {
            self.state.next_format += 1;
            self.state.formats.insert(format, Format { profile: head.profile.clone(), cut });
        }
        let want =
            Want { format, want: missing, least: missing, has: 0, near: None, promised: 0, priority: 0 };
        let taken = self.take(OWN, tenant, &cut, &want, u64::MAX);
        // No message carries descriptors to the broker itself.
        self.fresh_descriptors.clear();
        let mut taken: Vec<BlockId> = taken.into_iter().map(|t| t.block).collect();
        if taken.len() < missing as usize {
            let got = taken.len();
            self.give_up(taken, format);
            return Err(format!("it does not fit: {missing} blocks are needed, and only {got} were found"));
        }
        // Jobs are done in order: when these are zero, nobody's earlier order writes there any more. What is behind a
        // block in its place is zero with that, too.
        let cleared = self.next_ticket;
        self.next_ticket += 1;
        let pieces = taken.iter().filter_map(|b| self.piece(*b)).collect();
        self.jobs.push_back(Job::Scrub { ticket: cleared, pieces });
        let prefixes = &self.state.prefixes;
        taken.reverse();
        let missing = |e: &Entry| if prefixes.get(&e.name.0).is_none() { taken.pop() } else { None };
        let blocks = head.blocks.iter().map(missing).collect();
        Ok(Some(Loading { head: head.clone(), tenant, format, blocks, cleared }))
    }

    /// Zeros are written, or not. `false` if they are not those of a prefix that is being loaded.
    pub(super) fn store_cleared(&mut self, ticket: u64, result: &Result<(), String>) -> bool {
        let Some(store) = &self.store else { return false };
        let from = store.policy.location.clone();
        let Some(Task { work: Work::Load { current: Some(loading), .. }, .. }) = &store.task else {
            return false;
        };
        if loading.cleared != ticket {
            return false;
        }
        if let Err(why) = result {
            let why = format!("its blocks could not be cleared: {why}");
            self.loaded(Err(why));
            return true;
        }
        let place = |block: &Option<BlockId>| {
            let (buffer, range) = self.piece((*block)?)?;
            Some((buffer, range.start))
        };
        let into = loading.blocks.iter().map(place).collect();
        let head = Box::new(loading.head.clone());
        self.jobs.push_back(Job::Store(Order::Read { from, head, into }));
        true
    }

    fn read(&mut self, result: Result<(), StoreError>) {
        self.loaded(result.map_err(|e| e.to_string()));
    }

    /// The file was read, or not.
    fn loaded(&mut self, result: Result<(), String>) {
        let Some(Task { work: Work::Load { current, .. }, .. }) =
            self.store.as_mut().and_then(|s| s.task.as_mut())
        else {
            return;
        };
        let Some(loading) = current.take() else { return };
        let path = self.path_of(&loading.head);
        let head = loading.head.clone();
        match result.and_then(|()| self.publish_loaded(&loading)) {
            Ok(()) => {
                if let Some(store) = &mut self.store {
                    store.known.insert(head.chain().0);
                }
                self.let_extents_go();
                self.report(reported(path, Some(&head), StoreOutcome::Loaded));
            }
            Err(why) => {
                self.give_up(loading.blocks.into_iter().flatten().collect(), loading.format);
                self.refuse_file(path, Some(&head), why);
            }
        }
        self.load_next();
    }

    /// Seals the blocks, publishes them under their names and pins the chain. Changes nothing if it cannot.
    fn publish_loaded(&mut self, loading: &Loading) -> Result<(), String> {
        let Loading { head, tenant, format, blocks, .. } = loading;
        let there = |(e, block): (&Entry, &Option<BlockId>)| {
            block.is_some() || self.state.prefixes.get(&e.name.0).is_some()
        };
        if !head.blocks.iter().zip(blocks).all(there) {
            return Err("a part of it that was in the pool has been evicted meanwhile; load it again".into());
        }
        let chain = head.chain().0;
        let priority = self.state.tenancy.of(*tenant).priority;
        let mut parent = head.before.map(|b| b.0);
        for (entry, block) in head.blocks.iter().zip(blocks) {
            let name = entry.name.0;
            let published = self.state.prefixes.get(&name).is_some();
            match block {
                // Somebody has published it meanwhile.
                Some(block) if published => _ = self.state.pool.free_credit(*block, OWN),
                Some(block) => {
                    let held = self.state.pool.hold(*block, OWN);
                    debug_assert_eq!(held, Ok(()), "it is the broker's credit");
                    self.state.pool.seal(block.place);
                    let (tenant, format, block) = (*tenant, *format, *block);
                    let windowed = self.is_windowed(format);
                    let publication = Publication { name, parent, block, tenant, format, priority, windowed };
                    if self.state.prefixes.publish(publication) {
                        self.sum_later(block);
                    }
                }
                None => {}
            }
            self.set_pinned(&name, chain, true);
            if let Some(block) = block.filter(|_| !published) {
                // No table holds it; it stays because it is pinned.
                self.state.pool.drop_refs([block], None, |_| true, |_, _| ());
            }
            parent = Some(name);
        }
        // A file of an earlier version may have one that could not come in over the socket today.
        let (tenant, model, label) = (*tenant, head.model.0, plain(&head.label));
        let (blocks, tokens) = (head.blocks.len() as u32, head.tokens);
        let pin = Pin { tenant, pid: 0, label, blocks, tokens, model };
        self.set_pin(chain, Some(pin));
        Ok(())
    }

    /// What was taken for a prefix that is refused goes back.
    fn give_up(&mut self, blocks: Vec<BlockId>, format: FormatId) {
        for block in blocks {
            let freed = self.state.pool.free_credit(block, OWN);
            debug_assert_eq!(freed, Ok(()));
        }
        self.let_extents_go();
        self.forget_format(format);
    }

    fn let_extents_go(&mut self) {
        for extent in self.state.pool.held_by(OWN) {
            self.state.pool.remove_holder(extent, OWN);
        }
    }

    fn path_of(&self, head: &Head) -> PathBuf {
        self.path_of_chain(&head.chain())
    }

    fn path_of_chain(&self, chain: &Hex) -> PathBuf {
        let name = format!("{chain}{}", crate::store::file::SUFFIX);
        self.store.as_ref().map_or_else(PathBuf::new, |s| s.policy.location.path.join(name))
    }

    fn refuse_file(&mut self, path: PathBuf, head: Option<&Head>, why: String) {
        let why =
            if why.contains(&*path.to_string_lossy()) { why } else { format!("{}: {why}", path.display()) };
        let line = reported(path, head, StoreOutcome::Refused);
        self.report(StoredReport { why: Some(why), ..line });
    }

    fn report(&mut self, line: StoredReport) {
        // Names of files are shown, and whoever can put a file there has chosen its name.
        let file = line.file.to_str().map_or_else(|| line.file.clone(), |path| plain(path).into());
        let line = StoredReport { file, why: line.why.map(|why| plain(&why)), ..line };
        match &line.why {
            Some(why) => log::warn!("a stored prefix: {why}"),
            None => log::info!("{}: {:?}", line.file.display(), line.outcome),
        }
        if let Some(task) = self.store.as_mut().and_then(|s| s.task.as_mut()) {
            task.report.prefixes.push(line);
        }
    }

    fn end_task(&mut self) {
        let Some(store) = &mut self.store else { return };
        let Some(task) = store.task.take() else { return };
        store.finished = Some((task.number, task.report));
        self.end_waiting_for_copies();
    }

    /// Look-ups that waited go on, when all is read and what is common to several tenants is copied.
    pub(super) fn end_waiting_for_copies(&mut self) {
        let busy = self.common_has_work();
        let Some(store) = self.store.as_mut().filter(|s| s.task.is_none() && !busy) else { return };
        self.stirred |= store.until.take().is_some();
    }

    /// Whether look-ups are to wait for what is being taken in.
    pub(super) fn lookups_wait(&self) -> bool {
        self.store.as_ref().is_some_and(|s| s.until.is_some())
    }

    /// When they have waited long enough.
    pub(super) fn lookups_wait_until(&self) -> Option<Instant> {
        self.store.as_ref()?.until
    }

    /// They have, if that is past.
    pub(super) fn end_late_lookups(&mut self, now: Instant) {
        let Some(store) = &mut self.store else { return };
        if store.until.take_if(|until| *until <= now).is_some() {
            log::warn!("stored prefixes are still being read; look-ups do not wait for them any longer");
            self.stirred = true;
            self.settle();
        }
    }

    /// What was under way when the state was recorded is not any more.
    pub(super) fn forget_store_work(&mut self) {
        let saving = |(name, ..): (&Digest, BlockId, Tenant, bool)| *name;
        let names: Vec<Digest> = self.state.prefixes.iter().map(saving).collect();
        for name in names {
            self.set_pinned(&name, SAVING, false);
        }
        for block in self.state.pool.credit_of(OWN) {
            let freed = self.state.pool.free_credit(block, OWN);
            debug_assert_eq!(freed, Ok(()));
        }
        self.let_extents_go();
    }
}

fn reported(file: PathBuf, head: Option<&Head>, outcome: StoreOutcome) -> StoredReport {
    StoredReport {
        file,
        uid: head.map(|h| h.tenant),
        label: head.map_or_else(String::new, |h| plain(&h.label)),
        blocks: head.map_or(0, |h| h.blocks.len() as u32),
        tokens: head.map_or(0, |h| h.tokens),
        bytes: head.map_or(0, Head::data_bytes),
        outcome,
        why: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::broker::{Peer, Policy};
    use crate::heap::Memfd;
    use crate::profile::Profile;
    use crate::wire::{self, Verb, Writer};

    /// A broker whose worker is run by hand, and a client of it with an open session.
    struct World {
        broker: Broker,
        client: ClientId,
        number: u64,
        now: Instant,
        session: u64,
    }

    impl World {
        fn new(path: &std::path::Path) -> Self {
            let heap = Arc::new(Memfd::new(false));
            let mut broker = Broker::new(heap, 128 << 10, 4, 4, Policy::default()).unwrap();
            let location = Location { path: path.into(), limit: 1 << 20, part: 1 << 20 };
            broker.set_store(StorePolicy { location, tenants: None, labels: Vec::new() });
            let client = broker.connect(Peer { uid: 1000, pid: 1 }).unwrap();
            let now = Instant::now();
            broker.tick(now);
            let mut world = World { broker, client, number: 0, now, session: 0 };
            let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
            world.ask(Verb::Hello, |w| {
                w.put(&wire::Hello { magic, version, label: wire::label("t") });
            });
            let profile = Profile::uniform("small", "f16", 2, 512, 512, 16).unwrap();
            world.ask(Verb::Profile, |w| wire::put_profile(w, &profile, 0));
            world.ask(Verb::Open, |w| _ = w.put(&wire::Open { format: 1.into(), ..Default::default() }));
            world.session = 1;
            world
        }

        fn ask(&mut self, verb: Verb, fill: impl FnOnce(&mut Writer)) -> Option<Vec<u8>> {
            self.number += 1;
            let mut w = Writer::request(verb, self.number, self.session);
            fill(&mut w);
            self.broker.request(self.client, &w.finish());
            self.answer()
        }

        /// The body of the answer that is there, if one is.
        fn answer(&mut self) -> Option<Vec<u8>> {
            let output = self.broker.outputs().pop_front()?;
            let (header, body) = wire::split(&output.message).unwrap();
            assert_eq!(header.fault.get(), 0, "{}", String::from_utf8_lossy(body));
            Some(body.to_vec())
        }

        fn look_up(&mut self) -> Option<Vec<u8>> {
            self.ask(Verb::Attach, |w| {
                w.put(&wire::Attach { count: 33.into(), more: 0.into() }).put_tokens(&[7; 33]);
            })
        }

        fn after(&mut self, time: Duration) {
            self.now += time;
            self.broker.tick(self.now);
            self.broker.verify().unwrap();
        }
    }

    #[test]
    fn a_look_up_waits_two_seconds_for_a_slow_disk_and_no_longer() {
        let nowhere = tempfile::tempdir().unwrap();
        let mut w = World::new(&nowhere.path().join("prefixes"));
        w.broker.load_at_start(w.now);
        assert_eq!(w.look_up(), None, "it waits");
        assert_eq!(w.broker.next_wake(), Some(w.now + PATIENCE), "and the loop wakes up when that is over");
        w.after(PATIENCE - Duration::from_millis(1));
        assert_eq!(w.answer(), None);
        w.after(Duration::from_millis(1));
        let nothing = w.answer().expect("an answer, though nothing has been read");
        assert_eq!(nothing, [0; 16], "no token, no extent, no block");
        assert!(w.look_up().is_some(), "those after it do not wait at all");
        // The disk answers late: nothing is lost by that, and nobody waits again.
        for job in w.broker.jobs() {
            let done = job.run(&Memfd::new(false));
            w.broker.done(done);
        }
        assert!(!w.broker.is_storing(1) && w.broker.stored(1).is_some());
        assert!(w.look_up().is_some());
        w.broker.verify().unwrap();
    }

    #[test]
    fn a_look_up_goes_on_as_soon_as_all_is_read() {
        let nowhere = tempfile::tempdir().unwrap();
        let mut w = World::new(&nowhere.path().join("prefixes"));
        w.broker.load_at_start(w.now);
        assert_eq!(w.look_up(), None);
        for job in w.broker.jobs() {
            let done = job.run(&Memfd::new(false));
            w.broker.done(done);
        }
        assert!(w.answer().is_some());
        assert_eq!(w.broker.next_wake(), None);
    }

    #[test]
    fn a_pinned_chain_with_a_block_that_is_gone_is_named_by_a_save_and_not_passed_over() {
        let nowhere = tempfile::tempdir().unwrap();
        let mut w = World::new(&nowhere.path().join("prefixes"));
        let (tenant, pid, label) = (Tenant(1000), 1, "t/system".into());
        let pin = Pin { tenant, pid, label, blocks: 3, tokens: 48, model: [0; 32] };
        w.broker.set_pin([9; 32], Some(pin));
        let number = w.broker.save_prefixes().unwrap();
        for job in w.broker.jobs() {
            let done = job.run(&Memfd::new(false));
            w.broker.done(done);
        }
        let report = w.broker.stored(number).unwrap();
        assert_eq!(report.prefixes.len(), 1, "{report:?}");
        let line = &report.prefixes[0];
        assert_eq!(
            (line.outcome, line.uid, line.label.as_str()),
            (StoreOutcome::Refused, Some(1000), "t/system")
        );
        let why = line.why.as_ref().unwrap();
        let file = format!("{}.kvprefix", "09".repeat(32));
        for words in [&file, "its block 3 of 3 is gone", "kvbctl unpin 0909090909090909"] {
            assert!(why.contains(words), "{why}");
        }
    }
}
