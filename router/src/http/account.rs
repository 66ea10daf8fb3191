//! What is written down about a request: one log line and the counters, once, also when its client leaves half way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use http::StatusCode;
use tandem_telemetry::Span;

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
    span: Span,
    closed: bool,
    _in_flight: Counted,
}

impl Account {
    /// Opens one. `cut_off` becomes true where this router closes the connection because its client takes nothing.
    /// `span` ends with it.
    pub fn open(
        metrics: &Arc<Metrics>,
        endpoint: Endpoint,
        request_id: String,
        cut_off: Arc<AtomicBool>,
        span: Span,
    ) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            endpoint,
            request_id,
            came: Instant::now(),
            stream: false,
            progress: Arc::new(Progress::of(span.parent().clone())),
            cut_off,
            span,
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
        self.trace(code, error);
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
            trace_id = self.progress.trace().trace_id(),
            source = error.map(RouterError::source),
            error = error.map(tracing::field::display),
            "request"
        );
    }
}

impl Account {
    /// Says the same in the span.
    fn trace(&mut self, code: &'static str, error: Option<&RouterError>) {
        let (progress, request_id, stream) = (&self.progress, &self.request_id, self.stream);
        let operation = match self.endpoint {
            Endpoint::Chat => "chat",
            Endpoint::Completions | Endpoint::Other => "text_completion",
        };
        // the head of a stream has gone out before its error
        let status = error
            .filter(|_| !stream)
            .map_or(StatusCode::OK, |error| error.class().status());
        self.span.describe(|| {
            [
                ("http.request.method", "POST".into()),
                ("http.route", self.endpoint.route().into()),
                ("http.response.status_code", i64::from(status.as_u16()).into()),
                ("gen_ai.operation.name", operation.into()),
                (
                    "gen_ai.usage.input_tokens",
                    i64::from(progress.prompt_tokens().unwrap_or(0)).into(),
                ),
                (
                    "gen_ai.usage.output_tokens",
                    i64::from(progress.completion_tokens()).into(),
                ),
                ("tandem.request_id", request_id.clone().into()),
                ("tandem.stream", stream.into()),
                ("tandem.attempts", i64::from(progress.attempts()).into()),
            ]
        });
        if let Some(first) = self.progress.first_token() {
            self.span
                .describe(|| [("tandem.first_token_us", (first.as_micros() as i64).into())]);
        }
        match error {
            Some(error) => self.span.fail(code, || format!("{}: {error}", error.source())),
            None if code != OK => self
                .span
                .fail(code, || "the client did not take the whole answer".to_owned()),
            None => {}
        }
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
