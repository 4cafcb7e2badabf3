//! `kvbctl hold`: memory for a program that allocates for itself, for as long as it runs.
//!
//! Owns the lease (an open connection to the broker), the program, and the signals that are meant for it. Invariants: the
//! program starts when all of the memory is with the kernel, or not at all; it does not outlive this process, whose end
//! ends the lease; its exit code is this process's.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use kvbroker::broker::HoldReport;
use kvbroker::size::Size;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpid, getppid};

use super::Failure;
use super::answer::{Reply, foreign, report, said};
use super::live::AdminSocket;

pub const EXIT_CODES: &str = "Exit codes:
  the command's own, or 128 and the number of the signal that ended it
  1    so much cannot be lent, or could not within --wait; standard error says who has it
  2    the command line is wrong
  3    the broker could not be reached, or did not answer in time
  126  the command could not be started
  127  there is no such command

The memory leaves the pool when the command starts and comes back to it when the command ends. Free extents go first, then
those that tenants hold without a block in use; nobody loses a block in use, or a reserve. SIGINT, SIGTERM, SIGHUP, SIGQUIT,
SIGUSR1 and SIGUSR2 are handed on. If kvbctl itself is killed, the command gets SIGTERM and the memory comes back. If
the broker goes away, the command runs on, and the next broker is asked for the same hold.";

/// Longer than the broker takes to decide.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a broker that cannot lend so much now is asked again, within `--wait`.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// The same while the command runs, and with it signals that wait to be handed on.
const RETRY_PATIENCE: Duration = Duration::from_secs(6);
/// How long to wait before a broker that has gone is looked for again; it doubles each time.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// As much of the command's name as the broker is told: its line has 256 bytes.
const SHOWN: usize = 120;

/// The signals that are the command's.
const FORWARDED: [Signal; 6] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// The connection for whose life the memory is lent, and what is lent.
type Lease = (UnixStream, HoldReport);

/// The options of `kvbctl hold`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How much, rounded up to whole extents
    #[arg(value_name = "SIZE")]
    size: Size,
    #[command(flatten)]
    admin: AdminSocket,
    /// Seconds to go on asking while so much cannot be lent: memory that is on its way back, or that sessions still use
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u32,
    /// Say nothing but what is wrong
    #[arg(long, short)]
    quiet: bool,
    /// What to run with it
    #[arg(value_name = "COMMAND", last = true, required = true)]
    command: Vec<String>,
}

impl Args {
    /// Runs the command, and returns its exit code.
    pub fn run(self) -> Result<u8, Failure> {
        // From the first moment: a signal that comes while the broker collects memory ends this process, and with it the
        // lease; one that comes later is the command's.
        let (lease, report) = self.first_lease()?;
        if !self.quiet {
            let (all, command) = (Size::from_bytes(report.bytes), &self.command[0]);
            let command = kvbroker::quote::plain(command);
            say(&format!("{all} ({} extents) are with the kernel while {command} runs", report.extents));
            report.note.iter().for_each(|note| say(note));
        }
        let signals = block().map_err(failed("signals"))?;
        let mut child = match spawn(&self.command) {
            Ok(child) => child,
            Err(e) => {
                let code = if e.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                say(&format!("{}: {e}", self.command[0]));
                return Ok(code);
            }
        };
        let status = self.wait(&mut child, &signals, lease)?;
        // The lease ends with this process: nothing is left to be said to the broker.
        Ok(code(status))
    }

    /// Asks, and within `--wait` asks again, until the memory is lent.
    fn first_lease(&self) -> Result<Lease, Failure> {
        let until = Instant::now() + Duration::from_secs(self.wait.into());
        let mut told = self.quiet;
        loop {
            let why = match self.lease(PATIENCE)? {
                Ok(lease) => return Ok(lease),
                Err(why) => why,
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Refused(why));
            }
            if !std::mem::replace(&mut told, true) {
                say(&format!("{why}; asking again for {} s at most", self.wait));
            }
            std::thread::sleep(left.min(ASK_AGAIN));
        }
    }

    /// Asks for the memory, and waits until all of it is there, or until the broker says why not. The connection is the
    /// lease.
    fn lease(&self, patience: Duration) -> Result<Result<Lease, String>, Failure> {
        let mut stream = self.admin.connect()?;
        stream.set_write_timeout(Some(patience)).map_err(failed("the admin socket"))?;
        let shown = kvbroker::quote::plain(&self.command.join(" "));
        let end = (0..=SHOWN.min(shown.len())).rev().find(|at| shown.is_char_boundary(*at)).unwrap_or(0);
        writeln!(stream, "hold {} {}", self.size.bytes(), &shown[..end])
            .map_err(|e| self.admin.unreachable(&e))?;
        let reply = Reply::within(stream, patience).line();
        let (line, stream) = reply.map_err(|e| self.admin.unreachable(&e))?;
        let answer = match said(&line)? {
            Ok(answer) => answer,
            Err(why) => return Ok(Err(why)),
        };
        let report: HoldReport = report(&answer)?;
        if !report.in_force || report.bytes < self.size.bytes() {
            return Err(foreign(&"it lends less than was asked for"));
        }
        Ok(Ok((stream, report)))
    }

    /// Until the command has ended: hands signals on, and looks for a broker if the one that lent the memory is gone.
    fn wait(&self, child: &mut Child, signals: &SignalFd, lease: UnixStream) -> Result<ExitStatus, Failure> {
        let mut lease = Some(lease);
        let (mut retry, mut due) = (FIRST_RETRY, None);
        loop {
            if let Some(status) = child.try_wait().map_err(failed("the command"))? {
                return Ok(status);
            }
            if due.is_some_and(|t| t <= Instant::now()) {
                match self.lease(RETRY_PATIENCE) {
                    Ok(Ok((stream, report))) => {
                        let all = Size::from_bytes(report.bytes);
                        say(&format!("a broker is there again, and {all} are held as before"));
                        (lease, due, retry) = (Some(stream), None, FIRST_RETRY);
                    }
                    not_yet => {
                        if let Ok(Err(why)) | Err(Failure::Refused(why)) = not_yet {
                            say(&format!("a broker is there again, and does not lend the memory: {why}"));
                        }
                        retry = (retry * 2).min(LONGEST_RETRY);
                        due = Some(Instant::now() + retry);
                    }
                }
            }
            let mut wait = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
            // Nothing more is said on it: what can be read is its end.
            wait.extend(lease.iter().map(|l| PollFd::new(l.as_fd(), PollFlags::POLLIN)));
            let left = due.map(|t| t.saturating_duration_since(Instant::now()).as_millis() + 1);
            let timeout = left.map_or(PollTimeout::NONE, |ms| u16::try_from(ms).unwrap_or(u16::MAX).into());
            match poll(&mut wait, timeout) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(e) => return Err(failed("poll")(e.into())),
            }
            let gone = wait.get(1).and_then(PollFd::any).unwrap_or(false);
            if gone {
                say(
                    "the broker has gone, and its memory with it; the command runs on, and the next broker is asked again",
                );
                (lease, due) = (None, Some(Instant::now() + retry));
            }
            forward(child, signals)?;
        }
    }
}

/// Signals that are for the command, and word of its end, come through a descriptor from now on.
fn block() -> io::Result<SignalFd> {
    let mut mask = SigSet::empty();
    FORWARDED.into_iter().chain([Signal::SIGCHLD]).for_each(|s| mask.add(s));
    mask.thread_block()?;
    Ok(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

fn forward(child: &Child, signals: &SignalFd) -> Result<(), Failure> {
    while let Some(info) = signals.read_signal().map_err(|e| failed("signals")(e.into()))? {
        // What a terminal sends goes to all of its foreground processes: the command has it already. Codes above 0 are
        // the kernel's (sigaction(2)).
        let sent_by_somebody = info.ssi_code <= 0;
        match Signal::try_from(info.ssi_signo as i32) {
            Ok(signal) if sent_by_somebody && signal != Signal::SIGCHLD => {
                // An error means that it has just ended.
                let _ = kill(Pid::from_raw(child.id() as i32), signal);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Starts the command with the signal mask that this process had, and so that it does not outlive it.
fn spawn(command: &[String]) -> io::Result<Child> {
    let parent = getpid();
    let mut run = Command::new(&command[0]);
    run.args(&command[1..]);
    // SAFETY: between fork and exec the closure only makes system calls (sigprocmask, prctl, getppid), all of which are
    // async-signal-safe, and allocates nothing.
    #[allow(unsafe_code)]
    unsafe {
        run.pre_exec(move || {
            pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
            nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
            // It may have ended before the line above.
            if getppid() != parent { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        });
    }
    run.spawn()
}

/// As a shell says it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

fn say(what: &str) {
    // If standard error is gone, the command still has its memory.
    let _ = writeln!(io::stderr(), "kvbctl: {what}");
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> Failure {
    move |e| Failure::Refused(format!("{what}: {e}"))
}
