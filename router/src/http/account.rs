//! What is written down about a request: one log line and the counters, once, also when its client leaves half way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::api::prepare::Origin;
use crate::error::RouterError;
use crate::flow::Progress;
use crate::metrics::{CLIENT_GONE, CLIENT_STALLED, Counted, Endpoint, Metrics, OK};

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
    /// How far it is.
    pub progress: Arc<Progress>,
    cut_off: Arc<AtomicBool>,
    closed: bool,
    _in_flight: Counted,
}

impl Account {
    /// Opens one. `cut_off` becomes true where this router closes the connection because its client takes nothing.
    pub fn open(metrics: &Arc<Metrics>, endpoint: Endpoint, request_id: String, cut_off: Arc<AtomicBool>) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            endpoint,
            request_id,
            came: Instant::now(),
            stream: false,
            progress: Arc::default(),
            cut_off,
            closed: false,
            _in_flight: Counted::new(&metrics.in_flight),
        }
    }

    /// What of it the work on its text needs to know.
    pub fn origin(&self) -> Origin {
        Origin {
            request_id: self.request_id.clone(),
            came: self.came,
        }
    }

    /// The answer is streamed.
    pub fn streamed(&mut self) {
        self.stream = true;
    }

    /// The answer is complete.
    pub fn succeeded(mut self) {
        self.close(OK, None);
    }

    /// The request failed.
    pub fn failed(mut self, error: &RouterError) {
        self.close(error.code(), Some(error));
    }

    /// This router cut its client off, because it took nothing of the answer.
    pub fn stalled(mut self) {
        self.close(CLIENT_STALLED, None);
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
            first_token_seconds = self.progress.first_token().map(|first| first.as_secs_f64()),
            prompt_tokens = self.progress.prompt_tokens(),
            completion_tokens = self.progress.completion_tokens(),
            attempts = self.progress.attempts(),
            source = error.map(RouterError::source),
            error = error.map(tracing::field::display),
            "request"
        );
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if !self.closed {
            let cut_off = self.cut_off.load(Ordering::Acquire);
            self.close(if cut_off { CLIENT_STALLED } else { CLIENT_GONE }, None);
        }
    }
}
