//! What the broker says, as it is read.
//!
//! Owns the connection while it is read. Invariant: whatever answers at the socket, reading it ends in time and in bounded
//! memory, and nothing of it is believed, or shown, that this tool does not know: an answer without what was asked for is no
//! answer, and its texts are quoted.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvbroker::quote::{line, plain};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Failure;

/// An answer has no more bytes than this. The longest is the list of sessions: 256 connections with 256 sessions each, as
/// many as the daemon lets by default, of some 400 bytes each are 26 MB.
pub const LONGEST: u64 = 64 << 20;
/// An error is shown up to so many characters.
const SHOWN: usize = 1000;

/// A connection that is read until a moment, or for ever.
pub struct Reply {
    stream: UnixStream,
    patience: Option<Duration>,
    until: Option<Instant>,
    /// Reading ends when nobody reads standard output any more.
    for_stdout: bool,
}

impl Reply {
    /// To be read within `patience`, all of it.
    pub fn within(stream: UnixStream, patience: Duration) -> Self {
        let until = Instant::now() + patience;
        Reply { stream, patience: Some(patience), until: Some(until), for_stdout: false }
    }

    /// What is read goes to standard output as it comes: when that is closed there is no more to be read.
    pub fn for_stdout(mut self) -> Self {
        self.for_stdout = true;
        self
    }

    /// From now on there is no hurry.
    pub fn wait_for_ever(&mut self) {
        (self.patience, self.until) = (None, None);
    }

    /// All of it, up to the end of the connection.
    pub fn text(self) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.take(LONGEST + 1).read_to_end(&mut bytes)?;
        if bytes.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        utf8(bytes)
    }

    /// Its first line, and the connection, which goes on.
    pub fn line(self) -> io::Result<(String, UnixStream)> {
        let mut lines = Lines::of(self);
        let line = lines.next()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((line, lines.reply.into_inner().stream))
    }
}

impl Read for Reply {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let stdout = io::stdout();
            let mut wait = vec![PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
            // Asked for nothing, it tells of its end.
            wait.extend(self.for_stdout.then(|| PollFd::new(stdout.as_fd(), PollFlags::empty())));
            let left = self.until.map(|t| t.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                u16::try_from(left.as_millis() + 1).unwrap_or(u16::MAX).into()
            });
            match poll(&mut wait, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
            if wait.get(1).and_then(PollFd::any).unwrap_or(false) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            // Bytes that come one by one keep nobody beyond the moment either.
            if self.until.is_some_and(|t| t <= Instant::now()) {
                let seconds = self.patience.unwrap_or_default().as_secs();
                let why = format!("it has not answered within {seconds} s");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            if wait[0].any().unwrap_or(false) {
                return self.stream.read(buffer);
            }
        }
    }
}

/// What comes line by line.
pub struct Lines {
    reply: BufReader<Reply>,
}

impl Lines {
    /// Of what is still to come.
    pub fn of(reply: Reply) -> Self {
        Lines { reply: BufReader::new(reply) }
    }

    /// See [`Reply::wait_for_ever`].
    pub fn wait_for_ever(&mut self) {
        self.reply.get_mut().wait_for_ever();
    }

    /// The next line without its end; `None` at the end of the connection.
    pub fn next(&mut self) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        self.reply.by_ref().take(LONGEST + 1).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        utf8(line).map(Some)
    }
}

fn utf8(bytes: Vec<u8>) -> io::Result<String> {
    let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    if bytes.len() as u64 > LONGEST {
        return Err(wrong(format!("it is longer than {} MiB", LONGEST >> 20)));
    }
    String::from_utf8(bytes).map_err(|e| wrong(e.utf8_error().to_string()))
}

/// What answered says nothing that a broker says.
pub fn foreign(why: &dyn std::fmt::Display) -> Failure {
    let why = quoted(&why.to_string());
    Failure::Refused(format!("the answer is not what a broker of this version says ({why})"))
}

/// What is wrong, as one line of bounded length.
pub fn quoted(text: &str) -> String {
    line(text, SHOWN)
}

/// One document of the broker's, or the error that it says.
pub fn said(text: &str) -> Result<Result<Value, String>, Failure> {
    let value: Value = serde_json::from_str(text).map_err(|e| foreign(&e))?;
    match value.get("error") {
        Some(Value::String(error)) => Ok(Err(quoted(error))),
        Some(_) => Err(foreign(&"its error is no text")),
        None => Ok(Ok(value)),
    }
}

/// The same for whoever makes no difference.
pub fn parse(text: &str) -> Result<Value, Failure> {
    said(text)?.map_err(Failure::Refused)
}

/// The report in a document, with texts as they may be shown.
pub fn report<T: DeserializeOwned>(answer: &Value) -> Result<T, Failure> {
    let mut shown = answer.clone();
    quote_all(&mut shown);
    serde_json::from_value(shown).map_err(|e| foreign(&e))
}

/// Quotes every text in a document, names of fields too.
pub fn quote_all(value: &mut Value) {
    match value {
        Value::String(text) => *text = plain(text),
        Value::Array(all) => all.iter_mut().for_each(quote_all),
        Value::Object(fields) => {
            for (name, mut value) in std::mem::take(fields) {
                quote_all(&mut value);
                fields.insert(plain(&name), value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
