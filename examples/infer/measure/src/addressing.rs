//! Row `addressing`: what paging adds to a decode step, in instructions, as a share of the step.
//!
//! The program runs itself under callgrind, which counts inside [`decode_steps`] only: loading and filling the caches are not counted.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::Content;
use infer::config::Config;
use infer::kv::{Broker, Geometry, Kv, KvError, KvOptions, KvStore, Twin};
use infer::load::cached_smollm2;
use infer::model::{Logits, Model};
use infer::weights::{Precision, Source};
use kvbroker::attention::Element;
use kvbroker::client::{Client, EmbeddedOptions};
use kvbroker::profile::Layout;

use crate::figure::{at_most, reported};

/// The weights as the file has them, Q4_1, and widened.
const WEIGHTS: [&str; 2] = ["quantised", "f32"];
/// Keys and values in f16, the engine's default.
const ELEMENT: Element = Element::F16;
/// Tokens held before the first counted step. Both are whole blocks: the first counted step takes a new one.
const HELD: [usize; 2] = [512, 2048];
/// Counted steps.
const STEPS: usize = 2;

/// Prints the row's figures.
pub fn run() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for weights in WEIGHTS {
        for held in HELD {
            // Side by side: counts do not depend on what else runs.
            let [paged, twin] = ["paged", "contiguous"].map(|store| start(weights, held, store, dir.path()));
            let (paged, twin) = (paged?.finish()?, twin?.finish()?);
            ensure!(paged.logits == twin.logits, "the logits of the paged and the contiguous steps differ");
            print(&format!("{weights}-{held}"), &paged, &twin);
        }
    }
    Ok(())
}

fn print(case: &str, paged: &Count, twin: &Count) {
    let of_step = |n: f64| 100.0 * n / twin.total;
    let added = paged.total - twin.total;
    let millions = |n: f64| format!("{:.3} M", n / STEPS as f64 / 1e6);
    let note = format!(
        "{} instructions a step contiguous, {} paged; of the difference {} in attention, {} in storing rows, {} in \
         making room ({STEPS} steps, the first of which takes a block of 32 tokens)",
        millions(twin.total),
        millions(paged.total),
        millions(paged.attend - twin.attend),
        millions(paged.store - twin.store),
        millions(paged.ensure - twin.ensure),
    );
    at_most(&format!("addressing/step-{case}"), of_step(added), "%", 0.1, &note);
    let note =
        format!("attention / step, contiguous; paged attention is {:.4} x", paged.attend / twin.attend);
    reported(&format!("addressing/attention-share-{case}"), of_step(twin.attend), "%", &note);
}

/// A counted program that runs.
struct Counting {
    child: Child,
    dump: PathBuf,
}

fn start(weights: &str, held: usize, store: &str, dir: &Path) -> Result<Counting> {
    let dump = dir.join(format!("{weights}-{held}-{store}"));
    let child = Command::new("valgrind")
        .args(["--tool=callgrind", "--compress-strings=no", "--compress-pos=no"])
        .arg("--toggle-collect=*decode_steps*")
        .arg(format!("--callgrind-out-file={}", dump.display()))
        .arg(std::env::current_exe()?)
        .args(["counted", weights, &held.to_string(), store])
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("valgrind does not start: is it installed?")?;
    Ok(Counting { child, dump })
}

impl Counting {
    fn finish(self) -> Result<Count> {
        let output = self.child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "callgrind failed: {said}");
        Count::read(&self.dump, output.stdout)
    }
}

/// Instructions of one [`decode_steps`].
struct Count {
    total: f64,
    attend: f64,
    store: f64,
    ensure: f64,
    /// The last step's logits, as the program printed their bits.
    logits: Vec<u8>,
}

impl Count {
    /// Reads a dump. Its format is in valgrind's manual, "Callgrind Format Specification": a call is a line `cfn=`
    /// with the name of what is called, a line `calls=`, and a line that ends with what the call cost.
    fn read(path: &Path, logits: Vec<u8>) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("callgrind wrote no {path:?}"))?;
        let number = |line: Option<&str>| {
            let last = line.and_then(|l| l.split_whitespace().last());
            last.and_then(|n| n.parse::<f64>().ok()).with_context(|| format!("{path:?} is no profile"))
        };
        let mut count = Count { total: 0.0, attend: 0.0, store: 0.0, ensure: 0.0, logits };
        count.total = number(text.lines().find(|l| l.starts_with("totals:")))?;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let sum = match line.strip_prefix("cfn=") {
                Some(name) if name.contains("counted_attend") => &mut count.attend,
                Some(name) if name.contains("counted_store") => &mut count.store,
                Some(name) if name.contains("counted_ensure") => &mut count.ensure,
                _ => continue,
            };
            ensure!(lines.next().is_some_and(|l| l.starts_with("calls=")), "{path:?} is no profile");
            *sum += number(lines.next())?;
        }
        ensure!(count.total > 0.0 && count.attend > 0.0, "{path:?} has no counts of the steps");
        Ok(count)
    }
}

/// The counted program. Prints the bits of the last step's logits.
pub fn counted(weights: &str, held: &str, store: &str) -> Result<()> {
    let precision = if weights == WEIGHTS[0] { Precision::File } else { Precision::F32 };
    let held: usize = held.parse()?;
    let model = load(precision)?;
    let geometry = model.geometry();
    let context = held + STEPS;
    let logits = if store == "paged" {
        let client = Client::embedded(EmbeddedOptions::default())?;
        let options = KvOptions {
            label: "measure",
            model: "smollm2",
            fingerprint: "measure",
            geometry,
            element: ELEMENT,
            layout: Layout::PlaneMajor,
            context,
        };
        side(&model, &mut Broker::open_on(&client, &options.register(&client)?, &options)?, held)?
    } else {
        side(&model, &mut Twin::new(geometry, ELEMENT, context), held)?
    };
    println!("{:x?}", logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>());
    Ok(())
}

/// The cached SmolLM2 without its text side, which would take longer to load than the steps.
fn load(precision: Precision) -> Result<Model> {
    let mut file = BufReader::new(File::open(cached_smollm2()?)?);
    let content = Content::read(&mut file)?;
    let config = Config::from_gguf(&content)?;
    Ok(Model::load(config, &mut Source::Gguf(Box::new(content), file), precision)?)
}

/// Fills `kv` and runs the steps over it. The first step is not counted: buffers find their size in it.
fn side<K: KvStore>(model: &Model, kv: &mut K, held: usize) -> Result<Vec<f32>> {
    fill(kv, model.geometry(), held - 1)?;
    let mut kv = Counted(kv);
    model.step(&mut kv, &[1], held - 1, Logits::None)?;
    decode_steps(model, &mut kv, held)
}

/// Rows of repeatable values instead of a computed prompt: instructions do not depend on what the values mean.
fn fill<K: KvStore>(kv: &mut K, geometry: Geometry, tokens: usize) -> Result<()> {
    let row = geometry.kv_heads * geometry.head_dim;
    // A prime number of places to start from, so that rows repeat late.
    const STARTS: usize = 4099;
    let mut state = 1u32;
    let mut value = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as f32 / u32::MAX as f32 - 0.5
    };
    let values: Vec<f32> = (0..STARTS + row).map(|_| value()).collect();
    let mut starts = (0..STARTS).cycle().step_by(7);
    kv.ensure(tokens)?;
    for token in 0..tokens {
        for layer in 0..geometry.layers {
            for which in [Kv::K, Kv::V] {
                let start = starts.next().expect("endless");
                kv.store(token, layer, which, &values[start..start + row]);
            }
        }
    }
    Ok(())
}

/// What is counted. callgrind finds it by this name.
#[inline(never)]
fn decode_steps<K: KvStore>(model: &Model, kv: &mut K, held: usize) -> Result<Vec<f32>> {
    let mut logits = Vec::new();
    for n in 0..STEPS {
        logits = model.step(kv, &[100 + n as u32], held + n, Logits::Last)?;
    }
    Ok(logits)
}

/// A store whose calls keep their names, for callgrind to count apart.
struct Counted<'a, K>(&'a mut K);

impl<K: KvStore> KvStore for Counted<'_, K> {
    fn ensure(&mut self, tokens: usize) -> Result<(), KvError> {
        counted_ensure(self.0, tokens)
    }

    fn reserve(&mut self, tokens: usize, step: usize) -> Result<(), KvError> {
        self.0.reserve(tokens, step)
    }

    fn store(&mut self, token: usize, layer: usize, kv: Kv, row: &[f32]) {
        counted_store(self.0, token, layer, kv, row);
    }

    fn attend(&mut self, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]) {
        counted_attend(self.0, layer, kv_tokens, q, out);
    }
}

#[inline(never)]
fn counted_ensure<K: KvStore>(kv: &mut K, tokens: usize) -> Result<(), KvError> {
    kv.ensure(tokens)
}

#[inline(never)]
fn counted_store<K: KvStore>(kv: &mut K, token: usize, layer: usize, which: Kv, row: &[f32]) {
    kv.store(token, layer, which, row);
}

#[inline(never)]
fn counted_attend<K: KvStore>(kv: &mut K, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]) {
    kv.attend(layer, kv_tokens, q, out);
}
