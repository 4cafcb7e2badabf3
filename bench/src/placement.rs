//! Where the two sides of what is measured run: all on one processor, or each side on one of its own.
//!
//! Owns nothing. A kernel that is left to itself keeps the two threads of a bare ping-pong on one processor, and wakes the
//! daemon on another that sleeps: on a virtual machine that alone costs five times what is measured. So where a figure is a
//! ratio of two exchanges, both lie on the processors in the same way.

use std::io;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// One way.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    ours: usize,
    theirs: usize,
}

fn run_on(processors: &CpuSet) -> io::Result<()> {
    Ok(sched_setaffinity(Pid::from_raw(0), processors)?)
}

fn only(processor: usize) -> io::Result<CpuSet> {
    let mut one = CpuSet::new();
    one.set(processor)?;
    Ok(one)
}

impl Placement {
    /// All on one, and each side on its own where there are two.
    pub fn all() -> io::Result<Vec<Self>> {
        let all = sched_getaffinity(Pid::from_raw(0))?;
        let mut usable = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu) == Ok(true));
        let ours = usable.next().ok_or_else(|| io::Error::other("this thread runs on no processor"))?;
        Ok([Some(ours), usable.next()]
            .into_iter()
            .flatten()
            .map(|theirs| Placement { ours, theirs })
            .collect())
    }

    /// Whether each side has one of its own.
    pub fn is_apart(self) -> bool {
        self.ours != self.theirs
    }

    /// What a figure's name ends with.
    pub fn suffix(self) -> &'static str {
        if self.is_apart() { "-apart" } else { "" }
    }

    /// What a figure's note says of it.
    pub fn words(self) -> &'static str {
        if self.is_apart() { "each side on a processor of its own" } else { "all on one processor" }
    }

    /// What is started meanwhile stays where who answers is to run; this thread runs where who asks is to from then on.
    pub fn start<T>(self, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        run_on(&only(self.theirs)?)?;
        let started = start();
        run_on(&only(self.ours)?)?;
        started
    }

    /// Does something, and lets this thread run again afterwards where it might before.
    pub fn each(mut what: impl FnMut(Self) -> io::Result<()>) -> io::Result<()> {
        let before = sched_getaffinity(Pid::from_raw(0))?;
        let result = Self::all()?.into_iter().try_for_each(&mut what);
        run_on(&before)?;
        result
    }
}
