//! Paths and methods.

use std::sync::Arc;

use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use tandem_telemetry::State;

use super::account::Account;
use super::body::Answer;
use super::{App, generate};
use crate::api::answer::Model;
use crate::error::RouterError;
use crate::metrics::Endpoint;

/// Names a request, in both directions.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The stable machine code of an error.
pub const ERROR_CODE: HeaderName = HeaderName::from_static("x-tandem-error-code");

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Answers one request. Dropped when its client leaves, with all that it has begun.
pub async fn answer(app: Arc<App>, request: Request<Incoming>) -> Response<Answer> {
    let request_id = request_id(request.headers());
    let path = request.uri().path();
    let endpoint = match path {
        generate::CHAT => Endpoint::Chat,
        generate::COMPLETIONS => Endpoint::Completions,
        _ => Endpoint::Other,
    };
    let mut account = Some(Account::open(&app.flow.metrics, endpoint, request_id.clone()));
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
    response
}

async fn route(
    app: &Arc<App>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    account: &mut Option<Account>,
) -> Result<Response<Answer>, RouterError> {
    if endpoint != Endpoint::Other {
        allow(&request, &Method::POST, "POST")?;
        return generate::answer(app, endpoint, request, account).await;
    }
    let path = request.uri().path();
    let model = path.strip_prefix("/v1/models/");
    let known = model.is_some() || matches!(path, "/v1/models" | "/health" | "/livez" | "/readyz" | "/metrics");
    if !known {
        return Err(RouterError::NoPath {
            method: request.method().to_string(),
            path: path.to_owned(),
        });
    }
    if request.method() != Method::HEAD {
        allow(&request, &Method::GET, "GET")?;
    }
    let name = &app.config.model_name;
    match path {
        "/v1/models" => Ok(json(StatusCode::OK, this_model(app).to_list())),
        "/livez" => Ok(json(StatusCode::OK, br#"{"status":"alive"}"#.to_vec())),
        "/health" | "/readyz" => Ok(ready(&app.readiness.get())),
        "/metrics" => {
            let text = app
                .exposition
                .encode()
                .map_err(|error| RouterError::Internal(error.to_string()))?;
            let mut response = json(StatusCode::OK, text.into_bytes());
            response.headers_mut().insert(header::CONTENT_TYPE, OPEN_METRICS);
            Ok(response)
        }
        _ => match model.filter(|asked| asked == name) {
            Some(_) => Ok(json(StatusCode::OK, this_model(app).to_json())),
            None => Err(RouterError::UnknownModel {
                asked: model.unwrap_or_default().to_owned(),
                served: name.clone(),
            }),
        },
    }
}

fn this_model(app: &App) -> Model<'_> {
    Model::new(&app.config.model_name, app.started, app.limits().max_length_tokens)
}

fn ready(state: &State) -> Response<Answer> {
    let status = if *state == State::Ready {
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
fn refusal(error: &RouterError, request_id: &str) -> Response<Answer> {
    let mut response = json(error.class().status(), error.envelope(request_id));
    let headers = response.headers_mut();
    headers.insert(ERROR_CODE, HeaderValue::from_static(error.code()));
    if let Some(seconds) = error.retry_after_seconds() {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    if let RouterError::Method { allow, .. } = error {
        headers.insert(header::ALLOW, HeaderValue::from_static(allow));
    }
    response
}

/// The client's own id if it can be logged and echoed as it is, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic()))
        .map_or_else(|| format!("req-{:032x}", rand::random::<u128>()), str::to_owned)
}
