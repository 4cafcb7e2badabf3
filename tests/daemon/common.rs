//! Prompts that one tenant pins and others read: what the configuration names is shared, and only that.

use nix::sys::signal::Signal;

use crate::support::{BLOCK, CONFIG, Daemon, Helper, PER_BLOCK, POOL, Place, until};

/// Pins a prompt; may read it; is named by nothing.
const DONOR: u32 = 4001;
const READER: u32 = 4002;
const STRANGER: u32 = 4003;
const TOKENS: usize = 3 * PER_BLOCK;

/// The label of a helper's pin: the name of its program, which is this one.
fn program() -> String {
    std::env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().into()
}

fn rule() -> String {
    rule_of(DONOR)
}

fn rule_of(uid: u32) -> String {
    format!("[[prefix.common]]\nuid = {uid}\nlabel = \"{}\"\ntenants = [{READER}]\n", program())
}

fn start() -> Daemon {
    Place::new(&format!("{CONFIG}{}", rule())).start()
}

/// A process of the donor that has pinned the prompt, filled with `who`.
fn donor(daemon: &Daemon, who: u8) -> Helper {
    let mut a = daemon.helper(DONOR);
    a.must("open");
    a.must(&format!("ensure 0 {}", TOKENS + 1));
    a.must(&format!("fill 0 0 {TOKENS} {who}"));
    a.must(&format!("seal 0 {TOKENS}"));
    a.must(&format!("pin 0 {TOKENS}"));
    a
}

fn common(daemon: &Daemon) -> Vec<serde_json::Value> {
    daemon.admin("prefixes")["common"].as_array().unwrap().clone()
}

fn is_shared(daemon: &Daemon) -> bool {
    common(daemon).iter().any(|c| c["state"] == "shared")
}

/// So many tokens of the prompt are found by a new process of `uid`, in its first session.
fn finds(daemon: &Daemon, uid: u32, tokens: usize) -> Helper {
    let mut c = daemon.helper(uid);
    c.must("open");
    assert_eq!(c.say(&format!("attach 0 {}", TOKENS + 1)), tokens.to_string(), "{}", daemon.place.log());
    c
}

#[test]
fn a_prompt_that_the_configuration_names_is_found_by_the_tenants_named_and_by_nobody_else() {
    let mut daemon = start();
    let _a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let before = daemon.ledger();
    let mut b = finds(&daemon, READER, TOKENS);
    b.must(&format!("holds 0 0 {TOKENS} 5"));
    assert_eq!(daemon.ledger(), before, "a copy is no block of the pool");
    drop(finds(&daemon, STRANGER, 0));
    // The rule has one direction.
    let mut more = daemon.helper(READER);
    more.must("open");
    more.must("ensure 0 64");
    more.must("fill 0 0 64 9");
    more.must("seal 0 64");
    more.must("pin 0 64");
    let shown = common(&daemon);
    assert_eq!(shown.len(), 1, "{shown:?}");
    assert_eq!((&shown[0]["uid"], &shown[0]["blocks"]), (&DONOR.into(), &3.into()));
    assert_eq!((&shown[0]["readers"][0], &shown[0]["connections"]), (&READER.into(), &1.into()));
    assert_eq!(daemon.admin("status")["common_bytes"], 3 * BLOCK);
    let report = daemon.admin("prefixes");
    assert_eq!((&report["common_bytes"], &report["common_hits"]), (&(3 * BLOCK).into(), &3.into()));
    daemon.lives();
}

#[test]
fn who_writes_behind_or_in_a_common_prompt_writes_in_blocks_of_his_own() {
    let mut daemon = start();
    let mut a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let mut b = finds(&daemon, READER, TOKENS);
    // Behind it: own blocks, sealed after it, found by the next one of this tenant as one prompt.
    b.must("ensure 0 80");
    b.must(&format!("fill 0 {TOKENS} 80 9"));
    b.must("seal 0 80");
    let mut twin = daemon.helper(READER);
    twin.must("open");
    assert_eq!(twin.say("attach 0 81"), "80");
    twin.must(&format!("holds 0 0 {TOKENS} 5"));
    twin.must(&format!("holds 0 {TOKENS} 80 9"));
    // In it: a copy of his own.
    assert!(b.say("fill 0 0 16 7").contains("make it writable first"));
    b.must("writable 0 0 20");
    b.must("fill 0 0 32 7");
    b.must("holds 0 0 32 7");
    b.must(&format!("holds 0 32 {TOKENS} 5"));
    twin.must(&format!("holds 0 0 {TOKENS} 5"));
    a.must(&format!("holds 0 0 {TOKENS} 5"));
    // Sealed anew, with a common block between blocks of his own: that one's name stays its donor's.
    b.must("seal 0 80");
    assert_eq!(daemon.admin("check")["ok"], true, "{}", daemon.place.log());
    daemon.helper(STRANGER).must("open");
    // Fork, trim, pin and close work on it as on any sealed block; a pin keeps what is his own.
    twin.must("pin 0 80");
    let pinned = daemon.account("pinned");
    assert_eq!(pinned, 5 * BLOCK, "3 of the donor and 2 of his own");
    twin.must("trim 0 20");
    twin.must("ensure 0 40");
    twin.must("fill 0 20 40 3");
    twin.must("holds 0 0 20 5");
    twin.must("close 0");
    b.must("close 0");
    daemon.lives();
}

#[test]
fn nobody_can_write_in_what_is_common_by_mmap_mprotect_or_another_descriptor() {
    let daemon = start();
    let mut a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let mut b = finds(&daemon, READER, TOKENS);
    assert_eq!(b.say("attack"), "1");
    // Nor can the donor, whose own mapping stays writable: it is another memory.
    assert_eq!(a.say("attack"), "0");
    a.must("spoil 0 0");
    b.must(&format!("holds 0 0 {TOKENS} 5"));
    finds(&daemon, READER, TOKENS).must(&format!("holds 0 0 {TOKENS} 5"));
}

#[test]
fn a_donor_that_goes_on_writing_after_the_seal_is_found_out_before_anything_is_common() {
    let mut daemon = start();
    let mut a = daemon.helper(DONOR);
    a.must("open");
    a.must(&format!("ensure 0 {TOKENS}"));
    a.must(&format!("fill 0 0 {TOKENS} 5"));
    a.must(&format!("seal 0 {TOKENS}"));
    // Its checksums are known when a check has compared them.
    daemon.admin("fsck start");
    until("the check is through", || daemon.admin("fsck")["running"] == false);
    a.must("spoil 0 16");
    a.must(&format!("pin 0 {TOKENS}"));
    until("it is found", || daemon.admin("status")["counters"]["damaged"] == 1);
    assert_eq!(a.say("damaged 0"), "16");
    until("it is pinned no more", || common(&daemon).is_empty());
    assert_eq!(daemon.account("pinned"), 0);
    drop(finds(&daemon, READER, 0));
    assert!(daemon.place.log().contains("is not what was sealed"), "{}", daemon.place.log());
    daemon.lives();
}

#[test]
fn what_is_unpinned_stays_with_who_reads_it_is_found_by_nobody_more_and_goes_with_the_last_reader() {
    let mut daemon = start();
    let mut a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let mut b = finds(&daemon, READER, TOKENS);
    let mut killed = finds(&daemon, READER, TOKENS);
    a.must(&format!("unpin 0 {TOKENS}"));
    let state = |daemon: &Daemon| common(daemon).first().map(|c| c["state"].clone());
    assert_eq!(state(&daemon), Some("retired".into()));
    b.must(&format!("holds 0 0 {TOKENS} 5"));
    b.must("open");
    assert_eq!(b.say(&format!("attach 1 {}", TOKENS + 1)), "0");
    killed.kill();
    until("one has it", || common(&daemon)[0]["connections"] == 1);
    b.must("close 0");
    until("it is given back", || {
        b.must("poll");
        state(&daemon).is_none()
    });
    assert_eq!(b.say("attack"), "0", "its descriptor is closed");
    // Pinned anew, it is copied anew.
    a.must(&format!("pin 0 {TOKENS}"));
    until("it is copied again", || is_shared(&daemon));
    assert_eq!(b.say(&format!("attach 1 {}", TOKENS + 1)), TOKENS.to_string());
    b.must(&format!("holds 1 0 {TOKENS} 5"));
    daemon.lives();
}

#[test]
fn a_copy_beyond_the_bound_is_not_made_and_that_is_said() {
    // Two extents of four blocks.
    let config = format!("{CONFIG}{}[prefix]\ncommon-limit = \"128K\"\n", rule());
    let mut daemon = Place::new(&config).start();
    let mut a = daemon.helper(DONOR);
    a.must("open");
    a.must("ensure 0 80");
    a.must("fill 0 0 80 5");
    a.must("seal 0 80");
    a.must("pin 0 80");
    until("it is refused", || common(&daemon).iter().any(|c| c["state"] == "refused"));
    assert!(common(&daemon)[0]["why"].as_str().unwrap().contains("prefix.common-limit"));
    drop(finds(&daemon, READER, 0));
    a.must("unpin 0 80");
    a.must(&format!("pin 0 {TOKENS}"));
    until("the shorter one is copied", || is_shared(&daemon));
    drop(finds(&daemon, READER, TOKENS));
    daemon.lives();
}

#[test]
fn after_a_restart_a_stored_prompt_is_common_before_the_first_look_up_is_answered() {
    let place = Place::new(CONFIG);
    let store = format!("[prefix.store]\ndirectory = {:?}\n", place.path("prefixes"));
    std::fs::write(place.path("kvbroker.toml"), format!("{CONFIG}{store}{}", rule())).unwrap();
    let mut daemon = place.start();
    drop(donor(&daemon, 5));
    until("it is copied", || is_shared(&daemon));
    assert_eq!(daemon.admin("save")["prefixes"][0]["outcome"], "saved");
    daemon.signal(Signal::SIGKILL);
    daemon.child = daemon.place.command().spawn().unwrap();
    until("the next daemon serves", || daemon.try_admin("check").is_some());
    let mut b = finds(&daemon, READER, TOKENS);
    b.must(&format!("holds 0 0 {TOKENS} 5"));
    assert_eq!(daemon.account("pinned"), 3 * BLOCK);
    assert_eq!(daemon.account("free") + daemon.account("pinned") + daemon.account("stranded"), POOL);
    daemon.lives();
}

#[test]
fn a_rule_that_cannot_be_kept_ends_the_start_with_code_2_and_words() {
    for (text, words) in [
        (format!("[pool]\nbackend = \"dma-heap\"\n{}", rule()), "cannot be handed out for reading only"),
        (rule().replace(&program(), ""), "name the prompts"),
        (rule().replace(&READER.to_string(), &DONOR.to_string()), "beside the one who pins it"),
        (
            format!("{}limit = \"512K\"\n{}limit = \"256K\"\n", rule(), rule()),
            "another rule of this uid has another limit",
        ),
        (format!("{CONFIG}{}limit = \"2M\"\n", rule()), "more than the 256K of prefix.common-limit"),
        (
            format!("{CONFIG}{}limit = \"256K\"\n{}", rule(), rule_of(STRANGER)),
            "uid 4003: its part of prefix.common-limit",
        ),
        ("[prefix]\ncommon-limit = \"1M\"\n".into(), "no [[prefix.common]]"),
        (format!("{}[prefix]\ncommon-limit = \"1M\"\n", rule()), "copies are counted in whole extents"),
    ] {
        let (code, log) = Place::new(&text).fails();
        assert_eq!((code, log.contains(words)), (Some(2), true), "{text}: {log}");
    }
}

fn state(daemon: &Daemon) -> String {
    common(daemon).first().map_or("gone".into(), |c| c["state"].as_str().unwrap().into())
}

fn common_bytes(daemon: &Daemon) -> u64 {
    daemon.admin("status")["common_bytes"].as_u64().unwrap()
}

#[test]
fn a_copy_counts_until_nobody_has_it_open_whatever_its_reader_says() {
    for what in ["keep", "keep-mapping"] {
        let mut daemon = start();
        let mut a = donor(&daemon, 5);
        until("it is copied", || is_shared(&daemon));
        let mut b = finds(&daemon, READER, TOKENS);
        assert_eq!(b.say(what), "1", "three blocks are in one extent");
        a.must(&format!("unpin 0 {TOKENS}"));
        assert_eq!((state(&daemon), common_bytes(&daemon)), ("retired".into(), 3 * BLOCK));
        b.must("close 0");
        // The library says that it has given it back; this process has not.
        until("it says so", || {
            b.must("poll");
            state(&daemon) != "retired"
        });
        assert_eq!((state(&daemon), common_bytes(&daemon)), ("kept".into(), 3 * BLOCK), "{what}");
        assert_eq!(daemon.admin("prefixes")["common_donors"][0]["extents"], 1);
        until("it is said", || daemon.place.log().contains("somebody has it open still"));
        b.must("let-go");
        until("it is gone", || state(&daemon) == "gone");
        assert_eq!(common_bytes(&daemon), 0);
        daemon.lives();
    }
}

#[test]
fn a_copy_goes_with_the_process_that_kept_it() {
    let mut daemon = start();
    let mut a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let mut b = finds(&daemon, READER, TOKENS);
    assert_eq!(b.say("keep"), "1");
    a.must(&format!("unpin 0 {TOKENS}"));
    b.must("close 0");
    until("it says that it has given it back", || {
        b.must("poll");
        state(&daemon) == "kept"
    });
    b.kill();
    until("it is gone", || state(&daemon) == "gone");
    daemon.lives();
}

#[test]
fn who_keeps_the_inode_of_a_copy_keeps_nothing_that_is_in_it() {
    let daemon = start();
    let mut a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let mut b = finds(&daemon, READER, TOKENS);
    assert_eq!(b.say("keep-inode"), "1");
    assert_eq!(b.say("kept-bytes"), (3 * BLOCK).to_string());
    a.must(&format!("unpin 0 {TOKENS}"));
    b.must("close 0");
    until("it is gone", || {
        b.must("poll");
        state(&daemon) == "gone"
    });
    assert_eq!(b.say("kept-bytes"), "0");
}

#[test]
fn a_donor_and_a_reader_together_have_no_more_memory_than_the_donors_part_however_often_it_is_pinned_anew() {
    // Two extents for two donors.
    let config = format!("{CONFIG}{}{}[prefix]\ncommon-limit = \"256K\"\n", rule(), rule_of(STRANGER));
    let mut daemon = Place::new(&config).start();
    let mut a = donor(&daemon, 5);
    until("it is copied", || is_shared(&daemon));
    let mut b = finds(&daemon, READER, TOKENS);
    assert_eq!(b.say("keep"), "1");
    b.must("close 0");
    for _ in 0..3 {
        a.must(&format!("unpin 0 {TOKENS}"));
        until("it is given back, says the reader", || {
            b.must("poll");
            common(&daemon).iter().all(|c| c["state"] == "kept")
        });
        a.must(&format!("pin 0 {TOKENS}"));
        until("it is refused", || common(&daemon).iter().any(|c| c["state"] == "refused"));
        assert_eq!(common_bytes(&daemon), 3 * BLOCK);
    }
    // The other donor has its part all the same.
    let mut other = daemon.helper(STRANGER);
    other.must("open");
    other.must("ensure 0 17");
    other.must("fill 0 0 16 6");
    other.must("seal 0 16");
    other.must("pin 0 16");
    until("it is copied", || common(&daemon).iter().any(|c| c["state"] == "shared" && c["uid"] == STRANGER));
    // And this one has its own again when the reader has let go.
    b.must("let-go");
    until("it is copied", || common(&daemon).iter().all(|c| c["state"] == "shared"));
    daemon.lives();
}

#[test]
fn a_longer_prompt_that_continues_a_common_one_is_copied_from_where_that_one_ends() {
    let mut daemon = start();
    let mut a = daemon.helper(DONOR);
    a.must("open");
    a.must("ensure 0 80");
    a.must("fill 0 0 80 5");
    a.must("seal 0 80");
    a.must("pin 0 48");
    until("it is copied", || is_shared(&daemon));
    a.must("pin 0 80");
    let all_shared = || common(&daemon).iter().filter(|c| c["state"] == "shared").count() == 2;
    until("so is the longer one", all_shared);
    assert_eq!(common_bytes(&daemon), 5 * BLOCK, "not eight");
    let bytes: u64 = common(&daemon).iter().map(|c| c["bytes"].as_u64().unwrap()).sum();
    assert_eq!(bytes, 5 * BLOCK);
    // A beginning of both is there at no cost.
    a.must("pin 0 16");
    until("all three", || common(&daemon).iter().filter(|c| c["state"] == "shared").count() == 3);
    assert_eq!(common_bytes(&daemon), 5 * BLOCK);
    let finds = |tokens: usize| {
        let mut b = daemon.helper(READER);
        b.must("open");
        assert_eq!(b.say("attach 0 81"), tokens.to_string(), "{}", daemon.place.log());
        b.must(&format!("holds 0 0 {tokens} 5"));
    };
    finds(80);
    // The shorter ones go, and what the longer one needs of them stays.
    a.must("unpin 0 48");
    a.must("unpin 0 16");
    finds(80);
    assert_eq!((common(&daemon).len(), common_bytes(&daemon)), (1, 5 * BLOCK));
    // And the other way round: nothing behind a prompt is found that is pinned no more.
    a.must("pin 0 32");
    a.must("unpin 0 80");
    finds(32);
    a.must("unpin 0 32");
    until("all is gone", || common_bytes(&daemon) == 0);
    daemon.lives();
}

#[test]
fn a_rule_names_whole_segments_of_a_label() {
    // The program's name without its end.
    let name = program();
    let rule = rule().replace(&name, &name[..name.len() - 1]);
    let daemon = Place::new(&format!("{CONFIG}{rule}")).start();
    let _a = donor(&daemon, 5);
    drop(finds(&daemon, READER, 0));
    assert_eq!(common(&daemon).len(), 0);
}
