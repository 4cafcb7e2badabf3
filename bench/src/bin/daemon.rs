//! Row `daemon`: what a running `kvbrokerd` costs and how it behaves beside bad neighbours.
//!
//! Start to ready against the memory it takes and an exec; resident memory and wake-ups while idle; how soon a dead
//! client's blocks are free, against a bare wake-up; and what one client's requests take beside a neighbour that
//! floods, stalls or hoards, against one that only burns processor time.

use std::fs;
use std::hint::black_box;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvbroker::heap::{Heap, Memfd};
use kvbroker::profile::Profile;
use kvbroker::seqpacket::SeqPacket;
use kvbroker::wire::{self, Reader, Verb, Writer};
use kvbroker_bench::placement::Placement;
use kvbroker_bench::{Cmp, Figure, at_most, reported};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

const DAEMON: &str = "target/release/kvbrokerd";
const EXTENT: u64 = 3 << 20;
const EXTENTS: u64 = 64;
/// The tenant that is measured, and the neighbour; both only where this runs as root.
const VICTIM: u32 = 20001;
const NEIGHBOUR: u32 = 20002;

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    if let (Some(role), Some(socket)) = (arguments.next(), arguments.next()) {
        return neighbour(&role, Path::new(&socket));
    }
    let directory = std::env::temp_dir().join(format!("kvbroker-bench-daemon.{}", std::process::id()));
    fs::create_dir(&directory)?;
    let result = measure(&directory);
    fs::remove_dir_all(&directory)?;
    result
}

fn measure(directory: &Path) -> io::Result<()> {
    start_to_ready(directory)?;
    idle(directory)?;
    Placement::each(|placement| dead_client(directory, placement))?;
    neighbours(directory)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Daemon {
    process: Child,
    socket: PathBuf,
}

impl Daemon {
    /// Starts one; the second value is how long it took from `exec` to READY=1, in seconds.
    fn start(directory: &Path, more: &str) -> io::Result<(Self, f64)> {
        let path = |name: &str| directory.join(name);
        let (socket, notify) = (path("client.sock"), path("notify"));
        let config = format!(
            "[pool]\nbackend = \"memfd\"\nlock = false\nextent = \"3M\"\nsize = \"{}M\"\n[socket]\nmode = \"0666\"\n{more}",
            EXTENTS * EXTENT >> 20
        );
        fs::write(path("kvbroker.toml"), config)?;
        let _ = fs::remove_file(&notify);
        let ready = UnixDatagram::bind(&notify)?;
        ready.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut command = Command::new(DAEMON);
        command.arg("--config").arg(path("kvbroker.toml")).arg("--socket").arg(&socket);
        command.arg("--admin-socket").arg(path("admin.sock")).env("NOTIFY_SOCKET", &notify);
        let began = Instant::now();
        let process = command.stdin(Stdio::null()).spawn()?;
        let daemon = Daemon { process, socket };
        let mut said = [0; 4096];
        let got = ready.recv(&mut said)?;
        let took = began.elapsed().as_secs_f64();
        let said = String::from_utf8_lossy(&said[..got]);
        if !said.contains("READY=1") {
            return Err(io::Error::other(format!("the daemon said {said}")));
        }
        Ok((daemon, took))
    }

    fn proc_status(&self, key: &str) -> io::Result<f64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = text.lines().find_map(|l| l.strip_prefix(key));
        let number = line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse().ok());
        number.ok_or_else(|| io::Error::other(format!("{key} is not in /proc")))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_to_ready(directory: &Path) -> io::Result<()> {
    const ROUNDS: usize = 7;
    let (mut ready, mut taken, mut exec) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (daemon, took) = Daemon::start(directory, "")?;
        drop(daemon);
        ready.push(took);
        let heap = Memfd::new(false);
        let began = Instant::now();
        let buffers: Vec<_> = (0..EXTENTS)
            .map(|_| heap.allocate(EXTENT))
            .collect::<Result<_, _>>()
            .map_err(io::Error::other)?;
        taken.push(began.elapsed().as_secs_f64());
        drop(buffers);
        let began = Instant::now();
        Command::new(DAEMON).arg("--version").stdout(Stdio::null()).status()?;
        exec.push(began.elapsed().as_secs_f64());
    }
    let (ready, taken, exec) = (median(ready), median(taken), median(exec));
    at_most(
        "daemon/start-to-ready",
        (ready - taken) / exec,
        10.0,
        format!(
            "(start to READY=1, {:.1} ms, less taking the same memory, {:.1} ms) / kvbrokerd --version, {:.2} ms; memfd pool of \
             192 MiB, medians of {ROUNDS}",
            ready * 1e3,
            taken * 1e3,
            exec * 1e3
        ),
    );
    Ok(())
}

fn idle(directory: &Path) -> io::Result<()> {
    const SECONDS: u64 = 5;
    /// Until then the broker looks whether anybody uses what was granted (`limits.rest-ms`, half a second, twice).
    const REST: Duration = Duration::from_millis(1500);
    let (daemon, _) = Daemon::start(directory, "")?;
    let mut client = Raw::connect(&daemon.socket)?;
    client.greet()?;
    let blocks = client.grow(64)?;
    std::thread::sleep(REST);
    let before = daemon.proc_status("voluntary_ctxt_switches:")?;
    std::thread::sleep(Duration::from_secs(SECONDS));
    let woken = daemon.proc_status("voluntary_ctxt_switches:")? - before;
    let figure = |name: &str, value: f64, unit: &str, bar: f64, note: &str| {
        Figure {
            name: name.into(),
            value,
            unit: unit.into(),
            bar: Some(bar),
            cmp: Cmp::AtMost,
            note: note.into(),
        }
        .print()
    };
    figure(
        "daemon/idle-wakeups",
        woken / SECONDS as f64,
        "1/s",
        0.0,
        "of the loop, with a client that holds 64 blocks and asks for nothing; without systemd's watchdog",
    );
    let own = daemon.proc_status("VmRSS:")? - daemon.proc_status("RssShmem:")?;
    figure("daemon/resident", own / 1024.0, "MiB", 8.0, "resident memory without the pool");
    drop(blocks);
    Ok(())
}

/// From the hang-up of a client that holds 64 blocks until another one is told that they are free, its question and
/// answer included.
fn dead_client(directory: &Path, placement: Placement) -> io::Result<()> {
    const ROUNDS: usize = 200;
    let (daemon, _) = placement.start(|| Daemon::start(directory, ""))?;
    let mut witness = Raw::connect(&daemon.socket)?;
    let format = witness.greet()?;
    let all = witness.room(format)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let mut client = Raw::connect(&daemon.socket)?;
        client.greet()?;
        let granted = client.grow(64)?;
        if witness.room(format)? + 64 > all {
            return Err(io::Error::other("the blocks are not counted as held"));
        }
        let began = Instant::now();
        drop(client);
        while witness.room(format)? < all {}
        times.push(began.elapsed().as_secs_f64());
        drop(granted);
    }
    let wake = wake_up(placement)?;
    let back = median(times);
    at_most(
        format!("daemon/dead-client{}", placement.suffix()),
        back / wake,
        20.0,
        format!(
            "hang-up to the answer that shows the blocks free, {:.1} us, over a wake-up through an eventfd, {:.1} us, {}; \
             medians of {ROUNDS}",
            back * 1e6,
            wake * 1e6,
            placement.words()
        ),
    );
    Ok(())
}

/// One thread wakes another, and that one the first: half of it.
fn wake_up(placement: Placement) -> io::Result<f64> {
    const ROUNDS: usize = 2000;
    let make = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).map_err(io::Error::from);
    let (there, back) = (make()?, make()?);
    std::thread::scope(|scope| {
        placement.start(|| {
            Ok(scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let _ = there.read().and_then(|_| back.write(1));
                }
            }))
        })?;
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let began = Instant::now();
            there.write(1)?;
            back.read()?;
            times.push(began.elapsed().as_secs_f64() / 2.0);
        }
        Ok(median(times))
    })
}

fn neighbours(directory: &Path) -> io::Result<()> {
    let root = nix::unistd::geteuid().is_root();
    let me = nix::unistd::geteuid().as_raw();
    let victim = if root { VICTIM } else { me };
    let config = format!("[[tenant]]\nuid = {victim}\nreserve = \"48M\"\n");
    let kinds: &[&str] =
        if root { &["burn", "flood", "stall", "hoard"] } else { &["burn", "flood", "stall"] };
    let mut burn = 0.0;
    for &kind in kinds {
        let (daemon, _) = Daemon::start(directory, &config)?;
        open_to_others(directory)?;
        let mut other = Command::new(std::env::current_exe()?);
        other.args([kind, &daemon.socket.display().to_string()]).stdout(Stdio::null());
        if root {
            other.uid(NEIGHBOUR).gid(NEIGHBOUR);
        }
        let mut other = other.spawn()?;
        std::thread::sleep(Duration::from_millis(500));
        let measured = as_user(victim, || grow_and_free(&daemon.socket));
        let ended = other.try_wait()?;
        let _ = other.kill();
        other.wait()?;
        let (middle, late) = measured?;
        if let Some(status) = ended {
            return Err(io::Error::other(format!("the neighbour ({kind}) has ended: {status}")));
        }
        let note = format!(
            "one block granted and given back: median {:.1} us, p99 {:.1} us",
            middle * 1e6,
            late * 1e6
        );
        if kind == "burn" {
            burn = middle;
            reported(
                "daemon/beside-burn",
                middle * 1e6,
                "us",
                format!("a neighbour burns processor time; {note}"),
            );
        } else {
            at_most(
                format!("daemon/beside-{kind}"),
                middle / burn,
                2.0,
                format!("over the same beside a neighbour that burns: {note}"),
            );
        }
    }
    Ok(())
}

fn open_to_others(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))
}

/// Connects as `uid`: the broker asks the kernel who connected at that time.
fn as_user<T>(uid: u32, what: impl FnOnce() -> T) -> T {
    let me = nix::unistd::geteuid();
    let change = me.is_root() && uid != me.as_raw();
    if change {
        nix::unistd::seteuid(uid.into()).expect("root may be anybody");
    }
    let result = what();
    if change {
        nix::unistd::seteuid(me).expect("and itself again");
    }
    result
}

/// Median and 99th percentile, in seconds.
fn grow_and_free(path: &Path) -> io::Result<(f64, f64)> {
    let mut client = Raw::connect(path)?;
    client.greet()?;
    let mut times = Vec::new();
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        let began = Instant::now();
        let blocks = client.grow(1)?;
        client.free(&blocks)?;
        times.push(began.elapsed().as_secs_f64());
        // A decoding session asks now and then.
        std::thread::sleep(Duration::from_micros(500));
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

/// What the other process does until it is killed.
fn neighbour(role: &str, path: &Path) -> io::Result<()> {
    match role {
        "burn" => loop {
            black_box(black_box(1u64).wrapping_mul(3));
        },
        "flood" => {
            let mut client = Raw::connect(path)?;
            let format = client.greet()?;
            loop {
                client.room(format)?;
            }
        }
        // Sends as much as the socket takes, and reads nothing: it sleeps in send, most of the time.
        "stall" => {
            let mut client = Raw::connect(path)?;
            let format = client.greet()?;
            loop {
                client.send(Verb::Query, 0, |w| {
                    _ = w.put(&wire::Query { format: format.into(), reserved: 0.into() })
                })?;
            }
        }
        "hoard" => {
            let mut client = Raw::connect(path)?;
            client.greet()?;
            while client.grow(32).is_ok() {}
            loop {
                // Refused each time, as fast as it goes.
                let _ = client.grow(1);
            }
        }
        other => Err(io::Error::other(format!("there is no neighbour {other}"))),
    }
}

/// A connection without the library, so that one process can have many and drop them whenever it likes.
struct Raw {
    socket: SeqPacket,
    sequence: u64,
    buffer: Vec<u8>,
    session: u64,
    kept: Vec<std::os::fd::OwnedFd>,
}

impl Raw {
    fn connect(path: &Path) -> io::Result<Self> {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        connect(fd.as_fd().as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Raw {
            socket: fd.into(),
            sequence: 0,
            buffer: vec![0; wire::MAX_MESSAGE],
            session: 0,
            kept: Vec::new(),
        })
    }

    /// Says hello, registers the reference profile and opens a session.
    fn greet(&mut self) -> io::Result<u32> {
        let hello = wire::Hello {
            magic: wire::MAGIC.into(),
            version: wire::VERSION.into(),
            label: wire::label("bench"),
        };
        self.ask(Verb::Hello, 0, |w| _ = w.put(&hello))?;
        let reply = self.ask(Verb::Profile, 0, |w| wire::put_profile(w, &Profile::reference(), 0))?;
        let format =
            Reader::new("format", &reply).one::<wire::Format>().map_err(io::Error::other)?.format.get();
        let open = wire::Open { format: format.into(), ..wire::Open::default() };
        let reply = self.ask(Verb::Open, 0, |w| _ = w.put(&open))?;
        self.session =
            Reader::new("opened", &reply).one::<wire::Opened>().map_err(io::Error::other)?.session.get();
        Ok(format)
    }

    fn send(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> io::Result<()> {
        self.sequence += 1;
        let mut w = Writer::request(verb, self.sequence, session);
        fill(&mut w);
        self.socket.send(&w.finish(), &[])
    }

    fn ask(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> io::Result<Vec<u8>> {
        self.send(verb, session, fill)?;
        loop {
            let got = self.socket.recv(&mut self.buffer)?;
            if got.bytes == 0 {
                return Err(io::Error::other("the daemon has hung up"));
            }
            self.kept.extend(got.fds);
            let (header, body) = wire::split(&self.buffer[..got.bytes]).map_err(io::Error::other)?;
            if header.sequence.get() != self.sequence {
                continue;
            }
            return match header.fault.get() {
                0 => Ok(body.to_vec()),
                _ => Err(io::Error::other(
                    String::from_utf8_lossy(body.get(16..).unwrap_or(body)).into_owned(),
                )),
            };
        }
    }

    fn room(&mut self, format: u32) -> io::Result<u64> {
        let reply = self
            .ask(Verb::Query, 0, |w| _ = w.put(&wire::Query { format: format.into(), reserved: 0.into() }))?;
        Ok(Reader::new("room", &reply).one::<wire::Room>().map_err(io::Error::other)?.free.get())
    }

    fn grow(&mut self, blocks: u32) -> io::Result<Vec<wire::WireBlock>> {
        let grow = wire::Grow { want: blocks.into(), least: blocks.into(), ..wire::Grow::default() };
        let reply = self.ask(Verb::Grow, self.session, |w| _ = w.put(&grow))?;
        let mut r = Reader::new("grant", &reply);
        let grant: wire::Grant = *r.one().map_err(io::Error::other)?;
        let _: &[wire::ExtentInfo] = r.many(grant.extents.get(), wire::MAX_FDS).map_err(io::Error::other)?;
        let blocks: &[wire::GrantedBlock] =
            r.many(grant.blocks.get(), wire::MAX_BLOCKS).map_err(io::Error::other)?;
        Ok(blocks.iter().map(|b| b.block).collect())
    }

    fn free(&mut self, blocks: &[wire::WireBlock]) -> io::Result<()> {
        self.ask(Verb::Free, 0, |w| {
            w.put(&wire::Free { count: (blocks.len() as u32).into(), reserved: 0.into() });
            blocks.iter().for_each(|b| _ = w.put(b));
        })?;
        Ok(())
    }
}
