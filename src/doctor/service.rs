//! The service: users, units, limits, sockets, and who runs as whom.
//!
//! Invariant: limits are those of the running daemon where it runs (/proc/PID/limits), else those that its unit asks for;
//! the text says which.

use super::tree::{Person, Tree};
use super::{Board, CLIENTS, Findings};
use crate::daemon::too_tight;
use crate::heap::cgroup_bytes;
use crate::packing::Extents;
use crate::profile::Profile;
use crate::size::Size;

const UNITS: [&str; 3] = ["kvbrokerd.service", "kvbrokerd.socket", "kvbrokerd-admin.socket"];
/// Where units are, the strongest first (systemd.unit(5)).
const PLACES: [&str; 4] =
    ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
/// Descriptors in one message (SCM_MAX_FD, include/net/scm.h): those that an unread message charges to the sender.
const FDS_PER_MESSAGE: u64 = 253;
/// The kernel's default of vm.max_map_count.
const MAPS: u64 = 65_530;
/// Mappings of a process beside its views: libraries, weights, stacks.
const OTHER_MAPS: u64 = 1024;

/// The daemon's process: the one that runs as its user, where another kvbrokerd runs beside it.
pub(super) fn find_daemon(tree: &Tree, user: Option<&Person>) -> Option<u32> {
    let named = |pid: &u32| tree.text(&format!("/proc/{pid}/comm")).as_deref() == Some("kvbrokerd");
    let all: Vec<u32> = pids(tree).filter(named).collect();
    let uid = user.map(|u| u64::from(u.uid));
    let own = |pid: &&u32| tree.field(&format!("/proc/{pid}/status"), "Uid") == uid && uid.is_some();
    all.iter().find(own).or(all.first()).copied()
}

fn pids(tree: &Tree) -> impl Iterator<Item = u32> {
    tree.names("/proc").into_iter().filter_map(|name| name.parse().ok())
}

pub(super) fn examine(board: &Board, found: &mut Findings) {
    limits(board, found);
    users(board, found);
    units(board, found);
    sockets(board, found);
    engines(board, found);
}

/// Bytes or a count; `None` for infinity.
type Limit = Option<u64>;

/// The limit from /proc/PID/limits: its hard one, since the daemon raises itself to that.
fn process_limit(board: &Board, row: &str) -> Option<Limit> {
    limit_of_process(board, row, 1)
}

/// The one in force is column 0, the hard one column 1.
fn limit_of_process(board: &Board, row: &str, column: usize) -> Option<Limit> {
    let text = board.tree.text(&format!("/proc/{}/limits", board.pid?))?;
    let line = text.lines().find_map(|l| l.strip_prefix(row))?;
    Some(line.split_whitespace().nth(column)?.parse().ok())
}

/// The last value of `key` in the unit and its drop-ins.
fn unit_value(board: &Board, unit: &str, key: &str) -> Option<String> {
    let file = PLACES.iter().find_map(|place| board.tree.text(&format!("{place}/{unit}")))?;
    let mut texts = vec![file];
    for place in PLACES.iter().rev() {
        let directory = format!("{place}/{unit}.d");
        let names = board.tree.names(&directory).into_iter().filter(|n| n.ends_with(".conf"));
        texts.extend(names.filter_map(|name| board.tree.text(&format!("{directory}/{name}"))));
    }
    let find = |text: &String| {
        let mut lines = text.lines().rev();
        lines.find_map(|l| Some(l.trim().strip_prefix(key)?.strip_prefix('=')?.trim().to_owned()))
    };
    texts.iter().rev().find_map(find)
}

/// A limit of the unit: the last of `soft:hard` (systemd.exec(5)), with its suffix of 1024.
fn unit_limit(board: &Board, key: &str) -> Option<Limit> {
    let text = unit_value(board, UNITS[0], key)?;
    let text = text.rsplit(':').next().unwrap_or_default();
    if text == "infinity" {
        return Some(None);
    }
    let (number, shift) = match text.chars().last() {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    Some(Some(number.parse::<u64>().ok()?.checked_shl(shift)?))
}

fn limits(board: &Board, found: &mut Findings) {
    let area = "limits";
    let extents = board.config.extents(board.page).ok();
    let count = extents.map_or(0, |e: Extents| e.count);
    let drop_in = |line: &str| format!("systemctl edit {}: [Service] {line}", UNITS[0]);
    let whose = if board.pid.is_some() { "the running daemon's" } else { "the unit's" };

    let files = process_limit(board, "Max open files").or_else(|| unit_limit(board, "LimitNOFILE"));
    let needed = FDS_PER_MESSAGE * u64::from(board.config.connections()) + count + 64;
    let why = format!(
        "{} connections may each leave a message of {FDS_PER_MESSAGE} unread",
        board.config.connections()
    );
    match files {
        Some(Some(n)) if n < needed => found.warn(
            area,
            "open-files",
            format!("{whose} limit is {n}, and {needed} may be needed: {why}"),
            drop_in(&format!("LimitNOFILE={needed}")),
        ),
        Some(limit) => {
            let shown = limit.map_or("infinity".into(), |n| n.to_string());
            found.ok(area, "open-files", format!("{whose} limit is {shown}"));
        }
        None => found.warn(
            area,
            "open-files",
            "neither a running daemon nor its unit says how many files it may open",
            "install the package's units; 524288 is their LimitNOFILE",
        ),
    }

    let locked = process_limit(board, "Max locked memory").or_else(|| unit_limit(board, "LimitMEMLOCK"));
    let pool = board.config.pool_bytes;
    if board.config.wants_heap() {
        found.ok(area, "locked-memory", "a dma-heap pool is never swapped and needs no limit");
    } else if !board.config.lock {
        found.warn(
            area,
            "locked-memory",
            "pool.lock is off: the pool may go to swap or zram, and a session's next token waits for it",
            "pool.lock = true in /etc/kvbroker/kvbroker.toml",
        );
    } else {
        match locked {
            Some(Some(n)) if n < pool => found.warn(
                area,
                "locked-memory",
                format!(
                    "{whose} limit is {}, so a pool of {} may be swapped",
                    Size::from_bytes(n),
                    board.config.pool()
                ),
                drop_in("LimitMEMLOCK=infinity"),
            ),
            Some(_) => found.ok(area, "locked-memory", format!("{whose} limit lets the pool be locked")),
            None => found.warn(
                area,
                "locked-memory",
                "neither a running daemon nor its unit says how much it may lock",
                "install the package's units; infinity is their LimitMEMLOCK",
            ),
        }
    }

    file_size(board, whose, extents, found);
    cgroup(board, found);

    let maps = board.tree.number("/proc/sys/vm/max_map_count").unwrap_or(MAPS);
    // A plane view of every block: each plane of a block is a mapping, at worst.
    let mappings = |profile: &Profile, extents: &Extents| -> u64 {
        let each = profile.groups().iter().enumerate();
        each.map(|(g, group)| 2 * group.layers.len() as u64 * extents.pack(profile.block_bytes(g)).blocks)
            .sum()
    };
    let most = extents.and_then(|e| board.config.profiles.iter().map(|p| mappings(p, &e)).max());
    let worst = most.unwrap_or(0) + OTHER_MAPS;
    let said =
        format!("vm.max_map_count is {maps}; plane views over the whole pool take up to {worst} mappings");
    if maps < worst {
        let mend =
            format!("sysctl -w vm.max_map_count={worst}, and the line in /etc/sysctl.d/60-kvbroker.conf");
        found.warn(area, "mappings", said, mend);
    } else {
        found.ok(area, "mappings", said);
    }
}

/// Extents of ordinary memory are files.
fn file_size(board: &Board, whose: &str, extents: Option<Extents>, found: &mut Findings) {
    let (area, item) = ("limits", "file-size");
    let limit =
        limit_of_process(board, "Max file size", 0).or_else(|| unit_limit(board, "LimitFSIZE")).flatten();
    let extent = extents.map_or(0, |e| e.bytes);
    match limit.filter(|n| *n < extent && !board.config.wants_heap()) {
        Some(n) => found.fail(
            area,
            item,
            format!("{whose} limit is {n} bytes, and an extent of {} is a file", Size::from_bytes(extent)),
            format!("systemctl edit {}: [Service] LimitFSIZE=infinity", UNITS[0]),
        ),
        None => found.ok(area, item, "nothing keeps an extent from being a file"),
    }
}

/// What the daemon's memory cgroups allow if it runs, else what its unit asks for.
fn cgroup(board: &Board, found: &mut Findings) {
    let (area, item) = ("limits", "cgroup-memory");
    let read = |path: &str| board.tree.text(path);
    let running = board.pid.and_then(|pid| read(&format!("/proc/{pid}/cgroup")));
    let limit = match running {
        Some(cgroups) => cgroup_bytes(&cgroups, read),
        None => unit_limit(board, "MemoryMax").flatten().map(|n| (n, format!("MemoryMax= of {}", UNITS[0]))),
    };
    let why = limit.and_then(|(limit, file)| too_tight(&board.config, limit, &file));
    match why.filter(|_| !board.config.wants_heap()) {
        Some(why) => {
            found.fail(area, item, why, format!("systemctl edit {}: [Service] MemoryMax=infinity", UNITS[0]))
        }
        None => found.ok(area, item, "no memory cgroup is too small for the pool"),
    }
}

fn users(board: &Board, found: &mut Findings) {
    let area = "service";
    let sysusers = "systemd-sysusers (the package does it)";
    match board.daemon {
        Some(_) => found.ok(area, "user", "the user kvbroker is there"),
        None => found.fail(area, "user", "there is no user kvbroker for the daemon", sysusers),
    }
    let groups = board.tree.groups();
    match groups.iter().find(|(name, ..)| name == CLIENTS) {
        None => found.fail(area, "clients", format!("there is no group {CLIENTS} for engines"), sysusers),
        Some((.., members)) if members.is_empty() => found.warn(
            area,
            "clients",
            format!("nobody is in the group {CLIENTS}: only root connects"),
            format!("usermod -aG {CLIENTS} USER for each engine's user, who then logs in anew"),
        ),
        Some((.., members)) => found.ok(area, "clients", format!("in {CLIENTS}: {}", members.join(", "))),
    }
}

fn units(board: &Board, found: &mut Findings) {
    let area = "service";
    let missing: Vec<&str> = UNITS
        .into_iter()
        .filter(|u| !PLACES.iter().any(|p| board.tree.exists(&format!("{p}/{u}"))))
        .collect();
    if !missing.is_empty() {
        let said = format!("not installed: {}", missing.join(", "));
        return found.fail(
            area,
            "units",
            said,
            "install the package kvbroker, or copy systemd/ and run systemctl daemon-reload",
        );
    }
    let masked = UNITS
        .into_iter()
        .find(|u| board.tree.link(&format!("/etc/systemd/system/{u}")).as_deref() == Some("null"));
    if let Some(unit) = masked {
        return found.fail(area, "units", format!("{unit} is masked"), format!("systemctl unmask {unit}"));
    }
    let wanted =
        |target: &str, unit: &str| board.tree.exists(&format!("/etc/systemd/system/{target}.wants/{unit}"));
    let off: Vec<&str> =
        [("multi-user.target", UNITS[0]), ("sockets.target", UNITS[1]), ("sockets.target", UNITS[2])]
            .into_iter()
            .filter(|(target, unit)| !wanted(target, unit))
            .map(|(_, unit)| unit)
            .collect();
    match off.is_empty() {
        true => found.ok(area, "units", "installed and enabled"),
        false => found.warn(
            area,
            "units",
            format!(
                "not enabled: {}; after the next boot nobody is served until they are started",
                off.join(", ")
            ),
            format!("systemctl enable --now {}", off.join(" ")),
        ),
    }
}

fn sockets(board: &Board, found: &mut Findings) {
    let area = "service";
    match board.pid {
        Some(pid) => found.ok(area, "daemon", format!("kvbrokerd runs, process {pid}")),
        None => found.warn(
            area,
            "daemon",
            "kvbrokerd does not run",
            "systemctl start kvbrokerd, and `journalctl -u kvbrokerd` if it does not stay",
        ),
    }
    let clients = board.config.socket.display().to_string();
    let admin = board.config.admin_socket.display().to_string();
    let restart = "systemctl restart kvbrokerd.socket kvbrokerd-admin.socket kvbrokerd.service";
    for (item, path) in [("socket", clients), ("admin-socket", admin)] {
        let Some(node) = board.tree.node(&path).filter(|_| board.tree.exists(&path)) else {
            found.warn(area, item, format!("{path} is not there"), restart);
            continue;
        };
        let group = board.tree.group_name(node.gid);
        let said = format!("{path} is {:04o}, owner {}, group {group}", node.mode, node.uid);
        let right = match item {
            // Who may write may connect. Beside root and the daemon that is the clients' group alone.
            "socket" => node.mode & 0o777 == 0o660 && group == CLIENTS,
            _ => node.mode & 0o077 == 0,
        };
        match (right, item) {
            (true, _) => found.ok(area, item, said),
            (false, "socket") => {
                let mend = format!(
                    "0660 and group {CLIENTS}: SocketMode= and SocketGroup= in kvbrokerd.socket; {restart}"
                );
                found.warn(area, item, said, mend);
            }
            (false, _) => found.fail(
                area,
                item,
                format!("{said}: who connects there sees every tenant"),
                format!("0600: SocketMode= in kvbrokerd-admin.socket; {restart}"),
            ),
        }
    }
}

/// Whether the daemon turns engines away because of their user namespace.
fn namespaces(board: &Board, engines: &[(String, u32, Option<u64>)], found: &mut Findings) {
    let map = |pid: String| board.tree.text(&format!("/proc/{pid}/uid_map"));
    // Where none runs, it would run in the namespace of whoever starts it: most likely this one.
    let Some(own) = map(board.pid.map_or_else(|| "self".into(), |pid| pid.to_string())) else { return };
    let named =
        |uid: &Option<u64>| uid.and_then(|u| u.try_into().ok()).is_some_and(|u| board.config.names(u));
    let strange = |(_, pid, uid): &&(String, u32, Option<u64>)| {
        map(pid.to_string()).is_some_and(|map| map != own) && !named(uid)
    };
    let strangers: Vec<String> = engines
        .iter()
        .filter(strange)
        .map(|(comm, pid, uid)| format!("{comm} ({pid}, uid {})", uid.unwrap_or_default()))
        .collect();
    if !strangers.is_empty() {
        found.warn(
            "service",
            "user-namespaces",
            format!(
                "not served, since they are in another user namespace than the daemon and not named: {}",
                strangers.join(", ")
            ),
            "name each uid in the configuration: [[tenant]] with uid = ...; see \"An engine in a container\" in docs/operations.md",
        );
    }
}

/// Processes that have mapped the pool, or the runtimes of NPUs: by the names of what they map. Another user's maps can
/// only be read by root, and in a container not always by root.
fn engines(board: &Board, found: &mut Findings) {
    let (area, item) = ("service", "engines");
    const MAPPED: [&str; 5] =
        ["/memfd:kvbroker", "libkvbroker.so", "libggml-kvbroker", "librkllmrt.so", "librknnrt.so"];
    let mut engines = Vec::new();
    let mut hidden = false;
    for pid in pids(&board.tree).filter(|pid| Some(*pid) != board.pid) {
        let maps = board.tree.text(&format!("/proc/{pid}/maps"));
        // One that has ended meanwhile is not hidden.
        hidden |= maps.is_none() && board.tree.exists(&format!("/proc/{pid}"));
        if maps.is_some_and(|maps| MAPPED.iter().any(|word| maps.contains(word))) {
            let comm = board.tree.text(&format!("/proc/{pid}/comm")).unwrap_or_default();
            let uid = board.tree.field(&format!("/proc/{pid}/status"), "Uid");
            engines.push((comm, pid, uid));
        }
    }
    namespaces(board, &engines, found);
    let root: Vec<String> = engines
        .iter()
        .filter(|(.., uid)| *uid == Some(0))
        .map(|(comm, pid, _)| format!("{comm} ({pid})"))
        .collect();
    let own =
        "a user for each engine, in the group kvbroker-clients: User= and SupplementaryGroups= in its unit";
    match (root.len(), engines.len()) {
        (0, 0) if hidden => found.warn(
            area,
            item,
            "none was found, but what other processes have mapped (/proc/PID/maps) cannot be read",
            "run this as root: sudo kvbctl doctor; where root may not look either (a container, a kernel that is locked down), run it on the host",
        ),
        (0, 0) => found.ok(area, item, "none runs"),
        (0, n) => found.ok(area, item, format!("{n} run, none of them as root")),
        (1, _) => found.warn(
            area,
            item,
            format!("{} runs as root: nothing keeps it from anybody's memory", root[0]),
            own,
        ),
        (n, _) => found.warn(
            area,
            item,
            format!("{n} run as root and are one tenant, which trusts itself: {}", root.join(", ")),
            own,
        ),
    }
}
