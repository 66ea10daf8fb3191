//! `tandem bench`: programs that load a server and print what they measured.
//!
//! | module | holds |
//! | --- | --- |
//! | [`chat`] | the load: streamed chat requests against an OpenAI-compatible server |
//! | [`multiround`] | growing conversations on connections that are kept alive, as agents make them |
//! | [`engine`] | one engine through gRPC, past router and text |
//! | [`client`] | one request and what it measured |
//! | [`sse`] | server-sent events |
//! | [`prompt`] | prompts of a given length in tokens, without the server's tokenizer |
//! | [`report`] | percentiles, the table, the JSON |

mod chat;
mod client;
mod engine;
mod multiround;
mod prompt;
mod report;
pub mod sse;

use std::process::ExitCode;

use clap::Subcommand;

pub use chat::key;

/// What to load.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Streamed chat requests with fixed prompt and answer lengths, against any OpenAI-compatible server
    Chat(chat::ChatArgs),
    /// Growing conversations on connections that are kept alive; says which rounds hang while they do
    Multiround(multiround::MultiroundArgs),
    /// One engine's prefill and decode rates through its gRPC port
    Engine(engine::EngineArgs),
}

/// Runs the load. The exit code is 1 when any request failed.
pub async fn run(command: BenchCommand) -> ExitCode {
    match command {
        BenchCommand::Chat(args) => chat::run(args).await,
        BenchCommand::Multiround(args) => multiround::run(args).await,
        BenchCommand::Engine(args) => match engine::run(args).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                crate::console::error(&error.to_string());
                ExitCode::FAILURE
            }
        },
    }
}
