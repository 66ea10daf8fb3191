//! Chat templates render byte for byte what Python's Jinja2 renders (`tests/golden/renderings.py`).

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use tandem_router::text::{ChatInput, ChatTemplate, Json, Message, TextError};

use super::data;

#[derive(Deserialize)]
struct Conversation {
    name: String,
    messages: Vec<Message>,
    tools: Option<Json>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Json>,
}

#[derive(Deserialize, PartialEq, Debug)]
#[serde(untagged)]
enum Expected {
    Text(String),
    Raises { raises: String },
}

fn conversations() -> Vec<Conversation> {
    serde_json::from_str(&read_to_string(data("conversations.json")).unwrap()).unwrap()
}

/// 2026-07-04 09:05:03 UTC, the generator's clock.
fn clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_783_155_903)
}

fn compile(source: &str) -> Result<ChatTemplate, TextError> {
    let special = [
        ("bos_token", "<|begin|>"),
        ("eos_token", "<|im_end|>"),
        ("pad_token", "<|pad|>"),
    ];
    let special = special.map(|(name, token)| (name.to_owned(), token.to_owned())).into();
    ChatTemplate::compile_with_clock(source, &special, clock)
}

#[test]
fn templates_render_other_bytes_than_jinja2() {
    let expected: BTreeMap<String, BTreeMap<String, Expected>> =
        serde_json::from_str(&read_to_string(data("renderings.json")).unwrap()).unwrap();
    let conversations = conversations();
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (name, expected) in &expected {
        let source = read_to_string(data(&format!("templates/{name}.jinja"))).unwrap();
        let template = compile(&source).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(expected.len(), conversations.len());
        for conversation in &conversations {
            let got = template.render(&ChatInput {
                messages: &conversation.messages,
                tools: conversation.tools.as_ref(),
                add_generation_prompt: conversation.add_generation_prompt.unwrap_or(true),
                kwargs: conversation.chat_template_kwargs.as_ref(),
            });
            let got = match got {
                Ok(text) => Expected::Text(text),
                Err(TextError::Render { reason }) => Expected::Raises { raises: reason },
                Err(other) => panic!("{name}, {}: {other}", conversation.name),
            };
            compared += 1;
            let want = &expected[&conversation.name];
            if got != *want {
                wrong.push(format!("{name}, {}:\n{}", conversation.name, difference(want, &got)));
            }
        }
    }
    assert!(compared > 100, "only {compared} renderings compared");
    assert!(
        wrong.is_empty(),
        "{} of {compared} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// The first lines that differ.
fn difference(want: &Expected, got: &Expected) -> String {
    if let (Expected::Text(want), Expected::Text(got)) = (want, got) {
        let pair = want.lines().zip(got.lines()).find(|(want, got)| want != got);
        if let Some((want, got)) = pair {
            return format!("  want {want:?}\n  got  {got:?}");
        }
    }
    let short = |text: String| text.chars().take(300).collect::<String>();
    format!(
        "  want {}\n  got  {}",
        short(format!("{want:?}")),
        short(format!("{got:?}"))
    )
}
