//! Boards that the doctor has seen: tests/data/boards.

use std::path::{Path, PathBuf};

use super::{Level, Report, examine};

fn board(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/boards").join(name)
}

/// In a copy, since the units are links out of the tree, which nobody follows in an examination.
fn see(name: &str) -> Report {
    changed(name, &[])
}

/// What was found for `area.item`: level, text, mend.
fn item<'a>(report: &'a Report, name: &str) -> (Level, &'a str, &'a str) {
    let found = report.items.iter().find(|i| format!("{}.{}", i.area, i.item) == name);
    let found = found.unwrap_or_else(|| panic!("{name} was not looked at:\n{report}"));
    (found.level, &found.said, found.mend.as_deref().unwrap_or_default())
}

fn expect(report: &Report, name: &str, level: Level, words: &str, mend: &str) {
    let (found, said, mended) = item(report, name);
    assert_eq!(found, level, "{name}: {said}\n{report}");
    assert!(said.contains(words), "{name}: {said}");
    assert!(mended.contains(mend), "{name}: {mended}");
}

#[test]
fn a_healthy_board_has_no_warning_and_no_failure() {
    let report = see("healthy");
    assert_eq!((report.warn, report.fail), (0, 0), "{report}");
    expect(&report, "heaps.chosen", Level::Ok, "/dev/dma_heap/kvbroker", "");
    expect(&report, "heaps.alignment", Level::Ok, "680 blocks of 384 KiB in 85 extents", "");
    expect(&report, "npu.iommu", Level::Ok, "0000:01:00.0 (Hailo) (hailo) is in IOMMU group 7", "");
    expect(&report, "service.daemon", Level::Ok, "process 412", "");
    expect(&report, "service.engines", Level::Ok, "1 run, none of them as root", "");
}

#[test]
fn a_vendor_kernel_without_udmabuf_says_what_it_costs_and_who_can_empty_the_heap() {
    let report = see("vendor-6.1");
    expect(&report, "kernel.holder-count", Level::Warn, "destroyed and allocated anew", "Linux 6.9");
    expect(
        &report,
        "kernel.pinning",
        Level::Warn,
        "never ends on this kernel",
        "memfd pool is not concerned",
    );
    expect(&report, "kernel.pressure", Level::Ok, "read every 10 s", "");
    expect(&report, "udmabuf.node", Level::Warn, "by staging", "CONFIG_UDMABUF");
    expect(&report, "memory.region", Level::Ok, "cma=256M", "");
    let rights = "usermod -aG video kvbroker";
    expect(
        &report,
        "heaps.daemon-access",
        Level::Fail,
        "0660, group video: the user kvbroker may not",
        rights,
    );
    expect(&report, "heaps.exposure", Level::Warn, "alice can empty it", "kvbroker-install-overlay");
    expect(&report, "npu.iommu", Level::Ok, "fdab0000.npu (RKNPU) is in IOMMU group 3", "");
    expect(
        &report,
        "npu.trust",
        Level::Warn,
        "/dev/dri/renderD129 is open to everybody",
        "a user of its own",
    );
    let root = "2 run as root and are one tenant, which trusts itself: rkllm_server (700), llm_panel (701)";
    expect(&report, "service.engines", Level::Warn, root, "SupplementaryGroups=");
    expect(&report, "service.daemon", Level::Warn, "does not run", "systemctl start kvbrokerd");
}

#[test]
fn a_mainline_kernel_with_rocket_reaches_the_pool_by_copies() {
    let report = see("rocket-6.18");
    assert_eq!(report.fail, 0, "{report}");
    expect(&report, "npu.import", Level::Warn, "imports no foreign buffers", "stage what the NPU reads");
    assert_eq!(report.items.iter().filter(|i| i.area == "npu").count(), 3, "three cores");
    expect(&report, "memory.region", Level::Ok, "reserved-memory/kvbroker", "");
    expect(&report, "heaps.chosen", Level::Ok, "/dev/dma_heap/default_cma_region", "");
    expect(&report, "heaps.exposure", Level::Ok, "nobody but the daemon", "");
    expect(&report, "udmabuf.limits", Level::Ok, "up to 64 MiB", "");
    // As a board that runs: nothing else to say.
    let warned: Vec<_> = report.items.iter().filter(|i| i.level == Level::Warn).map(|i| i.area).collect();
    assert_eq!(warned, ["npu", "npu", "npu", "service"], "{report}");
}

#[test]
fn a_default_cma_region_of_8_mib_fails_with_the_command_that_enlarges_it() {
    let report = see("small-cma");
    let said = "CMA has 8 MiB, 5.96 MiB of it free: less than pool.minimum, 128 MiB";
    expect(&report, "memory.cma", Level::Fail, said, "kvbroker-install-overlay");
    expect(&report, "memory.cma", Level::Fail, said, "cma=256M");
    expect(&report, "heaps.chosen", Level::Ok, "/dev/dma_heap/cma", "");
    let rules = "udevadm trigger --subsystem-match=dma_heap";
    expect(&report, "heaps.daemon-access", Level::Fail, "0600, group root", rules);
    expect(&report, "npu.iommu", Level::Ok, "has no IOMMU: it imports contiguous extents", "");
    expect(&report, "service.clients", Level::Warn, "only root connects", "usermod -aG kvbroker-clients");
}

#[test]
fn a_laptop_needs_no_cma_for_a_memfd_pool_and_is_told_to_install_the_service() {
    let report = see("laptop");
    expect(&report, "memory.cma", Level::Ok, "a memfd pool needs none", "");
    expect(&report, "heaps.names", Level::Ok, "system", "");
    expect(&report, "heaps.chosen", Level::Ok, "a memfd pool needs none", "");
    expect(&report, "npu.iommu", Level::Ok, "(a processing accelerator) (intel_vpu) is in IOMMU group 9", "");
    expect(&report, "service.user", Level::Fail, "no user kvbroker", "systemd-sysusers");
    expect(&report, "service.units", Level::Fail, "not installed", "install the package");
    expect(&report, "limits.open-files", Level::Warn, "neither a running daemon nor its unit", "524288");
}

/// A copy of a board, to be changed.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        match source.is_dir() && !source.is_symlink() {
            true => copy(&source, &target),
            // Links to units are followed, others lead nowhere here and are kept.
            false if source.exists() => _ = std::fs::copy(&source, &target).unwrap(),
            false => std::os::unix::fs::symlink(std::fs::read_link(&source).unwrap(), &target).unwrap(),
        }
    }
}

/// The board `name` with files changed: what is then said.
fn changed(name: &str, files: &[(&str, &str)]) -> Report {
    let dir = tempfile::tempdir().unwrap();
    copy(&board(name), dir.path());
    for (path, text) in files {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    examine(dir.path(), None).unwrap()
}

#[test]
fn a_size_on_the_command_line_that_replaces_the_node_is_a_failure() {
    let report = changed("rocket-6.18", &[("proc/cmdline", "root=/dev/sda cma=64M quiet")]);
    expect(&report, "memory.region", Level::Fail, "cma=64M", "remove cma=64M");
    // Where each region has a heap, cma= sizes the default one and leaves the node alone.
    let report = changed("healthy", &[("proc/cmdline", "cma=64M")]);
    expect(&report, "memory.region", Level::Ok, "reserved-memory/kvbroker", "");
    let report = changed("healthy", &[("proc/sys/kernel/osrelease", "6.18.1")]);
    expect(&report, "memory.region", Level::Fail, "default CMA region only", "linux,cma-default");
}

#[test]
fn a_heap_that_everybody_opens_and_a_client_in_the_daemons_group_are_named() {
    let nodes = std::fs::read_to_string(board("healthy").join(".nodes")).unwrap();
    let report = changed("healthy", &[(".nodes", &nodes.replace("c 660 0 997", "c 666 0 997"))]);
    expect(&report, "heaps.exposure", Level::Fail, "everybody can take all", "60-kvbroker.rules");
    let group = std::fs::read_to_string(board("healthy").join("etc/group")).unwrap();
    let report =
        changed("healthy", &[("etc/group", &group.replace("kvbroker:x:997:", "kvbroker:x:997:alice"))]);
    expect(&report, "heaps.exposure", Level::Warn, "alice can empty it", "gpasswd -d");
}

#[test]
fn the_overlays_heap_that_the_configuration_does_not_choose_is_a_warning_with_the_line_that_chooses_it() {
    expect(&see("healthy"), "heaps.overlay", Level::Ok, "/dev/dma_heap/kvbroker is the pool's", "");
    let of = |config: &str| changed("healthy", &[("etc/kvbroker/kvbroker.toml", config)]);
    let report = of("[pool]\ndevice = \"contiguous\"\nheap = \"default_cma_region\"\n");
    let said = "is there, and the pool comes from /dev/dma_heap/default_cma_region";
    expect(&report, "heaps.overlay", Level::Warn, said, "pool.heap = \"kvbroker\"");
    let report = of("[pool]\nbackend = \"memfd\"\n");
    expect(&report, "heaps.overlay", Level::Warn, "is none of a heap", "pool.device = \"contiguous\"");
    // There the overlay's region is the default one.
    expect(
        &see("rocket-6.18"),
        "heaps.overlay",
        Level::Ok,
        "is of the same region as /dev/dma_heap/kvbroker",
        "",
    );
    let report = see("laptop");
    assert!(report.items.iter().all(|i| i.item != "overlay"), "there is none there: {report}");
}

#[test]
fn a_cgroup_or_a_file_size_below_the_pool_fails() {
    let memfd = ("etc/kvbroker/kvbroker.toml", "[pool]\nbackend = \"memfd\"\n");
    let drop_in = "etc/systemd/system/kvbrokerd.service.d/override.conf";
    let report = changed("rocket-6.18", &[memfd, (drop_in, "[Service]\nMemoryMax=128M\nLimitFSIZE=1M\n")]);
    expect(
        &report,
        "limits.cgroup-memory",
        Level::Fail,
        "128 MiB (MemoryMax= of kvbrokerd.service)",
        "MemoryMax=",
    );
    expect(&report, "limits.file-size", Level::Fail, "the unit's limit is 1048576 bytes", "LimitFSIZE=");
    let cgroup = ("proc/412/cgroup", "0::/system.slice/kvbrokerd.service\n");
    let tight = ("sys/fs/cgroup/system.slice/memory.max", "268435456\n");
    let limits = "Limit  Soft Limit  Hard Limit  Units\nMax file size  1048576  unlimited  bytes\n";
    let report = changed("healthy", &[memfd, cgroup, tight, ("proc/412/limits", limits)]);
    let file = "256 MiB (/sys/fs/cgroup/system.slice/memory.max)";
    expect(&report, "limits.cgroup-memory", Level::Fail, file, "MemoryMax=");
    expect(
        &report,
        "limits.file-size",
        Level::Fail,
        "the running daemon's limit is 1048576 bytes",
        "LimitFSIZE=",
    );
    // Memory of a heap is no file, and no cgroup counts it.
    let report = changed("healthy", &[cgroup, tight]);
    expect(&report, "limits.cgroup-memory", Level::Ok, "", "");
}

#[test]
fn limits_come_from_the_running_daemon_or_else_from_its_unit_and_drop_ins() {
    let drop_in = "etc/systemd/system/kvbrokerd.service.d/override.conf";
    let low = [(drop_in, "[Service]\nLimitNOFILE=1024\nLimitMEMLOCK=8M\n")];
    let report = changed("rocket-6.18", &low);
    expect(&report, "limits.open-files", Level::Warn, "the unit's limit is 1024", "LimitNOFILE=");
    let memfd = ("etc/kvbroker/kvbroker.toml", "[pool]\nbackend = \"memfd\"\n");
    let report = changed("rocket-6.18", &[low[0], memfd]);
    expect(
        &report,
        "limits.locked-memory",
        Level::Warn,
        "8 MiB, so a pool of 256 MiB",
        "LimitMEMLOCK=infinity",
    );
    let report = changed("healthy", &low);
    expect(&report, "limits.open-files", Level::Ok, "the running daemon's limit is 524288", "");
    let report = changed("healthy", &[("proc/sys/vm/max_map_count", "30000\n")]);
    expect(&report, "limits.mappings", Level::Warn, "take up to 33664 mappings", "vm.max_map_count=33664");
}

#[test]
fn a_wrong_configuration_and_a_kernels_other_alignment_are_findings() {
    let report = changed("healthy", &[("etc/kvbroker/kvbroker.toml", "[pool]\nsizes = \"1M\"\n")]);
    expect(&report, "service.configuration", Level::Fail, "did you mean `size`?", "kvbrokerd --check");
    let report = changed("healthy", &[("boot/config-7.3.4-1-arm64", "CONFIG_CMA_ALIGNMENT=5\n")]);
    expect(&report, "heaps.alignment", Level::Warn, "CONFIG_CMA_ALIGNMENT = 5, configured is 8", "order = 5");
    let strict = "[pool]\nextent = \"block\"\nheap = \"kvbroker\"\n";
    let report = changed("healthy", &[("etc/kvbroker/kvbroker.toml", strict)]);
    expect(&report, "heaps.alignment", Level::Warn, "512 blocks of 384 KiB", "kvbctl plan");
}

#[test]
fn a_pool_of_udmabufs_on_a_kernel_without_them_is_a_failure() {
    let config = ("etc/kvbroker/kvbroker.toml", "[pool]\ndevice = \"iommu\"\n");
    let report = changed("vendor-6.1", &[config]);
    expect(&report, "udmabuf.node", Level::Fail, "the configured pool is made of it", "CONFIG_UDMABUF");
    let report = changed("rocket-6.18", &[config]);
    expect(&report, "udmabuf.node", Level::Ok, "0660, group kvm", "");
}

#[test]
fn every_warning_and_failure_carries_what_to_do() {
    for name in ["healthy", "vendor-6.1", "rocket-6.18", "small-cma", "laptop"] {
        let report = see(name);
        for item in &report.items {
            assert_eq!(item.mend.is_some(), item.level != Level::Ok, "{name}: {item:?}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["items"].as_array().unwrap().len(), report.ok + report.warn + report.fail);
        assert_eq!(json["items"][0]["level"], "ok");
    }
}

#[test]
fn an_engine_in_a_user_namespace_of_its_own_is_told_to_be_named_and_is_fine_once_it_is() {
    const WHOLE: &str = "         0          0 4294967295\n";
    let elsewhere = [("proc/412/uid_map", WHOLE), ("proc/600/uid_map", "         0     100000      65536\n")];
    let report = changed("healthy", &elsewhere);
    expect(&report, "service.user-namespaces", Level::Warn, "(600, uid 1000)", "[[tenant]]");
    let not_looked_at = |report: &Report| report.items.iter().all(|i| i.item != "user-namespaces");
    let name = [("etc/kvbroker/kvbroker.toml.d/tenant.toml", "[[tenant]]\nuid = 1000\n")];
    assert!(not_looked_at(&changed("healthy", &[&elsewhere[..], &name].concat())));
    assert!(not_looked_at(&changed("healthy", &[("proc/412/uid_map", WHOLE), ("proc/600/uid_map", WHOLE)])));
}

#[test]
fn a_root_that_is_not_there_is_an_error_and_no_board() {
    assert!(examine(Path::new("/nowhere"), None).is_err());
}
