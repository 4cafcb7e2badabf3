//! The SIGSEGV handler, and what it may touch.
//!
//! Owns the table of regions and the process's former handler. The handler runs in whatever thread wrote, wherever that
//! thread was, so it allocates nothing, takes no lock, logs nothing and calls only what POSIX lists as safe in a signal
//! handler: it marks the unit as wanted, rings an `eventfd`, and sleeps on a futex until the pager's own thread, which is
//! an ordinary thread, has asked the broker and mapped the blocks. Invariants:
//! - a region in the table stays allocated until no handler looks at it;
//! - a fault is either mended by a grant or handed to whoever handled SIGSEGV before, never swallowed;
//! - a unit's word says what its memory is: [`EMPTY`] zeros that cannot be written, [`GRANTED`] memory of its own.
//!
//! Why not do the round trip in the handler: it would need a connection, buffers and a lock of its own, the mapping of
//! sixty planes and the zeroing of blocks, all without `malloc`, and whatever the broker says besides (an extent asked
//! back) would wait for the next fault. A thread costs one more wake-up (some 10 us) beside sixty `mmap`s, and it waits,
//! retries and reconnects with the code that everything else uses.
//!
//! Why not userfaultfd: it is missing or refused where this must run. Without privilege it needs `UFFD_USER_MODE_ONLY`
//! and a kernel built with it, containers' seccomp profiles refuse the call, write-protect faults on arm64 came with
//! 6.10 while boards run 5.10 and 6.1; it resolves faults by copying pages into anonymous or shared memory, and does
//! not let a mapping of scattered blocks appear in place of the page that faulted. Its one gain, that writes by system
//! calls fault too, does not carry that.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use libc::{c_int, c_void, siginfo_t};

use super::layout::{Layout, Runs};

/// Pagers that one process may have at a time.
pub(super) const MOST_REGIONS: usize = 1024;

/// Zeros that cannot be written.
pub(super) const EMPTY: u32 = 0;
/// A thread waits for it.
pub(super) const WANTED: u32 = 1;
/// It has memory.
pub(super) const GRANTED: u32 = 2;
/// It is being emptied: wait, then look again.
pub(super) const CHANGING: u32 = 3;
/// It cannot be granted; the message says why. Whoever reads this makes it empty again.
pub(super) const FAILED: u32 = 4;
/// The broker has taken its block: whoever reads or writes there is ended with the message.
pub(super) const TAKEN: u32 = 5;

/// Faults in granted units, without any grant between, after which it is not this module's fault that they fail.
const STRAYS: u32 = 100_000;
const MESSAGE_BYTES: usize = 1024;

/// The part of a pager that the handler sees.
#[derive(Debug)]
pub(super) struct Region {
    pub base: usize,
    pub planes: Box<[Runs]>,
    /// One word per unit; threads sleep on it.
    pub states: Box<[AtomicU32]>,
    /// One bit per unit in which a thread waits.
    pub wanted: Box<[AtomicU64]>,
    /// In which plane the unit was first written.
    pub asked_by: Box<[AtomicU32]>,
    /// Wakes the pager's thread.
    pub bell: OwnedFd,
    /// Faults that were for this region.
    pub faults: AtomicU64,
    strays: AtomicU32,
    made_by: u32,
    message: Message,
}

/// Words for the last moment, written by the pager's thread before it gives a unit up.
#[derive(Debug)]
struct Message {
    bytes: Box<[AtomicU32]>,
    len: AtomicUsize,
}

impl Region {
    pub fn new(base: usize, layout: &Layout, bell: OwnedFd) -> Self {
        let words = |n: usize| std::iter::repeat_with(AtomicU32::default).take(n).collect();
        let bits = layout.units.div_ceil(64);
        Region {
            base,
            planes: layout.planes.clone().into_boxed_slice(),
            states: words(layout.units),
            wanted: std::iter::repeat_with(AtomicU64::default).take(bits).collect(),
            asked_by: words(layout.units),
            bell,
            faults: AtomicU64::new(0),
            strays: AtomicU32::new(0),
            made_by: std::process::id(),
            message: Message { bytes: words(MESSAGE_BYTES / 4), len: AtomicUsize::new(0) },
        }
    }

    /// Wakes the pager's thread. Safe in a signal handler.
    pub fn ring(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes of a local to a descriptor that lives as long as the region.
        unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// The pager's thread, or an API call, says what became of a unit, and wakes whoever waits for it.
    pub fn set(&self, unit: usize, state: u32) {
        if state == GRANTED {
            self.strays.store(0, Ordering::Relaxed);
        }
        self.states[unit].store(state, Ordering::Release);
        futex_wake(&self.states[unit]);
    }

    /// Takes the marks of units in which threads wait.
    pub fn take_wanted(&self) -> Vec<usize> {
        let mut units = Vec::new();
        for (word, bits) in self.wanted.iter().enumerate() {
            let mut bits = bits.swap(0, Ordering::Acquire);
            while bits != 0 {
                units.push(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        units
    }

    /// What to say before the process ends.
    pub fn set_message(&self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min(MESSAGE_BYTES)];
        for (word, chunk) in self.message.bytes.iter().zip(bytes.chunks(4)) {
            let mut four = [0; 4];
            four[..chunk.len()].copy_from_slice(chunk);
            word.store(u32::from_ne_bytes(four), Ordering::Relaxed);
        }
        self.message.len.store(bytes.len(), Ordering::Release);
    }

    fn say(&self) {
        let len = self.message.len.load(Ordering::Acquire);
        let mut out = [0u8; MESSAGE_BYTES];
        for (four, word) in out.chunks_exact_mut(4).zip(self.message.bytes.iter()) {
            four.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        write_error(out.get(..len).unwrap_or_default());
    }

    /// Whether the write that faulted at `address` can be tried again.
    fn mend(&self, address: usize) -> bool {
        // SAFETY: getpid has no preconditions.
        if unsafe { libc::getpid() } as u32 != self.made_by {
            write_error(
                b"kvbroker: a forked child wrote into KV memory, which belongs to its parent: load the model after the fork\n",
            );
            return false;
        }
        let found = Layout::find(&self.planes, address.wrapping_sub(self.base));
        let Some((plane, unit)) = found else { return false };
        let (Some(state), Some(word)) = (self.states.get(unit), self.wanted.get(unit / 64)) else {
            return false;
        };
        loop {
            match state.load(Ordering::Acquire) {
                EMPTY => {
                    if state.compare_exchange(EMPTY, WANTED, Ordering::AcqRel, Ordering::Acquire).is_err() {
                        continue;
                    }
                    self.faults.fetch_add(1, Ordering::Relaxed);
                    if let Some(by) = self.asked_by.get(unit) {
                        by.store(plane as u32, Ordering::Relaxed);
                    }
                    word.fetch_or(1 << (unit % 64), Ordering::Release);
                    self.ring();
                }
                // Another thread was quicker; or no grant helps, as for code that is executed in here.
                GRANTED => return self.strays.fetch_add(1, Ordering::Relaxed) < STRAYS,
                FAILED => {
                    self.say();
                    let _ = state.compare_exchange(FAILED, EMPTY, Ordering::AcqRel, Ordering::Acquire);
                    return false;
                }
                TAKEN => {
                    self.say();
                    return false;
                }
                seen => futex_wait(state, seen),
            }
        }
    }
}

fn write_error(bytes: &[u8]) {
    // SAFETY: writes from a slice that is ours to standard error. Whether it arrives does not matter.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Sleeps while the word has this value.
fn futex_wait(word: &AtomicU32, value: u32) {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let forever = ptr::null::<libc::timespec>();
    // SAFETY: the word lives as long as the region; the kernel only reads it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, forever) };
}

fn futex_wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel uses the address of the word only to find its sleepers.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, c_int::MAX) };
}

/// A place of the table.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    region: AtomicPtr<Region>,
    /// Handlers that look at the region now.
    readers: AtomicUsize,
}

static TABLE: [Slot; MOST_REGIONS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        region: AtomicPtr::new(ptr::null_mut()),
        readers: AtomicUsize::new(0),
    }
}; MOST_REGIONS];

/// One more than the highest place that was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A region's entry in the table; dropping it takes it out.
#[derive(Debug)]
pub(super) struct Entry(usize);

/// Makes the handler know a region. `None` when the table is full.
///
/// # Safety
/// `region` stays valid until the entry is dropped.
pub(super) unsafe fn enter(region: *const Region, bytes: usize) -> Option<Entry> {
    install();
    // SAFETY: valid, as the caller says.
    let base = unsafe { (*region).base };
    for (index, slot) in TABLE.iter().enumerate() {
        // The place is taken first: its range is still empty then, so no handler finds it.
        let free = ptr::null_mut();
        if slot.region.compare_exchange(free, region.cast_mut(), Ordering::SeqCst, Ordering::Relaxed).is_ok()
        {
            USED.fetch_max(index + 1, Ordering::SeqCst);
            slot.end.store(base + bytes, Ordering::SeqCst);
            slot.start.store(base, Ordering::SeqCst);
            return Some(Entry(index));
        }
    }
    None
}

impl Drop for Entry {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot.start.store(0, Ordering::SeqCst);
        slot.end.store(0, Ordering::SeqCst);
        // A handler that has counted itself in may still have seen the range.
        while slot.readers.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        slot.region.store(ptr::null_mut(), Ordering::SeqCst);
    }
}

/// Whether a fault at `address` was in a region and has been mended.
fn mend(address: usize) -> bool {
    for slot in TABLE.iter().take(USED.load(Ordering::SeqCst)) {
        if !(slot.start.load(Ordering::SeqCst)..slot.end.load(Ordering::SeqCst)).contains(&address) {
            continue;
        }
        slot.readers.fetch_add(1, Ordering::SeqCst);
        // Again, now that the place cannot be given up: see Entry::drop.
        let inside = (slot.start.load(Ordering::SeqCst)..slot.end.load(Ordering::SeqCst)).contains(&address);
        let region = slot.region.load(Ordering::SeqCst);
        // SAFETY: the range was set after we were counted, so the entry is not dropped before we are counted out, and
        // the region is valid until then.
        let mended = inside && unsafe { region.as_ref() }.is_some_and(|r| r.mend(address));
        slot.readers.fetch_sub(1, Ordering::SeqCst);
        return mended;
    }
    false
}

/// Who handled SIGSEGV before.
struct Former {
    action: UnsafeCell<MaybeUninit<libc::sigaction>>,
    known: AtomicBool,
    /// SA_RESETHAND: it wanted to be called once.
    spent: AtomicBool,
}

// SAFETY: `action` is written before `known` is set, by one thread (`Once`), and only read afterwards.
unsafe impl Sync for Former {}

static FORMER: Former = Former {
    action: UnsafeCell::new(MaybeUninit::uninit()),
    known: AtomicBool::new(false),
    spent: AtomicBool::new(false),
};

/// Puts the handler in place, once per process; it stays, because whoever came later may call it.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all-zero is a valid sigaction; the kernel reads one and fills the other.
        unsafe {
            let mut former: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGSEGV, ptr::null(), &mut former);
            (*FORMER.action.get()).write(former);
            FORMER.known.store(true, Ordering::SeqCst);
            let mut ours: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
            ours.sa_sigaction = handler as usize;
            // On the thread's own signal stack where it has one: a stack overflow must still reach the former handler,
            // and runtimes such as Go's insist on it. What runs here needs little more than 1 KiB.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut ours.sa_mask);
            libc::sigaction(libc::SIGSEGV, &ours, ptr::null_mut());
        }
    });
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: errno is this thread's own; the kernel hands over a valid siginfo; si_addr is there for a fault.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        // A signal that somebody sent has no address.
        let fault = (*info).si_code > 0;
        let mended = fault && mend((*info).si_addr() as usize);
        if !mended {
            chain(signal, info, context, fault);
        }
        *errno = saved;
    }
}

/// Does what would have been done without this module.
///
/// # Safety
/// Called by the handler, with what the kernel gave it.
unsafe fn chain(signal: c_int, info: *mut siginfo_t, context: *mut c_void, fault: bool) {
    // SAFETY: `action` is complete once `known` is set, and `known` is set before the handler is in place; the former
    // handler is called as the kernel would have called it.
    unsafe {
        if !FORMER.known.load(Ordering::SeqCst) {
            return default(signal, fault);
        }
        let former = (*FORMER.action.get()).assume_init_ref();
        let once = former.sa_flags & libc::SA_RESETHAND != 0;
        let spent = once && FORMER.spent.swap(true, Ordering::SeqCst);
        match former.sa_sigaction {
            _ if spent => default(signal, fault),
            libc::SIG_DFL => default(signal, fault),
            // The kernel ends a process that ignores a real fault.
            libc::SIG_IGN if fault => default(signal, fault),
            libc::SIG_IGN => {}
            handler => {
                let mut before: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, &former.sa_mask, &mut before);
                if former.sa_flags & libc::SA_NODEFER != 0 {
                    let mut this: libc::sigset_t = std::mem::zeroed();
                    libc::sigemptyset(&mut this);
                    libc::sigaddset(&mut this, signal);
                    libc::pthread_sigmask(libc::SIG_UNBLOCK, &this, ptr::null_mut());
                }
                if former.sa_flags & libc::SA_SIGINFO != 0 {
                    type Full = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
                    std::mem::transmute::<usize, Full>(handler)(signal, info, context);
                } else {
                    type Plain = extern "C" fn(c_int);
                    std::mem::transmute::<usize, Plain>(handler)(signal);
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
            }
        }
    }
}

/// The default action: the fault comes again when the handler returns, and ends the process; a signal that was sent is
/// sent again.
fn default(signal: c_int, fault: bool) {
    // SAFETY: all-zero is the default action; raise and sigaction are safe in a handler.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &default, ptr::null_mut());
        if !fault {
            libc::raise(signal);
        }
    }
}
