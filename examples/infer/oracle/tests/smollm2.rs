//! SmolLM2-135M-Instruct against candle's `quantized_llama`, on the demo's own prompt.

use std::io::{BufReader, Cursor, Seek};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use infer::kv::Twin;
use infer::load::{Loaded, cached_smollm2, load};
use infer::text::Message;
use infer::weights::Precision;
use kvbroker::attention::Element;
use oracle::{DECODED, Reference};

const CPU: Device = Device::Cpu;

fn engine(precision: Precision) -> Loaded {
    load(&cached_smollm2().unwrap_or_else(|e| panic!("{e}")), precision).unwrap()
}

fn prompt(engine: &Loaded) -> Vec<u32> {
    let system = include_str!("../../prompts/system.txt").trim();
    let question = "The clear well reads 97.5 %. What do I do?";
    let chat = [Message::new("system", system), Message::new("user", question)];
    engine.text.encode(&engine.text.render(&chat, true).unwrap()).unwrap()
}

fn record<R: std::io::Read + Seek>(prompt: &[u32], mut file: R) -> Reference {
    let content = gguf_file::Content::read(&mut file).unwrap();
    let mut model = ModelWeights::from_gguf(content, &mut file, &CPU).unwrap();
    Reference::record(prompt, &mut |tokens, start| {
        model.forward(&Tensor::new(tokens, &CPU)?.unsqueeze(0)?, start)?.flatten_all()?.to_vec1()
    })
}

/// The same model with every weight widened to f32, as a GGUF file in memory.
fn widened() -> Cursor<Vec<u8>> {
    let path = cached_smollm2().unwrap_or_else(|e| panic!("{e}"));
    let mut file = BufReader::new(std::fs::File::open(path).unwrap());
    let content = gguf_file::Content::read(&mut file).unwrap();
    let tensors: Vec<(String, QTensor)> = content
        .tensor_infos
        .keys()
        .map(|name| {
            let tensor = content.tensor(&mut file, name, &CPU).unwrap().dequantize(&CPU).unwrap();
            (name.clone(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap())
        })
        .collect();
    let metadata: Vec<(&str, &gguf_file::Value)> =
        content.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let mut out = Cursor::new(Vec::new());
    gguf_file::write(&mut out, &metadata, &tensors).unwrap();
    out.rewind().unwrap();
    out
}

#[test]
fn with_weights_widened_to_f32_the_logits_are_those_of_candle() {
    let engine = engine(Precision::F32);
    let prompt = prompt(&engine);
    assert!(prompt.len() > 256, "{}", prompt.len());
    let reference = record(&prompt, widened());
    let twin = |element| Twin::new(engine.model.geometry(), element, prompt.len() + DECODED);

    let exact = reference.compare(&engine.model, &mut twin(Element::F32), 100);
    println!("SmolLM2, f32 weights, f32 KV: {exact}");
    assert!(exact.max_diff <= 1e-3 && exact.same_choices(), "{exact}");
    assert!(exact.min_spread > 1.0, "{exact}");

    let half = reference.compare(&engine.model, &mut twin(Element::F16), 100);
    println!("SmolLM2, f32 weights, f16 KV: {half}");
    assert!(half.mean_kl() <= 1e-4 && half.same_choices(), "{half}");
}

#[test]
fn with_the_files_quantised_weights_the_choices_are_those_of_candle() {
    let engine = engine(Precision::File);
    let prompt = prompt(&engine);
    let file = std::fs::File::open(cached_smollm2().unwrap_or_else(|e| panic!("{e}"))).unwrap();
    let reference = record(&prompt, BufReader::new(file));
    for element in [Element::F32, Element::F16] {
        let mut twin = Twin::new(engine.model.geometry(), element, prompt.len() + DECODED);
        let figures = reference.compare(&engine.model, &mut twin, 100);
        println!("SmolLM2, quantised weights, {element:?} KV: {figures}");
        assert!(figures.mean_kl() <= 1e-3 && figures.same_choices(), "{element:?}: {figures}");
    }
}
