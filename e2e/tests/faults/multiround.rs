//! `tandem bench multiround` through a proxy that holds answers, and past it.

use serde_json::Value;
use tandem_e2e::bin;
use tandem_e2e::planting::list;
use tandem_e2e::proxy::{Doorway, Plant, Proxy};
use tandem_e2e::stack::MODEL;
use tokio::process::Command;

use crate::rig::Rig;

const SESSIONS: usize = 4;
const ROUNDS: usize = 6;
/// The first request of a connection whose answer the proxy holds.
const HELD: usize = 3;

#[tokio::test(flavor = "multi_thread")]
async fn conversations_hang_behind_a_proxy_that_holds_and_pass_beside_it() {
    let rig = Rig::start().await;
    let front = rig.front().await;
    let proxy = Proxy::start(front.door.addr(), Plant::Hold(HELD as u64)).await;
    let args = [
        "bench".to_owned(),
        "multiround".to_owned(),
        "--json".to_owned(),
        format!("--base-url={}", proxy.url()),
        format!("--ca={}", proxy.ca().display()),
        format!("--compare={}", front.router.url()),
        format!("--model={MODEL}"),
        format!("--sessions={SESSIONS}"),
        format!("--rounds={ROUNDS}"),
        "--output-tokens=8".to_owned(),
        "--report-seconds=2".to_owned(),
        "--hang-seconds=15".to_owned(),
    ];
    let output = Command::new(bin("tandem")).args(args).kill_on_drop(true).output().await;
    let output = output.expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(output.status.code(), Some(1), "{report:#}");
    let [through, past] = list(&report["sides"]) else {
        panic!("{report:#}")
    };
    assert_eq!(
        (&past["asked"], &past["passed"]),
        (&24.into(), &24.into()),
        "{report:#}"
    );
    assert_eq!(list(&through["rounds"]).len(), SESSIONS * ROUNDS, "{report:#}");
    for turn in list(&through["rounds"]) {
        let round = turn["round"].as_u64().expect("a number") as usize;
        let expected = match round {
            _ if round < HELD => "passed",
            HELD => "hung",
            _ => "not_run",
        };
        assert_eq!(turn["status"], expected, "{turn}");
        if round == 2 {
            assert_eq!(turn["connection"], "reused", "{turn}");
        }
    }
    // while it happened, not only at the end
    assert!(said.contains(&format!("round {HELD}")), "{said}");
    drop(proxy);
    rig.settled(front).await;
}
