//! The `Admin` service: what changes this engine, on a port of its own, for those who have the token.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tandem_secrets::{Presented, Token, Watched, bearer};
use tandem_wire::Reason;
use tandem_wire::proto::admin_server::{Admin, AdminServer};
use tandem_wire::proto::{DrainRequest, DrainResponse, FlushRequest, FlushResponse, Knobs, SetKnobsRequest};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

use super::listen::{self, ListenError, Reserved};
use super::node::Shared;
use crate::sched::knobs::MAX_TIMER_MS;
use crate::transfer::KeepAlive;

/// Calls of one connection at once: people and an operator, no traffic.
const STREAMS: u32 = 64;
/// No message of this service comes near it.
const MESSAGE_BYTES: usize = 64 << 10;

/// Where an engine's admin port will listen, and what opens it.
#[derive(Debug)]
pub struct AdminPort {
    /// Taken, not yet open.
    pub reserved: Reserved,
    /// What callers must have.
    pub token: Arc<Watched<Token>>,
    /// Where the router reaches it; `None`: its port, on the host of the control port.
    pub advertise: Option<String>,
}

/// The same, open.
pub(super) struct OpenPort {
    listener: TcpListener,
    addr: SocketAddr,
    gate: Gate,
}

impl AdminPort {
    /// host:port for `EngineInfo`.
    pub(super) fn endpoint(&self) -> String {
        let port = self.reserved.addr().port();
        self.advertise.clone().unwrap_or_else(|| format!(":{port}"))
    }

    pub(super) fn open(self) -> Result<OpenPort, ListenError> {
        Ok(OpenPort {
            addr: self.reserved.addr(),
            listener: self.reserved.open()?,
            gate: Gate(self.token),
        })
    }
}

impl OpenPort {
    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves until `closing`.
    pub(super) async fn serve(self, shared: Arc<Shared>, keep_alive: KeepAlive, closing: CancellationToken) {
        let incoming = futures::stream::unfold(self.listener, |listener| async {
            let stream = listen::accept(&listener).await;
            Some((Ok::<_, std::io::Error>(stream), listener))
        });
        let service = AdminServer::new(AdminService(shared)).max_decoding_message_size(MESSAGE_BYTES);
        let served = keep_alive
            .server()
            .max_concurrent_streams(Some(STREAMS))
            .add_service(InterceptedService::new(service, self.gate))
            .serve_with_incoming_shutdown(incoming.boxed(), closing.cancelled_owned())
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the admin port's server ended");
        }
    }
}

/// Lets nobody in without the token, before a message is read.
#[derive(Clone)]
struct Gate(Arc<Watched<Token>>);

impl Interceptor for Gate {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let presented = request.metadata().get_all("authorization");
        let wrong = match bearer(presented.iter().map(MetadataValue::as_bytes)) {
            Presented::Secret(secret) if self.0.get().opens(secret) => return Ok(request),
            Presented::Secret(_) => "the token is not the one of --admin-token-file",
            Presented::Nothing => "no token: send the one of --admin-token-file as authorization: Bearer TOKEN",
            Presented::Other => "the authorization is not one Bearer token",
        };
        Err(Status::unauthenticated(wrong))
    }
}

struct AdminService(Arc<Shared>);

#[tonic::async_trait]
impl Admin for AdminService {
    async fn set_knobs(&self, request: Request<SetKnobsRequest>) -> Result<Response<Knobs>, Status> {
        let shared = &self.0;
        let request = request.into_inner();
        shared.check_boot(&request.boot_id).map_err(|f| f.to_status())?;
        let change = request.knobs.unwrap_or_default();
        let _one_at_a_time = shared.knobs.lock();
        let knobs = shared
            .all_knobs()
            .with(&change, shared.scheduler.spec())
            .and_then(|knobs| Ok(shared.scheduler.set_knobs(knobs.sched).map(|()| knobs)?))
            .map_err(|refused| shared.failure(Reason::Invalid, refused.to_string()).to_status())?;
        shared.timers.update(|timers| *timers = knobs.timers);
        tracing::info!(?knobs, "knobs changed");
        Ok(Response::new(knobs.to_wire()))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let shared = &self.0;
        let request = request.into_inner();
        shared.check_boot(&request.boot_id).map_err(|f| f.to_status())?;
        tracing::info!(resume = request.resume, limit_ms = request.deadline_ms, "drain");
        shared.set_draining(!request.resume);
        let remaining = if request.resume {
            shared.remaining()
        } else {
            let limit = Duration::from_millis(request.deadline_ms.min(MAX_TIMER_MS));
            shared.drained(tokio::time::Instant::now() + limit).await
        };
        Ok(Response::new(DrainResponse { remaining }))
    }

    async fn flush(&self, request: Request<FlushRequest>) -> Result<Response<FlushResponse>, Status> {
        let shared = &self.0;
        shared
            .check_boot(&request.into_inner().boot_id)
            .map_err(|f| f.to_status())?;
        let freed_pages = shared.scheduler.cache().flush();
        tracing::info!(freed_pages, "prefix cache flushed");
        Ok(Response::new(FlushResponse { freed_pages }))
    }
}
