//! SmolLM2-135M-Instruct against candle's `quantized_llama`, on the demo's own prompt.

use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek};

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

/// candle's model of a GGUF file, ready to be asked.
fn candle<R: Read + Seek>(mut file: R) -> impl FnMut(&[u32], usize) -> candle_core::Result<Vec<f32>> {
    let content = gguf_file::Content::read(&mut file).unwrap();
    let mut model = ModelWeights::from_gguf(content, &mut file, &CPU).unwrap();
    move |tokens, start| {
        model.forward(&Tensor::new(tokens, &CPU)?.unsqueeze(0)?, start)?.flatten_all()?.to_vec1()
    }
}

fn file() -> BufReader<File> {
    BufReader::new(File::open(cached_smollm2().unwrap_or_else(|e| panic!("{e}"))).unwrap())
}

/// The same model with every weight widened to f32, as a GGUF file in memory.
fn widened() -> Cursor<Vec<u8>> {
    let mut file = file();
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
fn the_logits_are_those_of_candle() {
    let wide = engine(Precision::F32);
    let prompt = prompt(&wide);
    assert!(prompt.len() > 256, "{}", prompt.len());
    let twin = |element| Twin::new(wide.model.geometry(), element, prompt.len() + DECODED);
    let exact = Reference::record(&prompt, &mut candle(widened()));

    let same = exact.figures(&exact.rerun_engine(&wide.model, &mut twin(Element::F32), 100));
    println!("SmolLM2, f32 weights, f32 KV: {same}");
    assert!(same.max_diff <= 1e-3 && same.same_choices(), "{same}");
    assert!(same.min_spread > 1.0, "{same}");

    let half = exact.figures(&exact.rerun_engine(&wide.model, &mut twin(Element::F16), 100));
    println!("SmolLM2, f32 weights, f16 KV: {half}");
    assert!(half.mean_kl() <= 1e-4 && half.same_choices(), "{half}");

    // Quantised products round the activations to 8 bits, and thirty layers amplify whichever way a tie falls: one
    // unit in the last place of attention's result moves the logits of this engine by a mean KL of 3e-3 from its own.
    // So two programs that are both right differ by that much, and what can be asked is that the engine's rounding
    // costs no more than candle's does, both against the same weights in f32.
    let quantised = engine(Precision::File);
    let rounded = exact.rerun(&mut candle(file()), prompt.len());
    let theirs = exact.figures(&rounded);
    println!("SmolLM2, candle's own loss by quantised products: {theirs}");
    for element in [Element::F32, Element::F16] {
        let run = exact.rerun_engine(&quantised.model, &mut twin(element), 100);
        let ours = exact.figures(&run);
        println!("SmolLM2, quantised weights, {element:?} KV, against f32 weights: {ours}");
        assert!(ours.mean_kl() <= 2.0 * theirs.mean_kl(), "{element:?}: {ours}, candle's {theirs}");
        let both = rounded.figures(&run);
        println!("SmolLM2, quantised weights, {element:?} KV, against candle's quantised: {both}");
        assert!(both.mean_kl() <= 1e-2 && both.same_choices(), "{element:?}: {both}");
    }
}
