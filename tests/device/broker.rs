//! The real `kvbrokerd` under its own user, and connections to it that do what no library would.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kvbroker::id::BlockId;
use kvbroker::profile::Profile;
use kvbroker::seqpacket::SeqPacket;
use kvbroker::wire::{self, Event, Fault, Reader, Verb, Writer};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::unistd::Pid;
use serde_json::Value;

use crate::daemon::{HeapRule, until};
use crate::support::{DAEMON, HEAP_GROUP};

/// The owners and modes that udev/60-kvbroker.rules gives the heaps, for as long as what is returned lives, and the
/// daemon's group for /dev/udmabuf, which a distribution gives to a group that the daemon is in.
#[must_use]
pub fn apply_udev_rules() -> HeapRule {
    chown("/dev/udmabuf", Some(0), Some(HEAP_GROUP)).expect("chown");
    fs::set_permissions("/dev/udmabuf", Permissions::from_mode(0o660)).expect("chmod");
    HeapRule::apply()
}

/// A directory with a configuration.
pub struct Place {
    dir: tempfile::TempDir,
    /// The nodes are root's again afterwards, as the kernel gives them: other tests look at that.
    _rule: HeapRule,
}

impl Place {
    /// `pool` is the table `[pool]` of the configuration.
    pub fn new(pool: &str) -> Self {
        let rule = apply_udev_rules();
        let dir = tempfile::tempdir().expect("directory");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("chmod");
        chown(dir.path(), Some(DAEMON.uid), Some(DAEMON.gid)).expect("chown");
        let config = format!("[pool]\n{pool}\n[socket]\nmode = \"0666\"\n");
        fs::write(dir.path().join("kvbroker.toml"), config).expect("configuration");
        Place { dir, _rule: rule }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("/bin/kvbrokerd");
        command.arg("--config").arg(self.path("kvbroker.toml"));
        command
            .arg("--socket")
            .arg(self.path("client.sock"))
            .arg("--admin-socket")
            .arg(self.path("admin.sock"));
        let log = File::options().create(true).append(true).open(self.path("log")).expect("log");
        command.env("KVBROKER_LOG", "info").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.uid(DAEMON.uid).gid(DAEMON.gid);
        command
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs a daemon that is to end by itself: its exit code, and what it said.
    pub fn fails(&self) -> (Option<i32>, String) {
        let status = self.command().status().expect("kvbrokerd");
        (status.code(), self.log())
    }

    pub fn start(self) -> Broker {
        self.start_with(|_| {})
    }

    pub fn start_with(self, prepare: impl FnOnce(&mut Command)) -> Broker {
        let mut command = self.command();
        prepare(&mut command);
        let child = command.spawn().expect("kvbrokerd");
        let mut broker = Broker { place: self, child };
        until("the broker serves", || {
            if let Some(status) = broker.child.try_wait().expect("wait") {
                panic!("the broker ended: {status}\n{}", broker.place.log());
            }
            broker.ask("check").is_some()
        });
        broker
    }
}

/// A running daemon.
pub struct Broker {
    pub place: Place,
    child: Child,
}

impl Broker {
    pub fn socket(&self) -> PathBuf {
        self.place.path("client.sock")
    }

    fn ask(&self, question: &str) -> Option<Value> {
        let mut stream = UnixStream::connect(self.place.path("admin.sock")).ok()?;
        writeln!(stream, "{question}").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    /// The daemon's status, after it has counted everything anew.
    pub fn status(&self) -> Value {
        let check = self.ask("check").unwrap_or_else(|| panic!("no answer\n{}", self.place.log()));
        assert_eq!(check["ok"], true, "{check}");
        self.ask("status").expect("status")
    }

    pub fn prefixes(&self) -> Value {
        self.ask("prefixes").expect("prefixes")
    }

    pub fn map(&self) -> Value {
        self.ask("map").expect("map")
    }

    /// Bytes of the ledger's account.
    pub fn account(&self, name: &str) -> u64 {
        self.status()["ledger"][name].as_u64().expect("an account")
    }

    /// What `kvbctl status` prints.
    pub fn kvbctl_status(&self) -> String {
        let mut command = Command::new("/bin/kvbctl");
        let output = command.arg("status").arg("--socket").arg(self.place.path("admin.sock")).output();
        String::from_utf8(output.expect("kvbctl").stdout).expect("text")
    }

    pub fn quarantined(&self) -> usize {
        self.status()["pool"]["quarantined"].as_array().expect("a list").len()
    }

    pub fn fds(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("fds").count()
    }

    /// Ends it as an operator would.
    pub fn stop(mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).expect("kill");
        let status = self.child.wait().expect("wait");
        assert!(status.success(), "{status}\n{}", self.place.log());
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the broker's log:\n{}", self.place.log());
        }
    }
}

/// A connection without the library.
pub struct Connection {
    socket: SeqPacket,
    number: u64,
    format: u32,
    /// Descriptors that came, by extent.
    pub extents: BTreeMap<u32, OwnedFd>,
    pub blocks: Vec<BlockId>,
    /// Extents that were asked back, with the deadline in milliseconds.
    pub asked_back: Vec<(u32, u32)>,
}

impl Connection {
    /// Connects, says hello as `label` and registers the reference profile.
    pub fn new(path: &Path, label: &str) -> Self {
        let fd =
            socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("socket");
        connect(fd.as_raw_fd(), &UnixAddr::new(path).expect("path")).expect("connect");
        let limit = nix::sys::time::TimeVal::new(60, 0);
        nix::sys::socket::setsockopt(&fd, nix::sys::socket::sockopt::ReceiveTimeout, &limit)
            .expect("timeout");
        let (extents, blocks, asked_back) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut c = Connection { socket: fd.into(), number: 0, format: 0, extents, blocks, asked_back };
        let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
        c.ask(Verb::Hello, |w| _ = w.put(&wire::Hello { magic, version, label: wire::label(label) }))
            .expect("hello");
        let (body, _) =
            c.ask(Verb::Profile, |w| wire::put_profile(w, &Profile::reference(), 0)).expect("profile");
        c.format = u32::from_le_bytes(body[..4].try_into().expect("four bytes"));
        c
    }

    fn ask(&mut self, verb: Verb, fill: impl FnOnce(&mut Writer)) -> Result<(Vec<u8>, Vec<OwnedFd>), Fault> {
        self.number += 1;
        let mut w = Writer::request(verb, self.number, 0);
        fill(&mut w);
        self.socket.send(&w.finish(), &[]).expect("send");
        loop {
            let mut buffer = vec![0; wire::MAX_MESSAGE];
            let got = self.socket.recv(&mut buffer).expect("an answer");
            let (header, body) = wire::split(&buffer[..got.bytes]).expect("a message");
            if header.sequence.get() == 0 {
                assert_eq!(header.opcode.get(), wire::EVENT | Event::GiveBack as u16);
                let event: &wire::GiveBack = Reader::new("event", body).one().expect("give back");
                self.asked_back.push((event.extent.get(), event.deadline_ms.get()));
                continue;
            }
            assert_eq!(header.sequence.get(), self.number);
            return match Fault::from_code(header.fault.get()) {
                Some(fault) => Err(fault),
                None => Ok((body.to_vec(), got.fds)),
            };
        }
    }

    /// Takes in the events that have come.
    pub fn take_in_events(&mut self) {
        let format = self.format.into();
        self.ask(Verb::Query, |w| _ = w.put(&wire::Query { format, reserved: 0.into() })).expect("query");
    }

    /// Takes `want` blocks, all or none. Returns them, and the extents whose descriptors came.
    pub fn reserve(&mut self, want: u32) -> Result<(Vec<BlockId>, Vec<u32>), Fault> {
        let reserve = wire::Reserve { format: self.format.into(), want: want.into() };
        let (body, fds) = self.ask(Verb::Reserve, |w| _ = w.put(&reserve))?;
        let mut r = Reader::new("grant", &body);
        let grant: wire::Grant = *r.one().expect("grant");
        let extents: &[wire::ExtentInfo] = r.many(grant.extents.get(), wire::MAX_FDS).expect("extents");
        let blocks: &[wire::GrantedBlock] = r.many(grant.blocks.get(), wire::MAX_BLOCKS).expect("blocks");
        assert_eq!(extents.len(), fds.len());
        let extents: Vec<u32> = extents.iter().map(|e| e.extent.get()).collect();
        let blocks: Vec<BlockId> = blocks.iter().map(|b| b.block.id()).collect();
        self.extents.extend(extents.iter().copied().zip(fds));
        self.blocks.extend(&blocks);
        Ok((blocks, extents))
    }

    /// Gives all blocks back.
    pub fn free(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        self.ask(Verb::Free, |w| {
            w.put(&wire::Free { count: (blocks.len() as u32).into(), reserved: 0.into() });
            w.put_blocks(blocks.iter().copied());
        })
        .expect("free");
    }

    /// Says that an extent is unmapped and closed, whether it is so or not.
    pub fn return_extent(&mut self, extent: u32) -> Result<(), Fault> {
        let back = wire::ReturnExtent { extent: extent.into(), reserved: 0.into() };
        self.ask(Verb::ReturnExtent, |w| _ = w.put(&back)).map(drop)
    }
}
