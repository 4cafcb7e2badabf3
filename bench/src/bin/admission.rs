//! Row `admission`: how long a session of high priority waits for its admission and its blocks while four processes of
//! low priority keep the pool full, against the same while four processes only keep the processors busy.
//!
//! Everybody is a process of its own over a running daemon's socket, and of one uid: what differs is the sessions'
//! priority. Each round of the high one opens a session, is admitted, takes its blocks and ends; beside the full pool
//! its admission makes the broker ask a low one to give up its session.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvbroker::client::{Admission, Client, ClientOptions, ClientProfile, OpenOptions, Session};
use kvbroker::profile::Profile;
use kvbroker_bench::{at_most, reported};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};

const NEIGHBOURS: usize = 4;
const LOW: u8 = 10;
/// 256 tokens: 16 blocks of the reference profile.
const TOKENS: usize = 256;
/// 192 MiB are 64 extents: four low ones with up to 160 blocks each want more than the 512.
const LOW_TOKENS: usize = 160 * 16;
const ROUNDS: usize = 400;
const WARM_UP: usize = 20;
/// Between two rounds, in which low ones fill the pool again.
const PAUSE: Duration = Duration::from_millis(5);

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--low", socket] => saturate(Path::new(socket)),
        ["--burn"] => loop {
            std::hint::spin_loop();
        },
        _ => {
            let directory = std::env::temp_dir().join(format!("kvbroker-bench.{}", std::process::id()));
            std::fs::create_dir(&directory)?;
            let measured = measure(&directory);
            std::fs::remove_dir_all(&directory)?;
            measured
        }
    }
}

/// A process that ends with this value.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn neighbours(arguments: &[&str]) -> io::Result<Vec<Process>> {
    let one =
        || Command::new(std::env::current_exe()?).args(arguments).stdout(Stdio::null()).spawn().map(Process);
    (0..NEIGHBOURS).map(|_| one()).collect()
}

fn connect(socket: &Path, label: &str) -> Result<(Client, ClientProfile), Failure> {
    let options = ClientOptions { label: label.into(), credit_ahead: 0, ..ClientOptions::default() };
    let client = Client::connect_to(socket, options)?;
    let profile = client.profile(&Profile::reference())?;
    Ok((client, profile))
}

/// `zero`: what is granted reads as zero, as by default. What another process has written is zeroed in any case.
fn open(client: &Client, profile: &ClientProfile, priority: u8, zero: bool) -> Result<Session, Failure> {
    Ok(client.open(profile, OpenOptions { priority, zero, ..OpenOptions::default() })?)
}

/// A background report that never ends: takes block after block, gives its session up when it is asked to, and begins anew.
fn saturate(socket: &Path) -> Result<(), Failure> {
    let (client, profile) = connect(socket, "low")?;
    loop {
        let mut session = open(&client, &profile, LOW, false)?;
        let mut tokens = 0;
        while session.wanted_back().is_none() {
            match session.ensure((tokens + 16).min(LOW_TOKENS)) {
                Ok(()) if tokens < LOW_TOKENS => tokens += 16,
                // It has all that it wants, or there is no more: it decodes meanwhile, 100 us for a token, and hears the broker
                // beside that.
                Ok(()) | Err(kvbroker::client::Error::Refused { .. }) => {
                    hear(&client, Duration::from_micros(100))?;
                    client.poll()?;
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Waits until the broker says something, or for `most`.
fn hear(client: &Client, most: Duration) -> Result<(), Failure> {
    let fd = client.event_fd().ok_or("a daemon's client has a connection")?;
    // SAFETY: the descriptor is the client's, which lives as long as the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    match ppoll(&mut [PollFd::new(fd, PollFlags::POLLIN)], Some(most.into()), None) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn measure(directory: &Path) -> Result<(), Failure> {
    let socket: PathBuf = directory.join("client.sock");
    let daemon = Command::new("target/release/kvbrokerd")
        .args(["--pool", "192M", "--extent", "3M", "--backend", "memfd", "--socket"])
        .arg(&socket)
        .arg("--admin-socket")
        .arg(directory.join("admin.sock"))
        .spawn()?;
    let _daemon = Process(daemon);
    let began = Instant::now();
    while let Err(e) = connect(&socket, "first") {
        if began.elapsed() > Duration::from_secs(10) {
            return Err(e);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let path = socket.to_str().ok_or("the directory's name is not UTF-8")?;
    for (name, zero) in [("high-priority", true), ("unzeroed", false)] {
        let beside_burning = {
            let _burning = neighbours(&["--burn"])?;
            rounds(&socket, zero, |_| true)?
        };
        let beside_full = {
            let _low = neighbours(&["--low", path])?;
            // The pool is full when not even one extent is left.
            rounds(&socket, zero, |room| room < 8)?
        };
        let at = |rounds: &[Round], step: Step, part: usize| {
            let mut times: Vec<Duration> = rounds.iter().map(step).collect();
            times.sort_unstable();
            times[(times.len() * part / 1000).min(times.len() - 1)].as_secs_f64() * 1e6
        };
        let (full, burning) = (at(&beside_full, Round::all, 500), at(&beside_burning, Round::all, 500));
        let steps: [Step; 3] = [|r| r.opened, |r| r.admitted, |r| r.ensured];
        let steps = steps.map(|step| {
            format!("{:.0} / {:.0}", at(&beside_full, step, 500), at(&beside_burning, step, 500))
        });
        let what = format!(
            "{full:.0} us against {burning:.0} us: open, admit and ensure {TOKENS} tokens ({}), beside {NEIGHBOURS} sessions of low \
             priority that fill the pool, against {NEIGHBOURS} that burn the processors; medians of {}",
            steps.join(", "),
            beside_full.len()
        );
        if zero {
            at_most(
                "admission/high-priority",
                full / burning,
                2.0,
                format!("{what}; blocks read as zero on both sides"),
            );
        } else {
            let why = "who gets back what it has had itself writes no zeros; what comes from others is zeroed all the same";
            reported("admission/unzeroed", full / burning, "x", format!("{what}; {why}"));
        }
        for (side, rounds) in [("full", &beside_full), ("burning", &beside_burning)] {
            reported(
                format!("admission/{name}-p99-{side}"),
                at(rounds, Round::all, 990),
                "us",
                "99th of 100; shared cores, so without a bar",
            );
        }
    }
    Ok(())
}

/// What each step of a round took.
struct Round {
    opened: Duration,
    admitted: Duration,
    ensured: Duration,
}

type Step = fn(&Round) -> Duration;

impl Round {
    fn all(&self) -> Duration {
        self.opened + self.admitted + self.ensured
    }
}

/// The high one's rounds, each begun when the pool's room is as `is_so` says.
fn rounds(socket: &Path, zero: bool, is_so: impl Fn(u64) -> bool) -> Result<Vec<Round>, Failure> {
    let (client, profile) = connect(socket, "high")?;
    let mut rounds = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS + WARM_UP {
        let waiting = Instant::now();
        while !is_so(profile.room()?.free) {
            if waiting.elapsed() > Duration::from_secs(20) {
                return Err("the low ones do not fill the pool".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let began = Instant::now();
        let mut session = open(&client, &profile, 0, zero)?;
        let opened = began.elapsed();
        match session.admit(TOKENS, true)? {
            Admission::Admitted => {}
            other => return Err(format!("not admitted: {other:?}").into()),
        }
        let admitted = began.elapsed();
        session.ensure(TOKENS)?;
        if round >= WARM_UP {
            let ensured = began.elapsed() - admitted;
            rounds.push(Round { opened, admitted: admitted - opened, ensured });
        }
        drop(session);
        profile.release_credit()?;
        std::thread::sleep(PAUSE);
    }
    Ok(rounds)
}
