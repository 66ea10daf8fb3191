//! The health and metrics listener.
//!
//! It shares nothing with the work but the registry and the state: own thread, own runtime. A blocked executor, a
//! scheduler in a long step or a full accept queue of the main listener leaves it answering.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, oneshot};

use crate::{Metrics, Readiness, TelemetryError};

/// Probes and scrapers are few; more connections than this wait in the kernel's accept queue.
const MAX_CONNECTIONS: usize = 64;
/// One request per connection, and all of it within this: a peer that stops reading or writing holds no slot for long.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(10);
/// After a failed accept (file descriptors used up, say) the next try waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The running listener; dropping it closes the port and ends the thread.
#[derive(Debug)]
pub struct OpsServer {
    addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl OpsServer {
    /// Binds `addr` (port 0: a free one) and serves `/metrics`, `/livez` and `/readyz` from now on.
    ///
    /// `/readyz` is 200 in [`State::Ready`](crate::State::Ready) and [`State::Degraded`](crate::State::Degraded), 503 otherwise; `/livez` is 200 but in
    /// [`State::Failed`](crate::State::Failed). Both answer with JSON: `status`, and `loading` (percent) or `reason`.
    pub fn start(addr: SocketAddr, metrics: Metrics, readiness: Readiness) -> Result<Self, TelemetryError> {
        let bind = |source| TelemetryError::Bind { addr, source };
        let listener = TcpListener::bind(addr).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let bound = listener.local_addr().map_err(bind)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(TelemetryError::Start)?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("ops".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = accept(listener, metrics, readiness) => {}
                        _ = stopped => {}
                    }
                });
            })
            .map_err(TelemetryError::Start)?;
        Ok(Self {
            addr: bound,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for OpsServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, metrics: Metrics, readiness: Readiness) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "health listener cannot join its runtime"),
    };
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "health listener cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (metrics, readiness) = (metrics.clone(), readiness.clone());
        // Owned by this thread's runtime, ended by the deadline.
        tokio::spawn(async move {
            let _slot = slot;
            let service = service_fn(|request| {
                let response = answer(&request, &metrics, &readiness);
                async { Ok::<_, Infallible>(response) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(CONNECTION_DEADLINE, connection).await;
        });
    }
}

fn answer(request: &Request<Incoming>, metrics: &Metrics, readiness: &Readiness) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return respond(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "only GET\n".into());
    }
    match request.uri().path() {
        "/metrics" => match metrics.encode() {
            Ok(text) => respond(StatusCode::OK, OPEN_METRICS, text),
            Err(error) => respond(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", format!("{error}\n")),
        },
        "/livez" => state(readiness, crate::State::is_alive),
        "/readyz" => state(readiness, crate::State::is_ready),
        _ => respond(
            StatusCode::NOT_FOUND,
            "text/plain",
            "try /metrics, /livez or /readyz\n".into(),
        ),
    }
}

fn state(readiness: &Readiness, ok: fn(&crate::State) -> bool) -> Response<Full<Bytes>> {
    let state = readiness.get();
    let status = if ok(&state) {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    respond(status, "application/json", state.to_json())
}

fn respond(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}
