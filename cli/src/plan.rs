//! `tandem plan`: what a change does, before it is made.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::cluster::plan::Applied;
use crate::cluster::{self, ClusterArgs};
use crate::console;
use crate::manifest::{self, ManifestError};

/// `tandem plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Of the deployment on a cluster [default: the file's, with `kubectl tandem` or a flag of kubectl; else no cluster is asked]
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// The manifest of a PDDeployment, as it is to be
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
    /// The manifest as it is now, where no cluster is asked; without it a first install
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "ClusterArgs"])]
    against: Option<PathBuf>,
    /// As `kubectl apply --server-side` would apply the file [default: as `kubectl apply` would]
    #[arg(long, conflicts_with = "against")]
    server_side: bool,
    /// In whose name it would be applied
    #[arg(long, value_name = "NAME", default_value = cluster::plan::MANAGER, requires = "server_side")]
    field_manager: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Prints the steps of a change.
pub async fn plan(args: PlanArgs, plugin: bool) -> ExitCode {
    let means_cluster = plugin || args.name.is_some() || args.cluster.given() || args.server_side;
    let told = if means_cluster && args.against.is_none() {
        let applied = if args.server_side {
            Applied::ByServer(&args.field_manager)
        } else {
            Applied::ByClient
        };
        let told = cluster::plan::plan(&args.cluster, args.name.as_deref(), &args.file, applied).await;
        told.map_err(|error| error.to_string())
    } else {
        of_files(&args).map_err(|error| error.to_string())
    };
    match told {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            console::error(&error);
            ExitCode::FAILURE
        }
    }
}

fn of_files(args: &PlanArgs) -> Result<String, ManifestError> {
    let old = args.against.as_deref().map(manifest::load).transpose()?;
    let new = manifest::load(&args.file)?;
    Ok(tandem_plan::rehearsal::tell(
        old.as_ref().map(|old| &old.spec),
        &new.spec,
    ))
}
