//! `kvbctl tenants`, `prefixes`, `evict`, `drain` and `metrics`.
//!
//! Owns how these are asked and printed. Invariant: every figure comes from the broker's answer.

use std::io::{self, Write};

use clap::Args;
use kvbroker::broker::{EvictReport, PrefixesReport, TenantsReport};
use kvbroker::quote::plain;
use serde::Deserialize;
use serde_json::Value;

use super::answer::{foreign, parse, report};
use super::live::{Ask, mib, table};
use super::{Failure, print_json};

/// The accounts that `kvbctl tenants` has a column for; the rest is `other`.
const COLUMNS: [&str; 6] = ["private", "shared", "credit", "cached", "pinned", "stranded"];

/// `kvbctl tenants`
pub fn tenants(ask: &Ask, out: &mut impl Write) -> Result<(), Failure> {
    ask.show("tenants", out, |report: TenantsReport, out| print_tenants(&report, out))
}

/// Prints a row for each tenant.
pub(super) fn print_tenants(report: &TenantsReport, out: &mut dyn Write) -> io::Result<()> {
    let names = [
        "uid", "prio", "memory", "reserve", "limit", "private", "shared", "credit", "cached", "pinned",
        "stranded", "other", "clients", "sessions",
    ];
    let mut rows = vec![names.map(String::from)];
    for t in &report.tenants {
        let account = |name: &str| t.ledger.get(name).copied().unwrap_or(0);
        let [private, shared, credit, cached, pinned, stranded] = COLUMNS.map(account);
        let other = COLUMNS.iter().fold(t.bytes, |left, name| left.saturating_sub(account(name)));
        rows.push([
            t.uid.to_string(),
            t.priority.to_string(),
            mib(t.bytes),
            mib(t.reserve_bytes),
            t.limit_bytes.map_or("none".into(), mib),
            mib(private),
            mib(shared),
            mib(credit),
            mib(cached),
            mib(pinned),
            mib(stranded),
            mib(other),
            t.connections.to_string(),
            t.sessions.to_string(),
        ]);
    }
    table(out, &rows, &[])?;
    writeln!(out, "{} of {} belong to no tenant", mib(report.unowned_bytes), mib(report.pool_bytes))
}

/// `kvbctl prefixes`
pub fn prefixes(ask: &Ask, out: &mut impl Write) -> Result<(), Failure> {
    ask.show("prefixes", out, |report: PrefixesReport, out| {
        let names = [
            "chain", "uid", "model", "blocks", "common", "pinned", "idle", "tokens", "memory", "hits", "prio",
        ];
        let names = names.into_iter().chain(["pinned by"]).map(String::from);
        let mut rows: Vec<[String; 12]> = names.collect::<Vec<_>>().try_into().into_iter().collect();
        for c in &report.chains {
            rows.push([
                c.chain.clone(),
                c.uid.to_string(),
                c.model.clone(),
                c.blocks.to_string(),
                c.common_blocks.to_string(),
                c.pinned_blocks.to_string(),
                c.idle_blocks.to_string(),
                c.tokens.to_string(),
                mib(c.bytes),
                c.hits.to_string(),
                c.priority.to_string(),
                c.pinned_by.clone().unwrap_or_default(),
            ]);
        }
        table(out, &rows, &[0, 2, 11])?;
        print_common(&report, out)?;
        writeln!(
            out,
            "{} blocks; {} cached, {} pinned; {} of {} blocks looked up were found; {} evicted so far",
            report.blocks,
            mib(report.cached_bytes),
            mib(report.pinned_bytes),
            report.hits,
            report.queries,
            report.evictions
        )
    })
}

/// Prints what tenants have in common, if anything.
fn print_common(report: &PrefixesReport, out: &mut dyn Write) -> io::Result<()> {
    if report.common_limit_bytes == 0 && report.common.is_empty() {
        return Ok(());
    }
    let names = ["common", "of uid", "label", "read by", "blocks", "memory", "clients", "state"];
    let mut rows = vec![names.map(String::from)];
    for c in &report.common {
        rows.push([
            c.chain.clone(),
            c.uid.to_string(),
            c.label.clone(),
            c.readers.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
            c.blocks.to_string(),
            mib(c.bytes),
            c.connections.to_string(),
            c.why.as_ref().map_or_else(|| c.state.clone(), |why| format!("{}: {why}", c.state)),
        ]);
    }
    writeln!(out)?;
    table(out, &rows, &[0, 2, 3, 7])?;
    writeln!(
        out,
        "read-only copies beside the pool: {} of {}; {} of their blocks were found",
        mib(report.common_bytes),
        mib(report.common_limit_bytes),
        report.common_hits
    )?;
    for d in &report.common_donors {
        writeln!(out, "of uid {}: {} of its {} extents", d.uid, d.extents, d.limit_extents)?;
    }
    writeln!(out)
}

/// `kvbctl evict`
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["blocks", "uid", "pinned"]))]
pub struct Evict {
    #[command(flatten)]
    ask: Ask,
    /// So many blocks, in the order in which grants would evict them
    #[arg(value_name = "BLOCKS")]
    blocks: Option<u64>,
    /// Only of this tenant; without BLOCKS, all of it
    #[arg(long, value_name = "UID")]
    uid: Option<u32>,
    /// Unpin the chains whose names (kvbctl prefixes) begin so, and evict what no session holds of them
    #[arg(long, value_name = "CHAIN", conflicts_with_all = ["blocks", "uid"], value_parser = super::live::chain)]
    pinned: Option<String>,
}

impl Evict {
    /// Asks, and prints what went. A chain that nobody has pinned is exit code 1.
    pub fn run(&self, out: &mut impl Write) -> Result<(), Failure> {
        let question = match (&self.pinned, self.blocks, self.uid) {
            (Some(chain), ..) => format!("evict pinned={chain}"),
            (None, Some(blocks), None) => format!("evict blocks={blocks}"),
            (None, Some(blocks), Some(uid)) => format!("evict blocks={blocks} uid={uid}"),
            (None, None, Some(uid)) => format!("evict blocks=all uid={uid}"),
            (None, None, None) => return Err(Failure::Refused("evict what?".into())),
        };
        let answer = self.ask.change(&question)?;
        let report: EvictReport = report(&answer)?;
        if let Some(chain) = self.pinned.as_ref().filter(|_| report.unpinned.is_empty()) {
            return Err(Failure::Refused(format!("no pinned prefix has a name that begins with {chain}")));
        }
        if self.ask.is_json() {
            return print_json(out, &answer);
        }
        for pin in &report.unpinned {
            writeln!(out, "{} of uid {} is pinned no more", pin.chain, pin.uid)?;
        }
        write!(out, "{} blocks evicted, {}", report.blocks, mib(report.bytes))?;
        match report.kept {
            0 => writeln!(out)?,
            n => writeln!(out, "; {n} stay: sessions hold them, or other chains go through them")?,
        }
        Ok(())
    }
}

/// `kvbctl drain`
#[derive(Debug, Args)]
pub struct Drain {
    #[command(flatten)]
    ask: Ask,
    /// Serve again
    #[arg(long)]
    off: bool,
}

impl Drain {
    /// Says so to the broker, and prints how many still go on.
    pub fn run(&self, out: &mut impl Write) -> Result<(), Failure> {
        let answer = self.ask.change(if self.off { "drain off" } else { "drain" })?;
        let Draining { draining, sessions } = report(&answer)?;
        if draining == self.off {
            return Err(foreign(&"it says the opposite of what was asked for"));
        }
        if self.ask.is_json() {
            return print_json(out, &answer);
        }
        match draining {
            true => writeln!(out, "draining: {sessions} sessions go on; kvbctl drain --off ends it")?,
            false => writeln!(out, "not draining: new sessions are served")?,
        }
        Ok(())
    }
}

/// What comes of `drain`.
#[derive(Deserialize)]
struct Draining {
    draining: bool,
    sessions: u64,
}

/// How figures are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Prometheus's text format, for node_exporter's textfile collector and promtool; OpenMetrics' UNIT and EOF lines
    /// are comments there
    Text,
    /// OpenMetrics 1.0, which describes counters without their suffix _total
    Openmetrics,
}

/// `kvbctl metrics`
#[derive(Debug, Args)]
pub struct Metrics {
    #[command(flatten)]
    ask: Ask,
    /// The dialect
    #[arg(long, default_value = "text", conflicts_with = "json")]
    format: Format,
}

impl Metrics {
    /// Prints the text as the broker gives it, or with --json its samples.
    pub fn run(&self, out: &mut impl Write) -> Result<(), Failure> {
        let text = self.ask.text(match self.format {
            Format::Text => "metrics",
            Format::Openmetrics => "metrics openmetrics",
        })?;
        if text.starts_with('{') {
            parse(&text)?;
        }
        if !text.ends_with("# EOF\n") {
            return Err(foreign(&"figures end with a line # EOF"));
        }
        if self.ask.is_json() {
            return print_json(out, &samples(&text));
        }
        Ok(text.lines().try_for_each(|line| writeln!(out, "{}", plain(line)))?)
    }
}

/// The samples by name, with their labels as written.
fn samples(text: &str) -> Value {
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        let value = match value.parse::<u64>() {
            Ok(whole) => Value::from(whole),
            Err(_) => Value::from(value.parse::<f64>().ok()?),
        };
        Some((name.to_owned(), value))
    };
    Value::Object(text.lines().filter(|l| !l.starts_with('#')).filter_map(sample).collect())
}
