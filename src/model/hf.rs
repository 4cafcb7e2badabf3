//! Reads the `config.json` of a Hugging Face model.
//!
//! Owns the field names, and the defaults of the Transformers library that files leave out. Invariant: a field that is
//! there and is not what it should be is refused by its name, even where a default exists.

use super::{
    Family, Fault, MAX_HEAD_DIM, MAX_HEADS, MAX_LENGTH, MOST_LAYERS, ModelShape, Parts, alternate,
    derived_head_dim, printable, quote, within, wrong_number,
};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// A value in which no object has a key twice: of two, one reader takes the first and another the last.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(UniqueKeys).map(Unique)
    }
}

struct UniqueKeys;

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(Unique(value)) = from.next_element()? {
            all.push(value);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            let Unique(value) = from.next_value()?;
            let twice = all.contains_key(&key).then(|| quote(&key));
            if let Some(key) = twice {
                return Err(A::Error::custom(format!("the key {key} comes twice")));
            }
            all.insert(key, value);
        }
        Ok(Value::Object(all))
    }
}

/// The shape that the text of a `config.json` describes; `fallback_name` is used if it has no name.
///
/// JSON's nesting is bounded by the parser (128); its size by the caller.
pub fn parse(text: &[u8], fallback_name: &str) -> Result<ModelShape, Fault> {
    // Of UTF-8, and of UTF-16 either way round.
    if [&b"\xef\xbb\xbf"[..], b"\xff\xfe", b"\xfe\xff"].iter().any(|mark| text.starts_with(mark)) {
        return Err(Fault::ByteOrderMark);
    }
    let Unique(root) = serde_json::from_slice(text)?;
    let Value::Object(root) = &root else {
        return Err(Fault::Wrong {
            field: "(the whole file)".to_owned(),
            found: found(&root),
            expected: "an object".to_owned(),
        });
    };
    let root = Fields { map: root, prefix: "" };
    let family =
        Family::from_tag("model_type", root.text("model_type")?.ok_or_else(|| missing("model_type"))?)?;
    let mut notes = Vec::new();
    // A model that sees and writes keeps the part that writes in text_config.
    let fields = match (family, root.get("text_config")) {
        (Family::Gemma3, Some(Value::Object(map))) => Fields { map, prefix: "text_config." },
        (Family::Gemma3, Some(other)) => return Err(root.wrong("text_config", other, "an object")),
        _ => root,
    };
    let defaults = Defaults::of(family);
    let mut number = |name: &str, most: u32, default: Option<u32>| -> Result<Option<u32>, Fault> {
        let stated = fields.number(name, most)?;
        if let (None, Some(default)) = (stated, default) {
            notes.push(format!(
                "{} is not in the file: taken as {default}, Transformers' default",
                fields.path(name)
            ));
        }
        Ok(stated.or(default))
    };
    let layers = number("num_hidden_layers", MOST_LAYERS, None)?;
    let layers = layers.ok_or_else(|| fields.missing("num_hidden_layers"))?;
    let heads = number("num_attention_heads", MAX_HEADS, defaults.heads)?;
    let heads = heads.ok_or_else(|| fields.missing("num_attention_heads"))?;
    let kv_heads = number("num_key_value_heads", MAX_HEADS, defaults.kv_heads)?;
    let head_dim = number("head_dim", MAX_HEAD_DIM, defaults.head_dim)?;
    let context = fields.number("max_position_embeddings", MAX_LENGTH)?;
    let kv_heads = match kv_heads {
        Some(n) => n,
        // Files older than grouped-query attention have no such field: each head has its own K and V.
        None if family == Family::Llama => {
            notes.push(
                "num_key_value_heads is not in the file: each attention head has its own K and V".to_owned(),
            );
            heads
        }
        None => return Err(fields.missing("num_key_value_heads")),
    };
    let head_dim = match head_dim {
        Some(n) => n,
        // Qwen3's heads are not hidden_size / heads wide (0.6B: 1024 / 16, but 128), so there is nothing to derive.
        None if family == Family::Qwen3 => return Err(fields.missing("head_dim")),
        None => {
            let hidden =
                fields.number("hidden_size", MAX_LENGTH)?.ok_or_else(|| fields.missing("hidden_size"))?;
            within(
                "hidden_size",
                derived_head_dim(&fields.path("hidden_size"), hidden, heads)?.into(),
                MAX_HEAD_DIM,
            )?
        }
    };
    let windows = windows(&fields, family, layers, &mut notes)?;
    let name = root.text("_name_or_path").ok().flatten().and_then(printable);
    let parts = Parts {
        family,
        name: name.unwrap_or_else(|| fallback_name.to_owned()),
        heads,
        context,
        kv_heads: vec![kv_heads; layers as usize],
        k_dim: head_dim,
        v_dim: head_dim,
        windows,
        notes,
    };
    parts.join(&fields.path("num_key_value_heads"))
}

/// What Transformers' configuration classes fill in; only Gemma's published files rely on it (gemma-3-4b-it states
/// neither heads nor head_dim).
struct Defaults {
    heads: Option<u32>,
    kv_heads: Option<u32>,
    head_dim: Option<u32>,
}

impl Defaults {
    fn of(family: Family) -> Self {
        match family {
            Family::Gemma2 | Family::Gemma3 => {
                Defaults { heads: Some(8), kv_heads: Some(4), head_dim: Some(256) }
            }
            _ => Defaults { heads: None, kv_heads: None, head_dim: None },
        }
    }
}

/// The window of each layer.
fn windows(
    fields: &Fields<'_>,
    family: Family,
    layers: u32,
    notes: &mut Vec<String>,
) -> Result<Vec<Option<u32>>, Fault> {
    let full = vec![None; layers as usize];
    let window = match family {
        // Transformers' Llama has no window, whatever the file says.
        Family::Llama => return Ok(full),
        Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 => {
            if !fields.flag("use_sliding_window")?.unwrap_or(false) {
                return Ok(full);
            }
            fields.number("sliding_window", MAX_LENGTH)?
        }
        Family::Mistral => fields.number("sliding_window", MAX_LENGTH)?,
        Family::Gemma2 | Family::Gemma3 => match fields.get_or_null("sliding_window") {
            None => {
                notes.push(format!(
                    "{} is not in the file: taken as 4096, Transformers' default",
                    fields.path("sliding_window")
                ));
                Some(4096)
            }
            Some(_) => fields.number("sliding_window", MAX_LENGTH)?,
        },
    };
    let Some(window) = window else { return Ok(full) };
    if let Some(types) = fields.get("layer_types") {
        return listed(fields, types, layers, window);
    }
    if let Some(every) = family.global_every() {
        // Newer files write the pattern with an underscore.
        let stated = match fields.number("sliding_window_pattern", MOST_LAYERS)? {
            Some(n) => Some(n),
            None => fields.number("_sliding_window_pattern", MOST_LAYERS)?,
        };
        return Ok(alternate(layers, stated.unwrap_or(every), window));
    }
    if family == Family::Mistral {
        return Ok(vec![Some(window); layers as usize]);
    }
    // Qwen: the first max_window_layers layers keep everything.
    let whole = fields.count("max_window_layers")?.unwrap_or(28);
    Ok((0..u64::from(layers)).map(|n| if n < whole { None } else { Some(window) }).collect())
}

fn listed(fields: &Fields<'_>, types: &Value, layers: u32, window: u32) -> Result<Vec<Option<u32>>, Fault> {
    let expected = format!("a list of {layers} layer types");
    let Value::Array(types) = types else { return Err(fields.wrong("layer_types", types, &expected)) };
    if types.len() != layers as usize {
        return Err(Fault::Wrong {
            field: fields.path("layer_types"),
            found: format!("a list of {}", types.len()),
            expected,
        });
    }
    (0..)
        .zip(types)
        .map(|(n, entry)| match entry.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(Some(window)),
            _ => {
                let field = format!("layer_types[{n}]");
                Err(fields.wrong(&field, entry, "\"full_attention\" or \"sliding_attention\""))
            }
        })
        .collect()
}

/// An object of the file, and how the file names it.
#[derive(Clone, Copy)]
struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
}

impl<'a> Fields<'a> {
    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn get_or_null(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name)
    }

    /// The field; `null` is how many files write "not set".
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn missing(&self, name: &str) -> Fault {
        missing(&self.path(name))
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> Fault {
        Fault::Wrong { field: self.path(name), found: found(value), expected: expected.to_owned() }
    }

    fn number(&self, name: &str, most: u32) -> Result<Option<u32>, Fault> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_u64().ok_or_else(|| wrong_number(&self.path(name), found(value), most))?;
        within(&self.path(name), number, most).map(Some)
    }

    /// A number that may be 0.
    fn count(&self, name: &str) -> Result<Option<u64>, Fault> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_u64().map(Some).ok_or_else(|| self.wrong(name, value, "a whole number"))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, Fault> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(name, value, "true or false"))
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, Fault> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(name, value, "a text"))
    }
}

fn missing(field: &str) -> Fault {
    Fault::Missing { field: field.to_owned(), hint: ": it is needed for the size of the KV cache" }
}

/// What a value is, in a few words.
fn found(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(text) => quote(text),
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KvType;
    use proptest::prelude::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({"model_type": "llama", "num_hidden_layers": 16, "num_attention_heads": 32,
               "num_key_value_heads": 8, "hidden_size": 2048, "head_dim": 64, "max_position_embeddings": 131_072})
    }

    fn gemma() -> Value {
        json!({"model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4,
               "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 1152, "sliding_window": 512,
               "sliding_window_pattern": 6})
    }

    fn read(value: &Value) -> Result<ModelShape, Fault> {
        parse(value.to_string().as_bytes(), "fallback")
    }

    fn with(mut value: Value, field: &str, to: Value) -> Value {
        value[field] = to;
        value
    }

    fn refusal(value: &Value) -> String {
        read(value).expect_err("refused").to_string()
    }

    fn windowed(shape: &ModelShape) -> Vec<usize> {
        (0..shape.layers.len()).filter(|n| shape.layers[*n].window.is_some()).collect()
    }

    #[test]
    fn a_llama_config_gives_its_geometry() {
        let shape = read(&llama()).unwrap();
        assert_eq!(shape.profile(KvType::F16, 16).unwrap().bytes_per_token(), 32 << 10);
        assert_eq!((shape.heads, shape.context, &*shape.name), (32, Some(131_072), "fallback"));
        assert!(shape.notes.is_empty());
        let named = read(&with(llama(), "_name_or_path", json!("org/model"))).unwrap();
        assert_eq!(named.name, "org/model");
    }

    #[test]
    fn a_key_that_comes_twice_is_refused_at_whatever_depth() {
        let twice = llama().to_string().replacen('{', "{\"head_dim\": 128, ", 1);
        for text in [&twice, "{\"model_type\": \"llama\", \"a\": [{\"head_dim\": 1, \"head_dim\": 1}]}"] {
            let said = parse(text.as_bytes(), "fallback").expect_err("refused").to_string();
            assert!(said.contains("the key \"head_dim\" comes twice"), "{said}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_named() {
        let text = format!("\u{feff}{}", llama());
        let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        for bytes in [text.as_bytes(), &wide] {
            let said = parse(bytes, "fallback").expect_err("refused").to_string();
            assert!(said.contains("byte order mark"), "{said}");
        }
    }

    #[test]
    fn a_head_dim_that_is_null_or_missing_follows_from_the_hidden_size() {
        let shape = read(&with(llama(), "head_dim", Value::Null)).unwrap();
        assert_eq!(shape.layers[0].k_dim, 64);
        let odd = with(with(llama(), "head_dim", Value::Null), "hidden_size", json!(2049));
        let said = refusal(&odd);
        assert!(said.contains("hidden_size is 2049") && said.contains("32 attention heads"), "{said}");
    }

    #[test]
    fn qwen3_must_state_its_head_dim_because_it_does_not_follow() {
        let qwen3 = with(with(llama(), "model_type", json!("qwen3")), "head_dim", Value::Null);
        assert!(refusal(&qwen3).contains("head_dim is missing"));
    }

    #[test]
    fn an_old_llama_config_without_kv_heads_has_one_for_each_head() {
        let shape = read(&with(llama(), "num_key_value_heads", Value::Null)).unwrap();
        assert_eq!(shape.layers[0].kv_heads, 32);
        assert_eq!(shape.notes.len(), 1);
        let qwen = with(with(llama(), "num_key_value_heads", Value::Null), "model_type", json!("qwen2"));
        assert!(refusal(&qwen).contains("num_key_value_heads is missing"));
    }

    #[test]
    fn gemma_3_keeps_all_tokens_in_every_sixth_layer() {
        for config in [gemma(), with(gemma(), "sliding_window_pattern", Value::Null)] {
            let shape = read(&config).unwrap();
            let full: Vec<usize> = (0..26).filter(|n| !windowed(&shape).contains(n)).collect();
            assert_eq!(full, [5, 11, 17, 23]);
            let profile = shape.profile(KvType::F16, 16).unwrap();
            assert_eq!(profile.bytes_at(4096), 27 << 20);
        }
        assert!(windowed(&read(&with(gemma(), "sliding_window", Value::Null)).unwrap()).is_empty());
        let third = read(&with(gemma(), "sliding_window_pattern", json!(3))).unwrap();
        assert_eq!(26 - windowed(&third).len(), 8);
    }

    #[test]
    fn a_list_of_layer_types_is_followed_and_an_unknown_type_is_named() {
        let types = |kind: &str| {
            let mut list = vec!["sliding_attention"; 26];
            list[7] = kind;
            with(gemma(), "layer_types", json!(list))
        };
        let shape = read(&types("full_attention")).unwrap();
        assert_eq!(windowed(&shape).len(), 25);
        let said = refusal(&types("linear_attention"));
        assert!(said.contains("layer_types[7]") && said.contains("linear_attention"), "{said}");
        assert!(
            refusal(&with(gemma(), "layer_types", json!(["full_attention"])))
                .contains("layer_types is a list of 1")
        );
    }

    #[test]
    fn a_gemma_3_that_also_sees_has_its_fields_in_text_config_and_transformers_defaults_are_named() {
        let config = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
            "num_hidden_layers": 34, "sliding_window": 1024}});
        let shape = read(&config).unwrap();
        assert_eq!(
            (shape.layers.len(), shape.heads, shape.layers[0].kv_heads, shape.layers[0].k_dim),
            (34, 8, 4, 256)
        );
        assert_eq!(shape.notes.len(), 3);
        assert!(shape.notes[0].contains("text_config.num_attention_heads"), "{:?}", shape.notes);
        let broken = json!({"model_type": "gemma3", "text_config": 7});
        assert!(refusal(&broken).contains("text_config is 7"));
        let empty = json!({"model_type": "gemma3", "text_config": {}});
        assert!(refusal(&empty).contains("text_config.num_hidden_layers is missing"));
    }

    #[test]
    fn gemma_2_keeps_all_tokens_in_every_second_layer() {
        let config =
            with(with(gemma(), "model_type", json!("gemma2")), "sliding_window_pattern", Value::Null);
        assert_eq!(windowed(&read(&config).unwrap()), (0..26).step_by(2).collect::<Vec<_>>());
    }

    #[test]
    fn qwen_uses_its_window_only_where_it_says_so() {
        let qwen = with(with(llama(), "model_type", json!("qwen2")), "sliding_window", json!(4096));
        assert!(windowed(&read(&qwen).unwrap()).is_empty());
        let on = with(with(qwen, "use_sliding_window", json!(true)), "max_window_layers", json!(10));
        assert_eq!(windowed(&read(&on).unwrap()), (10..16).collect::<Vec<_>>());
        assert!(
            refusal(&with(on, "use_sliding_window", json!("yes"))).contains("use_sliding_window is \"yes\"")
        );
    }

    #[test]
    fn mistral_has_one_window_for_all_layers_or_none() {
        let mistral = with(llama(), "model_type", json!("mistral"));
        assert!(windowed(&read(&mistral).unwrap()).is_empty());
        let shape = read(&with(mistral, "sliding_window", json!(4096))).unwrap();
        assert_eq!(windowed(&shape).len(), 16);
        assert_eq!(shape.profile(KvType::F16, 16).unwrap().groups().len(), 1);
    }

    #[test]
    fn an_unknown_family_is_refused_with_the_field_and_the_known_ones() {
        let said = refusal(&with(llama(), "model_type", json!("rwkv7")));
        assert!(said.contains("model_type is \"rwkv7\"") && said.contains("qwen3"), "{said}");
        assert!(refusal(&json!({})).contains("model_type is missing"));
        assert!(refusal(&json!({"model_type": ["llama"]})).contains("model_type is a list of 1"));
    }

    #[test]
    fn numbers_that_cannot_be_are_refused_by_their_field() {
        let cases = [
            ("num_hidden_layers", json!(0)),
            ("num_hidden_layers", json!(1_000_000)),
            ("num_hidden_layers", json!("16")),
            ("num_attention_heads", json!(0)),
            ("num_attention_heads", json!(-32)),
            ("num_key_value_heads", json!(5)),
            ("num_key_value_heads", json!(64)),
            ("head_dim", json!(64.5)),
            ("head_dim", json!(1e300)),
            ("head_dim", json!(u64::MAX)),
            ("head_dim", json!([64])),
            ("max_position_embeddings", json!(-1)),
        ];
        for (field, value) in cases {
            let said = refusal(&with(llama(), field, value.clone()));
            assert!(said.contains(&format!("{field} is ")), "{field} = {value}: {said}");
        }
        for field in ["num_hidden_layers", "num_attention_heads"] {
            assert!(refusal(&with(llama(), field, Value::Null)).contains(&format!("{field} is missing")));
        }
    }

    #[test]
    fn text_that_is_no_config_is_refused() {
        let said = |text: &str| parse(text.as_bytes(), "x").expect_err(text).to_string();
        assert!(said("").contains("no valid JSON"));
        assert!(said("{\"num_hidden_layers\": NaN}").contains("no valid JSON"));
        assert!(said("[1, 2]").contains("expected an object"));
        assert!(said(&"[".repeat(100_000)).contains("no valid JSON"));
        assert!(said(&"{\"a\":".repeat(100_000)).contains("no valid JSON"));
        assert!(said("{\"model_type\": \"\u{7f}evil\"}").contains("\\u{7f}"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes, "x");
        }

        #[test]
        fn no_value_in_any_field_makes_the_reader_or_the_profile_panic(
            field in 0usize..9, family in 0usize..8, number: i64, kv in 0usize..6, shift in 0u32..20,
        ) {
            const FIELDS: [&str; 9] = ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                "hidden_size", "sliding_window", "sliding_window_pattern", "max_window_layers", "layer_types"];
            let config = with(gemma(), "model_type", json!(Family::TAGS[family].0));
            let config = with(with(config, "use_sliding_window", json!(true)), FIELDS[field], json!(number >> (shift * 3)));
            if let Ok(shape) = read(&config) {
                let _ = shape.profile(KvType::ALL[kv], 1 << shift);
            }
        }
    }
}
