//! Traces: OpenTelemetry spans, sent to a collector over OTLP (gRPC). Off unless an endpoint is given.
//!
//! | room | purpose |
//! | --- | --- |
//! | here | the flags, and [`Traces`]: where spans begin |
//! | `span` | [`Span`]: one operation of one request; [`TraceParent`]: what its children are children of |
//! | `export` | the queue and the thread that sends |
//!
//! Nothing here ever waits: a span that ends is put into a bounded queue, and what finds no room is counted and dropped. A thread
//! of its own, with a runtime of its own, does the sending.
//!
//! Context comes and goes as W3C `traceparent` and `tracestate`. Where no endpoint is given, a caller's context is passed on as
//! it came, so that a trace is not cut in two by a process that does not take part in it.

mod export;
mod span;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    SpanContext, SpanKind, TraceContextExt, TraceFlags as W3cFlags, TraceState, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanLimits};

use crate::{Metrics, TelemetryError};
use export::Sender;

pub use span::{Span, TraceParent};

/// What is still queued when the process ends gets this long to be sent.
const FLUSH: Duration = Duration::from_secs(2);

/// The flags of every process that traces.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub struct TraceFlags {
    /// Where traces go: the gRPC port of an OTLP collector, http://HOST:PORT [default: nowhere]
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_parser = endpoint)]
    pub otlp_endpoint: Option<String>,
    /// The share of requests that is traced, 0 to 1, where a caller's traceparent does not say
    #[arg(long, value_name = "RATIO", default_value_t = 1.0, value_parser = ratio)]
    pub trace_sample: f64,
}

fn endpoint(text: &str) -> Result<String, String> {
    let uri: http::Uri = text
        .parse()
        .map_err(|error| format!("{error}; give http://HOST:PORT"))?;
    match (uri.scheme_str(), uri.authority(), uri.path()) {
        (Some("http"), Some(_), "" | "/") => Ok(text.to_owned()),
        (Some("https"), ..) => Err("only http is spoken here; let a collector beside this process encrypt".to_owned()),
        _ => Err("this is not http://HOST:PORT, the gRPC port of a collector (4317 by custom)".to_owned()),
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|ratio| (0.0..=1.0).contains(ratio))
        .ok_or_else(|| "this is no number from 0 to 1".to_owned())
}

/// Where spans begin. Clones are one.
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<Tracing>>);

#[derive(Debug)]
struct Tracing {
    tracer: SdkTracer,
    sender: Sender,
    /// The share of the requests that come without a caller's word.
    sample: f64,
}

impl Traces {
    /// No spans; contexts are passed on.
    pub fn off() -> Self {
        Self(None)
    }

    /// Starts what `flags` ask for; `service` names this process in the traces.
    pub(crate) fn start(service: &'static str, flags: &TraceFlags, metrics: &Metrics) -> Result<Self, TelemetryError> {
        let counters = export::Counters::register(metrics);
        let Some(endpoint) = &flags.otlp_endpoint else {
            return Ok(Self::off());
        };
        let resource = Resource::builder_empty()
            .with_attributes([
                KeyValue::new("service.name", service),
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::new("service.instance.id", format!("{:032x}", rand::random::<u128>())),
                KeyValue::new("process.pid", i64::from(std::process::id())),
            ])
            .build();
        let (sender, processor) = export::start(endpoint, &resource, counters)?;
        // every limit and sampler is said here, so that no variable of the environment says another
        let provider = SdkTracerProvider::builder()
            // it is only asked for spans that are sampled
            .with_sampler(Sampler::AlwaysOn)
            .with_span_limits(SpanLimits::default())
            .with_resource(resource)
            .with_span_processor(processor)
            .build();
        let tracer = provider.tracer("tandem");
        Ok(Self(Some(Arc::new(Tracing {
            tracer,
            sender,
            sample: flags.trace_sample,
        }))))
    }

    /// Begins the span of a request that came with `headers`; `name` is its method and route.
    pub fn request(&self, headers: &HeaderMap, name: &'static str) -> Span {
        self.begin(caller(headers), name, SpanKind::Server)
    }

    /// Begins the span of a gRPC call that is served here; `method` is package, service and name.
    pub fn served(&self, headers: &HeaderMap, method: &'static str) -> Span {
        let mut span = self.request(headers, method);
        span.rpc(method);
        span
    }

    /// Begins the span of work that nobody called for: the first of its trace.
    pub fn work(&self, name: &'static str) -> Span {
        self.begin(None, name, SpanKind::Internal)
    }

    fn begin(&self, parent: Option<SpanContext>, name: &'static str, kind: SpanKind) -> Span {
        let Some(tracing) = &self.0 else {
            return Span::passing(parent);
        };
        // what is not sampled never reaches the SDK, where even a span that nobody records costs thousands of instructions
        let context = match parent {
            Some(parent) if parent.is_sampled() => Context::new().with_remote_span_context(parent),
            Some(parent) => return Span::passing(Some(parent)),
            None if rand::random_bool(tracing.sample) => Context::new(),
            None => return Span::passing(Some(unsampled())),
        };
        Span::begun(self.clone(), &tracing.tracer, &context, name, kind)
    }

    /// Sends what is queued, for two seconds at most; spans that end later are dropped. Blocks: call it last, off every runtime.
    pub fn close(&self) {
        if let Some(tracing) = &self.0 {
            tracing.sender.close(FLUSH);
        }
    }
}

/// A trace that nobody records: tells those below that it was decided.
fn unsampled() -> SpanContext {
    let (trace, span) = (rand::random::<u128>(), rand::random::<u64>());
    SpanContext::new(
        trace.into(),
        span.into(),
        W3cFlags::NOT_SAMPLED,
        false,
        TraceState::NONE,
    )
}

/// The context that a call came with.
fn caller(headers: &HeaderMap) -> Option<SpanContext> {
    struct Headers<'a>(&'a HeaderMap, Option<String>);

    impl Extractor for Headers<'_> {
        fn get(&self, name: &str) -> Option<&str> {
            match &self.1 {
                Some(state) if name == TRACESTATE => Some(state),
                _ => self.0.get(name)?.to_str().ok(),
            }
        }

        fn keys(&self) -> Vec<&str> {
            vec![TRACEPARENT, TRACESTATE]
        }
    }

    let mut parents = headers.get_all(TRACEPARENT).iter();
    // two are none, says W3C
    let (Some(_), None) = (parents.next(), parents.next()) else {
        return None;
    };
    let states: Vec<&str> = headers
        .get_all(TRACESTATE)
        .iter()
        .filter_map(|state| state.to_str().ok())
        .collect();
    let headers = Headers(headers, (states.len() > 1).then(|| states.join(",")));
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
    let caller = context.span().span_context().clone();
    caller.is_valid().then_some(caller)
}

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        traces: TraceFlags,
    }

    fn flags(more: &[&str]) -> Result<TraceFlags, String> {
        Program::try_parse_from(["program"].iter().chain(more))
            .map(|program| program.traces)
            .map_err(|error| error.to_string())
    }

    /// Traces to an address where nobody listens.
    fn traces(sample: f64) -> Traces {
        traces_to(
            "http://127.0.0.1:1".to_owned(),
            sample,
            &Metrics::new("tandem-test", "0"),
        )
    }

    fn traces_to(endpoint: String, sample: f64, metrics: &Metrics) -> Traces {
        let flags = TraceFlags {
            otlp_endpoint: Some(endpoint),
            trace_sample: sample,
        };
        Traces::start("tandem-test", &flags, metrics).unwrap()
    }

    fn headers(all: &[(&'static str, &'static str)]) -> HeaderMap {
        all.iter()
            .map(|(name, value)| {
                (
                    http::HeaderName::from_static(name),
                    http::HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

    /// What a call below `span` carries.
    fn carried(span: &Span) -> HeaderMap {
        span.parent().carried_by(()).into_parts().0.into_headers()
    }

    #[test]
    fn a_flag_that_cannot_work_is_taken() {
        let given = flags(&["--otlp-endpoint=http://c:4317", "--trace-sample=0.5"]).unwrap();
        assert_eq!(given.otlp_endpoint.as_deref(), Some("http://c:4317"));
        assert!(flags(&["--otlp-endpoint=http://[::1]:4317/"]).is_ok());
        for wrong in [
            "--otlp-endpoint=c:4317",
            "--otlp-endpoint=",
            "--otlp-endpoint=https://c:4317",
            "--otlp-endpoint=http://c:4318/v1/traces",
            "--otlp-endpoint=http://",
            "--trace-sample=1.1",
            "--trace-sample=-0.1",
            "--trace-sample=NaN",
            "--trace-sample=some",
        ] {
            let error = flags(&[wrong]).unwrap_err();
            assert!(error.contains(wrong.split('=').next().unwrap()), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_process_that_does_not_trace_cuts_its_callers_trace_in_two() {
        let span = Traces::off().request(&headers(&[("traceparent", SAMPLED), ("tracestate", "a=1")]), "GET /");
        let passed = carried(&span);
        assert_eq!(passed["traceparent"], SAMPLED);
        assert_eq!(passed["tracestate"], "a=1");
        assert_eq!(
            span.parent().trace_id().as_deref(),
            Some("4bf92f3577b34da6a3ce929d0e0e4736")
        );
        // below a call from here, too
        assert_eq!(carried(&span.parent().call("s/M", "h:1"))["traceparent"], SAMPLED);
        assert!(carried(&Traces::off().request(&HeaderMap::new(), "GET /")).is_empty());
    }

    #[test]
    fn the_callers_word_on_sampling_is_overruled() {
        for sample in [0.0, 1.0] {
            let traces = traces(sample);
            for (parent, flags) in [(SAMPLED, "01"), (UNSAMPLED, "00")] {
                let span = traces.request(&headers(&[("traceparent", parent)]), "GET /");
                let passed = carried(&span)["traceparent"].to_str().unwrap().to_owned();
                assert!(
                    passed.starts_with(&parent[..36]) && passed.ends_with(flags),
                    "{passed} below {parent}"
                );
                assert_eq!(passed[36..52] != parent[36..52], flags == "01", "a span of its own");
                assert_eq!(span.parent().trace_id().is_some(), flags == "01");
            }
            // without a caller's word the ratio decides, for what is below too
            let own = traces.request(&HeaderMap::new(), "GET /");
            let below = carried(&own.parent().call("s/M", "h:1"));
            assert!(
                below["traceparent"]
                    .to_str()
                    .unwrap()
                    .ends_with(if sample > 0.0 { "01" } else { "00" })
            );
        }
    }

    #[test]
    fn what_is_not_sampled_is_given_to_the_sdk() {
        let traces = traces(0.0);
        for caller in [&[][..], &[("traceparent", UNSAMPLED), ("tracestate", "a=1")]] {
            let span = traces.request(&headers(caller), "GET /");
            let call = span.parent().call("s/M", "h:1");
            assert!(!span.is_recorded() && !call.is_recorded());
            // the SDK would have given each an id of its own
            assert_eq!(carried(&call), carried(&span));
            assert!(caller.iter().all(|(name, value)| carried(&call)[*name] == *value));
        }
        // each root is a trace of its own
        let root = || carried(&traces.request(&HeaderMap::new(), "GET /"));
        assert_ne!(root(), root());
    }

    #[test]
    fn the_share_that_is_sampled_is_another_than_asked_for() {
        let traces = traces(0.25);
        let sampled = (0..4_000)
            .filter(|_| traces.request(&HeaderMap::new(), "GET /").is_recorded())
            .count();
        // 1,000 with a deviation of 27: outside of this once in 10^20 runs
        assert!((740..1_260).contains(&sampled), "{sampled} of 4,000");
    }

    #[test]
    fn a_broken_traceparent_is_followed() {
        let traces = traces(0.0);
        for broken in [
            "",
            "nonsense",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        ] {
            let span = traces.request(&headers(&[("traceparent", broken)]), "GET /");
            assert_eq!(span.parent().trace_id(), None, "{broken:?}");
        }
        let mut two = headers(&[("traceparent", SAMPLED)]);
        two.append("traceparent", http::HeaderValue::from_static(SAMPLED));
        assert_eq!(traces.request(&two, "GET /").parent().trace_id(), None);
    }

    #[test]
    fn spans_that_nobody_takes_wait_without_bound_or_hold_the_end_up() {
        // the kernel takes the connection, and nobody reads from it
        let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let metrics = Metrics::new("tandem-test", "0");
        let traces = traces_to(format!("http://{}", deaf.local_addr().unwrap()), 1.0, &metrics);
        for _ in 0..10_000 {
            drop(traces.request(&HeaderMap::new(), "GET /"));
        }
        let begin = Instant::now();
        traces.close();
        assert!(begin.elapsed() < FLUSH * 20, "{:?}", begin.elapsed());
        let text = metrics.encode().unwrap();
        let count = |sample: &str| -> u64 {
            let line = text
                .lines()
                .find(|line| line.starts_with(sample))
                .unwrap_or_else(|| panic!("{sample} in {text}"));
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert_eq!(count("tandem_traces_exported_spans_total"), 0);
        let full = count("tandem_traces_dropped_spans_total{reason=\"queue_full\"}");
        assert!(full > 0, "none of 10,000 found the queue full");
        // closed twice, and later spans, harm nothing
        traces.close();
        drop(traces.request(&HeaderMap::new(), "GET /"));
    }
}
