//! What one tenant can still reach of memory that has become another's: nothing, on any backend, whatever it kept.
//!
//! Each case runs the real daemon under its own user, and two tenants as processes of different users. The first fills the
//! pool, keeps a way into one extent (see [`Keep`]), and gives everything back, or dies. The second fills whatever it gets
//! with its own bytes. Then the first uses what it kept. The controls do the same on kernel buffers of the same kinds
//! without the broker's rules between the two, and there every attempt succeeds: so the cases can fail.

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use kvbroker::client::{Client, ClientOptions, OpenOptions, Session};
use kvbroker::profile::{Kv, Profile};
use kvbroker::wire::Fault;
use nix::errno::Errno;
use nix::fcntl::SealFlag;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
    socketpair,
};
use nix::unistd::pipe;

use crate::broker::{Broker, Connection, Place, apply_udev_rules};
use crate::daemon::{check_kv, until, write_kv};
use crate::support::{
    ALICE, BOB, CMA_HEAP, EXTENT, Heap, Map, Peer, SYSTEM_HEAP, as_user, broker_seals, cma_used, holders,
    memfd, seal, udmabuf,
};

const EXTENTS: usize = 4;
const PER_EXTENT: u32 = 8;
const BLOCKS: u32 = EXTENTS as u32 * PER_EXTENT;
const A: u8 = 0xaa;
const B: u8 = 0xbb;
const ATTACK: u8 = 0xcc;

/// The kinds of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Cma,
    System,
    Udmabuf,
    Memfd,
}

impl Backend {
    fn pool(self) -> String {
        let backend = match self {
            Backend::Cma => format!("backend = \"dma-heap\"\nheap = \"{CMA_HEAP}\""),
            Backend::System => format!("backend = \"dma-heap\"\nheap = \"{SYSTEM_HEAP}\""),
            Backend::Udmabuf => "backend = \"udmabuf\"".into(),
            Backend::Memfd => "backend = \"memfd\"".into(),
        };
        format!("size = \"{}M\"\nextent = \"3M\"\n{backend}", EXTENTS * 3)
    }

    /// A buffer as the broker makes it, and what must stay alive behind it.
    fn buffer(self) -> (OwnedFd, Option<OwnedFd>) {
        match self {
            Backend::Cma => (Heap::open(CMA_HEAP).expect("heap").alloc(EXTENT).expect("alloc"), None),
            Backend::System => (Heap::open(SYSTEM_HEAP).expect("heap").alloc(EXTENT).expect("alloc"), None),
            Backend::Udmabuf => {
                let memory = memfd(EXTENT, broker_seals());
                (udmabuf(memory.as_fd(), &[(0, EXTENT)]).expect("udmabuf"), Some(memory))
            }
            Backend::Memfd => (memfd(EXTENT, broker_seals()), None),
        }
    }
}

/// How a tenant keeps a way into an extent that it has given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    Mapping,
    Descriptor,
    /// A mapping in a forked child whose parent has died.
    Fork,
    /// A descriptor in a message that nobody reads.
    InFlight,
    /// Pages in a pipe.
    Pipe,
    /// A device's import.
    Import,
    /// A dma-buf of its own over the extent.
    OwnUdmabuf,
}

const ALL: [Keep; 7] =
    [Keep::Mapping, Keep::Descriptor, Keep::Fork, Keep::InFlight, Keep::Pipe, Keep::Import, Keep::OwnUdmabuf];

/// A way into an extent.
enum Residue {
    Map(Map),
    Fd(OwnedFd),
    InFlight(OwnedFd, OwnedFd),
    Pipe(OwnedFd, OwnedFd),
    Import(File, u32),
}

impl Residue {
    /// Keeps a way into the extent behind `fd`; the error is the kernel's, which does not let it.
    fn keep(keep: Keep, fd: OwnedFd) -> nix::Result<Residue> {
        match keep {
            Keep::Mapping | Keep::Fork => Ok(Residue::Map(Map::writable(fd.as_fd(), EXTENT))),
            Keep::Descriptor => Ok(Residue::Fd(fd)),
            Keep::InFlight => {
                let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
                let (sender, receiver) = pair.expect("socketpair");
                let fds = [fd.as_raw_fd()];
                let control = [ControlMessage::ScmRights(&fds)];
                let text = [io::IoSlice::new(b"x")];
                sendmsg::<()>(sender.as_raw_fd(), &text, &control, MsgFlags::empty(), None).expect("sendmsg");
                Ok(Residue::InFlight(sender, receiver))
            }
            Keep::Pipe => {
                let (read, write) = pipe().expect("pipe");
                let map = Map::writable(fd.as_fd(), EXTENT);
                let page = libc::iovec { iov_base: map.start().as_ptr().cast(), iov_len: 4096 };
                // SAFETY: the vector names memory of the mapping, which outlives the call.
                Errno::result(unsafe { libc::vmsplice(write.as_raw_fd(), &page, 1, 0) })?;
                Ok(Residue::Pipe(read, write))
            }
            Keep::Import => {
                let device = vgem();
                let mut prime = Prime { handle: 0, flags: 0, fd: fd.as_raw_fd() };
                // SAFETY: the kernel reads and writes one struct drm_prime_handle, which outlives the call.
                unsafe { drm::fd_to_handle(device.as_raw_fd(), &mut prime) }?;
                Ok(Residue::Import(device, prime.handle))
            }
            Keep::OwnUdmabuf => udmabuf(fd.as_fd(), &[(0, EXTENT)]).map(Residue::Fd),
        }
    }

    /// The extent's bytes as they are seen this way, some of each: and `ATTACK` written over them where that can be.
    fn use_it(self) -> Vec<u8> {
        let whole = |fd: BorrowedFd<'_>| Map::writable(fd, EXTENT);
        let map = match self {
            Residue::Map(map) => map,
            Residue::Fd(fd) => whole(fd.as_fd()),
            Residue::InFlight(_sender, receiver) => {
                let mut control = nix::cmsg_space!([i32; 1]);
                let mut text = [0];
                let mut parts = [io::IoSliceMut::new(&mut text)];
                let message = recvmsg::<()>(
                    receiver.as_raw_fd(),
                    &mut parts,
                    Some(&mut control),
                    MsgFlags::MSG_CMSG_CLOEXEC,
                )
                .expect("recvmsg");
                let fd = message.cmsgs().expect("control").find_map(|c| match c {
                    // SAFETY: the kernel has just installed it for this process, and nobody else owns it.
                    ControlMessageOwned::ScmRights(fds) => Some(unsafe { OwnedFd::from_raw_fd(fds[0]) }),
                    _ => None,
                });
                whole(fd.expect("a descriptor").as_fd())
            }
            Residue::Pipe(read, write) => {
                drop(write);
                let mut bytes = Vec::new();
                File::from(read).read_to_end(&mut bytes).expect("read the pipe");
                return bytes;
            }
            Residue::Import(device, handle) => {
                let flags = (libc::O_CLOEXEC | libc::O_RDWR) as u32;
                let mut prime = Prime { handle, flags, fd: -1 };
                // SAFETY: as for fd_to_handle.
                unsafe { drm::handle_to_fd(device.as_raw_fd(), &mut prime) }.expect("export");
                // SAFETY: the call has just made it.
                whole(unsafe { OwnedFd::from_raw_fd(prime.fd) }.as_fd())
            }
        };
        let bytes = (0..EXTENT).step_by(1021).map(|at| map.byte(at)).collect();
        map.fill(0, EXTENT, ATTACK);
        bytes
    }
}

/// `struct drm_prime_handle`
#[repr(C)]
struct Prime {
    handle: u32,
    flags: u32,
    fd: i32,
}

mod drm {
    nix::ioctl_readwrite!(handle_to_fd, b'd', 0x2d, super::Prime);
    nix::ioctl_readwrite!(fd_to_handle, b'd', 0x2e, super::Prime);
}

fn render_nodes() -> Vec<std::path::PathBuf> {
    let all = fs::read_dir("/dev/dri").expect("/dev/dri").map(|e| e.expect("entry").path());
    all.filter(|p| p.to_string_lossy().contains("renderD")).collect()
}

/// The device that imports: its node opened as a user of the group `render` would.
fn vgem() -> File {
    let node = render_nodes().into_iter().next().expect("a render node");
    fs::OpenOptions::new().read(true).write(true).open(node).expect("open vgem")
}

/// As on a machine where a tenant is in the groups of the render node and of /dev/udmabuf.
fn let_everybody_import() {
    let udmabuf = "/dev/udmabuf".into();
    for node in render_nodes().into_iter().chain([udmabuf]) {
        fs::set_permissions(node, Permissions::from_mode(0o666)).expect("chmod");
    }
}

/// Whether the kernel lets a tenant keep a way into an extent of this kind at all; `None` where kernels differ.
fn can_keep(backend: Backend, keep: Keep) -> Option<bool> {
    match (backend, keep) {
        // Up to 6.8 the pages of these mappings can be kept, later ones refuse.
        (Backend::Cma | Backend::System | Backend::Udmabuf, Keep::Pipe) => None,
        (Backend::Cma | Backend::System | Backend::Udmabuf, Keep::OwnUdmabuf) => Some(false),
        (Backend::Memfd, Keep::Import) => Some(false),
        _ => Some(true),
    }
}

/// What the first tenant does. It yields when it has given everything back, uses what it kept, yields, and lets go.
fn first_tenant(socket: &Path, keep: Keep) -> Peer {
    Peer::start(ALICE, |turns| {
        let mut c = Connection::new(socket, "first");
        c.reserve(BLOCKS).expect("all blocks");
        for fd in c.extents.values() {
            Map::writable(fd.as_fd(), EXTENT).fill(0, EXTENT, A);
        }
        let (&first, _) = c.extents.first_key_value().expect("an extent");
        let residue = Residue::keep(keep, c.extents.remove(&first).expect("its descriptor"));
        let others: Vec<u32> = c.extents.keys().copied().collect();
        c.extents.clear();
        if keep == Keep::Fork {
            // SAFETY: this process has one thread. The child goes on; the parent ends without a word to the broker.
            if unsafe { libc::fork() } > 0 {
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(0) }
            }
            drop(c);
        } else {
            c.free();
            for extent in others.into_iter().chain([first]) {
                c.return_extent(extent).expect("return extent");
            }
        }
        // The turn is the test's. Whether something was kept is told by the broker's books and by what follows.
        turns.yield_to_test();
        if let Ok(residue) = residue {
            let seen = residue.use_it();
            assert!(!seen.contains(&B), "{keep:?} shows bytes of the next tenant");
            assert!(seen.iter().all(|b| [0, A].contains(b)), "{keep:?} shows {:x?}", &seen[..4]);
        }
        turns.yield_to_test();
    })
}

/// What the second tenant does: fills all that it gets, then compares when it has the turn, then takes the rest.
fn second_tenant(socket: &Path, blocks: u32) -> Peer {
    Peer::start(BOB, |turns| {
        let mut c = Connection::new(socket, "second");
        c.reserve(blocks).unwrap_or_else(|e| panic!("{blocks} blocks: {e:?}"));
        let maps: Vec<Map> = c.extents.values().map(|fd| Map::writable(fd.as_fd(), EXTENT)).collect();
        assert_eq!(maps.len() as u32, blocks / PER_EXTENT);
        for map in &maps {
            assert!(map.is_all(0), "a new extent reads as zero");
            map.fill(0, EXTENT, B);
        }
        turns.yield_to_test();
        assert!(maps.iter().all(|map| map.is_all(B)), "the first tenant has changed the second's bytes");
        turns.yield_to_test();
        if blocks < BLOCKS {
            let (_, came) = c.reserve(BLOCKS - blocks).expect("the rest of the pool");
            for extent in came {
                assert!(
                    Map::writable(c.extents[&extent].as_fd(), EXTENT).is_all(0),
                    "what came back reads as zero"
                );
            }
        }
    })
}

fn case(broker: &Broker, backend: Backend, keep: Keep) {
    let mut first = first_tenant(&broker.socket(), keep);
    first.wait_for_yield();
    let proven = broker.status()["pool"]["holder_count"]["proven"] == true;
    let kept = can_keep(backend, keep).unwrap_or(!proven);
    // Pages in a pipe are not counted: where they can be kept, the extent is destroyed and its pages stay out.
    let quarantined = usize::from(kept && backend != Backend::Memfd && keep != Keep::Pipe);
    let all = (EXTENTS * EXTENT) as u64;
    until("all is free or in quarantine", || {
        let status = broker.status();
        let (ledger, pool) = (&status["ledger"], &status["pool"]);
        let settled = ledger["free"].as_u64().zip(ledger["quarantined"].as_u64()).map(|(f, q)| f + q);
        let missing = pool["extents_missing"].as_u64().expect("a number") * EXTENT as u64;
        settled.map(|s| s + missing) == Some(all) && broker.quarantined() == quarantined
    });
    let status = broker.status();
    let q = &status["pool"]["quarantined"];
    if quarantined > 0 {
        assert_eq!(q[0]["last_granted"]["uid"], ALICE.uid, "{q}");
        assert_eq!(q[0]["last_granted"]["label"], "first", "{q}");
        let shown = broker.kvbctl_status();
        assert!(shown.contains("is in quarantine") && shown.contains("(first), tenant 1001"), "{shown}");
        let map = broker.map();
        assert!(map["extents"].as_array().expect("list").iter().any(|e| e["slots"] == "!"), "{map}");
    }
    let free = (status["ledger"]["free"].as_u64().expect("bytes") as usize / EXTENT) as u32;
    let mut second = second_tenant(&broker.socket(), free * PER_EXTENT);
    second.wait_for_yield();
    first.resume();
    first.wait_for_yield();
    second.resume();
    second.wait_for_yield();
    first.resume();
    first.finish();
    until("what was in quarantine has come back", || {
        broker.quarantined() == 0 && broker.status()["pool"]["extents"] == EXTENTS
    });
    second.resume();
    second.finish();
    until("everything is free", || broker.account("free") == all);
}

fn matrix(backend: Backend) {
    let before = cma_used();
    let broker = Place::new(&backend.pool()).start();
    let_everybody_import();
    let (fds, held) = (broker.fds(), cma_used());
    for keep in ALL {
        eprintln!("{backend:?}: {keep:?}");
        case(&broker, backend, keep);
        until("no descriptor is left over", || broker.fds() == fds);
        until("no CMA page is left over", || cma_used() == held);
    }
    let status = broker.status();
    let (renewed, reused) = (&status["counters"]["renewed"], &status["counters"]["reused"]);
    let proven = status["pool"]["holder_count"]["proven"] == true;
    assert!(renewed.as_u64() > Some(0), "{status}");
    assert_eq!(
        reused.as_u64() > Some(0),
        proven,
        "scrubbed in place exactly where the count is a proof: {status}"
    );
    if backend == Backend::Memfd {
        assert!(!broker.place.log().contains("quarantine"), "a memfd is emptied, never waited for");
    }
    broker.stop();
    until("the pool has gone back to the kernel", || cma_used() == before);
}

#[test]
fn nothing_that_a_tenant_keeps_of_a_cma_buffer_reaches_the_next_tenant() {
    matrix(Backend::Cma);
}

#[test]
fn nothing_that_a_tenant_keeps_of_a_system_heap_buffer_reaches_the_next_tenant() {
    matrix(Backend::System);
}

#[test]
fn nothing_that_a_tenant_keeps_of_a_udmabuf_reaches_the_next_tenant() {
    matrix(Backend::Udmabuf);
}

#[test]
fn nothing_that_a_tenant_keeps_of_a_memfd_reaches_the_next_tenant() {
    matrix(Backend::Memfd);
}

/// The same attempts on a buffer that changes hands as it is.
#[test]
fn without_the_brokers_rules_every_attempt_sees_the_next_tenants_bytes_and_changes_them() {
    let _rule = apply_udev_rules();
    let_everybody_import();
    let mut succeeded = 0;
    for backend in [Backend::Cma, Backend::System, Backend::Udmabuf, Backend::Memfd] {
        for keep in ALL {
            let (buffer, _behind) = backend.buffer();
            let map = Map::writable(buffer.as_fd(), EXTENT);
            map.fill(0, EXTENT, A);
            let refused = can_keep(backend, keep) == Some(false);
            let mut first = Peer::start(ALICE, |turns| {
                let residue = Residue::keep(keep, buffer.try_clone().expect("dup"));
                turns.yield_to_test();
                match residue {
                    Ok(residue) => {
                        assert!(!refused, "{backend:?} {keep:?}");
                        assert!(residue.use_it().iter().all(|b| *b == B), "{backend:?} {keep:?}");
                    }
                    Err(e) => {
                        assert!(can_keep(backend, keep) != Some(true), "{backend:?} {keep:?}: {e}");
                        assert!(
                            [Errno::EFAULT, Errno::EBADFD, Errno::EINVAL].contains(&e),
                            "{backend:?} {keep:?}: {e}"
                        );
                    }
                }
            });
            first.wait_for_yield();
            map.fill(0, EXTENT, B);
            first.resume();
            first.finish();
            let changed = map.is_all(ATTACK);
            assert!(changed || map.is_all(B));
            if can_keep(backend, keep) == Some(true) && keep != Keep::Pipe {
                assert!(changed, "{backend:?} {keep:?}");
                succeeded += 1;
            }
        }
    }
    assert!(succeeded >= 20, "{succeeded} attempts succeeded");
}

#[test]
fn a_tenant_cannot_add_a_seal_that_would_keep_its_extent_from_being_emptied() {
    let broker = Place::new(&Backend::Memfd.pool()).start();
    let socket = broker.socket();
    as_user(ALICE, || {
        let mut c = Connection::new(&socket, "sealer");
        c.reserve(1).expect("a block");
        let extent = c.extents.values().next().expect("an extent").as_fd();
        for more in [SealFlag::F_SEAL_FUTURE_WRITE, SealFlag::F_SEAL_WRITE] {
            assert_eq!(seal(extent, more).unwrap_err(), Errno::EPERM, "{more:?}");
        }
        // The same on a memfd that is not sealed against seals: so the refusal is the seal's doing.
        let careless = memfd(EXTENT, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
        seal(careless.as_fd(), SealFlag::F_SEAL_FUTURE_WRITE).expect("nothing forbids it");
    });
    until("it is back", || broker.account("free") == (EXTENTS * EXTENT) as u64);
    broker.stop();
}

/// Tokens of a common prompt: as many blocks as one extent has.
const COMMON: usize = PER_EXTENT as usize * 16;

/// What Alice pins as "engine" is common to Bob.
fn common_rule() -> String {
    format!("[[prefix.common]]\nuid = {}\nlabel = \"engine\"\ntenants = [{}]", ALICE.uid, BOB.uid)
}

/// A session of the library's, in a client that calls itself "engine".
fn engine(socket: &Path) -> Session {
    let options = ClientOptions { label: "engine".into(), credit_ahead: 0, ..ClientOptions::default() };
    let client = Client::connect_to(socket, options).expect("connect");
    let profile = client.profile(&Profile::reference()).expect("profile");
    client.open(&profile, OpenOptions { model: "m".into(), ..OpenOptions::default() }).expect("open")
}

fn common_ids() -> Vec<u32> {
    (0..=COMMON as u32).collect()
}

/// This process's descriptors of read-only copies.
fn copies() -> Vec<std::path::PathBuf> {
    let all = fs::read_dir("/proc/self/fd").expect("fds").map(|e| e.expect("entry").path());
    let is_copy = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|what| what.to_string_lossy().contains("kvbroker-common"))
    };
    all.filter(is_copy).collect()
}

/// The four ways to write in memory that one was given for reading.
fn attack(copy: &Path) {
    let fd = File::open(copy).map(OwnedFd::from);
    assert_eq!(fd.expect_err("opened again for reading").raw_os_error(), Some(libc::EACCES), "mode 0400");
    let again = fs::OpenOptions::new().read(true).write(true).open(copy);
    assert_eq!(again.expect_err("opened again for writing").raw_os_error(), Some(libc::EACCES));
    let number: i32 =
        copy.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse().ok()).expect("a number");
    // SAFETY: it is this process's, stays open meanwhile, and is not closed through this.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let map = |prot| {
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe { libc::mmap(std::ptr::null_mut(), EXTENT, prot, libc::MAP_SHARED, fd.as_raw_fd(), 0) }
    };
    assert_eq!(map(libc::PROT_READ | libc::PROT_WRITE), libc::MAP_FAILED, "mapped for writing");
    let readable = map(libc::PROT_READ);
    assert_ne!(readable, libc::MAP_FAILED, "{}", Errno::last());
    // SAFETY: the mapping was made just now, and nothing refers to it.
    unsafe {
        assert_eq!(libc::mprotect(readable, EXTENT, libc::PROT_READ | libc::PROT_WRITE), -1, "mprotect");
        libc::munmap(readable, EXTENT);
    }
    assert_eq!(udmabuf(fd, &[(0, EXTENT)]).expect_err("a udmabuf of it"), Errno::EINVAL);
    // The same of an extent of the caller's own: so the refusal is the seal's doing.
    udmabuf(memfd(EXTENT, broker_seals()).as_fd(), &[(0, EXTENT)]).expect("a udmabuf of a writable memfd");
}

fn common_prompt(backend: Backend) {
    let broker = Place::new(&format!("{}\n{}", backend.pool(), common_rule())).start();
    let_everybody_import();
    let socket = broker.socket();
    let mut donor = Peer::start(ALICE, |turns| {
        let mut session = engine(&socket);
        session.ensure(COMMON).expect("blocks");
        write_kv(&mut session, 0..COMMON, 1);
        assert_eq!(session.seal(&common_ids()[..COMMON]).expect("seal"), COMMON);
        session.pin(COMMON).expect("pin");
        turns.yield_to_test();
        // Its own mapping stays writable, and is of other memory.
        for token in 0..COMMON {
            let row = session.row_mut(token, 0, Kv::K);
            // SAFETY: the row is mapped writable for as long as the session lives.
            unsafe { row.write_volatile(!row.read_volatile()) };
        }
        turns.yield_to_test();
    });
    donor.wait_for_yield();
    until("it is copied", || broker.prefixes()["common"][0]["state"] == "shared");
    let mut reader = Peer::start(BOB, |turns| {
        let mut session = engine(&socket);
        assert_eq!(session.attach(&common_ids()).expect("attach"), COMMON);
        check_kv(&session, 0..COMMON, 1);
        let copies = copies();
        assert_eq!(copies.len(), 1);
        copies.iter().for_each(|copy| attack(copy));
        turns.yield_to_test();
        check_kv(&session, 0..COMMON, 1);
        session.writable(0..20).expect("a copy of its own");
        write_kv(&mut session, 0..20, 2);
        check_kv(&session, 20..COMMON, 1);
    });
    reader.wait_for_yield();
    donor.resume();
    donor.wait_for_yield();
    reader.resume();
    reader.finish();
    donor.resume();
    donor.finish();
    as_user(crate::support::User { uid: 1003, gid: 1003, groups: BOB.groups }, || {
        assert_eq!(engine(&socket).attach(&common_ids()).expect("attach"), 0, "nobody has named this one");
    });
    broker.stop();
}

#[test]
fn a_common_prompt_of_a_memfd_pool_can_be_written_by_none_of_its_readers() {
    common_prompt(Backend::Memfd);
}

#[test]
fn a_common_prompt_of_a_udmabuf_pool_can_be_written_by_none_of_its_readers() {
    common_prompt(Backend::Udmabuf);
}

#[test]
fn a_dma_heap_pool_cannot_be_read_only_and_refuses_to_make_a_prompt_common() {
    for backend in [Backend::Cma, Backend::System] {
        let (code, log) = Place::new(&format!("{}\n{}", backend.pool(), common_rule())).fails();
        assert_eq!(code, Some(2), "{log}");
        assert!(log.contains("cannot be handed out for reading only"), "{log}");
    }
}

#[test]
fn a_client_cannot_open_a_heap_under_the_shipped_modes() {
    let _rule = apply_udev_rules();
    as_user(ALICE, || {
        for heap in [CMA_HEAP, SYSTEM_HEAP] {
            assert_eq!(Heap::open(heap).unwrap_err(), Errno::EACCES, "{heap}");
        }
        let device = fs::OpenOptions::new().read(true).write(true).open("/dev/udmabuf");
        assert_eq!(device.unwrap_err().raw_os_error(), Some(libc::EACCES));
    });
}

/// From here on `vmsplice` fails with EPERM in this process and what it becomes.
fn deny_vmsplice() -> io::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // seccomp_data.nr
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_vmsplice as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        Errno::result(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        Errno::result(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter))?;
    }
    Ok(())
}

#[test]
fn a_broker_that_may_not_try_vmsplice_destroys_extents_and_allocates_them_anew() {
    let broker = Place::new(&Backend::Cma.pool()).start_with(|command| {
        // SAFETY: only system calls between fork and exec.
        unsafe { command.pre_exec(deny_vmsplice) };
    });
    let status = broker.status();
    let count = &status["pool"]["holder_count"];
    assert_eq!(count["proven"], false, "{count}");
    assert!(count["text"].as_str().expect("text").contains("EPERM"), "{count}");
    let socket = broker.socket();
    as_user(ALICE, || {
        let mut c = Connection::new(&socket, "first");
        c.reserve(BLOCKS).expect("all blocks");
        for fd in c.extents.values() {
            Map::writable(fd.as_fd(), EXTENT).fill(0, EXTENT, A);
        }
    });
    until("all is back", || broker.account("free") == (EXTENTS * EXTENT) as u64);
    until("and renewed", || broker.status()["counters"]["renewed"] == EXTENTS);
    assert_eq!(broker.status()["counters"]["reused"], 0);
    as_user(BOB, || {
        let mut c = Connection::new(&socket, "second");
        c.reserve(BLOCKS).expect("all blocks");
        assert!(c.extents.values().all(|fd| Map::writable(fd.as_fd(), EXTENT).is_all(0)));
    });
    broker.stop();
}

#[test]
fn extents_come_back_by_consent_and_a_client_that_does_not_answer_keeps_them() {
    let broker = Place::new(&Backend::Cma.pool()).start();
    let socket = broker.socket();
    // Started first: it would inherit the owner's descriptors, and hold them.
    let mut other = Peer::start(BOB, |turns| {
        turns.yield_to_test();
        let mut c = Connection::new(&socket, "other");
        for _ in 0..4 {
            assert_eq!(c.reserve(PER_EXTENT).unwrap_err(), Fault::Busy);
            turns.yield_to_test();
        }
        until("the owner has given its extents back", || c.reserve(BLOCKS).is_ok());
        assert!(c.extents.values().all(|fd| Map::writable(fd.as_fd(), EXTENT).is_all(0)));
    });
    other.wait_for_yield();
    let mut owner = Connection::new(&socket, "owner");
    owner.reserve(BLOCKS).expect("all blocks");
    for fd in owner.extents.values() {
        Map::writable(fd.as_fd(), EXTENT).fill(0, EXTENT, A);
    }
    owner.free();
    other.resume();
    other.wait_for_yield();
    owner.take_in_events();
    let [(asked, deadline)] = owner.asked_back[..] else { panic!("{:?}", owner.asked_back) };
    assert_eq!(deadline, 2000, "one extent is enough, and one is asked for");
    other.resume();
    other.wait_for_yield();
    owner.take_in_events();
    assert_eq!(owner.asked_back.len(), 1, "while it is asked for it is not asked for again");
    let map = broker.map();
    let is_asked = |e: &&serde_json::Value| e["asked_back"] == true;
    assert_eq!(map["extents"].as_array().expect("list").iter().filter(is_asked).count(), 1, "{map}");
    // No block of it is granted while others can serve.
    let (blocks, came) = owner.reserve(BLOCKS - PER_EXTENT).expect("blocks");
    assert!(blocks.iter().all(|b| b.place.extent.0 != asked) && came.is_empty());
    // When nothing else can, the request is withdrawn, and the descriptor comes again.
    let (blocks, came) = owner.reserve(PER_EXTENT).expect("blocks");
    assert!(blocks.iter().all(|b| b.place.extent.0 == asked));
    assert_eq!(came, [asked]);
    // Its late answer is refused: blocks of it are in use.
    assert_eq!(owner.return_extent(asked).unwrap_err(), Fault::BadRequest);
    owner.free();
    // It is asked again, does not answer, and keeps what it has.
    other.resume();
    other.wait_for_yield();
    owner.take_in_events();
    assert_eq!(owner.asked_back.len(), 2);
    std::thread::sleep(std::time::Duration::from_millis(2500));
    other.resume();
    other.wait_for_yield();
    owner.take_in_events();
    assert!(broker.place.log().contains("nobody answered"), "{}", broker.place.log());
    assert_eq!(broker.quarantined(), 0);
    owner.reserve(BLOCKS).expect("it is all the owner's still");
    owner.free();
    // Now it gives back all of them.
    let all: Vec<u32> = owner.extents.keys().copied().collect();
    owner.extents.clear();
    for extent in all {
        owner.return_extent(extent).expect("return extent");
    }
    other.resume();
    other.finish();
    broker.stop();
}

#[test]
fn a_count_of_one_is_what_the_broker_waits_for() {
    // The kernel's side of it, for each kind of dma-buf and each way of keeping one that is counted.
    let _rule = apply_udev_rules();
    let_everybody_import();
    for backend in [Backend::Cma, Backend::System, Backend::Udmabuf] {
        for keep in [Keep::Mapping, Keep::Descriptor, Keep::InFlight, Keep::Import] {
            let (buffer, _behind) = backend.buffer();
            let residue = Residue::keep(keep, buffer.try_clone().expect("dup")).expect("kept");
            assert!(holders(buffer.as_fd()) > 1, "{backend:?} {keep:?}");
            drop(residue);
            assert_eq!(holders(buffer.as_fd()), 1, "{backend:?} {keep:?}");
        }
    }
}
