//! The `Engine` service: who this is and how loaded; Generate is next door, and what changes the engine has a port of its own.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::Stream;
use tandem_wire::proto::engine_server::Engine;
use tandem_wire::proto::{EngineInfo, GenerateEvent, GenerateRequest, GetInfoRequest, Load, WatchLoadRequest};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::generate;
use super::node::Shared;
use crate::trace::failed;

/// Between two load reports, unless the caller asks for another interval.
const LOAD_INTERVAL: Duration = Duration::from_millis(100);
/// A load report comes at least this often.
const LOAD_AT_LEAST: Duration = Duration::from_secs(1);

pub(super) struct EngineService(pub(super) Arc<Shared>);

#[tonic::async_trait]
impl Engine for EngineService {
    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;
    type WatchLoadStream = Pin<Box<dyn Stream<Item = Result<Load, Status>> + Send>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let mut span = self
            .0
            .traces
            .served(request.metadata().as_ref(), "tandem.v1.Engine/Generate");
        match generate::start(&self.0, request.into_inner(), &mut span).await {
            Ok(events) => Ok(Response::new(events)),
            Err(failure) => {
                failed(&mut span, &failure);
                Err(failure.to_status())
            }
        }
    }

    async fn get_info(&self, _: Request<GetInfoRequest>) -> Result<Response<EngineInfo>, Status> {
        let shared = &self.0;
        let spec = shared.scheduler.spec();
        Ok(Response::new(EngineInfo {
            boot_id: shared.boot_id.to_wire(),
            role: shared.scheduler.role().to_wire().into(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model_name: shared.model_name.clone(),
            model_hash: spec.hash.to_vec().into(),
            layout: Some(spec.layout.to_wire()),
            max_length_tokens: spec.max_length_tokens,
            vocab_size: spec.vocab_size,
            backend: spec.backend.to_owned(),
            knobs: Some(shared.all_knobs().to_wire()),
            total_pages: spec.total_pages,
            uptime_ms: shared.started.elapsed().as_millis() as u64,
            end_token_ids: spec.end_tokens.clone(),
            admin_endpoint: shared.admin_endpoint.clone(),
            handoffs: Some(shared.tally.to_wire(Instant::now())),
        }))
    }

    async fn watch_load(&self, request: Request<WatchLoadRequest>) -> Result<Response<Self::WatchLoadStream>, Status> {
        let request = request.into_inner();
        let shared = Arc::clone(&self.0);
        if !request.boot_id.is_empty() {
            shared.check_boot(&request.boot_id).map_err(|f| f.to_status())?;
        }
        let pause = match request.min_interval_ms {
            0 => LOAD_INTERVAL,
            ms => Duration::from_millis(ms.into()).min(LOAD_AT_LEAST),
        };
        let loads = async_stream::stream! {
            let mut changes = shared.scheduler.load();
            loop {
                changes.borrow_and_update();
                yield Ok(shared.scheduler.load_now().to_wire(shared.boot_id, shared.scheduler.inflight()));
                let next = async {
                    tokio::time::sleep(pause).await;
                    let _ = tokio::time::timeout(LOAD_AT_LEAST.saturating_sub(pause), changes.changed()).await;
                };
                tokio::select! {
                    () = next => {}
                    () = shared.closing.cancelled() => return,
                }
            }
        };
        Ok(Response::new(Box::pin(loads)))
    }
}
