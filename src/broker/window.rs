//! Windows for devices: who has one, over which blocks, and when it is gone.
//!
//! Owns the books of windows (part of the state) and the kernel objects behind them (not part of it). Invariants:
//! - every block under a window counts one reference for it, from before the kernel object is made until after nobody can
//!   reach the block through it any more; so no block under a window is free, evicted or another's;
//! - a window is over what its session's table has: when an entry under it leaves the table, or the session or its client
//!   ends, the window is closed, and its blocks are let go once the kernel object is provably nobody's: a udmabuf when
//!   this process has its only reference, a range of device addresses when it is unmapped, a run on its owner's word (it
//!   closes the window, or the session that was lost) and otherwise when nobody has the extent;
//! - a device belongs to the tenant whose address space it is bound to, until it can be bound anew: no descriptor of it is
//!   open then, whoever had one, and the broker's own it closes for that when another tenant asks.

mod making;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use making::{Declined, Made, Making, Piece};

use super::{Answer, Broker, Job, Refused, Reply, Waiting};
use crate::heap::Buffer;
use crate::id::{BlockId, ClientId, ExtentId, Place, SessionId, Tenant};
use crate::map::page_bytes;
use crate::pool::Block;
use crate::profile::Kv;
use crate::window::iommu::{Device, Handle, Mapping, Space};
use crate::window::iova::Iovas;
use crate::window::{Access, How, Means, Part, Span, What, join};
use crate::wire::{self, Fault, MAX_BLOCKS, Reader, Verb};

/// How soon a window that somebody still holds is looked at again, at first and at most.
const RECHECK: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));
/// Address space that a window reserves if nothing is said: so many times what it shows, so that it grows in place.
const GROWTH: u64 = 4;

/// One window, as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hold {
    client: ClientId,
    tenant: Tenant,
    session: SessionId,
    how: How,
    what: What,
    /// Number of the first block in its session.
    first: u32,
    blocks: Vec<BlockId>,
    /// The owner is done with it, or gone; somebody may still reach the blocks.
    closing: bool,
    /// The owner is gone: its word cannot be had.
    orphan: bool,
    /// A device that is not coherent imports its extents: see [`alone`](super::alone).
    alone: bool,
}

impl Hold {
    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    pub(super) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone
    }

    pub(super) fn is_alone_in(&self, extent: ExtentId) -> bool {
        self.alone && self.extents().any(|e| e == extent)
    }

    pub(super) fn extents(&self) -> impl Iterator<Item = ExtentId> + '_ {
        self.blocks.iter().map(|b| b.place.extent)
    }
}

/// The kernel object of a window.
#[derive(Debug)]
enum Object {
    /// A udmabuf.
    Buffer(Arc<OwnedFd>),
    /// Device addresses.
    Mapped { space: Arc<Space>, iova: u64, reserved: u64, mappings: Vec<Mapping> },
    /// Device addresses on their way out of the device's reach.
    Leaving { iova: u64 },
}

/// A tenant's address space, with the device in it.
#[derive(Debug)]
struct TenantSpace {
    space: Arc<Space>,
    /// The broker's own descriptor of the device; `None` when it was closed for another tenant to try.
    handle: Option<Handle>,
    iovas: Iovas,
    /// Clients that were given the device's descriptor, and may have it still.
    sent: BTreeSet<ClientId>,
}

/// What the worker is doing, and for which window.
#[derive(Debug)]
struct Pending {
    client: ClientId,
    tenant: Tenant,
    how: How,
    window: Option<u64>,
    /// Blocks that it had before it was to grow.
    before: Option<usize>,
}

/// Everything about windows that is not written down.
#[derive(Debug, Default)]
pub(super) struct Windows {
    means: Means,
    objects: BTreeMap<u64, Object>,
    spaces: BTreeMap<Tenant, TenantSpace>,
    /// Staging buffers of connected clients.
    staging: BTreeMap<ClientId, Arc<Buffer>>,
    /// Staging buffers whose clients are done with them, until nobody has them.
    leaving: Vec<Arc<Buffer>>,
    pending: BTreeMap<u64, Pending>,
    /// Windows over a place.
    cover: BTreeMap<Place, u32>,
    /// Which window the one being made is to replace.
    replaced: BTreeMap<u64, u64>,
    /// When the closed ones are looked at again.
    patience: Option<Duration>,
    /// Counts the references to a udmabuf; another one in tests, which have none.
    count: Count,
    /// Whether nobody else has an extent; likewise.
    sole: Sole,
}

#[derive(Debug, Clone, Copy)]
struct Sole(fn(&Buffer) -> bool);

impl Default for Sole {
    fn default() -> Self {
        Sole(Buffer::is_only_ours)
    }
}

#[derive(Debug, Clone, Copy)]
struct Count(fn(BorrowedFd<'_>) -> Option<u64>);

impl Default for Count {
    fn default() -> Self {
        // What the kernel does not say is not 1.
        Count(crate::heap::references)
    }
}

impl Windows {
    /// What the record says, without the kernel's objects: blocks stay where they are, for want of a proof.
    pub(super) fn recalled(holds: &BTreeMap<u64, Hold>) -> Self {
        let mut windows = Windows::default();
        for place in holds.values().flat_map(|h| &h.blocks).map(|b| b.place) {
            *windows.cover.entry(place).or_default() += 1;
        }
        windows
    }

    /// Whether the device sees what CPUs have in their caches.
    pub(super) fn coherent(&self) -> bool {
        self.means.coherent
    }

    /// Windows over a place.
    pub(super) fn over(&self, place: Place) -> u32 {
        self.cover.get(&place).copied().unwrap_or(0)
    }
}

/// What is known of a request that comes back from the worker.
#[derive(Debug, Default)]
pub(super) struct Resume {
    pub declined: Vec<(How, Declined)>,
    pub ready: Option<u64>,
}

/// How it goes on.
enum Next {
    /// It is there.
    Ready(u64),
    /// The worker makes it.
    Work(Making, Pending),
}

/// A request, checked.
struct Wish {
    client: ClientId,
    tenant: Tenant,
    session: SessionId,
    what: What,
    first: u32,
    blocks: Vec<BlockId>,
    part: Part,
    slot_bytes: u64,
    /// Whether the device may write the block.
    writable: Vec<bool>,
    /// The window that this one is to replace.
    old: Option<u64>,
    /// Blocks that there should be address space for.
    capacity: u64,
    auto: bool,
}

impl Wish {
    fn spans(&self, range: std::ops::Range<usize>) -> Vec<Span> {
        join(self.blocks[range].iter().map(|b| b.place), self.slot_bytes, self.part)
    }

    fn bytes(&self) -> u64 {
        self.part.bytes * self.blocks.len() as u64
    }

    /// Refuses blocks that the device may not write, for a way which cannot keep it from that.
    fn all_writable(&self, what: &str) -> Result<(), Declined> {
        let Some(first) = self.writable.iter().position(|w| !w) else { return Ok(()) };
        let block = self.first as usize + first;
        let text = format!(
            "{what} is always writable, and block {block} may not be written by the device: make it the session's own first (writable), or use a read-only iommu window"
        );
        Err(Declined::new(Fault::BadRequest, text))
    }
}

/// What a window is called inside: whose it is, and which of the tenant's. Clients are told the latter only, so that the
/// numbers do not tell what others make. Numbers have 32 bits; of a longer one there is no window.
fn key(tenant: Tenant, number: u64) -> u64 {
    u32::try_from(number).map_or(0, |number| u64::from(tenant.0) << 32 | u64::from(number))
}

/// What its client calls a window.
fn number(window: u64) -> u64 {
    window & u64::from(u32::MAX)
}

impl Broker {
    /// What this machine has for windows.
    pub fn set_means(&mut self, means: Means) {
        self.windows.means = means;
    }

    /// Counts holders otherwise than the kernel does.
    #[cfg(test)]
    pub(super) fn count_references_by(
        &mut self,
        count: fn(BorrowedFd<'_>) -> Option<u64>,
        sole: fn(&Buffer) -> bool,
    ) {
        self.windows.count = Count(count);
        self.windows.sole = Sole(sole);
    }

    pub(super) fn window(
        &mut self,
        client: ClientId,
        id: SessionId,
        mut r: Reader<'_>,
        resume: Resume,
    ) -> Result<Answer, Refused> {
        let ask: wire::Window = *r.one()?;
        let used = r.many(ask.report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        if let Some(window) = resume.ready {
            // The session may have been ended by the broker while the worker was at it.
            self.session(client, id)?;
            return Ok(Answer::Now(self.window_reply(window, &resume.declined)));
        }
        self.apply_report(client, id, &ask.report, used)?;
        let wish = self.wish(client, id, &ask)?;
        let ways = match ask.how.get() {
            0 => How::ALL.to_vec(),
            code => vec![How::from_code(code).ok_or_else(|| {
                Refused::bad(format!("there is no way {code} to make a window: 0 is auto, 1 to 4 are ways"))
            })?],
        };
        let mut declined = resume.declined;
        for how in ways {
            if declined.iter().any(|(h, _)| *h == how) {
                continue;
            }
            match self.make(how, &wish) {
                Ok(Next::Ready(window)) => return Ok(Answer::Now(self.window_reply(window, &declined))),
                Ok(Next::Work(making, pending)) => {
                    let ticket = self.next_ticket;
                    self.next_ticket += 1;
                    self.windows.pending.insert(ticket, pending);
                    self.jobs.push_back(Job::Window { ticket, making });
                    return Ok(Answer::Making { declined });
                }
                Err(why) => {
                    declined.push((how, why));
                }
            }
        }
        let words: Vec<String> = declined.iter().map(|(how, why)| format!("{how}: {}", why.text)).collect();
        // A way that is possible but not now says more than one that never is.
        let fault = declined.iter().map(|(_, why)| why.fault).find(|f| *f != Fault::BadRequest);
        Err(Refused::new(
            fault.unwrap_or(Fault::BadRequest),
            format!("no window can be made: {}", words.join("; ")),
        ))
    }

    fn wish(&self, client: ClientId, id: SessionId, ask: &wire::Window) -> Result<Wish, Refused> {
        if self.frozen {
            let text = "the broker's books do not add up; it makes no windows";
            return Err(Refused::new(Fault::BrokerFault, text));
        }
        let s = self.session(client, id)?;
        let (first, count) = (ask.first.get(), ask.blocks.get());
        if count == 0 {
            return Err(Refused::bad(format!("{id}: a window over no blocks")));
        }
        if first < s.head || u64::from(first) + u64::from(count) > u64::from(s.end()) {
            let text = format!(
                "{id}: blocks {first} to {} are not all there, the table holds {} to {}",
                u64::from(first) + u64::from(count),
                s.head,
                s.end()
            );
            return Err(Refused::bad(text));
        }
        let what = match (ask.what.get(), ask.kv.get()) {
            (0, _) => What::Blocks,
            (1, 0) => What::Plane { layer: ask.layer.get(), kv: Kv::K },
            (1, 1) => What::Plane { layer: ask.layer.get(), kv: Kv::V },
            (what, kv) => {
                let text = format!(
                    "a window shows whole blocks (0) or one plane (1), K (0) or V (1), not {what}, {kv}"
                );
                return Err(Refused::bad(text));
            }
        };
        let format = &self.state.formats[&s.format];
        let part =
            Part::of(&format.profile, what, page_bytes() as u64).map_err(|e| Refused::bad(e.to_string()))?;
        let old = Some(ask.window.get()).filter(|w| *w != 0).map(|number| key(s.tenant, number));
        if let Some(old) = old {
            let mine = self
                .state
                .windows
                .get(&old)
                .filter(|h| !h.closing && (h.client, h.session, h.what) == (client, id, what));
            if mine.is_none() {
                let text = format!(
                    "window {} is not a window of {id} over the same part: it may be closed",
                    ask.window
                );
                return Err(Refused::new(Fault::Stale, text));
            }
        }
        self.admit_window(id, s.tenant, old)?;
        let replaced = old.and_then(|old| self.state.windows.get(&old)).map_or(0, |h| h.blocks.len());
        let more = (count as usize).saturating_sub(replaced);
        self.may_name(s.tenant, more, "make windows over fewer blocks")?;
        let at = (first - s.head) as usize;
        let blocks = s.table[at..at + count as usize].to_vec();
        if let Some(copy) = blocks.iter().position(|b| b.place.extent.is_copy()) {
            let text = format!(
                "block {} of {id} is of a prompt that is common to several tenants, in memory that no device is given: make \
                 these tokens writable first, which copies them",
                first + copy as u32
            );
            return Err(Refused::bad(text));
        }
        let read_only = ask.flags.get() & wire::WINDOW_READ_ONLY != 0;
        let private = |b: &BlockId| match self.state.pool.slot(b.place).map(|s| s.block) {
            Some(Block::Held { refs, sealed: false, .. }) => refs - self.windows.over(b.place) == 1,
            _ => false,
        };
        let writable = blocks.iter().map(|b| !read_only && private(b)).collect();
        Ok(Wish {
            client,
            tenant: s.tenant,
            session: id,
            what,
            first,
            blocks,
            part,
            slot_bytes: format.cut.slot_bytes,
            writable,
            old,
            capacity: u64::from(ask.capacity.get()),
            auto: ask.how.get() == 0,
        })
    }

    /// Whether one more window is within the operator's limits. One that is to be replaced makes room for its successor.
    fn admit_window(&self, id: SessionId, tenant: Tenant, old: Option<u64>) -> Result<(), Refused> {
        let (mut of_session, mut of_tenant) = (0u32, 0u32);
        for (window, hold) in &self.state.windows {
            // One that is closed and still held counts for the tenant, whose device holds it.
            of_session += u32::from(hold.session == id && !hold.closing && Some(*window) != old);
            of_tenant += u32::from(hold.tenant == tenant);
        }
        let limits = [
            (of_session, self.policy.windows_per_session, "this session", "limits.windows-per-session"),
            (of_tenant, self.policy.windows_per_tenant, "this tenant", "limits.windows-per-tenant"),
            (self.state.windows.len() as u32, self.policy.windows, "the broker", "limits.windows"),
        ];
        match limits.into_iter().find(|(count, most, ..)| count >= most) {
            None => Ok(()),
            Some((count, most, whose, key)) => {
                let text = format!(
                    "{whose} has {count} windows, and {key} is {most}; close some, on the device's side too: those count that a device still holds"
                );
                Err(Refused::new(Fault::OverLimit, text).numbers(u64::from(count) + 1, most.into()))
            }
        }
    }

    fn make(&mut self, how: How, wish: &Wish) -> Result<Next, Declined> {
        match how {
            How::Run => self.make_run(wish),
            How::Udmabuf => self.make_udmabuf(wish),
            How::Iommu => self.make_iommu(wish),
            How::Bounce => self.make_bounce(wish),
        }
    }

    fn make_run(&mut self, wish: &Wish) -> Result<Next, Declined> {
        let backend = self.heap.backend();
        if !backend.is_dma_buf() {
            let text = format!("extents of a {backend} pool are no dma-bufs, so no device imports them");
            return Err(Declined::new(Fault::BadRequest, text));
        }
        let access = self.windows.means.access;
        if wish.auto && access == Access::Iommu {
            return Err(Declined::new(
                Fault::BadRequest,
                "the device is driven through iommufd, which takes no dma-bufs",
            ));
        }
        if wish.auto && access != Access::Scatter && backend.is_scattered() {
            let text = "pages of an extent may be scattered, and pool.device does not say that the device takes that";
            return Err(Declined::new(Fault::BadRequest, text));
        }
        let spans = wish.spans(0..wish.blocks.len());
        if spans.len() != 1 {
            let parts = match wish.what {
                What::Blocks => "blocks",
                What::Plane { .. } => "planes of blocks",
            };
            let text = format!("the {} {parts} lie in {} separate pieces", wish.blocks.len(), spans.len());
            return Err(Declined::new(Fault::BadRequest, text));
        }
        wish.all_writable("the extent of a run")?;
        if self.imports_need_one_writer() {
            if let Some(why) = self.another_writer(wish.session, &wish.blocks) {
                let text = format!(
                    "the device is not coherent (device.coherent), so only one session may write what it imports, and {why}; pool.extent = \"block\" gives each block an extent of its own"
                );
                return Err(Declined::new(Fault::Busy, text));
            }
            let cut = self.state.formats[&self.state.sessions[&wish.session].format].cut;
            let promised = self.promised_in(wish.tenant, &cut, &wish.blocks);
            if promised > 0 {
                let text = format!(
                    "the device is not coherent (device.coherent), so only one session may write what it imports, and {promised} free places beside the blocks were promised to sessions (admit)"
                );
                return Err(Declined::new(Fault::Busy, text));
            }
        }
        Ok(Next::Ready(self.note(How::Run, wish)))
    }

    fn make_udmabuf(&mut self, wish: &Wish) -> Result<Next, Declined> {
        let no = |text: String| Err(Declined::new(Fault::BadRequest, text));
        if wish.auto {
            match self.windows.means.access {
                Access::Scatter => {}
                Access::Unknown => {
                    return no("pool.device does not say that the device takes scattered memory".into());
                }
                Access::Contiguous => return no("the device must have contiguous memory".into()),
                Access::Iommu => {
                    return no("the device is driven through iommufd, which takes no dma-bufs".into());
                }
            }
        }
        let spans = wish.spans(0..wish.blocks.len());
        let Some(pieces) = self.pieces(&spans) else {
            let backend = self.heap.backend();
            return no(format!("the kernel joins ranges of memfds only, and this pool is {backend}"));
        };
        wish.all_writable("a udmabuf")?;
        let udmabuf = self.windows.means.udmabuf.clone();
        let udmabuf = udmabuf.map_err(|why| Declined::new(Fault::BadRequest, why))?;
        let window = self.note(How::Udmabuf, wish);
        let pending = self.pending(wish, How::Udmabuf, Some(window), None);
        Ok(Next::Work(Making::Join(udmabuf, pieces), pending))
    }

    fn make_iommu(&mut self, wish: &Wish) -> Result<Next, Declined> {
        let device = self.windows.means.iommu.clone();
        let device = device.map_err(|why| Declined::new(Fault::BadRequest, why))?;
        let backend = self.heap.backend();
        let spans = wish.spans(0..1);
        if self.pieces(&spans).is_none() {
            let text = format!("iommufd maps memfds only, and this pool is {backend}");
            return Err(Declined::new(Fault::BadRequest, text));
        }
        if let Some(bind) = self.bind(device, wish)? {
            let pending = self.pending(wish, How::Iommu, None, None);
            return Ok(Next::Work(bind, pending));
        }
        if let Some(grown) = self.grow_in_place(wish) {
            return Ok(grown);
        }
        let tenant = self.windows.spaces.get_mut(&wish.tenant).expect("just looked at");
        let wanted = match wish.capacity {
            0 => wish.bytes().saturating_mul(GROWTH),
            blocks => blocks.max(wish.blocks.len() as u64).saturating_mul(wish.part.bytes),
        };
        // Large ranges at large borders, so that the IOMMU can use large entries where memory allows.
        let align = (page_bytes() as u64).max(if wanted >= 2 << 20 { 2 << 20 } else { 4096 });
        let (space, taken) = (tenant.space.clone(), tenant.iovas.take(wanted, align));
        let (iova, reserved) = match taken {
            Some(iova) => (iova, wanted),
            None => match tenant.iovas.take(wish.bytes(), page_bytes() as u64) {
                Some(iova) => (iova, wish.bytes()),
                None => {
                    let text = format!(
                        "{} bytes of device addresses are not left beside {} windows of this tenant; close some",
                        wish.bytes(),
                        tenant.iovas.count()
                    );
                    return Err(Declined::new(Fault::Busy, text));
                }
            },
        };
        let window = self.note(How::Iommu, wish);
        let object = Object::Mapped { space: space.clone(), iova, reserved, mappings: Vec::new() };
        self.windows.objects.insert(window, object);
        let segments = self.segments(wish, 0);
        let pending = self.pending(wish, How::Iommu, Some(window), None);
        Ok(Next::Work(Making::Map(space, iova, segments), pending))
    }

    /// The device for the tenant, if it is not there: it is bound anew, which the kernel refuses while any descriptor of an
    /// earlier binding is open. Those of the broker are closed for that, but not while the other tenant has windows for the
    /// device: then it is in use whatever became of the descriptors.
    fn bind(&mut self, device: Arc<Device>, wish: &Wish) -> Result<Option<Making>, Declined> {
        let space = self.windows.spaces.get(&wish.tenant);
        if space.is_some_and(|s| s.handle.is_some() || s.sent.contains(&wish.client)) {
            return Ok(None);
        }
        let space = space.map(|s| s.space.clone());
        let others = |t: Tenant| t != wish.tenant;
        let open = |h: &&Hold| h.how == How::Iommu && !h.closing && others(h.tenant);
        if self.windows.spaces.keys().any(|t| others(*t)) && self.state.windows.values().any(|h| open(&h)) {
            let text = format!(
                "{} is another tenant's, which has windows for it; it comes free when those and every descriptor of it are closed",
                device.name()
            );
            return Err(Declined::new(Fault::Busy, text));
        }
        let earlier = self.windows.spaces.values_mut().filter_map(|s| s.handle.take()).collect();
        Ok(Some(Making::Bind(device, space, earlier)))
    }

    /// Maps only what is new, behind what is there, if the old window has the addresses for it.
    fn grow_in_place(&mut self, wish: &Wish) -> Option<Next> {
        let old = wish.old?;
        let hold = &self.state.windows[&old];
        let had = hold.blocks.len();
        if hold.first != wish.first || !wish.blocks.starts_with(&hold.blocks) {
            return None;
        }
        let Some(Object::Mapped { space, iova, reserved, .. }) = self.windows.objects.get(&old) else {
            return None;
        };
        if wish.bytes() > *reserved {
            return None;
        }
        if had == wish.blocks.len() {
            return Some(Next::Ready(old));
        }
        let (space, at) = (space.clone(), iova + had as u64 * wish.part.bytes);
        let segments = self.segments(wish, had);
        let new = wish.blocks[had..].to_vec();
        for block in &new {
            self.cover(*block);
        }
        self.state.windows.get_mut(&old).expect("just looked at").blocks.extend(new);
        let pending = self.pending(wish, How::Iommu, Some(old), Some(had));
        Some(Next::Work(Making::Map(space, at, segments), pending))
    }

    fn make_bounce(&mut self, wish: &Wish) -> Result<Next, Declined> {
        let staging = self.windows.means.staging.clone();
        let staging = staging.map_err(|why| Declined::new(Fault::BadRequest, why))?;
        if wish.auto && self.windows.means.access == Access::Iommu {
            let text = "the device is driven through iommufd, which takes no dma-bufs";
            return Err(Declined::new(Fault::BadRequest, text));
        }
        if self.windows.staging.contains_key(&wish.client) {
            return Ok(Next::Ready(self.note(How::Bounce, wish)));
        }
        let out = (self.windows.staging.len() + self.windows.leaving.len()) as u64;
        let asked = self.windows.pending.values().filter(|p| p.how == How::Bounce).count() as u64;
        let (needed, total) = ((out + asked + 1) * staging.bytes, staging.total);
        if needed > total {
            let text = format!(
                "{out} processes have staging buffers of {} bytes, and device.staging-total is {total}; they come free when those close their windows",
                staging.bytes
            );
            return Err(Declined::new(Fault::Busy, text));
        }
        let pending = self.pending(wish, How::Bounce, None, None);
        Ok(Next::Work(Making::Stage(staging.heap, staging.bytes), pending))
    }

    fn pending(&self, wish: &Wish, how: How, window: Option<u64>, before: Option<usize>) -> Pending {
        Pending { client: wish.client, tenant: wish.tenant, how, window, before }
    }

    /// Where spans are; `None` unless all extents are memfds.
    fn pieces(&self, spans: &[Span]) -> Option<Vec<Piece>> {
        let piece = |s: &Span| {
            let buffer = self.buffers.get(&s.extent)?.clone();
            buffer.memfd()?;
            Some(Piece { buffer, offset: s.offset, bytes: s.bytes })
        };
        spans.iter().map(piece).collect()
    }

    /// The blocks from `from` on, cut where the device's right to write changes.
    fn segments(&self, wish: &Wish, from: usize) -> Vec<(Vec<Piece>, bool)> {
        let mut segments = Vec::new();
        let mut start = from;
        while start < wish.blocks.len() {
            let may = wish.writable[start];
            let end =
                (start..wish.blocks.len()).find(|&i| wish.writable[i] != may).unwrap_or(wish.blocks.len());
            let pieces = self.pieces(&wish.spans(start..end)).expect("all extents of a pool are of one kind");
            segments.push((pieces, may));
            start = end;
        }
        segments
    }

    /// Writes a window down and takes its references.
    fn note(&mut self, how: How, wish: &Wish) -> u64 {
        let number = self.state.window_numbers.entry(wish.tenant).or_default();
        let window = loop {
            *number = number.wrapping_add(1).max(1);
            let window = key(wish.tenant, (*number).into());
            // After four thousand million of them, one of the first may still be there.
            if !self.state.windows.contains_key(&window) {
                break window;
            }
        };
        // Staged bytes are copies: their blocks may go wherever they like.
        let blocks = if how == How::Bounce { Vec::new() } else { wish.blocks.clone() };
        blocks.iter().for_each(|b| self.cover(*b));
        let hold = Hold {
            client: wish.client,
            tenant: wish.tenant,
            session: wish.session,
            how,
            what: wish.what,
            first: wish.first,
            blocks,
            closing: false,
            orphan: false,
            alone: how == How::Run && self.imports_need_one_writer(),
        };
        let alone = hold.alone;
        self.state.windows.insert(window, hold);
        if alone {
            self.set_extents_aside(&wish.blocks);
        }
        if let Some(old) = wish.old {
            // Its successor is over the same blocks, so nothing of it is free meanwhile.
            self.windows.replaced.insert(window, old);
        }
        window
    }

    fn cover(&mut self, block: BlockId) {
        self.share(&[block]);
        *self.windows.cover.entry(block.place).or_default() += 1;
    }

    fn uncover(&mut self, block: BlockId, hold: (ClientId, SessionId)) {
        if let Some(count) = self.windows.cover.get_mut(&block.place) {
            *count -= 1;
            if *count == 0 {
                self.windows.cover.remove(&block.place);
            }
        }
        // A client that has lost the session may still write there: then the block waits for its word, as those do that
        // were under no window.
        let (client, session) = hold;
        if self.is_lost(client, session) && self.state.pool.suspect(block.place, client) {
            let kept = self.state.clients.get_mut(&client).and_then(|c| c.lost.get_mut(&session));
            kept.expect("just looked at").push(block);
            return;
        }
        self.let_go(block, None);
    }

    fn window_reply(&mut self, window: u64, declined: &[(How, Declined)]) -> Reply {
        if let Some(old) = self.windows.replaced.remove(&window) {
            self.close_window(old, false);
        }
        let hold = &self.state.windows[&window];
        let (how, client, tenant) = (hold.how, hold.client, hold.tenant);
        let format = &self.state.formats[&self.state.sessions[&hold.session].format];
        let part =
            Part::of(&format.profile, hold.what, page_bytes() as u64).expect("checked when it was made");
        let bytes = part.bytes * hold.blocks.len() as u64;
        let mut made =
            wire::WindowMade { window: number(window).into(), bytes: bytes.into(), ..Default::default() };
        made.how = how.code().into();
        made.capacity = bytes.into();
        let mut descriptors = Vec::new();
        let mut flags = 0;
        match how {
            How::Run => {
                let first = Span::at(hold.blocks[0].place, format.cut.slot_bytes, part);
                made.extent = first.extent.0.into();
                made.offset = first.offset.into();
            }
            How::Udmabuf => {
                if let Some(Object::Buffer(fd)) = self.windows.objects.get(&window) {
                    descriptors.push(fd.clone());
                    flags |= wire::WINDOW_BUFFER;
                }
            }
            How::Iommu => {
                if let Some(Object::Mapped { iova, reserved, .. }) = self.windows.objects.get(&window) {
                    made.address = (*iova).into();
                    made.capacity = (*reserved).into();
                }
                if let Some(space) = self.windows.spaces.get_mut(&tenant) {
                    if let Some(handle) = space.handle.clone().filter(|_| space.sent.insert(client)) {
                        descriptors.push(handle);
                        flags |= wire::WINDOW_DEVICE;
                    }
                }
            }
            How::Bounce => {
                if let Some(buffer) = self.windows.staging.get(&client) {
                    made.bytes = buffer.bytes().into();
                    made.capacity = buffer.bytes().into();
                    if let Some(copy) = buffer.fd().and_then(|fd| fd.try_clone_to_owned().ok()) {
                        descriptors.push(Arc::new(copy));
                        flags |= wire::WINDOW_BUFFER;
                    }
                }
            }
        }
        made.flags = flags.into();
        let mut reply = Reply { descriptors, ..Reply::default() };
        reply.body.put(&made);
        let words: Vec<String> = declined.iter().map(|(how, why)| format!("{how}: {}", why.text)).collect();
        reply.body.put(words.join("\n").as_bytes());
        reply
    }

    /// The verb `close window`.
    pub(super) fn end_window(&mut self, client: ClientId, mut r: Reader<'_>) -> Result<Answer, Refused> {
        let number = r.one::<wire::CloseWindow>()?.window.get();
        r.end()?;
        let window = key(self.client(client).tenant, number);
        if !self.state.windows.get(&window).is_some_and(|h| h.client == client && !h.closing) {
            return Err(Refused::new(Fault::Stale, format!("window {number} is not on this connection")));
        }
        self.close_window(window, false);
        Ok(Answer::Now(Reply::default()))
    }

    /// A window's owner is done with it, or gone (`orphan`): its blocks are let go as soon as nobody reaches them.
    fn close_window(&mut self, window: u64, orphan: bool) {
        let Some(hold) = self.state.windows.get_mut(&window) else { return };
        hold.orphan |= orphan;
        if hold.closing {
            return;
        }
        hold.closing = true;
        let client = hold.client;
        if self.windows.pending.values().any(|p| p.window == Some(window)) {
            // The worker is at it: when it is done, this goes on.
            return;
        }
        match self.windows.objects.get_mut(&window) {
            Some(Object::Mapped { space, iova, mappings, .. }) => {
                let (space, iova, mappings) = (space.clone(), *iova, std::mem::take(mappings));
                self.windows.objects.insert(window, Object::Leaving { iova });
                let ticket = self.next_ticket;
                self.next_ticket += 1;
                let tenant = self.state.windows[&window].tenant;
                let pending = Pending { client, tenant, how: How::Iommu, window: Some(window), before: None };
                self.windows.pending.insert(ticket, pending);
                self.jobs.push_back(Job::Window { ticket, making: Making::Unmap(space, mappings) });
            }
            Some(Object::Leaving { .. }) => {}
            Some(Object::Buffer(_)) | None => {
                self.windows.patience = Some(RECHECK.0);
                self.reap(window);
            }
        }
        self.drop_staging(client);
    }

    /// A process whose last staged window is closed needs no buffer.
    fn drop_staging(&mut self, client: ClientId) {
        let staged = |h: &Hold| h.client == client && h.how == How::Bounce && !h.closing;
        if self.state.windows.values().any(staged) {
            return;
        }
        if let Some(buffer) = self.windows.staging.remove(&client) {
            self.windows.leaving.push(buffer);
            self.windows.patience = Some(RECHECK.0);
        }
    }

    /// Ends a closed window if nobody can reach its blocks through it any more.
    fn reap(&mut self, window: u64) {
        let Some(hold) = self.state.windows.get(&window).filter(|h| h.closing) else { return };
        let free = match (hold.how, self.windows.objects.get(&window)) {
            (How::Bounce, _) => true,
            // Its owner has said that the device is done; only the owner's word can be had while it lives, and nobody
            // else's needs to. Of an owner that is gone, the extent itself must be free of holders.
            (How::Run, _) => match hold.orphan {
                true => hold.blocks.iter().all(|b| self.is_only_ours(b.place)),
                // A session that the broker has ended: its owner has not said so yet.
                false => !self.is_lost(hold.client, hold.session),
            },
            (_, Some(Object::Buffer(fd))) => (self.windows.count.0)(fd.as_fd()) == Some(1),
            // Made by an earlier run of the broker, or on its way: no proof.
            _ => false,
        };
        if free {
            self.forget_window(window);
        }
    }

    fn is_lost(&self, client: ClientId, session: SessionId) -> bool {
        self.state.clients.get(&client).is_some_and(|c| c.lost.contains_key(&session))
    }

    fn is_only_ours(&self, place: Place) -> bool {
        self.buffers.get(&place.extent).is_none_or(|b| (self.windows.sole.0)(b))
    }

    fn forget_window(&mut self, window: u64) {
        if let Some(Object::Mapped { iova, .. } | Object::Leaving { iova }) =
            self.windows.objects.remove(&window)
        {
            let tenant = self.state.windows[&window].tenant;
            if let Some(space) = self.windows.spaces.get_mut(&tenant) {
                space.iovas.give(iova);
            }
        }
        self.windows.replaced.remove(&window);
        let Some(hold) = self.state.windows.remove(&window) else { return };
        if hold.alone {
            self.set_extents_aside(&hold.blocks);
        }
        for block in hold.blocks.into_iter().rev() {
            self.uncover(block, (hold.client, hold.session));
        }
    }

    /// Closes the windows of a session whose table no longer has what is under them.
    pub(super) fn check_windows(&mut self, id: SessionId) {
        let table = self.state.sessions.get(&id);
        let stands = |h: &Hold| {
            let of = |i: usize| table.and_then(|s| s.block(h.first + i as u32));
            h.blocks.iter().enumerate().all(|(i, b)| of(i) == Some(*b)) && table.is_some()
        };
        let mine = self.state.windows.iter().filter(|(_, h)| h.session == id && !h.closing);
        let gone: Vec<u64> = mine.filter(|(_, h)| !stands(h)).map(|(w, _)| *w).collect();
        for window in gone {
            self.close_window(window, false);
        }
    }

    /// A process has let go of a session that the broker had ended, and so of its windows.
    pub(super) fn reap_windows_of(&mut self, id: SessionId) {
        let mine = self.state.windows.iter().filter(|(_, h)| h.session == id && h.closing);
        for window in mine.map(|(w, _)| *w).collect::<Vec<_>>() {
            self.reap(window);
        }
    }

    /// The owner of windows is gone.
    pub(super) fn orphan_windows(&mut self, client: ClientId) {
        let mine = self.state.windows.iter().filter(|(_, h)| h.client == client);
        for window in mine.map(|(w, _)| *w).collect::<Vec<_>>() {
            self.close_window(window, true);
        }
        self.drop_staging(client);
        for space in self.windows.spaces.values_mut() {
            space.sent.remove(&client);
        }
    }

    /// After how long [`recheck_windows`](Self::recheck_windows) is to be called; `None` while nothing waits for it.
    pub fn recheck_after(&self) -> Option<Duration> {
        self.windows.patience
    }

    /// Looks again at what somebody may still hold.
    pub fn recheck_windows(&mut self) {
        let closing = self.state.windows.iter().filter(|(_, h)| h.closing).map(|(w, _)| *w);
        for window in closing.collect::<Vec<_>>() {
            self.reap(window);
        }
        self.windows.leaving.retain(|b| !b.is_only_ours());
        // What the kernel is to take out of a device's reach is told by the worker, not found by looking.
        let objects = &self.windows.objects;
        let waits = |w: &u64, h: &Hold| h.closing && !matches!(objects.get(w), Some(Object::Leaving { .. }));
        let left = self.state.windows.iter().any(|(w, h)| waits(w, h)) || !self.windows.leaving.is_empty();
        self.windows.patience = left.then(|| {
            let before = self.windows.patience.unwrap_or(RECHECK.0);
            (before * 2).clamp(RECHECK.0, RECHECK.1)
        });
        self.settle();
    }

    /// A device in whose address space nothing is any more, and that no client has, is nobody's: the broker lets go of it, and
    /// whoever binds it next proves that all others have.
    pub(super) fn let_go_of_devices(&mut self) {
        let used: BTreeSet<Tenant> = self
            .state
            .windows
            .values()
            .filter(|h| h.how == How::Iommu)
            .map(|h| h.tenant)
            .chain(self.windows.pending.values().map(|p| p.tenant))
            .collect();
        self.windows.spaces.retain(|tenant, s| !s.sent.is_empty() || used.contains(tenant));
    }

    /// The worker is done with something for a window.
    pub(super) fn window_made(&mut self, ticket: u64, result: Result<Made, Declined>) {
        let Some(p) = self.windows.pending.remove(&ticket) else { return };
        let (client, connected) = (p.client, self.state.clients.contains_key(&p.client));
        let closing = p.window.is_some_and(|w| self.state.windows.get(&w).is_none_or(|h| h.closing));
        match (result, p.window) {
            (Ok(Made::Bound(space, handle, allowed)), _) => {
                // Bound anew, so nobody who was given it before has it any more.
                self.windows.spaces.values_mut().for_each(|s| s.sent.clear());
                if connected {
                    let bits = self.windows.means.iommu.as_ref().map_or(32, |d| d.bits);
                    let new = || TenantSpace {
                        space,
                        handle: None,
                        iovas: Iovas::new(&allowed, bits),
                        sent: BTreeSet::new(),
                    };
                    // What is mapped in the tenant's own space stays so.
                    self.windows.spaces.entry(p.tenant).or_insert_with(new).handle = Some(handle);
                }
                self.window_again(client, None, None);
            }
            (Ok(Made::Staged(buffer)), _) => {
                if connected {
                    self.windows.staging.insert(client, Arc::new(buffer));
                }
                self.window_again(client, None, None);
            }
            (Ok(Made::Joined(fd)), Some(window)) => {
                self.windows.objects.insert(window, Object::Buffer(Arc::new(fd)));
                self.made_or_closed(client, window, closing);
            }
            (Ok(Made::Mapped(new)), Some(window)) => {
                if let Some(Object::Mapped { mappings, .. }) = self.windows.objects.get_mut(&window) {
                    mappings.extend(new);
                }
                self.made_or_closed(client, window, closing);
            }
            (Ok(Made::Unmapped), Some(window)) => self.forget_window(window),
            (Ok(_), None) => {}
            // Another process of the tenant asked at the same time, and has bound it.
            (Err(_), None) if p.how == How::Iommu && self.has_device(p.tenant) => {
                self.window_again(client, None, None);
            }
            (Err(why), Some(window))
                if matches!(self.windows.objects.get(&window), Some(Object::Leaving { .. })) =>
            {
                log::error!(
                    "window {window} cannot be taken out of the device's reach: {}; its blocks stay out of use",
                    why.text
                );
            }
            (Err(why), window) => {
                if let Some(window) = window {
                    match p.before {
                        Some(before) => self.ungrow(window, before),
                        None => self.forget_window(window),
                    }
                    if closing && p.before.is_some() {
                        self.made_or_closed(client, window, true);
                    }
                }
                self.window_again(client, Some((p.how, why)), None);
            }
        }
    }

    fn has_device(&self, tenant: Tenant) -> bool {
        self.windows.spaces.get(&tenant).is_some_and(|s| s.handle.is_some())
    }

    fn ungrow(&mut self, window: u64, before: usize) {
        let Some(hold) = self.state.windows.get_mut(&window) else { return };
        let whose = (hold.client, hold.session);
        for block in hold.blocks.split_off(before) {
            self.uncover(block, whose);
        }
    }

    fn made_or_closed(&mut self, client: ClientId, window: u64, closing: bool) {
        if closing {
            // It was closed while the worker was at it: now it can really be.
            if let Some(hold) = self.state.windows.get_mut(&window) {
                hold.closing = false;
            }
            let orphan = self.state.windows.get(&window).is_some_and(|h| h.orphan);
            self.close_window(window, orphan);
            // Whoever still waits for it is told what became of its session.
            self.window_again(client, None, None);
        } else {
            self.window_again(client, None, Some(window));
        }
    }

    /// The request of a client that waited for the worker goes on.
    fn window_again(&mut self, client: ClientId, declined: Option<(How, Declined)>, ready: Option<u64>) {
        let Some(Waiting::Window { message, declined: mut before }) = self.waiting.remove(&client) else {
            return;
        };
        before.extend(declined);
        let Ok((header, body)) = wire::split(&message) else { return };
        let (session, sequence) = (header.session.get(), header.sequence.get());
        let Some(tenant) = self.state.clients.get(&client).map(|c| c.tenant) else { return };
        let session = SessionId { tenant, number: session };
        let resume = Resume { declined: before, ready };
        match self.window(client, session, Reader::new(Verb::Window.name(), body), resume) {
            Ok(Answer::Now(reply)) => self.reply(client, Verb::Window, sequence, reply),
            Ok(Answer::Making { declined }) => {
                self.waiting.insert(client, Waiting::Window { message, declined });
            }
            Ok(Answer::Later) => unreachable!("a window never waits for extents"),
            Err(why) => self.refuse(client, Verb::Window as u16, sequence, &why),
        }
    }

    /// References that windows have, by place; what is wrong with them otherwise.
    pub(super) fn window_refs(&self) -> Result<BTreeMap<Place, u32>, String> {
        let mut refs: BTreeMap<Place, u32> = BTreeMap::new();
        for (id, h) in &self.state.windows {
            self.check_window(*id, h)?;
            for block in &h.blocks {
                self.check_under(*id, *block)?;
                *refs.entry(block.place).or_default() += 1;
            }
        }
        if refs != self.windows.cover {
            return Err("the count of windows over each place differs from the windows".into());
        }
        Ok(refs)
    }

    /// What is true of a window whatever is under it.
    pub(super) fn check_window(&self, id: u64, h: &Hold) -> Result<(), String> {
        match h.closing || self.state.sessions.contains_key(&h.session) {
            true => Ok(()),
            false => Err(format!("window {id} is open without its {}", h.session)),
        }
    }

    /// What is true of one block under it.
    pub(super) fn check_under(&self, id: u64, block: BlockId) -> Result<(), String> {
        match self.state.pool.check_claim(block) {
            Ok(Block::Held { .. }) => Ok(()),
            _ => Err(format!("{block} under window {id} is not held")),
        }
    }

    /// Blocks that the tenant's windows list, those included that are closed and still held.
    pub(super) fn blocks_under_windows(&self, tenant: Tenant) -> u64 {
        let mine = self.state.windows.values().filter(|h| h.tenant == tenant);
        mine.map(|h| h.blocks.len() as u64).sum()
    }

    /// Bytes of staging buffers, of which the pool knows nothing.
    pub(super) fn staging_bytes(&self) -> u64 {
        self.windows.staging.values().chain(&self.windows.leaving).map(|b| b.bytes()).sum()
    }

    /// Windows that are open, and closed ones whose blocks somebody may still reach.
    pub fn window_counts(&self) -> (usize, usize) {
        let closing = self.state.windows.values().filter(|h| h.closing).count();
        (self.state.windows.len() - closing, closing)
    }
}
