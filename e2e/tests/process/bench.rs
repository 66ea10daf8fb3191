//! `tandem bench chat` against a whole stack.

use std::process::Command;

use serde_json::Value;
use tandem_e2e::bin;
use tandem_e2e::stack::{Pair, Router};

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_chats_at_a_time_all_complete() {
    let pair = Pair::start(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let output = tokio::task::spawn_blocking(move || {
        let mut command = Command::new("timeout");
        command
            .arg("280")
            .arg(bin("tandem"))
            .args(["bench", "chat", "--concurrency=16", "--json"]);
        command.args([format!("--url={}", router.url()), "--requests=48".into()]);
        (command.output().expect("timeout(1) runs"), router)
    });
    let (output, _router) = output.await.expect("no panic");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    println!("{report:#}");
    assert_eq!(report["failed"], 0, "{report:#}");
    assert_eq!(report["completed"], 48, "{report:#}");
    assert_eq!(report["short_answers"], 0, "{report:#}");
    pair.idle(std::time::Duration::from_secs(10)).await;
}
