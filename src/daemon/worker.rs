//! The worker thread: what takes long.
//!
//! Owns nothing but the jobs in flight. Invariant: jobs are done one after the other, in the order in which they came, but
//! for the zeros that a grant waits for, which come first: they are short, and an extent that is renewed beside them takes
//! up to ten milliseconds and is in nobody's way. Files are another thread's, which is there while there is work on them: no
//! grant waits for a disk.

use std::collections::VecDeque;
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
            let mut queue = Queue::default();
            while let Some(job) = queue.next(&work) {
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

/// What has come and is not done yet.
#[derive(Debug, Default)]
struct Queue {
    awaited: VecDeque<Job>,
    others: VecDeque<Job>,
}

impl Queue {
    /// The next job; waits for one if there is none. `None` when there will be no more.
    fn next(&mut self, work: &Receiver<Job>) -> Option<Job> {
        if self.awaited.is_empty() && self.others.is_empty() {
            self.put(work.recv().ok()?);
        }
        while let Ok(job) = work.try_recv() {
            self.put(job);
        }
        self.awaited.pop_front().or_else(|| self.others.pop_front())
    }

    fn put(&mut self, job: Job) {
        let queue = if matches!(job, Job::Scrub { .. }) { &mut self.awaited } else { &mut self.others };
        queue.push_back(job);
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ExtentId;

    #[test]
    fn zeros_that_a_grant_waits_for_come_before_extents_that_nobody_waits_for() {
        let (send, work) = channel();
        let renew = |n| Job::Renew { extent: ExtentId(n), old: None, bytes: 0 };
        let scrub = |ticket| Job::Scrub { ticket, pieces: Vec::new() };
        for job in [renew(1), renew(2), scrub(3), renew(4), scrub(5)] {
            send.send(job).unwrap();
        }
        drop(send);
        let mut queue = Queue::default();
        let order = std::iter::from_fn(|| queue.next(&work)).map(|job| match job {
            Job::Renew { extent, .. } => u64::from(extent.0),
            Job::Scrub { ticket, .. } => ticket,
            other => panic!("{other:?}"),
        });
        assert_eq!(order.collect::<Vec<_>>(), [3, 5, 1, 2, 4]);
    }
}
