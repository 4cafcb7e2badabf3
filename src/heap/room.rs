//! How much memory the machine has, and whether it has some to spare.
//!
//! Owns nothing. Invariant: it only reads; where the kernel does not say, there is room, and the allocation itself decides.

use std::io;

use super::HeapError;

/// What is left to the machine beyond an extent that is taken: about twice the watermark below which a kernel with 4 GiB
/// begins to reclaim (`vm.min_free_kbytes`, 8 MiB there).
const LEFT_ALONE: u64 = 16 << 20;

/// What the machine has, in bytes, if the kernel says it (`MemTotal`).
#[cfg(feature = "daemon")]
pub(crate) fn memory_bytes() -> Option<u64> {
    field(&meminfo()?, "MemTotal:")
}

/// What can be had of it without swapping, in bytes (`MemAvailable`).
fn available() -> Option<u64> {
    field(&meminfo()?, "MemAvailable:")
}

fn meminfo() -> Option<String> {
    std::fs::read_to_string("/proc/meminfo").ok()
}

/// A line of `/proc/meminfo`, in bytes; it is written in KiB, which are called kB there (proc_meminfo(5)).
fn field(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// For heaps of ordinary memory: an error where `bytes` more would leave the machine too little.
pub(super) fn check(heap: &str, bytes: u64) -> Result<(), HeapError> {
    enough(heap, bytes, available())
}

fn enough(heap: &str, bytes: u64, available: Option<u64>) -> Result<(), HeapError> {
    match available {
        Some(there) if there < bytes + LEFT_ALONE => Err(HeapError::NoMemory {
            heap: heap.into(),
            bytes,
            source: io::Error::from_raw_os_error(libc::ENOMEM),
            advice: "the machine itself has hardly any left; it is asked again later",
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_that_would_leave_the_machine_without_memory_is_not_asked_for() {
        let meminfo = "MemTotal:  4014528 kB\nMemFree: 8000 kB\nMemAvailable:      20480 kB\n";
        assert_eq!(field(meminfo, "MemTotal:"), Some(4_014_528 << 10));
        let there = field(meminfo, "MemAvailable:");
        assert_eq!(there, Some(20 << 20));
        assert!(enough("memfd", 3 << 20, there).is_ok());
        let said = enough("memfd", 5 << 20, there).unwrap_err().to_string();
        assert!(said.contains("memfd: no memory for a buffer of 5242880 bytes"), "{said}");
        assert!(
            enough("memfd", 5 << 20, field("MemTotal: 1 kB\n", "MemAvailable:")).is_ok(),
            "a kernel that does not say"
        );
    }
}
