//! Whom TLS trusts: those named by `--ca`, else those that this machine trusts.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use tandem_secrets::SecretFile;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Certificates that a server's own must be signed by.
#[derive(Debug, Clone)]
pub struct Trust(Roots);

#[derive(Debug, Clone)]
enum Roots {
    Named(Arc<ClientConfig>),
    /// Read when they are needed first.
    OfThisMachine(Arc<OnceLock<Result<Arc<ClientConfig>, String>>>),
}

impl Trust {
    /// The certificates of `ca`, in PEM. Without it, those that this machine trusts; where it has none, that is said when a
    /// server with TLS is asked.
    ///
    /// # Errors
    /// `ca` cannot be read, or holds no certificate.
    pub fn new(ca: Option<&Path>) -> Result<Self, String> {
        let Some(ca) = ca else {
            return Ok(Self(Roots::OfThisMachine(Arc::default())));
        };
        let file = SecretFile::public("--ca", ca);
        let certificates = CertificateDer::pem_slice_iter(&file.read().map_err(|error| error.to_string())?)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| file.error(format!("it is not PEM: {error}")).to_string())?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            let taken = roots.add(certificate);
            taken.map_err(|error| file.error(format!("a certificate cannot be used: {error}")).to_string())?;
        }
        if roots.is_empty() {
            let problem = "it holds no certificate; write those that signed the server's own into it, in PEM";
            return Err(file.error(problem).to_string());
        }
        config(roots).map(|config| Self(Roots::Named(config)))
    }

    pub(super) fn config(&self) -> Result<Arc<ClientConfig>, String> {
        match &self.0 {
            Roots::Named(config) => Ok(Arc::clone(config)),
            Roots::OfThisMachine(read) => read.get_or_init(|| of_this_machine().and_then(config)).clone(),
        }
    }
}

fn of_this_machine() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err("this machine trusts no certificate".to_owned());
    }
    Ok(roots)
}

fn config(roots: RootCertStore) -> Result<Arc<ClientConfig>, String> {
    let versions = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(Arc::new(versions.with_root_certificates(roots).with_no_client_auth()))
}
