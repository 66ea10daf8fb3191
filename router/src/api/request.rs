//! The body of a request. A wrong type names its field; a field that is not known is ignored, as OpenAI's servers do; one that
//! is known and would change the answer is refused while it is not supported.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::fields::{LogitBias, Prompts, ResponseFormat, Stop};
use super::sampling::MAX_LOGPROBS;
use crate::error::RouterError;
use crate::text::{Json, Message};

/// Fields of both APIs. Repeated in both structs by a macro, because serde's `flatten` would lose the path of a wrong field.
/// A refused field is named with the value that changes nothing.
macro_rules! body {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* }
        refused { $($refused:ident = $neutral:tt,)* }
    ) => {
        body! {
            @all $(#[$doc])* $name {
                $($(#[$fdoc])* $field: $type,)*
                /// Which model.
                model: String,
                /// Most tokens of the answer.
                max_tokens: u32,
                /// The same by its newer name.
                max_completion_tokens: u32,
                /// No end before so many tokens.
                min_tokens: u32,
                /// 0 is greedy.
                temperature: f32,
                /// Nucleus.
                top_p: f32,
                /// Only the so many likeliest; 0 or -1: all.
                top_k: i64,
                /// Only those at least this share as likely as the likeliest.
                min_p: f32,
                /// Against what the answer has.
                presence_penalty: f32,
                /// The same, each time it has it.
                frequency_penalty: f32,
                /// Against what prompt and answer have; 1 is none.
                repetition_penalty: f32,
                /// Added to the logits of single tokens.
                logit_bias: LogitBias,
                /// For the same draw again.
                seed: i64,
                /// Texts that end the answer.
                stop: Stop,
                /// Token ids that end the answer.
                stop_token_ids: Vec<u32>,
                /// The model's own end does not end the answer.
                ignore_eos: bool,
                /// Special tokens are no part of the text.
                skip_special_tokens: bool,
                /// What the text must be.
                response_format: ResponseFormat,
                /// So many answers to each prompt.
                n: u32,
                /// Piece by piece.
                stream: bool,
                /// How.
                stream_options: StreamOptions,
            }
            refused {
                $($refused = $neutral,)*
                prompt_logprobs = null,
                use_beam_search = false,
                allowed_token_ids = null,
                bad_words = [],
                include_stop_str_in_output = false,
                truncate_prompt_tokens = null,
                return_token_ids = false,
                return_tokens_as_token_ids = false,
                guided_json = null,
                guided_regex = null,
                guided_choice = null,
                guided_grammar = null,
                structured_outputs = null,
                logits_processors = null,
            }
        }
    };
    (
        @all $(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* }
        refused { $($refused:ident = $neutral:tt,)* }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: Option<$type>,)*
            $($refused: Option<serde_json::Value>,)*
        }

        impl $name {
            /// Every field that is known, so that a test can miss none.
            pub const FIELDS: &[&str] = &[$(stringify!($field),)* $(stringify!($refused),)*];

            /// The fields of both APIs.
            pub fn common(&self) -> Common<'_> {
                Common {
                    model: self.model.as_deref(),
                    max_tokens: self.max_completion_tokens.or(self.max_tokens),
                    max_tokens_field: if self.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" },
                    min_tokens: self.min_tokens,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.as_ref().map_or(&[][..], |biases| &biases.0),
                    logprobs: None,
                    seed: self.seed,
                    stop: self.stop.as_ref().map_or(&[][..], |stop| &stop.0),
                    stop_token_ids: self.stop_token_ids.as_deref().unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
                    response_format: self.response_format.as_ref(),
                    n: self.n.unwrap_or(1),
                    stream: self.stream.unwrap_or(false),
                    include_usage: self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
                }
            }

            /// Reads a body.
            pub fn read(json: &[u8]) -> Result<Self, RouterError> {
                let body: Self = read(json)?;
                $(refuse(stringify!($refused), body.$refused.as_ref(), &json!($neutral))?;)*
                if body.stream_options.is_some() && body.stream != Some(true) {
                    return Err(RouterError::field("stream_options", "only allowed when stream is true"));
                }
                if body.max_tokens.is_some() && body.max_completion_tokens.is_some() && body.max_tokens != body.max_completion_tokens {
                    return Err(RouterError::field("max_tokens", "differs from max_completion_tokens; give one of them"));
                }
                Ok(body)
            }
        }
    };
}

/// `stream_options`.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: Option<bool>,
}

/// The fields of both APIs, some with their defaults.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the API")]
pub struct Common<'a> {
    /// Which model.
    pub model: Option<&'a str>,
    /// Most tokens of the answer.
    pub max_tokens: Option<u32>,
    /// By which name it was given.
    pub max_tokens_field: &'static str,
    /// No end before so many tokens.
    pub min_tokens: Option<u32>,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Only the so many likeliest; 0 or -1: all.
    pub top_k: Option<i64>,
    /// Only those at least this share as likely as the likeliest.
    pub min_p: Option<f32>,
    /// Against what the answer has.
    pub presence_penalty: Option<f32>,
    /// The same, each time it has it.
    pub frequency_penalty: Option<f32>,
    /// Against what prompt and answer have; 1 is none.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of single tokens.
    pub logit_bias: &'a [(u32, f32)],
    /// Report each token's log-probability, with so many of the likeliest.
    pub logprobs: Option<u32>,
    /// For the same draw again.
    pub seed: Option<i64>,
    /// Texts that end the answer.
    pub stop: &'a [String],
    /// Token ids that end the answer.
    pub stop_token_ids: &'a [u32],
    /// The model's own end does not end the answer.
    pub ignore_eos: bool,
    /// Special tokens are no part of the text.
    pub skip_special_tokens: bool,
    /// What the text must be.
    pub response_format: Option<&'a ResponseFormat>,
    /// So many answers to each prompt.
    pub n: u32,
    /// Piece by piece.
    pub stream: bool,
    /// With the usage as last chunk.
    pub include_usage: bool,
}

body! {
    /// `/v1/chat/completions`.
    ChatBody {
        /// The conversation.
        messages: Vec<Message>,
        /// Further variables of the chat template.
        chat_template_kwargs: Json,
        /// What may be called.
        tools: Json,
        /// What must be.
        tool_choice: Json,
        /// More than one call in an answer.
        parallel_tool_calls: bool,
        /// Report each token's log-probability.
        logprobs: bool,
        /// With so many of the likeliest.
        top_logprobs: u32,
    }
    refused {
        functions = [],
        function_call = "auto",
        audio = null,
        modalities = ["text"],
        echo = false,
        add_special_tokens = false,
        add_generation_prompt = true,
        continue_final_message = false,
        chat_template = null,
        documents = [],
        web_search_options = null,
    }
}

body! {
    /// `/v1/completions`.
    CompletionBody {
        /// What to continue.
        prompt: Prompts,
        /// Report each token's log-probability, with so many of the likeliest.
        logprobs: u32,
        /// Only as many as `n`.
        best_of: u32,
    }
    refused {
        echo = false,
        suffix = "",
        add_special_tokens = true,
        prompt_embeds = null,
    }
}

impl ChatBody {
    /// How many of the likeliest tokens are reported with each, if log-probabilities were asked for.
    pub fn scores(&self) -> Result<Option<u32>, RouterError> {
        let top = self.top_logprobs.unwrap_or(0);
        if self.logprobs == Some(true) {
            return at_most(MAX_LOGPROBS, "top_logprobs", top).map(Some);
        }
        if top > 0 {
            return Err(RouterError::field("top_logprobs", "only allowed when logprobs is true"));
        }
        Ok(None)
    }
}

impl CompletionBody {
    /// How many of the likeliest tokens are reported with each, if log-probabilities were asked for.
    pub fn scores(&self) -> Result<Option<u32>, RouterError> {
        self.logprobs
            .map(|top| at_most(MAX_LOGPROBS, "logprobs", top))
            .transpose()
    }

    /// Refuses to make more answers than are given.
    pub fn check_best_of(&self) -> Result<(), RouterError> {
        let n = self.n.unwrap_or(1);
        match self.best_of {
            Some(best_of) if best_of != n => Err(RouterError::Unsupported {
                param: "best_of".into(),
                detail: format!("only the same as n, which is {n}, is supported"),
            }),
            _ => Ok(()),
        }
    }
}

fn at_most(most: u32, param: &str, value: u32) -> Result<u32, RouterError> {
    if value <= most {
        return Ok(value);
    }
    Err(RouterError::field(param, format!("{value} is not in 0 to {most}")))
}

/// Refuses a field that is not supported, unless it has the value that changes nothing or says nothing.
fn refuse(param: &str, given: Option<&serde_json::Value>, neutral: &serde_json::Value) -> Result<(), RouterError> {
    use serde_json::Value;
    let Some(given) = given else { return Ok(()) };
    let nothing = match given {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    };
    if nothing || given == neutral || given == "none" {
        return Ok(());
    }
    let detail = match neutral {
        Value::Null => "not supported; leave it out".to_owned(),
        neutral => format!("only {neutral} is supported"),
    };
    Err(RouterError::Unsupported {
        param: param.to_owned(),
        detail,
    })
}

/// Reads JSON; the error names the field: where it is at fault, it is read again and the path to the field is followed. Following
/// it always would be 3 % of a request whose prompt is token ids.
pub(super) fn read<T: DeserializeOwned>(json: &[u8]) -> Result<T, RouterError> {
    serde_json::from_slice(json).or_else(|_| read_with_path(json))
}

fn read_with_path<T: DeserializeOwned>(json: &[u8]) -> Result<T, RouterError> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let body = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, error.inner())
    })?;
    deserializer
        .end()
        .map_err(|error| RouterError::MalformedJson(error.to_string()))?;
    Ok(body)
}

fn explain(path: &str, error: &serde_json::Error) -> RouterError {
    let text = error.to_string();
    if !error.is_data() {
        return RouterError::MalformedJson(text);
    }
    // serde_json appends " at line L column C"; the path says it better
    let detail = text
        .rsplit_once(" at line ")
        .map_or(text.as_str(), |(detail, _)| detail);
    let path = if path == "." { "" } else { path };
    let missing = detail
        .strip_prefix("missing field `")
        .and_then(|rest| rest.strip_suffix('`'));
    match missing {
        Some(field) if path.is_empty() => RouterError::field(field, "missing"),
        Some(field) => RouterError::field(format!("{path}.{field}"), "missing"),
        None if path.is_empty() => RouterError::field("", format!("the body is not an object: {detail}")),
        None => RouterError::field(path, detail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(json: &str) -> Result<ChatBody, RouterError> {
        ChatBody::read(json.as_bytes())
    }

    #[test]
    fn a_wrong_type_names_its_field() {
        let m = r#""messages":[{"role":"user","content":"x"}]"#;
        let cases = [
            (format!(r#"{{{m},"max_tokens":"x"}}"#), "max_tokens"),
            (format!(r#"{{{m},"max_tokens":-1}}"#), "max_tokens"),
            (format!(r#"{{{m},"max_tokens":1.5}}"#), "max_tokens"),
            (format!(r#"{{{m},"temperature":"hot"}}"#), "temperature"),
            (format!(r#"{{{m},"stop":5}}"#), "stop"),
            (format!(r#"{{{m},"stop":["a",5]}}"#), "stop[1]"),
            (format!(r#"{{{m},"stream":"yes"}}"#), "stream"),
            (
                format!(r#"{{{m},"stream_options":{{"include_usage":3}}}}"#),
                "stream_options.include_usage",
            ),
            (format!(r#"{{{m},"stop_token_ids":[1,-2]}}"#), "stop_token_ids[1]"),
            (
                r#"{"messages":[{"role":"user","content":5}]}"#.into(),
                "messages[0].content",
            ),
            (r#"{"messages":[{"role":5,"content":"x"}]}"#.into(), "messages[0].role"),
            (r#"{"messages":[{"content":"x"}]}"#.into(), "messages[0].role"),
            (
                r#"{"messages":[{"role":"user","content":[{"type":"text","text":1}]}]}"#.into(),
                "messages[0].content[0].text",
            ),
            (r#"{"messages":"hello"}"#.into(), "messages"),
            (r#"{"model":1}"#.into(), "model"),
        ];
        for (json, param) in cases {
            let error = chat(&json).unwrap_err();
            assert_eq!(error.param(), Some(param), "{json}: {error}");
            assert_eq!(error.code(), "invalid_field");
            assert!(error.to_string().starts_with(param), "{error}");
            assert!(!error.to_string().contains("column"), "{error}");
        }
    }

    #[test]
    fn what_is_no_json_is_told_from_what_is_no_object() {
        for json in ["", "{", "{\"a\":}", "nonsense", "{} trailing"] {
            assert_eq!(chat(json).unwrap_err().code(), "malformed_json", "{json}");
        }
        assert_eq!(chat("[1]").unwrap_err().code(), "invalid_field");
        assert_eq!(chat("5").unwrap_err().param(), None);
    }

    #[test]
    fn null_is_as_good_as_absent() {
        let body = chat(r#"{"messages":null,"stop":null,"max_tokens":null,"stream":null,"tools":null}"#).unwrap();
        assert!(body.messages.is_none() && body.common().stop.is_empty());
    }

    #[test]
    fn stream_options_without_stream_are_refused() {
        let error = chat(r#"{"stream_options":{"include_usage":true}}"#).unwrap_err();
        assert_eq!(error.param(), Some("stream_options"));
    }
}
