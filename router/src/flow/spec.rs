//! What one prompt is asked for with.

use std::sync::Arc;
use std::time::Instant;

use tandem_wire::proto;

use crate::error::RouterError;
use crate::knobs::Knobs;
use crate::metrics::Endpoint;
use crate::text::ToolFormat;

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// A client.
    Client,
    /// One who looks for a fault: as a client, but not counted as one.
    Diagnosis,
    /// A probe, which goes to the engines whatever the order on traffic is.
    Probe,
}

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Spec {
    /// For logs and traces.
    pub request_id: String,
    /// Through which API it came.
    pub endpoint: Endpoint,
    /// When it came.
    pub came: Instant,
    /// What was in force when it came.
    pub knobs: Knobs,
    /// When its time is over.
    pub deadline: Instant,
    /// The prompt's ids.
    pub prompt: Arc<[u32]>,
    /// How tokens are drawn.
    pub sampling: proto::Sampling,
    /// At most so many tokens; none: as many as fit.
    pub max_new_tokens: Option<u32>,
    /// Longest prompt with answer by the router's own limit; the engine's holds too.
    pub max_length_tokens: Option<u32>,
    /// Ids that end it, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end ids do not end it.
    pub ignore_eos: bool,
    /// Texts that end it.
    pub stops: Vec<String>,
    /// How tool calls are written in it; their marks are a part of the text.
    pub calls: Option<ToolFormat>,
    /// Special tokens are a part of the text.
    pub show_special_tokens: bool,
    /// The client sees each piece as it comes.
    pub streamed: bool,
    /// Who asks.
    pub asker: Asker,
}

/// How many new tokens `spec` may have where prompt and answer together have at most `max_length_tokens`.
pub fn fit(spec: &Spec, max_length_tokens: u32) -> Result<u32, RouterError> {
    let prompt = spec.prompt.len() as u64;
    let max = u64::from(max_length_tokens);
    let param = spec.endpoint.prompt_field();
    let detail = match spec.max_new_tokens {
        // the answer has at least one token
        _ if prompt >= max => {
            format!(
                "this model takes at most {max} tokens, answer included, but the {param} have {prompt} tokens; shorten them"
            )
        }
        Some(new) if prompt + u64::from(new) > max => format!(
            "this model takes at most {max} tokens, but {} were asked for: {prompt} in the {param}, {new} in the answer; \
             shorten either",
            prompt + u64::from(new)
        ),
        Some(new) => return Ok(new),
        None => return Ok((max - prompt) as u32),
    };
    Err(RouterError::ContextLength { param, detail })
}
