//! `tandem diagnose` and `tandem capture` of what `tandem up` runs.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tandem_e2e::{bin, probe};

use crate::up::{MODEL, Up};

const KEY: &str = "sk-planted-key-0123456789";
const WRONG_KEY: &str = "sk-wrong-key-9876543210";
const PROMPT: &str = "the planted words of a prompt";

/// Runs a command of the program to its end.
fn tandem(args: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("120").arg(bin("tandem")).args(args);
    command.output().expect("timeout(1) runs")
}

async fn post(up: &Up, key: &str, body: &Value) -> u16 {
    let url = format!("http://127.0.0.1:{}/v1/chat/completions", up.http);
    let answer = probe::http().post(url).bearer_auth(key).json(body).send().await;
    answer.expect("an answer").status().as_u16()
}

/// With the most that our own programs and their libraries write at that level.
#[tokio::test(flavor = "multi_thread")]
async fn a_capture_holds_a_prompt_or_a_secret_or_is_judged_otherwise_later() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("keys"), KEY).expect("a file");
    let flags = [
        format!("--api-key-file={}", at("keys")),
        format!("--log-dir={}", at("logs")),
    ];
    let mut up = Up::launch_logging("debug", &flags.each_ref().map(String::as_str));
    up.ready().await;
    let chat = |messages: Value| json!({"model": MODEL, "messages": messages, "max_tokens": 4});
    let good = chat(json!([{"role": "user", "content": PROMPT}]));
    assert_eq!(post(&up, KEY, &good).await, 200);
    assert_eq!(post(&up, WRONG_KEY, &good).await, 401);
    // errors that quote what is wrong
    assert_eq!(post(&up, KEY, &chat(json!(PROMPT))).await, 400);
    assert_eq!(post(&up, KEY, &json!({"model": PROMPT, "messages": []})).await, 404);

    let (state, capture) = (up.state_dir(), at("capture.tar"));
    let output = tandem(&["capture", "-o", &capture, "--state-dir", &state, "--rounds=2"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let token = std::fs::read_to_string(Path::new(&state).join("admin-token")).expect("a token");
    let bytes = std::fs::read(&capture).expect("an archive");
    let text = String::from_utf8_lossy(&bytes);
    for planted in [KEY, WRONG_KEY, PROMPT, token.trim()] {
        assert!(!text.contains(planted), "the archive holds {planted:?}");
    }
    for part in [
        "tandem-capture/logs/router.log",
        "tandem-capture/logs/prefill-0.log",
        "tandem-capture/metrics/decode-0.txt",
        "tandem-capture/router/connections.json",
        "tandem-capture/router/knobs.json",
        "tandem-capture/manifest.json",
        "tandem-capture/versions.json",
        "tandem_engine_inflight",
        "tandem_router_requests",
    ] {
        assert!(text.contains(part), "the archive lacks {part}");
    }

    // nobody but the probes came meanwhile, and those have no key: the badge is enough
    let now = tandem(&["diagnose", "--state-dir", &state, "--json"]);
    let later = tandem(&["diagnose", "--from", &capture, "--json"]);
    let finding = |output: &Output| {
        let judged: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let verdict = &judged["verdict"];
        (
            output.status.code(),
            verdict["finding"].clone(),
            verdict["layers"][1]["standing"].clone(),
        )
    };
    let expected = (Some(4), json!("no_fault_inside"), json!("excluded"));
    assert_eq!(finding(&now), expected, "{}", String::from_utf8_lossy(&now.stdout));
    assert_eq!(finding(&later), expected, "{}", String::from_utf8_lossy(&later.stdout));

    // what a client sees, measured; a capture in the place of another is refused
    let via = format!("--via=http://127.0.0.1:{}", up.http);
    let output = tandem(&["diagnose", "--state-dir", &state, &via]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.ends_with("verdict: no fault seen\n"), "{said}");
    let output = tandem(&["capture", "-o", &capture, "--state-dir", &state]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("choose another file with -o"),
        "{said}"
    );
}
