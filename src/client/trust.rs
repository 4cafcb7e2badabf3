//! What the broker says, before anything is done with it.
//!
//! The broker is trusted with what memory holds: it has it mapped, and can change or take it. It is not trusted with the shape
//! of messages: a broken one, or what answers in its stead, gives an error that names the field, and ends the connection.
//!
//! Owns, for one connection, what has been asked and not answered, and what the answers have said so far that later ones must
//! agree with. Invariants: an answer goes on to the client only if it is the one answer to a request of this connection, and
//! everything in it that becomes an address, a length, an index or a count has been checked against the request, the profile
//! and the memory that came; so nothing is mapped, and no table made, by a number that has not been checked. An event goes on
//! only if it speaks of something that is here, and of all together so many come in a second that there can be things to tell of.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::link::Message;
use crate::attention::PAGE_SHIFT;
use crate::id::BlockId;
use crate::map::page_bytes;
use crate::profile::{Kv, Profile};
use crate::quote;
use crate::window::{How, Part, What};
use crate::wire::{
    self, Event, ExtentInfo, Fault, GrantedBlock, MAX_BLOCKS, MAX_FDS, MAX_TOKENS, Reader, Verb, Verdict,
};

/// The most places for extents that a client makes a table of: 4 million, which is a pool of 128 GiB in extents of 64 KiB.
const MOST_PLACES: u64 = 1 << 22;
/// The most bytes that block tables, whose entries count pages of 4 KiB in 32 bits, can name.
const MOST_BYTES: u64 = 1 << (32 + PAGE_SHIFT);
/// The most blocks of one profile that a client makes a table of (8 bytes each): a pool of 64 GiB in blocks of 4 KiB.
const MOST_SLOTS: u64 = 1 << 25;
/// Events that a broker may send in a second. It has one to tell of each extent, and few of each session.
const MOST_EVENTS: u32 = 1 << 16;
/// Bytes of an event beyond which it counts as several: none has so many.
const LONG_EVENT: usize = 256;
/// Requests that may be without an answer.
const MOST_ASKED: usize = 1 << 16;
/// Characters that are shown of what the broker says for people.
const MOST_SHOWN: usize = 600;

/// What the broker says for people: one line, harmless on a terminal, and not too long.
pub(super) fn words(text: &str) -> String {
    quote::line(text, MOST_SHOWN)
}

/// The geometry of blocks as both sides have agreed on it.
#[derive(Debug)]
struct Cut {
    profile: Profile,
    slots: u32,
    slot_bytes: u64,
}

/// The pool, as the broker has described it.
#[derive(Debug, Clone, Copy)]
struct Pool {
    extent_bytes: u64,
    /// For extents, those that come while old ones are still mapped counted in.
    places: u64,
}

/// Memory that the broker has handed over.
#[derive(Debug, Clone, Copy)]
struct Memory {
    bytes: u64,
    writable: bool,
}

/// What an answer is held against.
#[derive(Debug)]
enum Question {
    Profile(Profile),
    /// In the format of this number.
    Open(u32),
    Fork(Option<Arc<Cut>>),
    Blocks(Wanted),
    Window(WantedWindow),
    Skip,
    Other,
}

/// Blocks that were asked for.
#[derive(Debug)]
struct Wanted {
    cut: Option<Arc<Cut>>,
    least: usize,
    most: usize,
}

/// A window that was asked for.
#[derive(Debug)]
struct WantedWindow {
    bytes: u64,
    how: Option<How>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Gate {
    asked: BTreeMap<u64, (Verb, Question)>,
    pool: Option<Pool>,
    formats: BTreeMap<u32, Arc<Cut>>,
    sessions: BTreeMap<u64, Arc<Cut>>,
    extents: BTreeMap<u32, Memory>,
    /// Events since `second` began.
    events: u32,
    second: Instant,
    #[cfg(test)]
    is_open: bool,
}

impl Gate {
    pub fn new() -> Self {
        Gate {
            asked: BTreeMap::new(),
            pool: None,
            formats: BTreeMap::new(),
            sessions: BTreeMap::new(),
            extents: BTreeMap::new(),
            events: 0,
            second: Instant::now(),
            #[cfg(test)]
            is_open: false,
        }
    }

    /// One that lets everything pass: for tests of what is behind it.
    #[cfg(test)]
    pub fn open() -> Self {
        Gate { is_open: true, ..Gate::new() }
    }

    /// A request has been sent. An error when so many are open that nobody answers.
    pub fn asks(&mut self, verb: Verb, sequence: u64, session: u64, body: &[u8]) -> Result<(), String> {
        let question = self.question(verb, session, body);
        self.asked.insert(sequence, (verb, question));
        match self.asked.len() > MOST_ASKED {
            true => Err(format!("{MOST_ASKED} requests are without an answer")),
            false => Ok(()),
        }
    }

    fn question(&mut self, verb: Verb, session: u64, body: &[u8]) -> Question {
        let cut = || self.sessions.get(&session).cloned();
        match verb {
            Verb::Profile => wire::read_profile(body).map_or(Question::Other, Question::Profile),
            Verb::Open => front(body).map_or(Question::Other, |o: wire::Open| Question::Open(o.format.get())),
            Verb::Fork => Question::Fork(cut()),
            Verb::Skip => Question::Skip,
            Verb::Grow => {
                let (least, most) = front(body).map_or((0, 0), |g: wire::Grow| (g.least.get(), g.want.get()));
                Question::Blocks(Wanted { cut: cut(), least: least as usize, most: most as usize })
            }
            Verb::Reserve => {
                let (format, want) =
                    front(body).map_or((0, 0), |r: wire::Reserve| (r.format.get(), r.want.get() as usize));
                let cut = self.formats.get(&format).cloned();
                Question::Blocks(Wanted { cut, least: want, most: want })
            }
            Verb::Trim => Question::Blocks(Wanted { cut: cut(), least: 0, most: MAX_BLOCKS }),
            Verb::Attach => {
                let (cut, count) = (cut(), front(body).map_or(0, |a: wire::Attach| a.count.get()));
                let per_block = cut.as_ref().map_or(1, |c| c.profile.tokens_per_block());
                Question::Blocks(Wanted { cut, least: 0, most: count.div_ceil(per_block) as usize })
            }
            Verb::Window => match (cut(), front::<wire::Window>(body)) {
                (Some(cut), Some(w)) => Question::Window(WantedWindow::of(&cut.profile, &w)),
                _ => Question::Other,
            },
            // What the broker is told is gone, it has no business with any more.
            Verb::Close => {
                self.sessions.remove(&session);
                Question::Other
            }
            Verb::ReturnExtent => {
                let extent = front(body).map_or(0, |r: wire::ReturnExtent| r.extent.get());
                self.extents.remove(&extent);
                Question::Other
            }
            Verb::Hello
            | Verb::Free
            | Verb::Seal
            | Verb::Pin
            | Verb::Query
            | Verb::Admit
            | Verb::CloseWindow => Question::Other,
        }
    }

    /// Whether the client is to hear of a message. The error says what is wrong with it.
    pub fn check(&mut self, message: &Message) -> Result<bool, String> {
        #[cfg(test)]
        if self.is_open {
            return Ok(true);
        }
        if message.sequence == 0 {
            return self.check_event(message);
        }
        let Some((verb, question)) = self.asked.remove(&message.sequence) else {
            return Err(format!("an answer to request {}, which is not open", message.sequence));
        };
        if message.opcode != verb as u16 | wire::REPLY {
            return Err(format!("{} was asked, and opcode {:#x} answers", verb.name(), message.opcode));
        }
        if message.fault != 0 {
            check_refusal(message).map_err(|why| format!("{}: {why}", verb.name()))?;
            return Ok(true);
        }
        self.check_answer(verb, question, message).map_err(|why| format!("{}: {why}", verb.name()))?;
        Ok(true)
    }

    fn check_event(&mut self, message: &Message) -> Result<bool, String> {
        if self.second.elapsed() >= Duration::from_secs(1) {
            (self.events, self.second) = (0, Instant::now());
        }
        self.events = self.events.saturating_add(1 + (message.body.len() / LONG_EVENT) as u32);
        if self.events > MOST_EVENTS {
            return Err(format!("more than {MOST_EVENTS} events in a second"));
        }
        let event = match message.opcode & wire::EVENT {
            wire::EVENT => message.event(),
            // Its last word on a message that it could not read.
            wire::REPLY if message.fault != 0 => return Ok(false),
            _ => return Err(format!("opcode {:#x} without a request", message.opcode)),
        };
        let Some(event) = event else { return Ok(false) };
        let wrong = |why: String| format!("event {}: {why}", event.name());
        no_descriptors(message).map_err(wrong)?;
        let body = &message.body;
        match event {
            Event::Goodbye => Ok(false),
            Event::Refused => check_refusal(message).map_err(wrong).map(|()| true),
            Event::GiveBack => {
                let e: wire::GiveBack = whole(body).map_err(wrong)?;
                let extent = e.extent.get();
                Ok(match e.deadline_ms.get() {
                    0 => self.extents.remove(&extent).is_some(),
                    _ => self.extents.contains_key(&extent),
                })
            }
            Event::ReclaimSession => {
                let e: wire::ReclaimSession = whole(body).map_err(wrong)?;
                Ok(self.sessions.contains_key(&e.session.get()))
            }
            Event::SessionLost => {
                let e: wire::Opened = whole(body).map_err(wrong)?;
                Ok(self.sessions.contains_key(&e.session.get()))
            }
            Event::PrefixDamaged => {
                let e: wire::Damaged = whole(body).map_err(wrong)?;
                Ok(self.sessions.contains_key(&e.session.get()))
            }
        }
    }

    fn check_answer(&mut self, verb: Verb, question: Question, message: &Message) -> Result<(), String> {
        let body = &message.body;
        match question {
            Question::Blocks(wanted) => return self.check_blocks(verb, &wanted, message),
            Question::Window(wanted) => return self.check_window(&wanted, message),
            _ => no_descriptors(message)?,
        }
        match (verb, question) {
            (_, Question::Profile(profile)) => {
                let pool = self.pool.ok_or("it comes before the answer to hello")?;
                let format: wire::Format = whole(body)?;
                let cut = Cut::agreed(&format, profile, pool)?;
                let number = format.format.get();
                if self.formats.get(&number).is_some_and(|known| known.profile != cut.profile) {
                    return Err(format!("format is {number}, which another profile is called already"));
                }
                self.formats.entry(number).or_insert(Arc::new(cut));
            }
            (_, Question::Open(format)) => {
                let cut = self.formats.get(&format).cloned();
                self.check_opened(body, cut)?;
            }
            (_, Question::Fork(cut)) => self.check_opened(body, cut)?,
            (_, Question::Skip) => {
                let mut r = Reader::new("the answer", body);
                let told: &wire::Present = r.one().map_err(text)?;
                r.many::<u8>(told.blocks.get(), MAX_TOKENS).map_err(text)?;
                r.end().map_err(text)?;
            }
            (Verb::Hello, _) => self.pool = Some(Pool::described(&whole(body)?)?),
            (Verb::Seal | Verb::Pin, _) => _ = whole::<wire::Counted>(body)?,
            (Verb::Query, _) => _ = whole::<wire::Room>(body)?,
            (Verb::Admit, _) => {
                let verdict = whole::<wire::Admission>(body)?.verdict.get();
                if u16::try_from(verdict).ok().and_then(Verdict::from_code).is_none() {
                    return Err(format!("verdict is {verdict}, which is none"));
                }
            }
            _ if body.is_empty() => {}
            _ => return Err(format!("{} bytes, and there is nothing to say", body.len())),
        }
        Ok(())
    }

    fn check_opened(&mut self, body: &[u8], cut: Option<Arc<Cut>>) -> Result<(), String> {
        let session = whole::<wire::Opened>(body)?.session.get();
        let cut = cut.ok_or("a session of a profile that was not registered")?;
        match self.sessions.insert(session, cut) {
            Some(_) => Err(format!("session is {session}, which is open already")),
            None => Ok(()),
        }
    }

    fn check_blocks(&mut self, verb: Verb, wanted: &Wanted, message: &Message) -> Result<(), String> {
        let pool = self.pool.ok_or("it comes before the answer to hello")?;
        let mut r = Reader::new("the answer", &message.body);
        let grant: &wire::Grant = r.one().map_err(text)?;
        let infos: &[ExtentInfo] = r.many(grant.extents.get(), MAX_FDS).map_err(text)?;
        let blocks: &[GrantedBlock] = r.many(grant.blocks.get(), MAX_BLOCKS).map_err(text)?;
        r.end().map_err(text)?;
        let came = check_extents(verb, pool, infos, message)?;
        let count = blocks.len();
        if count < wanted.least || count > wanted.most {
            let (least, most) = (wanted.least, wanted.most);
            return Err(format!("blocks is {count}, and {least} to {most} were asked for"));
        }
        let mut seen = BTreeSet::new();
        for granted in blocks {
            let BlockId { place, .. } = granted.block.id();
            let (extent, slot) = (place.extent.0, place.slot);
            let cut = wanted.cut.as_deref().ok_or("blocks of a profile that was not registered")?;
            // What is mapped already stays as it is.
            let memory = self.extents.get(&extent).or(came.get(&extent)).copied();
            let memory = memory.ok_or(format!("a block's extent is {extent}, which did not come"))?;
            if slot >= cut.slots {
                return Err(format!("a block's slot is {slot}, of {} in an extent", cut.slots));
            }
            let end = (u64::from(slot) + 1) * cut.slot_bytes;
            if end > memory.bytes {
                let has = memory.bytes;
                return Err(format!("a block ends at byte {end} of extent {extent}, which has {has}"));
            }
            let flags = granted.flags.get();
            let (kind, others) = match verb {
                Verb::Attach => (wire::SEALED, wire::RETURNED),
                Verb::Trim => (wire::RETURNED, wire::SEALED),
                _ => (0, wire::SEALED | wire::RETURNED),
            };
            if flags & kind != kind || flags & others != 0 {
                return Err(format!("a block's flags are {flags:#x}, which is no answer to that"));
            }
            if !memory.writable && verb != Verb::Attach {
                return Err(format!("a block's extent is {extent}, which can only be read"));
            }
            if !seen.insert((extent, slot)) {
                return Err(format!("slot {slot} of extent {extent} is there twice"));
            }
        }
        for (extent, memory) in came {
            self.extents.entry(extent).or_insert(memory);
        }
        if self.extents.len() as u64 > pool.places {
            return Err(format!("more extents than the {} that there can be", pool.places));
        }
        Ok(())
    }

    fn check_window(&self, wanted: &WantedWindow, message: &Message) -> Result<(), String> {
        let mut r = Reader::new("the answer", &message.body);
        let made: &wire::WindowMade = r.one().map_err(text)?;
        let how = How::from_code(made.how.get()).filter(|how| wanted.how.is_none_or(|asked| asked == *how));
        let how = how.ok_or(format!("how is {}, which was not asked for", made.how))?;
        let (bytes, offset, flags) = (made.bytes.get(), made.offset.get(), made.flags.get());
        if how != How::Bounce && bytes < wanted.bytes {
            return Err(format!("bytes is {bytes}, and {} were asked for", wanted.bytes));
        }
        let past = |has: u64| offset.checked_add(bytes).is_none_or(|end| end > has);
        match how {
            How::Run => {
                let extent = made.extent.get();
                let memory = self.extents.get(&extent).copied();
                let memory = memory.ok_or(format!("extent is {extent}, which did not come"))?;
                if past(memory.bytes) {
                    let has = memory.bytes;
                    return Err(format!(
                        "offset is {offset}, bytes is {bytes}: extent {extent} has {has} bytes"
                    ));
                }
            }
            How::Iommu => {
                let (address, capacity) = (made.address.get(), made.capacity.get());
                if capacity < bytes || address.checked_add(capacity).is_none() {
                    return Err(format!("address is {address:#x}, capacity is {capacity}, of {bytes} bytes"));
                }
            }
            How::Udmabuf | How::Bounce if flags & wire::WINDOW_BUFFER == 0 => {
                return Err(format!("flags is {flags:#x}: a window by {how} comes with its buffer"));
            }
            How::Udmabuf | How::Bounce => {}
        }
        if message.fds_lost {
            return Ok(());
        }
        let named = (flags & (wire::WINDOW_BUFFER | wire::WINDOW_DEVICE)).count_ones() as usize;
        if named != message.fds.len() {
            return Err(format!("flags is {flags:#x}, and {} descriptors came", message.fds.len()));
        }
        let buffer = message.fds.first().filter(|_| matches!(how, How::Udmabuf | How::Bounce));
        let has = buffer.map_or(u64::MAX, length);
        if bytes > has.min(isize::MAX as u64) {
            return Err(format!("bytes is {bytes}, and its buffer has {has}"));
        }
        Ok(())
    }
}

/// The memory that came with an answer.
fn check_extents(
    verb: Verb,
    pool: Pool,
    infos: &[ExtentInfo],
    message: &Message,
) -> Result<BTreeMap<u32, Memory>, String> {
    // Without room for descriptors none of them is here; the client says so to the broker.
    if !message.fds_lost && infos.len() != message.fds.len() {
        return Err(format!("extents is {}, and {} descriptors came", infos.len(), message.fds.len()));
    }
    let mut came = BTreeMap::new();
    for (i, info) in infos.iter().enumerate() {
        let extent = info.extent.get();
        if extent == 0 {
            return Err("an extent is 0, which names none".into());
        }
        let writable = info.flags.get() & wire::READ_ONLY == 0;
        if !writable && verb != Verb::Attach {
            return Err(format!("extent {extent} can only be read, and is for writing"));
        }
        let bytes = message.fds.get(i).map_or(pool.extent_bytes, length);
        let fits = match writable {
            true => bytes >= pool.extent_bytes,
            false => bytes > 0 && bytes <= pool.extent_bytes,
        };
        if !fits {
            let has = pool.extent_bytes;
            return Err(format!("the memory of extent {extent} has {bytes} bytes, an extent has {has}"));
        }
        came.insert(extent, Memory { bytes: bytes.min(pool.extent_bytes), writable });
    }
    Ok(came)
}

impl Pool {
    fn described(welcome: &wire::Welcome) -> Result<Self, String> {
        let version = welcome.version.get();
        if version != wire::VERSION {
            return Err(format!("version is {version}, and {} was asked for", wire::VERSION));
        }
        let (page, theirs) = (page_bytes() as u64, welcome.page_bytes.get());
        if u64::from(theirs) != page {
            return Err(format!("page_bytes is {theirs}, and a page here has {page}"));
        }
        let extent_bytes = welcome.extent_bytes.get();
        if extent_bytes == 0 || extent_bytes % page != 0 {
            return Err(format!("extent_bytes is {extent_bytes}, which is no whole number of pages"));
        }
        let (extents, copies) = (welcome.extents.get(), welcome.copies.get());
        let places = u64::from(extents) * 2 + 2 + u64::from(copies);
        let most = MOST_BYTES.min(isize::MAX as u64);
        if places > MOST_PLACES || places.checked_mul(extent_bytes).is_none_or(|all| all > most) {
            return Err(format!(
                "extents is {extents} and copies is {copies}, of {extent_bytes} bytes each: more than this library can map"
            ));
        }
        Ok(Pool { extent_bytes, places })
    }
}

impl Cut {
    fn agreed(format: &wire::Format, profile: Profile, pool: Pool) -> Result<Self, String> {
        let (slots, slot_bytes) = (format.blocks_per_extent.get(), format.slot_bytes.get());
        let (block, page) = (profile.block_bytes(0), page_bytes() as u64);
        if slot_bytes < block || slot_bytes % page != 0 {
            return Err(format!(
                "slot_bytes is {slot_bytes}: a block of {block} bytes lies in whole pages of {page}"
            ));
        }
        let all = u64::from(slots).checked_mul(slot_bytes).filter(|all| *all <= pool.extent_bytes);
        if slots == 0 || all.is_none() {
            let has = pool.extent_bytes;
            return Err(format!(
                "blocks_per_extent is {slots}, of {slot_bytes} bytes each: an extent has {has}"
            ));
        }
        if pool.places * u64::from(slots) > MOST_SLOTS {
            return Err(format!(
                "blocks_per_extent is {slots}: more blocks in all than the {MOST_SLOTS} that this library can count; use more tokens per block"
            ));
        }
        Ok(Cut { profile, slots, slot_bytes })
    }
}

impl WantedWindow {
    fn of(profile: &Profile, asked: &wire::Window) -> Self {
        let kv = if asked.kv.get() == 0 { Kv::K } else { Kv::V };
        let what = match asked.what.get() {
            0 => What::Blocks,
            _ => What::Plane { layer: asked.layer.get(), kv },
        };
        // What is no part of the profile, the client does not ask for.
        let part = Part::of(profile, what, page_bytes() as u64).map_or(0, |part| part.bytes);
        let bytes = part.saturating_mul(asked.blocks.get().into());
        WantedWindow { bytes, how: How::from_code(asked.how.get()) }
    }
}

/// Checks what an answer to attach says of the session: it holds `tokens` tokens in `blocks` whole blocks, all of them or all
/// but the last one, and no more than the `most` that were asked about.
pub(super) fn attached(tokens: u64, blocks: usize, shift: u32, most: usize) -> Result<usize, String> {
    let whole = (blocks as u64) << shift;
    let held = whole.saturating_sub(1)..=whole.min(most as u64);
    match usize::try_from(tokens).ok().filter(|_| held.contains(&tokens)) {
        Some(tokens) => Ok(tokens),
        None => Err(format!(
            "attach: tokens is {tokens}, of {most} asked for, in {blocks} blocks of {}",
            1u64 << shift
        )),
    }
}

fn check_refusal(message: &Message) -> Result<(), String> {
    no_descriptors(message)?;
    front::<wire::Refusal>(&message.body).ok_or("a refusal without its numbers")?;
    match Fault::from_code(message.fault) {
        Some(_) => Ok(()),
        None => Err(format!("fault is {}, which is none", message.fault)),
    }
}

fn no_descriptors(message: &Message) -> Result<(), String> {
    match message.fds.len() {
        0 => Ok(()),
        came => Err(format!("{came} descriptors came with what has none")),
    }
}

/// The bytes behind a descriptor; 0 if it is no memory.
fn length(fd: &OwnedFd) -> u64 {
    let file = nix::sys::stat::fstat(fd).ok().filter(|s| s.st_mode & libc::S_IFMT == libc::S_IFREG);
    let bytes = match file {
        Some(stat) => Some(stat.st_size),
        // A dma-buf is no file to `fstat`, and says its length so.
        None => nix::unistd::lseek(fd, 0, nix::unistd::Whence::SeekEnd).ok(),
    };
    bytes.and_then(|b| u64::try_from(b).ok()).unwrap_or(0)
}

/// A body that is one structure.
fn whole<T: FromBytes + Immutable + KnownLayout + Unaligned + Copy>(body: &[u8]) -> Result<T, String> {
    let mut r = Reader::new("the message", body);
    let one: T = *r.one().map_err(text)?;
    r.end().map_err(text)?;
    Ok(one)
}

/// The structure that a body begins with.
fn front<T: FromBytes + Immutable + KnownLayout + Unaligned + Copy>(body: &[u8]) -> Option<T> {
    T::ref_from_prefix(body).ok().map(|(one, _)| *one)
}

fn text(e: impl Display) -> String {
    e.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(code: u16, body: &[u8]) -> Message {
        let (opcode, body) = (wire::EVENT | code, body.to_vec());
        Message { opcode, fault: 0, sequence: 0, body, fds: Vec::new(), fds_lost: false, grant: None }
    }

    #[test]
    fn a_session_holds_whole_blocks_of_what_was_asked_for_or_all_but_the_last_token() {
        for held in [0, 15, 16, 31, 32, 33] {
            let blocks = (held as usize).div_ceil(16);
            let is_right = [0, 15, 16, 31, 32].contains(&held);
            assert_eq!(attached(held, blocks, 4, 100).is_ok(), is_right, "{held}");
        }
        assert!(attached(14, 1, 4, 100).is_err() && attached(17, 1, 4, 100).is_err());
        assert!(attached(16, 1, 4, 15).is_err() && attached(15, 1, 4, 15).is_ok());
        assert!(attached(1, 0, 4, 100).is_err() && attached(u64::MAX, 1, 4, usize::MAX).is_err());
        // With one token in a block, the last one is left out with its block.
        assert!(attached(3, 3, 0, 4).is_ok());
    }

    #[test]
    fn of_what_is_not_here_nobody_hears_and_of_what_is_everybody() {
        let mut gate = Gate::new();
        gate.extents.insert(1, Memory { bytes: 4096, writable: true });
        let give_back = |extent: u8, ms: u8| event(1, &[extent, 0, 0, 0, ms, 0, 0, 0]);
        assert_eq!(gate.check(&give_back(1, 9)), Ok(true));
        assert_eq!(gate.check(&give_back(2, 9)), Ok(false));
        // Gone already: then it is not here.
        assert_eq!(gate.check(&give_back(1, 0)), Ok(true));
        assert_eq!(gate.check(&give_back(1, 0)), Ok(false));
        assert_eq!(gate.check(&event(4, &[9, 0, 0, 0, 0, 0, 0, 0])), Ok(false));
        // Events of a later version.
        assert_eq!(gate.check(&event(99, &[0; 500])), Ok(false));
        assert!(gate.check(&event(1, &[0; 9])).is_err());
    }

    #[test]
    fn an_extent_that_has_been_returned_is_not_here() {
        let mut gate = Gate::new();
        gate.extents.insert(1, Memory { bytes: 4096, writable: true });
        gate.asks(Verb::ReturnExtent, 1, 0, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(gate.extents.is_empty());
    }

    #[test]
    fn nobody_leaves_requests_without_an_answer_for_ever() {
        let mut gate = Gate::new();
        let most = MOST_ASKED as u64;
        assert!((1..=most).all(|n| gate.asks(Verb::Query, n, 0, &[]).is_ok()));
        assert!(gate.asks(Verb::Query, most + 1, 0, &[]).is_err());
    }

    #[test]
    fn long_events_count_as_several() {
        let mut gate = Gate::new();
        let long = event(99, &[0; 60_000]);
        assert!((0..1000).any(|_| gate.check(&long).is_err()));
    }

    #[test]
    fn so_many_events_come_in_a_second_and_no_more() {
        let mut gate = Gate::new();
        let mut all = || (0..=MOST_EVENTS).all(|_| gate.check(&event(99, &[])).is_ok());
        // However slow this machine is: all of them once come within one second.
        assert!((0..100).any(|_| !all()));
    }
}
