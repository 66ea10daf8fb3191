//! Orders to the engines, passed on to their own admin ports with the same token.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tandem_secrets::Token;
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::{DrainRequest, FlushRequest};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::engines::{Engines, Link, Session, Worker};
use crate::error::RouterError;

/// To an engine on the same network.
const DIAL: Duration = Duration::from_secs(2);
/// An engine answers from memory; one under full load may take its time.
const ANSWER: Duration = Duration::from_secs(5);
/// The longest that a drain is waited for.
const MAX_WAIT_MS: u64 = 600_000;

/// What each engine answered.
#[derive(Debug, Serialize)]
pub struct Told {
    engines: Vec<Engine>,
}

#[derive(Debug, Serialize)]
struct Engine {
    side: &'static str,
    endpoint: String,
    #[serde(flatten)]
    answer: Answer,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// Pages that it dropped.
    FreedPages(u32),
    /// Requests that are still there.
    Remaining(u32),
    /// It did not do it.
    Error(String),
}

impl Told {
    /// Did every engine do it?
    pub fn all(&self) -> bool {
        !self
            .engines
            .iter()
            .any(|engine| matches!(engine.answer, Answer::Error(_)))
    }
}

/// Of a drain, or of its end.
#[derive(Debug)]
pub struct Order {
    /// One engine; none: all.
    endpoint: Option<String>,
    wait: Duration,
    resume: bool,
}

impl Order {
    /// `{"endpoint": "HOST:PORT"}` or `{"all": true}`; for a drain also `"wait_ms"`, how long to wait for what still runs.
    pub fn read(body: &[u8], resume: bool) -> Result<Self, RouterError> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Body {
            endpoint: Option<String>,
            #[serde(default)]
            all: bool,
            #[serde(default)]
            wait_ms: u64,
        }
        let body: Body = serde_json::from_slice(body).map_err(|error| RouterError::MalformedJson(error.to_string()))?;
        if body.endpoint.is_some() == body.all {
            return Err(RouterError::field(
                "endpoint",
                "name one engine's control port as HOST:PORT, or write \"all\": true",
            ));
        }
        if body.wait_ms > MAX_WAIT_MS {
            let detail = format!("{} is too long: give at most {MAX_WAIT_MS}", body.wait_ms);
            return Err(RouterError::field("wait_ms", detail));
        }
        Ok(Self {
            endpoint: body.endpoint,
            wait: Duration::from_millis(body.wait_ms),
            resume,
        })
    }
}

/// Drops the prefix caches of all engines.
pub async fn flush(engines: &Engines, token: &Token) -> Told {
    tell(&engines.workers(), |session| async move {
        let boot_id = session.boot.to_wire();
        let mut client = client(&session).await?;
        let answer = tokio::time::timeout(ANSWER, client.flush(with(token, FlushRequest { boot_id })?))
            .await
            .map_err(|_| "it does not answer".to_owned())?
            .map_err(|status| said(&status))?;
        Ok(Answer::FreedPages(answer.into_inner().freed_pages))
    })
    .await
}

/// Stops admission at one engine or all, or ends that.
pub async fn drain(engines: &Engines, token: &Token, order: &Order) -> Result<Told, RouterError> {
    let meant = |worker: &Arc<Worker>| {
        order
            .endpoint
            .as_deref()
            .is_none_or(|endpoint| endpoint == worker.endpoint())
    };
    let mut workers = engines.workers();
    workers.retain(meant);
    if let (true, Some(endpoint)) = (workers.is_empty(), &order.endpoint) {
        let known = engines.workers();
        let known: Vec<_> = known.iter().map(|worker| worker.endpoint()).collect();
        let detail = format!("{endpoint:?} is none of this router's engines: {}", known.join(", "));
        return Err(RouterError::field("endpoint", detail));
    }
    let told = tell(&workers, |session| async move {
        let request = DrainRequest {
            boot_id: session.boot.to_wire(),
            deadline_ms: order.wait.as_millis() as u64,
            resume: order.resume,
        };
        let mut client = client(&session).await?;
        let answer = tokio::time::timeout(order.wait + ANSWER, client.drain(with(token, request)?))
            .await
            .map_err(|_| "it does not answer".to_owned())?
            .map_err(|status| said(&status))?;
        Ok(Answer::Remaining(answer.into_inner().remaining))
    });
    Ok(told.await)
}

/// Tells all at once.
async fn tell<F>(workers: &[Arc<Worker>], order: impl Fn(Arc<Session>) -> F) -> Told
where
    F: Future<Output = Result<Answer, String>>,
{
    let told = workers.iter().map(|worker| {
        let begun = match worker.link() {
            Link::Up(session) => Ok(order(session)),
            Link::Down { reason, .. } => Err(reason),
        };
        async move {
            let answer = match begun {
                Ok(order) => order.await,
                Err(reason) => Err(reason),
            };
            Engine {
                side: worker.side().name(),
                endpoint: worker.endpoint().to_owned(),
                answer: answer.unwrap_or_else(Answer::Error),
            }
        }
    });
    Told {
        engines: futures::future::join_all(told).await,
    }
}

async fn client(session: &Session) -> Result<AdminClient<Channel>, String> {
    let endpoint = session
        .admin_endpoint()
        .ok_or("it has no admin port; start it with --admin-listen and --admin-token-file")?;
    let unreachable = |why: String| format!("its admin port {endpoint} cannot be reached: {why}");
    let dialled = Endpoint::from_shared(format!("http://{endpoint}"))
        .map_err(|error| unreachable(error.to_string()))?
        .connect_timeout(DIAL);
    let channel = tokio::time::timeout(DIAL, dialled.connect())
        .await
        .map_err(|_| unreachable(format!("no answer within {} s", DIAL.as_secs())))?
        .map_err(|error| unreachable(error.to_string()))?;
    Ok(AdminClient::new(channel))
}

fn with<T>(token: &Token, message: T) -> Result<Request<T>, String> {
    let mut request = Request::new(message);
    let mut value: tonic::metadata::MetadataValue<_> = token
        .authorization()
        .parse()
        .map_err(|_| "the token cannot be sent".to_owned())?;
    value.set_sensitive(true);
    request.metadata_mut().insert("authorization", value);
    Ok(request)
}

fn said(status: &Status) -> String {
    match status.code() {
        tonic::Code::Unauthenticated => "it has another admin token than this router".to_owned(),
        _ => status.message().to_owned(),
    }
}
