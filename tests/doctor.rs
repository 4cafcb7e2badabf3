//! `kvbctl doctor` as it is typed: exit codes, JSON, and a root that is not there. What is found is tested in
//! `src/doctor/tests.rs`, over the same boards.

use std::path::Path;
use std::process::{Command, Output};

fn doctor(board: &str, more: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/boards").join(board);
    Command::new(env!("CARGO_BIN_EXE_kvbctl"))
        .arg("doctor")
        .arg("--root")
        .arg(root)
        .args(more)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_board_without_failure_ends_with_0_and_with_strict_only_without_warnings() {
    let healthy = doctor("healthy", &["--strict"]);
    assert_eq!(healthy.status.code(), Some(0), "{}", text(&healthy.stdout));
    assert!(text(&healthy.stdout).ends_with("0 warnings, 0 failures\n"), "{}", text(&healthy.stdout));
    assert_eq!(doctor("rocket-6.18", &[]).status.code(), Some(0));
    assert_eq!(doctor("rocket-6.18", &["--strict"]).status.code(), Some(1));
}

#[test]
fn a_failure_ends_with_1_and_each_item_that_is_not_ok_shows_its_mending_command() {
    let output = doctor("small-cma", &[]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), ""));
    let said = text(&output.stdout);
    let marked = said.lines().filter(|l| l.starts_with("warn ") || l.starts_with("fail ")).count();
    assert!(
        marked > 0 && said.lines().filter(|l| l.trim_start().starts_with("mend: ")).count() == marked,
        "{said}"
    );
    assert!(said.contains("cma=256M on the kernel's command line"), "{said}");
}

#[test]
fn json_is_for_scripts_and_counts_its_items() {
    let output = doctor("vendor-6.1", &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let items = report["items"].as_array().unwrap();
    let failed: Vec<_> = items.iter().filter(|i| i["level"] == "fail").collect();
    assert_eq!(failed.len() as u64, report["fail"].as_u64().unwrap());
    assert_eq!(failed[0]["area"], "heaps");
    assert_eq!(failed[0]["item"], "daemon-access");
    assert!(failed[0]["mend"].as_str().unwrap().contains("usermod"), "{report}");
}

#[test]
fn a_root_that_is_not_there_and_a_wrong_option_are_told_apart() {
    let output = doctor("no-such-board", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no-such-board"), "{}", text(&output.stderr));
    assert_eq!(doctor("healthy", &["--nonsense"]).status.code(), Some(2));
}
