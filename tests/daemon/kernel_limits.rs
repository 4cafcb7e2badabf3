//! What the kernel bounds: descriptors in flight, mappings. Who meets a bound is told; the others do not notice.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;

use kvbroker::wire::{self, Fault, Verb, Writer};

use crate::support::{CONFIG, Daemon, Place, Raw, until};

const A: u32 = 4001;
/// Whom the daemon runs as where privileges would lift the bound.
const DAEMON: u32 = 4050;

/// Takes all mappings that this process may still have.
#[derive(Default)]
pub struct Crowd {
    ranges: Vec<(usize, usize)>,
}

impl Crowd {
    /// Splits a range of its own until the kernel allows no more. Room for the list is there before.
    pub fn fill(&mut self) -> String {
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).unwrap().unwrap() as usize;
        let most: usize =
            std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
        let bytes = (most + 2) * page;
        self.ranges.reserve(64);
        // SAFETY: a new range without access that nothing else uses; every second page becomes a mapping of its own.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let at = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            self.ranges.push((at as usize, bytes));
            let mut next = page;
            while libc::mprotect((at as usize + next) as *mut _, page, libc::PROT_READ) == 0 {
                next += 2 * page;
                assert!(next < bytes, "vm.max_map_count was not met");
            }
            // A page takes two: there may be one left. Shared ones are never joined with what is beside them.
            loop {
                let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
                let at = libc::mmap(std::ptr::null_mut(), page, libc::PROT_READ, flags, -1, 0);
                if at == libc::MAP_FAILED {
                    break;
                }
                self.ranges.push((at as usize, page));
            }
        }
        "ok".into()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for (at, bytes) in self.ranges.drain(..) {
            // SAFETY: the ranges are this value's own.
            unsafe { libc::munmap(at as *mut _, bytes) };
        }
    }
}

#[test]
fn a_client_without_a_mapping_left_is_refused_in_time_and_its_views_stay_good() {
    let mut daemon = Daemon::new();
    let mut client = daemon.helper(A);
    client.must("open");
    client.must("open");
    client.must("ensure 0 64");
    client.must("fill 0 0 64 5");
    client.must("view 0 512");
    client.must("view-holds 0 64 5");
    // A view that could outgrow the limit is refused when it is asked for, by the name of the limit.
    let answer = client.say("view 1 1200000");
    assert!(answer.contains("vm.max_map_count"), "{answer}");
    // What the client has not told of yet is its credit in the daemon's books.
    let used = || daemon.account("private") + daemon.account("credit");
    let before = (daemon.account("free"), used());
    client.must("crowd");
    assert_eq!(client.say("view 1 64"), "map");
    assert_eq!(client.say("ensure 0 256"), "map");
    client.must("view-holds 0 64 5");
    client.must("holds 0 0 64 5");
    client.must("make-room");
    client.must("release");
    until("what could not be mapped is back", || (daemon.account("free"), used()) == before);
    client.must("ensure 0 256");
    client.must("fill 0 64 256 5");
    client.must("view-holds 0 256 5");
    client.must("view 1 64");
    daemon.lives();
}

/// A daemon without privileges that may open (and have in flight) so few files.
fn small(more: &str) -> Daemon {
    let config = format!("{}\n{more}", CONFIG.replace("size = \"1M\"", "size = \"2M\""));
    let place = Place::new(&config);
    assert!(nix::unistd::getuid().is_root(), "run as root: sudo -E cargo test --test daemon");
    chown(place.dir.path(), Some(DAEMON), Some(DAEMON)).unwrap();
    place.start_with(|command| {
        command.uid(DAEMON).gid(DAEMON);
        // SAFETY: setrlimit may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 128, rlim_max: 128 };
                match libc::setrlimit(libc::RLIMIT_NOFILE, &limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            })
        };
    })
}

/// A session on a connection of its own.
fn open(daemon: &Daemon) -> (Raw, u32, u64) {
    let mut raw = daemon.raw();
    let format = raw.greet();
    let open = wire::Open { format: format.into(), ..wire::Open::default() };
    let opened = raw.ask(Verb::Open, 0, |w| _ = w.put(&open)).unwrap();
    let session = u64::from_le_bytes(opened.body[..8].try_into().unwrap());
    (raw, format, session)
}

fn attach(tokens: &[u32]) -> impl FnOnce(&mut Writer) {
    move |w| {
        w.put(&wire::Attach { count: (tokens.len() as u32).into(), more: 0.into() }).put_tokens(tokens);
    }
}

/// Publishes 48 blocks, which fill 12 extents, and returns their tokens.
fn publish(daemon: &Daemon) -> (Raw, Vec<u32>) {
    let tokens: Vec<u32> = (0..48 * 16).collect();
    let (mut donor, format, session) = open(daemon);
    let grant = donor.reserve(format, 48).unwrap();
    assert_eq!((grant.fault, grant.fds), (None, 12));
    let from = size_of::<wire::Grant>() + 12 * size_of::<wire::ExtentInfo>();
    let named: Vec<u8> = grant.body[from..].chunks_exact(24).flat_map(|block| block[..16].to_vec()).collect();
    let sealed = donor.ask(Verb::Seal, session, |w| {
        let report = wire::Report { tokens: (48 * 16).into(), first: 0.into(), used: 48.into() };
        w.put(&wire::Seal { report, from: 0.into(), count: (48 * 16).into() });
        w.put_tokens(&tokens).put(&named[..]);
    });
    assert_eq!(sealed.unwrap().fault, None);
    (donor, tokens)
}

#[test]
fn clients_that_never_read_leave_the_others_room_for_descriptors_in_flight() {
    let mut daemon = small("");
    let (donor, tokens) = publish(&daemon);
    let fds = daemon.fds();
    // Fourteen times twelve descriptors are more than the kernel lets this daemon's user have in flight.
    let mut deaf: Vec<_> = (0..14)
        .map(|_| {
            let (mut raw, _, session) = open(&daemon);
            raw.send(Verb::Attach, session, attach(&tokens)).unwrap();
            raw
        })
        .collect();
    // Another user's grants come all the while.
    let mut other = daemon.helper(A);
    other.must("open");
    for tokens in [16, 64, 128, 256] {
        other.must(&format!("ensure 0 {tokens}"));
    }
    other.must("fill 0 0 256 5");
    let ticks = daemon.ticks();
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(daemon.ticks() - ticks <= 10, "the daemon spins on what it cannot send");
    // Whoever reads gets what it was owed.
    for raw in &mut deaf {
        let reply = raw.receive().expect("its answer comes");
        assert_eq!((reply.fault, reply.fds), (None, 12));
    }
    drop(deaf);
    other.must("holds 0 0 256 5");
    drop((donor, other));
    until("all descriptors are closed", || daemon.clients() == 0 && daemon.fds() < fds);
    daemon.lives();
}

#[test]
fn a_dropped_connection_with_unread_descriptors_counts_against_its_user_until_they_are_gone() {
    let mut daemon = small("[limits]\nconnections-per-tenant = 3\n");
    let fds = daemon.fds();
    let deaf: Vec<_> = (0..3)
        .map(|_| {
            let mut raw = daemon.raw();
            let format = raw.greet();
            let reserve = wire::Reserve { format: format.into(), want: 4.into() };
            raw.send(Verb::Reserve, 0, |w| _ = w.put(&reserve)).unwrap();
            raw
        })
        .collect();
    until("each has a descriptor on its way", || daemon.account("credit") == 12 * crate::support::BLOCK);
    // Each breaks the protocol and is dropped; what it has not read keeps its descriptors in flight.
    for raw in &deaf {
        raw.socket.send(&[1; 7], &[]).unwrap();
    }
    until("they are dropped", || daemon.clients() == 0);
    let mut fourth = daemon.raw();
    let refusal = fourth.receive().expect("a word before the end");
    assert_eq!((refusal.number, refusal.fault), (0, Some(Fault::OverLimit)));
    let said = String::from_utf8_lossy(&refusal.body[16..]).into_owned();
    assert!(said.contains("unread"), "{said}");
    // Another user is served.
    let mut other = daemon.helper(A);
    other.must("open");
    other.must("ensure 0 64");
    drop((deaf, other));
    until("it may connect again", || {
        let mut raw = daemon.raw();
        let label = wire::label("raw");
        let hello = wire::Hello { magic: wire::MAGIC.into(), version: wire::VERSION.into(), label };
        raw.ask(Verb::Hello, 0, |w| _ = w.put(&hello)).is_some_and(|r| r.fault.is_none())
    });
    until("all descriptors are closed", || daemon.clients() == 0 && daemon.fds() <= fds);
    daemon.lives();
}
