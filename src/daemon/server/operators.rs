//! Operators' connections in the loop: what each waits for, and who watches.
//!
//! Owns nothing: the loop has the connections. Invariants: whoever asks gets a connection, if need be that of one who does
//! nothing; a watcher gets the whole state first, then every change, or is dropped; nothing is read of a watcher.

use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::{Server, Token};
use crate::daemon::admin::{self, Operator, Wait};
use crate::daemon::watch;
use crate::seldom::seldom;

impl Server {
    pub(super) fn accept_operators(&mut self) {
        match self.admin.accept() {
            Ok(Some(fd)) => {
                let asks = |(id, o): (&u64, &Operator)| (!o.is_lease()).then_some((*id, o.is_watching()));
                let asking: Vec<_> = self.operators.iter().filter_map(asks).collect();
                if asking.len() >= admin::MOST {
                    // Who asks gets an answer; who has been connected for longest and does not watch has to go for it.
                    let silent = asking.iter().find(|(_, watches)| !watches).map(|(id, _)| *id);
                    self.drop_operator(silent.unwrap_or_default());
                }
                let id = self.next_operator;
                self.next_operator += 1;
                let operator = Operator::new(fd);
                let event = EpollEvent::new(EpollFlags::EPOLLIN, Token::Operator(id).pack());
                if self.epoll.add(&operator, event).is_ok() {
                    self.operators.insert(id, operator);
                }
            }
            Ok(None) => {}
            Err(e) => self.pause(&e),
        }
    }

    pub(super) fn operator(&mut self, id: u64, events: EpollFlags) {
        let Some(operator) = self.operators.get_mut(&id) else { return };
        if operator.is_watcher() && events.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            return self.drop_operator(id);
        }
        let mut wait = operator.go_on(&mut self.broker);
        if wait == Wait::Watch {
            wait = self.begin_to_watch(id);
        }
        let flags = match wait {
            Wait::Read => EpollFlags::EPOLLIN,
            Wait::Write => EpollFlags::EPOLLOUT,
            // A lease ends when its holder hangs up: nothing else is waited for.
            Wait::Lease => EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
            // Nothing is read of a watcher: one that has shut down its half would be readable for ever.
            Wait::Changes => EpollFlags::empty(),
            // A hang-up is told all the same.
            Wait::Broker => EpollFlags::empty(),
            Wait::Watch | Wait::End => return self.drop_operator(id),
        };
        let Some(operator) = self.operators.get(&id) else { return };
        if self.epoll.modify(operator, &mut EpollEvent::new(flags, Token::Operator(id).pack())).is_err() {
            self.drop_operator(id);
        }
    }

    fn drop_operator(&mut self, id: u64) {
        if let Some(mut operator) = self.operators.remove(&id) {
            let _ = self.epoll.delete(&operator);
            operator.end_lease(&mut self.broker);
        }
    }

    /// The whole state for a new watcher; the others are brought up to it first.
    fn begin_to_watch(&mut self, id: u64) -> Wait {
        let full = self.operators.values().filter(|o| o.is_watching()).count() >= watch::MOST;
        let state = if full {
            None
        } else {
            let (changes, state) = self.watch.begin(&self.broker);
            self.tell_watchers(&changes);
            Some(state)
        };
        let Some(operator) = self.operators.get_mut(&id) else { return Wait::End };
        match state {
            Some(state) => operator.watch(state),
            None => {
                let most = watch::MOST;
                operator.refuse(&format!("{most} watch already, and there are no more at one time; end one"));
            }
        }
        operator.go_on(&mut self.broker)
    }

    pub(super) fn tell_watchers(&mut self, changes: &str) {
        if changes.is_empty() {
            return;
        }
        let watching: Vec<u64> =
            self.operators.iter().filter(|(_, o)| o.is_watching()).map(|(id, _)| *id).collect();
        for id in watching {
            if let Some(queue) = self.operators.get_mut(&id).and_then(Operator::watching) {
                if !queue.push(changes) {
                    seldom!(warn, "an operator that watches does not read: dropped");
                }
            }
            self.operator(id, EpollFlags::empty());
        }
    }
}
