//! `/health_generate`: does a token come through both legs, now? And `/admin/probe`: did the KV of a prompt that nobody has seen
//! come over the wire?
//!
//! Of the first, one at a time, whoever asks: those who come while one runs wait for the next, and all of them share it. So
//! asking often costs the engines nothing, and no answer is older than its question.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use http::{Response, StatusCode};
use serde::Serialize;
use tandem_wire::proto::Sampling;
use tokio::sync::Mutex;

use super::account::Account;
use super::body::Answer;
use super::{App, routes};
use crate::error::RouterError;
use crate::flow::spec::Asker;
use crate::flow::{Choice, Done, Event, Part, Progress, Spec};
use crate::metrics::Endpoint;
use crate::text::{Text, TextError};

/// A probe takes at most this long.
const LIMIT: Duration = Duration::from_secs(10);
/// The first token is prefill's, the second is decode's.
const TOKENS: u32 = 2;
const PROMPT: &str = "1, 2, 3, 4, 5,";

/// The last probe, and the right to make one.
#[derive(Debug)]
pub struct Probe {
    prompt: Arc<[u32]>,
    text: Arc<Text>,
    last: Mutex<Option<Last>>,
}

/// What a completion on a prompt that nobody has seen was found to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// Tokens of the prompt.
    prompt_tokens: u32,
    /// Tokens of the answer.
    completion_tokens: u32,
    /// Of the prompt, found in a prefix cache.
    cached_tokens: u32,
    /// Of the prompt, those whose KV decode received.
    moved_tokens: u32,
    /// Bytes of that KV, as decode counted them.
    moved_bytes: u64,
    /// Of the prompt, those that decode computed itself.
    computed_tokens: u32,
    /// All of it.
    seconds: f64,
}

#[derive(Debug)]
struct Last {
    began: Instant,
    outcome: Outcome,
}

#[derive(Debug, Clone, Serialize)]
struct Outcome {
    status: &'static str,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl Probe {
    /// Makes none yet.
    pub fn new(text: Arc<Text>) -> Result<Self, TextError> {
        Ok(Self {
            prompt: text.encode_prompt(PROMPT)?.into(),
            text,
            last: Mutex::new(None),
        })
    }

    /// A probe that begins after this call.
    pub async fn answer(app: &Arc<App>, account: &Account) -> Response<Answer> {
        let came = Instant::now();
        let mut last = app.probe.last.lock().await;
        let outcome = match &*last {
            Some(last) if last.began >= came => last.outcome.clone(),
            _ => {
                let began = Instant::now();
                let id = account.request_id.clone();
                let prompt = Arc::clone(&app.probe.prompt);
                let error = tokens(app, id, prompt, LIMIT, &account.progress).await.err();
                let outcome = Outcome {
                    status: if error.is_none() { "generating" } else { "failed" },
                    seconds: began.elapsed().as_secs_f64(),
                    code: error.as_ref().map(RouterError::code),
                    reason: error.as_ref().map(ToString::to_string),
                };
                *last = Some(Last {
                    began,
                    outcome: outcome.clone(),
                });
                outcome
            }
        };
        let status = match outcome.code {
            None => StatusCode::OK,
            Some(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        routes::json(status, serde_json::to_vec(&outcome).unwrap_or_default())
    }

    /// A completion on a prompt that begins with 256 random bits, so that no prefix cache holds any of it.
    pub async fn measure(app: &Arc<App>, request_id: String, limit: Duration) -> Result<Measured, RouterError> {
        let began = Instant::now();
        let [high, low] = rand::random::<[u128; 2]>();
        let salted = format!("{high:032x}{low:032x} {PROMPT}");
        let prompt: Arc<[u32]> = app.probe.text.encode_prompt(&salted)?.into();
        let done = tokens(app, request_id, prompt, limit, &Arc::new(Progress::default())).await?;
        let usage = done.usage.unwrap_or_default();
        Ok(Measured {
            prompt_tokens: done.prompt_tokens,
            completion_tokens: done.completion_tokens,
            cached_tokens: usage.cached_tokens,
            moved_tokens: usage.moved_tokens,
            moved_bytes: usage.moved_bytes,
            computed_tokens: usage.computed_tokens,
            seconds: began.elapsed().as_secs_f64(),
        })
    }
}

async fn tokens(
    app: &Arc<App>,
    request_id: String,
    prompt: Arc<[u32]>,
    limit: Duration,
    progress: &Arc<Progress>,
) -> Result<Done, RouterError> {
    let came = Instant::now();
    let spec = Spec {
        request_id,
        endpoint: Endpoint::Other,
        came,
        knobs: app.flow.knobs(),
        deadline: came + limit,
        prompt,
        sampling: Sampling {
            top_p: 1.0,
            ..Sampling::default()
        },
        max_new_tokens: Some(TOKENS),
        max_length_tokens: app.limits().max_length_tokens,
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        stops: Vec::new(),
        show_special_tokens: false,
        calls: None,
        streamed: true,
        asker: Asker::Probe,
    };
    let choice = Choice::new(Arc::clone(&app.flow), spec, Part::Alone, Arc::clone(progress))?;
    let mut events = choice.events().boxed();
    let ended = async {
        while let Some(event) = events.next().await {
            match event {
                Event::Done(done) => return Ok(done),
                Event::Failed(error) => return Err(error),
                Event::Accepted | Event::Text(_) | Event::Restarted => {}
            }
        }
        Err(RouterError::Internal("the probe ended without its last event".into()))
    };
    let ended = tokio::time::timeout(limit, ended).await;
    ended.unwrap_or(Err(RouterError::Deadline(limit)))
}
