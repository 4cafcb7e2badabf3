//! The worker thread: what takes long.
//!
//! Owns nothing but the jobs in flight. Invariants: jobs are done one after the other. Zeros of one tenant are written in the
//! order in which they were ordered, and so is all else; of several tenants' zeros each has its turn, so that nobody waits for
//! more than one order of each other tenant; and zeros and all else take turns while there are both. A
//! request waits for zeros, for most other jobs nobody does: when one tenant gives back all it had, hundreds of extents are
//! renewed, and whoever wants a block zeroed meanwhile waits for one of them. Zeros are always written before the reply that grants them
//! leaves, and no renewal touches what is to be zeroed: its buffer is in the pool no more when it is ordered. Files are
//! another thread's, which is there while there is work on them: no grant waits for a disk.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::broker::{Done, Job};
use crate::heap::Heap;
use crate::id::Tenant;
use crate::store::Order;

/// The loop's end of the worker.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    report: Sender<Done>,
    event: Arc<EventFd>,
}

/// What is to be done, zeros apart from all else.
#[derive(Debug, Default)]
struct Lanes {
    /// By tenants, whose turn it is at the front; none is there without a job.
    zeros: VecDeque<(Tenant, VecDeque<Job>)>,
    others: VecDeque<Job>,
    zeroed_last: bool,
}

impl Lanes {
    /// The next job; waits for one. `None` when there will be none.
    fn next(&mut self, work: &Receiver<Job>) -> Option<Job> {
        if self.zeros.is_empty() && self.others.is_empty() {
            let job = work.recv().ok()?;
            self.sort(job);
        }
        work.try_iter().for_each(|job| self.sort(job));
        let zeros_first = !self.zeroed_last || self.others.is_empty();
        let zeros = if zeros_first { self.next_zeros() } else { None };
        let job = zeros.or_else(|| self.others.pop_front());
        self.zeroed_last = matches!(job, Some(Job::Scrub { .. }));
        job
    }

    /// The zeros whose turn it is.
    fn next_zeros(&mut self) -> Option<Job> {
        let (tenant, mut jobs) = self.zeros.pop_front()?;
        let job = jobs.pop_front();
        if !jobs.is_empty() {
            self.zeros.push_back((tenant, jobs));
        }
        job
    }

    fn sort(&mut self, job: Job) {
        let Job::Scrub { tenant, .. } = job else { return self.others.push_back(job) };
        match self.zeros.iter_mut().find(|(t, _)| *t == tenant) {
            Some((_, jobs)) => jobs.push_back(job),
            None => self.zeros.push_back((tenant, VecDeque::from([job]))),
        }
    }
}

impl Worker {
    /// Starts the thread.
    pub fn start(heap: Arc<dyn Heap>) -> io::Result<Self> {
        let (jobs, work) = channel::<Job>();
        let (report, done) = channel();
        let event = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let (ring, to_loop) = (event.clone(), report.clone());
        std::thread::Builder::new().name("worker".into()).spawn(move || {
            let mut lanes = Lanes::default();
            while let Some(job) = lanes.next(&work) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The tickets of zeros, and 0 for all else, in the order in which they are done.
    fn order(jobs: Vec<Job>) -> Vec<u64> {
        let (send, work) = channel();
        jobs.into_iter().for_each(|job| send.send(job).unwrap());
        drop(send);
        let mut lanes = Lanes::default();
        let ticket = |job| match job {
            Job::Scrub { ticket, .. } => ticket,
            _ => 0,
        };
        std::iter::from_fn(|| lanes.next(&work)).map(ticket).collect()
    }

    fn zeros(uid: u32, ticket: u64) -> Job {
        Job::Scrub { ticket, tenant: Tenant(uid), pieces: Vec::new(), wanted: None }
    }

    #[test]
    fn zeros_wait_for_one_order_of_each_other_tenant_however_many_it_has() {
        let many = (1..=60).map(|ticket| zeros(1, ticket));
        let order = order(many.chain([zeros(2, 101), zeros(2, 102), zeros(3, 201)]).collect());
        assert_eq!(order[..6], [1, 101, 201, 2, 102, 3]);
        assert_eq!(order[6..], (4..=60).collect::<Vec<u64>>());
    }

    #[test]
    fn zeros_wait_for_one_extent_that_is_renewed_and_not_for_all_and_no_extent_waits_for_ever() {
        let zeros = |ticket| zeros(1, ticket);
        let other = || Job::Allocate { bytes: 1 };
        assert_eq!(order(vec![other(), other(), other(), zeros(1), zeros(2)]), [1, 0, 2, 0, 0]);
        assert_eq!(order(vec![zeros(1), zeros(2), zeros(3), zeros(4), other()]), [1, 0, 2, 3, 4]);
        assert_eq!(order(vec![other(), other()]), [0, 0]);
    }
}
