//! Streamed answers, as server-sent events. The parts of a chunk that never change are written once.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;

use super::Head;
use super::answer::{Usage, call_id};
use super::logprobs::Logprobs;
use crate::error::RouterError;
use crate::flow::{Finish, Piece};
use crate::metrics::Endpoint;
use crate::text::{ToolEvent, Vocabulary};

/// What a good stream ends with, and a broken one never does.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");
/// Keeps whatever lies between the client and us from closing a silent connection.
pub const COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// Writes the chunks of one answer.
#[derive(Debug)]
pub struct Chunks {
    endpoint: Endpoint,
    /// Each piece comes with the log-probabilities of its tokens.
    scores: Option<Arc<Vocabulary>>,
    /// `data: {"id":…,"model":…,` as bytes.
    head: Vec<u8>,
    /// `,"usage":null` where the last chunk brings the usage.
    usage: &'static str,
}

impl Chunks {
    /// Chunks under `head`; with `include_usage` each says that its usage is null. `scores`: with log-probabilities.
    pub fn new(head: &Head, include_usage: bool, scores: Option<Arc<Vocabulary>>) -> Self {
        #[derive(Serialize)]
        struct Begin<'a> {
            id: &'a str,
            object: &'a str,
            created: u64,
            model: &'a str,
        }
        let chat = head.endpoint == Endpoint::Chat;
        let begin = Begin {
            id: &head.id,
            object: if chat {
                "chat.completion.chunk"
            } else {
                "text_completion"
            },
            created: head.created,
            model: &head.model,
        };
        let mut bytes = b"data: ".to_vec();
        bytes.extend(serde_json::to_vec(&begin).unwrap_or_default());
        bytes.pop();
        bytes.push(b',');
        Self {
            endpoint: head.endpoint,
            scores,
            head: bytes,
            usage: if include_usage { ",\"usage\":null" } else { "" },
        }
    }

    fn chat(&self) -> bool {
        self.endpoint == Endpoint::Chat
    }

    /// The first chunk of a chat, before any text; completions have none.
    pub fn role(&self, index: usize) -> Option<Bytes> {
        self.chat().then(|| {
            self.chunk(
                index,
                r#"{"role":"assistant","content":"","refusal":null}"#,
                "null",
                None,
            )
        })
    }

    /// A piece of text.
    pub fn text(&self, index: usize, piece: &Piece) -> Bytes {
        let json = serde_json::to_string(&piece.text).unwrap_or_default();
        let scores = self.scores.as_ref().filter(|_| !piece.tokens.is_empty());
        let logprobs = scores.map(|vocabulary| Logprobs::new(self.endpoint, &piece.tokens, vocabulary).to_json());
        let logprobs = logprobs.as_deref().unwrap_or("null");
        if self.chat() {
            self.chunk(index, &format!("{{\"content\":{json}}}"), logprobs, None)
        } else {
            self.chunk(index, &json, logprobs, None)
        }
    }

    /// What a scanner found.
    pub fn event(&self, index: usize, event: &ToolEvent) -> Bytes {
        #[derive(Serialize)]
        struct Delta<'a> {
            tool_calls: [Call<'a>; 1],
        }
        #[derive(Serialize)]
        struct Call<'a> {
            index: usize,
            #[serde(skip_serializing_if = "Option::is_none")]
            id: Option<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            r#type: Option<&'a str>,
            function: Function<'a>,
        }
        #[derive(Serialize)]
        struct Function<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            name: Option<&'a str>,
            arguments: &'a str,
        }
        let call = match event {
            ToolEvent::Text(text) => {
                let text = serde_json::to_string(text).unwrap_or_default();
                return self.chunk(index, &format!("{{\"content\":{text}}}"), "null", None);
            }
            ToolEvent::CallStart { index, name } => Call {
                index: *index,
                id: Some(call_id()),
                r#type: Some("function"),
                function: Function {
                    name: Some(name),
                    arguments: "",
                },
            },
            ToolEvent::Arguments { index, delta } => Call {
                index: *index,
                id: None,
                r#type: None,
                function: Function {
                    name: None,
                    arguments: delta,
                },
            },
        };
        let delta = serde_json::to_string(&Delta { tool_calls: [call] }).unwrap_or_default();
        self.chunk(index, &delta, "null", None)
    }

    /// The end of a choice.
    pub fn finish(&self, index: usize, finish: Finish) -> Bytes {
        self.chunk(index, if self.chat() { "{}" } else { "\"\"" }, "null", Some(finish))
    }

    fn chunk(&self, index: usize, payload: &str, logprobs: &str, finish: Option<Finish>) -> Bytes {
        use std::io::Write;
        let mut bytes = Vec::with_capacity(self.head.len() + payload.len() + logprobs.len() + 128);
        bytes.extend_from_slice(&self.head);
        let name = if self.chat() { "delta" } else { "text" };
        // writing to a Vec cannot fail
        let _ = write!(
            bytes,
            "\"choices\":[{{\"index\":{index},\"{name}\":{payload},\"logprobs\":{logprobs},\"finish_reason\":"
        );
        let _ = match finish {
            None => write!(bytes, "null"),
            Some(finish) => write!(bytes, "\"{}\"", finish.name()),
        };
        let _ = write!(bytes, "}}]{}}}\n\n", self.usage);
        bytes.into()
    }

    /// The usage, after the last choice has ended.
    pub fn usage(&self, usage: &Usage) -> Bytes {
        let mut bytes = self.head.clone();
        bytes.extend_from_slice(b"\"choices\":[],\"usage\":");
        bytes.extend(serde_json::to_vec(usage).unwrap_or_default());
        bytes.extend_from_slice(b"}\n\n");
        bytes.into()
    }
}

/// The last event of a broken stream: OpenAI's envelope, and no `[DONE]` after it.
pub fn error(error: &RouterError, request_id: &str) -> Bytes {
    let mut bytes = b"data: ".to_vec();
    bytes.extend(error.envelope(request_id));
    bytes.extend_from_slice(b"\n\n");
    bytes.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn payload(bytes: &Bytes) -> serde_json::Value {
        let text = std::str::from_utf8(bytes).unwrap();
        serde_json::from_str(text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap()).unwrap()
    }

    proptest! {
        #[test]
        fn any_text_comes_through_a_chunk_unchanged_and_on_one_line(text in ".*", model in "\\PC*") {
            for endpoint in [Endpoint::Chat, Endpoint::Completions] {
                let chunks = Chunks::new(&Head::new(endpoint, &model), true, None);
                let piece = Piece { text: text.clone(), tokens: Vec::new() };
                let bytes = chunks.text(3, &piece);
                prop_assert_eq!(std::str::from_utf8(&bytes).unwrap().matches('\n').count(), 2);
                let json = payload(&bytes);
                prop_assert_eq!(&json["model"], &model);
                let choice = &json["choices"][0];
                prop_assert_eq!(choice["index"].as_u64(), Some(3));
                let place = if endpoint == Endpoint::Chat { &choice["delta"]["content"] } else { &choice["text"] };
                prop_assert_eq!(place, &text);
                prop_assert!(choice["finish_reason"].is_null() && json["usage"].is_null());
            }
        }
    }

    #[test]
    fn an_end_says_why_and_has_no_text() {
        let chunks = Chunks::new(&Head::new(Endpoint::Chat, "m"), false, None);
        let json = payload(&chunks.finish(0, Finish::Length));
        assert_eq!(json["choices"][0]["finish_reason"], "length");
        assert_eq!(json["choices"][0]["delta"], serde_json::json!({}));
        assert!(json.get("usage").is_none());
    }
}
