//! The program as a user runs it, with the broker embedded.

use std::process::{Command, Output};

fn infer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_infer"))
        .args(args)
        .env("KVBROKER_BACKEND", "embedded")
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn events(output: &Output) -> Vec<serde_json::Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_answer_comes_on_standard_output_and_its_figures_on_standard_error() {
    let out = infer(&["--prompt", "What does a check valve do?", "--max-tokens", "16"]);
    assert!(out.status.success(), "{out:?}");
    assert!(text(&out.stdout).contains("valve"), "{out:?}");
    let stats = text(&out.stderr);
    assert!(stats.starts_with("prompt 37 tokens, 0 from the shared prefix; first token after"), "{stats}");
    assert!(stats.contains("private") && stats.contains("shared"), "{stats}");
}

#[test]
fn events_are_one_json_object_a_line_and_tell_the_same_answer() {
    let args = ["--prompt", "What does a check valve do?", "--max-tokens", "16"];
    let plain = infer(&args);
    let out = infer(&[&args[..], &["--json-events", "--label", "one"]].concat());
    assert!(out.status.success(), "{out:?}");
    let events = events(&out);
    assert_eq!((&events[0]["event"], &events[0]["prompt_tokens"]), (&"start".into(), &37.into()));
    let done = events.last().unwrap();
    assert_eq!((&done["event"], &done["label"]), (&"done".into(), &"one".into()));
    assert_eq!(done["generated_tokens"], events.len() - 2);
    let tokens = events.iter().filter(|e| e["event"] == "token").map(|e| e["text"].as_str().unwrap());
    assert_eq!(tokens.collect::<String>(), text(&plain.stdout).trim_end_matches('\n'));
}

#[test]
fn a_seed_repeats_its_answer_and_another_gives_another() {
    let run = |seed| {
        let args =
            ["--prompt", "Tell a story.", "--max-tokens", "12", "--temperature", "1.0", "--seed", seed];
        text(&infer(&args).stdout).to_owned()
    };
    let first = run("1");
    assert_eq!(first, run("1"));
    assert_ne!(first, run("2"));
}

#[test]
fn a_context_that_can_never_fit_is_refused_with_exit_code_1() {
    let args = ["--prompt", "Hi", "--context", "8192", "--kv-type", "f32"];
    let out = infer(&args);
    assert_eq!(out.status.code(), Some(1));
    assert!(out.stdout.is_empty() && text(&out.stderr).starts_with("infer: never-fits: "), "{out:?}");
    let out = infer(&[&args[..], &["--json-events"]].concat());
    assert_eq!((out.status.code(), &events(&out)[0]["kind"]), (Some(1), &"never-fits".into()));
}

#[test]
fn without_a_broker_the_message_says_what_to_do() {
    let out = Command::new(env!("CARGO_BIN_EXE_infer"))
        .args(["--prompt", "Hi"])
        .env_remove("KVBROKER_BACKEND")
        .env("KVBROKER_SOCKET", "/nonexistent/kvbroker.sock")
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("KVBROKER_BACKEND=embedded"), "{out:?}");
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_before_it_is_computed() {
    let out = infer(&["--prompt", "Hi", "--context", "16"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("the prompt has 31 tokens and the context 16"), "{out:?}");
}

#[test]
fn a_file_that_is_no_model_is_refused_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "not a model").unwrap();
    let out = infer(&["--model", file.path().to_str().unwrap(), "--prompt", "Hi"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("is no model that this engine can load"), "{out:?}");
}

#[test]
fn numbers_that_make_no_sense_are_wrong_arguments_at_once() {
    for (option, value, words) in [
        ("--threads", "100000", "at most 1024"),
        ("--threads", "0", "at least 1"),
        ("--max-tokens", "0", "at least 1"),
        ("--temperature", "NaN", "0 or a number above it"),
        ("--temperature", "-1", "0 or a number above it"),
        ("--temperature", "inf", "0 or a number above it"),
        ("--temperature", "warm", "invalid float"),
    ] {
        let out = infer(&["--prompt", "Hi", &format!("{option}={value}")]);
        assert_eq!(out.status.code(), Some(2), "{option} {value}: {out:?}");
        assert!(out.stdout.is_empty() && text(&out.stderr).contains(words), "{option} {value}: {out:?}");
    }
}
