//! The client library: what an inference engine links.
//!
//! Owns the connection, the mapped extents and the credit of this process. A [`Client`] is shared by its threads; each
//! token sequence is a [`Session`], which one thread uses at a time. Invariants: the data path makes no system call
//! while credit lasts; a refusal comes before anything has been written; what a session holds stays readable and
//! writable whatever becomes of the broker.
//!
//! The broker is trusted with what memory holds, not with the shape of its messages: a broken answer is
//! [`Error::Protocol`], and ends the connection. Only memory that it cuts short after it has handed it over, where the kind of
//! memory has no seals against that, ends the process that touches it.
//!
//! ```no_run
//! use kvbroker::client::{Client, OpenOptions};
//! use kvbroker::profile::{Kv, Profile};
//!
//! # fn main() -> Result<(), kvbroker::client::Error> {
//! let client = Client::connect()?;
//! let profile = client.profile(&Profile::reference())?;
//! let mut session = client.open(&profile, OpenOptions { model: "my-model".into(), ..Default::default() })?;
//! let prompt = [1, 2, 3];
//! let held = session.attach(&prompt)?; // tokens whose KV is there already
//! session.ensure(prompt.len())?; // room for the rest
//! for token in held..prompt.len() {
//!     for layer in 0..24 {
//!         session.write_row(token, layer, Kv::K, &[0; 512])?;
//!         session.write_row(token, layer, Kv::V, &[0; 512])?;
//!     }
//! }
//! session.seal(&prompt)?; // whole blocks can be shared from here on
//! # Ok(())
//! # }
//! ```

mod arena;
mod credit;
mod error;
mod groups;
mod link;
mod pager;
mod session;
mod staging;
mod sync;
mod trust;
mod view;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

pub use error::Error;
pub use groups::{GroupedProfile, GroupedSession};
pub use link::Embedded;
pub use pager::{Notice, Notify, Pager, PagerOptions, PagerPlane, PagerStats};
pub use session::{Batch, Session, SessionStats, StagingStats, Window, WindowOptions, WindowPlace};
pub use view::PlaneView;

use crate::broker::{Broker, Policy};
use crate::heap::{Backend, Memfd};
use crate::id::{BlockId, ExtentId, Place};
use crate::profile::{Plane, Profile};
use crate::wire::{
    self, Event, ExtentInfo, Grant, GrantedBlock, MAX_BLOCKS, MAX_FDS, Reader, Verb, Verdict, Writer,
};
use arena::Arena;
use credit::{Credits, Spare};
use link::{Link, Message};

/// Where the broker listens unless `KVBROKER_SOCKET` says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/kvbroker/kvbroker.sock";

/// How to reach a broker.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The program's name for people; by default the name of the executable.
    pub label: String,
    /// The longest that a call may wait for the broker.
    pub timeout: Duration,
    /// Blocks to have ahead of need. With 1, a decoding session finds its next block already there when it crosses a
    /// block's end, and at most one block per process lies idle.
    pub credit_ahead: u32,
}

impl Default for ClientOptions {
    fn default() -> Self {
        // Without /proc, as in a bare chroot, by the name under which it was started.
        let exe = std::env::current_exe().ok().or_else(|| std::env::args_os().next().map(PathBuf::from));
        let name = exe.as_deref().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
        ClientOptions {
            label: name.unwrap_or_else(|| "unnamed".into()),
            timeout: Duration::from_secs(5),
            credit_ahead: 1,
        }
    }
}

/// How to open a session.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The session's name for people, up to 32 bytes.
    pub label: String,
    /// Whatever tells this model's weights from others': sessions share prefixes only under the same text.
    pub model: String,
    /// The longest length in tokens, if it is known: one that can never fit is refused at once.
    pub max_tokens: Option<u64>,
    /// 1 to 255: who makes room for whom when memory is short, at most the tenant's own; 0 for the tenant's own.
    pub priority: u8,
    /// Zero blocks that this process has used before, when they are used again. Whoever reads whole tiles of a block,
    /// beyond the tokens that are written, needs it.
    pub zero: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { label: String::new(), model: String::new(), max_tokens: None, priority: 0, zero: true }
    }
}

/// How to run a broker in this process.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// Bytes of the pool; rounded down to whole extents.
    pub pool_bytes: u64,
    /// Bytes of one extent.
    pub extent_bytes: u64,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        EmbeddedOptions { pool_bytes: 256 << 20, extent_bytes: 3 << 20 }
    }
}

/// What the broker said at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BrokerInfo {
    /// Identifies this run of the broker.
    pub instance: u64,
    /// This process's tenant: its uid.
    pub tenant: u32,
    /// Bytes of one extent.
    pub extent_bytes: u64,
    /// Extents in the pool.
    pub extents: u32,
    /// The kind of memory.
    pub backend: Backend,
}

/// How much of a format there is, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// The most that this tenant could ever hold.
    pub capacity: u64,
    /// What it could be granted now.
    pub free: u64,
    /// What it holds now, credit included.
    pub held: u64,
}

/// What came of [`Session::admit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Growing to that length will not be refused, whatever others do.
    Admitted,
    /// It fits once this many cached blocks of this tenant are evicted: ask again, and say that they may.
    AfterEviction(u64),
    /// It fits when this many blocks that other sessions of this tenant hold are free.
    WhenYoursFree(u64),
    /// This many blocks are missing, and other tenants have them.
    Busy(u64),
    /// It is too long by this many blocks.
    NeverFits(u64),
}

impl Admission {
    fn of(reply: &wire::Admission) -> Result<Self, Error> {
        let blocks = reply.blocks.get();
        let code = u16::try_from(reply.verdict.get()).ok().and_then(Verdict::from_code);
        Ok(match code {
            Some(Verdict::Admitted) => Admission::Admitted,
            Some(Verdict::AfterEviction) => Admission::AfterEviction(blocks),
            Some(Verdict::WhenYoursFree) => Admission::WhenYoursFree(blocks),
            Some(Verdict::Busy) => Admission::Busy(blocks),
            Some(Verdict::NeverFits) => Admission::NeverFits(blocks),
            None => return Err(Error::Protocol(format!("verdict {}", reply.verdict))),
        })
    }
}

/// A connection to a broker. Cheap to clone; all clones are one connection, which ends with the last clone and the
/// last session.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

/// A profile that the broker knows.
#[derive(Debug, Clone)]
pub struct ClientProfile {
    format: Arc<Format>,
    client: Arc<Shared>,
}

#[derive(Debug)]
struct Format {
    id: u32,
    profile: Profile,
    planes: Vec<[Plane; 2]>,
    slot_bytes: usize,
    blocks_per_extent: u32,
    credits: Credits,
    sessions: AtomicUsize,
}

#[derive(Debug)]
struct Shared {
    link: Mutex<Link>,
    /// Threads that wait for it.
    wanting: AtomicUsize,
    arena: Arena,
    formats: Mutex<Vec<Arc<Format>>>,
    /// Which format a request for blocks was about, until its reply has been taken in.
    asked: Mutex<HashMap<u64, (Arc<Format>, u64)>>,
    /// Sessions that the broker wants back, and when it ends them.
    wanted: Mutex<HashMap<u64, Instant>>,
    /// Sessions that it has ended, and that are still open here.
    lost: Mutex<HashSet<u64>>,
    /// Whether there has been one.
    any_lost: AtomicBool,
    /// The first damaged block of sessions that have one.
    damaged: Mutex<HashMap<u64, u32>>,
    info: BrokerInfo,
    options: ClientOptions,
    /// The staging buffer, while a window uses it.
    staging: Mutex<std::sync::Weak<staging::Staging>>,
    /// The device imports extents in which this process has no credit only.
    alone: AtomicBool,
    made_by: u32,
}

impl Client {
    /// Connects to the broker at `KVBROKER_SOCKET`, or at its usual place. With `KVBROKER_BACKEND=embedded` there is
    /// none: the pool is this process's own.
    pub fn connect() -> Result<Self, Error> {
        Client::connect_with(ClientOptions::default())
    }

    /// [`connect`](Self::connect) with options.
    pub fn connect_with(options: ClientOptions) -> Result<Self, Error> {
        match std::env::var("KVBROKER_BACKEND").as_deref() {
            Ok("embedded") => Client::embedded_with(EmbeddedOptions::default(), options),
            Ok(other) if !other.is_empty() => {
                let text = format!(
                    "KVBROKER_BACKEND={other}: the only value is embedded; leave it unset for a broker"
                );
                Err(Error::Invalid(text))
            }
            _ => {
                let path = usual_socket(std::env::var_os("KVBROKER_SOCKET"));
                Client::connect_to(&path, options)
            }
        }
    }

    /// Connects to the broker at `socket`.
    pub fn connect_to(socket: &Path, options: ClientOptions) -> Result<Self, Error> {
        let path = || PathBuf::from(socket);
        let link = Link::connect(socket, options.timeout)?;
        Client::start(link, options).map_err(|e| match e {
            Error::Protocol(why) => Error::Stranger { path: path(), why },
            Error::Lost(why) => Error::NotReachable { path: path(), source: std::io::Error::other(why) },
            other => other,
        })
    }

    /// A pool of this process's own, over memfd.
    pub fn embedded(options: EmbeddedOptions) -> Result<Self, Error> {
        Client::embedded_with(options, ClientOptions::default())
    }

    /// [`embedded`](Self::embedded) with options.
    pub fn embedded_with(embedded: EmbeddedOptions, options: ClientOptions) -> Result<Self, Error> {
        let extents = u32::try_from(embedded.pool_bytes / embedded.extent_bytes.max(1)).unwrap_or(u32::MAX);
        let heap = Arc::new(Memfd::new(false));
        let broker = Broker::new(heap, embedded.extent_bytes, extents, extents, Policy::default())?;
        Client::on(&Embedded::new(broker), nix::unistd::getuid().as_raw(), options)
    }

    /// A client of a broker in this process, as the tenant `uid`: for tests and simulations.
    pub fn on(broker: &Embedded, uid: u32, options: ClientOptions) -> Result<Self, Error> {
        Client::start(broker.connect(uid)?, options)
    }

    fn start(mut link: Link, options: ClientOptions) -> Result<Self, Error> {
        let hello = wire::Hello {
            magic: wire::MAGIC.into(),
            version: wire::VERSION.into(),
            label: wire::label(&options.label),
        };
        let reply = link.call(Verb::Hello, 0, options.timeout, |w| {
            w.put(&hello);
        })?;
        let welcome: wire::Welcome = read_one(&reply)?;
        let backend = welcome.backend.get();
        let info = BrokerInfo {
            instance: welcome.instance.get(),
            tenant: welcome.tenant.get(),
            extent_bytes: welcome.extent_bytes.get(),
            extents: welcome.extents.get(),
            backend: Backend::from_code(backend)
                .ok_or_else(|| Error::Protocol(format!("backend {backend} is not known to this library")))?,
        };
        // Twice the pool: an extent that the broker has renewed comes under a new name while the old one may still be
        // mapped here.
        let places = info.extents.saturating_mul(2).saturating_add(2).saturating_add(welcome.copies.get());
        let arena = Arena::new(places, info.extent_bytes as usize)
            .map_err(|source| Error::Map { what: "the address range of the pool".into(), source })?;
        let shared = Shared {
            link: Mutex::new(link),
            wanting: AtomicUsize::new(0),
            arena,
            formats: Mutex::new(Vec::new()),
            asked: Mutex::new(HashMap::new()),
            wanted: Mutex::new(HashMap::new()),
            lost: Mutex::default(),
            any_lost: AtomicBool::new(false),
            damaged: Mutex::new(HashMap::new()),
            info,
            options,
            staging: Mutex::default(),
            alone: AtomicBool::new(false),
            made_by: std::process::id(),
        };
        Ok(Client { shared: Arc::new(shared) })
    }

    /// What the broker said at the start.
    pub fn info(&self) -> BrokerInfo {
        self.shared.info
    }

    /// Registers a geometry of one layer group. Refused when a block of it does not fit an extent. For several groups:
    /// [`grouped_profile`](Self::grouped_profile).
    pub fn profile(&self, profile: &Profile) -> Result<ClientProfile, Error> {
        if profile.groups().len() != 1 {
            let text = format!(
                "profile {} has {} layer groups: register it with grouped_profile",
                profile.name(),
                profile.groups().len()
            );
            return Err(Error::Invalid(text));
        }
        let reply = self.shared.call(Verb::Profile, 0, |w| wire::put_profile(w, profile, 0))?;
        let format: wire::Format = read_one(&reply)?;
        let mut formats = lock(&self.shared.formats);
        let known = formats.iter().find(|f| f.id == format.format.get()).cloned();
        let format = known.unwrap_or_else(|| {
            let new = Arc::new(Format {
                id: format.format.get(),
                planes: profile.planes(0),
                slot_bytes: format.slot_bytes.get() as usize,
                blocks_per_extent: format.blocks_per_extent.get(),
                credits: Credits::new(self.shared.arena.capacity(), format.blocks_per_extent.get()),
                profile: profile.clone(),
                sessions: AtomicUsize::new(0),
            });
            formats.push(new.clone());
            new
        });
        Ok(ClientProfile { format, client: self.shared.clone() })
    }

    /// Opens a session.
    pub fn open(&self, profile: &ClientProfile, options: OpenOptions) -> Result<Session, Error> {
        if !Arc::ptr_eq(&profile.client, &self.shared) {
            return Err(Error::Invalid("the profile was registered on another client".into()));
        }
        let open = wire::Open {
            format: profile.format.id.into(),
            priority: u32::from(options.priority).into(),
            max_tokens: options.max_tokens.unwrap_or(0).into(),
            model: Sha256::digest(&options.model).into(),
            label: wire::label(&options.label),
        };
        let reply = self.shared.call(Verb::Open, 0, |w| {
            w.put(&open);
        })?;
        let opened: wire::Opened = read_one(&reply)?;
        Ok(Session::new(self.shared.clone(), profile.format.clone(), opened.session.get(), options.zero))
    }

    /// Takes in what the broker has to say: an extent that it wants back, a late answer. Every call does that too; who makes no
    /// calls for long should do it now and then, or when [`event_fd`](Self::event_fd) is readable. Waits for no answer, and
    /// while another thread's call does that, for some milliseconds at most. An error when the broker has gone.
    pub fn poll(&self) -> Result<(), Error> {
        self.shared.poll()
    }

    /// The connection's descriptor, to wait on; `None` when the broker is embedded. It stays the client's.
    pub fn event_fd(&self) -> Option<RawFd> {
        self.shared.enter().fd().map(|fd| fd.as_raw_fd())
    }

    /// Whether the broker has gone.
    pub fn is_lost(&self) -> bool {
        self.shared.enter().is_lost()
    }
}

impl ClientProfile {
    /// The geometry.
    pub fn profile(&self) -> &Profile {
        &self.format.profile
    }

    /// Bytes of a block's place in an extent.
    pub fn slot_bytes(&self) -> usize {
        self.format.slot_bytes
    }

    /// Where the planes of a layer lie in a block, K and V.
    pub fn planes(&self, layer: usize) -> [Plane; 2] {
        self.format.planes[layer]
    }

    /// How much of it there is.
    pub fn room(&self) -> Result<Room, Error> {
        self.client.room(&self.format, 0)
    }

    /// Takes `blocks` blocks as credit now, all or none, so that growing by as much cannot be refused later.
    pub fn reserve(&self, blocks: u32) -> Result<(), Error> {
        let got = self.client.reserve(&self.format, blocks as usize)?;
        got.into_iter().for_each(|spare| self.format.credits.give(spare));
        Ok(())
    }

    /// Gives blocks back that have been reserved, as far as they are still there.
    fn unreserve(&self, blocks: u32) -> Result<(), Error> {
        let spares = std::iter::from_fn(|| self.format.credits.take()).take(blocks as usize).collect();
        self.client.free(&self.format, spares)
    }

    /// Blocks that this process has ahead of need.
    pub fn credit(&self) -> u32 {
        self.format.credits.count()
    }

    /// Takes a block from credit and gives it back at once: what the bench times. `false` without credit.
    #[doc(hidden)]
    pub fn take_and_give_back(&self) -> bool {
        self.format.credits.take().map(|spare| self.format.credits.give(spare)).is_some()
    }

    /// Gives all credit back to the broker.
    pub fn release_credit(&self) -> Result<(), Error> {
        self.client.release_surplus(&self.format, 0, None)
    }
}

/// Where the broker is, by `KVBROKER_SOCKET`: empty is unset, as for `KVBROKER_BACKEND`.
fn usual_socket(named: Option<OsString>) -> PathBuf {
    named.filter(|path| !path.is_empty()).map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn read_one<T>(message: &Message) -> Result<T, Error>
where
    T: zerocopy::FromBytes + zerocopy::Immutable + zerocopy::KnownLayout + zerocopy::Unaligned + Copy,
{
    let mut r = Reader::new("the broker's reply", &message.body);
    let one: T = *r.one().map_err(|e| Error::Protocol(e.to_string()))?;
    r.end().map_err(|e| Error::Protocol(e.to_string()))?;
    Ok(one)
}

/// How long a call that waits keeps the connection to itself, so that other threads can speak and hear meanwhile. A thread whose
/// answer another one has taken in finds it after as long at the latest.
const SLICE: Duration = Duration::from_millis(5);

impl Shared {
    fn link(&self) -> Result<MutexGuard<'_, Link>, Error> {
        // A forked child shares the socket with its parent: one word from it would spoil the parent's conversation.
        if std::process::id() != self.made_by {
            return Err(Error::Forked);
        }
        Ok(self.enter())
    }

    fn enter(&self) -> MutexGuard<'_, Link> {
        self.wanting.fetch_add(1, Ordering::Relaxed);
        let link = lock(&self.link);
        self.wanting.fetch_sub(1, Ordering::Relaxed);
        link
    }

    /// Lets other threads have the connection.
    fn step_back<'a>(&'a self, link: MutexGuard<'a, Link>) -> MutexGuard<'a, Link> {
        drop(link);
        if self.wanting.load(Ordering::Relaxed) > 0 {
            // Whoever lets go of a lock and takes it at once is quicker than one that has to wake up first.
            std::thread::sleep(Duration::from_micros(100));
        }
        self.enter()
    }

    fn poll(&self) -> Result<(), Error> {
        let mut link = self.link()?;
        link.drain();
        self.take_in(&mut link)?;
        link.lost().map_or(Ok(()), Err)
    }

    /// What the broker has said makes no sense to a session: nothing that comes from it can be relied on any more.
    fn broken(&self, why: String) -> Error {
        self.enter().broken(why)
    }

    /// Whether the broker has ended a session.
    #[inline]
    fn has_lost(&self, session: u64) -> bool {
        self.any_lost.load(Ordering::Relaxed) && lock(&self.lost).contains(&session)
    }

    fn note_lost(&self, session: u64) {
        lock(&self.wanted).remove(&session);
        lock(&self.lost).insert(session);
        self.any_lost.store(true, Ordering::Relaxed);
    }

    /// A session is closed.
    fn forget(&self, session: u64) {
        lock(&self.wanted).remove(&session);
        lock(&self.lost).remove(&session);
        lock(&self.damaged).remove(&session);
    }

    /// How much there is, for a session if it is not 0.
    fn room(&self, format: &Format, session: u64) -> Result<Room, Error> {
        let query = wire::Query { format: format.id.into(), reserved: 0.into() };
        let reply = self.call(Verb::Query, session, |w| {
            w.put(&query);
        })?;
        let room: wire::Room = read_one(&reply)?;
        Ok(Room { capacity: room.capacity.get(), free: room.free.get(), held: room.held.get() })
    }

    /// Sends a request and waits for its reply. Blocks that come with it are mapped when this returns ([`Message::granted`]),
    /// and belong to the caller.
    fn call(&self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> Result<Message, Error> {
        self.call_late(verb, session, fill, |_| ())
    }

    /// [`call`](Self::call). `late` is told the request's number when the answer may still come.
    fn call_late(
        &self,
        verb: Verb,
        session: u64,
        fill: impl FnOnce(&mut Writer),
        late: impl FnOnce(u64),
    ) -> Result<Message, Error> {
        let timeout = self.options.timeout;
        let deadline = Instant::now() + timeout;
        let mut link = self.link()?;
        let sequence = link.ask(verb, session, timeout, fill)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let heard = link.listen(SLICE.min(left));
            // In the order in which it came, whoever it is for: what one answer brings, the next may speak of.
            if let Err(e) = self.take_in(&mut link) {
                log::debug!("taking in what the broker says: {e}");
            }
            if let Some(reply) = link.answer(sequence) {
                let refused = reply.verdict().err();
                if refused.as_ref().and_then(Error::fault) == Some(wire::Fault::SessionLost) {
                    self.note_lost(session);
                }
                return refused.map_or(Ok(reply), Err);
            }
            match heard {
                Err(e) => {
                    link.give_up(sequence);
                    return Err(e);
                }
                Ok(false) if left.is_zero() => {
                    let why = link.give_up_late(sequence, verb, timeout);
                    late(sequence);
                    return Err(why);
                }
                Ok(true) => {}
                Ok(false) => link = self.step_back(link),
            }
        }
    }

    /// A request whose reply hands over blocks of credit: they are mapped when this returns, and belong to the caller.
    fn request_blocks(
        &self,
        format: &Arc<Format>,
        verb: Verb,
        session: u64,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<Vec<Spare>, Error> {
        // The answer may still come, and with it blocks.
        let late = |sequence| _ = lock(&self.asked).insert(sequence, (format.clone(), session));
        let reply = self.call_late(verb, session, fill, late)?;
        Ok(reply.granted()?.1.into_iter().map(|(spare, _)| spare).collect())
    }

    /// Refuses more blocks than there can be, before the first of several requests for them has taken what others would
    /// get. `kept`: blocks that the session, if it is not 0, has beside them; `ready`: what there is of them already.
    fn refuse_if_short(
        &self,
        format: &Format,
        session: u64,
        count: usize,
        kept: usize,
        ready: u32,
    ) -> Result<(), Error> {
        let room = self.room(format, session)?;
        let needed = count as u64;
        let all = needed.saturating_add(kept as u64);
        let ready = room.free.saturating_add(u64::from(ready));
        let (fault, needed, available) = if all > room.capacity {
            (wire::Fault::NeverFits, all, room.capacity)
        } else if needed > ready {
            (wire::Fault::Busy, needed, ready)
        } else {
            return Ok(());
        };
        let text = match fault {
            wire::Fault::NeverFits => format!(
                "{needed} blocks will never fit: this tenant can hold at most {available} of this format"
            ),
            _ => format!(
                "{needed} blocks are needed, {available} can be had now; close or trim sessions, or try again later"
            ),
        };
        Err(Error::Refused { fault, needed, available, text })
    }

    /// Takes blocks for no table yet, all or none: they belong to the caller.
    fn reserve(&self, format: &Arc<Format>, blocks: usize) -> Result<Vec<Spare>, Error> {
        if blocks > MAX_FDS {
            self.refuse_if_short(format, 0, blocks, 0, 0)?;
        }
        let mut got = Vec::with_capacity(blocks);
        while got.len() < blocks {
            // Each may lie in an extent of its own, whose descriptor comes with it.
            let want = (blocks - got.len()).min(MAX_FDS) as u32;
            let reserve = wire::Reserve { format: format.id.into(), want: want.into() };
            let answer = self.request_blocks(format, Verb::Reserve, 0, |w| {
                w.put(&reserve);
            });
            match answer {
                Ok(spares) => got.extend(spares),
                Err(e) => {
                    if let Err(e) = self.free(format, got) {
                        // They stay credit of this process, and are taken next.
                        log::debug!("blocks of a reservation that failed were not given back: {e}");
                    }
                    return Err(e);
                }
            }
        }
        Ok(got)
    }

    /// Asks for blocks without waiting; they become credit when the answer is taken in.
    fn ask_ahead(
        &self,
        format: &Arc<Format>,
        session: u64,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<(), Error> {
        let mut link = self.link()?;
        let sequence = link.send(Verb::Grow, session, self.options.timeout, fill)?;
        lock(&self.asked).insert(sequence, (format.clone(), session));
        Ok(())
    }

    /// Takes in what has come, all of it, in its order. What could not be taken in is told.
    fn take_in(&self, link: &mut Link) -> Result<(), Error> {
        let mut all = Ok(());
        while let Some(message) = link.aside.pop_front() {
            let taken = match message.sequence {
                0 => self.take_in_event(link, &message),
                _ => self.take_in_reply(link, message),
            };
            all = all.and(taken);
        }
        all
    }

    fn take_in_event(&self, link: &mut Link, message: &Message) -> Result<(), Error> {
        match message.event() {
            Some(Event::GiveBack) => self.give_back(link, message)?,
            Some(Event::ReclaimSession) => {
                let event: wire::ReclaimSession = read_one(message)?;
                let until = Instant::now() + Duration::from_millis(event.deadline_ms.get().into());
                lock(&self.wanted).insert(event.session.get(), until);
            }
            Some(Event::SessionLost) => {
                let event: wire::Opened = read_one(message)?;
                self.note_lost(event.session.get());
            }
            Some(Event::PrefixDamaged) => {
                let event: wire::Damaged = read_one(message)?;
                let mut damaged = lock(&self.damaged);
                let first = damaged.entry(event.session.get()).or_insert(u32::MAX);
                *first = event.block.get().min(*first);
            }
            _ => {}
        }
        Ok(())
    }

    /// Maps what came with a reply, and keeps it for whoever waits for it. If nobody does, blocks are credit.
    fn take_in_reply(&self, link: &mut Link, mut message: Message) -> Result<(), Error> {
        let asked = lock(&self.asked).remove(&message.sequence);
        if let Ok(Verb::Grow | Verb::Reserve | Verb::Trim) = message.verdict() {
            message.grant = Some(self.take_over_credit(link, &mut message));
        } else if let Ok(Verb::Attach) = message.verdict() {
            message.grant = Some(self.take_over(&mut message));
        }
        if link.is_awaited(message.sequence) {
            link.keep(message);
            return Ok(());
        }
        // Refused ahead of need: the next request that really needs blocks will be told why.
        let Some((format, _)) = asked.filter(|_| message.grant.is_some()) else { return Ok(()) };
        for (spare, _) in message.granted()?.1 {
            format.credits.give(spare);
        }
        Ok(())
    }

    /// Whether an answer to [`ask_ahead`](Self::ask_ahead) is still to come.
    fn is_asked(&self, format: &Arc<Format>) -> bool {
        lock(&self.asked).values().any(|(f, _)| Arc::ptr_eq(f, format))
    }

    /// Whether a session waits for one.
    fn has_asked(&self, session: u64) -> bool {
        lock(&self.asked).values().any(|(_, by)| *by == session)
    }

    /// Maps what came with a grant. Returns the tokens that it names, and its blocks with their flags.
    fn take_over(&self, message: &mut Message) -> Result<Granted, Error> {
        let grant = ParsedGrant::parse(message)?;
        let fds = std::mem::take(&mut message.fds);
        if message.fds_lost {
            let source = std::io::Error::from_raw_os_error(libc::EMFILE);
            return Err(Error::Map { what: "the descriptors of a grant".into(), source });
        }
        if grant.extents.len() != fds.len() {
            let (named, came) = (grant.extents.len(), fds.len());
            return Err(Error::Protocol(format!(
                "a grant names {named} extents and brings {came} descriptors"
            )));
        }
        if grant.alone {
            self.alone.store(true, Ordering::Relaxed);
        }
        for ((&id, &writable), fd) in grant.extents.iter().zip(&grant.writable).zip(fds) {
            let what = || format!("{id} of {} bytes", self.info.extent_bytes);
            self.arena.map(id, fd, writable).map_err(|source| Error::Map { what: what(), source })?;
        }
        let spare = |&(BlockId { place, generation }, flags): &(BlockId, u32)| {
            let missing = || Error::Protocol(format!("{} was granted without its descriptor", place.extent));
            let position = self.arena.position(place.extent).ok_or_else(missing)?;
            Ok((Spare { position, slot: place.slot, generation, zero: flags & wire::ZERO != 0 }, flags))
        };
        let blocks = grant.blocks.iter().map(spare).collect::<Result<_, Error>>()?;
        Ok((grant.tokens, blocks))
    }

    /// The same for a grant of credit. What cannot be mapped here goes back to the broker, all of it.
    fn take_over_credit(&self, link: &mut Link, message: &mut Message) -> Result<Granted, Error> {
        let taken = self.take_over(message);
        if taken.is_err() {
            let grant = ParsedGrant::parse(message)?;
            link.send(Verb::Free, 0, self.options.timeout, |w| {
                w.put(&wire::Free { count: (grant.blocks.len() as u32).into(), reserved: 0.into() });
                w.put_blocks(grant.blocks.iter().map(|(block, _)| *block));
            })?;
            // They came with this very message: nobody here has used them.
            for &extent in &grant.extents {
                if self.arena.unmap(extent) {
                    self.send_return(link, extent)?;
                }
            }
        }
        taken
    }

    /// Of extents that came with a grant, those that could not be mapped: the broker must know that they are not here.
    fn return_unmapped(&self, extents: &[ExtentId]) -> Result<(), Error> {
        let mut link = self.link()?;
        for &extent in extents.iter().filter(|extent| self.arena.position(**extent).is_none()) {
            self.send_return(&mut link, extent)?;
        }
        Ok(())
    }

    fn send_return(&self, link: &mut Link, extent: ExtentId) -> Result<(), Error> {
        let back = wire::ReturnExtent { extent: extent.0.into(), reserved: 0.into() };
        link.send(Verb::ReturnExtent, 0, self.options.timeout, |w| {
            w.put(&back);
        })?;
        Ok(())
    }

    /// The broker wants an extent back in which no block is in use, or has taken it.
    fn give_back(&self, link: &mut Link, message: &Message) -> Result<(), Error> {
        let event: wire::GiveBack = read_one(message)?;
        let extent = ExtentId(event.extent.get());
        if self.arena.unmap(extent) && event.deadline_ms.get() > 0 {
            self.send_return(link, extent)?;
        }
        Ok(())
    }

    /// Gives all credit but `keep` blocks back to the broker: `first`, which has been taken for this, and then any.
    fn release_surplus(&self, format: &Arc<Format>, keep: u32, first: Option<Spare>) -> Result<(), Error> {
        first.into_iter().for_each(|spare| format.credits.give(spare));
        let surplus = format.credits.count().saturating_sub(keep) as usize;
        if surplus == 0 {
            return Ok(());
        }
        let first = first.and_then(|s| format.credits.take_at(s.position, s.slot));
        let rest = std::iter::from_fn(|| format.credits.take());
        let spares: Vec<_> = first.into_iter().chain(rest).take(surplus).collect();
        self.free(format, spares)
    }

    /// Gives the credit in some extents back to the broker.
    fn free_credit_in(&self, format: &Arc<Format>, extents: &BTreeSet<ExtentId>) -> Result<(), Error> {
        if self.is_asked(format) {
            // Answers come in order: after this one, what was asked for ahead is here too.
            self.room(format, 0)?;
        }
        let positions: BTreeSet<_> = extents.iter().filter_map(|e| self.arena.position(*e)).collect();
        let all: Vec<_> = std::iter::from_fn(|| format.credits.take()).collect();
        let (there, elsewhere): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|spare| positions.contains(&spare.position));
        elsewhere.into_iter().for_each(|spare| format.credits.give(spare));
        self.free(format, there)
    }

    /// Gives credit back to the broker. Without a broker it stays credit.
    fn free(&self, format: &Arc<Format>, spares: Vec<Spare>) -> Result<(), Error> {
        for some in spares.chunks(MAX_BLOCKS) {
            let names = some.iter().filter_map(|s| self.name(s.position, s.slot, s.generation));
            let sent = self.call(Verb::Free, 0, |w| {
                w.put(&wire::Free { count: (some.len() as u32).into(), reserved: 0.into() });
                w.put_blocks(names);
            });
            if let Err(e) = sent {
                // After a timeout nobody knows whether the broker has them: nobody uses them here any more.
                if !matches!(e, Error::Timeout(_)) {
                    some.iter().for_each(|s| format.credits.give(*s));
                }
                return Err(e);
            }
        }
        Ok(())
    }

    /// The name of the block at a place of the arena.
    fn name(&self, position: u32, slot: u32, generation: u64) -> Option<BlockId> {
        let extent = self.arena.extent_at(position)?;
        Some(BlockId { place: Place { extent, slot }, generation })
    }
}

/// The tokens that a grant names, and its blocks with their flags.
type Granted = (u64, Vec<(Spare, u32)>);

/// What a grant says.
struct ParsedGrant {
    tokens: u64,
    extents: Vec<ExtentId>,
    /// Of each extent, whether it may be written.
    writable: Vec<bool>,
    /// The device imports them only while no credit is in them.
    alone: bool,
    blocks: Vec<(BlockId, u32)>,
}

impl ParsedGrant {
    fn parse(message: &Message) -> Result<Self, Error> {
        let protocol = |e: wire::WireError| Error::Protocol(e.to_string());
        let mut r = Reader::new("a grant", &message.body);
        let grant: Grant = *r.one().map_err(protocol)?;
        let extents: &[ExtentInfo] = r.many(grant.extents.get(), MAX_FDS).map_err(protocol)?;
        let blocks: &[GrantedBlock] = r.many(grant.blocks.get(), MAX_BLOCKS).map_err(protocol)?;
        r.end().map_err(protocol)?;
        Ok(ParsedGrant {
            tokens: grant.tokens.get(),
            extents: extents.iter().map(|e| ExtentId(e.extent.get())).collect(),
            writable: extents.iter().map(|e| e.flags.get() & wire::READ_ONLY == 0).collect(),
            alone: extents.iter().any(|e| e.flags.get() & wire::EXTENT_ALONE != 0),
            blocks: blocks.iter().map(|b| (b.block.id(), b.flags.get())).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_name_of_the_socket_is_none() {
        assert_eq!(usual_socket(None), Path::new(DEFAULT_SOCKET));
        assert_eq!(usual_socket(Some("".into())), Path::new(DEFAULT_SOCKET));
        assert_eq!(usual_socket(Some("/run/x".into())), Path::new("/run/x"));
    }

    /// Fails to compile, not to run.
    #[test]
    fn a_client_is_shared_by_threads_and_a_session_moves_between_them() {
        fn shared<T: Send + Sync>() {}
        fn moved<T: Send>() {}
        shared::<Client>();
        shared::<ClientProfile>();
        moved::<Session>();
    }
}
