//! Windows: one contiguous range for a device over blocks that are not.
//!
//! Owns the arithmetic of windows ([`Part`], [`Span`], [`join`]) and the kernel objects behind them: udmabufs
//! ([`udmabuf`]), device address spaces ([`iommu`], [`iova`]) and cache hand-over ([`sync`]). Who may have which window, and
//! how long its blocks stay where they are, is the broker's business. Invariants: a span lies inside one slot's part or is
//! a chain of such that touch; the spans of a window, one after the other, are its bytes in order; every span begins and
//! ends on a page.

pub mod iommu;
pub mod iova;
pub mod sync;
pub mod udmabuf;

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::heap::Heap;
use crate::id::{ExtentId, Place};
use crate::profile::{Kv, Layout, Profile};

/// A way to make a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum How {
    /// The blocks lie side by side in one dma-buf already: nothing is made.
    Run = 1,
    /// A dma-buf over the pages of scattered memfd blocks.
    Udmabuf = 2,
    /// Consecutive addresses in the device's own address space (iommufd).
    Iommu = 3,
    /// A contiguous staging buffer, filled and drained by the CPU.
    Bounce = 4,
}

impl How {
    /// All of them, in the order in which `auto` tries.
    pub const ALL: [How; 4] = [How::Run, How::Udmabuf, How::Iommu, How::Bounce];

    /// The number that the protocol and the C ABI use; 0 stands for auto.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The way that a number means.
    pub fn from_code(code: u32) -> Option<How> {
        How::ALL.into_iter().find(|h| h.code() == code)
    }

    /// The name that documents use.
    pub fn name(self) -> &'static str {
        match self {
            How::Run => "run",
            How::Udmabuf => "udmabuf",
            How::Iommu => "iommu",
            How::Bounce => "bounce",
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a window shows of each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum What {
    /// All of it, blocks in table order. The padding at a slot's end is part of it.
    Blocks,
    /// The K or the V of one layer, in token order. `layer` is the index in the profile.
    Plane {
        /// Which layer.
        layer: u32,
        /// K or V.
        kv: Kv,
    },
}

/// The part of a slot that a window shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// Bytes from the slot's start.
    pub offset: u64,
    /// Bytes: whole pages.
    pub bytes: u64,
}

/// Why a profile has no such part. The caller's mistake, or the profile's.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum PartError {
    #[error("there is no layer {layer}: the profile has {layers}, counted from 0")]
    NoLayer { layer: u32, layers: usize },
    #[error("layer {layer} has no V: it keeps everything in K")]
    NoPlane { layer: u32 },
    #[error(
        "a plane of the token-major layout is scattered row by row: no device range is made of it; use the plane-major layout{}",
        tokens.map_or(String::new(), |t| format!(" with {t} tokens per block"))
    )]
    TokenMajor { tokens: Option<u32> },
    #[error(
        "the plane takes {bytes} bytes per block from byte {offset}, which are not whole pages of {page}: {}",
        tokens.map_or("no number of tokens per block would do".into(), |t| format!("{t} tokens per block would do"))
    )]
    NotWholePages { bytes: u64, offset: u64, page: u64, tokens: Option<u32> },
}

impl Part {
    /// The part of a block of the profile's first group that `what` names, on a machine with pages of `page` bytes.
    pub fn of(profile: &Profile, what: What, page: u64) -> Result<Part, PartError> {
        let (layer, kv) = match what {
            What::Blocks => return Ok(Part { offset: 0, bytes: profile.slot_bytes(0, page) }),
            What::Plane { layer, kv } => (layer, kv),
        };
        let planes = profile.planes(0);
        let layers = planes.len();
        let plane = planes.get(layer as usize).ok_or(PartError::NoLayer { layer, layers })?[kv as usize];
        if plane.row == 0 {
            return Err(PartError::NoPlane { layer });
        }
        let tokens = profile.plane_view_tokens(page);
        if profile.layout() != Layout::PlaneMajor {
            return Err(PartError::TokenMajor { tokens });
        }
        let bytes = plane.row as u64 * u64::from(profile.tokens_per_block());
        let offset = plane.offset as u64;
        if bytes % page != 0 || offset % page != 0 {
            return Err(PartError::NotWholePages { bytes, offset, page, tokens });
        }
        Ok(Part { offset, bytes })
    }
}

/// Bytes that lie side by side in one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The extent.
    pub extent: ExtentId,
    /// From this byte of it.
    pub offset: u64,
    /// So many.
    pub bytes: u64,
}

impl Span {
    /// The part of the slot at a place.
    pub fn at(place: Place, slot_bytes: u64, part: Part) -> Span {
        let offset = u64::from(place.slot) * slot_bytes + part.offset;
        Span { extent: place.extent, offset, bytes: part.bytes }
    }
}

/// The parts of slots in the order given, as few spans: what touches becomes one.
pub fn join(places: impl IntoIterator<Item = Place>, slot_bytes: u64, part: Part) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for place in places {
        let next = Span::at(place, slot_bytes, part);
        match spans.last_mut() {
            Some(last) if last.extent == next.extent && last.offset + last.bytes == next.offset => {
                last.bytes += next.bytes;
            }
            _ => spans.push(next),
        }
    }
    spans
}

/// What the device that reads windows can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// Nobody has said: no way is chosen whose result such a device could misread.
    #[default]
    Unknown,
    /// It must have physically contiguous memory.
    Contiguous,
    /// It imports dma-bufs and scatters, behind an IOMMU of the kernel's.
    Scatter,
    /// It is driven from user space, behind an IOMMU that iommufd serves.
    Iommu,
}

/// A staging buffer, if there is to be one.
#[derive(Debug, Clone)]
pub struct StagingMeans {
    /// Where buffers come from: contiguous memory.
    pub heap: Arc<dyn Heap>,
    /// Bytes of one process's buffer.
    pub bytes: u64,
    /// Bytes of all of them together.
    pub total: u64,
}

/// What this machine has for windows. Each thing is there, or there are words why not.
#[derive(Debug, Clone)]
pub struct Means {
    /// The device.
    pub access: Access,
    /// Whether the device sees what CPUs have in their caches, so that nothing is lost by an import.
    pub coherent: bool,
    /// `/dev/udmabuf`.
    pub udmabuf: Result<Arc<udmabuf::Udmabuf>, String>,
    /// The device's own address spaces.
    pub iommu: Result<Arc<iommu::Device>, String>,
    /// Staging buffers.
    pub staging: Result<StagingMeans, String>,
}

impl Default for Means {
    fn default() -> Self {
        Means {
            access: Access::Unknown,
            coherent: true,
            udmabuf: Err("udmabuf is not opened here".into()),
            iommu: Err("no device is configured (device.node)".into()),
            staging: Err("no staging buffer is configured (device.staging)".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(extent: u32, slot: u32) -> Place {
        Place { extent: ExtentId(extent), slot }
    }

    #[test]
    fn a_plane_of_the_reference_model_is_two_pages_of_each_block() {
        let p = Profile::reference();
        let plane = |layer, kv| Part::of(&p, What::Plane { layer, kv }, 4096);
        assert_eq!(plane(0, Kv::K), Ok(Part { offset: 0, bytes: 8192 }));
        assert_eq!(plane(3, Kv::V), Ok(Part { offset: 7 * 8192, bytes: 8192 }));
        assert_eq!(plane(24, Kv::K), Err(PartError::NoLayer { layer: 24, layers: 24 }));
        assert_eq!(Part::of(&p, What::Blocks, 4096), Ok(Part { offset: 0, bytes: 384 << 10 }));
    }

    #[test]
    fn a_plane_that_is_no_whole_pages_is_refused_with_the_tokens_per_block_that_would_do() {
        let small = Profile::uniform("qwen2.5-0.5b", "f16", 24, 256, 256, 8).unwrap();
        let e = Part::of(&small, What::Plane { layer: 1, kv: Kv::V }, 4096).unwrap_err();
        assert_eq!(e, PartError::NotWholePages { bytes: 2048, offset: 6144, page: 4096, tokens: Some(16) });
        assert!(e.to_string().ends_with("16 tokens per block would do"), "{e}");
        // On a board with pages of 16 KiB the reference needs 32.
        let e = Part::of(&Profile::reference(), What::Plane { layer: 0, kv: Kv::K }, 16384).unwrap_err();
        assert!(e.to_string().ends_with("32 tokens per block would do"), "{e}");
        let rows = Profile::reference().with_layout(Layout::TokenMajor);
        let e = Part::of(&rows, What::Plane { layer: 0, kv: Kv::K }, 4096).unwrap_err();
        assert!(e.to_string().contains("plane-major layout with 8 tokens per block"), "{e}");
        assert!(Part::of(&rows, What::Blocks, 4096).is_ok(), "whole blocks need no planes");
        let latent = Profile::uniform("latent", "f16", 2, 4096, 0, 16).unwrap();
        let none = Part::of(&latent, What::Plane { layer: 1, kv: Kv::V }, 4096);
        assert_eq!(none, Err(PartError::NoPlane { layer: 1 }));
    }

    #[test]
    fn whole_blocks_that_touch_become_one_span_and_their_planes_do_not() {
        let whole = Part { offset: 0, bytes: 384 << 10 };
        let places = [place(1, 5), place(1, 6), place(1, 7), place(2, 0), place(1, 4), place(1, 4)];
        let spans = join(places, 384 << 10, whole);
        let shape: Vec<_> = spans.iter().map(|s| (s.extent.0, s.offset >> 10, s.bytes >> 10)).collect();
        assert_eq!(shape, [(1, 1920, 1152), (2, 0, 384), (1, 1536, 384), (1, 1536, 384)]);
        let plane = Part { offset: 8192, bytes: 8192 };
        assert_eq!(join(places, 384 << 10, plane).len(), 6);
        assert_eq!(join(places, 384 << 10, plane)[1].offset, 6 * (384 << 10) + 8192);
    }

    #[test]
    fn a_span_never_crosses_from_one_extent_into_the_next_of_the_same_number() {
        let whole = Part { offset: 0, bytes: 4096 };
        assert_eq!(join([place(1, 0), place(2, 1)], 4096, whole).len(), 2);
        assert!(join([], 4096, whole).is_empty());
    }
}
