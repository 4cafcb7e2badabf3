//! Memory: how much there is, the CMA region, the heaps, who may open them, what alignment costs, and udmabuf.
//!
//! Invariant: whether a shortage is a failure depends on what is configured. A board that serves a memfd pool needs no
//! CMA; one that insists on a heap needs at least its `pool.minimum` there.

use super::kernel::{Release, build_option};
use super::{Board, CLIENTS, DAEMON, Findings};
use crate::packing::{Extents, Placement, block_sizes, percent};
use crate::size::Size;

const HEAPS: &str = "/dev/dma_heap";
/// The heap of the default CMA region (drivers/dma-buf/heaps/cma_heap.c, from 6.17 on; the older names are of kernels that
/// make a heap of that region only).
const DEFAULT_HEAP: &str = "default_cma_region";
const REGION: &str = "/proc/device-tree/reserved-memory/kvbroker";
/// Waste from here on is worth a warning: as `kvbctl plan` and `status` have it.
const WASTE_PERCENT: f64 = 10.0;
/// `size_limit_mb` of udmabuf when the kernel does not say (drivers/dma-buf/udmabuf.c, up to 7.2).
const UDMABUF_MIB: u64 = 64;

fn size(bytes: u64) -> Size {
    Size::from_bytes(bytes)
}

pub(super) fn examine(board: &Board, found: &mut Findings) {
    total(board, found);
    region(board, found);
    cma(board, found);
    heaps(board, found);
    alignment(board, found);
    udmabuf(board, found);
}

fn kib(board: &Board, key: &str) -> Option<u64> {
    board.tree.field("/proc/meminfo", key).map(|kib| kib << 10)
}

fn total(board: &Board, found: &mut Findings) {
    let (pool, area, item) = (board.config.pool(), "memory", "pool");
    let Some(all) = kib(board, "MemTotal") else {
        return found.warn(area, item, "/proc/meminfo cannot be read", "see that /proc is mounted");
    };
    let available = kib(board, "MemAvailable").unwrap_or(0);
    let said = format!("a pool of {pool} of {} of memory, {} of it available", size(all), size(available));
    let smaller = "make pool.size smaller in /etc/kvbroker/kvbroker.toml";
    if pool.bytes() > all {
        found.fail(area, item, said, smaller);
    } else if board.pid.is_none() && pool.bytes() > available {
        found.warn(area, item, format!("{said}: a start would drive out others"), smaller);
    } else if pool.bytes() > all / 2 {
        found.warn(area, item, format!("{said}: more than half"), smaller);
    } else {
        found.ok(area, item, said);
    }
}

fn region(board: &Board, found: &mut Findings) {
    let (area, item) = ("memory", "region");
    let tree = &board.tree;
    let cmdline = tree.text("/proc/cmdline").unwrap_or_default();
    let cma = cmdline.split_whitespace().find(|word| word.starts_with("cma="));
    if !tree.exists(REGION) {
        return match cma {
            Some(word) => found.ok(area, item, format!("the CMA region is that of the command line, {word}")),
            None => found.ok(
                area,
                item,
                "no device-tree node of the broker's own; the kernel's default CMA region",
            ),
        };
    }
    let default = tree.exists(&format!("{REGION}/linux,cma-default"));
    let install = "kvbroker-install-overlay, then reboot";
    if !tree.exists(&format!("{REGION}/reusable")) || tree.exists(&format!("{REGION}/no-map")) {
        found.fail(
            area,
            item,
            "the node reserved-memory/kvbroker is not `reusable`, or `no-map`: no heap is made of it",
            format!("take the overlay that the package ships: {install}"),
        );
    } else if let (true, Some(word)) = (default, cma) {
        found.fail(
            area,
            item,
            format!("{word} on the kernel's command line replaces the node reserved-memory/kvbroker"),
            format!("remove {word} (Armbian: extraargs= in /boot/armbianEnv.txt) and reboot"),
        );
    } else if !default && board.release.is_some_and(|r| r < Release::HEAP_PER_REGION) {
        found.fail(
            area,
            item,
            "this kernel makes a heap of the default CMA region only, and the node reserved-memory/kvbroker is not it",
            format!("take the overlay with linux,cma-default: {install}"),
        );
    } else {
        found.ok(area, item, "the device tree has the node reserved-memory/kvbroker");
    }
}

fn cma(board: &Board, found: &mut Findings) {
    let (area, item) = ("memory", "cma");
    let (total, free) = (kib(board, "CmaTotal").unwrap_or(0), kib(board, "CmaFree").unwrap_or(0));
    let (pool, least) = (board.config.pool_bytes, board.config.minimum_bytes);
    let said = format!("CMA has {}, {} of it free", size(total), size(free));
    if !board.config.wants_heap() {
        return found.ok(area, item, format!("{said}; a memfd pool needs none"));
    }
    // A free part smaller than the pool is the pool itself while the daemon runs.
    let taken = board.pid.is_some();
    let enlarge = format!(
        "give it {} or more: kvbroker-install-overlay (device tree), or cma={}M on the kernel's command line; reboot",
        size(pool),
        pool.next_multiple_of(1 << 20) >> 20,
    );
    if total < least {
        let minimum = size(least);
        found.fail(area, item, format!("{said}: less than pool.minimum, {minimum}"), enlarge);
    } else if !taken && free < least {
        found.fail(
            area,
            item,
            format!("{said}: others have taken so much that pool.minimum, {}, does not fit", size(least)),
            "start the broker earlier, or give it a region of its own: kvbroker-install-overlay; reboot",
        );
    } else if total < pool || (!taken && free < pool) {
        found.warn(area, item, format!("{said}: the pool of {} is not taken whole", size(pool)), enlarge);
    } else {
        found.ok(area, item, said);
    }
}

fn heaps(board: &Board, found: &mut Findings) {
    let area = "heaps";
    let wanted = board.config.wants_heap();
    let names = board.tree.names(HEAPS);
    if names.is_empty() {
        let rockchip = board.tree.exists("/dev/rk_dma_heap");
        let said = match rockchip {
            true => {
                "only Rockchip's own /dev/rk_dma_heap is there, with calls of its own, which the broker does not use"
            }
            false => "there is none under /dev/dma_heap",
        };
        let mend = "a kernel with CONFIG_DMABUF_HEAPS_CMA and a CMA region; for engines on the CPU: pool.backend = \
                    \"memfd\"";
        return match wanted {
            true => found.fail(area, "names", said, mend),
            false => found.ok(area, "names", format!("{said}; a memfd pool needs none")),
        };
    }
    found.ok(area, "names", names.join(", "));
    let chosen = board.config.heap_in(&board.tree.real(&board.config.heap_directory));
    overlay(board, found, &names, chosen.as_deref().filter(|_| wanted));
    let Some(chosen) = chosen else {
        let said = "none of them is a CMA heap by its name";
        return match wanted {
            true => found.fail(area, "chosen", said, "name it: pool.heap in /etc/kvbroker/kvbroker.toml"),
            false => found.ok(area, "chosen", format!("{said}; a memfd pool needs none")),
        };
    };
    let Some(node) = board.tree.node(&chosen) else {
        let said = format!("{chosen}, which pool.heap names, is not there");
        return match wanted {
            true => found.fail(area, "chosen", said, format!("pool.heap = \"{}\"", names[0])),
            false => found.ok(area, "chosen", said),
        };
    };
    match wanted {
        true => found.ok(area, "chosen", chosen.clone()),
        false => found.ok(area, "chosen", format!("{chosen} would be taken; the configured pool is memfd")),
    }

    let group = board.tree.group_name(node.gid);
    let said = format!("{chosen} is {:04o}, group {group}", node.mode);
    let rules = "install udev/60-kvbroker.rules, then udevadm control --reload && udevadm trigger \
                 --subsystem-match=dma_heap";
    match &board.daemon {
        Some(daemon) if node.opens_for(daemon) => found.ok(area, "daemon-access", said.clone()),
        Some(_) if wanted => {
            let mend = match group.as_str() {
                "root" | DAEMON => rules.to_owned(),
                other => format!("usermod -aG {other} {DAEMON}, and restart kvbrokerd; or {rules}"),
            };
            found.fail(area, "daemon-access", format!("{said}: the user {DAEMON} may not open it"), mend);
        }
        Some(_) => found.ok(area, "daemon-access", format!("{said}; a memfd pool does not open it")),
        // That the user is missing is said once, under service.
        None => {}
    }
    exposure(board, found, &said, node, rules);
}

/// Whether the heap that the package's overlay makes is the one that is used. A heap is named after the node of its region.
fn overlay(board: &Board, found: &mut Findings, names: &[String], chosen: Option<&str>) {
    let Some(own) = names.iter().find(|name| name.split('@').next() == Some(DAEMON)) else { return };
    let path = format!("{HEAPS}/{own}");
    let (area, item) = ("heaps", "overlay");
    match chosen {
        Some(chosen) if chosen == path => found.ok(area, item, format!("{path} is the pool's")),
        // Where the overlay's node is the default region, two heaps are made of it.
        Some(chosen)
            if chosen == format!("{HEAPS}/{DEFAULT_HEAP}")
                && board.tree.exists(&format!("{REGION}/linux,cma-default")) =>
        {
            found.ok(area, item, format!("{chosen}, the pool's, is of the same region as {path}"));
        }
        Some(chosen) => found.warn(
            area,
            item,
            format!("{path}, the region of the broker's own, is there, and the pool comes from {chosen}"),
            format!("pool.heap = \"{own}\" in /etc/kvbroker/kvbroker.toml"),
        ),
        None => found.warn(
            area,
            item,
            format!("{path}, the region of the broker's own, is there, and the configured pool is none of a heap"),
            format!(
                "pool.device = \"contiguous\" and pool.heap = \"{own}\" in /etc/kvbroker/kvbroker.toml; or, where no device \
                 reads the pool, take the overlay away: kvbroker-install-overlay --remove, and reboot"
            ),
        ),
    }
}

/// Who else could empty the heap, past any limit of the broker.
fn exposure(board: &Board, found: &mut Findings, said: &str, node: super::tree::Node, rules: &str) {
    let (area, item) = ("heaps", "exposure");
    if node.mode & 0o006 != 0 {
        found.fail(area, item, format!("{said}: everybody can take all of its memory"), rules);
        return;
    }
    let groups = board.tree.groups();
    let members = groups.iter().find(|(_, gid, _)| *gid == node.gid && node.mode & 0o060 != 0);
    let others: Vec<&str> = members
        .map(|(.., members)| members.iter().map(String::as_str).filter(|m| *m != DAEMON).collect())
        .unwrap_or_default();
    match (others.is_empty(), members.map(|(name, ..)| name.as_str())) {
        (true, Some("video")) => found.warn(
            area,
            item,
            format!(
                "{said}: media programs that run with this group can empty it, past any limit of the broker"
            ),
            "a region of the broker's own (kvbroker-install-overlay), whose heap no other rule opens",
        ),
        (true, _) => found.ok(area, item, format!("{said}: nobody but the daemon opens it")),
        (false, Some(name)) => found.warn(
            area,
            item,
            format!("{said}: {} can empty it, past any limit of the broker", others.join(", ")),
            match name {
                DAEMON => {
                    format!("put engines' users into {CLIENTS}, not {DAEMON}: gpasswd -d USER {DAEMON}")
                }
                _ => "a region of the broker's own: kvbroker-install-overlay".into(),
            },
        ),
        (false, None) => {}
    }
}

fn alignment(board: &Board, found: &mut Findings) {
    let (area, item) = ("heaps", "alignment");
    let configured = board.config.cma_alignment_order;
    let kernels = build_option(board, "CONFIG_CMA_ALIGNMENT").and_then(|text| text.parse::<u32>().ok());
    let Ok(placement) = Placement::cma(board.page, kernels.unwrap_or(configured)) else { return };
    let blocks = block_sizes(&board.config.profiles);
    let cut = Extents::choose(board.config.pool_bytes, board.config.extent, &blocks, placement);
    let Ok(cut) = cut else { return };
    if let Some(order) = kernels.filter(|order| *order != configured) {
        let said = format!(
            "the kernel aligns buffers by CONFIG_CMA_ALIGNMENT = {order}, configured is {configured}"
        );
        return found.warn(area, item, said, format!("pool.cma-alignment-order = {order}"));
    }
    let worst = blocks.iter().map(|block| cut.pack(*block)).max_by_key(|packing| packing.waste.total());
    let Some(worst) = worst else { return };
    let share = percent(worst.waste.total(), board.config.pool_bytes);
    let known =
        if kernels.is_some() { "by the kernel's configuration" } else { "assumed: the kernel's is unknown" };
    let said = format!(
        "order {configured} ({known}): {} blocks of {} in {} extents of {}, {} ({share:.1} %) in no block",
        worst.blocks,
        size(worst.block_bytes),
        worst.extents,
        size(worst.extent_bytes),
        size(worst.waste.total()),
    );
    match share >= WASTE_PERCENT && board.config.wants_heap() {
        true => found.warn(
            area,
            item,
            said,
            "pool.extent = \"auto\", or other tokens-per-block: `kvbctl plan` compares",
        ),
        false => found.ok(area, item, said),
    }
}

fn udmabuf(board: &Board, found: &mut Findings) {
    let (area, tree) = ("udmabuf", &board.tree);
    let Some(node) = tree.node("/dev/udmabuf") else {
        let built = build_option(board, "CONFIG_UDMABUF");
        let mend = match built.as_deref() {
            Some("m") => "modprobe udmabuf, and a line `udmabuf` in /etc/modules-load.d/kvbroker.conf",
            _ => {
                "a kernel with CONFIG_UDMABUF; nothing else needs it: contiguous extents and staging serve a device"
            }
        };
        let said = "/dev/udmabuf is not there: no device range over scattered blocks, KV reaches an NPU through \
                    contiguous extents or by staging";
        return match board.config.wants_udmabuf() {
            true => found.fail(area, "node", format!("{said}; and the configured pool is made of it"), mend),
            false => found.warn(area, "node", said, mend),
        };
    };
    let said = format!("/dev/udmabuf is {:04o}, group {}", node.mode, tree.group_name(node.gid));
    match &board.daemon {
        Some(daemon) if !node.opens_for(daemon) => {
            let group = tree.group_name(node.gid);
            let mend: String = match group.as_str() {
                "root" => "udevadm trigger --subsystem-match=misc, so that the distribution's rule gives it to group kvm".into(),
                group => format!("usermod -aG {group} {DAEMON}, and restart kvbrokerd"),
            };
            let said = format!("{said}: the user {DAEMON} may not open it");
            match board.config.wants_udmabuf() {
                true => found.fail(area, "node", said, mend),
                false => found.warn(area, "node", said, mend),
            }
        }
        _ => found.ok(area, "node", said),
    }
    let parameters = "/sys/module/udmabuf/parameters";
    let limit = tree.number(&format!("{parameters}/size_limit_mb"));
    let list = tree.number(&format!("{parameters}/list_limit"));
    let mib = limit.unwrap_or(UDMABUF_MIB);
    let said = format!(
        "a buffer of up to {mib} MiB{}, of up to {} pieces",
        if limit.is_none() { " (assumed)" } else { "" },
        list.unwrap_or(1024),
    );
    let extent = board.config.extents(board.page).ok().map(|e| e.bytes);
    match extent.filter(|bytes| *bytes > mib << 20) {
        Some(bytes) => found.warn(
            area,
            "limits",
            format!("{said}: an extent has {}", size(bytes)),
            format!(
                "options udmabuf size_limit_mb={} in /etc/modprobe.d/kvbroker.conf",
                bytes.div_ceil(1 << 20)
            ),
        ),
        None => found.ok(area, "limits", said),
    }
}
