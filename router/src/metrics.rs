//! What the router counts. Everything that must come back to zero is a guard.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tandem_telemetry::{Metrics as Exposition, initialise};
use tandem_wire::Reason;
use tandem_wire::reason::meaning;

use crate::error::{all_codes, all_reasons};
use crate::evidence::{ConnectionsByState, Registry};
use crate::flow::Order;

/// `code` of a request that was answered.
pub const OK: &str = "ok";
/// `code` of a request whose client left before its answer was complete.
pub const CLIENT_GONE: &str = "client_gone";
/// `code` of a request whose client was cut off because it took nothing of its answer.
pub const CLIENT_STALLED: &str = "client_stalled";

/// Which API a request came through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// All others.
    Other,
}

impl Endpoint {
    const ALL: [Self; 3] = [Self::Chat, Self::Completions, Self::Other];

    /// The field of a body that holds what is to be answered.
    pub const fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions | Self::Other => "prompt",
        }
    }

    /// Its path.
    pub const fn route(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Other => "",
        }
    }

    /// As the `endpoint` label says it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Other => "other",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    endpoint: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    endpoint: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ForReason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPhase {
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InMode {
    mode: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRole {
    role: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Upstream {
    role: &'static str,
    endpoint: String,
}

/// The router's metrics, `tandem_router_*`.
#[derive(Debug)]
pub struct Metrics {
    requests: Family<Outcome, Counter>,
    request_seconds: Family<Of, Histogram, fn() -> Histogram>,
    first_token_seconds: Family<Of, Histogram, fn() -> Histogram>,
    phase_seconds: Family<InPhase, Histogram, fn() -> Histogram>,
    retries: Family<ForReason, Counter>,
    upstream_up: Family<Upstream, Gauge>,
    upstream_in_flight: Family<Upstream, Gauge>,
    upstream_occupied: Family<Upstream, Gauge>,
    discovery_current: Family<OfRole, Gauge>,
    discovery_failures: Family<OfRole, Counter>,
    /// Requests whose answer is not complete.
    pub in_flight: Gauge,
    /// Requests that wait for an engine with room, or are held back.
    pub queue_depth: Gauge,
    /// Whether requests go to the engines, and how many are there.
    pub traffic: TrafficGauges,
    /// Tokens of prompts that were answered.
    pub prompt_tokens: Counter,
    /// Of those, found in a prefix cache.
    pub cached_tokens: Counter,
    /// Tokens of answers.
    pub completion_tokens: Counter,
    /// Requests that decode prefills itself because no prefill engine can be used.
    pub prefill_bypassed: Counter,
    /// Clients that were cut off because they took nothing of their answer.
    pub client_stalled: Counter,
}

/// Where a request's time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Template and tokenizer.
    Text,
    /// Waiting in the router for an engine with room.
    Queue,
    /// Waiting in the prefill's run queue.
    PrefillQueue,
    /// Computing the prompt.
    Prefill,
    /// Moving KV.
    Transfer,
    /// From the hand-off to the last token.
    Decode,
}

impl Phase {
    const ALL: [Self; 6] = [
        Self::Text,
        Self::Queue,
        Self::PrefillQueue,
        Self::Prefill,
        Self::Transfer,
        Self::Decode,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Queue => "queue",
            Self::PrefillQueue => "prefill_queue",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
        }
    }
}

/// 1 ms to 2 min: below lies noise, above the deadline.
fn seconds() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    ])
}

impl Metrics {
    /// Registers everything, each label set at zero.
    pub fn register(exposition: &Exposition, evidence: &Arc<Registry>) -> Arc<Self> {
        let metrics = Self {
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(seconds),
            first_token_seconds: Family::new_with_constructor(seconds),
            phase_seconds: Family::new_with_constructor(seconds),
            retries: Family::default(),
            upstream_up: Family::default(),
            upstream_in_flight: Family::default(),
            upstream_occupied: Family::default(),
            discovery_current: Family::default(),
            discovery_failures: Family::default(),
            in_flight: Gauge::default(),
            queue_depth: Gauge::default(),
            traffic: TrafficGauges::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            prefill_bypassed: Counter::default(),
            client_stalled: Counter::default(),
        };
        let codes: Vec<_> = all_codes().chain([OK, CLIENT_GONE, CLIENT_STALLED]).collect();
        for endpoint in Endpoint::ALL.map(Endpoint::name) {
            initialise(&metrics.requests, codes.iter().map(|&code| Outcome { endpoint, code }));
            initialise(&metrics.request_seconds, [Of { endpoint }]);
        }
        for endpoint in [Endpoint::Chat, Endpoint::Completions].map(Endpoint::name) {
            initialise(&metrics.first_token_seconds, [Of { endpoint }]);
        }
        initialise(
            &metrics.phase_seconds,
            Phase::ALL.map(|phase| InPhase { phase: phase.name() }),
        );
        initialise(
            &metrics.retries,
            all_reasons()
                .filter(|(_, m)| m.retryable)
                .map(|(_, m)| ForReason { reason: m.code }),
        );
        exposition.part("router", |registry| {
            let m = &metrics;
            registry.register("requests", "Requests by endpoint and outcome", m.requests.clone());
            registry.register(
                "request_seconds",
                "From the request's head to the end of its answer",
                m.request_seconds.clone(),
            );
            registry.register(
                "first_token_seconds",
                "From the request's head to its first token",
                m.first_token_seconds.clone(),
            );
            registry.register(
                "phase_seconds",
                "Where requests spent their time",
                m.phase_seconds.clone(),
            );
            registry.register(
                "retries",
                "Attempts after the first, by the reason of the failure before",
                m.retries.clone(),
            );
            registry.register("upstream_up", "1 while the engine can be used", m.upstream_up.clone());
            registry.register(
                "upstream_in_flight",
                "Requests that this router has at the engine",
                m.upstream_in_flight.clone(),
            );
            registry.register(
                "upstream_occupied",
                "Requests at the engine, whoever sent them, by its last report",
                m.upstream_occupied.clone(),
            );
            registry.register(
                "discovery_current",
                "1 while the API server tells of the engines, 0 while those it told of last are used",
                m.discovery_current.clone(),
            );
            registry.register(
                "discovery_failures",
                "Looks at the API server that failed",
                m.discovery_failures.clone(),
            );
            registry.register(
                "in_flight",
                "Requests whose answer is not complete",
                m.in_flight.clone(),
            );
            registry.register_collector(Box::new(ConnectionsByState(Arc::clone(evidence))));
            registry.register(
                "queue_depth",
                "Requests that wait for an engine with room, or are held back",
                m.queue_depth.clone(),
            );
            registry.register(
                "at_engines",
                "Requests that are with engines",
                m.traffic.at_engines.clone(),
            );
            registry.register(
                "traffic",
                "1 for what happens to requests now: admit, queue or reject",
                m.traffic.order.clone(),
            );
            registry.register(
                "prompt_tokens",
                "Tokens of prompts that were answered",
                m.prompt_tokens.clone(),
            );
            registry.register(
                "cached_tokens",
                "Of the prompt tokens, found in a prefix cache",
                m.cached_tokens.clone(),
            );
            registry.register("completion_tokens", "Tokens of answers", m.completion_tokens.clone());
            registry.register(
                "prefill_bypassed",
                "Requests that decode prefills itself because no prefill engine can be used",
                m.prefill_bypassed.clone(),
            );
            registry.register(
                "client_stalled",
                "Clients cut off because they took nothing of their answer",
                m.client_stalled.clone(),
            );
        });
        Arc::new(metrics)
    }

    /// Counts a finished request.
    pub fn request(&self, endpoint: Endpoint, code: &'static str, seconds: f64) {
        let endpoint = endpoint.name();
        self.requests.get_or_create(&Outcome { endpoint, code }).inc();
        self.request_seconds.get_or_create(&Of { endpoint }).observe(seconds);
    }

    /// Takes the time to the first token.
    pub fn first_token(&self, endpoint: Endpoint, seconds: f64) {
        self.first_token_seconds
            .get_or_create(&Of {
                endpoint: endpoint.name(),
            })
            .observe(seconds);
    }

    /// Takes the time spent in one phase.
    pub fn phase(&self, phase: Phase, seconds: f64) {
        self.phase_seconds
            .get_or_create(&InPhase { phase: phase.name() })
            .observe(seconds);
    }

    /// Counts another attempt.
    pub fn retry(&self, reason: Reason) {
        self.retries
            .get_or_create(&ForReason {
                reason: meaning(reason).code,
            })
            .inc();
    }

    /// Shows no more of an engine that is none any more.
    pub fn forget_upstream(&self, role: &'static str, endpoint: &str) {
        let labels = Upstream {
            role,
            endpoint: endpoint.to_owned(),
        };
        for family in [&self.upstream_up, &self.upstream_in_flight, &self.upstream_occupied] {
            family.remove(&labels);
        }
    }

    /// What is shown of the search for engines of a role.
    pub fn discovery(&self, role: &'static str) -> DiscoveryGauges {
        DiscoveryGauges {
            current: self.discovery_current.get_or_create_owned(&OfRole { role }),
            failures: self.discovery_failures.get_or_create_owned(&OfRole { role }),
        }
    }

    /// The gauges of one engine.
    pub fn upstream(&self, role: &'static str, endpoint: &str) -> EngineGauges {
        let labels = Upstream {
            role,
            endpoint: endpoint.to_owned(),
        };
        EngineGauges {
            up: self.upstream_up.get_or_create_owned(&labels),
            in_flight: self.upstream_in_flight.get_or_create_owned(&labels),
            occupied: self.upstream_occupied.get_or_create_owned(&labels),
        }
    }
}

/// What is shown of one engine.
#[derive(Debug, Clone)]
pub struct EngineGauges {
    /// 1 while it can be used.
    pub up: Gauge,
    /// Requests that this router has there.
    pub in_flight: Gauge,
    /// Requests there, whoever sent them, by its last report.
    pub occupied: Gauge,
}

/// What is shown of the search for engines.
#[derive(Debug, Clone)]
pub struct DiscoveryGauges {
    /// 1 while what is known is current.
    pub current: Gauge,
    /// Looks in vain.
    pub failures: Counter,
}

/// What is shown of traffic.
#[derive(Debug, Clone, Default)]
pub struct TrafficGauges {
    /// Requests that are with engines.
    pub at_engines: Gauge,
    order: Family<InMode, Gauge>,
}

impl TrafficGauges {
    /// This is the order in force.
    pub fn say(&self, order: Order) {
        for mode in Order::MODES {
            let now = i64::from(mode == order.mode());
            self.order.get_or_create(&InMode { mode }).set(now);
        }
    }
}

/// One of something, for as long as it lives.
#[derive(Debug)]
pub struct Counted(Gauge);

impl Counted {
    /// Counts one more.
    pub fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
