//! Read-only copies: memory that several tenants may read and nobody can write.
//!
//! Owns nothing beyond the call. Invariant: before a descriptor leaves this module its memfd has all the seals (no write,
//! no new writable mapping, no other size, no other seal), mode 0400, and no writable descriptor; so whoever gets it
//! can map it for reading and nothing else: not by `mmap`, not by `mprotect`, not by opening it again through `/proc`, and
//! not through a udmabuf, which the kernel makes of no memfd that is sealed against writing.
//!
//! A copy is always a fresh memfd. Sealing the donor's own buffer would not do: the kernel adds no seal against writing
//! while a writable mapping exists, and the donor has one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl, open};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fchmod};

use super::{Buffer, room};

/// Bytes that are copied at a time.
const PIECE: usize = 64 << 10;

/// What was copied.
#[derive(Debug)]
pub struct ReadOnlyCopy {
    /// Open for reading only.
    pub fd: OwnedFd,
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
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("kvbroker-common", flags)?);
        // The memory is there from the start: no reader's touch can fail for want of it.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as i64)?;
        let (mut own, mut at, mut sums) = (vec![0; PIECE], 0, Vec::with_capacity(pieces.len()));
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
        fchmod(&file, Mode::S_IRUSR)?;
        let seals = SealFlag::F_SEAL_WRITE
            | SealFlag::F_SEAL_FUTURE_WRITE
            | SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let fd = open(again.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(ReadOnlyCopy { fd, bytes, sums })
    }
}

#[cfg(test)]
mod tests {
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
        let file = File::from(copy.fd);
        let mut bytes = vec![0; 8192 + 9];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes[4095], bytes[4096], &bytes[8192..]), (7, 0, &b"123456789"[..]));
    }

    #[test]
    fn not_even_its_maker_can_write_it_change_its_size_or_give_its_pages_back() {
        let copy = copy();
        let again = format!("/proc/self/fd/{}", copy.fd.as_raw_fd());
        // As root the mode stops nobody; the seals do.
        if let Ok(writable) = File::options().read(true).write(true).open(again) {
            assert_eq!(writable.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
            assert_eq!(writable.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
            let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            assert_eq!(fallocate(&writable, punch, 0, 4096), Err(nix::Error::EPERM));
            // SAFETY: a new mapping at an address of the kernel's choice; nothing is touched through it.
            #[allow(unsafe_code)]
            let mapped = unsafe {
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, writable.as_raw_fd(), 0)
            };
            assert_eq!(mapped, libc::MAP_FAILED);
        }
        let file = File::from(copy.fd);
        assert_eq!(file.metadata().unwrap().len(), 8192 + 9);
        assert!(file.write_at(b"x", 0).is_err());
    }
}
