//! The OpenAI dialect: what requests say and how answers are written. Knows neither sockets nor engines.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`request`] | the body of a request, read so that an error names its field |
//! | [`fields`] | fields that have more than one shape |
//! | [`sampling`] | how tokens are drawn |
//! | [`prepare`] | from a body to what the engines are asked for |
//! | [`tools`] | what a chat may call, and must |
//! | [`tokens`] | from text to tokens and back, without an engine |
//! | [`logprobs`] | log-probabilities, as both APIs write them |
//! | [`answer`] | whole answers |
//! | [`chunks`] | streamed answers, as server-sent events |

pub mod answer;
pub mod chunks;
pub mod fields;
pub mod logprobs;
pub mod prepare;
pub mod request;
pub mod sampling;
pub mod tokens;
pub mod tools;

use std::time::SystemTime;

use crate::metrics::Endpoint;

/// What every object of one answer begins with.
#[derive(Debug, Clone)]
pub struct Head {
    /// Through which API.
    pub endpoint: Endpoint,
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// The model's name.
    pub model: String,
}

impl Head {
    /// The head of a new answer.
    pub fn new(endpoint: Endpoint, model: &str) -> Self {
        let prefix = match endpoint {
            Endpoint::Completions => "cmpl",
            Endpoint::Chat | Endpoint::Other => "chatcmpl",
        };
        Self {
            endpoint,
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: epoch_seconds(),
            model: model.to_owned(),
        }
    }
}

/// Now, in seconds since the epoch.
pub fn epoch_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
