//! `tandem`: a `PDDeployment` on this machine, and what measures it.

mod bench;
mod capture;
mod claims;
mod console;
#[cfg(test)]
mod corpus;
mod diagnose;
mod http;
mod manifest;
mod plan;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    /// Say what `tandem up` runs and how it stands; exit code 1 if something is not ready
    Status(up::StatusArgs),
    /// Drop the prefix caches of what `tandem up` runs
    Flush(up::FlushArgs),
    /// Say what a change of a PDDeployment does, step by step, before it is made
    Plan(plan::PlanArgs),
    /// Say which layer is at fault, if one is: client path, router, prefill, transfer or decode; exit code by verdict
    Diagnose(diagnose::DiagnoseArgs),
    /// Write everything that can be observed into one archive, without prompts and secrets
    Capture(capture::CaptureArgs),
    /// Load a server and measure it
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
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
            Command::Status(args) => up::status(args).await,
            Command::Flush(args) => up::flush(args).await,
            Command::Plan(args) => plan::plan(&args),
            Command::Diagnose(args) => diagnose::diagnose(args).await,
            Command::Capture(args) => capture::capture(args).await,
            Command::Bench(command) => bench::run(command).await,
        }
    });
    // A file that is still being hashed must not hold the end up.
    runtime.shutdown_background();
    code
}
