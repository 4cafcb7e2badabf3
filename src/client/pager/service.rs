//! The pager's own thread: grants what the fault handler asks for.
//!
//! Owns the waiting. Invariant: every unit that is wanted becomes granted, or failed with words; also when this thread
//! comes to an end, for whatever reason, so no thread sleeps in the handler for ever
//! (`tests/pager.rs::a_write_that_waits_while_its_pager_is_freed_does_not_wait_for_ever`).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

use super::lease::Lease;
use super::{FAILED, Inner, MutexGuard, Notice, TAKEN, Table, WANTED};
use crate::client::Error;
use crate::profile::Kv;
use crate::size::Size;

const STACK_BYTES: usize = 512 << 10;
/// Pauses between two attempts while the pool is empty.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Faults in V far from where K is written, after which V is taken to be kept in columns.
const TRANSPOSED: u64 = 8;

/// Starts the thread, with all signals blocked: no handler of the program runs on it.
pub(super) fn start(inner: Arc<Inner>) -> std::io::Result<std::thread::JoinHandle<()>> {
    let mut before = SigSet::empty();
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), Some(&mut before))?;
    let builder = std::thread::Builder::new().name("kvbroker-pager".into()).stack_size(STACK_BYTES);
    let thread = builder.spawn(move || {
        let guard = Watch(&inner);
        guard.0.serve();
    });
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    thread
}

/// Fails what is wanted when the thread ends.
struct Watch<'a>(&'a Arc<Inner>);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let region = &self.0.region;
        region.set_message("kvbroker: KV memory was written while it was being freed\n");
        for unit in 0..region.states.len() {
            if region.states[unit].load(Ordering::Acquire) == WANTED {
                region.set(unit, FAILED);
            }
        }
    }
}

impl Inner {
    fn serve(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            self.wait(None);
            self.hear();
            let units = self.region.take_wanted();
            if !units.is_empty() {
                self.grant_wanted(&units);
            }
        }
    }

    /// Sleeps until the handler rings or the broker has something to say.
    fn wait(&self, longest: Option<Duration>) {
        let (fd, mute) = {
            let table = self.table_anyway();
            let client = table.leases.last().map(Lease::client).filter(|c| !c.is_lost());
            let fd = client.and_then(|c| c.event_fd());
            (fd, client.is_some() && fd.is_none())
        };
        // A broker in this process has nothing to wake this thread with.
        let longest = longest.or(mute.then_some(LONGEST_PAUSE));
        let mut fds = vec![PollFd::new(self.region.bell.as_fd(), PollFlags::POLLIN)];
        if let Some(fd) = fd {
            // SAFETY: the descriptor belongs to the client of the last lease, which only this thread replaces.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            fds.push(PollFd::new(fd, PollFlags::POLLIN));
        }
        let ms = longest.map(|d| d.as_millis().clamp(1, 60_000) as u16);
        match poll(&mut fds, ms.map_or(PollTimeout::NONE, PollTimeout::from)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => {
                log::error!("a pager's thread cannot wait: {e}");
                std::thread::sleep(LONGEST_PAUSE);
            }
        }
        let mut count = [0; 8];
        // Nonblocking: there is nothing to read when the broker was the one who spoke.
        let _ = nix::unistd::read(&self.region.bell, &mut count);
    }

    /// Takes in what the broker says. Its going is told once.
    fn hear(&self) {
        let mut table = self.table_anyway();
        let Some(client) = table.leases.last().map(Lease::client).filter(|c| !c.is_lost()) else { return };
        if let Err(e) = client.poll() {
            log::debug!("a pager's client: {e}");
        }
        self.tell_if_lost(&mut table);
        let lease = table.leases.last().expect("a pager always has a lease");
        let (wanted, taken) = (lease.is_wanted_back(), lease.is_taken());
        if taken {
            self.end_taken(&mut table);
        } else if wanted {
            self.make_room(&mut table);
        }
    }

    /// A session of higher priority needs the blocks. An engine cannot be told to do with less, so what it holds moves into
    /// private memory, if it may have that much; else it is told, and ended when it goes on.
    fn make_room(&self, table: &mut MutexGuard<'_, Table>) {
        let lease = table.leases.last().expect("a pager always has a lease");
        let units = lease.units();
        let block = self.layout.block_bytes as u64;
        let needed = (table.spilled.len() + units.len()) as u64 * block;
        if needed > self.options.spill {
            if !std::mem::replace(&mut table.told_wanted, true) {
                self.notify(&Notice::WantedBack { needed, spill: self.options.spill });
            }
            return;
        }
        let stays = units.iter().position(|&unit| {
            let moved = self.move_out(unit);
            moved.inspect_err(|e| log::warn!("unit {unit} of a pager stays in the pool: {e}")).is_err()
        });
        let moved = &units[..stays.unwrap_or(units.len())];
        table.spilled.extend(moved);
        let lease = table.leases.last_mut().expect("a pager always has a lease");
        lease.drop_units(moved);
        lease.forget_request();
        if stays.is_none() {
            let why = "a session of higher priority needs the blocks".into();
            self.notify(&Notice::Spilled { bytes: needed, why });
        }
    }

    /// The broker has ended the session: what the engine has computed is gone, and it must not go on as if it were not.
    fn end_taken(&self, table: &mut MutexGuard<'_, Table>) {
        if std::mem::replace(&mut table.told_taken, true) {
            return;
        }
        let lease = table.leases.last().expect("a pager always has a lease");
        let units = lease.units();
        let text = format!(
            "kvbroker: a session of higher priority needed this KV cache, and the broker has taken its {} units of {}: this process ends here.\n\
             kvbroker: what helps: KVBROKER_SPILL={}M to go on in memory of its own then, a higher priority for this user (kvbctl limits), a larger pool\n",
            units.len(),
            Size::from_bytes(self.layout.block_bytes as u64),
            (self.layout.block_bytes as u64 * self.layout.units as u64).div_ceil(1 << 20),
        );
        self.region.set_message(&text);
        for unit in units {
            self.region.set(unit, TAKEN);
            if let Err(e) = self.forbid(unit) {
                log::error!("unit {unit} of a pager, which the broker has taken, can still be read: {e}");
            }
        }
        self.notify(&Notice::Taken);
    }

    fn tell_if_lost(&self, table: &mut Table) {
        let lost = table.leases.last().is_some_and(|lease| lease.client().is_lost());
        if lost && !table.told_lost {
            self.notify(&Notice::Lost);
        }
        table.told_lost = lost;
    }

    fn grant_wanted(&self, units: &[usize]) {
        let mut table = self.table_anyway();
        self.look_for_columns(&mut table, units);
        if self.grant(&mut table, units).is_ok() {
            return;
        }
        // One by one from here on: what there is goes as far as it goes.
        let deadline = Instant::now() + self.options.wait;
        let mut told = false;
        for &unit in units {
            let mut pause = FIRST_PAUSE;
            while let Err(why) = self.grant_one(&mut table, unit) {
                let may_help = matches!(
                    why,
                    Error::Refused { .. } | Error::Lost(_) | Error::Timeout(_) | Error::NotReachable { .. }
                );
                if !may_help || Instant::now() >= deadline || self.stop.load(Ordering::SeqCst) {
                    self.last_resort(&mut table, unit, &why);
                    break;
                }
                if !told {
                    told = true;
                    self.notify(&Notice::Waiting(why.to_string()));
                }
                drop(table);
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
                table = self.table_anyway();
            }
        }
    }

    /// One unit, from another broker if this one has gone.
    fn grant_one(&self, table: &mut MutexGuard<'_, Table>, unit: usize) -> Result<(), Error> {
        match self.grant(table, &[unit]) {
            Err(Error::Lost(_)) => {
                self.tell_if_lost(table);
                self.reconnect(table)?;
                self.grant(table, &[unit]).map(|_| ())
            }
            other => other.map(|_| ()),
        }
    }

    /// A lease at the broker that is there now, for what is granted from here on.
    fn reconnect(&self, table: &mut MutexGuard<'_, Table>) -> Result<(), Error> {
        let client = (self.connect)()?;
        if client.is_lost() {
            return Err(Error::Lost("it has not come back".into()));
        }
        let lease = Lease::open(client, &self.layout, &self.planes, &self.options)?;
        table.leases.push(lease);
        table.told_lost = false;
        self.end_old_leases(table);
        self.notify(&Notice::Resumed);
        Ok(())
    }

    /// Private memory, or the end.
    fn last_resort(&self, table: &mut Table, unit: usize, why: &Error) {
        let block = self.layout.block_bytes as u64;
        let spilled = table.spilled.len() as u64 * block;
        let mut why = why.to_string();
        if spilled + block <= self.options.spill {
            match self.spill(table, unit) {
                Ok(()) => return self.notify(&Notice::Spilled { bytes: spilled + block, why }),
                Err(e) => why = e.to_string(),
            }
        }
        let held = table.leases.iter().map(Lease::held).sum::<usize>();
        let text = format!(
            "kvbroker: no memory for the KV cache, and a write cannot be refused, so this process ends here.\n\
             kvbroker: {why}\n\
             kvbroker: this buffer holds {held} of {} units of {}; waited {} ms (KVBROKER_WAIT_MS), spilled {} of {} (KVBROKER_SPILL)\n\
             kvbroker: what helps: KVBROKER_ADMIT=longest to be refused at the start instead, a shorter context or fewer slots, a larger pool\n",
            self.layout.units,
            Size::from_bytes(block),
            self.options.wait.as_millis(),
            Size::from_bytes(spilled),
            Size::from_bytes(self.options.spill),
        );
        self.region.set_message(&text);
        self.region.set(unit, FAILED);
    }

    /// V that is written where K is not: it is kept in columns, as llama.cpp does without flash attention.
    fn look_for_columns(&self, table: &mut Table, units: &[usize]) {
        for &unit in units {
            let plane = self.region.asked_by[unit].load(Ordering::Relaxed) as usize;
            match self.layout.planes.get(plane).map(|p| p.kv) {
                Some(Kv::K) => table.last_k = Some(unit),
                Some(Kv::V) if table.last_k.is_some_and(|k| unit.abs_diff(k) > 1) => table.transposed += 1,
                _ => {}
            }
        }
        if table.transposed >= TRANSPOSED && !table.told_transposed {
            table.told_transposed = true;
            self.notify(&Notice::Transposed { bytes: self.layout.bytes });
        }
    }
}
