//! Pressure on the machine's memory, as the kernel sees it (PSI).
//!
//! Owns the trigger, or the file that is read instead, and when to look. Invariants:
//! - with a trigger the kernel wakes the loop; without one the file is read every ten seconds, and only while the broker
//!   has something that it could give;
//! - whether pressure is gone is looked at only while something has been given back, later each time that it comes again
//!   soon: a pool that is given and taken in turns helps nobody;
//! - where the kernel says nothing of pressure, that is said once, and nothing wakes up.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::epoll::EpollFlags;

/// Where the kernel tells of pressure on memory.
pub(super) const PSI: &str = "/proc/pressure/memory";
/// Tasks that waited for memory for 200 ms within 2 s: what systemd takes for pressure too
/// (`DefaultMemoryPressureThresholdSec=`). The window is the shortest that a user without CAP_SYS_RESOURCE may have
/// (Documentation/accounting/psi.rst: a multiple of 2 s).
const TRIGGER: &str = "some 200000 2000000";
/// The same as a share of time, for the averages over ten seconds that the file shows.
const PRESSED: f64 = 10.0;
/// Below this the machine has memory again.
const RELIEVED: f64 = 1.0;
/// How often the file is read.
const POLL: Duration = Duration::from_secs(10);
/// The longest that what was given back is left with the kernel without a look.
const LONGEST: Duration = Duration::from_secs(640);

/// What the broker could do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Needs {
    /// Give something.
    pub slack: bool,
    /// Take back what it has given.
    pub given: bool,
}

/// What there is to tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    Pressed,
    Relieved,
}

/// Where the file is read and how often; other than [`PSI`] only in tests.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub path: PathBuf,
    pub every: Duration,
}

impl Default for Source {
    fn default() -> Self {
        Source { path: PSI.into(), every: POLL }
    }
}

#[derive(Debug)]
enum Watch {
    Trigger(File),
    Poll,
    Nothing,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pressure {
    source: Source,
    watch: Watch,
    /// The kernel has called.
    called: bool,
    last_look: Instant,
    pressed_at: Instant,
    /// How long after that it is looked whether pressure is gone.
    patience: Duration,
    /// When what had been given back was taken again.
    relieved: Option<Instant>,
}

impl Pressure {
    /// Asks the kernel for a trigger, or finds out what there is instead.
    pub fn open(source: Source) -> Self {
        let watch = match trigger(&source.path) {
            Ok(file) => Watch::Trigger(file),
            Err(e) => match std::fs::read_to_string(&source.path).map(|text| average(&text)) {
                Ok(Some(_)) => {
                    log::debug!("{}: no trigger ({e}); it is read instead", source.path.display());
                    Watch::Poll
                }
                Ok(None) | Err(_) => Watch::Nothing,
            },
        };
        let (patience, now) = (source.every, Instant::now());
        Pressure { source, watch, called: false, last_look: now, pressed_at: now, patience, relieved: None }
    }

    /// How it is learnt that memory is short, for people.
    pub fn how(&self) -> String {
        let path = self.source.path.display();
        match self.watch {
            Watch::Trigger(_) => format!("the kernel tells ({path}, {TRIGGER})"),
            Watch::Poll => {
                let every = self.source.every.as_secs();
                format!(
                    "{path} is read every {every} s while there is something to give: this kernel lets no user wait for it"
                )
            }
            Watch::Nothing => {
                format!("this kernel does not tell ({path}: CONFIG_PSI, or psi=1 on its command line)")
            }
        }
    }

    /// Whether nothing is ever learnt.
    pub fn is_blind(&self) -> bool {
        matches!(self.watch, Watch::Nothing)
    }

    /// What to wait for with EPOLLPRI.
    pub fn trigger(&self) -> Option<BorrowedFd<'_>> {
        match &self.watch {
            Watch::Trigger(file) => Some(file.as_fd()),
            Watch::Poll | Watch::Nothing => None,
        }
    }

    /// The trigger has fired, at most once in its window.
    pub fn triggered(&mut self, events: EpollFlags) {
        if events.contains(EpollFlags::EPOLLERR) {
            // The kernel took it away: closing it also takes it out of the loop's set.
            log::warn!(
                "{}: the kernel has ended the trigger; the file is read instead",
                self.source.path.display()
            );
            self.watch = Watch::Poll;
            return;
        }
        self.called = true;
    }

    /// When to call [`news`](Self::news) next; `None` while nothing would come of it.
    pub fn next_look(&self, needs: Needs) -> Option<Instant> {
        let next = self.last_look + self.source.every;
        let pressed = (needs.slack && matches!(self.watch, Watch::Poll)).then_some(next);
        let relieved = (needs.given && !self.is_blind()).then(|| next.max(self.pressed_at + self.patience));
        pressed.into_iter().chain(relieved).min()
    }

    /// What there is to say to the broker now.
    pub fn news(&mut self, now: Instant, needs: Needs) -> Option<News> {
        let called = std::mem::take(&mut self.called);
        if called {
            return self.pressed(now);
        }
        if self.next_look(needs).is_none_or(|at| now < at) {
            return None;
        }
        self.last_look = now;
        let share = std::fs::read_to_string(&self.source.path).ok().and_then(|text| average(&text))?;
        match share {
            s if s >= PRESSED => self.pressed(now),
            s if s < RELIEVED && needs.given && now >= self.pressed_at + self.patience => {
                self.relieved = Some(now);
                Some(News::Relieved)
            }
            _ => None,
        }
    }

    fn pressed(&mut self, now: Instant) -> Option<News> {
        (self.last_look, self.pressed_at) = (now, now);
        if let Some(relieved) = self.relieved.take() {
            let soon = now.duration_since(relieved) < 2 * self.patience;
            self.patience = if soon { (self.patience * 2).min(LONGEST) } else { self.source.every };
        }
        Some(News::Pressed)
    }
}

/// Registers a trigger. The kernel ends it when the file is closed.
fn trigger(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    if path != Path::new(PSI) {
        // A file of a test's: writing to it would change it.
        return Err(Errno::EOPNOTSUPP.into());
    }
    let mut file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // With its zero, in one call: the kernel reads it as a string.
    file.write_all(format!("{TRIGGER}\0").as_bytes())?;
    Ok(file)
}

/// The share of the last ten seconds, in per cent, in which some task waited for memory: `some avg10=0.22 …`.
fn average(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|l| l.strip_prefix("some "))?;
    some.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVES: Needs = Needs { slack: true, given: false };
    const GAVE: Needs = Needs { slack: false, given: true };
    const NOTHING: Needs = Needs { slack: false, given: false };

    struct Fake {
        file: tempfile::NamedTempFile,
        pressure: Pressure,
        now: Instant,
    }

    impl Fake {
        fn new() -> Self {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n").unwrap();
            let pressure = Pressure::open(Source { path: file.path().into(), every: POLL });
            let now = pressure.last_look;
            Fake { file, pressure, now }
        }

        fn after(&mut self, seconds: u64, share: f64, needs: Needs) -> Option<News> {
            self.now += Duration::from_secs(seconds);
            let line =
                format!("some avg10={share:.2} avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 total=0\n");
            std::fs::write(self.file.path(), line).unwrap();
            self.pressure.news(self.now, needs)
        }
    }

    #[test]
    fn without_a_trigger_the_file_is_read_every_ten_seconds_and_only_while_there_is_something_to_give() {
        let mut f = Fake::new();
        assert_eq!(f.pressure.next_look(NOTHING), None);
        assert_eq!(f.pressure.next_look(GIVES), Some(f.now + POLL));
        assert_eq!(f.after(9, 50.0, GIVES), None, "too early for a look");
        assert_eq!(f.after(1, 50.0, NOTHING), None, "nothing to give");
        assert_eq!(f.after(0, 50.0, GIVES), Some(News::Pressed));
        assert_eq!(f.after(10, 9.99, GIVES), None);
        assert_eq!(f.after(10, 10.0, GIVES), Some(News::Pressed), "and again while it lasts");
    }

    #[test]
    fn what_was_given_is_taken_back_when_pressure_is_gone_and_later_each_time_that_it_comes_again() {
        let mut f = Fake::new();
        assert_eq!(f.after(10, 50.0, GIVES), Some(News::Pressed));
        assert_eq!(f.after(10, 5.0, GAVE), None, "between the bounds nothing changes");
        assert_eq!(f.after(10, 0.5, GAVE), Some(News::Relieved));
        assert_eq!(f.after(10, 50.0, GIVES), Some(News::Pressed));
        assert_eq!(f.after(10, 0.5, GAVE), None, "it came again at once: twenty seconds now");
        assert_eq!(f.after(10, 0.5, GAVE), Some(News::Relieved));
        assert_eq!(f.after(100, 50.0, GIVES), Some(News::Pressed));
        assert_eq!(f.after(10, 0.5, GAVE), Some(News::Relieved), "after a long quiet time it is ten again");
    }

    #[test]
    fn a_kernel_that_says_nothing_of_pressure_is_named_and_never_looked_at_again() {
        let mut pressure = Pressure::open(Source { path: "/nowhere/pressure".into(), every: POLL });
        assert!(pressure.is_blind() && pressure.trigger().is_none());
        assert!(pressure.how().contains("/nowhere/pressure: CONFIG_PSI"), "{}", pressure.how());
        let all = Needs { slack: true, given: true };
        assert_eq!(pressure.next_look(all), None);
        assert_eq!(pressure.news(pressure.last_look + 9 * POLL, all), None);
    }

    #[test]
    fn the_real_kernel_gives_a_trigger_or_at_least_a_figure() {
        let Ok(text) = std::fs::read_to_string(PSI) else {
            eprintln!("this kernel has no {PSI}: nothing to look at");
            return;
        };
        assert!(average(&text).is_some(), "{text}");
        let pressure = Pressure::open(Source::default());
        assert!(!pressure.is_blind(), "{}", pressure.how());
        if let Some(trigger) = pressure.trigger() {
            let epoll = nix::sys::epoll::Epoll::new(nix::sys::epoll::EpollCreateFlags::empty()).unwrap();
            epoll.add(trigger, nix::sys::epoll::EpollEvent::new(EpollFlags::EPOLLPRI, 7)).unwrap();
            let mut events = [nix::sys::epoll::EpollEvent::empty(); 1];
            // It may fire or not, and it is no error.
            let count = epoll.wait(&mut events, 0u8).unwrap();
            assert!(count == 0 || !events[0].events().contains(EpollFlags::EPOLLERR));
        }
    }
}
