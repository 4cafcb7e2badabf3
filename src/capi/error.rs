//! Codes and words of what went wrong.
//!
//! Owns the last failure of each thread. Invariant: a code that is returned is the code of the failure that the thread
//! keeps, with its words and numbers, until the thread's next failure.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, c_char};

use super::sized::{self, versioned};
use super::{aligned, border, copy_text, count, status};
use crate::client::Error;
use crate::heap::HeapError;
use crate::wire::Fault;

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        /// A negative return value.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(i32)]
        pub(super) enum Code { $($name = $value,)* }

        fn name_of(code: i32) -> Option<&'static CStr> {
            match code { 0 => Some(c"ok"), $($value => Some($text),)* _ => None }
        }
    };
}

codes! {
    Invalid = -1, c"invalid";
    NotReachable = -2, c"not-reachable";
    Lost = -3, c"lost";
    Timeout = -4, c"timeout";
    Protocol = -5, c"protocol";
    Map = -6, c"map";
    TooManyMappings = -7, c"too-many-mappings";
    Forked = -8, c"forked";
    NoMemory = -9, c"no-memory";
    Internal = -10, c"internal";
    InUse = -11, c"in-use";
    Unsupported = -12, c"unsupported";
    // -100 and the number of the fault on the wire.
    NeverFits = -101, c"never-fits";
    Busy = -102, c"busy";
    OverLimit = -103, c"over-limit";
    Stale = -104, c"stale";
    BadRequest = -105, c"bad-request";
    BrokerFault = -106, c"broker-fault";
    SessionLost = -107, c"session-lost";
}

/// What a thread keeps of a failed call.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    code: Code,
    os_error: i32,
    needed: u64,
    available: u64,
    text: String,
}

impl Failure {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Failure { code, os_error: 0, needed: 0, available: 0, text: text.into() }
    }

    pub fn invalid(text: impl Into<String>) -> Self {
        Failure::new(Code::Invalid, text)
    }

    /// A panic inside the library: a defect, whose words may help its author.
    pub fn internal(panic: &(dyn Any + Send)) -> Self {
        let words = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Failure::new(Code::Internal, format!("a defect of the library, please report it: {words}"))
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        let os = |e: &std::io::Error| e.raw_os_error().unwrap_or(0);
        let (code, os_error, needed, available) = match &e {
            Error::NotReachable { source, .. } => (Code::NotReachable, os(source), 0, 0),
            Error::Refused { fault, needed, available, .. } => {
                let code = match fault {
                    Fault::NeverFits => Code::NeverFits,
                    Fault::Busy => Code::Busy,
                    Fault::OverLimit => Code::OverLimit,
                    Fault::Stale => Code::Stale,
                    Fault::BadRequest => Code::BadRequest,
                    Fault::BrokerFault => Code::BrokerFault,
                    Fault::SessionLost => Code::SessionLost,
                };
                (code, 0, *needed, *available)
            }
            Error::Lost(_) => (Code::Lost, 0, 0, 0),
            Error::Timeout(_) => (Code::Timeout, 0, 0, 0),
            Error::Protocol(_) | Error::Stranger { .. } => (Code::Protocol, 0, 0, 0),
            Error::Invalid(_) => (Code::Invalid, 0, 0, 0),
            Error::Map { source, .. } => (Code::Map, os(source), 0, 0),
            Error::TooManyMappings { needed, used, limit } => {
                (Code::TooManyMappings, 0, *needed as u64, limit.saturating_sub(*used) as u64)
            }
            Error::Forked => (Code::Forked, 0, 0, 0),
            Error::Heap(heap) => {
                let os_error = match heap {
                    HeapError::Open { source, .. }
                    | HeapError::NoMemory { source, .. }
                    | HeapError::Call { source, .. } => os(source),
                    _ => 0,
                };
                (Code::NoMemory, os_error, 0, 0)
            }
        };
        Failure { code, os_error, needed, available, text: e.to_string() }
    }
}

thread_local! {
    static LAST: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// Keeps a failure for its thread and returns its code.
pub(super) fn keep(failure: Failure) -> i64 {
    let code = failure.code as i64;
    // A thread that is ending may have no place for it any more; the code still says what happened.
    let _ = LAST.try_with(|last| last.replace(Some(failure)));
    code
}

/// This thread's last failure; none, too, in a thread that is ending and has no place for it any more.
fn last() -> Option<Failure> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

versioned! {
    /// Numbers of the last failure. See the header.
    struct kvb_error {
        code: i32,
        os_error: i32,
        needed: u64,
        available: u64,
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvb_error_name(code: i32) -> *const c_char {
    name_of(code).unwrap_or(c"unknown").as_ptr()
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_last_error(text: *mut c_char, size: usize) -> usize {
    let copied = border(|| {
        let words = last().map(|f| f.text).unwrap_or_default();
        // It has no code to return for a NULL, and must not replace the failure that is asked for.
        if !text.is_null() {
            // SAFETY: the header asks for room for `size` bytes.
            unsafe { copy_text(&words, text, size) };
        }
        count(words.len())
    });
    usize::try_from(copied).unwrap_or(0)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_last_error_info(out: *mut kvb_error) -> i32 {
    status(|| {
        aligned(out, "out")?;
        let none = kvb_error { size: 0, code: 0, os_error: 0, needed: 0, available: 0 };
        let told = last().map_or(none, |Failure { code, os_error, needed, available, .. }| kvb_error {
            size: 0,
            code: code as i32,
            os_error,
            needed,
            available,
        });
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_error", told) }
    })
}
