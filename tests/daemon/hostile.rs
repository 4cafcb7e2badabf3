//! Clients that mean harm or are broken: they are refused or dropped, and nobody else notices.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvbroker::wire::{self, Fault, Verb, Writer};

use crate::support::{CONFIG, Daemon, POOL, Place, Raw, open_null, profile, until};

/// A header with its length filled in, and a body.
fn message(opcode: u16, sequence: u64, body: &[u8]) -> Vec<u8> {
    let mut w = Writer::start(opcode, 0, sequence, 0);
    w.put(body);
    w.finish()
}

fn hello(magic: u32, version: u32) -> Vec<u8> {
    let mut w = Writer::request(Verb::Hello, 1, 0);
    w.put(&wire::Hello { magic: magic.into(), version: version.into(), label: wire::label("raw") });
    w.finish()
}

#[test]
fn every_broken_message_ends_in_a_typed_answer_or_a_hang_up_and_leaks_nothing() {
    let mut daemon = Daemon::new();
    let mut neighbour = daemon.raw();
    let format = neighbour.greet();
    assert_eq!(neighbour.reserve(format, 1).unwrap().fault, None);
    let fds = daemon.fds();
    let good = hello(wire::MAGIC, wire::VERSION);
    let mut wrong_length = good.clone();
    wrong_length[4] += 1;
    let broken: [(&str, Vec<u8>, bool, bool); 11] = [
        // what, message, after hello, whether there is an answer before the end
        ("wrong magic", hello(1, wire::VERSION), false, true),
        ("wrong version", hello(wire::MAGIC, 99), false, true),
        ("request before hello", message(Verb::Query as u16, 1, &[0; 8]), false, true),
        ("short hello", message(Verb::Hello as u16, 1, &[0; 8]), false, true),
        ("second hello", good.clone(), true, true),
        ("no header", vec![1; 7], true, true),
        ("wrong length", wrong_length, true, true),
        (
            "longer than the protocol allows",
            message(Verb::Query as u16, 2, &vec![0; wire::MAX_MESSAGE]),
            true,
            false,
        ),
        ("number 0", message(Verb::Query as u16, 0, &[0; 8]), true, true),
        ("an empty message", Vec::new(), true, false),
        ("unknown verb", message(99, 3, &[0; 8]), true, true),
    ];
    for (what, bytes, greeted, answered) in broken {
        let mut raw = daemon.raw();
        if greeted {
            assert_eq!(raw.hello().fault, None);
        }
        raw.socket.send(&bytes, &[]).unwrap();
        if answered {
            let reply = raw.receive().unwrap_or_else(|| panic!("{what}: no answer"));
            assert_eq!(reply.fault, Some(Fault::BadRequest), "{what}");
        }
        let goes_on = ["request before hello", "unknown verb"].contains(&what);
        if !goes_on {
            assert_eq!(raw.receive(), None, "{what}: the daemon hangs up");
        } else if greeted {
            assert!(raw.ask(Verb::Query, 0, |w| _ = w.put(&wire::Query::default())).is_some());
        }
        assert_eq!(neighbour.reserve(format, 0).unwrap().fault, None);
    }
    let mut raw = daemon.raw();
    raw.hello();
    let null = open_null();
    let many = [null.as_fd(); 200];
    match raw.socket.send(&message(Verb::Query as u16, 2, &[0; 8]), &many) {
        Ok(()) => assert_eq!(raw.receive(), None, "descriptors end the connection"),
        // From Linux 6.16 on they do not even leave.
        Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EPERM)),
    }
    drop(raw);
    drop(daemon.raw());
    until("all descriptors are closed", || daemon.clients() == 1 && daemon.fds() <= fds);
    daemon.lives();
}

#[test]
fn counts_beyond_all_bounds_are_refused_one_by_one() {
    let mut daemon = Daemon::new();
    let mut raw = daemon.raw();
    let format = raw.greet();
    let reply = raw.ask(Verb::Open, 0, |w| {
        w.put(&wire::Open { format: format.into(), ..wire::Open::default() });
    });
    let session = reply.unwrap();
    let session = u64::from_le_bytes(session.body[..8].try_into().unwrap());
    let before = (daemon.ledger(), daemon.fds());
    for verb in Verb::ALL.iter().copied().filter(|v| *v != Verb::Hello) {
        for words in 0..17 {
            for value in [u32::MAX, 1 << 31, u32::MAX / 16 + 1] {
                let body: Vec<u8> = (0..words).flat_map(|_| value.to_le_bytes()).collect();
                let reply = raw.ask(verb, session, |w| _ = w.put(&body[..])).expect("it stays connected");
                assert!(reply.fault.is_some(), "{} with {words} words of {value}", verb.name());
            }
        }
    }
    let open = |tokens: u64| {
        move |w: &mut Writer| {
            w.put(&wire::Open { format: format.into(), max_tokens: tokens.into(), ..wire::Open::default() });
        }
    };
    assert_eq!(raw.ask(Verb::Open, 0, open(u64::MAX)).unwrap().fault, Some(Fault::NeverFits));
    assert_eq!((daemon.ledger(), daemon.fds()), before);
    daemon.lives();
}

#[test]
fn garbage_at_line_speed_keeps_nobody_from_being_served() {
    let mut daemon = Daemon::new();
    let socket = daemon.place.socket();
    let before = (daemon.ledger(), daemon.clients(), daemon.fds());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 1..3u64 {
            let (socket, stop) = (&socket, &stop);
            scope.spawn(move || {
                let mut state = seed;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let Ok(mut raw) = Raw::connect(socket) else { continue };
                    if state % 3 == 0 {
                        // It may be one too many, while its former connections are still being ended.
                        raw.try_hello();
                    }
                    for _ in 0..50 {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(seed);
                        let bytes: Vec<u8> = (0..state >> 58).map(|i| (state >> (i % 56)) as u8).collect();
                        let bytes =
                            if state % 2 == 0 { message(state as u16 % 20, 1, &bytes) } else { bytes };
                        if raw.socket.send(&bytes, &[]).is_err() {
                            break;
                        }
                    }
                }
            });
        }
        let mut raw = daemon.raw();
        let format = raw.greet();
        for _ in 0..200 {
            assert_eq!(raw.reserve(format, 0).unwrap().fault, None);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    until("all is as it was", || (daemon.ledger(), daemon.clients(), daemon.fds()) == before);
    daemon.lives();
}

#[test]
fn a_client_that_never_reads_costs_neither_time_nor_descriptors_nor_the_others() {
    let mut daemon = Daemon::new();
    let before = (daemon.ledger(), daemon.clients(), daemon.fds());
    let mut deaf = daemon.raw();
    let format = deaf.greet();
    // Eight grants with a descriptor each: one may be on its way, the others wait in the daemon's hands.
    for _ in 0..8 {
        deaf.send(Verb::Reserve, 0, |w| _ = w.put(&wire::Reserve { format: format.into(), want: 4.into() }))
            .unwrap();
    }
    until("the first grant is there", || daemon.account("credit") > 0);
    std::thread::sleep(Duration::from_millis(50));
    let (granted, ticks) = (daemon.account("credit"), daemon.ticks());
    std::thread::sleep(Duration::from_millis(600));
    assert!(daemon.ticks() - ticks <= 10, "the daemon spins: {} ticks in 600 ms", daemon.ticks() - ticks);
    assert!(granted < POOL / 2, "requests of a client that does not read are not done: {granted}");
    let mut other = daemon.raw();
    let format = other.greet();
    assert_eq!(other.reserve(format, 4).unwrap().fault, None);
    // When it reads, everything comes, in order.
    let mut fds = 0;
    for number in 3..11 {
        let reply = deaf.receive().unwrap();
        assert_eq!(reply.number, number);
        fds += reply.fds;
    }
    assert_eq!(fds, 7, "seven extents were left");
    drop(deaf);
    until("its blocks are back", || daemon.account("credit") == POOL / 8);
    // A flood of small requests that nobody reads the answers of.
    let mut flood = daemon.raw();
    flood.hello();
    let nonblocking = nix::fcntl::OFlag::O_NONBLOCK;
    nix::fcntl::fcntl(flood.socket.as_fd(), nix::fcntl::FcntlArg::F_SETFL(nonblocking)).unwrap();
    let resident = daemon.status_line("VmRSS:");
    let mut sent = 0;
    while sent < 100_000 && flood.send(Verb::Query, 0, |w| _ = w.put(&wire::Query::default())).is_ok() {
        sent += 1;
    }
    assert!(sent < 100_000, "the flood was to stop at a full socket");
    assert!(daemon.status_line("VmRSS:") < resident + (4 << 10), "the queue is bounded");
    assert_eq!(other.reserve(format, 0).unwrap().fault, None);
    drop((flood, other));
    until("all is as it was", || (daemon.ledger(), daemon.clients(), daemon.fds()) == before);
    daemon.lives();
}

#[test]
fn a_flood_of_connections_at_the_limit_of_open_files_leaves_the_others_alone() {
    use std::os::unix::process::CommandExt;
    let mut daemon = Place::new(CONFIG).start_with(|command| {
        // SAFETY: setrlimit may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 96, rlim_max: 96 };
                if libc::setrlimit(libc::RLIMIT_NOFILE, &limit) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            })
        };
    });
    let fds = daemon.fds();
    let mut early = daemon.raw();
    let format = early.greet();
    let flood: Vec<_> = (0..300).filter_map(|_| Raw::connect(&daemon.place.socket()).ok()).collect();
    assert!(flood.len() > 100);
    assert_eq!(early.reserve(format, 4).unwrap().fault, None);
    until("those who are not served have been hung up on", || {
        flood.iter().filter(|raw| raw.socket.unread_by_peer().is_err() || is_hung_up(raw)).count() > 200
    });
    let ticks = daemon.ticks();
    std::thread::sleep(Duration::from_millis(500));
    assert!(daemon.ticks() - ticks <= 10, "the daemon spins on connections that it cannot take");
    // Memory still changes hands: the flood has taken no descriptor that the pool needs.
    drop(early);
    until("the pool is whole", || daemon.account("free") == POOL);
    drop(flood);
    until("there is room again", || {
        let mut raw = daemon.raw();
        raw.ask(Verb::Hello, 0, |w| _ = w.put(&hello_body())).is_some_and(|r| r.fault.is_none())
    });
    until("all descriptors are closed", || daemon.clients() == 0 && daemon.fds() <= fds);
    daemon.lives();
}

fn hello_body() -> wire::Hello {
    wire::Hello { magic: wire::MAGIC.into(), version: wire::VERSION.into(), label: wire::label("raw") }
}

fn is_hung_up(raw: &Raw) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut fds = [PollFd::new(raw.socket.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).unwrap() > 0 && fds[0].revents().unwrap().contains(PollFlags::POLLHUP)
}

#[test]
fn one_user_cannot_take_all_connections() {
    let config = format!("{CONFIG}\n[limits]\nconnections-per-tenant = 3\n");
    let daemon = Place::new(&config).start();
    let mut mine: Vec<_> = (0..3).map(|_| daemon.raw()).collect();
    mine.iter_mut().for_each(|raw| assert_eq!(raw.hello().fault, None));
    let mut fourth = daemon.raw();
    let refused = fourth.receive().expect("a word before the end");
    assert_eq!((refused.number, refused.fault), (0, Some(Fault::OverLimit)));
    assert!(String::from_utf8_lossy(&refused.body).contains("limits.connections-per-tenant"));
    assert_eq!(fourth.receive(), None);
    let mut other = daemon.helper(4002);
    other.must("open");
    mine.pop();
    until("a connection that ended counts no more", || {
        let mut raw = daemon.raw();
        raw.ask(Verb::Hello, 0, |w| _ = w.put(&hello_body())).is_some_and(|r| r.fault.is_none())
    });
}

#[test]
fn a_connection_that_says_no_hello_ends_is_counted_and_keeps_nobody_awake() {
    let config = format!("{CONFIG}\n[limits]\nhello-ms = 300\n");
    let mut daemon = Place::new(&config).start();
    let before = daemon.fds();
    let mut known = daemon.raw();
    assert_eq!(known.hello().fault, None);
    let mut silent = daemon.raw();
    let mut chatty = daemon.raw();
    // Words before hello are no hello.
    let refused = chatty.ask(Verb::Query, 0, |w| _ = w.put(&[0u8; 8][..])).unwrap();
    assert_eq!(refused.fault, Some(Fault::BadRequest));
    for raw in [&mut silent, &mut chatty] {
        let ended = raw.receive().expect("a word before the end");
        assert_eq!((ended.number, ended.fault), (0, Some(Fault::BadRequest)));
        assert!(String::from_utf8_lossy(&ended.body[16..]).contains("limits.hello-ms"));
        assert_eq!(raw.receive(), None);
    }
    // One that does not even read what it is told leaves nothing behind either.
    let unread = daemon.raw();
    until("it has ended", || daemon.admin("status")["counters"]["silent"] == 3);
    until("nothing of them is left: a connection takes its socket and its process", || {
        daemon.clients() == 1 && daemon.fds() == before + 2
    });
    // Who has said it has all the time in the world, and the daemon sleeps.
    let wakes = || {
        let quiet = daemon.status_line("voluntary_ctxt_switches:");
        std::thread::sleep(Duration::from_millis(700));
        daemon.status_line("voluntary_ctxt_switches:") - quiet
    };
    until("nothing wakes it up", || wakes() == 0);
    assert_eq!(known.ask(Verb::Profile, 0, |w| wire::put_profile(w, &profile(), 0)).unwrap().fault, None);
    drop((unread, silent, chatty));
    daemon.lives();
}

#[test]
fn silent_connections_of_others_leave_a_tenant_with_a_reserve_its_own() {
    let limits = "[limits]\nconnections = 9\nconnections-per-tenant = 4\nhello-ms = 60000\n";
    let config = format!("{CONFIG}\n{limits}[[tenant]]\nuid = 4001\nreserve = \"128K\"\n");
    let mut daemon = Place::new(&config).start();
    // Two users that take all that they can, and say nothing there.
    let mut crowd: Vec<_> = [4002, 4003].into_iter().map(|uid| daemon.helper(uid)).collect();
    crowd.iter_mut().for_each(|c| c.must("connect 4"));
    until("they have what they can get", || daemon.clients() == 5);
    let mut refused = daemon.raw();
    let word = refused.receive().expect("a word before the end");
    assert_eq!((word.number, word.fault), (0, Some(Fault::OverLimit)));
    assert!(String::from_utf8_lossy(&word.body[16..]).contains("reserve"));
    // Four connections are those of the tenant with a reserve, whatever others do.
    let mut mine: Vec<_> = (0..4).map(|_| daemon.helper(4001)).collect();
    for helper in &mut mine {
        helper.must("open");
    }
    assert_eq!(daemon.clients(), 9);
    // What it has left is kept for it.
    drop(mine.pop());
    until("it is closed", || daemon.clients() == 8);
    assert_eq!(daemon.raw().receive().expect("a word").fault, Some(Fault::OverLimit));
    daemon.helper(4001).must("open");
    daemon.lives();
}

#[test]
fn a_crowd_of_connections_of_one_user_is_served_no_more_often_than_a_neighbour_with_one() {
    let mut daemon = Daemon::new();
    let mut mine = daemon.raw();
    let format = mine.greet();
    let mut crowd = daemon.helper(4002);
    crowd.must("connect 20");
    crowd.must("greet-all");
    // While nobody is served, twenty connections ask for an extent each, and then one of a neighbour does. There are eight.
    let daemon_pid = nix::unistd::Pid::from_raw(daemon.pid() as i32);
    nix::sys::signal::kill(daemon_pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    crowd.must(&format!("reserve-all {format} 4"));
    mine.send(Verb::Reserve, 0, |w| _ = w.put(&wire::Reserve { format: format.into(), want: 4.into() }))
        .unwrap();
    nix::sys::signal::kill(daemon_pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    assert_eq!(mine.receive().unwrap().fault, None, "the crowd was served eight times before");
    assert_eq!(crowd.say("granted"), "7");
    daemon.lives();
}

#[test]
fn a_tenant_whose_requests_take_long_is_answered_each_time_and_nobody_is_kept_awake_for_it() {
    // Long in a debug build, which checks the books after each request.
    let mut daemon = Daemon::new();
    let mut neighbour = daemon.raw();
    let format = neighbour.greet();
    let mut busy = daemon.helper(4002);
    busy.must("open");
    busy.must("ensure 0 500");
    for n in 1..=40 {
        busy.must("fork 0");
        busy.must(&format!("close {n}"));
        assert_eq!(neighbour.reserve(format, 0).unwrap().fault, None);
    }
    // One that ends while it rests is gone at once, and nothing is left to wake up for.
    busy.order("fork 0");
    busy.kill();
    until("it is gone", || daemon.clients() == 1);
    let wakes = || {
        let quiet = daemon.status_line("voluntary_ctxt_switches:");
        std::thread::sleep(Duration::from_millis(700));
        daemon.status_line("voluntary_ctxt_switches:") - quiet
    };
    until("nothing wakes it up", || wakes() == 0);
    daemon.lives();
}

#[test]
fn operators_that_are_silent_slow_or_confused_keep_no_other_from_an_answer() {
    let mut daemon = Daemon::new();
    let admin = daemon.place.path("admin.sock");
    let fds = daemon.fds();
    let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&admin).unwrap()).collect();
    assert_eq!(daemon.admin("check")["ok"], true);
    // A request of which only half has come, and one without its end whose sender hangs up.
    let mut half = UnixStream::connect(&admin).unwrap();
    half.write_all(b"stat").unwrap();
    let mut broken = UnixStream::connect(&admin).unwrap();
    broken.write_all(b"limits uid=7 limit=").unwrap();
    drop(broken);
    let mut garbage = UnixStream::connect(&admin).unwrap();
    let _ = garbage.write_all(&[0xff; 100_000]);
    assert!(daemon.admin("nonsense")["error"].as_str().unwrap().contains("nonsense"));
    // One who asks and does not read: its answer waits, the daemon does not.
    let mut slow = UnixStream::connect(&admin).unwrap();
    slow.write_all(b"map\n").unwrap();
    let ticks = daemon.ticks();
    std::thread::sleep(Duration::from_millis(300));
    assert!(daemon.ticks() - ticks <= 6, "the daemon spins");
    half.write_all(b"us\n").unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut half, &mut answer).unwrap();
    assert!(answer.contains("\"ledger\""), "{answer}");
    drop((silent, half, garbage, slow));
    until("all are gone", || daemon.fds() <= fds);
    daemon.lives();
}

/// Lines of the log that say this, and how many the daemon may have written since `start`: one a second from each place.
fn said_at_most(daemon: &Daemon, words: &str, start: std::time::Instant) -> (usize, usize) {
    let lines = daemon.place.log().lines().filter(|l| l.contains(words)).count();
    (lines, 1 + start.elapsed().as_secs() as usize)
}

#[test]
fn whoever_is_refused_or_breaks_the_protocol_without_end_does_not_fill_the_log() {
    let config = format!("{CONFIG}\n[limits]\nconnections-per-tenant = 2\n");
    let mut daemon = Place::new(&config).start();
    let start = std::time::Instant::now();
    let (mut one, _other) = (daemon.raw(), daemon.raw());
    assert_eq!(one.hello().fault, None);
    for _ in 0..500 {
        let refused = daemon.raw().receive().expect("a word before the end");
        assert_eq!(refused.fault, Some(Fault::OverLimit));
    }
    let (lines, most) = said_at_most(&daemon, "a connection was refused", start);
    assert!((1..=most).contains(&lines), "500 refused, {lines} lines, at most {most}");
    // One that sends descriptors is dropped for it, and comes again.
    drop(one);
    let null = open_null();
    let mut dropped = 0;
    while dropped < 200 {
        let mut raw = daemon.raw();
        if raw.socket.send(&hello(wire::MAGIC, wire::VERSION), &[null.as_fd()]).is_ok()
            && raw.receive().is_none()
        {
            dropped += 1;
        }
    }
    let (lines, most) = said_at_most(&daemon, "sent descriptors", start);
    assert!(lines <= most, "{dropped} dropped, {lines} lines, at most {most}");
    daemon.lives();
}
