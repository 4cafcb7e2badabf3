//! `kvbctl doctor`: is this board ready for the broker, item by item, and what mends it.
//!
//! Owns nothing; it reads. Invariants: nothing is opened but files to read, and on this machine the heap, of which one
//! page is taken for a moment to try what its count of holders proves; no right beyond reading is needed, and without the
//! right to the heap that one item is judged by the kernel's version. What cannot be known is said to be so and is never
//! "ok"; each warning and each failure carries what to do. All reading goes through `tree`, so recorded boards are
//! examined like this one.
//!
//! What is looked for comes from the kernel's sources and from boards; the constants name theirs.

mod device;
mod kernel;
mod memory;
mod service;
mod tree;

use std::fmt;
use std::io;
use std::path::Path;

use serde::Serialize;

use crate::daemon::{Config, DEFAULT_CONFIG, Overrides};
use kernel::Release;
use tree::{Person, Tree};

/// The user that the daemon runs as, by systemd/kvbroker.sysusers.conf.
const DAEMON: &str = "kvbroker";
/// The group that may connect.
const CLIENTS: &str = "kvbroker-clients";

/// How an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be, or not needed here.
    Ok,
    /// It works, with a price or a risk that the text names.
    Warn,
    /// The broker, or what is configured, will not work.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What it belongs to: `kernel`, `memory`, `heaps`, `udmabuf`, `npu`, `limits`, `service`.
    pub area: &'static str,
    /// Its name within the area, stable for scripts.
    pub item: &'static str,
    /// How it is.
    pub level: Level,
    /// What was found.
    pub said: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// All of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Items that are as they should be.
    pub ok: usize,
    /// Items with a price or a risk.
    pub warn: usize,
    /// Items that keep the broker from working.
    pub fail: usize,
    /// In the order in which a board is brought up.
    pub items: Vec<Item>,
}

/// What the checks share.
struct Board {
    tree: Tree,
    /// The tree is the machine that this runs on.
    here: bool,
    config: Config,
    release: Option<Release>,
    /// The daemon's user, if it is there.
    daemon: Option<Person>,
    page: u64,
    /// The running daemon.
    pid: Option<u32>,
}

/// Findings, one after the other.
#[derive(Default)]
struct Findings(Vec<Item>);

impl Findings {
    fn ok(&mut self, area: &'static str, item: &'static str, said: impl Into<String>) {
        self.0.push(Item { area, item, level: Level::Ok, said: said.into(), mend: None });
    }

    fn warn(
        &mut self,
        area: &'static str,
        item: &'static str,
        said: impl Into<String>,
        mend: impl Into<String>,
    ) {
        self.0.push(Item { area, item, level: Level::Warn, said: said.into(), mend: Some(mend.into()) });
    }

    fn fail(
        &mut self,
        area: &'static str,
        item: &'static str,
        said: impl Into<String>,
        mend: impl Into<String>,
    ) {
        self.0.push(Item { area, item, level: Level::Fail, said: said.into(), mend: Some(mend.into()) });
    }
}

/// Examines the board below `root` (`/`: this one). `config` is the daemon's configuration on this machine; without it
/// the board's own.
pub fn examine(root: &Path, config: Option<&Path>) -> io::Result<Report> {
    let tree = Tree::new(root)?;
    let mut found = Findings::default();
    let read = match config {
        Some(path) => Config::read(path, true, &Overrides::default()),
        None => Config::read_of_board(DEFAULT_CONFIG.as_ref(), |path| tree.real(path)),
    };
    let config = match read.and_then(|c| c.consistent().map(|()| c)) {
        Ok(config) => {
            found.ok("service", "configuration", format!("a pool of {} is configured", config.pool()));
            config
        }
        Err(e) => {
            let mend =
                "correct it; `kvbrokerd --check` says when it is right. The rest was judged by the defaults";
            found.fail("service", "configuration", e.to_string(), mend);
            Config::default()
        }
    };
    let daemon = tree.person(DAEMON);
    let board = Board {
        release: tree.text("/proc/sys/kernel/osrelease").and_then(|text| Release::parse(&text)),
        // The first mapping of whatever process is asked: all have the same.
        page: tree.field("/proc/self/smaps", "KernelPageSize").map_or(4096, |kib| kib << 10),
        pid: service::find_daemon(&tree, daemon.as_ref()),
        daemon,
        here: tree.here,
        tree,
        config,
    };
    kernel::examine(&board, &mut found);
    memory::examine(&board, &mut found);
    device::examine(&board, &mut found);
    service::examine(&board, &mut found);
    let count = |level| found.0.iter().filter(|i| i.level == level).count();
    Ok(Report { ok: count(Level::Ok), warn: count(Level::Warn), fail: count(Level::Fail), items: found.0 })
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for item in &self.items {
            let name = format!("{}.{}", item.area, item.item);
            writeln!(f, "{:<5} {name:<22} {}", item.level, item.said)?;
            if let Some(mend) = &item.mend {
                writeln!(f, "{:<5} {:<22} mend: {mend}", "", "")?;
            }
        }
        writeln!(f, "{} ok, {} warnings, {} failures", self.ok, self.warn, self.fail)
    }
}

#[cfg(test)]
mod tests;
