//! What a driver carries: messages to clients, jobs to the worker, and what became of those.
//!
//! Owns nothing. Invariant: [`Job::run`] is all that a worker does, and it touches only what the job brings along, so that
//! it runs beside the broker without a lock.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use super::lent;
use super::window::{Declined, Made, Making};
use crate::heap::{Buffer, Heap, HeapError, ReadOnlyCopy, Renewal, Sealed};
use crate::id::{BlockId, ClientId, ExtentId, Tenant};
use crate::store::{Finished, Order};
use crate::wire::Writer;

/// A message for a client, with the extents whose descriptors go with it.
#[derive(Debug)]
pub struct Output {
    /// For whom.
    pub to: ClientId,
    /// The message.
    pub message: Vec<u8>,
    /// Buffers whose descriptors go along, in this order.
    pub buffers: Vec<Arc<Buffer>>,
    /// Other descriptors, after those.
    pub descriptors: Vec<Descriptor>,
    /// After this message the connection ends.
    pub last: bool,
}

impl Output {
    /// A message that brings no descriptor, and after which the connection goes on.
    pub(super) fn plain(to: ClientId, message: Writer) -> Self {
        let (buffers, descriptors) = (Vec::new(), Vec::new());
        Output { to, message: message.finish(), buffers, descriptors, last: false }
    }
}

/// A descriptor that goes with a message and is no buffer's.
#[derive(Debug, Clone)]
pub enum Descriptor {
    /// This one, whoever gets it.
    Shared(Arc<OwnedFd>),
    /// Of a read-only copy. Each reader gets an open file of its own, which is opened when the message leaves: what waits
    /// to be sent costs no descriptor.
    Copy(Arc<Sealed>),
}

/// See [`Descriptor::open`].
#[derive(Debug)]
pub enum Opened<'a> {
    /// Of the broker.
    Shared(BorrowedFd<'a>),
    /// To be closed when it has been sent.
    Own(OwnedFd),
}

impl Descriptor {
    /// What is to be sent.
    pub fn open(&self) -> std::io::Result<Opened<'_>> {
        match self {
            Descriptor::Shared(fd) => Ok(Opened::Shared(fd.as_fd())),
            Descriptor::Copy(file) => file.reader().map(Opened::Own),
        }
    }
}

impl AsFd for Opened<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Opened::Shared(fd) => *fd,
            Opened::Own(fd) => fd.as_fd(),
        }
    }
}

/// Work that takes long, for the worker.
#[derive(Debug)]
pub enum Job {
    /// Write zeros over pieces of buffers.
    Scrub {
        /// What [`Done::Scrubbed`] repeats.
        ticket: u64,
        /// Whose they are: of several tenants' zeros, everybody's have their turn.
        tenant: Tenant,
        /// The pieces.
        pieces: Vec<(Arc<Buffer>, Range<u64>)>,
        /// Gone when nobody waits for it any more: then what is left of it is not done, so that nobody's zeros wait for those
        /// of connections that have ended. `None` if it is wanted in any case.
        wanted: Option<Weak<()>>,
    },
    /// Make of an extent that was somebody's one that nobody has ever seen.
    Renew {
        /// The extent that the old buffer was.
        extent: ExtentId,
        /// The old buffer; `None` if it is gone already.
        old: Option<Arc<Buffer>>,
        /// Size of the new one.
        bytes: u64,
    },
    /// Something for a device's window.
    Window {
        /// What [`Done::Window`] repeats.
        ticket: u64,
        /// What is to be made.
        making: Making,
    },
    /// Ask the kernel for a buffer that was missing.
    Allocate {
        /// Its size.
        bytes: u64,
    },
    /// Read a piece of a sealed block for its checksum.
    Sum {
        /// The block.
        block: BlockId,
        /// Where it is.
        buffer: Arc<Buffer>,
        /// The piece, from the buffer's start.
        piece: Range<u64>,
        /// The sum of the pieces before it; 0 before the first.
        sum: u32,
    },
    /// Close the buffer of an extent that is lent: its memory is the kernel's.
    GiveBack {
        /// The extent.
        extent: ExtentId,
        /// Its buffer, which nobody else has.
        buffer: Arc<Buffer>,
    },
    /// Copy pieces of sealed blocks into memory that nobody can write.
    Copy {
        /// What [`Done::Copied`] repeats.
        ticket: u64,
        /// The blocks.
        pieces: Vec<(Arc<Buffer>, Range<u64>)>,
    },
    /// Read or write stored prefixes. The blocks that it names are nobody else's meanwhile, so it may be done beside the
    /// others.
    Store(Order),
}

/// What became of a [`Job`].
#[derive(Debug)]
pub enum Done {
    /// Zeros are written, or not.
    Scrubbed {
        /// Of which job.
        ticket: u64,
        /// The error if they are not.
        result: Result<(), String>,
    },
    /// The extent is renewed, or not.
    Renewed {
        /// The extent that it was.
        extent: ExtentId,
        /// What became of it.
        result: Renewal,
    },
    /// It is made, or not.
    Window {
        /// Of which job.
        ticket: u64,
        /// What was made, or the words why not.
        result: Result<Made, Declined>,
    },
    /// The kernel has answered.
    Allocated(Result<Buffer, HeapError>),
    /// A piece of a sealed block is read, or not.
    Summed {
        /// The block.
        block: BlockId,
        /// The sum with this piece.
        result: Result<u32, String>,
    },
    /// The memory of an extent is with the kernel.
    GivenBack(ExtentId),
    /// They are copied, or not.
    Copied {
        /// Of which job.
        ticket: u64,
        /// The copy.
        result: Result<ReadOnlyCopy, String>,
    },
    /// Stored prefixes were read or written, or not.
    Stored(Finished),
}

impl Job {
    /// Does it. This is all that a worker does.
    pub fn run(self, heap: &dyn Heap) -> Done {
        match self {
            Job::Scrub { ticket, pieces, wanted, .. } => {
                let zero = |(buffer, range): (Arc<Buffer>, Range<u64>)| {
                    if wanted.as_ref().is_some_and(|wanted| wanted.strong_count() == 0) {
                        return Err("nobody waits for them any more".to_owned());
                    }
                    buffer.zero(range).map_err(|e| e.to_string())
                };
                Done::Scrubbed { ticket, result: pieces.into_iter().try_for_each(zero) }
            }
            Job::Renew { extent, old: Some(old), .. } => Done::Renewed { extent, result: heap.renew(old) },
            Job::Renew { extent, old: None, bytes } => {
                Done::Renewed { extent, result: Renewal::of(heap.allocate(bytes)) }
            }
            Job::Window { ticket, making } => Done::Window { ticket, result: making.run() },
            Job::Sum { block, buffer, piece, sum } => {
                Done::Summed { block, result: buffer.checksum(piece, sum).map_err(|e| e.to_string()) }
            }
            // What was lent is not taken from whoever needs it more: a pool that is too small works, a machine that is
            // out of memory kills somebody.
            Job::Allocate { bytes } => {
                Done::Allocated(heap.has_room(bytes).and_then(|()| heap.allocate(bytes)))
            }
            Job::GiveBack { extent, buffer } => {
                lent::give_back(buffer);
                Done::GivenBack(extent)
            }
            Job::Copy { ticket, pieces } => {
                Done::Copied { ticket, result: ReadOnlyCopy::of(&pieces).map_err(|e| e.to_string()) }
            }
            Job::Store(order) => Done::Stored(order.run()),
        }
    }
}
