//! The C ABI over the client library: `include/kvbroker.h`, function by function.
//!
//! Owns the handles that a C program holds. Invariants: no panic and no unwinding crosses the border; a pointer from C
//! is checked for NULL and alignment before it is used, a number for its range; a session that two threads use at once
//! gives `KVB_ERR_IN_USE`, a handle used in a forked child `KVB_ERR_FORKED`; a call that fails has changed nothing and
//! leaves its out parameters alone. The header is the documentation of the functions; here is only how they are done.

#![allow(unsafe_code, non_camel_case_types)]
// Every function takes raw pointers under the contract that the header states once: a handle comes from this library and
// is not closed yet, a pointer with a count has room for so many elements.
#![allow(clippy::missing_safety_doc)]

mod attention;
mod client;
mod error;
mod process;
mod session;
mod sized;
mod window;

pub use attention::{kvb_attention, kvb_attention_call, kvb_scratch, kvb_scratch_free, kvb_scratch_new};
pub use client::{
    kvb_abi_version, kvb_client, kvb_client_close, kvb_client_event_fd, kvb_client_get_info, kvb_client_info,
    kvb_client_options, kvb_client_poll, kvb_connect, kvb_embedded, kvb_embedded_options, kvb_geometry,
    kvb_layer, kvb_plane, kvb_profile, kvb_profile_close, kvb_profile_from_model, kvb_profile_get_info,
    kvb_profile_info, kvb_profile_new, kvb_profile_plane, kvb_profile_release_credit, kvb_profile_reserve,
    kvb_profile_room, kvb_room, kvb_version,
};
pub use error::{kvb_error, kvb_error_name, kvb_last_error, kvb_last_error_info};
pub use session::{
    kvb_admission, kvb_map, kvb_open_options, kvb_session, kvb_session_admit, kvb_session_attach,
    kvb_session_close, kvb_session_damaged_from, kvb_session_ensure, kvb_session_first_token,
    kvb_session_fork, kvb_session_map, kvb_session_map_layer, kvb_session_open, kvb_session_pin,
    kvb_session_read_row, kvb_session_reserve, kvb_session_seal, kvb_session_set_rewind, kvb_session_stats,
    kvb_session_tokens, kvb_session_trim, kvb_session_trim_head, kvb_session_unpin, kvb_session_view,
    kvb_session_wanted_back, kvb_session_writable, kvb_session_write_row, kvb_stats, kvb_view,
};

pub use window::{
    kvb_batch, kvb_session_window, kvb_window, kvb_window_batch, kvb_window_close, kvb_window_declined,
    kvb_window_drain, kvb_window_extend, kvb_window_get_info, kvb_window_info, kvb_window_is_current,
    kvb_window_load, kvb_window_options, kvb_window_release, kvb_window_take_device,
};

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use error::{Code, Failure};

/// Version of the ABI: `KVB_ABI_VERSION` of the header.
pub const ABI_VERSION: u32 = 1;

/// Runs the body of a function: errors and panics become a negative code, whose text the thread keeps.
fn border(body: impl FnOnce() -> Result<i64, Failure>) -> i64 {
    // Nothing that a panic leaves half done is used again: sessions are behind a lock that it poisons.
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::internal(&*panic),
    };
    error::keep(failure)
}

/// The same for functions that return 0.
fn status(body: impl FnOnce() -> Result<(), Failure>) -> i32 {
    border(|| body().map(|()| 0)) as i32
}

/// A number that C gets as `int64_t`.
fn count(n: usize) -> Result<i64, Failure> {
    i64::try_from(n).map_err(|_| Failure::new(Code::Internal, "a count is larger than an int64_t"))
}

/// A number of tokens or bytes from C.
fn number(n: u64, what: &str) -> Result<usize, Failure> {
    usize::try_from(n)
        .map_err(|_| Failure::invalid(format!("{what}: {n} is more than this machine can address")))
}

/// A text from C; empty for NULL.
///
/// # Safety
/// `text` is NULL or a string that ends with a zero byte.
unsafe fn text(text: *const c_char, what: &str) -> Result<String, Failure> {
    if text.is_null() {
        return Ok(String::new());
    }
    // SAFETY: passed on to the caller.
    let bytes = unsafe { CStr::from_ptr(text) };
    let text = bytes.to_str().map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))?;
    Ok(text.into())
}

/// What a pointer from C points at; NULL and misaligned pointers are errors.
///
/// # Safety
/// A pointer that is neither must point at a `T` that lives, and that nobody changes, for `'a`.
unsafe fn at<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    aligned(pointer, what)?;
    // SAFETY: not NULL and aligned; the rest is the caller's promise.
    Ok(unsafe { &*pointer })
}

fn aligned<T>(pointer: *const T, what: &str) -> Result<(), Failure> {
    match (pointer.is_null(), pointer.is_aligned()) {
        (true, _) => Err(Failure::invalid(format!("{what} is NULL"))),
        (false, false) => Err(Failure::invalid(format!("{what} is not aligned: {pointer:p}"))),
        (false, true) => Ok(()),
    }
}

/// `count` elements from C that are the caller's own memory; NULL only for none.
///
/// # Safety
/// Unless `count` is 0, `pointer` points at so many elements, which nobody changes for `'a`.
unsafe fn elements<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    aligned(pointer, what)?;
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Failure::invalid(format!("{what}: {count} elements do not fit the address space")));
    }
    // SAFETY: not NULL, aligned, of a possible size; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Copies as much of a text as fits, whole characters, with a zero byte at the end; nothing where `size` is 0.
///
/// # Safety
/// `to` has room for `size` bytes.
unsafe fn copy_text(words: &str, to: *mut c_char, size: usize) {
    let Some(room) = size.checked_sub(1) else { return };
    let mut end = words.len().min(room);
    while !words.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: `end` is below `size`; the words are ours, so they lie elsewhere.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(words.as_ptr(), end);
        to.add(end).write(0);
    }
}

/// Gives C a handle.
///
/// # Safety
/// `out` has been checked by [`aligned`] and may be written.
unsafe fn hand_out<T>(out: *mut *mut T, handle: T) {
    // SAFETY: passed on to the caller.
    unsafe { out.write(Box::into_raw(Box::new(handle))) };
}

/// Takes a handle back and ends it.
///
/// # Safety
/// `handle` comes from [`hand_out`] and is not used again.
unsafe fn take_back<T>(handle: *mut T) {
    // SAFETY: passed on to the caller.
    drop(unsafe { Box::from_raw(handle) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null_mut;

    fn last_words() -> String {
        let mut text = [0u8; 256];
        // SAFETY: the buffer has the size that is said.
        let length = unsafe { kvb_last_error(text.as_mut_ptr().cast(), text.len()) };
        String::from_utf8(text[..length.min(text.len() - 1)].to_vec()).unwrap()
    }

    fn session() -> *mut kvb_session {
        let embedded = kvb_embedded_options {
            size: size_of::<kvb_embedded_options>(),
            pool_bytes: 0,
            extent_bytes: 128 << 10,
        };
        let embedded = kvb_embedded_options { pool_bytes: 256 << 10, ..embedded };
        let geometry = kvb_geometry {
            size: size_of::<kvb_geometry>(),
            name: c"m".as_ptr(),
            element: c"f16".as_ptr(),
            rows: std::ptr::null(),
            layers: 1,
            k_row: 256,
            v_row: 256,
            tokens_per_block: 16,
            layout: 0,
            window: 0,
            windows: std::ptr::null(),
        };
        let (mut client, mut profile, mut session) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the structures live for the calls; each handle is closed once.
        unsafe {
            assert_eq!(kvb_embedded(&embedded, std::ptr::null(), &mut client), 0, "{}", last_words());
            assert_eq!(kvb_profile_new(client, &geometry, &mut profile), 0, "{}", last_words());
            assert_eq!(kvb_session_open(profile, std::ptr::null(), &mut session), 0, "{}", last_words());
            assert_eq!((kvb_profile_close(profile), kvb_client_close(client)), (0, 0));
        }
        session
    }

    #[test]
    fn a_panic_becomes_a_code_with_its_words() {
        assert_eq!(border(|| panic!("the {} broke", "axle")), Code::Internal as i64);
        assert_eq!(last_words(), "a defect of the library, please report it: the axle broke");
        assert_eq!(status(|| panic!("plain")), -10);
        assert!(last_words().ends_with("plain"));
    }

    #[test]
    fn a_session_that_another_call_uses_says_so_instead_of_breaking() {
        let s = session();
        // SAFETY: the session is closed at the end only.
        unsafe {
            let guard = session::read(s).unwrap();
            assert_eq!(kvb_session_ensure(s, 1), Code::InUse as i32);
            assert_eq!(kvb_session_close(s), Code::InUse as i32);
            assert_eq!(kvb_session_tokens(s), 0);
            drop(guard);
            assert_eq!(kvb_session_ensure(s, 1), 0);
            assert_eq!(kvb_session_close(s), 0);
        }
    }

    /// Of these structures: the name, and the size that passed first.
    macro_rules! first_sizes {
        ($($name:ident)*) => { [$((stringify!($name), <$name as sized::Versioned>::FIRST),)*] };
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn every_structure_takes_the_size_that_it_had_in_the_first_header() {
        let sizes = first_sizes! {
            kvb_error kvb_client_options kvb_embedded_options kvb_client_info kvb_geometry kvb_profile_info kvb_room
            kvb_open_options kvb_admission kvb_stats kvb_map kvb_view kvb_window_options kvb_window_info kvb_batch
            kvb_attention_call
        };
        // Programs out there say these numbers: none ever changes, whatever is added to a structure.
        let first = [32, 24, 24, 40, 64, 48, 40, 40, 24, 72, 56, 40, 56, 72, 40, 80];
        assert_eq!(sizes.map(|(_, size)| size), first, "{sizes:?}");
        // In the header's order, and none is missing.
        let header = include_str!("../../include/kvbroker.h").split("typedef struct ");
        let sized = header.filter_map(|text| text.split_once(" {\n    size_t size;"));
        assert!(sized.map(|(name, _)| name).eq(sizes.iter().map(|(name, _)| *name)));
    }

    #[test]
    fn texts_are_cut_between_characters() {
        let _ = error::keep(Failure::invalid("阀门"));
        let mut text = [9u8; 5];
        // SAFETY: the buffer has the size that is said.
        assert_eq!(unsafe { kvb_last_error(text.as_mut_ptr().cast(), text.len()) }, 6);
        assert_eq!(&text[..4], "阀\0".as_bytes());
    }
}
