//! `kvbrokerd`: the broker's daemon.
//!
//! Owns the command line and the log. Exit codes: 0 after SIGTERM, SIGINT or SIGHUP, 1 when it could not start or serve, 2
//! for a wrong command line or configuration.

#![deny(unsafe_code)]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kvbroker::daemon::{Config, DEFAULT_CONFIG, Overrides, run};
use log::{Level, LevelFilter};

const LOG: &str = "KVBROKER_LOG";
const AFTER: &str = "Exit codes:
  0  stopped by SIGTERM, SIGINT or SIGHUP
  1  it could not start, or could not go on; standard error says why
  2  the command line or the configuration is wrong

KVBROKER_LOG sets what is logged: off, error, warn (the default), info, debug.
Sizes: 256M and 256MiB are 2^28 bytes. A number without unit is refused.";

/// The broker of attention KV-cache memory: takes a pool of memory and hands blocks of it to inference processes.
#[derive(Debug, Parser)]
#[command(name = "kvbrokerd", version, after_help = AFTER)]
struct Cli {
    /// The configuration; files in the directory of this name with .d behind it win over it
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// Read the configuration, say what a start on this machine would take, or what is wrong, and end
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    overrides: Overrides,
}

/// The command line, for whoever writes about it: `examples/manual.rs`.
#[allow(dead_code, reason = "the program itself has no use for it")]
pub(crate) fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(said) if !said.use_stderr() => {
            return answered(said.print().and_then(|()| std::io::stdout().flush()));
        }
        Err(wrong) => wrong.exit(),
    };
    start_log();
    // A broker that has lost its footing must not go on deciding about memory: systemd starts a new one.
    std::panic::set_hook(Box::new(|panic| {
        log::error!("{panic}");
        std::process::abort();
    }));
    let path = cli.config.clone().unwrap_or_else(|| DEFAULT_CONFIG.into());
    let config = match Config::read(&path, cli.config.is_some(), &cli.overrides) {
        Ok(config) => config,
        Err(e) => return complain(&e.to_string(), 2),
    };
    if let Some(doubt) = config.doubt() {
        log::warn!("{doubt}");
    }
    if cli.check {
        return match config.outlook() {
            Ok(outlook) => {
                // Without --config the file may be missing, and then it had better be said that it is.
                let missing = if path.exists() {
                    ""
                } else {
                    "there is no such file, so this is by defaults and drop-ins: "
                };
                say(&format!("{}: {missing}a start would take {outlook}", path.display()))
            }
            Err(e) => complain(&e.to_string(), 2),
        };
    }
    if let Err(e) = config.consistent() {
        return complain(&e.to_string(), 2);
    }
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => complain(&e.to_string(), 1),
    }
}

fn say(answer: &str) -> ExitCode {
    answered(writeln!(std::io::stdout(), "{answer}"))
}

fn answered(written: std::io::Result<()>) -> ExitCode {
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => complain(&format!("cannot write the answer: {e}"), 1),
    }
}

/// Says why the daemon ends: through the log, and past it where the log is off. Nobody should have to turn it on to
/// learn why there is no broker.
fn complain(why: &str, code: u8) -> ExitCode {
    match log::log_enabled!(Level::Error) {
        true => log::error!("{why}"),
        false => eprintln!("kvbrokerd: error: {why}"),
    }
    ExitCode::from(code)
}

/// To standard error; with the priorities that the journal reads when that is where it goes.
fn start_log() {
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let mut builder = env_logger::Builder::new();
    builder.filter_level(LevelFilter::Warn);
    let asked = std::env::var_os(LOG).map(|text| text.to_string_lossy().into_owned());
    let understood = asked.as_deref().is_none_or(is_filter);
    if let Some(filter) = asked.as_deref().filter(|_| understood) {
        builder.parse_filters(filter);
    }
    builder.format(move |out, record| {
        let priority = match record.level() {
            Level::Error => 3,
            Level::Warn => 4,
            Level::Info => 6,
            Level::Debug | Level::Trace => 7,
        };
        match journal {
            true => writeln!(out, "<{priority}>{}", record.args()),
            false => {
                writeln!(out, "kvbrokerd: {}: {}", record.level().as_str().to_lowercase(), record.args())
            }
        }
    });
    builder.init();
    if let Some(filter) = asked.filter(|_| !understood) {
        let filter = kvbroker::quote::plain(&filter);
        log::warn!(
            "{LOG} = \"{filter}\" is no level: use off, error, warn, info or debug; warnings are logged"
        );
    }
}

/// A level, or levels of modules, as env_logger takes them. It takes any other word for the name of a module.
fn is_filter(text: &str) -> bool {
    let level = |part: &str| part.rsplit('=').next().is_some_and(|l| l.trim().parse::<LevelFilter>().is_ok());
    text.is_empty() || text.split(',').all(level)
}
