//! `Generate` against an engine, as the router calls it.

use std::time::{Duration, Instant};

use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{self, EngineInfo, Finished, GenerateRequest, Usage, WatchLoadRequest};
use tandem_wire::{Failure, Reason, Source, TransferId, TransferKey};
use tokio::time::timeout;
use tonic::transport::Channel;

/// No request of a test takes longer; one that does hangs.
pub const HANG: Duration = Duration::from_mins(2);

/// How a generation ended.
#[derive(Debug, Clone)]
pub enum End {
    /// With the engine's own last message.
    Finished(Finished),
    /// With a failure: the last message, or the call's status.
    Failed(Failure),
    /// The stream ended without a last message.
    Cut,
}

/// The tokens of a generation and how it ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Every generated token that arrived.
    pub tokens: Vec<u32>,
    /// How it ended.
    pub end: End,
    /// From the call to its end.
    pub took: Duration,
}

impl Outcome {
    /// The usage of a good answer; panics for any other.
    pub fn usage(&self) -> &Usage {
        match &self.end {
            End::Finished(finished) => finished.usage.as_ref().expect("Finished carries usage"),
            other => panic!("expected a good answer, got {other:?}"),
        }
    }

    /// The reason of a failed one; panics for any other.
    pub fn reason(&self) -> Reason {
        match &self.end {
            End::Failed(failure) => failure.reason,
            other => panic!("expected a failure, got {other:?} with {} tokens", self.tokens.len()),
        }
    }
}

/// A connection to an engine's control port.
pub async fn connect(endpoint: &str) -> EngineClient<Channel> {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{endpoint}"))
        .expect("host:port")
        .connect_timeout(Duration::from_secs(5))
        .connect()
        .await
        .unwrap_or_else(|error| panic!("cannot connect to {endpoint}: {error}"));
    EngineClient::new(channel)
}

/// The engine's description of itself.
pub async fn info(client: &mut EngineClient<Channel>) -> EngineInfo {
    timeout(HANG, client.get_info(proto::GetInfoRequest {}))
        .await
        .expect("GetInfo hangs")
        .expect("GetInfo")
        .into_inner()
}

/// The engine's load now.
pub async fn load(client: &mut EngineClient<Channel>) -> Result<proto::Load, tonic::Status> {
    let call = async {
        let mut stream = client.watch_load(WatchLoadRequest::default()).await?.into_inner();
        stream
            .message()
            .await?
            .ok_or_else(|| tonic::Status::unavailable("WatchLoad ended without a load"))
    };
    timeout(HANG, call).await.expect("WatchLoad hangs")
}

/// A greedy request for `max_new_tokens` tokens, which end tokens do not cut short, with a key of its own.
pub fn request(engine: &EngineInfo, prompt: &[u32], max_new_tokens: u32) -> GenerateRequest {
    let key = TransferKey {
        id: TransferId::random(),
        attempt: 1,
    };
    GenerateRequest {
        boot_id: engine.boot_id.clone(),
        key: Some(key.to_wire()),
        request_id: format!("e2e-{}", key.id),
        prompt_tokens: prompt.to_vec(),
        sampling: Some(proto::Sampling::default()),
        max_new_tokens,
        ignore_eos: true,
        remaining_ms: HANG.as_millis() as u64,
        ..Default::default()
    }
}

/// Runs a request to its end.
pub async fn generate(client: &mut EngineClient<Channel>, request: GenerateRequest) -> Outcome {
    generate_until(client, request, usize::MAX).await
}

/// Runs a request, and drops its stream as soon as `enough` tokens have arrived: what a leaving client does.
pub async fn generate_until(client: &mut EngineClient<Channel>, request: GenerateRequest, enough: usize) -> Outcome {
    let begin = Instant::now();
    let id = request.request_id.clone();
    let mut tokens = Vec::new();
    let call = async {
        let mut stream = match client.generate(request).await {
            Ok(response) => response.into_inner(),
            Err(status) => return End::Failed(Failure::from_status(&status, Source::Decode)),
        };
        while tokens.len() < enough {
            match stream.message().await {
                Ok(Some(event)) => match event.event {
                    Some(Event::Tokens(more)) => tokens.extend(more.ids),
                    Some(Event::Finished(finished)) => return End::Finished(finished),
                    Some(Event::Failure(failure)) => return End::Failed(Failure::from_wire(&failure)),
                    Some(Event::Started(_) | Event::Phase(_)) | None => {}
                },
                Ok(None) => return End::Cut,
                Err(status) => return End::Failed(Failure::from_status(&status, Source::Decode)),
            }
        }
        End::Cut
    };
    let Ok(end) = timeout(HANG, call).await else {
        panic!("request {id} hangs: no end after {HANG:?}")
    };
    Outcome {
        tokens,
        end,
        took: begin.elapsed(),
    }
}
