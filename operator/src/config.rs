//! The operator's flags.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use clap::builder::NonEmptyStringValueParser;
use clap::value_parser;
use tandem_telemetry::{LogFormat, TraceFlags};

/// Runs PDDeployments on Kubernetes.
#[derive(Debug, Clone, Parser)]
#[command(name = "tandem-operator", version)]
pub struct Config {
    /// A namespace whose PDDeployments are run; may be given several times. Not given: all namespaces.
    #[arg(long = "watch-namespace", value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    pub watch_namespaces: Vec<String>,
    /// The operator's own namespace: where its lease is, and from where its pods may reach engines and routers. Not given:
    /// that of the kubeconfig, or of the service account.
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub namespace: Option<String>,
    /// A namespace whose pods may read the metrics of engines and routers; may be given several times. Not given: none may,
    /// where the cluster enforces NetworkPolicies.
    #[arg(long = "metrics-namespace", value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    pub metrics_namespaces: Vec<String>,
    /// How this operator calls itself in the lease. Not given: the host's name and a random number.
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub identity: Option<String>,
    /// The lease of which one operator of several is elected.
    #[arg(long, default_value = "tandem-operator", value_parser = NonEmptyStringValueParser::new())]
    pub lease_name: String,
    /// Another operator takes over so long after this one was last heard of, in seconds.
    #[arg(long, default_value_t = 15, value_parser = value_parser!(u32).range(1..=3600))]
    pub lease_seconds: u32,
    /// The image of prefill and decode where a spec names none.
    #[arg(long, value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
    pub default_engine_image: String,
    /// The image of the router where a spec names none.
    #[arg(long, value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
    pub default_router_image: String,
    /// Deployments that are looked at at the same time.
    #[arg(long, default_value_t = 8, value_parser = value_parser!(u16).range(1..=256))]
    pub concurrency: u16,
    /// How to reach the API server. Not given: as a pod of its cluster does.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Where /metrics, /livez and /readyz are.
    #[arg(long, default_value = "127.0.0.1:7102")]
    pub ops_listen: SocketAddr,
    /// text or json.
    #[arg(long, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Where traces go.
    #[command(flatten)]
    pub traces: TraceFlags,
}
