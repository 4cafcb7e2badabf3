//! Extents as memfds: ordinary memory, present from the start, that can really be taken back.
//!
//! Owns nothing beyond the call. Invariant: before a descriptor leaves this module the memfd has all its pages, and
//! the seals SHRINK, GROW and SEAL. Nobody can change its size (no SIGBUS) nor add a seal that would make the punch of
//! [`punch`] fail, so emptying it always works, and afterwards whoever kept it reads zeros.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{Backend, Buffer, Heap, HeapError};

/// The memfd heap.
#[derive(Debug, Clone, Copy)]
pub struct Memfd {
    lock: bool,
}

impl Memfd {
    /// `lock`: keep the pages out of swap and zram, as far as RLIMIT_MEMLOCK lets it.
    pub fn new(lock: bool) -> Self {
        Memfd { lock }
    }
}

fn call(call: &'static str) -> impl Fn(nix::Error) -> HeapError {
    move |e| HeapError::Call { heap: "memfd".into(), call, source: e.into() }
}

impl Heap for Memfd {
    fn backend(&self) -> Backend {
        Backend::Memfd
    }

    fn name(&self) -> String {
        "memfd".into()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        super::room::check_file_size("memfd", bytes)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd: OwnedFd = memfd_create("kvbroker", flags).map_err(call("memfd_create"))?;
        fallocate(&fd, FallocateFlags::empty(), 0, bytes as i64).map_err(|e| HeapError::NoMemory {
            heap: "memfd".into(),
            bytes,
            source: e.into(),
            advice: "make the pool smaller than the memory that is free",
        })?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).map_err(call("F_ADD_SEALS"))?;
        let buffer = Buffer::new(fd, bytes, Backend::Memfd);
        if self.lock {
            let locked = buffer.map().and_then(|m| m.map_or(Ok(()), |m| m.lock()));
            locked.map_err(|source| HeapError::Call { heap: "memfd".into(), call: "mlock", source })?;
        }
        Ok(buffer)
    }

    fn has_room(&self, bytes: u64) -> Result<(), HeapError> {
        super::room::check("memfd", bytes)
    }
}

/// Gives all pages of a memfd back to the kernel: every mapping and descriptor of it reads zeros from now on.
pub(super) fn punch(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    Ok(fallocate(fd.as_fd(), flags, 0, bytes as i64)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::SharedMap;

    #[test]
    fn an_old_holder_of_a_dropped_extent_reads_zeros_and_cannot_prevent_it() {
        let buffer = Memfd::new(false).allocate(1 << 20).unwrap();
        let kept = buffer.fd().unwrap().try_clone_to_owned().unwrap();
        let more = fcntl(&kept, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_FUTURE_WRITE));
        assert_eq!(more, Err(nix::Error::EPERM));
        let map = SharedMap::new(kept.as_fd(), 1 << 20).unwrap();
        map.write(4096, &[7; 16]);
        drop(buffer);
        assert_eq!(map.read(4096, 16), [0; 16]);
        assert_eq!(nix::sys::stat::fstat(&kept).unwrap().st_size, 1 << 20);
    }

    #[test]
    fn a_checksum_is_the_same_in_one_piece_and_in_several() {
        let buffer = Memfd::new(false).allocate(1 << 20).unwrap();
        buffer.map().unwrap().unwrap().write(4096, b"123456789");
        // The check value of CRC-32 in every catalogue.
        assert_eq!(buffer.checksum(4096..4105, 0).unwrap(), 0xCBF4_3926);
        let all = buffer.checksum(0..1 << 20, 0).unwrap();
        let first = buffer.checksum(0..300_001, 0).unwrap();
        assert_eq!(buffer.checksum(300_001..1 << 20, first).unwrap(), all);
        buffer.map().unwrap().unwrap().write((1 << 20) - 1, &[1]);
        assert_ne!(buffer.checksum(0..1 << 20, 0).unwrap(), all);
    }

    #[test]
    fn an_extent_beyond_the_limit_of_a_files_size_is_an_error_and_ends_no_process() {
        use nix::sys::resource::{Resource, setrlimit};
        const LIMITED: &str = "KVBROKER_TEST_FILE_SIZE";
        if std::env::var_os(LIMITED).is_some() {
            setrlimit(Resource::RLIMIT_FSIZE, 4096, 4096).unwrap();
            let said = Memfd::new(false).allocate(1 << 20).unwrap_err().to_string();
            assert!(said.contains("none of more than 4096 bytes (RLIMIT_FSIZE)"), "{said}");
            return;
        }
        // In a process of its own: the limit is of the whole process.
        let name =
            "heap::memfd::tests::an_extent_beyond_the_limit_of_a_files_size_is_an_error_and_ends_no_process";
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let output = again.args(["--exact", name]).env(LIMITED, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{}: {said}", output.status);
    }

    #[test]
    fn memory_is_there_before_the_first_touch() {
        let buffer = Memfd::new(false).allocate(1 << 20).unwrap();
        let stat = nix::sys::stat::fstat(buffer.fd().unwrap()).unwrap();
        assert_eq!(stat.st_blocks * 512, 1 << 20);
    }
}
