//! `/health_generate`: does a token come through both legs, now?
//!
//! One probe at a time, whoever asks: those who come while one runs wait for the next, and all of them share it. So asking
//! often costs the engines nothing, and no answer is older than its question.

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
use crate::flow::{Choice, Event, Part, Spec};
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
    last: Mutex<Option<Last>>,
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
    pub fn new(text: &Text) -> Result<Self, TextError> {
        Ok(Self {
            prompt: text.encode_prompt(PROMPT)?.into(),
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
                let tokens = tokio::time::timeout(LIMIT, tokens(app, account)).await;
                let error = match tokens {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(error),
                    Err(_) => Some(RouterError::Deadline(LIMIT)),
                };
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
}

async fn tokens(app: &Arc<App>, account: &Account) -> Result<(), RouterError> {
    let spec = Spec {
        request_id: account.request_id.clone(),
        endpoint: Endpoint::Other,
        came: account.came,
        knobs: app.flow.knobs(),
        deadline: Instant::now() + LIMIT,
        prompt: Arc::clone(&app.probe.prompt),
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
    let choice = Choice::new(Arc::clone(&app.flow), spec, Part::Alone, Arc::clone(&account.progress))?;
    let mut events = choice.events().boxed();
    while let Some(event) = events.next().await {
        match event {
            Event::Done(_) => return Ok(()),
            Event::Failed(error) => return Err(error),
            Event::Accepted | Event::Text(_) | Event::Restarted => {}
        }
    }
    Err(RouterError::Internal("the probe ended without its last event".into()))
}
