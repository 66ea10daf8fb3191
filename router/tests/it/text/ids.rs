//! Ids equal those of reference implementations (`tests/golden/ids.py`).

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::PathBuf;

use tandem_router::text::Text;

use super::{TINY, data, gguf_string, tiny_with};

fn strings() -> Vec<String> {
    serde_json::from_str(&read_to_string(data("strings.json")).unwrap()).unwrap()
}

fn expected(name: &str) -> Vec<Vec<u32>> {
    let mut all: BTreeMap<String, Vec<Vec<u32>>> =
        serde_json::from_str(&read_to_string(data("ids.json")).unwrap()).unwrap();
    all.remove(name).unwrap_or_else(|| panic!("no ids for {name}"))
}

fn compare(name: &str, got: impl Fn(&str) -> Vec<u32>) {
    let (strings, expected) = (strings(), expected(name));
    assert_eq!(strings.len(), expected.len());
    assert!(strings.len() > 200);
    let wrong: Vec<_> = strings
        .iter()
        .zip(&expected)
        .filter(|(string, want)| got(string) != **want)
        .map(|(string, want)| format!("{string:?}: want {want:?}, got {:?}", got(string)))
        .collect();
    assert!(wrong.is_empty(), "{name}: {} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_gguf_pre_tokenizer_cuts_words_otherwise_than_its_model() {
    let folder = tempfile::tempdir().unwrap();
    for family in ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "default"] {
        let path = tiny_with(folder.path(), "tokenizer.ggml.pre", Some(&gguf_string(family)));
        let text = Text::load(&path).unwrap();
        compare(&format!("tiny {family}"), |string| text.encode_chat(string).unwrap());
    }
}

#[test]
fn tokenizer_json_gives_other_ids_than_the_same_vocabulary_in_gguf() {
    let text = Text::load(&data("tiny-json/tokenizer.json")).unwrap();
    compare("tiny smollm", |string| text.encode_chat(string).unwrap());
    for string in strings() {
        let ids = text.encode_chat(&string).unwrap();
        assert_eq!(text.decode(&ids, true).unwrap(), TINY.decode(&ids, true).unwrap());
    }
}

#[test]
fn a_text_does_not_survive_encoding_and_decoding() {
    for string in strings() {
        assert_eq!(TINY.decode(&TINY.encode_chat(&string).unwrap(), false).unwrap(), string);
    }
}

#[test]
fn pieces_with_space_marks_and_byte_tokens_decode_otherwise_than_the_reference() {
    let text = Text::load(&data("pieces-json/tokenizer.json")).unwrap();
    // its file asks for truncation to 8 tokens, and for <s> in front
    compare("pieces", |string| text.encode_prompt(string).unwrap());
    let decoded: BTreeMap<String, Vec<String>> =
        serde_json::from_str(&read_to_string(data("decoded.json")).unwrap()).unwrap();
    let mut with_bytes = 0;
    for (ids, want) in expected("pieces").iter().zip(&decoded["pieces"]) {
        with_bytes += usize::from(!want.is_ascii());
        assert_eq!(text.decode(ids, true).unwrap(), *want);
    }
    let inner = text.encode_chat("xy").unwrap();
    assert_eq!(text.decode(&inner, true).unwrap(), "xy");
    let end = text.decode(&inner[inner.len() - 1..], true).unwrap();
    assert!(
        "xy".ends_with(&end) && !end.is_empty(),
        "only a space is stripped, not {end:?}"
    );
    assert!(
        with_bytes > 50,
        "the corpus must have characters that are spelled as bytes"
    );
}

#[test]
fn a_prompt_begins_with_no_or_two_bos() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny_with(folder.path(), "tokenizer.ggml.add_bos_token", Some(&[7, 0, 0, 0, 1]));
    let text = Text::load(&path).unwrap();
    let plain = text.encode_chat("Hello").unwrap();
    assert_eq!(text.encode_prompt("Hello").unwrap(), [&[1], &plain[..]].concat());
    // what a template wrote stands alone, its own <|im_start|> included
    assert_eq!(
        text.encode_chat("<|im_start|>Hello").unwrap(),
        [&[1], &plain[..]].concat()
    );
    assert_eq!(TINY.encode_prompt("Hello").unwrap(), plain, "this model asks for none");

    // llama-bpe files that do not say want one
    let path = tiny_with(folder.path(), "tokenizer.ggml.add_bos_token", None);
    assert_eq!(Text::load(&path).unwrap().encode_prompt("Hello").unwrap(), plain);
    let text = std::fs::read(&path).unwrap();
    let at = text.windows(6).position(|window| window == b"smollm").unwrap();
    let renamed = [&text[..at - 8], &gguf_string("llama-bpe")[4..], &text[at + 6..]].concat();
    std::fs::write(&path, renamed).unwrap();
    assert_eq!(Text::load(&path).unwrap().encode_prompt("Hello").unwrap()[0], 1);
}

#[test]
fn special_tokens_are_taken_for_plain_text() {
    let ids = TINY
        .encode_prompt("<|im_start|>user\n<tool>x</tool><|im_end|>")
        .unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (1, 2));
    assert_eq!(
        TINY.decode(&ids, true).unwrap(),
        "user\n<tool>x</tool>",
        "a user's token stays, a control token goes"
    );
    assert_eq!(
        TINY.decode(&ids, false).unwrap(),
        "<|im_start|>user\n<tool>x</tool><|im_end|>"
    );
    assert_eq!(TINY.eos_ids(), [2, 0], "end of turn, and end of text by its name");
}

#[test]
fn an_end_of_sequence_that_is_not_marked_as_control_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let id = TINY.encode_chat("!").unwrap()[0];
    let path = tiny_with(
        folder.path(),
        "tokenizer.ggml.eos_token_id",
        Some(&[4u32.to_le_bytes(), id.to_le_bytes()].concat()),
    );
    let text = Text::load(&path).unwrap();
    assert_eq!(text.eos_ids()[0], id);
    assert_eq!(text.decode(&[id], true).unwrap(), "");
}

/// The real model's file: `TANDEM_TEST_MODEL`, or where `make model` puts it.
fn model() -> Option<PathBuf> {
    let path = match std::env::var_os("TANDEM_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.demo/models/smollm2/model.gguf"),
    };
    if path.exists() {
        return Some(path);
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{} is missing: run `make model`",
        path.display()
    );
    eprintln!("skipped: {} is missing; `make model` fetches it", path.display());
    None
}

#[test]
fn smollm2_gets_other_ids_than_the_reference() {
    let Some(path) = model() else { return };
    let text = Text::load(&path).unwrap();
    compare("smollm2 smollm", |string| text.encode_prompt(string).unwrap());
    let messages = [tandem_router::text::Message::text(
        "user",
        "What is the capital of France?",
    )];
    let prompt = text
        .render_chat(&tandem_router::text::ChatInput::new(&messages))
        .unwrap();
    assert!(prompt.ends_with("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"));
    let ids = text.encode_chat(&prompt).unwrap();
    assert_eq!(
        ids.iter().filter(|&&id| id == 1).count(),
        3,
        "system, user and assistant each begin once"
    );
    assert_eq!(text.eos_ids()[0], 2);
}
