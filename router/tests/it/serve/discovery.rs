//! Engines that are found by a cluster's EndpointSlices: the set that requests see is the one that the API server told last.

use serde_json::json;
use tandem_telemetry::State;
use tandem_wire::proto::Role;
use tandem_wire::proto::finished::Cause;

use super::PATIENCE;
use super::apiserver::{ApiServer, Stands};
use super::client::events;
use super::engine::{self, Mock, Step};
use super::stack::Governed;

const PREFILLS: &str = "chat-p";
const DECODES: &str = "chat-d";

/// A router that finds its engines.
async fn finding(server: &ApiServer, flags: &[&str]) -> (Governed, tempfile::NamedTempFile) {
    let file = server.kubeconfig();
    let kubeconfig = format!("--kubeconfig={}", file.path().display());
    let mut all = vec!["--discover-prefill=chat-p", "--discover-decode=chat-d", &kubeconfig];
    all.extend(flags);
    (Governed::cold(&[], &[], &all).await, file)
}

async fn ready(rig: &Governed) {
    rig.stack.becomes(|state| *state == State::Ready).await;
}

/// Waits until these are the engines, by their state.
async fn engines(rig: &Governed, wanted: &[(&Mock, &str)]) {
    let began = std::time::Instant::now();
    let mut wanted: Vec<_> = wanted
        .iter()
        .map(|(mock, state)| (mock.endpoint(), (*state).to_owned()))
        .collect();
    wanted.sort();
    loop {
        let view = rig.get("/admin/endpoints").await;
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let all = view["endpoints"].as_array().unwrap().iter();
        let mut now: Vec<_> = all.map(|one| (text(&one["endpoint"]), text(&one["state"]))).collect();
        now.sort();
        if now == wanted {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "never {wanted:?}: {view:#}");
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

const PREFILLS_CURRENT: &str = "tandem_router_discovery_current{role=\"prefill\"}";
const DECODES_CURRENT: &str = "tandem_router_discovery_current{role=\"decode\"}";

#[tokio::test]
async fn an_engine_that_comes_is_not_found_or_one_that_leaves_loses_what_runs() {
    let server = ApiServer::start().await;
    let (prefill, old, new) = (engine::prefill(), engine::decode(), engine::decode());
    let (rig, _file) = finding(&server, &[]).await;
    rig.stack
        .becomes(|state| matches!(state, State::Waiting { reason } if reason.contains("service serving/chat-d has no endpoint")))
        .await;
    let none = rig.stack.client.chat(json!({})).await;
    assert_eq!((none.status, none.code().as_str()), (503, "no_decode_engine"));

    server.put("d-1", DECODES, old.addr, Stands::Ready);
    engines(&rig, &[(&old, "up")]).await;
    // prefill engines are looked for: that there is none now is not as if there were to be none
    let none = rig.stack.client.chat(json!({})).await;
    assert_eq!((none.status, none.code().as_str()), (503, "no_prefill_engine"));
    assert!(none.message().contains("service serving/chat-p"), "{}", none.message());
    server.put("p-1", PREFILLS, prefill.addr, Stands::Ready);
    ready(&rig).await;

    old.then(vec![
        Step::Started,
        Step::Spell("Par"),
        Step::Hold,
        Step::Spell("is"),
        Step::Finish(Cause::Stop),
    ]);
    let running = rig.stack.client.streaming(json!({})).await;
    old.called(1).await;
    assert_eq!(old.calls()[0].prefill.as_ref().unwrap().endpoint, prefill.endpoint());
    server.put("d-1", DECODES, old.addr, Stands::Terminating);
    server.put("d-2", DECODES, new.addr, Stands::Ready);
    engines(&rig, &[(&prefill, "up"), (&new, "up")]).await;
    for _ in 0..4 {
        assert_eq!(rig.stack.client.chat(json!({})).await.content(), "Paris");
    }
    assert_eq!((old.calls().len(), new.calls().len()), (1, 4));
    old.release();
    let running = events(running).await;
    assert!(running.done && running.text() == "Paris", "{running:?}");
    // nothing is shown of one that is no engine any more
    let text = rig.stack.metrics.encode().unwrap();
    assert!(!text.contains(&old.endpoint()) && text.contains(&new.endpoint()));
    rig.stack.at_rest(&[&prefill, &old, &new]).await;
}

#[tokio::test]
async fn what_is_told_while_no_watch_runs_is_missed() {
    let server = ApiServer::start().await;
    let decode = |_| {
        Mock::start(engine::Shape {
            role: Role::Unified,
            ..engine::Shape::default()
        })
    };
    let all: Vec<Mock> = (0..4).map(decode).collect();
    let (rig, _file) = finding(&server, &[]).await;
    server.put("d-0", DECODES, all[0].addr, Stands::Ready);
    engines(&rig, &[(&all[0], "up")]).await;
    for (at, expires) in [(1, false), (2, true)] {
        server.cut(expires);
        server.put("d-0", DECODES, all[at].addr, Stands::Ready);
        // the watch that would tell of it has ended: the list does
        server.cut(expires);
        engines(&rig, &[(&all[at], "up")]).await;
    }
    server.put("d-1", DECODES, all[3].addr, Stands::NotReady);
    server.put("d-1", DECODES, all[3].addr, Stands::Ready);
    engines(&rig, &[(&all[2], "up"), (&all[3], "up")]).await;
    server.delete("d-0");
    engines(&rig, &[(&all[3], "up")]).await;
}

#[tokio::test]
async fn without_the_api_server_the_router_forgets_its_engines() {
    for status in [403, 429, 500, 503] {
        let server = ApiServer::start().await;
        let (old, new) = (engine::unified(), engine::unified());
        server.put("d-1", DECODES, old.addr, Stands::Ready);
        let (rig, _file) = finding(&server, &[]).await;
        ready(&rig).await;
        rig.stack.reaches(PREFILLS_CURRENT, 1).await;
        server.fails(Some(status));
        server.put("d-1", DECODES, new.addr, Stands::Ready);
        rig.stack.reaches(DECODES_CURRENT, 0).await;
        assert!(
            rig.stack
                .sample("tandem_router_discovery_failures_total{role=\"decode\"}")
                > 0
        );
        assert_eq!(rig.stack.client.get("/readyz").await.status, 200);
        assert_eq!(rig.stack.client.chat(json!({})).await.content(), "Paris");
        engines(&rig, &[(&old, "up")]).await;
        server.fails(None);
        engines(&rig, &[(&new, "up")]).await;
        rig.stack.reaches(DECODES_CURRENT, 1).await;
        assert_eq!((old.calls().len(), new.calls().len()), (1, 0));
    }
}

#[tokio::test]
async fn an_api_server_that_fails_or_hangs_up_is_asked_without_a_pause() {
    let server = ApiServer::start().await;
    let (rig, _file) = finding(&server, &[]).await;
    rig.stack.reaches(DECODES_CURRENT, 1).await;
    server.fails(Some(500));
    let begin = std::time::Instant::now();
    rig.stack.reaches(DECODES_CURRENT, 0).await;
    let asked = server.asked();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    // for two Services 50 ms after the first failure at the earliest, then each time twice as late
    let (asked, seconds) = (server.asked() - asked, begin.elapsed().as_secs_f64());
    let most = 2.0 * (1.0 + (1.0 + seconds / 0.05).log2().ceil());
    assert!(f64::from(asked) <= most, "{asked} in {seconds} s");
}

#[tokio::test]
async fn a_request_is_lost_when_an_engine_leaves_and_others_stay() {
    let server = ApiServer::start().await;
    let (prefill, stays, leaves) = (engine::prefill(), engine::decode(), engine::decode());
    server.put("p-1", PREFILLS, prefill.addr, Stands::Ready);
    server.put("d-1", DECODES, stays.addr, Stands::Ready);
    let (rig, _file) = finding(&server, &["--policy=round-robin"]).await;
    ready(&rig).await;
    let asking: Vec<_> = (0..4)
        .map(|_| {
            let client = rig.stack.client.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    assert_eq!(client.chat(json!({})).await.content(), "Paris");
                }
            })
        })
        .collect();
    let mut came = 0;
    while !asking.iter().all(tokio::task::JoinHandle::is_finished) {
        let before = leaves.calls().len();
        server.put("d-2", DECODES, leaves.addr, Stands::Ready);
        let served = async {
            while leaves.calls().len() == before && !asking.iter().all(tokio::task::JoinHandle::is_finished) {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, served)
            .await
            .expect("the engine gets nothing");
        came += usize::from(leaves.calls().len() > before);
        server.put("d-2", DECODES, leaves.addr, Stands::Terminating);
        engines(&rig, &[(&prefill, "up"), (&stays, "up")]).await;
    }
    for request in asking {
        request.await.unwrap();
    }
    assert!(came > 0, "the engine never served");
    assert_eq!(stays.calls().len() + leaves.calls().len(), 200);
    rig.stack.at_rest(&[&prefill, &stays, &leaves]).await;
}
