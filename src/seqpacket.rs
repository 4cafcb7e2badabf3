//! The socket edge: datagrams of a `SOCK_SEQPACKET` Unix socket, and the descriptors that travel with them.
//!
//! Owns the socket. Invariants: every descriptor that arrives is an [`OwnedFd`] with CLOEXEC from its first moment, so
//! no error path can leak one; a message that was cut is an error, never a shorter message, and descriptors come all
//! or not at all; a closed peer gives an error, never a signal.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, socket};

use crate::wire::MAX_FDS;

/// Room for the control data of [`MAX_FDS`] descriptors, aligned as `cmsghdr` wants it.
#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; CONTROL_BYTES]);

// SAFETY: CMSG_SPACE only computes.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) } as usize;

/// What came: the length of the message in the caller's buffer, and its descriptors.
#[derive(Debug)]
pub struct Received {
    /// Bytes of the message; 0 when the peer has closed.
    pub bytes: usize,
    /// Descriptors, in the order in which they were sent.
    pub fds: Vec<OwnedFd>,
    /// More descriptors were sent than this process may open (RLIMIT_NOFILE): those that came are closed.
    pub fds_lost: bool,
}

/// One end of a connection.
#[derive(Debug)]
pub struct SeqPacket {
    fd: OwnedFd,
}

impl From<OwnedFd> for SeqPacket {
    fn from(fd: OwnedFd) -> Self {
        SeqPacket { fd }
    }
}

impl AsFd for SeqPacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl SeqPacket {
    /// Sends one message, whole, with up to [`MAX_FDS`] descriptors. `WouldBlock` when the peer's queue is full.
    pub fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > MAX_FDS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
        }
        let mut iov = libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: message.len() };
        let mut control = Control([MaybeUninit::uninit(); CONTROL_BYTES]);
        // SAFETY: all-zero is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &mut iov;
        header.msg_iovlen = 1;
        if !fds.is_empty() {
            let bytes = size_of_val(fds) as u32;
            header.msg_control = control.0.as_mut_ptr().cast();
            // SAFETY: CMSG_SPACE only computes.
            header.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as _;
            // SAFETY: the control buffer is aligned for cmsghdr and has room for one header and `fds.len()` numbers, as
            // checked above; BorrowedFd is transparent over RawFd.
            unsafe {
                let cmsg = libc::CMSG_FIRSTHDR(&header);
                (*cmsg).cmsg_level = libc::SOL_SOCKET;
                (*cmsg).cmsg_type = libc::SCM_RIGHTS;
                (*cmsg).cmsg_len = libc::CMSG_LEN(bytes) as _;
                let data = libc::CMSG_DATA(cmsg).cast::<RawFd>();
                for (i, fd) in fds.iter().enumerate() {
                    data.add(i).write_unaligned(fd.as_raw_fd());
                }
            }
        }
        loop {
            // SAFETY: header, iovec, message and control data all outlive the call; the kernel only reads them.
            let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &header, libc::MSG_NOSIGNAL) };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives one message into `buffer`. A message longer than that is an error.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut control = Control([MaybeUninit::uninit(); CONTROL_BYTES]);
        // SAFETY: all-zero is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &mut iov;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = CONTROL_BYTES as _;
        let bytes = loop {
            // SAFETY: header, iovec, buffer and control data outlive the call and are ours alone.
            let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
            if got >= 0 {
                break got as usize;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        };
        let mut fds = collect(&header);
        let fds_lost = header.msg_flags & libc::MSG_CTRUNC != 0;
        if fds_lost {
            fds.clear();
        }
        if header.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a message is longer than the protocol allows",
            ));
        }
        Ok(Received { bytes, fds, fds_lost })
    }

    /// Bytes that this end has sent and the peer has not read (`SIOCOUTQ`).
    pub fn unread_by_peer(&self) -> io::Result<usize> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: TIOCOUTQ (the same number as SIOCOUTQ) writes one int through the pointer.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes as usize) }
    }

    /// Ends the conversation in both directions. What has been sent can still be read.
    pub fn shut_down(&self) {
        // An error means that the peer has gone already.
        let _ = nix::sys::socket::shutdown(self.fd.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }

    /// Refuses descriptors from the peer where the kernel can (`SO_PASSRIGHTS`, Linux 6.16). On older kernels they
    /// arrive and are closed.
    pub fn refuse_descriptors(&self) {
        const SO_PASSRIGHTS: libc::c_int = 83;
        let off: libc::c_int = 0;
        // SAFETY: the kernel reads one int through the pointer. Failure means an older kernel, which is handled.
        unsafe {
            let value = (&raw const off).cast();
            let size = size_of::<libc::c_int>() as libc::socklen_t;
            libc::setsockopt(self.fd.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, value, size);
        }
    }
}

/// How often a socket whose queue of connections is full is tried anew.
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// Connects to the Unix socket at `path`, and waits at most so long for its listener to have room. The socket that is
/// connected does not block.
pub fn connect(path: &Path, kind: SockType, timeout: Duration) -> io::Result<OwnedFd> {
    let start = Instant::now();
    // Else connect(2) waits for ever for a listener that takes nobody in.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let address = UnixAddr::new(path)?;
    let fd = socket(AddressFamily::Unix, kind, flags, None)?;
    loop {
        match nix::sys::socket::connect(fd.as_raw_fd(), &address) {
            Ok(()) => return Ok(fd),
            Err(Errno::EINTR) => {}
            // A full queue: nothing tells when it is no longer, so it is tried.
            Err(Errno::EAGAIN) => {
                let left = timeout.saturating_sub(start.elapsed());
                if left.is_zero() {
                    let text =
                        format!("it has taken no connection within {timeout:?}, and its queue is full");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                std::thread::sleep(left.min(TRY_AGAIN));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Takes ownership of every descriptor in the control data.
fn collect(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled the control buffer; CMSG_FIRSTHDR and CMSG_NXTHDR stay inside msg_controllen.
    let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !cmsg.is_null() {
        // SAFETY: a non-null result of the two macros points at a whole cmsghdr, whose length the kernel has set; the
        // descriptors in it are new in this process and nobody else owns them.
        unsafe {
            if (*cmsg).cmsg_level == libc::SOL_SOCKET && (*cmsg).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*cmsg).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(cmsg).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            cmsg = libc::CMSG_NXTHDR(header, cmsg);
        }
    }
    fds
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{Backlog, bind, listen, socketpair};

    fn pair() -> (SeqPacket, SeqPacket) {
        let (a, b) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        (a.into(), b.into())
    }

    #[test]
    fn messages_and_descriptors_arrive_whole_and_in_order() {
        let (a, b) = pair();
        let files: Vec<_> = (0..MAX_FDS).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        a.send(b"with", &fds).unwrap();
        a.send(b"without", &[]).unwrap();
        let mut buffer = [0; 64];
        let got = b.recv(&mut buffer).unwrap();
        assert_eq!((&buffer[..got.bytes], got.fds.len()), (&b"with"[..], MAX_FDS));
        for fd in &got.fds {
            let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
            assert_ne!(flags & libc::FD_CLOEXEC, 0);
        }
        let got = b.recv(&mut buffer).unwrap();
        assert_eq!((&buffer[..got.bytes], got.fds.len()), (&b"without"[..], 0));
        let more: Vec<_> = fds.iter().chain(&fds).copied().collect();
        assert_eq!(a.send(b"x", &more).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_message_that_is_too_long_is_an_error_and_the_next_one_arrives() {
        let (a, b) = pair();
        a.send(&[1; 100], &[]).unwrap();
        a.send(b"next", &[]).unwrap();
        let mut buffer = [0; 64];
        assert_eq!(b.recv(&mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(b.recv(&mut buffer).unwrap().bytes, 4);
        drop(a);
        assert_eq!(b.recv(&mut buffer).unwrap().bytes, 0);
        assert_eq!(b.send(b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_listener_that_takes_nobody_in_is_waited_for_no_longer_than_asked() {
        let place = tempfile::tempdir().unwrap();
        for (name, kind) in [("packets", SockType::SeqPacket), ("stream", SockType::Stream)] {
            let path = place.path().join(name);
            let listener = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
            bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
            listen(&listener, Backlog::new(0).unwrap()).unwrap();
            let mut waiting = Vec::new();
            let full = loop {
                match connect(&path, kind, Duration::ZERO) {
                    Ok(fd) => waiting.push(fd),
                    Err(e) => break e,
                }
            };
            assert_eq!(full.kind(), io::ErrorKind::TimedOut);
            let late = connect(&path, kind, Duration::from_millis(30)).unwrap_err();
            assert!(late.to_string().contains("within 30ms"), "{late}");
            // One place is enough.
            drop(nix::sys::socket::accept(&listener).unwrap());
            connect(&path, kind, Duration::from_secs(5)).unwrap();
        }
    }

    #[test]
    fn what_the_peer_has_not_read_is_counted() {
        let (a, b) = pair();
        assert_eq!(a.unread_by_peer().unwrap(), 0);
        a.send(b"hello", &[]).unwrap();
        assert!(a.unread_by_peer().unwrap() > 0);
        b.recv(&mut [0; 64]).unwrap();
        assert_eq!(a.unread_by_peer().unwrap(), 0);
    }
}
