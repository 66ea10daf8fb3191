//! The operator, installed by helm as users do.

use serde_json::Value;

use super::{Nodes, outcome};
use crate::cluster::api::{Api, path};

/// Where it is installed.
pub const NAMESPACE: &str = "tandem-system";

impl Nodes {
    /// Installs CRDs and operator if they are not there, by the very commands of the README, and waits until the operator is ready.
    pub fn install(&self) {
        self.helm(&["upgrade", "--install", "tandem-crds", "charts/tandem-crds"]);
        self.upgrade(&[]);
    }

    /// The operator's pods that are not to be deleted.
    ///
    /// # Panics
    /// Where there is none.
    pub async fn operators(&self) -> Vec<Value> {
        let pods: Api<Value> = Api::at(&self.admin(), &path("v1", &format!("namespaces/{NAMESPACE}/"), "pods"));
        let mut all = pods.list("app.kubernetes.io/name=tandem-operator").await;
        all.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        assert!(!all.is_empty(), "no operator runs");
        all
    }

    /// Installs the operator or gives it other values.
    pub fn upgrade(&self, values: &[&str]) {
        let flags: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
        self.upgrade_with(&flags);
    }

    /// The same by helm's own flags.
    pub fn upgrade_with(&self, flags: &[&str]) {
        let mut args = vec![
            "upgrade",
            "--install",
            "tandem",
            "charts/tandem",
            "--namespace",
            NAMESPACE,
            "--create-namespace",
        ];
        // What was given before counts no more.
        args.extend(["--reset-values", "--wait", "--timeout=4m"]);
        args.extend(flags);
        let output = outcome(&mut self.helm_command(&args), "");
        if output.status.success() {
            return;
        }
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        // what it waited for in vain
        eprintln!(
            "{}",
            self.kubectl(&["get", "pods", "--all-namespaces", "--output=wide"], "")
        );
        eprintln!("{}", self.kubectl(&["get", "events", "--namespace", NAMESPACE], ""));
        panic!("helm {}: {}", args.join(" "), output.status);
    }
}
