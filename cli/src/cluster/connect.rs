//! The flags of kubectl, the API server, and what is said where it refuses.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client, Config};
use tandem_crds::PDDeployment;
use tokio::time::timeout;

use crate::console::with_causes;

/// Each request, but a watch.
const ASK: Duration = Duration::from_secs(30);

/// kubectl's own flags.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Cluster, as for kubectl")]
pub struct ClusterArgs {
    /// The namespace [default: that of the kubeconfig's context]
    #[arg(short = 'n', long, value_name = "NAME")]
    namespace: Option<String>,
    /// The kubeconfig's context [default: its current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig [default: KUBECONFIG, else ~/.kube/config, else the service account of this pod]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The kubeconfig's cluster [default: the context's]
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// The kubeconfig's user [default: the context's]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Act as this user, who may be a service account
    #[arg(long = "as", value_name = "USER")]
    as_user: Option<String>,
}

/// A request, in the words of the API server's rights.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    pub verb: &'static str,
    pub resource: &'static str,
    /// Who has the right.
    pub role: &'static str,
}

/// Whoever may view the namespace.
const VIEWERS: &str = "the ClusterRole view, with Tandem's tandem-view aggregated to it";
/// Whoever may look into a deployment's processes.
const DIAGNOSERS: &str = "Tandem's Role tandem-diagnose for this deployment";
/// Whoever may edit it.
const EDITORS: &str = "the ClusterRole edit, with Tandem's tandem-edit aggregated to it";

impl Need {
    pub const fn view(verb: &'static str, resource: &'static str) -> Self {
        Self {
            verb,
            resource,
            role: VIEWERS,
        }
    }

    pub const fn diagnose(verb: &'static str, resource: &'static str) -> Self {
        Self {
            verb,
            resource,
            role: DIAGNOSERS,
        }
    }

    pub const fn edit(verb: &'static str, resource: &'static str) -> Self {
        Self {
            verb,
            resource,
            role: EDITORS,
        }
    }
}

/// Why the cluster did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("no kubeconfig can be used: {0}; name one with --kubeconfig FILE, and its context with --context")]
    Kubeconfig(String),
    #[error("the API server cannot be asked: {0}")]
    Client(String),
    #[error("cannot {verb} {resource} in namespace {namespace}: no answer of the API server within {} s", ASK.as_secs())]
    Late {
        verb: &'static str,
        resource: &'static str,
        namespace: String,
    },
    #[error("may not {verb} {resource} in namespace {namespace}: {message}; {role} gives this right")]
    Forbidden {
        verb: &'static str,
        resource: &'static str,
        namespace: String,
        message: String,
        role: &'static str,
    },
    #[error(
        "no PDDeployment {name:?} in namespace {namespace}; -n names another namespace, `status` lists what is there"
    )]
    NotFound { name: String, namespace: String },
    #[error("this cluster knows no PDDeployment: install Tandem's CRDs first")]
    NoCrd,
    #[error("{0}")]
    Refused(String),
    #[error("cannot {verb} {resource} in namespace {namespace}: {message}")]
    Failed {
        verb: &'static str,
        resource: &'static str,
        namespace: String,
        message: String,
    },
}

/// A namespace of a cluster.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    pub namespace: String,
}

impl ClusterArgs {
    /// Somebody means a cluster.
    pub fn given(&self) -> bool {
        let named = [&self.namespace, &self.context, &self.cluster, &self.user, &self.as_user];
        self.kubeconfig.is_some() || named.iter().any(|flag| flag.is_some())
    }

    /// The namespace, where a flag names it.
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// A client, in the namespace that is meant. Nothing is asked yet.
    pub async fn connect(&self) -> Result<Cluster, ClusterError> {
        let mut config = self.config().await?;
        if self.as_user.is_some() {
            config.auth_info.impersonate.clone_from(&self.as_user);
        }
        // What asks again is a person.
        config.default_retry = false;
        let namespace = self
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| ClusterError::Client(with_causes(&error)))?;
        Ok(Cluster { client, namespace })
    }

    async fn config(&self) -> Result<Config, ClusterError> {
        let options = KubeConfigOptions {
            context: self.context.clone(),
            cluster: self.cluster.clone(),
            user: self.user.clone(),
        };
        // its causes are in it
        let failed = |error: &KubeconfigError| ClusterError::Kubeconfig(error.to_string());
        let file = match &self.kubeconfig {
            Some(path) => Kubeconfig::read_from(path),
            None => Kubeconfig::read(),
        };
        match file {
            Ok(file) => {
                let config = Config::from_custom_kubeconfig(file, &options).await;
                config.map_err(|error| failed(&error))
            }
            Err(error) => {
                let named = self.kubeconfig.is_some() || self.context.is_some() || self.cluster.is_some();
                let of_pod = if named { None } else { Config::incluster().ok() };
                of_pod.ok_or_else(|| failed(&error))
            }
        }
    }
}

impl Cluster {
    /// The `PDDeployment`s of the namespace.
    pub fn deployments(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource())
    }

    /// Waits for an answer, and says who could have had it where it is refused.
    pub async fn ask<T>(&self, need: Need, call: impl Future<Output = kube::Result<T>>) -> Result<T, ClusterError> {
        match timeout(ASK, call).await {
            Ok(answer) => answer.map_err(|error| self.refused(need, &error)),
            Err(_) => Err(ClusterError::Late {
                verb: need.verb,
                resource: need.resource,
                namespace: self.namespace.clone(),
            }),
        }
    }

    /// What is said of an error.
    pub fn refused(&self, need: Need, error: &kube::Error) -> ClusterError {
        let Need { verb, resource, role } = need;
        let namespace = self.namespace.clone();
        match error {
            kube::Error::Api(status) if status.code == 403 => ClusterError::Forbidden {
                verb,
                resource,
                namespace,
                message: status.message.clone(),
                role,
            },
            // The path itself is not known, and not an object below it.
            kube::Error::Api(status) if status.code == 404 && resource == RESOURCE && lacks_path(status) => {
                ClusterError::NoCrd
            }
            kube::Error::Api(status) => ClusterError::Failed {
                verb,
                resource,
                namespace,
                message: status.message.clone(),
            },
            error => ClusterError::Failed {
                verb,
                resource,
                namespace,
                message: with_causes(error),
            },
        }
    }
}

/// `PDDeployment`s, in the words of the API server's rights.
pub const RESOURCE: &str = "pddeployments";

/// Where the API server has them.
pub fn resource() -> ApiResource {
    ApiResource::erase::<PDDeployment>(&())
}

fn lacks_path(status: &kube::core::Status) -> bool {
    status.details.as_ref().is_none_or(|details| details.name.is_empty())
}
