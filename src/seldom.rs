//! Log lines that somebody outside can cause as often as he likes.
//!
//! Owns, for each place in the source that logs so, when it did last and how often it has kept silent since. Invariant: one
//! place logs at most once a second, and what it kept silent about is counted in its next line. (The log is the operator's
//! disk, and what he reads when something is wrong: nobody else fills it.)

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How often one place logs at most.
const EVERY: Duration = Duration::from_secs(1);

/// One place that logs.
#[derive(Debug)]
pub(crate) struct Site(Mutex<(Option<Instant>, u64)>);

impl Site {
    pub const fn new() -> Self {
        Site(Mutex::new((None, 0)))
    }

    /// Whether it is time for a line, and how many were left out before it.
    pub fn due(&self, now: Instant) -> Option<u64> {
        // Two numbers: whoever panicked while it held them has left them as they are.
        let mut site = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (last, left_out) = &mut *site;
        if last.is_some_and(|last| now.saturating_duration_since(last) < EVERY) {
            *left_out += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(left_out))
    }
}

/// What a line says of those that were left out before it.
pub(crate) struct LeftOut(pub u64);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " (and {n} more like this since the last such line)"),
        }
    }
}

/// `log::LEVEL!`, at most once a second from this place: `seldom!(warn, "...", ...)`.
macro_rules! seldom {
    ($level:ident, $($said:tt)+) => {{
        static SITE: $crate::seldom::Site = $crate::seldom::Site::new();
        if let Some(left_out) = SITE.due(std::time::Instant::now()) {
            log::$level!("{}{}", format_args!($($said)+), $crate::seldom::LeftOut(left_out));
        }
    }};
}
pub(crate) use seldom;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_speaks_once_a_second_and_says_how_often_it_was_silent() {
        let (site, start) = (Site::new(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(site.due(start), Some(0));
        for ms in 1..1000 {
            assert_eq!(site.due(at(ms)), None);
        }
        assert_eq!(site.due(at(1000)), Some(999));
        assert_eq!(site.due(at(1999)), None);
        assert_eq!(site.due(at(5000)), Some(1));
        assert_eq!(site.due(at(9000)), Some(0), "nothing was left out");
        assert_eq!(
            LeftOut(0).to_string() + &LeftOut(7).to_string(),
            " (and 7 more like this since the last such line)"
        );
    }
}
