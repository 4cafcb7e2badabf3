//! `kvbctl`: the operator's tool.
//!
//! Owns the command line: what is asked, how the answer is printed, and the exit codes. Invariant: an answer goes to
//! standard output and a complaint to standard error, and the exit code alone tells a script which it was.

#![deny(unsafe_code)]

#[path = "kvbctl/answer.rs"]
mod answer;
#[path = "kvbctl/doctor.rs"]
mod doctor;
#[path = "kvbctl/events.rs"]
mod events;
#[path = "kvbctl/hold.rs"]
mod hold;
#[path = "kvbctl/live.rs"]
mod live;
#[path = "kvbctl/observe.rs"]
mod observe;
#[path = "kvbctl/plan.rs"]
mod plan;
#[path = "kvbctl/simulate.rs"]
mod simulate;
#[path = "kvbctl/store.rs"]
mod store;
#[path = "kvbctl/top.rs"]
mod top;

use clap::{Parser, Subcommand};
use std::io::{self, Write};
use std::process::ExitCode;

const EXIT_CODES: &str = "Exit codes:
  0  done
  1  the request was refused or failed; standard error says why
  2  the command line is wrong
  3  the broker could not be reached, or did not answer in time; then a change may have been made, or may still be

Sizes: 256M and 256MiB are 2^28 bytes; K, M, G and T are powers of two, B is bytes. A number without unit is refused.";

/// The operator's tool of kvbroker, a broker of attention KV-cache memory.
#[derive(Debug, Parser)]
#[command(name = "kvbctl", version, after_help = EXIT_CODES, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Account for a model's KV cache on a board: geometry, packing, paging against static reservation
    #[command(after_help = EXIT_CODES)]
    Plan(plan::Args),
    /// The pool at a glance: memory, ledger, prefixes, refusals
    #[command(after_help = EXIT_CODES)]
    Status(live::Ask),
    /// Every session: whose it is, its tokens and its blocks
    #[command(after_help = EXIT_CODES)]
    Sessions(live::Ask),
    /// The pool drawn place by place, one letter a block
    #[command(after_help = EXIT_CODES)]
    Map {
        #[command(flatten)]
        ask: live::Ask,
        /// Whether to use colours
        #[arg(long, default_value = "auto")]
        colour: live::Colour,
    },
    /// What each tenant is guaranteed, may have and has; with UID, change it while the broker runs
    #[command(after_help = EXIT_CODES)]
    Limits(live::Limits),
    /// Let pinned prefixes go: those whose names (kvbctl status) begin with CHAIN, or all
    #[command(after_help = EXIT_CODES)]
    Unpin(live::Unpin),
    /// Write pinned prefixes to files, from which every start brings them back
    #[command(after_help = EXIT_CODES)]
    Save(live::Ask),
    /// Bring stored prefixes back that are not in the pool
    #[command(after_help = EXIT_CODES)]
    Load(live::Ask),
    /// What each tenant has, by account, and what it is guaranteed and may have
    #[command(after_help = EXIT_CODES)]
    Tenants(live::Ask),
    /// Every chain of published blocks: whose it is, how long, how much of it is pinned or could be evicted
    #[command(after_help = EXIT_CODES)]
    Prefixes(live::Ask),
    /// Evict cached prefixes that no session holds
    #[command(after_help = EXIT_CODES)]
    Evict(observe::Evict),
    /// Let nothing new begin: sessions that exist go on with what they have, and what was promised to them
    #[command(after_help = EXIT_CODES)]
    Drain(observe::Drain),
    /// The whole state, then each change of it as it happens, until interrupted
    #[command(after_help = EXIT_CODES)]
    Events(live::Ask),
    /// Who uses the pool, live on a terminal once a second (q quits); once where there is none
    #[command(after_help = EXIT_CODES)]
    Top(live::Ask),
    /// The broker's figures for Prometheus: names, types and units in its text format
    #[command(after_help = EXIT_CODES)]
    Metrics(observe::Metrics),
    /// Replay a trace of requests against a pool and a policy, without a broker
    #[command(after_help = EXIT_CODES)]
    Simulate(Box<simulate::Args>),
    /// Have the broker count every byte anew
    #[command(after_help = EXIT_CODES)]
    Check(live::Ask),
    /// Verify the checksum of every sealed block; damaged ones are dropped
    #[command(after_help = EXIT_CODES)]
    Fsck(live::Ask),
    /// Look whether this board is ready, item by item, and say what mends it; needs no running broker
    #[command(after_help = doctor::EXIT_CODES)]
    Doctor(doctor::Args),
    /// Give memory of the pool back to the kernel while a command runs that allocates for itself
    #[command(after_help = hold::EXIT_CODES)]
    Hold(hold::Args),
}

/// Why a command ended without an answer.
#[derive(Debug)]
enum Failure {
    /// Exit code 1, with what to say.
    Refused(String),
    /// Exit code 3, with what to say.
    Unreachable(String),
    /// Exit code 1; what there is to say stands in the answer.
    Unfit,
    /// Standard output cannot be written.
    Output(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Output(error)
    }
}

/// The command line, for whoever writes about it: `examples/manual.rs`.
#[allow(dead_code, reason = "the program itself has no use for it")]
pub(crate) fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // --help and --version are answers like others. A wrong command line ends the process with 2.
        Err(said) if !said.use_stderr() => {
            return end(said.print().and_then(|()| io::stdout().flush()).map_err(Failure::from));
        }
        Err(wrong) => wrong.exit(),
    };
    let mut out = io::stdout().lock();
    let result = match cli.command {
        Command::Hold(args) => {
            // Standard output is the command's.
            drop(out);
            return match args.run() {
                Ok(code) => ExitCode::from(code),
                Err(why) => end(Err(why)),
            };
        }
        Command::Plan(args) => args.run(&mut out),
        Command::Status(ask) => ask.status(&mut out),
        Command::Sessions(ask) => ask.sessions(&mut out),
        Command::Map { ask, colour } => ask.map(colour, &mut out),
        Command::Limits(args) => args.run(&mut out),
        Command::Unpin(args) => args.run(&mut out),
        Command::Save(ask) => store::run(&ask, "save", &mut out),
        Command::Load(ask) => store::run(&ask, "load", &mut out),
        Command::Tenants(ask) => observe::tenants(&ask, &mut out),
        Command::Prefixes(ask) => observe::prefixes(&ask, &mut out),
        Command::Evict(args) => args.run(&mut out),
        Command::Drain(args) => args.run(&mut out),
        Command::Events(ask) => events::run(&ask, &mut out),
        Command::Top(ask) => top::run(&ask, &mut out),
        Command::Metrics(args) => args.run(&mut out),
        Command::Simulate(args) => args.run(&mut out),
        Command::Check(ask) => ask.check(&mut out),
        Command::Fsck(ask) => ask.fsck(&mut out),
        Command::Doctor(args) => args.run(&mut out),
    };
    let flushed = out.flush().map_err(Failure::from);
    end(result.and(flushed))
}

fn end(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Unfit) => ExitCode::from(1),
        // The reader has seen enough, as in `kvbctl ... | head`.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Failure::Output(error)) => complain(&format!("cannot write the answer: {error}"), 1),
        Err(Failure::Refused(why)) => complain(&why, 1),
        Err(Failure::Unreachable(why)) => complain(&why, 3),
    }
}

fn complain(why: &str, code: u8) -> ExitCode {
    // If standard error is gone too, the exit code still says it.
    let _ = writeln!(io::stderr(), "kvbctl: {why}");
    ExitCode::from(code)
}

/// Prints `answer` as one JSON object.
fn print_json(out: &mut impl Write, answer: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(answer).map_err(|e| Failure::Refused(e.to_string()))?;
    Ok(writeln!(out, "{text}")?)
}
