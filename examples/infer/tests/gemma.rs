//! Gemma 3, most of whose layers see a window of the newest tokens: they hold no more, and the answer stays the same.
//! Weights are from a seeded generator; that the arithmetic is Gemma's is the oracle's to show.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use infer::config::Config;
use infer::kv::{Broker, KvOptions, KvStore, Twin};
use infer::load::{cached_gemma3, load_weights};
use infer::model::{Logits, Model};
use infer::sampler::argmax;
use infer::weights::{Precision, Source};
use kvbroker::attention::Element;
use kvbroker::client::{Client, EmbeddedOptions};
use kvbroker::profile::Layout;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

const WINDOW: usize = 40;
const VOCAB: usize = 211;
const CONTEXT: usize = 512;

/// Seven layers, of which the third and the sixth see all tokens.
fn model() -> Model {
    let (hidden, heads, kv_heads, dim, mlp) = (64, 4, 2, 128, 96);
    let config = json!({
        "model_type": "gemma3_text", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": 7, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": CONTEXT,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": dim, "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    });
    let mut rng = StdRng::seed_from_u64(7);
    let mut noise = |dims: &[usize], width: f32| {
        let values: Vec<f32> =
            (0..dims.iter().product()).map(|_| width * (rng.random::<f32>() - 0.5)).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    };
    let mut tensors = HashMap::new();
    for n in 0..7 {
        for (name, dims) in [
            ("self_attn.q_proj", vec![heads * dim, hidden]),
            ("self_attn.k_proj", vec![kv_heads * dim, hidden]),
            ("self_attn.v_proj", vec![kv_heads * dim, hidden]),
            ("self_attn.o_proj", vec![hidden, heads * dim]),
            ("mlp.gate_proj", vec![mlp, hidden]),
            ("mlp.up_proj", vec![mlp, hidden]),
            ("mlp.down_proj", vec![hidden, mlp]),
            ("self_attn.q_norm", vec![dim]),
            ("self_attn.k_norm", vec![dim]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("pre_feedforward_layernorm", vec![hidden]),
            ("post_feedforward_layernorm", vec![hidden]),
        ] {
            let width = if dims.len() == 2 { 5.0 / (dims[1] as f32).sqrt() } else { 1.0 };
            tensors.insert(format!("model.layers.{n}.{name}.weight"), noise(&dims, width));
        }
    }
    tensors.insert("model.embed_tokens.weight".to_owned(), noise(&[VOCAB, hidden], 0.6));
    tensors.insert("model.norm.weight".to_owned(), noise(&[hidden], 1.0));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let config = Config::from_hf(&config.to_string()).unwrap();
    Model::load(config, &mut Source::safetensors(&[file]).unwrap(), Precision::File).unwrap()
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (i * i * 7 + i * 13 + 5) % VOCAB as u32).collect()
}

fn open(client: &Client, model: &Model, element: Element, layout: Layout) -> Broker {
    let options = KvOptions {
        label: "test",
        model: "gemma",
        fingerprint: "gemma",
        geometry: model.geometry(),
        element,
        layout,
        context: CONTEXT,
    };
    let profile = options.geometry.profile(options.model, element, layout).unwrap();
    Broker::open_on(client, &client.grouped_profile(&profile).unwrap(), &options).unwrap()
}

/// All logits of a prompt in pieces of `chunk`, then of decoded tokens; calls `each` after every step.
fn logits<K: KvStore>(
    model: &Model,
    kv: &mut K,
    prompt: &[u32],
    chunk: usize,
    decoded: usize,
    mut each: impl FnMut(&K, usize),
) -> (Vec<u32>, Vec<u32>) {
    let (mut bits, mut tokens) = (Vec::new(), Vec::new());
    let vocab = model.config().vocab;
    for (n, piece) in prompt.chunks(chunk).enumerate() {
        let all = model.step(kv, piece, n * chunk, Logits::All).unwrap();
        each(kv, n * chunk + piece.len());
        bits.extend(all.iter().map(|l| l.to_bits()));
        tokens = vec![argmax(&all[all.len() - vocab..]).0];
    }
    for n in 0..decoded {
        let last = model.step(kv, &[tokens[n]], prompt.len() + n, Logits::Last).unwrap();
        assert!(last.iter().all(|l| l.is_finite()));
        each(kv, prompt.len() + n + 1);
        bits.extend(last.iter().map(|l| l.to_bits()));
        tokens.push(argmax(&last).0);
    }
    (bits, tokens)
}

#[test]
fn with_its_window_freed_the_model_says_bit_for_bit_what_it_says_over_all_rows() {
    let model = model();
    let geometry = model.geometry();
    let prompt = prompt(150);
    for (element, layout) in [
        (Element::F16, Layout::PlaneMajor),
        (Element::F16, Layout::TokenMajor),
        (Element::F32, Layout::PlaneMajor),
    ] {
        let mut twin = Twin::new(geometry, element, CONTEXT);
        let (bits, tokens) = logits(&model, &mut twin, &prompt, 150, 300, |_, _| {});
        let client = Client::embedded(EmbeddedOptions::default()).unwrap();
        let mut kv = open(&client, &model, element, layout);
        // Another sequence grows in turn, and takes the blocks that this one gives back.
        let mut other = open(&client, &model, element, layout);
        other.ensure(64).unwrap();
        for token in 0..64 {
            for (layer, which) in (0..7).flat_map(|l| [(l, infer::kv::Kv::K), (l, infer::kv::Kv::V)]) {
                other.store(token, layer, which, &[f32::NAN; 256]);
            }
        }
        let (freed, same) = logits(&model, &mut kv, &prompt, 37, 300, |_, _| {});
        assert!(freed == bits && same == tokens, "{element:?}, {layout:?}");
        assert!(tokens.iter().any(|t| *t != tokens[0]), "the tokens of an answer differ");
    }
}

#[test]
fn local_layers_hold_their_window_however_long_the_answer_is() {
    let model = model();
    let client = Client::embedded(EmbeddedOptions::default()).unwrap();
    let mut kv = open(&client, &model, Element::F16, Layout::PlaneMajor);
    // A row of 512 bytes, K and V: 16 KiB for a block of 16 tokens in each layer.
    let block = 16 << 10;
    let window_blocks = (WINDOW + 15).div_ceil(16);
    let mut most = 0;
    logits(&model, &mut kv, &prompt(30), 10, 450, |kv, tokens| {
        let local = kv.usage().bytes - 2 * block * tokens.div_ceil(16);
        assert!(local <= 5 * block * window_blocks, "{local} bytes of local layers at {tokens} tokens");
        most = most.max(local);
    });
    assert_eq!(most, 5 * block * window_blocks, "they hold their window");
    // After 480 tokens the window begins in block 27 of 30.
    assert_eq!(kv.usage().bytes, 2 * block * 30 + 5 * block * 3);
}

#[test]
fn an_answer_over_a_shared_prefix_longer_than_the_window_is_the_answer_computed_whole() {
    let model = model();
    let client = Client::embedded(EmbeddedOptions::default()).unwrap();
    let prompt = prompt(200);
    let mut first = open(&client, &model, Element::F16, Layout::PlaneMajor);
    let (whole, _) = logits(&model, &mut first, &prompt[..160], 32, 0, |_, _| {});
    assert_eq!(first.seal(&prompt[..160]).unwrap(), 160);
    first.pin(160).unwrap();
    let rest = model.step(&mut first, &prompt[160..], 160, Logits::All).unwrap();
    drop(first);
    assert_eq!(whole.len(), 160 * VOCAB);

    let mut second = open(&client, &model, Element::F16, Layout::PlaneMajor);
    assert_eq!(second.attach(&prompt).unwrap(), 160);
    // Ten blocks of the layers that see all, and of the others those of the last 39 tokens.
    assert_eq!(second.usage().bytes, (10 * 2 + 3 * 5) * (16 << 10));
    let shared = model.step(&mut second, &prompt[160..], 160, Logits::All).unwrap();
    assert!(shared == rest, "logits differ");
}

#[test]
#[ignore = "the model is fetched by scripts/fetch-model gemma only"]
fn gemma_3_270m_says_the_same_bits_with_its_window_freed_and_holds_no_more_than_it() {
    let model = load_weights(&cached_gemma3().unwrap_or_else(|e| panic!("{e}")), Precision::File).unwrap();
    // A hundred tokens beyond the window, then forty more.
    let prompt: Vec<u32> = (0..612).map(|i| if i == 0 { 2 } else { 500 + (i * 37) % 211 }).collect();
    let context = 1024;
    let mut twin = Twin::new(model.geometry(), Element::F16, context);
    let (bits, tokens) = logits(&model, &mut twin, &prompt, 153, 40, |_, _| {});
    let client = Client::embedded(EmbeddedOptions::default()).unwrap();
    let options = KvOptions {
        label: "test",
        model: "gemma-3-270m",
        fingerprint: "gemma-3-270m",
        geometry: model.geometry(),
        element: Element::F16,
        layout: Layout::PlaneMajor,
        context,
    };
    let profile = options.geometry.profile(options.model, options.element, options.layout).unwrap();
    let mut kv = Broker::open_on(&client, &client.grouped_profile(&profile).unwrap(), &options).unwrap();
    let (freed, same) = logits(&model, &mut kv, &prompt, 153, 40, |kv, tokens| {
        // 16 KiB for a block of 16 tokens in each layer; three layers of eighteen see all tokens.
        let local = (kv.usage().bytes >> 14) - 3 * tokens.div_ceil(16);
        let step = if tokens > 612 { 1 } else { 153 };
        assert!(local <= 15 * (511usize + step + 15).div_ceil(16), "{local} blocks at {tokens} tokens");
    });
    assert!(freed == bits && same == tokens);
    println!("Gemma 3 270M after {} tokens: {} KiB held", 612 + 40, kv.usage().bytes >> 10);
}
