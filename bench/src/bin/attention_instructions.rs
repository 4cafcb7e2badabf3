//! Row `attention-instructions`: instructions of a decode step's attention over scattered blocks, against the same
//! kernel over contiguous arrays, counted by valgrind's callgrind.
//!
//! The program runs itself under callgrind, with one step and with three: the difference is two steps and nothing of
//! the set-up. Layers are all alike, so a model of one layer does.

use std::hint::black_box;
use std::process::Command;

use kvbroker::attention::Element;
use kvbroker_bench::kv::{Model, Sequence};
use kvbroker_bench::{at_most, reported};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => count_all(),
        [side, model, tokens, element, steps] => work(side, model, tokens, element, steps),
        _ => panic!("usage: attention_instructions [paged|contiguous MODEL TOKENS f16|f32 STEPS]"),
    }
}

/// The counted program.
fn work(side: &str, model: &str, tokens: &str, element: &str, steps: &str) {
    let model = Model::all().into_iter().find(|m| m.name == model).expect("a model's name");
    let element = if element == "f16" { Element::F16 } else { Element::F32 };
    let mut sequence = Sequence::new(Model { layers: 1, ..model }, element, tokens.parse().expect("tokens"));
    for _ in 0..steps.parse().expect("steps") {
        black_box(match side {
            "paged" => sequence.paged_layer(0),
            "one-run" => sequence.contiguous_layer(0, 1 << 30),
            _ => sequence.contiguous_layer(0, 16),
        });
    }
}

fn count_all() {
    for model in Model::all() {
        for tokens in [512, 2048] {
            for element in ["f16", "f32"] {
                let step = |side| {
                    let count = |steps| count([side, model.name, &tokens.to_string(), element, steps]);
                    (count("3") - count("1")) / 2.0
                };
                let [paged, blocks, one_run] = ["paged", "contiguous", "one-run"].map(step);
                let name = |what| format!("attention-instructions/{what}-{}-{tokens}-{element}", model.name);
                let note = model.describe();
                at_most(
                    name("ratio"),
                    paged / blocks,
                    1.01,
                    format!("paged / contiguous walked in blocks of 16; {note}"),
                );
                reported(
                    name("ratio-one-run"),
                    paged / one_run,
                    "x",
                    format!("paged / contiguous walked in one run; {note}"),
                );
                reported(
                    name("layer"),
                    paged,
                    "instructions",
                    format!("paged, one layer of a decode step; {note}"),
                );
                let added = paged - blocks;
                reported(
                    name("addressing"),
                    added,
                    "instructions",
                    format!("paged - contiguous in blocks, one layer; {note}"),
                );
            }
        }
    }
}

/// Instructions of a whole run of this program.
fn count(arguments: [&str; 5]) -> f64 {
    let program = std::env::current_exe().expect("the program's own path");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(arguments)
        .output()
        .expect("valgrind runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "valgrind failed: {said}");
    let collected = said.lines().find_map(|line| line.split("Collected :").nth(1));
    collected.and_then(|n| n.trim().parse().ok()).unwrap_or_else(|| panic!("no count from valgrind: {said}"))
}
