//! The ways to make a window: which of them can serve a request, and what each of them begins.
//!
//! Owns nothing. Invariant: a way that is declined has changed nothing; one that is taken has written the window down, with a
//! reference to each block, before the worker makes the kernel's object.

use std::sync::Arc;

use super::request::Wish;
use super::{Declined, Hold, Making, Object, Pending, Piece};
use crate::broker::Broker;
use crate::id::Tenant;
use crate::map::page_bytes;
use crate::window::iommu::Device;
use crate::window::{Access, How, Span, What};
use crate::wire::Fault;

/// Address space that a window reserves if nothing is said: so many times what it shows, so that it grows in place.
const GROWTH: u64 = 4;

/// How it goes on.
pub(super) enum Next {
    /// It is there.
    Ready(u64),
    /// The worker makes it.
    Work(Making, Pending),
}

impl Broker {
    pub(super) fn make(&mut self, how: How, wish: &Wish) -> Result<Next, Declined> {
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
}
