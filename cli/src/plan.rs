//! `tandem plan`: what a change does, before it is made.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::console;
use crate::manifest;

/// `tandem plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The manifest of a PDDeployment, as it is to be
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
    /// The manifest as it is now; without it a first install
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
}

/// Prints the steps of a change.
pub fn plan(args: &PlanArgs) -> ExitCode {
    let old = args.against.as_deref().map(manifest::load).transpose();
    let told = old.and_then(|old| {
        let new = manifest::load(&args.file)?;
        Ok(tandem_plan::rehearsal::tell(
            old.as_ref().map(|old| &old.spec),
            &new.spec,
        ))
    });
    match told {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            console::error(&error.to_string());
            ExitCode::FAILURE
        }
    }
}
