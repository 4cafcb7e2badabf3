//! What a granted fault costs: the first write into a unit of a pager, over a broker in the same process, beside the bare
//! mappings that it needs. Prints one line of JSON per number of planes; both times are medians in nanoseconds.
//!
//! Run with: `cargo run --release --example pager_cost`

use std::os::fd::AsRawFd;
use std::time::Instant;

use kvbroker::client::{Client, EmbeddedOptions, Pager, PagerOptions, PagerPlane};
use kvbroker::heap::{Heap, Memfd};
use kvbroker::profile::Kv;

const UNITS: usize = 64;
const ROUNDS: usize = 5;

fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times[times.len() / 2]
}

fn granted(planes: usize) -> Result<(u64, usize), kvbroker::client::Error> {
    let plane = |i: usize| {
        let kv = if i % 2 == 0 { Kv::K } else { Kv::V };
        PagerPlane { kv, bytes: 384 * 2048, row: 384, stream_bytes: 0 }
    };
    let all: Vec<_> = (0..planes).map(plane).collect();
    let pool = Client::embedded(EmbeddedOptions { pool_bytes: 128 << 20, extent_bytes: 3 << 20 })?;
    let pager = Pager::new(&all, PagerOptions::default(), move || Ok(pool.clone()))?;
    let unit = pager.unit_bytes(0);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        for u in 0..UNITS.min(384 * 2048 / unit) {
            let start = Instant::now();
            // SAFETY: inside plane 0, which the pager keeps mapped; no reference to it exists.
            unsafe { pager.base().add(u * unit).write_volatile(1) };
            times.push(start.elapsed().as_nanos() as u64);
        }
        pager.clear()?;
    }
    Ok((median(times), unit))
}

fn bare(planes: usize, unit: usize) -> std::io::Result<u64> {
    let buffer = Memfd::new(false).allocate((UNITS * planes * unit) as u64).map_err(std::io::Error::other)?;
    let fd = buffer.fd().ok_or_else(|| std::io::Error::other("a memfd has a descriptor"))?.as_raw_fd();
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let bytes = UNITS * planes * unit;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses the range; what follows maps inside it, and it is unmapped at the end.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        for u in 0..UNITS {
            let start = Instant::now();
            for p in 0..planes {
                let at = base.wrapping_byte_add((p * UNITS + u) * unit);
                let offset = ((u * 37 % UNITS) * planes + p) * unit;
                let (prot, flags) = (
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE,
                );
                // SAFETY: as above; the offset is inside the buffer.
                if unsafe { libc::mmap(at, unit, prot, flags, fd, offset as libc::off_t) } == libc::MAP_FAILED
                {
                    return Err(std::io::Error::last_os_error());
                }
            }
            times.push(start.elapsed().as_nanos() as u64);
        }
        // SAFETY: the range of this round, in which nothing is used any more.
        unsafe { libc::munmap(base, bytes) };
    }
    Ok(median(times))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for planes in [2, 24, 60] {
        let (fault, unit) = granted(planes)?;
        let floor = bare(planes, unit)?;
        println!(
            "{{\"planes\": {planes}, \"unit_bytes\": {unit}, \"fault_ns\": {fault}, \"bare_mmap_ns\": {floor}}}"
        );
    }
    Ok(())
}
