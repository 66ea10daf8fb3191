//! The fixture itself: nodes that take what they have not, or a counter that misses writes, would prove nothing.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use serde_json::json;
use tandem_e2e::cluster::api::{Api, Client, Patch};
use tandem_e2e::cluster::audit::Request;
use tandem_e2e::cluster::fault::{Fault, Proxy};
use tandem_e2e::cluster::kubelet::{Life, Start};
use tandem_e2e::cluster::record::{Recorder, State};
use tandem_e2e::cluster::{self, Cluster, PATIENCE};
use tandem_e2e::eventually;

/// A namespace with nodes that only its pods are placed on: as many as `gpus`, each with so many.
pub(crate) async fn with_nodes(cluster: &Cluster, purpose: &str, gpus: &[u32]) -> (Client, String) {
    let client = cluster.admin();
    let name = cluster.namespace(purpose).await;
    for (index, gpus) in gpus.iter().enumerate() {
        let node = format!("{name}-{index}");
        cluster.kubelet().node(&node, *gpus, &[("test", name.as_str())]).await;
    }
    let selector =
        json!({"metadata": {"annotations": {"scheduler.alpha.kubernetes.io/node-selector": format!("test={name}")}}});
    let api: Api<Namespace> = Api::all(&client);
    api.patch(&name, Patch::Merge, &selector)
        .await
        .expect("the namespace's nodes");
    (client, name)
}

fn deployment(name: &str, replicas: u32, gpus: u32) -> Deployment {
    let deployment = json!({
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [{
                    "name": "main", "image": "nobody/pulls:this",
                    "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
                }]},
            },
        },
    });
    serde_json::from_value(deployment).expect("a deployment")
}

async fn create(client: &Client, namespace: &str, deployment: &Deployment) {
    let api: Api<Deployment> = Api::namespaced(client, namespace);
    api.create(deployment).await.expect("a deployment");
}

async fn ready(client: &Client, namespace: &str, name: &str, count: i32) {
    let api: Api<Deployment> = Api::namespaced(client, namespace);
    eventually("the deployment's ready pods", PATIENCE, async || {
        let found = api.get(name).await.map_err(|refused| refused.to_string())?;
        let ready = found.status.and_then(|status| status.ready_replicas).unwrap_or(0);
        (ready == count)
            .then_some(())
            .ok_or_else(|| format!("{ready} of {count}"))
    })
    .await;
}

async fn pods(client: &Client, namespace: &str) -> Vec<Pod> {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    api.list("").await
}

fn label(pod: &Pod) -> Option<&str> {
    pod.metadata.labels.as_ref()?.get("app").map(String::as_str)
}

fn condition(pod: &Pod, kind: &str) -> (String, String) {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let found = conditions
        .into_iter()
        .flatten()
        .find(|condition| condition.type_ == kind);
    found.map_or_else(Default::default, |found| {
        (found.status.clone(), found.reason.clone().unwrap_or_default())
    })
}

#[test]
fn pods_take_no_more_gpus_than_the_node_has() {
    cluster::test(async |cluster| {
        let (client, name) = with_nodes(cluster, "gpus", &[8]).await;
        create(&client, &name, &deployment("big", 3, 4)).await;
        ready(&client, &name, "big", 2).await;
        eventually("the third waits for GPUs", PATIENCE, async || {
            let all = pods(&client, &name).await;
            let waiting: Vec<_> = all.iter().map(|pod| condition(pod, "PodScheduled")).collect();
            let waits = |(status, reason): &&(String, String)| status == "False" && reason == "Unschedulable";
            (waiting.iter().filter(waits).count() == 1)
                .then_some(())
                .ok_or_else(|| format!("{waiting:?}"))
        })
        .await;
    });
}

#[test]
fn a_pod_follows_its_script() {
    cluster::test(async |cluster| {
        let (client, name) = with_nodes(cluster, "script", &[0]).await;
        cluster.kubelet().script(&name, |pod| match label(pod) {
            Some("missing") => Life {
                start: Start::ImageMissing,
                ..Life::default()
            },
            Some("loop") => Life {
                start: Start::CrashLoop,
                ..Life::default()
            },
            Some("clings") => Life {
                terminating: Duration::from_hours(1),
                ..Life::default()
            },
            _ => Life::default(),
        });
        for app in ["missing", "loop", "clings", "plain"] {
            create(&client, &name, &deployment(app, 1, 0)).await;
        }
        ready(&client, &name, "clings", 1).await;
        ready(&client, &name, "plain", 1).await;
        let of = async |app: &str| {
            pods(&client, &name)
                .await
                .into_iter()
                .find(|pod| label(pod) == Some(app))
        };
        for (app, reason) in [("missing", "ImagePullBackOff"), ("loop", "CrashLoopBackOff")] {
            eventually(app, PATIENCE, async || {
                let pod = of(app).await.ok_or("no pod")?;
                let containers = pod
                    .status
                    .and_then(|status| status.container_statuses)
                    .unwrap_or_default();
                let waiting = containers
                    .first()
                    .and_then(|one| one.state.as_ref()?.waiting.as_ref()?.reason.clone());
                (waiting.as_deref() == Some(reason))
                    .then_some(())
                    .ok_or_else(|| format!("{waiting:?}"))
            })
            .await;
        }

        let plain = of("plain").await.expect("a pod");
        cluster.kubelet().crash(&plain);
        ready(&client, &name, "plain", 0).await;

        let api: Api<Deployment> = Api::namespaced(&client, &name);
        for app in ["plain", "clings"] {
            api.delete(app, &json!({"propagationPolicy": "Background"}))
                .await
                .expect("a deletion");
        }
        eventually("the one pod goes", PATIENCE, async || {
            of("plain").await.map_or(Ok(()), |pod| {
                Err(format!("{} is still there", pod.metadata.name.unwrap_or_default()))
            })
        })
        .await;
        eventually("the other is Terminating", PATIENCE, async || {
            let pod = of("clings").await.expect("a pod that takes an hour to end");
            pod.metadata
                .deletion_timestamp
                .map(|_| ())
                .ok_or_else(|| "not yet".to_owned())
        })
        .await;
    });
}

#[test]
fn a_node_without_heartbeats_loses_its_pods_and_a_restored_one_serves_again() {
    cluster::test(async |cluster| {
        let (client, name) = with_nodes(cluster, "lost", &[0]).await;
        create(&client, &name, &deployment("app", 1, 0)).await;
        ready(&client, &name, "app", 1).await;
        let node = format!("{name}-0");
        cluster.kubelet().lose(&node);
        ready(&client, &name, "app", 0).await;
        let nodes: Api<Node> = Api::all(&client);
        let lost = nodes.get(&node).await.expect("the node");
        let conditions = lost.status.and_then(|status| status.conditions).unwrap_or_default();
        assert!(
            conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "Unknown")
        );
        eventually("its pod is to go", PATIENCE, async || {
            let all = pods(&client, &name).await;
            all.iter()
                .find(|pod| pod.metadata.deletion_timestamp.is_some())
                .map(|_| ())
                .ok_or_else(|| format!("{} pods, none Terminating", all.len()))
        })
        .await;
        cluster.kubelet().restore(&node).await;
        ready(&client, &name, "app", 1).await;
        eventually("the lost pod has gone", PATIENCE, async || {
            let all = pods(&client, &name).await;
            (all.len() == 1)
                .then_some(())
                .ok_or_else(|| format!("{} pods", all.len()))
        })
        .await;
    });
}

#[test]
fn each_write_of_a_user_is_counted_and_no_read() {
    cluster::test(async |cluster| {
        let name = cluster.namespace("audit").await;
        let client = cluster.account(&name, "writer", "edit").await;
        let user = format!("system:serviceaccount:{name}:writer");
        let api: Api<ConfigMap> = Api::namespaced(&client, &name);
        let map = |name: &str| serde_json::from_value::<ConfigMap>(json!({"metadata": {"name": name}})).expect("a map");
        for index in 0..5 {
            let created = api.create(&map(&format!("m-{index}"))).await;
            created.expect("a map");
            api.list("").await;
        }
        api.create(&map("m-0")).await.expect_err("it is there already");
        let counted = |kind: fn(&Request) -> bool| cluster.audit().of(&user).into_iter().filter(kind).count();
        // An answer can be here before its line is in the log.
        eventually("eleven requests", PATIENCE, async || {
            let all = counted(|_| true);
            (all == 11).then_some(()).ok_or_else(|| format!("{all}"))
        })
        .await;
        assert_eq!(counted(Request::writes), 6);
        let refused = cluster
            .audit()
            .writes_of(&user)
            .iter()
            .map(|one| one.response_status.code)
            .max();
        assert_eq!(refused, Some(409));
    });
}

/// Set for the child of the test below: it starts a cluster, says where, and waits to be killed.
const HOLD: &str = "TANDEM_TEST_HOLD_A_CLUSTER";

#[test]
fn nothing_is_left_of_a_test_that_is_killed() {
    if std::env::var_os(HOLD).is_some() {
        cluster::test(async |cluster| {
            println!("\nHELD {}", cluster.dir().display());
            std::future::pending::<()>().await;
        });
    }
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args([
            "--exact",
            "--nocapture",
            "fixtures::nothing_is_left_of_a_test_that_is_killed",
        ])
        .env(HOLD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let held = lines
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("HELD ").map(str::to_owned));
    let dir = held.expect("the child has started a cluster");
    // etcd, API server, controllers, scheduler, and a proxy for each of two users
    assert_eq!(processes_of(&dir), 6);
    child.kill().expect("kill -9");
    child.wait().expect("wait");
    let begin = std::time::Instant::now();
    while Path::new(&dir).exists() || processes_of(&dir) > 0 {
        assert!(begin.elapsed() < PATIENCE, "{dir} or its processes are still there");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Processes whose program lies in `dir`.
fn processes_of(dir: &str) -> usize {
    let all = std::fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
    all.filter(|entry| std::fs::read(entry.path().join("cmdline")).is_ok_and(|line| line.starts_with(dir.as_bytes())))
        .count()
}

#[test]
fn the_proxy_does_to_a_request_what_it_is_told() {
    cluster::test(async |cluster| {
        let name = cluster.namespace("faults").await;
        let proxy = Proxy::start(cluster.plain(&cluster.dir().join("pki/admin.kubeconfig"))).await;
        let http = reqwest::Client::new();
        let url = |map: &str| format!("{}/api/v1/namespaces/{name}/configmaps{map}", proxy.server());
        let make = async |map: &str| {
            let body = json!({"metadata": {"name": map}}).to_string();
            let sent = http.post(url("")).header("content-type", "application/json").body(body);
            sent.send().await.map(|answer| answer.status().as_u16())
        };
        let client = cluster.admin();
        let maps: Api<ConfigMap> = Api::namespaced(&client, &name);
        assert_eq!(make("passed").await.expect("an answer"), 201);
        proxy.rule(|_| Fault::Status(429));
        assert_eq!(make("refused").await.expect("an answer"), 429);
        proxy.rule(|_| Fault::Drop);
        make("dropped").await.expect_err("no answer");
        for map in ["refused", "dropped"] {
            assert_eq!(maps.get(map).await.expect_err("it was never asked for").code, 404);
        }
        proxy.rule(|_| Fault::Unheard);
        make("unheard").await.expect_err("no answer");
        maps.get("unheard").await.expect("it was made all the same");
        proxy.rule(|seen| if seen.writes() { Fault::Hold } else { Fault::None });
        let mut held = proxy.held();
        tokio::select! {
            _ = make("held") => panic!("an answer"),
            held = held.changed() => held.expect("the proxy is there"),
        }
        maps.get("held").await.expect("it was made all the same");
        proxy.rule(|_| Fault::None);
        assert_eq!(proxy.seen().iter().filter(|seen| seen.writes()).count(), 5);

        // A watch is open until it is cut.
        let open = http.get(url("?watch=true&resourceVersion=0")).send().await;
        let mut events = open.expect("a watch").bytes_stream();
        events
            .next()
            .await
            .expect("an event")
            .expect("of the maps that are there");
        proxy.cut_watches();
        loop {
            match events.next().await {
                Some(Ok(_)) => {}
                Some(Err(_)) => break,
                None => panic!("the watch ended well"),
            }
        }
    });
}

#[test]
fn the_recorder_misses_no_event() {
    cluster::test(async |cluster| {
        let name = cluster.namespace("record").await;
        crate::crd(cluster).await;
        let client = cluster.admin();
        let maps: Api<ConfigMap> = Api::namespaced(&client, &name);
        let recorder = Recorder::start(&client, &name).await;
        let map = json!({"metadata": {"name": "m"}, "data": {"count": "0"}});
        maps.create(&serde_json::from_value(map).expect("a map"))
            .await
            .expect("a map");
        for count in 1..=20 {
            let patch = json!({"data": {"count": count.to_string()}});
            maps.patch("m", Patch::Merge, &patch).await.expect("an edit");
        }
        maps.delete("m", &json!({})).await.expect("a deletion");
        let end = json!({"metadata": {"name": "end"}});
        maps.create(&serde_json::from_value(end).expect("a map"))
            .await
            .expect("a map");
        let ended = |state: &State| {
            state
                .get("configmaps", "end")
                .map(|_| ())
                .ok_or_else(|| "not yet".to_owned())
        };
        recorder.until("the last event", PATIENCE, ended).await;
        let events = recorder.events();
        let of_it = events.iter().filter(|event| event.object["metadata"]["name"] == "m");
        let counts: Vec<_> = of_it
            .map(|event| (event.object["data"]["count"].clone(), event.gone))
            .collect();
        let mut wanted: Vec<_> = (0..=20).map(|count| (json!(count.to_string()), false)).collect();
        wanted.push((json!("20"), true));
        assert_eq!(counts, wanted);
    });
}
