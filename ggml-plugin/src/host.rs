//! The ggml of the program that has loaded this library.
//!
//! Owns the addresses of its functions. Invariant: a [`Host`] exists only for a ggml whose version is known and that has
//! read structures of [`crate::abi`] as they were written. This library links no ggml of its own: two copies would be two
//! worlds, each with its own registry.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use crate::abi::{
    API_VERSION, API_VERSION_2, Buffer, BufferFns, BufferType, Device, InitParams, KNOWN, Reg, Tensor,
};

macro_rules! host {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// Functions of the host's ggml.
        #[derive(Clone, Copy)]
        pub struct Host {
            /// Of the host's ggml, as its version says.
            pub api_version: c_int,
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Host {
            fn find(library: &Library) -> Result<Self, String> {
                $(
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the name ends with a zero byte.
                    let address = library.symbol(unsafe { CStr::from_ptr(name.as_ptr().cast()) });
                    let Some(address) = address else {
                        return Err(format!("it has no function {}", stringify!($name)));
                    };
                    // SAFETY: the public headers of ggml declare the function with this signature, in every version
                    // of `KNOWN`.
                    let $name = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(address)
                    };
                )*
                Ok(Host { api_version: API_VERSION, $($name,)* })
            }
        }
    };
}

host! {
    ggml_version: fn() -> *const c_char;
    ggml_nbytes: fn(*const Tensor) -> usize;
    ggml_type_name: fn(c_int) -> *const c_char;
    ggml_init: fn(InitParams) -> *mut c_void;
    ggml_free: fn(*mut c_void);
    ggml_new_tensor_3d: fn(*mut c_void, c_int, i64, i64, i64) -> *mut Tensor;
    ggml_view_2d: fn(*mut c_void, *mut Tensor, i64, i64, usize, usize) -> *mut Tensor;
    ggml_set_name: fn(*mut Tensor, *const c_char) -> *mut Tensor;
    ggml_backend_buffer_init: fn(*mut BufferType, BufferFns, *mut c_void, usize) -> *mut Buffer;
    ggml_backend_buffer_free: fn(*mut Buffer);
    ggml_backend_buffer_get_base: fn(*mut Buffer) -> *mut c_void;
    ggml_backend_buffer_get_size: fn(*mut Buffer) -> usize;
    ggml_backend_tensor_alloc: fn(*mut Buffer, *mut Tensor, *mut c_void) -> c_int;
    ggml_backend_view_init: fn(*mut Tensor) -> c_int;
    ggml_backend_buft_get_alignment: fn(*mut BufferType) -> usize;
    ggml_backend_buft_is_host: fn(*mut BufferType) -> bool;
    ggml_backend_buft_get_device: fn(*mut BufferType) -> *mut Device;
    ggml_backend_dev_name: fn(*mut Device) -> *const c_char;
    ggml_backend_dev_type: fn(*mut Device) -> c_int;
    ggml_backend_dev_backend_reg: fn(*mut Device) -> *mut Reg;
    ggml_backend_reg_name: fn(*mut Reg) -> *const c_char;
}

/// Where symbols are looked up.
struct Library(*mut c_void);

impl Library {
    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a handle that dlopen gave, or RTLD_DEFAULT; the name is a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// The loaded library that has ggml: in the global scope, or, where the program has loaded it for itself alone (Python
/// does), among everything that is loaded.
fn libraries() -> Vec<Library> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, names: *mut c_void) -> c_int {
        // SAFETY: the linker hands over a valid entry; `names` is the vector below.
        unsafe {
            let name = (*info).dlpi_name;
            if !name.is_null() && *name != 0 {
                (*names.cast::<Vec<CString>>()).push(CStr::from_ptr(name).to_owned());
            }
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the callback gets the vector and nobody else uses it meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut names).cast()) };
    let open = |name: &CString| {
        // SAFETY: opens what is loaded already, so no code of it runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then_some(Library(handle))
    };
    std::iter::once(Library(libc::RTLD_DEFAULT)).chain(names.iter().filter_map(open)).collect()
}

/// A C string of the host's as text.
///
/// # Safety
/// `text` is null or a C string.
pub unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller says.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Major and minor of a version such as `0.27.0` or `0.27.1-dev`.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

impl Host {
    /// Finds the host's ggml and checks its version. The error says what is wrong with it.
    pub fn load() -> Result<Self, String> {
        let marker = c"ggml_backend_buffer_init";
        let library = libraries().into_iter().find(|l| l.symbol(marker).is_some());
        let mut host = Host::find(&library.ok_or("there is no ggml in this process")?)?;
        // SAFETY: a function without arguments that returns a constant string.
        let version = unsafe { text((host.ggml_version)()) };
        let parsed = parse(&version);
        let known = parsed.is_some_and(|v| KNOWN.contains(&v));
        if parsed.is_some_and(|v| v < (0, 26)) {
            host.api_version = API_VERSION_2;
        }
        let tried = std::env::var_os("KVBROKER_GGML").is_some_and(|v| v == *version.as_str());
        if !known && !tried {
            let list: Vec<String> = KNOWN.iter().map(|(a, b)| format!("{a}.{b}")).collect();
            return Err(format!(
                "this program has ggml {version}, and this plugin was run with {} only, whose internal structures it relies on; KVBROKER_GGML={version} tries it all the same",
                list.join(", ")
            ));
        }
        host.check_tensor().map_err(|what| format!("ggml {version}: {what}"))?;
        Ok(host)
    }

    /// Whether tensors made by the host are read here as they are.
    fn check_tensor(&self) -> Result<(), String> {
        let params = InitParams { mem_size: 64 << 10, mem_buffer: std::ptr::null_mut(), no_alloc: true };
        // SAFETY: as the public headers say; the context is freed before its tensors are out of use here.
        unsafe {
            let context = (self.ggml_init)(params);
            if context.is_null() {
                return Err("no context could be made".into());
            }
            const F16: c_int = 1;
            let t = (self.ggml_new_tensor_3d)(context, F16, 64, 32, 3);
            (self.ggml_set_name)(t, c"cache_k_l7".as_ptr());
            let v = (self.ggml_view_2d)(context, t, 64, 32, 128, 4096);
            let sizes = (*t).nb == [2, 128, 4096, 12288] && (*t).ne == [64, 32, 3, 1];
            let named = (*t).name() == "cache_k_l7" && (*t).kind == F16 && (*t).data.is_null();
            let viewed = (*v).view_src == t && (*v).view_offs == 4096 && (*t).view_src.is_null();
            let bytes = (self.ggml_nbytes)(t) == 12288;
            (self.ggml_free)(context);
            if sizes && named && viewed && bytes {
                Ok(())
            } else {
                Err("its tensors have another layout".into())
            }
        }
    }

    /// Whether the host reads the structures of this device as they are written. `probe` makes a buffer of 4096 bytes.
    ///
    /// # Safety
    /// The pointers are to complete structures that live as long as the process.
    pub unsafe fn check_device(
        &self,
        reg: *mut Reg,
        device: *mut Device,
        kind: *mut BufferType,
        probe: impl FnOnce() -> *mut Buffer,
    ) -> Result<(), String> {
        // SAFETY: the host's own functions, on structures that are complete.
        unsafe {
            let same = text((self.ggml_backend_reg_name)(reg)) == crate::NAME
                && text((self.ggml_backend_dev_name)(device)) == crate::DEVICE
                && (self.ggml_backend_dev_type)(device) == crate::abi::DEVICE_TYPE_GPU
                && (self.ggml_backend_dev_backend_reg)(device) == reg
                && (self.ggml_backend_buft_is_host)(kind)
                && (self.ggml_backend_buft_get_alignment)(kind) == crate::device::ALIGNMENT
                && (self.ggml_backend_buft_get_device)(kind) == device;
            if !same {
                return Err("it reads devices in another layout".into());
            }
            let buffer = probe();
            if buffer.is_null() {
                return Err("no buffer could be made".into());
            }
            let base = (self.ggml_backend_buffer_get_base)(buffer);
            let same = (self.ggml_backend_buffer_get_size)(buffer) == 4096
                && !base.is_null()
                && (*buffer).kind == kind
                && (*buffer).size == 4096;
            (self.ggml_backend_buffer_free)(buffer);
            if same { Ok(()) } else { Err("it reads buffers in another layout".into()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn versions_are_read_up_to_the_minor_number() {
        assert_eq!(parse("0.27.0"), Some((0, 27)));
        assert_eq!(parse("0.26.3-dev"), Some((0, 26)));
        assert_eq!(parse("1.0"), Some((1, 0)));
        assert_eq!(parse("unknown"), None);
    }
}
