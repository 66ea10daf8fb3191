//! `tandem history`: the changes that ended.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use clap::Args;
use tandem_crds::status::{HistoryEntry, Outcome};

use super::connect::{ClusterArgs, ClusterError};
use super::deployment::Deployment;
use super::finish;
use super::table::{age, columns, or_none, span};

/// `tandem history`.
#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// The deployment
    #[arg(value_name = "NAME")]
    name: String,
    /// Show what this change changed; its first letters are enough
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Print JSON
    #[arg(short = 'o', long, value_name = "FORMAT", value_parser = ["json"])]
    output: Option<String>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Shows them, newest first.
pub async fn history(args: HistoryArgs) -> ExitCode {
    finish(run(&args).await)
}

async fn run(args: &HistoryArgs) -> Result<ExitCode, ClusterError> {
    let cluster = args.cluster.connect().await?;
    let deployment = Deployment::get(&cluster, &args.name).await?;
    let wanted = args.revision.as_deref().unwrap_or_default();
    let entries: Vec<&HistoryEntry> = deployment
        .status
        .history
        .iter()
        .filter(|entry| entry.revision.starts_with(wanted))
        .collect();
    if entries.is_empty() && args.revision.is_some() {
        return Err(ClusterError::Refused(format!(
            "no change to {wanted:?} in the history of {}: without --revision all are listed",
            args.name
        )));
    }
    let text = if args.output.is_some() {
        serde_json::to_string_pretty(&entries).unwrap_or_default() + "\n"
    } else if args.revision.is_some() {
        entries.into_iter().map(details).collect()
    } else {
        table(&entries)
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

fn table(entries: &[&HistoryEntry]) -> String {
    let head = ["REVISION", "OUTCOME", "CHANGED", "RESTARTED", "ENDED", "TOOK"];
    let rows = entries.iter().map(|entry| {
        vec![
            entry.revision.clone(),
            format!("{:?}", entry.outcome),
            changed(entry),
            restarted(entry),
            format!("{} ago", age(entry.ended_at.0)),
            took(entry),
        ]
    });
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect();
    columns("", &rows)
}

/// The fields, as long as they are few.
fn changed(entry: &HistoryEntry) -> String {
    match entry.changed.as_slice() {
        [] => "<none>".to_owned(),
        [one] => one.path.clone(),
        [first, rest @ ..] => format!("{} and {} more", first.path, rest.len()),
    }
}

fn restarted(entry: &HistoryEntry) -> String {
    let roles: Vec<_> = entry.restarted.iter().map(|role| role.field()).collect();
    or_none(&roles.join(","))
}

fn took(entry: &HistoryEntry) -> String {
    span(entry.ended_at.0.duration_since(entry.started_at.0).as_secs())
}

fn details(entry: &HistoryEntry) -> String {
    let mut text = format!(
        "{}: {:?} {} ago, after {}; restarted: {}\n",
        entry.revision,
        entry.outcome,
        age(entry.ended_at.0),
        took(entry),
        restarted(entry)
    );
    if !entry.failure.is_empty() && entry.outcome != Outcome::Promoted {
        let _ = writeln!(text, "  because {}", entry.failure);
    }
    for change in &entry.changed {
        let (from, to) = (or_none(&change.from), or_none(&change.to));
        let _ = writeln!(text, "  {}: {from} -> {to}", change.path);
    }
    if entry.changed.is_empty() {
        text.push_str("  no field that a process sees differs from what ran before\n");
    }
    text
}
