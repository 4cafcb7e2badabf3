//! Pinned prefixes that survive a restart: what is written to files, and what is taken in from them.
//!
//! Owns the one task on files that is under way, and what came of the last one. The files themselves are
//! [`crate::store`]'s, and are read and written by the driver's worker, never here. Invariants:
//! - one task at a time, in which prefixes are read (`loading`) or written (`saving`) one after the other;
//! - each file that was looked at is a line of the report, with a reason if nothing came of it.

mod loading;
mod saving;

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Broker;
use super::prefix::Digest;
use crate::id::Tenant;
use crate::quote::plain;
use crate::store::{Finished, Head, Hex, Location};
use loading::Loading;

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

    /// The worker has done something with files.
    pub(super) fn store_finished(&mut self, finished: Finished) {
        match finished {
            Finished::Listed(listing) => self.listed(listing),
            Finished::Read(result) => self.read(result),
            Finished::Saved(all) => self.saved(all),
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
    use std::time::Duration;

    use super::loading::PATIENCE;
    use super::*;
    use crate::broker::prefix::Pin;
    use crate::broker::{Peer, Policy};
    use crate::heap::Memfd;
    use crate::id::ClientId;
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
