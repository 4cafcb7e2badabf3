//! What operators see and say, through the real `kvbctl`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvbroker::wire::{self, Fault, Verb};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{BLOCK, Daemon, EXTENT, Helper, POOL, until};

const A: u32 = 4001;
const B: u32 = 4002;

fn command(daemon: &Daemon, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    command.args(args).arg("--socket").arg(daemon.place.path("admin.sock")).stdin(Stdio::null());
    command
}

fn kvbctl(daemon: &Daemon, args: &[&str]) -> Output {
    command(daemon, args).output().unwrap()
}

fn text(daemon: &Daemon, args: &[&str]) -> String {
    let out = kvbctl(daemon, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn json(daemon: &Daemon, args: &[&str]) -> Value {
    serde_json::from_str(&text(daemon, &[args, &["--json"]].concat())).unwrap()
}

/// A client with `tokens` tokens written and sealed in session 0.
fn sealed(daemon: &Daemon, uid: u32, tokens: usize) -> Helper {
    let mut client = daemon.helper(uid);
    client.must("open");
    client.must(&format!("ensure 0 {tokens}"));
    client.must(&format!("fill 0 0 {tokens} 5"));
    client.must(&format!("seal 0 {tokens}"));
    client
}

fn gone(daemon: &Daemon, client: Helper) {
    let clients = daemon.clients();
    drop(client);
    until("the client has gone", || daemon.clients() < clients);
}

#[test]
fn prefixes_and_tenants_say_whose_blocks_are_where_and_add_up() {
    let daemon = Daemon::new();
    let a = sealed(&daemon, A, 64);
    let mut b = daemon.helper(B);
    b.must("open");
    b.must("ensure 0 16");
    b.must("fill 0 0 16 6");

    let prefixes = json(&daemon, &["prefixes"]);
    assert_eq!(prefixes["blocks"], 4);
    let chain = &prefixes["chains"][0];
    assert_eq!((&chain["uid"], &chain["tokens"], &chain["idle_blocks"]), (&A.into(), &64.into(), &0.into()));
    let name = chain["chain"].as_str().unwrap().to_owned();
    assert_eq!(name.len(), 16);
    assert!(text(&daemon, &["prefixes"]).lines().any(|l| l.starts_with(&name) && l.contains("128 KiB")));

    gone(&daemon, a);
    assert_eq!(json(&daemon, &["prefixes"])["chains"][0]["idle_blocks"], 4);
    let report = json(&daemon, &["tenants"]);
    let mut all = report["unowned_bytes"].as_u64().unwrap();
    for tenant in report["tenants"].as_array().unwrap() {
        let bytes = tenant["bytes"].as_u64().unwrap();
        let booked = tenant["ledger"].as_object().unwrap().values().map(|b| b.as_u64().unwrap());
        assert_eq!(booked.sum::<u64>(), bytes, "{tenant}");
        all += bytes;
    }
    assert_eq!(all, POOL);
    let of = |uid: u32| report["tenants"].as_array().unwrap().iter().find(|t| t["uid"] == uid).unwrap();
    assert_eq!((&of(A)["ledger"]["cached"], &of(A)["sessions"]), (&(4 * BLOCK).into(), &0.into()));
    assert_eq!((&of(B)["bytes"], &of(B)["sessions"]), (&EXTENT.into(), &1.into()));
    let printed = text(&daemon, &["tenants"]);
    assert!(
        printed.lines().any(|l| l.trim_start().starts_with("4002 ") && l.contains("128 KiB")),
        "{printed}"
    );
}

#[test]
fn an_eviction_takes_what_nobody_holds_and_a_pinned_chain_only_by_name() {
    let daemon = Daemon::new();
    let mut a = sealed(&daemon, A, 64);
    a.must("pin 0 64");
    gone(&daemon, a);
    let b = sealed(&daemon, B, 32);
    gone(&daemon, b);
    assert_eq!((daemon.account("pinned"), daemon.account("cached")), (4 * BLOCK, 2 * BLOCK));

    let out = json(&daemon, &["evict", "1"]);
    assert_eq!((&out["blocks"], &out["bytes"]), (&1.into(), &BLOCK.into()));
    assert_eq!(json(&daemon, &["evict", "--uid", "4001"])["blocks"], 0, "all of this tenant's is pinned");
    assert!(text(&daemon, &["evict", "--uid", "4002"]).starts_with("1 blocks evicted, 32 KiB"));
    assert_eq!(json(&daemon, &["evict", "1000"])["blocks"], 0);
    assert_eq!((daemon.account("pinned"), daemon.account("cached")), (4 * BLOCK, 0));

    let name = daemon.admin("status")["pins"][0]["chain"].as_str().unwrap().to_owned();
    let out = json(&daemon, &["evict", "--pinned", &name[..6]]);
    assert_eq!((&out["blocks"], &out["kept"], &out["unpinned"][0]["uid"]), (&4.into(), &0.into(), &A.into()));
    assert_eq!((daemon.account("pinned"), daemon.account("free")), (0, POOL));
    let out = kvbctl(&daemon, &["evict", "--pinned", &name]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("no pinned prefix has a name that begins with"));
    for wrong in [&["evict"][..], &["evict", "3", "--pinned", "ab"]] {
        assert_eq!(kvbctl(&daemon, wrong).status.code(), Some(2), "{wrong:?}");
    }
    assert_eq!(kvbctl(&daemon, &["evict", "--pinned", "no-hex"]).status.code(), Some(2));
}

#[test]
fn an_eviction_leaves_a_session_what_it_holds() {
    let daemon = Daemon::new();
    let mut a = sealed(&daemon, A, 64);
    a.must("pin 0 64");
    let name = daemon.admin("status")["pins"][0]["chain"].as_str().unwrap().to_owned();
    let out = json(&daemon, &["evict", "--pinned", &name]);
    assert_eq!((&out["blocks"], &out["kept"]), (&0.into(), &4.into()));
    assert_eq!(json(&daemon, &["evict", "--uid", "4001"])["blocks"], 0);
    a.must("holds 0 0 64 5");
    assert_eq!((daemon.account("pinned"), daemon.account("shared")), (0, 4 * BLOCK));
}

#[test]
fn a_drained_broker_lets_sessions_go_on_and_none_begin() {
    let daemon = Daemon::new();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 16");
    assert!(text(&daemon, &["drain"]).starts_with("draining: 1 sessions go on"));
    assert_eq!(daemon.admin("status")["draining"], true);
    assert!(text(&daemon, &["status"]).contains("DRAINING"));

    a.must("fill 0 0 16 5");
    a.must("holds 0 0 16 5");
    a.must("seal 0 16");
    assert_eq!(a.say("ensure 0 32"), "busy");
    assert_eq!(a.say("open"), "busy");
    let mut b = daemon.helper(B);
    assert_eq!(b.say("open"), "busy");
    assert_eq!(b.say("reserve 1"), "busy");
    a.must("close 0");

    assert_eq!(json(&daemon, &["drain", "--off"])["draining"], false);
    b.must("open");
    b.must("ensure 0 16");
    a.must("open");
}

#[test]
fn what_an_admitted_session_was_promised_comes_also_while_the_broker_drains() {
    let daemon = Daemon::new();
    let mut raw = daemon.raw();
    let format = raw.greet();
    let open = wire::Open {
        format: format.into(),
        priority: 0.into(),
        max_tokens: 0.into(),
        model: [1; 32],
        label: wire::label("admitted"),
    };
    let opened = raw.ask(Verb::Open, 0, |w| _ = w.put(&open)).unwrap();
    let session = u64::from_le_bytes(opened.body[..8].try_into().unwrap());
    let admit = wire::Admit { tokens: 32.into(), flags: 0.into(), reserved: 0.into() };
    assert_eq!(raw.ask(Verb::Admit, session, |w| _ = w.put(&admit)).unwrap().fault, None);
    daemon.admin("drain");
    let report = || wire::Report { tokens: 0.into(), first: 0.into(), used: 0.into() };
    let mut grow = |want: u32, least: u32| {
        let grow = wire::Grow { report: report(), want: want.into(), least: least.into() };
        let reply = raw.ask(Verb::Grow, session, |w| _ = w.put(&grow)).unwrap();
        (reply.fault, reply.body.get(12).copied())
    };
    assert_eq!(grow(3, 3).0, Some(Fault::Busy), "more than was promised");
    assert_eq!(grow(8, 1), (None, Some(2)), "as much as was promised");
    assert_eq!(grow(8, 1).0, Some(Fault::Busy), "it is used up");
    assert_eq!(grow(8, 0), (None, Some(0)), "what does not press is not refused");
}

/// What a reader of events has built of them.
#[derive(Default)]
struct Picture {
    objects: BTreeMap<(String, String), Value>,
    complete: bool,
    end: Option<Value>,
}

impl Picture {
    fn take(&mut self, line: &str) {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let key = || (event["kind"].as_str().unwrap().to_owned(), event["id"].as_str().unwrap().to_owned());
        match event["event"].as_str().unwrap() {
            "state" => {
                assert!(!self.complete, "{line}");
                assert!(self.objects.insert(key(), event["is"].clone()).is_none());
            }
            "complete" => {
                assert_eq!(event["objects"], self.objects.len());
                self.complete = true;
            }
            "new" => assert!(self.objects.insert(key(), event["is"].clone()).is_none(), "{line}"),
            "changed" => assert!(self.objects.insert(key(), event["is"].clone()).is_some(), "{line}"),
            "gone" => assert!(self.objects.remove(&key()).is_some(), "{line}"),
            _ => self.end = Some(event),
        }
    }

    fn of(&self, kind: &str) -> Vec<&Value> {
        self.objects.iter().filter(|((k, _), _)| k == kind).map(|(_, is)| is).collect()
    }
}

/// `kvbctl events --json`, read by a thread.
struct Watcher {
    child: Child,
    lines: Receiver<String>,
    picture: Picture,
}

impl Watcher {
    fn start(daemon: &Daemon) -> Self {
        let mut command = command(daemon, &["events", "--json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, (to, lines)) = (child.stdout.take().unwrap(), channel());
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                if to.send(line.unwrap()).is_err() {
                    return;
                }
            }
        });
        Watcher { child, lines, picture: Picture::default() }
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&Picture) -> bool) {
        while !is_so(&self.picture) {
            let line = self.lines.recv_timeout(Duration::from_secs(20));
            self.picture
                .take(&line.unwrap_or_else(|e| panic!("{e} before {what}: {:?}", self.picture.objects)));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn events_are_the_whole_state_first_and_then_every_change() {
    let mut daemon = Daemon::new();
    let a = sealed(&daemon, A, 32);
    let mut watcher = Watcher::start(&daemon);
    watcher.until("the state", |p| p.complete);
    assert_eq!((watcher.picture.of("session").len(), watcher.picture.of("prefix").len()), (1, 1));
    assert_eq!(watcher.picture.of("pool")[0]["bytes"], POOL);

    let mut b = daemon.helper(B);
    b.must("open");
    b.must("ensure 0 16");
    b.must("fill 0 0 16 5");
    b.must("seal 0 16");
    watcher
        .until("the second session", |p| p.of("session").iter().any(|s| s["uid"] == B && s["tokens"] == 16));
    watcher.until("its prefix", |p| p.of("prefix").iter().any(|c| c["uid"] == B));
    drop(a);
    watcher.until("the end of the first", |p| p.of("session").len() == 1);
    watcher.until("its cached prefix", |p| {
        p.of("prefix").iter().any(|c| c["uid"] == A && c["idle_blocks"] == 2)
    });
    daemon.admin("evict blocks=all uid=4001");
    watcher.until("its eviction", |p| p.of("prefix").iter().all(|c| c["uid"] == B));
    daemon.admin("drain");
    watcher.until("the drain", |p| p.of("pool")[0]["draining"] == true);

    // Whoever begins now sees what the first one has built.
    let mut second = Watcher::start(&daemon);
    second.until("the state", |p| p.complete);
    daemon.admin("drain off");
    for watcher in [&mut watcher, &mut second] {
        watcher.until("the drain's end", |p| p.of("pool")[0]["draining"] == false);
    }
    assert_eq!(watcher.picture.objects, second.picture.objects);

    daemon.signal(Signal::SIGTERM);
    watcher.until("the end", |p| p.end.is_some());
    assert_eq!(watcher.picture.end.as_ref().unwrap()["event"], "end");
    assert_eq!(watcher.child.wait().unwrap().code(), Some(3));
}

#[test]
fn a_watcher_that_does_not_read_is_dropped_with_a_reason_and_the_others_miss_nothing() {
    let mut daemon = Daemon::new();
    let mut reader = Watcher::start(&daemon);
    reader.until("the state", |p| p.complete);
    let mut stalled = UnixStream::connect(daemon.place.path("admin.sock")).unwrap();
    writeln!(stalled, "events").unwrap();
    let mut a = daemon.helper(A);
    let mut sessions = 0;
    for _ in 0..60 {
        if daemon.place.log().contains("does not read: dropped") {
            break;
        }
        let first = sessions;
        while sessions < first + 200 {
            a.must("open");
            sessions += 1;
        }
        reader.until("the sessions", |p| p.of("session").len() == 200);
        (first..sessions).for_each(|n| a.must(&format!("close {n}")));
        reader.until("their end", |p| p.of("session").is_empty());
    }
    assert!(daemon.place.log().contains("does not read: dropped"), "{sessions} sessions came and went");
    stalled.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = String::new();
    stalled.read_to_string(&mut text).unwrap();
    assert!(text.len() < 512 << 10, "what waits is bounded: {}", text.len());
    let mut picture = Picture::default();
    text.lines().for_each(|line| picture.take(line));
    let end = picture.end.expect("a last line");
    assert_eq!(end["event"], "dropped");
    assert!(end["reason"].as_str().unwrap().contains("not read in time"), "{end}");
    a.must("open");
    reader.until("another session", |p| p.of("session").len() == 1);
    daemon.lives();
}

#[test]
fn there_are_few_watchers_and_they_keep_nobody_from_asking() {
    let mut daemon = Daemon::new();
    let ask = |what: &str| {
        let mut stream = UnixStream::connect(daemon.place.path("admin.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(what.as_bytes()).unwrap();
        stream
    };
    let first_line = |stream: &UnixStream| {
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        line
    };
    let mut watchers: Vec<UnixStream> = (0..4).map(|_| ask("events\n")).collect();
    for w in &watchers {
        assert!(first_line(w).contains("\"event\":\"state\""));
    }
    let out = kvbctl(&daemon, &["events"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("4 watch already"));
    // Others who say nothing do not push watchers out, and are pushed out by who asks.
    let silent: Vec<UnixStream> = (0..20).map(|_| ask("")).collect();
    assert_eq!(daemon.admin("check")["ok"], true);
    daemon.admin("drain");
    for w in &mut watchers {
        let mut lines = BufReader::new(w).lines();
        assert!(lines.any(|l| l.unwrap().contains("\"draining\":true")), "it still watches");
    }
    drop((watchers, silent));
    until("a watcher's place is free", || kvbctl_starts_to_watch(&daemon));
    daemon.lives();
}

fn kvbctl_starts_to_watch(daemon: &Daemon) -> bool {
    let mut stream = UnixStream::connect(daemon.place.path("admin.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    writeln!(stream, "events").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line.contains("\"event\":\"state\"")
}

/// Runs a checker of metrics over `text`.
fn checked(command: &mut Command, text: &str) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn metrics_are_what_prometheus_reads_and_say_nothing_of_what_clients_call_themselves() {
    let daemon = Daemon::new();
    let _a = sealed(&daemon, A, 32);
    let mut twin = daemon.helper(A);
    twin.must("open");
    assert_eq!(twin.say("attach 0 32"), "31");
    let page = text(&daemon, &["metrics"]);
    let open = text(&daemon, &["metrics", "--format", "openmetrics"]);
    let samples = json(&daemon, &["metrics"]);
    assert_eq!(samples["kvbroker_prefix_cache_queries_total"], 2);
    assert_eq!(samples["kvbroker_prefix_cache_hits_total"], 2);
    assert_eq!(samples["kvbroker_kv_cache_usage_perc"], 0.0625, "two blocks of 32");
    assert_eq!(samples["kvbroker_tenant_ledger_bytes{uid=\"4001\",account=\"shared\"}"], 2 * BLOCK);
    let accounts =
        samples.as_object().unwrap().iter().filter(|(n, _)| n.starts_with("kvbroker_ledger_bytes"));
    assert_eq!(accounts.map(|(_, v)| v.as_u64().unwrap()).sum::<u64>(), POOL);
    let chain = json(&daemon, &["prefixes"])["chains"][0]["chain"].as_str().unwrap().to_owned();
    for (page, described) in [(&page, "hits_total counter"), (&open, "hits counter")] {
        assert!(page.contains(&format!("# TYPE kvbroker_prefix_cache_{described}\n")));
        assert!(page.contains("\n# UNIT kvbroker_pool_size_bytes bytes\n") && page.ends_with("\n# EOF\n"));
        assert!(!page.contains(&chain) && !page.contains("small"), "{page}");
    }

    let need = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/need");
    let there = Command::new(need).arg("promtool:prometheus").status();
    if there.is_ok_and(|s| s.success()) {
        let promtool = || {
            let mut command = Command::new("promtool");
            command.args(["check", "metrics"]);
            command
        };
        let out = checked(&mut promtool(), &page);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let broken = page.replacen("kvbroker_pool_size_bytes 1048576", "kvbroker_pool_size_bytes much", 1);
        assert!(!checked(&mut promtool(), &broken).status.success(), "the check checks");
    } else {
        eprintln!("SKIPPED: promtool (Debian package prometheus) is not here and could not be installed");
    }
    const PARSE: &str = "import sys; from prometheus_client.openmetrics.parser import text_string_to_metric_families as f; \
                         assert len(list(f(sys.stdin.read()))) > 20";
    let python = |code: &str| {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", code]);
        command
    };
    if python("import prometheus_client").stderr(Stdio::null()).status().is_ok_and(|s| s.success()) {
        let out = checked(&mut python(PARSE), &open);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(!checked(&mut python(PARSE), &page).status.success(), "one dialect is not the other");
    } else {
        eprintln!("SKIPPED: the OpenMetrics parser (Debian package python3-prometheus-client) is not here");
    }
}

#[test]
fn top_is_drawn_once_without_a_terminal() {
    let daemon = Daemon::new();
    let _a = sealed(&daemon, A, 64);
    let drawn = text(&daemon, &["top"]);
    assert!(
        drawn.contains("s shared 128 KiB") && drawn.contains("4001") && !drawn.contains('\x1b'),
        "{drawn}"
    );
    let bar = drawn.lines().find(|l| l.starts_with('[')).unwrap();
    assert_eq!(bar.len(), 62);
    assert_eq!(bar.matches('s').count(), 8, "an eighth of 60, rounded: {bar}");
    let view = json(&daemon, &["top"]);
    assert_eq!(view["sessions"][0]["uid"], A);
    assert_eq!(view["tenants"]["pool_bytes"], POOL);
    let nobody = Command::new(env!("CARGO_BIN_EXE_kvbctl")).args(["top", "--socket", "/nowhere"]).output();
    assert_eq!(nobody.unwrap().status.code(), Some(3));
}

#[test]
fn top_is_live_on_a_terminal_until_q_and_leaves_the_terminal_as_it_was() {
    use nix::sys::termios::{LocalFlags, tcgetattr};
    let daemon = Daemon::new();
    for end in ["q", "signal"] {
        let pty = nix::pty::openpty(None, None).unwrap();
        let before = tcgetattr(&pty.slave).unwrap();
        let mut top = command(&daemon, &["top"]);
        top.stdin(pty.slave.try_clone().unwrap()).stdout(pty.slave.try_clone().unwrap());
        let mut child = top.spawn().unwrap();
        drop(top);
        let mut master = std::fs::File::from(pty.master);
        let (to, drawn) = channel();
        let mut reader = master.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut some) {
                let _ = to.send(String::from_utf8_lossy(&some[..n]).into_owned());
            }
        });
        let mut seen = String::new();
        let mut wait_for = |what: &str| {
            while !seen.contains(what) {
                seen +=
                    &drawn.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|e| panic!("{e}: {seen}"));
            }
        };
        wait_for("\x1b[?1049h");
        wait_for("0 sessions");
        assert!(!tcgetattr(&pty.slave).unwrap().local_flags.contains(LocalFlags::ICANON));
        // A terminal of 12 rows, as it answers when it is asked.
        master.write_all(b"\x1b[12;1R").unwrap();
        let mut a = daemon.helper(A);
        a.must("open");
        wait_for("1 sessions");
        wait_for("\x1b[12;1H\x1b[7mq quits");
        drop(a);
        match end {
            "q" => master.write_all(b"q").unwrap(),
            _ => nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), Signal::SIGTERM)
                .unwrap(),
        }
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{end}");
        wait_for("\x1b[?1049l");
        assert_eq!(tcgetattr(&pty.slave).unwrap().local_flags, before.local_flags);
    }
}
