//! An allocator that counts, so that a hostile count that makes a reader allocate is seen.
//!
//! Owns two numbers per thread. Invariant: what a thread has allocated and not freed is what it counts, so others that
//! run beside it do not matter; what is freed on another thread than it was allocated on is counted wrongly, and no
//! reader under test has threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The system's allocator, with the counts.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // A thread that is ending has no counts any more, and nothing is measured on it.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call is handed to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise about `layout` is the one that is needed.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: `pointer` came from the system's allocator with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist while the bytes are copied.
        count(size as i64);
        count(-(layout.size() as i64));
        // SAFETY: `pointer` came from the system's allocator with this layout.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs `work` and panics if it had more than `most` bytes allocated at one moment, beyond what there was before.
pub fn at_most<T>(most: usize, what: &str, work: impl FnOnce() -> T) -> T {
    let before = NOW.get();
    PEAK.set(before);
    let result = work();
    let peak = usize::try_from(PEAK.get() - before).unwrap_or(0);
    assert!(peak <= most, "{what} allocated {peak} bytes, more than the {most} that its input justifies");
    result
}
