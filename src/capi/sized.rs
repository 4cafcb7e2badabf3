//! Structures that begin with their own size, so that a program and a library of different versions understand each
//! other.
//!
//! Owns nothing. Invariants: never a byte is read or written beyond the size that the program states; fields that the
//! program does not know are zero, which always means the default; a field that this library does not know and that is
//! not zero is refused rather than ignored.

use super::Failure;
use super::error::Code;

/// No structure of this ABI will be larger: a size beyond it is an uninitialised one.
const LARGEST: usize = 4096;

/// A structure with its size in front.
///
/// # Safety
/// The type is `repr(C)`, its first field is a `usize`, and all-zero bytes are a value of it, as is every other pattern.
pub(super) unsafe trait Versioned: Copy {
    /// Bytes of the structure in the first version of the ABI that had it.
    const FIRST: usize;
}

/// The size that the program states.
///
/// # Safety
/// `from` is not NULL, aligned, and points at `size` readable bytes.
unsafe fn stated<T: Versioned>(from: *const T, what: &str) -> Result<usize, Failure> {
    // SAFETY: passed on to the caller; `size` is the first field.
    let size = unsafe { from.cast::<usize>().read() };
    if size < T::FIRST || size > LARGEST {
        let text = format!("{what}.size is {size}: set it to sizeof({what}), which is {}", size_of::<T>());
        return Err(Failure::invalid(text));
    }
    Ok(size)
}

/// Whether [`write()`] will find room.
///
/// # Safety
/// As for `write`.
pub(super) unsafe fn check<T: Versioned>(to: *mut T, what: &str) -> Result<(), Failure> {
    // SAFETY: passed on to the caller.
    unsafe { stated(to.cast_const(), what) }.map(|_| ())
}

/// Reads options; NULL stands for all defaults.
///
/// # Safety
/// `from` is NULL or points at as many readable bytes as its first field says.
pub(super) unsafe fn read<T: Versioned>(from: *const T, what: &str) -> Result<T, Failure> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    if !from.is_null() {
        super::aligned(from, what)?;
        // SAFETY: passed on to the caller.
        let size = unsafe { stated(from, what)? };
        for at in size_of::<T>()..size {
            // SAFETY: below the stated size.
            if unsafe { from.cast::<u8>().add(at).read() } != 0 {
                let text = format!(
                    "{what}: byte {at} is set, which this library ({}) does not know",
                    super::ABI_VERSION
                );
                return Err(Failure::new(Code::Unsupported, text));
            }
        }
        // SAFETY: both sides have so many bytes, and they are different objects.
        unsafe {
            value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from.cast(), size.min(size_of::<T>()))
        };
    }
    // SAFETY: every pattern is a value.
    Ok(unsafe { value.assume_init() })
}

/// Writes results; the `size` field stays as the program has set it.
///
/// # Safety
/// `to` has been checked by `aligned` and points at as many writable bytes as its first field says.
pub(super) unsafe fn write<T: Versioned>(to: *mut T, what: &str, value: T) -> Result<(), Failure> {
    // SAFETY: passed on to the caller.
    let size = unsafe { stated(to.cast_const(), what)? };
    let known = size.min(size_of::<T>());
    let word = size_of::<usize>();
    // SAFETY: all below the stated size, and `value` is our own.
    unsafe {
        let (to, from) = (to.cast::<u8>(), (&raw const value).cast::<u8>());
        to.add(word).copy_from_nonoverlapping(from.add(word), known - word);
        to.add(known).write_bytes(0, size - known);
    }
    Ok(())
}
