//! TLS on the public port: certificates that follow their files, and a handshake with a deadline.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tandem_secrets::{SecretError, SecretFile, Watched};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::socket::Socket;

/// From the accepted connection to the end of its handshake: whoever sends nothing, or rubbish slowly, holds no slot for longer.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The first byte of every TLS connection.
const HANDSHAKE_RECORD: u8 = 22;
const PLAIN_HTTP: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nthis port speaks TLS: use https://\n";

/// The server's certificate and its key.
#[derive(Debug)]
pub struct Identity {
    config: Watched<ServerConfig>,
    handshake: Duration,
}

impl Identity {
    /// Reads both files, and again when they change. A pair that is broken or does not belong together is not taken.
    pub fn start(cert: &Path, key: &Path) -> Result<Self, SecretError> {
        let files = vec![
            SecretFile::public("--tls-cert", cert),
            SecretFile::private("--tls-key", key),
        ];
        Watched::start(files, |files, bytes| {
            server_config((&files[0], &bytes[0]), (&files[1], &bytes[1]))
        })
        .map(|config| Self {
            config,
            handshake: HANDSHAKE,
        })
    }

    /// Does the handshake. A client that speaks plain HTTP is told so.
    pub async fn accept(&self, socket: Socket) -> io::Result<TlsStream<Socket>> {
        let accept = async {
            if !speaks_tls(socket.tcp()).await? {
                let mut socket = socket;
                socket.write_all(PLAIN_HTTP).await?;
                socket.shutdown().await?;
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak TLS"));
            }
            TlsAcceptor::from(self.config.get()).accept(socket).await
        };
        tokio::time::timeout(self.handshake, accept)
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long"))?
    }
}

/// False where the client has begun with a letter, as every method of HTTP does. Other rubbish is left to TLS to refuse.
async fn speaks_tls(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [HANDSHAKE_RECORD];
    stream.peek(&mut first).await?;
    Ok(!first[0].is_ascii_alphabetic())
}

fn server_config(
    (cert_file, cert): (&SecretFile, &[u8]),
    (key_file, key): (&SecretFile, &[u8]),
) -> Result<ServerConfig, SecretError> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(cert)
        .collect::<Result<_, _>>()
        .map_err(|error| cert_file.error(format!("it is not PEM: {error}")))?;
    if chain.is_empty() {
        return Err(
            cert_file.error("it holds no certificate; write the server's own first, then those that signed it, in PEM")
        );
    }
    // what the parser says of a key may quote it
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
        key_file.error(
            "it holds no private key that can be read; write one in PEM (PKCS #8, PKCS #1 or SEC 1), not encrypted",
        )
    })?;
    let versions = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| cert_file.error(error.to_string()))?;
    let mut config = versions
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => key_file.error(format!(
                "it is not the key of the first certificate in {}",
                cert_file.path.display()
            )),
            error => cert_file.error(format!("it cannot be used with the key: {error}")),
        })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use tandem_telemetry::prometheus_client::metrics::counter::Counter;
    use tokio::net::TcpListener;

    use super::*;
    use crate::evidence::Registry;

    fn pair() -> (String, String) {
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (cert.pem(), signing_key.serialize_pem())
    }

    #[test]
    fn a_pair_that_cannot_serve_is_refused_by_flag_file_and_remedy() {
        let ((cert, key), (_, other)) = (pair(), pair());
        let encrypted = key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
        let cut = &cert[..cert.len() / 2];
        for (cert, key, named) in [
            ("", &key, "--tls-cert c.pem: it holds no certificate"),
            (&key, &key, "--tls-cert c.pem: it holds no certificate"),
            (cut, &key, "--tls-cert c.pem: it is not PEM"),
            (&cert, &String::new(), "--tls-key k.pem: it holds no private key"),
            (&cert, &cert, "--tls-key k.pem: it holds no private key"),
            (
                &cert,
                &encrypted,
                "--tls-key k.pem: it holds no private key that can be read; write one in PEM (PKCS #8, PKCS #1 or SEC 1), not encrypted",
            ),
            (
                &cert,
                &other,
                "--tls-key k.pem: it is not the key of the first certificate in c.pem",
            ),
        ] {
            let files = (
                SecretFile::public("--tls-cert", "c.pem"),
                SecretFile::private("--tls-key", "k.pem"),
            );
            let refused = server_config((&files.0, cert.as_bytes()), (&files.1, key.as_bytes()));
            let error = refused.unwrap_err().to_string();
            assert!(error.starts_with(named), "{error} should begin with {named}");
            let secret = key.lines().nth(1).unwrap_or("-");
            assert!(secret == "-" || !error.contains(secret), "{error}");
        }
    }

    #[tokio::test]
    async fn a_client_that_sends_nothing_or_half_a_hello_is_left_at_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = pair();
        let (cert_file, key_file) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        std::fs::write(&cert_file, cert).unwrap();
        std::fs::write(&key_file, key).unwrap();
        let mut identity = Identity::start(&cert_file, &key_file).unwrap();
        identity.handshake = Duration::from_millis(100);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for sent in [&b""[..], &[22, 3, 1, 2, 0, 1]] {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            client.write_all(sent).await.unwrap();
            let (stream, peer) = listener.accept().await.unwrap();
            let evidence = Registry::default().open(peer, true);
            let socket = Socket::new(stream, HANDSHAKE, Counter::default(), evidence).unwrap();
            let error = identity.accept(socket).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
    }
}
