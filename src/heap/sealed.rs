//! Read-only copies: memory that several tenants may read and nobody can write.
//!
//! Owns nothing beyond the call. Invariants:
//! - before a descriptor leaves this module its memfd has these seals: no write, no new writable mapping, no growth, no other
//!   seal; and mode 0400. So whoever gets one can map it for reading and nothing else: not by `mmap`, not by `mprotect`,
//!   not by opening it again through `/proc`, and not through a udmabuf, which the kernel makes of no memfd that is
//!   sealed against writing;
//! - the one descriptor that is open for writing, [`Sealed`], stays with the broker. All that can be done with it is to take
//!   the memory back, and it does that only when the kernel says that nobody else has the file open.
//!
//! That last proof is a lease (fcntl(2), `F_SETLEASE` with `F_WRLCK`). The kernel grants one only if no other open file
//! of the inode exists: it compares the inode's counts of readers and writers with what the asking file adds to them itself
//! (`check_conflicting_open` in fs/locks.c; exact since Linux 5.4, where `i_readcount` came to be kept with file
//! locking and not only with IMA). An open file is what every descriptor refers to, in whatever process or in flight in a
//! socket, and what every mapping keeps, also after its descriptor is closed. Two things it does not count:
//! - a descriptor of `O_PATH`, which is no open file but keeps the inode. So the file is cut to nothing while the lease keeps
//!   others from opening it: what is left to that descriptor is an empty file. (This is why there is no seal against
//!   shrinking. Who could shrink it is who may open it for writing: mode 0400 leaves the broker's own user and root.)
//! - pages that sit in a pipe or a socket after `splice` or `vmsplice`. Pipes are bounded by the kernel for each user
//!   (`fs.pipe-user-pages-soft`, 64 MiB as it comes), sockets by their buffers; the same process could fill them with any memory.
//!
//! A copy is always a fresh memfd. Sealing the donor's own buffer would not do: the kernel adds no seal against writing
//! while a writable mapping exists, and the donor has one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl, open};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fchmod};

use super::{Buffer, room};

/// Bytes that are copied at a time.
const PIECE: usize = 64 << 10;

/// What was copied.
#[derive(Debug)]
pub struct ReadOnlyCopy {
    /// The file.
    pub file: Sealed,
    /// Its bytes.
    pub bytes: u64,
    /// The CRC-32 of each piece, of the very bytes that are in the copy.
    pub sums: Vec<u32>,
}

impl ReadOnlyCopy {
    /// Of pieces, one after the other, and seals it. The pieces may be written by others meanwhile: the sums tell what
    /// was copied.
    pub fn of(pieces: &[(Arc<Buffer>, Range<u64>)]) -> io::Result<Self> {
        let bytes = pieces.iter().map(|(_, range)| range.end - range.start).sum();
        room::check("a read-only copy", bytes).map_err(io::Error::other)?;
        let mut sums = Vec::with_capacity(pieces.len());
        let file = Sealed::new(bytes, |file| {
            let (mut own, mut at) = (vec![0; PIECE], 0);
            for (buffer, range) in pieces {
                let (mut from, mut sum) = (range.start, crc32fast::Hasher::new());
                while from < range.end {
                    let some = own.len().min((range.end - from) as usize);
                    buffer.read(from, &mut own[..some])?;
                    sum.update(&own[..some]);
                    file.write_all_at(&own[..some], at)?;
                    from += some as u64;
                    at += some as u64;
                }
                sums.push(sum.finalize());
            }
            Ok(())
        })?;
        Ok(ReadOnlyCopy { file, bytes, sums })
    }
}

/// A sealed memfd, by the one descriptor that is open for writing. It is never handed out: see the module.
#[derive(Debug)]
pub struct Sealed(File);

impl Sealed {
    /// One of `bytes` bytes that `fill` has written.
    fn new(bytes: u64, fill: impl FnOnce(&File) -> io::Result<()>) -> io::Result<Self> {
        room::check_file_size("a read-only copy", bytes).map_err(io::Error::other)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let made = File::from(memfd_create("kvbroker-common", flags)?);
        // Opened once more: the kernel counts what was opened, and not what memfd_create made.
        let file = File::from(open_again(&made, OFlag::O_RDWR)?);
        // The memory is there from the start: no reader's touch can fail for want of it.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as i64)?;
        fill(&file)?;
        fchmod(&file, Mode::S_IRUSR)?;
        let seals = SealFlag::F_SEAL_WRITE
            | SealFlag::F_SEAL_FUTURE_WRITE
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        // Who opens it while the lease is held has the kernel tell the holder, by a signal that ends a process unless
        // another one is chosen.
        control(&file, F_SETSIG, libc::SIGURG)?;
        Ok(Sealed(file))
    }

    /// A descriptor for one reader: open for reading only, and an open file of its own, with an offset of its own.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        open_again(&self.0, OFlag::O_RDONLY)
    }

    /// Takes the memory back if nobody else has the file open; `false`, and nothing has happened, if somebody has. After
    /// `true` nobody gets to the bytes any more, whatever he has kept.
    pub fn take_back(&self) -> io::Result<bool> {
        match control(&self.0, libc::F_SETLEASE, libc::F_WRLCK) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => return Ok(false),
            Err(e) => return Err(e),
        }
        let cut = self.0.set_len(0);
        // Given up in any case: whoever opens the file waits for that.
        control(&self.0, libc::F_SETLEASE, libc::F_UNLCK)?;
        cut.map(|()| true)
    }

    /// Whether this kernel, as it is configured, can tell who has a file open: the error says why not. Tried with a file
    /// of one byte and a reader of it.
    pub fn probe() -> Result<(), String> {
        let told = (|| {
            let file = Sealed::new(1, |_| Ok(()))?;
            let reader = file.reader()?;
            let with = file.take_back()?;
            drop(reader);
            Ok::<_, io::Error>((with, file.take_back()?))
        })();
        match told {
            Ok((false, true)) => Ok(()),
            Ok(_) => Err("F_SETLEASE does not tell whether a memfd is open elsewhere".into()),
            Err(e) => Err(format!("fcntl F_SETLEASE on a memfd: {e}; it needs fs.leases-enable = 1")),
        }
    }
}

/// fcntl(2) in Linux's numbering; the libc crate has no name for it on every target.
const F_SETSIG: libc::c_int = 10;

fn control(file: &File, operation: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both operations take an int and touch no memory of this process; the descriptor is open.
    #[allow(unsafe_code)]
    let result = unsafe { libc::fcntl(file.as_raw_fd(), operation, value) };
    Errno::result(result).map(drop).map_err(io::Error::from)
}

/// Opens the same file once more.
fn open_again(file: &File, how: OFlag) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(open(path.as_str(), how | OFlag::O_CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::heap::{Heap, Memfd};

    /// Two pieces with bytes of their own.
    fn copy() -> ReadOnlyCopy {
        let buffer = Arc::new(Memfd::new(false).allocate(1 << 20).unwrap());
        buffer.write(0, &[7; 4096]).unwrap();
        buffer.write(512 << 10, b"123456789").unwrap();
        ReadOnlyCopy::of(&[(buffer.clone(), 0..8192), (buffer, 512 << 10..(512 << 10) + 9)]).unwrap()
    }

    #[test]
    fn a_copy_has_the_bytes_in_order_and_their_checksums() {
        let copy = copy();
        assert_eq!(copy.bytes, 8192 + 9);
        // The check value of CRC-32 in every catalogue.
        assert_eq!(copy.sums[1], 0xCBF4_3926);
        let file = File::from(copy.file.reader().unwrap());
        let mut bytes = vec![0; 8192 + 9];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes[4095], bytes[4096], &bytes[8192..]), (7, 0, &b"123456789"[..]));
    }

    #[test]
    fn not_even_its_maker_can_write_it_let_it_grow_or_give_single_pages_back() {
        let copy = copy();
        let writable = &copy.file.0;
        assert_eq!(writable.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(writable.set_len(1 << 20).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        assert_eq!(fallocate(writable, punch, 0, 4096), Err(nix::Error::EPERM));
        // SAFETY: a new mapping at an address of the kernel's choice; nothing is touched through it.
        #[allow(unsafe_code)]
        let mapped = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, writable.as_raw_fd(), 0)
        };
        assert_eq!(mapped, libc::MAP_FAILED);
        let file = File::from(copy.file.reader().unwrap());
        assert_eq!(file.metadata().unwrap().len(), 8192 + 9);
        assert!(file.write_at(b"x", 0).is_err());
        // Nor can a reader change its size.
        assert!(file.set_len(0).is_err());
        assert_eq!(file.metadata().unwrap().len(), 8192 + 9);
    }

    #[test]
    fn readers_of_one_copy_have_an_offset_each() {
        use std::io::Read;
        let copy = copy();
        let [mut a, mut b] = [(); 2].map(|()| File::from(copy.file.reader().unwrap()));
        let mut two = [[0; 4096]; 2];
        a.read_exact(&mut two[0]).unwrap();
        b.read_exact(&mut two[1]).unwrap();
        assert_eq!(two, [[7; 4096]; 2]);
    }

    #[test]
    fn a_copy_is_taken_back_when_nobody_has_it_open_mapped_or_in_flight_and_not_before() {
        let copy = copy();
        let alone = || copy.file.take_back().unwrap();
        let reader = copy.file.reader().unwrap();
        assert!(!alone(), "a descriptor");
        let twin = reader.try_clone().unwrap();
        drop(reader);
        assert!(!alone(), "a duplicate of it");
        let map = memmap2::MmapOptions::new().len(8192).map_raw_read_only(&twin).unwrap();
        drop(twin);
        assert!(!alone(), "a mapping whose descriptor is closed");
        drop(map);
        let (a, b) = UnixStream::pair().unwrap();
        let reader = copy.file.reader().unwrap();
        let message = [nix::sys::socket::ControlMessage::ScmRights(&[reader.as_raw_fd()])];
        let flags = nix::sys::socket::MsgFlags::empty();
        nix::sys::socket::sendmsg::<()>(a.as_raw_fd(), &[io::IoSlice::new(b"x")], &message, flags, None)
            .unwrap();
        drop((reader, a));
        assert!(!alone(), "in flight to somebody");
        // Not counted, and left with an empty file.
        let reader = copy.file.reader().unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let inode = File::from(open(path.as_str(), OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).unwrap());
        drop(reader);
        assert_eq!(inode.metadata().unwrap().len(), 8192 + 9);
        drop(b);
        assert!(alone());
        assert_eq!(inode.metadata().unwrap().len(), 0);
        assert_eq!(std::os::unix::fs::MetadataExt::blocks(&inode.metadata().unwrap()), 0);
        Sealed::probe().unwrap();
    }
}
