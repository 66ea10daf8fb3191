//! The router finds its engines by the EndpointSlices of a real API server, with no more rights than it is given.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::cluster::api::{Api, Client, Patch, path};
use tandem_e2e::cluster::{self, Cluster};
use tandem_e2e::process::Process;
use tandem_e2e::stack::{MODEL, START};
use tandem_e2e::{bin, eventually, model, probe};
use tandem_operator::render::meta::Owner;
use tandem_operator::render::{guard, json as sent};

const SERVICE: &str = "chat-dk-0000000001";

/// An engine that is where a pod could be: no EndpointSlice takes a loopback address.
struct Engine {
    address: &'static str,
    process: Process,
}

impl Engine {
    async fn start(address: &'static str) -> Self {
        let args = [
            "--role=unified".to_owned(),
            format!("--model={}", model().display()),
            format!("--served-name={MODEL}"),
            "--backend=cpu".to_owned(),
            format!("--listen={address}:7101"),
            format!("--ops-listen={address}:7102"),
        ];
        let process = Process::start("engine", &bin("tandem-engine"), &args);
        ready(&format!("http://{address}:7102/readyz")).await;
        Self { address, process }
    }

    /// What the controllers write of its pod.
    fn endpoint(&self, ready: bool) -> Value {
        json!({"addresses": [self.address], "conditions": {"ready": ready, "serving": true, "terminating": !ready}})
    }
}

async fn ready(url: &str) {
    eventually(url, START, async || {
        let answer = probe::http().get(url).send().await;
        let status = answer.map_err(|error| error.to_string())?.status();
        status.is_success().then_some(()).ok_or_else(|| status.to_string())
    })
    .await;
}

/// Gives the router's account what a deployment's router is given.
async fn allow(client: &Client, namespace: &str) {
    let owner = Owner {
        name: "chat",
        namespace,
        uid: "none",
    };
    let objects = [
        (sent(guard::account(&owner, Role::Router)), "serviceaccounts"),
        (sent(guard::permission(&owner)), "roles"),
        (sent(guard::grant(&owner)), "rolebindings"),
    ];
    for (mut object, plural) in objects {
        // its owner is none, and the garbage collector would see to that
        object["metadata"]["ownerReferences"] = Value::Null;
        let version = object["apiVersion"].as_str().expect("a version").to_owned();
        let api: Api<Value> = Api::at(client, &path(&version, &format!("namespaces/{namespace}/"), plural));
        api.create(&object).await.expect("an object of the router's rights");
    }
}

/// A router where only its kubeconfig and a Service's name say where engines are.
fn router(kubeconfig: &Path, namespace: &str, address: &str) -> Process {
    let args = [
        format!("--listen={address}:8080"),
        format!("--ops-listen={address}:7102"),
        format!("--model-name={MODEL}"),
        format!("--tokenizer={}", model().display()),
        format!("--discover-decode={SERVICE}"),
        format!("--namespace={namespace}"),
        format!("--kubeconfig={}", kubeconfig.display()),
    ];
    Process::start("router", &bin("tandem-router"), &args)
}

async fn setup(cluster: &Cluster, purpose: &str) -> (Client, String) {
    let (client, namespace) = (cluster.admin(), cluster.namespace(purpose).await);
    allow(&client, &namespace).await;
    (client, namespace)
}

#[test]
fn an_engine_that_is_asked_to_stop_gets_what_is_new_or_loses_what_runs() {
    cluster::test(async |cluster| {
        let (client, namespace) = setup(cluster, "discovery").await;
        let kubeconfig = cluster.token(&namespace, "chat-router").await;
        let slices: Api<EndpointSlice> = Api::namespaced(&client, &namespace);
        let mut old = Engine::start("10.244.250.1").await;
        let slice = json!({
            "metadata": {"name": "chat-1", "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4", "ports": [{"name": "control", "port": 7101}], "endpoints": [old.endpoint(true)],
        });
        let slice: EndpointSlice = serde_json::from_value(slice).expect("a slice");
        slices.create(&slice).await.expect("a slice");
        let _router = router(&kubeconfig, &namespace, "10.244.250.9");
        ready("http://10.244.250.9:7102/readyz").await;

        let ask = async |tokens: u32| {
            let body = json!({"model": MODEL, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": true, "stream": true});
            let request = probe::http()
                .post("http://10.244.250.9:8080/v1/completions")
                .json(&body);
            request.send().await.expect("the router answers")
        };
        let mut running = ask(400).await;
        let mut text = String::from_utf8_lossy(&running.chunk().await.expect("a piece").expect("a piece")).into_owned();

        // as the kubelet and the controllers do it when a pod is deleted while another takes its place
        let new = Engine::start("10.244.250.2").await;
        old.process.signal(libc::SIGTERM);
        let patch = json!({"endpoints": [old.endpoint(false), new.endpoint(true)]});
        slices.patch("chat-1", Patch::Merge, &patch).await.expect("a new slice");
        eventually("the router uses the new engine alone", START, async || {
            let metrics = probe::Metrics::of("10.244.250.9:7102").await;
            let up = |address: &str| {
                let label = format!("endpoint=\"{address}:7101\"");
                metrics.samples("tandem_router_upstream_up", &[&label])
            };
            let both = [up(old.address), up(new.address)];
            (both == [vec![], vec![1.0]])
                .then_some(())
                .ok_or_else(|| format!("{both:?}"))
        })
        .await;
        let next = ask(4).await.text().await.expect("an answer");
        assert!(next.ends_with("data: [DONE]\n\n"), "{next}");
        while let Some(piece) = running.chunk().await.expect("what runs is not cut off") {
            text.push_str(&String::from_utf8_lossy(&piece));
        }
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        let status = old.process.wait(Duration::from_mins(2)).await;
        assert!(status.success(), "{status}");
    });
}
