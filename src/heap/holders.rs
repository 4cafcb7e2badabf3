//! Who else holds a dma-buf: the count that the kernel keeps.
//!
//! Owns nothing. Invariant: [`alone`] hands a buffer out for reuse only when this process has one reference to it and no
//! mapping of its own, and the kernel counts one reference in all. The count (`file_count` of the dma-buf's file, in
//! `/proc/self/fdinfo`) covers descriptors, mappings, mappings that a fork has copied, descriptors in flight in a socket,
//! and devices that import the buffer. It can only fall once nobody is left who could pass the buffer on, so a count of 1
//! stays 1. Whether it covers every way to the *pages* is another question: see [`super::probe`].

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use super::Buffer;

/// A buffer that somebody else still reaches.
#[derive(Debug)]
pub struct Held {
    /// The buffer, as it was.
    pub buffer: Arc<Buffer>,
    /// References in all, the broker's own one included; 0 when the broker itself has not let go yet.
    pub count: u64,
}

/// References to the dma-buf behind `fd`, this one included.
pub(super) fn count(fd: BorrowedFd<'_>) -> io::Result<u64> {
    parse(&std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?)
}

fn parse(text: &str) -> io::Result<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("count:"));
    let count = line.and_then(|l| l.trim().parse().ok());
    count.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "its fdinfo names no count: it is no dma-buf")
    })
}

/// The buffer, if nobody but the caller reaches it. Where the count cannot be read, it is handed out too, for what is safe
/// without it: it must be destroyed then, not reused.
pub(super) fn alone(old: Arc<Buffer>) -> Result<(Buffer, io::Result<()>), Held> {
    // A message that is not sent yet, or a job that is not done, may name it too.
    let mut buffer = Arc::try_unwrap(old).map_err(|buffer| Held { buffer, count: 0 })?;
    // The mapping is a reference like any other.
    buffer.unmap();
    match buffer.fd().map_or(Ok(1), count) {
        Ok(1) => Ok((buffer, Ok(()))),
        Ok(count) => Err(Held { buffer: Arc::new(buffer), count }),
        Err(e) => Ok((buffer, Err(e))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Heap, Memfd};

    #[test]
    fn the_count_is_read_from_the_kernels_text_and_nothing_else_passes_for_it() {
        let text =
            "pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t71\nsize:\t3145728\ncount:\t3\nexp_name:\treserved\n";
        assert_eq!(parse(text).unwrap(), 3);
        for other in ["", "pos:\t0\n", "count:\tmany\n", "xcount:\t1\n"] {
            assert!(parse(other).is_err(), "{other}");
        }
        let memfd = Memfd::new(false).allocate(1 << 16).unwrap();
        assert!(count(memfd.fd().unwrap()).is_err());
    }

    #[test]
    fn a_buffer_that_the_broker_itself_still_names_is_not_handed_out() {
        let old = Arc::new(crate::heap::Imaginary.allocate(4096).unwrap());
        let queued = old.clone();
        let held = alone(old).unwrap_err();
        assert_eq!(held.count, 0);
        drop(queued);
        assert!(alone(held.buffer).is_ok());
    }
}
