//! `infer`: answers one question with a model whose KV cache lives in kvbroker's blocks.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use infer::generate::{Answer, Outcome, Prompt};
use infer::kv::{Broker, KvError, KvOptions, Usage};
use infer::load::{Loaded, cached_smollm2, load};
use infer::sampler::Sampler;
use infer::weights::Precision;
use kvbroker::attention::Element;
use kvbroker::profile::Layout;
use serde_json::json;

/// Answers one question with a language model whose KV cache lives in kvbroker's blocks.
///
/// The broker is found through KVBROKER_SOCKET; with KVBROKER_BACKEND=embedded it runs inside this process and
/// nothing need be installed.
///
/// Exit codes: 0 answered; 1 failed or refused by the broker; 2 wrong arguments.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
struct Args {
    /// GGUF file, or directory with config.json, model.safetensors and tokenizer.json [default: the cached SmolLM2]
    #[arg(long)]
    model: Option<PathBuf>,
    /// System prompt, or @FILE to read it from a file
    #[arg(long)]
    system: Option<String>,
    /// The question, or @FILE [default: read from standard input]
    #[arg(long)]
    prompt: Option<String>,
    /// The longest answer, in tokens
    #[arg(long, default_value_t = 256, value_parser = at_least_one)]
    max_tokens: usize,
    /// 0 takes the most probable token always
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    temperature: f32,
    /// Where the choice of tokens starts, for a temperature above 0
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Type of the cached keys and values
    #[arg(long, default_value_t = Element::F16, value_name = "TYPE")]
    kv_type: Element,
    /// How weights are held in memory
    #[arg(long, value_enum, default_value_t = Weights::File)]
    weights: Weights,
    /// Worker threads, up to 1024 [default: one per core]
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,
    /// The longest sequence, prompt and answer, in tokens; the broker is asked whether so much can ever fit
    #[arg(long, default_value_t = 2048)]
    context: usize,
    /// Publish the system prompt's blocks, so that later runs need not compute them
    #[arg(long)]
    share_system: bool,
    /// Keep the published system prompt even when nobody uses it; implies --share-system
    #[arg(long)]
    pin: bool,
    /// A name for this session in kvbctl
    #[arg(long, default_value = "infer")]
    label: String,
    /// Print one JSON object per line (start, token, done, error) instead of text
    #[arg(long)]
    json_events: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Weights {
    /// As the file has them
    File,
    /// Widened to f32
    F32,
    /// Matrices quantised to q8_0 while loading: fast on every processor
    Q8_0,
}

/// More threads than this no machine has cores for, and each one that is started costs memory and time.
const MOST_THREADS: usize = 1024;

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("{e}")),
    }
}

fn threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        n if n > MOST_THREADS => Err(format!("it must be at most {MOST_THREADS}")),
        n => Ok(n),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        // NaN is neither: with it, no token would be more probable than another.
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        Ok(_) => Err("it must be 0 or a number above it".into()),
        Err(e) => Err(format!("{e}")),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = told_once(&error);
            if args.json_events {
                let refused = error.chain().find_map(|e| e.downcast_ref::<KvError>());
                let kind = refused.map_or("failed", KvError::kind);
                event(json!({ "event": "error", "label": args.label, "kind": kind, "message": message }));
            }
            eprintln!("infer: {message}");
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, without those that it quotes already.
fn told_once(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |told, cause| match cause.to_string() {
        cause if told.contains(&cause) => told,
        cause if told.is_empty() => cause,
        cause => format!("{told}: {cause}"),
    })
}

fn run(args: &Args) -> Result<()> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    }
    let question = match &args.prompt {
        Some(text) => text_or_file(text)?,
        None => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("cannot read the question")?;
            text
        }
    };
    let system = args.system.as_deref().map(text_or_file).transpose()?;
    let path = match &args.model {
        Some(path) => path.clone(),
        None => cached_smollm2()?,
    };
    let precision = match args.weights {
        Weights::File => Precision::File,
        Weights::F32 => Precision::F32,
        Weights::Q8_0 => Precision::Q8,
    };
    let loaded = load(&path, precision)?;
    let context = args.context.min(loaded.model.config().max_context);
    let prompt = Prompt::new(&loaded.text, system.as_deref().map(str::trim), question.trim())?;
    if prompt.ids.len() >= context {
        bail!(
            "the prompt has {} tokens and the context {context}: give a shorter prompt or a longer --context",
            prompt.ids.len()
        );
    }

    let mut kv = Broker::open(&KvOptions {
        label: &args.label,
        model: &loaded.name,
        fingerprint: &loaded.fingerprint,
        geometry: loaded.model.geometry(),
        element: args.kv_type,
        layout: Layout::PlaneMajor,
        context,
    })?;
    answer(args, &loaded, &prompt, context, &mut kv)
}

fn answer(args: &Args, loaded: &Loaded, prompt: &Prompt, context: usize, kv: &mut Broker) -> Result<()> {
    let began = Instant::now();
    let held = kv.attach(&prompt.ids)?;
    if args.json_events {
        event(json!({
            "event": "start", "label": args.label, "pid": std::process::id(), "model": loaded.name,
            "prompt_tokens": prompt.ids.len(), "shared_tokens": held,
        }));
    }
    let answer = Answer::begin(loaded, kv, prompt, held, context, began, |kv: &mut Broker| {
        if args.share_system || args.pin {
            kv.seal(&prompt.ids[..prompt.common])?;
        }
        if args.pin {
            kv.pin(prompt.common)?;
        }
        Ok(())
    })?;
    let mut sampler = Sampler::new(args.temperature, args.seed);
    let mut shown = 0;
    let outcome = answer.decode(&mut sampler, args.max_tokens, |text| {
        shown += 1;
        if args.json_events {
            event(json!({ "event": "token", "label": args.label, "n": shown, "text": text }));
        } else {
            // A reader that has gone away is no reason to stop: the answer is shown for whoever still looks.
            let mut out = std::io::stdout();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    })?;
    report(args, prompt, held, &outcome, &kv.usage());
    Ok(())
}

fn report(args: &Args, prompt: &Prompt, held: usize, outcome: &Outcome, usage: &Usage) {
    let first = outcome.first_token.as_secs_f64();
    if args.json_events {
        event(json!({
            "event": "done", "label": args.label, "stop": outcome.stop.name(),
            "prompt_tokens": prompt.ids.len(), "shared_tokens": held, "generated_tokens": outcome.generated,
            "first_token_seconds": first, "tokens_per_second": outcome.tokens_per_second(),
            "blocks_private": usage.private, "blocks_shared": usage.shared, "kv_bytes": usage.bytes,
        }));
        return;
    }
    println!();
    eprintln!(
        "prompt {} tokens, {held} from the shared prefix; first token after {first:.2} s; {} tokens at {:.1}/s ({}); \
         blocks: {} private, {} shared",
        prompt.ids.len(),
        outcome.generated,
        outcome.tokens_per_second(),
        outcome.stop.name(),
        usage.private,
        usage.shared,
    );
}

/// `@FILE` stands for the file's text.
fn text_or_file(text: impl AsRef<str>) -> Result<String> {
    match text.as_ref().strip_prefix('@') {
        None => Ok(text.as_ref().to_owned()),
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("cannot read {path}")),
    }
}

/// One line, written at once, so that several processes can share one output.
fn event(event: serde_json::Value) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("{event}\n").as_bytes()).and_then(|()| out.flush());
}
