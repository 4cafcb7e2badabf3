//! The trace of `kvbctl simulate`.

use kvbroker::simulate::{self, TRACE_BLOCK};

/// What stands in traces.
pub const WORDS: &[&[u8]] = &[
    b"\"timestamp\"",
    b"\"input_length\"",
    b"\"output_length\"",
    b"\"hash_ids\"",
    b"\n",
    b"[]",
    b"{}",
    b"null",
];

/// Traces that are right.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut shop_floor = Vec::new();
    let trace = simulate::shop_floor(1, 1);
    simulate::write(&trace[..trace.len().min(4)], &mut shop_floor).expect("a vector takes what is written");
    let one = br#"{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    let more =
        br#"{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2], "more": {"a": [1]}}

{"timestamp": 7, "input_length": 5, "output_length": 0, "hash_ids": [9]}
"#;
    let wrong = format!(r#"{{"timestamp": "{}"}}"#, "x".repeat(4000));
    vec![one.to_vec(), more.to_vec(), shop_floor, wrong.into_bytes()]
}

/// What is read is written, and read again as the same.
pub fn run(data: &[u8]) -> bool {
    let mut accepted = false;
    for block in [TRACE_BLOCK, 1, u32::MAX] {
        let read = super::alloc::at_most((1 << 20) + 64 * data.len(), "reading a trace", || {
            simulate::read(data, block)
        });
        match read {
            Ok(trace) => {
                accepted = true;
                assert!(!trace.is_empty() && trace.is_sorted_by_key(|r| r.timestamp));
                let mut bytes = Vec::new();
                simulate::write(&trace, &mut bytes).expect("a vector takes what is written");
                let again = simulate::read(&bytes[..], block).expect("what was written is right");
                assert_eq!(again, trace);
            }
            Err(e) => super::check_words(&e),
        }
    }
    accepted
}
