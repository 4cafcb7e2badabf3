//! Who is in the broker's user namespace, and so has the uid that the kernel says and no others.
//!
//! Owns what this process's own map of uids looks like. Invariant: a peer is taken for one of this namespace only if its map
//! was seen to be this process's own, byte for byte, while the very process that connected was alive.
//!
//! **Why.** A tenant is a uid. Whoever has subordinate uids (subuid(5), newuidmap(1)) can have processes under each of them,
//! all in user namespaces of its own, and would be as many tenants as it has of these, each with the limits of one. To change
//! uids in the broker's own namespace takes a right (CAP_SETUID) that makes limits meaningless anyway.
//!
//! **How it is seen.** `/proc/PID/uid_map` may be read by everybody. It shows the namespace's uids as the reader's namespace
//! has them (user_namespaces(7)). A map that maps all uids to themselves, or as the broker's own parent does, can only be
//! written with CAP_SETUID in the namespace above: so whose map is equal is in our namespace, or in one that root made.
//!
//! **That it is the right process** the pidfd of the connection says (SO_PEERPIDFD, Linux 6.5): its process is still there
//! after the map was read, so its pid was its own all the while. And it must have the uid that connected, or be root, who may
//! be anybody: a process can connect under credentials that another one has lent it (io_uring's personalities), and then the
//! kernel says the one's uid and the other's pid. Whoever gives up the uid between its connect and this look is refused.
//! Older kernels know the pid only; there all is read through one open `/proc/PID`, which stays with its process. What is
//! left of a race: who connects, hands the socket on and ends, and whose pid then becomes that of a process in this
//! namespace under the same uid, before the broker looks. (`pidfd_open` would be as late as that directory is.) A subordinate
//! uid has no such processes unless root starts some.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use thiserror::Error;

/// A map has at most 340 lines (user_namespaces(7)) of three numbers; the status of a process is shorter.
const MOST_BYTES: u64 = 64 << 10;

/// Why somebody is not served under this uid.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub(super) enum Stranger {
    #[error(
        "uid {0} connects from another user namespace than the broker's, where one user can have many uids; name it in the configuration ([[tenant]], uid = {0}) if it is to be a tenant"
    )]
    Elsewhere(u32),
    #[error(
        "the process that connected as uid {0} has ended before it was seen in which user namespace it was; keep it until it is answered, or name the uid in the configuration ([[tenant]], uid = {0})"
    )]
    Ended(u32),
    #[error(
        "the user namespace of the process that connected as uid {uid} cannot be seen ({why}); let the broker see /proc (ProtectProc=default, no hidepid, the same pid namespace), or name the uid in the configuration ([[tenant]], uid = {uid})"
    )]
    Hidden { uid: u32, why: io::Error },
}

/// See the module.
#[derive(Debug)]
pub(super) struct Namespace {
    /// This process's own map; `None` on a kernel without user namespaces.
    own: io::Result<Option<Vec<u8>>>,
}

impl Namespace {
    /// Looks at this process. That its map cannot be read is no reason not to start: whoever is named is served.
    pub fn of_this_process() -> Self {
        let own = File::open("/proc/self").and_then(|own| match read_in(&own, "uid_map") {
            Ok(map) => Ok(Some(map)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        });
        Namespace { own }
    }

    /// Whether the process that connected is of this namespace. `pidfd` is the connection's, where the kernel has it.
    pub fn admits(&self, uid: u32, pid: i32, pidfd: Option<BorrowedFd<'_>>) -> Result<(), Stranger> {
        let hidden = |why| Stranger::Hidden { uid, why };
        let own = match &self.own {
            Ok(Some(own)) => own,
            Ok(None) => return Ok(()),
            Err(e) => return Err(hidden(io::Error::new(e.kind(), e.to_string()))),
        };
        let map = map_of(uid, pid, pidfd.is_some());
        if pidfd.is_some_and(has_ended) {
            return Err(Stranger::Ended(uid));
        }
        match map {
            Ok(map) if map == *own => Ok(()),
            Ok(_) => Err(Stranger::Elsewhere(uid)),
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => Err(Stranger::Elsewhere(uid)),
            // Only where there is no pidfd to tell it from what is hidden.
            Err(e) if pidfd.is_none() && is_gone(&e) => Err(Stranger::Ended(uid)),
            Err(e) => Err(hidden(e)),
        }
    }
}

/// The map of a process, if it has this uid and is still there after the map was read. Where it is `known` to be the one that
/// connected it may be root instead, and who is neither gives EPERM; else who has not the uid is another one by now: ESRCH.
fn map_of(uid: u32, pid: i32, known: bool) -> io::Result<Vec<u8>> {
    let directory = File::open(format!("/proc/{pid}"))?;
    let map = read_in(&directory, "uid_map")?;
    let has = uids(&read_in(&directory, "status")?);
    match has.contains(&uid) || (known && has.contains(&0)) {
        true => Ok(map),
        false if known => Err(Errno::EPERM.into()),
        false => Err(Errno::ESRCH.into()),
    }
}

/// The uids in the status of a process: real, effective, saved, of the file system.
fn uids(status: &[u8]) -> Vec<u32> {
    let text = String::from_utf8_lossy(status);
    let line = text.lines().find_map(|l| l.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|uid| uid.parse().ok()).collect()
}

fn is_gone(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
}

/// Whether the process of a pidfd has ended. What cannot be asked counts as ended.
fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut asked = [PollFd::new(pidfd, PollFlags::POLLIN)];
    !matches!(poll(&mut asked, PollTimeout::ZERO), Ok(0))
}

fn read_in(directory: &File, name: &str) -> io::Result<Vec<u8>> {
    let file = openat(directory.as_fd(), name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    File::from(file).take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    use super::*;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socketpair, sockopt};

    /// A pidfd of this process, where the kernel has them.
    fn own_pidfd() -> Option<OwnedFd> {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (one, _other) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        getsockopt(&one, sockopt::PeerPidfd).ok()
    }

    #[test]
    fn this_process_is_of_its_own_namespace_with_a_pidfd_and_without() {
        let (namespace, own) = (Namespace::of_this_process(), nix::unistd::getuid().as_raw());
        let pid = std::process::id() as i32;
        namespace.admits(own, pid, None).unwrap();
        if let Some(pidfd) = own_pidfd() {
            namespace.admits(own, pid, Some(pidfd.as_fd())).unwrap();
        }
    }

    #[test]
    fn without_a_pidfd_a_pid_that_another_user_has_by_now_is_one_that_has_ended() {
        let namespace = Namespace::of_this_process();
        let other = nix::unistd::getuid().as_raw() + 1;
        let refused = namespace.admits(other, std::process::id() as i32, None).unwrap_err();
        assert!(matches!(refused, Stranger::Ended(uid) if uid == other), "{refused}");
    }

    #[test]
    fn a_process_with_another_uid_than_the_one_that_connected_was_lent_it_unless_it_is_root() {
        use std::os::unix::process::CommandExt;
        if !nix::unistd::getuid().is_root() {
            return;
        }
        let child = |uid| {
            let mut child =
                Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).uid(uid).spawn().unwrap();
            let pid = child.id() as i32;
            let seen = [4001, 4002].map(|uid| map_of(uid, pid, true).map_err(|e| e.raw_os_error()));
            drop(child.stdin.take());
            child.wait().unwrap();
            seen
        };
        let [own, lent] = child(4001);
        assert_eq!((own.is_ok(), lent), (true, Err(Some(libc::EPERM))));
        assert!(child(0).iter().all(Result::is_ok));
    }

    #[test]
    fn a_process_that_has_ended_is_of_no_namespace() {
        let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let own = nix::unistd::getuid().as_raw();
        let refused = Namespace::of_this_process().admits(own, pid, None).unwrap_err();
        assert!(matches!(refused, Stranger::Ended(_)), "{refused}");
    }

    #[test]
    fn a_process_that_lives_and_cannot_be_looked_at_is_said_to_be_hidden() {
        let Some(pidfd) = own_pidfd() else { return };
        // As from a pid namespace that does not have it: the kernel says 0.
        let refused = Namespace::of_this_process().admits(7, 0, Some(pidfd.as_fd())).unwrap_err();
        assert!(matches!(refused, Stranger::Hidden { .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("uid = 7") && text.contains("ProtectProc"), "{text}");
    }
}
