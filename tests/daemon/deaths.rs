//! Clients that die, stop or are killed together: at each step of the protocol, and while they share.
//!
//! `lifetime.rs` kills clients at random moments; here each step has its turn.

use std::time::Duration;

use kvbroker::wire::{self, Fault, Verb};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{BLOCK, Daemon, EXTENT, POOL, Raw, profile, until};

const A: u32 = 4001;
const B: u32 = 4002;
/// Tokens of the prompt that steps attach.
const PROMPT: u32 = 48;

/// What a client says one after the other: so that every verb, and every state that a connection can be in, is a step.
pub const STEPS: [&str; 19] = [
    "connect",
    "hello",
    "profile",
    "open",
    "admit",
    "reserve",
    "report",
    "grow",
    "fork",
    "trim",
    "seal",
    "pin",
    "open twin",
    "attach a part",
    "attach the rest",
    "window",
    "free",
    "unpin",
    "close",
];

/// What a step writes into its message.
type Fill = Box<dyn Fn(&mut wire::Writer)>;

/// Takes the first `step` steps and one more; with `unread` it dies before it reads the answer to that one. What only
/// a client's process does, in the role of a client.
pub fn walk(socket: &std::path::Path, step: usize, unread: bool) -> String {
    let mut raw = Raw::connect(socket).unwrap();
    let (mut session, mut twin, mut format) = (0, 0, 0);
    let mut credit: Vec<wire::WireBlock> = Vec::new();
    let prompt: Vec<u32> = (0..PROMPT).collect();
    for (now, name) in STEPS.iter().enumerate().take(step + 1).skip(1) {
        let report = |used: &[wire::WireBlock], tokens: u64| wire::Report {
            tokens: tokens.into(),
            first: 0.into(),
            used: (used.len() as u32).into(),
        };
        let two: Vec<_> = credit.iter().take(2).copied().collect();
        let named: Vec<_> = two.iter().map(wire::WireBlock::id).collect();
        let (verb, of, body): (Verb, u64, Fill) = match *name {
            "hello" => {
                let hello = wire::Hello {
                    magic: wire::MAGIC.into(),
                    version: wire::VERSION.into(),
                    label: wire::label("walker"),
                };
                (Verb::Hello, 0, Box::new(move |w| _ = w.put(&hello)))
            }
            "profile" => (Verb::Profile, 0, Box::new(|w| wire::put_profile(w, &profile(), 0))),
            "open" | "open twin" => {
                let open = wire::Open { format: u32::into(format), ..wire::Open::default() };
                (Verb::Open, 0, Box::new(move |w| _ = w.put(&open)))
            }
            "admit" => {
                let admit = wire::Admit { tokens: 64.into(), ..wire::Admit::default() };
                (Verb::Admit, session, Box::new(move |w| _ = w.put(&admit)))
            }
            "reserve" => {
                let reserve = wire::Reserve { format: format.into(), want: 5.into() };
                (Verb::Reserve, 0, Box::new(move |w| _ = w.put(&reserve)))
            }
            "report" | "grow" => {
                let want = if *name == "grow" { 3 } else { 0 };
                let grow = wire::Grow { report: report(&two, 32), want: want.into(), least: 0.into() };
                (Verb::Grow, session, Box::new(move |w| _ = w.put(&grow).put_blocks(named.clone())))
            }
            "fork" => {
                let report = wire::Report { first: 2.into(), ..report(&[], 32) };
                (Verb::Fork, session, Box::new(move |w| _ = w.put(&report)))
            }
            "trim" => {
                let report = wire::Report { first: 2.into(), ..report(&[], 32) };
                let trim = wire::Trim { report, tokens: 16.into(), head: 0.into(), release: 0.into() };
                (Verb::Trim, twin, Box::new(move |w| _ = w.put(&trim)))
            }
            "seal" => {
                let report = wire::Report { first: 2.into(), ..report(&[], 32) };
                let seal = wire::Seal { report, from: 0.into(), count: 32.into() };
                // Other tokens than the prompt's: what is attached stays the donor's.
                let tokens: Vec<u32> = (900..932).collect();
                (Verb::Seal, session, Box::new(move |w| _ = w.put(&seal).put_tokens(&tokens)))
            }
            "pin" | "unpin" => {
                let report = wire::Report { first: 2.into(), ..report(&[], 32) };
                let on = u32::from(*name == "pin");
                let pin = wire::Pin { report, blocks: 2.into(), on: on.into() };
                (Verb::Pin, session, Box::new(move |w| _ = w.put(&pin)))
            }
            "attach a part" | "attach the rest" => {
                let (from, more) = if *name == "attach a part" { (0, 1) } else { (16, 0) };
                let tokens = prompt[from..if more == 1 { 16 } else { prompt.len() }].to_vec();
                let attach = wire::Attach { count: (tokens.len() as u32).into(), more: more.into() };
                (Verb::Attach, twin, Box::new(move |w| _ = w.put(&attach).put_tokens(&tokens)))
            }
            "window" => {
                let report = wire::Report { first: 2.into(), ..report(&[], 32) };
                let window = wire::Window { report, blocks: 2.into(), ..wire::Window::default() };
                (Verb::Window, session, Box::new(move |w| _ = w.put(&window)))
            }
            "free" => {
                let one = credit[4].id();
                let free = wire::Free { count: 1.into(), reserved: 0.into() };
                (Verb::Free, 0, Box::new(move |w| _ = w.put(&free).put_blocks([one])))
            }
            "close" => {
                let report = wire::Report { first: 2.into(), ..report(&[], 32) };
                (Verb::Close, session, Box::new(move |w| _ = w.put(&report)))
            }
            other => panic!("no step {other}"),
        };
        raw.send(verb, of, |w| body(w)).unwrap();
        if now == step && unread {
            kill(Pid::this(), Signal::SIGKILL).unwrap();
        }
        let reply = raw.receive().unwrap_or_else(|| panic!("hung up on at {name}"));
        // There may be no device here for which a window could be made.
        if *name == "window" {
            continue;
        }
        assert_eq!(reply.fault, None, "{name}: {}", String::from_utf8_lossy(&reply.body));
        let word = |at: usize| u32::from_le_bytes(reply.body[at..at + 4].try_into().unwrap());
        match *name {
            "profile" => format = word(0),
            "open" => session = u64::from(word(0)),
            "fork" | "open twin" => twin = u64::from(word(0)),
            "reserve" => {
                let from = size_of::<wire::Grant>() + word(8) as usize * size_of::<wire::ExtentInfo>();
                let each = reply.body[from..].chunks_exact(size_of::<wire::GrantedBlock>());
                credit.extend(each.map(|b| {
                    let name = &b[..size_of::<wire::WireBlock>()];
                    <wire::WireBlock as zerocopy::FromBytes>::read_from_bytes(name).unwrap()
                }));
            }
            _ => {}
        }
    }
    // The connection stays open until the process ends.
    std::mem::forget(raw);
    "ok".into()
}

#[test]
fn a_client_killed_at_any_step_of_the_protocol_leaves_nothing_and_disturbs_nobody() {
    let mut daemon = Daemon::new();
    let mut donor = daemon.helper(A);
    donor.must("open");
    donor.must(&format!("ensure 0 {PROMPT}"));
    donor.must(&format!("fill 0 0 {PROMPT} 5"));
    donor.must(&format!("seal 0 {PROMPT}"));
    let neighbour = daemon.helper(B);
    let start = (daemon.ledger(), daemon.clients(), daemon.fds());
    for (step, name) in STEPS.iter().enumerate() {
        for unread in [0, 1] {
            // Each helper has a connection of the library's, and walks on one of its own.
            let mut victim = daemon.helper(A);
            if unread == 0 || step == 0 {
                victim.must(&format!("walk {step} 0"));
                victim.kill();
            } else {
                assert_eq!(victim.say(&format!("walk {step} 1")), "ended", "at {name}");
                victim.kill();
            }
            until(&format!("the one killed at {name} is gone"), || daemon.clients() == start.1);
            let now = daemon.ledger();
            assert_eq!(now["credit"], start.0["credit"], "at {name}");
            assert_eq!(now["shared"], start.0["shared"], "at {name}");
            assert_eq!(now["private"], start.0["private"], "at {name}");
            // What it had published and pinned stays, as it should; an operator lets it go.
            daemon.admin("unpin all");
            daemon.admin("evict blocks=all");
            let mut last = None;
            until(&format!("all is as it was after {name}"), || {
                let now = (daemon.ledger(), daemon.clients(), daemon.fds());
                let same = now == start;
                last = Some(now);
                same || {
                    // Extents that only the dead one had are renewed; those that the donor lives in keep free places.
                    let (ledger, clients, fds) = last.as_ref().unwrap();
                    let of = |l: &serde_json::Value, name: &str| l[name].as_u64().unwrap();
                    let idle = |l: &serde_json::Value| of(l, "free") + of(l, "stranded");
                    ["credit", "private", "shared", "cached", "pinned", "quarantined"]
                        .iter()
                        .all(|name| ledger[name] == start.0[name])
                        && idle(ledger) == idle(&start.0)
                        && *clients == start.1
                        && *fds == start.2
                }
            });
            donor.must(&format!("holds 0 0 {PROMPT} 5"));
        }
    }
    drop(neighbour);
    daemon.lives();
}

#[test]
fn two_clients_killed_together_while_they_share_a_prefix_leave_it_to_the_third() {
    let mut daemon = Daemon::new();
    let mut third = daemon.helper(A);
    third.must("open");
    let mut pair = [daemon.helper(A), daemon.helper(A)];
    pair[0].must("open");
    pair[0].must("ensure 0 64");
    pair[0].must("fill 0 0 64 5");
    pair[0].must("seal 0 64");
    pair[1].must("open");
    assert_eq!(pair[1].say("attach 0 64"), "63");
    // Both go on behind what they share.
    for (i, client) in pair.iter_mut().enumerate() {
        client.must("ensure 0 128");
        client.must(&format!("fill 0 64 128 {}", 6 + i));
    }
    assert_eq!(third.say("attach 0 64"), "63");
    let fds = daemon.fds();
    for client in &pair {
        kill(Pid::from_raw(client.child.id() as i32), Signal::SIGKILL).unwrap();
    }
    until("both are gone", || daemon.clients() == 1);
    let now = daemon.ledger();
    assert_eq!((&now["shared"], &now["private"]), (&(4 * BLOCK).into(), &0.into()), "{now}");
    third.must("holds 0 0 63 5");
    until("their sockets are closed", || daemon.fds() < fds);
    // It goes on writing behind the prefix; the prefix is found by others; at the end there is only what is cached.
    third.must("ensure 0 100");
    third.must("fill 0 63 100 8");
    third.must("holds 0 0 63 5");
    let mut late = daemon.helper(A);
    late.must("open");
    assert_eq!(late.say("attach 0 64"), "63");
    drop((late, third));
    until("only the prefix is left", || {
        let now = daemon.ledger();
        now["cached"] == 4 * BLOCK && now["shared"] == 0 && now["private"] == 0 && now["credit"] == 0
    });
    daemon.admin("evict blocks=all");
    until("the pool is whole", || daemon.account("free") == POOL);
    daemon.lives();
}

#[test]
fn a_client_that_is_stopped_keeps_what_it_has_costs_nothing_and_goes_on_where_it_was() {
    let mut daemon = Daemon::new();
    let mut stopped = daemon.helper(A);
    stopped.must("open");
    stopped.must("ensure 0 100");
    stopped.must("fill 0 0 100 5");
    let held = daemon.ledger();
    let pid = Pid::from_raw(stopped.child.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    // An answer that it cannot read is on its way while it stands.
    stopped.order("ensure 0 128");
    // Nothing of the broker's goes by how long a client says nothing, so that two seconds stand for a minute.
    let ticks = daemon.ticks();
    std::thread::sleep(Duration::from_secs(2));
    assert!(daemon.ticks() - ticks <= 4, "the daemon waits for the stopped one with a busy CPU");
    let mut other = daemon.helper(B);
    other.must("open");
    let free = (POOL - 2 * EXTENT) / BLOCK * 16;
    for round in 0..10 {
        other.must(&format!("ensure 0 {free}"));
        other.must(&format!("fill 0 0 64 {}", round + 6));
        assert_eq!(other.say(&format!("ensure 0 {}", free + 16)), "busy", "round {round}");
        other.must("trim 0 0");
        other.must("release");
    }
    drop(other);
    until("the other's memory is back", || daemon.ledger()["free"] == held["free"]);
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(stopped.answered(), "ok");
    stopped.must("holds 0 0 100 5");
    stopped.must("zeros 0 100 128");
    assert_eq!(stopped.say("lost"), "false");
    daemon.lives();
}

#[test]
fn a_client_whose_broker_has_gone_is_told_by_poll_and_by_every_call_until_it_connects_anew() {
    let mut daemon = Daemon::new();
    let mut client = daemon.helper(A);
    client.must("open");
    client.must("ensure 0 40");
    client.must("fill 0 0 40 5");
    client.must("poll");
    daemon.signal(Signal::SIGKILL);
    assert_eq!(client.say("poll"), "session-lost");
    assert_eq!(client.say("poll"), "session-lost");
    assert_eq!(client.say("lost"), "true");
    assert_eq!(client.say("open"), "session-lost");
    client.must("holds 0 0 40 5");
}

#[test]
fn a_client_that_may_not_connect_is_told_by_the_library_which_limit_says_so() {
    use kvbroker::client::{Client, ClientOptions, Error};
    let config = format!("{}\n[limits]\nconnections-per-tenant = 2\n", crate::support::CONFIG);
    let daemon = crate::support::Place::new(&config).start();
    let connect = || Client::connect_to(&daemon.place.socket(), ClientOptions::default());
    let (one, _two) = (connect().unwrap(), connect().unwrap());
    // Several times: the daemon may hang up before, or after, it could have read what the library says first.
    for _ in 0..50 {
        let refused = connect().unwrap_err();
        assert!(
            matches!(&refused, Error::Refused { fault: Fault::OverLimit, needed: 3, available: 2, .. }),
            "{refused}"
        );
        assert!(refused.to_string().contains("limits.connections-per-tenant"), "{refused}");
    }
    drop(one);
    until("there is room again", || connect().is_ok());
}

#[test]
fn a_broker_that_is_killed_again_and_again_starts_each_time_with_the_whole_pool() {
    let mut daemon = Daemon::new();
    let mut clients = Vec::new();
    let mut fds = None;
    for round in 0..20 {
        // Each round leaves a client behind that keeps its memory mapped, and a socket of a dead broker.
        let mut client = daemon.helper(A + round % 3);
        client.must("open");
        client.must("ensure 0 512");
        client.must("fill 0 0 512 5");
        clients.push(client);
        daemon.signal(Signal::SIGKILL);
        daemon.child = daemon.place.command().spawn().unwrap();
        until("the next broker serves", || daemon.try_admin("check").is_some());
        assert_eq!(daemon.account("free"), POOL, "round {round}");
        until("no descriptor more than the first time", || daemon.fds() <= *fds.get_or_insert(daemon.fds()));
    }
    for client in &mut clients {
        client.must("holds 0 0 512 5");
    }
    daemon.lives();
}
