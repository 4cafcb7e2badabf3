//! Windows over a session, as the process sees them.
//!
//! Owns what came with each: a dma-buf, a device address, or a share in the staging buffer. Invariants: a window is over
//! the blocks that it names; when the session has others in their stead, the window is no longer current and says so; this
//! process's descriptor of a window is closed before the broker is told that the window is done with.

#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::super::staging::{Half, Staging};
use super::super::{Error, Shared, lock, trust};
use super::Session;
use crate::id::{BlockId, ExtentId};
use crate::map::page_bytes;
use crate::profile::Kv;
use crate::window::{How, Part, What};
use crate::wire::{self, Reader, Verb};

/// How a window is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowOptions {
    /// The way; `None` for the first that the configured device can use.
    pub how: Option<How>,
    /// The device may not write: what a window over a shared prefix needs. Only iommu can promise it.
    pub read_only: bool,
    /// Tokens that the window may come to hold, if it is known: iommu reserves device addresses for as many, so that it
    /// grows in place.
    pub capacity: Option<usize>,
}

/// Where a window is.
#[derive(Debug, Clone, Copy)]
pub enum WindowPlace<'a> {
    /// In a dma-buf, for the device's driver to import. The descriptor stays the window's.
    Buffer {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// Where the window starts in it.
        offset: usize,
        /// Bytes.
        bytes: usize,
    },
    /// At a device address.
    Address {
        /// The first one.
        iova: u64,
        /// Bytes that can be reached now.
        bytes: usize,
    },
    /// In batches through the staging buffer: see [`Session::load`] and [`Session::drain`].
    Staging {
        /// The buffer.
        fd: BorrowedFd<'a>,
        /// The most bytes of one batch.
        batch: usize,
        /// Bytes of the window.
        bytes: usize,
    },
}

#[derive(Debug)]
enum Inside {
    Buffer { fd: OwnedFd, offset: usize },
    Address { iova: u64 },
    Staging(Arc<Staging>),
}

/// What staging has cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StagingStats {
    /// Hand-overs from the device to the CPU.
    pub syncs_to_cpu: u64,
    /// Hand-overs from the CPU to the device.
    pub syncs_to_device: u64,
    /// Bytes copied, both ways.
    pub bytes: u64,
}

/// One range for a device over blocks of a session. The device must be done with it before it is dropped: then its blocks
/// may be used again.
#[derive(Debug)]
pub struct Window {
    client: Arc<Shared>,
    session: u64,
    id: u64,
    how: How,
    what: What,
    options: WindowOptions,
    first: usize,
    blocks: Vec<BlockId>,
    part: Part,
    per_block: usize,
    declined: Vec<(How, String)>,
    /// `None` only while it is being dropped or replaced.
    inside: Option<Inside>,
    device: Option<OwnedFd>,
    made: u64,
}

/// A piece of a window in one half of the staging buffer, which is free again when this is dropped.
#[derive(Debug)]
pub struct Batch {
    half: Half,
    at: usize,
    bytes: usize,
}

impl Batch {
    /// Where the batch starts in the window, in bytes.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Where it starts in the staging buffer: what the device is told.
    pub fn offset(&self) -> usize {
        self.half.offset()
    }

    /// Bytes of it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Which half of the staging buffer, 0 or 1.
    pub fn half(&self) -> usize {
        self.half.index()
    }
}

impl Window {
    /// The number of a window that is nobody's business any more.
    const NONE: u64 = 0;

    /// Which way it was made.
    pub fn how(&self) -> How {
        self.how
    }

    /// The ways that come before it and were not possible, and why.
    pub fn declined(&self) -> &[(How, String)] {
        &self.declined
    }

    /// What of each block it shows.
    pub fn what(&self) -> What {
        self.what
    }

    /// The window's number at the broker.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Requests that it took to make it and to let it grow.
    pub fn requests(&self) -> u64 {
        self.made
    }

    /// The tokens that it shows, whole blocks of them: more than the session holds once it has grown.
    pub fn tokens(&self) -> Range<usize> {
        self.first * self.per_block..(self.first + self.blocks.len()) * self.per_block
    }

    /// Bytes from the window's start to where the block of `token` begins.
    pub fn block_offset(&self, token: usize) -> Option<usize> {
        let block = (token / self.per_block).checked_sub(self.first).filter(|b| *b < self.blocks.len())?;
        Some(block * self.part.bytes as usize)
    }

    /// Bytes of the window.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * self.part.bytes as usize
    }

    /// Where it is.
    pub fn place(&self) -> WindowPlace<'_> {
        let bytes = self.bytes();
        match self.inside.as_ref().expect("only absent while the window is dropped or replaced") {
            Inside::Buffer { fd, offset } => WindowPlace::Buffer { fd: fd.as_fd(), offset: *offset, bytes },
            Inside::Address { iova } => WindowPlace::Address { iova: *iova, bytes },
            Inside::Staging(s) => WindowPlace::Staging { fd: s.fd(), batch: s.half_bytes(), bytes },
        }
    }

    /// The device, if it came with this window: bound to this tenant's address space, for the process to drive. It comes
    /// with the first iommu window of a client; who takes it keeps the device until it is closed.
    pub fn take_device(&mut self) -> Option<OwnedFd> {
        self.device.take()
    }

    /// What staging has cost this process so far; nothing for windows of other kinds.
    pub fn staging_stats(&self) -> StagingStats {
        match &self.inside {
            Some(Inside::Staging(staging)) => {
                let (syncs_to_cpu, syncs_to_device, bytes) = staging.counts();
                StagingStats { syncs_to_cpu, syncs_to_device, bytes }
            }
            _ => StagingStats::default(),
        }
    }

    fn staging(&self) -> Result<&Arc<Staging>, Error> {
        match &self.inside {
            Some(Inside::Staging(staging)) => Ok(staging),
            _ => {
                Err(Error::Invalid(format!("window {} is made by {}: nothing is staged", self.id, self.how)))
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.inside = None;
        if self.id == Window::NONE {
            return;
        }
        let close = wire::CloseWindow { window: self.id.into() };
        let closed = self.client.call(Verb::CloseWindow, 0, |w| {
            w.put(&close);
        });
        match closed {
            Ok(_) | Err(Error::Lost(_) | Error::Forked) => {}
            // Closed by the broker, when a block under it left the table.
            Err(Error::Refused { fault: wire::Fault::Stale, .. }) => {}
            Err(e) => log::warn!("window {} was not closed: {e}", self.id),
        }
    }
}

impl Session {
    /// A range for a device over the blocks of `tokens`: whole blocks in table order, or one plane in token order. `how` is
    /// the way, `None` for the first that the configured device can use ([`Window::declined`] says why not an earlier
    /// one). It shows whole blocks, so all of those that `tokens` lies in.
    pub fn window(&mut self, tokens: Range<usize>, what: What, how: Option<How>) -> Result<Window, Error> {
        self.window_with(tokens, what, WindowOptions { how, ..WindowOptions::default() })
    }

    /// [`window`](Self::window) with options.
    pub fn window_with(
        &mut self,
        tokens: Range<usize>,
        what: What,
        options: WindowOptions,
    ) -> Result<Window, Error> {
        if tokens.is_empty() {
            return Err(Error::Invalid(format!("a window over tokens {tokens:?}, which are none")));
        }
        self.check_range(&tokens)?;
        let part = self.part(what)?;
        let first = tokens.start >> self.shift();
        let end = tokens.end.div_ceil(self.per_block());
        self.ask_window(None, first, end, what, part, options)
    }

    fn part(&self, what: What) -> Result<Part, Error> {
        let part = Part::of(&self.format.profile, what, page_bytes() as u64);
        part.map_err(|e| Error::Invalid(e.to_string()))
    }

    /// Whether the window is over what this session has there now. It no longer is when a block under it was trimmed, or
    /// replaced by a copy; then the device must stop using it.
    pub fn is_current(&self, window: &Window) -> bool {
        let entries = self.entries.get(window.first..window.first + window.blocks.len());
        window.session == self.id
            && window.first >= self.head
            && entries.is_some_and(|e| e.iter().map(|e| e.block).eq(window.blocks.iter().copied()))
    }

    fn check_own(&self, window: &Window) -> Result<(), Error> {
        if window.session != self.id {
            return Err(Error::Invalid(format!("window {} is of another session", window.id)));
        }
        Ok(())
    }

    fn check_current(&self, window: &Window) -> Result<(), Error> {
        self.check_own(window)?;
        if !self.is_current(window) {
            let text =
                format!("window {} is over blocks that the session no longer has: extend it", window.id);
            return Err(Error::Invalid(text));
        }
        Ok(())
    }

    /// Has the window show at least all tokens up to `end`. While it does already, this asks nobody. It grows to twice its
    /// length where the pool has room, by blocks that the session will write next, so that it grows seldom; a udmabuf is a
    /// new one then, to be imported anew, and the old one can be closed by the device once it is. A window that is no longer
    /// current is made anew.
    pub fn extend_window(&mut self, window: &mut Window, end: usize) -> Result<(), Error> {
        self.check_own(window)?;
        if end > self.tokens {
            let text = format!("a window up to token {end}: the session holds {}", self.tokens);
            return Err(Error::Invalid(text));
        }
        if self.is_current(window) && end <= window.tokens().end {
            return Ok(());
        }
        let first = window.first.max(self.head);
        let needed = end.div_ceil(self.per_block());
        if needed <= first {
            return Err(Error::Invalid(format!(
                "a window up to token {end} begins at {}",
                first << self.shift()
            )));
        }
        let doubled = (first + 2 * window.blocks.len()).min(self.view_blocks());
        // What is copied needs no blocks ahead.
        if doubled > needed && window.how != How::Bounce {
            if let Err(e) = self.grow(doubled << self.shift()) {
                log::debug!("window {} grows by what it needs only: {e}", window.id);
            }
        }
        let end = match window.how {
            How::Bounce => needed,
            _ => needed.max(doubled.min(self.entries.len())),
        };
        // Making room may have copied a shared block under it.
        let old = self.is_current(window).then_some(window.id);
        let new = self.ask_window(old, first, end, window.what, window.part, window.options)?;
        replace(window, new, old.is_some());
        Ok(())
    }

    fn ask_window(
        &mut self,
        old: Option<u64>,
        first: usize,
        end: usize,
        what: What,
        part: Part,
        options: WindowOptions,
    ) -> Result<Window, Error> {
        let (plane, layer, kv) = match what {
            What::Blocks => (0, 0, Kv::K),
            What::Plane { layer, kv } => (1, layer, kv),
        };
        if matches!(options.how, None | Some(How::Run)) && self.client.alone.load(Ordering::Relaxed) {
            let extents = self.entries[first..end].iter().map(|e| e.block.place.extent).collect();
            self.client.free_credit_in(&self.format, &extents)?;
        }
        let per_block = self.per_block();
        let reply = self.call(Verb::Window, |w, report, blocks| {
            w.put(&wire::Window {
                report,
                window: old.unwrap_or(0).into(),
                first: (first as u32).into(),
                blocks: ((end - first) as u32).into(),
                what: plane.into(),
                layer: layer.into(),
                kv: (kv as u32).into(),
                how: options.how.map_or(0, How::code).into(),
                capacity: (options.capacity.unwrap_or(0).div_ceil(per_block) as u32).into(),
                flags: if options.read_only { wire::WINDOW_READ_ONLY } else { 0 }.into(),
            });
            w.put_blocks(blocks.iter().copied());
        })?;
        let protocol = |e: wire::WireError| Error::Protocol(e.to_string());
        let mut r = Reader::new("a window", &reply.body);
        let made: wire::WindowMade = *r.one().map_err(protocol)?;
        let how = How::from_code(made.how.get());
        let how =
            how.ok_or_else(|| Error::Protocol(format!("there is no way {} to make a window", made.how)))?;
        let text = r.text();
        let declined = text.lines().filter_map(|line| {
            let (name, why) = line.split_once(": ")?;
            Some((How::ALL.into_iter().find(|h| h.name() == name)?, trust::words(why)))
        });
        let declined = declined.take(How::ALL.len()).collect();
        let blocks = self.entries[first..end].iter().map(|e| e.block).collect();
        let mut window = Window {
            client: self.client.clone(),
            session: self.id,
            id: made.window.get(),
            how,
            what,
            options,
            first,
            blocks,
            part,
            per_block,
            declined,
            inside: None,
            device: None,
            made: 1,
        };
        // From here on an error closes the window, here and at the broker.
        if reply.fds_lost {
            let source = std::io::Error::from_raw_os_error(libc::EMFILE);
            return Err(Error::Map { what: "the descriptors of a window".into(), source });
        }
        let mut fds = reply.fds.into_iter();
        let missing = || Error::Protocol(format!("a window by {how} came without its descriptor"));
        let flags = made.flags.get();
        let buffer = if flags & wire::WINDOW_BUFFER != 0 { fds.next() } else { None };
        window.device = if flags & wire::WINDOW_DEVICE != 0 { fds.next() } else { None };
        window.inside = Some(match how {
            How::Run => {
                let fd = self.client.arena.descriptor(ExtentId(made.extent.get()));
                let fd = fd.map_err(|source| Error::Map { what: "the extent of a window".into(), source })?;
                Inside::Buffer { fd, offset: made.offset.get() as usize }
            }
            How::Udmabuf => Inside::Buffer { fd: buffer.ok_or_else(missing)?, offset: 0 },
            How::Iommu => Inside::Address { iova: made.address.get() },
            How::Bounce => {
                Inside::Staging(self.client.staging(buffer.ok_or_else(missing)?, made.bytes.get() as usize)?)
            }
        });
        Ok(window)
    }

    /// Copies the window's bytes from byte `at` on into a half of the staging buffer, as many as fit, and hands them to the
    /// device. Waits for its turn if other windows have both halves; a window with a batch in hand gets the other half only
    /// if it is free, and otherwise `None`: finish the first one.
    pub fn load(&self, window: &Window, held: Option<&Batch>, at: usize) -> Result<Option<Batch>, Error> {
        let Some(batch) = self.batch(window, held, at)? else { return Ok(None) };
        let pieces = self.staged(window, &batch).map(|(p, bytes)| (p.cast_const(), bytes));
        // SAFETY: the pieces lie in mapped blocks of this session, and are as long as the batch, which fits the half.
        let filled = unsafe { batch.half.fill(pieces) };
        filled.map_err(|source| Error::Map { what: "the staging buffer".into(), source })?;
        Ok(Some(batch))
    }

    /// A half of the staging buffer for the device to write what belongs at byte `at` of the window: then
    /// [`drain`](Self::drain). Waits as [`load`](Self::load) does.
    pub fn batch(&self, window: &Window, held: Option<&Batch>, at: usize) -> Result<Option<Batch>, Error> {
        let staging = window.staging()?;
        self.check_current(window)?;
        if at >= window.bytes() {
            return Err(Error::Invalid(format!("byte {at} of a window of {}", window.bytes())));
        }
        let half = staging.take(held.is_some());
        Ok(half.map(|half| Batch { at, bytes: half.bytes().min(window.bytes() - at), half }))
    }

    /// Copies what the device has written into the blocks. Refused, with nothing copied, if one of them may not be written.
    pub fn drain(&mut self, window: &Window, batch: &Batch) -> Result<(), Error> {
        window.staging()?;
        self.check_current(window)?;
        let part = window.part.bytes as usize;
        let first = window.first + batch.at / part;
        let end = window.first + (batch.at + batch.bytes).div_ceil(part);
        if let Some(shared) = (first..end).find(|&i| self.entries[i].shared) {
            let text = format!("block {shared} is shared: make its tokens writable first");
            return Err(Error::Invalid(text));
        }
        // SAFETY: as in load; the blocks are this session's alone.
        let drained = unsafe { batch.half.drain(self.staged(window, batch)) };
        drained.map_err(|source| Error::Map { what: "the staging buffer".into(), source })
    }

    /// Where the bytes of a batch are, block by block.
    fn staged<'a>(
        &'a self,
        window: &'a Window,
        batch: &Batch,
    ) -> impl Iterator<Item = (*mut u8, usize)> + 'a {
        let part = window.part.bytes as usize;
        let (mut at, end) = (batch.at, batch.at + batch.bytes);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (block, within) = (at / part, at % part);
            let bytes = (part - within).min(end - at);
            at += bytes;
            let start = self.block_at(window.first + block);
            Some((start.wrapping_add(window.part.offset as usize + within), bytes))
        })
    }
}

/// `window` becomes `new`. `told`: the broker knows that, and has closed the old one; else it is closed now.
fn replace(window: &mut Window, mut new: Window, told: bool) {
    new.made += window.made;
    new.device = new.device.take().or(window.device.take());
    let mut old = std::mem::replace(window, new);
    if told {
        old.id = Window::NONE;
    }
}

impl Shared {
    /// The process's staging buffer: the one that is there, or this one.
    fn staging(&self, fd: OwnedFd, bytes: usize) -> Result<Arc<Staging>, Error> {
        let mut known = lock(&self.staging);
        if let Some(staging) = Weak::upgrade(&known) {
            return Ok(staging);
        }
        let new = Staging::new(fd, bytes);
        let new = Arc::new(new.map_err(|source| Error::Map { what: "the staging buffer".into(), source })?);
        *known = Arc::downgrade(&new);
        Ok(new)
    }
}
