//! Clients that are no good ones: who keeps one connection and notes what comes on it, and who does not read.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::task::AbortOnDropHandle;

/// One connection through TLS that is kept alive. Dropping it closes it.
#[derive(Debug)]
pub struct KeptAlive {
    requests: SendRequest<Full<Bytes>>,
    host: String,
    key: String,
    _connection: AbortOnDropHandle<()>,
}

impl KeptAlive {
    /// Connects to `https://HOST:PORT`, whose certificate was signed by `ca`. Each request comes with `key`.
    pub async fn open(url: &str, ca: &Path, key: &str) -> Self {
        let host = url.strip_prefix("https://").expect("an https URL");
        let addr: SocketAddr = host.parse().expect("an address");
        let mut roots = RootCertStore::empty();
        let pem = CertificateDer::from_pem_file(ca).expect("a certificate");
        roots.add(pem).expect("an authority");
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has them")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let socket = TcpStream::connect(addr).await.expect("connect");
        let _ = socket.set_nodelay(true);
        let name = ServerName::from(addr.ip());
        let connector = TlsConnector::from(Arc::new(config));
        let stream = connector.connect(name, socket).await.expect("TLS");
        let (requests, connection) = handshake(TokioIo::new(stream)).await.expect("HTTP");
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.await;
        }));
        Self {
            requests,
            host: host.to_owned(),
            key: format!("Bearer {key}"),
            _connection: connection,
        }
    }

    /// The status and the whole body of the answer to a completion; an error where either does not come.
    pub async fn complete(&mut self, body: &Value) -> Result<(u16, Bytes), hyper::Error> {
        let request = Request::post("/v1/completions")
            .header("host", &self.host)
            .header("authorization", &self.key)
            .header("content-type", "application/json")
            .body(Full::from(body.to_string()))
            .expect("a request");
        // the connection's own task may not have seen yet that the last answer is complete
        self.requests.ready().await?;
        let response = self.requests.send_request(request).await?;
        let status = response.status().as_u16();
        Ok((status, response.into_body().collect().await?.to_bytes()))
    }
}

/// Asks for a completion on a connection with a small receive buffer, and reads no more of the answer than that it begins.
pub async fn not_reading(addr: SocketAddr, body: &Value) -> TcpStream {
    // A receive buffer of a few KiB fills at once; the kernel's default would swallow the whole answer.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(4096).expect("SO_RCVBUF");
    // Segments as on a network: the loopback's 64 KiB make the sender's kernel buffer megabytes.
    socket.set_tcp_mss(1400).expect("TCP_MAXSEG");
    socket.connect(&addr.into()).expect("connect");
    socket.set_nonblocking(true).expect("nonblocking");
    let mut stuck = TcpStream::from_std(socket.into()).expect("a tokio socket");
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {addr}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stuck.write_all(head.as_bytes()).await.expect("the head");
    stuck.write_all(body.as_bytes()).await.expect("the body");
    let mut first = [0; 64];
    stuck.read_exact(&mut first).await.expect("the answer begins");
    stuck
}
