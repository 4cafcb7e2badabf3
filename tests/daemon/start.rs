//! Start: sockets that are there already, what the configuration gets wrong, what systemd hands over and is told.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};

use crate::support::{CONFIG, Daemon, Place, Raw, mount_tmpfs, until};

#[test]
fn a_path_on_which_a_broker_lives_is_left_alone() {
    let mut daemon = Daemon::new();
    let (code, log) = daemon.place.fails();
    assert_eq!(code, Some(1));
    assert!(log.contains("a broker is listening there already"), "{log}");
    assert_eq!(daemon.raw().hello().fault, None);
    daemon.lives();
}

#[test]
fn a_file_in_the_way_is_not_removed() {
    let place = Place::new(CONFIG);
    std::fs::write(place.socket(), "precious").unwrap();
    let (code, log) = place.fails();
    assert_eq!(code, Some(1));
    assert!(log.contains("something that is no socket is in the way"), "{log}");
    assert_eq!(std::fs::read_to_string(place.socket()).unwrap(), "precious");
}

#[test]
fn a_wrong_configuration_ends_with_code_2_and_words() {
    let long = "[socket]\nmode = \"9\"\n";
    for (config, words) in [
        ("[pool]\nsizes = \"1M\"\n", "did you mean `size`?"),
        ("[pool]\nsize = \"1\"\n", "without unit"),
        ("nonsense", "line 1"),
        (long, "octal"),
        ("pool = 5\n", "expected the table [pool]"),
    ] {
        let (code, log) = Place::new(config).fails();
        assert_eq!(code, Some(2), "{config}: {log}");
        assert!(log.contains(words), "{config}: {log}");
    }
    let place = Place::new("");
    std::fs::remove_file(place.path("kvbroker.toml")).unwrap();
    let (code, log) = place.fails();
    assert_eq!((code, log.contains("kvbroker.toml")), (Some(2), true), "{log}");
    let status = place.command().arg("--nonsense").status().unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn a_pool_that_cannot_be_ends_with_code_1_and_what_to_do() {
    let of = |pool: &str| CONFIG.replace("size = \"1M\"", pool);
    for (config, words) in [
        (of("size = \"512G\""), "make pool.size smaller"),
        (
            of("size = \"1M\"\nheap-directory = \"/nowhere\"\ndevice = \"contiguous\""),
            "name it with pool.heap",
        ),
        (of("size = \"1M\"\nheap = \"/nowhere/cma\""), "there is no such heap"),
        (of("size = \"1M\"\nheap = \"/dev/null\""), "/dev/null"),
    ] {
        let place = Place::new(&config);
        let (code, log) = place.fails();
        assert_eq!(code, Some(1), "{config}: {log}");
        assert!(log.contains(words), "{config}: {log}");
        assert!(!place.socket().exists(), "a daemon that did not start leaves no socket");
    }
}

#[test]
fn a_daemon_that_could_serve_nobody_for_want_of_open_files_does_not_start_and_says_what_would_help() {
    let place = Place::new(CONFIG);
    let mut command = place.command();
    // Eight extents, and what the daemon itself needs.
    // SAFETY: setrlimit may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 56, rlim_max: 56 };
            match libc::setrlimit(libc::RLIMIT_NOFILE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
    assert_eq!(command.status().unwrap().code(), Some(1));
    let log = place.log();
    for words in ["may open 56 files", "none for connections beside the pool's 8", "LimitNOFILE"] {
        assert!(log.contains(words), "{words}: {log}");
    }
    assert!(!place.socket().exists(), "a daemon that did not start leaves no socket");
}

/// A start whose socket for clients is elsewhere.
fn elsewhere(place: &Place, socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbrokerd"));
    command.arg("--config").arg(place.path("kvbroker.toml")).arg("--socket").arg(socket);
    command.arg("--admin-socket").arg(place.path("admin.sock")).stdin(Stdio::null());
    let log = std::fs::File::options().create(true).append(true).open(place.path("log")).unwrap();
    command.stderr(log);
    command
}

/// What `kvbrokerd --check` says: exit code, standard output, standard error.
fn checked(place: &Place) -> (Option<i32>, String, String) {
    let output = place.command().arg("--check").stdout(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap(), place.log())
}

#[test]
fn a_check_says_in_one_line_what_a_start_would_take_and_takes_nothing() {
    let place = Place::new(CONFIG);
    let (code, said, log) = checked(&place);
    assert_eq!((code, log.as_str()), (Some(0), ""), "{said}");
    assert!(said.ends_with("a start would take 8 extents of 128 KiB, 1 MiB in all, from memfd\n"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!place.socket().exists() && !place.path("admin.sock").exists());
    // A broker that serves does not disturb the check of what its next start would do, nor the check the broker.
    let mut daemon = place.start();
    assert_eq!(checked(&daemon.place).0, Some(0));
    daemon.lives();
}

#[test]
fn a_check_by_defaults_says_that_there_is_no_configuration_file() {
    let place = Place::new("");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbrokerd"));
    command.args(["--check", "--pool", "16M", "--backend", "memfd"]);
    command.arg("--socket").arg(place.socket()).arg("--admin-socket").arg(place.path("admin.sock"));
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    // On a machine with the package there is one.
    let is_there = Path::new("/etc/kvbroker/kvbroker.toml").exists();
    assert_ne!(said.contains("there is no such file, so this is by defaults"), is_there, "{said}");
    // One that is named must be there.
    let mut command = place.command();
    std::fs::remove_file(place.path("kvbroker.toml")).unwrap();
    assert_eq!(command.arg("--check").status().unwrap().code(), Some(2));
    assert!(place.log().contains("kvbroker.toml"), "{}", place.log());
}

#[test]
fn a_check_refuses_what_this_machine_cannot_give() {
    let of = |pool: &str| CONFIG.replace("size = \"1M\"", pool);
    let socket = |line: &str| CONFIG.replace("mode = \"0666\"", line);
    for (config, words) in [
        (of("size = \"512T\""), "pool.size = 512T: this machine has "),
        (
            of("size = \"1M\"\nheap-directory = \"/nowhere\"\ndevice = \"contiguous\""),
            "no CMA heap was found there",
        ),
        (of("size = \"1M\"\nheap = \"/nowhere/cma\""), "pool.heap = /nowhere/cma: there is no such heap"),
        (
            of("size = \"1M\"\nbackend = \"dma-heap\"\nheap-directory = \"/nowhere\""),
            "pool.heap-directory = /nowhere",
        ),
        (socket("group = \"no-such-group\""), "socket.group = no-such-group: there is no such group"),
        (of("size = \"64K\""), "make the pool larger"),
        (
            format!("{CONFIG}\n[device]\nnode = \"/nowhere/vfio0\"\n"),
            "device.node = /nowhere/vfio0: there is no such",
        ),
        (
            format!("{CONFIG}\n[device]\nnode = \"/dev/null\"\niommu = \"/nowhere/iommu\"\n"),
            "device.iommu = /nowhere/iommu: there is no such",
        ),
    ] {
        let (code, said, log) = checked(&Place::new(&config));
        assert_eq!((code, said.as_str()), (Some(2), ""), "{config}: {log}");
        assert!(log.contains(words), "{config}: {log}");
        assert!(log.contains("kvbroker.toml: "), "{config}: {log}");
    }
    let place = Place::new(CONFIG);
    let status = elsewhere(&place, &place.path("none/a.sock")).arg("--check").status().unwrap();
    assert_eq!(status.code(), Some(2));
    assert!(place.log().contains("there is no directory"), "{}", place.log());
}

#[test]
fn a_start_refuses_what_contradicts_itself_as_a_check_does() {
    let place = Place::new(&CONFIG.replace("size = \"1M\"", "size = \"64K\""));
    let (code, log) = place.fails();
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("kvbroker.toml: pool.size = 64K: "), "{log}");
    assert!(!place.socket().exists());
}

#[test]
fn an_unknown_group_a_missing_directory_and_a_full_one_are_told_apart_and_nothing_is_left_behind() {
    let place = Place::new(&CONFIG.replace("mode = \"0666\"", "group = \"no-such-group\""));
    let (code, log) = place.fails();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("there is no group no-such-group"), "{log}");
    assert!(!place.socket().exists(), "a socket was left behind");

    let place = Place::new(CONFIG);
    let status = elsewhere(&place, &place.path("none/a.sock")).status().unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(place.log().contains("there is no directory"), "{}", place.log());

    // A directory of a file system that has room for its root alone, in a mount namespace of this start's own.
    let place = Place::new(CONFIG);
    let full = place.path("full");
    std::fs::create_dir(&full).unwrap();
    let mut command = elsewhere(&place, &full.join("a.sock"));
    mount_tmpfs(&mut command, &full, c"nr_inodes=1");
    let status = command.status().unwrap();
    assert_eq!(status.code(), Some(1), "{}", place.log());
    assert!(place.log().contains("no space is left in its directory"), "{}", place.log());
}

#[test]
fn the_reason_of_a_failed_start_is_said_even_when_the_log_is_off() {
    for (config, code, words) in [
        (CONFIG.replace("size = \"1M\"", "sizes = \"1M\""), 2, "did you mean `size`?"),
        (
            CONFIG.replace("size = \"1M\"", "size = \"1M\"\nheap = \"/nowhere/cma\""),
            1,
            "there is no such heap",
        ),
    ] {
        let place = Place::new(&config);
        let status = place.command().env("KVBROKER_LOG", "off").status().unwrap();
        assert_eq!(status.code(), Some(code));
        assert!(place.log().contains(words), "{}", place.log());
    }
}

/// Has the command's process have no file of more than `bytes`.
fn limit_files(command: &mut Command, bytes: u64) -> &mut Command {
    // SAFETY: setrlimit may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    }
}

#[test]
fn an_extent_that_may_be_no_file_is_refused_with_the_limit_and_ends_no_process_without_a_word() {
    let place = Place::new(CONFIG);
    for (check, code) in [(true, 2), (false, 1)] {
        let mut command = elsewhere(&place, &place.socket());
        if check {
            command.arg("--check");
        }
        let output = limit_files(command.stderr(Stdio::piped()), 100 << 10).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("102400 bytes (RLIMIT_FSIZE)") && said.contains("LimitFSIZE="), "{said}");
    }
}

#[test]
fn a_level_of_the_log_that_there_is_not_is_warned_of() {
    for (level, warned) in [("verbose", true), ("warn,", true), ("kvbroker=debug", false), ("", false)] {
        let place = Place::new(CONFIG);
        let mut command = elsewhere(&place, &place.socket());
        command.env("KVBROKER_LOG", level).arg("--check").stderr(Stdio::piped());
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert_eq!(said.contains(&format!("KVBROKER_LOG = \"{level}\" is no level")), warned, "{said}");
    }
}

#[test]
fn a_place_for_stored_prompts_that_cannot_be_made_is_warned_of_and_serves_all_the_same() {
    let place = Place::new(CONFIG);
    let path = place.path("mistyped/prefixes");
    let config = format!("{CONFIG}\n[prefix.store]\ndirectory = \"{}\"\n", path.display());
    std::fs::write(place.path("kvbroker.toml"), config).unwrap();
    let (code, _, log) = checked(&place);
    assert_eq!(code, Some(0), "{log}");
    assert!(
        log.contains("prefix.store.directory = ") && log.contains("neither saved nor brought back"),
        "{log}"
    );
    let mut daemon = place.start();
    daemon.lives();
    assert!(daemon.place.log().contains("neither saved nor brought back"), "{}", daemon.place.log());
}

#[test]
fn a_drop_in_of_an_odd_name_plays_no_tricks_on_the_terminal() {
    let place = Place::new(CONFIG);
    std::fs::create_dir(place.path("kvbroker.toml.d")).unwrap();
    let odd = place.path("kvbroker.toml.d").join("\u{1b}[2J\nall is well.toml");
    for wrong in ["nonsense", "[pool]\nsize = \"1K\"\n"] {
        std::fs::write(&odd, wrong).unwrap();
        let (code, _, said) = checked(&place);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("?[2J?all is well.toml") && !said.contains('\u{1b}'), "{said:?}");
    }
}

#[test]
fn a_socket_that_a_dead_broker_left_is_taken_over() {
    let mut daemon = Daemon::new();
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.place.socket().exists());
    let mut command = daemon.place.command();
    daemon.child = command.spawn().unwrap();
    until("the second broker serves", || daemon.try_admin("check").is_some());
    assert!(daemon.place.log().contains("taken over from a broker that has died"), "{}", daemon.place.log());
    assert_eq!(daemon.raw().hello().fault, None);
}

#[test]
fn a_heap_that_this_user_may_not_open_is_named_with_the_group_that_may() {
    use std::os::unix::fs::{PermissionsExt, chown};
    assert!(nix::unistd::getuid().is_root(), "run as root: sudo -E cargo test --test daemon");
    let place = Place::new("");
    let heap = place.path("heap");
    std::fs::write(&heap, "").unwrap();
    std::fs::set_permissions(&heap, std::fs::Permissions::from_mode(0o0)).unwrap();
    chown(place.dir.path(), Some(4001), Some(4001)).unwrap();
    let config = CONFIG.replace("size = \"1M\"", &format!("size = \"1M\"\nheap = \"{}\"", heap.display()));
    std::fs::write(place.path("kvbroker.toml"), config).unwrap();
    let mut command = place.command();
    let status = command.uid(4001).gid(4001).status().unwrap();
    assert_eq!(status.code(), Some(1), "{}", place.log());
    assert!(place.log().contains("group kvbroker"), "{}", place.log());
}

#[test]
fn sockets_that_systemd_hands_over_are_used_and_left_where_they_are() {
    let place = Place::new(CONFIG);
    let (client, admin) = (place.path("client.sock"), place.path("admin.sock"));
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(fd.as_raw_fd(), &UnixAddr::new(&client).unwrap()).unwrap();
    listen(&fd, Backlog::new(64).unwrap()).unwrap();
    let admin_fd: OwnedFd = UnixListener::bind(&admin).unwrap().into();
    // Somebody who came before the daemon is served when it is there.
    let mut early = Raw::connect(&client).unwrap();
    let (first, second) = (fd.as_raw_fd(), admin_fd.as_raw_fd());
    let mut daemon = place.start_with(|command| {
        // A shell in between knows the pid that the daemon will have.
        let log =
            std::fs::File::options().append(true).create(true).open(client.with_file_name("log")).unwrap();
        let mut shell = std::process::Command::new("/bin/sh");
        shell
            .arg("-c")
            .arg("LISTEN_PID=$$ exec \"$0\" \"$@\"")
            .arg(command.get_program())
            .args(command.get_args());
        shell
            .env("LISTEN_FDS", "2")
            .env("LISTEN_FDNAMES", "client:admin")
            .env("KVBROKER_LOG", "info")
            .stderr(log);
        // SAFETY: only what may be called after fork.
        unsafe {
            shell.pre_exec(move || {
                if libc::dup2(first, 63) < 0 || libc::dup2(second, 64) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                libc::dup2(63, 3);
                libc::dup2(64, 4);
                libc::close(63);
                libc::close(64);
                Ok(())
            });
        }
        *command = shell;
    });
    assert_eq!(early.hello().fault, None);
    assert!(!daemon.place.log().contains("handed over; only"), "{}", daemon.place.log());
    assert_eq!(daemon.signal(nix::sys::signal::Signal::SIGTERM).code(), Some(0));
    assert!(client.exists() && admin.exists());
}

#[test]
fn systemd_is_told_when_the_daemon_is_ready_what_it_has_and_that_it_lives() {
    let place = Place::new(CONFIG);
    let notify = UnixDatagram::bind(place.path("notify")).unwrap();
    notify.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let path = place.path("notify");
    let mut daemon = place.start_with(|command| {
        command.env("NOTIFY_SOCKET", path).env("WATCHDOG_USEC", "200000");
    });
    let mut all = String::new();
    until("ready, status and two signs of life", || {
        let mut buffer = [0; 4096];
        let got = notify.recv(&mut buffer).unwrap();
        all += std::str::from_utf8(&buffer[..got]).unwrap();
        all += "\n";
        all.matches("WATCHDOG=1").count() >= 2
    });
    assert!(all.contains("READY=1"), "{all}");
    assert!(all.contains("STATUS=8 extents of "), "{all}");
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    let mut buffer = [0; 4096];
    let stopping = std::iter::from_fn(|| notify.recv(&mut buffer).ok().map(|n| buffer[..n].to_vec()));
    assert!(stopping.take(50).any(|m| m.starts_with(b"STOPPING=1")));
}

#[test]
fn a_user_connects_only_where_the_sockets_mode_lets_him() {
    let daemon = Place::new(&CONFIG.replace("0666", "0600")).start();
    assert_eq!(daemon.raw().hello().fault, None);
    let status = std::process::Command::new("/bin/sh")
        .arg("-c")
        .arg("test -w \"$0\"")
        .arg(daemon.place.socket())
        .uid(4001)
        .gid(4001)
        .status()
        .unwrap();
    assert!(!status.success());
}

#[test]
fn a_start_that_could_serve_nobody_is_refused_with_what_to_raise_or_make_smaller() {
    let place = Place::new(CONFIG);
    let mut command = place.command();
    // 48 of the daemon's own, 8 extents, and one: a connection takes two.
    // SAFETY: setrlimit may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 57, rlim_max: 57 };
            match libc::setrlimit(libc::RLIMIT_NOFILE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
    let status = command.status().unwrap();
    assert_eq!(status.code(), Some(1), "{}", place.log());
    let said = place.log();
    for part in ["may open 57 files", "leaves none for connections", "raise LimitNOFILE", "extents larger"] {
        assert!(said.contains(part), "{said}");
    }
}
