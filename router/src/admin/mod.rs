//! The admin port: what reveals or changes more than a client's business, for those who have the token.
//!
//! | path | answers |
//! | --- | --- |
//! | `GET /admin/endpoints` | each engine: who it is and how it stands |
//! | `GET /admin/loads` | each engine's load by its last report |
//! | `GET /admin/connections` | each client connection: what it waits for, and where its time went; the slowest requests of late |
//! | `GET /admin/evidence` | what that comes to: how answers ended lately, clients that take nothing, whether a pair of engines is known |
//! | `GET`, `POST /admin/traffic` | whether requests go to the engines, how many are there and how many wait; changes it |
//! | `GET`, `POST /admin/knobs` | what can be changed while the router runs; changes it |
//! | `POST /admin/probe` | a completion on a prompt that nobody has seen, and what was counted of it |
//! | `POST /admin/badge` | a badge that marks requests as probes |
//! | `POST /admin/flush` | drops the prefix caches of all engines |
//! | `POST /admin/drain`, `POST /admin/resume` | an engine admits nothing new, or admits again |
//!
//! [`orders`] passes orders to the engines' own admin ports, [`traffic`], [`probe`] and [`badge`] take those to this router,
//! [`views`], [`connections`] and [`evidence`] are what is shown.

mod badge;
mod connections;
mod evidence;
mod orders;
mod probe;
mod traffic;
mod views;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tandem_secrets::{Presented, Token, Watched};
use tandem_telemetry::prometheus_client::metrics::counter::Counter;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

use crate::error::{Locked, RouterError};
use crate::evidence::{Connection, Registry};
use crate::http::App;
use crate::http::body::{Answer, Budget, Held, read};
use crate::http::probe::Probe;
use crate::http::routes::{REQUEST_ID, json, presented, refusal, request_id, turn_away};
use crate::http::socket::Socket;

/// People and an operator; more connections than this wait in the kernel.
const MAX_CONNECTIONS: usize = 64;
/// For a request's head, and for a client that takes nothing of its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Orders are short.
const MAX_BODY_BYTES: usize = 64 << 10;
/// After a failed accept (file descriptors used up, say) the next try waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The open port. Dropping it closes it.
#[derive(Debug)]
pub struct Port {
    addr: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

/// What its connections share.
struct Admin {
    app: Arc<App>,
    token: Watched<Token>,
}

impl Port {
    /// Serves from now on.
    pub fn open(listener: TcpListener, addr: SocketAddr, token: Watched<Token>, app: Arc<App>) -> Self {
        let task = tokio::spawn(accept(listener, Arc::new(Admin { app, token })));
        Self {
            addr,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

async fn accept(listener: TcpListener, admin: Arc<Admin>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // those who look are no clients
    let unlisted = Registry::default();
    // owned here: they end with the port
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (admin, evidence) = (Arc::clone(&admin), unlisted.open(peer, false));
                connections.spawn(async move {
                    connection(stream, admin, evidence).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the admin port");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One request per connection, so that a connection holds its slot no longer than its answer takes.
async fn connection(stream: TcpStream, admin: Arc<Admin>, evidence: Arc<Connection>) {
    let Ok(socket) = Socket::new(stream, PATIENCE, Counter::default(), evidence) else {
        return;
    };
    let service = service_fn(|request| {
        let admin = Arc::clone(&admin);
        async move { Ok::<_, Infallible>(answer(&admin, request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .keep_alive(false)
        .serve_connection(TokioIo::new(socket), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection to the admin port broke");
    }
}

async fn answer(admin: &Admin, request: Request<Incoming>) -> Response<Answer> {
    let id = request_id(request.headers());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = match route(admin, request).await {
        Ok(response) => response,
        Err(error) => refusal(&error, &id),
    };
    let status = response.status().as_u16();
    if method == Method::GET {
        tracing::debug!(request_id = id, %method, path, status, "admin");
    } else {
        tracing::info!(request_id = id, %method, path, status, "admin");
    }
    if let Ok(value) = http::HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// The paths.
#[derive(Clone, Copy)]
enum Path {
    Endpoints,
    Loads,
    Connections,
    Evidence,
    Traffic,
    Knobs,
    Probe,
    Badge,
    Flush,
    Drain,
    Resume,
}

async fn route(admin: &Admin, request: Request<Incoming>) -> Result<Response<Answer>, RouterError> {
    let path = match admin.unlock(&request).and_then(|()| path(&request)) {
        Ok(path) => path,
        Err(error) => {
            turn_away(request).await;
            return Err(error);
        }
    };
    let engines = &admin.app.flow.engines;
    let token = admin.token.get();
    match path {
        Path::Endpoints => Ok(shown(StatusCode::OK, &views::endpoints(&engines.workers()))),
        Path::Loads => Ok(shown(StatusCode::OK, &views::loads(&engines.workers()))),
        Path::Connections => Ok(shown(StatusCode::OK, &connections::view(&admin.app.evidence))),
        Path::Evidence => Ok(shown(StatusCode::OK, &evidence::view(engines, &admin.app.evidence))),
        Path::Flush => Ok(outcome(&orders::flush(engines, &token).await)),
        Path::Traffic => {
            let flow = &admin.app.flow;
            if request.method() == Method::POST {
                let order = traffic::read(&body(request).await?.bytes)?;
                flow.traffic.take(order);
                tracing::info!(?order, "traffic");
            }
            Ok(shown(StatusCode::OK, &traffic::view(flow)))
        }
        Path::Knobs => {
            let flow = &admin.app.flow;
            if request.method() == Method::POST {
                let order = body(request).await?;
                // nothing is waited for between the two: no other order comes in between
                let knobs = flow.knobs().changed(&order.bytes)?;
                flow.knobs.store(Arc::new(knobs));
                flow.engines.changed().link();
                tracing::info!(?knobs, "knobs");
            }
            Ok(shown(StatusCode::OK, &flow.knobs()))
        }
        Path::Probe => {
            let id = request_id(request.headers());
            let limit = probe::read(&body(request).await?.bytes)?;
            let measured = Probe::measure(&admin.app, id, limit).await?;
            Ok(shown(StatusCode::OK, &measured))
        }
        Path::Badge => {
            let time = badge::read(&body(request).await?.bytes)?;
            let badge = admin.app.badges.draw(time);
            Ok(shown(StatusCode::OK, &badge::Drawn { badge: badge.text() }))
        }
        Path::Drain | Path::Resume => {
            let held = body(request).await?;
            let order = orders::Order::read(&held.bytes, matches!(path, Path::Resume))?;
            Ok(outcome(&orders::drain(engines, &token, &order).await?))
        }
    }
}

async fn body(request: Request<Incoming>) -> Result<Held, RouterError> {
    let (parts, body) = request.into_parts();
    // not of the budget of the clients' bodies: an order must come through while those are many
    read(&parts.headers, body, MAX_BODY_BYTES, &Budget::new(MAX_BODY_BYTES)).await
}

impl Admin {
    fn unlock(&self, request: &Request<Incoming>) -> Result<(), RouterError> {
        match presented(request) {
            Presented::Secret(secret) if self.token.get().opens(secret) => Ok(()),
            Presented::Nothing => Err(RouterError::Unauthorized(Locked::NoToken)),
            Presented::Secret(_) | Presented::Other => Err(RouterError::Unauthorized(Locked::WrongToken)),
        }
    }
}

fn path(request: &Request<Incoming>) -> Result<Path, RouterError> {
    let (path, allow) = match request.uri().path() {
        "/admin/endpoints" => (Path::Endpoints, "GET"),
        "/admin/loads" => (Path::Loads, "GET"),
        "/admin/connections" => (Path::Connections, "GET"),
        "/admin/evidence" => (Path::Evidence, "GET"),
        "/admin/traffic" => (Path::Traffic, "GET, POST"),
        "/admin/knobs" => (Path::Knobs, "GET, POST"),
        "/admin/probe" => (Path::Probe, "POST"),
        "/admin/badge" => (Path::Badge, "POST"),
        "/admin/flush" => (Path::Flush, "POST"),
        "/admin/drain" => (Path::Drain, "POST"),
        "/admin/resume" => (Path::Resume, "POST"),
        other => {
            return Err(RouterError::NoPath {
                method: request.method().to_string(),
                path: other.to_owned(),
            });
        }
    };
    if allow.split(", ").any(|method| request.method() == method) {
        return Ok(path);
    }
    Err(RouterError::Method {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        allow,
    })
}

/// 200 where every engine did it, else 502.
fn outcome(told: &orders::Told) -> Response<Answer> {
    let status = if told.all() {
        StatusCode::OK
    } else {
        StatusCode::BAD_GATEWAY
    };
    shown(status, told)
}

fn shown(status: StatusCode, what: &impl Serialize) -> Response<Answer> {
    json(status, serde_json::to_vec(what).unwrap_or_default())
}
