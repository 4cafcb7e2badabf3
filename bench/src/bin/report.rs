//! Collects the figures of a run: reads them line by line, writes them as one JSON array to the file named by its
//! argument, and shows them as a table.

use std::io::BufRead;

use kvbroker_bench::{Cmp, Figure};

fn main() {
    let path = std::env::args().nth(1).expect("usage: report RESULTS.json < figures");
    let mut figures = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("figures on standard input");
        figures.push(
            serde_json::from_str::<Figure>(&line).unwrap_or_else(|e| panic!("not a figure ({e}): {line}")),
        );
    }
    let json = serde_json::to_string_pretty(&figures).expect("figures are plain data");
    std::fs::write(&path, json + "\n").unwrap_or_else(|e| panic!("cannot write {path}: {e}"));

    let width = figures.iter().map(|f| f.name.len()).max().unwrap_or(0);
    println!("{:width$}  {:>14}  {:12}  {:>9}  {:8}  note", "figure", "value", "unit", "bar", "verdict");
    for f in &figures {
        let bar = f
            .bar
            .map_or(String::new(), |bar| format!("{} {bar}", if f.cmp == Cmp::AtMost { "<=" } else { ">=" }));
        let verdict = match f.met() {
            Some(true) => "kept",
            Some(false) => "missed",
            None => "",
        };
        let value =
            if f.value.abs() >= 1000.0 { format!("{:.0}", f.value) } else { format!("{:.4}", f.value) };
        println!("{:width$}  {value:>14}  {:12}  {bar:>9}  {verdict:8}  {}", f.name, f.unit, f.note);
    }
    let missed = figures.iter().filter(|f| f.met() == Some(false)).count();
    let promised = figures.iter().filter(|f| f.bar.is_some()).count();
    println!("\n{} of {promised} promises kept; written to {path}", promised - missed);
}
