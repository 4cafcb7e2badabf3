//! Who comes in: connections from the listener to their hello.
//!
//! Owns nothing: the loop has the listeners and the connections. Invariants: whoever is refused is told why, if the socket takes
//! it; what the kernel refuses makes the listeners rest for a moment, and never the loop spin; who does not say hello in
//! time is gone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};
use nix::sys::socket::{getsockopt, sockopt};

use super::{BREATHER, Server, Token};
use crate::broker::{ConnectError, Peer};
use crate::daemon::connection::{Connection, has_unread};
use crate::daemon::namespace::Stranger;
use crate::id::{ClientId, Tenant};
use crate::seldom::seldom;
use crate::seqpacket::SeqPacket;
use crate::wire::{self, Event, Fault, Writer};

/// Connections that are accepted in one turn.
const PER_TURN: usize = 16;

impl Server {
    pub(super) fn accept_clients(&mut self) {
        for _ in 0..PER_TURN {
            match self.clients.accept() {
                Ok(Some(fd)) => {
                    if let Err(e) = self.greet(fd) {
                        seldom!(warn, "a connection was refused: {e}");
                    }
                }
                Ok(None) => return,
                Err(e) => return self.pause(&e),
            }
        }
    }

    /// The kernel would not accept: the listeners are left alone for a moment, so that the loop does not spin.
    pub(super) fn pause(&mut self, why: &io::Error) {
        seldom!(warn, "accepting connections: {why}");
        let nothing = |token: Token| EpollEvent::new(EpollFlags::empty(), token.pack());
        let _ = self.epoll.modify(&self.clients, &mut nothing(Token::Clients));
        let _ = self.epoll.modify(&self.admin, &mut nothing(Token::Admin));
        self.paused_until = Some(Instant::now() + 5 * BREATHER);
    }

    fn greet(&mut self, fd: OwnedFd) -> Result<(), Box<dyn std::error::Error>> {
        let peer = getsockopt(&fd, sockopt::PeerCredentials)?;
        let uid = peer.uid();
        self.tombstones.retain(|t| has_unread(&t.socket));
        let dead = self.tombstones.iter().filter(|t| t.uid == uid).count();
        let live = self.connections.values().filter(|c| c.uid == uid).count();
        let most = self.limits.connections_per_tenant;
        if dead > 0 && dead + live >= most as usize {
            let why = format!(
                "uid {uid} has left {dead} connections behind with descriptors unread, which count until they are closed \
                 (limits.connections-per-tenant = {most})"
            );
            let needed = (dead + live) as u64 + 1;
            // One message, if the socket takes it: whoever is refused learns why.
            let _ = SeqPacket::from(fd).send(&refusal(Fault::OverLimit, needed, most.into(), &why), &[]);
            return Err(why.into());
        }
        let pidfd = match getsockopt(&fd, sockopt::PeerPidfd) {
            Ok(pidfd) => Some(pidfd),
            // Without one (older kernels) the socket alone says when the client has gone.
            Err(Errno::ENOPROTOOPT) => None,
            Err(Errno::ESRCH) => return Err(turn_away(fd, Stranger::Ended(uid))),
            // There is no descriptor left to watch it with.
            Err(e) => return Err(e.into()),
        };
        if !self.broker.tenancy().named.contains_key(&Tenant(uid)) {
            if let Err(e) = self.namespace.admits(uid, peer.pid(), pidfd.as_ref().map(AsFd::as_fd)) {
                return Err(turn_away(fd, e));
            }
        }
        let socket = SeqPacket::from(fd);
        socket.refuse_descriptors();
        let id = match self.broker.connect(Peer { uid, pid: peer.pid() }) {
            Ok(id) => id,
            Err(e) => {
                let (fault, needed, available) = numbers(&e);
                let _ = socket.send(&refusal(fault, needed, available, &e.to_string()), &[]);
                return Err(e.into());
            }
        };
        let by = Instant::now() + self.limits.hello;
        let connection = Connection::new(socket, pidfd, uid, by);
        let added =
            self.epoll.add(&connection, EpollEvent::new(EpollFlags::EPOLLIN, Token::Client(id).pack()));
        let watched = match &connection.pidfd {
            Some(pidfd) => {
                self.epoll.add(pidfd, EpollEvent::new(EpollFlags::EPOLLIN, Token::Process(id).pack()))
            }
            None => Ok(()),
        };
        if let Err(e) = added.and(watched) {
            self.broker.disconnect(id);
            return Err(e.into());
        }
        self.connections.insert(id, connection);
        self.silent.insert((by, id));
        Ok(())
    }

    /// Whoever has said hello need not hurry.
    pub(super) fn note_hello(&mut self, id: ClientId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.hello_by.is_some() && self.broker.has_greeted(id) {
            if let Some(by) = connection.hello_by.take() {
                self.silent.remove(&(by, id));
            }
        }
    }

    /// Connections on which nobody has said hello in time end: each of them is a place that somebody else needs.
    pub(super) fn end_silent(&mut self) {
        while let Some(&(by, id)) = self.silent.first() {
            if by > Instant::now() {
                return;
            }
            // It may have been said, and not been read yet.
            self.read(id);
            if self.silent.remove(&(by, id)) {
                self.dismiss(id);
            }
        }
    }

    /// Ends a connection on which nobody has said hello. Nothing that counts has been sent there, so nobody has to read
    /// anything before it is gone.
    fn dismiss(&mut self, id: ClientId) {
        let Some(connection) = self.leave(id) else { return };
        let _ = self.epoll.delete(&connection);
        self.broker.count_silent();
        let (uid, ms) = (connection.uid, self.limits.hello.as_millis());
        log::debug!("client {} (uid {uid}): no hello within {ms} ms", id.0);
        let why = format!("nobody has said hello on this connection within {ms} ms (limits.hello-ms)");
        // If the socket takes it.
        let _ = connection.socket.send(&refusal(Fault::BadRequest, 0, 0, &why), &[]);
    }
}

/// Whose fault it is that there can be no connection, what would be needed, and what there is.
fn numbers(why: &ConnectError) -> (Fault, u64, u64) {
    match why {
        ConnectError::Nobody => (Fault::BadRequest, 0, 0),
        ConnectError::Full(most) | ConnectError::Kept(most) => {
            (Fault::OverLimit, u64::from(*most) + 1, (*most).into())
        }
        ConnectError::TenantFull { count, .. } => (Fault::OverLimit, u64::from(*count) + 1, (*count).into()),
    }
}

/// Tells whoever has connected why there is no connection, if the socket takes it.
fn turn_away(fd: OwnedFd, why: Stranger) -> Box<dyn std::error::Error> {
    let _ = SeqPacket::from(fd).send(&refusal(Fault::BadRequest, 0, 0, &why.to_string()), &[]);
    why.into()
}

/// The event `refused`.
fn refusal(fault: Fault, needed: u64, available: u64, why: &str) -> Vec<u8> {
    let mut event = Writer::start(wire::EVENT | Event::Refused as u16, fault as u16, 0, 0);
    event.put(&wire::Refusal { needed: needed.into(), available: available.into() });
    event.put(why.as_bytes());
    event.finish()
}
