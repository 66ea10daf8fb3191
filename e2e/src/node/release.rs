//! The operator, installed by helm as users do.

use super::Nodes;

/// Where it is installed.
pub const NAMESPACE: &str = "tandem-system";

impl Nodes {
    /// Installs CRDs and operator if they are not there, by the very commands of the README, and waits until the operator is ready.
    pub fn install(&self) {
        self.helm(&["upgrade", "--install", "tandem-crds", "charts/tandem-crds"]);
        self.upgrade(&[]);
    }

    /// Installs the operator or gives it other values.
    pub fn upgrade(&self, values: &[&str]) {
        let mut args = vec![
            "upgrade",
            "--install",
            "tandem",
            "charts/tandem",
            "--namespace",
            NAMESPACE,
            "--create-namespace",
        ];
        args.extend(["--wait", "--timeout=4m"]);
        args.extend(values.iter().flat_map(|value| ["--set", value]));
        self.helm(&args);
    }
}
