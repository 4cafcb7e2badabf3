//! `kvbctl save` and `load`: pinned prefixes into files and back.
//!
//! Owns nothing. Invariant: whatever was refused is said on standard error with the file's name, and is exit code 1.

use std::io::{self, Write};
use std::time::Duration;

use kvbroker::broker::{StoreOutcome, StoreReport, StoredReport};
use kvbroker::quote::plain;

use super::answer::report;
use super::live::{Ask, mib};
use super::{Failure, print_json};

/// As long as a slow card takes for a large store.
const PATIENCE: Duration = Duration::from_secs(120);

/// Asks, waits until it is done, and prints what became of each prefix.
pub fn run(ask: &Ask, what: &str, out: &mut impl Write) -> Result<(), Failure> {
    let answer = ask.change_within(what, PATIENCE)?;
    let report: StoreReport = report(&answer)?;
    if ask.is_json() {
        print_json(out, &answer)?;
    } else {
        print(what, &report, out)?;
    }
    let refused: Vec<String> = report.prefixes.iter().filter_map(|p| p.why.as_deref()).map(plain).collect();
    match refused.is_empty() {
        true => Ok(()),
        false => Err(Failure::Refused(refused.join("\nkvbctl: "))),
    }
}

fn print(what: &str, report: &StoreReport, out: &mut dyn Write) -> io::Result<()> {
    for p in &report.prefixes {
        let said = match p.outcome {
            StoreOutcome::Saved => "saved",
            StoreOutcome::Removed => "removed",
            StoreOutcome::Loaded => "loaded",
            StoreOutcome::Present => "there already",
            StoreOutcome::Refused => continue,
        };
        let file = plain(&p.file.file_name().unwrap_or_default().to_string_lossy());
        let StoredReport { blocks, tokens, bytes, .. } = p;
        let label = plain(&p.label);
        match p.uid {
            Some(uid) => writeln!(
                out,
                "{said}: {file}: uid {uid} ({label}), {blocks} blocks, {tokens} tokens, {}",
                mib(*bytes)
            )?,
            None => writeln!(out, "{said}: {file}")?,
        }
    }
    if report.prefixes.is_empty() {
        let none = if what == "save" { "no pinned prefix is to be stored" } else { "no prefix is stored" };
        writeln!(out, "{none} in {}", plain(&report.directory.to_string_lossy()))?;
    }
    Ok(())
}
