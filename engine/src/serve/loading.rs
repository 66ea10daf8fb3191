//! What is answered while the model loads: to every call, that it does. A connection that is refused says less, for a process that is
//! dead refuses too.

use std::convert::Infallible;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tandem_telemetry::{Readiness, State};
use tandem_wire::{Failure, Reason, Source};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tonic::body::Body;

use super::listen::accept;

/// Answers calls that come to `listener` until it is dropped, and its connections with it.
pub(super) async fn answer(listener: TcpListener, source: Source, readiness: Readiness) -> Infallible {
    let since = Instant::now();
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            stream = accept(&listener) => stream,
            Some(_) = connections.join_next() => continue,
        };
        let readiness = readiness.clone();
        connections.spawn(async move {
            let service = service_fn(move |_: http::Request<Incoming>| {
                let status = failure(source, &readiness, since).to_status();
                async { Ok::<_, Infallible>(status.into_http::<Body>()) }
            });
            let server = auto::Builder::new(TokioExecutor::new()).http2_only();
            // whoever leaves, leaves
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn failure(source: Source, readiness: &Readiness, since: Instant) -> Failure {
    let percent = match readiness.get() {
        State::Loading { percent } => percent,
        // it is about to serve
        _ => 100,
    };
    let detail = format!(
        "the model has been loading for {:.1} s, {percent} % of it is there; ask again",
        since.elapsed().as_secs_f64()
    );
    Failure::new(Reason::Loading, source, detail)
}
