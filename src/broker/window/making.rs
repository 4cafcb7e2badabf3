//! What the worker does for windows, and why a way is not taken.
//!
//! Owns nothing. Invariant: what was begun is there as a whole or not at all: a mapping of which a later part fails is
//! taken back, and where even that fails the process ends, since pages would stay within a device's reach.

use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::heap::{Buffer, Heap, HeapError};
use crate::window::iommu::{Device, Handle, IommuError, Mapping, Space};
use crate::window::udmabuf::{Range, Udmabuf, UdmabufError};
use crate::wire::Fault;

/// A piece of the pool, for the worker.
#[derive(Debug)]
pub struct Piece {
    pub(super) buffer: Arc<Buffer>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// What the worker does for windows.
#[derive(Debug)]
pub enum Making {
    /// A udmabuf over pieces.
    Join(Arc<Udmabuf>, Vec<Piece>),
    /// The device, bound to a new address space, or to the tenant's own again. The broker's descriptors of earlier bindings
    /// are closed before, so that the kernel's refusal says that somebody else has one.
    Bind(Arc<Device>, Option<Arc<Space>>, Vec<Handle>),
    /// Pieces at consecutive device addresses; `true` for those that the device may write.
    Map(Arc<Space>, u64, Vec<(Vec<Piece>, bool)>),
    /// The opposite.
    Unmap(Arc<Space>, Vec<Mapping>),
    /// A staging buffer.
    Stage(Arc<dyn Heap>, u64),
}

/// What came of it.
#[derive(Debug)]
pub enum Made {
    /// The dma-buf.
    Joined(OwnedFd),
    /// The address space, the device in it, and the addresses that can be used.
    Bound(Arc<Space>, Handle, Vec<RangeInclusive<u64>>),
    /// In the order of the pieces.
    Mapped(Vec<Mapping>),
    /// Nothing reaches them any more.
    Unmapped,
    /// The buffer.
    Staged(Buffer),
}

impl Piece {
    fn range(&self) -> Option<Range<'_>> {
        Some(Range { memfd: self.buffer.memfd()?, offset: self.offset, bytes: self.bytes })
    }
}

fn ranges(pieces: &[Piece]) -> Result<Vec<Range<'_>>, Declined> {
    let ranges = pieces.iter().map(Piece::range).collect::<Option<_>>();
    ranges.ok_or_else(|| Declined::new(Fault::BrokerFault, "an extent is no memfd"))
}

impl Making {
    /// Does it.
    pub(in super::super) fn run(self) -> Result<Made, Declined> {
        match self {
            Making::Join(udmabuf, pieces) => Ok(Made::Joined(udmabuf.create(&ranges(&pieces)?)?)),
            Making::Bind(device, space, earlier) => {
                drop(earlier);
                let space = space.map_or_else(|| Space::new(&device).map(Arc::new), Ok)?;
                let handle = device.bind(&space)?;
                let allowed = space.ranges()?;
                Ok(Made::Bound(space, handle, allowed))
            }
            Making::Map(space, iova, segments) => {
                let mut mapped: Vec<Mapping> = Vec::new();
                let mut at = iova;
                for (pieces, writable) in &segments {
                    let one = ranges(pieces).and_then(|r| Ok(space.map(&r, at, *writable)?));
                    match one {
                        Ok(mapping) => {
                            at += mapping.bytes;
                            mapped.push(mapping);
                        }
                        Err(e) => {
                            for mapping in &mapped {
                                if let Err(e) = space.unmap(mapping) {
                                    // The pages stay pinned and reachable: the process ends rather than re-use them.
                                    panic!(
                                        "taking back a range of device addresses that was just mapped: {e}"
                                    );
                                }
                            }
                            return Err(e);
                        }
                    }
                }
                Ok(Made::Mapped(mapped))
            }
            Making::Unmap(space, mappings) => {
                mappings.iter().try_for_each(|m| space.unmap(m))?;
                Ok(Made::Unmapped)
            }
            Making::Stage(heap, bytes) => Ok(Made::Staged(heap.allocate(bytes)?)),
        }
    }
}

/// Why a way is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declined {
    pub(super) fault: Fault,
    pub(super) text: String,
}

impl Declined {
    pub(super) fn new(fault: Fault, text: impl Into<String>) -> Self {
        Declined { fault, text: text.into() }
    }
}

impl From<HeapError> for Declined {
    fn from(e: HeapError) -> Self {
        Declined::new(Fault::Busy, e.to_string())
    }
}

impl From<UdmabufError> for Declined {
    fn from(e: UdmabufError) -> Self {
        let fault = match e {
            UdmabufError::TooManyRanges { .. } | UdmabufError::TooLarge { .. } => Fault::OverLimit,
            UdmabufError::Missing { .. } | UdmabufError::Open { .. } | UdmabufError::Create { .. } => {
                Fault::BrokerFault
            }
        };
        Declined::new(fault, e.to_string())
    }
}

impl From<IommuError> for Declined {
    fn from(e: IommuError) -> Self {
        let fault = match e {
            IommuError::InUse { .. } => Fault::Busy,
            IommuError::Open { .. } | IommuError::Call { .. } | IommuError::Map { .. } => Fault::BrokerFault,
        };
        Declined::new(fault, e.to_string())
    }
}
