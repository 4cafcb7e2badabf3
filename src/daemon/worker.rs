//! The worker thread: what takes long.
//!
//! Owns nothing but the jobs in flight. Invariant: jobs are done one after the other in the order in which they came,
//! so zeros that were ordered before a grant are written before it, whatever was ordered between.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::broker::{Done, Job};
use crate::heap::Heap;

/// The loop's end of the worker.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    event: Arc<EventFd>,
}

impl Worker {
    /// Starts the thread.
    pub fn start(heap: Arc<dyn Heap>) -> io::Result<Self> {
        let (jobs, work) = channel::<Job>();
        let (report, done) = channel();
        let event = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let ring = event.clone();
        std::thread::Builder::new().name("worker".into()).spawn(move || {
            for job in work {
                if report.send(job.run(&*heap)).is_err() || ring.write(1).is_err() {
                    return;
                }
            }
        })?;
        Ok(Worker { jobs, done, event })
    }

    /// Orders a job.
    pub fn order(&self, job: Job) {
        if self.jobs.send(job).is_err() {
            log::error!("the worker thread has ended; what it was to do is lost");
        }
    }

    /// What is finished, without waiting.
    pub fn finished(&self) -> Vec<Done> {
        // An error only means that there was nothing to read.
        let _ = self.event.read();
        std::iter::from_fn(|| self.done.try_recv().ok()).collect()
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
