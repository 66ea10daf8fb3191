//! One error for everything a request can meet, and the one place that turns it into an answer.

use std::time::Duration;

use http::StatusCode;
use serde::Serialize;
use tandem_wire::reason::{Meaning, meaning, source_name};
use tandem_wire::{Failure, Reason, Source};

use crate::text::TextError;

/// Why a request was not answered.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RouterError {
    /// The body is not JSON.
    #[error("the body is not valid JSON: {0}")]
    MalformedJson(String),
    /// A field has a wrong type or value.
    #[error("{detail}")]
    Field {
        /// Path of the field, as in `messages[0].content`; empty for the body itself.
        param: String,
        /// What is wrong and what would be right; begins with the path.
        detail: String,
    },
    /// A field asks for something that would change the answer and is not implemented.
    #[error("{param}: {detail}")]
    Unsupported {
        /// Path of the field.
        param: String,
        /// What is supported instead.
        detail: String,
    },
    /// The body is larger than `--max-body-bytes`.
    #[error("the body has more than {limit_bytes} bytes, the limit of this server")]
    BodyTooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// The bodies that are being read have as many bytes together as they may.
    #[error(
        "the requests that are arriving hold {limit_bytes} bytes already, the limit of this server; try again later"
    )]
    BodiesFull {
        /// `--max-bodies-bytes`.
        limit_bytes: usize,
    },
    /// The body did not arrive whole.
    #[error("the body did not arrive: {0}")]
    BodyIncomplete(String),
    /// The body did not arrive in time.
    #[error("the body did not arrive within {} s", .0.as_secs())]
    BodyTimeout(Duration),
    /// The body is declared to be something other than JSON.
    #[error("content type {0:?} is not supported; send application/json")]
    ContentType(String),
    /// The request came without a secret that opens what it asks for.
    #[error("{0}")]
    Unauthorized(Locked),
    /// No such path.
    #[error("no such path: {method} {path}")]
    NoPath {
        /// Method asked with.
        method: String,
        /// Path asked for.
        path: String,
    },
    /// The path exists, but not with this method.
    #[error("{path} does not take {method}; use {allow}")]
    Method {
        /// Method asked with.
        method: String,
        /// Path asked for.
        path: String,
        /// The method it takes.
        allow: &'static str,
    },
    /// A model that is not served here.
    #[error("the model `{asked}` does not exist; this server has `{served}`")]
    UnknownModel {
        /// Asked for.
        asked: String,
        /// Served.
        served: String,
    },
    /// Prompt and answer do not fit the model.
    #[error("{detail}")]
    ContextLength {
        /// The field whose length it is.
        param: &'static str,
        /// Names both lengths.
        detail: String,
    },
    /// As many requests wait as may wait.
    #[error("{limit} requests are waiting already; try again later")]
    QueueFull {
        /// `--queue-limit`.
        limit: usize,
    },
    /// No engine had room within `--queue-ms`.
    #[error("no engine had room within {:.1} s; try again later", waited.as_secs_f64())]
    QueueTimeout {
        /// Time spent waiting.
        waited: Duration,
    },
    /// No decode engine can be used.
    #[error("no decode engine can be used: {0}")]
    NoDecode(String),
    /// No prefill engine can be used.
    #[error("no prefill engine can be used: {0}")]
    NoPrefill(String),
    /// An order keeps requests from the engines.
    #[error("this server takes no requests for now: its engines are being changed; try again later")]
    NotAdmitted,
    /// The router is shutting down.
    #[error("this router is shutting down")]
    Draining,
    /// The request's own time is over.
    #[error("the request took longer than {} s, the limit of this server", .0.as_secs())]
    Deadline(Duration),
    /// The router failed.
    #[error("{0}")]
    Internal(String),
    /// An engine refused or failed.
    #[error("{0}")]
    Engine(Failure),
}

/// What a request has no secret for, and what it came with instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Locked {
    /// The API, without a key.
    #[error("no API key: send one as `Authorization: Bearer KEY`")]
    NoKey,
    /// The API, with a key that is none.
    #[error("the API key is not one of this server's")]
    WrongKey,
    /// An admin path, without the token.
    #[error("no admin token: send it as `Authorization: Bearer TOKEN`")]
    NoToken,
    /// An admin path, with something else.
    #[error("the admin token is not this router's")]
    WrongToken,
}

/// What an error means to a client; decides the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The request is wrong.
    Invalid,
    /// It has no secret that opens what it asks for.
    Locked,
    /// It names something that does not exist.
    NotFound,
    /// Wrong method.
    Method,
    /// The request did not arrive in time.
    Slow,
    /// The request is too large.
    TooLarge,
    /// The body is no JSON by its own declaration.
    MediaType,
    /// Too many requests wait.
    Busy,
    /// Nothing can serve it now.
    Unavailable,
    /// Its time is over.
    Timeout,
    /// The router is at fault.
    Internal,
    /// As the reason table says.
    Reason(Reason),
}

impl Class {
    /// The status of an answer of this class.
    pub fn status(self) -> StatusCode {
        match self {
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::Locked => StatusCode::UNAUTHORIZED,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Reason(reason) => {
                StatusCode::from_u16(meaning(reason).http).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }

    /// OpenAI's `type` of an answer of this class.
    fn kind(self) -> &'static str {
        match self.status().as_u16() {
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }
}

impl RouterError {
    /// A wrong value of one field.
    pub fn field(param: impl Into<String>, detail: impl AsRef<str>) -> Self {
        let param = param.into();
        let detail = if param.is_empty() {
            detail.as_ref().to_owned()
        } else {
            format!("{param}: {}", detail.as_ref())
        };
        Self::Field { param, detail }
    }

    /// What it means to a client.
    pub fn class(&self) -> Class {
        match self {
            Self::MalformedJson(_)
            | Self::Field { .. }
            | Self::Unsupported { .. }
            | Self::BodyIncomplete(_)
            | Self::ContextLength { .. } => Class::Invalid,
            Self::BodyTooLarge { .. } => Class::TooLarge,
            Self::BodyTimeout(_) => Class::Slow,
            Self::ContentType(_) => Class::MediaType,
            Self::Unauthorized(_) => Class::Locked,
            Self::NoPath { .. } | Self::UnknownModel { .. } => Class::NotFound,
            Self::Method { .. } => Class::Method,
            Self::QueueFull { .. } | Self::BodiesFull { .. } => Class::Busy,
            Self::QueueTimeout { .. } | Self::NoDecode(_) | Self::NoPrefill(_) | Self::NotAdmitted | Self::Draining => {
                Class::Unavailable
            }
            Self::Deadline(_) => Class::Timeout,
            Self::Internal(_) => Class::Internal,
            Self::Engine(failure) => Class::Reason(failure.reason),
        }
    }

    /// The stable machine code: `code` of the envelope and the header `x-tandem-error-code`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::MalformedJson(_) => "malformed_json",
            Self::Field { .. } => "invalid_field",
            Self::Unsupported { .. } => "unsupported_parameter",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodiesFull { .. } => "bodies_full",
            Self::BodyIncomplete(_) => "body_incomplete",
            Self::BodyTimeout(_) => "body_timeout",
            Self::ContentType(_) => "unsupported_content_type",
            Self::Unauthorized(Locked::NoKey | Locked::WrongKey) => "invalid_api_key",
            Self::Unauthorized(Locked::NoToken | Locked::WrongToken) => "invalid_admin_token",
            Self::NoPath { .. } => "unknown_path",
            Self::Method { .. } => "method_not_allowed",
            Self::UnknownModel { .. } => "model_not_found",
            Self::ContextLength { .. } => CONTEXT_LENGTH,
            Self::QueueFull { .. } => "queue_full",
            Self::QueueTimeout { .. } => "no_capacity",
            Self::NoDecode(_) => "no_decode_engine",
            Self::NoPrefill(_) => "no_prefill_engine",
            Self::NotAdmitted => "not_admitted",
            Self::Draining => "draining",
            Self::Deadline(_) => "deadline",
            Self::Internal(_) => "internal",
            Self::Engine(failure) if failure.reason == Reason::OverLength => CONTEXT_LENGTH,
            Self::Engine(failure) => failure.meaning().code,
        }
    }

    /// Which part saw it first.
    pub fn source(&self) -> &'static str {
        let source = match self {
            Self::Engine(failure) if failure.source == Source::Unspecified => Source::Router,
            Self::Engine(failure) => failure.source,
            _ if self.class().status().is_client_error() && self.class() != Class::Busy => Source::Client,
            _ => Source::Router,
        };
        source_name(source)
    }

    /// Something is wrong with the request. What it says may quote it, so it is for the client alone.
    pub fn is_of_client(&self) -> bool {
        self.source() == source_name(Source::Client)
    }

    /// The same request may succeed elsewhere or later, and sending it again does no harm.
    pub fn retryable(&self) -> bool {
        match self {
            Self::QueueFull { .. }
            | Self::BodiesFull { .. }
            | Self::QueueTimeout { .. }
            | Self::NoDecode(_)
            | Self::NoPrefill(_)
            | Self::NotAdmitted
            | Self::Draining
            | Self::BodyTimeout(_)
            | Self::BodyIncomplete(_) => true,
            Self::Engine(failure) => failure.meaning().retryable,
            Self::MalformedJson(_)
            | Self::Field { .. }
            | Self::Unsupported { .. }
            | Self::BodyTooLarge { .. }
            | Self::ContentType(_)
            | Self::Unauthorized(_)
            | Self::NoPath { .. }
            | Self::Method { .. }
            | Self::UnknownModel { .. }
            | Self::ContextLength { .. }
            | Self::Deadline(_)
            | Self::Internal(_) => false,
        }
    }

    /// Seconds after which another try makes sense: with every 429 and 503.
    pub fn retry_after_seconds(&self) -> Option<u32> {
        match self.class().status() {
            // a change of engines takes its time
            _ if matches!(self, Self::NotAdmitted) => Some(5),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Some(1),
            _ => None,
        }
    }

    /// The field at fault.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Field { param, .. } | Self::Unsupported { param, .. } => {
                Some(param).filter(|p| !p.is_empty()).map(String::as_str)
            }
            Self::ContextLength { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        }
    }

    /// OpenAI's envelope, as JSON.
    pub fn envelope(&self, request_id: &str) -> Vec<u8> {
        #[derive(Serialize)]
        struct Envelope<'a> {
            error: Inner<'a>,
        }
        #[derive(Serialize)]
        struct Inner<'a> {
            message: String,
            r#type: &'a str,
            param: Option<&'a str>,
            code: &'a str,
            source: &'a str,
            retryable: bool,
            #[serde(skip_serializing_if = "Option::is_none")]
            retry_after_seconds: Option<u32>,
            request_id: &'a str,
        }
        let envelope = Envelope {
            error: Inner {
                message: self.to_string(),
                r#type: self.class().kind(),
                param: self.param(),
                code: self.code(),
                source: self.source(),
                retryable: self.retryable(),
                retry_after_seconds: self.retry_after_seconds(),
                request_id,
            },
        };
        serde_json::to_vec(&envelope).unwrap_or_default()
    }
}

const CONTEXT_LENGTH: &str = "context_length_exceeded";

/// Every code an answer can carry, for metrics that start at zero.
pub fn all_codes() -> impl Iterator<Item = &'static str> {
    let own = [
        "malformed_json",
        "invalid_field",
        "unsupported_parameter",
        "body_too_large",
        "bodies_full",
        "body_incomplete",
        "body_timeout",
        "unsupported_content_type",
        "invalid_api_key",
        "unknown_path",
        "method_not_allowed",
        "model_not_found",
        CONTEXT_LENGTH,
        "queue_full",
        "no_decode_engine",
        "no_prefill_engine",
        "not_admitted",
    ];
    own.into_iter().chain(all_reasons().map(|(_, m)| m.code))
}

/// Every reason of the wire with its meaning.
pub fn all_reasons() -> impl Iterator<Item = (Reason, Meaning)> {
    (1..64)
        .filter_map(|value| Reason::try_from(value).ok())
        .map(|reason| (reason, meaning(reason)))
}

impl From<TextError> for RouterError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Field { field, reason } => Self::field(field, reason),
            error if error.is_request_fault() => Self::field(error.param().unwrap_or_default(), error.to_string()),
            error => Self::Internal(error.to_string()),
        }
    }
}

impl From<Failure> for RouterError {
    fn from(failure: Failure) -> Self {
        Self::Engine(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_of_the_wire_becomes_an_error_answer_with_its_own_status() {
        for (reason, meaning) in all_reasons() {
            let error = RouterError::from(Failure::new(reason, Source::Prefill, "why"));
            assert_eq!(error.class().status().as_u16(), meaning.http, "{reason:?}");
            assert!(
                all_codes().any(|code| code == error.code()),
                "{reason:?} is not among the codes"
            );
            assert_eq!(error.source(), "prefill");
            assert_eq!(error.retryable(), meaning.retryable);
        }
    }

    #[test]
    fn whoever_may_try_again_is_told_when() {
        for (reason, meaning) in all_reasons() {
            let error = RouterError::from(Failure::new(reason, Source::Decode, "why"));
            assert_eq!(error.retry_after_seconds().is_some(), meaning.http == 503, "{reason:?}");
        }
        assert!(RouterError::QueueFull { limit: 1 }.retry_after_seconds().is_some());
        assert!(RouterError::Draining.retry_after_seconds().is_some());
        assert!(RouterError::Internal("x".into()).retry_after_seconds().is_none());
    }

    #[test]
    fn the_envelope_is_openais_with_the_request_id() {
        let error = RouterError::field("messages[0].content", "expected a string");
        let json: serde_json::Value = serde_json::from_slice(&error.envelope("req-1")).unwrap();
        let inner = &json["error"];
        assert_eq!(inner["type"], "invalid_request_error");
        assert_eq!(inner["param"], "messages[0].content");
        assert_eq!(inner["code"], "invalid_field");
        assert_eq!(inner["request_id"], "req-1");
        assert!(inner["message"].as_str().unwrap().starts_with("messages[0].content: "));
        let none: serde_json::Value = serde_json::from_slice(&RouterError::Draining.envelope("r")).unwrap();
        assert!(none["error"]["param"].is_null());
    }
}
