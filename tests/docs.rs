//! What the documents say of tests and of modules: each test that they name is there, and is a test; each module is in the
//! table of the architecture, and what that names is there.
//!
//! `docs/faults.md`, `docs/faults-llama.md` and `docs/npu.md` promise that somebody watches over each kind of fault. A
//! test that was renamed or removed must not leave the promise behind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Where tests are, beside those of the package.
const ROOMS: [&str; 6] = ["src", "tests", "ggml-plugin", "examples", "bench", "scripts"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(document: &str) -> String {
    std::fs::read_to_string(root().join(document)).unwrap_or_else(|e| panic!("{document}: {e}"))
}

/// Every source file by its path from the root, without what is built.
fn sources() -> BTreeMap<PathBuf, String> {
    fn walk(directory: &Path, found: &mut BTreeMap<PathBuf, String>) {
        for entry in std::fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|n| n != "target" && n != "__pycache__") {
                    walk(&path, found);
                }
            } else if path.extension().is_some_and(|e| e == "rs" || e == "py") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.insert(path.strip_prefix(root()).unwrap().to_path_buf(), text);
            }
        }
    }
    let mut found = BTreeMap::new();
    ROOMS.iter().for_each(|room| walk(&root().join(room), &mut found));
    found
}

/// What stands between single backquotes, outside of blocks of code.
fn quoted(text: &str) -> Vec<&str> {
    let mut spans = Vec::new();
    for (i, part) in text.split("```").enumerate() {
        if i % 2 == 0 {
            spans.extend(part.lines().flat_map(|line| line.split('`').skip(1).step_by(2)));
        }
    }
    spans
}

/// A test that a document names: perhaps a file or module, and a function or the beginning of its name.
#[derive(Debug, PartialEq)]
struct Named<'a> {
    place: Option<&'a str>,
    function: &'a str,
    whole: bool,
}

/// Names of tests are sentences, so six words and more are one (C functions have fewer); shorter ones are with their place (`pager::NAME`).
fn named(span: &str) -> Option<Named<'_>> {
    let (place, name) = match span.rsplit_once("::") {
        Some((place, name)) => (Some(place), name),
        None => (None, span),
    };
    let (function, whole) = match name.strip_suffix("...") {
        Some(beginning) => (beginning, false),
        None => (name, true),
    };
    let is_name = function.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    let is_place = |p: &str| {
        // Of code, not of tests: `prefix::child` is no sentence.
        p.ends_with(".rs") || p.ends_with(".py") || function.split('_').count() >= 3
    };
    let counts = place.map_or(!whole || function.split('_').count() >= 6, is_place);
    (is_name && !function.is_empty() && counts).then_some(Named { place, function, whole })
}

/// Whether a source file has the test.
fn has(text: &str, python: bool, named: &Named<'_>) -> bool {
    let lines: Vec<&str> = text.lines().collect();
    lines.iter().enumerate().any(|(at, line)| {
        let line = line.trim_start();
        let Some(rest) = line.strip_prefix(if python { "def " } else { "fn " }) else { return false };
        let found = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
        let same = if named.whole { found == named.function } else { found.starts_with(named.function) };
        // Attributes stand right above it.
        let above = lines[..at].iter().rev().map(|l| l.trim());
        let is_test = python || above.take_while(|l| l.starts_with('#')).any(|l| l == "#[test]");
        same && is_test
    })
}

fn exists(sources: &BTreeMap<PathBuf, String>, named: &Named<'_>) -> bool {
    sources.iter().any(|(path, text)| {
        let right_place = match named.place {
            None => true,
            Some(place) if place.contains('/') => path == Path::new(place),
            // A module's last name is its file's, or its directory's.
            Some(place) => {
                let last = place.rsplit("::").next().unwrap_or(place);
                let stem = path.file_stem().is_some_and(|s| s == last);
                stem || path.parent().is_some_and(|p| p.ends_with(last)) || path.ends_with(last)
            }
        };
        right_place && has(text, path.extension().is_some_and(|e| e == "py"), named)
    })
}

#[test]
fn every_test_that_a_document_names_is_a_test_that_exists() {
    let sources = sources();
    for document in ["docs/faults.md", "docs/faults-llama.md", "docs/npu.md"] {
        let text = read(document);
        let all: Vec<_> = quoted(&text).into_iter().filter_map(named).collect();
        assert!(all.len() >= 5, "{document} names {} tests: is it read right?", all.len());
        let missing: Vec<_> = all.iter().filter(|n| !exists(&sources, n)).collect();
        assert!(missing.is_empty(), "{document} names tests that are not there: {missing:#?}");
    }
}

#[test]
fn every_check_of_llama_that_its_document_names_is_there() {
    let text = read("docs/faults-llama.md");
    let checks = read("scripts/llama.d/prove.py");
    let others = checks.clone() + &read("scripts/llama");
    let italics: Vec<&str> = text.split('*').skip(1).step_by(2).filter(|s| !s.contains(' ')).collect();
    assert!(italics.len() > 20, "{italics:?}");
    let missing: Vec<_> = italics.iter().filter(|name| !others.contains(&format!("def {name}("))).collect();
    assert!(
        missing.is_empty(),
        "docs/faults-llama.md names checks that scripts/llama does not have: {missing:?}"
    );
}

#[test]
fn every_kind_of_fault_has_a_test_or_a_reason_why_it_cannot_occur() {
    let text = read("docs/faults.md");
    let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| ---")).collect();
    let mut watched = 0;
    for row in &rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let last = cells.last().unwrap();
        // The heads of the tables.
        if ["here", "test"].contains(last) {
            continue;
        }
        let answered = quoted(last).into_iter().any(|span| named(span).is_some());
        let said =
            ["Cannot occur: ", "Open: ", "In [faults-llama.md]"].iter().any(|word| last.starts_with(word));
        assert!(answered || said, "neither a test nor a reason: {row}");
        watched += usize::from(answered);
    }
    assert!(watched > 100, "{watched} rows have a test: is the document read right?");
}

/// The library's modules by their paths, `broker::window::making`; without those that only test.
fn modules(sources: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let name = |path: &PathBuf| {
        let inside = path.strip_prefix("src").ok()?.with_extension("");
        let mut parts: Vec<&str> = inside.iter().filter_map(|part| part.to_str()).collect();
        if parts.last() == Some(&"mod") {
            parts.pop();
        }
        let last = *parts.last()?;
        let is_module = parts[0] != "bin" && !["lib", "tests"].contains(&last) && !last.ends_with("_test");
        is_module.then(|| parts.join("::"))
    };
    sources.keys().filter_map(name).collect()
}

#[test]
fn every_module_is_in_the_table_of_rooms_and_every_room_is_there() {
    let text = read("docs/architecture.md");
    let table = text.split("## Rooms").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("the rooms");
    let rows =
        table.lines().filter_map(|line| line.strip_prefix("| ")).filter_map(|row| row.split(" | ").next());
    let named: Vec<&str> = rows.flat_map(quoted).collect();
    let modules = modules(&sources());
    assert!(named.len() > 60 && modules.len() > 60, "{} named, {} there", named.len(), modules.len());
    // In brackets, or behind a module of the same room, the last part of a name is enough.
    let means = |name: &str, module: &str| {
        module == name || (!name.contains("::") && module.rsplit("::").next() == Some(name))
    };
    let missing: Vec<_> = modules.iter().filter(|m| !named.iter().any(|n| means(n, m))).collect();
    assert!(missing.is_empty(), "docs/architecture.md does not name {missing:?}");
    let is_there = |name: &str| modules.iter().any(|m| means(name, m)) || root().join(name).is_dir();
    let gone: Vec<_> = named.iter().filter(|n| !is_there(n)).collect();
    assert!(gone.is_empty(), "docs/architecture.md names {gone:?}, which are not there");
}

/// What a document says is in a file: "`Pool::take` (pool/choose.rs)" gives `take` and the file.
fn placed(text: &str) -> Vec<(String, String)> {
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for (at, _) in flat.match_indices("` (") {
        let inside = flat[at + 3..].split(')').next().unwrap_or_default();
        let named = flat[..at].rsplit('`').next().unwrap_or_default();
        let name = named.split('(').next().and_then(|n| n.rsplit("::").next()).unwrap_or_default();
        if inside.ends_with(".rs") && !inside.contains(' ') {
            found.push((name.to_owned(), inside.to_owned()));
        }
    }
    found
}

#[test]
fn the_ways_of_a_grant_and_of_a_fault_go_through_functions_that_are_where_they_are_said_to_be() {
    let sources = sources();
    let all = placed(&read("docs/architecture.md"));
    assert!(all.len() > 12, "{all:?}: is the document read right?");
    let is_there = |(name, file): &&(String, String)| {
        let text = [format!("src/{file}"), file.clone()].into_iter().find_map(|p| sources.get(Path::new(&p)));
        let begins = |line: &str, word: &str| {
            let rest = line.split_once(&format!("{word} {name}")).map(|(_, rest)| rest);
            rest.is_some_and(|r| !r.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
        };
        text.is_some_and(|t| t.lines().any(|l| begins(l, "fn") || begins(l, "struct") || begins(l, "enum")))
    };
    let gone: Vec<_> = all.iter().filter(|placed| !is_there(placed)).collect();
    assert!(gone.is_empty(), "docs/architecture.md says that these are there, and they are not: {gone:?}");
    let wrong = ("take".to_owned(), "pool/life.rs".to_owned());
    assert!(!is_there(&&wrong), "it is noticed");
}

#[test]
fn what_a_document_says_of_a_test_that_is_not_there_is_noticed() {
    let sources = sources();
    let gone = |span: &str| named(span).is_some_and(|n| !exists(&sources, &n));
    assert!(gone("a_test_that_nobody_has_ever_written"));
    assert!(gone("tests/docs.rs::a_test_that_nobody_has_ever_written"));
    // It is there, but elsewhere; it is there, but no test; its beginning is none.
    assert!(gone("tests/plan.rs::every_kind_of_fault_has_a_test_or_a_reason_why_it_cannot_occur"));
    assert!(gone("tests/docs.rs::quoted"));
    assert!(gone("every_sort_of_fault_..."));
    assert!(!gone("every_kind_of_fault_..."));
    assert!(!gone("docs::every_kind_of_fault_has_a_test_or_a_reason_why_it_cannot_occur"));
    assert_eq!(named("memory_order"), None);
    assert_eq!(named("prefix::child"), None);
}
