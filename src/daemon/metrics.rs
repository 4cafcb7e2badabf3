//! The broker's figures for a monitoring system, in the text formats of Prometheus and OpenMetrics.
//!
//! Owns the names. Invariants: a family stands once, with its help and type before its samples; a name never changes its
//! meaning; no label carries what a client says of itself, only uids and the broker's own words, so a client cannot make
//! the number of series grow or have its text shown.
//!
//! Two dialects, because no text satisfies both: a counter `x_total` is described under that name in Prometheus's text
//! format (<https://prometheus.io/docs/instrumenting/exposition_formats/>), which the textfile collector of node_exporter
//! and `promtool check metrics` read, and under `x` in OpenMetrics 1.0
//! (<https://prometheus.io/docs/specs/om/open_metrics_spec/>). The lines UNIT and EOF are comments to the former.

use std::fmt::{self, Write};

use crate::broker::Broker;

/// How the text is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Prometheus's text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    Open,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Gauge,
    Counter,
    Info,
}

struct Page {
    dialect: Dialect,
    text: String,
}

impl Page {
    /// Begins a family. `name` is without the suffix that its type asks for.
    fn family(&mut self, name: &str, kind: Type, unit: &str, help: &str) -> Result<String, fmt::Error> {
        let sample = match kind {
            Type::Gauge => format!("kvbroker_{name}"),
            Type::Counter => format!("kvbroker_{name}_total"),
            Type::Info => format!("kvbroker_{name}_info"),
        };
        let (described, kind) = match (self.dialect, kind) {
            (Dialect::Text, Type::Info | Type::Gauge) => (sample.clone(), "gauge"),
            (Dialect::Text, Type::Counter) => (sample.clone(), "counter"),
            (Dialect::Open, Type::Gauge) => (sample.clone(), "gauge"),
            (Dialect::Open, Type::Counter) => (format!("kvbroker_{name}"), "counter"),
            (Dialect::Open, Type::Info) => (format!("kvbroker_{name}"), "info"),
        };
        writeln!(self.text, "# HELP {described} {help}")?;
        writeln!(self.text, "# TYPE {described} {kind}")?;
        if !unit.is_empty() {
            writeln!(self.text, "# UNIT {described} {unit}")?;
        }
        Ok(sample)
    }

    fn gauge(&mut self, name: &str, unit: &str, help: &str, value: impl fmt::Display) -> fmt::Result {
        let name = self.family(name, Type::Gauge, unit, help)?;
        writeln!(self.text, "{name} {value}")
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let name = self.family(name, Type::Counter, "", help)?;
        writeln!(self.text, "{name} {value}")
    }

    /// A family with one sample for each set of labels; not begun if there is none.
    fn labelled<V: fmt::Display>(
        &mut self,
        name: &str,
        unit: &str,
        help: &str,
        samples: impl IntoIterator<Item = (String, V)>,
    ) -> fmt::Result {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let name = self.family(name, Type::Gauge, unit, help)?;
        samples.try_for_each(|(labels, value)| writeln!(self.text, "{name}{{{labels}}} {value}"))
    }
}

/// The whole text.
pub(super) fn text(broker: &Broker, dialect: Dialect) -> String {
    let mut page = Page { dialect, text: String::new() };
    // Writing to a string does not fail.
    let _ = fill(&mut page, broker);
    page.text
}

fn fill(page: &mut Page, broker: &Broker) -> fmt::Result {
    let (status, tenants) = (broker.status(), broker.tenants());
    let name = page.family("build", Type::Info, "", "The daemon's version.")?;
    writeln!(page.text, "{name}{{version=\"{}\"}} 1", status.version)?;

    let account = |name: &str| status.ledger.get(name).copied().unwrap_or(0);
    let available: u64 = ["free", "stranded", "cached", "lent"].map(account).iter().sum();
    let usage = 1.0 - available as f64 / status.pool.bytes.max(1) as f64;
    page.gauge(
        "kv_cache_usage_perc",
        "",
        "Share of the pool that is in use, from 0 to 1; cached prefixes that nobody holds count as not in use.",
        if status.pool.bytes == 0 { 0.0 } else { usage },
    )?;
    page.gauge("pool_size_bytes", "bytes", "Memory that the broker holds.", status.pool.bytes)?;
    page.labelled(
        "ledger_bytes",
        "bytes",
        "Where every byte of the pool is; the accounts add up to the pool.",
        status.ledger.iter().map(|(name, bytes)| (format!("account=\"{name}\""), bytes)),
    )?;
    page.gauge("extents", "", "Extents that the broker holds.", status.pool.extents)?;
    page.gauge(
        "extents_missing",
        "",
        "Extents that the kernel had no memory for; asked for again from time to time.",
        status.pool.extents_missing,
    )?;
    page.gauge(
        "extents_quarantined",
        "",
        "Extents that somebody holds to whom they do not belong any more.",
        status.pool.quarantined.len(),
    )?;
    page.gauge("connections", "", "Clients that are connected.", status.clients)?;
    page.gauge("sessions", "", "Token sequences that are open.", status.sessions)?;
    page.gauge("draining", "", "1 while the operator drains the broker.", u8::from(status.draining))?;
    page.gauge(
        "frozen",
        "",
        "1 if the books did not add up: nothing more is granted until a restart.",
        u8::from(status.frozen),
    )?;
    page.gauge(
        "common_prompts_bytes",
        "bytes",
        "Read-only copies of prompts that several tenants share, beside the pool.",
        status.common_bytes,
    )?;
    page.gauge("prefix_blocks", "", "Published blocks.", status.prefix_blocks)?;
    page.gauge("prefix_pinned_blocks", "", "Published blocks that are pinned.", status.prefix_pinned)?;

    let c = &status.counters;
    for (name, help, value) in [
        ("prefix_cache_queries", "Blocks that look-ups asked for.", status.prefix_queries),
        ("prefix_cache_hits", "Blocks that look-ups found.", status.prefix_hits),
        ("prefix_cache_evictions", "Published blocks that were evicted.", status.prefix_evictions),
        ("requests", "Requests answered, refusals included.", c.requests),
        ("refusals", "Requests refused, for whatever reason.", c.refusals),
        ("stale_requests", "Requests refused because they named what had gone.", c.stale),
        ("blocks_granted", "Blocks granted.", c.granted),
        ("blocks_scrubbed", "Blocks zeroed before a grant.", c.scrubbed),
        ("extents_renewed", "Extents renewed because they had been somebody's.", c.renewed),
        ("extents_reused", "Extents whose memory was scrubbed and used again.", c.reused),
        ("extents_seized", "Extents taken from tenants that had no block in use in them.", c.seized),
        ("reclaims", "Sessions asked to make room for one of higher priority.", c.reclaims),
        ("sessions_lost", "Sessions ended because they did not make room in time.", c.sessions_lost),
        ("silent_connections", "Connections ended because nobody said hello in time.", c.silent),
        ("blocks_damaged", "Sealed blocks that were found to be not what was sealed.", c.damaged),
    ] {
        page.counter(name, help, value)?;
    }

    let each = || tenants.tenants.iter();
    page.labelled(
        "tenant_ledger_bytes",
        "bytes",
        "Where the bytes of a tenant's extents are.",
        each().flat_map(|t| {
            let label = move |name: &String| format!("uid=\"{}\",account=\"{name}\"", t.uid);
            t.ledger.iter().map(move |(name, bytes)| (label(name), *bytes))
        }),
    )?;
    let uid = |uid: u32| format!("uid=\"{uid}\"");
    page.labelled(
        "tenant_reserve_bytes",
        "bytes",
        "What a tenant is guaranteed.",
        each().map(|t| (uid(t.uid), t.reserve_bytes)),
    )?;
    page.labelled(
        "tenant_limit_bytes",
        "bytes",
        "What a tenant may own, where that is limited.",
        each().filter_map(|t| Some((uid(t.uid), t.limit_bytes?))),
    )?;
    page.labelled(
        "tenant_sessions",
        "",
        "Token sequences that a tenant has open.",
        each().map(|t| (uid(t.uid), t.sessions)),
    )?;
    page.labelled(
        "tenant_connections",
        "",
        "Connections of a tenant.",
        each().map(|t| (uid(t.uid), t.connections)),
    )?;
    writeln!(page.text, "# EOF")
}
