//! `tandem status`: of a deployment on a cluster, or of what runs on this machine.

use std::process::ExitCode;

use clap::{Args, ValueEnum};

use crate::cluster::list::Shown;
use crate::cluster::{self, ClusterArgs, ClusterError, Place, USAGE};
use crate::console;
use crate::up::{self, StateArgs};

/// `tandem status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// A deployment on a cluster [default: all of the namespace; `tandem` without a flag of kubectl: what runs here]
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// The deployments of all namespaces of a cluster
    #[arg(short = 'A', long, conflicts_with_all = ["name", "namespace"])]
    all_namespaces: bool,
    /// Show how it stands and each turn that it takes from then on
    #[arg(short = 'w', long, requires = "name", conflicts_with_all = ["output", "json"])]
    watch: bool,
    /// JSON, or for the deployments of a cluster more columns
    #[arg(short = 'o', long, value_name = "FORMAT", value_enum)]
    output: Option<Output>,
    /// The same as -o json
    #[arg(long, conflicts_with = "output")]
    json: bool,
    #[command(flatten)]
    state: StateArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Json,
    Wide,
}

/// Says how it stands; so does the exit code.
pub async fn status(args: StatusArgs, plugin: bool) -> ExitCode {
    let named = args.name.is_some() || args.all_namespaces;
    let place = match Place::of(named, &args.cluster, &args.state, plugin) {
        Ok(place) => place,
        Err(error) => return usage(&error),
    };
    let json = args.json || args.output == Some(Output::Json);
    let wide = args.output == Some(Output::Wide);
    if wide && (place == Place::Machine || args.name.is_some()) {
        return usage("-o wide is for the deployments of a cluster: leave it out, or the name");
    }
    match place {
        Place::Machine => up::status(&args.state, json).await,
        Place::Cluster => cluster::finish(of_cluster(&args, json, wide).await),
    }
}

fn usage(error: &str) -> ExitCode {
    console::error(error);
    ExitCode::from(USAGE)
}

async fn of_cluster(args: &StatusArgs, json: bool, wide: bool) -> Result<ExitCode, ClusterError> {
    let cluster = args.cluster.connect().await?;
    match &args.name {
        Some(name) if args.watch => cluster::watch(&cluster, name).await,
        Some(name) => cluster::show(&cluster, name, json).await,
        None => {
            let shown = match (json, wide) {
                (true, _) => Shown::Json,
                (false, true) => Shown::Wide,
                (false, false) => Shown::Columns,
            };
            cluster::list(&cluster, args.all_namespaces, shown).await
        }
    }
}
