//! The operators' socket: one line asks, one JSON document answers, and the connection ends. `metrics` is answered with
//! text, and after `events` the connection goes on with one line for each change.
//!
//! Owns the connections to it. Invariants: an operator that does not read holds up nobody, and there are never more than
//! a handful of them; a connection that asked for a hold is its lease: it stays open after its answer, and the hold ends
//! with it, however it ends. `echo status | socat - UNIX-CONNECT:/run/kvbroker/admin.sock` is enough to use it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};

use super::observe::{self, Answer};
use super::watch::Queue;
use crate::broker::{Borrower, Broker, HoldId, HoldProgress, LimitChange, PinReport, StoreRefusal};
use crate::id::Tenant;

/// Operators at one time, leases not counted.
pub(super) const MOST: usize = 16;
const LONGEST_REQUEST: usize = 256;
/// Bytes that the kernel keeps for a watcher: what it has not read is to wait where it is counted.
const KERNEL_QUEUE: usize = 32 << 10;

/// One of them.
#[derive(Debug)]
pub(super) struct Operator {
    stream: UnixStream,
    request: Vec<u8>,
    answer: Option<Vec<u8>>,
    sent: usize,
    /// A task of the broker's on stored prefixes, whose end is the answer.
    task: Option<u64>,
    /// After `events`: what it is still to be told.
    queue: Option<Queue>,
    lease: Option<HoldId>,
}

/// What is to be waited for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Read,
    Write,
    /// For the broker to be done.
    Broker,
    /// For changes; the kernel tells by itself when the operator has gone.
    Changes,
    /// The operator asks to watch: see [`Operator::watch`].
    Watch,
    /// For the operator's end, or for the broker.
    Lease,
    End,
}

impl Operator {
    pub fn new(fd: OwnedFd) -> Self {
        Operator {
            stream: fd.into(),
            request: Vec::new(),
            answer: None,
            sent: 0,
            task: None,
            queue: None,
            lease: None,
        }
    }

    /// Goes on as far as it goes.
    pub fn go_on(&mut self, broker: &mut Broker) -> Wait {
        if let Some(queue) = &mut self.queue {
            return match queue.flush(&mut self.stream) {
                Ok(true) if queue.is_open() => Wait::Changes,
                Ok(false) => Wait::Write,
                _ => Wait::End,
            };
        }
        if self.lease.is_some() && self.has_hung_up() {
            return Wait::End;
        }
        if self.answer.is_none() && self.lease.is_none() && self.task.is_none() {
            match self.read_line() {
                Ok(true) => {}
                Ok(false) => return Wait::Read,
                Err(_) => return Wait::End,
            }
            if self.line() == "events" {
                return Wait::Watch;
            }
            self.ask(broker);
        }
        if let Some(task) = self.task.filter(|_| self.answer.is_none()) {
            if self.has_gone() {
                return Wait::End;
            }
            match broker.stored(task) {
                Some(report) => self.answer_with(serde_json::to_value(report)),
                None if broker.is_storing(task) => return Wait::Broker,
                None => return Wait::End,
            }
        }
        if self.answer.is_none() {
            match self.lease.and_then(|hold| broker.hold_progress(hold)) {
                Some(HoldProgress::Waiting) => return Wait::Lease,
                Some(HoldProgress::InForce(report)) => {
                    self.answer_with(serde_json::to_value(report));
                }
                Some(HoldProgress::Refused(why)) => {
                    self.end_lease(broker);
                    self.answer_with(Ok(refusal(&why)));
                }
                None => return Wait::End,
            }
        }
        let all = self.answer.as_deref().unwrap_or_default();
        while self.sent < all.len() {
            match self.stream.write(&all[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Wait::Write,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Wait::End,
            }
        }
        if self.lease.is_some() { Wait::Lease } else { Wait::End }
    }

    /// Whether the connection is a lease, and so not one that may be ended for want of room.
    pub fn is_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Whether it waits for the broker and not for the operator.
    pub fn waits_for_broker(&self) -> bool {
        (self.lease.is_some() || self.task.is_some()) && self.answer.is_none()
    }

    /// The connection ends.
    pub fn end_lease(&mut self, broker: &mut Broker) {
        if let Some(hold) = self.lease.take() {
            broker.end_hold(hold);
        }
    }

    fn line(&self) -> String {
        String::from_utf8_lossy(&self.request).trim().to_owned()
    }

    fn ask(&mut self, broker: &mut Broker) {
        let line = self.line();
        if let Some(rest) = line.strip_prefix("hold ") {
            return match self.hold(broker, rest) {
                Ok(hold) => self.lease = Some(hold),
                Err(why) => self.answer_with(Ok(refusal(&why))),
            };
        }
        match line.as_str() {
            "save" => self.begin(broker.save_prefixes()),
            "load" => self.begin(broker.load_prefixes()),
            line => self.answer = Some(answer(broker, line).into_bytes()),
        }
    }

    /// `hold BYTES COMMAND`
    fn hold(&self, broker: &mut Broker, request: &str) -> Result<HoldId, String> {
        let (bytes, command) = request.split_once(' ').unwrap_or((request, ""));
        let wrong = || format!("hold {bytes}: say how many bytes, as a number, and then what runs with them");
        let bytes = bytes.parse().map_err(|_| wrong())?;
        let peer = getsockopt(&self.stream, sockopt::PeerCredentials).map_err(|e| e.to_string())?;
        // It is shown on terminals.
        let command = crate::quote::plain(command);
        let borrower = Borrower { uid: peer.uid(), pid: peer.pid(), command };
        broker.hold(bytes, borrower).map_err(|e| e.to_string())
    }

    fn answer_with(&mut self, json: serde_json::Result<serde_json::Value>) {
        self.answer = Some(line_of(json).into_bytes());
    }

    /// Whether the holder of a lease has gone, or has nothing more to say, which is the same. What he says is not read.
    fn has_hung_up(&mut self) -> bool {
        let mut some = [0; LONGEST_REQUEST];
        loop {
            match self.stream.read(&mut some) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return e.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }

    fn begin(&mut self, task: Result<u64, StoreRefusal>) {
        match task {
            Ok(task) => self.task = Some(task),
            Err(why) => self.answer_with(Ok(refusal(&why.to_string()))),
        }
    }

    /// Whether nobody is there any more to be answered: one who has only said all that he will say is.
    fn has_gone(&self) -> bool {
        let mut fd = [PollFd::new(self.stream.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut fd, PollTimeout::ZERO).is_ok() && fd[0].revents().is_some_and(|r| r.intersects(gone))
    }

    /// It watches from now on: `state` goes first.
    pub fn watch(&mut self, state: String) {
        // A larger one does no harm.
        let _ = setsockopt(&self.stream, sockopt::SndBuf, &KERNEL_QUEUE);
        self.queue = Some(Queue::new(state));
    }

    /// It is answered with why it is not, and that is all.
    pub fn refuse(&mut self, why: &str) {
        self.answer = Some(format!("{}\n", serde_json::json!({ "error": why })).into_bytes());
    }

    /// The queue of one that watches and has not been dropped.
    pub fn watching(&mut self) -> Option<&mut Queue> {
        self.queue.as_mut().filter(|q| q.is_open())
    }

    /// Whether it only waits for changes, or to read them: then a hang-up is the end.
    pub fn is_watcher(&self) -> bool {
        self.queue.is_some()
    }

    /// Whether it watches and has not been dropped.
    pub fn is_watching(&self) -> bool {
        self.queue.as_ref().is_some_and(Queue::is_open)
    }

    /// Whether the line is there.
    fn read_line(&mut self) -> io::Result<bool> {
        let mut some = [0; LONGEST_REQUEST];
        loop {
            match self.stream.read(&mut some) {
                Ok(0) if self.request.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(0) => return Ok(true),
                Ok(n) => self.request.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            }
            if let Some(end) = self.request.iter().position(|&b| b == b'\n') {
                self.request.truncate(end);
                return Ok(true);
            }
            if self.request.len() > LONGEST_REQUEST {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }
}

impl AsFd for Operator {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// With the newline at its end.
fn answer(broker: &mut Broker, request: &str) -> String {
    let json = match observe::answer(broker, request) {
        Some(Answer::Text(text)) => return text,
        Some(Answer::Json(json)) => json,
        None => plain_answer(broker, request),
    };
    line_of(json)
}

fn line_of(json: serde_json::Result<serde_json::Value>) -> String {
    format!("{}\n", json.unwrap_or_else(|e| refusal(&e.to_string())))
}

fn refusal(why: &str) -> serde_json::Value {
    serde_json::json!({ "error": why })
}

fn plain_answer(broker: &mut Broker, request: &str) -> serde_json::Result<serde_json::Value> {
    match request {
        "status" => serde_json::to_value(broker.status()),
        "sessions" => serde_json::to_value(broker.sessions()),
        "map" => serde_json::to_value(broker.map()),
        "check" => serde_json::to_value(Check::of(broker)),
        "limits" => serde_json::to_value(broker.limits()),
        "fsck" => serde_json::to_value(broker.fsck()),
        "fsck start" => serde_json::to_value(broker.begin_fsck()),
        other => match other.split_once(' ') {
            Some(("limits", change)) => match limit_change(change) {
                Ok(change) => serde_json::to_value(broker.change_limits(&change)),
                Err(why) => Ok(refusal(&why)),
            },
            Some(("unpin", which)) => serde_json::to_value(unpin(broker, which)),
            _ => Ok(refusal(&format!(
                "there is no request {other:?}: ask for status, sessions, map, check, limits, unpin, fsck, save, load, \
                 hold BYTES COMMAND, {}",
                observe::REQUESTS
            ))),
        },
    }
}

/// `uid=N [reserve=BYTES] [limit=BYTES|none] [priority=N] [revision=N]`
fn limit_change(text: &str) -> Result<LimitChange, String> {
    let mut uid = None;
    let tenant = Tenant(0);
    let mut change = LimitChange { tenant, reserve: None, limit: None, priority: None, revision: None };
    for word in text.split_whitespace() {
        let (key, value) = word.split_once('=').ok_or_else(|| format!("{word}: write key=value"))?;
        let number = || value.parse::<u64>().map_err(|e| format!("{key} = {value}: {e}"));
        match key {
            "uid" => uid = Some(value.parse().map_err(|e| format!("uid = {value}: {e}"))?),
            "reserve" => change.reserve = Some(number()?),
            "limit" if value == "none" => change.limit = Some(None),
            "limit" => change.limit = Some(Some(number()?)),
            "priority" => {
                change.priority = Some(value.parse().map_err(|e| format!("priority = {value}: {e}"))?);
            }
            "revision" => change.revision = Some(number()?),
            _ => return Err(format!("{key}: there are uid, reserve, limit, priority and revision")),
        }
    }
    change.tenant = Tenant(uid.ok_or("whose limits? uid is missing")?);
    Ok(change)
}

/// What was unpinned.
#[derive(serde::Serialize)]
struct Unpinned {
    unpinned: Vec<PinReport>,
}

/// Unpins the chains whose names begin with `which`, or all for `all`.
fn unpin(broker: &mut Broker, which: &str) -> Unpinned {
    let pins = broker.status().pins;
    let named = |p: &PinReport| which == "all" || (!which.is_empty() && p.chain.starts_with(which));
    let mut unpinned: Vec<PinReport> = pins.into_iter().filter(named).collect();
    unpinned.retain(|pin| broker.unpin_named(&pin.chain));
    Unpinned { unpinned }
}

#[derive(serde::Serialize)]
struct Check {
    ok: bool,
    problem: Option<String>,
}

impl Check {
    fn of(broker: &Broker) -> Self {
        let problem = broker.verify().err();
        Check { ok: problem.is_none(), problem }
    }
}
