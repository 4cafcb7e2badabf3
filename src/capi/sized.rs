//! Structures that begin with their own size, so that a program and a library of different versions understand each
//! other.
//!
//! Owns what such a structure is declared with ([`versioned!`]). Invariants: never a byte is read or written beyond the size
//! that the program states; fields that the program does not know are zero, which always means the default; a field that
//! this library does not know and that is not zero is refused rather than ignored; the size that a structure first had stays
//! good for ever.

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

/// Declares structures of the header, `size` in front.
///
/// What a later version of the ABI adds stands in braces of its own, `struct a { first: u64, } + { later: u64, }`: so the
/// size of the first version stays what it was, and programs built with it are served.
macro_rules! versioned {
    ($(
        $(#[$meta:meta])*
        struct $name:ident { $($field:ident: $ty:ty,)* } $(+ { $($later:ident: $later_ty:ty,)* })?
    )*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name { pub size: usize, $(pub $field: $ty,)* $($(pub $later: $later_ty,)*)? }

        // SAFETY: repr(C), `size` first, integers, floats and raw pointers only.
        unsafe impl $crate::capi::sized::Versioned for $name {
            const FIRST: usize = {
                #[repr(C)]
                struct First { size: usize, $($field: $ty,)* }
                size_of::<First>()
            };
        }

        // A field that is added must not come to lie where programs before it have padding, whose bytes mean nothing: what
        // would be padding is a field of its own (`reserved`).
        #[cfg(target_pointer_width = "64")]
        const _: () = {
            let fields = size_of::<usize>() $(+ size_of::<$ty>())* $($(+ size_of::<$later_ty>())*)?;
            assert!(fields == size_of::<$name>(), concat!(stringify!($name), " has padding"));
        };
    )*};
}
pub(super) use versioned;

/// The size that the program states.
///
/// # Safety
/// `from` is not NULL, aligned, and points at `size` readable bytes.
unsafe fn stated<T: Versioned>(from: *const T, what: &str) -> Result<usize, Failure> {
    // SAFETY: passed on to the caller; `size` is the first field.
    let size = unsafe { from.cast::<usize>().read() };
    // No sizeof of any version is anything but whole words.
    if size < T::FIRST || size > LARGEST || size % size_of::<usize>() != 0 {
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

#[cfg(test)]
mod tests {
    use super::super::error::Failure;
    use super::*;

    versioned! {
        /// A structure of two versions: 16 bytes at first, 24 now.
        struct kvb_grown { first: u64, } + { later: u32, latest: u32, }
    }

    /// What a program has in memory: its structure, and behind it what is not its structure.
    type Memory = [usize; 5];
    const FOREIGN: usize = 0x5a5a_5a5a_5a5a_5a5a;

    fn of_size(words: usize) -> Memory {
        let mut memory = [FOREIGN; 5];
        memory[..words].fill(0);
        memory[0] = 8 * words;
        memory[1] = 7;
        memory
    }

    fn read_from(memory: &Memory) -> Result<kvb_grown, Failure> {
        // SAFETY: the memory is larger than any size that passes for one.
        unsafe { read(memory.as_ptr().cast::<kvb_grown>(), "kvb_grown") }
    }

    fn write_to(memory: &mut Memory) -> Result<(), Failure> {
        let value = kvb_grown { size: 0, first: 1, later: 2, latest: 3 };
        // SAFETY: as in read_from.
        unsafe { write(memory.as_mut_ptr().cast::<kvb_grown>(), "kvb_grown", value) }
    }

    #[test]
    fn a_program_older_than_the_library_gets_the_defaults_of_the_fields_that_it_does_not_have() {
        assert_eq!((kvb_grown::FIRST, size_of::<kvb_grown>()), (16, 24));
        let given = read_from(&of_size(2)).unwrap();
        assert_eq!((given.first, given.later, given.latest), (7, 0, 0));
    }

    #[test]
    fn a_program_older_than_the_library_keeps_what_lies_behind_its_structure() {
        let mut memory = of_size(2);
        write_to(&mut memory).unwrap();
        assert_eq!(memory, [16, 1, FOREIGN, FOREIGN, FOREIGN]);
    }

    #[test]
    fn a_program_of_the_librarys_own_version_has_every_field() {
        let mut memory = of_size(3);
        write_to(&mut memory).unwrap();
        assert_eq!(memory[3..], [FOREIGN, FOREIGN]);
        let given = read_from(&memory).unwrap();
        assert_eq!((given.size, given.first, given.later, given.latest), (24, 1, 2, 3));
    }

    #[test]
    fn a_program_newer_than_the_library_reads_zero_where_the_library_has_nothing_to_say() {
        let mut memory = [FOREIGN; 5];
        memory[0] = 32;
        write_to(&mut memory).unwrap();
        assert_eq!((memory[0], memory[3], memory[4]), (32, 0, FOREIGN));
    }

    #[test]
    fn a_program_newer_than_the_library_is_served_unless_it_asks_for_what_the_library_does_not_know() {
        let mut memory = of_size(4);
        assert_eq!(read_from(&memory).unwrap().first, 7);
        memory[3] = 1;
        let refused = read_from(&memory).unwrap_err();
        assert_eq!(super::super::error::keep(refused), Code::Unsupported as i64);
    }

    #[test]
    fn a_size_that_no_version_has_is_refused_and_nothing_is_written() {
        for size in [0, 8, 15, 17, 20, LARGEST + 8, usize::MAX] {
            let mut memory = of_size(2);
            memory[0] = size;
            let before = memory;
            assert!(read_from(&memory).is_err(), "{size}");
            assert!(write_to(&mut memory).is_err(), "{size}");
            assert_eq!(memory, before, "{size}");
        }
    }
}
