//! `tandem bench chat`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use futures::StreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use tandem_secrets::{Keys, SecretFile, Token};

use super::client::{Sample, Server, Shape};
use super::prompt::{Prompts, words_for};
use super::report::{Report, Run};
use crate::console;
use crate::http::Trust;

/// Two lengths, in words, at which the server is asked for its count.
const FEW: usize = 8;
const MANY: usize = 72;
/// Prompts that no request of the load uses.
const PROBE: u64 = u64::MAX - 8;

/// `tandem bench chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The server, with or without /v1
    #[arg(
        long,
        visible_alias = "url",
        value_name = "URL",
        default_value = "http://127.0.0.1:8080"
    )]
    base_url: String,
    /// The model to ask [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Come with a key: the first of a file as the router's --api-key-file
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Who signed the server's certificate, in PEM [default: whom this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    concurrency: u16,
    /// Requests in all [default: four times the concurrency]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Length of each prompt in tokens, the chat template included
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Length of each answer in tokens
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    output_tokens: u32,
    /// Let all prompts begin alike, for the prefix cache to find; otherwise no two do
    #[arg(long)]
    shared_prefix: bool,
    /// Repeat a run's prompts [default: new ones each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// A request that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    timeout_seconds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the load and prints the report. The exit code is 1 when any request failed.
pub async fn run(args: ChatArgs) -> ExitCode {
    match measure(&args).await {
        Ok(report) => {
            let text = if args.json {
                serde_json::to_string_pretty(&report).unwrap_or_default()
            } else {
                report.to_string()
            };
            let _ = writeln!(std::io::stdout(), "{text}");
            if report.failed == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            console::error(&error);
            ExitCode::FAILURE
        }
    }
}

/// The first key of `--api-key-file`.
pub fn key(file: Option<&Path>) -> Result<Option<Token>, String> {
    let key = file.map(|path| {
        let file = SecretFile::private("--api-key-file", path);
        Keys::first(&file, &file.read()?)
    });
    key.transpose().map_err(|error| error.to_string())
}

async fn measure(args: &ChatArgs) -> Result<Report, String> {
    let key = key(args.api_key_file.as_deref())?;
    let deadline = Duration::from_secs(args.timeout_seconds.into());
    let server = Server::new(&args.base_url, Trust::new(args.ca.as_deref())?, key.as_ref(), deadline)?;
    let no_answer = |error: String| format!("{} does not answer as an OpenAI server: {error}", server.url());
    let model = match &args.model {
        Some(model) => model.clone(),
        None => server.first_model().await.map_err(no_answer)?,
    };
    let mut shape = Shape {
        model,
        output_tokens: args.output_tokens.into(),
        ignore_eos: true,
    };
    let seed = args.seed.unwrap_or_else(rand::random);
    let mut prompts = Prompts {
        seed,
        words: FEW,
        shared_prefix: args.shared_prefix,
    };

    // These requests also warm the server up: the first one pays for what is set up on first use.
    let probe = |words: usize, index: u64| {
        Prompts {
            words,
            shared_prefix: false,
            ..prompts.clone()
        }
        .prompt(PROBE + index)
    };
    let few = match server.count(&shape, &probe(FEW, 0)).await {
        Err(refused) if refused.starts_with("400") => {
            shape.ignore_eos = false;
            server.count(&shape, &probe(FEW, 0)).await.map_err(no_answer)?
        }
        counted => counted.map_err(no_answer)?,
    };
    let many = server.count(&shape, &probe(MANY, 1)).await.map_err(no_answer)?;
    prompts.words = words_for(args.prompt_tokens.into(), (FEW, few), (MANY, many))?;

    let concurrency = usize::from(args.concurrency);
    let requests = args.requests.map_or(u64::from(args.concurrency) * 4, u64::from);
    let bar = progress(requests);
    let began = Instant::now();
    let results: Vec<Result<Sample, String>> = futures::stream::iter(0..requests)
        .map(|index| {
            let (server, shape, bar, prompt) = (&server, &shape, &bar, prompts.prompt(index));
            async move {
                let result = server.stream(shape, &prompt).await;
                bar.inc(1);
                result
            }
        })
        .buffer_unordered(concurrency)
        .collect()
        .await;
    let wall = began.elapsed();
    bar.finish_and_clear();
    let run = Run {
        url: server.url().to_owned(),
        model: shape.model,
        concurrency,
        output_tokens: shape.output_tokens,
        wall,
    };
    Ok(Report::new(run, results))
}

/// On a terminal only.
fn progress(requests: u64) -> ProgressBar {
    let bar = ProgressBar::new(requests);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} requests  {elapsed}  eta {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
