//! Token ids and rendered chats are those of llama.cpp, as recorded in a fixture.

use infer::load::{cached_smollm2, load};
use infer::text::{Message, Text};
use infer::weights::Precision;
use serde::Deserialize;

#[derive(Deserialize)]
struct Fixture {
    texts: Vec<Recorded>,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Recorded {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Message>,
    prompt: String,
    ids: Vec<u32>,
}

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("fixtures/smollm2-llamacpp.json")).unwrap()
}

fn text() -> Text {
    load(&cached_smollm2().unwrap_or_else(|e| panic!("{e}")), Precision::File).unwrap().text
}

#[test]
fn the_ids_of_every_recorded_text_are_those_of_llama_cpp() {
    let text = text();
    let fixture = fixture();
    assert!(fixture.texts.len() >= 30);
    for recorded in fixture.texts {
        assert_eq!(text.encode(&recorded.text).unwrap(), recorded.ids, "{:?}", recorded.text);
    }
}

#[test]
fn chats_render_and_tokenize_as_in_llama_cpp() {
    let text = text();
    for chat in fixture().chats {
        assert_eq!(text.render(&chat.messages, true).unwrap(), chat.prompt);
        assert_eq!(text.encode(&chat.prompt).unwrap(), chat.ids);
    }
}

#[test]
fn text_that_comes_token_by_token_is_the_whole_text() {
    let text = text();
    for recorded in fixture().texts {
        let mut stream = text.stream();
        let pieces: Vec<String> = recorded.ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{pieces:?}");
        assert_eq!(pieces.concat(), text.decode(&recorded.ids).unwrap(), "{:?}", recorded.text);
    }
}

#[test]
fn the_demos_system_prompt_has_more_than_eight_blocks_of_tokens() {
    let ids = text().encode(include_str!("../prompts/system.txt")).unwrap();
    assert!((256..=320).contains(&ids.len()), "{}", ids.len());
}
