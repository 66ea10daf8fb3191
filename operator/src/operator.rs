//! All of it, started and stopped.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config as ClientConfig};
use tandem_plan::DefaultImages;
use tandem_telemetry::{Readiness, State, Traces};
use tokio::task::JoinSet;
use tokio::time::interval;

use crate::cluster::cache::Cache;
use crate::cluster::events::Events;
use crate::cluster::lease::{Elector, Leadership};
use crate::cluster::watch::Watches;
use crate::cluster::write::Writer;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::queue::Queue;
use crate::reconcile::{Memories, Reconciler};
use crate::render::network::Reach;

/// Between two looks at whether all watches have listed everything.
const SYNC_POLL: Duration = Duration::from_millis(50);

/// Why the operator ended.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// The kubeconfig cannot be used.
    #[error("--kubeconfig {}: {source}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<kube::config::KubeconfigError>,
    },
    /// This is no pod of a cluster.
    #[error("this is no pod with a service account ({0}); give --kubeconfig FILE")]
    NoPod(#[from] kube::config::InClusterError),
    /// The client of the API server cannot be made.
    #[error("cannot speak to the API server: {0}")]
    Client(#[from] Box<kube::Error>),
    /// The client of the processes cannot be made.
    #[error("cannot speak to engines and routers: {0}")]
    Peers(#[from] reqwest::Error),
    /// Another operator may lead.
    #[error("the lease is lost: {0}; another operator leads or may, so that this one ends")]
    LeaseLost(String),
}

/// The operator, its caches fed already.
pub struct Operator {
    reconciler: Arc<Reconciler>,
    elector: Elector,
    watches: Watches,
    /// Dropped, they end.
    tasks: JoinSet<()>,
    readiness: Readiness,
    at_once: usize,
}

impl Operator {
    /// Connects and begins to watch.
    pub async fn start(
        config: &Config,
        metrics: &tandem_telemetry::Metrics,
        readiness: Readiness,
        traces: Traces,
    ) -> Result<Self, OperatorError> {
        let client_config = connect(config).await?;
        let namespace = config
            .namespace
            .clone()
            .unwrap_or_else(|| client_config.default_namespace.clone());
        let client = Client::try_from(client_config).map_err(Box::new)?;
        let identity = config.identity.clone().unwrap_or_else(identity);
        let leadership = Leadership::new(Duration::from_secs(config.lease_seconds.into()));
        let (cache, queue) = (Arc::new(Cache::default()), Arc::new(Queue::default()));
        let metrics = Metrics::register(metrics, &cache);
        let writer = Writer::new(client.clone(), Arc::clone(&cache), leadership.clone(), metrics.clone());
        let watches = Watches::new(
            client.clone(),
            Arc::clone(&cache),
            Arc::clone(&queue),
            metrics.clone(),
            &config.watch_namespaces,
        );
        let mut tasks = JoinSet::new();
        watches.start(&mut tasks);
        let elector = Elector::new(client, &namespace, &config.lease_name, identity.clone(), leadership);
        let reconciler = Reconciler {
            cache,
            queue,
            events: Events::new(writer.clone(), identity),
            writer,
            peers: Arc::new(Peers::new(metrics.clone())?),
            metrics,
            images: DefaultImages {
                engine: config.default_engine_image.clone(),
                router: config.default_router_image.clone(),
            },
            reach: Reach {
                operator_namespace: namespace,
                metrics_namespaces: config.metrics_namespaces.clone(),
            },
            memories: Memories::default(),
            traces,
        };
        Ok(Self {
            reconciler: Arc::new(reconciler),
            elector,
            watches,
            tasks,
            readiness,
            at_once: config.concurrency.into(),
        })
    }

    /// Works as soon as it leads, until it does not or `stop` ends.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), OperatorError> {
        let mut stop = std::pin::pin!(stop);
        tokio::select! {
            () = &mut stop => return Ok(()),
            () = self.synced() => {}
        }
        // One that stands by is as ready as one that leads.
        self.readiness.set(State::Ready);
        tokio::select! {
            () = &mut stop => return Ok(()),
            () = self.elector.acquire() => {}
        }
        let metrics = self.reconciler.metrics.clone();
        metrics.leading(true);
        let work = tokio::spawn(Arc::clone(&self.reconciler).run(self.at_once));
        let ended = tokio::select! {
            () = &mut stop => None,
            reason = self.elector.keep() => Some(reason),
        };
        metrics.leading(false);
        // No pass begins any more; a write that is under way ends with its lease.
        work.abort();
        self.tasks.abort_all();
        match ended {
            None => {
                // Whatever is still being written is dropped before another may lead.
                let _ = work.await;
                self.elector.release().await;
                Ok(())
            }
            Some(reason) => Err(OperatorError::LeaseLost(reason)),
        }
    }

    async fn synced(&self) {
        let all = self.watches.all();
        self.readiness.set(State::Waiting {
            reason: "the watches have not listed everything yet".to_owned(),
        });
        let mut poll = interval(SYNC_POLL);
        while !self.reconciler.cache.synced(&all) {
            poll.tick().await;
        }
    }
}

async fn connect(config: &Config) -> Result<ClientConfig, OperatorError> {
    let Some(path) = &config.kubeconfig else {
        return Ok(ClientConfig::incluster()?);
    };
    let failed = |source| OperatorError::Kubeconfig {
        path: path.clone(),
        source: Box::new(source),
    };
    let file = Kubeconfig::read_from(path).map_err(failed)?;
    let config = ClientConfig::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    config.map_err(failed)
}

/// The host's name, which is a pod's, and a number of this process.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{:08x}", host.trim(), rand::random::<u32>())
}
