//! Listening on a pod's address.
//!
//! A connection belongs to the task that has accepted it: the end of the process is the end of all its connections.

use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tonic::service::Routes;

/// A process that is started again finds its ports still closing for this long.
const TAKEN: Duration = Duration::from_secs(5);

/// What is answered over HTTP.
#[derive(Debug)]
pub enum Answer {
    /// A status and JSON.
    Json(u16, Value),
    /// A status and text.
    Text(u16, String),
}

/// Takes a port.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    let begin = tokio::time::Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if begin.elapsed() > TAKEN => return Err(format!("{address}: {error}")),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Answers HTTP/1 with what `handler` says.
pub async fn http<H, F>(listener: TcpListener, handler: H)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    accept(listener, |stream| {
        let handler = handler.clone();
        async move {
            let service = hyper::service::service_fn(|request| {
                let answer = handler(request);
                async { Ok::<_, std::convert::Infallible>(response(answer.await)) }
            });
            let served = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            // a client that left
            let _ = served.await;
        }
    })
    .await;
}

/// Serves gRPC.
pub async fn grpc(listener: TcpListener, routes: Routes) {
    let routes = routes.prepare();
    accept(listener, |stream| {
        let service = TowerToHyperService::new(routes.clone());
        async move {
            let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service);
            let _ = served.await;
        }
    })
    .await;
}

async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve(stream))),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

fn response(answer: Answer) -> Response<Full<Bytes>> {
    let (status, kind, body) = match answer {
        Answer::Json(status, body) => (status, "application/json", body.to_string()),
        Answer::Text(status, body) => (status, "text/plain", body),
    };
    Response::builder()
        .status(status)
        .header("content-type", kind)
        .body(Full::from(body))
        .expect("a response")
}
