//! `tandem bench chat` against a server whose faults are known.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::Value;

struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start(model: &str) -> Self {
        Self::start_with(&[model])
    }

    fn start_with(args: &[&str]) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/openai_server.py");
        let mut process = Command::new("python3")
            .arg(script)
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        Self {
            process,
            port: line.trim().parse().unwrap(),
        }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/v1", self.port)
    }

    fn bench(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
        command.args(["bench", "chat", "--base-url", &self.url()]);
        command.args(args).output().unwrap()
    }

    /// Conversations: exit code, report and what was said meanwhile.
    fn multiround(&self, args: &[&str]) -> (Option<i32>, Value, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
        command.args(["bench", "multiround", "--json", "--base-url", &self.url()]);
        let output = command.args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
        (output.status.code(), report, said)
    }

    fn report(&self, args: &[&str]) -> (Option<i32>, Value) {
        let output = self.bench(&[args, &["--json"]].concat());
        let report = serde_json::from_slice(&output.stdout);
        (
            output.status.code(),
            report.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr))),
        )
    }

    fn stats(&self) -> Value {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(stream, "GET /stats HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn prompts_and_answers_have_the_lengths_asked_for_and_the_load_its_concurrency() {
    let server = Server::start("fine");
    let args = [
        "--concurrency",
        "8",
        "--requests",
        "24",
        "--prompt-tokens",
        "100",
        "--output-tokens",
        "20",
    ];
    let (code, report) = server.report(&args);
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!((&report["completed"], &report["failed"]), (&24.into(), &0.into()));
    assert_eq!(report["prompt_tokens"], serde_json::json!({"min": 100, "max": 100}));
    assert_eq!(report["output_tokens"], serde_json::json!({"min": 20, "max": 20}));
    assert_eq!(report["short_answers"], 0);
    assert_eq!(server.stats()["max_in_flight"], 8);
    let ms = |row: &str, column: &str| report[row][column].as_f64().unwrap();
    // The server sleeps 5 ms before each token: 20 of them in all, one before the first text.
    assert!(
        ms("ttft_ms", "p50") >= 5.0 && ms("total_ms", "p50") >= 100.0,
        "{report:#}"
    );
    assert!(ms("inter_token_ms", "p50") >= 4.0, "{report:#}");
    assert!(ms("ttft_ms", "p50") < ms("total_ms", "p50"));
    let rate = report["output_tokens_per_second"].as_f64().unwrap();
    let expected = 24.0 * 20.0 / report["wall_seconds"].as_f64().unwrap();
    assert!((rate - expected).abs() < 0.01 * expected, "{report:#}");
    let table = String::from_utf8(server.bench(&["--output-tokens", "4"]).stdout).unwrap();
    assert!(
        table.contains("completed 4   failed 0") && table.contains("output tokens/s"),
        "{table}"
    );
}

#[test]
fn a_failed_request_is_counted_by_its_reason_and_fails_the_run() {
    let args = ["--concurrency", "2", "--requests", "9", "--output-tokens", "2"];
    let (code, report) = Server::start("flaky").report(&args);
    assert_eq!(code, Some(1), "{report:#}");
    assert_eq!((&report["completed"], &report["failed"]), (&6.into(), &3.into()));
    assert_eq!(report["failures"], serde_json::json!({"503: queue is full": 3}));

    let (code, report) = Server::start("cut").report(&args);
    assert_eq!((code, &report["failed"]), (Some(1), &9.into()), "{report:#}");
    assert!(report["failures"].to_string().contains("cut off"), "{report:#}");
}

#[test]
fn a_server_that_never_answers_ends_the_run_by_its_deadline() {
    let began = Instant::now();
    let (code, report) = Server::start("silent").report(&["--requests", "2", "--timeout-seconds", "1"]);
    assert_eq!((code, &report["failed"]), (Some(1), &2.into()), "{report:#}");
    assert!(
        report["failures"].to_string().contains("not complete after 1 s"),
        "{report:#}"
    );
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_server_without_ignore_eos_is_loaded_and_its_short_answers_are_told() {
    let (code, report) = Server::start("strict").report(&["--requests", "3", "--output-tokens", "8"]);
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(
        (&report["short_answers"], &report["output_tokens"]["max"]),
        (&3.into(), &4.into())
    );
}

#[test]
fn the_server_may_also_be_named_by_url() {
    let url = "--url=http://127.0.0.1:1";
    let output = Command::new(env!("CARGO_BIN_EXE_tandem"))
        .args(["bench", "chat", url])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("error: http://127.0.0.1:1"), "{text}");
}

#[test]
fn nobody_there_and_impossible_lengths_are_plain_errors() {
    let mut server = Server::start("fine");
    let output = server.bench(&["--prompt-tokens", "20"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("too short") && text.contains("--prompt-tokens 31 or more"),
        "{text}"
    );

    server.process.kill().unwrap();
    server.process.wait().unwrap();
    let output = server.bench(&[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.starts_with("error: http://127.0.0.1:") && text.contains("refused"),
        "{text}"
    );
}

#[test]
fn a_server_with_keys_is_asked_without_or_by_a_broken_file() {
    let server = Server::start("locked");
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    let flag = format!("--api-key-file={}", keys.display());
    std::fs::write(&keys, "# of the tests\nsk-of-the-tests-0123\n").unwrap();
    let (code, report) = server.report(&["--requests=3", "--output-tokens=2", &flag]);
    assert_eq!((code, &report["completed"]), (Some(0), &Value::from(3)), "{report}");
    for (content, args, said) in [
        ("sk-of-the-tests-0124\n", &[flag.as_str()][..], "401: no such key"),
        ("", &[], "401: no such key"),
        ("\n", &[&flag], "it holds no key; write one on each line"),
    ] {
        std::fs::write(&keys, content).unwrap();
        let output = server.bench(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(said), "{stderr}");
        assert!(!stderr.contains("sk-"), "{stderr}");
    }
}

/// `field` of each round, by session and round.
fn rounds<'a>(side: &'a Value, field: &str) -> Vec<&'a str> {
    let rounds = side["rounds"].as_array().unwrap();
    rounds
        .iter()
        .map(|round| round[field].as_str().unwrap_or("-"))
        .collect()
}

#[test]
fn a_conversation_is_held_on_many_connections_or_does_not_grow() {
    let (code, report, said) = Server::start("kept").multiround(&["--sessions=2", "--rounds=3"]);
    let side = &report["sides"][0];
    assert_eq!(
        (code, &side["passed"], &side["asked"]),
        (Some(0), &6.into(), &6.into()),
        "{report:#} {said}"
    );
    assert_eq!(
        rounds(side, "connection"),
        ["new", "reused", "reused"].repeat(2),
        "{report:#}"
    );
    let tokens = |at: usize| side["rounds"][at]["prompt_tokens"].as_u64().unwrap();
    // a question of 32 words and an answer of 32 come on top each time
    assert!(tokens(1) >= tokens(0) + 64 && tokens(2) >= tokens(1) + 64, "{report:#}");
}

#[test]
fn a_proxy_that_holds_answers_on_reused_connections_looks_well() {
    let (held, direct) = (Server::start("held"), Server::start("kept"));
    let hasty = [
        "--model=any",
        "--sessions=2",
        "--rounds=4",
        "--report-seconds=1",
        "--hang-seconds=6",
    ];
    let compare = format!("--compare={}", direct.url());
    let (code, report, said) = held.multiround(&[&hasty[..], &[&compare]].concat());
    assert_eq!(code, Some(1), "{report:#}");
    let (through, past) = (&report["sides"][0], &report["sides"][1]);
    assert_eq!(
        rounds(through, "status"),
        ["passed", "passed", "hung", "not_run"].repeat(2),
        "{report:#}"
    );
    assert_eq!(rounds(past, "status"), ["passed"; 8], "{report:#}");
    assert!(said.contains("session 2, round 3: nothing for "), "{said}");

    let (code, report, _) = held.multiround(&[&hasty[..], &["--fresh-connections"]].concat());
    let side = &report["sides"][0];
    assert_eq!(
        (code, rounds(side, "status")),
        (Some(0), vec!["passed"; 8]),
        "{report:#}"
    );
    assert_eq!(rounds(side, "connection"), ["new"; 8], "{report:#}");
}

#[test]
fn a_server_with_tls_is_not_loaded_or_believed_whoever_signed_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let authority = || {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let (ours, other) = (authority(), authority());
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let cert = params.signed_by(&key, &ours).unwrap();
    let pair = write("pair.pem", cert.pem() + &key.serialize_pem());
    let (ours, other) = (write("ours.pem", ours.pem()), write("other.pem", other.pem()));
    let server = Server::start_with(&["kept", &pair]);
    let run = |ca: &[&str], url: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
        command.args([
            "bench",
            "multiround",
            "--json",
            "--sessions=1",
            "--rounds=3",
            "--base-url",
            url,
        ]);
        let output = command.args(ca).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (
            output.status.code(),
            serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default(),
            said,
        )
    };
    let url = format!("https://localhost:{}", server.port);
    let (code, report, said) = run(&["--ca", &ours], &url);
    assert_eq!(code, Some(0), "{report:#} {said}");
    assert_eq!(rounds(&report["sides"][0], "connection"), ["new", "reused", "reused"]);
    for (ca, url) in [
        (&["--ca", other.as_str()][..], &url),
        (&["--ca", &ours], &format!("https://127.0.0.1:{}", server.port)),
        (&[], &url),
    ] {
        let (code, _, said) = run(ca, url);
        assert_eq!(code, Some(1), "{ca:?} {url}");
        assert!(said.contains("TLS: ") && said.contains("--ca FILE"), "{said}");
    }
    let (_, _, said) = run(&["--ca", &pair.replace("pair", "none")], &url);
    assert!(
        said.contains("--ca") && said.contains("none.pem: it cannot be read"),
        "{said}"
    );
}
