//! `tandem diagnose`: which layer is at fault, if one is, by what was measured.
//!
//! | module | holds |
//! | --- | --- |
//! | [`target`] | where to look |
//! | [`gather`] | looks, and makes the record |
//! | [`prober`] | tiny completions, sent each way to measure |
//! | [`record`] | everything that was observed |
//! | [`facts`] | the record in the terms of the rules |
//! | [`observation`] | what was seen, as numbered lines |
//! | [`verdict`] | the rules; pure |
//! | [`summary`] | how things stand, in sentences |
//! | [`text`] | what people read |

mod facts;
mod gather;
mod observation;
#[cfg(test)]
mod planted;
mod prober;
mod record;
mod summary;
#[cfg(test)]
mod table;
mod target;
mod text;
mod verdict;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use crate::http::{Http, Trust};
use crate::{capture, console};
use gather::Options;
use record::{Limits, Record, VERSION};
pub use target::Target;
use target::TargetArgs;
use verdict::{Finding, Layer, Verdict, verdict};

/// A larger file is no record.
const MAX_RECORD_BYTES: u64 = 64 << 20;

/// `tandem diagnose`.
#[derive(Debug, Args)]
pub struct DiagnoseArgs {
    /// Judge what was observed before, and look at nothing: an archive of `tandem capture`, or the JSON of an earlier run
    #[arg(long, value_name = "FILE", conflicts_with_all = ["via", "ca", "name"])]
    from: Option<PathBuf>,
    /// Print JSON: the record and the verdict
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    look: LookArgs,
}

/// Where to look, and how.
#[derive(Debug, Args)]
pub struct LookArgs {
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
    #[command(flatten)]
    target: TargetArgs,
}

impl LookArgs {
    /// What to look at.
    pub async fn target(&self, plugin: bool) -> Result<Target, String> {
        self.target.find(plugin).await
    }
}

/// Looks and judges. The exit code says what was found.
pub async fn diagnose(args: DiagnoseArgs, plugin: bool) -> ExitCode {
    let record = match &args.from {
        Some(path) => read(path),
        None => match args.look.target(plugin).await {
            Ok(target) => observe(&args.look, &target).await,
            Err(error) => Err(error),
        },
    };
    let record = match record {
        Ok(record) => record,
        Err(error) => {
            console::error(&error);
            return ExitCode::FAILURE;
        }
    };
    let (verdict, mut text) = judge(&record);
    if args.json {
        text = serde_json::to_string_pretty(&json!({ "record": record, "verdict": verdict })).unwrap_or_default();
    }
    let _ = writeln!(std::io::stdout(), "{text}");
    ExitCode::from(code(&verdict))
}

/// What a record says, and in words.
pub fn judge(record: &Record) -> (Verdict, String) {
    let verdict = verdict(record);
    let text = text::text(record, &verdict);
    (verdict, text)
}

/// Makes a record.
pub async fn observe(args: &LookArgs, target: &Target) -> Result<Record, String> {
    if args.probe_seconds < args.stuck_seconds {
        return Err(format!(
            "--probe-seconds {} is shorter than --stuck-seconds {}: what is slow could not be told from what hangs",
            args.probe_seconds, args.stuck_seconds
        ));
    }
    let options = Options {
        limits: Limits {
            stuck_ms: u64::from(args.stuck_seconds) * 1000,
            probe_ms: u64::from(args.probe_seconds) * 1000,
        },
        via: args.via.clone(),
        trust: Trust::new(args.ca.as_deref())?,
        rounds: args.rounds,
    };
    if let Some(via) = &options.via {
        Http::new(via, options.trust.clone())?;
    }
    Ok(gather::record(target, &options).await)
}

/// A record that was kept.
fn read(path: &Path) -> Result<Record, String> {
    #[derive(serde::Deserialize)]
    struct Kept {
        record: Record,
    }
    let failed = |why: String| format!("{}: {why}", path.display());
    let bytes = bytes(path).map_err(failed)?;
    let kept: Kept = serde_json::from_slice(&bytes).map_err(|error| failed(format!("it holds no record: {error}")))?;
    if kept.record.version > VERSION {
        return Err(failed(format!(
            "its record has version {}, this program reads up to {VERSION}: use a newer tandem",
            kept.record.version
        )));
    }
    Ok(kept.record)
}

fn bytes(path: &Path) -> Result<Vec<u8>, String> {
    let open = || File::open(path).map_err(|error| error.to_string());
    let mut bytes = Vec::new();
    let first = open()?
        .take(1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    if first == 1 && bytes != b"{" {
        return capture::record(open()?, MAX_RECORD_BYTES);
    }
    bytes.clear();
    let read = open()?.take(MAX_RECORD_BYTES).read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|error| error.to_string())
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
