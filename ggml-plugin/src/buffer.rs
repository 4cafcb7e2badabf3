//! Buffers: what llama.cpp allocates here, and the functions that ggml calls on it.
//!
//! Owns the list of KV buffers of this process. Invariants: a buffer that holds the K and V of layers is a pager, one
//! plane per tensor; whatever else comes is private memory and said so; ggml's `clear` with 0 gives every block back
//! instead of writing zeros.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use kvbroker::client::{Notice, Pager, PagerOptions, PagerPlane, PagerStats};
use kvbroker::profile::Kv;
use kvbroker::size::Size;

use crate::abi::{Buffer, BufferFns, BufferType, STATUS_SUCCESS, Tensor};
use crate::device::plugin;
use crate::host::text;
use crate::{info, warn};

/// Bytes that stand for a row where only a size is known.
const UNKNOWN_ROW: usize = 512;

/// A plane's geometry, for calls that speak of cells.
#[derive(Debug, Clone, Copy)]
pub struct Cells {
    /// Offset of the plane in the buffer.
    pub start: usize,
    pub row: usize,
    pub cells: usize,
    pub streams: usize,
}

/// A KV buffer.
pub struct KvBuffer {
    pub id: u64,
    pub pager: Pager,
    pub planes: Vec<Cells>,
}

enum Memory {
    Paged(Arc<KvBuffer>),
    Plain { base: *mut c_void, bytes: usize },
}

static BUFFERS: Mutex<Vec<Arc<KvBuffer>>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The KV buffers that there are.
pub fn buffers() -> MutexGuard<'static, Vec<Arc<KvBuffer>>> {
    BUFFERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// How many KV buffers there have been.
pub fn buffers_made() -> u64 {
    NEXT.load(Ordering::Relaxed) - 1
}

const FNS: BufferFns = BufferFns {
    free_buffer: free,
    get_base: base,
    init_tensor: None,
    memset_tensor,
    set_tensor,
    get_tensor,
    set_tensor_2d: None,
    get_tensor_2d: None,
    cpy_tensor: None,
    clear,
    reset: None,
};

/// K or V by a tensor's name: `cache_k_l3`, or with a tag, `cache_swa_v_l3`.
fn side(name: &str) -> Option<Kv> {
    let rest = name.strip_prefix("cache_")?;
    let (head, layer) = rest.rsplit_once("_l")?;
    layer.parse::<u32>().ok()?;
    match head.rsplit('_').next()? {
        "k" => Some(Kv::K),
        "v" => Some(Kv::V),
        _ => None,
    }
}

/// Tensors that have no place yet, in order.
///
/// # Safety
/// `tensors` points at `count` valid tensors of the host.
unsafe fn unplaced(tensors: *mut *mut Tensor, count: c_int) -> Vec<*mut Tensor> {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: as the caller says.
    unsafe {
        let all = (0..count).map(|i| *tensors.add(i));
        all.filter(|t| (**t).view_src.is_null() && (**t).data.is_null()).collect()
    }
}

pub unsafe extern "C" fn alloc_n(
    kind: *mut BufferType,
    tensors: *mut *mut Tensor,
    count: c_int,
) -> *mut Buffer {
    // SAFETY: ggml hands over valid tensors.
    let fresh = unsafe { unplaced(tensors, count) };
    // SAFETY: as above.
    let names: Vec<String> = fresh.iter().map(|t| unsafe { (**t).name() }).collect();
    let sides: Option<Vec<Kv>> = names.iter().map(|n| side(n)).collect();
    let (buffer, places) = match sides.filter(|s| !s.is_empty()) {
        // SAFETY: as above.
        Some(sides) => unsafe { paged(kind, &fresh, &sides) },
        // SAFETY: as above.
        None => unsafe { plain_n(kind, &fresh, &names) },
    };
    if buffer.is_null() {
        return buffer;
    }
    let host = plugin().host;
    // SAFETY: the host's own functions on its own tensors; each place is inside the buffer and has room for its tensor.
    let placed = unsafe {
        let base = base(buffer).cast::<u8>();
        let mut placed = fresh.iter().zip(&places).all(|(t, at)| {
            (host.ggml_backend_tensor_alloc)(buffer, *t, base.wrapping_add(*at).cast()) == STATUS_SUCCESS
        });
        for i in 0..usize::try_from(count).unwrap_or(0) {
            let t = *tensors.add(i);
            if placed && !(*t).view_src.is_null() && (*t).buffer.is_null() {
                placed = (host.ggml_backend_view_init)(t) == STATUS_SUCCESS;
            }
        }
        placed
    };
    if !placed {
        warn("a tensor of the KV cache could not be placed");
        // SAFETY: made above, and nothing uses it.
        unsafe { (host.ggml_backend_buffer_free)(buffer) };
        return std::ptr::null_mut();
    }
    buffer
}

/// A pager with one plane per tensor.
///
/// # Safety
/// The tensors are valid.
unsafe fn paged(kind: *mut BufferType, tensors: &[*mut Tensor], sides: &[Kv]) -> (*mut Buffer, Vec<usize>) {
    let host = plugin().host;
    let mut planes = Vec::with_capacity(tensors.len());
    let mut cells = Vec::with_capacity(tensors.len());
    let mut kinds: Vec<String> = Vec::new();
    for (t, kv) in tensors.iter().zip(sides) {
        // SAFETY: the tensors are valid, and ggml_nbytes and ggml_type_name only read.
        let (t, bytes, name) =
            unsafe { (&**t, (host.ggml_nbytes)(*t), text((host.ggml_type_name)((**t).kind))) };
        let (row, streams) = (t.nb[1].max(1), usize::try_from(t.ne[2]).unwrap_or(1).max(1));
        planes.push(PagerPlane {
            kv: *kv,
            bytes,
            row,
            stream_bytes: if streams > 1 { bytes / streams } else { 0 },
        });
        cells.push(Cells { start: 0, row, cells: usize::try_from(t.ne[1]).unwrap_or(0), streams });
        if !kinds.contains(&name) {
            kinds.push(name);
        }
    }
    let (k, v) = (planes[0].row, planes.get(1).map_or(0, |p| p.row));
    let layers = sides.iter().filter(|s| **s == Kv::K).count();
    let name = format!("{layers} layers, {k}+{v} bytes");
    let Some(mut buffer) = pager(&planes, name, kinds.join("/")) else {
        return (std::ptr::null_mut(), Vec::new());
    };
    let base = buffer.pager.base() as usize;
    let places: Vec<usize> = (0..planes.len()).map(|i| buffer.pager.plane(i) as usize - base).collect();
    for (cell, at) in cells.iter_mut().zip(&places) {
        cell.start = *at;
    }
    buffer.planes = cells;
    // SAFETY: `kind` is ours.
    (unsafe { enter(kind, buffer) }, places)
}

fn pager(planes: &[PagerPlane], name: String, element: String) -> Option<KvBuffer> {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut options = match PagerOptions::from_env() {
        Ok(options) => options,
        Err(e) => {
            warn(&e.to_string());
            return None;
        }
    };
    options.label = format!("llama.cpp kv {id}");
    options.name = name;
    options.element = element;
    options.notify = Some(Arc::new(move |notice: &Notice| tell(id, notice)));
    let total: usize = planes.iter().map(|p| p.bytes).sum();
    match Pager::new(planes, options, || plugin().connect()) {
        Ok(pager) => {
            let stats = pager.stats();
            info(&format!(
                "KV buffer {id}: {} in {} units of {}, granted as they are written",
                Size::from_bytes(total as u64),
                stats.units,
                Size::from_bytes(stats.block_bytes as u64),
            ));
            Some(KvBuffer { id, pager, planes: Vec::new() })
        }
        Err(e) => {
            warn(&format!("no KV buffer of {}: {e}", Size::from_bytes(total as u64)));
            None
        }
    }
}

/// # Safety
/// `kind` is this library's.
unsafe fn enter(kind: *mut BufferType, buffer: KvBuffer) -> *mut Buffer {
    let bytes = buffer.pager.bytes();
    let buffer = Arc::new(buffer);
    buffers().push(buffer.clone());
    // SAFETY: as the caller says.
    unsafe { hand_out(kind, Memory::Paged(buffer), bytes) }
}

/// # Safety
/// `kind` is this library's.
unsafe fn hand_out(kind: *mut BufferType, memory: Memory, bytes: usize) -> *mut Buffer {
    let context = Box::into_raw(Box::new(memory));
    // SAFETY: the functions fit the context, which `free` takes back.
    unsafe { (plugin().host.ggml_backend_buffer_init)(kind, FNS, context.cast(), bytes) }
}

fn tell(id: u64, notice: &Notice) {
    match notice {
        Notice::Transposed { bytes } => warn(&format!(
            "flash attention is off, so V is kept in columns and one token touches a unit of every row: KV buffer {id} will soon hold all of its {}. The answers are right; run with flash attention (-fa on) to hold only what is written",
            Size::from_bytes(*bytes as u64)
        )),
        Notice::Waiting(why) => warn(&format!("KV buffer {id} waits for a block: {why}")),
        Notice::Spilled { bytes, why } => warn(&format!(
            "KV buffer {id} has {} in private memory, outside the pool: {why}",
            Size::from_bytes(*bytes)
        )),
        Notice::WantedBack { needed, spill } => warn(&format!(
            "a session of higher priority needs the memory of KV buffer {id}, and the broker takes it before long: this process ends then. With KVBROKER_SPILL={}M it would go on in memory of its own ({} is set)",
            needed.div_ceil(1 << 20),
            Size::from_bytes(*spill)
        )),
        Notice::Taken => {
            warn(&format!("the broker has taken KV buffer {id} for a session of higher priority"))
        }
        Notice::Lost => warn(&format!(
            "the broker has gone; KV buffer {id} keeps what it has, and asks the next broker when it needs more"
        )),
        Notice::Resumed => warn(&format!("KV buffer {id} is granted blocks by another broker now")),
        _ => {}
    }
}

/// Private memory for what is no KV cache.
///
/// # Safety
/// The tensors are valid.
unsafe fn plain_n(
    kind: *mut BufferType,
    tensors: &[*mut Tensor],
    names: &[String],
) -> (*mut Buffer, Vec<usize>) {
    let (mut at, mut places) = (0usize, Vec::new());
    for t in tensors {
        places.push(at);
        // SAFETY: only reads a valid tensor.
        let bytes = unsafe { (plugin().host.ggml_nbytes)(*t) };
        at = at.saturating_add(bytes).next_multiple_of(crate::device::ALIGNMENT);
    }
    if at > 0 {
        warn(&format!(
            "{} for {}{} is no attention KV cache (the state of a recurrent model is not): it is private memory, outside the pool",
            Size::from_bytes(at as u64),
            names.first().map_or("tensors without a name", String::as_str),
            if names.len() > 1 { " and others" } else { "" },
        ));
    }
    // SAFETY: `kind` is ours.
    (unsafe { plain(kind, at) }, places)
}

/// # Safety
/// `kind` is this library's.
pub unsafe fn plain(kind: *mut BufferType, bytes: usize) -> *mut Buffer {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses free addresses.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes.max(1), prot, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        warn(&format!("no {bytes} bytes of private memory: {}", std::io::Error::last_os_error()));
        return std::ptr::null_mut();
    }
    // SAFETY: as the caller says.
    unsafe { hand_out(kind, Memory::Plain { base, bytes }, bytes) }
}

/// A buffer of which nothing but the size is known: one plane.
pub unsafe extern "C" fn alloc(kind: *mut BufferType, bytes: usize) -> *mut Buffer {
    let plane = PagerPlane { kv: Kv::K, bytes, row: UNKNOWN_ROW, stream_bytes: 0 };
    match pager(&[plane], "unknown planes".into(), String::new()) {
        // SAFETY: `kind` is ours.
        Some(buffer) => unsafe { enter(kind, buffer) },
        None => std::ptr::null_mut(),
    }
}

/// # Safety
/// `buffer` is a buffer of this library that has not been freed.
unsafe fn memory<'a>(buffer: *mut Buffer) -> &'a Memory {
    // SAFETY: the context is the box that `hand_out` made.
    unsafe { &*(*buffer).context.cast::<Memory>() }
}

unsafe extern "C" fn free(buffer: *mut Buffer) {
    // SAFETY: ggml frees a buffer once; the context is the box that `hand_out` made.
    let memory = unsafe { Box::from_raw((*buffer).context.cast::<Memory>()) };
    match *memory {
        Memory::Paged(kv) => {
            let PagerStats { units_held, units, faults, .. } = kv.pager.stats();
            info(&format!("KV buffer {} freed: {units_held} of {units} units held, {faults} faults", kv.id));
            buffers().retain(|b| b.id != kv.id);
        }
        // SAFETY: mapped by `plain`, and nothing uses it any more.
        Memory::Plain { base, bytes } => unsafe {
            libc::munmap(base, bytes.max(1));
        },
    }
}

unsafe extern "C" fn base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: ggml passes a live buffer of this library.
    match unsafe { memory(buffer) } {
        Memory::Paged(kv) => kv.pager.base().cast(),
        Memory::Plain { base, .. } => *base,
    }
}

/// Memory for a part of a tensor before it is written from here: without a fault, and also where the source turns out to
/// be read by a system call.
///
/// # Safety
/// `buffer` is live, `tensor` lies in it, and the part is inside the tensor.
unsafe fn ensure(buffer: *mut Buffer, tensor: *const Tensor, offset: usize, size: usize) -> *mut u8 {
    // SAFETY: as the caller says.
    unsafe {
        let at = (*tensor).data.cast::<u8>().wrapping_add(offset);
        if let Memory::Paged(kv) = memory(buffer) {
            let from = at as usize - kv.pager.base() as usize;
            if let Err(e) = kv.pager.ensure(from..from + size) {
                // The write itself waits for blocks, and says what to do when there are none.
                info(&format!("KV buffer {}: {e}", kv.id));
            }
        }
        at
    }
}

unsafe extern "C" fn memset_tensor(b: *mut Buffer, t: *mut Tensor, value: u8, offset: usize, size: usize) {
    // SAFETY: ggml has checked that the part is inside the tensor.
    unsafe { ensure(b, t, offset, size).write_bytes(value, size) }
}

unsafe extern "C" fn set_tensor(
    b: *mut Buffer,
    t: *mut Tensor,
    from: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as above; the source is the caller's and may lie in the same buffer.
    unsafe { ensure(b, t, offset, size).copy_from(from.cast(), size) }
}

unsafe extern "C" fn get_tensor(
    _: *mut Buffer,
    t: *const Tensor,
    to: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as above; what has not been written reads as zero.
    unsafe { to.cast::<u8>().copy_from((*t).data.cast::<u8>().wrapping_add(offset), size) }
}

unsafe extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: ggml passes a live buffer of this library, and nobody writes to it while it is cleared.
    unsafe {
        if value == 0 {
            if let Memory::Paged(kv) = memory(buffer) {
                match kv.pager.clear() {
                    Ok(()) => return,
                    Err(e) => warn(&format!("KV buffer {} is cleared by writing zeros: {e}", kv.id)),
                }
            }
        }
        base(buffer).cast::<u8>().write_bytes(value, (*buffer).size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_tensors_are_told_by_their_names_and_recurrent_state_is_not_one() {
        assert_eq!(side("cache_k_l0"), Some(Kv::K));
        assert_eq!(side("cache_v_l29"), Some(Kv::V));
        assert_eq!(side("cache_swa_k_l3"), Some(Kv::K));
        for other in ["cache_r_l0", "cache_s_l12", "cache_ple_r_l0", "blk.0.attn_k.weight", "cache_k_lx", ""]
        {
            assert_eq!(side(other), None, "{other}");
        }
    }
}
