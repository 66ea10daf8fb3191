//! `tandem diagnose`: which layer is at fault, if one is, by what was measured.
//!
//! | module | holds |
//! | --- | --- |
//! | [`target`] | where to look |
//! | [`gather`] | looks, and makes the record |
//! | [`prober`] | tiny completions, sent each way to measure |
//! | [`record`] | everything that was observed |
//! | [`facts`] | the record in the terms of the rules, each observation as a line |
//! | [`verdict`] | the rules; pure |
//! | [`text`] | what people read |

mod facts;
mod gather;
mod prober;
mod record;
mod target;
mod text;
mod verdict;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use crate::console;
use crate::http::Trust;
use gather::Options;
use record::{Limits, Record, VERSION};
use target::TargetArgs;
use verdict::{Finding, Layer, Verdict, verdict};

/// A larger file is no record.
const MAX_RECORD_BYTES: u64 = 64 << 20;

/// `tandem diagnose`.
#[derive(Debug, Args)]
pub struct DiagnoseArgs {
    /// Measure what a client sees: probes through this URL, and past it
    #[arg(long, value_name = "URL")]
    via: Option<String>,
    /// Who signed the certificates of --via and of the router, in PEM [default: whom this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// What has not moved for so long is stuck, and a probe that takes so long is slow
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    stuck_seconds: u32,
    /// A probe that is not complete after so long hangs
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=3600))]
    probe_seconds: u32,
    /// Probes on a connection that is kept alive; 0: only look, send no probe at all
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(0..=64))]
    rounds: u32,
    /// Judge what was observed before: the JSON of an earlier run, and look at nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["via", "ca"])]
    from: Option<PathBuf>,
    /// Print JSON: the record and the verdict
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: TargetArgs,
}

/// Looks and judges. The exit code says what was found.
pub async fn diagnose(args: DiagnoseArgs) -> ExitCode {
    let record = match &args.from {
        Some(path) => read(path),
        None => observe(&args).await,
    };
    let record = match record {
        Ok(record) => record,
        Err(error) => {
            console::error(&error);
            return ExitCode::FAILURE;
        }
    };
    let verdict = verdict(&record);
    let text = if args.json {
        serde_json::to_string_pretty(&json!({ "record": record, "verdict": verdict })).unwrap_or_default()
    } else {
        text::text(&record, &verdict)
    };
    let _ = writeln!(std::io::stdout(), "{text}");
    ExitCode::from(code(&verdict))
}

async fn observe(args: &DiagnoseArgs) -> Result<Record, String> {
    if args.probe_seconds < args.stuck_seconds {
        return Err(format!(
            "--probe-seconds {} is shorter than --stuck-seconds {}: what is slow could not be told from what hangs",
            args.probe_seconds, args.stuck_seconds
        ));
    }
    let target = args.target.find().map_err(|error| error.to_string())?;
    let options = Options {
        limits: Limits {
            stuck_ms: u64::from(args.stuck_seconds) * 1000,
            probe_ms: u64::from(args.probe_seconds) * 1000,
        },
        via: args.via.clone(),
        trust: Trust::new(args.ca.as_deref())?,
        rounds: args.rounds,
    };
    Ok(gather::record(target, &options).await)
}

/// A record that was kept.
fn read(path: &Path) -> Result<Record, String> {
    #[derive(serde::Deserialize)]
    struct Kept {
        record: Record,
    }
    let failed = |why: String| format!("{}: {why}", path.display());
    let size = std::fs::metadata(path)
        .map_err(|error| failed(error.to_string()))?
        .len();
    if size > MAX_RECORD_BYTES {
        return Err(failed(format!(
            "it has {size} bytes, more than a record has ({MAX_RECORD_BYTES})"
        )));
    }
    let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let kept: Kept = serde_json::from_slice(&bytes).map_err(|error| failed(format!("it holds no record: {error}")))?;
    if kept.record.version > VERSION {
        return Err(failed(format!(
            "its record has version {}, this program reads up to {VERSION}: use a newer tandem",
            kept.record.version
        )));
    }
    Ok(kept.record)
}

/// 0: no fault; 3: undecided; 4: none inside Tandem, the client's side not measured; from 10: which layer, 20: several.
fn code(verdict: &Verdict) -> u8 {
    let mut suspects = verdict.suspects();
    match (verdict.finding, suspects.next(), suspects.next()) {
        (_, Some(_), Some(_)) => 20,
        (_, Some(suspect), None) => match suspect.layer {
            Layer::ClientPath => 10,
            Layer::Router => 11,
            Layer::Prefill => 12,
            Layer::Transfer => 13,
            Layer::Decode => 14,
        },
        (Finding::NoFault, ..) => 0,
        (Finding::NoFaultInside, ..) => 4,
        (Finding::Undecided | Finding::Fault, ..) => 3,
    }
}
