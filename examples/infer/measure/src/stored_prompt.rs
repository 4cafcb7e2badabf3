//! Row `stored-prompt`: the time from the start of the broker to the first token of an answer, when the system prompt is
//! stored (`[prefix.store]`) and when it is not.
//!
//! A daemon of its own for each round, over the same directory: the prompt's KV comes from its file before the engine's
//! look-up is answered, or is computed. The engine has loaded its weights already, on both sides: that takes as long
//! with a broker as without one.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use infer::kv::Broker;
use infer::load::{Loaded, cached_smollm2, load};
use infer::weights::Precision;
use kvbroker::client::{Client, ClientOptions};

use crate::figure::{at_most, reported};
use crate::first_token::compute;
use crate::sequence;

/// The stored prompt: 8 whole blocks of SmolLM2's 32 tokens.
const STORED: usize = 256;
/// The whole prompt: with a question of 16 tokens.
const PROMPT: usize = STORED + 16;
const ROUNDS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(20);

/// Prints the row's figures.
pub fn run() -> Result<()> {
    let loaded = load(&cached_smollm2()?, Precision::File)?;
    let text = loaded.text.encode(include_str!("../../prompts/system.txt"))?;
    let ids: Vec<u32> = text.iter().copied().cycle().take(PROMPT).collect();
    let directory = tempfile::tempdir()?;
    // What is to be found later.
    {
        let daemon = Daemon::start(directory.path(), true)?;
        let mut kv = open(&loaded, &daemon.client()?)?;
        compute(&loaded, &mut kv, &ids[..STORED], 0)?;
        ensure!(kv.seal(&ids[..STORED])? == STORED, "the prompt is not whole blocks");
        kv.pin(STORED)?;
        let said = daemon.ask("save")?;
        ensure!(said.contains("\"saved\""), "the prompt is not saved: {said}");
    }
    let mut times = [const { Vec::new() }; 2];
    let mut logits = [const { Vec::new() }; 2];
    for round in 0..=ROUNDS {
        for (side, stored) in [true, false].into_iter().enumerate() {
            let began = Instant::now();
            let daemon = Daemon::start(directory.path(), stored)?;
            let mut kv = open(&loaded, &daemon.client()?)?;
            let held = kv.attach(&ids)?;
            ensure!(held == if stored { STORED } else { 0 }, "{held} tokens are there");
            logits[side] = compute(&loaded, &mut kv, &ids, held)?;
            // The first round warms up.
            if round > 0 {
                times[side].push(began.elapsed());
            }
        }
    }
    ensure!(logits[0] == logits[1], "the first token's logits with and without the stored prompt differ");
    let [stored, computed] = times.map(|mut t| {
        t.sort_unstable();
        t[t.len() / 2].as_secs_f64()
    });
    let note = format!(
        "{stored:.3} s against {computed:.3} s; SmolLM2, {STORED} of {PROMPT} tokens stored, from the start of the broker; \
         medians of {ROUNDS}, wall clock"
    );
    // The only promise is that it is worth having.
    at_most("stored-prompt/start-to-first-token", stored / computed, "x", 1.0, &note);
    reported(
        "stored-prompt/with",
        stored * 1e3,
        "ms",
        "start of the broker to the first token, prompt stored",
    );
    reported("stored-prompt/without", computed * 1e3, "ms", "the same, prompt computed");
    Ok(())
}

fn open(loaded: &Loaded, client: &Client) -> Result<Broker> {
    let options = sequence::options(loaded, PROMPT);
    Ok(Broker::open_on(client, &options.register(client)?, &options)?)
}

/// A running daemon, which ends with this value.
struct Daemon {
    process: Child,
    directory: std::path::PathBuf,
}

impl Daemon {
    fn start(directory: &Path, stored: bool) -> Result<Self> {
        let config = directory.join("kvbroker.toml");
        let store = directory.join("prefixes");
        let table = format!("[prefix.store]\ndirectory = {store:?}\n");
        std::fs::write(&config, if stored { table.as_str() } else { "" })?;
        let mut command = Command::new("target/release/kvbrokerd");
        command.arg("--config").arg(&config).args(["--pool", "96M", "--backend", "memfd"]);
        command.arg("--socket").arg(directory.join("client.sock"));
        command.arg("--admin-socket").arg(directory.join("admin.sock"));
        let process = command.spawn().context("target/release/kvbrokerd: run this through scripts/bench")?;
        Ok(Daemon { process, directory: directory.into() })
    }

    /// Connects as soon as that can be done.
    fn client(&self) -> Result<Client> {
        let (socket, began) = (self.directory.join("client.sock"), Instant::now());
        loop {
            match Client::connect_to(&socket, ClientOptions::default()) {
                Ok(client) => return Ok(client),
                Err(e) if began.elapsed() > PATIENCE => return Err(e.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn ask(&self, request: &str) -> Result<String> {
        let mut stream = UnixStream::connect(self.directory.join("admin.sock"))?;
        writeln!(stream, "{request}")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
