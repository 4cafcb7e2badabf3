//! Pinned prompts that survive a restart of the daemon, and files that are no such prompts.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;

use crate::support::{BLOCK, CONFIG, Daemon, PER_BLOCK, POOL, Place, mount_tmpfs, until};

const A: u32 = 4001;
const B: u32 = 4002;

/// A place whose daemon stores prefixes, with these further keys.
fn place(keys: &str) -> Place {
    let place = Place::new(CONFIG);
    configure(&place, CONFIG, keys);
    place
}

fn directory(place: &Place) -> PathBuf {
    place.path("prefixes")
}

fn configure(place: &Place, config: &str, keys: &str) {
    let text = format!("{config}[prefix.store]\ndirectory = {:?}\n{keys}", directory(place));
    std::fs::write(place.path("kvbroker.toml"), text).unwrap();
}

/// A process of `uid` writes and pins the first `blocks` blocks of the prompt, and ends.
fn pin(daemon: &Daemon, uid: u32, blocks: usize, who: u8) {
    let tokens = blocks * PER_BLOCK;
    let mut c = daemon.helper(uid);
    c.must("open");
    c.must(&format!("ensure 0 {}", tokens + 1));
    c.must(&format!("fill 0 0 {tokens} {who}"));
    c.must(&format!("seal 0 {tokens}"));
    c.must(&format!("pin 0 {tokens}"));
    c.must("close 0");
    drop(c);
    until("it has gone", || daemon.clients() == 0);
}

/// A new process of `uid` finds so many blocks of the prompt, and reads what was written.
fn finds(daemon: &Daemon, uid: u32, blocks: usize, who: u8) {
    let tokens = blocks * PER_BLOCK;
    let mut c = daemon.helper(uid);
    c.must("open");
    assert_eq!(c.say(&format!("attach 0 {}", tokens + 1)), tokens.to_string(), "{}", daemon.place.log());
    c.must(&format!("holds 0 0 {tokens} {who}"));
    // What comes after it is the process's own.
    c.must(&format!("ensure 0 {}", tokens + PER_BLOCK));
    c.must(&format!("fill 0 {tokens} {} {}", tokens + PER_BLOCK, who ^ 1));
    c.must(&format!("holds 0 0 {tokens} {who}"));
}

fn finds_nothing(daemon: &Daemon, uid: u32) {
    let mut c = daemon.helper(uid);
    c.must("open");
    assert_eq!(c.say("attach 0 33"), "0");
}

/// `kvbctl`: exit code, standard output, standard error.
fn kvbctl(daemon: &Daemon, what: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    let output = command.arg(what).arg("--socket").arg(daemon.place.path("admin.sock")).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn saved(daemon: &Daemon, lines: usize) {
    let mut answer = (None, String::new(), String::new());
    until("what was stored has been read", || {
        answer = kvbctl(daemon, "save");
        !answer.2.contains("just now")
    });
    let (code, said, why) = answer;
    assert_eq!((code, why.as_str()), (Some(0), ""), "{said}");
    assert_eq!(said.matches("saved: ").count(), lines, "{said}");
}

fn stop(daemon: &mut Daemon) {
    assert_eq!(daemon.signal(Signal::SIGTERM).code(), Some(0));
}

/// The next daemon in the same place, when it has read what is stored.
fn next(daemon: &mut Daemon) {
    daemon.child = daemon.place.command().spawn().unwrap();
    until("the next daemon serves", || daemon.try_admin("check").is_some());
    until("it has read its files", || daemon.admin("load")["prefixes"].is_array());
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

#[test]
fn a_pinned_prompt_is_there_after_a_restart_and_a_new_process_reads_the_same_bytes() {
    let mut daemon = place("").start();
    pin(&daemon, A, 3, 5);
    pin(&daemon, B, 2, 9);
    saved(&daemon, 2);
    let directory = directory(&daemon.place);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&directory), 0o700);
    assert!(files(&directory).iter().all(|f| mode(f) == 0o600));
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        daemon.signal(signal);
        // Whoever comes first, before the files are read, waits for them.
        daemon.child = daemon.place.command().spawn().unwrap();
        until("the next daemon serves", || daemon.try_admin("check").is_some());
        finds(&daemon, A, 3, 5);
        finds(&daemon, B, 2, 9);
        finds_nothing(&daemon, A + 7);
        assert_eq!(daemon.account("pinned"), 5 * BLOCK);
        until("what they had of their own is back", || daemon.clients() == 0);
        daemon.lives();
    }
    // They are saved again as they came, and let go as any other.
    saved(&daemon, 2);
    let (code, said, _) = kvbctl(&daemon, "load");
    assert_eq!((code, said.matches("there already: ").count()), (Some(0), 2), "{said}");
    let status = daemon.admin("status");
    let pins = status["pins"].as_array().unwrap();
    assert_eq!(pins.len(), 2);
    assert!(pins.iter().all(|p| p["pid"] == 0), "{status}");
    assert_eq!(daemon.admin("unpin all")["unpinned"].as_array().unwrap().len(), 2);
    assert_eq!(daemon.account("pinned"), 0);
    let (code, said, _) = kvbctl(&daemon, "save");
    assert_eq!((code, said.matches("removed: ").count()), (Some(0), 2), "{said}");
    assert!(files(&directory).is_empty());
    stop(&mut daemon);
    next(&mut daemon);
    assert_eq!(daemon.account("free"), POOL);
    finds_nothing(&daemon, A);
}

#[test]
fn files_that_are_no_whole_prefix_of_this_version_are_named_and_cost_nothing() {
    let mut daemon = place("").start();
    pin(&daemon, A, 3, 5);
    saved(&daemon, 1);
    stop(&mut daemon);
    let file = files(&directory(&daemon.place)).remove(0);
    let good = std::fs::read(&file).unwrap();
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let foreign = {
        // Another tenant's name over a whole file, with a right checksum: whoever can do that can read this test.
        use sha2::Digest as _;
        let length = u32::from_le_bytes(good[12..16].try_into().unwrap()) as usize;
        let body = String::from_utf8(good[48..48 + length].to_vec()).unwrap();
        let body = body.replacen(&format!("\"tenant\":{A}"), &format!("\"tenant\":{B}"), 1);
        let mut bytes = good.clone();
        bytes[48..48 + length].copy_from_slice(body.as_bytes());
        let sum = sha2::Sha256::digest([&bytes[..16], body.as_bytes()].concat());
        bytes[16..48].copy_from_slice(&sum);
        bytes
    };
    let mut older = good.clone();
    older[8] = 0;
    for (bytes, words) in [
        (changed(3), "its first bytes are others"),
        (changed(40), "checksum of its head"),
        (changed(good.len() - 1), "checksum of block 2"),
        (good[..good.len() - 1].to_vec(), "it is cut"),
        (Vec::new(), "it is cut"),
        ([&good[..], &good[..]].concat(), "longer than it says"),
        (older, "of version 0"),
        (foreign, "it is foreign"),
        (vec![7; 600 << 10], "prefix.store.limit"),
    ] {
        std::fs::write(&file, bytes).unwrap();
        let before = daemon.place.log().len();
        next(&mut daemon);
        let log = daemon.place.log()[before..].to_owned();
        assert!(log.contains(words) && log.contains(&file.display().to_string()), "{words}: {log}");
        until("nothing was kept", || daemon.account("free") == POOL);
        finds_nothing(&daemon, A);
        let (code, _, why) = kvbctl(&daemon, "load");
        assert_eq!((code, why.contains(words)), (Some(1), true), "{words}: {why}");
        daemon.lives();
        stop(&mut daemon);
    }
    std::fs::write(&file, good).unwrap();
    next(&mut daemon);
    finds(&daemon, A, 3, 5);
}

#[test]
fn only_what_the_configuration_names_is_stored_and_loaded() {
    let mut daemon = place(&format!("tenants = [{B}]\n")).start();
    pin(&daemon, A, 2, 5);
    pin(&daemon, B, 2, 9);
    saved(&daemon, 1);
    stop(&mut daemon);
    next(&mut daemon);
    finds_nothing(&daemon, A);
    finds(&daemon, B, 2, 9);
    stop(&mut daemon);
    configure(&daemon.place, CONFIG, "labels = [\"nobody\"]\n");
    next(&mut daemon);
    assert!(daemon.place.log().contains("it stays in its file"), "{}", daemon.place.log());
    let (code, said, _) = kvbctl(&daemon, "save");
    assert_eq!((code, said.contains("no pinned prefix is to be stored")), (Some(0), true), "{said}");
    assert_eq!(files(&directory(&daemon.place)).len(), 1, "what was not loaded is not removed");
}

#[test]
fn without_a_directory_nothing_is_stored_and_that_is_said() {
    let daemon = Daemon::new();
    for what in ["save", "load"] {
        let (code, _, why) = kvbctl(&daemon, what);
        assert_eq!((code, why.contains("set prefix.store.directory")), (Some(1), true), "{why}");
    }
    let (code, log) = Place::new("[prefix.store]\nlimit = \"1M\"\n").fails();
    assert_eq!((code, log.contains("prefix.store = no directory")), (Some(2), true), "{log}");
    for (keys, words) in [
        ("tenant-limit = \"1M\"\n", "tenant-limit = 1M: that is more than the 512K of prefix.store.limit"),
        (
            "tenants = [1, 2, 3]\ntenant-limit = \"200K\"\n",
            "3 tenants with that much have more than the 512K",
        ),
        ("labels = [\"\"]\n", "an empty label names no prefix"),
    ] {
        let text = format!("{CONFIG}[prefix.store]\ndirectory = \"/nowhere\"\n{keys}");
        let (code, log) = Place::new(&text).fails();
        assert_eq!((code, log.contains(words)), (Some(2), true), "{words}: {log}");
    }
    let (code, log) = Place::new("[prefix.store]\ndirectory = \"prefixes\"\n").fails();
    assert_eq!((code, log.contains("from the root on")), (Some(2), true), "{log}");
}

#[test]
fn a_prefix_that_does_not_fit_the_next_pool_is_left_in_its_file() {
    let mut daemon = place("").start();
    pin(&daemon, A, 3, 5);
    pin(&daemon, B, 2, 9);
    saved(&daemon, 2);
    stop(&mut daemon);
    for (config, words) in [
        // Extents of one block: A may own two.
        (
            format!("{CONFIG}[[tenant]]\nuid = {A}\nlimit = \"64K\"\n").replace("128K", "32K"),
            "it does not fit: 3 blocks are needed",
        ),
        (format!("{CONFIG}[limits]\npinned = \"64K\"\n"), "limits.pinned"),
        (
            CONFIG.replace("128K", "16K").replace("head-dim = 128", "head-dim = 64"),
            "never fits an extent of 16 KiB",
        ),
    ] {
        configure(&daemon.place, &config, "limit = \"1M\"\n");
        let before = daemon.place.log().len();
        next(&mut daemon);
        let log = daemon.place.log()[before..].to_owned();
        assert!(log.contains(words), "{words}: {log}");
        daemon.lives();
        stop(&mut daemon);
    }
    configure(&daemon.place, CONFIG, "");
    next(&mut daemon);
    finds(&daemon, A, 3, 5);
    finds(&daemon, B, 2, 9);
}

#[test]
fn a_full_disk_and_a_full_store_leave_what_was_stored_before() {
    // Too much for prefix.store.limit.
    let daemon = place("limit = \"80K\"\ntenant-limit = \"80K\"\n").start();
    pin(&daemon, A, 2, 5);
    saved(&daemon, 1);
    let before = std::fs::read(&files(&directory(&daemon.place))[0]).unwrap();
    pin(&daemon, B, 2, 9);
    let (code, said, why) = kvbctl(&daemon, "save");
    assert_eq!((code, said.matches("saved: ").count()), (Some(1), 1), "{said}");
    assert!(why.contains("of prefix.store.limit are in use; what was stored before stays"), "{why}");
    let now = files(&directory(&daemon.place));
    assert_eq!((now.len(), std::fs::read(&now[0]).unwrap() == before), (1, true));

    // A file system that has room for one of them, in a mount namespace of the daemon's own.
    let place = place("");
    let full = directory(&place);
    std::fs::create_dir(&full).unwrap();
    let daemon = place.start_with(|command| mount_tmpfs(command, &full, c"size=144k,mode=0700"));
    pin(&daemon, A, 2, 5);
    saved(&daemon, 1);
    let inside = Path::new("/proc").join(daemon.pid().to_string()).join("root");
    let inside = inside.join(full.strip_prefix("/").unwrap());
    let one = files(&inside);
    let before = std::fs::read(&one[0]).unwrap();
    pin(&daemon, B, 3, 9);
    let (code, _, why) = kvbctl(&daemon, "save");
    assert_eq!(code, Some(1));
    assert!(why.contains("no space is left for") && why.contains("what was stored before stays"), "{why}");
    assert_eq!(files(&inside), one, "nothing half written is left behind");
    assert!(std::fs::read(&one[0]).unwrap() == before);
}

#[test]
fn one_tenant_that_pins_all_it_can_leaves_another_ones_prompt_its_place_in_the_store() {
    // Two blocks and their head for each of the two.
    let keys = format!("limit = \"160K\"\ntenants = [{A}, {B}]\n");
    let daemon = place(&keys).start();
    pin(&daemon, A, 2, 5);
    pin(&daemon, A, 1, 5);
    let (code, said, why) = kvbctl(&daemon, "save");
    assert_eq!((code, said.matches("saved: ").count()), (Some(1), 1), "{said}");
    // Nested prompts are a file each, and all count against their tenant.
    assert!(why.contains(&format!("the files of uid {A} have")), "{why}");
    pin(&daemon, B, 2, 9);
    let (_, said, _) = kvbctl(&daemon, "save");
    assert!(said.contains(&format!("uid {B} ")), "{said}");
    assert_eq!(files(&directory(&daemon.place)).len(), 2);
}

#[test]
fn a_file_whose_name_plays_tricks_on_a_terminal_is_named_without_them() {
    let daemon = place("").start();
    pin(&daemon, A, 1, 5);
    saved(&daemon, 1);
    let name = directory(&daemon.place).join("\u{202e}gnp\u{1b}[2J\u{200b}.kvprefix");
    std::fs::write(&name, "no prefix").unwrap();
    std::fs::set_permissions(&name, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (code, said, why) = kvbctl(&daemon, "load");
    assert_eq!((code, why.contains("?gnp?[2J?.kvprefix")), (Some(1), true), "{why:?}");
    let (json, log) = (daemon.admin("load").to_string(), daemon.place.log());
    for text in [said, why, json, log] {
        assert!(!text.contains(['\u{202e}', '\u{1b}', '\u{200b}']), "{text:?}");
    }
}
