//! The files of a configuration: which are read, how they lie over each other, and which of them said what.
//!
//! Owns no state. Invariant: what is read is a regular file of a configuration's size, so no start waits for a pipe; of each
//! key the file that set it last is known, so that a refusal names it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::ConfigError;
use crate::quote::shown;

/// The largest file that is read: the shipped one, with every key and a comment to each, has 5 KiB.
const MOST_BYTES: u64 = 1 << 20;

/// Which file a key was last set in.
#[derive(Debug, Clone, Default)]
pub(in crate::daemon) struct Origins(BTreeMap<String, PathBuf>);

impl Origins {
    /// Notes that `path` sets all keys of `table`: `pool.size`, `tenant`.
    pub(super) fn note(&mut self, path: &Path, table: &toml::Table) {
        for (name, value) in table {
            match value {
                toml::Value::Table(keys) => {
                    self.0.extend(keys.keys().map(|key| (format!("{name}.{key}"), path.into())));
                }
                _ => _ = self.0.insert(name.clone(), path.into()),
            }
        }
    }

    /// Keys that the command line has set are no file's.
    pub(super) fn forget(&mut self, keys: &[(&str, bool)]) {
        for (key, _) in keys.iter().filter(|(_, given)| *given) {
            self.0.remove(*key);
        }
    }

    /// The file, for people.
    pub(super) fn of(&self, key: &str) -> String {
        self.0.get(key).map_or_else(|| "command line or defaults".into(), |path| name(path))
    }

    /// The refusal of a value.
    pub(in crate::daemon) fn wrong(
        &self,
        key: &str,
        value: impl std::fmt::Display,
        why: String,
    ) -> ConfigError {
        let value = shown(&value.to_string(), 200);
        ConfigError::Setting { origin: self.of(key), key: key.into(), value, why: shown(&why, 1000) }
    }

    /// The refusal of something that is not one value.
    pub(super) fn refuse(&self, key: &str, text: String) -> ConfigError {
        ConfigError::Value { origin: self.of(key), text: shown(&text, 1000) }
    }
}

/// A file's name as it may be shown: whoever may write a directory has chosen it.
pub(super) fn name(path: &Path) -> String {
    crate::quote::plain(&path.to_string_lossy())
}

/// A file of a configuration's size: a pipe is never waited for, and what has no end is not read to it.
pub(super) fn read_text(path: &Path) -> std::io::Result<String> {
    let wrong = |why: String| std::io::Error::new(std::io::ErrorKind::InvalidInput, why);
    // Looked at before it is opened: to open a pipe is to wait for who writes it.
    let meta = std::fs::metadata(path)?;
    if !meta.is_file() {
        return Err(wrong("this is no regular file".into()));
    }
    if meta.len() > MOST_BYTES {
        return Err(wrong(format!(
            "the file has {} bytes, more than the {MOST_BYTES} of any configuration",
            meta.len()
        )));
    }
    std::fs::read_to_string(path)
}

/// The `*.toml` files of the directory `path` + `.d`, in the order of their names; none where there is no such directory.
/// `real` says where a path is on this machine.
pub(super) fn drop_ins(
    path: &Path,
    real: impl Fn(&Path) -> PathBuf,
) -> Result<Vec<(PathBuf, String)>, ConfigError> {
    let mut directory = path.as_os_str().to_owned();
    directory.push(".d");
    let read = |path: PathBuf| move |source| ConfigError::Read { path, source };
    let directory = PathBuf::from(directory);
    let there = real(&directory);
    let entries = match std::fs::read_dir(&there) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ConfigError::Read { path: there, source }),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = directory.join(entry.map_err(read(there.clone()))?.file_name());
        if path.extension().is_some_and(|e| e == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    let text = |path: PathBuf| Ok((path.clone(), read_text(&path).map_err(read(path))?));
    paths.iter().map(|path| text(real(path))).collect()
}

/// Lays a file over those before it: key by key, and tenant by tenant.
pub(super) fn merge(into: &mut toml::Table, from: toml::Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => merge(old, new),
            (Some(toml::Value::Array(old)), toml::Value::Array(new)) if key == "tenant" => {
                merge_tenants(old, new);
            }
            (_, value) => _ = into.insert(key, value),
        }
    }
}

/// Tenants of several files stand beside each other, so that a file for one does not undo another's reserve; keys of the
/// same tenant win as all keys do. One that stands twice in the same file stays there twice, and is refused later.
fn merge_tenants(into: &mut Vec<toml::Value>, from: Vec<toml::Value>) {
    let mut earlier = std::mem::take(into);
    for new in from {
        let same = earlier.iter().position(|old| old.get("uid") == new.get("uid"));
        match (same.map(|at| earlier.remove(at)), new) {
            (Some(toml::Value::Table(mut old)), toml::Value::Table(new)) => {
                merge(&mut old, new);
                into.push(toml::Value::Table(old));
            }
            (_, new) => into.push(new),
        }
    }
    into.append(&mut earlier);
}

/// The parser's message, and for a key that nobody knows the nearest one that somebody does.
pub(super) fn explain(error: &toml::de::Error, text: &str) -> String {
    let line = error.span().map_or(1, |s| 1 + text[..s.start.min(text.len())].matches('\n').count());
    let message = error.message();
    let mut words = message.split('`').skip(1).step_by(2);
    let nearest = message.starts_with("unknown field").then(|| {
        let unknown = words.next().unwrap_or_default();
        words.min_by_key(|known| distance(unknown, known)).filter(|known| distance(unknown, known) <= 3)
    });
    match nearest.flatten() {
        Some(known) => format!("line {line}: {message}; did you mean `{known}`?"),
        None => format!("line {line}: {message}"),
    }
}

/// Edits between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = change.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
