//! The kernel's interfaces as the device tests need them, and other users' processes.
//!
//! Nothing of the product is used here, so that a test of the kernel cannot be wrong together with the product.
//! Memory that another process may write is only ever touched through raw pointers.

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Gid, Pid, Uid, fork, ftruncate, pipe, setgroups, setresgid, setresuid};

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// A block of the reference profile: 16 tokens of 24 KiB.
pub const BLOCK: usize = 384 * KIB;
/// Eight blocks, the extent that packs a CMA area without loss.
pub const EXTENT: usize = 3 * MIB;
/// The size of the machine's CMA area.
pub const AREA: usize = 256 * MIB;

/// The name of the CMA heap: that of the area from `cma=` on x86-64, that of the overlay's node on arm64.
pub const CMA_HEAP: &str = if cfg!(target_arch = "aarch64") { "kvbroker" } else { "reserved" };
pub const SYSTEM_HEAP: &str = "system";

/// A user of the guest's /etc/passwd.
#[derive(Debug, Clone, Copy)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: &'static [u32],
}

/// The group that may open the heaps. Only the daemon is in it.
pub const HEAP_GROUP: u32 = 901;
/// The group that may connect to the daemon.
pub const CLIENT_GROUP: u32 = 902;
pub const ROOT: User = User { uid: 0, gid: 0, groups: &[] };
pub const DAEMON: User = User { uid: 901, gid: HEAP_GROUP, groups: &[] };
pub const ALICE: User = User { uid: 1001, gid: 1001, groups: &[CLIENT_GROUP] };
pub const BOB: User = User { uid: 1002, gid: 1002, groups: &[CLIENT_GROUP] };

/// A few pages of the area may be taken by unmovable users before the first test runs: 507 of 512 buffers and 84 of
/// 85 extents have been seen.
pub fn almost(full: usize) -> std::ops::RangeInclusive<usize> {
    full - full.div_ceil(64)..=full
}

#[repr(C)]
#[derive(Debug, Default)]
pub struct HeapAllocation {
    pub len: u64,
    pub fd: u32,
    pub fd_flags: u32,
    pub heap_flags: u64,
}

mod ioctl {
    nix::ioctl_readwrite!(dma_heap_alloc, b'H', 0, super::HeapAllocation);
    nix::ioctl_write_ptr!(dma_buf_sync, b'b', 0, u64);
}
/// `_IOW('u', 0x43, struct udmabuf_create_list)`; the size covers the header only.
const UDMABUF_CREATE_LIST: libc::Ioctl = 0x4008_7543;

/// A file of /dev/dma_heap.
#[derive(Debug)]
pub struct Heap(File);

impl Heap {
    /// Opens the heap read-only, which is enough to allocate.
    pub fn open(name: &str) -> nix::Result<Heap> {
        let file = File::open(format!("/dev/dma_heap/{name}"));
        file.map(Heap).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))
    }

    /// A buffer of at least `len` bytes, writable.
    pub fn alloc(&self, len: usize) -> nix::Result<OwnedFd> {
        let fd_flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
        self.request(HeapAllocation { len: len as u64, fd_flags, ..Default::default() })
    }

    /// `DMA_HEAP_IOCTL_ALLOC` with any arguments.
    pub fn request(&self, mut request: HeapAllocation) -> nix::Result<OwnedFd> {
        // SAFETY: the kernel reads and writes one HeapAllocation, which outlives the call.
        unsafe { ioctl::dma_heap_alloc(self.0.as_raw_fd(), &mut request) }?;
        // SAFETY: the call succeeded, so `fd` is a new file descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(request.fd as i32) })
    }

    /// Buffers of `len` bytes until `want` are there or the heap is exhausted.
    pub fn alloc_up_to(&self, len: usize, want: usize) -> Vec<OwnedFd> {
        let mut buffers = Vec::new();
        while buffers.len() < want {
            match self.alloc(len) {
                Ok(buffer) => buffers.push(buffer),
                Err(Errno::ENOMEM) => break,
                Err(error) => panic!("buffer {} of {len} bytes: {error}", buffers.len()),
            }
        }
        buffers
    }
}

/// `DMA_BUF_IOCTL_SYNC` with the raw flags (1 read, 2 write, 4 end).
pub fn dma_buf_sync(fd: BorrowedFd, flags: u64) -> nix::Result<()> {
    // SAFETY: the kernel reads one u64, which outlives the call.
    unsafe { ioctl::dma_buf_sync(fd.as_raw_fd(), &flags) }.map(drop)
}

/// A dma-buf over ranges `(offset, size)` of a memfd, in the list's order.
pub fn udmabuf(memfd: BorrowedFd, ranges: &[(usize, usize)]) -> nix::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/udmabuf").expect("/dev/udmabuf");
    // struct udmabuf_create_list {u32 flags, count; struct {u32 memfd, pad; u64 offset, size} list[]}, as u64 words:
    // both targets are little-endian. Flag 1 is close-on-exec.
    let mut list = vec![1 | (ranges.len() as u64) << 32];
    for &(offset, size) in ranges {
        list.extend([memfd.as_raw_fd() as u64, offset as u64, size as u64]);
    }
    // SAFETY: the kernel reads the header and `count` ranges, all of which are in `list`.
    let fd = Errno::result(unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE_LIST, list.as_ptr()) })?;
    // SAFETY: the call succeeded, so it returned a new file descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A memfd of `len` bytes with these seals.
pub fn memfd(len: usize, seals: SealFlag) -> OwnedFd {
    const NAME: &CStr = c"device-test";
    let fd = memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("memfd_create");
    ftruncate(&fd, len as i64).expect("ftruncate");
    seal(fd.as_fd(), seals).expect("F_ADD_SEALS");
    fd
}

pub fn seal(fd: BorrowedFd, seals: SealFlag) -> nix::Result<()> {
    fcntl(fd, FcntlArg::F_ADD_SEALS(seals)).map(drop)
}

/// The seals that a memfd must have before it leaves the broker.
pub fn broker_seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// A shared mapping of a whole buffer.
#[derive(Debug)]
pub struct Map {
    start: NonNull<u8>,
    len: usize,
}

impl Map {
    pub fn new(fd: BorrowedFd, len: usize, prot: ProtFlags) -> nix::Result<Map> {
        let length = NonZeroUsize::new(len).expect("a mapping is not empty");
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, fd, 0) }?;
        Ok(Map { start: start.cast(), len })
    }

    pub fn writable(fd: BorrowedFd, len: usize) -> Map {
        Map::new(fd, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).expect("writable mapping")
    }

    pub fn read_only(fd: BorrowedFd, len: usize) -> Map {
        Map::new(fd, len, ProtFlags::PROT_READ).expect("read-only mapping")
    }

    /// Memory of this process alone, in no file.
    pub fn private(len: usize) -> Map {
        let length = NonZeroUsize::new(len).expect("a mapping is not empty");
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: as in `new`.
        let start = unsafe { mmap_anonymous(None, length, prot, MapFlags::MAP_PRIVATE) }.expect("memory");
        Map { start: start.cast(), len }
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Writes `byte` at `offset..offset + len`.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset + len <= self.len);
        // SAFETY: the range lies in the mapping, which was made writable or the process gets its signal.
        unsafe { self.start.as_ptr().add(offset).write_bytes(byte, len) }
    }

    pub fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.len);
        // SAFETY: the byte lies in the mapping. Volatile, because other processes write it.
        unsafe { self.start.as_ptr().add(offset).read_volatile() }
    }

    /// Whether each byte of the mapping is `byte`.
    pub fn is_all(&self, byte: u8) -> bool {
        let pattern = u64::from_ne_bytes([byte; 8]);
        assert!(self.len % 8 == 0);
        // SAFETY: as in `byte`; a mapping is page-aligned, so each u64 is aligned.
        (0..self.len / 8)
            .all(|i| unsafe { self.start.as_ptr().cast::<u64>().add(i).read_volatile() } == pattern)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and nothing borrows from it.
        unsafe { munmap(self.start.cast(), self.len) }.expect("munmap");
    }
}

/// How many file descriptors and mappings hold the dma-buf: `count` in its fdinfo.
pub fn holders(fd: BorrowedFd) -> usize {
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let text = fs::read_to_string(&path).expect("fdinfo");
    let count =
        text.lines().find_map(|line| line.strip_prefix("count:")).expect("fdinfo of a dma-buf has a count");
    count.trim().parse().expect("count is a number")
}

/// The error of splicing a page of the mapping into a pipe, where it would outlive the mapping.
pub fn vmsplice_error(map: &Map) -> Option<Errno> {
    let (_read, write) = pipe().expect("pipe");
    let page = libc::iovec { iov_base: map.start.as_ptr().cast(), iov_len: 4096 };
    // SAFETY: the vector names memory of the mapping, which outlives the call.
    Errno::result(unsafe { libc::vmsplice(write.as_raw_fd(), &page, 1, 0) }).err()
}

/// The third field of the line of /etc/passwd or /etc/group that starts with `name`.
fn id(file: &str, name: &str) -> u32 {
    let text = fs::read_to_string(file).expect("the file of ids");
    let mut fields = text.lines().map(|line| line.split(':'));
    let mut fields = fields.find(|line| line.clone().next() == Some(name)).expect("a name with an id");
    fields.nth(2).expect("an id").parse().expect("a number")
}

pub fn user_id(name: &str) -> u32 {
    id("/etc/passwd", name)
}

pub fn group_id(name: &str) -> u32 {
    id("/etc/group", name)
}

/// Bytes of the machine's CMA area that are allocated. `CmaFree` of /proc/meminfo would not do: it counts what each
/// CPU holds back late, and movable pages of anybody as taken.
pub fn cma_used() -> usize {
    let area =
        fs::read_dir("/sys/kernel/debug/cma").expect("CMA_DEBUGFS").next().expect("an area").expect("entry");
    let pages = fs::read_to_string(area.path().join("used")).expect("used");
    // SAFETY: asks for a number.
    pages.trim().parse::<usize>().expect("a number of pages")
        * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize
}

/// A process of another user, which takes turns with the test.
#[derive(Debug)]
pub struct Peer {
    pid: Pid,
    turns: UnixStream,
}

/// The peer's side of the turns.
#[derive(Debug)]
pub struct Turns(UnixStream);

impl Turns {
    /// Lets the test go on and waits until it gives the turn back.
    pub fn yield_to_test(&mut self) {
        self.0.write_all(&[0]).expect("the test is gone");
        self.0.read_exact(&mut [0]).expect("the test is gone");
    }
}

impl Peer {
    /// Forks a process that becomes `user` and runs `work` with whatever it inherits.
    pub fn start(user: User, work: impl FnOnce(&mut Turns)) -> Peer {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        // SAFETY: scripts/vm runs one test at a time, on the only thread, so the child may do what it likes.
        match unsafe { fork() }.expect("fork") {
            ForkResult::Parent { child } => Peer { pid: child, turns: ours },
            ForkResult::Child => {
                drop(ours);
                let mut turns = Turns(theirs);
                let report = turns.0.try_clone().expect("dup");
                // libtest would capture the message and lose it with this process.
                panic::set_hook(Box::new(move |info| drop((&report).write_all(info.to_string().as_bytes()))));
                let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
                    user.become_for_good();
                    work(&mut turns);
                }));
                // SAFETY: ends this process at once; the parent's destructors and exit handlers are not ours to run.
                unsafe { libc::_exit(i32::from(outcome.is_err())) }
            }
        }
    }

    /// Waits until the peer yields.
    pub fn wait_for_yield(&mut self) {
        let mut byte = [0xff];
        let got = self.turns.read(&mut byte).expect("read from the peer");
        if got != 1 || byte != [0] {
            self.reap(&byte[..got]);
            panic!("the peer ended without yielding");
        }
    }

    /// Lets the peer go on.
    pub fn resume(&mut self) {
        self.turns.write_all(&[0]).expect("the peer is gone");
    }

    /// Whether the peer has yielded; false once it has ended, however it did.
    pub fn yields(&mut self) -> bool {
        let mut byte = [0xff];
        self.turns.read(&mut byte).is_ok_and(|got| got == 1 && byte == [0])
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Ends the peer where it stands.
    pub fn kill(self) {
        kill(self.pid, Signal::SIGKILL).expect("kill");
        waitpid(self.pid, None).expect("waitpid");
    }

    /// How the peer ended, once it has.
    pub fn end(self) -> WaitStatus {
        waitpid(self.pid, None).expect("waitpid")
    }

    /// Waits until the peer has ended; its failure is the test's.
    pub fn finish(mut self) {
        self.reap(&[]);
    }

    fn reap(&mut self, begun: &[u8]) {
        let mut message = begun.to_vec();
        self.turns.read_to_end(&mut message).expect("read from the peer");
        match waitpid(self.pid, None).expect("waitpid") {
            WaitStatus::Exited(_, 0) => {}
            status => panic!("peer {status:?}: {}", String::from_utf8_lossy(&message)),
        }
    }
}

impl User {
    fn become_for_good(self) {
        let groups: Vec<Gid> = self.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        setgroups(&groups).expect("setgroups");
        setresgid(gid, gid, gid).expect("setresgid");
        setresuid(uid, uid, uid).expect("setresuid");
    }
}

/// Runs `work` as `user` in a process of its own.
pub fn as_user(user: User, work: impl FnOnce()) {
    Peer::start(user, |_| work()).finish();
}
