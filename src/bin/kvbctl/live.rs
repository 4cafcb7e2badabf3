//! `kvbctl status`, `sessions`, `map` and `check`: what a running broker says of itself, and how it is asked.
//!
//! Owns the one question and its answer. Invariant: every figure comes from the broker's answer; nothing is kept or
//! computed beyond sums and shares of what stands there.

use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvbroker::broker::{
    FsckReport, LimitsReport, MapReport, Outcome, PinReport, SessionReport, StatusReport,
};
use kvbroker::daemon::DEFAULT_ADMIN_SOCKET;
use kvbroker::seqpacket;
use kvbroker::size::Size;
use nix::sys::socket::SockType;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::answer::{self, Lines, Reply, foreign, parse, report};
use super::{Failure, print_json};

/// Where the broker is.
#[derive(Debug, Args)]
pub struct AdminSocket {
    /// The broker's admin socket
    #[arg(long, value_name = "PATH", env = "KVBROKER_ADMIN_SOCKET", default_value = DEFAULT_ADMIN_SOCKET)]
    socket: PathBuf,
}

impl AdminSocket {
    /// Connects to it.
    pub fn connect(&self) -> Result<UnixStream, Failure> {
        let fd =
            seqpacket::connect(&self.socket, SockType::Stream, PATIENCE).map_err(|e| self.unreachable(&e))?;
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// Why it is of no use.
    pub fn unreachable(&self, e: &io::Error) -> Failure {
        let advice = match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => "is kvbrokerd running?",
            io::ErrorKind::PermissionDenied => "the admin socket is for root, or for the broker's own user",
            io::ErrorKind::TimedOut => "the broker hangs, is stopped, or has too much to do",
            // Whoever is there talks, and is no broker.
            io::ErrorKind::InvalidData => return foreign(e),
            _ => "the broker does not answer",
        };
        Failure::Unreachable(format!("{}: {e}; {advice}", self.socket.display()))
    }
}

/// How to ask.
#[derive(Debug, Args)]
pub struct Ask {
    #[command(flatten)]
    admin: AdminSocket,
    /// Answer in JSON; sizes are bytes
    #[arg(long)]
    json: bool,
}

const PATIENCE: Duration = Duration::from_secs(5);
/// How often a check that runs is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl Ask {
    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// Asks; what comes is still to be read, within `patience`.
    fn ask(&self, question: &str, patience: Duration) -> Result<Reply, Failure> {
        let mut stream = self.admin.connect()?;
        stream.set_write_timeout(Some(PATIENCE))?;
        writeln!(stream, "{question}").map_err(|e| self.unreachable(&e))?;
        Ok(Reply::within(stream, patience))
    }

    /// The lines of what has no end. The first one comes soon, or nobody is there.
    pub(super) fn lines(&self, question: &str) -> Result<Lines, Failure> {
        Ok(Lines::of(self.ask(question, PATIENCE)?.for_stdout()))
    }

    pub(super) fn unreachable(&self, e: &io::Error) -> Failure {
        self.admin.unreachable(e)
    }

    /// The answer as it comes.
    pub(super) fn text(&self, question: &str) -> Result<String, Failure> {
        self.ask(question, PATIENCE)?.text().map_err(|e| self.unreachable(&e))
    }

    /// The answer to what changes nothing.
    pub(super) fn answer(&self, question: &str) -> Result<Value, Failure> {
        parse(&self.text(question)?)
    }

    /// Has something done, and waits so long for word of it. Without an answer nobody knows whether it was done.
    pub(super) fn change_within(&self, question: &str, patience: Duration) -> Result<Value, Failure> {
        let text = self.ask(question, patience)?.text().map_err(|e| match self.unreachable(&e) {
            Failure::Unreachable(why) => Failure::Unreachable(format!(
                "{why}; what was asked for may have been done, or may still be when it goes on: look again before you \
                 repeat it"
            )),
            other => other,
        })?;
        parse(&text)
    }

    pub(super) fn change(&self, question: &str) -> Result<Value, Failure> {
        self.change_within(question, PATIENCE)
    }

    pub(super) fn show<T: DeserializeOwned>(
        &self,
        question: &str,
        out: &mut impl Write,
        text: impl FnOnce(T, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let answer = self.answer(question)?;
        // In JSON too an answer to something else is none.
        let report = report(&answer)?;
        if self.json {
            return print_json(out, &answer);
        }
        Ok(text(report, out)?)
    }

    /// `kvbctl status`
    pub fn status(&self, out: &mut impl Write) -> Result<(), Failure> {
        self.show("status", out, print_status)
    }

    /// `kvbctl sessions`
    pub fn sessions(&self, out: &mut impl Write) -> Result<(), Failure> {
        self.show("sessions", out, print_sessions)
    }

    /// `kvbctl map`
    pub fn map(&self, colour: Colour, out: &mut impl Write) -> Result<(), Failure> {
        let coloured = match colour {
            Colour::Always => true,
            Colour::Never => false,
            Colour::Auto => io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
        };
        self.show("map", out, |report, out| print_map(&report, coloured, out))
    }

    /// `kvbctl check`
    pub fn check(&self, out: &mut impl Write) -> Result<(), Failure> {
        let answer = self.answer("check")?;
        let checked: Checked = report(&answer)?;
        if self.json {
            print_json(out, &answer)?;
        } else if checked.ok {
            writeln!(out, "every byte of the pool is accounted for")?;
        }
        match checked.ok {
            true => Ok(()),
            false => {
                let problem = checked.problem.unwrap_or_else(|| "the broker does not say where".into());
                Err(Failure::Refused(format!("the books do not add up: {problem}")))
            }
        }
    }
}

/// What comes of `check`.
#[derive(Deserialize)]
struct Checked {
    ok: bool,
    problem: Option<String>,
}

impl Ask {
    /// `kvbctl fsck`: begins a check, or joins the one that runs, and waits for its end. Damage is exit code 1.
    pub fn fsck(&self, out: &mut impl Write) -> Result<(), Failure> {
        let mut report: FsckReport = report(&self.change("fsck start")?)?;
        let run = report.run;
        while report.running {
            std::thread::sleep(LOOK_EVERY);
            report = answer::report(&self.answer("fsck")?)?;
            if report.run != run {
                return Err(Failure::Refused(
                    "the broker was started anew meanwhile, or another check was".into(),
                ));
            }
        }
        if self.json {
            print_json(out, &report)?;
        } else {
            print_fsck(&report, out)?;
        }
        match report.damaged.saturating_add(report.unreadable) {
            0 => Ok(()),
            _ => Err(Failure::Refused(format!(
                "{} of {} sealed blocks are damaged, {} cannot be read",
                report.damaged, report.blocks, report.unreadable
            ))),
        }
    }
}

fn print_fsck(report: &FsckReport, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "{} sealed blocks: {} as they were sealed, {} read for the first time, {} freed meanwhile",
        report.blocks, report.intact, report.first, report.gone
    )?;
    for d in &report.found {
        write!(out, "extent {} slot {} of uid {}: damaged, dropped", d.extent, d.slot, d.uid)?;
        if !d.sessions.is_empty() {
            let sessions: Vec<String> = d.sessions.iter().map(u64::to_string).collect();
            write!(out, "; told: sessions {}", sessions.join(", "))?;
        }
        if d.unpinned > 0 {
            write!(out, "; {} pinned prefixes went with it: publish and pin them anew", d.unpinned)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// `kvbctl limits`
#[derive(Debug, Args)]
pub struct Limits {
    #[command(flatten)]
    ask: Ask,
    /// Whose limits to change
    uid: Option<u32>,
    /// Extents that are always there for it, as a size; rounded up
    #[arg(long, value_name = "SIZE", requires = "uid")]
    reserve: Option<Size>,
    /// What it may own at most, rounded down; `none` for no limit
    #[arg(long, value_name = "SIZE", requires = "uid")]
    limit: Option<String>,
    /// 0 to 255; sessions of lower priority make room for those of higher
    #[arg(long, value_name = "N", requires = "uid")]
    priority: Option<u8>,
    /// Only if this is still the revision that holds
    #[arg(long, value_name = "N", requires = "uid")]
    revision: Option<u64>,
}

impl Limits {
    /// Asks, and prints what holds then. A change that is refused is exit code 1.
    pub fn run(&self, out: &mut impl Write) -> Result<(), Failure> {
        let mut question = "limits".to_owned();
        if let Some(uid) = self.uid {
            question += &format!(" uid={uid}");
        }
        if let Some(reserve) = self.reserve {
            question += &format!(" reserve={}", reserve.bytes());
        }
        match self.limit.as_deref() {
            None => {}
            Some("none") => question += " limit=none",
            Some(size) => {
                let size: Size =
                    size.parse().map_err(|e| Failure::Refused(format!("--limit {size}: {e}")))?;
                question += &format!(" limit={}", size.bytes());
            }
        }
        if let Some(priority) = self.priority {
            question += &format!(" priority={priority}");
        }
        if let Some(revision) = self.revision {
            question += &format!(" revision={revision}");
        }
        let answer = match self.uid {
            Some(_) => self.ask.change(&question)?,
            None => self.ask.answer(&question)?,
        };
        let report: LimitsReport = report(&answer)?;
        if report.outcome == Some(Outcome::Refused) {
            return Err(Failure::Refused(report.reasons.join("; ")));
        }
        if self.ask.json {
            return print_json(out, &answer);
        }
        print_limits(&report, out)?;
        Ok(())
    }
}

fn print_limits(report: &LimitsReport, out: &mut dyn Write) -> io::Result<()> {
    if report.outcome == Some(Outcome::Deferred) {
        writeln!(out, "taken, and in force for what comes: {}", report.reasons.join("; "))?;
    }
    let each = mib(report.extent_bytes);
    writeln!(
        out,
        "revision {}; {} extents of {each}, {} of them reserved",
        report.revision, report.extents, report.reserved
    )?;
    writeln!(out, "   uid  reserve  limit  priority  extents  pinned      cached      sessions")?;
    for t in &report.tenants {
        let limit = t.limit.map_or("none".into(), |limit| limit.to_string());
        writeln!(
            out,
            "{:>6}  {:>7}  {limit:>5}  {:>8}  {:>7}  {:<10}  {:<10}  {:>8}",
            t.uid,
            t.reserve,
            t.priority,
            t.extents,
            mib(t.pinned_bytes),
            mib(t.cached_bytes),
            t.sessions
        )?;
    }
    Ok(())
}

/// Digits of a chain's name that are shown.
const CHAIN_DIGITS: usize = 16;

/// The beginning of a chain's name.
pub(super) fn chain(text: &str) -> Result<String, String> {
    let digits = text.to_ascii_lowercase();
    match (1..=CHAIN_DIGITS).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        true => Ok(digits),
        false => Err(format!(
            "a chain's name is {CHAIN_DIGITS} hexadecimal digits, such as 3fa9c17e20b48d55, which kvbctl status and kvbctl \
             prefixes show: write the first of them, as many as tell it from others"
        )),
    }
}

fn chain_or_all(text: &str) -> Result<String, String> {
    if text == "all" {
        Ok(text.into())
    } else {
        chain(text).map_err(|why| format!("{why}, or all for every one"))
    }
}

/// `kvbctl unpin`
#[derive(Debug, Args)]
pub struct Unpin {
    #[command(flatten)]
    ask: Ask,
    /// The beginning of a chain's name as kvbctl status shows it, or `all`
    #[arg(value_parser = chain_or_all)]
    chain: String,
}

impl Unpin {
    /// Asks, and prints what was unpinned. Nothing of that name is exit code 1.
    pub fn run(&self, out: &mut impl Write) -> Result<(), Failure> {
        let answer = self.ask.change(&format!("unpin {}", self.chain))?;
        let Unpinned { unpinned } = report(&answer)?;
        if unpinned.is_empty() && self.chain != "all" {
            return Err(Failure::Refused(format!(
                "no pinned prefix has a name that begins with {}",
                self.chain
            )));
        }
        if self.ask.json {
            return print_json(out, &answer);
        }
        for pin in unpinned {
            writeln!(out, "{} of uid {}: {} blocks", pin.chain, pin.uid, pin.blocks)?;
        }
        Ok(())
    }
}

/// What comes of `unpin`.
#[derive(Deserialize)]
struct Unpinned {
    unpinned: Vec<PinReport>,
}

/// Whether the map is coloured.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Colour {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Yes
    Always,
    /// No
    Never,
}

pub(super) fn mib(bytes: u64) -> String {
    Size::from_bytes(bytes).to_string()
}

fn print_status(s: StatusReport, out: &mut dyn Write) -> io::Result<()> {
    let pool = &s.pool;
    writeln!(out, "kvbrokerd {}", s.version)?;
    if s.draining {
        writeln!(
            out,
            "DRAINING  nothing new begins, {} sessions go on; kvbctl drain --off ends it",
            s.sessions
        )?;
    }
    let (each, all) = (mib(pool.extent_bytes), mib(pool.bytes));
    writeln!(
        out,
        "pool      {all} in {} extents of {each}, {} ({}: {})",
        pool.extents, pool.backend, pool.heap, pool.reason
    )?;
    if pool.backend == kvbroker::heap::Backend::DmaHeap {
        writeln!(out, "          count of holders: {}", pool.holder_count.text)?;
    }
    if pool.extents_missing > 0 {
        writeln!(
            out,
            "          WARNING: {} of {} extents are missing: on their way back from a hold, or the kernel has no memory for them; it is asked again",
            pool.extents_missing, pool.extents_wanted
        )?;
    }
    if pool.waste.alignment > 0 {
        let (lost, of) = (mib(pool.waste.alignment), mib(pool.configured_bytes));
        let share = pool.waste.alignment as f64 / pool.configured_bytes.max(1) as f64 * 100.0;
        writeln!(
            out,
            "          {lost} of the {of} ({share:.0} %) lie between extents: the kernel starts each on a multiple of {}. \
             Larger extents of several blocks (extent = \"auto\") avoid it: see kvbctl plan",
            mib(pool.stride_bytes)
        )?;
    }
    for h in &pool.holds {
        let (all, state) = (mib(h.bytes), if h.in_force { "lent" } else { "about to be lent" });
        writeln!(
            out,
            "          {all} {state} to pid {} ({}) by kvbctl hold, uid {}",
            h.pid, h.command, h.uid
        )?;
    }
    if pool.extents_elastic > 0 {
        let all = mib(pool.extent_bytes.saturating_mul(pool.extents_elastic.into()));
        writeln!(out, "          {all} given back to the kernel, because memory is short")?;
    }
    for q in &pool.quarantined {
        write!(out, "          WARNING: extent {} is in quarantine, held by {} others", q.extent, q.others)?;
        match &q.last_granted {
            Some(l) => writeln!(out, "; last granted to pid {} ({}), tenant {}", l.pid, l.label, l.uid)?,
            None => writeln!(out)?,
        }
    }
    for f in &s.formats {
        let waste = f.waste_bytes_per_extent as f64 / pool.extent_bytes as f64 * 100.0;
        let blocks = u64::from(f.blocks_per_extent) * u64::from(pool.extents);
        write!(
            out,
            "profile   {} {}: blocks of {} tokens, {}; {} per extent, {blocks} in all",
            f.name,
            f.element,
            f.tokens_per_block,
            mib(f.block_bytes),
            f.blocks_per_extent
        )?;
        match waste {
            w if w >= 10.0 => writeln!(out, "; WARNING: {w:.0} % of each extent is waste: see kvbctl plan")?,
            w if w > 0.0 => writeln!(out, "; {w:.1} % waste")?,
            _ => writeln!(out)?,
        }
    }
    writeln!(out, "clients   {} with {} sessions", s.clients, s.sessions)?;
    let hits = match s.prefix_queries {
        0 => "no look-ups yet".into(),
        n => format!("{} of {n} blocks looked up were found", s.prefix_hits),
    };
    writeln!(out, "prefixes  {} blocks, {} pinned; {hits}", s.prefix_blocks, s.prefix_pinned)?;
    if s.common_bytes > 0 {
        writeln!(
            out,
            "common    {} of read-only copies beside the pool (kvbctl prefixes)",
            mib(s.common_bytes)
        )?;
    }
    if s.windows > 0 || s.windows_held > 0 || s.staging_bytes > 0 {
        let (held, staging) = (s.windows_held, mib(s.staging_bytes));
        writeln!(out, "windows   {}, {held} closed and still held; {staging} of staging buffers", s.windows)?;
    }
    for pin in &s.pins {
        writeln!(
            out,
            "pinned    {} by uid {} ({}, pid {}): {} blocks, {} tokens",
            pin.chain, pin.uid, pin.label, pin.pid, pin.blocks, pin.tokens
        )?;
    }
    let c = &s.counters;
    writeln!(out, "requests  {}, of which {} refused ({} stale)", c.requests, c.refusals, c.stale)?;
    writeln!(
        out,
        "memory    {} blocks granted, {} zeroed between processes, {} extents renewed between tenants ({} scrubbed in place)",
        c.granted, c.scrubbed, c.renewed, c.reused
    )?;
    if c.damaged > 0 {
        writeln!(out, "WARNING   {} sealed blocks were found damaged, and dropped: see the log", c.damaged)?;
    }
    if c.pressed > 0 {
        writeln!(out, "pressure  {} times; {} extents given back over it", c.pressed, c.given_back)?;
    }
    writeln!(out, "ledger")?;
    for (name, bytes) in s.ledger.iter().filter(|(_, bytes)| **bytes > 0) {
        let share = *bytes as f64 / pool.bytes.max(1) as f64 * 100.0;
        writeln!(out, "  {name:<12} {:>12} {share:>6.1} %", mib(*bytes))?;
    }
    if s.frozen {
        writeln!(
            out,
            "FROZEN: the books do not add up; nothing more is granted until a restart (see the log)"
        )?;
    }
    Ok(())
}

fn print_sessions(sessions: Vec<SessionReport>, out: &mut dyn Write) -> io::Result<()> {
    let mut rows = vec![
        [
            "session", "uid", "pid", "program", "label", "model", "tokens", "private", "shared", "credit",
            "memory",
        ]
        .map(String::from),
    ];
    for s in &sessions {
        let bytes = s.block_bytes.saturating_mul(u64::from(s.blocks_private) + u64::from(s.blocks_shared));
        rows.push([
            s.session.to_string(),
            s.uid.to_string(),
            s.pid.to_string(),
            s.program.clone(),
            s.label.clone(),
            s.model.clone(),
            s.tokens.to_string(),
            s.blocks_private.to_string(),
            s.blocks_shared.to_string(),
            s.blocks_credit.to_string(),
            mib(bytes),
        ]);
    }
    table(out, &rows, &[3, 4, 5])
}

/// Prints rows in columns as wide as they need, the first row being their names; those in `left` begin at the left.
pub(super) fn table<const N: usize>(
    out: &mut dyn Write,
    rows: &[[String; N]],
    left: &[usize],
) -> io::Result<()> {
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(i, (cell, width))| match left.contains(&i) {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

fn print_map(map: &MapReport, coloured: bool, out: &mut dyn Write) -> io::Result<()> {
    let legend = [
        ('-', "free extent"),
        ('~', "being renewed"),
        ('!', "in quarantine"),
        ('>', "lent"),
        ('.', "free block"),
        ('c', "credit"),
        ('p', "private"),
        ('s', "shared"),
        ('k', "cached"),
        ('P', "pinned"),
    ];
    let colour = |letter: char| match letter {
        'c' => "33",
        'p' => "32",
        's' => "36",
        'P' => "35",
        '~' | '!' => "31",
        _ => "90",
    };
    let paint = |letter: char, text: String| match coloured {
        true => format!("\x1b[{}m{text}\x1b[0m", colour(letter)),
        false => text,
    };
    let said: Vec<_> = legend.iter().map(|(l, name)| paint(*l, format!("{l} {name}"))).collect();
    writeln!(out, "{}", said.join("   "))?;
    let width = map.extents.iter().map(|e| e.slots.len()).max().unwrap_or(1);
    let per_line = (72 / (width + 1)).max(1);
    for line in map.extents.chunks(per_line) {
        let cells = line.iter().map(|e| {
            let letters: String = e.slots.chars().map(|l| paint(l, l.to_string())).collect();
            letters + &" ".repeat(width - e.slots.len())
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join(" ").trim_end())?;
    }
    for e in &map.extents {
        if let Some(l) = &e.last_granted {
            writeln!(
                out,
                "extent {}: last granted to pid {} ({}), tenant {}",
                e.extent, l.pid, l.label, l.uid
            )?;
        }
    }
    Ok(())
}
