//! Calls for programs that know of this library, through `ggml_backend_reg_get_proc_address`. `kvbroker-ggml.h` declares
//! them for C.
//!
//! Owns no state. Invariant: a wrong argument gives -1, never harm to a buffer.

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::sync::Arc;

use crate::buffer::{KvBuffer, buffers};
use crate::info;

/// `struct kvbroker_ggml_stats`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Stats {
    pub id: u64,
    pub bytes: u64,
    pub block_bytes: u64,
    pub units: u64,
    pub units_held: u64,
    pub units_spilled: u64,
    pub faults: u64,
    pub cells: u64,
    pub streams: u64,
}

/// The function called so, or null.
pub fn find(name: &CStr) -> *mut c_void {
    match name.to_bytes() {
        b"kvbroker_ggml_stats" => stats as *mut c_void,
        b"kvbroker_ggml_ensure" => ensure as *mut c_void,
        b"kvbroker_ggml_trim" => trim as *mut c_void,
        _ => std::ptr::null_mut(),
    }
}

/// `int kvbroker_ggml_stats(struct kvbroker_ggml_stats * out, int most)`: the KV buffers of this process, as many as fit;
/// returns how many there are.
unsafe extern "C" fn stats(out: *mut Stats, most: c_int) -> c_int {
    let all = buffers();
    for (i, b) in all.iter().take(usize::try_from(most).unwrap_or(0)).enumerate() {
        let s = b.pager.stats();
        let plane = b.planes.first();
        let one = Stats {
            id: b.id,
            bytes: s.bytes as u64,
            block_bytes: s.block_bytes as u64,
            units: s.units as u64,
            units_held: s.units_held as u64,
            units_spilled: s.units_spilled as u64,
            faults: s.faults,
            cells: plane.map_or(0, |p| p.cells as u64),
            streams: plane.map_or(0, |p| p.streams as u64),
        };
        if !out.is_null() {
            // SAFETY: the caller says that there is room for `most`.
            unsafe { out.add(i).write(one) };
        }
    }
    c_int::try_from(all.len()).unwrap_or(c_int::MAX)
}

fn buffer(id: u64) -> Option<Arc<KvBuffer>> {
    buffers().iter().find(|b| b.id == id).cloned()
}

/// Where cells `from..to` of a stream lie in each plane.
fn parts(buffer: &KvBuffer, stream: u32, from: u64, to: u64) -> Option<Vec<Range<usize>>> {
    let part = |p: &crate::buffer::Cells| {
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        let fits = from <= to && to <= p.cells && (stream as usize) < p.streams;
        let at = |cell: usize| p.start + (stream as usize * p.cells + cell) * p.row;
        fits.then(|| at(from)..at(to))
    };
    let parts: Option<Vec<_>> = buffer.planes.iter().map(part).collect();
    parts.filter(|p| !p.is_empty())
}

/// `int kvbroker_ggml_ensure(uint64_t id, uint32_t stream, uint64_t from, uint64_t to)`: memory for these cells now; 0, or
/// -1 when it cannot be had, with nothing changed.
unsafe extern "C" fn ensure(id: u64, stream: u32, from: u64, to: u64) -> c_int {
    let Some(buffer) = buffer(id) else { return -1 };
    let Some(parts) = parts(&buffer, stream, from, to) else { return -1 };
    for part in parts {
        if let Err(e) = buffer.pager.ensure(part) {
            info(&format!("KV buffer {id}: {e}"));
            return -1;
        }
    }
    0
}

/// `int kvbroker_ggml_trim(uint64_t id, uint32_t stream, uint64_t from, uint64_t to)`: these cells are not needed any more;
/// returns how many units were given back, or -1.
unsafe extern "C" fn trim(id: u64, stream: u32, from: u64, to: u64) -> c_int {
    let Some(buffer) = buffer(id) else { return -1 };
    let Some(parts) = parts(&buffer, stream, from, to) else { return -1 };
    match buffer.pager.trim(&parts) {
        Ok(units) => c_int::try_from(units).unwrap_or(c_int::MAX),
        Err(e) => {
            info(&format!("KV buffer {id}: {e}"));
            -1
        }
    }
}
