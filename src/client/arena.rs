//! The address range in which a process sees the pool.
//!
//! Owns one reserved range with a place for every extent the client may come to hold, the mappings in it, and the
//! descriptors behind them. Invariants: a place that is occupied is mapped, readable, and writable unless it is
//! a read-only copy, until [`Arena::unmap`]; one whose extent the broker has taken while a table still names blocks of it stays
//! readable and writable, as zeros of this process's own, until no table does
//! (`tests::a_place_that_tables_name_outlives_its_extent`); any other gives a fault; nothing is mapped over an occupied place.
//! Offsets of blocks in the range are what block tables hold, so one base address serves all of them.

#![allow(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::id::ExtentId;

/// A place in the arena: the n-th extent-sized piece.
pub(super) type Position = u32;

#[derive(Debug)]
struct Occupied {
    position: Position,
    fd: OwnedFd,
}

#[derive(Debug, Default)]
struct Places {
    by_id: HashMap<ExtentId, Occupied>,
    free: Vec<Position>,
    /// Without an extent, and named by tables.
    left: BTreeSet<Position>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    extent_bytes: usize,
    made_by: u32,
    places: Mutex<Places>,
    /// Which extent is at each position, 0 for none: the same as in `places`, for the data path.
    ids: Box<[AtomicU32]>,
    /// How many entries of tables name a block at each position.
    named: Box<[AtomicU32]>,
}

// SAFETY: the range belongs to the arena alone, its address never changes, and the table of places is behind a lock.
// What lies in the range is shared memory, which only raw pointers touch.
unsafe impl Send for Arena {}
// SAFETY: as for Send.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves room for `extents` extents, without memory behind it.
    pub fn new(extents: u32, extent_bytes: usize) -> io::Result<Self> {
        let too_big =
            || io::Error::new(io::ErrorKind::InvalidInput, "the pool is larger than the address space");
        let bytes = (extents as usize).checked_mul(extent_bytes).ok_or_else(too_big)?;
        let base = reserve(None, bytes)?;
        // The lowest place first, so that a small client stays in a small part of the range.
        let places = Places { free: (0..extents).rev().collect(), ..Places::default() };
        let words = || std::iter::repeat_with(AtomicU32::default).take(extents as usize).collect();
        let (ids, named, made_by) = (words(), words(), std::process::id());
        Ok(Arena { base, bytes, extent_bytes, made_by, places: Mutex::new(places), ids, named })
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        super::lock(&self.places)
    }

    /// The start of the range.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// How many extents fit.
    pub fn capacity(&self) -> u32 {
        (self.bytes / self.extent_bytes) as u32
    }

    /// Where an extent is mapped, if it is.
    pub fn position(&self, extent: ExtentId) -> Option<Position> {
        self.places().by_id.get(&extent).map(|o| o.position)
    }

    /// Which extent is mapped there.
    pub fn extent_at(&self, position: Position) -> Option<ExtentId> {
        match self.ids[position as usize].load(Ordering::Acquire) {
            0 => None,
            id => Some(ExtentId(id)),
        }
    }

    /// Offset in the range, in units of 4 KiB, of byte `offset` of the extent at `position`.
    pub fn page(&self, position: Position, offset: usize) -> u32 {
        ((position as usize * self.extent_bytes + offset) >> crate::attention::PAGE_SHIFT) as u32
    }

    /// Maps an extent, all its pages present, and keeps its descriptor. One for reading only is as long as its file, and
    /// at most a place.
    pub fn map(&self, extent: ExtentId, fd: OwnedFd, writable: bool) -> io::Result<Position> {
        let mut places = self.places();
        if let Some(known) = places.by_id.get(&extent) {
            return Ok(known.position);
        }
        let full = || {
            io::Error::new(io::ErrorKind::OutOfMemory, "more extents are mapped than the pool should have")
        };
        let bytes = if writable { self.extent_bytes } else { self.length(&fd)? };
        let position = places.free.pop().ok_or_else(full)?;
        // SAFETY: the place is inside the range and free, so the new mapping replaces only the reservation.
        let mapped = unsafe { map_fixed(self.at(position), bytes, fd.as_fd(), 0, writable) };
        if let Err(e) = mapped {
            places.free.push(position);
            return Err(e);
        }
        places.by_id.insert(extent, Occupied { position, fd });
        self.ids[position as usize].store(extent.0, Ordering::Release);
        Ok(position)
    }

    /// Bytes of a read-only copy: what is mapped beyond the end of a file is a fault.
    fn length(&self, fd: &OwnedFd) -> io::Result<usize> {
        let bytes = usize::try_from(nix::sys::stat::fstat(fd)?.st_size).unwrap_or(0);
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "a read-only copy is no part of an extent");
        Some(bytes).filter(|b| *b > 0 && *b <= self.extent_bytes).ok_or_else(wrong)
    }

    /// The position that page `page` of the range lies in.
    fn position_of(&self, page: u32) -> Position {
        (((page as usize) << crate::attention::PAGE_SHIFT) / self.extent_bytes) as Position
    }

    /// An entry of a table names the block at this page.
    #[inline]
    pub fn name(&self, page: u32) {
        self.named[self.position_of(page) as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// An entry of a table names it no more.
    pub fn unname(&self, page: u32) {
        let position = self.position_of(page);
        // Release and Acquire: whatever was done in the place by way of that entry is done before the place goes.
        if self.named[position as usize].fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let mut places = self.places();
        let unnamed = self.named[position as usize].load(Ordering::Acquire) == 0;
        if unnamed && places.left.remove(&position) {
            self.clear(&mut places, position);
        }
    }

    /// Unmaps an extent and closes its descriptor. Whether it is not mapped here any more, as far as the arena goes.
    pub fn unmap(&self, extent: ExtentId) -> bool {
        let mut places = self.places();
        let Some(gone) = places.by_id.remove(&extent) else { return true };
        let Occupied { position, fd } = gone;
        if self.named[position as usize].load(Ordering::Acquire) == 0 {
            self.ids[position as usize].store(0, Ordering::Release);
            self.clear(&mut places, position);
            return true;
        }
        // SAFETY: the place was occupied by this extent alone. Whoever uses it by way of a table finds memory there at every
        // moment: the kernel replaces a mapping at once.
        let zeros = unsafe { map_private(self.at(position), self.extent_bytes) };
        if zeros.is_err() {
            places.by_id.insert(extent, Occupied { position, fd });
            return false;
        }
        self.ids[position as usize].store(0, Ordering::Release);
        places.left.insert(position);
        true
    }

    fn at(&self, position: Position) -> *mut u8 {
        self.base().wrapping_add(position as usize * self.extent_bytes)
    }

    /// Makes a place that nobody uses free.
    fn clear(&self, places: &mut Places, position: Position) {
        // In a forked child the extents are not mapped, and something else may be where they were.
        if std::process::id() != self.made_by {
            return;
        }
        // No extent is there, and no table names a block of it.
        let reserved = reserve(Some(self.at(position)), self.extent_bytes);
        if reserved.is_ok() {
            places.free.push(position);
        }
    }

    /// A descriptor of the extent, for a device's driver.
    pub fn descriptor(&self, extent: ExtentId) -> io::Result<OwnedFd> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the extent is not mapped");
        self.places().by_id.get(&extent).ok_or_else(gone)?.fd.try_clone()
    }

    /// Maps `bytes` bytes from `offset` of an extent at `address` too, for a view.
    ///
    /// # Safety
    /// `address..address + bytes` is the caller's, and nothing refers to what was mapped there.
    pub unsafe fn alias(
        &self,
        extent: ExtentId,
        offset: usize,
        bytes: usize,
        address: *mut u8,
        writable: bool,
    ) -> io::Result<()> {
        let places = self.places();
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the extent is not mapped");
        let fd = places.by_id.get(&extent).ok_or_else(gone)?.fd.as_fd();
        // SAFETY: passed on to the caller.
        unsafe { map_fixed(address, bytes, fd, offset, writable) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // In a forked child the extents are not mapped, and something else may be where they were.
        if std::process::id() != self.made_by {
            return;
        }
        // SAFETY: the range was reserved by this arena and nothing outlives it that points into it.
        unsafe { libc::munmap(self.base().cast(), self.bytes) };
    }
}

/// A private range without access and without memory: anywhere, or over what is at `at` now.
fn reserve(at: Option<*mut u8>, bytes: usize) -> io::Result<NonNull<u8>> {
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let at = at.unwrap_or(std::ptr::null_mut());
    // SAFETY: without an address the kernel chooses free addresses; with one, the caller owns what is there.
    let got = unsafe { libc::mmap(at.cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
    pointer(got)
}

/// A private range that reads as zero and must not be written: what a view is before blocks are in it.
///
/// # Safety
/// With an address, the caller owns `at..at + bytes` and nothing refers to what was mapped there.
pub(super) unsafe fn map_zero(at: Option<*mut u8>, bytes: usize, replace: bool) -> io::Result<NonNull<u8>> {
    let place = match (at, replace) {
        (None, _) => 0,
        (Some(_), true) => libc::MAP_FIXED,
        (Some(_), false) => libc::MAP_FIXED_NOREPLACE,
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | place;
    let at = at.unwrap_or(std::ptr::null_mut());
    // SAFETY: the caller owns what is at the address, or there is nothing (NOREPLACE), or the kernel chooses.
    let got = unsafe { libc::mmap(at.cast(), bytes, libc::PROT_READ, flags, -1, 0) };
    let got = pointer(got)?;
    // SAFETY: the range was just mapped. A child has no use for it.
    unsafe { libc::madvise(got.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
    Ok(got)
}

/// Makes `at..at + bytes` mappings of their own, which lie in larger ones perhaps: what is mapped over the range afterwards
/// splits nothing, and so needs none of the process's mappings (vm.max_map_count) beyond those that there are then. What is
/// there is not changed: what tells it from its neighbours is advice on reading ahead, which memory has no use for. On an
/// error nothing is different for whoever uses the range.
///
/// # Safety
/// The range is the caller's.
pub(super) unsafe fn set_apart(at: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: passed on to the caller; advice changes no byte.
    match unsafe { libc::madvise(at.cast(), bytes, libc::MADV_RANDOM) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Undoes [`set_apart`]: the kernel may join the range with its neighbours again.
///
/// # Safety
/// The range is the caller's.
pub(super) unsafe fn join_again(at: *mut u8, bytes: usize) {
    // SAFETY: passed on to the caller; advice changes no byte.
    unsafe { libc::madvise(at.cast(), bytes, libc::MADV_NORMAL) };
}

/// Private memory, zero until written, in place of what is at `at`: what a pager falls back to.
///
/// # Safety
/// The caller owns `at..at + bytes` and nothing refers to what was mapped there.
pub(super) unsafe fn map_private(at: *mut u8, bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: passed on to the caller.
    let got = unsafe { libc::mmap(at.cast(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    let got = pointer(got)?;
    // SAFETY: the range was just mapped. A child has no use for it.
    unsafe { libc::madvise(got.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
    Ok(())
}

/// Changes what may be done with a range.
///
/// # Safety
/// The range is the caller's.
pub(super) unsafe fn protect(at: *mut u8, bytes: usize, rights: i32) -> io::Result<()> {
    // SAFETY: passed on to the caller.
    match unsafe { libc::mprotect(at.cast(), bytes, rights) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts private memory with the same bytes in place of what is at `at`: whoever reads there meanwhile finds them at every
/// moment, whoever writes faults until it is done. On an error it is as it was.
///
/// # Safety
/// The range is the caller's, readable, and a mapping of its own.
pub(super) unsafe fn make_private(at: *mut u8, bytes: usize) -> io::Result<()> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses free addresses.
    let copy = pointer(unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags, -1, 0) })?.as_ptr();
    // SAFETY: passed on to the caller. When this returns, no thread writes there any more.
    if let Err(e) = unsafe { protect(at, bytes, libc::PROT_READ) } {
        // SAFETY: mapped above, and known to nobody else.
        unsafe { libc::munmap(copy.cast(), bytes) };
        return Err(e);
    }
    // SAFETY: both ranges are readable, the new one is ours alone, and they differ.
    unsafe { copy.copy_from_nonoverlapping(at, bytes) };
    // SAFETY: as above; the copy takes the place of the range at once.
    let moved = unsafe {
        libc::madvise(copy.cast(), bytes, libc::MADV_DONTFORK);
        libc::mremap(copy.cast(), bytes, bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, at)
    };
    if let Err(e) = pointer(moved) {
        // SAFETY: as above.
        unsafe {
            let _ = protect(at, bytes, rights);
            libc::munmap(copy.cast(), bytes);
        }
        return Err(e);
    }
    Ok(())
}

/// Ends a range of [`map_zero`] and whatever was mapped over it.
///
/// # Safety
/// The caller owns the range and nothing refers to it any more.
pub(super) unsafe fn unmap(at: *mut u8, bytes: usize) {
    // SAFETY: passed on to the caller.
    unsafe { libc::munmap(at.cast(), bytes) };
}

fn pointer(got: *mut libc::c_void) -> io::Result<NonNull<u8>> {
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(got.cast()).ok_or_else(|| io::Error::other("the kernel mapped at address 0"))
}

/// Maps part of a buffer at a fixed address, with all pages present.
///
/// # Safety
/// The caller owns `at..at + bytes` and nothing refers to what was mapped there.
unsafe fn map_fixed(
    at: *mut u8,
    bytes: usize,
    fd: std::os::fd::BorrowedFd<'_>,
    offset: usize,
    writable: bool,
) -> io::Result<()> {
    let prot = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
    // SAFETY: passed on to the caller.
    let got = unsafe { libc::mmap(at.cast(), bytes, prot, flags, fd.as_raw_fd(), offset as libc::off_t) };
    let got = pointer(got)?;
    // SAFETY: the range was just mapped. A child must not hold extents: it would count as a holder of a dma-buf.
    unsafe { libc::madvise(got.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
    // MAP_POPULATE does nothing for a dma-buf: the first touch of each page maps it.
    for page in (0..bytes).step_by(crate::map::page_bytes()) {
        // SAFETY: inside the range that was just mapped readable.
        unsafe { got.as_ptr().add(page).read_volatile() };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: usize = 64 << 10;

    fn memory() -> OwnedFd {
        let fd = nix::sys::memfd::memfd_create(c"extent", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&fd, EXTENT as i64).unwrap();
        fd
    }

    #[test]
    fn a_place_that_tables_name_outlives_its_extent() {
        let arena = Arena::new(2, EXTENT).unwrap();
        let position = arena.map(ExtentId(7), memory(), true).unwrap();
        let at = arena.at(position).wrapping_add(4096);
        // SAFETY: inside the place, which is mapped and ours.
        let (read, write) = (|| unsafe { at.read_volatile() }, |byte: u8| unsafe { at.write_volatile(byte) });
        write(5);
        let page = arena.page(position, 4096);
        arena.name(page);
        arena.name(page);
        assert!(arena.unmap(ExtentId(7)));
        assert_eq!((arena.position(ExtentId(7)), arena.extent_at(position)), (None, None));
        assert_eq!(read(), 0);
        write(6);
        assert_eq!(read(), 6);

        // The next one does not come to lie there as long as an entry names the place.
        arena.unname(page);
        let other = arena.map(ExtentId(8), memory(), true).unwrap();
        assert_ne!(other, position);
        let full = arena.map(ExtentId(9), memory(), true).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::OutOfMemory);
        assert_eq!(read(), 6);
        arena.unname(page);
        assert_eq!(arena.map(ExtentId(9), memory(), true).unwrap(), position);
        assert_eq!(read(), 0);
        assert!(arena.unmap(ExtentId(9)) && arena.unmap(ExtentId(8)) && arena.unmap(ExtentId(7)));
        assert_eq!(arena.places().free.len(), 2);
    }
}
