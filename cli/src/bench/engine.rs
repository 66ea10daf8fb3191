//! `tandem bench engine`: token rates of one engine through gRPC Generate, past router and text.
//!
//! Two figures, each as a server runs it (scheduler, sampling and stream included):
//! - prefill: prompt tokens / (request sent → first token), one request at a time;
//! - decode: tokens of all streams / time, while all streams run: from the moment the last stream has its first token
//!   until the first stream ends.

use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use tandem_wire::{
    TransferId, TransferKey,
    proto::{self, engine_client::EngineClient, generate_event::Event},
};
use tonic::transport::Channel;

/// Measures an engine's prefill and decode rates through its gRPC port.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// The engine's control port, host:port.
    #[arg(long, value_name = "HOST:PORT")]
    endpoint: String,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Tokens generated per request; 1 measures prefill, more measures decode.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    output_tokens: u32,
    /// Streams at the same time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Seed of the random prompt tokens; each request's prompt is another one.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Sampling temperature; 0 picks the likeliest token.
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    temperature: f32,
    /// Sample among the likeliest tokens with this much probability in all.
    #[arg(long, default_value_t = 1.0, value_parser = top_p)]
    top_p: f32,
    /// Seconds until the measurement is given up.
    #[arg(long, default_value_t = 300)]
    timeout_seconds: u64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    backend: String,
    model: String,
    prompt_tokens: u32,
    output_tokens: u32,
    concurrency: u32,
    /// Prompt tokens per second, all streams together, until the last first token.
    prefill_tokens_per_second: f64,
    /// Absent if no token follows the first.
    decode_tokens_per_second: Option<f64>,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum EngineBenchError {
    /// Nobody answers there.
    #[error(
        "cannot reach an engine at {endpoint}: {source}; --endpoint takes the engine's control port (its --listen)"
    )]
    Connect {
        /// As given.
        endpoint: String,
        /// Why.
        source: tonic::transport::Error,
    },
    /// A call failed.
    #[error("engine at {endpoint} failed: {failure}")]
    Call {
        /// As given.
        endpoint: String,
        /// Why.
        failure: tandem_wire::Failure,
    },
    /// A stream ended early or without a word.
    #[error("a stream of {endpoint} ended after {got} of {want} tokens")]
    Short {
        /// As given.
        endpoint: String,
        /// Tokens received.
        got: usize,
        /// Tokens asked for.
        want: u32,
    },
    /// The measurement took too long.
    #[error("not done after {0} s; raise --timeout-seconds or ask for fewer tokens")]
    Timeout(u64),
}

/// When each token of one stream came.
type Times = Vec<Instant>;

/// Runs the measurement and prints it.
pub async fn run(args: EngineArgs) -> Result<(), EngineBenchError> {
    let limit = Duration::from_secs(args.timeout_seconds);
    let report = tokio::time::timeout(limit, measure(&args))
        .await
        .map_err(|_| EngineBenchError::Timeout(args.timeout_seconds))??;
    if args.json {
        println!("{}", serde_json::json!(report));
    } else {
        println!("{} on {}", report.model, report.backend);
        println!(
            "prefill  {:8.1} tok/s  ({} × {} prompt tokens)",
            report.prefill_tokens_per_second, args.concurrency, args.prompt_tokens
        );
        if let Some(rate) = report.decode_tokens_per_second {
            println!("decode   {rate:8.1} tok/s  ({} streams)", args.concurrency);
        }
    }
    Ok(())
}

async fn measure(args: &EngineArgs) -> Result<Report, EngineBenchError> {
    let call = |status: tonic::Status| EngineBenchError::Call {
        endpoint: args.endpoint.clone(),
        failure: tandem_wire::Failure::from_status(&status, tandem_wire::Source::Decode),
    };
    let connect = |source| EngineBenchError::Connect {
        endpoint: args.endpoint.clone(),
        source,
    };
    let channel = Channel::from_shared(format!("http://{}", args.endpoint))
        .map_err(|_| EngineBenchError::Call {
            endpoint: args.endpoint.clone(),
            failure: tandem_wire::Failure::new(
                tandem_wire::Reason::Invalid,
                tandem_wire::Source::Client,
                "--endpoint is not host:port",
            ),
        })?
        .tcp_nodelay(true)
        .connect_timeout(Duration::from_secs(5))
        .connect()
        .await
        .map_err(connect)?;
    let mut client = EngineClient::new(channel);
    let info = client
        .get_info(proto::GetInfoRequest {})
        .await
        .map_err(call)?
        .into_inner();

    let start = Instant::now();
    let streams = (0..args.concurrency).map(|i| one(client.clone(), args, &info, i));
    let times: Vec<Times> = futures::future::try_join_all(streams).await?;

    let firsts = times.iter().filter_map(|t| t.first());
    let lasts = times.iter().filter_map(|t| t.last());
    let (Some(&all_started), Some(&first_end)) = (firsts.max(), lasts.min()) else {
        return Err(EngineBenchError::Short {
            endpoint: args.endpoint.clone(),
            got: 0,
            want: args.output_tokens,
        });
    };
    let decode = (args.output_tokens > 1 && first_end > all_started).then(|| {
        let in_window = times
            .iter()
            .flatten()
            .filter(|t| **t > all_started && **t <= first_end)
            .count();
        in_window as f64 / (first_end - all_started).as_secs_f64()
    });
    Ok(Report {
        backend: info.backend,
        model: info.model_name,
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens,
        concurrency: args.concurrency,
        prefill_tokens_per_second: f64::from(args.prompt_tokens * args.concurrency)
            / (all_started - start).as_secs_f64(),
        decode_tokens_per_second: decode,
    })
}

async fn one(
    mut client: EngineClient<Channel>,
    args: &EngineArgs,
    info: &proto::EngineInfo,
    index: u32,
) -> Result<Times, EngineBenchError> {
    let failed = |failure| EngineBenchError::Call {
        endpoint: args.endpoint.clone(),
        failure,
    };
    let request = proto::GenerateRequest {
        boot_id: info.boot_id.clone(),
        key: Some(
            TransferKey {
                id: TransferId::random(),
                attempt: 0,
            }
            .to_wire(),
        ),
        request_id: format!("bench-{index}"),
        prompt_tokens: prompt(args, info.vocab_size, index),
        sampling: Some(proto::Sampling {
            temperature: args.temperature,
            top_p: args.top_p,
            seed: args.seed,
            ..proto::Sampling::default()
        }),
        max_new_tokens: args.output_tokens,
        ignore_eos: true,
        ..Default::default()
    };
    let status = |s: tonic::Status| failed(tandem_wire::Failure::from_status(&s, tandem_wire::Source::Decode));
    let mut events = client.generate(request).await.map_err(status)?.into_inner();
    let mut times = Times::new();
    while let Some(event) = events.message().await.map_err(status)? {
        match event.event {
            Some(Event::Tokens(tokens)) => times.extend(std::iter::repeat_n(Instant::now(), tokens.ids.len())),
            Some(Event::Failure(failure)) => return Err(failed(tandem_wire::Failure::from_wire(&failure))),
            Some(Event::Finished(_)) => break,
            Some(Event::Started(_) | Event::Phase(_)) | None => {}
        }
    }
    if times.len() != args.output_tokens as usize {
        let endpoint = args.endpoint.clone();
        return Err(EngineBenchError::Short {
            endpoint,
            got: times.len(),
            want: args.output_tokens,
        });
    }
    Ok(times)
}

fn temperature(text: &str) -> Result<f32, String> {
    within(text, |value| (0.0..=2.0).contains(&value), "a number from 0 to 2")
}

fn top_p(text: &str) -> Result<f32, String> {
    within(
        text,
        |value| value > 0.0 && value <= 1.0,
        "a number above 0 and at most 1",
    )
}

fn within(text: &str, range: impl Fn(f32) -> bool, what: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|value| range(*value))
        .ok_or_else(|| format!("not {what}"))
}

/// Random ordinary tokens (xorshift), the same for the same seed; the first hundred ids are often special.
fn prompt(args: &EngineArgs, vocab: u32, index: u32) -> Vec<u32> {
    let mut state = args.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(index) + 1) << 20;
    let low = 100.min(vocab / 2);
    (0..args.prompt_tokens)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            low + (state % u64::from(vocab - low)) as u32
        })
        .collect()
}
