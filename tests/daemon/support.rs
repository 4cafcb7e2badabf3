//! A daemon in a directory of its own, processes that are its clients, and raw sockets for what no library would send.

use std::ffi::{CStr, CString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kvbroker::profile::Profile;
use kvbroker::seqpacket::SeqPacket;
use kvbroker::wire::{self, Fault, Verb, Writer};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::unistd::Pid;

/// Bytes of a block, of an extent (4 blocks), and of the pool (8 extents).
pub const BLOCK: u64 = 32 << 10;
pub const EXTENT: u64 = 128 << 10;
pub const POOL: u64 = 1 << 20;
pub const PER_BLOCK: usize = 16;
pub const ROW: usize = 512;

/// Two layers of 512-byte rows, 16 tokens per block.
pub fn profile() -> Profile {
    Profile::uniform("small", "f16", 2, ROW as u32, ROW as u32, PER_BLOCK as u32).unwrap()
}

pub const CONFIG: &str = r#"
[pool]
size = "1M"
extent = "128K"
[socket]
mode = "0666"
[[profile]]
name = "small"
layers = 2
kv-heads = 2
head-dim = 128
"#;

/// Waits until `what` is so; the patience is for slow machines, not a promise.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Has the command's process find a fresh tmpfs at `path`, in a mount namespace of its own. `options` are tmpfs(5)'s.
pub fn mount_tmpfs(command: &mut Command, path: &Path, options: &'static CStr) {
    let mounted = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: unshare and mount may be called between fork and exec; all strings were made before.
    unsafe {
        command.pre_exec(move || {
            let (tmpfs, private) = (c"tmpfs".as_ptr(), libc::MS_REC | libc::MS_PRIVATE);
            let none = std::ptr::null();
            let done = libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), none, private, none.cast()) == 0
                && libc::mount(tmpfs, mounted.as_ptr(), tmpfs, 0, options.as_ptr().cast()) == 0;
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
}

/// A directory with a configuration, before there is a daemon.
pub struct Place {
    pub dir: tempfile::TempDir,
}

impl Place {
    pub fn new(config: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(dir.path().join("kvbroker.toml"), config).unwrap();
        Place { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("client.sock")
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbrokerd"));
        command.arg("--config").arg(self.path("kvbroker.toml"));
        command.arg("--socket").arg(self.socket()).arg("--admin-socket").arg(self.path("admin.sock"));
        command.env("KVBROKER_LOG", "info").stdin(Stdio::null()).stdout(Stdio::null());
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        command.stderr(log);
        command
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs a daemon that is to end by itself.
    pub fn fails(&self) -> (Option<i32>, String) {
        let status = self.command().status().unwrap();
        (status.code(), self.log())
    }

    pub fn start(self) -> Daemon {
        self.start_with(|_| {})
    }

    pub fn start_with(self, prepare: impl FnOnce(&mut Command)) -> Daemon {
        let mut command = self.command();
        prepare(&mut command);
        let child = command.spawn().unwrap();
        let mut daemon = Daemon { place: self, child };
        until("the daemon serves", || {
            if let Some(status) = daemon.child.try_wait().unwrap() {
                panic!("the daemon ended: {status}\n{}", daemon.place.log());
            }
            daemon.try_admin("check").is_some()
        });
        daemon
    }
}

pub struct Daemon {
    pub place: Place,
    pub child: Child,
}

impl Daemon {
    pub fn new() -> Self {
        Place::new(CONFIG).start()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn try_admin(&self, request: &str) -> Option<serde_json::Value> {
        let mut stream = UnixStream::connect(self.place.path("admin.sock")).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        writeln!(stream, "{request}").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    pub fn admin(&self, request: &str) -> serde_json::Value {
        self.try_admin(request).unwrap_or_else(|| panic!("no answer\n{}", self.place.log()))
    }

    /// The ledger, after everything has been counted anew.
    pub fn ledger(&self) -> serde_json::Value {
        let check = self.admin("check");
        assert_eq!(check["ok"], true, "{check}");
        self.admin("status")["ledger"].clone()
    }

    pub fn account(&self, name: &str) -> u64 {
        self.ledger()[name].as_u64().unwrap()
    }

    pub fn clients(&self) -> u64 {
        self.admin("status")["clients"].as_u64().unwrap()
    }

    pub fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// Time on a CPU, in clock ticks (10 ms).
    pub fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    pub fn status_line(&self, key: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(key)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    pub fn signal(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.pid() as i32), signal).unwrap();
        self.child.wait().unwrap()
    }

    pub fn lives(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "the daemon ended: {ended:?}\n{}", self.place.log());
        assert_eq!(self.admin("check")["ok"], true);
        assert_eq!(self.admin("status")["frozen"], false);
    }

    pub fn raw(&self) -> Raw {
        Raw::connect(&self.place.socket()).unwrap()
    }

    /// A client process under `uid`.
    pub fn helper(&self, uid: u32) -> Helper {
        Helper::start(&self.place.socket(), uid, &[])
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection without the library.
pub struct Raw {
    pub socket: SeqPacket,
    pub number: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub number: u64,
    pub fault: Option<Fault>,
    pub body: Vec<u8>,
    pub fds: usize,
}

impl Raw {
    pub fn connect(path: &Path) -> nix::Result<Self> {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        let limit = nix::sys::time::TimeVal::new(20, 0);
        nix::sys::socket::setsockopt(&fd, nix::sys::socket::sockopt::ReceiveTimeout, &limit)?;
        Ok(Raw { socket: fd.into(), number: 0 })
    }

    pub fn hello(&mut self) -> Reply {
        self.try_hello().expect("a welcome")
    }

    /// `None` when the daemon has hung up.
    pub fn try_hello(&mut self) -> Option<Reply> {
        let hello = wire::Hello {
            magic: wire::MAGIC.into(),
            version: wire::VERSION.into(),
            label: wire::label("raw"),
        };
        self.ask(Verb::Hello, 0, |w| _ = w.put(&hello))
    }

    /// Says hello and registers the profile, whose number it returns.
    pub fn greet(&mut self) -> u32 {
        assert_eq!(self.hello().fault, None);
        let reply = self.ask(Verb::Profile, 0, |w| wire::put_profile(w, &profile(), 0)).unwrap();
        u32::from_le_bytes(reply.body[..4].try_into().unwrap())
    }

    pub fn send(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> std::io::Result<()> {
        self.number += 1;
        let mut w = Writer::request(verb, self.number, session);
        fill(&mut w);
        self.socket.send(&w.finish(), &[])
    }

    /// `None` when the daemon has hung up.
    pub fn receive(&mut self) -> Option<Reply> {
        let mut buffer = vec![0; wire::MAX_MESSAGE];
        let got = match self.socket.recv(&mut buffer) {
            Ok(got) if got.bytes > 0 => got,
            Ok(_) => return None,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer in 20 s"),
            Err(_) => return None,
        };
        let (header, body) = wire::split(&buffer[..got.bytes]).unwrap();
        let fault = header.fault.get();
        Some(Reply {
            number: header.sequence.get(),
            fault: (fault != 0).then(|| Fault::from_code(fault).unwrap()),
            body: body.to_vec(),
            fds: got.fds.len(),
        })
    }

    pub fn ask(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> Option<Reply> {
        self.send(verb, session, fill).ok()?;
        self.receive()
    }

    pub fn reserve(&mut self, format: u32, want: u32) -> Option<Reply> {
        self.ask(Verb::Reserve, 0, |w| _ = w.put(&wire::Reserve { format: format.into(), want: want.into() }))
    }
}

/// A client process: this test binary once more, in a role (see `roles.rs`).
pub struct Helper {
    pub child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

/// What names the socket to a helper process.
pub const ROLE: &str = "KVBROKER_TEST_ROLE";

impl Helper {
    pub fn start(socket: &Path, uid: u32, limits: &[(libc::__rlimit_resource_t, u64)]) -> Self {
        if uid != nix::unistd::getuid().as_raw() {
            assert!(
                nix::unistd::getuid().is_root(),
                "these tests need clients of several users and so run as root: sudo -E cargo test --test daemon"
            );
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "roles::a_client_process_does_what_it_is_told",
            "--nocapture",
            "--test-threads=1",
        ]);
        command.env(ROLE, socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.uid(uid).gid(uid);
        let limits = limits.to_vec();
        // SAFETY: setrlimit may be called between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for (resource, value) in &limits {
                    let limit = libc::rlimit { rlim_cur: *value, rlim_max: *value };
                    if libc::setrlimit(*resource, &limit) != 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut helper = Helper { child, stdin, stdout };
        assert_eq!(helper.answer(), "ready");
        helper
    }

    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            if self.stdout.read_line(&mut line).unwrap_or(0) == 0 {
                return "ended".into();
            }
            // The test harness writes on the same line before it.
            if let Some((_, answer)) = line.split_once("> ") {
                return answer.trim_end().into();
            }
        }
    }

    /// One order, one answer.
    pub fn say(&mut self, order: &str) -> String {
        if writeln!(self.stdin, "{order}").is_err() {
            return "ended".into();
        }
        self.answer()
    }

    pub fn must(&mut self, order: &str) {
        let answer = self.say(order);
        assert_eq!(answer, "ok", "{order}");
    }

    /// The answer to an [`order`](Self::order).
    pub fn answered(&mut self) -> String {
        self.answer()
    }

    pub fn order(&mut self, order: &str) {
        writeln!(self.stdin, "{order}").unwrap();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A process that has connected from a user namespace of its own, as one of a user's subordinate uids, and waits for its end.
pub struct Subordinate {
    pid: Pid,
    pub raw: Raw,
}

impl Subordinate {
    /// What an ordinary user does with newuidmap(1): user 4001 with the subordinate uids 100000 to 100999, of which the
    /// process takes the one that is `inside` there (0 is the user itself, 1 is 100000).
    pub fn connect(path: &Path, inside: u32) -> Self {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let limit = nix::sys::time::TimeVal::new(20, 0);
        nix::sys::socket::setsockopt(&fd, nix::sys::socket::sockopt::ReceiveTimeout, &limit).unwrap();
        let address = UnixAddr::new(path).unwrap();
        let [(mapped, map), (done, told)] = [(); 2].map(|()| nix::unistd::pipe().unwrap());
        let wait = |fd: i32| {
            let mut byte = 0_u8;
            // SAFETY: the byte is this frame's, and read may be called after fork.
            (unsafe { libc::read(fd, (&raw mut byte).cast(), 1) } == 1).then_some(())
        };
        // SAFETY: the child makes nothing but system calls, all of which may be called after fork, and ends by _exit.
        let child = unsafe { nix::unistd::fork() }.unwrap();
        let nix::unistd::ForkResult::Parent { child: pid } = child else {
            // SAFETY: as above; the path and the byte outlive the calls.
            unsafe {
                let done = libc::setgroups(0, std::ptr::null()) == 0
                    && libc::setresgid(4001, 4001, 4001) == 0
                    && libc::setresuid(4001, 4001, 4001) == 0
                    && libc::unshare(libc::CLONE_NEWUSER) == 0
                    && libc::write(told.as_raw_fd(), [1_u8].as_ptr().cast(), 1) == 1
                    && wait(mapped.as_raw_fd()).is_some()
                    && libc::setresuid(inside, inside, inside) == 0
                    && connect(fd.as_raw_fd(), &address).is_ok()
                    && libc::write(told.as_raw_fd(), [2_u8].as_ptr().cast(), 1) == 1;
                if done {
                    libc::pause();
                }
                libc::_exit(i32::from(!done));
            }
        };
        drop(told);
        wait(done.as_raw_fd()).expect("user namespaces are allowed here (kernel.unprivileged_userns_clone)");
        for kind in ["uid_map", "gid_map"] {
            std::fs::write(format!("/proc/{pid}/{kind}"), "0 4001 1\n1 100000 1000\n").unwrap();
        }
        nix::unistd::write(&map, &[1]).unwrap();
        wait(done.as_raw_fd()).expect("it connects");
        Subordinate { pid, raw: Raw { socket: fd.into(), number: 0 } }
    }

    /// Its process ends; the connection is open still.
    pub fn end(&self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(self.pid, None);
    }
}

impl Drop for Subordinate {
    fn drop(&mut self) {
        self.end();
    }
}

pub fn open_null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}
