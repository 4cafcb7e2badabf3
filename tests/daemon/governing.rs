//! What the operator's rules do while everybody wants memory: reserves, limits, priorities, pins, checks.

use std::process::{Command, Output};

use kvbroker::wire::{self, Fault, Verb};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::{BLOCK, CONFIG, Daemon, Place, until};

const A: u32 = 4001;
const B: u32 = 4002;
/// Tokens that an extent holds; the pool has eight.
const TOKENS: usize = 64;

fn start(more: &str) -> Daemon {
    Place::new(&format!("{CONFIG}\n{more}")).start()
}

fn kvbctl(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
    command.args(arguments).arg("--socket").arg(daemon.place.path("admin.sock"));
    command.output().unwrap()
}

/// What it prints; it must be done.
fn done(daemon: &Daemon, arguments: &[&str]) -> String {
    let out = kvbctl(daemon, arguments);
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{arguments:?}: {said}{}", String::from_utf8_lossy(&out.stderr));
    said
}

/// The same as JSON.
fn json(daemon: &Daemon, arguments: &[&str]) -> Value {
    let all: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
    serde_json::from_str(&done(daemon, &all)).unwrap()
}

/// Why it is refused: exit code 1.
fn refused(daemon: &Daemon, arguments: &[&str]) -> String {
    let out = kvbctl(daemon, arguments);
    assert_eq!(out.status.code(), Some(1), "{arguments:?}: {}", String::from_utf8_lossy(&out.stdout));
    String::from_utf8(out.stderr).unwrap()
}

fn tenant(limits: &Value, uid: u32) -> &Value {
    let all = limits["tenants"].as_array().unwrap();
    all.iter().find(|t| t["uid"] == uid).unwrap_or_else(|| panic!("uid {uid} in {limits}"))
}

#[test]
fn a_session_of_lower_priority_makes_room_and_one_that_does_so_in_time_is_not_ended() {
    let daemon = start(&format!(
        "[limits]\nreclaim-ms = 20000\n[[tenant]]\nuid = {B}\npriority = 200\n[[tenant]]\nuid = {A}\npriority = 20\n"
    ));
    let mut low = daemon.helper(A);
    low.must("open");
    // The broker learns of a table by the next request about it: of this one it knows all blocks but the last.
    low.must("ensure 0 496");
    low.must("ensure 0 512");
    low.must("fill 0 0 512 5");
    let mut high = daemon.helper(B);
    high.must("open");
    high.order("ensure 0 64");
    until("the lower one is asked", || low.say("wanted 0") == "true");
    // Nothing is taken from it before it gives: its rows are there.
    low.must("holds 0 0 512 5");
    low.must("close 0");
    assert_eq!(high.answered(), "ok");
    high.must("zeros 0 0 64");
    let counters = &daemon.admin("status")["counters"];
    assert_eq!((&counters["reclaims"], &counters["sessions_lost"]), (&1.into(), &0.into()));
    // Equals are not asked.
    let mut equal = daemon.helper(B);
    equal.must("open");
    equal.must("ensure 0 448");
    equal.must("open");
    assert_eq!(equal.say("ensure 1 16"), "busy");
    assert_eq!(daemon.admin("status")["counters"]["reclaims"], 1);
}

#[test]
fn a_stopped_client_loses_its_session_at_the_deadline_and_can_write_in_no_block_of_others() {
    let daemon = start(&format!(
        "[limits]\nreclaim-ms = 300\n[[tenant]]\nuid = {B}\npriority = 200\n[[tenant]]\nuid = {A}\npriority = 20\n"
    ));
    let mut low = daemon.helper(A);
    low.must("open");
    // The broker learns of a table by the next request about it: of this one it knows all blocks but the last.
    low.must("ensure 0 496");
    low.must("ensure 0 512");
    low.must("fill 0 0 512 5");
    let stopped = Pid::from_raw(low.child.id() as i32);
    kill(stopped, Signal::SIGSTOP).unwrap();
    let mut high = daemon.helper(B);
    high.must("open");
    high.must("ensure 0 256");
    high.must("zeros 0 0 256");
    high.must("fill 0 0 256 9");
    let counters = daemon.admin("status")["counters"].clone();
    assert_eq!((&counters["reclaims"], &counters["sessions_lost"]), (&1.into(), &1.into()));
    kill(stopped, Signal::SIGCONT).unwrap();
    // It goes on as if nothing had been: what it writes lands in memory of its own.
    low.must("fill 0 0 512 7");
    high.must("holds 0 0 256 9");
    assert_eq!(low.say("ensure 0 528"), "session-lost");
    assert_eq!(low.say("seal 0 512"), "session-lost");
    high.must("holds 0 0 256 9");
    low.must("close 0");
    low.must("open");
    low.must("ensure 1 64");
    low.must("zeros 1 0 64");
    high.must("holds 0 0 256 9");
    daemon.ledger();
}

#[test]
fn a_reserve_is_there_to_its_last_extent_however_loaded_the_pool_is() {
    let daemon = start(&format!("[[tenant]]\nuid = {B}\nreserve = \"384K\"\n"));
    // Others take whatever they get, published or not.
    let mut others = [daemon.helper(A), daemon.helper(A), daemon.helper(A + 10)];
    for (i, other) in others.iter_mut().enumerate() {
        other.must("open");
        other.must("open");
        let mut tokens = 0;
        while other.say(&format!("ensure 0 {}", tokens + 16)) == "ok" {
            tokens += 16;
            other.must(&format!("fill 0 {} {tokens} {}", tokens - 16, i + 1));
            if i == 0 && tokens == 256 {
                other.must("seal 0 256");
            }
        }
        assert_ne!(other.say("ensure 1 16"), "ok");
    }
    let three = 3 * TOKENS;
    let mut owner = daemon.helper(B);
    owner.must("open");
    owner.must(&format!("ensure 0 {three}"));
    owner.must(&format!("zeros 0 0 {three}"));
    assert_eq!(owner.say(&format!("ensure 0 {}", three + 16)), "busy");
    // What it gives back is nobody else's.
    owner.must("close 0");
    for other in &mut others {
        assert_ne!(other.say("ensure 1 16"), "ok");
    }
    owner.must("open");
    owner.must(&format!("ensure 1 {three}"));
    daemon.ledger();
}

#[test]
fn limits_are_changed_while_everybody_works_and_the_answer_says_what_holds_from_when() {
    let daemon = Daemon::new();
    let uid = A.to_string();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 256");
    a.must("fill 0 0 256 3");
    let first = json(&daemon, &["limits"]);
    assert_eq!((&first["revision"], &first["outcome"]), (&1.into(), &Value::Null));
    assert_eq!((&tenant(&first, A)["extents"], &tenant(&first, A)["limit"]), (&4.into(), &Value::Null));
    // Room for it: applied.
    let now = json(&daemon, &["limits", &uid, "--limit", "640K", "--reserve", "256K"]);
    assert_eq!((&now["revision"], &now["outcome"]), (&2.into(), &"applied".into()));
    assert_eq!((&tenant(&now, A)["limit"], &tenant(&now, A)["reserve"]), (&5.into(), &2.into()));
    a.must("ensure 0 320");
    assert_eq!(a.say("ensure 0 336"), "never-fits");
    a.must("open");
    assert_eq!(a.say("ensure 1 16"), "over-limit");
    // Below what is in use: deferred. Nothing is taken, and there is no more until it has been given back.
    let now = json(&daemon, &["limits", &uid, "--limit", "256K"]);
    assert_eq!((&now["revision"], &now["outcome"]), (&3.into(), &"deferred".into()));
    assert!(now["reasons"][0].as_str().unwrap().contains("owns 5 extents, the limit is 2"), "{now}");
    a.must("holds 0 0 256 3");
    assert_eq!(a.say("ensure 1 16"), "over-limit");
    a.must("trim 0 96");
    a.must("ensure 1 16");
    a.must("holds 0 0 96 3");
    // A reserve that others are in the way of: deferred, and kept for it as it becomes free.
    let mut b = daemon.helper(B);
    b.must("open");
    b.must("ensure 0 320");
    let now = json(&daemon, &["limits", "4003", "--reserve", "512K"]);
    assert_eq!((&now["revision"], &now["outcome"]), (&4.into(), &"deferred".into()), "{now}");
    // What cannot be is refused, and changes nothing.
    for nobody in ["65534", "4294967295"] {
        let why = refused(&daemon, &["limits", nobody, "--reserve", "128K"]);
        assert!(why.contains(&format!("uid {nobody}: ")), "{why}");
    }
    let why = refused(&daemon, &["limits", "4004", "--reserve", "512K"]);
    assert!(why.contains("the reserves would be 10 extents, the pool has 8"), "{why}");
    for less in ["1B", "131071B"] {
        let why = refused(&daemon, &["limits", &uid, "--limit", less]);
        assert!(why.contains("is less than one extent of 128 KiB"), "{why}");
    }
    let why = refused(&daemon, &["limits", &uid, "--limit", "128K"]);
    assert!(why.contains("below the reserve"), "{why}");
    let why = refused(&daemon, &["limits", &uid, "--priority", "5", "--revision", "3"]);
    assert!(why.contains("revision 3 was changed meanwhile: 4 holds"), "{why}");
    let last = json(&daemon, &["limits"]);
    assert_eq!((&last["revision"], &last["reserved"]), (&4.into(), &6.into()));
    assert_eq!(tenant(&last, A)["priority"], 100);
    let shown = done(&daemon, &["limits", &uid, "--priority", "5", "--revision", "4"]);
    assert!(shown.contains("revision 5; 8 extents of 128 KiB, 6 of them reserved"), "{shown}");
    daemon.ledger();
}

#[test]
fn pins_are_bounded_shown_with_their_owner_and_lifted_by_the_operator() {
    let daemon = start("[limits]\npinned = \"128K\"\n");
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 96");
    a.must("fill 0 0 96 5");
    a.must("seal 0 96");
    assert_eq!(a.say("pin 0 80"), "over-limit");
    a.must("pin 0 64");
    // Another tenant's pins are its own, and count for it alone.
    let mut b = daemon.helper(B);
    b.must("open");
    b.must("ensure 0 64");
    b.must("fill 0 0 64 6");
    b.must("seal 0 64");
    b.must("pin 0 64");
    let pid = a.child.id();
    drop(a);
    until("its owner has gone", || daemon.clients() == 1);
    let status = json(&daemon, &["status"]);
    let pins = status["pins"].as_array().unwrap();
    let pin = pins.iter().find(|p| p["uid"] == A).unwrap().clone();
    assert_eq!(
        (pins.len(), &pin["pid"], &pin["blocks"], &pin["tokens"]),
        (2, &pid.into(), &4.into(), &64.into())
    );
    assert!(done(&daemon, &["status"]).contains(&format!("by uid {A} (")));
    assert_eq!(tenant(&json(&daemon, &["limits"]), A)["pinned_bytes"], 4 * BLOCK);
    assert_eq!(daemon.account("pinned"), 8 * BLOCK);
    let why = refused(&daemon, &["unpin", "0123456789"]);
    assert!(why.contains("begins with 0123456789"), "{why}");
    for none in ["", "no-such-name", "00112233445566778"] {
        let out = kvbctl(&daemon, &["unpin", none]);
        let why = String::from_utf8(out.stderr).unwrap();
        assert_eq!(
            (out.status.code(), why.contains("a chain's name is 16 hexadecimal digits")),
            (Some(2), true),
            "{why}"
        );
    }
    let chain = pin["chain"].as_str().unwrap();
    let lifted = json(&daemon, &["unpin", chain]);
    assert_eq!(lifted["unpinned"][0]["chain"], chain);
    // It is cached now: still found, and gone when somebody needs the room.
    assert_eq!((daemon.account("pinned"), daemon.account("cached")), (4 * BLOCK, 6 * BLOCK));
    let mut again = daemon.helper(A);
    again.must("open");
    assert_eq!(again.say("attach 0 96"), "95");
    again.must("close 0");
    drop(again);
    b.must("open");
    b.must("ensure 1 448");
    assert_eq!((daemon.account("pinned"), daemon.account("cached")), (4 * BLOCK, 0));
    done(&daemon, &["unpin", "all"]);
    assert_eq!(daemon.account("pinned"), 0);
}

#[test]
fn whether_another_tenant_has_the_same_prompt_shows_in_no_answer() {
    let with_it = answers_of_the_second(7);
    let without_it = answers_of_the_second(1007);
    assert_eq!(with_it.len(), 5);
    assert_eq!(with_it, without_it);
}

/// One tenant publishes the prompt that begins with token 7; then another one asks for that which begins with `first`,
/// computes and publishes it. All that the broker answers to the second one.
fn answers_of_the_second(first: u32) -> Vec<String> {
    let daemon = Daemon::new();
    let mut donor = daemon.helper(A);
    assert_eq!(donor.say("raw 7").split('|').count(), 5);
    let mut asker = daemon.helper(B);
    asker.say(&format!("raw {first}")).split('|').map(str::to_owned).collect()
}

#[test]
fn the_numbers_that_a_tenant_is_told_are_the_same_whether_or_not_others_open_anything() {
    let alone = Daemon::new().helper(B).say("numbers 3");
    assert_eq!(alone, "[1, 2, 3, 4, 1, 2, 3, 4]", "formats of the connection, and sessions of the tenant");
    let daemon = Daemon::new();
    let mut others = daemon.helper(A);
    (0..3).for_each(|_| others.must("open"));
    others.must("fork 0");
    assert_eq!(others.say("numbers 2"), "[1, 2, 3, 4, 5, 6, 7]");
    let mut mine = daemon.helper(B);
    assert_eq!(mine.say("numbers 3"), alone);
    // Its own count, which never goes back.
    others.must("open");
    assert_eq!(mine.say("numbers 1"), "[1, 2, 3, 4, 5, 6]");
    // A number of another one's is a number of nobody's, and operators tell them apart by uid and number.
    mine.must("open");
    let sessions = daemon.admin("sessions");
    let mut names: Vec<(u64, u64)> = sessions
        .as_array()
        .unwrap()
        .iter()
        .map(|s| (s["uid"].as_u64().unwrap(), s["session"].as_u64().unwrap()))
        .collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!((names.len(), all), (6, 6), "{names:?}");
}

#[test]
fn a_request_that_never_fits_is_refused_at_once_and_holds_up_none_behind_it() {
    let daemon = Daemon::new();
    let mut raw = daemon.raw();
    let format = raw.greet();
    let wants = [40, 2, 253, 1, 33, 4];
    for want in wants {
        raw.send(Verb::Reserve, 0, |w| {
            w.put(&wire::Reserve { format: format.into(), want: want.into() });
        })
        .unwrap();
    }
    for want in wants {
        let reply = raw.receive().unwrap();
        let fault = (want > 32).then_some(Fault::NeverFits);
        assert_eq!(reply.fault, fault, "{want} blocks");
    }
    // Nor does one that waits for somebody to make room hold up other clients.
    let mut other = daemon.raw();
    let format = other.greet();
    assert_eq!(other.reserve(format, 253).unwrap().fault, Some(Fault::NeverFits));
    assert_eq!(other.reserve(format, 25).unwrap().fault, None);
}

#[test]
fn nothing_before_hello_gets_anything_but_a_typed_refusal() {
    let daemon = Daemon::new();
    let mut raw = daemon.raw();
    for verb in Verb::ALL.iter().copied().filter(|v| *v != Verb::Hello) {
        let reply = raw.ask(verb, 1, |w| _ = w.put(&[0u8; 64][..])).unwrap();
        assert_eq!(reply.fault, Some(Fault::BadRequest), "{}", verb.name());
        assert!(String::from_utf8_lossy(&reply.body[16..]).contains("hello"), "{}", verb.name());
    }
    assert_eq!(raw.hello().fault, None);
}

#[test]
fn damage_in_a_sealed_block_is_found_dropped_and_told() {
    let daemon = Daemon::new();
    let mut a = daemon.helper(A);
    a.must("open");
    a.must("ensure 0 64");
    a.must("fill 0 0 64 5");
    a.must("seal 0 64");
    a.must("pin 0 64");
    let report = json(&daemon, &["fsck"]);
    assert_eq!((&report["blocks"], &report["damaged"]), (&4.into(), &0.into()), "{report}");
    assert_eq!(report["intact"].as_u64().unwrap() + report["first"].as_u64().unwrap(), 4, "{report}");
    let mut reader = daemon.helper(A);
    reader.must("open");
    assert_eq!(reader.say("attach 0 64"), "63");
    // A process that holds the extent can write anywhere in it: here, in token 20, which is sealed.
    a.must("spoil 0 20");
    let out = kvbctl(&daemon, &["fsck", "--json"]);
    assert_eq!(out.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&report["intact"], &report["damaged"]), (&3.into(), &1.into()), "{report}");
    assert_eq!(report["found"][0]["sessions"], serde_json::json!([1, 2]));
    assert_eq!(report["found"][0]["unpinned"], 1);
    for holder in [&mut a, &mut reader] {
        until("its holders are told", || holder.say("damaged 0") == "16");
    }
    // Nobody finds it any more, and its holder cannot make it findable again.
    let mut late = daemon.helper(A);
    late.must("open");
    assert_eq!(late.say("attach 0 64"), "16");
    a.must("ensure 0 80");
    a.must("fill 0 64 80 5");
    a.must("seal 0 80");
    late.must("close 0");
    late.must("open");
    assert_eq!(late.say("attach 1 64"), "16");
    assert_eq!(daemon.account("pinned"), 0);
    // Computed anew it is: both blocks and what comes after.
    a.must("trim 0 16");
    assert_eq!(a.say("damaged 0"), "no");
    a.must("ensure 0 64");
    a.must("fill 0 16 64 5");
    a.must("seal 0 64");
    late.must("close 1");
    late.must("open");
    assert_eq!(late.say("attach 2 64"), "63");
    late.must("holds 2 0 63 5");
    assert_eq!(daemon.admin("status")["counters"]["damaged"], 1);
    assert!(done(&daemon, &["status"]).contains("1 sealed blocks were found damaged"));
    assert_eq!(json(&daemon, &["fsck"])["damaged"], 0);
}
