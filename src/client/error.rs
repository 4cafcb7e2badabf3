//! What can go wrong for a client, and whose fault it is.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::wire::Fault;

/// What happened at a socket that does not let this process in, and what to do about it.
fn not_reachable(path: &Path, source: &io::Error) -> String {
    let path = path.display();
    match (source.kind(), source.raw_os_error()) {
        // Nothing is known of the broker then.
        (_, Some(libc::EMFILE | libc::ENFILE)) => {
            format!("no socket for the broker at {path}: {source}{}", limit(source))
        }
        (io::ErrorKind::PermissionDenied, _) => format!(
            "no broker at {path}: {source}; this user may not connect: add it to the socket's group (kvbroker-clients as installed) and log in anew"
        ),
        (io::ErrorKind::TimedOut, _) => {
            format!("the broker at {path} hangs: {source}; look at its log, and whether it is stopped")
        }
        _ => format!(
            "no broker at {path}: {source}; start kvbrokerd, set KVBROKER_SOCKET, or set KVBROKER_BACKEND=embedded to run without one"
        ),
    }
}

/// Which limit of the process or the system an error of the kernel speaks of.
fn limit(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EMFILE) => {
            "; RLIMIT_NOFILE (ulimit -n) is what this process may have open: close files, or raise it"
        }
        Some(libc::ENFILE) => "; fs.file-max is what all processes may have open: raise the sysctl",
        Some(libc::ENOMEM) => {
            "; vm.max_map_count is how many mappings a process may have, RLIMIT_AS (ulimit -v) how many addresses: use fewer views, or raise what is reached"
        }
        _ => "",
    }
}

/// An error of the client library. After any of them the client and its sessions are as they were before the call,
/// unless the variant says otherwise.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody listens there.
    #[error("{}", not_reachable(path, source))]
    NotReachable {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The broker said no, and why.
    #[error("{}: {text}", fault.name())]
    Refused {
        /// Whose fault.
        fault: Fault,
        /// What was needed, in the unit that the text names; 0 if it says nothing.
        needed: u64,
        /// What there was.
        available: u64,
        /// The broker's words.
        text: String,
    },
    /// The connection is gone. What is held stays usable for reading and writing; it cannot grow.
    #[error(
        "lost: this connection to the broker is over ({0}); what is held can be used to the end, growing needs a new client"
    )]
    Lost(String),
    /// The broker did not answer in time. A late answer is taken in when it comes.
    #[error("the broker did not answer within {0:?}")]
    Timeout(Duration),
    /// The broker's answer is not what the protocol says. Nothing of it has been used, and the connection is over.
    #[error("the broker's answer makes no sense: {0}")]
    Protocol(String),
    /// What answers there is no broker of this kind.
    #[error(
        "what answers at {path} is no kvbroker of this version: {why}; look at what listens there, or set KVBROKER_SOCKET"
    )]
    Stranger {
        /// The socket.
        path: PathBuf,
        /// What is wrong with its answer.
        why: String,
    },
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The kernel would not map memory.
    #[error("mapping {what}: {source}{}", limit(source))]
    Map {
        /// What was to be mapped.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A view would need more mappings than a process may have.
    #[error(
        "a view of {needed} mappings does not fit: {used} of the {limit} that vm.max_map_count allows are in use; use a smaller capacity, more tokens per block, or raise the sysctl"
    )]
    TooManyMappings {
        /// Mappings that the view would need.
        needed: usize,
        /// Mappings in use or promised.
        used: usize,
        /// The limit.
        limit: usize,
    },
    /// This process is a fork of the one that made the client.
    #[error("this process was forked after the client was made: make a client of its own")]
    Forked,
    /// The embedded broker could not take its memory.
    #[error(transparent)]
    Heap(#[from] crate::heap::HeapError),
}

impl Error {
    /// The broker's verdict, if it is one.
    pub fn fault(&self) -> Option<Fault> {
        match self {
            Error::Refused { fault, .. } => Some(*fault),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(code: i32) -> String {
        let source = io::Error::from_raw_os_error(code);
        Error::NotReachable { path: "/run/x".into(), source }.to_string()
    }

    #[test]
    fn a_limit_of_this_process_is_named_and_not_called_a_missing_broker() {
        assert!(
            text(libc::ENOENT).starts_with("no broker at /run/x") && text(libc::ENOENT).contains("start")
        );
        assert!(text(libc::EACCES).contains("kvbroker-clients"));
        let full = text(libc::EMFILE);
        assert!(full.contains("RLIMIT_NOFILE") && !full.contains("no broker"), "{full}");
        let map =
            |code| Error::Map { what: "it".into(), source: io::Error::from_raw_os_error(code) }.to_string();
        assert!(map(libc::EMFILE).contains("RLIMIT_NOFILE"));
        assert!(map(libc::ENOMEM).contains("vm.max_map_count") && map(libc::ENOMEM).contains("RLIMIT_AS"));
        assert_eq!(map(libc::EINVAL), format!("mapping it: {}", io::Error::from_raw_os_error(libc::EINVAL)));
    }

    #[test]
    fn what_is_lost_is_called_as_its_code_and_not_as_a_session_that_was_ended() {
        let lost = Error::Lost("why".into()).to_string();
        assert!(lost.starts_with("lost: ") && lost.contains("why"), "{lost}");
    }
}
