//! The kernel: its version, and what is known to be wrong with that version.
//!
//! Invariant: a fault is told by the version that mends it, as the kernel's history has it; a vendor's kernel of an older
//! version is taken to have the fault, whatever was taken into it. What can be tried is tried first: whether the count of a
//! buffer's holders proves anything is asked of the heap itself, where this process may open it.

use std::path::Path;

use super::{Board, Findings};
use crate::heap::{DmaHeap, Heap, Proof};

const AREA: &str = "kernel";

/// A kernel's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Release {
    pub major: u32,
    pub minor: u32,
}

impl Release {
    /// `6.1.84-vendor-rk35xx` is 6.1.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(|c: char| !c.is_ascii_digit());
        Some(Release { major: parts.next()?.parse().ok()?, minor: parts.next()?.parse().ok()? })
    }

    /// The first one with dma-buf heaps.
    pub const HEAPS: Release = Release { major: 5, minor: 6 };
    /// The first one on which an unprivileged user may have a pressure trigger, with windows of whole 2 s ("sched/psi: Allow
    /// unprivileged polling of N*2s period", merged for 6.4 in April 2023; Documentation/accounting/psi.rst).
    pub const PRESSURE_TRIGGER: Release = Release { major: 6, minor: 4 };
    /// The first one on which mappings of a CMA heap are VM_PFNMAP, so that no page of them can be kept past the
    /// buffer's holder count (commit 1c1914d6e8c6).
    pub const COUNT_IS_PROOF: Release = Release { major: 6, minor: 9 };
    /// The first one that makes a heap of each reusable region, not of the default one alone (commit 4f5f8baf7341).
    pub const HEAP_PER_REGION: Release = Release { major: 6, minor: 19 };
}

/// The setting of `option` in the kernel's build configuration, where the board has kept it. A compressed
/// /proc/config.gz is not read.
pub(super) fn build_option(board: &Board, option: &str) -> Option<String> {
    let release = board.tree.text("/proc/sys/kernel/osrelease")?;
    let places = [format!("/boot/config-{release}"), format!("/usr/lib/modules/{release}/config")];
    let text = places.iter().find_map(|path| board.tree.text(path))?;
    let line = text.lines().find_map(|l| l.strip_prefix(option)?.strip_prefix('='))?;
    Some(line.to_owned())
}

pub(super) fn examine(board: &Board, found: &mut Findings) {
    let full = board.tree.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let Some(release) = board.release else {
        found.warn(
            AREA,
            "version",
            format!("the version \"{full}\" cannot be read"),
            "see that /proc is mounted; faults of single versions are not looked for",
        );
        return;
    };
    if release < Release::HEAPS {
        found.fail(
            AREA,
            "version",
            format!("Linux {full} has no dma-buf heaps"),
            "take a kernel of 5.6 or newer (boards: 6.1 or newer)",
        );
    } else {
        found.ok(AREA, "version", format!("Linux {full}"));
    }
    holder_count(board, release, found);
    if release < Release::COUNT_IS_PROOF {
        found.warn(
            AREA,
            "pinning",
            "registering a CMA heap's mapping as io_uring fixed buffers or for VFIO never ends on this kernel (pages that \
             were never on an LRU list, mended by commit 1aaf8c122918)",
            "engines must not do that with blocks of a dma-heap pool; a memfd pool is not concerned",
        );
    }
    if let Some(text) = board.tree.text("/proc/pressure/memory") {
        let some = text.lines().next().unwrap_or_default();
        match release < Release::PRESSURE_TRIGGER {
            true => found.ok(
                AREA,
                "pressure",
                format!("{some}; read every 10 s, since this kernel gives no trigger"),
            ),
            false => found.ok(AREA, "pressure", some),
        }
    } else {
        found.warn(
            AREA,
            "pressure",
            "there is no /proc/pressure/memory: cached prefixes are not given back when memory gets short",
            "add psi=1 to the kernel's command line, or build it with CONFIG_PSI=y",
        );
    }
}

/// Whether a buffer's count of holders proves that nobody else reaches it: by the daemon's own probe on one page of the
/// heap, else by the version, and why.
fn holder_count(board: &Board, release: Release, found: &mut Findings) {
    let heap = board.here.then(|| board.config.heap_in(&board.config.heap_directory)).flatten();
    let opened = heap.map(|path| (DmaHeap::open(Path::new(&path)).map(|heap| heap.proof()), path));
    match opened {
        Some((Ok(proof), path)) => tried(&proof, &path, found),
        Some((Err(why), _)) => by_version(release, &format!("by the version; not tried: {why}"), found),
        None => by_version(release, "by the version; there is no heap to try", found),
    }
}

const COUNT: &str = "holder-count";
const ANEW_IS_FINE: &str = "nothing needs to be set; Linux 6.9 or newer makes the hand-over cheaper";

/// What the probe found on the heap `path`.
fn tried(proof: &Proof, path: &str, found: &mut Findings) {
    let said = format!("tried on {path}: {proof}");
    match proof {
        Proof::Proven | Proof::NotNeeded => found.ok(AREA, COUNT, said),
        Proof::PagesCanBeKept => found.warn(AREA, COUNT, said, ANEW_IS_FINE),
        Proof::NotTried(_) | Proof::NoCount(_) => found.warn(
            AREA,
            COUNT,
            said,
            "ask outside of a container or filter of system calls; the running daemon's own answer is in kvbctl status --json",
        ),
    }
}

fn by_version(release: Release, how: &str, found: &mut Findings) {
    if release < Release::COUNT_IS_PROOF {
        let said = format!(
            "pages of a CMA heap's mapping can be kept past the buffer's holder count here (vmsplice, before 6.9): the \
             count proves nothing, so extents are destroyed and allocated anew between tenants, and a page that somebody \
             keeps leaves the pool an extent short until it is let go ({how})"
        );
        found.warn(AREA, COUNT, said, ANEW_IS_FINE);
    } else {
        let said = "mappings of a heap cannot be pinned, so a buffer's holder count proves who has it";
        found.ok(AREA, COUNT, format!("{said} ({how})"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Findings, Level};
    use super::{Proof, Release, tried};

    #[test]
    fn what_the_probe_finds_decides_and_a_filtered_call_is_no_proof() {
        let level = |proof| {
            let mut found = Findings::default();
            tried(&proof, "/dev/dma_heap/kvbroker", &mut found);
            assert!(found.0[0].said.contains("tried on /dev/dma_heap/kvbroker"), "{:?}", found.0);
            found.0[0].level
        };
        assert_eq!(level(Proof::Proven), Level::Ok);
        for other in
            [Proof::PagesCanBeKept, Proof::NotTried("EPERM".into()), Proof::NoCount("no fdinfo".into())]
        {
            assert_eq!(level(other), Level::Warn);
        }
    }

    #[test]
    fn versions_of_vendors_are_read_as_what_they_are_based_on() {
        let of = |text| Release::parse(text).map(|r| (r.major, r.minor));
        assert_eq!(of("6.1.84-vendor-rk35xx"), Some((6, 1)));
        assert_eq!(of("6.19-rc3"), Some((6, 19)));
        assert_eq!(of("7.3.4-1-arm64"), Some((7, 3)));
        assert_eq!(of("Linux"), None);
        assert!(Release::parse("6.18.2").unwrap() < Release::HEAP_PER_REGION);
        assert!(Release::parse("7.0").unwrap() > Release::HEAP_PER_REGION);
    }
}
