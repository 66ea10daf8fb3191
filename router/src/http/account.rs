//! What is written down about a request: one log line and the counters, once, also when its client leaves half way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{StatusCode, Version};
use tandem_telemetry::Span;

use super::App;
use crate::api::prepare::Origin;
use crate::error::RouterError;
use crate::evidence::{Connection, Ended, KEPT, Open, Registry, Stage, Stay};
use crate::flow::{Asker, Progress};
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
    registry: Arc<Registry>,
    connection: Arc<Connection>,
    open: Arc<Open>,
    /// Its own stage; the choices have theirs.
    stay: Stay,
    span: Span,
    closed: bool,
    _in_flight: Option<Counted>,
}

impl Account {
    /// Opens one for a request that came on `connection`, a marked probe or not. `span` ends with it.
    pub fn open(
        app: &App,
        endpoint: Endpoint,
        request_id: String,
        (connection, version): (Arc<Connection>, Version),
        probe: bool,
        span: Span,
    ) -> Self {
        let came = Instant::now();
        let progress = Arc::new(Progress::of(span.parent().clone()));
        let stay = progress.stay(Stage::Body);
        let open = Open {
            request_id: request_id.clone(),
            came,
            ledger: Arc::clone(progress.ledger()),
            probe,
        };
        let open = connection.begin(version, open);
        Self {
            metrics: Arc::clone(&app.flow.metrics),
            endpoint,
            request_id,
            came,
            stream: false,
            progress,
            registry: Arc::clone(&app.evidence),
            connection,
            open,
            stay,
            span,
            closed: false,
            _in_flight: (!probe).then(|| Counted::new(&app.flow.metrics.in_flight)),
        }
    }

    /// Its body is there: template and tokenizer have it.
    pub fn text(&mut self) {
        self.stay.move_to(Stage::Text);
    }

    /// Its choices run, and say themselves what they wait for.
    pub fn answers(&mut self) {
        self.stay.move_to(Stage::Answer);
    }

    /// What of it the work on its text needs to know.
    pub fn origin(&self) -> Origin {
        Origin {
            request_id: self.request_id.clone(),
            came: self.came,
            asker: if self.open.probe {
                Asker::Diagnosis
            } else {
                Asker::Client
            },
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
        let total = self.came.elapsed();
        let seconds = total.as_secs_f64();
        self.remember(code, total);
        if !self.open.probe {
            self.metrics.request(self.endpoint, code, seconds);
        }
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
            probe = self.open.probe,
            first_token_seconds = self.progress.first_token().map(|first| first.as_secs_f64()),
            prompt_tokens = self.progress.prompt_tokens(),
            completion_tokens = self.progress.completion_tokens(),
            attempts = self.progress.attempts(),
            trace_id = self.progress.trace().trace_id(),
            source = error.map(RouterError::source),
            // what is wrong with a request may quote it, and its client is told
            error = error.filter(|error| !error.is_of_client()).map(tracing::field::display),
            "request"
        );
    }
}

impl Account {
    /// Leaves what happened to whoever asks later.
    fn remember(&mut self, code: &'static str, total: Duration) {
        let generated = self.endpoint != Endpoint::Other;
        self.connection.end(&self.open, generated && code == OK);
        if !generated || !KEPT {
            return;
        }
        let ended = Ended {
            request_id: self.request_id.clone(),
            endpoint: self.endpoint.name(),
            code,
            stream: self.stream,
            connection: self.connection.id,
            at: self.came + total,
            total,
            first_token: self.progress.first_token(),
            prompt_tokens: self.progress.prompt_tokens().unwrap_or(0),
            completion_tokens: self.progress.completion_tokens(),
            attempts: self.progress.attempts(),
            spent: self.progress.ledger().spent(self.came + total),
        };
        self.registry.ended(ended, self.open.probe);
    }

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
            Some(error) if error.is_of_client() => self.span.fail(code, || error.source().to_owned()),
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
            let cut_off = self.connection.is_cut_off();
            self.close(if cut_off { CLIENT_STALLED } else { CLIENT_GONE }, None);
        }
    }
}
