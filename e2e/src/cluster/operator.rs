//! The operator as a process: under its own rights, killed and started again.

use std::path::PathBuf;
use std::time::Duration;

use super::{Cluster, PATIENCE};
use crate::probe::Metrics;
use crate::process::Process;
use crate::{eventually, free_port};

/// How it is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whose objects it looks after, and where its lease is.
    pub namespace: String,
    /// How it calls itself in the lease.
    pub identity: String,
    /// The image of engines where a spec names none.
    pub engine_image: String,
    /// The router's.
    pub router_image: String,
    /// How to reach the API server.
    pub kubeconfig: PathBuf,
    /// Another one takes over so long after it was last heard of; in whole seconds.
    pub lease: Duration,
}

/// An operator process.
#[derive(Debug)]
pub struct Operator {
    options: Options,
    process: Process,
    ops: u16,
}

/// Where only one operator runs. A write may begin for two thirds of a lease: of a short one a busy machine leaves too little.
const LEASE: Duration = Duration::from_secs(10);

/// The name of its account.
pub const ACCOUNT: &str = "tandem-operator";

impl Options {
    /// An account with the operator's rights in a namespace, and an operator that uses it.
    pub async fn of(cluster: &Cluster, namespace: &str) -> Self {
        cluster.operator_account(namespace).await;
        Self {
            namespace: namespace.to_owned(),
            identity: "first".into(),
            engine_image: "tandem.test/engine:1".into(),
            router_image: "tandem.test/router:1".into(),
            kubeconfig: cluster.token(namespace, ACCOUNT).await,
            lease: LEASE,
        }
    }

    /// Its name in the audit log.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{ACCOUNT}", self.namespace)
    }
}

impl Operator {
    /// Starts it; it may not lead yet. The caller is in the cluster's network.
    pub fn start(options: &Options) -> Self {
        let ops = free_port();
        let args = [
            format!("--kubeconfig={}", options.kubeconfig.display()),
            format!("--watch-namespace={}", options.namespace),
            format!("--namespace={}", options.namespace),
            format!("--identity={}", options.identity),
            format!("--lease-seconds={}", options.lease.as_secs()),
            format!("--default-engine-image={}", options.engine_image),
            format!("--default-router-image={}", options.router_image),
            format!("--ops-listen=127.0.0.1:{ops}"),
        ];
        Self {
            options: options.clone(),
            process: Process::start("tandem-operator", &crate::bin("tandem-operator"), &args),
            ops,
        }
    }

    /// Waits until it has seen all that it watches.
    pub async fn ready(&mut self) {
        let url = format!("http://127.0.0.1:{}/readyz", self.ops);
        let http = crate::probe::http();
        let process = &mut self.process;
        eventually("the operator is ready", PATIENCE, async || {
            if let Some(status) = process.exited() {
                panic!("the operator has ended ({status}):\n{}", process.tail(20));
            }
            let answer = http.get(&url).send().await.map_err(|error| error.to_string())?;
            if answer.status().is_success() {
                Ok(())
            } else {
                Err(answer.text().await.unwrap_or_default())
            }
        })
        .await;
    }

    /// Its metrics now.
    pub async fn metrics(&self) -> Metrics {
        Metrics::of(&format!("127.0.0.1:{}", self.ops)).await
    }

    /// `kill -9`, and starts another with the same options.
    pub fn kill_and_restart(&mut self) {
        self.process.kill();
        *self = Self::start(&self.options);
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}
