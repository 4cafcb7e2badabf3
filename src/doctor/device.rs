//! NPUs: which there are, whether an IOMMU stands before them, and what their drivers do with the pool's buffers.
//!
//! Invariant: a driver is known by what the kernel calls it (`DRIVER=`, `OF_COMPATIBLE_n=` in uevent, PCI ids), never by
//! the board's name. What each driver imports is from its source: rknpu 0.9.8 (rknpu_gem.c), rocket and ethosu of Linux
//! 7.3, hailort-drivers 5.3 and gasket.

use super::{Board, Findings};

const AREA: &str = "npu";

/// How a driver takes foreign buffers.
enum Import {
    /// Rockchip's: imports dma-bufs, keeps the first address only, and takes kernel addresses from user space.
    Rknpu,
    /// None at all.
    Nothing,
    /// dma-bufs in pieces.
    Scattered,
}

struct Npu {
    name: String,
    driver: String,
    import: Import,
    iommu_group: Option<String>,
    /// Nodes that reach it.
    nodes: Vec<String>,
}

/// Names in `compatible` or of drivers, and what they are.
fn by_name(driver: &str, compatible: &str) -> Option<Import> {
    let has = |word: &str| driver.eq_ignore_ascii_case(word);
    if has("rknpu") || compatible.ends_with("-rknpu") {
        return Some(Import::Rknpu);
    }
    if has("rocket")
        || has("ethosu")
        || compatible.ends_with("-rknn-core")
        || compatible.starts_with("arm,ethos-u")
    {
        return Some(Import::Nothing);
    }
    None
}

/// PCI vendor and device of accelerators, and the class of others ("processing accelerators", 0x1200).
fn by_pci(vendor: &str, device: &str, class: &str) -> Option<(&'static str, Import)> {
    match (vendor, device) {
        ("0x1e60", _) => Some(("Hailo", Import::Scattered)),
        ("0x1ac1", "0x089a") => Some(("Coral Edge TPU", Import::Scattered)),
        _ if class.starts_with("0x1200") => Some(("a processing accelerator", Import::Scattered)),
        _ => None,
    }
}

fn value<'a>(text: &'a str, key: &str) -> &'a str {
    text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
}

fn platform(board: &Board) -> Vec<Npu> {
    let root = "/sys/bus/platform/devices";
    let mut all: Vec<Npu> = Vec::new();
    for name in board.tree.names(root) {
        let Some(text) = board.tree.text(&format!("{root}/{name}/uevent")) else { continue };
        let driver = value(&text, "DRIVER");
        let Some(import) = by_name(driver, value(&text, "OF_COMPATIBLE_0")) else { continue };
        let iommu_group = board.tree.link(&format!("{root}/{name}/iommu_group"));
        all.push(Npu { name, driver: driver.into(), import, iommu_group, nodes: Vec::new() });
    }
    // The vendor's driver is a DRM device or a misc one, by how it was built.
    for class in ["drm", "accel"] {
        for node in board.tree.names(&format!("/sys/class/{class}")) {
            let device = format!("/sys/class/{class}/{node}/device");
            let Some(text) = board.tree.text(&format!("{device}/uevent")) else { continue };
            let path = if class == "drm" { format!("/dev/dri/{node}") } else { format!("/dev/accel/{node}") };
            let driver = value(&text, "DRIVER");
            let same = all.iter_mut().find(|n| !driver.is_empty() && n.driver.eq_ignore_ascii_case(driver));
            if let Some(npu) = same.filter(|_| board.tree.exists(&path)) {
                npu.nodes.push(path);
            }
        }
    }
    if board.tree.exists("/dev/rknpu") {
        if let Some(npu) = all.iter_mut().find(|n| matches!(n.import, Import::Rknpu)) {
            npu.nodes.push("/dev/rknpu".into());
        }
    }
    all
}

fn pci(board: &Board) -> Vec<Npu> {
    let root = "/sys/bus/pci/devices";
    let make = |name: String| {
        let read = |file: &str| board.tree.text(&format!("{root}/{name}/{file}")).unwrap_or_default();
        let (known, import) = by_pci(&read("vendor"), &read("device"), &read("class"))?;
        let iommu_group = board.tree.link(&format!("{root}/{name}/iommu_group"));
        let driver = value(&read("uevent"), "DRIVER").to_owned();
        Some(Npu { name: format!("{name} ({known})"), driver, import, iommu_group, nodes: Vec::new() })
    };
    board.tree.names(root).into_iter().filter_map(make).collect()
}

pub(super) fn examine(board: &Board, found: &mut Findings) {
    let all: Vec<Npu> = platform(board).into_iter().chain(pci(board)).collect();
    if all.is_empty() {
        return found.ok(AREA, "devices", "none that is known; engines run on the CPU");
    }
    for npu in &all {
        one(board, npu, found);
    }
}

fn one(board: &Board, npu: &Npu, found: &mut Findings) {
    let driver = if npu.driver.is_empty() { "no driver" } else { &npu.driver };
    let said = match &npu.iommu_group {
        Some(group) => format!("{} ({driver}) is in IOMMU group {group}", npu.name),
        None => format!("{} ({driver}) has no IOMMU", npu.name),
    };
    let contiguous = "pool.device = \"contiguous\" in /etc/kvbroker/kvbroker.toml, and a CMA heap";
    match (&npu.import, npu.iommu_group.is_some()) {
        (Import::Rknpu, true) => found.ok(AREA, "iommu", format!("{said}: it imports extents, and blocks in pieces")),
        (Import::Rknpu, false) if board.config.reads_contiguous() => {
            found.ok(AREA, "iommu", format!("{said}: it imports contiguous extents, and only those are configured"));
        }
        (Import::Rknpu, false) => found.warn(
            AREA,
            "iommu",
            format!("{said}: it would read wrong memory past the first piece of a scattered buffer, without an error"),
            contiguous,
        ),
        (Import::Nothing, _) => found.warn(
            AREA,
            "import",
            format!("{said}: its driver imports no foreign buffers, so KV reaches it by copies"),
            "nothing on this kernel; engines keep KV in the pool for the CPU, and stage what the NPU reads",
        ),
        (Import::Scattered, true) => found.ok(AREA, "iommu", format!("{said}: blocks in pieces can be mapped")),
        (Import::Scattered, false) => {
            let mend = "turn the IOMMU on (firmware; intel_iommu=on, or iommu.passthrough=0), or trust the device";
            found.warn(AREA, "iommu", format!("{said}: it can reach all memory"), mend);
        }
    }
    if matches!(npu.import, Import::Rknpu) {
        let open: Vec<String> = npu.nodes.iter().filter_map(|path| open_to(board, path)).collect();
        let said = "rknpu takes kernel addresses from whoever opens its node: such a process is trusted with all memory, \
                    and no broker can isolate it";
        found.warn(
            AREA,
            "trust",
            match open.is_empty() {
                true => said.to_owned(),
                false => format!("{said}; {}", open.join(", ")),
            },
            "let one service open the node, under a user of its own, and no tenant",
        );
    }
}

/// Who may open a node beside root.
fn open_to(board: &Board, path: &str) -> Option<String> {
    let node = board.tree.node(path)?;
    if node.mode & 0o006 != 0 {
        return Some(format!("{path} is open to everybody"));
    }
    (node.mode & 0o060 != 0).then(|| format!("{path} is open to group {}", board.tree.group_name(node.gid)))
}
