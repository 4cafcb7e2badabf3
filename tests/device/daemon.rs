//! The real daemon on the machine's real heaps: `kvbrokerd` under its own user, configured by a file, asked by
//! `kvbctl`, used through the client library by processes of other users.
//!
//! Owns a daemon's directory, its process and the owners of the heap nodes while it lives. Invariant: when it is
//! gone, the machine is as it was.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvbroker::client::{Client, ClientOptions, Session};
use kvbroker::profile::{Kv, Profile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::{DAEMON, HEAP_GROUP, User};

/// For an emulated machine on a busy host; nothing is promised by it.
const PATIENCE: Duration = Duration::from_secs(150);

/// Waits until `what` is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// While it lives, the heaps belong to the daemon's group, as udev/60-kvbroker.rules has it.
pub struct HeapRule;

impl HeapRule {
    pub fn apply() -> Self {
        HeapRule::own(HEAP_GROUP, 0o660);
        HeapRule
    }

    fn own(group: u32, mode: u32) {
        for entry in fs::read_dir("/dev/dma_heap").expect("heaps") {
            let path = entry.expect("entry").path();
            chown(&path, Some(0), Some(group)).expect("chown");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
        }
    }
}

impl Drop for HeapRule {
    fn drop(&mut self) {
        HeapRule::own(0, 0o600);
    }
}

/// A configured daemon that does not run.
pub struct Place {
    directory: tempfile::TempDir,
    options: Vec<String>,
    vmsplice_forbidden: bool,
}

impl Place {
    /// With these lines in the table `[pool]` and after it. The socket is open to all: who may connect under systemd
    /// is what `service` tests.
    pub fn new(pool: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        chown(directory.path(), Some(DAEMON.uid), Some(DAEMON.gid)).expect("chown");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let text = format!("[socket]\nmode = \"0666\"\n[pool]\n{pool}\n");
        fs::write(directory.path().join("kvbroker.toml"), text).expect("the configuration");
        Place { directory, options: Vec::new(), vmsplice_forbidden: false }
    }

    /// With an option on the daemon's command line.
    pub fn option(mut self, option: &str) -> Self {
        self.options.push(option.into());
        self
    }

    /// Under a filter that answers EPERM to vmsplice, as a container's may.
    pub fn without_vmsplice(mut self) -> Self {
        self.vmsplice_forbidden = true;
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The socket for clients.
    pub fn socket(&self) -> PathBuf {
        self.path("client.sock")
    }

    /// What the daemon has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn spawn(&self) -> Child {
        let log = fs::File::options().create(true).append(true).open(self.path("log")).expect("log");
        let mut command = Command::new("kvbrokerd");
        command.arg("--config").arg(self.path("kvbroker.toml"));
        command.arg("--socket").arg(self.socket()).arg("--admin-socket").arg(self.path("admin.sock"));
        command.args(&self.options).env("KVBROKER_LOG", "info");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.uid(DAEMON.uid).gid(DAEMON.gid);
        if self.vmsplice_forbidden {
            // SAFETY: two system calls on a constant program, which may be made between fork and exec.
            unsafe { command.pre_exec(forbid_vmsplice) };
        }
        command.spawn().expect("kvbrokerd")
    }

    /// Runs a daemon that is to refuse; its exit code and its words.
    pub fn refuses(&self) -> (Option<i32>, String) {
        let status = self.spawn().wait().expect("wait");
        (status.code(), self.log())
    }

    /// Starts the daemon and waits until it serves.
    pub fn start(self) -> Broker {
        let child = self.spawn();
        let mut broker = Broker { place: self, child };
        until("the daemon serves", || {
            if let Some(status) = broker.child.try_wait().expect("wait") {
                panic!("the daemon ended: {status}\n{}", broker.place.log());
            }
            broker.kvbctl(&["check"]).is_ok()
        });
        broker
    }
}

/// From here on vmsplice fails with EPERM in this process and whatever it executes.
fn forbid_vmsplice() -> std::io::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // seccomp_data.nr is the first word.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_vmsplice as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the call, which copies it.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// A daemon that runs.
pub struct Broker {
    pub place: Place,
    child: Child,
}

impl Broker {
    /// On a CMA heap that the configuration does not name.
    pub fn on_cma(pool: &str) -> Self {
        Place::new(&format!("backend = \"dma-heap\"\n{pool}")).start()
    }

    /// What the operator's tool prints; its complaint if it fails.
    pub fn kvbctl(&self, words: &[&str]) -> Result<String, String> {
        let socket = self.place.path("admin.sock");
        let output = Command::new("kvbctl").args(words).arg("--socket").arg(socket).output().expect("kvbctl");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// `kvbctl status`, for people.
    pub fn status_text(&self) -> String {
        self.kvbctl(&["status"]).expect("status")
    }

    /// `kvbctl status --json`.
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.kvbctl(&["status", "--json"]).expect("status")).expect("JSON")
    }

    /// A number of the status' table `pool`.
    pub fn pool(&self, key: &str) -> u64 {
        let status = self.status();
        status["pool"][key].as_u64().unwrap_or_else(|| panic!("no number pool.{key} in {status}"))
    }

    /// Bytes in an account of the ledger.
    pub fn account(&self, name: &str) -> u64 {
        self.status()["ledger"][name].as_u64().expect("an account")
    }

    /// Every byte is counted anew, and it grants still.
    pub fn is_sound(&self) {
        self.kvbctl(&["check"]).expect("the books add up");
        assert_eq!(self.status()["frozen"], false);
    }

    /// Has the operator's tool lend memory while a command runs.
    pub fn hold(&self, size: &str, command: &[&str]) -> Child {
        let mut kvbctl = Command::new("kvbctl");
        kvbctl.args(["hold", size, "--socket"]).arg(self.place.path("admin.sock")).arg("--").args(command);
        kvbctl.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("kvbctl")
    }

    /// Open descriptors of the daemon.
    pub fn fds(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("fds").count()
    }

    /// Runs `work` as a client of that user, in a process of its own.
    pub fn client(&self, user: User, work: impl FnOnce(&Client)) {
        crate::support::as_user(user, || work(&self.connect()));
    }

    /// Connects this process, which becomes a client of its user.
    pub fn connect(&self) -> Client {
        let options = ClientOptions { timeout: PATIENCE, ..ClientOptions::default() };
        Client::connect_to(&self.place.socket(), options).expect("connect")
    }

    /// Blocks of the profile that the pool has, as a client is told.
    pub fn blocks(&self, user: User, profile: Profile, expected: u64) {
        self.client(user, |client| {
            let room = client.profile(&profile).expect("profile").room().expect("room");
            assert_eq!((room.capacity, room.free), (expected, expected), "blocks of {}", profile.name());
        });
    }

    /// Ends it as systemd would.
    pub fn stop(mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).expect("kill");
        let status = self.child.wait().expect("wait");
        assert!(status.success(), "{status}\n{}", self.place.log());
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Does nothing to a daemon that has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.place.log());
        }
    }
}

/// The layers of the reference profile whose rows tests write: the first, one in between, the last.
const LAYERS: [usize; 3] = [0, 11, 23];
/// Bytes of a row of the reference profile.
const ROW: usize = 512;

/// A row that only this writer has at this place: f16 values between 0.1 and 0.5, so that attention over it makes sense.
pub fn row(writer: u32, token: usize, layer: usize, kv: Kv) -> [u8; ROW] {
    let mut seed = u64::from(writer) << 40 ^ (token as u64) << 16 ^ (layer as u64) << 1 ^ kv as u64;
    let mut bytes = [0; ROW];
    for pair in bytes.chunks_exact_mut(2) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        pair.copy_from_slice(&(0x3000 | (seed >> 52) as u16 & 0x07ff).to_le_bytes());
    }
    bytes
}

/// Writes the KV of tokens of a session of the reference profile.
pub fn write_kv(session: &mut Session, tokens: std::ops::Range<usize>, writer: u32) {
    for token in tokens {
        for layer in LAYERS {
            for kv in [Kv::K, Kv::V] {
                session.write_row(token, layer, kv, &row(writer, token, layer, kv)).expect("write");
            }
        }
    }
}

/// Fails unless the session holds what [`write_kv`] wrote.
pub fn check_kv(session: &Session, tokens: std::ops::Range<usize>, writer: u32) {
    let mut read = [0; ROW];
    for token in tokens {
        for layer in LAYERS {
            for kv in [Kv::K, Kv::V] {
                session.read_row(token, layer, kv, &mut read).expect("read");
                let expected = row(writer, token, layer, kv);
                assert!(
                    read == expected,
                    "writer {writer}, token {token}, layer {layer}, {kv:?}: {:?} instead of {:?}",
                    &read[..8],
                    &expected[..8]
                );
            }
        }
    }
}
