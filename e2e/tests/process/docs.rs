//! What the documents say about the software is what the software says about itself.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use tandem_e2e::stack::{Pair, Router};
use tandem_e2e::{bin, probe, root};
use tandem_wire::Reason;
use tandem_wire::reason::meaning;

fn documents() -> Vec<(PathBuf, String)> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(root().join("docs"))
        .expect("docs/")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.push(root().join("README.md"));
    paths
        .into_iter()
        .map(|path| (path.clone(), std::fs::read_to_string(path).expect("a text")))
        .collect()
}

#[test]
fn the_table_of_errors_is_the_table_of_reasons() {
    let text = std::fs::read_to_string(root().join("docs/errors.md")).expect("docs/errors.md");
    let (of_engines, _) = text
        .split_once("The router answers these by itself")
        .expect("the second table");
    let documented: BTreeSet<(String, u16, bool)> = of_engines
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
            let code = cells.next()?.trim_end_matches('`').to_owned();
            Some((code, cells.next()?.parse().ok()?, cells.next()? == "yes"))
        })
        .collect();
    let known: BTreeSet<(String, u16, bool)> = (1..)
        .map_while(|number| Reason::try_from(number).ok())
        .map(meaning)
        .map(|meaning| (meaning.code.to_owned(), meaning.http, meaning.retryable))
        .collect();
    assert_eq!(documented, known);
}

fn help(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(bin(program))
        .args(arguments)
        .arg("--help")
        .output()
        .expect("--help");
    assert!(
        output.status.success(),
        "{program} {arguments:?} --help: {}",
        output.status
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn flags(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
        .filter(|word| word.starts_with("--"))
        .collect()
}

/// What `kubectl tandem` can be asked for.
const ON_A_CLUSTER: [&str; 7] = ["status", "plan", "restart", "approve", "history", "diagnose", "capture"];

#[test]
fn a_flag_for_a_cluster_is_not_told_of() {
    let text = std::fs::read_to_string(root().join("docs/kubectl.md")).expect("docs/kubectl.md");
    let told = flags(&text);
    for command in ON_A_CLUSTER {
        let help = help("tandem", &[command]);
        for flag in flags(&help) {
            let known = ["--help", "--version"].contains(&flag) || told.contains(flag);
            assert!(known, "docs/kubectl.md says nothing of {flag} of {command}");
        }
    }
}

#[test]
fn every_flag_that_the_documents_name_exists() {
    let help = [
        help("tandem-engine", &[]),
        help("tandem-router", &[]),
        help("tandem-operator", &[]),
        help("tandem", &["up"]),
        ON_A_CLUSTER.map(|command| help("tandem", &[command])).concat(),
        help("tandem", &["bench", "chat"]),
        help("tandem", &["bench", "multiround"]),
    ]
    .concat();
    let known = flags(&help);
    for (path, text) in documents() {
        // Flags stand in code: `--flag`, or on an indented or fenced line that begins with one of our programs.
        for line in text.lines() {
            // helm has flags of its own
            let ours = !line.contains("helm ")
                && ["`--", "tandem ", "tandem-engine", "tandem-router"]
                    .iter()
                    .any(|mark| line.contains(mark));
            for word in line
                .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
                .filter(|_| ours)
            {
                let is_flag = word.len() > 3 && word.starts_with("--") && word.as_bytes()[2] != b'-';
                assert!(
                    !is_flag || known.contains(word),
                    "{} names {word}, which no program has",
                    path.display()
                );
            }
        }
    }
}

/// What router and engines show begins with one of these.
const METRICS: [&str; 6] = [
    "tandem_router_",
    "tandem_engine_",
    "tandem_transfer_",
    "tandem_runtime_",
    "tandem_traces_",
    "process_",
];

#[tokio::test]
async fn a_metric_that_the_documents_name_is_shown_by_nobody() {
    let pair = Pair::start(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let mut shown = BTreeSet::new();
    for ops in [pair.prefill.ops(), pair.decode.ops(), router.ops()] {
        let answer = probe::http().get(format!("http://{ops}/metrics")).send().await;
        let text = answer.expect("/metrics").text().await.expect("a text");
        let names = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        shown.extend(names.map(str::to_owned));
    }
    let mut told = 0;
    for (path, text) in documents() {
        let quoted = text.split('`').skip(1).step_by(2);
        let names = quoted.filter_map(|quoted| quoted.split(['{', ' ']).next());
        for name in names.filter(|name| METRICS.iter().any(|part| name.starts_with(part))) {
            told += 1;
            // a counter's samples end in it
            let family = name.strip_suffix("_total").unwrap_or(name);
            // by a router alone that searches for its engines
            if family.starts_with("tandem_router_discovery_") {
                continue;
            }
            assert!(
                shown.contains(family),
                "{} names {name}, which is not among {shown:?}",
                path.display()
            );
        }
    }
    assert!(told > 10, "{told} names of metrics were found");
}
