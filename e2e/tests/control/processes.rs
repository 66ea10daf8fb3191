//! The processes of pods. What speaks the contracts without computing anything has to behave as the shipped binary does: each of
//! these tests runs both.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use serde_json::{Value, json};
use tandem_e2e::cluster::api::{Api, Client, Patch};
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::peer::Script;
use tandem_e2e::cluster::{self, Cluster, PATIENCE};
use tandem_e2e::probe::Metrics;
use tandem_e2e::{client, eventually};
use tandem_operator::render::ports;
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::{EngineInfo, Knobs, SetKnobsRequest};

use crate::fixtures::with_nodes;
use crate::{children, crd};

/// Children of a deployment, applied without an operator.
async fn apply_all(cluster: &Cluster, purpose: &str, runs: Runs) -> (Client, String) {
    crd(cluster).await;
    let (client, namespace) = with_nodes(cluster, purpose, &[8]).await;
    cluster.kubelet().script(&namespace, move |_| Life {
        runs,
        ..Life::default()
    });
    children::models(&client, &namespace).await;
    let object = children::create(&client, &namespace).await;
    for child in children::children(&object) {
        children::apply(&client, &child).await;
    }
    (client, namespace)
}

/// The one ready pod of a role.
pub(crate) async fn ready(client: &Client, namespace: &str, role: &str) -> Pod {
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    eventually("a ready pod", PATIENCE, async || {
        let all = pods.list(&format!("tandem.dev/role={role}")).await;
        let ready = |pod: &&Pod| {
            let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions
                .into_iter()
                .any(|one| one.type_ == "Ready" && one.status == "True")
        };
        all.iter()
            .find(ready)
            .cloned()
            .ok_or_else(|| format!("{} pods", all.len()))
    })
    .await
}

fn address(pod: &Pod) -> &str {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref());
    ip.expect("an address")
}

pub(crate) async fn info(pod: &Pod) -> EngineInfo {
    let endpoint = format!("{}:{}", address(pod), ports::CONTROL);
    client::info(&mut client::connect(&endpoint).await).await
}

async fn set_max_running(pod: &Pod, boot_id: &[u8], token: &str, max_running: u32) -> Result<Knobs, tonic::Status> {
    let endpoint = format!("http://{}:{}", address(pod), ports::ADMIN);
    let mut client = AdminClient::connect(endpoint).await.expect("its admin port");
    let mut request = tonic::Request::new(SetKnobsRequest {
        boot_id: boot_id.to_vec().into(),
        knobs: Some(Knobs {
            max_running: Some(max_running),
            ..Knobs::default()
        }),
    });
    let bearer = format!("Bearer {token}").parse().expect("a header");
    request.metadata_mut().insert("authorization", bearer);
    client.set_knobs(request).await.map(tonic::Response::into_inner)
}

async fn token(client: &Client, namespace: &str) -> String {
    let secrets: Api<Secret> = Api::namespaced(client, namespace);
    let secret = secrets.get("chat-admin-token").await.expect("the token");
    let data = secret.data.expect("its data");
    String::from_utf8(data["admin-token"].0.clone()).expect("text")
}

fn an_engine_takes_knobs_by_call_and_reads_the_newest_when_it_starts_again(purpose: &str, runs: Runs) {
    cluster::test(async |cluster| {
        let (client, namespace) = apply_all(cluster, purpose, runs).await;
        let pod = ready(&client, &namespace, "decode").await;
        let begun = info(&pod).await;
        let max_running = |info: &EngineInfo| info.knobs.and_then(|knobs| knobs.max_running);
        assert_eq!(max_running(&begun), Some(32), "what the config map holds");

        let refused = set_max_running(&pod, &begun.boot_id, "another", 7).await;
        assert_eq!(
            refused.expect_err("no order without the token").code(),
            tonic::Code::Unauthenticated
        );
        let token = token(&client, &namespace).await;
        let refused = set_max_running(&pod, &[9; 16], &token, 7).await;
        refused.expect_err("another incarnation is meant");
        let now = set_max_running(&pod, &begun.boot_id, &token, 7)
            .await
            .expect("an order");
        assert_eq!(now.max_running, Some(7));
        assert_eq!(max_running(&info(&pod).await), Some(7));

        let maps: Api<ConfigMap> = Api::namespaced(&client, &namespace);
        let edit = json!({"data": {"max-running": "9"}});
        let edited = maps.patch("chat-decode-knobs", Patch::Merge, &edit).await;
        edited.expect("an edit");
        cluster.kubelet().kill(&pod);
        let again = eventually("another incarnation", PATIENCE, async || {
            let pod = ready(&client, &namespace, "decode").await;
            let count = pod
                .status
                .iter()
                .flat_map(|status| status.container_statuses.iter().flatten());
            let restarts: i32 = count.map(|container| container.restart_count).sum();
            if restarts == 1 {
                Ok(pod)
            } else {
                Err(format!("{restarts} restarts"))
            }
        })
        .await;
        let again = info(&again).await;
        assert_ne!(again.boot_id, begun.boot_id);
        assert_eq!(max_running(&again), Some(9), "what the config map holds now");
    });
}

#[test]
fn a_peer_takes_knobs_by_call_and_reads_the_newest_when_it_starts_again() {
    an_engine_takes_knobs_by_call_and_reads_the_newest_when_it_starts_again("peers", Runs::Peer(Script::default()));
}

#[test]
fn a_real_engine_takes_knobs_by_call_and_reads_the_newest_when_it_starts_again() {
    an_engine_takes_knobs_by_call_and_reads_the_newest_when_it_starts_again("real", Runs::Real);
}

/// With what the operator renders and nothing else: arguments, Services, and the rights of the router's account.
#[test]
fn real_processes_find_each_other_and_answer() {
    cluster::test(async |cluster| {
        let (client, namespace) = apply_all(cluster, "whole", Runs::Real).await;
        let pod = ready(&client, &namespace, "router").await;
        let body = json!({"model": "m", "prompt": "One, two,", "max_tokens": 4, "temperature": 0});
        let url = format!("http://{}:{}/v1/completions", address(&pod), ports::HTTP);
        let request = reqwest::Client::new().post(url).bearer_auth("k".repeat(32)).json(&body);
        let answer = request.send().await.expect("an answer");
        let (status, text) = (answer.status().as_u16(), answer.text().await.expect("its text"));
        assert_eq!(status, 200, "{text}");
        // the prompt was read by one engine, and its KV went to the other
        let prefill = ready(&client, &namespace, "prefill").await;
        let metrics = Metrics::of(&format!("{}:{}", address(&prefill), ports::OPS)).await;
        assert!(metrics.sum("tandem_engine_tokens_total", &["kind=\"prompt\""]) > 0.0);
    });
}

#[test]
fn a_router_finds_ready_engines_and_acknowledges_orders() {
    cluster::test(async |cluster| {
        let (client, namespace) = apply_all(cluster, "routers", Runs::default()).await;
        let pod = ready(&client, &namespace, "router").await;
        let token = token(&client, &namespace).await;
        let http = reqwest::Client::new();
        let call = async |token: &str, path: &str, body: Option<Value>| -> (u16, Value) {
            let url = format!("http://{}:{}/admin/{path}", address(&pod), ports::ADMIN);
            let request = match body {
                Some(body) => http.post(url).json(&body),
                None => http.get(url),
            };
            let answer = request.bearer_auth(token).send().await.expect("an answer");
            (answer.status().as_u16(), answer.json().await.expect("JSON"))
        };
        let (status, _) = call("another", "traffic", Some(json!({"mode": "reject"}))).await;
        assert_eq!(status, 401);
        let (_, standing) = call(&token, "traffic", None).await;
        assert_eq!(standing["mode"], "admit");
        let order = json!({"mode": "queue", "remaining_ms": 60_000});
        let (status, acknowledged) = call(&token, "traffic", Some(order)).await;
        assert_eq!((status, &acknowledged["mode"]), (200, &json!("queue")));
        assert!(
            acknowledged["remaining_ms"]
                .as_i64()
                .is_some_and(|left| left > 0 && left <= 60_000)
        );
        let (_, knobs) = call(&token, "knobs", Some(json!({"queue_ms": 5000}))).await;
        assert_eq!(
            (&knobs["queue_ms"], &knobs["policy"]),
            (&json!(5000), &json!("least-loaded"))
        );

        let engines: BTreeMap<String, String> = [
            ("prefill", ready(&client, &namespace, "prefill").await),
            ("decode", ready(&client, &namespace, "decode").await),
        ]
        .into_iter()
        .map(|(role, pod)| (role.to_owned(), format!("{}:{}", address(&pod), ports::CONTROL)))
        .collect();
        eventually("both engines are known", PATIENCE, async || {
            let (_, found) = call(&token, "endpoints", None).await;
            let found: BTreeMap<String, String> = found["endpoints"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|one| {
                    let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
                    (text("side"), text("endpoint"))
                })
                .collect();
            if found == engines {
                Ok(())
            } else {
                Err(format!("{found:?}"))
            }
        })
        .await;
        let (status, probed) = call(&token, "probe", Some(json!({"timeout_ms": 60_000}))).await;
        assert_eq!(status, 200, "{probed}");
        let number = |name: &str| probed[name].as_u64().expect("a number");
        assert_eq!(number("moved_tokens"), number("prompt_tokens"));
        assert_eq!((number("computed_tokens"), number("completion_tokens")), (0, 1));
    });
}
