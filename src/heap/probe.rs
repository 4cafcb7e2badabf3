//! Whether the count of a dma-buf's holders proves that nobody reaches its pages.
//!
//! Owns nothing beyond the call. Invariant: only an attempt that was made on a buffer of the very heap, and that the kernel
//! refused with EFAULT, is a proof. Up to kernel 6.8 the pages of a CMA heap's mapping are ordinary pages: `vmsplice` puts
//! them into a pipe, where they outlive mapping and descriptor without being counted, and can be read when they are the
//! next tenant's. Later kernels map without page structures (VM_PFNMAP), and the same call fails with EFAULT. A filter of
//! system calls (EPERM, ENOSYS) says nothing about the kernel.

use std::fmt;
use std::io;

use nix::errno::Errno;

use super::{Buffer, holders};

/// What is known about the count of a heap's buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// A count of 1 means that nobody else reaches the buffer.
    Proven,
    /// `vmsplice` took a page of a mapping: pages can be kept past the count.
    PagesCanBeKept,
    /// The attempt could not be made: with this errno's name.
    NotTried(String),
    /// The count itself cannot be read, or does not count.
    NoCount(String),
    /// This heap needs no count: what it hands out is always new memory.
    NotNeeded,
}

impl Proof {
    /// Whether a buffer that nobody else holds may be scrubbed and used again.
    pub fn is_proven(&self) -> bool {
        *self == Proof::Proven
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ANEW: &str = "extents are destroyed and allocated anew";
        match self {
            Proof::Proven => f.write_str(
                "proven: pages cannot be kept past the count of holders (vmsplice: EFAULT); extents are scrubbed and reused",
            ),
            Proof::PagesCanBeKept => write!(
                f,
                "not proven: on this kernel vmsplice keeps pages past the count of holders; {ANEW}"
            ),
            Proof::NotTried(why) => {
                write!(f, "not proven: vmsplice could not be tried ({why}); {ANEW}")
            }
            Proof::NoCount(why) => write!(f, "not proven: holders cannot be counted ({why}); {ANEW}"),
            Proof::NotNeeded => f.write_str("not needed: every extent is new memory"),
        }
    }
}

/// Judges the errno of the attempt; `None` when it succeeded.
fn judge(error: Option<Errno>) -> Proof {
    match error {
        Some(Errno::EFAULT) => Proof::Proven,
        None => Proof::PagesCanBeKept,
        Some(other) => Proof::NotTried(format!("{other:?}")),
    }
}

/// Tries it on `buffer`, a dma-buf that nobody else has.
pub(super) fn probe(mut buffer: Buffer) -> Proof {
    match attempt(&mut buffer) {
        Ok(proof) => proof,
        Err(e) => Proof::NoCount(e.to_string()),
    }
}

fn attempt(buffer: &mut Buffer) -> io::Result<Proof> {
    let count = |b: &Buffer| b.fd().map_or(Ok(1), holders::count);
    let before = count(buffer)?;
    let error = {
        let Some(map) = buffer.map()? else { return Ok(Proof::NotNeeded) };
        // Written first, so that the page is there.
        map.write(0, &[1]);
        // The pipe ends here, and with it its hold on the page, before the buffer can be freed.
        let (_read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        map.first_page_into(&write).err()
    };
    let (mapped, error) = (count(buffer)?, error.map(|e| Errno::from_raw(e.raw_os_error().unwrap_or(0))));
    buffer.unmap();
    let after = count(buffer)?;
    if (before, mapped, after) != (1, 2, 1) {
        return Ok(Proof::NoCount(format!("{before} before a mapping, {mapped} with it, {after} after it")));
    }
    Ok(judge(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Heap, Memfd};

    #[test]
    fn only_efault_is_a_proof() {
        assert!(judge(Some(Errno::EFAULT)).is_proven());
        for other in [None, Some(Errno::EPERM), Some(Errno::ENOSYS), Some(Errno::EINVAL), Some(Errno::EAGAIN)]
        {
            assert!(!judge(other).is_proven(), "{other:?}");
        }
        assert!(judge(Some(Errno::EPERM)).to_string().contains("EPERM"));
    }

    #[test]
    fn memory_whose_holders_nobody_counts_is_never_proven() {
        let proof = probe(Memfd::new(false).allocate(1 << 16).unwrap());
        assert!(matches!(proof, Proof::NoCount(_)), "{proof:?}");
    }

    #[test]
    fn a_page_of_an_ordinary_mapping_goes_into_a_pipe() {
        // What the attempt is about: here it succeeds, so the call is made and made right.
        let buffer = Memfd::new(false).allocate(1 << 16).unwrap();
        let (_read, write) = nix::unistd::pipe().unwrap();
        let map = buffer.map().unwrap().unwrap();
        assert_eq!(map.first_page_into(&write).unwrap(), crate::map::page_bytes());
    }
}
