//! The C of `docs/npu.md`: every snippet compiles against the header, and what needs no device runs.
#![cfg(feature = "daemon")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// The snippets of the document: their label after `c`, and their text.
fn snippets() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/npu.md")).unwrap();
    let blocks = text.split("\n```c").skip(1).map(|block| {
        let (label, rest) = block.split_once('\n').unwrap();
        (label.trim().to_owned(), rest.split("\n```").next().unwrap().to_owned() + "\n")
    });
    blocks.collect()
}

const HEAD: &str = "#include <kvbroker.h>\n#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n#include <sys/mman.h>\n";

/// What RKNN's header declares of this, for want of RKNN.
const RKNN: &str = "typedef uint64_t rknn_context;\n\
    typedef struct _rknn_tensor_memory { void *virt_addr; uint64_t phys_addr; int32_t fd; int32_t offset; uint32_t size; } rknn_tensor_mem;\n\
    rknn_tensor_mem *rknn_create_mem_from_fd(rknn_context ctx, int32_t fd, void *virt_addr, uint32_t size, int32_t offset);\n";

/// Without a device: every way is declined in words, and nothing is left behind.
const MAIN: &str = r#"
static int never_start(int dma_buf, uint64_t offset, uint64_t bytes)
{
    (void)dma_buf, (void)offset, (void)bytes;
    return -1;
}

static int never_wait(void)
{
    return -1;
}

int main(void)
{
    kvb_client *client;
    kvb_profile *profile;
    kvb_session *session;
    kvb_window *window = NULL;
    uint64_t address;
    kvb_geometry geometry = KVB_INIT(kvb_geometry);
    geometry.layers = 2;
    geometry.k_row = geometry.v_row = 4096;
    geometry.tokens_per_block = 16;
    if (kvb_embedded(NULL, NULL, &client) < 0 || kvb_profile_new(client, &geometry, &profile) < 0 ||
        kvb_session_open(profile, NULL, &session) < 0 || kvb_session_ensure(session, 20) < 0)
        return 1;
    if (give_plane_to_npu(session, 1, KVB_V, &window) != KVB_ERR_BAD_REQUEST || window)
        return 2;
    char text[1024];
    kvb_last_error(text, sizeof text);
    if (!strstr(text, "run: ") || !strstr(text, "udmabuf: ") || !strstr(text, "iommu: ") || !strstr(text, "bounce: "))
        return 3;
    if (give_plane_to_npu(session, 2, KVB_V, &window) != KVB_ERR_INVALID)
        return 4;
    if (follow(NULL, session) != KVB_ERR_INVALID || npu_of_window(NULL, &address) != KVB_ERR_INVALID ||
        stream_to_npu(NULL, session, never_start, never_wait) != KVB_ERR_INVALID || kvb_window_close(NULL) != 0)
        return 5;
    puts(text);
    return kvb_session_close(session) | kvb_profile_close(profile) | kvb_client_close(client);
}
"#;

fn compile(directory: &Path, name: &str, source: &str, extra: &[&str]) -> std::path::PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (file, program) = (directory.join(format!("{name}.c")), directory.join(name));
    fs::write(&file, source).unwrap();
    let flags =
        ["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-D_POSIX_C_SOURCE=200809L"];
    let mut cc = Command::new("cc");
    cc.args(flags).arg(format!("-I{}", root.join("include").display())).arg(&file).arg("-o").arg(&program);
    let ran = cc.args(extra).output().unwrap();
    assert!(ran.status.success(), "{name}: {}", String::from_utf8_lossy(&ran.stderr));
    program
}

#[test]
fn every_snippet_compiles_and_says_in_words_that_there_is_no_device() {
    let directory = tempfile::tempdir().unwrap();
    let snippets = snippets();
    assert!(snippets.len() >= 5, "{} snippets", snippets.len());
    let (rknn, plain): (Vec<_>, Vec<_>) = snippets.into_iter().partition(|(label, _)| label == "rknn");
    assert_eq!(rknn.len(), 1);
    compile(directory.path(), "rknn", &[HEAD, RKNN, &rknn[0].1].concat(), &["-c"]);
    let library = std::env::current_exe().unwrap().parent().unwrap().join("libkvbroker.a");
    let all: String = plain.into_iter().map(|(_, text)| text).collect();
    let libraries = [library.to_str().unwrap(), "-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
    let program = compile(directory.path(), "snippets", &[HEAD, &all, MAIN].concat(), &libraries);
    let ran = Command::new(program).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{}: {said}", ran.status);
    assert!(said.contains("no device is configured"), "{said}");
}

#[test]
fn the_import_example_compiles_without_a_warning() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().unwrap();
    let source = fs::read_to_string(root.join("examples/npu-import.c")).unwrap();
    compile(directory.path(), "npu-import", &source, &["-c"]);
}

#[test]
fn every_cell_of_the_matrix_that_says_run_here_names_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/npu.md")).unwrap();
    let section = text.split("\n## ").find(|s| s.starts_with("1. ")).unwrap();
    // A name in backticks that is a sentence is a test's (tests/docs.rs says whether there is one of that name).
    let named = |part: &str| -> Vec<String> {
        let quoted = part.split('`').skip(1).step_by(2).map(|q| q.rsplit("::").next().unwrap());
        quoted.filter(|q| q.matches('_').count() >= 5).map(String::from).collect()
    };
    let mut cells = 0;
    for cell in section.lines().filter(|l| l.starts_with("| ")).flat_map(|l| l.split(" | ")) {
        let Some((_, behind)) = cell.split_once("*run here*") else { continue };
        cells += 1;
        // Either a name, or a letter, which the list below the matrix explains.
        let letter = behind.split('(').skip(1).find(|l| l.as_bytes().get(1) == Some(&b')')).map(|l| &l[..2]);
        let item =
            |item: &&str| letter.is_some_and(|l| item.strip_prefix('(').is_some_and(|i| i.starts_with(l)));
        let listed = section.split("\n- ").find(item).map_or(Vec::new(), named);
        assert!(!named(behind).is_empty() || !listed.is_empty(), "no test is named for: {cell}");
    }
    assert!(cells >= 7, "{cells} cells say that they were run");
}

/// A tree as sysfs shows it: PCI devices with their IOMMU group.
struct Sysfs(tempfile::TempDir);

impl Sysfs {
    fn new() -> Self {
        let sysfs = Sysfs(tempfile::tempdir().unwrap());
        fs::create_dir_all(sysfs.0.path().join("bus/pci/drivers/vfio-pci")).unwrap();
        fs::create_dir_all(sysfs.0.path().join("bus/pci/devices")).unwrap();
        sysfs
    }

    fn device(&self, address: &str, class: &str, group: Option<&str>) -> std::path::PathBuf {
        let device = self.0.path().join("bus/pci/devices").join(address);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("class"), class).unwrap();
        if let Some(group) = group {
            let group = self.0.path().join("kernel/iommu_groups").join(group);
            fs::create_dir_all(group.join("devices").join(address)).unwrap();
            std::os::unix::fs::symlink(&group, device.join("iommu_group")).unwrap();
        }
        device
    }

    /// Runs the script: whether it worked, and what it said.
    fn bind(&self, arguments: &[&str]) -> (bool, String) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/npu-bind");
        let ran = Command::new(script).args(arguments).env("KVBROKER_SYSFS", self.0.path()).output().unwrap();
        let said = [ran.stdout, ran.stderr].concat();
        (ran.status.success(), String::from_utf8_lossy(&said).into_owned())
    }
}

#[test]
fn the_setup_script_binds_a_device_that_is_alone_behind_its_iommu_and_no_other() {
    let sysfs = Sysfs::new();
    sysfs.device("0000:01:00.0", "0x120000", Some("5"));
    sysfs.device("0000:01:00.1", "0x040300", Some("5"));
    sysfs.device("0000:02:00.0", "0x120000", None);
    let ready = sysfs.device("0000:03:00.0", "0x120000", Some("6"));
    sysfs.device("0000:00:1c.0", "0x060400", Some("6"));
    std::os::unix::fs::symlink(sysfs.0.path().join("bus/pci/drivers/vfio-pci"), ready.join("driver"))
        .unwrap();
    fs::create_dir_all(ready.join("vfio-dev/vfio3")).unwrap();

    let refused = |address: &str, why: &str| {
        let (worked, said) = sysfs.bind(&[address]);
        assert!(!worked && said.contains(why), "{address}: {said}");
    };
    refused("01:00.0", "is no PCI address");
    refused("0000:09:00.0", "there is no PCI device 0000:09:00.0");
    refused("0000:01:00.0", "shares its IOMMU group with 0000:01:00.1");
    refused("0000:02:00.0", "is behind no IOMMU");
    assert_eq!(sysfs.bind(&["0000:03:00.0"]), (true, "/dev/vfio/devices/vfio3\n".into()));
    let (_, listed) = sysfs.bind(&["--list"]);
    assert!(listed.contains("0000:03:00.0 class 0x120000 driver vfio-pci"), "{listed}");
    assert!(!listed.contains("0000:01:00") && !listed.contains("0000:02:00"), "{listed}");
    assert!(!sysfs.bind(&["--release", "0000:01:00.0"]).0);
}
