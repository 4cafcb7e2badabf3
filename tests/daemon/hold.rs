//! `kvbctl hold` and memory pressure: what leaves the pool for the kernel, and that it comes back.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Daemon, Place, until};

const MIB: u64 = 1 << 20;
const POOL: u64 = 256 * MIB;
const A: u32 = 4001;

fn config(pool: &str) -> String {
    format!(
        "[pool]\nsize = \"256M\"\nextent = \"1M\"\nminimum = \"64M\"\n{pool}[socket]\nmode = \"0666\"\n\
         [[profile]]\nname = \"small\"\nlayers = 2\nkv-heads = 2\nhead-dim = 128\n"
    )
}

fn daemon() -> Daemon {
    Place::new(&config("")).start()
}

fn hold(daemon: &Daemon, size: &str, command: &[&str]) -> Command {
    let mut kvbctl = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    kvbctl.args(["hold", size, "--socket"]).arg(daemon.place.path("admin.sock")).arg("--").args(command);
    kvbctl.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    kvbctl
}

fn run(daemon: &Daemon, size: &str, command: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = hold(daemon, size, command).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A hold whose command has said its process number; it runs until it is killed.
struct Running {
    kvbctl: Child,
    command: Pid,
}

impl Running {
    fn start(daemon: &Daemon, size: &str, script: &str) -> Self {
        let script = format!("echo $$; {script}");
        let mut kvbctl = hold(daemon, size, &["sh", "-c", &script]).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(kvbctl.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let command = line.trim().parse().unwrap_or_else(|_| panic!("it said {line:?}"));
        Running { kvbctl, command: Pid::from_raw(command) }
    }

    fn kvbctl(&self) -> Pid {
        Pid::from_raw(self.kvbctl.id() as i32)
    }
}

/// Bytes of the pool that are in memory, as the kernel counts them: what the daemon's memfds have of pages.
fn held_by(daemon: &Daemon) -> u64 {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    let blocks = fds.filter_map(|fd| {
        let path = fd.ok()?.path();
        let is_extent = std::fs::read_link(&path).ok()?.to_str()?.starts_with("/memfd:kvbroker");
        is_extent.then(|| std::fs::metadata(&path).map_or(0, |m| m.blocks()))
    });
    blocks.sum::<u64>() * 512
}

/// What the machine has available: `MemAvailable`, and the pages that were freed a moment ago and wait on a list of
/// their CPU for the next one who wants some, which the kernel counts as available only after a while.
fn available(meminfo: &str, zoneinfo: &str) -> u64 {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:")).unwrap();
    let counted = line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10;
    let lists = zoneinfo.lines().filter_map(|l| l.trim().strip_prefix("count:"));
    let pages: u64 = lists.map(|n| n.trim().parse::<u64>().unwrap()).sum();
    counted + pages * kvbroker::map::page_bytes() as u64
}

fn is_whole(daemon: &Daemon) {
    until("the pool is whole", || daemon.account("free") == POOL && held_by(daemon) == POOL);
    assert_eq!(daemon.admin("status")["pool"]["extents_missing"], 0);
}

#[test]
fn while_a_command_runs_the_kernel_has_the_memory_and_after_it_the_pool() {
    let mut daemon = daemon();
    assert_eq!(held_by(&daemon), POOL);
    let running = Running::start(&daemon, "239.5M", "exec sleep 1000");
    // From the first moment of the command, and to the page.
    assert_eq!(held_by(&daemon), 16 * MIB, "rounded up to whole extents");
    assert_eq!((daemon.account("lent"), daemon.account("free")), (240 * MIB, 16 * MIB));
    let status = daemon.admin("status");
    let shown = &status["pool"]["holds"][0];
    assert_eq!((&shown["in_force"], &shown["bytes"]), (&true.into(), &(240 * MIB).into()), "{status}");
    assert!(shown["command"].as_str().unwrap().starts_with("sh -c"), "{shown}");
    kill(running.command, Signal::SIGKILL).unwrap();
    let said = running.kvbctl.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(128 + 9));
    is_whole(&daemon);
    daemon.lives();
}

#[test]
fn the_memory_that_the_machine_has_available_rises_by_what_is_held() {
    let daemon = daemon();
    // Others on this machine take and give memory at the same time: some attempt must be undisturbed.
    let mut rises = Vec::new();
    for _ in 0..30 {
        let read = |path| std::fs::read_to_string(path).unwrap();
        let before = available(&read("/proc/meminfo"), &read("/proc/zoneinfo"));
        let (code, during, said) = run(&daemon, "240M", &["cat", "/proc/meminfo", "/proc/zoneinfo"]);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("240 MiB (240 extents) are with the kernel while cat runs"), "{said}");
        is_whole(&daemon);
        rises.push(available(&during, &during) as i64 - before as i64);
        if rises.last().is_some_and(|r| (r - 240 * MIB as i64).unsigned_abs() < 16 * MIB) {
            return;
        }
    }
    panic!("never by 240 MiB: {rises:?}");
}

#[test]
fn the_exit_code_and_the_output_are_the_commands() {
    let daemon = daemon();
    let (code, out, _) = run(&daemon, "1M", &["sh", "-c", "echo out; exit 7"]);
    assert_eq!((code, out.as_str()), (Some(7), "out\n"));
    assert_eq!(run(&daemon, "1M", &["sh", "-c", "kill -KILL $$"]).0, Some(128 + 9));
    let (code, _, said) = run(&daemon, "1M", &["/nowhere/engine"]);
    assert_eq!(code, Some(127));
    assert!(said.contains("/nowhere/engine: No such file"), "{said}");
    assert_eq!(run(&daemon, "1M", &["/etc/passwd"]).0, Some(126));
    let (code, _, said) = run(&daemon, "0B", &["true"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("a hold of nothing makes no room"), "{said}");
    assert_eq!(run(&daemon, "1M", &["sh", "-c", "exit $1", "sh", "5"]).0, Some(5));
    is_whole(&daemon);
}

#[test]
fn a_hold_that_cannot_be_is_refused_with_who_has_the_memory_and_the_command_never_runs() {
    let daemon = daemon();
    let mut tenant = daemon.helper(A);
    tenant.must("open");
    tenant.must("ensure 0 1000");
    let held = POOL - daemon.account("free");
    assert!(held > 0);
    let (code, out, said) = run(&daemon, "256M", &["echo", "ran"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    let extents = held / MIB;
    assert!(said.contains("256 MiB (256 extents of 1 MiB) cannot be lent"), "{said}");
    assert!(said.contains(&format!(" {extents} are in use by uid {A}")), "{said}");
    let (code, _, said) = run(&daemon, "16T", &["true"]);
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(daemon.account("lent"), 0);
}

#[test]
fn a_hold_that_may_wait_is_lent_the_memory_once_the_session_that_uses_it_is_over() {
    let daemon = daemon();
    let mut tenant = daemon.helper(A);
    tenant.must("open");
    tenant.must("ensure 0 1000");
    let mut kvbctl = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    kvbctl.args(["hold", "256M", "--wait", "600", "--socket"]).arg(daemon.place.path("admin.sock"));
    kvbctl.args(["--", "echo", "ran"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut waiting = kvbctl.spawn().unwrap();
    let mut said = String::new();
    let mut words = BufReader::new(waiting.stderr.take().unwrap());
    words.read_line(&mut said).unwrap();
    assert!(
        said.contains(&format!("in use by uid {A}")) && said.contains("asking again for 600 s"),
        "{said}"
    );
    assert_eq!(daemon.account("lent"), 0, "nothing is taken from anybody meanwhile");
    drop(tenant);
    let output = waiting.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), b"ran\n".as_slice()));
    is_whole(&daemon);
}

#[test]
fn a_hold_that_waits_in_vain_ends_with_the_brokers_reason_and_the_command_never_runs() {
    let daemon = daemon();
    let mut kvbctl = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    kvbctl.args(["hold", "16T", "--wait", "1", "--quiet", "--socket"]).arg(daemon.place.path("admin.sock"));
    let output = kvbctl.args(["--", "echo", "ran"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), b"".as_slice()));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.matches("cannot be lent").count(), 1, "{said}");
}

#[test]
fn a_size_at_the_end_of_all_numbers_is_refused_like_any_other_and_the_daemon_goes_on() {
    let mut daemon = daemon();
    for size in ["18446744073709551615B", "18446744073709551614B", "16777215T"] {
        let (code, out, said) = run(&daemon, size, &["echo", "ran"]);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{size}: {said}");
        assert!(said.contains("cannot be lent"), "{size}: {said}");
    }
    assert_eq!(daemon.account("lent"), 0);
    is_whole(&daemon);
    daemon.lives();
}

#[test]
fn extents_that_a_tenant_has_without_a_block_in_use_are_lent_too() {
    let daemon = daemon();
    let mut tenant = daemon.helper(A);
    tenant.must("open");
    tenant.must("ensure 0 4000");
    tenant.must("close 0");
    let (code, _, said) = run(&daemon, "256M", &["true"]);
    // The library may keep credit: then that is what is said.
    assert!(code == Some(0) || said.contains(&format!("in use by uid {A}")), "{said}");
    drop(tenant);
    is_whole(&daemon);
}

#[test]
fn two_holds_share_the_pool_and_each_ends_by_itself() {
    let daemon = daemon();
    let first = Running::start(&daemon, "100M", "exec sleep 1000");
    let second = Running::start(&daemon, "100M", "exec sleep 1000");
    assert_eq!(daemon.account("lent"), 200 * MIB);
    let (code, _, said) = run(&daemon, "100M", &["true"]);
    assert_eq!(code, Some(1));
    assert!(said.contains(" 200 are lent to holds") && said.contains(" 56 are free"), "{said}");
    kill(first.command, Signal::SIGKILL).unwrap();
    until("the first is over", || daemon.account("lent") == 100 * MIB);
    kill(second.command, Signal::SIGKILL).unwrap();
    is_whole(&daemon);
}

#[test]
fn when_kvbctl_is_killed_the_memory_comes_back_and_the_command_ends() {
    let daemon = daemon();
    let mut running = Running::start(&daemon, "200M", "exec sleep 1000");
    kill(running.kvbctl(), Signal::SIGKILL).unwrap();
    running.kvbctl.wait().unwrap();
    is_whole(&daemon);
    until("the command has ended", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", running.command)).unwrap_or_default();
        // Gone, or a zombie that its new parent has not collected.
        stat.is_empty() || stat.contains(") Z ")
    });
}

#[test]
fn signals_for_kvbctl_are_the_commands() {
    let daemon = daemon();
    // The loop starts no process: a shell that is about to has its traps undone for a moment.
    // Not SIGINT: a shell cannot trap what was ignored when it started, as that is in a background job.
    for (signal, name, code) in [(Signal::SIGTERM, "TERM", 9), (Signal::SIGUSR1, "USR1", 10)] {
        let script = format!("trap 'exit {code}' {name}; while :; do :; done");
        let mut running = Running::start(&daemon, "8M", &script);
        // The trap may not be set yet: a command that dies of the signal would say 128 and its number.
        until("the trap is set", || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", running.command)).unwrap();
            let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
            u64::from_str_radix(&caught, 16).unwrap() & 1 << (signal as i32 - 1) != 0
        });
        kill(running.kvbctl(), signal).unwrap();
        assert_eq!(running.kvbctl.wait().unwrap().code(), Some(code));
    }
    is_whole(&daemon);
}

#[test]
fn when_the_broker_is_killed_the_command_runs_on_and_the_next_broker_is_asked_for_the_same() {
    let mut daemon = daemon();
    let running = Running::start(&daemon, "200M", "exec sleep 1000");
    daemon.signal(Signal::SIGKILL);
    daemon.child = daemon.place.command().spawn().unwrap();
    until("the hold is there again", || {
        let status = daemon.try_admin("status");
        status.is_some_and(|s| s["pool"]["holds"][0]["in_force"] == true)
    });
    assert_eq!(daemon.account("lent"), 200 * MIB);
    kill(running.command, None).expect("the command lives");
    kill(running.command, Signal::SIGTERM).unwrap();
    let said = running.kvbctl.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(128 + 15));
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("the broker has gone") && said.contains("200 MiB are held as before"), "{said}");
    is_whole(&daemon);
}

#[test]
fn a_lease_outlasts_a_crowd_of_operators_and_ends_with_its_connection() {
    let mut daemon = daemon();
    let ask = |line: &str| {
        let mut stream = UnixStream::connect(daemon.place.path("admin.sock")).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        writeln!(stream, "{line}").unwrap();
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer).unwrap();
        (stream, answer)
    };
    for wrong in ["hold ", "hold x", "hold -1 a", "hold 1M a", "hold 99999999999999999999 a"] {
        let (_, answer) = ask(wrong);
        assert!(answer.contains("error"), "{wrong}: {answer}");
    }
    let (lease, answer) = ask("hold 8388608 an engine");
    assert!(answer.contains("\"in_force\":true"), "{answer}");
    let silent: Vec<_> =
        (0..40).map(|_| UnixStream::connect(daemon.place.path("admin.sock")).unwrap()).collect();
    assert_eq!(daemon.account("lent"), 8 * MIB);
    drop(silent);
    // Half a hang-up is one: who says nothing more holds nothing.
    lease.shutdown(std::net::Shutdown::Write).unwrap();
    until("it is over", || daemon.account("lent") == 0);
    is_whole(&daemon);
    daemon.lives();
}

/// A daemon that reads `pressure` for what the kernel would say.
fn under_pressure(pool: &str) -> Daemon {
    let place = Place::new(&config(pool));
    let file = place.path("pressure");
    say(&file, 0.0);
    place.start_with(|command| {
        command.arg("--pressure-file").arg(&file).args(["--pressure-every", "20"]);
    })
}

fn say(file: &std::path::Path, share: f64) {
    let new = file.with_extension("new");
    std::fs::write(&new, format!("some avg10={share:.2} avg60=0.00 avg300=0.00 total=0\n")).unwrap();
    std::fs::rename(new, file).unwrap();
}

#[test]
fn under_pressure_an_elastic_pool_shrinks_to_its_floor_serves_who_asks_and_grows_again() {
    let mut daemon = under_pressure("elastic = true\nfloor = \"64M\"\n");
    let file = daemon.place.path("pressure");
    say(&file, 50.0);
    until("it is at its floor", || daemon.account("lent") == POOL - 64 * MIB);
    until("the kernel has it", || held_by(&daemon) == 64 * MIB);
    let status = daemon.admin("status");
    assert_eq!(status["pool"]["extents_elastic"], 192, "{status}");
    // Sessions come before the kernel's other users as long as there is memory.
    let mut tenant = daemon.helper(A);
    tenant.must("open");
    let tokens = 16 * (32 * 80);
    tenant.must(&format!("ensure 0 {tokens}"));
    assert!(held_by(&daemon) >= 80 * MIB);
    say(&file, 0.0);
    until("all of it is there again", || daemon.account("lent") == 0 && held_by(&daemon) == POOL);
    daemon.lives();
}

#[test]
fn a_pool_that_gives_nothing_wakes_up_for_no_pressure() {
    let daemon = under_pressure("");
    say(&daemon.place.path("pressure"), 90.0);
    is_whole(&daemon);
    let wakes = || {
        let quiet = daemon.status_line("voluntary_ctxt_switches:");
        std::thread::sleep(std::time::Duration::from_millis(400));
        daemon.status_line("voluntary_ctxt_switches:") - quiet
    };
    // The end of the last question may still be under way.
    until("nothing wakes it up", || wakes() == 0);
    assert_eq!(daemon.account("free"), POOL);
}
