//! `kvbctl events`: the whole state, then each change of it.
//!
//! Owns what is remembered of each object, so that people see what has changed of it. Invariants: every line is out
//! before the next one is waited for; the end of the stream has a reason and an exit code that is not 0.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::Failure;
use super::answer::{LONGEST, foreign, parse, quote_all, quoted};
use super::live::Ask;

/// Of all objects together no more is remembered than an answer may have.
const MOST: usize = LONGEST as usize;

/// Prints until it is interrupted, nobody reads it any more, or the broker ends it.
pub fn run(ask: &Ask, out: &mut impl Write) -> Result<(), Failure> {
    let mut known = Known::default();
    let mut lines = ask.lines("events")?;
    while let Some(line) = lines.next().map_err(|e| closed(ask, e))? {
        // There is a broker; how long nothing changes is not its doing.
        lines.wait_for_ever();
        let mut event = parse(&line)?;
        let Some(name) = event["event"].as_str().map(quoted) else {
            return Err(foreign(&"a line of it tells of no event"));
        };
        if ask.is_json() {
            writeln!(out, "{line}")?;
        } else {
            quote_all(&mut event);
            print(&event, &mut known, out)?;
            if known.bytes > MOST {
                return Err(foreign(&"it tells of more objects than a broker has"));
            }
        }
        out.flush()?;
        let reason = quoted(event["reason"].as_str().unwrap_or("no reason is given"));
        match name.as_str() {
            "dropped" => return Err(Failure::Refused(format!("dropped by the broker: {reason}"))),
            "end" => return Err(Failure::Unreachable(format!("the broker has ended: {reason}"))),
            _ => {}
        }
    }
    Err(Failure::Unreachable("the broker has gone without a word".into()))
}

fn closed(ask: &Ask, e: std::io::Error) -> Failure {
    match e.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::Output(e),
        _ => ask.unreachable(&e),
    }
}

/// What was last said of each object, by kind and id.
#[derive(Default)]
struct Known {
    objects: BTreeMap<(String, String), (Value, usize)>,
    bytes: usize,
}

impl Known {
    fn insert(&mut self, key: &(String, String), is: Value) -> Option<Value> {
        let bytes = key.0.len() + key.1.len() + is.to_string().len();
        self.bytes += bytes;
        let (before, bytes) = self.objects.insert(key.clone(), (is, bytes))?;
        self.bytes -= bytes;
        Some(before)
    }

    fn remove(&mut self, key: &(String, String)) {
        self.bytes -= self.objects.remove(key).map_or(0, |(_, bytes)| bytes);
    }
}

fn print(event: &Value, known: &mut Known, out: &mut impl Write) -> std::io::Result<()> {
    let word = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
    let key = (word("kind"), word("id"));
    let name = word("event");
    let what = match name.as_str() {
        "complete" => format!("that is all, {} objects; what follows are changes", event["objects"]),
        "dropped" | "end" => return Ok(()),
        "gone" => {
            known.remove(&key);
            String::new()
        }
        _ => {
            let before = known.insert(&key, event["is"].clone());
            difference(before.as_ref(), &event["is"])
        }
    };
    let line = format!("{} {name:<8} {:<7} {:<6} {what}", clock(), key.0, key.1);
    writeln!(out, "{}", line.trim_end())
}

/// `tokens 16 -> 32` for what has changed, `tokens 32` for all of what is new.
fn difference(before: Option<&Value>, is: &Value) -> String {
    let mut said = Vec::new();
    differ("", before, is, &mut said);
    said.join(", ")
}

fn differ(path: &str, before: Option<&Value>, is: &Value, said: &mut Vec<String>) {
    let Some(fields) = is.as_object() else {
        match before {
            Some(before) if before == is => {}
            Some(before) => said.push(format!("{path} {before} -> {is}")),
            None => said.push(format!("{path} {is}")),
        }
        return;
    };
    for (name, value) in fields {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        differ(&path, before.map(|b| &b[name.as_str()]), value, said);
    }
    for (name, value) in before.and_then(Value::as_object).into_iter().flatten() {
        if !fields.contains_key(name) {
            said.push(format!("{path}.{name} {value} -> none"));
        }
    }
}

/// The time of day, UTC: what a log beside it has too.
fn clock() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    format!("{:02}:{:02}:{:02}Z", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}
