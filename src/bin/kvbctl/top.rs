//! `kvbctl top`: who uses the pool, drawn anew once a second.
//!
//! Owns the terminal while it is live. Invariants: whatever ends it (q, a signal, a broken pipe), the terminal is as it
//! was before; a broker that goes away is said and asked again; no line is longer than the screen is wide, and no more
//! lines than it has are drawn. Plain ANSI sequences (ECMA-48, and xterm's alternate screen) are enough.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kvbroker::broker::{SessionReport, StatusReport, TenantsReport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{
    InputFlags, LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};
use serde::Deserialize;

use super::answer::report;
use super::live::{Ask, mib, table};
use super::observe::print_tenants;
use super::{Failure, print_json};

const EVERY: Duration = Duration::from_secs(1);
/// Columns of the bar.
const BAR: usize = 60;

/// What the broker answers.
#[derive(Deserialize)]
struct View {
    status: StatusReport,
    tenants: TenantsReport,
    sessions: Vec<SessionReport>,
}

/// Live on a terminal; once where there is none, or in JSON.
pub fn run(ask: &Ask, out: &mut impl Write) -> Result<(), Failure> {
    if ask.is_json() {
        let answer = ask.answer("top")?;
        report::<View>(&answer)?;
        return print_json(out, &answer);
    }
    // What is wrong at the start is said as ever, with its exit code.
    let first = frame(ask)?;
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Ok(out.write_all(first.as_bytes())?);
    }
    live(ask, first, out)
}

fn frame(ask: &Ask) -> Result<String, Failure> {
    let view: View = report(&ask.answer("top")?)?;
    let mut text = Vec::new();
    draw(&view, &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn draw(view: &View, out: &mut dyn Write) -> io::Result<()> {
    let status = &view.status;
    let (pool, all) = (&status.pool, status.pool.bytes.max(1));
    write!(
        out,
        "kvbrokerd {}  {} clients, {} sessions  pool {} in {} extents",
        status.version,
        status.clients,
        status.sessions,
        mib(pool.bytes),
        pool.extents
    )?;
    let alarms = [
        (status.frozen, "FROZEN".to_owned()),
        (status.draining, "DRAINING".to_owned()),
        (pool.extents_missing > 0, format!("{} MISSING", pool.extents_missing)),
        (!pool.quarantined.is_empty(), format!("{} IN QUARANTINE", pool.quarantined.len())),
    ];
    for (_, alarm) in alarms.iter().filter(|(on, _)| *on) {
        write!(out, "  {alarm}")?;
    }
    writeln!(out)?;
    let account = |name: &str| status.ledger.get(name).copied().unwrap_or(0);
    let parts = [
        ("private", 'p'),
        ("shared", 's'),
        ("credit", 'c'),
        ("pinned", 'P'),
        ("cached", 'k'),
        ("stranded", '.'),
        ("quarantined", '!'),
        ("waste", 'w'),
    ];
    // Each boundary is rounded by itself: the bar is never longer than the pool.
    let (mut bar, mut end) = (String::new(), 0);
    for (name, letter) in parts {
        end = u64::saturating_add(end, account(name));
        let until = (end as f64 / all as f64 * BAR as f64).round() as usize;
        while bar.len() < until.min(BAR) {
            bar.push(letter);
        }
    }
    writeln!(out, "[{bar:-<BAR$}]")?;
    let said = parts.iter().chain(&[("lent", 'l'), ("free", '-')]).filter(|(name, _)| account(name) > 0);
    let said = said.map(|(name, letter)| format!("{letter} {name} {}", mib(account(name))));
    writeln!(out, "{}", said.collect::<Vec<_>>().join("  "))?;
    let c = &status.counters;
    writeln!(
        out,
        "prefixes {} blocks, {}/{} found, {} evicted   requests {}, refused {}   reclaims {}, lost {}",
        status.prefix_blocks,
        status.prefix_hits,
        status.prefix_queries,
        status.prefix_evictions,
        c.requests,
        c.refusals,
        c.reclaims,
        c.sessions_lost
    )?;
    writeln!(out)?;
    print_tenants(&view.tenants, out)?;
    writeln!(out)?;
    print_sessions(&view.sessions, out)
}

/// The largest first.
fn print_sessions(sessions: &[SessionReport], out: &mut dyn Write) -> io::Result<()> {
    let blocks = |s: &SessionReport| u64::from(s.blocks_private) + u64::from(s.blocks_shared);
    let bytes = |s: &SessionReport| s.block_bytes.saturating_mul(blocks(s));
    let mut sessions: Vec<&SessionReport> = sessions.iter().collect();
    sessions.sort_by_key(|s| (std::cmp::Reverse(bytes(s)), s.session));
    let names =
        ["session", "uid", "pid", "memory", "tokens", "private", "shared", "program", "label", "model"];
    let mut rows = vec![names.map(String::from)];
    rows.extend(sessions.into_iter().map(|s| {
        [
            s.session.to_string(),
            s.uid.to_string(),
            s.pid.to_string(),
            mib(bytes(s)),
            s.tokens.to_string(),
            s.blocks_private.to_string(),
            s.blocks_shared.to_string(),
            s.program.clone(),
            s.label.clone(),
            s.model.clone(),
        ]
    }));
    table(out, &rows, &[7, 8, 9])
}

/// The terminal without line editing and on its second screen, until this is dropped.
struct Screen {
    before: Termios,
}

impl Screen {
    fn enter(out: &mut impl Write) -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.local_flags &= !(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
        raw.input_flags &= !InputFlags::IXON;
        raw.control_chars[SpecialCharacterIndices::VMIN as usize] = 1;
        raw.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        let screen = Screen { before };
        // The second screen, no cursor, and lines that are too long end at the edge.
        write!(out, "\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        out.flush()?;
        Ok(screen)
    }

    fn leave(out: &mut impl Write) -> io::Result<()> {
        write!(out, "\x1b[?7h\x1b[?25h\x1b[?1049l")?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSAFLUSH, &self.before);
    }
}

/// Asks the terminal how many rows it has: the cursor goes as far down as it can, and says where that is.
const ASK_ROWS: &str = "\x1b[9999;1H\x1b[6n";

fn live(ask: &Ask, first: String, out: &mut impl Write) -> Result<(), Failure> {
    let mut mask = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGWINCH].into_iter().for_each(|s| mask.add(s));
    mask.thread_block().map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&mask, flags).map_err(io::Error::from)?;
    let screen = Screen::enter(out)?;
    let ended = draw_until_quit(ask, first, &signals, out);
    // What may fail because the terminal is gone does not hide why it ended.
    let left = Screen::leave(out);
    drop(screen);
    ended.and(Ok(left?))
}

fn draw_until_quit(
    ask: &Ask,
    first: String,
    signals: &SignalFd,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let (mut text, mut rows, mut input) = (first, 24, Input::default());
    write!(out, "{ASK_ROWS}")?;
    let mut next = Instant::now() + EVERY;
    loop {
        paint(&text, rows, out)?;
        let wait = next.saturating_duration_since(Instant::now()).as_millis();
        let timeout = PollTimeout::try_from(wait as u64 + 1).unwrap_or(PollTimeout::MAX);
        let stdin = io::stdin();
        let mut fds =
            [PollFd::new(stdin.as_fd(), PollFlags::POLLIN), PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(io::Error::from(e).into()),
        }
        let heard = |at: usize| fds[at].revents().is_some_and(|r| !r.is_empty());
        let (typed, signalled) = (heard(0), heard(1));
        if typed {
            let mut some = [0; 64];
            // Past the library's buffer, which poll does not know of.
            match nix::unistd::read(&stdin, &mut some).map_err(io::Error::from)? {
                // The terminal has hung up.
                0 => return Ok(()),
                n => match input.take(&some[..n]) {
                    Typed::Quit => return Ok(()),
                    Typed::Rows(n) => rows = n,
                    Typed::Nothing => {}
                },
            }
        }
        if signalled {
            match signals.read_signal().map_err(io::Error::from)? {
                Some(s) if s.ssi_signo == Signal::SIGWINCH as u32 => write!(out, "{ASK_ROWS}")?,
                Some(_) => return Ok(()),
                None => {}
            }
        }
        if next <= Instant::now() {
            next = Instant::now() + EVERY;
            text = match frame(ask) {
                Ok(text) => text,
                Err(Failure::Refused(why) | Failure::Unreachable(why)) => {
                    format!("{why}\nasked again every second\n")
                }
                Err(other) => return Err(other),
            };
        }
    }
}

/// Draws from the top; what does not fit the screen is left out.
fn paint(text: &str, rows: usize, out: &mut impl Write) -> io::Result<()> {
    write!(out, "\x1b[H")?;
    for (n, line) in text.lines().take(rows.saturating_sub(1)).enumerate() {
        write!(out, "\x1b[{};1H{line}\x1b[K", n + 1)?;
    }
    write!(out, "\x1b[J\x1b[{rows};1H\x1b[7mq quits\x1b[0m\x1b[K")?;
    out.flush()
}

/// What was typed.
#[derive(Debug, PartialEq, Eq)]
enum Typed {
    Nothing,
    Quit,
    /// The terminal's answer to [`ASK_ROWS`].
    Rows(usize),
}

/// Bytes that come from the terminal: keys, and answers of its own that may come in pieces.
#[derive(Debug, Default)]
struct Input {
    answer: Option<Vec<u8>>,
}

impl Input {
    fn take(&mut self, bytes: &[u8]) -> Typed {
        let mut typed = Typed::Nothing;
        for &byte in bytes {
            match (&mut self.answer, byte) {
                (_, 0x1b) => self.answer = Some(Vec::new()),
                // An escape sequence ends with its first letter.
                (Some(answer), b'A'..=b'Z' | b'a'..=b'z') => {
                    let row = answer.strip_prefix(b"[").filter(|_| byte == b'R');
                    let row = row.and_then(|a| a.split(|b| *b == b';').next());
                    let row = row.and_then(|r| std::str::from_utf8(r).ok()?.parse().ok());
                    if let Some(rows) = row.filter(|rows| *rows > 0) {
                        typed = Typed::Rows(rows);
                    }
                    self.answer = None;
                }
                (Some(answer), _) if answer.len() < 32 => answer.push(byte),
                (Some(_), _) => self.answer = None,
                // Ctrl-C and Ctrl-D too.
                (None, b'q' | b'Q' | 3 | 4) => return Typed::Quit,
                (None, _) => {}
            }
        }
        typed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_terminal_is_no_key_and_may_come_in_pieces() {
        let mut input = Input::default();
        assert_eq!(input.take(b"\x1b[4"), Typed::Nothing);
        assert_eq!(input.take(b"0;1R"), Typed::Rows(40));
        assert_eq!(input.take(b"\x1b[A\x1b[Bx"), Typed::Nothing, "arrows");
        assert_eq!(input.take(b"\x1b[0;1R"), Typed::Nothing, "no terminal has no rows");
        assert_eq!(input.take(b"q"), Typed::Quit);
        assert_eq!(Input::default().take(&[3]), Typed::Quit);
    }
}
