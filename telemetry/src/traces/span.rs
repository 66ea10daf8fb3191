//! One operation of one request.

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use opentelemetry::trace::{Span as _, SpanContext, SpanKind, Status, TraceState, Tracer as _};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::SdkTracer;
use tonic::metadata::MetadataMap;

use super::{TRACEPARENT, TRACESTATE, Traces};

/// One operation of one request: it begins when it is made and ends when it is dropped. Where no endpoint is given or the
/// request is not sampled, nothing is recorded, and what is below it is told its caller's context.
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
    /// A span that is not recorded: its children are its caller's.
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
            recorded: Some(Box::new(span)),
        }
    }

    #[cfg(test)]
    pub(super) fn is_recorded(&self) -> bool {
        self.recorded.is_some()
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

/// `00-TRACE-SPAN-FLAGS` in hex. By hand, as `format!` takes ten times as long, and unsampled requests have it too.
fn traceparent(context: &SpanContext) -> [u8; 55] {
    let mut text = *b"00-................................-................-00";
    let (trace, span) = (context.trace_id().to_bytes(), context.span_id().to_bytes());
    let digits = [(3, &trace[..]), (36, &span[..])];
    for (at, bytes) in digits {
        for (pair, byte) in text[at..].chunks_exact_mut(2).zip(bytes) {
            pair.copy_from_slice(&[byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    if context.is_sampled() {
        text[54] = b'1';
    }
    text
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

    /// Tells whoever is sent `headers` of this context.
    pub fn inject(&self, headers: &mut HeaderMap) {
        let Some(context) = &self.context else { return };
        if let Ok(mut parent) = HeaderValue::from_bytes(&traceparent(context)) {
            // it is another one for each call: in HTTP/2's table of headers it would only push out those that come again
            parent.set_sensitive(true);
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
