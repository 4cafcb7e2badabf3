//! From a message to what comes of it: an answer, a refusal, or a request that waits.
//!
//! Owns the shape of an answer. Invariants: every request gets one reply, with its number; while one of a connection waits, the
//! driver reads no other of it ([`Broker::is_waiting`]); a reply that hands over blocks leaves after the zeros in them are
//! written, and if they cannot be, nothing of the grant is left.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use zerocopy::{Immutable, IntoBytes};

use super::{Broker, Declined, Descriptor, Job, Output};
use crate::heap::Buffer;
use crate::id::{BlockId, ClientId, ExtentId, SessionId};
use crate::pool::ClaimError;
use crate::seldom::seldom;
use crate::window::How;
use crate::wire::{self, Event, Fault, Verb, WireError, Writer};

/// How many requests the flight recorder remembers.
pub(super) const RECORDER: usize = 64;

/// A refusal: whose fault, numbers, and words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) fault: Fault,
    pub(super) needed: u64,
    pub(super) available: u64,
    pub(super) text: String,
}

impl Refused {
    pub(super) fn new(fault: Fault, text: impl Into<String>) -> Self {
        Refused { fault, needed: 0, available: 0, text: text.into() }
    }

    pub(super) fn bad(text: impl Into<String>) -> Self {
        Refused::new(Fault::BadRequest, text)
    }

    pub(super) fn numbers(self, needed: u64, available: u64) -> Self {
        Refused { needed, available, ..self }
    }
}

impl From<WireError> for Refused {
    fn from(e: WireError) -> Self {
        Refused::bad(e.to_string())
    }
}

impl From<ClaimError> for Refused {
    fn from(e: ClaimError) -> Self {
        let fault = match e {
            ClaimError::NoExtent(_) | ClaimError::Stale { .. } => Fault::Stale,
            ClaimError::NoSlot(_) | ClaimError::NotInUse(_) | ClaimError::NotCredit(_) => Fault::BadRequest,
        };
        Refused::new(fault, e.to_string())
    }
}

/// What a verb answers.
pub(super) enum Answer {
    /// This reply.
    Now(Reply),
    /// Nothing yet: the request is kept and tried again.
    Later,
    /// Nothing yet: the worker makes a window; these ways were not possible.
    Making { declined: Vec<(How, Declined)> },
}

/// The rest of a reply, after its header.
#[derive(Default)]
pub(super) struct Reply {
    pub(super) session: u64,
    pub(super) body: Writer,
    pub(super) extents: Vec<ExtentId>,
    /// Descriptors beside those of extents.
    pub(super) descriptors: Vec<Arc<OwnedFd>>,
    /// Zeros to be written before the reply leaves.
    pub(super) scrub: Vec<BlockId>,
    /// Blocks that become the client's credit with it.
    pub(super) granted: Vec<BlockId>,
}

/// A client whose request waits for the worker.
#[derive(Debug)]
pub(super) enum Waiting {
    /// For extents: the request is tried again when one has been renewed.
    Extents(Vec<u8>),
    /// For a window: the request goes on when the worker is done. With it the ways that were not possible so far.
    Window { message: Vec<u8>, declined: Vec<(How, Declined)> },
    /// For zeros: then this goes out.
    Zeros {
        ticket: u64,
        /// What the job looks at: nobody waits for its zeros once this is gone.
        _wanted: Arc<()>,
        output: Output,
        verb: Verb,
        sequence: u64,
        /// All that the reply hands over, and the extents whose descriptors go with it.
        granted: Vec<BlockId>,
        extents: Vec<ExtentId>,
    },
}

impl Broker {
    /// Handles one message of a client. What comes of it is in the outbox: see [`outputs`](Self::outputs).
    pub fn request(&mut self, client: ClientId, message: &[u8]) {
        self.answer(client, message);
        self.settle();
    }

    /// What [`request`](Self::request) does, without what follows from it.
    fn answer(&mut self, client: ClientId, message: &[u8]) {
        if !self.state.clients.contains_key(&client) {
            return;
        }
        let (header, body) = match wire::split(message) {
            Ok(parts) => parts,
            // Without a header that can be trusted there is no number to reply to.
            Err(e) => return self.hang_up(client, 0, 0, &Refused::from(e)),
        };
        let (opcode, sequence) = (header.opcode.get(), header.sequence.get());
        let Some(verb) = Verb::from_code(opcode) else {
            return self.refuse(client, opcode, sequence, &WireError::UnknownVerb(opcode).into());
        };
        if sequence == 0 {
            let why = Refused::bad("sequence number 0 is for events: number requests from 1");
            return self.hang_up(client, opcode, 0, &why);
        }
        if self.recorder.len() == RECORDER {
            self.recorder.pop_front();
        }
        self.recorder.push_back((client, verb, header.session.get()));
        let session = SessionId { tenant: self.client(client).tenant, number: header.session.get() };
        match self.dispatch(client, verb, session, body) {
            Ok(Answer::Now(reply)) => self.reply(client, verb, sequence, reply),
            Ok(Answer::Later) => {
                self.waiting.insert(client, Waiting::Extents(message.to_vec()));
                let tenant = self.client(client).tenant;
                self.waits.begin(client, tenant);
            }
            Ok(Answer::Making { declined }) => {
                self.waiting.insert(client, Waiting::Window { message: message.to_vec(), declined });
            }
            Err(why) if verb == Verb::Hello => self.hang_up(client, opcode, sequence, &why),
            Err(why) => self.refuse(client, opcode, sequence, &why),
        }
    }

    pub(super) fn reply(&mut self, client: ClientId, verb: Verb, sequence: u64, reply: Reply) {
        self.state.counters.requests += 1;
        let mut message = Writer::start(verb as u16 | wire::REPLY, 0, sequence, reply.session);
        message.put(reply.body.body());
        // Copies have the highest names, so their descriptors come last.
        let (copies, extents): (Vec<_>, Vec<_>) = reply.extents.iter().partition(|e| e.is_copy());
        self.note_granted(client, &extents);
        let buffers = extents.iter().filter_map(|e| self.buffers.get(e).cloned()).collect();
        let mut descriptors: Vec<_> = copies.iter().filter_map(|e| self.common_descriptor(*e)).collect();
        descriptors.extend(reply.descriptors.into_iter().map(Descriptor::Shared));
        let message = message.finish();
        let output = Output { to: client, message, buffers, descriptors, last: false };
        if reply.scrub.is_empty() {
            return self.outbox.push_back(output);
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let pieces = reply.scrub.iter().filter_map(|b| self.piece(*b)).collect();
        self.state.counters.scrubbed += reply.scrub.len() as u64;
        let _wanted = Arc::new(());
        let (tenant, wanted) = (self.client(client).tenant, Some(Arc::downgrade(&_wanted)));
        self.jobs.push_back(Job::Scrub { ticket, tenant, pieces, wanted });
        let Reply { granted, extents, .. } = reply;
        self.waiting
            .insert(client, Waiting::Zeros { ticket, _wanted, output, verb, sequence, granted, extents });
    }

    /// Where a block's bytes are.
    pub(super) fn piece(&self, block: BlockId) -> Option<(Arc<Buffer>, Range<u64>)> {
        let extent = self.state.pool.extents().get(&block.place.extent)?;
        let start = extent.owned()?.slot_bytes * u64::from(block.place.slot);
        let buffer = self.buffers.get(&block.place.extent)?.clone();
        Some((buffer, start..start + extent.owned()?.slot_bytes))
    }

    fn refusal(&mut self, client: ClientId, opcode: u16, sequence: u64, why: &Refused) -> Output {
        let counters = &mut self.state.counters;
        counters.requests += 1;
        counters.refusals += 1;
        counters.stale += u64::from(why.fault == Fault::Stale);
        log::debug!("client {}: {}: {}", client.0, why.fault.name(), why.text);
        let mut message = Writer::start(opcode | wire::REPLY, why.fault as u16, sequence, 0);
        message.put(&wire::Refusal { needed: why.needed.into(), available: why.available.into() });
        message.put(why.text.as_bytes());
        Output::plain(client, message)
    }

    pub(super) fn refuse(&mut self, client: ClientId, opcode: u16, sequence: u64, why: &Refused) {
        let output = self.refusal(client, opcode & !wire::EVENT, sequence, why);
        self.outbox.push_back(output);
    }

    fn hang_up(&mut self, client: ClientId, opcode: u16, sequence: u64, why: &Refused) {
        let output = self.refusal(client, opcode & !wire::EVENT, sequence, why);
        self.outbox.push_back(Output { last: true, ..output });
    }

    /// Sends an event, about one of the client's sessions or (0) about none.
    pub(super) fn tell(
        &mut self,
        to: ClientId,
        event: Event,
        session: u64,
        body: &(impl IntoBytes + Immutable),
    ) {
        let mut message = Writer::start(wire::EVENT | event as u16, 0, 0, session);
        message.put(body);
        self.outbox.push_back(Output::plain(to, message));
    }

    /// Whether the client has a request that is not answered yet: the driver reads no more of it until then.
    pub fn is_waiting(&self, client: ClientId) -> bool {
        self.waiting.contains_key(&client)
    }

    pub(super) fn scrubbed(&mut self, ticket: u64, result: Result<(), String>) {
        if self.store_cleared(ticket, &result) {
            return;
        }
        let is_it =
            |(_, w): &(&ClientId, &Waiting)| matches!(w, Waiting::Zeros { ticket: t, .. } if *t == ticket);
        // The client may have gone meanwhile; then its blocks are free already.
        let Some((&client, _)) = self.waiting.iter().find(is_it) else { return };
        let Some(Waiting::Zeros { output, verb, sequence, granted, extents, .. }) =
            self.waiting.remove(&client)
        else {
            return;
        };
        let Err(error) = result else { return self.outbox.push_back(output) };
        // All of the grant goes back, not only what could not be zeroed: the client gets to know none of it.
        for block in granted {
            let freed = self.state.pool.free_credit(block, client);
            debug_assert_eq!(freed, Ok(()));
        }
        for extent in extents {
            self.state.pool.remove_holder(extent, client);
        }
        seldom!(error, "zeroing blocks for client {} failed: {error}", client.0);
        let why = Refused::new(Fault::BrokerFault, format!("the blocks could not be zeroed: {error}"));
        self.refuse(client, verb as u16, sequence, &why);
    }

    /// Tries requests again that waited for extents.
    pub(super) fn retry(&mut self) {
        let waits = |(client, w): (&ClientId, &Waiting)| match w {
            Waiting::Extents(_) => Some(*client),
            Waiting::Zeros { .. } | Waiting::Window { .. } => None,
        };
        let clients =
            self.waiting.iter().filter_map(waits).map(|client| (self.client(client).tenant, client));
        for client in self.waits.order(clients) {
            let tenant = self.client(client).tenant;
            // Looked at first: an answer of another kind that waits stays where it is.
            let Some(Waiting::Extents(message)) = self.waiting.get(&client) else { continue };
            let message = message.clone();
            self.waiting.remove(&client);
            // What follows from an answer follows once, after all: else the tries would nest.
            self.answer(client, &message);
            if !matches!(self.waiting.get(&client), Some(Waiting::Extents(_))) {
                self.stirred |= self.waits.serve(client, tenant, self.absent.clock);
            }
        }
    }
}
