//! What clients ask about windows: `window` and `close window`, from the claim to the answer.
//!
//! Owns nothing. Invariant: what is asked for has been checked, against the session's table and the operator's limits, before a
//! way is tried; a request that goes on when the worker is done is checked again, since its session may have changed.

use std::sync::Arc;

use super::ways::Next;
use super::{Declined, Object, key, number};
use crate::broker::{Answer, Broker, Job, Refused, Reply, Waiting};
use crate::id::{BlockId, ClientId, SessionId, Tenant};
use crate::map::page_bytes;
use crate::pool::Block;
use crate::profile::Kv;
use crate::window::{How, Part, Span, What, join};
use crate::wire::{self, Fault, MAX_BLOCKS, Reader, Verb};

/// What is known of a request that comes back from the worker.
#[derive(Debug, Default)]
pub(in crate::broker) struct Resume {
    pub declined: Vec<(How, Declined)>,
    pub ready: Option<u64>,
}

/// A request, checked.
pub(super) struct Wish {
    pub(super) client: ClientId,
    pub(super) tenant: Tenant,
    pub(super) session: SessionId,
    pub(super) what: What,
    pub(super) first: u32,
    pub(super) blocks: Vec<BlockId>,
    pub(super) part: Part,
    pub(super) slot_bytes: u64,
    /// Whether the device may write the block.
    pub(super) writable: Vec<bool>,
    /// The window that this one is to replace.
    pub(super) old: Option<u64>,
    /// Blocks that there should be address space for.
    pub(super) capacity: u64,
    pub(super) auto: bool,
}

impl Wish {
    pub(super) fn spans(&self, range: std::ops::Range<usize>) -> Vec<Span> {
        join(self.blocks[range].iter().map(|b| b.place), self.slot_bytes, self.part)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.part.bytes * self.blocks.len() as u64
    }

    /// Refuses blocks that the device may not write, for a way which cannot keep it from that.
    pub(super) fn all_writable(&self, what: &str) -> Result<(), Declined> {
        let Some(first) = self.writable.iter().position(|w| !w) else { return Ok(()) };
        let block = self.first as usize + first;
        let text = format!(
            "{what} is always writable, and block {block} may not be written by the device: make it the session's own first (writable), or use a read-only iommu window"
        );
        Err(Declined::new(Fault::BadRequest, text))
    }
}

impl Broker {
    pub(in crate::broker) fn window(
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
    pub(in crate::broker) fn end_window(
        &mut self,
        client: ClientId,
        mut r: Reader<'_>,
    ) -> Result<Answer, Refused> {
        let number = r.one::<wire::CloseWindow>()?.window.get();
        r.end()?;
        let window = key(self.client(client).tenant, number);
        if !self.state.windows.get(&window).is_some_and(|h| h.client == client && !h.closing) {
            return Err(Refused::new(Fault::Stale, format!("window {number} is not on this connection")));
        }
        self.close_window(window, false);
        Ok(Answer::Now(Reply::default()))
    }

    /// The request of a client that waited for the worker goes on.
    pub(super) fn window_again(
        &mut self,
        client: ClientId,
        declined: Option<(How, Declined)>,
        ready: Option<u64>,
    ) {
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
}
