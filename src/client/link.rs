//! The way to the broker: a socket, or a broker in this very process.
//!
//! Owns the connection and the numbering of requests. Invariants: every reply is matched to its request by number; a
//! reply that comes after its caller has given up, or that answers a request nobody waits for, is kept and handed to
//! the client with the next call, so no grant is ever lost; after the connection has failed once, everything fails; what
//! the broker says passes the gate ([`super::trust`]) before anybody hears of it, and what is put aside is bounded. The tests
//! at the end speak for the broker.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::SockType;

use super::trust::{self, Gate};
use super::{Error, Granted};
use crate::broker::{Broker, Peer};
use crate::heap::Heap;
use crate::id::ClientId;
use crate::seqpacket::{self, Received, SeqPacket};
use crate::wire::{self, Event, Fault, Header, MAX_MESSAGE, Reader, Verb, Writer};

/// Messages that may be aside at a time, and their bytes.
const MOST_ASIDE: (usize, usize) = (1 << 16, 16 << 20);

/// A message from the broker, with what came with it.
#[derive(Debug)]
pub(super) struct Message {
    pub opcode: u16,
    pub fault: u16,
    pub sequence: u64,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// Descriptors were sent that this process has no room for; `fds` is empty.
    pub fds_lost: bool,
    /// What it hands over, once the client has taken that in.
    pub grant: Option<Result<Granted, Error>>,
}

impl Message {
    fn parse(bytes: &[u8], fds: Vec<OwnedFd>, fds_lost: bool) -> Result<Self, Error> {
        let (header, body) = wire::split(bytes).map_err(|e| Error::Protocol(e.to_string()))?;
        let Header { opcode, fault, sequence, .. } = *header;
        let (opcode, fault) = (opcode.get(), fault.get());
        let (sequence, body) = (sequence.get(), body.to_vec());
        Ok(Message { opcode, fault, sequence, body, fds, fds_lost, grant: None })
    }

    /// The blocks that it hands over.
    pub fn granted(self) -> Result<Granted, Error> {
        self.grant.unwrap_or_else(|| {
            Err(Error::Protocol("an answer without the blocks that were asked for".into()))
        })
    }

    /// The event, if it is one.
    pub fn event(&self) -> Option<Event> {
        (self.sequence == 0).then(|| Event::from_code(self.opcode & !wire::EVENT)).flatten()
    }

    /// The verb that this answers, unless it is a refusal: then the error.
    pub fn verdict(&self) -> Result<Verb, Error> {
        let protocol = |what: String| Error::Protocol(what);
        if self.fault != 0 {
            let mut r = Reader::new("a refusal", &self.body);
            let refusal: wire::Refusal = *r.one().map_err(|e| protocol(e.to_string()))?;
            let fault =
                Fault::from_code(self.fault).ok_or_else(|| protocol(format!("fault {}", self.fault)))?;
            let (needed, available) = (refusal.needed.get(), refusal.available.get());
            return Err(Error::Refused { fault, needed, available, text: trust::words(&r.text()) });
        }
        let verb = Verb::from_code(self.opcode & !wire::REPLY).filter(|_| self.opcode & wire::REPLY != 0);
        verb.ok_or_else(|| protocol(format!("opcode {:#x}", self.opcode)))
    }
}

/// A broker inside this process, which several clients may share.
#[derive(Debug, Clone)]
pub struct Embedded {
    shared: Arc<Mutex<Inside>>,
}

#[derive(Debug)]
struct Inside {
    broker: Broker,
    mail: Vec<(ClientId, Message)>,
}

impl Embedded {
    /// A broker over `heap`, without a daemon.
    pub fn new(broker: Broker) -> Self {
        Embedded { shared: Arc::new(Mutex::new(Inside { broker, mail: Vec::new() })) }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        super::lock(&self.shared)
    }

    /// Looks at the broker, or checks it.
    pub fn with<T>(&self, look: impl FnOnce(&mut Broker) -> T) -> T {
        look(&mut self.inside().broker)
    }

    pub(super) fn connect(&self, uid: u32) -> Result<Link, Error> {
        let peer = Peer { uid, pid: std::process::id() as i32 };
        let id = self.with(|b| b.connect(peer)).map_err(|e| Error::Invalid(e.to_string()))?;
        Ok(Link::new(Way::Inside { broker: self.clone(), id }))
    }
}

impl Inside {
    /// Does the worker's jobs on the spot and collects what comes of it.
    fn settle(&mut self) {
        // There is no timer here: every request looks.
        if self.broker.recheck_after().is_some() {
            self.broker.recheck_windows();
        }
        let heap: Arc<dyn Heap> = self.broker.heap();
        self.broker.tick(Instant::now());
        // A job that is done may bring the next one, and no message yet.
        while self.broker.has_work() {
            for job in self.broker.jobs() {
                let done = job.run(&*heap);
                self.broker.done(done);
            }
            for output in self.broker.outputs() {
                let copy = |b: &Arc<crate::heap::Buffer>| b.fd().map(|fd| fd.try_clone_to_owned());
                let others = output.descriptors.iter().map(|d| d.open()?.as_fd().try_clone_to_owned());
                let fds: Result<Vec<_>, _> = output.buffers.iter().filter_map(copy).chain(others).collect();
                match fds
                    .map_err(|e| Error::Protocol(e.to_string()))
                    .and_then(|fds| Message::parse(&output.message, fds, false))
                {
                    Ok(message) => self.mail.push((output.to, message)),
                    Err(e) => log::error!("a message of the embedded broker is lost: {e}"),
                }
            }
        }
    }
}

#[derive(Debug)]
enum Way {
    Socket { socket: SeqPacket, buffer: Box<[u8]> },
    Inside { broker: Embedded, id: ClientId },
}

/// See the module.
#[derive(Debug)]
pub(super) struct Link {
    way: Way,
    sequence: u64,
    lost: Option<String>,
    gate: Gate,
    /// Bytes of what is aside, or more.
    aside_bytes: usize,
    /// What has come and has not been taken in by the client: events and replies, in their order.
    pub aside: VecDeque<Message>,
    /// Requests for whose replies threads wait, and those of the replies that have been taken in.
    awaited: BTreeMap<u64, Option<Message>>,
}

impl Link {
    fn new(way: Way) -> Self {
        let (gate, aside, awaited) = (Gate::new(), VecDeque::new(), BTreeMap::new());
        Link { way, sequence: 0, lost: None, gate, aside_bytes: 0, aside, awaited }
    }

    /// Connects to the broker at `path`.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, Error> {
        if path.as_os_str().is_empty() {
            return Err(Error::Invalid(
                "the path of the broker's socket is empty: name one, or none at all".into(),
            ));
        }
        let socket = seqpacket::connect(path, SockType::SeqPacket, timeout)
            .map_err(|source| Error::NotReachable { path: PathBuf::from(path), source })?;
        let buffer = vec![0; MAX_MESSAGE].into_boxed_slice();
        Ok(Link::new(Way::Socket { socket: socket.into(), buffer }))
    }

    /// The socket, to wait on for events.
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.way {
            Way::Socket { socket, .. } => Some(socket.as_fd()),
            Way::Inside { .. } => None,
        }
    }

    pub fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Why the broker has gone, if it has.
    pub fn lost(&self) -> Option<Error> {
        self.lost.clone().map(Error::Lost)
    }

    /// Sends a request and waits for its reply, with the connection for itself. What comes before that is put aside.
    pub fn call(
        &mut self,
        verb: Verb,
        session: u64,
        timeout: Duration,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<Message, Error> {
        let deadline = Instant::now() + timeout;
        let sequence = self.ask(verb, session, timeout, fill)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let heard = self.listen(left);
            if let Some(i) = self.aside.iter().position(|m| m.sequence == sequence) {
                self.give_up(sequence);
                let message = self.aside.remove(i).expect("it is there");
                message.verdict()?;
                return Ok(message);
            }
            match heard {
                Err(e) => return Err(e),
                Ok(false) if left.is_zero() => return Err(self.give_up_late(sequence, verb, timeout)),
                Ok(_) => {}
            }
        }
    }

    /// Sends a request for whose reply the caller will wait.
    pub fn ask(
        &mut self,
        verb: Verb,
        session: u64,
        timeout: Duration,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<u64, Error> {
        match self.send(verb, session, timeout, fill) {
            Ok(sequence) => {
                self.awaited.insert(sequence, None);
                Ok(sequence)
            }
            Err(e) => Err(self.refusal().unwrap_or(e)),
        }
    }

    /// Puts aside the next message that is there, or comes within `longest`. `false` if there is none. An error when no other
    /// will come.
    pub fn listen(&mut self, longest: Duration) -> Result<bool, Error> {
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        let Some(message) = self.receive(longest)? else { return Ok(false) };
        if message.event() == Some(Event::Refused) {
            let why = message.verdict().err();
            return Err(why.unwrap_or(self.lose("it refused the connection".into())));
        }
        self.aside.push_back(message);
        Ok(true)
    }

    /// Whether a thread waits for the reply to this request.
    pub fn is_awaited(&self, sequence: u64) -> bool {
        self.awaited.contains_key(&sequence)
    }

    /// Keeps a reply that has been taken in for the thread that waits for it.
    pub fn keep(&mut self, message: Message) {
        self.awaited.insert(message.sequence, Some(message));
    }

    /// The reply to a request, if it has been taken in.
    pub fn answer(&mut self, sequence: u64) -> Option<Message> {
        let answer = self.awaited.get_mut(&sequence)?.take()?;
        self.give_up(sequence);
        Some(answer)
    }

    /// Nobody waits for this reply any more.
    pub fn give_up(&mut self, sequence: u64) {
        self.awaited.remove(&sequence);
    }

    /// The same because it is late. Returns the error.
    pub fn give_up_late(&mut self, sequence: u64, verb: Verb, timeout: Duration) -> Error {
        self.give_up(sequence);
        let late = Error::Timeout(timeout);
        // Not knowing whether it was done, the two sides could disagree about blocks from here on. The socket stays open, so
        // that the broker takes nothing away.
        if !verb.may_come_late() {
            self.lost = Some(late.to_string());
        }
        late
    }

    /// What the broker said before it hung up, if it refused the connection.
    fn refusal(&mut self) -> Option<Error> {
        while let Ok(Some(message)) = self.receive(Duration::ZERO) {
            if message.event() == Some(Event::Refused) {
                return message.verdict().err();
            }
            self.aside.push_back(message);
        }
        None
    }

    /// Sends a request whose reply will be found aside.
    pub fn send(
        &mut self,
        verb: Verb,
        session: u64,
        timeout: Duration,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<u64, Error> {
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        self.sequence += 1;
        let mut w = Writer::request(verb, self.sequence, session);
        fill(&mut w);
        let message = w.finish();
        match &mut self.way {
            Way::Inside { broker, id } => {
                let mut inside = broker.inside();
                inside.broker.request(*id, &message);
                inside.settle();
            }
            Way::Socket { socket, .. } => {
                let deadline = Instant::now() + timeout;
                while let Err(e) = socket.send(&message, &[]) {
                    if e.kind() != std::io::ErrorKind::WouldBlock {
                        return Err(self.lose(e.to_string()));
                    }
                    let left = deadline.checked_duration_since(Instant::now());
                    if !left.is_some_and(|left| wait(socket, PollFlags::POLLOUT, left)) {
                        return Err(Error::Timeout(timeout));
                    }
                }
            }
        }
        let body = &message[size_of::<Header>()..];
        match self.gate.asks(verb, self.sequence, session, body) {
            Ok(()) => Ok(self.sequence),
            Err(why) => Err(self.broken(why)),
        }
    }

    /// The next message for the client that is there already, or that comes within `timeout`.
    fn receive(&mut self, timeout: Duration) -> Result<Option<Message>, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(message) = self.next(left)? else { return Ok(None) };
            match self.gate.check(&message) {
                Ok(true) => return self.bounded(message).map(Some),
                Ok(false) if !timeout.is_zero() && left.is_zero() => return Ok(None),
                Ok(false) => {}
                Err(why) => return Err(self.broken(why)),
            }
        }
    }

    /// The next message, as it comes.
    fn next(&mut self, timeout: Duration) -> Result<Option<Message>, Error> {
        let received = match &mut self.way {
            Way::Inside { broker, id } => return Ok(receive_inside(broker, *id, timeout)),
            Way::Socket { socket, buffer } => {
                let mut received = read_to_the_end(socket, buffer);
                if matches!(&received, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock) {
                    if timeout.is_zero() || !wait(socket, PollFlags::POLLIN, timeout) {
                        return Ok(None);
                    }
                    received = read_to_the_end(socket, buffer);
                }
                let parse = |r: Received| match r.bytes {
                    0 => None,
                    bytes => Some(Message::parse(&buffer[..bytes], r.fds, r.fds_lost)),
                };
                received.map(parse)
            }
        };
        match received {
            Ok(Some(Ok(message))) => Ok(Some(message)),
            Ok(None) => Err(self.lose("it has closed the connection".into())),
            Ok(Some(Err(Error::Protocol(why)))) => Err(self.broken(why)),
            Ok(Some(Err(e))) => Err(e),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData => Err(self.broken(e.to_string())),
            Err(e) => Err(self.lose(e.to_string())),
        }
    }

    /// A message, if there is room for it among those that wait to be taken in.
    fn bounded(&mut self, message: Message) -> Result<Message, Error> {
        if self.aside.is_empty() {
            self.aside_bytes = 0;
        }
        self.aside_bytes += message.body.len() + size_of::<Message>();
        let (most, most_bytes) = MOST_ASIDE;
        if self.aside.len() >= most || self.aside_bytes > most_bytes {
            let (some, bytes) = (self.aside.len(), self.aside_bytes);
            return Err(self.broken(format!("{some} messages of {bytes} bytes wait to be taken in")));
        }
        Ok(message)
    }

    /// Nothing that comes from this broker can be relied on any more.
    pub fn broken(&mut self, why: String) -> Error {
        self.lost = Some(format!("its answer makes no sense: {why}"));
        Error::Protocol(why)
    }

    /// Takes in, without waiting, whatever has come.
    pub fn drain(&mut self) {
        while let Ok(Some(message)) = self.receive(Duration::ZERO) {
            self.aside.push_back(message);
        }
    }

    fn lose(&mut self, why: String) -> Error {
        self.lost = Some(why.clone());
        Error::Lost(why)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Way::Inside { broker, id } = &self.way {
            let mut inside = broker.inside();
            inside.broker.disconnect(*id);
            inside.settle();
            inside.mail.retain(|(to, _)| to != id);
        }
    }
}

/// The next message of a broker in this process, if it comes in time. There, only time can bring one that is not there already.
fn receive_inside(broker: &Embedded, id: ClientId, timeout: Duration) -> Option<Message> {
    /// How often to look.
    const LOOK: Duration = Duration::from_millis(1);
    let deadline = Instant::now() + timeout;
    loop {
        {
            let mut inside = broker.inside();
            let mine = |inside: &Inside| inside.mail.iter().position(|(to, _)| *to == id);
            if mine(&inside).is_none() {
                inside.settle();
            }
            if let Some(i) = mine(&inside) {
                return Some(inside.mail.remove(i).1);
            }
        }
        let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        std::thread::sleep(LOOK.min(left));
    }
}

/// What the broker said before it hung up. If it did so with a request unread, the kernel reports that first
/// (ECONNRESET), and once; its last words, such as why it refused the connection, come after that.
fn read_to_the_end(socket: &SeqPacket, buffer: &mut [u8]) -> std::io::Result<Received> {
    match socket.recv(buffer) {
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => socket.recv(buffer),
        received => received,
    }
}

/// Whether the socket became ready in time.
fn wait(socket: &SeqPacket, flags: PollFlags, timeout: Duration) -> bool {
    // Rounded up, so that a wait of less than a millisecond does not spin.
    let ms = timeout.as_millis().saturating_add(1).min(i32::MAX as u128) as i32;
    let mut fds = [PollFd::new(socket.as_fd(), flags)];
    loop {
        match poll(&mut fds, PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)) {
            Err(nix::Error::EINTR) => continue,
            result => return result.is_ok_and(|n| n > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{AddressFamily, SockFlag};

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    /// A link, and the broker's end of its socket.
    fn pair() -> (Link, SeqPacket) {
        let kind = (AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_NONBLOCK);
        let (ours, theirs) = nix::sys::socket::socketpair(kind.0, kind.1, None, kind.2).unwrap();
        let buffer = vec![0; MAX_MESSAGE].into_boxed_slice();
        let mut link = Link::new(Way::Socket { socket: ours.into(), buffer });
        // What is behind it is the matter here.
        link.gate = Gate::open();
        (link, theirs.into())
    }

    /// The broker answers request `sequence`, whether it has come already or not.
    fn answer(broker: &SeqPacket, verb: Verb, sequence: u64, words: &[u8]) {
        let mut w = Writer::start(verb as u16 | wire::REPLY, 0, sequence, 0);
        w.put(words);
        broker.send(&w.finish(), &[]).unwrap();
    }

    fn ask(link: &mut Link, verb: Verb, timeout: Duration) -> Result<Vec<u8>, Error> {
        link.call(verb, 0, timeout, |_| ()).map(|message| message.body)
    }

    fn aside(link: &mut Link) -> Vec<(u64, Vec<u8>)> {
        link.aside.drain(..).map(|m| (m.sequence, m.body)).collect()
    }

    #[test]
    fn a_grant_that_comes_after_its_caller_gave_up_is_handed_over_with_the_next_call() {
        let (mut link, broker) = pair();
        assert!(matches!(ask(&mut link, Verb::Grow, Duration::ZERO), Err(Error::Timeout(_))));
        answer(&broker, Verb::Grow, 1, b"blocks");
        answer(&broker, Verb::Query, 2, b"room");
        assert_eq!(ask(&mut link, Verb::Query, SOON).unwrap(), b"room");
        assert_eq!(aside(&mut link), [(1, b"blocks".to_vec())]);
    }

    #[test]
    fn a_reply_that_nobody_waits_for_is_kept_whether_a_call_or_nobody_finds_it() {
        let (mut link, broker) = pair();
        let first = link.send(Verb::Grow, 0, SOON, |_| ()).unwrap();
        answer(&broker, Verb::Grow, first, b"ahead");
        answer(&broker, Verb::Query, first + 1, b"room");
        assert_eq!(ask(&mut link, Verb::Query, SOON).unwrap(), b"room");
        let second = link.send(Verb::Grow, 0, SOON, |_| ()).unwrap();
        answer(&broker, Verb::Grow, second, b"more");
        link.drain();
        assert_eq!(aside(&mut link), [(first, b"ahead".to_vec()), (second, b"more".to_vec())]);
    }

    #[test]
    fn a_request_that_the_two_sides_could_disagree_about_ends_the_connection_when_it_is_late() {
        let (mut link, broker) = pair();
        assert!(!Verb::Seal.may_come_late());
        assert!(matches!(ask(&mut link, Verb::Seal, Duration::ZERO), Err(Error::Timeout(_))));
        answer(&broker, Verb::Seal, 1, b"");
        answer(&broker, Verb::Query, 2, b"room");
        assert!(matches!(ask(&mut link, Verb::Query, SOON), Err(Error::Lost(_))));
        // Open as before: the broker takes nothing away.
        broker.send(&Writer::start(wire::EVENT, 0, 0, 0).finish(), &[]).unwrap();
    }

    #[test]
    fn a_refusal_is_the_callers_own_and_the_connection_lives_on() {
        let (mut link, broker) = pair();
        let mut w = Writer::start(Verb::Grow as u16 | wire::REPLY, Fault::Busy as u16, 1, 0);
        w.put(&wire::Refusal { needed: 3.into(), available: 2.into() }).put(&b"in use"[..]);
        broker.send(&w.finish(), &[]).unwrap();
        let refused = ask(&mut link, Verb::Grow, SOON).unwrap_err();
        let Error::Refused { fault: Fault::Busy, needed: 3, available: 2, text } = refused else {
            panic!("{refused}")
        };
        assert_eq!(text, "in use");
        answer(&broker, Verb::Query, 2, b"room");
        assert_eq!(ask(&mut link, Verb::Query, SOON).unwrap(), b"room");
    }

    #[test]
    fn after_the_broker_has_gone_everything_fails_and_what_it_said_before_is_still_there() {
        let (mut link, broker) = pair();
        let ahead = link.send(Verb::Grow, 0, SOON, |_| ()).unwrap();
        answer(&broker, Verb::Grow, ahead, b"blocks");
        drop(broker);
        for _ in 0..3 {
            assert!(matches!(ask(&mut link, Verb::Query, SOON), Err(Error::Lost(_))));
        }
        assert!(link.is_lost());
        assert_eq!(aside(&mut link), [(ahead, b"blocks".to_vec())]);
    }
}
