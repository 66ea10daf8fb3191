//! An HTTP engine as other routers expect it: answers at once, or a token at a time.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::{ANSWER, router};

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Which server's side paths it has.
#[derive(Clone, Copy, PartialEq)]
pub enum Dialect {
    Vllm,
    Sglang,
}

pub struct HttpEngine {
    pub addr: SocketAddr,
    _runtime: Runtime,
}

impl HttpEngine {
    /// With `token_ms` between two tokens of a stream.
    pub fn start(dialect: Dialect, token_ms: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let addr = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).unwrap();
                tokio::spawn(async move {
                    let service = service_fn(|request| async move {
                        Ok::<_, Infallible>(answer(request, dialect, Duration::from_millis(token_ms)).await)
                    });
                    // a router that hangs up in the middle is its own affair
                    let _ = auto::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(socket), service)
                        .await;
                });
            }
        });
        Self {
            addr,
            _runtime: runtime,
        }
    }
}

async fn answer(request: Request<Incoming>, dialect: Dialect, pace: Duration) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = body
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .unwrap_or_default();
    match (&head.method, head.uri.path()) {
        (&Method::POST, "/v1/chat/completions") => {
            let asked: Value = serde_json::from_slice(&body).unwrap();
            if asked["stream"] == true {
                streamed(pace)
            } else {
                whole()
            }
        }
        (&Method::GET, "/health" | "/health_generate") => Response::new(full("OK")),
        (&Method::GET, "/v1/models") => reply(&json!({"object": "list", "data": [{
            "id": router::MODEL, "object": "model", "created": 0, "root": router::MODEL, "max_model_len": 32_768,
            "owned_by": if dialect == Dialect::Vllm { "vllm" } else { "sglang" },
        }]})),
        (&Method::GET, "/version") if dialect == Dialect::Vllm => reply(&json!({"version": "0.11.0"})),
        (&Method::GET, "/server_info" | "/get_server_info") if dialect == Dialect::Sglang => reply(&json!({
            "model_path": router::MODEL, "served_model_name": router::MODEL, "tokenizer_path": router::MODEL,
            "tp_size": 1, "dp_size": 1, "max_running_requests": 4_096, "max_total_tokens": 1_000_000,
            "disaggregation_mode": "null", "version": "0.5.0", "internal_states": [{}],
        })),
        (&Method::GET, "/model_info" | "/get_model_info") if dialect == Dialect::Sglang => reply(&json!({
            "model_path": router::MODEL, "served_model_name": router::MODEL, "tokenizer_path": router::MODEL,
            "is_generation": true, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        })),
        _ => Response::builder()
            .status(StatusCode::NOT_FOUND)
            .body(full("{}"))
            .unwrap(),
    }
}

fn full(body: impl Into<Bytes>) -> Body {
    Full::new(body.into()).boxed_unsync()
}

fn reply(json: &Value) -> Response<Body> {
    Response::builder()
        .header("content-type", "application/json")
        .body(full(json.to_string()))
        .unwrap()
}

fn whole() -> Response<Body> {
    let tokens = ANSWER.len();
    reply(&json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": router::MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 256, "total_tokens": 256 + tokens, "completion_tokens": tokens},
    }))
}

/// A frame for each token, written one by one, and the end mark.
fn streamed(pace: Duration) -> Response<Body> {
    let frames = async_stream::stream! {
        for (index, character) in ANSWER.char_indices() {
            if index > 0 && !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            let last = index + 1 == ANSWER.len();
            let chunk = json!({
                "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": router::MODEL,
                "choices": [{
                    "index": 0, "delta": {"content": character.to_string()},
                    "finish_reason": if last { json!("length") } else { Value::Null },
                }],
            });
            yield Ok(Frame::data(Bytes::from(format!("data: {chunk}\n\n"))));
        }
        yield Ok(Frame::data(Bytes::from_static(b"data: [DONE]\n\n")));
    };
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(StreamBody::new(frames).boxed_unsync())
        .unwrap()
}
