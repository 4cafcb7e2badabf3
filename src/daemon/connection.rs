//! One client's connection: what waits to be sent to it, and whether it may speak.
//!
//! Owns the socket and the queue. Invariants: messages leave in order; at most one message with descriptors is unread
//! at any time, because descriptors in flight count against the daemon; while anything waits to be sent nothing more is
//! read, so a client that does not read cannot make the queue grow by asking.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use nix::sys::epoll::EpollFlags;

use crate::broker::{Descriptor, Output};
use crate::seldom::seldom;
use crate::seqpacket::SeqPacket;

/// Messages that may wait for a client beside those that ask for extents, before it is dropped.
const MOST_QUEUED: usize = 256;
/// From this many waiting messages on they are kept small.
const FEW: usize = 8;
/// What the kernel may count as unread just after the last message was read: it wakes the sender one byte before it
/// has counted down to nothing, and whoever looked in that moment would wait for ever. A message counts several
/// hundred bytes.
const UNREAD_NOISE: usize = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Connection {
    pub socket: SeqPacket,
    /// Readable when the process has ended, even if a child still has the socket.
    pub pidfd: Option<OwnedFd>,
    pub uid: u32,
    /// What epoll tells about.
    pub listening: EpollFlags,
    /// When hello must have been said; `None` once it has.
    pub hello_by: Option<Instant>,
    /// The turn of the loop in which it was read from last; 0 for never.
    pub served: u64,
    queue: VecDeque<Output>,
    /// Descriptors in the last message that had some.
    sent: usize,
}

/// What became of an attempt to send.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    /// Nothing waits any more.
    All,
    /// The client must read first: the socket says when it has.
    Unread,
    /// There is no room for so many descriptors in flight just now: to be tried again.
    Crowded,
    /// That was the last message, or the client has gone.
    End,
}

impl Connection {
    pub fn new(socket: SeqPacket, pidfd: Option<OwnedFd>, uid: u32, hello_by: Instant) -> Self {
        Connection {
            socket,
            pidfd,
            uid,
            listening: EpollFlags::EPOLLIN,
            hello_by: Some(hello_by),
            served: 0,
            queue: VecDeque::new(),
            sent: 0,
        }
    }

    /// Appends a message; `false` when the client has left too many unread. Of `extents` extents in the pool all may go
    /// back at one time, with a message about each to whoever has them: that is no fault of one who reads, nor of one who has
    /// nothing to ask for a while.
    pub fn queue(&mut self, mut output: Output, extents: usize) -> bool {
        if self.queue.len() > FEW {
            // It may wait for long, and be one of many: no more than it is.
            output.message.shrink_to_fit();
        }
        self.queue.push_back(output);
        self.queue.len() <= MOST_QUEUED.saturating_add(extents)
    }

    /// Whether messages wait.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Descriptors that go with the next message.
    pub fn next_descriptors(&self) -> usize {
        self.queue.front().map_or(0, |output| output.buffers.len() + output.descriptors.len())
    }

    /// Descriptors that have been sent and that the client has not read.
    pub fn in_flight(&mut self) -> usize {
        if self.sent > 0 && !has_unread(&self.socket) {
            self.sent = 0;
        }
        self.sent
    }

    /// Sends what can be sent, and no message with more than `room` descriptors.
    pub fn flush(&mut self, room: usize) -> Flushed {
        while let Some(output) = self.queue.front() {
            let descriptors = output.buffers.len() + output.descriptors.len();
            if descriptors > 0 && has_unread(&self.socket) {
                return Flushed::Unread;
            }
            if descriptors > room {
                return Flushed::Crowded;
            }
            let opened: io::Result<Vec<_>> = output.descriptors.iter().map(Descriptor::open).collect();
            let opened = match opened {
                Ok(opened) => opened,
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    return Flushed::Crowded;
                }
                Err(e) => {
                    seldom!(error, "a read-only copy could not be opened for uid {}: {e}", self.uid);
                    return Flushed::End;
                }
            };
            let fds = output.buffers.iter().filter_map(|b| b.fd());
            let fds: Vec<BorrowedFd<'_>> = fds.chain(opened.iter().map(AsFd::as_fd)).collect();
            match self.socket.send(&output.message, &fds) {
                Ok(()) if output.last => return Flushed::End,
                Ok(()) => {
                    if !fds.is_empty() {
                        self.sent = fds.len();
                    }
                    self.queue.pop_front();
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Flushed::Unread,
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::ETOOMANYREFS | libc::ENOMEM | libc::ENOBUFS)
                    ) =>
                {
                    return Flushed::Crowded;
                }
                Err(_) => return Flushed::End,
            }
        }
        Flushed::All
    }
}

/// Whether the peer has messages that it has not read.
pub(super) fn has_unread(socket: &SeqPacket) -> bool {
    socket.unread_by_peer().is_ok_and(|bytes| bytes > UNREAD_NOISE)
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;
    use crate::id::ClientId;

    #[test]
    fn a_client_that_does_not_read_may_be_owed_a_word_about_every_extent_beside_256_others_and_no_more() {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK);
        let (ours, theirs) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        let by = Instant::now() + Duration::from_secs(60);
        let mut connection = Connection::new(SeqPacket::from(ours), None, 7, by);
        let message = || {
            let message = Vec::with_capacity(4096);
            Output { to: ClientId(1), message, buffers: vec![], descriptors: vec![], last: false }
        };
        let extents = 1000;
        for n in 1..=256 + extents {
            assert!(connection.queue(message(), extents), "message {n}");
        }
        // Long queues are kept small: the room for a large answer is not kept for each word.
        let kept: usize = connection.queue.iter().map(|o| o.message.capacity()).sum();
        assert!(kept < 64 << 10, "{kept} bytes of room");
        assert!(!connection.queue(message(), extents));
        // With a small pool it is a small number.
        assert!(!connection.queue(message(), 8));
        drop(theirs);
    }
}
