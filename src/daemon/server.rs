//! The loop: readiness in, requests to the broker, messages out.
//!
//! Owns all connections. Invariants: every tenant gets its turn, one message at a time, and so does each of its connections
//! ([`turns`]), but for tenants that rest; nothing here blocks; a client is gone from the broker in the same turn in which the end of its
//! connection is read, or its process has ended. Who comes in is in `accept`, who operates in `operators`.

mod accept;
mod operators;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signalfd::SignalFd;

use super::admin::Operator;
use super::connection::{Connection, Flushed, has_unread};
use super::listener::Listener;
use super::namespace::Namespace;
use super::pressure::{Needs, News, Pressure};
use super::turns::{self, Ready, Rests};
use super::watch::Watch;
use super::worker::Worker;
use crate::broker::Broker;
use crate::id::ClientId;
use crate::seldom::seldom;
use crate::seqpacket::SeqPacket;
use crate::wire::MAX_MESSAGE;

/// How long to leave alone what the kernel had no room for.
const BREATHER: Duration = Duration::from_millis(20);

/// Events that one look finds at most.
const EVENTS: usize = 512;

/// How often the books are checked in a release build.
const CHECK_AT_MOST_EVERY: Duration = Duration::from_secs(1);

/// What an event is about. Packed into epoll's 64 bits: the kind in the lowest three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Clients,
    Admin,
    Worker,
    Signal,
    Client(ClientId),
    Process(ClientId),
    Operator(u64),
    Pressure,
}

impl Token {
    fn pack(self) -> u64 {
        match self {
            Token::Clients => 0,
            Token::Admin => 1,
            Token::Worker => 2,
            Token::Signal => 3,
            Token::Client(id) => id.0 << 3 | 4,
            Token::Process(id) => id.0 << 3 | 5,
            Token::Operator(id) => id << 3 | 6,
            Token::Pressure => 7,
        }
    }

    fn unpack(bits: u64) -> Option<Self> {
        Some(match bits & 7 {
            0 => Token::Clients,
            1 => Token::Admin,
            2 => Token::Worker,
            3 => Token::Signal,
            4 => Token::Client(ClientId(bits >> 3)),
            5 => Token::Process(ClientId(bits >> 3)),
            6 => Token::Operator(bits >> 3),
            7 => Token::Pressure,
            _ => return None,
        })
    }
}

/// A connection that has ended, with descriptors that nobody has read.
#[derive(Debug)]
struct Tombstone {
    uid: u32,
    socket: SeqPacket,
    descriptors: usize,
}

/// What the loop itself holds connections to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections of one tenant, with those that it has left behind unread.
    pub connections_per_tenant: u32,
    /// How long a connection may go without hello.
    pub hello: Duration,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Server {
    // Never dropped: dropping a memfd extent would empty it under whoever holds it, and what clients hold at the end is
    // theirs.
    broker: ManuallyDrop<Broker>,
    worker: Worker,
    epoll: Epoll,
    clients: Listener,
    admin: Listener,
    signals: SignalFd,
    pressure: Pressure,
    /// The loop waits for the pressure's trigger.
    pressure_armed: bool,
    connections: BTreeMap<ClientId, Connection>,
    operators: BTreeMap<u64, Operator>,
    next_operator: u64,
    watch: Watch,
    /// Connections that were ended while the client had messages with descriptors unread: those still count against
    /// this process, so they count against the client's uid.
    tombstones: Vec<Tombstone>,
    /// Connections that may have unread descriptors, and the most that this process may have in flight.
    in_flight: BTreeSet<ClientId>,
    most_in_flight: usize,
    /// Something has happened to a tombstone.
    stirred: bool,
    limits: Limits,
    namespace: Namespace,
    /// Connections on which nobody has said hello yet, by the end of their patience.
    silent: BTreeSet<(Instant, ClientId)>,
    /// Counts the turns of the loop.
    turn: u64,
    rests: Rests,
    /// Connections that have something to say and are not listened to while their tenants rest, and when to look whose rest is
    /// over: only while there are some.
    resting: BTreeSet<ClientId>,
    rest_ends: Option<Instant>,
    /// When windows that are closed, and that somebody may still hold, are looked at again.
    recheck_at: Option<Instant>,
    /// Connections whose messages the kernel had no room for.
    crowded: BTreeSet<ClientId>,
    /// Listeners that are left alone until then.
    paused_until: Option<Instant>,
    watchdog: Option<Duration>,
    /// Something has changed since the books were checked, and when that was.
    unchecked: bool,
    last_check: Instant,
    buffer: Box<[u8]>,
}

impl Server {
    pub fn new(
        broker: Broker,
        worker: Worker,
        (clients, admin): (Listener, Listener),
        signals: SignalFd,
        pressure: Pressure,
        limits: Limits,
        watchdog: Option<Duration>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let read = |token: Token| EpollEvent::new(EpollFlags::EPOLLIN, token.pack());
        epoll.add(&clients, read(Token::Clients))?;
        epoll.add(&admin, read(Token::Admin))?;
        epoll.add(&worker, read(Token::Worker))?;
        epoll.add(&signals, read(Token::Signal))?;
        if let Some(trigger) = pressure.trigger() {
            epoll.add(trigger, EpollEvent::new(EpollFlags::EPOLLPRI, Token::Pressure.pack()))?;
        }
        Ok(Server {
            broker: ManuallyDrop::new(broker),
            worker,
            epoll,
            clients,
            admin,
            signals,
            pressure,
            pressure_armed: true,
            connections: BTreeMap::new(),
            operators: BTreeMap::new(),
            next_operator: 1,
            watch: Watch::new(),
            tombstones: Vec::new(),
            in_flight: BTreeSet::new(),
            most_in_flight: most_in_flight(),
            stirred: false,
            limits,
            namespace: Namespace::of_this_process(),
            silent: BTreeSet::new(),
            turn: 0,
            rests: Rests::default(),
            resting: BTreeSet::new(),
            rest_ends: None,
            recheck_at: None,
            crowded: BTreeSet::new(),
            paused_until: None,
            watchdog,
            unchecked: false,
            last_check: Instant::now(),
            buffer: vec![0; MAX_MESSAGE].into_boxed_slice(),
        })
    }

    /// Serves until a signal asks to stop. What clients hold stays theirs.
    pub fn serve(mut self) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS];
        let mut last_watchdog = Instant::now();
        // What the start has left to be done.
        self.carry();
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout(last_watchdog)) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(e) => return Err(e.into()),
            };
            if let Some(interval) = self.watchdog {
                if last_watchdog.elapsed() >= interval / 2 {
                    last_watchdog = Instant::now();
                    // Systemd may be gone; that is no reason to stop.
                    let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
                }
            }
            self.unchecked |= count > 0;
            let now = Instant::now();
            if count > 0 || self.broker.next_wake().is_some_and(|t| t <= now) {
                self.watch.stir();
            }
            self.broker.tick(now);
            let mut ready = Vec::new();
            for event in &events[..count] {
                match Token::unpack(event.data()) {
                    Some(Token::Signal) if self.asked_to_stop() => return self.stop(),
                    Some(Token::Client(id)) => ready.extend(self.look_at_client(id, event.events())),
                    Some(token) => self.handle(token, event.events()),
                    None => {}
                }
            }
            self.turn += 1;
            // The others are found again by the next look.
            let mut busy = busy_time();
            for id in turns::choose(ready) {
                self.read_in_turn(id, &mut busy);
            }
            self.end_rests();
            self.end_silent();
            self.look_at_pressure();
            self.settle();
            if count == 0 {
                self.check_when_idle();
            }
        }
    }

    /// What the broker could do about a machine that is short of memory.
    fn needs(&self) -> Needs {
        Needs { slack: self.broker.has_slack(), given: self.broker.elastic_extents() > 0 }
    }

    fn look_at_pressure(&mut self) {
        match self.pressure.news(Instant::now(), self.needs()) {
            Some(News::Pressed) => _ = self.broker.pressed(),
            Some(News::Relieved) => _ = self.broker.relieved(),
            None => {}
        }
        // A call that nothing can be done about wakes up for nothing.
        let arm = self.broker.has_slack();
        if let Some(trigger) = self.pressure.trigger().filter(|_| arm != self.pressure_armed) {
            let flags = if arm { EpollFlags::EPOLLPRI } else { EpollFlags::empty() };
            let _ = self.epoll.modify(trigger, &mut EpollEvent::new(flags, Token::Pressure.pack()));
            self.pressure_armed = arm;
        }
    }

    /// The books are checked at most once a second, and a piece of them at a time, when nobody wants anything.
    fn check_is_due(&self) -> bool {
        self.broker.is_checking() || (self.unchecked && self.last_check.elapsed() >= CHECK_AT_MOST_EVERY)
    }

    /// The wait has found that nobody wants anything.
    fn check_when_idle(&mut self) {
        if !self.check_is_due() {
            return;
        }
        if !self.broker.is_checking() {
            self.unchecked = false;
            self.last_check = Instant::now();
        }
        self.broker.check_some();
    }

    fn timeout(&self, last_watchdog: Instant) -> EpollTimeout {
        if self.check_is_due() {
            // Only as long as it takes: a check ends by itself.
            return EpollTimeout::ZERO;
        }
        let watchdog = self.watchdog.map(|w| (w / 2).saturating_sub(last_watchdog.elapsed()));
        let breather = (!self.crowded.is_empty()).then_some(BREATHER);
        let due = [
            self.paused_until,
            // Only while something is in quarantine or missing, or a closed window may still be held.
            self.broker.next_wake(),
            self.watch.due(),
            self.recheck_at,
            self.rest_ends,
            self.pressure.next_look(self.needs()),
            // Only while somebody is connected who has not said hello.
            self.silent.first().map(|(by, _)| *by),
        ];
        let due = due.into_iter().flatten().min().map(|t| t.saturating_duration_since(Instant::now()));
        let soonest = [watchdog, breather, due].into_iter().flatten().min();
        let ms = |d: Duration| u16::try_from(d.as_millis() + 1).unwrap_or(u16::MAX);
        soonest.map_or(EpollTimeout::NONE, |d| EpollTimeout::from(ms(d)))
    }

    fn asked_to_stop(&mut self) -> bool {
        matches!(self.signals.read_signal(), Ok(Some(_)))
    }

    fn handle(&mut self, token: Token, events: EpollFlags) {
        match token {
            Token::Clients => self.accept_clients(),
            Token::Admin => self.accept_operators(),
            Token::Worker => self.broker.all_done(self.worker.finished()),
            Token::Process(id) if self.connections.contains_key(&id) => {
                log::debug!("client {}: its process has ended", id.0);
                self.end(id);
            }
            Token::Operator(id) => self.operator(id, events),
            Token::Pressure => self.pressure.triggered(events),
            Token::Client(_) | Token::Process(_) | Token::Signal => {}
        }
    }

    /// Something has happened on a connection: what waits is sent. If nothing does, it may have something to say.
    fn look_at_client(&mut self, id: ClientId, events: EpollFlags) -> Option<Ready> {
        let Some(connection) = self.connections.get(&id) else {
            // It ended earlier in this turn, or is a tombstone.
            self.stirred = true;
            return None;
        };
        if connection.has_queued() || self.broker.is_waiting(id) {
            // A hang-up is seen also by one who is not listened to, or for whose messages there is no room just now.
            match events.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
                true => self.end(id),
                false => self.flush(id),
            }
            return None;
        }
        let ready = Ready { uid: connection.uid, served: connection.served, id };
        if let Some(until) = self.rests.until(ready.uid, Instant::now()) {
            self.rest(id, until);
            // What it says waits in its socket, and so does its end: that is told once, as an edge, and read in its turn.
            self.listen_for(id, EpollFlags::EPOLLET);
            return None;
        }
        Some(ready)
    }

    /// Reads one request, and sees how long that keeps the loop from others. `busy` is the loop's own time so far: time in which
    /// other processes had the processor is nobody's fault here.
    fn read_in_turn(&mut self, id: ClientId, busy: &mut Duration) {
        let Some(uid) = self.connections.get(&id).map(|c| c.uid) else { return };
        let begin = Instant::now();
        if self.rests.until(uid, begin).is_some() {
            // Another one's request in this turn was long; the next look finds this one again.
            return;
        }
        self.read(id);
        let now = Instant::now();
        if !Rests::is_long(now - begin) {
            return;
        }
        let before = std::mem::replace(busy, busy_time());
        let took = busy.saturating_sub(before).min(now - begin);
        if Rests::is_long(took) && self.connections.values().any(|c| c.uid != uid) {
            self.rests.begin(uid, took, now);
        }
    }

    fn rest(&mut self, id: ClientId, until: Instant) {
        self.resting.insert(id);
        self.rest_ends = Some(self.rest_ends.map_or(until, |at| at.min(until)));
    }

    /// Listens again to those whose rest is over.
    fn end_rests(&mut self) {
        let now = Instant::now();
        if self.rest_ends.is_none_or(|at| now < at) {
            return;
        }
        self.rest_ends = None;
        for id in std::mem::take(&mut self.resting) {
            let Some(connection) = self.connections.get(&id) else { continue };
            match self.rests.until(connection.uid, now) {
                Some(until) => self.rest(id, until),
                None => self.flush(id),
            }
        }
    }

    /// Reads one request of a client to whom nothing is owed.
    fn read(&mut self, id: ClientId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.has_queued() || self.broker.is_waiting(id) {
            // An event has been put into its queue meanwhile.
            return;
        }
        connection.served = self.turn;
        match connection.socket.recv(&mut self.buffer) {
            Ok(r) if r.bytes == 0 => self.end(id),
            Ok(r) if !r.fds.is_empty() || r.fds_lost => {
                seldom!(
                    warn,
                    "client {} (uid {}): sent descriptors, which no request carries",
                    id.0,
                    connection.uid
                );
                self.end(id);
            }
            Ok(r) => {
                self.broker.request(id, &self.buffer[..r.bytes]);
                self.note_hello(id);
                self.carry();
                if self.broker.is_waiting(id) {
                    self.listen_for(id, EpollFlags::empty());
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => {
                log::debug!("client {}: {e}", id.0);
                self.end(id);
            }
        }
    }

    /// Carries messages and jobs from the broker to where they belong, until there are none: a connection that ends
    /// over it makes new ones, and nobody would come back for them.
    fn carry(&mut self) {
        while self.broker.has_work() {
            for job in self.broker.jobs() {
                self.worker.order(job);
            }
            let mut to = BTreeSet::new();
            let extents = self.broker.most_extents_of_a_client();
            for output in self.broker.outputs() {
                let id = output.to;
                let Some(connection) = self.connections.get_mut(&id) else { continue };
                if connection.queue(output, extents) {
                    to.insert(id);
                } else {
                    seldom!(warn, "client {} (uid {}) does not read: dropped", id.0, connection.uid);
                    self.end(id);
                }
            }
            for id in to {
                self.flush(id);
            }
        }
    }

    /// Sends what can be sent, and waits for the right thing then.
    fn flush(&mut self, id: ClientId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let room = match connection.next_descriptors() {
            0 => usize::MAX,
            _ => self.room_in_flight(connection.uid),
        };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let flushed = connection.flush(room);
        if connection.in_flight() > 0 {
            self.in_flight.insert(id);
        }
        let flags = match flushed {
            Flushed::All if self.broker.is_waiting(id) => EpollFlags::empty(),
            Flushed::All => EpollFlags::EPOLLIN,
            // Edge-triggered: the socket is writable all along; what counts is the moment at which the client reads.
            Flushed::Unread => EpollFlags::EPOLLOUT | EpollFlags::EPOLLET,
            Flushed::Crowded => {
                self.crowded.insert(id);
                EpollFlags::empty()
            }
            Flushed::End => return self.end(id),
        };
        self.listen_for(id, flags);
    }

    /// How many descriptors may be sent to `uid` now. Those in flight are this process's until they are read, so whoever
    /// does not read could leave nothing for the others: each user may have as many in flight as are left, and so
    /// there is always something left.
    fn room_in_flight(&mut self, uid: u32) -> usize {
        self.tombstones.retain(|t| has_unread(&t.socket));
        let (mut all, mut own) = (0, 0);
        let mut count = |of: u32, descriptors: usize| {
            all += descriptors;
            own += if of == uid { descriptors } else { 0 };
        };
        self.tombstones.iter().for_each(|t| count(t.uid, t.descriptors));
        self.in_flight.retain(|id| {
            let Some(connection) = self.connections.get_mut(id) else { return false };
            let descriptors = connection.in_flight();
            count(connection.uid, descriptors);
            descriptors > 0
        });
        match all {
            // One message always goes, whatever the limit.
            0 => usize::MAX,
            _ => self.most_in_flight.saturating_sub(all).saturating_sub(own),
        }
    }

    /// Has epoll tell about `flags` of a connection (hang-ups it tells about always), if it does not already. Arming an
    /// edge that is armed would make epoll tell at once, again and again.
    fn listen_for(&mut self, id: ClientId, flags: EpollFlags) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.listening == flags {
            return;
        }
        connection.listening = flags;
        let mut event = EpollEvent::new(flags, Token::Client(id).pack());
        if let Err(e) = self.epoll.modify(&*connection, &mut event) {
            seldom!(warn, "client {}: {e}", id.0);
            self.end(id);
        }
    }

    /// The client is gone from the broker, and from the loop but for its socket.
    fn leave(&mut self, id: ClientId) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        if let Some(by) = connection.hello_by {
            self.silent.remove(&(by, id));
        }
        if let Some(pidfd) = &connection.pidfd {
            let _ = self.epoll.delete(pidfd);
        }
        self.resting.remove(&id);
        self.broker.disconnect(id);
        Some(connection)
    }

    fn end(&mut self, id: ClientId) {
        let Some(mut connection) = self.leave(id) else { return };
        if has_unread(&connection.socket) {
            // The peer may read to the end, and then sees that it is the end. When it reads, or closes, epoll tells: edges
            // only, since a connection that has been shut down is hung up on all the time.
            connection.socket.shut_down();
            let edges = EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
            let _ = self.epoll.modify(&connection, &mut EpollEvent::new(edges, Token::Client(id).pack()));
            let (uid, descriptors) = (connection.uid, connection.in_flight());
            self.tombstones.push(Tombstone { uid, socket: connection.socket, descriptors });
        } else {
            let _ = self.epoll.delete(&connection);
        }
    }

    /// After every turn.
    fn settle(&mut self) {
        if std::mem::take(&mut self.stirred) {
            self.tombstones.retain(|t| has_unread(&t.socket));
        }
        for id in std::mem::take(&mut self.crowded) {
            self.flush(id);
        }
        let waits = |(id, o): (&u64, &Operator)| o.waits_for_broker().then_some(*id);
        let waiting: Vec<u64> = self.operators.iter().filter_map(waits).collect();
        waiting.into_iter().for_each(|id| self.operator(id, EpollFlags::empty()));
        if self.recheck_at.is_some_and(|t| t <= Instant::now()) {
            self.broker.recheck_windows();
            self.recheck_at = None;
            self.watch.stir();
        }
        match self.broker.recheck_after() {
            None => self.recheck_at = None,
            Some(after) => {
                // Something new to look at is looked at soon, whatever waits for longer.
                let at = Instant::now() + after;
                self.recheck_at = Some(self.recheck_at.map_or(at, |t| t.min(at)));
            }
        }
        self.carry();
        if self.operators.values().any(Operator::is_watching) {
            let changes = self.watch.changes(&self.broker);
            self.tell_watchers(&changes);
        } else {
            self.watch.rest();
        }
        if self.paused_until.is_some_and(|t| t <= Instant::now()) {
            self.paused_until = None;
            let read = |token: Token| EpollEvent::new(EpollFlags::EPOLLIN, token.pack());
            let _ = self.epoll.modify(&self.clients, &mut read(Token::Clients));
            let _ = self.epoll.modify(&self.admin, &mut read(Token::Admin));
        }
    }

    fn stop(mut self) -> io::Result<()> {
        log::info!("stopping: {} connections end, what they hold stays theirs", self.connections.len());
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        for operator in self.operators.values_mut() {
            if let Some(queue) = operator.watching() {
                queue.end("end", "the daemon stops");
                // One try: whoever does not read now sees the connection end.
                operator.go_on(&mut self.broker);
            }
        }
        self.broker.say_goodbye();
        // Not through `carry`: a connection that ends there gives its extents up, and the worker would empty them under
        // their holder.
        for output in self.broker.outputs() {
            if let Some(connection) = self.connections.get_mut(&output.to) {
                connection.queue(output, usize::MAX);
                connection.flush(usize::MAX);
            }
        }
        Ok(())
    }
}

/// How long this thread has run.
fn busy_time() -> Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let time = |t: nix::sys::time::TimeVal| Duration::new(t.tv_sec() as u64, t.tv_usec() as u32 * 1000);
    getrusage(UsageWho::RUSAGE_THREAD).map_or(Duration::ZERO, |u| time(u.user_time()) + time(u.system_time()))
}

/// Descriptors that the kernel lets this user have in flight: as many as this process may open (unix(7),
/// ETOOMANYREFS). It counts them by user, and this user is the daemon's own.
fn most_in_flight() -> usize {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_NOFILE).map_or(usize::MAX, |(soft, _)| soft as usize)
}
