//! The engine over the broker's blocks, embedded in the test's process.

mod common;

use common::{bits, engine};
use infer::kv::{Broker, Geometry, KvError, KvOptions, KvStore, Twin};
use infer::model::Logits;
use infer::weights::Precision;
use kvbroker::attention::Element;
use kvbroker::client::{Client, EmbeddedOptions};
use kvbroker::profile::Layout;
use kvbroker::wire::Fault;

const DECODED: usize = 20;

fn options(geometry: Geometry, element: Element, layout: Layout) -> KvOptions<'static> {
    KvOptions {
        label: "test",
        model: "smollm2",
        fingerprint: "smollm2",
        geometry,
        element,
        layout,
        context: 512,
    }
}

fn open(client: &Client, options: &KvOptions) -> Result<Broker, KvError> {
    let profile = options.geometry.profile(options.model, options.element, options.layout).unwrap();
    Broker::open_on(client, &client.grouped_profile(&profile)?, options)
}

#[test]
fn logits_over_the_brokers_blocks_equal_the_contiguous_twins_bit_for_bit() {
    let (engine, prompt) = engine(Precision::File);
    let geometry = engine.model.geometry();
    for element in [Element::F16, Element::F32] {
        let twin = bits(&engine, &mut Twin::new(geometry, element, 512), &prompt, DECODED);
        for layout in [Layout::PlaneMajor, Layout::TokenMajor] {
            let client = Client::embedded(EmbeddedOptions::default()).unwrap();
            let options = options(geometry, element, layout);
            // Another sequence that grows in turn with this one, so that neither gets neighbouring blocks.
            let mut other = open(&client, &options).unwrap();
            let mut kv = Interleaved { kv: open(&client, &options).unwrap(), other: &mut other };
            assert!(bits(&engine, &mut kv, &prompt, DECODED) == twin, "{element:?}, {layout:?}");
        }
    }
}

/// A sequence beside which another one grows by as much at every step.
struct Interleaved<'a> {
    kv: Broker,
    other: &'a mut Broker,
}

impl KvStore for Interleaved<'_> {
    fn ensure(&mut self, tokens: usize) -> Result<(), KvError> {
        for n in (0..=tokens).step_by(16).chain([tokens]) {
            self.kv.ensure(n)?;
            self.other.ensure(n)?;
        }
        Ok(())
    }

    fn reserve(&mut self, tokens: usize, step: usize) -> Result<(), KvError> {
        self.kv.reserve(tokens, step)
    }

    fn store(&mut self, token: usize, layer: usize, kv: infer::kv::Kv, row: &[f32]) {
        self.kv.store(token, layer, kv, row);
    }

    fn attend(&mut self, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]) {
        self.kv.attend(layer, kv_tokens, q, out);
    }
}

#[test]
fn an_answer_over_a_shared_prefix_is_the_answer_computed_whole() {
    let (engine, prompt) = engine(Precision::File);
    let client = Client::embedded(EmbeddedOptions::default()).unwrap();
    let options = options(engine.model.geometry(), Element::F16, Layout::PlaneMajor);
    let step =
        |kv: &mut Broker, tokens: &[u32], start| engine.model.step(kv, tokens, start, Logits::Last).unwrap();
    let mut first = open(&client, &options).unwrap();
    assert_eq!(first.attach(&prompt).unwrap(), 0, "nothing is published yet");
    let whole = step(&mut first, &prompt, 0);
    // 100 tokens are three whole blocks of 32.
    assert_eq!(first.seal(&prompt).unwrap(), 96);
    first.pin(96).unwrap();
    assert_eq!((first.usage().private, first.usage().shared), (1, 3));
    drop(first);

    let mut second = open(&client, &options).unwrap();
    let held = second.attach(&prompt).unwrap();
    assert_eq!(held, 96);
    let shared = step(&mut second, &prompt[held..], held);
    assert!(shared == whole, "the last token's logits differ");
    assert_eq!((second.usage().private, second.usage().shared), (1, 3));

    let other_model = KvOptions { fingerprint: "another", ..options };
    assert_eq!(open(&client, &other_model).unwrap().attach(&prompt).unwrap(), 0);
}

#[test]
fn a_refusal_comes_before_anything_is_computed_and_the_sequence_goes_on_with_what_it_has() {
    let (engine, prompt) = engine(Precision::File);
    let geometry = engine.model.geometry();
    // Two extents of 3 MiB: 8 blocks of 32 tokens.
    let small = EmbeddedOptions { pool_bytes: 6 << 20, ..EmbeddedOptions::default() };
    let client = Client::embedded(small).unwrap();
    let options = KvOptions { context: 192, ..options(geometry, Element::F16, Layout::PlaneMajor) };

    let too_long = KvOptions { context: 4096, ..options.clone() };
    let error = open(&client, &too_long).unwrap_err();
    assert_eq!(error.kind(), "never-fits", "{error}");

    let mut greedy = open(&client, &options).unwrap();
    greedy.ensure(192).unwrap();
    let mut kv = open(&client, &options).unwrap();
    let first = engine.model.step(&mut kv, &prompt[..32], 0, Logits::Last).unwrap();
    let error = engine.model.step(&mut kv, &prompt[32..], 32, Logits::Last).unwrap_err();
    assert!(
        matches!(&error, infer::error::Error::Kv(KvError::Broker(e)) if e.fault() == Some(Fault::Busy)),
        "{error}"
    );
    drop(greedy);
    let after = engine.model.step(&mut kv, &prompt[32..], 32, Logits::Last).unwrap();
    let mut twin = Twin::new(geometry, Element::F16, 192);
    assert!(engine.model.step(&mut twin, &prompt[..32], 0, Logits::Last).unwrap() == first);
    assert!(engine.model.step(&mut twin, &prompt[32..], 32, Logits::Last).unwrap() == after);
}
