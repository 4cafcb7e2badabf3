//! Row `views`: a block that is granted into plane views and given back, against the bare system calls that any view of
//! scattered memory needs: one `mmap` per plane at its address, a touch of each page, and one `mmap` that hides it again.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Duration;

use kvbroker::client::{Client, EmbeddedOptions, OpenOptions, Session};
use kvbroker::profile::{Kv, Profile};
use kvbroker_bench::{Clock, Samples, at_most};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::unistd::ftruncate;

const EXTENT: u64 = 3 << 20;
const PAGE: usize = 4096;
/// Blocks in one sample.
const BLOCKS: usize = 64;

fn main() {
    for (name, layers, row) in [("reference", 24, 512), ("smollm2", 30, 384)] {
        measure(name, layers, row);
    }
}

fn measure(name: &str, layers: u32, row: u32) {
    // 32 tokens make planes of whole pages for SmolLM2; the reference has them with 16 already.
    let per_block = if row * 16 % 4096 == 0 { 16 } else { 32 };
    let profile = Profile::uniform(name, "f16", layers, row, row, per_block).expect("a profile");
    let client = Client::embedded(EmbeddedOptions { pool_bytes: 128 << 20, extent_bytes: EXTENT });
    let client = client.expect("an embedded pool");
    let format = client.profile(&profile).expect("it fits");
    let plane = format.planes(0)[0].row * per_block as usize;
    let planes = layers as usize * 2;
    let tokens = BLOCKS * per_block as usize;
    // The blocks are there beforehand: a grant through the broker is the row `grant`.
    format.reserve(BLOCKS as u32 + 1).expect("the pool has them");
    let mut session = open(&client, &format);
    let mut views = Vec::new();
    for layer in 0..layers as usize {
        for kv in [Kv::K, Kv::V] {
            views.push(session.plane(layer, kv, tokens, None).expect("a view").address as usize);
        }
    }
    let touch = |views: &[usize], from: usize, length: usize| {
        for view in views {
            for page in (from..from + length).step_by(PAGE) {
                // SAFETY: the caller has just mapped this range of the view, writable, and nothing else refers to it.
                unsafe { ((view + page) as *mut u8).write_volatile(1) };
            }
        }
    };
    let mut grant = || {
        for block in 0..BLOCKS {
            session.ensure((block + 1) * per_block as usize).expect("within credit");
            touch(&views, block * plane, plane);
        }
        session.trim(0).expect("given back");
    };
    let file = scattered();
    let bases: Vec<usize> = (0..planes).map(|_| reserve(BLOCKS * plane)).collect();
    let slot = format.slot_bytes();
    let mut bare = || {
        for block in 0..BLOCKS {
            for (i, base) in bases.iter().enumerate() {
                let offset = block * slot + i * plane;
                show(&file, base + block * plane, plane, offset);
            }
            touch(&bases, block * plane, plane);
        }
        for block in 0..BLOCKS {
            bases.iter().for_each(|base| hide(base + block * plane, plane));
        }
    };
    let samples = Samples::interleaved(Clock::Cpu, 30, Duration::from_secs(2), &mut [&mut grant, &mut bare]);
    let each = |side: usize| samples.median(side) / BLOCKS as f64 * 1e6;
    let note = format!(
        "{name}: {planes} planes of {} KiB per block, {:.0} us against {:.0} us; median of {}",
        plane >> 10,
        each(0),
        each(1),
        samples.count()
    );
    at_most(
        format!("views/grant-{name}-memfd"),
        each(0) / each(1),
        1.5,
        format!("a block into plane views / bare mmaps and touches: {note}"),
    );
    bases.iter().for_each(|base| {
        let address = NonNull::new(*base as *mut _).expect("a mapping");
        // SAFETY: the whole range is ours, from `reserve`.
        unsafe { munmap(address, BLOCKS * plane) }.expect("unmapped");
    });
}

fn open(client: &Client, format: &kvbroker::client::ClientProfile) -> Session {
    client.open(format, OpenOptions { zero: false, ..OpenOptions::default() }).expect("a session")
}

/// A file with a pool's size, populated as the broker's extents are.
fn scattered() -> OwnedFd {
    let fd = memfd_create(c"bench", MFdFlags::MFD_CLOEXEC).expect("a memfd");
    ftruncate(&fd, 64 << 20).expect("64 MiB");
    let length = NonZeroUsize::new(64 << 20).expect("not zero");
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a fresh mapping of our own file, wherever the kernel likes.
    let address = unsafe { mmap(None, length, protection, flags, fd.as_fd(), 0) }.expect("mapped");
    // SAFETY: the mapping of the line above, whole.
    unsafe { munmap(address, 64 << 20) }.expect("unmapped");
    fd
}

fn reserve(bytes: usize) -> usize {
    let length = NonZeroUsize::new(bytes).expect("not zero");
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: a fresh range of addresses, wherever the kernel likes.
    let address = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) };
    address.expect("reserved").as_ptr() as usize
}

fn show(fd: &OwnedFd, at: usize, bytes: usize, offset: usize) {
    let length = NonZeroUsize::new(bytes).expect("not zero");
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: the range is part of one that `reserve` gave, so MAP_FIXED replaces nobody else's mapping.
    let address =
        unsafe { mmap(NonZeroUsize::new(at), length, protection, flags, fd.as_fd(), offset as i64) };
    address.expect("mapped");
}

fn hide(at: usize, bytes: usize) {
    let length = NonZeroUsize::new(bytes).expect("not zero");
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
    // SAFETY: as in `show`.
    unsafe { mmap_anonymous(NonZeroUsize::new(at), length, ProtFlags::PROT_NONE, flags) }.expect("hidden");
}
