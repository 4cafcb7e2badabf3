//! Configuration files.

use std::path::Path;

use kvbroker::daemon::{Config, ConfigError};

/// What stands in such files.
pub const WORDS: &[&[u8]] = &[
    b"[pool]\n",
    b"[limits]\n",
    b"[cache]\n",
    b"[device]\n",
    b"[prefix.store]\n",
    b"[[tenant]]\n",
    b"[[profile]]\n",
    b"size = ",
    b"extent = ",
    b"reserve = ",
    b"limit = ",
    b"minimum = ",
    b"layers = ",
    b"head-dim = ",
    b"kv-heads = ",
    b"tokens-per-block = ",
    b"\"block\"",
    b"\"16777215T\"",
    b"\"0B\"",
    b"\"q8_0\"",
    b"\"256M\"",
    b"\n",
    b"= 1\n",
];

/// The file that ships, with and without what it comments out, and others that are right.
pub fn seeds() -> Vec<Vec<u8>> {
    let shipped = include_str!("../../systemd/kvbroker.toml");
    // No model's file is there.
    let all: String = shipped
        .lines()
        .filter(|l| !l.contains("config.json"))
        .map(|l| l.strip_prefix("#: ").unwrap_or(l).to_owned() + "\n")
        .collect();
    let small = "scrub = \"always\"\n[pool]\nsize = \"8M\"\nextent = \"128K\"\n[[profile]]\nname = \"small\"\nlayers = 2\nkv-heads = 2\nhead-dim = 128\n[[tenant]]\nuid = 7\nreserve = \"1M\"\nlimit = \"2M\"\n";
    let reserve = |uid| format!("[[tenant]]\nuid = {uid}\nreserve = \"16777215T\"\n");
    let reserves = reserve(1) + &reserve(2);
    let long = format!("{} = 1\n", "k".repeat(4000));
    vec![
        reserves.into(),
        long.into(),
        shipped.into(),
        all.into(),
        small.into(),
        b"[pool]\nsize = \"1.5G\"\nextent = \"block\"\nminimum = \"64M\"\n".to_vec(),
    ]
}

fn read(text: &str) -> Result<Config, ConfigError> {
    Config::from_text(Path::new("kvbroker.toml"), text)
}

/// What is accepted is consistent, twice the same, and every answer about it comes without a panic.
pub fn run(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    // A model's file would be read from this machine's disk: whatever is there is not this input.
    if text.contains("model") {
        return false;
    }
    let config =
        match super::alloc::at_most((4 << 20) + 256 * data.len(), "reading a configuration", || read(text)) {
            Ok(config) => config,
            Err(e) => {
                super::check_words(&e);
                return false;
            }
        };
    assert!(config.minimum_bytes <= config.pool_bytes && config.floor_bytes <= config.pool_bytes);
    assert!(config.socket_mode <= 0o777 && !config.profiles.is_empty());
    let again = read(text).expect("it was accepted a moment ago");
    assert_eq!(format!("{again:?}"), format!("{config:?}"));
    for page in [4096, 16384, 65536] {
        match config.extents(page) {
            Ok(extents) => {
                assert!(
                    extents.bytes > 0
                        && extents.count > 0
                        && extents.count * extents.bytes <= config.pool_bytes
                );
                let _ = config.policy(extents.bytes, extents.one_block);
            }
            Err(e) => super::check_words(&e),
        }
    }
    if let Err(e) = config.consistent() {
        super::check_words(&e);
    }
    true
}
