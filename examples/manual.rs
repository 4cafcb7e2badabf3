//! Man pages and shell completions of `kvbrokerd` and `kvbctl`, made from the programs' own command lines, so that they
//! cannot say anything else than `--help` does. The page of the configuration is the shipped file itself.
//!
//! `cargo run --example manual -- DIRECTORY` writes `man/*.{1,5,8}` and `completions/{bash,zsh,fish}/*`. The date of the
//! pages is that of `SOURCE_DATE_EPOCH` (reproducible-builds.org), or none.

use std::fs;
use std::path::Path;

use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, roman};

#[allow(dead_code, reason = "of the program only its command line is used")]
#[path = "../src/bin/kvbctl.rs"]
mod kvbctl;
#[allow(dead_code, reason = "of the program only its command line is used")]
#[path = "../src/bin/kvbrokerd.rs"]
mod kvbrokerd;

const CONFIGURATION: &str = include_str!("../systemd/kvbroker.toml");
const MANUAL: &str = "kvbroker";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(out) = std::env::args_os().nth(1) else {
        return Err("usage: manual DIRECTORY".into());
    };
    let out = Path::new(&out);
    let date = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => day(seconds.parse()?),
        Err(_) => String::new(),
    };
    write(out, &date)
}

/// Writes all of it below `out`.
pub(crate) fn write(out: &Path, date: &str) -> Result<(), Box<dyn std::error::Error>> {
    let man = out.join("man");
    fs::create_dir_all(&man)?;
    pages(&man, kvbrokerd::command(), "8", date)?;
    pages(&man, kvbctl::command(), "1", date)?;
    fs::write(man.join("kvbroker.toml.5"), configuration(date))?;
    for (shell, name) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
        let directory = out.join("completions").join(name);
        fs::create_dir_all(&directory)?;
        for mut command in [kvbrokerd::command(), kvbctl::command()] {
            let name = command.get_name().to_owned();
            generate_to(shell, &mut command, name, &directory)?;
        }
    }
    Ok(())
}

/// The page of `command`, and one for each command below it: `kvbctl-plan.1`.
fn pages(directory: &Path, mut command: Command, section: &str, date: &str) -> std::io::Result<()> {
    // What comes after `--` is written so in a usage, and not in what the pages make of the arguments themselves.
    if command.get_positionals().any(clap::Arg::is_last_set) {
        let usage = command.render_usage().to_string();
        command = command.override_usage(usage.trim_start_matches("Usage:").trim().to_owned());
    }
    let name = command.get_name().to_owned();
    let version = env!("CARGO_PKG_VERSION");
    let mut page = Vec::new();
    let man = Man::new(command.clone().disable_help_subcommand(true))
        .title(name.to_uppercase())
        .section(section)
        .date(date)
        .source(format!("kvbroker {version}"))
        .manual(MANUAL);
    man.render(&mut page)?;
    // What stands after the options is called EXTRA there, which no manual has.
    let page = String::from_utf8_lossy(&page).replace(".SH EXTRA\n", ".SH NOTES\n");
    fs::write(directory.join(format!("{name}.{section}")), page)?;
    for below in command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        // clap keeps names for ever unless it is built to own strings; this program ends soon.
        let full: &str = format!("{name}-{}", below.get_name()).leak();
        let shown = format!("{name} {}", below.get_name());
        let below = below.clone().name(full).bin_name(shown).version(version);
        pages(directory, below, section, date)?;
    }
    Ok(())
}

/// kvbroker.toml(5): the shipped file, which names and explains every key.
fn configuration(date: &str) -> String {
    let source = format!("kvbroker {}", env!("CARGO_PKG_VERSION"));
    let mut page = Roff::new();
    page.control("TH", ["KVBROKER.TOML", "5", date, &source, MANUAL]);
    let section = |page: &mut Roff, title: &str, text: &str| {
        page.control("SH", [title]);
        page.text([roman(text)]);
    };
    section(&mut page, "NAME", "kvbroker.toml - configuration of kvbrokerd, the KV-cache memory broker");
    section(
        &mut page,
        "DESCRIPTION",
        "/etc/kvbroker/kvbroker.toml is read when kvbrokerd(8) starts. Files /etc/kvbroker/kvbroker.toml.d/*.toml win \
         over it, key by key (tenants by uid, profiles all together), in the order of their names, and the command line \
         over all. \"kvbrokerd --check\" says what a start would take, or which file, key and value are wrong.",
    );
    section(
        &mut page,
        "KEYS",
        "This is the shipped file; every key is in it, with its default or with \"#: \" before it.",
    );
    page.control("PP", []);
    page.control("nf", []);
    for line in CONFIGURATION.lines() {
        page.text([Inline::Roman(line.into())]);
    }
    page.control("fi", []);
    section(&mut page, "SEE ALSO", "kvbrokerd(8), kvbctl(1)");
    page.to_roff()
}

/// The day of a Unix time, in the proleptic Gregorian calendar (H. Hinnant, "chrono-compatible low-level date
/// algorithms": civil_from_days).
fn day(seconds: i64) -> String {
    let days = seconds.div_euclid(86_400) + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}
