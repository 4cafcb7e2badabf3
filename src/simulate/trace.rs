//! Traces of requests in the format that the Mooncake project publishes.
//!
//! Owns nothing. Invariant: a trace that is read has times that never go back, and for each request the ids of its
//! prompt's blocks, the last of which may be partial; anything else is an error that names the line.
//!
//! One JSON object per line: `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids`, one for
//! each block of 512 tokens of the prompt; equal ids mean equal tokens after equal tokens.
//! (FAST'25 release of the Mooncake traces; other fields are ignored.)

use std::io::{self, BufRead, Read, Write};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::MOST_TRACE;
use crate::quote::shown;

/// Tokens that one id of a published trace stands for.
pub const TRACE_BLOCK: u32 = 512;

/// The longest line that is read, in bytes: a request of fifty million tokens.
const MOST_LINE: u64 = 1 << 20;
/// The most tokens of a prompt, and of an answer: a thousand times what models take in.
const MOST_TOKENS: u64 = 1 << 30;
/// The latest time, in milliseconds: 35,000 years. What is computed of it in microseconds has 64 bits.
const MOST_TIME: u64 = 1 << 50;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// When it comes, in milliseconds from the start.
    pub timestamp: u64,
    /// Tokens of the prompt.
    pub input_length: u64,
    /// Tokens of the answer.
    pub output_length: u64,
    /// Names of the prompt's blocks; the last one may be partial.
    pub hash_ids: Vec<u64>,
}

/// Why something is no trace.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum TraceError {
    #[error("line {line}: {source}")]
    Read { line: u64, source: io::Error },
    #[error("line {line} is no request: {}", shown(&source.to_string(), 300))]
    Json { line: u64, source: serde_json::Error },
    #[error("line {line}: {ids} hash ids for {tokens} tokens, {needed} are needed at {block} tokens each")]
    Ids { line: u64, ids: usize, tokens: u64, needed: u64, block: u32 },
    #[error("line {line}: the time goes back from {before} to {after} ms")]
    Time { line: u64, before: u64, after: u64 },
    #[error("line {line} has more than the {MOST_LINE} bytes that a request may have")]
    Long { line: u64 },
    #[error("line {line}: {what} = {value}: a request has at most {most}")]
    Large { line: u64, what: &'static str, value: u64, most: u64 },
    #[error(
        "line {line}: the requests so far take {MOST_TRACE} bytes, as many as can be held; cut the trace into pieces"
    )]
    Held { line: u64 },
    #[error("the trace is empty")]
    Empty,
}

/// Reads a trace whose ids stand for `block` tokens each. Takes no more memory than [`MOST_TRACE`] and what the longest
/// line takes.
pub fn read(mut from: impl BufRead, block: u32) -> Result<Vec<Request>, TraceError> {
    let mut requests: Vec<Request> = Vec::new();
    let (mut text, mut held) = (Vec::new(), 0);
    for line in 1.. {
        text.clear();
        let read = from.by_ref().take(MOST_LINE + 1).read_until(b'\n', &mut text);
        if read.map_err(|source| TraceError::Read { line, source })? == 0 {
            break;
        }
        if text.len() as u64 > MOST_LINE {
            return Err(TraceError::Long { line });
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let mut r: Request =
            serde_json::from_slice(&text).map_err(|source| TraceError::Json { line, source })?;
        for (what, value, most) in [
            ("timestamp", r.timestamp, MOST_TIME),
            ("input_length", r.input_length, MOST_TOKENS),
            ("output_length", r.output_length, MOST_TOKENS),
        ] {
            if value > most {
                return Err(TraceError::Large { line, what, value, most });
            }
        }
        let (ids, tokens, needed) = (r.hash_ids.len(), r.input_length, r.input_length.div_ceil(block.into()));
        if (ids as u64) < r.input_length / u64::from(block) || ids as u64 > needed {
            return Err(TraceError::Ids { line, ids, tokens, needed, block });
        }
        let before = requests.last().map_or(0, |r| r.timestamp);
        if r.timestamp < before {
            return Err(TraceError::Time { line, before, after: r.timestamp });
        }
        r.hash_ids.shrink_to_fit();
        held += size_of::<Request>() + r.hash_ids.len() * size_of::<u64>();
        if held > MOST_TRACE {
            return Err(TraceError::Held { line });
        }
        requests.push(r);
    }
    match requests.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(requests),
    }
}

/// Writes a trace.
pub fn write(requests: &[Request], to: &mut impl Write) -> io::Result<()> {
    for r in requests {
        serde_json::to_writer(&mut *to, r)?;
        to.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Result<Vec<Request>, TraceError> {
        read(text.as_bytes(), TRACE_BLOCK)
    }

    #[test]
    fn a_trace_survives_writing_and_reading() {
        let trace = vec![
            Request { timestamp: 0, input_length: 513, output_length: 7, hash_ids: vec![0, 4] },
            Request { timestamp: 0, input_length: 5, output_length: 0, hash_ids: vec![9] },
        ];
        let mut bytes = Vec::new();
        write(&trace, &mut bytes).unwrap();
        assert_eq!(read(&*bytes, TRACE_BLOCK).unwrap(), trace);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let good = r#"{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
        let says = |text: String| lines(&text).unwrap_err().to_string();
        assert!(says(format!("{good}\nno")).starts_with("line 2 is no request"));
        let few = good.replace("[1, 2]", "[]");
        assert_eq!(says(few), "line 1: 0 hash ids for 600 tokens, 2 are needed at 512 tokens each");
        let many = good.replace("[1, 2]", "[1, 2, 3]");
        assert_eq!(says(many), "line 1: 3 hash ids for 600 tokens, 2 are needed at 512 tokens each");
        let back = good.replace("\"timestamp\": 5", "\"timestamp\": 4");
        assert_eq!(says(format!("{good}\n\n{back}")), "line 3: the time goes back from 5 to 4 ms");
        assert_eq!(says(String::new()), "the trace is empty");
        for (field, absurd) in [
            ("\"timestamp\": 5", "\"timestamp\": 18446744073709551615"),
            ("600", "18446744073709551615"),
            ("\"output_length\": 1", "\"output_length\": 1099511627776"),
        ] {
            let said = says(format!("{good}\n{}", good.replace(field, absurd)));
            assert!(said.starts_with("line 2: ") && said.contains("a request has at most"), "{said}");
        }
        assert!(says(good.replace("600", "-1")).starts_with("line 1 is no request"));
        assert_eq!(
            lines(&good.replace("[1, 2]", "[1]")).unwrap()[0].hash_ids,
            [1],
            "a partial block needs no id"
        );
    }

    /// The same line for ever.
    struct Repeated<'a>(&'a [u8], usize);

    impl Read for Repeated<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let read = (&self.0[self.1..]).read(out)?;
            self.1 = (self.1 + read) % self.0.len();
            Ok(read)
        }
    }

    #[test]
    fn a_trace_of_more_than_can_be_held_is_refused_by_the_line_at_which_it_is() {
        let ids = vec!["7"; 20_000].join(",");
        let line = format!(
            "{{\"timestamp\": 5, \"input_length\": 10240000, \"output_length\": 1, \"hash_ids\": [{ids}]}}\n"
        );
        let said = read(io::BufReader::new(Repeated(line.as_bytes(), 0)), TRACE_BLOCK).unwrap_err();
        let fit = MOST_TRACE / (size_of::<Request>() + 20_000 * 8);
        assert!(
            said.to_string().starts_with(&format!("line {}: the requests so far take", fit + 1)),
            "{said}"
        );
    }

    /// A file that never ends, and says how much of it was read.
    struct Endless(u64);

    impl Read for Endless {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            out.fill(b' ');
            self.0 += out.len() as u64;
            Ok(out.len())
        }
    }

    #[test]
    fn a_line_without_end_is_refused_by_its_number_before_it_is_read() {
        let mut file = Endless(0);
        let good = r#"{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
        let first = format!("{good}\n");
        let said = read(io::BufReader::new(first.as_bytes().chain(&mut file)), TRACE_BLOCK).unwrap_err();
        assert_eq!(said.to_string(), "line 2 has more than the 1048576 bytes that a request may have");
        assert!(file.0 < 2 * MOST_LINE, "{} bytes were read", file.0);
    }
}
