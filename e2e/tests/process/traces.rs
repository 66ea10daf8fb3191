//! One trace holds what the three processes did for a request; a collector that is dead or deaf harms none.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use tandem_e2e::stack::{MODEL, Pair, Router};
use tandem_e2e::{eventually, probe, salted_text};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Spans are gathered for a second before they are sent; on a busy machine all of it takes longer.
const ARRIVE: Duration = Duration::from_secs(30);

/// A collector: what came, with the name of the service that sent it.
#[derive(Debug, Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<(String, Span)>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.spans.lock().expect("the lock");
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.expect("a resource").attributes;
            let service = text(&attributes, "service.name");
            for scope in resource.scope_spans {
                spans.extend(scope.spans.into_iter().map(|span| (service.clone(), span)));
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        addr
    }

    fn of(&self, trace: &str) -> Vec<(String, Span)> {
        let spans = self.spans.lock().expect("the lock");
        spans
            .iter()
            .filter(|(_, span)| hex(&span.trace_id) == trace)
            .cloned()
            .collect()
    }

    /// The spans of a trace, once there are `count` of them.
    async fn trace(&self, trace: &str, count: usize) -> Vec<(String, Span)> {
        eventually("the spans of the trace arrive", ARRIVE, async || {
            let spans = self.of(trace);
            if spans.len() >= count {
                Ok(spans)
            } else {
                Err(format!("{spans:?}"))
            }
        })
        .await
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

fn value(attributes: &[KeyValue], name: &str) -> Option<Value> {
    let attribute = attributes.iter().find(|attribute| attribute.key == name)?;
    attribute.value.clone()?.value
}

fn text(attributes: &[KeyValue], name: &str) -> String {
    match value(attributes, name) {
        Some(Value::StringValue(text)) => text,
        other => panic!("{name} is {other:?} in {attributes:?}"),
    }
}

fn number(span: &Span, name: &str) -> i64 {
    match value(&span.attributes, name) {
        Some(Value::IntValue(number)) => number,
        other => panic!("{name} of {} is {other:?} in {:?}", span.name, span.attributes),
    }
}

/// A completion of a prompt that no cache has, with these headers.
async fn complete(router: &Router, salt: u64, headers: &[(&str, &str)]) -> (u16, serde_json::Value) {
    let body = serde_json::json!({
        "model": MODEL, "prompt": salted_text(salt, 60), "max_tokens": 5, "temperature": 0, "ignore_eos": true,
    });
    let mut request = probe::http()
        .post(format!("{}/v1/completions", router.url()))
        .json(&body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.expect("an answer");
    (response.status().as_u16(), response.json().await.expect("JSON"))
}

fn parent(trace: &str, span: &str, flags: &str) -> String {
    format!("00-{trace}-{span}-{flags}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_breaks_between_router_decode_and_prefill_or_is_made_against_the_callers_will() {
    let collector = Collector::default();
    let endpoint = format!("--otlp-endpoint=http://{}", collector.start().await);
    // nothing begins a trace by itself: what arrives is there because its caller asked for it
    let flags = [endpoint.as_str(), "--trace-sample=0"];
    let mut pair = Pair::start(&flags).await;
    let mut router = Router::start(
        &[&pair.prefill],
        &[&pair.decode],
        &[&flags[..], &["--queue-ms=3000"]].concat(),
    )
    .await;

    let unsampled = "11111111111111111111111111111111";
    let (status, _) = complete(
        &router,
        71,
        &[("traceparent", &parent(unsampled, "00f067aa0ba902b7", "00"))],
    )
    .await;
    assert_eq!(status, 200);
    let (status, _) = complete(&router, 72, &[]).await;
    assert_eq!(status, 200);
    let sampled = "4bf92f3577b34da6a3ce929d0e0e4736";
    let headers = [
        ("traceparent", parent(sampled, "00f067aa0ba902b7", "01")),
        ("tracestate", "vendor=1,other=2".to_owned()),
        ("x-request-id", "traced-1".to_owned()),
    ];
    let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
    let (status, body) = complete(&router, 73, &headers).await;
    assert_eq!(status, 200, "{body}");

    let spans = collector.trace(sampled, 7).await;
    let by: HashMap<(&str, &str, SpanKind), &Span> = spans
        .iter()
        .map(|(service, span)| ((service.as_str(), span.name.as_str(), span.kind()), span))
        .collect();
    let find = |service, name, kind| {
        *by.get(&(service, name, kind))
            .unwrap_or_else(|| panic!("no {kind:?} {name} of {service} in {:?}", by.keys()))
    };
    let answer = find("tandem-router", "POST /v1/completions", SpanKind::Server);
    let asked = find("tandem-router", "tandem.v1.Engine/Generate", SpanKind::Client);
    let generate = find("tandem-decode", "tandem.v1.Engine/Generate", SpanKind::Server);
    let pull = find("tandem-decode", "tandem.v1.KvTransfer/Prefill", SpanKind::Client);
    let prefill = find("tandem-prefill", "tandem.v1.KvTransfer/Prefill", SpanKind::Server);
    let fetch = find("tandem-decode", "tandem.v1.KvTransfer/Fetch", SpanKind::Client);
    let sent = find("tandem-prefill", "tandem.v1.KvTransfer/Fetch", SpanKind::Server);
    assert_eq!(spans.len(), 7, "{spans:?}");
    assert_eq!(hex(&answer.parent_span_id), "00f067aa0ba902b7");
    for (child, parent) in [
        (asked, answer),
        (generate, asked),
        (pull, generate),
        (prefill, pull),
        (fetch, pull),
        (sent, fetch),
    ] {
        assert_eq!(
            hex(&child.parent_span_id),
            hex(&parent.span_id),
            "{} under {}",
            child.name,
            parent.name
        );
    }
    for span in by.values() {
        assert_eq!(span.trace_state, "vendor=1,other=2", "{}", span.name);
        assert!(
            span.status
                .as_ref()
                .is_none_or(|status| status.code() != StatusCode::Error),
            "{span:?}"
        );
        assert!(span.end_time_unix_nano > span.start_time_unix_nano, "{span:?}");
    }
    // the layers' times: each lies within the span that it is a part of
    let micros =
        |span: &Span| i64::try_from((span.end_time_unix_nano - span.start_time_unix_nano) / 1000).expect("micros");
    for name in [
        "tandem.queue_us",
        "tandem.prefill_us",
        "tandem.transfer_us",
        "tandem.decode_us",
    ] {
        assert!(
            (0..=micros(generate)).contains(&number(generate, name)),
            "{name}: {generate:?}"
        );
    }
    for (span, name) in [
        (generate, "tandem.prefill_us"),
        (generate, "tandem.transfer_us"),
        (generate, "tandem.decode_us"),
        (prefill, "tandem.prefill_us"),
        (pull, "tandem.transfer_us"),
    ] {
        assert!(number(span, name) > 0, "{name} of {span:?}");
    }
    assert_eq!(
        number(generate, "tandem.prefill_us"),
        number(prefill, "tandem.prefill_us")
    );
    assert!(number(asked, "tandem.queue_us") >= 0);
    for span in [answer, generate, prefill] {
        assert_eq!(text(&span.attributes, "tandem.request_id"), "traced-1");
    }
    assert_eq!(number(answer, "http.response.status_code"), 200);
    assert_eq!(
        number(answer, "gen_ai.usage.input_tokens"),
        body["usage"]["prompt_tokens"].as_i64().expect("usage")
    );
    assert_eq!(number(answer, "gen_ai.usage.output_tokens"), 5);
    assert_eq!(text(&generate.attributes, "rpc.method"), "tandem.v1.Engine/Generate");
    let line = router.process.log();
    let line = line
        .lines()
        .find(|line| line.contains("traced-1"))
        .expect("a log line of the request");
    assert!(line.contains(sampled), "{line}");

    // what fails says so, where it failed
    pair.prefill.process.kill();
    let failed = "22222222222222222222222222222222";
    let (status, body) = complete(
        &router,
        74,
        &[("traceparent", &parent(failed, "00f067aa0ba902b7", "01"))],
    )
    .await;
    assert!(status >= 500, "{status} {body}");
    let spans = eventually("the failed request's span arrives", ARRIVE, async || {
        let spans = collector.of(failed);
        let ended = spans.iter().any(|(_, span)| span.name == "POST /v1/completions");
        if ended { Ok(spans) } else { Err(format!("{spans:?}")) }
    })
    .await;
    let (_, answer) = spans
        .iter()
        .find(|(_, span)| span.name == "POST /v1/completions")
        .expect("it");
    assert_eq!(
        answer
            .status
            .as_ref()
            .map(opentelemetry_proto::tonic::trace::v1::Status::code),
        Some(StatusCode::Error),
        "{answer:?}"
    );
    assert_eq!(
        text(&answer.attributes, "error.type"),
        body["error"]["code"].as_str().expect("a code")
    );
    assert_eq!(number(answer, "http.response.status_code"), i64::from(status));

    // the end of a process sends what it has; all that was ever sent belongs to the two traces
    for process in [&mut router.process, &mut pair.decode.process] {
        process.signal(libc::SIGTERM);
        process.wait(ARRIVE).await;
    }
    let spans = collector.spans.lock().expect("the lock").clone();
    for (service, span) in spans {
        let trace = hex(&span.trace_id);
        assert!(
            trace == sampled || trace == failed,
            "a span that nobody asked for: {service} {span:?}"
        );
    }
}

/// Answers, with a collector that does not; then the process ends in good time.
async fn unharmed(endpoint: &str) {
    let endpoint = format!("--otlp-endpoint={endpoint}");
    let mut pair = Pair::start(&[endpoint.as_str()]).await;
    let mut router = Router::start(&[&pair.prefill], &[&pair.decode], &[endpoint.as_str()]).await;
    for salt in 80..84 {
        let (status, body) = complete(&router, salt, &[]).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["usage"]["completion_tokens"], 5, "{body}");
    }
    for process in [&mut router.process, &mut pair.decode.process, &mut pair.prefill.process] {
        let begin = Instant::now();
        process.signal(libc::SIGTERM);
        // two seconds for what is left of the traces; the rest is for a busy machine
        let status = process.wait(Duration::from_secs(40)).await;
        assert!(status.success(), "{status} after {:?}", begin.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_not_there_fails_requests() {
    // a port that no test of this machine is given
    unharmed("http://127.0.0.1:1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_answers_holds_requests_up() {
    // connections are taken by the kernel, and nobody reads from them
    let deaf = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    unharmed(&format!("http://{}", deaf.local_addr().expect("an address"))).await;
}
