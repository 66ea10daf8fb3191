//! A TLS-terminating proxy that keeps connections alive and has one fault, as a process of its own (`planted-proxy`).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::http::uri::{Authority, Scheme};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::process::Process;
use crate::{bin, eventually};

/// What is wrong with a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Nothing.
    Nothing,
    /// From this request of a connection on (the first is 1), each answer is taken from upstream and none of it passed on.
    Hold(u64),
    /// Heads of answers are passed on, and no more is read from upstream.
    StopReading,
    /// So many requests ever get a connection to upstream: none is given back.
    Exhaust(usize),
    /// After so many bytes of an answer both connections are closed.
    Cut(u64),
}

impl FromStr for Plant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, number) = text.split_once('=').unwrap_or((text, "0"));
        let number: u64 = number.parse().map_err(|error| format!("{text}: {error}"))?;
        match name {
            "nothing" => Ok(Self::Nothing),
            "hold" => Ok(Self::Hold(number)),
            "stop-reading" => Ok(Self::StopReading),
            "exhaust" => Ok(Self::Exhaust(number as usize)),
            "cut" => Ok(Self::Cut(number)),
            _ => Err(format!(
                "{text}: use nothing, hold=N, stop-reading, exhaust=N or cut=BYTES"
            )),
        }
    }
}

impl std::fmt::Display for Plant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Hold(from) => write!(f, "hold={from}"),
            Self::StopReading => f.write_str("stop-reading"),
            Self::Exhaust(pool) => write!(f, "exhaust={pool}"),
            Self::Cut(after) => write!(f, "cut={after}"),
        }
    }
}

/// A running proxy. Dropping it kills it.
#[derive(Debug)]
pub struct Proxy {
    /// The process.
    pub process: Process,
    addr: SocketAddr,
    dir: tempfile::TempDir,
}

/// A proxy before the router, with the fault that it was started with.
#[expect(async_fn_in_trait, reason = "tests alone call it, each with one kind")]
pub trait Doorway {
    /// Where its clients connect to.
    fn url(&self) -> String;
    /// What its certificate is checked with.
    fn ca(&self) -> PathBuf;
    /// Waits until its fault has struck so often.
    async fn struck(&self, times: usize);
}

impl Proxy {
    /// Starts one in front of `upstream`.
    pub async fn start(upstream: SocketAddr, plant: Plant) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let args = [
            upstream.to_string(),
            plant.to_string(),
            dir.path().join("ca.pem").display().to_string(),
        ];
        let process = Process::start("proxy", &bin("planted-proxy"), &args);
        let addr = eventually("the proxy listens", Duration::from_secs(30), async || {
            let log = process.log();
            let line = log.lines().find_map(|line| line.strip_prefix("listening "));
            line.and_then(|addr| addr.parse().ok()).ok_or(log)
        })
        .await;
        Self { process, addr, dir }
    }
}

impl Doorway for Proxy {
    fn url(&self) -> String {
        format!("https://{}", self.addr)
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    async fn struck(&self, times: usize) {
        eventually(
            &format!("the fault strikes {times} times"),
            Duration::from_mins(1),
            async || {
                let struck = self
                    .process
                    .log()
                    .lines()
                    .filter(|line| line.starts_with("struck"))
                    .count();
                if struck >= times {
                    Ok(())
                } else {
                    Err(struck.to_string())
                }
            },
        )
        .await;
    }
}

/// The program: serves on a free port of the loopback, which it says on stdout, until it is killed. The certificate's authority
/// goes to `ca`; each time that the fault strikes it says so.
pub async fn serve(upstream: SocketAddr, plant: Plant, ca: &Path) -> Infallible {
    let tls = identity(ca);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    println!(
        "listening {}",
        listener.local_addr().expect("a bound socket has an address")
    );
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    if plant == Plant::StopReading {
        // what is not read must not find room in the kernel
        connector.set_recv_buffer_size(Some(4096));
    }
    let pool = match plant {
        Plant::Exhaust(pool) => pool,
        _ => Semaphore::MAX_PERMITS,
    };
    let proxying = Arc::new(Proxying {
        upstream: Client::builder(TokioExecutor::new()).build(connector),
        authority: upstream.to_string().parse().expect("host:port"),
        plant,
        pool: Semaphore::new(pool),
    });
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            continue;
        };
        let (tls, proxying) = (tls.clone(), Arc::clone(&proxying));
        tokio::spawn(async move {
            let _ = socket.set_nodelay(true);
            let Ok(stream) = tls.accept(socket).await else { return };
            let requests = AtomicU64::new(0);
            let service = service_fn(|request| {
                let number = requests.fetch_add(1, Ordering::Relaxed) + 1;
                let proxying = Arc::clone(&proxying);
                async move { Ok::<_, Infallible>(proxying.answer(number, request).await) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// A server's certificate for the loopback, by an authority that is written to `ca`.
fn identity(ca: &Path) -> TlsAcceptor {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
    std::fs::write(ca, authority.pem()).expect("a file");
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()]).expect("parameters");
    let cert = params.signed_by(&key, &authority).expect("a certificate");
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("PKCS#8");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .expect("a pair");
    TlsAcceptor::from(Arc::new(config))
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;
type Answer = UnsyncBoxBody<Bytes, AnyError>;

struct Proxying {
    upstream: Client<HttpConnector, Incoming>,
    authority: Authority,
    plant: Plant,
    pool: Semaphore,
}

impl Proxying {
    /// The answer to a connection's `number`th request.
    async fn answer(&self, number: u64, mut request: Request<Incoming>) -> Response<Answer> {
        if self.pool.available_permits() == 0 {
            struck();
        }
        self.pool.acquire().await.expect("it is never closed").forget();
        let mut to = request.uri().clone().into_parts();
        to.scheme = Some(Scheme::HTTP);
        to.authority = Some(self.authority.clone());
        *request.uri_mut() = Uri::from_parts(to).expect("a whole URI");
        let response = match self.upstream.request(request).await {
            Ok(response) => response,
            Err(error) => {
                let body = http_body_util::Full::new(Bytes::from(format!("no upstream: {error}\n")));
                let mut answer = Response::new(body.map_err(|never| match never {}).boxed_unsync());
                *answer.status_mut() = StatusCode::BAD_GATEWAY;
                return answer;
            }
        };
        match self.plant {
            Plant::Hold(from) if number >= from => {
                let _ = response.into_body().collect().await;
                struck();
                std::future::pending().await
            }
            Plant::StopReading => {
                struck();
                response.map(|body| Unread(body).boxed_unsync())
            }
            Plant::Cut(after) => response.map(|inner| Cut { inner, left: after }.boxed_unsync()),
            Plant::Nothing | Plant::Hold(_) | Plant::Exhaust(_) => {
                response.map(|body| body.map_err(AnyError::from).boxed_unsync())
            }
        }
    }
}

fn struck() {
    println!("struck");
}

/// A body that is never read.
struct Unread(#[expect(dead_code, reason = "held, so that upstream's connection stays open")] Incoming);

impl Body for Unread {
    type Data = Bytes;
    type Error = AnyError;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AnyError>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// A body that breaks off.
struct Cut {
    inner: Incoming,
    left: u64,
}

impl Body for Cut {
    type Data = Bytes;
    type Error = AnyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AnyError>>> {
        if self.left == 0 {
            struck();
            return Poll::Ready(Some(Err("cut".into())));
        }
        let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) else {
            return Poll::Pending;
        };
        Poll::Ready(frame.map(|frame| {
            let frame = frame?.map_data(|mut data| {
                data.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
                self.left -= data.len() as u64;
                data
            });
            Ok(frame)
        }))
    }
}
