//! The man pages, as `examples/manual.rs` writes them.

#[allow(dead_code, reason = "the example's own main is not called here")]
#[path = "../examples/manual.rs"]
mod manual;

fn page(name: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    manual::write(directory.path(), "2026-01-01").unwrap();
    // As a reader sees it: without the fonts.
    let page = std::fs::read_to_string(directory.path().join("man").join(name)).unwrap();
    ["\\fB", "\\fI", "\\fR", "\\"].iter().fold(page, |text, font| text.replace(font, ""))
}

#[test]
fn the_page_of_hold_shows_where_the_command_begins() {
    let page = page("kvbctl-hold.1");
    let synopsis = page.split(".SH SYNOPSIS\n").nth(1).and_then(|rest| rest.split(".SH").next()).unwrap();
    assert!(
        synopsis.starts_with("kvbctl hold ") && synopsis.trim_end().ends_with(" -- <COMMAND>..."),
        "{synopsis}"
    );
}

#[test]
fn pages_of_what_asks_the_broker_name_the_variable_that_says_where_it_is() {
    for name in ["kvbctl-status.1", "kvbctl-hold.1", "kvbctl-save.1", "kvbctl-unpin.1"] {
        let page = page(name);
        assert!(page.contains("KVBROKER_ADMIN_SOCKET"), "{name}: {page}");
    }
}
