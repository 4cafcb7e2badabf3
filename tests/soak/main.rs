//! A week on the shop floor, compressed: a real daemon and real engine processes of two tenants, from a seed, with
//! everything that happens in a week happening all the time. `scripts/soak --for 30m` runs it for long; in the ordinary
//! tests it runs for a few seconds.
//!
//! The week has seven days. At the end of each, all engines go, and what is left of them is looked at: the ledger, the
//! daemon's descriptors and its resident memory, compared at these equal points. Within a day nothing is calm: engines
//! are killed in the middle of their work, memory is lent and taken back, the machine says that it is short of memory.

#[path = "../daemon/support.rs"]
#[allow(dead_code, reason = "shared with the tests of the daemon, which need more")]
mod support;

#[path = "../../fuzz/src/random.rs"]
mod random;
mod roles;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use random::Random;
use roles::Account;
use support::{Daemon, Helper, Place, until};

/// What the environment says of a long run: seconds, and the seed.
const SECONDS: &str = "KVBROKER_SOAK_SECONDS";
const SEED: &str = "KVBROKER_SOAK_SEED";
/// Four sessions at 10 tokens a second, a week long, in blocks of 16 tokens.
const WEEK: u64 = 4 * 10 * 7 * 24 * 3600 / 16;
const DAYS: u32 = 7;
/// Who the four engines run as.
const TENANTS: [u32; 4] = [4001, 4001, 4002, 4002];
/// Blocks that an engine is told to use before it is spoken to again.
const HOUR: u64 = 300;
/// 20 extents of 4 blocks: four sessions of 33 blocks do not always fit, so that the pool is full now and then.
const POOL: u64 = 20 * support::EXTENT;
const CONFIG: &str = r#"
[pool]
size = "2.5M"
extent = "128K"
minimum = "1M"
elastic = true
floor = "1.5M"
[socket]
mode = "0666"
[[profile]]
name = "small"
layers = 2
kv-heads = 2
head-dim = 128
"#;

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number is needed")))
}

/// What `/proc/pressure/memory` would say.
fn press(file: &Path, share: f64) {
    let new = file.with_extension("new");
    std::fs::write(&new, format!("some avg10={share:.2} avg60=0.00 avg300=0.00 total=0\n")).unwrap();
    std::fs::rename(new, file).unwrap();
}

/// What the daemon has at the end of a day, with no engine there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Evening {
    fds: usize,
    resident_kib: u64,
    /// The ledger's total, and what of it is free.
    ledger: (u64, u64),
    quarantined: usize,
    frozen: bool,
}

/// What happened beside the work.
#[derive(Debug, Default)]
struct Events {
    killed: u64,
    /// Engines that ended without having been killed.
    died: u64,
    holds: u64,
    holds_refused: u64,
    pressed: u64,
    checks: u64,
    evictions: u64,
}

struct Floor {
    daemon: Daemon,
    random: Random,
    engines: Vec<Helper>,
    account: Account,
    events: Events,
    /// What engines found that must not be.
    broken: Vec<String>,
}

impl Floor {
    fn new(seed: u64) -> Self {
        let place = Place::new(CONFIG);
        let file = place.path("pressure");
        press(&file, 0.0);
        let daemon = place.start_with(|command| {
            command.arg("--pressure-file").arg(&file).args(["--pressure-every", "20"]);
            command.env("KVBROKER_LOG", "warn");
        });
        let (engines, account, events, broken) = Default::default();
        Floor { daemon, random: Random::new(seed), engines, account, events, broken }
    }

    fn press(&self, share: f64) {
        press(&self.daemon.place.path("pressure"), share);
    }

    fn order(&mut self, engine: usize) {
        let seed = self.random.next();
        self.engines[engine].order(&format!("work {HOUR} {seed}"));
    }

    /// One day: the engines work, and one thing after the other goes wrong, until `end` is reached, so many blocks have been
    /// used since the start (or it is too `late` for that), and every engine has been heard of.
    fn day(&mut self, end: Instant, grants: u64, late: Instant) {
        self.engines = TENANTS.iter().map(|uid| self.daemon.helper(*uid)).collect();
        (0..self.engines.len()).for_each(|engine| self.order(engine));
        let mut hours = 0;
        let goes_on = |floor: &Self| {
            let now = Instant::now();
            now < end || (floor.account.grants < grants && now < late)
        };
        while goes_on(self) || hours == 0 {
            hours += 1;
            self.disturb();
            for engine in 0..self.engines.len() {
                self.hear(engine);
                self.order(engine);
            }
        }
        (0..self.engines.len()).for_each(|engine| self.hear(engine));
    }

    fn hear(&mut self, engine: usize) {
        let said = self.engines[engine].answered();
        if let Some(account) = Account::parse(&said) {
            return self.account.add(account);
        }
        if said == "ended" {
            self.events.died += 1;
        }
        self.broken.push(format!("engine {engine}: {said}"));
        self.engines[engine] = self.daemon.helper(TENANTS[engine]);
    }

    fn disturb(&mut self) {
        match self.random.below(6) {
            0 | 1 => {
                // In the middle of whatever it is doing.
                let engine = self.random.below(self.engines.len());
                std::thread::sleep(Duration::from_micros(self.random.next() % 5000));
                self.engines[engine].kill();
                self.events.killed += 1;
                self.engines[engine] = self.daemon.helper(TENANTS[engine]);
                self.order(engine);
            }
            2 => {
                let mut kvbctl = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
                kvbctl.args(["hold", "512K", "--socket"]).arg(self.daemon.place.path("admin.sock"));
                kvbctl.args(["--", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
                match kvbctl.status().unwrap().code() {
                    Some(0) => self.events.holds += 1,
                    // Everything is in use.
                    Some(1) => self.events.holds_refused += 1,
                    other => panic!("kvbctl hold ends with {other:?}"),
                }
            }
            3 => {
                self.press(50.0);
                std::thread::sleep(Duration::from_millis(40));
                self.press(0.0);
                self.events.pressed += 1;
            }
            4 => {
                let check = self.daemon.admin("check");
                assert_eq!(check["ok"], true, "{check}");
                self.events.checks += 1;
            }
            _ => {
                self.daemon.admin("evict blocks=16");
                self.events.evictions += 1;
            }
        }
    }

    /// All engines go; then nothing may be left of them.
    fn evening(&mut self) -> Evening {
        self.engines.clear();
        self.press(0.0);
        until("the daemon has seen its clients go", || self.daemon.clients() == 0);
        self.daemon.admin("evict blocks=all");
        let pool = |status: &serde_json::Value| {
            let quarantined = status["pool"]["quarantined"].as_array().map_or(usize::MAX, Vec::len);
            (quarantined, status["pool"]["extents_missing"].as_u64(), status["ledger"]["lent"].as_u64())
        };
        // Extents are renewed, looked at again, and asked back from the kernel: all of it in a moment.
        until("the pool is whole", || pool(&self.daemon.admin("status")) == (0, Some(0), Some(0)));
        until("nothing is being renewed", || self.daemon.account("free") == POOL);
        let status = self.daemon.admin("status");
        let ledger: BTreeMap<String, u64> = serde_json::from_value(status["ledger"].clone()).unwrap();
        // The connection that asked is closed a moment after its answer.
        let mut fds = self.daemon.fds();
        until("the descriptors are counted twice alike", || {
            let before = std::mem::replace(&mut fds, self.daemon.fds());
            before == fds
        });
        Evening {
            fds,
            resident_kib: self.daemon.status_line("VmRSS:"),
            ledger: (ledger.values().sum(), ledger["free"]),
            quarantined: pool(&status).0,
            frozen: self.daemon.admin("check")["ok"] != true || status["frozen"] != false,
        }
    }
}

/// The final table: what was to be shown, and whether it is so.
#[derive(Default)]
struct Table {
    passed: u64,
    failed: u64,
}

impl Table {
    fn row(&mut self, what: &str, is_so: bool, found: impl std::fmt::Display) {
        println!("{:<7}{what}: {found}", if is_so { "ok" } else { "FAILED" });
        *(if is_so { &mut self.passed } else { &mut self.failed }) += 1;
    }
}

#[test]
fn a_week_on_the_shop_floor_ends_as_it_began() {
    let seconds = from_environment(SECONDS);
    let seed = from_environment(SEED).unwrap_or(1);
    let whole = Duration::from_secs(seconds.unwrap_or(10));
    let long = whole >= Duration::from_secs(600);
    let mut floor = Floor::new(seed);
    let begun = Instant::now();
    let mut evenings = Vec::new();
    for day in 1..=DAYS {
        // A long run is a whole week, however slow the machine: up to three times as long as it was told to be.
        let grants = if long { WEEK * u64::from(day) / u64::from(DAYS) } else { 0 };
        floor.day(begun + whole * day / DAYS, grants, begun + 3 * whole * day / DAYS);
        let evening = floor.evening();
        println!(
            "day {day}: {} s, {} grants so far, {} descriptors, {} KiB resident",
            begun.elapsed().as_secs(),
            floor.account.grants,
            evening.fds,
            evening.resident_kib
        );
        evenings.push(evening);
    }
    let status = floor.daemon.admin("status");
    let counter = |name: &str| status["counters"][name].as_u64().unwrap();
    let granted = counter("granted");
    let log = floor.daemon.place.log();
    let Floor { account, events, broken, .. } = &floor;
    let (weeks, took) = (granted as f64 / WEEK as f64, begun.elapsed().as_secs());
    println!("seed {seed}: {took} s, {granted} blocks granted ({weeks:.2} weeks)\n{account}\n{events:?}");

    let mut table = Table::default();
    let every = |is_so: &dyn Fn(&Evening) -> bool| evenings.iter().all(is_so);
    let (first, last) = (evenings[0], evenings[evenings.len() - 1]);
    table.row(
        "every evening the ledger adds up, and all of it is free",
        every(&|e| e.ledger == (POOL, POOL)),
        DAYS,
    );
    table.row("every evening nothing is in quarantine", every(&|e| e.quarantined == 0), last.quarantined);
    table.row(
        "every evening the books are in order",
        every(&|e| !e.frozen),
        format!("{} checks", events.checks),
    );
    // An extent or two may be in the worker's hands just then, without a descriptor; what leaks does so each day.
    let counts = || evenings.iter().map(|e| e.fds);
    let (fewest, most) = (counts().min().unwrap_or(0), counts().max().unwrap_or(0));
    table.row("descriptors are flat", most - fewest <= 2, format!("{fewest} to {most}"));
    // Compared with the first day: a daemon that has served has its buffers. The allocator's noise of a day is allowed, the
    // growth of a week would be seven times as much.
    let resident = format!("{} to {} KiB", first.resident_kib, last.resident_kib);
    table.row("resident memory is flat", every(&|e| e.resident_kib <= first.resident_kib + 512), resident);
    table.row(
        "every canary is right",
        broken.is_empty() && account.rows > account.grants,
        format!("{} rows {broken:?}", account.rows),
    );
    table.row(
        "nobody died that was not killed",
        events.died == 0,
        format!("{} died, {} were killed", events.died, events.killed),
    );
    table.row("no session was taken away", counter("sessions_lost") == 0, counter("sessions_lost"));
    table.row(
        "every block that was used was granted",
        granted >= account.grants,
        format!("{} used", account.grants),
    );
    // Without a device that can read scattered memory (`/dev/udmabuf`) windows are refused, in words.
    let kinds = [account.found, account.forks, account.windows + account.no_windows, events.killed];
    table.row(
        "prompts were found, sessions forked, windows asked for, engines killed",
        !kinds.contains(&0),
        format!("{kinds:?}"),
    );
    table.row(
        "the daemon says of no error",
        !log.contains("ERROR"),
        format!("{} lines of log", log.lines().count()),
    );
    if long {
        table.row("it was a week", granted >= WEEK, format!("{granted} of {WEEK} grants"));
    }
    println!("{} passed, {} failed", table.passed, table.failed);
    assert_eq!(table.failed, 0, "{broken:?}\n{log}");
}
