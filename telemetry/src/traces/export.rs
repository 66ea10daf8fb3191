//! The queue of ended spans, and the thread that sends them.

use std::fmt;
use std::sync::mpsc as std_mpsc;
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use crate::{Metrics, TelemetryError, initialise};

/// Spans that wait to be sent, some 4 MiB. What ends while it is full is dropped.
const QUEUE: usize = 2_048;
/// Spans of one message.
const BATCH: usize = 512;
/// The first span of a batch waits for others at most this long.
const GATHER: Duration = Duration::from_secs(1);
/// A collector that takes a batch no sooner has lost it.
const EXPORT: Duration = Duration::from_secs(5);

/// Why a span was dropped.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

const QUEUE_FULL: Why = Why { reason: "queue_full" };
const EXPORT_FAILED: Why = Why {
    reason: "export_failed",
};
const REJECTED: Why = Why { reason: "rejected" };

/// What is counted.
#[derive(Debug, Clone)]
pub(super) struct Counters {
    exported: Counter,
    dropped: Family<Why, Counter>,
}

impl Counters {
    pub(super) fn register(metrics: &Metrics) -> Self {
        let counters = Self {
            exported: Counter::default(),
            dropped: Family::default(),
        };
        initialise(&counters.dropped, [QUEUE_FULL, EXPORT_FAILED, REJECTED]);
        metrics.part("traces", |registry| {
            registry.register(
                "exported_spans",
                "Spans that the collector took",
                counters.exported.clone(),
            );
            registry.register(
                "dropped_spans",
                "Spans that were lost, and why",
                counters.dropped.clone(),
            );
        });
        counters
    }

    fn dropped(&self, why: &Why, spans: usize) {
        self.dropped.get_or_create(why).inc_by(spans as u64);
    }
}

/// The queue's end where spans come in.
#[derive(Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<SpanData>,
    counters: Counters,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.spans.try_send(span).is_err() {
            self.counters.dropped(&QUEUE_FULL, 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// The thread that sends.
pub(super) struct Sender {
    /// Taken by the first close: tells the thread to send what is left by then.
    stop: Mutex<Option<oneshot::Sender<Duration>>>,
    /// Says that it has.
    ended: Mutex<std_mpsc::Receiver<()>>,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

impl Sender {
    /// Sends what is queued, for `limit` at most.
    pub(super) fn close(&self, limit: Duration) {
        let Some(stop) = self.stop.lock().take() else { return };
        if stop.send(limit).is_ok() {
            // an error is a thread that has ended: there is nothing to wait for
            let _ = self.ended.lock().recv_timeout(limit + limit / 2);
        }
    }
}

/// Starts the thread. Nothing is dialled before the first span ends.
pub(super) fn start(
    endpoint: &str,
    resource: &Resource,
    counters: Counters,
) -> Result<(Sender, Queue), TelemetryError> {
    let dialled = Endpoint::from_shared(endpoint.to_owned())
        .map_err(|error| TelemetryError::Collector {
            endpoint: endpoint.to_owned(),
            reason: error.to_string(),
        })?
        .connect_timeout(EXPORT)
        .timeout(EXPORT);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(TelemetryError::StartExport)?;
    let (spans, queue) = mpsc::channel(QUEUE);
    let (stop, stopped) = oneshot::channel();
    let (end, ended) = std_mpsc::channel();
    let worker = Worker {
        queue,
        endpoint: endpoint.to_owned(),
        resource: ResourceAttributesWithSchema::from(resource),
        counters: counters.clone(),
        failing: false,
    };
    std::thread::Builder::new()
        .name("traces".into())
        .spawn(move || {
            runtime.block_on(worker.run(&dialled, stopped));
            // nobody waits if the process does not end by a close
            let _ = end.send(());
        })
        .map_err(TelemetryError::StartExport)?;
    let sender = Sender {
        stop: Mutex::new(Some(stop)),
        ended: Mutex::new(ended),
    };
    Ok((sender, Queue { spans, counters }))
}

struct Worker {
    queue: mpsc::Receiver<SpanData>,
    endpoint: String,
    resource: ResourceAttributesWithSchema,
    counters: Counters,
    /// The last batch was lost; said once, not for each.
    failing: bool,
}

impl Worker {
    async fn run(mut self, endpoint: &Endpoint, mut stopped: oneshot::Receiver<Duration>) {
        let mut client = TraceServiceClient::new(endpoint.connect_lazy());
        let mut batch = Vec::with_capacity(BATCH);
        let until = loop {
            tokio::select! {
                limit = &mut stopped => break deadline(limit),
                more = gather(&mut self.queue, &mut batch) => if !more { return },
            }
            let sending = self.send(&mut client, std::mem::take(&mut batch), EXPORT);
            tokio::pin!(sending);
            tokio::select! {
                () = &mut sending => {}
                limit = &mut stopped => {
                    let until = deadline(limit);
                    // what it holds is lost with it; the process ends
                    let _ = tokio::time::timeout_at(until, sending).await;
                    break until;
                }
            }
        };
        loop {
            while batch.len() < BATCH
                && let Ok(span) = self.queue.try_recv()
            {
                batch.push(span);
            }
            let left = until.saturating_duration_since(Instant::now());
            if batch.is_empty() || left.is_zero() {
                return;
            }
            self.send(&mut client, std::mem::take(&mut batch), left).await;
        }
    }

    /// Sends a batch once. What a collector does not take is lost: tried again, it would be in the way of what comes after it.
    async fn send(&mut self, client: &mut TraceServiceClient<Channel>, batch: Vec<SpanData>, limit: Duration) {
        let spans = batch.len();
        let request = ExportTraceServiceRequest {
            resource_spans: group_spans_by_resource_and_scope(batch, &self.resource),
        };
        let error = match tokio::time::timeout(limit, client.export(request)).await {
            Ok(Ok(response)) => {
                let partial = response.into_inner().partial_success.unwrap_or_default();
                let rejected = usize::try_from(partial.rejected_spans).unwrap_or(0).min(spans);
                self.counters.dropped(&REJECTED, rejected);
                self.counters.exported.inc_by((spans - rejected) as u64);
                if self.failing {
                    tracing::info!(endpoint = self.endpoint, "the collector takes traces again");
                }
                self.failing = false;
                return;
            }
            Ok(Err(status)) => status.to_string(),
            Err(_) => format!("no answer within {} ms", limit.as_millis()),
        };
        self.counters.dropped(&EXPORT_FAILED, spans);
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(
                endpoint = self.endpoint,
                spans,
                "traces are lost, requests are not affected: {error}"
            );
        }
    }
}

/// Waits for spans, then for others to go with them; false: there will be none any more.
async fn gather(queue: &mut mpsc::Receiver<SpanData>, batch: &mut Vec<SpanData>) -> bool {
    let Some(first) = queue.recv().await else {
        return false;
    };
    batch.push(first);
    let until = Instant::now() + GATHER;
    while batch.len() < BATCH {
        let room = BATCH - batch.len();
        match tokio::time::timeout_at(until, queue.recv_many(batch, room)).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    true
}

/// When to have sent what is left; an error is a handle that was dropped.
fn deadline(limit: Result<Duration, oneshot::error::RecvError>) -> Instant {
    Instant::now() + limit.unwrap_or_default()
}
