//! ggml's backend interface, versions 2 and 3, as far as a device needs it that owns memory and computes nothing.
//!
//! Owns no state. Invariant: every structure has the layout that ggml 0.26 and 0.27 give it, and 0.25 but for
//! [`BufferTypeFns2`]. It is internal to ggml
//! (`ggml-backend-impl.h`, which no package installs) and has changed before without a new API version: so the host's
//! version is looked up in [`KNOWN`], and [`crate::host`] reads structures made here through the host's own functions
//! before the first one is trusted to it.

use std::ffi::{c_char, c_int, c_void};

/// `GGML_BACKEND_API_VERSION` from 0.26 on.
pub const API_VERSION: c_int = 3;
/// `GGML_BACKEND_API_VERSION` of 0.25, which has buffer types of [`BufferTypeFns2`].
pub const API_VERSION_2: c_int = 2;
/// Versions of ggml (major and minor) that have this layout. `scripts/llama` runs all of them.
pub const KNOWN: &[(u32, u32)] = &[(0, 25), (0, 26), (0, 27)];
/// `GGML_BACKEND_DEVICE_TYPE_GPU`: the only type to which llama.cpp gives KV caches without being asked.
pub const DEVICE_TYPE_GPU: c_int = 1;
/// `GGML_STATUS_SUCCESS`.
pub const STATUS_SUCCESS: c_int = 0;
/// `GGML_STATUS_FAILED`.
pub const STATUS_FAILED: c_int = -1;
const MAX_DIMS: usize = 4;
const MAX_OP_PARAMS: usize = 64;
const MAX_SRC: usize = 10;
const MAX_NAME: usize = 64;

/// A function that this device does not offer.
pub type Absent = Option<unsafe extern "C" fn()>;

/// `ggml_tensor`.
#[repr(C)]
pub struct Tensor {
    pub kind: c_int,
    pub buffer: *mut Buffer,
    pub ne: [i64; MAX_DIMS],
    pub nb: [usize; MAX_DIMS],
    pub op: c_int,
    pub op_params: [i32; MAX_OP_PARAMS / 4],
    pub flags: i32,
    pub src: [*mut Tensor; MAX_SRC],
    pub view_src: *mut Tensor,
    pub view_offs: usize,
    pub data: *mut c_void,
    pub name: [c_char; MAX_NAME],
    pub extra: *mut c_void,
    pub padding: [c_char; 8],
}

/// `ggml_backend_buffer_type_i`.
#[repr(C)]
pub struct BufferTypeFns {
    pub get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub alloc_buffer_n: unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, c_int) -> *mut Buffer,
    pub get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub get_max_size: Absent,
    pub get_alloc_size: Absent,
    pub get_alloc_size_n: Absent,
    pub is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
}

/// `ggml_backend_buffer_type_i` of API version 2: only a size is told, never the tensors.
#[repr(C)]
pub struct BufferTypeFns2 {
    pub get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub get_max_size: Absent,
    pub get_alloc_size: Absent,
    pub is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
}

/// `ggml_backend_buffer_type`, whose functions depend on the API version. Read by the host alone; here only its address
/// is used.
#[repr(C)]
pub struct BufferType<Fns = BufferTypeFns> {
    pub fns: Fns,
    pub device: *mut Device,
    pub context: *mut c_void,
}

/// `ggml_backend_buffer_i`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferFns {
    pub free_buffer: unsafe extern "C" fn(*mut Buffer),
    pub get_base: unsafe extern "C" fn(*mut Buffer) -> *mut c_void,
    pub init_tensor: Absent,
    pub memset_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize),
    pub set_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize),
    pub get_tensor: unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize),
    pub set_tensor_2d: Absent,
    pub get_tensor_2d: Absent,
    pub cpy_tensor: Option<unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut Tensor) -> bool>,
    pub clear: unsafe extern "C" fn(*mut Buffer, u8),
    pub reset: Absent,
}

/// `ggml_backend_buffer`. Made and deleted by the host.
#[repr(C)]
pub struct Buffer {
    pub fns: BufferFns,
    pub kind: *mut BufferType,
    pub context: *mut c_void,
    pub size: usize,
    pub usage: c_int,
}

/// `ggml_backend_i`.
#[repr(C)]
pub struct BackendFns {
    pub get_name: unsafe extern "C" fn(*mut Backend) -> *const c_char,
    pub free: unsafe extern "C" fn(*mut Backend),
    pub set_tensor_async: Absent,
    pub get_tensor_async: Absent,
    pub set_tensor_2d_async: Absent,
    pub get_tensor_2d_async: Absent,
    pub cpy_tensor_async: Absent,
    pub synchronize: Absent,
    pub graph_plan_create: Absent,
    pub graph_plan_free: Absent,
    pub graph_plan_update: Absent,
    pub graph_plan_compute: Absent,
    pub graph_compute: unsafe extern "C" fn(*mut Backend, *mut c_void) -> c_int,
    pub event_record: Absent,
    pub event_wait: Absent,
    pub graph_optimize: Absent,
}

/// `ggml_backend`.
#[repr(C)]
pub struct Backend {
    pub guid: *const [u8; 16],
    pub fns: BackendFns,
    pub device: *mut Device,
    pub context: *mut c_void,
}

/// `ggml_backend_dev_caps`.
#[repr(C)]
#[derive(Default)]
pub struct Caps {
    pub asynchronous: bool,
    pub host_buffer: bool,
    pub buffer_from_host_ptr: bool,
    pub events: bool,
    pub mmap_support: bool,
}

/// `ggml_backend_dev_props`.
#[repr(C)]
pub struct Props {
    pub name: *const c_char,
    pub description: *const c_char,
    pub memory_free: usize,
    pub memory_total: usize,
    pub kind: c_int,
    pub device_id: *const c_char,
    pub caps: Caps,
}

/// `ggml_backend_device_i`.
#[repr(C)]
pub struct DeviceFns {
    pub get_name: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub get_description: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub get_memory: unsafe extern "C" fn(*mut Device, *mut usize, *mut usize),
    pub get_type: unsafe extern "C" fn(*mut Device) -> c_int,
    pub get_props: unsafe extern "C" fn(*mut Device, *mut Props),
    pub init_backend: unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend,
    pub get_buffer_type: unsafe extern "C" fn(*mut Device) -> *mut BufferType,
    pub get_host_buffer_type: Absent,
    pub buffer_from_host_ptr: Absent,
    pub supports_op: unsafe extern "C" fn(*mut Device, *const Tensor) -> bool,
    pub supports_buft: unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool,
    pub offload_op: Absent,
    pub event_new: Absent,
    pub event_free: Absent,
    pub event_synchronize: Absent,
}

/// `ggml_backend_device`.
#[repr(C)]
pub struct Device {
    pub fns: DeviceFns,
    pub reg: *mut Reg,
    pub context: *mut c_void,
}

/// `ggml_backend_reg_i`.
#[repr(C)]
pub struct RegFns {
    pub get_name: unsafe extern "C" fn(*mut Reg) -> *const c_char,
    pub get_device_count: unsafe extern "C" fn(*mut Reg) -> usize,
    pub get_device: unsafe extern "C" fn(*mut Reg, usize) -> *mut Device,
    pub get_proc_address: unsafe extern "C" fn(*mut Reg, *const c_char) -> *mut c_void,
}

/// `ggml_backend_reg`.
#[repr(C)]
pub struct Reg {
    pub api_version: c_int,
    pub fns: RegFns,
    pub context: *mut c_void,
}

/// `ggml_init_params`.
#[repr(C)]
pub struct InitParams {
    pub mem_size: usize,
    pub mem_buffer: *mut c_void,
    pub no_alloc: bool,
}

impl Tensor {
    /// Its name, up to the terminator.
    pub fn name(&self) -> String {
        let bytes: Vec<u8> = self.name.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
