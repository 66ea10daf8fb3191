//! The health listener over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tandem_telemetry::prometheus_client::encoding::EncodeLabelSet;
use tandem_telemetry::prometheus_client::metrics::counter::Counter;
use tandem_telemetry::prometheus_client::metrics::family::Family;
use tandem_telemetry::{LogFormat, Metrics, OpsServer, Readiness, State, TelemetryError, initialise};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

fn start() -> (OpsServer, Metrics, Readiness) {
    let metrics = Metrics::new("tandem-test", "1.2.3");
    let readiness = Readiness::default();
    let ops = OpsServer::start(
        SocketAddr::from(([127, 0, 0, 1], 0)),
        metrics.clone(),
        readiness.clone(),
    )
    .unwrap();
    (ops, metrics, readiness)
}

fn get(addr: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: test\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[test]
fn probes_report_each_state() {
    let (ops, _, readiness) = start();
    assert_eq!(
        get(ops.addr(), "/readyz"),
        (503, r#"{"status":"loading","loading":0}"#.into())
    );
    assert_eq!(get(ops.addr(), "/livez").0, 200);

    assert!(readiness.set(State::Loading { percent: 42 }));
    assert_eq!(
        get(ops.addr(), "/readyz"),
        (503, r#"{"status":"loading","loading":42}"#.into())
    );
    assert!(readiness.set(State::Waiting {
        reason: "no \"decode\" engine".into()
    }));
    assert_eq!(
        get(ops.addr(), "/readyz"),
        (503, r#"{"status":"waiting","reason":"no \"decode\" engine"}"#.into())
    );
    assert!(readiness.set(State::Ready));
    assert_eq!(get(ops.addr(), "/readyz"), (200, r#"{"status":"ready"}"#.into()));
    assert!(readiness.set(State::Degraded {
        reason: "no engine".into()
    }));
    assert_eq!(
        get(ops.addr(), "/readyz"),
        (200, r#"{"status":"degraded","reason":"no engine"}"#.into())
    );
    assert!(readiness.set(State::Draining));
    assert_eq!(get(ops.addr(), "/readyz"), (503, r#"{"status":"draining"}"#.into()));
    assert_eq!(get(ops.addr(), "/livez").0, 200);
    assert!(readiness.set(State::Failed { reason: "gone".into() }));
    assert_eq!(
        get(ops.addr(), "/livez"),
        (503, r#"{"status":"failed","reason":"gone"}"#.into())
    );
    assert_eq!(get(ops.addr(), "/else").0, 404);
}

#[test]
fn a_draining_or_failed_process_never_reads_as_ready_again() {
    let readiness = Readiness::default();
    readiness.set(State::Draining);
    assert!(!readiness.set(State::Ready));
    assert!(!readiness.set(State::Loading { percent: 1 }));
    assert_eq!(readiness.get(), State::Draining);
    assert!(readiness.set(State::Failed { reason: "x".into() }));
    assert!(!readiness.set(State::Draining));
    assert_eq!(readiness.get(), State::Failed { reason: "x".into() });
}

#[test]
fn a_label_set_is_visible_before_its_first_increment() {
    let (ops, metrics, _) = start();
    let requests = Family::<Outcome, Counter>::default();
    initialise(&requests, [Outcome { outcome: "done" }, Outcome { outcome: "failed" }]);
    metrics.part("demo", |registry| {
        registry.register("requests", "Requests", requests.clone());
    });

    let (status, text) = get(ops.addr(), "/metrics");
    assert_eq!(status, 200);
    assert!(
        text.contains("tandem_demo_requests_total{outcome=\"failed\"} 0"),
        "{text}"
    );
    assert!(
        text.contains("tandem_build_info{service=\"tandem-test\",version=\"1.2.3\"} 1"),
        "{text}"
    );
    let started: f64 = text
        .lines()
        .find_map(|line| line.strip_prefix("process_start_time_seconds "))
        .unwrap()
        .parse()
        .unwrap();
    assert!(started > 1.7e9, "{started}");
    assert!(text.ends_with("# EOF\n"), "{text}");
}

#[test]
fn silent_connections_do_not_lock_probes_out() {
    let (ops, _, _) = start();
    let silent: Vec<TcpStream> = (0..80).map(|_| TcpStream::connect(ops.addr()).unwrap()).collect();
    let began = Instant::now();
    assert_eq!(get(ops.addr(), "/livez").0, 200);
    // More silent peers than slots: the probe waits for one deadline of 10 s, not for the peers' good will.
    assert!(began.elapsed() < Duration::from_secs(19), "{:?}", began.elapsed());
    drop(silent);
}

#[test]
fn dropping_the_server_frees_its_port() {
    let (ops, metrics, readiness) = start();
    let addr = ops.addr();
    assert!(matches!(
        OpsServer::start(addr, metrics.clone(), readiness.clone()),
        Err(TelemetryError::Bind { .. })
    ));
    drop(ops);
    OpsServer::start(addr, metrics, readiness).unwrap();
}

#[test]
fn a_log_format_that_does_not_exist_is_refused_by_name() {
    assert_eq!("json".parse::<LogFormat>().unwrap(), LogFormat::Json);
    let error = "yaml".parse::<LogFormat>().unwrap_err().to_string();
    assert!(error.contains("\"yaml\"") && error.contains("text or json"), "{error}");
}
