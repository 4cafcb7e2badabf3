//! `kvbctl` against sockets at which no broker answers, or none of this version.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Somebody who answers every connection in the same way.
struct Impostor {
    dir: tempfile::TempDir,
}

impl Impostor {
    fn new(answer: impl Fn(UnixStream) + Send + Sync + Copy + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("admin.sock")).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut line = String::new();
                    if BufReader::new(&stream).read_line(&mut line).is_ok() {
                        answer(stream);
                    }
                });
            }
        });
        Impostor { dir }
    }

    fn says(text: &'static str) -> Self {
        Impostor::new(move |mut stream| _ = stream.write_all(text.as_bytes()))
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("admin.sock")
    }

    fn command(&self, args: &[&str]) -> Command {
        let (options, program) = match args.iter().position(|a| *a == "--") {
            Some(at) => args.split_at(at),
            None => (args, &[][..]),
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbctl"));
        command.args(options).arg("--socket").arg(self.socket()).args(program).stdin(Stdio::null());
        // An address space in which an answer without end ends the test, not the machine.
        limit_memory(&mut command);
        command
    }

    /// Exit code, standard output and standard error.
    fn ask(&self, args: &[&str]) -> (Option<i32>, String, String) {
        told(self.command(args).output().unwrap())
    }
}

fn told(output: Output) -> (Option<i32>, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn limit_memory(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: setrlimit may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 1 << 30, rlim_max: 1 << 30 };
            match libc::setrlimit(libc::RLIMIT_AS, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
}

/// Every verb that asks the broker.
const VERBS: [&[&str]; 19] = [
    &["status"],
    &["sessions"],
    &["map"],
    &["limits"],
    &["limits", "7", "--priority", "3"],
    &["unpin", "all"],
    &["save"],
    &["load"],
    &["tenants"],
    &["prefixes"],
    &["evict", "3"],
    &["drain"],
    &["drain", "--off"],
    &["events"],
    &["top"],
    &["metrics"],
    &["check"],
    &["fsck"],
    &["hold", "1M", "--", "true"],
];

#[test]
fn an_answer_without_what_was_asked_for_is_none() {
    for nothing in ["{}\n", "null\n", "[]\n", "7\n", "{\"error\": 5}\n", "half", "{\"draining\": 1}\n"] {
        let impostor = Impostor::says(nothing);
        for verb in VERBS {
            // A list of no sessions is one.
            if nothing == "[]\n" && verb == ["sessions"] {
                continue;
            }
            for json in [false, true] {
                let mut args = verb.to_vec();
                if json && verb[0] != "hold" {
                    args.push("--json");
                }
                let (code, out, err) = impostor.ask(&args);
                assert_eq!((code, out.as_str()), (Some(1), ""), "{args:?} of {nothing:?}: {err}");
                assert!(err.contains("not what a broker of this version says"), "{args:?}: {err}");
            }
        }
    }
    // The opposite of what was asked for is no answer either.
    let impostor = Impostor::says("{\"draining\": false, \"sessions\": 0, \"clients\": 0}\n");
    assert_eq!(impostor.ask(&["drain"]).0, Some(1));
    assert_eq!(impostor.ask(&["drain", "--off"]).0, Some(0));
}

#[test]
fn an_answer_without_end_is_cut_off() {
    let flood = Impostor::new(|mut stream| {
        let mut some = b"{\"a\": \"".to_vec();
        while stream.write_all(&some).is_ok() {
            some = vec![b'x'; 1 << 16];
        }
    });
    for verb in [&["status"][..], &["metrics"], &["events"], &["hold", "1M", "--", "true"]] {
        let (code, out, err) = flood.ask(verb);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{verb:?}: {err}");
        assert!(err.contains("longer than 64 MiB"), "{verb:?}: {err}");
    }
}

#[test]
fn who_answers_byte_by_byte_or_never_is_given_up_and_what_was_to_be_changed_is_left_open() {
    let drips = Impostor::new(|mut stream| {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let silent = Impostor::new(|stream| {
        // Until the other end is closed.
        let _ = BufReader::new(&stream).read_line(&mut String::new());
    });
    let verbs = [
        (&["status"][..], false),
        (&["events"], false),
        (&["drain"], true),
        (&["limits", "7", "--priority", "3"], true),
    ];
    for impostor in [&drips, &silent] {
        let running = verbs.map(|(verb, changes)| {
            let mut command = impostor.command(verb);
            let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            (verb, changes, child)
        });
        for (verb, changes, child) in running {
            let (code, out, err) = told(child.wait_with_output().unwrap());
            assert_eq!((code, out.as_str()), (Some(3), ""), "{verb:?}: {err}");
            assert!(err.contains("it has not answered within 5 s"), "{verb:?}: {err}");
            assert_eq!(err.contains("may still be when it goes on"), changes, "{verb:?}: {err}");
        }
    }
}

#[test]
fn texts_of_the_answer_play_no_tricks_on_the_terminal() {
    let error = r#"{"error": "\u001b[31mred\u0007\nkvbctl: all is well\u202e"}"#;
    let (code, _, err) = Impostor::says(error).ask(&["drain"]);
    assert_eq!((code, err.as_str()), (Some(1), "kvbctl: ?[31mred??kvbctl: all is well?\n"));
    let (code, _, err) = Impostor::says(error).ask(&["hold", "1M", "--", "true"]);
    assert_eq!((code, err.as_str()), (Some(1), "kvbctl: ?[31mred??kvbctl: all is well?\n"));
    let (_, _, err) = Impostor::says(r#"{"draining": true, "sessions": "\u001b[31m"}"#).ask(&["drain"]);
    assert!(!err.contains('\u{1b}'), "{err:?}");
    let pins = r#"{"unpinned": [{"chain": "\u001b[2J", "uid": 1, "pid": 2, "label": "", "blocks": 3, "tokens": 4}]}"#;
    let (code, out, err) = Impostor::says(pins).ask(&["unpin", "all"]);
    assert_eq!((code, out.as_str()), (Some(0), "?[2J of uid 1: 3 blocks\n"), "{err}");
    let event = "{\"event\": \"new\", \"kind\": \"session\", \"id\": \"\\u001b[2J\", \"is\": {\"\\u001b\": \"\\n\"}}\n";
    let (_, out, _) = Impostor::says(event).ask(&["events"]);
    assert!(out.contains("?[2J") && !out.contains('\u{1b}') && out.lines().count() == 1, "{out:?}");
    let (_, out, _) = Impostor::says("a 1\u{1b}[2J\n# EOF\n").ask(&["metrics"]);
    assert_eq!(out, "a 1?[2J\n# EOF\n");
}

#[test]
fn events_end_when_nobody_reads_them_any_more() {
    let quiet = Impostor::new(|mut stream| {
        let _ = stream.write_all(b"{\"event\": \"complete\", \"objects\": 0}\n");
        let _ = BufReader::new(&stream).read_line(&mut String::new());
    });
    let mut child = quiet.command(&["events"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("that is all, 0 objects"), "{line}");
    // The pipe is closed now, and nothing more happens.
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn help_that_cannot_be_written_is_no_success() {
    for program in [env!("CARGO_BIN_EXE_kvbctl"), env!("CARGO_BIN_EXE_kvbrokerd")] {
        for option in ["--help", "--version"] {
            let full = File::options().write(true).open("/dev/full").unwrap();
            let output = Command::new(program).arg(option).stdout(full).output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{program} {option}");
            let err = String::from_utf8(output.stderr).unwrap();
            assert!(err.contains("cannot write the answer"), "{err}");
            let output = Command::new(program).arg(option).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{program} {option}");
        }
        assert_eq!(Command::new(program).arg("--nonsense").output().unwrap().status.code(), Some(2));
    }
}
