//! `tandem`: a `PDDeployment` on this machine or on a cluster, and what measures it. As `kubectl-tandem` it is a plugin of
//! kubectl.

mod bench;
mod capture;
mod claims;
mod cluster;
mod console;
#[cfg(test)]
mod corpus;
mod diagnose;
mod http;
mod manifest;
mod plan;
mod status;
mod up;

use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

/// Large language models with prefill and decode as separate processes.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a PDDeployment on this machine: prefill, decode and router as processes on loopback
    Up(up::UpArgs),
    /// Stop what `tandem up` left running
    Down(up::DownArgs),
    /// Say how a deployment stands, on a cluster or on this machine; exit code 0 if it is ready
    Status(status::StatusArgs),
    /// Drop the prefix caches of what `tandem up` runs
    Flush(up::FlushArgs),
    /// Say what a change of a PDDeployment does, step by step, before it is made
    Plan(plan::PlanArgs),
    /// Restart a deployment on a cluster without a change
    Restart(cluster::RestartArgs),
    /// Let a change on a cluster go on that waits for a person
    Approve(cluster::ApproveArgs),
    /// List the changes of a deployment on a cluster that have ended
    History(cluster::HistoryArgs),
    /// Say which layer is at fault, if one is: client path, router, prefill, transfer or decode; exit code by verdict
    Diagnose(diagnose::DiagnoseArgs),
    /// Write everything that can be observed into one archive, without prompts and secrets
    Capture(capture::CaptureArgs),
    /// Load a server and measure it
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

/// What only this machine has, and kubectl's users do not look for.
const OF_MACHINE: [&str; 4] = ["up", "down", "flush", "bench"];

/// The arguments, and whether kubectl is in front of them.
fn arguments() -> (Cli, bool) {
    let name = std::env::args_os().next();
    let plugin = name.is_some_and(|name| {
        Path::new(&name)
            .file_name()
            .is_some_and(|name| name == "kubectl-tandem")
    });
    let mut command = Cli::command();
    if plugin {
        command = command.bin_name("kubectl tandem");
        for name in OF_MACHINE {
            command = command.mut_subcommand(name, |command| command.hide(true));
        }
    }
    let matches = command.get_matches();
    (
        Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()),
        plugin,
    )
}

fn main() -> ExitCode {
    let (cli, plugin) = arguments();
    // One thread: children ask the kernel to end them when the thread that started them ends, so that thread must be
    // the one that lives as long as the process.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            console::error(&format!("cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        match cli.command {
            Command::Up(args) => up::up(args).await,
            Command::Down(args) => up::down(args).await,
            Command::Status(args) => status::status(args, plugin).await,
            Command::Flush(args) => up::flush(args).await,
            Command::Plan(args) => plan::plan(args, plugin).await,
            Command::Restart(args) => cluster::restart(args).await,
            Command::Approve(args) => cluster::approve(args).await,
            Command::History(args) => cluster::history(args).await,
            Command::Diagnose(args) => diagnose::diagnose(args, plugin).await,
            Command::Capture(args) => capture::capture(args, plugin).await,
            Command::Bench(command) => bench::run(command).await,
        }
    });
    // What is read and nobody waits for any more must not hold the end up.
    runtime.shutdown_background();
    code
}
