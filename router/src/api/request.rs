//! The body of a request. A wrong type names its field; a field that is not known is ignored, as OpenAI's servers do; one that
//! is known and would change the answer is refused while it is not supported.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::fields::{Prompts, Stop};
use crate::error::RouterError;
use crate::text::{Json, Message};

/// Fields of both APIs. Repeated in both structs by a macro, because serde's `flatten` would lose the path of a wrong field.
macro_rules! body {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: Option<$type>,)*
            /// Which model.
            pub model: Option<String>,
            /// Most tokens of the answer.
            pub max_tokens: Option<u32>,
            /// The same by its newer name.
            pub max_completion_tokens: Option<u32>,
            /// 0 is greedy.
            pub temperature: Option<f32>,
            /// Nucleus.
            pub top_p: Option<f32>,
            /// For the same draw again.
            pub seed: Option<i64>,
            /// Texts that end the answer.
            pub stop: Option<Stop>,
            /// Token ids that end the answer.
            pub stop_token_ids: Option<Vec<u32>>,
            /// The model's own end does not end the answer.
            pub ignore_eos: Option<bool>,
            /// Piece by piece.
            pub stream: Option<bool>,
            /// How.
            pub stream_options: Option<StreamOptions>,
            /// Not supported above 1.
            pub n: Option<u32>,
            /// Not supported but 0.
            pub presence_penalty: Option<f64>,
            /// Not supported but 0.
            pub frequency_penalty: Option<f64>,
            /// Not supported but 1.
            pub repetition_penalty: Option<f64>,
            /// Not supported but 0 or -1.
            pub top_k: Option<i64>,
            /// Not supported but 0.
            pub min_p: Option<f64>,
            /// Not supported but 0.
            pub min_tokens: Option<u64>,
            /// Not supported.
            pub logit_bias: Option<serde_json::Value>,
            /// Not supported but text.
            pub response_format: Option<serde_json::Value>,
            /// Not supported.
            pub logprobs: Option<serde_json::Value>,
            /// Not supported.
            pub prompt_logprobs: Option<serde_json::Value>,
        }

        impl $name {
            /// The fields of both APIs.
            pub fn common(&self) -> Common<'_> {
                Common {
                    model: self.model.as_deref(),
                    max_tokens: self.max_completion_tokens.or(self.max_tokens),
                    max_tokens_field: if self.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" },
                    temperature: self.temperature,
                    top_p: self.top_p,
                    seed: self.seed,
                    stop: self.stop.as_ref().map_or(&[][..], |stop| &stop.0),
                    stop_token_ids: self.stop_token_ids.as_deref().unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    stream: self.stream.unwrap_or(false),
                    include_usage: self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
                }
            }

            /// Refuses what both APIs do not support yet.
            fn refuse_unsupported(&self) -> Result<(), RouterError> {
                refuse("n", self.n.is_some_and(|n| n != 1), "only 1 is supported")?;
                refuse("presence_penalty", self.presence_penalty.is_some_and(|v| v != 0.0), "only 0 is supported")?;
                refuse("frequency_penalty", self.frequency_penalty.is_some_and(|v| v != 0.0), "only 0 is supported")?;
                refuse("repetition_penalty", self.repetition_penalty.is_some_and(|v| (v - 1.0).abs() > 0.0), "only 1 is supported")?;
                refuse("top_k", self.top_k.is_some_and(|v| v > 0), "only 0 and -1 (off) are supported")?;
                refuse("min_p", self.min_p.is_some_and(|v| v != 0.0), "only 0 is supported")?;
                refuse("min_tokens", self.min_tokens.is_some_and(|v| v != 0), "only 0 is supported")?;
                refuse("logit_bias", !empty(self.logit_bias.as_ref()), "not supported; leave it out")?;
                let format = self.response_format.as_ref().filter(|f| !f.is_null());
                let plain = format.is_none_or(|format| format["type"] == "text");
                refuse("response_format", !plain, "only {\"type\": \"text\"} is supported")?;
                refuse("prompt_logprobs", on(self.prompt_logprobs.as_ref()), "not supported; leave it out")?;
                if self.stream_options.is_some() && self.stream != Some(true) {
                    return Err(RouterError::field("stream_options", "only allowed when stream is true"));
                }
                if self.max_tokens.is_some() && self.max_completion_tokens.is_some() && self.max_tokens != self.max_completion_tokens {
                    return Err(RouterError::field("max_tokens", "differs from max_completion_tokens; give one of them"));
                }
                Ok(())
            }
        }
    };
}

/// `stream_options`.
#[derive(Debug, Deserialize)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: Option<bool>,
}

/// The fields of both APIs, with their defaults.
#[derive(Debug, Clone, Copy)]
pub struct Common<'a> {
    /// Which model.
    pub model: Option<&'a str>,
    /// Most tokens of the answer.
    pub max_tokens: Option<u32>,
    /// By which name it was given.
    pub max_tokens_field: &'static str,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// For the same draw again.
    pub seed: Option<i64>,
    /// Texts that end the answer.
    pub stop: &'a [String],
    /// Token ids that end the answer.
    pub stop_token_ids: &'a [u32],
    /// The model's own end does not end the answer.
    pub ignore_eos: bool,
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
        /// Not supported.
        tools: serde_json::Value,
        /// Not supported.
        tool_choice: serde_json::Value,
        /// Not supported.
        functions: serde_json::Value,
        /// Not supported.
        top_logprobs: u32,
        /// Further variables of the chat template.
        chat_template_kwargs: Json,
    }
}

body! {
    /// `/v1/completions`.
    CompletionBody {
        /// What to continue.
        prompt: Prompts,
        /// Not supported above 1.
        best_of: u32,
        /// Not supported.
        echo: bool,
        /// Not supported.
        suffix: String,
    }
}

impl ChatBody {
    /// Reads a body.
    pub fn read(json: &[u8]) -> Result<Self, RouterError> {
        let body: Self = read(json)?;
        body.refuse_unsupported()?;
        refuse("tools", !empty(body.tools.as_ref()), "not supported; leave it out")?;
        refuse(
            "functions",
            !empty(body.functions.as_ref()),
            "not supported; leave it out",
        )?;
        let choice = body.tool_choice.as_ref().filter(|choice| !choice.is_null());
        let idle = choice.is_none_or(|choice| choice == "none" || choice == "auto");
        refuse("tool_choice", !idle, "only \"none\" and \"auto\" are supported")?;
        refuse("logprobs", on(body.logprobs.as_ref()), "not supported; leave it out")?;
        refuse(
            "top_logprobs",
            body.top_logprobs.is_some_and(|n| n != 0),
            "not supported; leave it out",
        )?;
        Ok(body)
    }
}

impl CompletionBody {
    /// Reads a body.
    pub fn read(json: &[u8]) -> Result<Self, RouterError> {
        let body: Self = read(json)?;
        body.refuse_unsupported()?;
        refuse("best_of", body.best_of.is_some_and(|n| n > 1), "only 1 is supported")?;
        refuse("echo", body.echo == Some(true), "not supported; leave it out")?;
        refuse(
            "suffix",
            body.suffix.as_ref().is_some_and(|s| !s.is_empty()),
            "not supported; leave it out",
        )?;
        // 0 asks for the chosen token's own
        let asks = body
            .logprobs
            .as_ref()
            .is_some_and(|v| !v.is_null() && *v != serde_json::Value::Bool(false));
        refuse("logprobs", asks, "not supported; leave it out")?;
        Ok(body)
    }
}

fn refuse(param: &str, asked: bool, detail: &str) -> Result<(), RouterError> {
    if asked {
        Err(RouterError::Unsupported {
            param: param.to_owned(),
            detail: detail.to_owned(),
        })
    } else {
        Ok(())
    }
}

fn on(value: Option<&serde_json::Value>) -> bool {
    value.is_some_and(|v| !(v.is_null() || *v == serde_json::Value::Bool(false) || *v == 0))
}

fn empty(value: Option<&serde_json::Value>) -> bool {
    match value {
        None | Some(serde_json::Value::Null) => true,
        Some(serde_json::Value::Array(list)) => list.is_empty(),
        Some(serde_json::Value::Object(map)) => map.is_empty(),
        Some(_) => false,
    }
}

fn read<T: DeserializeOwned>(json: &[u8]) -> Result<T, RouterError> {
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
    fn what_would_change_the_answer_is_refused_by_name_and_its_neutral_value_is_not() {
        for (param, value) in [
            ("n", "2"),
            ("presence_penalty", "0.5"),
            ("frequency_penalty", "-0.5"),
            ("repetition_penalty", "1.1"),
            ("top_k", "40"),
            ("min_p", "0.1"),
            ("min_tokens", "3"),
            ("logit_bias", r#"{"5":1}"#),
            ("response_format", r#"{"type":"json_object"}"#),
            ("tools", r#"[{"type":"function"}]"#),
            ("functions", "[{}]"),
            ("tool_choice", r#""required""#),
            ("logprobs", "true"),
            ("top_logprobs", "2"),
        ] {
            let error = chat(&format!(r#"{{"{param}":{value}}}"#)).unwrap_err();
            assert_eq!((error.param(), error.code()), (Some(param), "unsupported_parameter"));
        }
        let neutral = r#"{"n":1,"presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1,"top_k":-1,"min_p":0,
            "min_tokens":0,"logit_bias":{},"response_format":{"type":"text"},"tools":[],"functions":null,"tool_choice":"auto",
            "logprobs":false,"top_logprobs":0,"user":"someone","metadata":{"a":1},"unheard_of":[1]}"#;
        assert!(chat(neutral).is_ok());
        for json in [
            r#"{"best_of":2}"#,
            r#"{"echo":true}"#,
            r#"{"suffix":"x"}"#,
            r#"{"logprobs":0}"#,
        ] {
            assert_eq!(
                CompletionBody::read(json.as_bytes()).unwrap_err().code(),
                "unsupported_parameter",
                "{json}"
            );
        }
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
