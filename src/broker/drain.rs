//! Drain: what goes on, goes on; nothing begins.
//!
//! Owns the operator's word, which a restart of the broker forgets. Invariant: while the broker drains, nobody gets a
//! session or a block that was not promised before, and nobody loses anything: what sessions hold, and the credit of
//! their processes, is used, sealed, trimmed and given back as ever, and what an admitted session was promised comes.

use super::{Broker, Refused};
use crate::wire::Fault;

impl Broker {
    /// Begins to drain, or ends it.
    pub fn set_draining(&mut self, on: bool) {
        if std::mem::replace(&mut self.draining, on) == on {
            return;
        }
        match on {
            true => log::info!("draining: {} sessions go on, no new ones", self.state.sessions.len()),
            false => log::info!("draining no more: new sessions are served again"),
        }
        // Requests that wait for memory get their answer by the new rule.
        self.stirred = true;
        self.settle();
    }

    /// Refuses what begins, while the broker drains.
    pub(super) fn begins(&self, what: &str) -> Result<(), Refused> {
        match self.draining {
            true => Err(Refused::new(
                Fault::Busy,
                format!(
                    "{what}: the operator drains this broker; go on with what you have, or try again later"
                ),
            )),
            false => Ok(()),
        }
    }

    /// How many of `want` blocks a session may have now, of which it needs `least` and was promised `promised`.
    pub(super) fn undrained(&self, want: u32, least: u32, promised: u32) -> Result<u32, Refused> {
        if least > promised {
            self.begins("no more blocks")?;
        }
        Ok(if self.draining { want.min(promised) } else { want })
    }
}
