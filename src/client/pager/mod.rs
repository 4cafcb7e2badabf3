//! Pager: KV memory at fixed addresses whose units are granted by the first write into them.
//!
//! For engines that cannot be told to ask before they write. Owns an address range and the blocks in it. The range holds
//! planes side by side; each plane is cut into runs of whole pages, and unit `i` is run `i` of every plane: one block of
//! the broker. Invariants:
//! - a unit without a block reads as zero and takes no memory; reading never asks for a block;
//! - a block reads as zero when it appears, whatever it held before;
//! - a unit leaves the range before its block goes back;
//! - all mappings that a pager can come to need are counted when it is made, and refused then if they are too many;
//! - what is computed is never lost in silence: when the broker needs the blocks for a session of higher priority, they move into
//!   private memory as far as [`PagerOptions::spill`] goes, else the process ends at its next access, with words;
//! - what a pager holds stays usable when the broker goes. Blocks of a broker that has gone are kept, further ones come
//!   from the one that is there next.
//!
//! Units need not hold whole tokens, so q8_0 rows of 204 bytes page as finely as f16, and such blocks are never shared as
//! prefixes. A write cannot be refused politely: when the pool is empty, a pager waits
//! ([`PagerOptions::wait`], `KVBROKER_WAIT_MS`), then takes private memory ([`PagerOptions::spill`], `KVBROKER_SPILL`),
//! and only then lets the process end, with words that say what to do. [`PagerOptions::whole`]
//! (`KVBROKER_ADMIT=longest`) asks for everything when the pager is made, so that the refusal comes there.
//!
//! A forked child has no part in it: the range is not there, and a write ends the child with a message.

#![allow(unsafe_code)]

mod fault;
mod layout;
mod lease;
mod service;

use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::arena::{self, map_zero};
use super::view::{self, Promise};
use super::{Client, Error};
use crate::map::page_bytes;
use crate::profile::Kv;
use crate::size::Size;
use crate::wire::Fault;
use fault::{CHANGING, EMPTY, FAILED, GRANTED, Region, TAKEN, WANTED};
use layout::Layout;
use lease::Lease;

/// One plane of a pager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagerPlane {
    /// K or V. A V right behind a K is the same layer's.
    pub kv: Kv,
    /// Bytes of the plane.
    pub bytes: usize,
    /// Bytes of one token's row: decides how runs of different planes relate. Where a row means nothing, any common
    /// measure will do.
    pub row: usize,
    /// Bytes of one of several equal streams in the plane, or 0: units then begin where streams do, if that is possible.
    pub stream_bytes: usize,
}

/// How to make a pager.
#[derive(Clone)]
pub struct PagerOptions {
    /// The session's name for people.
    pub label: String,
    /// The model's, up to 32 bytes, for `kvbctl sessions`.
    pub name: String,
    /// The element type's label, up to 16 bytes.
    pub element: String,
    /// How long a write may wait for a block when the pool is empty.
    pub wait: Duration,
    /// Bytes of private memory, outside the pool, that the pager may take after that.
    pub spill: u64,
    /// Take all blocks when the pager is made.
    pub whole: bool,
    /// Told about what an operator should know. Called from the pager's thread.
    pub notify: Option<Notify>,
}

/// See [`PagerOptions::notify`].
pub type Notify = Arc<dyn Fn(&Notice) + Send + Sync>;

/// What an operator should know about a pager.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The engine writes V in columns: one token takes a unit of every row, and soon all units.
    Transposed {
        /// Bytes of the whole range.
        bytes: usize,
    },
    /// No block could be had; the write waits. The text says why.
    Waiting(String),
    /// Private memory was taken, `bytes` so far. The text says why there was no block.
    Spilled {
        /// Bytes in private memory now.
        bytes: u64,
        /// Why.
        why: String,
    },
    /// A session of higher priority needs the blocks, and the pager may not take enough private memory to do without them: the
    /// broker takes them before long, and the process ends at its next access.
    WantedBack {
        /// Bytes of private memory that would do.
        needed: u64,
        /// Bytes that it may take ([`PagerOptions::spill`]).
        spill: u64,
    },
    /// The broker has taken the blocks for a session of higher priority.
    Taken,
    /// The broker has gone; what is held stays.
    Lost,
    /// Another broker has been found.
    Resumed,
}

impl Default for PagerOptions {
    fn default() -> Self {
        PagerOptions {
            label: String::new(),
            name: String::new(),
            element: String::new(),
            wait: Duration::from_millis(2000),
            spill: 0,
            whole: false,
            notify: None,
        }
    }
}

impl std::fmt::Debug for PagerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagerOptions")
            .field("label", &self.label)
            .field("name", &self.name)
            .field("element", &self.element)
            .field("wait", &self.wait)
            .field("spill", &self.spill)
            .field("whole", &self.whole)
            .finish_non_exhaustive()
    }
}

impl PagerOptions {
    /// The defaults, with what `KVBROKER_WAIT_MS`, `KVBROKER_SPILL` and `KVBROKER_ADMIT` say.
    pub fn from_env() -> Result<Self, Error> {
        let mut options = PagerOptions::default();
        let read = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        if let Some(text) = read("KVBROKER_WAIT_MS") {
            let ms = text.parse().map_err(|_| {
                Error::Invalid(format!("KVBROKER_WAIT_MS={text}: it is a number of milliseconds"))
            })?;
            options.wait = Duration::from_millis(ms);
        }
        if let Some(text) = read("KVBROKER_SPILL").filter(|t| t != "0") {
            let size =
                Size::from_str(&text).map_err(|e| Error::Invalid(format!("KVBROKER_SPILL={text}: {e}")))?;
            options.spill = size.bytes();
        }
        match read("KVBROKER_ADMIT").as_deref() {
            None => {}
            Some("longest") => options.whole = true,
            Some(other) => {
                let text = format!("KVBROKER_ADMIT={other}: the only value is longest");
                return Err(Error::Invalid(text));
            }
        }
        Ok(options)
    }
}

/// Counts of a pager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PagerStats {
    /// Bytes of the range.
    pub bytes: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Units that the range has.
    pub units: usize,
    /// Units with a block of the broker.
    pub units_held: usize,
    /// Units in private memory.
    pub units_spilled: usize,
    /// Writes that had to wait for a grant.
    pub faults: u64,
    /// The same, in V planes at places where K had not been written: V is kept in columns.
    pub transposed: u64,
    /// Nanoseconds that the pager's thread spent on grants.
    pub grant_ns: u64,
}

/// What the pager's thread and the callers of the API share; never touched by the fault handler.
#[derive(Debug)]
struct Table {
    leases: Vec<Lease>,
    spilled: Vec<usize>,
    transposed: u64,
    told_transposed: bool,
    told_lost: bool,
    told_wanted: bool,
    told_taken: bool,
    grant_ns: u64,
    /// The unit that K asked for last.
    last_k: Option<usize>,
}

/// How to come by a client: called when the pager is made, and again after the broker has gone.
type Connect = Box<dyn Fn() -> Result<Client, Error> + Send + Sync>;

struct Inner {
    region: Box<Region>,
    layout: Layout,
    planes: Vec<PagerPlane>,
    options: PagerOptions,
    connect: Connect,
    table: Mutex<Table>,
    stop: std::sync::atomic::AtomicBool,
    made_by: u32,
}

/// See the module.
pub struct Pager {
    inner: Arc<Inner>,
    entry: Option<fault::Entry>,
    thread: Option<JoinHandle<()>>,
    _promise: Promise,
}

/// Mappings of this process that are neither views' nor pagers': those count against the same limit of the kernel. What
/// views and pagers have is not told apart but taken off as what they may come to have, so this is exact for the first
/// one and never too much; the most that was ever seen counts.
fn foreign_mappings() -> usize {
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let all = std::fs::read("/proc/self/maps").map_or(0, |text| text.iter().filter(|&&b| b == b'\n').count());
    let foreign = all.saturating_sub(view::mappings_promised());
    MOST.fetch_max(foreign, Ordering::Relaxed).max(foreign)
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager")
            .field("base", &self.base())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Pager {
    /// Makes a pager over `planes`, one after the other. `connect` gives the client: one of its own, or one that the
    /// process has anyway.
    ///
    /// # Errors
    /// What `connect` and the broker say, and [`Error::TooManyMappings`] when `vm.max_map_count` would not let the pager
    /// fill up. Nothing is left behind then.
    pub fn new(
        planes: &[PagerPlane],
        options: PagerOptions,
        connect: impl Fn() -> Result<Client, Error> + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let client = connect()?;
        let page = page_bytes();
        let extent = client.info().extent_bytes as usize;
        let mappings = view::mappings_left().saturating_sub(foreign_mappings());
        let layout = Layout::choose(planes, page, extent, mappings)?;
        let promise = Promise::new(layout.mappings())?;
        let lease = Lease::open(client, &layout, planes, &options)?;
        if options.whole {
            lease.reserve(layout.units)?;
        } else {
            lease.admit_one()?;
        }

        let map = |source| Error::Map { what: format!("a range of {} bytes", layout.bytes), source };
        // SAFETY: the kernel chooses free addresses.
        let base = unsafe { map_zero(None, layout.bytes, false) }.map_err(map)?.as_ptr() as usize;
        let range = Mapped { base, bytes: layout.bytes };
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| Error::Map { what: "a pager's bell".into(), source: e.into() })?;
        let inner = Arc::new(Inner {
            region: Box::new(Region::new(base, &layout, bell.into())),
            layout,
            planes: planes.to_vec(),
            options,
            connect: Box::new(connect),
            table: Mutex::new(Table {
                leases: vec![lease],
                spilled: Vec::new(),
                transposed: 0,
                told_transposed: false,
                told_lost: false,
                told_wanted: false,
                told_taken: false,
                grant_ns: 0,
                last_k: None,
            }),
            stop: false.into(),
            made_by: std::process::id(),
        });
        // SAFETY: the region lives in `inner`, which this pager keeps until after the entry is dropped.
        let entry = unsafe { fault::enter(&*inner.region, inner.layout.bytes) };
        let Some(entry) = entry else {
            let most = fault::MOST_REGIONS;
            return Err(Error::Invalid(format!("this process has {most} pagers, more than it may")));
        };
        let thread = service::start(inner.clone())
            .map_err(|source| Error::Map { what: "a pager's thread".into(), source })?;
        std::mem::forget(range);
        Ok(Pager { inner, entry: Some(entry), thread: Some(thread), _promise: promise })
    }

    /// Start of the range. It stays the same for the pager's life.
    pub fn base(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.inner.region.base)
    }

    /// Bytes of the range.
    pub fn bytes(&self) -> usize {
        self.inner.layout.bytes
    }

    /// Where plane `index` starts.
    ///
    /// # Panics
    /// If there is no such plane.
    pub fn plane(&self, index: usize) -> *mut u8 {
        self.base().wrapping_add(self.inner.layout.planes[index].start)
    }

    /// Bytes of a run of plane `index`.
    ///
    /// # Panics
    /// If there is no such plane.
    pub fn unit_bytes(&self, index: usize) -> usize {
        self.inner.layout.planes[index].unit
    }

    /// Grants all units that bytes `offsets` of the range lie in, without a fault: what is written by system calls, which
    /// get EFAULT in a unit without memory, needs it. All or none; a refusal changes nothing.
    pub fn ensure(&self, offsets: Range<usize>) -> Result<(), Error> {
        let units = self.inner.units_in(&offsets)?;
        let mut table = self.inner.table()?;
        self.inner.grant(&mut table, &units).map(|_| ())
    }

    /// Gives back the units that lie wholly in `parts`, byte ranges of the pager's range, in every plane: they read as
    /// zero again. The caller sees to it that nobody writes there meanwhile. Returns how many units were given back.
    pub fn trim(&self, parts: &[Range<usize>]) -> Result<usize, Error> {
        let units = self.inner.units_within(parts)?;
        let mut table = self.inner.table()?;
        self.inner.give_back(&mut table, &units)
    }

    /// Gives back everything: the whole range reads as zero again. The caller sees to it that nobody writes meanwhile.
    pub fn clear(&self) -> Result<(), Error> {
        let mut table = self.inner.table()?;
        self.inner.clear(&mut table)
    }

    /// Counts.
    pub fn stats(&self) -> PagerStats {
        let inner = &self.inner;
        let mut stats = PagerStats {
            bytes: inner.layout.bytes,
            block_bytes: inner.layout.block_bytes,
            units: inner.layout.units,
            faults: inner.region.faults.load(std::sync::atomic::Ordering::Relaxed),
            ..PagerStats::default()
        };
        if let Ok(table) = inner.table() {
            stats.units_held = table.leases.iter().map(Lease::held).sum();
            stats.units_spilled = table.spilled.len();
            stats.transposed = table.transposed;
            stats.grant_ns = table.grant_ns;
        }
        stats
    }
}

/// A range that nobody owns yet.
struct Mapped {
    base: usize,
    bytes: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by the pager that is being made, which has failed.
        unsafe { arena::unmap(std::ptr::with_exposed_provenance_mut(self.base), self.bytes) };
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        if std::process::id() != self.inner.made_by {
            // A forked child: the thread is not here, and the range and the connection are the parent's.
            std::mem::forget(self.entry.take());
            std::mem::forget(self.thread.take());
            std::mem::forget(self.inner.clone());
            return;
        }
        self.inner.stop.store(true, std::sync::atomic::Ordering::SeqCst);
        self.inner.region.ring();
        if let Some(thread) = self.thread.take() {
            // It ends in any case: a panic of it has been reported where it happened.
            let _ = thread.join();
        }
        // The handler forgets the range before it is gone.
        self.entry = None;
        drop(Mapped { base: self.inner.region.base, bytes: self.inner.layout.bytes });
        // Blocks last: nothing of them may be visible once they are somebody else's.
        let mut table = self.inner.table_anyway();
        table.leases.clear();
    }
}

impl Inner {
    fn table(&self) -> Result<MutexGuard<'_, Table>, Error> {
        if std::process::id() != self.made_by {
            return Err(Error::Forked);
        }
        Ok(self.table_anyway())
    }

    fn table_anyway(&self) -> MutexGuard<'_, Table> {
        super::lock(&self.table)
    }

    fn notify(&self, notice: &Notice) {
        if let Some(notify) = &self.options.notify {
            notify(notice);
        }
    }

    fn check(&self, offsets: &Range<usize>) -> Result<(), Error> {
        if offsets.end > self.layout.bytes || offsets.start > offsets.end {
            let bytes = self.layout.bytes;
            return Err(Error::Invalid(format!("bytes {offsets:?} of a pager of {bytes}")));
        }
        Ok(())
    }

    /// The units that a range of offsets touches.
    fn units_in(&self, offsets: &Range<usize>) -> Result<Vec<usize>, Error> {
        self.check(offsets)?;
        let mut units = Vec::new();
        for p in &self.layout.planes {
            let (from, to) = (offsets.start.max(p.start), offsets.end.min(p.end()));
            if from < to {
                units.extend((from - p.start) / p.unit..(to - p.start).div_ceil(p.unit));
            }
        }
        units.sort_unstable();
        units.dedup();
        Ok(units)
    }

    /// The units whose runs in all planes are covered.
    fn units_within(&self, parts: &[Range<usize>]) -> Result<Vec<usize>, Error> {
        parts.iter().try_for_each(|part| self.check(part))?;
        let mut covered = vec![0; self.layout.units];
        for p in &self.layout.planes {
            for part in parts {
                let (from, to) = (part.start.max(p.start), part.end.min(p.end()));
                if from < to {
                    let whole = (from - p.start).div_ceil(p.unit)..(to - p.start) / p.unit;
                    whole.for_each(|unit| covered[unit] += 1);
                }
            }
        }
        let planes_of = |unit| self.layout.planes.iter().filter(|p| unit < p.count).count();
        Ok((0..self.layout.units).filter(|&unit| covered[unit] == planes_of(unit)).collect())
    }

    fn state(&self, unit: usize) -> u32 {
        self.region.states[unit].load(std::sync::atomic::Ordering::Acquire)
    }

    /// Puts blocks into those of `units` that have none; returns how many there were. All or none.
    fn grant(&self, table: &mut Table, units: &[usize]) -> Result<usize, Error> {
        if let Some(unit) = units.iter().find(|&&u| self.state(u) == TAKEN) {
            let text = format!(
                "unit {unit} of this pager was taken for a session of higher priority: clear the pager"
            );
            return Err(Error::Refused { fault: Fault::SessionLost, needed: 0, available: 0, text });
        }
        let missing: Vec<usize> = units.iter().copied().filter(|&u| self.state(u) != GRANTED).collect();
        if missing.is_empty() {
            return Ok(0);
        }
        let started = Instant::now();
        let lease = table.leases.last_mut().expect("a pager always has a lease");
        let blocks = lease.take(missing.len())?;
        for (done, (&unit, block)) in missing.iter().zip(&blocks).enumerate() {
            if let Err(e) = self.show(lease, unit, block) {
                let hidden = self.put_zeros(unit);
                // What could not be hidden again is nobody else's: it stays with this lease until that ends.
                lease.put_back(&blocks[done + usize::from(hidden.is_err())..]);
                if hidden.is_err() {
                    lease.hold(unit, block);
                }
                return Err(e);
            }
            lease.hold(unit, block);
            self.region.set(unit, GRANTED);
        }
        table.grant_ns += started.elapsed().as_nanos() as u64;
        // Whoever waits runs already: telling the broker in which table the blocks are is not in its way.
        lease.report();
        Ok(missing.len())
    }

    fn run(&self, plane: usize, unit: usize) -> Option<(*mut u8, usize)> {
        let runs = self.layout.planes[plane];
        (unit < runs.count).then(|| {
            let at = self.region.base + runs.start + unit * runs.unit;
            (std::ptr::with_exposed_provenance_mut(at), runs.unit)
        })
    }

    /// A unit's runs, in all planes that have one.
    fn runs(&self, unit: usize) -> impl Iterator<Item = (*mut u8, usize)> {
        (0..self.layout.planes.len()).filter_map(move |plane| self.run(plane, unit))
    }

    /// Maps a block's runs in all planes. After an error some may be there.
    fn show(&self, lease: &Lease, unit: usize, block: &lease::Taken) -> Result<(), Error> {
        lease.zero(block);
        for plane in 0..self.layout.planes.len() {
            let Some((at, bytes)) = self.run(plane, unit) else { continue };
            // SAFETY: the run is inside this pager's range, and nothing is in it but zeros.
            unsafe { lease.alias(block, plane, at, bytes) }?;
        }
        Ok(())
    }

    /// Sees to it that each run of a unit is a mapping of its own, all of them or none. After that nothing that is mapped over
    /// them can fail because the process has too many: runs of neighbours that follow each other in memory are one mapping,
    /// and to put something else into the middle of it makes it three.
    fn set_apart(&self, unit: usize) -> Result<(), Error> {
        for plane in 0..self.layout.planes.len() {
            let Some((at, bytes)) = self.run(plane, unit) else { continue };
            // SAFETY: the run is inside this pager's range.
            if let Err(source) = unsafe { arena::set_apart(at, bytes) } {
                for (at, bytes) in (0..=plane).filter_map(|plane| self.run(plane, unit)) {
                    // SAFETY: as above.
                    unsafe { arena::join_again(at, bytes) };
                }
                let what = format!("unit {unit} by itself, of which the process has too many mappings");
                return Err(Error::Map { what, source });
            }
        }
        Ok(())
    }

    /// Zeros that cannot be written, in place of a unit, in all planes. On an error it is as it was.
    fn hide(&self, unit: usize) -> Result<(), Error> {
        self.set_apart(unit)?;
        self.put_zeros(unit)
    }

    fn put_zeros(&self, unit: usize) -> Result<(), Error> {
        for (at, bytes) in self.runs(unit) {
            // SAFETY: as in show; what was there is given up.
            unsafe { map_zero(Some(at), bytes, true) }.map_err(|source| Error::Map {
                what: format!("zeros over unit {unit}, of which the process has too many mappings"),
                source,
            })?;
        }
        Ok(())
    }

    /// Private memory in place of a unit that the broker has no block for. On an error it is as it was.
    fn spill(&self, table: &mut Table, unit: usize) -> Result<(), Error> {
        self.set_apart(unit)?;
        for (at, bytes) in self.runs(unit) {
            // SAFETY: the run is inside this pager's range, and nothing is in it but zeros.
            let mapped = unsafe { arena::map_private(at, bytes) };
            if let Err(source) = mapped {
                self.put_zeros(unit)?;
                return Err(Error::Map { what: format!("private memory for unit {unit}"), source });
            }
        }
        table.spilled.push(unit);
        self.region.set(unit, GRANTED);
        Ok(())
    }

    /// Moves what is in a unit into private memory. Whoever writes there meanwhile waits. On an error it is as it was.
    fn move_out(&self, unit: usize) -> Result<(), Error> {
        self.set_apart(unit)?;
        self.region.set(unit, CHANGING);
        // SAFETY: the run is inside this pager's range, and a mapping of its own. Writers are kept off by the unit's state.
        let moved = self.runs(unit).try_for_each(|(at, bytes)| unsafe { arena::make_private(at, bytes) });
        self.region.set(unit, GRANTED);
        moved.map_err(|source| Error::Map { what: format!("private memory for unit {unit}"), source })
    }

    /// Whoever reads or writes in a unit faults from now on.
    fn forbid(&self, unit: usize) -> Result<(), Error> {
        self.set_apart(unit)?;
        for (at, bytes) in self.runs(unit) {
            // SAFETY: the run is inside this pager's range.
            unsafe { arena::protect(at, bytes, libc::PROT_NONE) }
                .map_err(|source| Error::Map { what: format!("unit {unit}, against access"), source })?;
        }
        Ok(())
    }

    fn give_back(&self, table: &mut Table, units: &[usize]) -> Result<usize, Error> {
        let held: Vec<usize> = units.iter().copied().filter(|&u| self.state(u) == GRANTED).collect();
        for &unit in &held {
            self.region.set(unit, CHANGING);
        }
        let (mut hidden, mut why) = (held.len(), None);
        for (i, &unit) in held.iter().enumerate() {
            // What has been hidden before may have made room for the one that failed.
            if let Err(e) = self.hide(unit).or_else(|_| self.hide(unit)) {
                (hidden, why) = (i, Some(e));
                break;
            }
        }
        // What nobody sees any more goes back; the rest stays as it is.
        let (gone, stay) = held.split_at(hidden);
        stay.iter().for_each(|&unit| self.region.set(unit, GRANTED));
        table.spilled.retain(|unit| !gone.contains(unit));
        for lease in &mut table.leases {
            lease.drop_units(gone);
        }
        self.end_old_leases(table);
        gone.iter().for_each(|&unit| self.region.set(unit, EMPTY));
        why.map_or(Ok(gone.len()), Err)
    }

    fn clear(&self, table: &mut Table) -> Result<(), Error> {
        let has_memory = |&u: &usize| matches!(self.state(u), GRANTED | TAKEN);
        let held: Vec<usize> = (0..self.layout.units).filter(has_memory).collect();
        if held.is_empty() {
            return Ok(());
        }
        let states: Vec<u32> = held.iter().map(|&unit| self.state(unit)).collect();
        for &unit in &held {
            self.region.set(unit, CHANGING);
        }
        let base = std::ptr::with_exposed_provenance_mut(self.region.base);
        // SAFETY: the whole range is this pager's; one mapping takes the place of all.
        let zeros = unsafe { map_zero(Some(base), self.layout.bytes, true) };
        if let Err(source) = zeros {
            held.iter().zip(states).for_each(|(&unit, state)| self.region.set(unit, state));
            return Err(Error::Map { what: "zeros over a whole pager".into(), source });
        }
        table.spilled.clear();
        table.last_k = None;
        table.leases.iter_mut().for_each(Lease::drop_all);
        if table.told_taken {
            // What was lost is not needed any more: it begins anew, at the same broker.
            let client = table.leases.last().expect("a pager always has a lease").client().clone();
            match Lease::open(client, &self.layout, &self.planes, &self.options) {
                Ok(lease) => {
                    table.leases.push(lease);
                    (table.told_taken, table.told_wanted) = (false, false);
                }
                Err(e) => log::warn!("a pager whose blocks were taken cannot begin anew: {e}"),
            }
        }
        self.end_old_leases(table);
        held.iter().for_each(|&unit| self.region.set(unit, EMPTY));
        Ok(())
    }

    /// Leases of brokers that have gone end with their last block.
    fn end_old_leases(&self, table: &mut Table) {
        let last = table.leases.len() - 1;
        let mut index = 0;
        table.leases.retain(|lease| {
            index += 1;
            index - 1 == last || lease.held() > 0
        });
    }
}
