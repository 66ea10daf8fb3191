//! The table: each row alone and under load, with the client's vantage and without.

use std::fmt::Write as _;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;
use tandem_e2e::bin;
use tandem_e2e::planting::{MARK, STUCK, clear, list, of_proxy, plant};
use tandem_e2e::proxy::{Doorway, Proxy};
use tandem_e2e::stack::MODEL;
use tandem_faults::rows::Row;
use tokio::process::Command;

use crate::examples;
use crate::rig::{Front, KEY, Rig, TOKEN};
use crate::rows::{Machine, is_outside};

/// Probes that take so long hang.
const HANGS: Duration = Duration::from_secs(13);
/// For one run of `tandem diagnose`: it has deadlines of its own.
const RUN: Duration = Duration::from_mins(2);

/// From where it is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Vantage {
    /// Without what a client sees.
    Inside,
    /// With it.
    Via,
    /// With it, and judged later, by an archive.
    Captured,
}

/// One verdict.
struct Said {
    row: Row,
    loaded: bool,
    vantage: Vantage,
    took: Duration,
    finding: String,
    suspects: Vec<String>,
    summary: Vec<String>,
    whole: Value,
}

impl Said {
    /// What is wrong with it.
    fn wrong(&self) -> Option<String> {
        let expected: Vec<&str> = self.row.layer().into_iter().collect();
        let via = self.vantage != Vantage::Inside;
        if via && self.suspects != expected {
            return Some(format!("names {:?}, not {expected:?}", self.suspects));
        }
        if let Some(other) = self.suspects.iter().find(|of| !expected.contains(&of.as_str())) {
            return Some(format!("names {other}, which is well"));
        }
        let says = |wanted: fn(&str) -> bool| self.summary.iter().any(|line| wanted(line));
        let missing = |what: &str| Some(format!("does not say {what:?}"));
        match self.row {
            _ if via && self.finding != self.row.finding() => Some(format!("finds {}", self.finding)),
            Row::DecodeLoading
                if !says(|line| line.ends_with("is loading its model") || line.contains("is loading its model, ")) =>
            {
                missing("that decode is loading")
            }
            Row::DecodeOverloaded if !says(|line| line.contains("is full and steps")) => {
                missing("that decode is full and steps")
            }
            Row::ProxyCuts if !via && !says(|line| line == CUT) => missing(CUT),
            Row::ProxyHolds | Row::ProxyExhausted | Row::Idle if !via => {
                let whole = if self.loaded {
                    says(progressing) && says(not_measured)
                } else {
                    self.summary.len() == 1 && says(nothing_in_flight)
                };
                (!whole).then(|| format!("says {:?}", self.summary))
            }
            _ => None,
        }
    }

    fn line(&self) -> String {
        format!(
            "{:<24}{:<8}{:<10}{:<18}{:<14}{:>5.1} s  {}",
            self.row.name(),
            if self.loaded { "loaded" } else { "alone" },
            match self.vantage {
                Vantage::Inside => "",
                Vantage::Via => "--via",
                Vantage::Captured => "captured",
            },
            self.finding,
            self.suspects.join(", "),
            self.took.as_secs_f64(),
            self.wrong()
                .map_or_else(|| "ok".to_owned(), |wrong| format!("WRONG: it {wrong}")),
        )
    }

    /// Is it one that is shown in the documents?
    fn is_example(&self) -> bool {
        !self.loaded && self.vantage == Vantage::Via
    }

    /// The whole of it, for people.
    fn told(&self) -> String {
        let mut text = format!("---- {}\n", self.line());
        for of in list(&self.whole["verdict"]["observations"]) {
            let _ = writeln!(text, "{} {} {}", of["number"], of["text"], of["place"]);
        }
        for of in list(&self.whole["verdict"]["layers"]) {
            let _ = writeln!(text, "{of}");
        }
        for line in &self.summary {
            let _ = writeln!(text, "{line}");
        }
        text
    }
}

const CUT: &str = "2 client connections closed before their answer ended, client side not measured";

fn not_measured(line: &str) -> bool {
    is(
        line,
        &["last answer fully written ", " s ago, client side not measured"],
    )
}

fn nothing_in_flight(line: &str) -> bool {
    line.strip_prefix("nothing in flight inside Tandem, ")
        .is_some_and(not_measured)
}

fn progressing(line: &str) -> bool {
    ["request", "requests"].iter().any(|word| {
        let told = format!(" {word} in flight, all progressing (oldest step ");
        is(line, &["", &told, " s)"])
    })
}

/// Is `line` these pieces with numbers between them?
fn is(line: &str, pieces: &[&str]) -> bool {
    let Some((last, firsts)) = pieces.split_last() else {
        return false;
    };
    let mut rest = line;
    for piece in firsts {
        let Some(after) = rest.strip_prefix(piece) else {
            return false;
        };
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        if rest.len() == after.len() {
            return false;
        }
    }
    rest == *last
}

#[test]
fn a_sentence_is_told_by_its_pieces_and_numbers() {
    assert!(progressing("8 requests in flight, all progressing (oldest step 0.1 s)"));
    assert!(progressing("1 request in flight, all progressing (oldest step 0.0 s)"));
    assert!(!progressing(
        "8 requests in flight, 1 of them without a step (oldest step 0.1 s)"
    ));
    assert!(not_measured(
        "last answer fully written 12 s ago, client side not measured"
    ));
    assert!(!not_measured("last answer fully written 12 s ago"));
    assert!(!not_measured(
        "last answer fully written s ago, client side not measured"
    ));
}

/// Where to look.
fn look(rig: &Rig, front: &Front, proxy: &Proxy, vantage: Vantage) -> Vec<String> {
    let mut args = vec![
        format!("--router={}", front.router.url()),
        format!("--router-admin={}", front.door.admin),
        format!("--admin-token-file={}", rig.token().display()),
        format!("--prefill={}", rig.prefill.control()),
        format!("--decode={}", rig.decode.control()),
        format!("--model={MODEL}"),
        format!("--stuck-seconds={}", STUCK.as_secs()),
        format!("--probe-seconds={}", HANGS.as_secs()),
    ];
    if vantage != Vantage::Inside {
        args.push(format!("--via={}", proxy.url()));
        args.push(format!("--ca={}", proxy.ca().display()));
    }
    args
}

/// Runs `tandem`.
async fn tandem(command: &[&str], look: &[String]) -> Output {
    let run = Command::new(bin("tandem"))
        .args(command)
        .args(look)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(RUN, run).await;
    output.expect("tandem hangs").expect("it starts")
}

async fn diagnose(rig: &Rig, front: &Front, proxy: &Proxy, (row, loaded, vantage): (Row, bool, Vantage)) -> Said {
    let began = Instant::now();
    let look = look(rig, front, proxy, vantage);
    let whole = match vantage {
        Vantage::Captured => captured(&look).await,
        Vantage::Inside | Vantage::Via => json(&tandem(&["diagnose", "--json"], &look).await),
    };
    let verdict = &whole["verdict"];
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let suspected = list(&verdict["layers"])
        .iter()
        .filter(|layer| layer["standing"] == "suspected");
    Said {
        row,
        loaded,
        vantage,
        took: began.elapsed(),
        finding: word(&verdict["finding"]),
        suspects: suspected.map(|layer| word(&layer["layer"])).collect(),
        summary: list(&verdict["summary"]).iter().map(word).collect(),
        whole,
    }
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Captures, and judges what was captured: as it was judged then, and with nothing in it that is nobody's business.
async fn captured(look: &[String]) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("capture.tar");
    let output = tandem(&["capture", &format!("--output={}", file.display())], look).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let archive = std::fs::read(&file).expect("an archive");
    let holds = |text: &str| archive.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(
        holds("last_answer_written_ms"),
        "what it holds cannot be searched as it lies"
    );
    for secret in [TOKEN, KEY, MARK] {
        assert!(!holds(secret), "the archive holds {secret}");
    }
    let then: Value = serde_json::from_slice(record(&archive)).expect("JSON");
    let from = format!("--from={}", file.display());
    let now = json(&tandem(&["diagnose", "--json", &from], &[]).await);
    assert_eq!(now["verdict"], then["verdict"]);
    now
}

/// The record in an archive: its header is a block of 512 bytes, which begins with the name and has the size in octal digits.
fn record(archive: &[u8]) -> &[u8] {
    let name = b"tandem-capture/record.json\0";
    let at = archive.windows(name.len()).position(|window| window == name);
    let (header, rest) = archive[at.expect("a record")..].split_at(512);
    let size = std::str::from_utf8(&header[124..135]).expect("digits");
    &rest[..usize::from_str_radix(size, 8).expect("octal")]
}

/// All rows on a stack of their own.
async fn column(loaded: bool) -> Vec<Said> {
    let mut rig = Rig::start().await;
    let mut all = Vec::new();
    for row in rows() {
        let front = rig.front().await;
        let load = if loaded { front.load() } else { Vec::new() };
        // all of them get on
        front.door.stuck("decode", load.len(), Duration::ZERO).await;
        let proxy = Proxy::start(front.door.addr(), of_proxy(row)).await;
        let mut machine = Machine {
            rig: &mut rig,
            front: &front,
        };
        let victims = plant(row, &mut machine, &proxy).await;
        let from = |vantage| diagnose(&rig, &front, &proxy, (row, loaded, vantage));
        let inside = from(Vantage::Inside);
        let outside = async { tokio::join!(from(Vantage::Via), from(Vantage::Captured)) };
        // probes through a proxy end as its clients do: nobody may see them who looks from inside
        let (inside, (via, captured)) = if is_outside(row) {
            (inside.await, outside.await)
        } else {
            tokio::join!(inside, outside)
        };
        for said in [inside, via, captured] {
            println!("{}", said.line());
            all.push(said);
        }
        let mut machine = Machine {
            rig: &mut rig,
            front: &front,
        };
        clear(row, &mut machine).await;
        drop((victims, proxy, load));
        rig.settled(front).await;
    }
    all
}

/// All of them, or those whose name holds what `ROW` says.
fn rows() -> Vec<Row> {
    let only = std::env::var("ROW").unwrap_or_default();
    Row::ALL.into_iter().filter(|row| row.name().contains(&only)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_is_found_where_it_was_planted_and_nowhere_else() {
    let began = Instant::now();
    let (alone, loaded) = tokio::join!(column(false), column(true));
    let all: Vec<Said> = alone.into_iter().chain(loaded).collect();
    let mut table = format!("\n{} runs, {:.0} s\n", all.len(), began.elapsed().as_secs_f64());
    for said in &all {
        let _ = writeln!(table, "{}", said.line());
    }
    println!("{table}");
    let wrong: Vec<String> = all
        .iter()
        .filter(|said| said.wrong().is_some())
        .map(Said::told)
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.concat());
    for said in all.iter().filter(|said| said.is_example()) {
        let text = examples::told(&said.whole, &bin("tandem")).await;
        let unsaid = examples::unsaid(said.row, &text);
        let row = said.row.name();
        assert!(
            unsaid.is_empty(),
            "docs/diagnose.md shows of {row:?} {unsaid:#?}, but this was said:\n{text}"
        );
    }
}
