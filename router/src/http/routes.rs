//! Paths and methods.

use std::convert::Infallible;
use std::sync::Arc;

use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use tandem_secrets::{Presented, bearer};
use tandem_telemetry::{Span, State};

use super::account::Account;
use super::body::{Answer, linger, read};
use super::probe::Probe;
use super::{App, generate};
use crate::api::answer::Model;
use crate::error::{Locked, RouterError};
use crate::evidence::Connection;
use crate::metrics::Endpoint;

/// Names a request, in both directions.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The stable machine code of an error.
pub const ERROR_CODE: HeaderName = HeaderName::from_static("x-tandem-error-code");

const MODEL: &str = "/v1/models/";
const HEALTH: &str = "/health";
const HEALTH_GENERATE: &str = "/health_generate";
const LIVE: &str = "/livez";
const READY: &str = "/readyz";
const TOKENIZE: &str = "/tokenize";
/// What the text side answers alone.
const TEXT_PATHS: [&str; 2] = [TOKENIZE, "/detokenize"];
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Answers one request. Dropped when its client leaves, with all that it has begun.
pub async fn answer(
    app: Arc<App>,
    request: Request<Incoming>,
    connection: Arc<Connection>,
) -> Result<Response<Answer>, Infallible> {
    let request_id = request_id(request.headers());
    let path = request.uri().path();
    let endpoint = match path {
        generate::CHAT => Endpoint::Chat,
        generate::COMPLETIONS => Endpoint::Completions,
        _ => Endpoint::Other,
    };
    let span = match endpoint {
        Endpoint::Chat => app.traces.request(request.headers(), "POST /v1/chat/completions"),
        Endpoint::Completions => app.traces.request(request.headers(), "POST /v1/completions"),
        // probes and scrapers are no requests of anybody
        Endpoint::Other => Span::default(),
    };
    let came_on = (connection, request.version());
    let probe = app.badges.marks(request.headers());
    let mut account = Some(Account::open(&app, endpoint, request_id.clone(), came_on, probe, span));
    let head = request.method() == Method::HEAD;
    let mut response = match route(&app, endpoint, request, &mut account).await {
        Ok(response) => {
            if let Some(account) = account {
                account.succeeded();
            }
            response
        }
        Err(error) => {
            let response = refusal(&error, &request_id);
            if let Some(account) = account {
                account.failed(&error);
            }
            response
        }
    };
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    if head {
        *response.body_mut() = Answer::Whole(None);
    }
    Ok(response)
}

async fn route(
    app: &Arc<App>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    account: &mut Option<Account>,
) -> Result<Response<Answer>, RouterError> {
    let allowed = unlock(app, &request).and_then(|()| check(endpoint, &request));
    if let Err(error) = allowed {
        turn_away(request).await;
        return Err(error);
    }
    if endpoint != Endpoint::Other {
        return generate::answer(app, endpoint, request, account).await;
    }
    if TEXT_PATHS.contains(&request.uri().path()) {
        return tokens(app, request, account.as_ref()).await;
    }
    let path = request.uri().path();
    let model = path.strip_prefix(MODEL).map(decoded);
    let name = &app.config.model_name;
    match path {
        "/v1/models" => Ok(json(StatusCode::OK, this_model(app).to_list())),
        HEALTH_GENERATE => match account {
            Some(account) => Ok(Probe::answer(app, account).await),
            None => Err(RouterError::Internal("a request without an account".into())),
        },
        LIVE => Ok(json(StatusCode::OK, br#"{"status":"alive"}"#.to_vec())),
        HEALTH => Ok(state(&app.readiness.get(), |state| *state == State::Ready)),
        READY => Ok(state(&app.readiness.get(), State::is_ready)),
        "/metrics" => {
            let text = app
                .exposition
                .encode()
                .map_err(|error| RouterError::Internal(error.to_string()))?;
            let mut response = json(StatusCode::OK, text.into_bytes());
            response.headers_mut().insert(header::CONTENT_TYPE, OPEN_METRICS);
            Ok(response)
        }
        _ => match model.unwrap_or_default() {
            asked if asked == *name => Ok(json(StatusCode::OK, this_model(app).to_json())),
            asked => Err(RouterError::UnknownModel {
                asked,
                served: name.clone(),
            }),
        },
    }
}

/// May this request be here? Probes may without a key: whoever asks them has none, and they tell nothing but whether it serves.
fn unlock(app: &App, request: &Request<Incoming>) -> Result<(), RouterError> {
    let Some(keys) = &app.keys else {
        return Ok(());
    };
    if matches!(request.uri().path(), HEALTH | LIVE | READY) {
        return Ok(());
    }
    if app.badges.marks(request.headers()) {
        return Ok(());
    }
    match presented(request) {
        Presented::Secret(key) if keys.get().open(key) => Ok(()),
        Presented::Nothing => Err(RouterError::Unauthorized(Locked::NoKey)),
        Presented::Secret(_) | Presented::Other => Err(RouterError::Unauthorized(Locked::WrongKey)),
    }
}

/// What a request came with to open something.
pub(crate) fn presented<B>(request: &Request<B>) -> Presented<'_> {
    let values = request.headers().get_all(header::AUTHORIZATION);
    bearer(values.iter().map(HeaderValue::as_bytes))
}

/// Lets a request that is refused by its head be sent to its end, for a while; one that waits to be asked for its body is not.
pub(crate) async fn turn_away(request: Request<Incoming>) {
    if !request.headers().contains_key(header::EXPECT) {
        linger(&mut request.into_body()).await;
    }
}

/// From text to tokens or back.
async fn tokens(
    app: &Arc<App>,
    request: Request<Incoming>,
    account: Option<&Account>,
) -> Result<Response<Answer>, RouterError> {
    let (parts, body) = request.into_parts();
    let held = read(&parts.headers, body, app.config.max_body_bytes, &app.bodies).await?;
    let Some(open) = account else {
        return Err(RouterError::Internal("a request without an account".into()));
    };
    let (limits, origin) = (app.limits(), open.origin());
    let answer = if parts.uri.path() == TOKENIZE {
        app.text.tokenize(&held.bytes, &limits, &origin).await?
    } else {
        app.text.detokenize(&held.bytes, &limits, &origin).await?
    };
    Ok(json(StatusCode::OK, answer))
}

/// Is there such a path, with this method?
fn check(endpoint: Endpoint, request: &Request<Incoming>) -> Result<(), RouterError> {
    let path = request.uri().path();
    if endpoint != Endpoint::Other || TEXT_PATHS.contains(&path) {
        return allow(request, &Method::POST, "POST");
    }
    let known = path.starts_with(MODEL)
        || matches!(
            path,
            "/v1/models" | HEALTH | HEALTH_GENERATE | LIVE | READY | "/metrics"
        );
    if !known {
        return Err(RouterError::NoPath {
            method: request.method().to_string(),
            path: path.to_owned(),
        });
    }
    if request.method() == Method::HEAD {
        return Ok(());
    }
    allow(request, &Method::GET, "GET")
}

/// A part of a path with each `%XX` as the byte that it stands for.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hex = |at: usize| tail.get(at).and_then(|&digit| char::from(digit).to_digit(16));
        if let Some((high, low)) = hex(0).zip(hex(1)).filter(|_| first == b'%') {
            bytes.push((high * 16 + low) as u8);
            rest = &tail[2..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn this_model(app: &App) -> Model<'_> {
    Model::new(&app.config.model_name, app.started, app.limits().max_length_tokens)
}

fn state(state: &State, good: impl FnOnce(&State) -> bool) -> Response<Answer> {
    let status = if good(state) {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    json(status, state.to_json().into_bytes())
}

fn allow(request: &Request<Incoming>, method: &Method, allow: &'static str) -> Result<(), RouterError> {
    if request.method() == method {
        return Ok(());
    }
    Err(RouterError::Method {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        allow,
    })
}

/// An answer of JSON.
pub fn json(status: StatusCode, bytes: Vec<u8>) -> Response<Answer> {
    let mut response = Response::new(Answer::from(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

/// The one place that makes an error an answer.
pub(crate) fn refusal(error: &RouterError, request_id: &str) -> Response<Answer> {
    let mut response = json(error.class().status(), error.envelope(request_id));
    let headers = response.headers_mut();
    headers.insert(ERROR_CODE, HeaderValue::from_static(error.code()));
    if let Some(seconds) = error.retry_after_seconds() {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    match error {
        RouterError::Method { allow, .. } => {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        RouterError::Unauthorized(_) => {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        _ => {}
    }
    response
}

/// The client's own id if it can be logged and echoed as it is, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic()))
        .map_or_else(|| format!("req-{:032x}", rand::random::<u128>()), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_decoded_once_and_what_is_no_escape_stays() {
        for (text, expected) in [
            ("plain", "plain"),
            ("org%2Fmodel%20x", "org/model x"),
            ("%252F", "%2F"),
            ("%", "%"),
            ("%4", "%4"),
            ("%zz%41", "%zzA"),
            ("%C3%A9", "é"),
        ] {
            assert_eq!(decoded(text), expected);
        }
    }
}
