//! The protocol between a client and the broker: every message, byte by byte. `docs/protocol.md` says the same
//! for a C programmer.
//!
//! Owns no state. Invariants: every structure is fixed-size, little-endian and without alignment or padding, and
//! a decoder hands out a message only when its length is exactly what its counts say, so nothing behind this
//! module ever indexes by a number from a peer that has not been checked against the bytes that came.
//!
//! A message is one `SOCK_SEQPACKET` datagram: a [`Header`], then the structure of its verb, then the arrays that
//! the structure counts. A request carries a sequence number above 0; its one reply repeats it. An event has
//! sequence number 0. Descriptors travel from broker to client only.

// The derive macros of zerocopy define types of their own in here.
#![allow(missing_debug_implementations)]

use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::id::{BlockId, ExtentId, Place};
use crate::profile::{Group, Layer, Layout, MAX_LAYERS, Profile};

/// First bytes of a [`Hello`]: `KVBR`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"KVBR");
/// The version of this protocol. A broker speaks exactly one.
pub const VERSION: u32 = 1;
/// The longest message, in bytes, in both directions.
pub const MAX_MESSAGE: usize = 64 << 10;
/// The most blocks that one message may name.
pub const MAX_BLOCKS: usize = 1024;
/// The most token ids that one message may carry.
pub const MAX_TOKENS: usize = 8192;
/// The most descriptors of one message (`SCM_MAX_FD` of the kernel).
pub const MAX_FDS: usize = 253;
/// Set in the opcode of a reply.
pub const REPLY: u16 = 0x8000;
/// Set in the opcode of an event, together with [`REPLY`].
pub const EVENT: u16 = 0xC000;

macro_rules! wire {
    ($($(#[$meta:meta])* struct $name:ident { $($(#[$fm:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fm])* pub $field: $ty,)* }
    )*};
}

wire! {
    /// Starts every message: 24 bytes.
    struct Header {
        /// A [`Verb`]; with [`REPLY`] or [`EVENT`] set on what the broker sends.
        opcode: U16,
        /// In a reply: 0, or the [`Fault`] that a [`Refusal`] explains. Otherwise 0.
        fault: U16,
        /// Length of the whole message in bytes: must equal the datagram's.
        length: U32,
        /// The request's number on this connection, above 0; 0 in an event.
        sequence: U64,
        /// The session that the request is about; 0 where the verb has none.
        session: U64,
    }

    /// `hello`: first message of a connection.
    struct Hello {
        /// [`MAGIC`].
        magic: U32,
        /// [`VERSION`].
        version: U32,
        /// The program's name for people, UTF-8 padded with zeros.
        label: [u8; 32],
    }

    /// Reply to `hello`.
    struct Welcome {
        /// [`VERSION`] of the broker.
        version: U32,
        /// The uid that the kernel names as the peer's: the tenant.
        tenant: U32,
        /// Identifies this run of the broker.
        instance: U64,
        /// Bytes of one extent.
        extent_bytes: U64,
        /// Extents in the pool, those included that are missing just now.
        extents: U32,
        /// Page size of the machine in bytes.
        page_bytes: U32,
        /// What the extents are: 1 dma-heap, 2 memfd, 4 udmabuf.
        backend: U32,
        /// Extents beside the pool that this client may come to get, for reading only.
        copies: U32,
    }

    /// `profile`: the geometry of one layer group; then `layers` times [`LayerRow`].
    struct ProfileHead {
        /// 0 plane-major, 1 token-major.
        layout: U32,
        /// A power of two.
        tokens_per_block: U32,
        /// Sliding window in tokens, 0 for none.
        window: U32,
        /// How many [`LayerRow`] follow.
        layers: U32,
        /// The model's name, UTF-8 padded with zeros.
        name: [u8; 32],
        /// The element type's label, UTF-8 padded with zeros.
        element: [u8; 16],
    }

    /// One layer of a profile.
    struct LayerRow {
        /// The layer's number in the model.
        number: U32,
        /// Bytes of one token's K row.
        k_row: U32,
        /// Bytes of one token's V row.
        v_row: U32,
    }

    /// Reply to `profile`.
    struct Format {
        /// What later messages call this geometry.
        format: U32,
        /// Blocks of it in one extent.
        blocks_per_extent: U32,
        /// Bytes of one block's place in an extent: block `slot` starts at `slot * slot_bytes`.
        slot_bytes: U64,
        /// The most blocks that this tenant could ever hold at once.
        capacity: U64,
    }

    /// `open`: a new session.
    struct Open {
        /// From [`Format`].
        format: U32,
        /// 1 to 255: who makes room for whom, at most the tenant's own; 0 for the tenant's own.
        priority: U32,
        /// The longest length of the session in tokens if it is known, else 0. A length that can never fit is refused.
        max_tokens: U64,
        /// SHA-256 of whatever tells this model's weights from others': prefixes are only found under the same one.
        model: [u8; 32],
        /// The session's name for people, UTF-8 padded with zeros.
        label: [u8; 32],
    }

    /// Starts the body of every verb about a session: the state of its block table as the client has it. The entries
    /// `first..first+used` of the table become the `used` blocks that follow at the end of the message; later entries
    /// stay (`trim` drops them). An entry is the block that is there already, or one from the client's credit.
    struct Report {
        /// Tokens written so far.
        tokens: U64,
        /// First table entry that the report names.
        first: U32,
        /// How many [`WireBlock`] close the message.
        used: U32,
    }

    /// `grow`: report, and ask for blocks as credit.
    struct Grow {
        /// The table.
        report: Report,
        /// Blocks wanted.
        want: U32,
        /// Blocks without which the rest is of no use: fewer is a refusal and grants nothing.
        least: U32,
    }

    /// `reserve`: blocks as credit, for no session in particular.
    struct Reserve {
        /// From [`Format`].
        format: U32,
        /// Blocks wanted, all or none.
        want: U32,
    }

    /// `trim`: report, then drop blocks of the table.
    struct Trim {
        /// The table before.
        report: Report,
        /// Tokens that stay; the tail beyond is dropped.
        tokens: U64,
        /// Whole blocks dropped at the head (sliding window), counted from the start of the sequence.
        head: U32,
        /// 0: blocks that nobody else holds become credit, as many as the reply can name. 1: they are freed.
        release: U32,
    }

    /// `seal`: report, then make full blocks immutable and findable; `count` token ids follow (before the blocks).
    struct Seal {
        /// The table.
        report: Report,
        /// First block to seal: must be the first that is not sealed yet.
        from: U32,
        /// Token ids of the blocks from there: a multiple of tokens per block.
        count: U32,
    }

    /// Reply to `seal` and `pin`.
    struct Counted {
        /// Blocks sealed by this request, or pinned or unpinned by it.
        blocks: U32,
        /// Of these, already published by somebody else under the same name.
        duplicates: U32,
    }

    /// `attach`: look up `count` token ids, which follow, and share what is found. Continues where the table ends.
    struct Attach {
        /// How many token ids follow.
        count: U32,
        /// 1 when more of the prompt comes in a further message.
        more: U32,
    }

    /// `skip`: names blocks that the table does not have; `count` token ids follow. In a session whose table is empty
    /// the table begins behind them.
    struct Skip {
        /// The first block that has no name yet; 0 starts anew.
        from: U32,
        /// Token ids of the blocks from there: a multiple of tokens per block.
        count: U32,
    }

    /// Reply to `skip`; then a byte for each block of the request: 1 if somebody has published it.
    struct Present {
        /// How many bytes follow.
        blocks: U32,
        /// 0.
        reserved: U32,
    }

    /// `pin` and unpin: report, then keep sealed blocks for ever.
    struct Pin {
        /// The table.
        report: Report,
        /// Blocks from the start of the sequence, all sealed; of a format with a window, those of the last one count.
        blocks: U32,
        /// 1 to pin, 0 to unpin.
        on: U32,
    }

    /// `return extent`: this client has unmapped and closed it.
    struct ReturnExtent {
        /// The extent.
        extent: U32,
        /// 0.
        reserved: U32,
    }

    /// `query`: what the caller could have.
    struct Query {
        /// From [`Format`].
        format: U32,
        /// 0.
        reserved: U32,
    }

    /// Reply to `query`, in blocks of the format.
    struct Room {
        /// The most that this tenant could ever hold.
        capacity: U64,
        /// What it could be granted now.
        free: U64,
        /// What it holds now, credits and cached blocks included.
        held: U64,
    }

    /// `free`: credit given back; `count` [`WireBlock`] follow.
    struct Free {
        /// How many blocks follow.
        count: U32,
        /// 0.
        reserved: U32,
    }

    /// `admit`: may the session grow to `tokens` tokens? What it has attached is not needed once more.
    struct Admit {
        /// The longest length: prompt and longest answer.
        tokens: U64,
        /// [`MAY_EVICT`] or 0.
        flags: U32,
        /// 0.
        reserved: U32,
    }

    /// Reply to `admit`.
    struct Admission {
        /// A [`Verdict`].
        verdict: U32,
        /// Blocks that are promised to the session now: growing by as many will not be refused.
        promised: U32,
        /// Blocks that are missing, in the sense of the verdict.
        blocks: U64,
    }

    /// Event `reclaim session`: a session of higher priority needs its blocks.
    struct ReclaimSession {
        /// The session.
        session: U64,
        /// Milliseconds until it is ended.
        deadline_ms: U32,
        /// 0.
        reserved: U32,
    }

    /// Event `prefix damaged`: a sealed block of the session's table is not what it was when it was sealed.
    struct Damaged {
        /// The session.
        session: U64,
        /// The block's number, counted from the start of the sequence.
        block: U32,
        /// 0.
        reserved: U32,
    }

    /// Reply to `open` and `fork`; event `session lost`.
    struct Opened {
        /// The new session; the lost one.
        session: U64,
    }

    /// Reply that hands blocks over: `extents` times [`ExtentInfo`], each with its descriptor in the same order,
    /// then `blocks` times [`GrantedBlock`].
    struct Grant {
        /// `attach`: tokens that the session holds now.
        tokens: U64,
        /// How many [`ExtentInfo`] follow.
        extents: U32,
        /// How many [`GrantedBlock`] follow.
        blocks: U32,
    }

    /// An extent that this client gets the descriptor of.
    struct ExtentInfo {
        /// The extent.
        extent: U32,
        /// [`READ_ONLY`], [`EXTENT_ALONE`].
        flags: U32,
    }

    /// A block by name: 16 bytes.
    struct WireBlock {
        /// The extent.
        extent: U32,
        /// The slot in it.
        slot: U32,
        /// Which life of the place.
        generation: U64,
    }

    /// A block handed over.
    struct GrantedBlock {
        /// The block.
        block: WireBlock,
        /// [`ZERO`], [`SEALED`], [`RETURNED`].
        flags: U32,
        /// 0.
        reserved: U32,
    }

    /// Follows the header of a reply whose `fault` is not 0; then the text, UTF-8, to the end of the message.
    struct Refusal {
        /// What was needed, in the unit that the text names; 0 where it says nothing.
        needed: U64,
        /// What there is.
        available: U64,
    }

    /// `window`: report, then one range for a device over blocks of the table.
    struct Window {
        /// The table.
        report: Report,
        /// The window of this session that this one replaces, or that grows; 0 for none.
        window: U64,
        /// First block, counted from the start of the sequence.
        first: U32,
        /// So many blocks.
        blocks: U32,
        /// 0: whole blocks. 1: one plane of each.
        what: U32,
        /// Index of the plane's layer in the profile.
        layer: U32,
        /// 0: K. 1: V.
        kv: U32,
        /// 0: auto, the first way that the device can use. 1 run, 2 udmabuf, 3 iommu, 4 bounce.
        how: U32,
        /// iommu: blocks that there should be device addresses for, so that the window grows in place; 0 for some.
        capacity: U32,
        /// [`WINDOW_READ_ONLY`].
        flags: U32,
    }

    /// Reply to `window`, with the descriptors that `flags` names; then the ways that were not possible, one a line, to the
    /// end of the message.
    struct WindowMade {
        /// The window.
        window: U64,
        /// Bytes that can be reached now. bounce: bytes of the staging buffer.
        bytes: U64,
        /// run: where it starts in the extent.
        offset: U64,
        /// iommu: where it starts in the device's address space.
        address: U64,
        /// iommu: bytes that it can grow to in place. Else as `bytes`.
        capacity: U64,
        /// Which way it was.
        how: U32,
        /// run: the extent in which it lies.
        extent: U32,
        /// [`WINDOW_BUFFER`], [`WINDOW_DEVICE`].
        flags: U32,
        /// 0.
        reserved: U32,
    }

    /// `close window`: the device is done with it, and this process has closed its descriptor.
    struct CloseWindow {
        /// The window.
        window: U64,
    }

    /// Event `give back extent`: unmap it, close it, and confirm with `return extent`.
    struct GiveBack {
        /// The extent; no block of it is in use.
        extent: U32,
        /// Milliseconds in which to do so: whoever does not keeps it. 0: it is gone already, its bytes read as zero.
        deadline_ms: U32,
    }
}

/// The extent can be mapped for reading only, and is as long as its descriptor says (`fstat`).
pub const READ_ONLY: u32 = 1;
/// The block reads as zero.
pub const ZERO: u32 = 1;
/// The block is sealed: it is read, never written.
pub const SEALED: u32 = 2;
/// Not a new block: one that left the table and is the client's credit again.
pub const RETURNED: u32 = 4;

/// The configured device is not coherent: it imports this extent only while one session writes it, and while there is no
/// credit in it.
pub const EXTENT_ALONE: u32 = 2;
/// The device may not write what is under the window.
pub const WINDOW_READ_ONLY: u32 = 1;
/// A dma-buf comes with the reply: the window (udmabuf), or the staging buffer (bounce).
pub const WINDOW_BUFFER: u32 = 1;
/// The device comes with the reply, after the dma-buf if there is one: a process gets it once.
pub const WINDOW_DEVICE: u32 = 2;
/// In [`Admit`]: cached prefixes of the tenant may go for it.
pub const MAY_EVICT: u32 = 1;

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident { $($(#[$vm:meta])* $variant:ident = $value:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum $name { $($(#[$vm])* $variant = $value,)* }
        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant),*];
            /// The number on the wire, if it names one.
            pub fn from_code(code: u16) -> Option<Self> {
                match code { $($value => Some($name::$variant),)* _ => None }
            }
            /// The name that documents use.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}

codes! {
    /// What a request asks for.
    Verb {
        /// Says who is there and which protocol it speaks.
        Hello = 1, "hello";
        /// Registers a geometry.
        Profile = 2, "profile";
        /// Opens a session.
        Open = 3, "open";
        /// Takes credit for no session in particular.
        Reserve = 4, "reserve";
        /// Reports a table and takes credit.
        Grow = 5, "grow";
        /// Drops head or tail of a table.
        Trim = 6, "trim";
        /// Gives credit back.
        Free = 7, "free";
        /// A second session over the same blocks.
        Fork = 8, "fork";
        /// Publishes full blocks as a prefix.
        Seal = 9, "seal";
        /// Keeps a prefix, or lets it go.
        Pin = 10, "pin";
        /// Shares the longest published prefix.
        Attach = 11, "attach";
        /// An extent is unmapped.
        ReturnExtent = 12, "return extent";
        /// Asks how much there is.
        Query = 13, "query";
        /// Ends a session.
        Close = 14, "close";
        /// Asks for a promise that the session can grow to a length.
        Admit = 15, "admit";
        /// Makes or grows a range for a device.
        Window = 17, "window";
        /// Ends it.
        CloseWindow = 18, "close window";
        /// Names blocks that the table does not have, and says which are published.
        Skip = 20, "skip";
    }
}

codes! {
    /// What an event says.
    Event {
        /// [`GiveBack`].
        GiveBack = 1, "give back extent";
        /// The broker is going away: what is held stays usable.
        Goodbye = 2, "goodbye";
        /// [`ReclaimSession`].
        ReclaimSession = 3, "reclaim session";
        /// The session has been ended for one of higher priority: [`Opened`].
        SessionLost = 4, "session lost";
        /// A sealed block of a session is not what was sealed: [`Damaged`].
        PrefixDamaged = 5, "prefix damaged";
        /// This connection may not be: a [`Refusal`] and its text follow, and the broker hangs up.
        Refused = 6, "refused";
    }
}

codes! {
    /// What comes of a request to be admitted.
    Verdict {
        /// Growing to that length will not be refused.
        Admitted = 1, "admitted";
        /// It fits once so many cached blocks of the asker's own tenant are evicted: ask again with [`MAY_EVICT`].
        AfterEviction = 2, "fits-after-eviction";
        /// It fits when so many blocks that other sessions of the asker's tenant hold are free.
        WhenYoursFree = 3, "fits-when-yours-free";
        /// Others hold what it needs.
        Busy = 4, "busy";
        /// It never fits: it is too long by so many blocks.
        NeverFits = 5, "never-fits";
    }
}

codes! {
    /// Why a request was refused, and whose fault it is.
    Fault {
        /// The request is larger than the pool or the tenant's limit will ever be. The caller's plan is wrong.
        NeverFits = 1, "never-fits";
        /// Not now: others of this tenant, or other tenants, hold what it needs.
        Busy = 2, "busy";
        /// A limit set by the operator.
        OverLimit = 3, "over-limit";
        /// It names something that has gone.
        Stale = 4, "stale";
        /// The caller broke the protocol.
        BadRequest = 5, "bad-request";
        /// The broker's own.
        BrokerFault = 6, "broker-fault";
        /// The session was ended to make room for one of higher priority.
        SessionLost = 7, "session-lost";
    }
}

impl Verb {
    /// Whether an answer that comes after the caller has given up does no harm: asking again gives the same, or what it
    /// brings is credit.
    pub fn may_come_late(self) -> bool {
        use Verb::{Admit, Close, Grow, Hello, Open, Profile, Query, Reserve};
        matches!(self, Hello | Profile | Open | Reserve | Grow | Query | Close | Admit)
    }
}

/// Why bytes are no message. Always the sender's fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum WireError {
    #[error("a message of {got} bytes is shorter than the {need} that {what} takes")]
    Short { what: &'static str, need: usize, got: usize },
    #[error("{what} has {left} bytes too many")]
    Long { what: &'static str, left: usize },
    #[error("the header says {said} bytes, the message has {got}")]
    Length { said: u32, got: usize },
    #[error("there is no verb {0}")]
    UnknownVerb(u16),
    #[error("{what}: {count} are more than the {most} that one message may carry")]
    TooMany { what: &'static str, count: u64, most: usize },
    #[error("a label is not UTF-8")]
    Label,
    #[error("layout {0}: 0 is plane-major, 1 is token-major")]
    Layout(u32),
    #[error("{what} is {value}, at most {most} means something")]
    Field { what: &'static str, value: u32, most: u32 },
    #[error(transparent)]
    Profile(#[from] crate::profile::ProfileError),
}

impl WireBlock {
    /// The same as a claim to be checked.
    pub fn id(&self) -> BlockId {
        let place = Place { extent: ExtentId(self.extent.get()), slot: self.slot.get() };
        BlockId { place, generation: self.generation.get() }
    }
}

impl From<BlockId> for WireBlock {
    fn from(b: BlockId) -> Self {
        WireBlock {
            extent: b.place.extent.0.into(),
            slot: b.place.slot.into(),
            generation: b.generation.into(),
        }
    }
}

/// Takes structures off the front of a message, and refuses to end with bytes left over.
#[derive(Debug)]
pub struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads `body` as the message called `what`.
    pub fn new(what: &'static str, body: &'a [u8]) -> Self {
        Reader { what, rest: body }
    }

    /// The next structure.
    pub fn one<T: FromBytes + Immutable + KnownLayout + Unaligned>(&mut self) -> Result<&'a T, WireError> {
        let short = WireError::Short { what: self.what, need: size_of::<T>(), got: self.rest.len() };
        let (one, rest) = T::ref_from_prefix(self.rest).map_err(|_| short)?;
        self.rest = rest;
        Ok(one)
    }

    /// The next `count` structures, at most `most`.
    pub fn many<T: FromBytes + Immutable + Unaligned>(
        &mut self,
        count: u32,
        most: usize,
    ) -> Result<&'a [T], WireError> {
        let count = count as usize;
        if count > most {
            return Err(WireError::TooMany { what: self.what, count: count as u64, most });
        }
        let need = count * size_of::<T>();
        let short = WireError::Short { what: self.what, need, got: self.rest.len() };
        let (many, rest) = <[T]>::ref_from_prefix_with_elems(self.rest, count).map_err(|_| short)?;
        self.rest = rest;
        Ok(many)
    }

    /// What is left, as text.
    pub fn text(&mut self) -> String {
        String::from_utf8_lossy(std::mem::take(&mut self.rest)).into_owned()
    }

    /// Ends the message: there must be nothing left.
    pub fn end(self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(WireError::Long { what: self.what, left }),
        }
    }
}

/// Splits a message into its header and its body, and checks the length that it states.
pub fn split(message: &[u8]) -> Result<(&Header, &[u8]), WireError> {
    let need = size_of::<Header>();
    let short = WireError::Short { what: "a header", need, got: message.len() };
    let (header, body) = Header::ref_from_prefix(message).map_err(|_| short)?;
    if header.length.get() as usize != message.len() {
        return Err(WireError::Length { said: header.length.get(), got: message.len() });
    }
    Ok((header, body))
}

/// Puts a message together in a buffer that is used again and again.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Starts a message.
    pub fn start(opcode: u16, fault: u16, sequence: u64, session: u64) -> Self {
        let mut w = Writer { bytes: Vec::with_capacity(256) };
        let header = Header {
            opcode: opcode.into(),
            fault: fault.into(),
            length: 0.into(),
            sequence: sequence.into(),
            session: session.into(),
        };
        w.put(&header);
        w
    }

    /// Starts a request.
    pub fn request(verb: Verb, sequence: u64, session: u64) -> Self {
        Writer::start(verb as u16, 0, sequence, session)
    }

    /// Appends a structure.
    pub fn put<T: IntoBytes + Immutable + ?Sized>(&mut self, part: &T) -> &mut Self {
        self.bytes.extend_from_slice(part.as_bytes());
        self
    }

    /// Appends blocks by name.
    pub fn put_blocks(&mut self, blocks: impl IntoIterator<Item = BlockId>) -> &mut Self {
        for b in blocks {
            self.put(&WireBlock::from(b));
        }
        self
    }

    /// Appends token ids.
    pub fn put_tokens(&mut self, tokens: &[u32]) -> &mut Self {
        for &t in tokens {
            self.put(&U32::new(t));
        }
        self
    }

    /// What has been put in so far, for a message that is put together from parts.
    pub fn body(&self) -> &[u8] {
        &self.bytes
    }

    /// The message, its length filled in.
    pub fn finish(mut self) -> Vec<u8> {
        let length = U32::new(self.bytes.len() as u32);
        self.bytes[4..8].copy_from_slice(length.as_bytes());
        self.bytes
    }
}

/// A label of at most `N` bytes, cut at a character border and padded with zeros.
pub fn label<const N: usize>(text: &str) -> [u8; N] {
    let mut end = text.len().min(N);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut out = [0; N];
    out[..end].copy_from_slice(&text.as_bytes()[..end]);
    out
}

/// A label as text. Characters that could play tricks on an operator's terminal, controls and what turns the writing or
/// cannot be seen, become `?` ([`crate::quote`]).
pub fn label_text(label: &[u8]) -> Result<String, WireError> {
    let end = label.iter().position(|&b| b == 0).unwrap_or(label.len());
    let text = std::str::from_utf8(&label[..end]).map_err(|_| WireError::Label)?;
    Ok(crate::quote::plain(text))
}

/// Writes one layer group of a profile as the body of a `profile` message.
pub fn put_profile(w: &mut Writer, profile: &Profile, group: usize) {
    let g = &profile.groups()[group];
    w.put(&ProfileHead {
        layout: match profile.layout() {
            Layout::PlaneMajor => 0.into(),
            Layout::TokenMajor => 1.into(),
        },
        tokens_per_block: profile.tokens_per_block().into(),
        window: g.window.unwrap_or(0).into(),
        layers: (g.layers.len() as u32).into(),
        name: label(profile.name()),
        element: label(profile.element()),
    });
    for (number, layer) in &g.layers {
        w.put(&LayerRow { number: (*number).into(), k_row: layer.k_row.into(), v_row: layer.v_row.into() });
    }
}

/// Reads the body of a `profile` message: a checked profile of one group.
pub fn read_profile(body: &[u8]) -> Result<Profile, WireError> {
    let mut r = Reader::new("profile", body);
    let head: &ProfileHead = r.one()?;
    let rows: &[LayerRow] = r.many(head.layers.get(), MAX_LAYERS)?;
    r.end()?;
    let layout = match head.layout.get() {
        0 => Layout::PlaneMajor,
        1 => Layout::TokenMajor,
        other => return Err(WireError::Layout(other)),
    };
    let layer = |row: &LayerRow| Layer { k_row: row.k_row.get(), v_row: row.v_row.get() };
    let layers = rows.iter().map(|row| (row.number.get(), layer(row))).collect();
    let window = Some(head.window.get()).filter(|&w| w > 0);
    let (name, element) = (label_text(&head.name)?, label_text(&head.element)?);
    Ok(Profile::new(name, element, layout, head.tokens_per_block.get(), vec![Group { layers, window }])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_protocol_document() {
        let sizes = [
            (size_of::<Header>(), 24),
            (size_of::<Hello>(), 40),
            (size_of::<Welcome>(), 40),
            (size_of::<ProfileHead>(), 64),
            (size_of::<LayerRow>(), 12),
            (size_of::<Open>(), 80),
            (size_of::<Report>(), 16),
            (size_of::<Skip>(), 8),
            (size_of::<Present>(), 8),
            (size_of::<Grow>(), 24),
            (size_of::<Trim>(), 32),
            (size_of::<WireBlock>(), 16),
            (size_of::<GrantedBlock>(), 24),
            (size_of::<Grant>(), 16),
        ];
        for (got, want) in sizes {
            assert_eq!(got, want);
        }
        // The largest grant fits one message.
        let most = MAX_BLOCKS * size_of::<GrantedBlock>() + MAX_FDS * size_of::<ExtentInfo>();
        assert!(size_of::<Header>() + size_of::<Grant>() + most <= MAX_MESSAGE);
        assert!(MAX_TOKENS * 4 + MAX_BLOCKS * size_of::<WireBlock>() + 256 <= MAX_MESSAGE);
    }

    #[test]
    fn a_profile_survives_the_wire() {
        let p = Profile::reference().with_layout(Layout::TokenMajor);
        let mut w = Writer::request(Verb::Profile, 7, 0);
        put_profile(&mut w, &p, 0);
        let message = w.finish();
        let (header, body) = split(&message).unwrap();
        assert_eq!((header.opcode.get(), header.sequence.get()), (Verb::Profile as u16, 7));
        assert_eq!(read_profile(body).unwrap(), p);
    }

    #[test]
    fn every_cut_and_every_extra_byte_is_refused() {
        let mut w = Writer::request(Verb::Profile, 1, 0);
        put_profile(&mut w, &Profile::reference(), 0);
        let message = w.finish();
        for end in 0..message.len() {
            let cut = &message[..end];
            assert!(split(cut).is_err());
            if end >= size_of::<Header>() {
                assert!(read_profile(&cut[size_of::<Header>()..]).is_err(), "{end}");
            }
        }
        let longer = [&message[size_of::<Header>()..], &[0][..]].concat();
        assert!(matches!(read_profile(&longer), Err(WireError::Long { left: 1, .. })));
    }

    #[test]
    fn counts_beyond_the_message_are_refused_before_anything_is_read() {
        let mut r = Reader::new("blocks", &[0; 64]);
        assert!(matches!(r.many::<WireBlock>(u32::MAX, MAX_BLOCKS), Err(WireError::TooMany { .. })));
        assert!(matches!(r.many::<WireBlock>(5, MAX_BLOCKS), Err(WireError::Short { .. })));
    }

    #[test]
    fn labels_are_cut_between_characters_and_hold_no_control_characters() {
        let cut: [u8; 4] = label("关断三号阀门");
        assert_eq!(label_text(&cut).unwrap(), "关");
        assert_eq!(label_text(b"a\x1b[2Jb\0\0").unwrap(), "a?[2Jb");
        // "txt.exe" that reads as "exe.txt", and two names that look like one.
        let cut: [u8; 32] = label("pay\u{202e}txt.exe");
        assert_eq!(label_text(&cut).unwrap(), "pay?txt.exe");
        let cut: [u8; 32] = label("engine\u{200b}\u{e0041}");
        assert_eq!(label_text(&cut).unwrap(), "engine??");
        assert_eq!(label_text(&[0xff, 0]), Err(WireError::Label));
    }
}
