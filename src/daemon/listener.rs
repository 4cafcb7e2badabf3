//! Sockets that listen: handed over by systemd, or bound here.
//!
//! Owns the listening sockets, and the paths of those that it has bound. Invariants: a path never has wider rights than
//! configured, not even for a moment; a path that a live broker listens on is left alone; a socket that was bound here
//! is removed at the end, one of systemd's is not.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, listen, socket,
};
use nix::sys::stat::{Mode, umask};
use thiserror::Error;

use super::check::directory_of;
use crate::seldom::seldom;

/// How often a socket that is in the way is tried before a broker is believed to live behind it.
const PROBES: u32 = 10;
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// Why nobody can connect.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ListenError {
    #[error("{0}: a broker is listening there already; stop it, or use another path")]
    InUse(PathBuf),
    #[error("{path}: {call}: {source}")]
    Call { path: PathBuf, call: &'static str, source: io::Error },
    #[error("{path}: there is no directory {directory}; make it, or let systemd-tmpfiles --create make it")]
    NoDirectory { path: PathBuf, directory: PathBuf },
    #[error("{path}: no space is left in its directory for a socket; make room there (df -i, df)")]
    NoSpace { path: PathBuf },
    #[error("{path}: there is no group {group}; make it (groupadd --system {group}), or change socket.group")]
    NoGroup { path: PathBuf, group: String },
    #[error("{0}: something that is no socket is in the way")]
    NoSocket(PathBuf),
}

/// One of them.
#[derive(Debug)]
pub(super) struct Listener {
    fd: OwnedFd,
    /// The path, and which file it was when it was bound: what somebody else has put there since is not removed.
    bound: Option<(PathBuf, (u64, u64))>,
    /// Held so that there is one descriptor to accept with, and to hang up on, when there are no others.
    reserve: Option<std::fs::File>,
}

impl Listener {
    /// A socket that systemd has handed over.
    pub fn inherited(fd: OwnedFd) -> io::Result<Self> {
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(Listener { fd, bound: None, reserve: reserve() })
    }

    /// Binds `path`, takes it over from a broker that has died, and leaves it alone if one lives.
    pub fn bind(path: &Path, kind: SockType, mode: u32, group: Option<&str>) -> Result<Self, ListenError> {
        let call = |call| move |e: Errno| ListenError::Call { path: path.into(), call, source: e.into() };
        let address = UnixAddr::new(path).map_err(call("this is no path for a socket"))?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, kind, flags, None).map_err(call("socket"))?;
        // Two that start at once take turns from here until one of them listens.
        let _turn = turn(path)?;
        clear_the_way(path, kind, &address)?;
        let missing = |name: &str| ListenError::NoGroup { path: path.into(), group: name.into() };
        let group = match group {
            Some(name) => {
                let found = nix::unistd::Group::from_name(name).map_err(call("group"))?;
                Some(found.ok_or_else(|| missing(name))?.gid.as_raw())
            }
            None => None,
        };
        // Nobody but this user, from the first moment; then what is configured.
        let before = umask(Mode::from_bits_truncate(0o177));
        let bound = bind(fd.as_raw_fd(), &address);
        umask(before);
        bound.map_err(|e| match e {
            Errno::ENOSPC | Errno::EDQUOT => ListenError::NoSpace { path: path.into() },
            e => call("bind")(e),
        })?;
        let identity = identity(path).ok_or_else(|| ListenError::InUse(path.into()))?;
        // From here on the socket is removed again if anything fails.
        let listener = Listener { fd, bound: Some((path.into(), identity)), reserve: reserve() };
        let io = |call| move |source| ListenError::Call { path: path.into(), call, source };
        if group.is_some() {
            chown(path, None, group).map_err(io("chown"))?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(io("chmod"))?;
        listen(&listener.fd, Backlog::MAXCONN).map_err(call("listen"))?;
        Ok(listener)
    }

    /// The next one who wants to talk; `None` when there is nobody, or nobody more in this turn. At the limit of open
    /// files the caller is hung up on at once, so that the loop does not spin on him; one in a turn, so that a flood of
    /// callers does not keep the loop from those who are connected.
    pub fn accept(&mut self) -> io::Result<Option<OwnedFd>> {
        loop {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            match accept4(&self.fd, flags) {
                Ok(fd) => return Ok(Some(fd)),
                Err(Errno::EAGAIN) => return Ok(None),
                Err(Errno::EINTR | Errno::ECONNABORTED) => continue,
                Err(e @ (Errno::EMFILE | Errno::ENFILE)) => {
                    if self.reserve.take().is_none() {
                        self.reserve = reserve();
                        return Err(e.into());
                    }
                    let hung_up = accept4(&self.fd, flags).is_ok();
                    self.reserve = reserve();
                    if !hung_up {
                        return Err(e.into());
                    }
                    seldom!(
                        warn,
                        "a connection was refused: the daemon may open no more files (LimitNOFILE)"
                    );
                    return Ok(None);
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Which file a path leads to.
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// A lock on the socket's directory, held until it is dropped.
fn turn(path: &Path) -> Result<Flock<std::fs::File>, ListenError> {
    let directory = directory_of(path);
    let call = |call| move |source| ListenError::Call { path: path.into(), call, source };
    let opened = std::fs::File::open(directory).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            ListenError::NoDirectory { path: path.into(), directory: directory.into() }
        }
        _ => call("opening its directory")(source),
    })?;
    Flock::lock(opened, FlockArg::LockExclusive).map_err(|(_, e)| call("locking its directory")(e.into()))
}

fn reserve() -> Option<std::fs::File> {
    std::fs::File::open("/dev/null").ok()
}

fn clear_the_way(path: &Path, kind: SockType, address: &UnixAddr) -> Result<(), ListenError> {
    use std::os::unix::fs::FileTypeExt;
    let Ok(meta) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.file_type().is_socket() {
        return Err(ListenError::NoSocket(path.into()));
    }
    let call = |call| move |e: Errno| ListenError::Call { path: path.into(), call, source: e.into() };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    for _ in 0..PROBES {
        let probe = socket(AddressFamily::Unix, kind, flags, None).map_err(call("socket"))?;
        if connect(probe.as_raw_fd(), address) == Err(Errno::ECONNREFUSED) {
            log::info!("{}: taken over from a broker that has died", path.display());
            let unlink = |source| ListenError::Call { path: path.into(), call: "unlink", source };
            return std::fs::remove_file(path).map_err(unlink);
        }
        // A broker that was killed a moment ago may still be on its way out.
        std::thread::sleep(PROBE_EVERY);
    }
    Err(ListenError::InUse(path.into()))
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, bound)) = &self.bound {
            if identity(path) != Some(*bound) {
                return;
            }
            if let Err(e) = std::fs::remove_file(path) {
                log::warn!("{}: {e}", path.display());
            }
        }
    }
}
