//! Engines: GetInfo and SetKnobs.

use tandem_plan::Handoffs;
use tandem_wire::KvLayout;
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{self, EngineInfo, GetInfoRequest, Knobs, SetKnobsRequest};
use tandem_wire::reason::meaning;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};

use super::{PeerError, Target};

/// What an engine says of itself.
#[derive(Debug, Clone)]
pub struct Info {
    /// Its incarnation.
    pub boot_id: Vec<u8>,
    /// What it computes with.
    pub backend: String,
    /// In effect now.
    pub knobs: Knobs,
    /// KV of one token, all layers and heads together; 0 where it does not say.
    pub kv_bytes_per_token: u64,
    /// How its hand-offs ended, where it says so.
    pub handoffs: Option<Handoffs>,
}

/// Asks an engine about itself.
pub async fn info(target: &Target) -> Result<Info, PeerError> {
    let refused = |reason: String| PeerError::refused(target, "get_info", reason, false);
    let mut client = EngineClient::new(dial(&target.control).map_err(refused)?);
    let info: EngineInfo = client
        .get_info(GetInfoRequest {})
        .await
        .map_err(|status| refused(said(&status)))?
        .into_inner();
    let layout = KvLayout::from_wire(info.layout.as_ref());
    Ok(Info {
        boot_id: info.boot_id.to_vec(),
        backend: info.backend,
        knobs: info.knobs.unwrap_or_default(),
        kv_bytes_per_token: layout.map_or(0, |layout| layout.token_bytes() as u64),
        handoffs: info.handoffs.as_ref().map(handoffs),
    })
}

fn handoffs(said: &proto::Handoffs) -> Handoffs {
    let failed = said
        .failed
        .iter()
        .map(|one| (meaning(one.reason()).code.to_owned(), one.count));
    Handoffs {
        finished: said.finished,
        // a newer engine may have more reasons, not endlessly many
        failed: failed.take(64).collect(),
        failed_since: said.failed_since,
        recent: said.recent,
        recent_failed: said.recent_failed,
    }
}

/// Tells an engine its knobs; what it has in effect then.
pub async fn set_knobs(target: &Target, info: &Info, token: &str, knobs: Knobs) -> Result<Info, PeerError> {
    let refused = |reason: String, token| PeerError::refused(target, "set_knobs", reason, token);
    let mut client = AdminClient::new(dial(&target.admin).map_err(|reason| refused(reason, false))?);
    let mut request = Request::new(SetKnobsRequest {
        boot_id: info.boot_id.clone().into(),
        knobs: Some(knobs),
    });
    let bearer = format!("Bearer {token}").parse();
    let bearer = bearer.map_err(|_| refused("the admin token is no header's value".to_owned(), true))?;
    request.metadata_mut().insert("authorization", bearer);
    let told = client.set_knobs(request).await;
    let told = told.map_err(|status| refused(said(&status), status.code() == Code::Unauthenticated))?;
    Ok(Info {
        knobs: told.into_inner(),
        ..info.clone()
    })
}

/// The connection is made by the first call, within that call's deadline.
fn dial(authority: &str) -> Result<tonic::transport::Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{authority}"));
    Ok(endpoint.map_err(|error| error.to_string())?.connect_lazy())
}

fn said(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
