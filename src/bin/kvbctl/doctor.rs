//! `kvbctl doctor`: what [`kvbroker::doctor`] found, for people and for scripts.

use std::io::Write;
use std::path::PathBuf;

use kvbroker::doctor::examine;

use super::{Failure, print_json};

pub const EXIT_CODES: &str = "Exit codes:
  0  nothing failed; warnings are a price or a risk, and the broker works
  1  at least one item failed, with --strict also when one warns; or the files could not be read
  2  the command line is wrong

Run it as root: the processes of other users and the heap cannot be read otherwise. It takes one page of the heap for a
moment, to try whether vmsplice can keep it, and changes nothing.
Each item is ok, warn or fail; under a warning and a failure stands what mends it.";

/// The options of `kvbctl doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Examine the board whose files are below this directory: an image that is mounted, or a recorded tree
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// The daemon's configuration [default: /etc/kvbroker/kvbroker.toml below the root]
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// End with 1 on warnings too
    #[arg(long)]
    strict: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub fn run(self, out: &mut impl Write) -> Result<(), Failure> {
        let report = examine(&self.root, self.config.as_deref())
            .map_err(|e| Failure::Refused(format!("{}: {e}", self.root.display())))?;
        match self.json {
            true => print_json(out, &report)?,
            false => write!(out, "{report}")?,
        }
        match report.fail > 0 || (self.strict && report.warn > 0) {
            true => Err(Failure::Unfit),
            false => Ok(()),
        }
    }
}
