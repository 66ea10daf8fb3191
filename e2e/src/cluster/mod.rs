//! A real Kubernetes control plane for tests: etcd, API server, controller manager and scheduler. Only the kubelet is scripted.
//!
//! | module | holds |
//! | --- | --- |
//! | [`network`] | the network namespace in which all of it lives |
//! | [`pki`] | certificates, users and their kubeconfigs |
//! | [`servers`] | the server processes and their flags; who ends them when the test is killed |
//! | [`api`] | a client of the API server |
//! | [`audit`] | what the API server was asked, by whom |
//! | [`fault`] | a proxy before the API server that breaks what a test says |
//! | [`record`] | every event of a namespace |
//! | [`kubelet`] | nodes, the scripts by which pods come and go, and their processes |
//! | [`operator`] | the operator as a process, under its own rights |
//! | [`peer`] | a pod's process that speaks the contracts of engine and router and computes nothing |
//!
//! A test program shares one cluster: its tests run side by side in Kubernetes namespaces of their own. It starts with the first
//! test that wants it, and ends with the process, however that ends.

pub mod api;
pub mod audit;
pub mod fault;
pub mod kubelet;
pub mod network;
pub mod operator;
pub mod peer;
pub mod pki;
pub mod record;
pub mod servers;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use reqwest::Method;
use serde_json::json;

use api::{Api, Client};
use audit::Audit;
use kubelet::Kubelet;
use network::Network;
use pki::User;
use servers::Servers;

/// How long anything of the control plane may take on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// A running control plane.
#[derive(Debug)]
pub struct Cluster {
    network: Network,
    servers: Servers,
    kubelet: Kubelet,
    admin: String,
}

impl Cluster {
    /// Builds the servers where they are not built yet, and starts them.
    fn start() -> Self {
        let binary = binary();
        let network = Network::create();
        let servers = Servers::start(&binary, &network);
        let proxy = |user| network.enter(|| servers.proxy(&servers.kubeconfig(user)));
        let kubelet = Kubelet::start(
            &network,
            &proxy(User::Kubelet),
            &servers.kubeconfig(User::Kubelet),
            servers.dir(),
            servers.reaper(),
        );
        let admin = proxy(User::Admin);
        Self {
            network,
            servers,
            kubelet,
            admin,
        }
    }

    /// The nodes and the scripts of their pods.
    pub fn kubelet(&self) -> &Kubelet {
        &self.kubelet
    }

    /// What the API server was asked so far.
    pub fn audit(&self) -> Audit {
        Audit::new(&self.servers.audit_log())
    }

    /// A client that may do everything; of the runtime that it is made in.
    pub fn admin(&self) -> Client {
        Client::new(self.admin.clone())
    }

    /// A new Kubernetes namespace, named after its purpose.
    pub async fn namespace(&self, purpose: &str) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("{purpose}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}})).expect("a namespace");
        let made = Api::all(&self.admin()).create(&namespace).await;
        made.expect("a namespace");
        name
    }

    /// A service account with a ClusterRole in its namespace, and a client that acts as it.
    pub async fn account(&self, namespace: &str, name: &str, role: &str) -> Client {
        self.bound(namespace, name, &[role], &[]).await;
        Client::new(self.plain(&self.token(namespace, name).await))
    }

    /// A service account with ClusterRoles in its namespace, and others everywhere.
    async fn bound(&self, namespace: &str, name: &str, here: &[&str], everywhere: &[&str]) {
        let admin = self.admin();
        let account = json!({"metadata": {"name": name, "namespace": namespace}});
        let account: ServiceAccount = serde_json::from_value(account).expect("an account");
        let made = Api::namespaced(&admin, namespace).create(&account).await;
        made.expect("an account");
        let binding = |role: &str| {
            json!({
                "metadata": {"name": format!("{namespace}-{name}-{role}")},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
            })
        };
        for role in here {
            let binding: RoleBinding = serde_json::from_value(binding(role)).expect("a binding");
            let made = Api::namespaced(&admin, namespace).create(&binding).await;
            made.expect("a binding");
        }
        for role in everywhere {
            let binding: ClusterRoleBinding = serde_json::from_value(binding(role)).expect("a binding");
            let made = Api::all(&admin).create(&binding).await;
            made.expect("a binding");
        }
    }

    /// The operator's service account in a namespace, with the rights that it is shipped with and no others.
    pub async fn operator_account(&self, namespace: &str) {
        let rules = crate::root().join("charts/tandem/files/rbac.yaml");
        let rules = std::fs::read_to_string(&rules).expect("the operator's rules");
        let applied = self.kubectl(&["apply", "--server-side", "--filename=-"], &rules);
        assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
        let here = ["tandem-operator", "tandem-operator-lease"];
        self.bound(namespace, operator::ACCOUNT, &here, &["tandem-operator-nodes"])
            .await;
    }

    /// A plain address that adds a kubeconfig's token and TLS: of a `kubectl proxy`.
    pub fn plain(&self, kubeconfig: &Path) -> String {
        self.servers.proxy(kubeconfig)
    }

    /// A kubeconfig for a plain address that adds token and TLS by itself.
    pub fn kubeconfig_of(&self, name: &str, server: &str) -> PathBuf {
        self.servers.kubeconfig_of(name, server)
    }

    /// A kubeconfig that acts as a service account.
    pub async fn token(&self, namespace: &str, account: &str) -> PathBuf {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 24 * 3600}});
        let answer = self.admin().call(Method::POST, &path, Some(&request)).await;
        let answer = answer.expect("a token");
        let token = answer["status"]["token"].as_str().expect("a token");
        self.servers
            .kubeconfig_for(&format!("{namespace}-{account}.kubeconfig"), token)
    }

    /// Where all files of the servers are.
    pub fn dir(&self) -> &Path {
        self.servers.dir()
    }

    /// Runs `kubectl` as admin with `stdin` as its input.
    pub fn kubectl(&self, args: &[&str], stdin: &str) -> Output {
        use std::io::Write;
        let mut child = Command::new(self.servers.program("kubectl"))
            .arg("--kubeconfig")
            .arg(self.servers.kubeconfig(User::Admin))
            // discovery is cached below it
            .arg("--cache-dir")
            .arg(self.servers.dir().join("kubectl"))
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let mut input = child.stdin.take().expect("a pipe");
        let text = stdin.to_owned();
        // A child that does not read its input closes it; its exit status tells.
        let writer = std::thread::spawn(move || drop(input.write_all(text.as_bytes())));
        let output = child.wait_with_output().expect("kubectl ends");
        writer.join().expect("the writer");
        output
    }
}

/// Runs a test in the network of the shared cluster.
///
/// # Panics
/// Where the cluster does not start, and where the test does.
pub fn test(body: impl AsyncFnOnce(&'static Cluster) + Send) {
    static SHARED: LazyLock<Cluster> = LazyLock::new(Cluster::start);
    let cluster = &*SHARED;
    cluster.network.enter(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(body(cluster));
    });
}

/// The servers' binary; builds it where it is not there yet.
fn binary() -> PathBuf {
    let output = Command::new("python3")
        .arg(crate::root().join("scripts/kube.py"))
        .stderr(Stdio::inherit())
        .output()
        .expect("python3 starts");
    assert!(output.status.success(), "scripts/kube.py: {}", output.status);
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
}
