//! TLS on the public port.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::PATIENCE;
use super::client::question;
use super::engine::{self, Mock, Step};
use super::stack::{Stack, stack};

/// An authority, and the folder with what it signed.
struct Pki {
    authority: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pki = Self {
            authority: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
            dir: tempfile::tempdir().unwrap(),
        };
        pki.sign();
        pki
    }

    /// Replaces the server's pair by a new one; gives the certificate.
    fn sign(&self) -> CertificateDer<'static> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.authority).unwrap();
        std::fs::write(self.cert(), cert.pem()).unwrap();
        std::fs::write(self.key(), key.serialize_pem()).unwrap();
        cert.der().clone()
    }

    fn cert(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }

    fn key(&self) -> PathBuf {
        self.dir.path().join("key.pem")
    }

    async fn stack(&self, mock: &Mock, more: &[&str]) -> Stack {
        let (cert, key) = (self.cert(), self.key());
        let flags = [
            format!("--tls-cert={}", cert.display()),
            format!("--tls-key={}", key.display()),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        stack(&[], &[mock], &flags).await
    }

    /// A connection that speaks `protocol`.
    async fn connect(&self, addr: SocketAddr, protocol: &str) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let tcp = TcpStream::connect(addr).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(protocol.as_bytes()));
        stream
    }
}

fn served(stream: &TlsStream<TcpStream>) -> CertificateDer<'static> {
    stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
}

fn request(stream: bool) -> http::Request<Full<Bytes>> {
    let body = question(json!({"stream": stream})).to_string();
    http::Request::post("https://localhost/v1/chat/completions")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .unwrap()
}

#[tokio::test]
async fn both_protocols_are_served_whole_and_streamed() {
    let (pki, decode) = (Pki::new(), engine::decode());
    let stack = pki.stack(&decode, &[]).await;
    for protocol in ["http/1.1", "h2"] {
        for streamed in [false, true] {
            let expected = if streamed { "data: [DONE]" } else { "\"Paris\"" };
            let io = TokioIo::new(pki.connect(stack.router.addr(), protocol).await);
            let answer = if protocol == "h2" {
                let (mut client, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
                    .await
                    .unwrap();
                let connection = tokio::spawn(connection);
                let answer = client.send_request(request(streamed)).await.unwrap();
                assert_eq!(answer.version(), http::Version::HTTP_2);
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                connection.abort();
                body
            } else {
                let (mut client, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
                let connection = tokio::spawn(connection);
                let answer = client.send_request(request(streamed)).await.unwrap();
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                connection.abort();
                body
            };
            let text = String::from_utf8(answer.to_vec()).unwrap();
            assert!(text.contains(expected), "{protocol}: {text}");
        }
    }
    stack.disconnected().await;
}

#[tokio::test]
async fn a_new_certificate_is_served_without_a_restart_and_a_broken_pair_is_not() {
    let (pki, decode) = (Pki::new(), engine::decode());
    let stack = pki.stack(&decode, &[]).await;
    let addr = stack.router.addr();
    let old = pki.connect(addr, "h2").await;
    let first = served(&old);
    // a key alone, as between two writes
    std::fs::write(pki.key(), KeyPair::generate().unwrap().serialize_pem()).unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(2_500)).await;
    assert_eq!(served(&pki.connect(addr, "h2").await), first);
    let second = pki.sign();
    let taken = async {
        while served(&pki.connect(addr, "h2").await) != second {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, taken)
        .await
        .expect("the new certificate is never served");
    assert_ne!(first, second);
}

#[tokio::test]
async fn rubbish_is_cut_off_at_once_and_holds_no_connection() {
    let (pki, decode) = (Pki::new(), engine::decode());
    let stack = pki.stack(&decode, &[]).await;
    for rubbish in [
        &[0; 64][..],
        &[22, 3, 1, 0, 4, 9, 9, 9, 9],
        &[22, 3, 1, 255, 255, 1, 2, 3],
        &[128; 300],
    ] {
        let mut socket = TcpStream::connect(stack.router.addr()).await.unwrap();
        socket.write_all(rubbish).await.unwrap();
        let mut rest = Vec::new();
        // an alert may come, then the end, or a reset where we sent more than was read
        let ended = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "{rubbish:?} holds the connection");
    }
    stack.disconnected().await;
    pki.connect(stack.router.addr(), "http/1.1").await;
}

#[tokio::test]
async fn who_speaks_plain_http_is_told_to_use_https() {
    let (pki, decode) = (Pki::new(), engine::decode());
    let stack = pki.stack(&decode, &[]).await;
    let answer = stack.client.get("/v1/models").await;
    assert_eq!(
        (answer.status, answer.text.as_str()),
        (400, "this port speaks TLS: use https://\n")
    );
}

#[tokio::test]
async fn a_reader_that_stops_is_cut_off_behind_tls_too() {
    let (pki, decode) = (Pki::new(), engine::decode());
    let stack = pki.stack(&decode, &["--client-stall-ms=300"]).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let io = TokioIo::new(pki.connect(stack.router.addr(), "http/1.1").await);
    let (mut client, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    let connection = tokio::spawn(connection);
    let answer = client.send_request(request(true)).await.unwrap();
    decode.called(1).await;
    decode.idle().await;
    stack.at_rest(&[&decode]).await;
    stack.disconnected().await;
    assert_eq!(stack.sample("tandem_router_client_stalled_total"), 1);
    drop(answer);
    connection.abort();
}

#[tokio::test]
async fn a_key_is_demanded_behind_tls_too() {
    let (pki, decode) = (Pki::new(), engine::decode());
    let file = pki.dir.path().join("keys");
    std::fs::write(&file, "sk-0123456789abcdef").unwrap();
    let stack = pki
        .stack(&decode, &[&format!("--api-key-file={}", file.display())])
        .await;
    let mut stream = pki.connect(stack.router.addr(), "http/1.1").await;
    stream
        .write_all(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 401"), "{text}");
}
