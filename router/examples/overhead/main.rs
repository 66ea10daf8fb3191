//! What a request and a token cost in the router: CPU time of the binary, in front of engines that cost nothing, beside other routers.
//!
//! ```text
//! overhead --tokenizer MODEL.gguf [--rounds 5] [--seconds 2] [--case NAME] [--clients N]
//!          [--before PROGRAM] [--vllm-router PROGRAM] [--smg PROGRAM]
//! ```
//!
//! The routers take turns within each round; each measurement is a line of JSON. Our router stands between gRPC engines (prefill
//! and decode), the others between HTTP ones (two workers), all with the same answers at the same pace. Our router is measured
//! twice: with chats, as a client sends them, and with prompts that are token ids already, which leaves template and tokenizer
//! out as the others do. Wall-clock rates say little where load generator, router and engines share the cores; CPU time of the
//! router's process is the figure to compare.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a measuring program: it stops at the first surprise"
)]

#[expect(dead_code, reason = "the tests use more of it")]
#[path = "../../tests/it/serve/engine.rs"]
mod engine;
mod http_engine;
mod load;
mod router;

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use load::{Case, PROMPTS, Prompts};
use router::{Peer, Router};
use serde_json::json;
use tandem_router::text::Text;

const PATIENCE: Duration = Duration::from_secs(10);
/// The answer of every engine, a token for each character.
const ANSWER: &str = "thirty-two tokens of plain ascii";
/// Characters of a prompt's text, about 256 tokens.
const PROMPT_CHARS: usize = 1_024;
const TOKEN_MS: u64 = 20;

#[derive(Parser)]
struct Args {
    /// Where our router has its vocabulary and chat template from.
    #[arg(long)]
    tokenizer: PathBuf,
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Each measurement.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Only the cases whose name begins like this.
    #[arg(long, default_value = "")]
    case: String,
    /// Only the cases with so many clients.
    #[arg(long)]
    clients: Option<usize>,
    /// An earlier build of our router, to be compared with.
    #[arg(long)]
    before: Option<PathBuf>,
    /// vllm-router's program.
    #[arg(long)]
    vllm_router: Option<PathBuf>,
    /// The Shepherd Model Gateway's program.
    #[arg(long)]
    smg: Option<PathBuf>,
}

impl Args {
    fn wants(&self, case: &Case) -> bool {
        case.name.starts_with(&self.case) && self.clients.is_none_or(|clients| clients == case.clients)
    }
}

const CASES: &[Case] = &[
    Case {
        name: "JSON",
        clients: 1,
        stream: false,
        paced: false,
    },
    Case {
        name: "JSON",
        clients: 32,
        stream: false,
        paced: false,
    },
    Case {
        name: "JSON",
        clients: 256,
        stream: false,
        paced: false,
    },
    Case {
        name: "stream, unpaced",
        clients: 32,
        stream: true,
        paced: false,
    },
    Case {
        name: "stream, a token each 20 ms",
        clients: 64,
        stream: true,
        paced: true,
    },
];

/// A name, what it is asked, and how it is started: before engines with a pace, or without one.
type Contender<'a> = (&'a str, &'a Prompts, Box<dyn Fn(bool) -> Router + 'a>);

fn main() {
    let args = Args::parse();
    let text = Text::load(&args.tokenizer).expect("the tokenizer");
    let texts: Vec<String> = (0..PROMPTS).map(prompt).collect();
    let ids: Vec<Vec<u32>> = texts.iter().map(|text_| text.encode(text_, false).unwrap()).collect();
    let tokens = ids.iter().map(Vec::len).sum::<usize>() / ids.len();
    eprintln!(
        "prompts of {PROMPT_CHARS} characters, {tokens} tokens; answers of {} tokens",
        ANSWER.len()
    );
    let (chats, ids) = (Prompts::Chats(texts), Prompts::Ids(ids));

    let ours = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .join("../tandem-router");
    let mut contenders: Vec<Contender<'_>> = Vec::new();
    for (program, [by_ids, by_chats]) in [
        (Some(&ours), ["tandem", "tandem, chat"]),
        (args.before.as_ref(), ["before", "before, chat"]),
    ] {
        let Some(program) = program else { continue };
        for (name, prompts) in [(by_ids, &ids), (by_chats, &chats)] {
            let start = |paced| Router::ours(program, &args.tokenizer, paced);
            contenders.push((name, prompts, Box::new(start)));
        }
    }
    for (peer, program) in [(Peer::VllmRouter, &args.vllm_router), (Peer::Smg, &args.smg)] {
        if let Some(program) = program {
            contenders.push((
                peer.name(),
                &chats,
                Box::new(move |paced| Router::peer(peer, program, paced)),
            ));
        }
    }
    // every process is fresh for its round, so that no router profits from what an earlier case left behind
    for round in 0..args.rounds {
        for turn in 0..contenders.len() {
            let (name, prompts, start) = &contenders[(turn + round as usize) % contenders.len()];
            let (fast, paced) = (start(false), start(true));
            for case in CASES.iter().filter(|case| args.wants(case)) {
                let router = if case.paced { &paced } else { &fast };
                let measured = load::measure(router, case, prompts, Duration::from_secs_f64(args.seconds));
                println!(
                    "{}",
                    json!({
                        "router": name, "case": case.name, "clients": case.clients, "round": round,
                        "answers": measured.answers,
                        "cpu_us_per_answer": measured.cpu_us,
                        "cpu_us_per_token": measured.cpu_us / ANSWER.len() as f64,
                        "p50_ms": measured.p50_ms, "p99_ms": measured.p99_ms, "rss_mib": router.rss_mib(),
                    })
                );
            }
        }
        eprintln!("round {} of {}", round + 1, args.rounds);
    }
}

/// Ordinary words, other ones for each prompt.
fn prompt(index: usize) -> String {
    const WORDS: &[&str] = &[
        "river", "stone", "and", "the", "morning", "of", "a", "paper", "carries", "slow", "light", "seven", "to",
        "window", "under", "bread", "small", "machine", "with", "north", "answers", "green",
    ];
    let mut text = String::new();
    let mut state = index as u64 + 1;
    while text.len() < PROMPT_CHARS {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        text.push_str(WORDS[(state >> 33) as usize % WORDS.len()]);
        text.push(' ');
    }
    text.truncate(PROMPT_CHARS);
    text
}
