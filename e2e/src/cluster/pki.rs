//! Certificates, users and their kubeconfigs.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};

/// Who calls the API server with a token that it knew at its start. Operators get theirs from their service account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// May do everything.
    Admin,
    /// The controller manager.
    Controllers,
    /// The scheduler.
    Scheduler,
    /// The scripted kubelet, for all nodes.
    Kubelet,
}

impl User {
    const ALL: [Self; 4] = [Self::Admin, Self::Controllers, Self::Scheduler, Self::Kubelet];

    /// Its name in RBAC and in the audit log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Controllers => "system:kube-controller-manager",
            Self::Scheduler => "system:kube-scheduler",
            Self::Kubelet => "scripted-kubelet",
        }
    }

    const fn group(self) -> &'static str {
        match self {
            Self::Admin | Self::Kubelet => "system:masters",
            Self::Controllers | Self::Scheduler => "",
        }
    }

    fn file(self) -> String {
        format!("{}.kubeconfig", self.name().replace(':', "-"))
    }
}

/// The files below a folder of the cluster's.
#[derive(Debug)]
pub struct Pki {
    dir: PathBuf,
}

impl Pki {
    /// Writes all of them; the API server is reached by `address`.
    pub fn create(dir: PathBuf, address: &str, port: u16) -> Self {
        std::fs::create_dir(&dir).expect("a folder");
        let pki = Self { dir };
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
        pki.write("ca.crt", &authority.pem());

        let server = key();
        let names = [address, "localhost", "kubernetes.default.svc"].map(str::to_owned);
        let cert = CertificateParams::new(names)
            .and_then(|params| params.signed_by(&server, &authority))
            .expect("the API server's certificate");
        pki.write("server.crt", &cert.pem());
        pki.write("server.key", &server.serialize_pem());

        let accounts = key();
        pki.write("accounts.key", &accounts.serialize_pem());
        pki.write("accounts.pub", &accounts.public_key_pem());

        let mut tokens = String::new();
        for user in User::ALL {
            let token = format!("{:032x}", rand::random::<u128>());
            let _ = writeln!(tokens, "{token},{},{},\"{}\"", user.name(), user.name(), user.group());
            pki.kubeconfig(&user.file(), address, port, &token);
        }
        pki.write("tokens.csv", &tokens);
        pki
    }

    /// The path of a file: `ca.crt`, `server.crt`, `server.key`, `accounts.key`, `accounts.pub`, `tokens.csv`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The kubeconfig of a user.
    pub fn user(&self, user: User) -> PathBuf {
        self.path(&user.file())
    }

    /// Writes a kubeconfig for a token.
    pub fn kubeconfig(&self, name: &str, address: &str, port: u16, token: &str) -> PathBuf {
        let cluster = json!({
            "server": format!("https://{address}:{port}"), "certificate-authority": self.path("ca.crt"),
        });
        self.write(name, &config(&cluster, &json!({"token": token})).to_string())
    }

    /// Writes a kubeconfig for an address that needs neither token nor TLS.
    pub fn plain_kubeconfig(&self, name: &str, server: &str) -> PathBuf {
        self.write(name, &config(&json!({"server": server}), &json!({})).to_string())
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        write(&path, content);
        path
    }
}

fn config(cluster: &Value, user: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        "current-context": "test",
    })
}

fn write(path: &Path, content: &str) {
    std::fs::write(path, content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}
