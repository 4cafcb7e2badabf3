//! The staging buffer of a process: contiguous memory through which sessions reach a device that can neither scatter nor
//! stands behind an IOMMU.
//!
//! Owns the mapping, and who has which half. Invariants: a half is one batch's from the moment in which it is taken until
//! the batch is dropped; who waits for a half gets one in the order of arrival, and a window that has one already never
//! waits for the other, so that two windows with one half each cannot wait for each other; the CPU touches a half only
//! inside a section of [`Cpu`], which tells the caches; and since that tells of the whole buffer, no read section begins
//! while a half is being filled: where the device is not coherent, it would throw away what was written and is still in a
//! cache.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};

use crate::map::{SharedMap, page_bytes};
use crate::window::sync::{Counts, Cpu, Direction};

/// Two: one that the device has, and one that the CPU fills or drains meanwhile.
const HALVES: usize = 2;

#[derive(Debug, Default)]
struct Queue {
    busy: [bool; HALVES],
    next: u64,
    waiting: VecDeque<u64>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Staging {
    fd: OwnedFd,
    map: SharedMap,
    half_bytes: usize,
    queue: Mutex<Queue>,
    freed: Condvar,
    /// Shared by those that fill a half; who begins to drain one has it alone for that moment.
    filling: RwLock<()>,
    counts: Counts,
    copied: AtomicU64,
}

impl Staging {
    /// Maps a buffer of `bytes` bytes.
    pub fn new(fd: OwnedFd, bytes: usize) -> io::Result<Self> {
        let half_bytes = bytes / HALVES / page_bytes() * page_bytes();
        if half_bytes == 0 {
            let text = format!("a staging buffer of {bytes} bytes has no two halves of whole pages");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let map = SharedMap::new(fd.as_fd(), bytes)?;
        let queue = Mutex::new(Queue::default());
        let (freed, counts, copied) = (Condvar::new(), Counts::new(), AtomicU64::new(0));
        let filling = RwLock::new(());
        Ok(Staging { fd, map, half_bytes, queue, freed, filling, counts, copied })
    }

    /// The buffer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes of one half.
    pub fn half_bytes(&self) -> usize {
        self.half_bytes
    }

    /// (hand-overs from the device, hand-overs to it, bytes copied) so far.
    pub fn counts(&self) -> (u64, u64, u64) {
        let (reads, writes) = self.counts.get();
        (reads, writes, self.copied.load(Ordering::Relaxed))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        super::lock(&self.queue)
    }

    /// A half, when it is this caller's turn. One that `has` a half already is told `None` instead of waiting.
    pub fn take(self: &Arc<Self>, has: bool) -> Option<Half> {
        let mut q = self.queue();
        let ticket = q.next;
        q.next += 1;
        q.waiting.push_back(ticket);
        loop {
            let turn = q.waiting.front() == Some(&ticket);
            match q.busy.iter().position(|b| !b).filter(|_| turn) {
                Some(index) => {
                    q.waiting.pop_front();
                    q.busy[index] = true;
                    // Whoever is first now may find the other half free.
                    self.freed.notify_all();
                    return Some(Half { staging: self.clone(), index });
                }
                None if has => {
                    q.waiting.retain(|t| *t != ticket);
                    return None;
                }
                None => q = self.freed.wait(q).unwrap_or_else(|poisoned| poisoned.into_inner()),
            }
        }
    }
}

/// One half, until this is dropped.
#[derive(Debug)]
pub(super) struct Half {
    staging: Arc<Staging>,
    index: usize,
}

impl Half {
    /// Which one.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Where it starts in the buffer.
    pub fn offset(&self) -> usize {
        self.index * self.staging.half_bytes
    }

    /// Bytes of it.
    pub fn bytes(&self) -> usize {
        self.staging.half_bytes
    }

    /// Copies pieces in, one after the other, and hands the buffer to the device.
    ///
    /// # Safety
    /// Each piece points at so many readable bytes outside the staging buffer, together no more than the half has.
    pub unsafe fn fill(&self, pieces: impl IntoIterator<Item = (*const u8, usize)>) -> io::Result<()> {
        let _filling = self.staging.filling.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let cpu = Cpu::begin(self.staging.fd(), Direction::Write, Some(&self.staging.counts))?;
        let mut at = self.offset();
        for (from, bytes) in pieces {
            debug_assert!(at + bytes <= self.offset() + self.bytes());
            // SAFETY: the caller promises the source, and that all of it fits the half, which is this value's alone.
            unsafe { self.staging.map.as_ptr().add(at).copy_from_nonoverlapping(from, bytes) };
            at += bytes;
        }
        self.count(at);
        cpu.end()
    }

    /// Takes the buffer from the device and copies it out into pieces.
    ///
    /// # Safety
    /// As for [`fill`](Self::fill), with writable bytes.
    pub unsafe fn drain(&self, pieces: impl IntoIterator<Item = (*mut u8, usize)>) -> io::Result<()> {
        // Caches are invalidated when the section begins, so nobody needs to wait for its end.
        let alone = self.staging.filling.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let cpu = Cpu::begin(self.staging.fd(), Direction::Read, Some(&self.staging.counts))?;
        drop(alone);
        let mut at = self.offset();
        for (to, bytes) in pieces {
            debug_assert!(at + bytes <= self.offset() + self.bytes());
            // SAFETY: as in fill, the other way round.
            unsafe { to.copy_from_nonoverlapping(self.staging.map.as_ptr().add(at), bytes) };
            at += bytes;
        }
        self.count(at);
        cpu.end()
    }

    fn count(&self, end: usize) {
        self.staging.copied.fetch_add((end - self.offset()) as u64, Ordering::Relaxed);
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        self.staging.queue().busy[self.index] = false;
        self.staging.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Heap, Memfd};

    fn staging() -> Arc<Staging> {
        let bytes = 4 * page_bytes();
        let buffer = Memfd::new(false).allocate(bytes as u64).unwrap();
        Arc::new(Staging::new(buffer.fd().unwrap().try_clone_to_owned().unwrap(), bytes).unwrap())
    }

    #[test]
    fn who_has_a_half_is_not_made_to_wait_for_the_other() {
        let s = staging();
        let (first, second) = (s.take(false).unwrap(), s.take(true).unwrap());
        assert_ne!(first.offset(), second.offset());
        assert!(s.take(true).is_none(), "it would wait for itself");
        drop(first);
        assert!(s.take(true).is_some());
    }

    #[test]
    fn halves_go_round_in_the_order_of_asking() {
        let s = staging();
        let (a, b) = (s.take(false).unwrap(), s.take(false).unwrap());
        let (order, finished) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for n in 0..4 {
                let (waiter, order) = (s.clone(), order.clone());
                scope.spawn(move || {
                    let half = waiter.take(false).unwrap();
                    order.send(n).unwrap();
                    drop(half);
                });
                // The next one only when this one stands in the queue.
                while s.queue().waiting.len() < n + 1 {
                    std::thread::yield_now();
                }
            }
            // A greedy window with a half of its own gets nothing past those that wait.
            assert!(s.take(true).is_none());
            drop(a);
            let got: Vec<usize> = finished.iter().take(4).collect();
            assert_eq!(got, [0, 1, 2, 3]);
            drop(b);
        });
    }

    #[test]
    fn what_is_filled_in_pieces_is_drained_in_others_and_counted() {
        let s = staging();
        let half = s.take(false).unwrap();
        let source: Vec<u8> = (0..=255).collect();
        let mut to = vec![0u8; 256];
        // SAFETY: the pieces lie in the two vectors.
        unsafe {
            half.fill([(source.as_ptr(), 100), (source.as_ptr().add(100), 156)]).unwrap();
            let to = to.as_mut_ptr();
            half.drain([(to, 1), (to.add(1), 255)]).unwrap();
        }
        assert_eq!(to, source);
        assert_eq!(s.counts(), (1, 1, 512), "one hand-over each way");
    }

    #[test]
    fn no_half_is_taken_from_the_device_while_another_is_being_filled() {
        let s = staging();
        let (one, other) = (s.take(false).unwrap(), s.take(true).unwrap());
        let mut byte = 7u8;
        let at = &raw mut byte;
        let may = |what: &str, may: bool| {
            assert_eq!(s.filling.try_write().is_ok(), may, "{what}");
            1usize
        };
        // The pieces are asked for while the section is open.
        // SAFETY: each piece is one byte of a variable that outlives the copy.
        unsafe {
            let pieces = [false, false].map(|allowed| (at.cast_const(), allowed));
            one.fill(pieces.iter().map(|(p, allowed)| (*p, may("a drain beside a fill", *allowed)))).unwrap();
            let pieces = [(at, true)];
            other
                .drain(pieces.iter().map(|(p, allowed)| (*p, may("a fill beside a drain", *allowed))))
                .unwrap();
        }
        may("afterwards", true);
    }

    #[test]
    fn a_buffer_too_small_for_two_pages_is_refused() {
        let buffer = Memfd::new(false).allocate(page_bytes() as u64).unwrap();
        let fd = buffer.fd().unwrap().try_clone_to_owned().unwrap();
        assert!(Staging::new(fd, page_bytes()).unwrap_err().to_string().contains("two halves"));
    }
}
