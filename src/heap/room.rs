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

/// For buffers that are files: an error where this process may have none of so many bytes (RLIMIT_FSIZE). The kernel would
/// not only refuse, but send SIGXFSZ, which ends the process: of an embedded broker the engine.
pub(super) fn check_file_size(heap: &str, bytes: u64) -> Result<(), HeapError> {
    match beyond_file_size(bytes) {
        Some(limit) => Err(HeapError::FileSize { heap: heap.into(), bytes, limit }),
        None => Ok(()),
    }
}

/// The limit of a file's size in this process, if `bytes` are more.
pub(crate) fn beyond_file_size(bytes: u64) -> Option<u64> {
    use nix::sys::resource::{Resource, getrlimit};
    let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE).ok()?;
    (bytes > limit).then_some(limit)
}

/// The least bytes that a memory cgroup of a process may have, and the file that says so: of its own cgroup and all above
/// it. `cgroups` is its /proc/PID/cgroup (cgroups(7)); `read` reads the files below /sys/fs/cgroup.
#[cfg(feature = "daemon")]
pub(crate) fn cgroup_bytes(cgroups: &str, read: impl Fn(&str) -> Option<String>) -> Option<(u64, String)> {
    let mut least: Option<(u64, String)> = None;
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for directory in std::path::Path::new(path).ancestors() {
            let file = format!("{root}{}/{file}", directory.display().to_string().trim_end_matches('/'));
            // "max" is no number, and no limit.
            let limit = read(&file).and_then(|text| text.trim().parse().ok());
            if let Some(limit) = limit.filter(|n| least.as_ref().is_none_or(|(l, _)| n < l)) {
                least = Some((limit, file));
            }
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "daemon")]
    #[test]
    fn the_tightest_cgroup_above_a_process_counts() {
        let read = |file: &str| match file {
            "/sys/fs/cgroup/system.slice/kvbrokerd.service/memory.max" => Some("max\n".to_owned()),
            "/sys/fs/cgroup/system.slice/memory.max" => Some("134217728\n".into()),
            "/sys/fs/cgroup/memory.max" => Some("268435456\n".into()),
            "/sys/fs/cgroup/memory/box/memory.limit_in_bytes" => Some("1048576\n".into()),
            _ => None,
        };
        let of = |text| cgroup_bytes(text, read);
        let slice = Some((128 << 20, "/sys/fs/cgroup/system.slice/memory.max".to_owned()));
        assert_eq!(of("0::/system.slice/kvbrokerd.service\n"), slice);
        assert_eq!(of("0::/\n"), Some((256 << 20, "/sys/fs/cgroup/memory.max".into())));
        let old = Some((1 << 20, "/sys/fs/cgroup/memory/box/memory.limit_in_bytes".to_owned()));
        assert_eq!(of("5:cpu,cpuacct:/box\n4:hugetlb,memory:/box\n1:name=systemd:/box\n"), old);
        assert_eq!(of("5:cpu:/\nnonsense\n"), None);
    }

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
