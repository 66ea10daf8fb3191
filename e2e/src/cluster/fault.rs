//! A proxy before the API server that does to each request what a test says.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::WatchStream;

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Seen {
    /// How.
    pub method: Method,
    /// Of what, without the query.
    pub path: String,
    /// Whether it asks for all that follows.
    pub watch: bool,
}

impl Seen {
    /// Would it change something that lasts? Leases and events are written whenever there is something to tell.
    pub fn writes(&self) -> bool {
        self.method != Method::GET && !self.path.contains("/leases") && !self.path.contains("/events")
    }
}

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It goes through.
    None,
    /// It goes through after so long.
    Delay(Duration),
    /// The connection breaks, and the API server never hears of it.
    Drop,
    /// The API server does it, and the connection breaks before the answer is through.
    Unheard,
    /// The API server does it, and the answer waits for ever; [`Proxy::held`] tells of it.
    Hold,
    /// This status instead; the API server never hears of it.
    Status(u16),
}

type Rule = Box<dyn FnMut(&Seen) -> Fault + Send>;
type Body = UnsyncBoxBody<Bytes, Error>;
type Error = Box<dyn std::error::Error + Send + Sync>;

/// A running proxy. It ends when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _serving: JoinSet<()>,
}

struct Shared {
    upstream: String,
    http: reqwest::Client,
    rule: Mutex<Rule>,
    seen: Mutex<Vec<Seen>>,
    /// Watches that began before this count was reached are cut.
    cuts: watch::Sender<u64>,
    held: watch::Sender<u64>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("upstream", &self.upstream)
            .finish_non_exhaustive()
    }
}

impl Proxy {
    /// To the API server behind a plain address, for example that of a `kubectl proxy`.
    pub async fn start(upstream: String) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            upstream,
            http: reqwest::Client::new(),
            rule: Mutex::new(Box::new(|_| Fault::None)),
            seen: Mutex::default(),
            cuts: watch::channel(0).0,
            held: watch::channel(0).0,
        });
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            _serving: serving,
        }
    }

    /// Its own address, as a kubeconfig's server.
    pub fn server(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What becomes of each request from now on.
    pub fn rule(&self, rule: impl FnMut(&Seen) -> Fault + Send + 'static) {
        *lock(&self.shared.rule) = Box::new(rule);
    }

    /// All requests so far, oldest first.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }

    /// Breaks all watches that are open.
    pub fn cut_watches(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Answers that are held so far; their number changes with each.
    pub fn held(&self) -> watch::Receiver<u64> {
        self.shared.held.subscribe()
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let service = service_fn(|request| forward(request, Arc::clone(&shared)));
    // An error of the service breaks the connection, which is what some faults are.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn forward(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Error> {
    let query = request.uri().query().unwrap_or_default();
    let seen = Seen {
        method: request.method().clone(),
        path: request.uri().path().to_owned(),
        watch: query.contains("watch=true") || query.contains("watch=1"),
    };
    lock(&shared.seen).push(seen.clone());
    let fault = (lock(&shared.rule))(&seen);
    match fault {
        Fault::Drop => return Err("the test drops it".into()),
        Fault::Delay(time) => tokio::time::sleep(time).await,
        Fault::Status(code) => return Ok(refusal(code)),
        Fault::None | Fault::Unheard | Fault::Hold => {}
    }
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let mut passed = shared.http.request(seen.method, format!("{}{target}", shared.upstream));
    for name in ["content-type", "accept"] {
        if let Some(value) = request.headers().get(name) {
            passed = passed.header(name, value);
        }
    }
    let body = request.into_body().collect().await?.to_bytes();
    let answer = passed.body(body).send().await?;
    match fault {
        Fault::Unheard => {
            answer.bytes().await?;
            return Err("the test loses the answer".into());
        }
        Fault::Hold => {
            answer.bytes().await?;
            shared.held.send_modify(|held| *held += 1);
            return std::future::pending().await;
        }
        Fault::None | Fault::Delay(_) | Fault::Drop | Fault::Status(_) => {}
    }
    let mut response = Response::builder().status(answer.status());
    for name in ["content-type", "retry-after"] {
        if let Some(value) = answer.headers().get(name) {
            response = response.header(name, value);
        }
    }
    let frames = answer.bytes_stream().map_ok(Frame::data).map_err(Error::from);
    let body = if seen.watch {
        // The first value is the present one.
        let cut = WatchStream::from_changes(shared.cuts.subscribe()).map(|_| Err(Error::from("the test cuts it")));
        let ended = frames.map(Some).chain(futures::stream::iter([None]));
        let all = futures::stream::select(ended, cut.map(Some));
        let open = all.take_while(|frame| std::future::ready(frame.is_some()));
        StreamBody::new(open.filter_map(std::future::ready)).boxed_unsync()
    } else {
        StreamBody::new(frames).boxed_unsync()
    };
    Ok(response.body(body)?)
}

/// As the API server writes it.
fn refusal(code: u16) -> Response<Body> {
    let reason = match code {
        409 => "Conflict",
        429 => "TooManyRequests",
        _ => "InternalError",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason, "code": code,
        "message": "the test refuses it",
    });
    let body = Full::from(status.to_string()).map_err(|never| match never {});
    let mut response = Response::builder()
        .status(code)
        .header("content-type", "application/json");
    if code == 429 {
        response = response.header("retry-after", "1");
    }
    response.body(body.boxed_unsync()).expect("a response")
}
