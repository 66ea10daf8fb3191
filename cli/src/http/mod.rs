//! HTTP as a client, plain and over TLS: of the load programs and of what diagnoses.
//!
//! | module | holds |
//! | --- | --- |
//! | [`connect`] | connections, each known by a number |
//! | [`road`] | the way to a place: this machine's network, or a cluster's API server |
//! | [`trust`] | whom TLS trusts |

mod connect;
mod road;
mod trust;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;

pub use connect::{ConnectError, ConnectionId, Connector};
pub use road::Road;
pub use trust::Trust;

use crate::console::with_causes;

/// One server, and the connections to it that are kept alive.
#[derive(Debug, Clone)]
pub struct Http {
    client: Client<Connector, Full<Bytes>>,
    trust: Trust,
    road: Road,
    /// Scheme, host and port, and what of the path comes before `/v1`.
    url: String,
}

/// An answer whose body may still be coming.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    /// Of this router, where it failed: its stable code.
    pub error_code: Option<String>,
    /// The one that it came on.
    pub connection: Option<ConnectionId>,
    body: Incoming,
}

/// Why there is no answer, or no more of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// Nobody answers there.
    #[error("{0}")]
    Connect(String),
    /// Somebody does, but cannot be trusted or does not speak TLS.
    #[error("TLS: {0}; --ca FILE names who signed its certificate")]
    Tls(String),
    /// The connection ended before the answer did.
    #[error("{0}")]
    Broken(String),
    /// Too much of it.
    #[error("an answer is larger than {0} bytes")]
    TooLarge(usize),
}

impl Http {
    /// A server by its URL, with or without `/v1`.
    pub fn new(url: &str, trust: Trust) -> Result<Self, String> {
        Self::over(url, trust, Road::Tcp)
    }

    /// The same, reached by a road.
    pub fn over(url: &str, trust: Trust, road: Road) -> Result<Self, String> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/');
        let parsed: Uri = base.parse().map_err(|error| format!("{url:?} is not a URL: {error}"))?;
        if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
            return Err(format!(
                "{url:?} is not a URL of a server: it begins with http:// or https://"
            ));
        }
        if parsed
            .authority()
            .is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err("a URL must not hold a user and a password: a key is given by a file".to_owned());
        }
        Ok(Self {
            client: client(&trust, &road),
            trust,
            road,
            url: base.to_owned(),
        })
    }

    /// The same server, with no connection open yet.
    pub fn fresh(&self) -> Self {
        Self {
            client: client(&self.trust, &self.road),
            ..self.clone()
        }
    }

    /// Without `/v1`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sends a request; `path` begins with a slash.
    pub async fn send(&self, path: &str, mut request: Request<Full<Bytes>>) -> Result<Answer, HttpError> {
        let url = format!("{}{path}", self.url);
        *request.uri_mut() = url
            .parse()
            .map_err(|error| HttpError::Connect(format!("{url:?} is not a URL: {error}")))?;
        let response = self.client.request(request).await.map_err(|error| told(&error))?;
        let (parts, body) = response.into_parts();
        let code = parts.headers.get("x-tandem-error-code");
        Ok(Answer {
            status: parts.status,
            error_code: code.and_then(|value| value.to_str().ok()).map(str::to_owned),
            connection: parts.extensions.get::<ConnectionId>().copied(),
            body,
        })
    }
}

impl Answer {
    /// More of the body; none: it is complete.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpError> {
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|error| HttpError::Broken(with_causes(&error)))?;
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// All of it.
    pub async fn whole(mut self, limit: usize) -> Result<Vec<u8>, HttpError> {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if body.len() + chunk.len() > limit {
                return Err(HttpError::TooLarge(limit));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

fn client(trust: &Trust, road: &Road) -> Client<Connector, Full<Bytes>> {
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .build(Connector::new(trust.clone(), road.clone()))
}

/// What a refusal says, in the server's own words.
pub fn said(body: &[u8]) -> String {
    match serde_json::from_slice::<Value>(body) {
        Ok(json) => {
            let error = json.get("error").unwrap_or(&json);
            let message = error.get("message").and_then(Value::as_str);
            message.map_or_else(|| error.to_string(), str::to_owned)
        }
        Err(_) => String::from_utf8_lossy(body).chars().take(200).collect(),
    }
}

/// What went wrong, by where it did.
fn told(error: &hyper_util::client::legacy::Error) -> HttpError {
    match ConnectError::of(error) {
        Some(ConnectError::Tls(text)) => return HttpError::Tls(text.clone()),
        Some(refused) => return HttpError::Connect(refused.to_string()),
        None => {}
    }
    // Of a port that is forwarded, that nobody listens there is known only when it is read.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = cause {
        let io = inner.downcast_ref::<std::io::Error>();
        if let Some(refused) = io.filter(|io| io.kind() == std::io::ErrorKind::ConnectionRefused) {
            return HttpError::Connect(refused.to_string());
        }
        cause = inner.source();
    }
    HttpError::Broken(with_causes(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_url_is_taken_with_and_without_v1() {
        let trust = Trust::new(None).unwrap();
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(Http::new(url, trust.clone()).unwrap().url(), "http://h:1");
        }
        for url in ["h:1", "ftp://h", "", "http://", "http://me:s3cret@h"] {
            let refused = Http::new(url, trust.clone()).unwrap_err();
            assert!(!refused.contains("s3cret"), "{refused}");
        }
    }
}
