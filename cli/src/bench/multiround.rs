//! `tandem bench multiround`: conversations that grow, each on a connection that is kept alive, as agents hold them.
//!
//! A proxy that mishandles kept-alive connections lets every single request through and hangs a later round of a conversation.
//! Each round says whether its connection was reused, and `--compare` runs the same conversations at another URL at the
//! same time: past a proxy, say.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use futures::future::join_all;
use serde::Serialize;
use serde_json::{Value, json};

use super::chat::key;
use super::client::{Sample, Server, Shape};
use super::prompt::Prompts;
use crate::console;
use crate::http::{ConnectionId, Trust};

/// Words of each question.
const WORDS: usize = 32;

/// `tandem bench multiround`.
#[derive(Debug, Args)]
pub struct MultiroundArgs {
    /// The server, with or without /v1
    #[arg(
        long,
        visible_alias = "url",
        value_name = "URL",
        default_value = "http://127.0.0.1:8080"
    )]
    base_url: String,
    /// Run the same conversations here at the same time
    #[arg(long, value_name = "URL")]
    compare: Option<String>,
    /// The model to ask [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Come with a key: the first of a file as the router's --api-key-file
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Who signed the certificates of both, in PEM [default: whom this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Conversations at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    sessions: u32,
    /// Questions in each
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1024))]
    rounds: u32,
    /// Length of each answer in tokens, at most
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    output_tokens: u32,
    /// Open a connection for each round instead of keeping one alive
    #[arg(long)]
    fresh_connections: bool,
    /// Say that a round hangs when nothing has come for so long, and again after each such time
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    report_seconds: u32,
    /// A round in which nothing has come for so long hangs for good, and its conversation ends
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    hang_seconds: u32,
    /// A round that takes longer has failed, whatever comes meanwhile
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    timeout_seconds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What both sides of a comparison share.
#[derive(Debug)]
struct Plan {
    rounds: u32,
    shape: Shape,
    prompts: Prompts,
    fresh: bool,
    report: Duration,
    hang: Duration,
    deadline: Duration,
}

/// One question and what came of it.
#[derive(Debug, Clone, Serialize)]
struct Turn {
    session: u32,
    round: u32,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case", tag = "status")]
enum Outcome {
    Passed {
        connection: Connection,
        first_ms: f64,
        total_ms: f64,
        prompt_tokens: u64,
    },
    Failed {
        reason: String,
    },
    /// Nothing came for too long.
    Hung {
        /// Of the answer, before that.
        received_bytes: usize,
        waited_seconds: f64,
    },
    /// An earlier round of its conversation did not pass.
    NotRun,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Connection {
    New,
    Reused,
    /// The HTTP library does not say.
    Unknown,
}

/// All conversations at one URL.
#[derive(Debug, Serialize)]
struct Side {
    url: String,
    asked: usize,
    passed: usize,
    rounds: Vec<Turn>,
}

/// Runs the conversations and prints the report. The exit code is 1 when any round did not pass.
pub async fn run(args: MultiroundArgs) -> ExitCode {
    match measure(&args).await {
        Ok(sides) => {
            let text = if args.json {
                serde_json::to_string_pretty(&json!({ "sides": sides })).unwrap_or_default()
            } else {
                sides.iter().map(Side::to_string).collect::<Vec<_>>().join("\n")
            };
            let _ = writeln!(std::io::stdout(), "{text}");
            if sides.iter().all(|side| side.passed == side.asked) {
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

async fn measure(args: &MultiroundArgs) -> Result<Vec<Side>, String> {
    if args.report_seconds > args.hang_seconds {
        return Err(format!(
            "--report-seconds {} is longer than --hang-seconds {}: give a shorter one",
            args.report_seconds, args.hang_seconds
        ));
    }
    let key = key(args.api_key_file.as_deref())?;
    let deadline = Duration::from_secs(args.timeout_seconds.into());
    let urls = [Some(&args.base_url), args.compare.as_ref()];
    let trust = Trust::new(args.ca.as_deref())?;
    let server = |url: &String| Server::new(url, trust.clone(), key.as_ref(), deadline);
    let sides: Vec<Vec<Server>> = urls
        .into_iter()
        .flatten()
        // each conversation has its connections for itself
        .map(|url| (0..args.sessions).map(|_| server(url)).collect())
        .collect::<Result<_, _>>()?;
    let model = match (&args.model, sides.first().and_then(|side| side.first())) {
        (Some(model), _) => model.clone(),
        (None, Some(server)) => {
            let listed = server.first_model().await;
            listed.map_err(|error| format!("{} does not answer as an OpenAI server: {error}", server.url()))?
        }
        (None, None) => return Err("there is no server to ask".to_owned()),
    };
    let plan = Plan {
        rounds: args.rounds,
        shape: Shape {
            model,
            output_tokens: args.output_tokens.into(),
            ignore_eos: false,
        },
        prompts: Prompts {
            seed: rand::random(),
            words: WORDS,
            shared_prefix: false,
        },
        fresh: args.fresh_connections,
        report: Duration::from_secs(args.report_seconds.into()),
        hang: Duration::from_secs(args.hang_seconds.into()),
        deadline,
    };
    Ok(join_all(sides.into_iter().map(|servers| side(&plan, servers))).await)
}

/// All conversations at one URL, at the same time.
async fn side(plan: &Plan, servers: Vec<Server>) -> Side {
    let url = servers
        .first()
        .map_or_else(String::new, |server| server.url().to_owned());
    let sessions = (1..)
        .zip(&servers)
        .map(|(session, server)| converse(plan, server, session));
    Side::new(url, join_all(sessions).await.concat())
}

/// One conversation, to its end or to the first round that does not pass.
async fn converse(plan: &Plan, server: &Server, session: u32) -> Vec<Turn> {
    let mut messages = vec![json!({"role": "system", "content": "Answer briefly."})];
    let mut before: Option<ConnectionId> = None;
    let mut rounds = Vec::new();
    for round in 1..=plan.rounds {
        let number = u64::from(session) * u64::from(plan.rounds) + u64::from(round);
        let question = format!("Say something about: {}.", plan.prompts.prompt(number));
        messages.push(json!({"role": "user", "content": question}));
        let server = if plan.fresh { server.fresh() } else { server.clone() };
        let outcome = match ask(plan, &server, &messages, (session, round)).await {
            Ok(sample) => {
                let connection = match (sample.connection, before) {
                    (None, _) => Connection::Unknown,
                    (now, then) if now == then => Connection::Reused,
                    _ => Connection::New,
                };
                before = sample.connection;
                messages.push(json!({"role": "assistant", "content": sample.text}));
                Outcome::Passed {
                    connection,
                    first_ms: sample.first.as_secs_f64() * 1e3,
                    total_ms: sample.total.as_secs_f64() * 1e3,
                    prompt_tokens: sample.prompt_tokens,
                }
            }
            Err(outcome) => outcome,
        };
        let passed = matches!(outcome, Outcome::Passed { .. });
        rounds.push(Turn {
            session,
            round,
            outcome,
        });
        if !passed {
            let outcome = Outcome::NotRun;
            rounds.extend((round + 1..=plan.rounds).map(|round| Turn {
                session,
                round,
                outcome: outcome.clone(),
            }));
            break;
        }
    }
    rounds
}

/// One question. While nothing comes, that is said on stderr.
async fn ask(
    plan: &Plan,
    server: &Server,
    messages: &[Value],
    (session, round): (u32, u32),
) -> Result<Sample, Outcome> {
    let last = Cell::new((Instant::now(), 0_usize));
    let messages = Value::from(messages);
    let answer = server.converse(&plan.shape, &messages, |bytes| {
        last.set((Instant::now(), last.get().1 + bytes));
    });
    let mut answer = std::pin::pin!(answer);
    let began = Instant::now();
    let mut said = Duration::ZERO;
    loop {
        let (since, received_bytes) = last.get();
        let silent = since.elapsed();
        if silent >= plan.hang {
            return Err(Outcome::Hung {
                received_bytes,
                waited_seconds: silent.as_secs_f64(),
            });
        }
        if began.elapsed() >= plan.deadline {
            return Err(Outcome::Failed {
                reason: format!("not complete after {} s", plan.deadline.as_secs()),
            });
        }
        if silent < said {
            said = Duration::ZERO;
        }
        if silent >= said + plan.report {
            said = silent;
            let _ = writeln!(
                std::io::stderr(),
                "{}: session {session}, round {round}: nothing for {:.0} s, after {received_bytes} bytes of the answer",
                server.url(),
                silent.as_secs_f64(),
            );
        }
        let wake = (since + (said + plan.report).min(plan.hang)).min(began + plan.deadline);
        tokio::select! {
            biased;
            answer = &mut answer => return answer.map_err(|reason| Outcome::Failed { reason }),
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }
}

impl Side {
    fn new(url: String, rounds: Vec<Turn>) -> Self {
        let passed = rounds
            .iter()
            .filter(|round| matches!(round.outcome, Outcome::Passed { .. }));
        Self {
            url,
            asked: rounds.len(),
            passed: passed.count(),
            rounds,
        }
    }
}

/// The passed of one round.
#[derive(Debug, Default)]
struct Passed {
    first: Vec<f64>,
    total: Vec<f64>,
    prompt_tokens: u64,
    reused: usize,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}/{} rounds passed", self.url, self.passed, self.asked)?;
        writeln!(
            f,
            "  {:<7}{:>8}{:>8}{:>15}{:>16}{:>12}",
            "round", "passed", "reused", "prompt tokens", "first token ms", "total ms"
        )?;
        let mut by_round: BTreeMap<u32, Passed> = BTreeMap::new();
        for round in &self.rounds {
            let row = by_round.entry(round.round).or_default();
            if let Outcome::Passed {
                connection,
                first_ms,
                total_ms,
                prompt_tokens,
            } = round.outcome
            {
                row.first.push(first_ms);
                row.total.push(total_ms);
                row.prompt_tokens = row.prompt_tokens.max(prompt_tokens);
                row.reused += usize::from(connection == Connection::Reused);
            }
        }
        for (round, mut row) in by_round {
            let passed = row.first.len();
            write!(f, "  {round:<7}{passed:>8}")?;
            if passed > 0 {
                write!(
                    f,
                    "{:>8}{:>15}{:>16.1}{:>12.1}",
                    row.reused,
                    row.prompt_tokens,
                    median(&mut row.first),
                    median(&mut row.total)
                )?;
            }
            writeln!(f)?;
        }
        for Turn {
            session,
            round,
            outcome,
        } in &self.rounds
        {
            match outcome {
                Outcome::Failed { reason } => writeln!(f, "  session {session}, round {round}: failed: {reason}")?,
                Outcome::Hung {
                    received_bytes,
                    waited_seconds,
                } => writeln!(
                    f,
                    "  session {session}, round {round}: hung: nothing for {waited_seconds:.0} s, after {received_bytes} bytes of the answer"
                )?,
                Outcome::Passed { .. } | Outcome::NotRun => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(session: u32, round: u32, connection: Connection) -> Turn {
        Turn {
            session,
            round,
            outcome: Outcome::Passed {
                connection,
                first_ms: 20.0,
                total_ms: 50.0,
                prompt_tokens: 60,
            },
        }
    }

    #[test]
    fn a_round_that_hangs_is_not_named() {
        let hung = Outcome::Hung {
            received_bytes: 7,
            waited_seconds: 60.0,
        };
        let rounds = vec![
            passed(1, 1, Connection::New),
            passed(1, 2, Connection::Reused),
            passed(2, 1, Connection::New),
            Turn {
                session: 2,
                round: 2,
                outcome: hung,
            },
        ];
        let side = Side::new("http://h".into(), rounds);
        assert_eq!((side.asked, side.passed), (4, 3));
        let text = side.to_string();
        assert!(text.starts_with("http://h: 3/4 rounds passed\n"), "{text}");
        assert!(
            text.contains("session 2, round 2: hung: nothing for 60 s, after 7 bytes"),
            "{text}"
        );
        let json = serde_json::to_value(&side).unwrap();
        assert_eq!(json["rounds"][3]["status"], "hung");
        assert_eq!(json["rounds"][1]["connection"], "reused");
    }
}
