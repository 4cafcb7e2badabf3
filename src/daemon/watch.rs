//! Operators that watch: what is sent to each, and when one is dropped.
//!
//! Owns the last state that was told, and each watcher's queue. Invariants: a watcher gets the whole state first and then
//! every change, in order, without a gap; a queue is bounded, and whoever lets it fill gets one more line that says so,
//! and nothing after it; nobody pays for watching while nobody watches.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::broker::Broker;
use crate::broker::events::Snapshot;

/// Watchers at one time.
pub(super) const MOST: usize = 4;
/// The state is compared at most so often: what happens in between is told as one change.
const EVERY: Duration = Duration::from_millis(100);
/// Bytes of changes that wait for one watcher, beside what the kernel holds for it. The whole state, which is as long as there is
/// something to tell, and which each of [`MOST`] watchers is owed once, does not count.
const MOST_UNSENT: usize = 256 << 10;

/// What all watchers have been told.
#[derive(Debug)]
pub(super) struct Watch {
    told: Option<Snapshot>,
    stirred: bool,
    last: Instant,
}

impl Watch {
    pub fn new() -> Self {
        Watch { told: None, stirred: false, last: Instant::now() }
    }

    /// Something may have changed.
    pub fn stir(&mut self) {
        self.stirred = true;
    }

    /// Nobody watches any more.
    pub fn rest(&mut self) {
        self.told = None;
    }

    /// When to look next, if there is anything to look for.
    pub fn due(&self) -> Option<Instant> {
        (self.told.is_some() && self.stirred).then(|| self.last + EVERY)
    }

    /// What has changed since it was last told; nothing before it is due.
    pub fn changes(&mut self, broker: &Broker) -> String {
        match self.due() {
            Some(due) if due <= Instant::now() => self.look(broker),
            _ => String::new(),
        }
    }

    /// A new watcher: what the others are to be told first, and its whole state.
    pub fn begin(&mut self, broker: &Broker) -> (String, String) {
        let changes = self.look(broker);
        (changes, self.told.as_ref().map(Snapshot::lines).unwrap_or_default())
    }

    fn look(&mut self, broker: &Broker) -> String {
        self.stirred = false;
        self.last = Instant::now();
        let now = broker.snapshot();
        let changes = self.told.as_ref().map(|before| now.changes(before)).unwrap_or_default();
        self.told = Some(now);
        changes
    }
}

/// What one watcher has still to be sent.
#[derive(Debug)]
pub(super) struct Queue {
    unsent: Vec<u8>,
    /// How much of `unsent` has been sent.
    sent: usize,
    /// How much of what has not been sent is of the whole state, which is before all changes.
    state: usize,
    /// What was sent last has not ended a line.
    begun: bool,
    /// After what is queued nothing comes.
    ended: bool,
}

impl Queue {
    /// Begins with the whole state, which is as long as it is.
    pub fn new(state: String) -> Self {
        let unsent = state.into_bytes();
        Queue { state: unsent.len(), unsent, sent: 0, begun: false, ended: false }
    }

    /// Whether more may be queued.
    pub fn is_open(&self) -> bool {
        !self.ended
    }

    /// Appends changes; `false` if there was no room and the watcher is dropped.
    pub fn push(&mut self, changes: &str) -> bool {
        let waiting = self.unsent.len() - self.sent - self.state;
        if self.ended || changes.is_empty() {
            return true;
        }
        if waiting > 0 && waiting + changes.len() > MOST_UNSENT {
            let why = format!("{waiting} bytes of changes were not read in time; ask for the state anew");
            self.end("dropped", &why);
            return false;
        }
        self.unsent.drain(..self.sent);
        self.sent = 0;
        self.unsent.extend_from_slice(changes.as_bytes());
        true
    }

    /// Lets go of what waits, but for the rest of a line that has been begun, and appends the last line.
    pub fn end(&mut self, event: &str, reason: &str) {
        let after = &self.unsent[self.sent..];
        let rest = match after.iter().position(|b| *b == b'\n') {
            Some(end) if self.begun => &after[..=end],
            _ => &[],
        };
        let mut unsent = rest.to_vec();
        unsent.extend_from_slice(json!({ "event": event, "reason": reason }).to_string().as_bytes());
        unsent.push(b'\n');
        (self.unsent, self.sent, self.state, self.ended) = (unsent, 0, 0, true);
    }

    /// Sends what the watcher takes. `true`: nothing waits any more.
    pub fn flush(&mut self, stream: &mut impl Write) -> io::Result<bool> {
        while self.sent < self.unsent.len() {
            match stream.write(&self.unsent[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.sent += n;
                    self.state = self.state.saturating_sub(n);
                    self.begun = self.unsent[self.sent - 1] != b'\n';
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        (self.unsent, self.sent) = (Vec::new(), 0);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes, and no more.
    struct Reader(Vec<u8>, usize);

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(self.1);
            self.1 -= n;
            self.0.extend_from_slice(&bytes[..n]);
            if n == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(n) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn whoever_reads_too_slowly_gets_whole_lines_and_then_the_reason() {
        for taken in [0, 3, 4, 5, 6, 7] {
            let mut queue = Queue::new("one\ntwo\n".into());
            let mut reader = Reader(Vec::new(), taken);
            assert!(!queue.flush(&mut reader).unwrap());
            // More comes and is queued behind it, and nothing is sent in between.
            assert!(queue.push("three\n"));
            let long = "x".repeat(MOST_UNSENT - 1) + "\n";
            assert!(!queue.push(&long) && !queue.is_open());
            assert!(queue.push("more\n"), "it is dropped once");
            reader.1 = usize::MAX;
            assert!(queue.flush(&mut reader).unwrap());
            let text = String::from_utf8(reader.0).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            let whole = ["one", "two", "three"].into_iter().take(lines.len() - 1).collect::<Vec<_>>();
            assert_eq!(lines[..lines.len() - 1], whole[..], "{taken} bytes were taken");
            assert!(lines[lines.len() - 1].starts_with("{\"event\":\"dropped\""), "{text}");
            assert!(queue.unsent.len() < 1024);
        }
    }

    #[test]
    fn a_state_of_any_length_keeps_no_change_out() {
        let line = format!("{}\n", "s".repeat(99));
        let state = line.repeat(4 * MOST_UNSENT / line.len());
        let mut queue = Queue::new(state.clone());
        let mut reader = Reader(Vec::new(), 1000);
        let change = format!("{}\n", "c".repeat(1023));
        let mut changes = 0;
        // While the state is being read, and behind it, as many changes wait as ever.
        while queue.push(&change) {
            changes += 1;
            assert!(changes * change.len() <= MOST_UNSENT);
            reader.1 = 1000;
            assert!(!queue.flush(&mut reader).unwrap());
        }
        assert_eq!(changes, MOST_UNSENT / change.len());
        let mut queue = Queue::new(state.clone());
        let mut reader = Reader(Vec::new(), 0);
        assert!(queue.push(&change) && !queue.flush(&mut reader).unwrap());
        reader.1 = usize::MAX;
        assert!(queue.flush(&mut reader).unwrap());
        assert!(reader.0 == [state, change].concat().into_bytes());
    }

    #[test]
    fn whoever_reads_gets_every_change_and_nothing_is_kept() {
        let mut queue = Queue::new("state\n".into());
        let mut reader = Reader(Vec::new(), usize::MAX);
        for _ in 0..1000 {
            assert!(queue.flush(&mut reader).unwrap());
            assert!(queue.push("change\n"));
        }
        assert!(queue.flush(&mut reader).unwrap());
        assert_eq!(reader.0.len(), 6 + 1000 * 7);
        assert!(queue.unsent.is_empty());
    }
}
