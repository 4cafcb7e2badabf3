//! The worker thread: what takes long.
//!
//! Owns nothing but the jobs in flight. Invariant: jobs are done one after the other in the order in which they came,
//! so zeros that were ordered before a grant are written before it, whatever was ordered between. Files are another
//! thread's, which is there while there is work on them: no grant waits for a disk.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::broker::{Done, Job};
use crate::heap::Heap;
use crate::store::Order;

/// The loop's end of the worker.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    report: Sender<Done>,
    event: Arc<EventFd>,
}

impl Worker {
    /// Starts the thread.
    pub fn start(heap: Arc<dyn Heap>) -> io::Result<Self> {
        let (jobs, work) = channel::<Job>();
        let (report, done) = channel();
        let event = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let (ring, to_loop) = (event.clone(), report.clone());
        std::thread::Builder::new().name("worker".into()).spawn(move || {
            for job in work {
                if to_loop.send(job.run(&*heap)).is_err() || ring.write(1).is_err() {
                    return;
                }
            }
        })?;
        Ok(Worker { jobs, done, report, event })
    }

    /// Orders a job.
    pub fn order(&self, job: Job) {
        if let Job::Store(order) = job {
            return self.order_files(order);
        }
        if self.jobs.send(job).is_err() {
            log::error!("the worker thread has ended; what it was to do is lost");
        }
    }

    /// The broker orders one at a time.
    fn order_files(&self, order: Order) {
        let (report, ring) = (self.report.clone(), self.event.clone());
        let work = move || {
            if report.send(Done::Stored(order.run())).is_ok() {
                let _ = ring.write(1);
            }
        };
        if let Err(e) = std::thread::Builder::new().name("store".into()).spawn(work) {
            // The task stays unfinished: nothing is saved or loaded any more, and all else goes on.
            log::error!("no thread for the stored prefixes: {e}; restart the broker to have them");
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
