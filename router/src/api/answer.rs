//! Whole answers.

use serde::Serialize;

use super::Head;
use super::logprobs::Logprobs;
use crate::flow::{Done, Piece};
use crate::metrics::Endpoint;
use crate::text::tools::{self, ToolCall};
use crate::text::{ToolFormat, Vocabulary};

/// OpenAI's `usage`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

impl Usage {
    /// Of all choices together. How much was cached is said only if it is known of each.
    pub fn of<'a>(all: impl IntoIterator<Item = &'a Done>) -> Self {
        let mut usage = Self::default();
        let mut cached = Some(0);
        for done in all {
            usage.prompt_tokens += done.prompt_tokens;
            usage.completion_tokens += done.completion_tokens;
            cached = cached.zip(done.cached_tokens).map(|(sum, cached)| sum + cached);
        }
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
        usage.prompt_tokens_details = cached.map(|cached_tokens| PromptDetails { cached_tokens });
        usage
    }
}

/// One finished choice: all of it, and its end.
#[derive(Debug)]
pub struct Whole {
    /// All of its text.
    pub piece: Piece,
    /// Its end.
    pub done: Done,
    /// The calls that were written in it, which its text has no more.
    pub calls: Vec<ToolCall>,
}

impl Whole {
    /// Takes the calls out of the text, and keeps at most `most` of them.
    pub fn new(mut piece: Piece, mut done: Done, format: Option<ToolFormat>, most: usize) -> Self {
        let mut calls = Vec::new();
        if let Some(format) = format {
            let parts = tools::whole(format, &piece.text);
            (piece.text, calls) = (parts.text, parts.calls);
            calls.truncate(most);
            if !calls.is_empty() {
                done.finish = done.finish.with_calls();
            }
        }
        Self { piece, done, calls }
    }
}

/// A call's name for the message that answers it.
pub fn call_id() -> String {
    format!("call_{:024x}", rand::random::<u128>() >> 32)
}

/// The answer as JSON; `scores`: with log-probabilities.
pub fn whole(head: &Head, choices: &[Whole], scores: Option<&Vocabulary>) -> Vec<u8> {
    #[derive(Serialize)]
    struct Answer<'a> {
        id: &'a str,
        object: &'a str,
        created: u64,
        model: &'a str,
        choices: Vec<Choice<'a>>,
        usage: Usage,
    }
    #[derive(Serialize)]
    struct Choice<'a> {
        index: usize,
        #[serde(skip_serializing_if = "Option::is_none")]
        message: Option<Message<'a>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<&'a str>,
        logprobs: Option<Logprobs<'a>>,
        finish_reason: &'a str,
    }
    #[derive(Serialize)]
    struct Message<'a> {
        role: &'a str,
        content: Option<&'a str>,
        refusal: (),
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<Call<'a>>,
    }
    #[derive(Serialize)]
    struct Call<'a> {
        id: String,
        r#type: &'a str,
        function: Function<'a>,
    }
    #[derive(Serialize)]
    struct Function<'a> {
        name: &'a str,
        arguments: &'a str,
    }
    fn call(call: &ToolCall) -> Call<'_> {
        Call {
            id: call_id(),
            r#type: "function",
            function: Function {
                name: &call.name,
                arguments: &call.arguments,
            },
        }
    }
    let chat = head.endpoint == Endpoint::Chat;
    let answer = Answer {
        id: &head.id,
        object: if chat { "chat.completion" } else { "text_completion" },
        created: head.created,
        model: &head.model,
        choices: choices
            .iter()
            .enumerate()
            .map(|(index, choice)| Choice {
                index,
                message: chat.then_some(Message {
                    role: "assistant",
                    content: Some(choice.piece.text.as_str())
                        .filter(|text| choice.calls.is_empty() || !text.is_empty()),
                    refusal: (),
                    tool_calls: choice.calls.iter().map(call).collect(),
                }),
                text: (!chat).then_some(&choice.piece.text),
                logprobs: scores.map(|vocabulary| Logprobs::new(head.endpoint, &choice.piece.tokens, vocabulary)),
                finish_reason: choice.done.finish.name(),
            })
            .collect(),
        usage: Usage::of(choices.iter().map(|choice| &choice.done)),
    };
    serde_json::to_vec(&answer).unwrap_or_default()
}

/// An object of `/v1/models`.
#[derive(Debug, Serialize)]
pub struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,
}

impl<'a> Model<'a> {
    /// The one model.
    pub fn new(id: &'a str, created: u64, max_model_len: Option<u32>) -> Self {
        Self {
            id,
            object: "model",
            created,
            owned_by: "tandem",
            max_model_len,
        }
    }

    /// As JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The list of it alone, as JSON.
    pub fn to_list(&self) -> Vec<u8> {
        serde_json::to_vec(&serde_json::json!({"object": "list", "data": [self]})).unwrap_or_default()
    }
}
