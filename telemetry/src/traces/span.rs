//! One operation of one request.

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use opentelemetry::trace::{Span as _, SpanContext, SpanKind, Status, TraceFlags, TraceState, Tracer as _};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::SdkTracer;
use tonic::metadata::MetadataMap;

use super::{TRACEPARENT, TRACESTATE, Traces};

/// One operation of one request: it begins when it is made and ends when it is dropped. Where no endpoint is given or the
/// request is not sampled, nothing is recorded.
#[derive(Debug, Default)]
pub struct Span {
    parent: TraceParent,
    /// Boxed, because most spans are not recorded.
    recorded: Option<Box<opentelemetry_sdk::trace::Span>>,
}

/// The span that others are children of.
#[derive(Debug, Clone, Default)]
pub struct TraceParent {
    traces: Traces,
    context: Option<SpanContext>,
}

impl Span {
    /// A span of a process that does not trace: its children are its caller's.
    pub(super) fn passing(caller: Option<SpanContext>) -> Self {
        Self {
            parent: TraceParent {
                traces: Traces::off(),
                context: caller,
            },
            recorded: None,
        }
    }

    pub(super) fn begun(
        traces: Traces,
        tracer: &SdkTracer,
        context: &Context,
        name: &'static str,
        kind: SpanKind,
    ) -> Self {
        let span = tracer
            .span_builder(name)
            .with_kind(kind)
            .start_with_context(tracer, context);
        Self {
            parent: TraceParent {
                traces,
                context: Some(span.span_context().clone()),
            },
            recorded: span.is_recording().then(|| Box::new(span)),
        }
    }

    /// What its children are children of.
    pub fn parent(&self) -> &TraceParent {
        &self.parent
    }

    /// Says more about it: `attributes` are asked for if it is recorded.
    pub fn describe<const N: usize>(&mut self, attributes: impl FnOnce() -> [(&'static str, Value); N]) {
        if let Some(span) = &mut self.recorded {
            for (name, value) in attributes() {
                span.set_attribute(KeyValue::new(name, value));
            }
        }
    }

    /// It failed: `error` is a code of few values, `detail`, for people, is asked for if it is recorded.
    pub fn fail(&mut self, error: &'static str, detail: impl FnOnce() -> String) {
        if let Some(span) = &mut self.recorded {
            span.set_attribute(KeyValue::new("error.type", error));
            span.set_status(Status::error(detail()));
        }
    }

    pub(super) fn rpc(&mut self, method: &'static str) {
        self.describe(|| [("rpc.system.name", "grpc".into()), ("rpc.method", method.into())]);
    }
}

impl TraceParent {
    /// Begins the span of a gRPC call that is made from here to `server`, HOST:PORT.
    pub fn call(&self, method: &'static str, server: &str) -> Span {
        let mut span = self.traces.begin(self.context.clone(), method, SpanKind::Client);
        span.rpc(method);
        span.describe(|| {
            let (host, port) = server.rsplit_once(':').unwrap_or((server, ""));
            let port: i64 = port.parse().unwrap_or_default();
            [("server.address", host.to_owned().into()), ("server.port", port.into())]
        });
        span
    }

    /// The gRPC request that carries this context.
    pub fn carried_by<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if self.context.is_some() {
            let mut headers = HeaderMap::with_capacity(2);
            self.inject(&mut headers);
            *request.metadata_mut() = MetadataMap::from_headers(headers);
        }
        request
    }

    fn inject(&self, headers: &mut HeaderMap) {
        let Some(context) = &self.context else { return };
        let parent = format!(
            "00-{}-{}-{:02x}",
            context.trace_id(),
            context.span_id(),
            context.trace_flags() & TraceFlags::SAMPLED
        );
        if let Ok(parent) = HeaderValue::try_from(parent) {
            headers.insert(HeaderName::from_static(TRACEPARENT), parent);
        }
        if *context.trace_state() != TraceState::NONE
            && let Ok(state) = HeaderValue::try_from(context.trace_state().header())
        {
            headers.insert(HeaderName::from_static(TRACESTATE), state);
        }
    }

    /// The trace's id, for logs, if somebody records it.
    pub fn trace_id(&self) -> Option<String> {
        let context = self.context.as_ref().filter(|context| context.is_sampled())?;
        Some(context.trace_id().to_string())
    }
}
