//! The device: what llama.cpp sees of this library.
//!
//! Owns the connection that tells how much memory there is. Invariants: it is of type GPU, because llama.cpp puts KV
//! caches on no other kind; it supports no operation, so nothing is ever computed on it and weights stay with the CPU;
//! it offers no host buffer type, so that the CPU keeps its repacked weights.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock};

use kvbroker::client::{Client, Error};
use kvbroker::profile::Profile;

use crate::abi::{
    API_VERSION, API_VERSION_2, Backend, BackendFns, BufferType, BufferTypeFns, BufferTypeFns2, Caps,
    DEVICE_TYPE_GPU, Device, DeviceFns, Props, Reg, RegFns, STATUS_FAILED, Tensor,
};
use crate::host::Host;
use crate::{buffer, extension, warn};

/// Alignment of tensors in a buffer, in bytes: a cache line. Planes begin on pages anyway.
pub const ALIGNMENT: usize = 64;
/// What llama.cpp's own fitting (`--fit`, on by default) wants to leave free on every device, in bytes. It counts KV in
/// host memory, which ours is, against the host and not against this device, so it finds nothing here that it could
/// shrink; and where a device has less than this free, it then divides by zero (ggml 0.26 and 0.27: SIGFPE at the start,
/// run). So as much is added to what the broker has.
const FIT_MARGIN: u64 = 1 << 30;
const GUID: [u8; 16] = *b"kvbroker-ggml-01";
const C_NAME: &CStr = c"KVBROKER";
const C_DEVICE: &CStr = c"KVBROKER0";
const C_ID: &CStr = c"kvbroker";
const C_DESCRIPTION: &CStr = c"KV cache memory of kvbroker (computes nothing)";

/// What there is of this library in a process.
pub struct Plugin {
    pub host: Host,
    main: Mutex<Client>,
    embedded: bool,
    device: *mut Device,
    kind: *mut BufferType,
}

// SAFETY: the three structures are written once, before anybody has their address, and only read afterwards.
unsafe impl Send for Plugin {}
// SAFETY: as for Send.
unsafe impl Sync for Plugin {}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

/// The plugin, in functions that ggml only calls after it has been initialised.
pub fn plugin() -> &'static Plugin {
    PLUGIN.get().expect("ggml has the address of these functions from the plugin alone")
}

impl Plugin {
    /// Makes everything, and lets the host read it.
    pub fn start(host: Host, main: Client) -> Result<*mut Reg, String> {
        let embedded = main.event_fd().is_none();
        let leak = |b: Box<Reg>| Box::into_raw(b);
        let reg = leak(Box::new(reg(host.api_version, 1)));
        let device = Box::into_raw(Box::new(Device { fns: DEVICE, reg, context: std::ptr::null_mut() }));
        let kind = buffer_type(host.api_version, device);
        let plugin = Plugin { host, main: Mutex::new(main), embedded, device, kind };
        if PLUGIN.set(plugin).is_err() {
            return Err("it is loaded already".into());
        }
        // SAFETY: complete structures that are never freed.
        unsafe { host.check_device(reg, device, kind, || buffer::plain(kind, 4096)) }?;
        Ok(reg)
    }

    fn main(&self) -> Client {
        self.main.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// A client for one buffer: a connection of its own, so that none waits for another's. An embedded pool has one
    /// client, which is the pool.
    pub fn connect(&self) -> Result<Client, Error> {
        if self.embedded { Ok(self.main()) } else { Client::connect() }
    }

    /// Bytes that can be granted now, and all, as ggml is told: see [`FIT_MARGIN`].
    fn memory(&self) -> (usize, usize) {
        let (free, total) = self.pool();
        ((free + FIT_MARGIN) as usize, (total + FIT_MARGIN) as usize)
    }

    /// Bytes that can be granted now, and all.
    pub fn pool(&self) -> (u64, u64) {
        let client = self.main();
        let info = client.info();
        let total = info.extent_bytes * u64::from(info.extents);
        let free = free_bytes(&client).or_else(|_| {
            let again = Client::connect()?;
            let free = free_bytes(&again);
            *self.main.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = again;
            free
        });
        (free.unwrap_or(0), total)
    }
}

/// What could be granted in whole extents.
fn free_bytes(client: &Client) -> Result<u64, Error> {
    let page = kvbroker::map::page_bytes() as u32;
    let profile =
        Profile::uniform("free memory", "", 1, page, 0, 1).map_err(|e| Error::Invalid(e.to_string()))?;
    Ok(client.profile(&profile)?.room()?.free * u64::from(page))
}

/// The API version of the host, as far as it is known.
pub fn api_version() -> c_int {
    PLUGIN.get().map_or(API_VERSION, |p| p.host.api_version)
}

/// A registry entry with so many devices.
pub fn reg(api_version: c_int, devices: usize) -> Reg {
    let context = std::ptr::without_provenance_mut(devices);
    Reg {
        api_version,
        fns: RegFns {
            get_name: reg_name,
            get_device_count: reg_count,
            get_device: reg_device,
            get_proc_address: reg_proc,
        },
        context,
    }
}

unsafe extern "C" fn reg_name(_: *mut Reg) -> *const c_char {
    C_NAME.as_ptr()
}

unsafe extern "C" fn reg_count(reg: *mut Reg) -> usize {
    // SAFETY: ggml passes the registry entry that it was given.
    unsafe { (*reg).context as usize }
}

unsafe extern "C" fn reg_device(_: *mut Reg, _: usize) -> *mut Device {
    PLUGIN.get().map_or(std::ptr::null_mut(), |p| p.device)
}

unsafe extern "C" fn reg_proc(_: *mut Reg, name: *const c_char) -> *mut c_void {
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: ggml passes a C string.
    extension::find(unsafe { CStr::from_ptr(name) })
}

const DEVICE: DeviceFns = DeviceFns {
    get_name: device_name,
    get_description: device_description,
    get_memory: device_memory,
    get_type: device_type,
    get_props: device_props,
    init_backend,
    get_buffer_type: device_buffer_type,
    get_host_buffer_type: None,
    buffer_from_host_ptr: None,
    supports_op,
    supports_buft,
    offload_op: None,
    event_new: None,
    event_free: None,
    event_synchronize: None,
};

unsafe extern "C" fn device_name(_: *mut Device) -> *const c_char {
    C_DEVICE.as_ptr()
}

unsafe extern "C" fn device_description(_: *mut Device) -> *const c_char {
    C_DESCRIPTION.as_ptr()
}

unsafe extern "C" fn device_memory(_: *mut Device, free: *mut usize, total: *mut usize) {
    let (f, t) = plugin().memory();
    // SAFETY: ggml passes the addresses of two numbers.
    unsafe { (*free, *total) = (f, t) }
}

unsafe extern "C" fn device_type(_: *mut Device) -> c_int {
    DEVICE_TYPE_GPU
}

unsafe extern "C" fn device_props(_: *mut Device, props: *mut Props) {
    let (memory_free, memory_total) = plugin().memory();
    // Without mmap_support llama.cpp would read weights into memory instead of mapping the file.
    let caps = Caps { mmap_support: true, ..Caps::default() };
    let all = Props {
        name: C_DEVICE.as_ptr(),
        description: C_DESCRIPTION.as_ptr(),
        memory_free,
        memory_total,
        kind: DEVICE_TYPE_GPU,
        // The same for every copy of this library, so that llama.cpp uses one.
        device_id: C_ID.as_ptr(),
        caps,
    };
    // SAFETY: ggml passes the address of a Props.
    unsafe { props.write(all) }
}

unsafe extern "C" fn device_buffer_type(_: *mut Device) -> *mut BufferType {
    plugin().kind
}

unsafe extern "C" fn supports_op(_: *mut Device, _: *const Tensor) -> bool {
    false
}

unsafe extern "C" fn supports_buft(_: *mut Device, kind: *mut BufferType) -> bool {
    kind == plugin().kind
}

/// A buffer type as the host's API version has it. Never freed.
fn buffer_type(api_version: c_int, device: *mut Device) -> *mut BufferType {
    let context = std::ptr::null_mut();
    if api_version == API_VERSION_2 {
        let fns = BufferTypeFns2 {
            get_name: kind_name,
            alloc_buffer: buffer::alloc,
            get_alignment: kind_alignment,
            get_max_size: None,
            get_alloc_size: None,
            is_host: kind_is_host,
        };
        return Box::into_raw(Box::new(BufferType { fns, device, context })).cast();
    }
    let fns = BufferTypeFns {
        get_name: kind_name,
        alloc_buffer: buffer::alloc,
        alloc_buffer_n: buffer::alloc_n,
        get_alignment: kind_alignment,
        get_max_size: None,
        get_alloc_size: None,
        get_alloc_size_n: None,
        is_host: kind_is_host,
    };
    Box::into_raw(Box::new(BufferType { fns, device, context }))
}

unsafe extern "C" fn kind_name(_: *mut BufferType) -> *const c_char {
    C_NAME.as_ptr()
}

unsafe extern "C" fn kind_alignment(_: *mut BufferType) -> usize {
    ALIGNMENT
}

unsafe extern "C" fn kind_is_host(_: *mut BufferType) -> bool {
    true
}

/// A stream of a context. It remembers how many KV buffers there had been, to say so when none came.
unsafe extern "C" fn init_backend(device: *mut Device, _: *const c_char) -> *mut Backend {
    let fns = BackendFns {
        get_name: backend_name,
        free: backend_free,
        set_tensor_async: None,
        get_tensor_async: None,
        set_tensor_2d_async: None,
        get_tensor_2d_async: None,
        cpy_tensor_async: None,
        synchronize: None,
        graph_plan_create: None,
        graph_plan_free: None,
        graph_plan_update: None,
        graph_plan_compute: None,
        graph_compute: backend_compute,
        event_record: None,
        event_wait: None,
        graph_optimize: None,
    };
    let context = std::ptr::without_provenance_mut(buffer::buffers_made() as usize);
    Box::into_raw(Box::new(Backend { guid: &GUID, fns, device, context }))
}

unsafe extern "C" fn backend_name(_: *mut Backend) -> *const c_char {
    C_NAME.as_ptr()
}

unsafe extern "C" fn backend_free(backend: *mut Backend) {
    // SAFETY: ggml frees a backend once; it is the box that `init_backend` made.
    let backend = unsafe { Box::from_raw(backend) };
    if buffer::buffers_made() == backend.context as u64 {
        crate::info(
            "a context has ended that had no KV cache in the pool: --no-kv-offload, n_gpu_layers 0, a model without one, or a dry run (--fit)",
        );
    }
}

unsafe extern "C" fn backend_compute(_: *mut Backend, _: *mut c_void) -> c_int {
    warn("ggml wants to compute on this device, which supports no operation");
    STATUS_FAILED
}
