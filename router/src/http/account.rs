//! What is written down about a request: one log line and the counters, once, also when its client leaves half way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::RouterError;
use crate::flow::Done;
use crate::metrics::{CLIENT_GONE, Counted, Endpoint, Metrics, OK};

/// An open account of one request. Dropped before it is closed, it says that the client left.
#[derive(Debug)]
pub struct Account {
    metrics: Arc<Metrics>,
    endpoint: Endpoint,
    /// The request's id.
    pub request_id: String,
    /// When its head had come.
    pub came: Instant,
    stream: bool,
    tokens: Option<(u32, u32)>,
    attempts: u32,
    first_token: Option<Duration>,
    closed: bool,
    _in_flight: Counted,
}

impl Account {
    /// Opens one.
    pub fn open(metrics: &Arc<Metrics>, endpoint: Endpoint, request_id: String) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            endpoint,
            request_id,
            came: Instant::now(),
            stream: false,
            tokens: None,
            attempts: 0,
            first_token: None,
            closed: false,
            _in_flight: Counted::new(&metrics.in_flight),
        }
    }

    /// The answer is streamed.
    pub fn streamed(&mut self) {
        self.stream = true;
    }

    /// Takes a finished choice.
    pub fn add(&mut self, done: &Done) {
        let (prompt, completion) = self.tokens.unwrap_or_default();
        self.tokens = Some((prompt + done.prompt_tokens, completion + done.completion_tokens));
        self.attempts = self.attempts.max(done.attempts);
        self.first_token = self.first_token.or(done.first_token);
    }

    /// The answer is complete.
    pub fn succeeded(mut self) {
        self.close(OK, None);
    }

    /// The request failed.
    pub fn failed(mut self, error: &RouterError) {
        self.close(error.code(), Some(error));
    }

    fn close(&mut self, code: &'static str, error: Option<&RouterError>) {
        self.closed = true;
        let seconds = self.came.elapsed().as_secs_f64();
        self.metrics.request(self.endpoint, code, seconds);
        if self.endpoint == Endpoint::Other && error.is_none() {
            // probes and scrapers would fill the log
            return;
        }
        tracing::info!(
            request_id = self.request_id,
            endpoint = self.endpoint.name(),
            code,
            seconds,
            stream = self.stream,
            first_token_seconds = self.first_token.map(|first| first.as_secs_f64()),
            prompt_tokens = self.tokens.map(|tokens| tokens.0),
            completion_tokens = self.tokens.map(|tokens| tokens.1),
            attempts = self.attempts,
            source = error.map(RouterError::source),
            error = error.map(tracing::field::display),
            "request"
        );
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if !self.closed {
            self.close(CLIENT_GONE, None);
        }
    }
}
