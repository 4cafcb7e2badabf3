//! Writes the seeds of a target into a directory, one file each: where libFuzzer begins.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(name), Some(directory)) = (arguments.next(), arguments.next().map(PathBuf::from)) else {
        eprintln!("usage: seeds TARGET DIRECTORY");
        return ExitCode::from(2);
    };
    let Some(target) = kvbroker_fuzz::TARGETS.iter().find(|t| t.name == name) else {
        let names: Vec<_> = kvbroker_fuzz::TARGETS.iter().map(|t| t.name).collect();
        eprintln!("there is no target {name}; the targets are: {}", names.join(" "));
        return ExitCode::from(2);
    };
    for (number, seed) in (target.seeds)().iter().enumerate() {
        if let Err(error) = std::fs::write(directory.join(format!("seed-{number}")), seed) {
            eprintln!("{}: {error}", directory.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
