//! Windows for devices: who has one, over which blocks, and when it is gone.
//!
//! Owns the books of windows (part of the state) and the kernel objects behind them (not part of it). A window is asked for
//! in `request`, begun by one of the `ways`, made by the worker (`making`), and ended in `ending`. Invariants (`window_test`
//! plays them against a memory of who can still reach what):
//! - every block under a window counts one reference for it, from before the kernel object is made until after nobody can
//!   reach the block through it any more; so no block under a window is free, evicted or another's;
//! - a window is over what its session's table has: when an entry under it leaves the table, or the session or its client
//!   ends, the window is closed, and its blocks are let go once the kernel object is provably nobody's: a udmabuf when
//!   this process has its only reference, a range of device addresses when it is unmapped, a run on its owner's word (it
//!   closes the window, or the session that was lost) and otherwise when nobody has the extent;
//! - a device belongs to the tenant whose address space it is bound to, until it can be bound anew: no descriptor of it is
//!   open then, whoever had one, and the broker's own it closes for that when another tenant asks.

mod ending;
mod making;
mod request;
mod ways;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use making::{Declined, Made, Making, Piece};
use request::Wish;

use super::Broker;
use crate::heap::Buffer;
use crate::id::{BlockId, ClientId, ExtentId, Place, SessionId, Tenant};
use crate::pool::Block;
use crate::seldom::seldom;
use crate::window::iommu::{Handle, Mapping, Space};
use crate::window::iova::Iovas;
use crate::window::{How, Means, What};

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
                seldom!(
                    error,
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
