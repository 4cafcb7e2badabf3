//! `kvbctl events`: the whole state, then each change of it.
//!
//! Owns what is remembered of each object, so that people see what has changed of it. Invariants: every line is out
//! before the next one is waited for; the end of the stream has a reason and an exit code that is not 0.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::Failure;
use super::live::{Ask, parse};

/// Prints until it is interrupted or the broker ends it.
pub fn run(ask: &Ask, out: &mut impl Write) -> Result<(), Failure> {
    let mut known: BTreeMap<(String, String), Value> = BTreeMap::new();
    for line in BufReader::new(ask.ask("events", None)?).lines() {
        let line = line.map_err(|e| ask.unreachable(&e))?;
        let event = parse(&line)?;
        if ask.is_json() {
            writeln!(out, "{line}")?;
        } else {
            print(&event, &mut known, out)?;
        }
        out.flush()?;
        let reason = event["reason"].as_str().unwrap_or("no reason is given");
        match event["event"].as_str() {
            Some("dropped") => return Err(Failure::Refused(format!("dropped by the broker: {reason}"))),
            Some("end") => return Err(Failure::Unreachable(format!("the broker has ended: {reason}"))),
            _ => {}
        }
    }
    Err(Failure::Unreachable("the broker has gone without a word".into()))
}

fn print(
    event: &Value,
    known: &mut BTreeMap<(String, String), Value>,
    out: &mut impl Write,
) -> std::io::Result<()> {
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
            let before = known.insert(key.clone(), event["is"].clone());
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
