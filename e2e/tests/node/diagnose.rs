//! `kubectl tandem diagnose` and `capture` through real kubelets, as an account that may look and no more: what was planted is
//! found where it was planted. `-- --nocapture` prints the table; `TANDEM_TEST_ROWS=all` plants everything.

use std::any::Any;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::node::proxy::ProxyPod;
use tandem_e2e::node::serving::{MODEL, NAME, Stage};
use tandem_e2e::node::{self, Forward, LIMIT, NODES, Nodes, outcome};
use tandem_e2e::proxy::Plant;
use tandem_e2e::stack::Faults;
use tandem_e2e::visitor::{KeptAlive, not_reading};
use tandem_e2e::{bin, eventually, probe, salted_text};
use tandem_faults::rows::Row;
use tokio_util::task::AbortOnDropHandle;

/// Of every day.
const FEW: [Row; 4] = [Row::ProxyHolds, Row::TransferStalled, Row::DecodeWedged, Row::Idle];
/// What has not moved for so long is stuck.
const STUCK: Duration = Duration::from_secs(5);
/// Probes that take so long hang.
const HANGS: Duration = Duration::from_secs(13);
/// Milliseconds for each of the model's thirty layers: a tiny probe takes longer than [`STUCK`].
const SLOW: &str = "slow-prefill 300";
/// In each prompt; no archive may hold it.
const MARK: &str = "quokka7431";
const ADMIN: u16 = 7104;

struct Scene {
    stage: Stage,
    /// The Service's port on a node.
    url: String,
    faults: [Faults; 3],
    admin: Forward,
    token: String,
    oncall: Oncall,
}

/// Somebody who is paged: an account, with kubectl and the plugin on its path.
struct Oncall {
    nodes: &'static Nodes,
    namespace: String,
    folder: tempfile::TempDir,
}

impl Oncall {
    /// An account that may view the namespace.
    fn new(stage: &Stage) -> Self {
        let (nodes, namespace) = (stage.nodes, stage.namespace.clone());
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink(bin("tandem"), folder.path().join("kubectl-tandem")).expect("a link");
        let within = ["--namespace", &namespace];
        let kubectl = |args: &[&str]| nodes.kubectl(&[args, &within].concat(), "");
        kubectl(&["create", "serviceaccount", "oncall"]);
        let account = format!("--serviceaccount={namespace}:oncall");
        kubectl(&["create", "rolebinding", "oncall-view", "--clusterrole=view", &account]);
        let token = kubectl(&["create", "token", "oncall", "--duration=2h"]);
        let mut config: Value =
            serde_json::from_str(&nodes.kubectl(&["config", "view", "--raw", "--output=json"], "")).expect("JSON");
        config["users"][0]["user"] = json!({"token": token.trim()});
        std::fs::write(folder.path().join("config"), config.to_string()).expect("a file");
        Self {
            nodes,
            namespace,
            folder,
        }
    }

    /// `kubectl tandem …`.
    fn tandem(&self, args: &[String]) -> Output {
        let mut command = self.nodes.kubectl_command();
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:{path}", self.folder.path().display()))
            .env("KUBECONFIG", self.folder.path().join("config"))
            .arg("tandem")
            .args(args)
            .args(["--namespace", &self.namespace]);
        outcome(&mut command, "")
    }

    fn archive(&self) -> PathBuf {
        self.folder.path().join("capture.tar")
    }
}

fn completion(salt: u64, words: usize, max_tokens: u32) -> Value {
    json!({
        "model": MODEL, "prompt": format!("{MARK} {}", salted_text(salt, words)), "max_tokens": max_tokens, "temperature": 1.0, "seed": salt,
        "stream": true, "ignore_eos": true,
    })
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

impl Scene {
    async fn start(nodes: &'static Nodes) -> Self {
        let tag = nodes.load_faults();
        nodes.install();
        let stage = Stage::new(nodes, "diagnose").await;
        let mut spec = json!({
            "router": {"service": {"type": "NodePort"}},
            // no timer of the product ends what is planted before it was looked at
            "timeouts": {
                "rendezvousSeconds": 80, "progressSeconds": 80, "stallSeconds": 80, "leaseSeconds": 80,
                "inflightWatchdogSeconds": 100, "drainSeconds": 120,
            },
        });
        let mut faults = Vec::new();
        for role in Role::ALL {
            let (of, part) = stage.faults(role, &tag).await;
            for (key, value) in part.as_object().expect("an object") {
                spec[role.field()][key] = value.clone();
            }
            faults.push(of);
        }
        let oncall = Oncall::new(&stage);
        stage.create(spec).await;
        stage.promoted().await;

        let refused = oncall.tandem(&["diagnose".into(), NAME.into()]);
        assert!(!refused.status.success());
        let why = String::from_utf8_lossy(&refused.stderr);
        assert!(why.contains("tandem-diagnose"), "{why}");
        let granted = json!([{
            "namespace": stage.namespace, "deployments": [NAME],
            "subjects": [{"kind": "ServiceAccount", "name": "oncall", "namespace": stage.namespace}],
        }]);
        nodes.upgrade_with(&["--set-json", &format!("diagnose={granted}")]);

        let secret = nodes.kubectl(
            &[
                "get",
                "secret",
                &format!("{NAME}-admin-token"),
                "--namespace",
                &stage.namespace,
                "--output=go-template={{index .data \"admin-token\" | base64decode}}",
            ],
            "",
        );
        let router = stage.pod(Role::Router);
        let target = format!("pod/{}", router["metadata"]["name"].as_str().expect("a name"));
        Self {
            url: stage.node_port().await,
            admin: nodes.forward(&stage.namespace, &target, ADMIN),
            token: secret,
            faults: faults.try_into().expect("one for each role"),
            oncall,
            stage,
        }
    }

    fn faults(&self, role: Role) -> &Faults {
        let at = Role::ALL.iter().position(|one| *one == role);
        &self.faults[at.expect("one of them")]
    }

    fn addr(&self) -> SocketAddr {
        self.url.trim_start_matches("http://").parse().expect("an address")
    }

    /// `/admin/connections`.
    async fn connections(&self) -> Result<Value, String> {
        let url = format!("http://{}/admin/connections", self.admin.address);
        let answer = probe::http().get(url).bearer_auth(&self.token).send().await;
        let answer = answer.map_err(|error| format!("{error:?}"))?;
        answer.json().await.map_err(|error| format!("{error:?}"))
    }

    /// Waits until `count` requests have been in `state` for so long.
    async fn stuck(&self, state: &str, count: usize) {
        eventually(&format!("{count} are in {state} for {STUCK:?}"), LIMIT, async || {
            let seen = self.connections().await?;
            let long = |of: &Value| {
                of["state"] == state && u128::from(of["state_ms"].as_u64().unwrap_or(0)) >= STUCK.as_millis()
            };
            let stuck = list(&seen["connections"])
                .iter()
                .filter(|connection| long(connection) || list(&connection["requests"]).iter().any(long))
                .count();
            if stuck >= count {
                Ok(())
            } else {
                Err(seen["by_state"].to_string())
            }
        })
        .await;
    }

    /// Waits until no answer is due.
    async fn unused(&self) {
        eventually("no request is under way any more", LIMIT, async || {
            let seen = self.connections().await?;
            if seen["in_flight"] == 0 {
                Ok(())
            } else {
                Err(seen["by_state"].to_string())
            }
        })
        .await;
    }

    /// A client's request, until the guard is dropped.
    fn ask(&self, salt: u64, words: usize, max_tokens: u32) -> AbortOnDropHandle<()> {
        let (url, body) = (
            format!("{}/v1/completions", self.url),
            completion(salt, words, max_tokens),
        );
        AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = async { probe::http().post(url).json(&body).send().await?.bytes().await }.await;
        }))
    }

    /// The first process of a role's pod dies.
    fn kill(&self, role: Role) {
        let pod = self.stage.pod(role);
        let id = pod["status"]["containerStatuses"][0]["containerID"]
            .as_str()
            .expect("an id");
        let id = id.strip_prefix("containerd://").expect("containerd's");
        let node = pod["spec"]["nodeName"].as_str().expect("a node");
        self.stage.nodes.on(
            node,
            &["ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", id],
        );
    }

    /// Plants it and waits until it has struck; gives what holds it.
    async fn plant(&self, row: Row, proxy: &ProxyPod) -> Vec<Box<dyn Any>> {
        let mut victims: Vec<Box<dyn Any>> = Vec::new();
        let visit = async || KeptAlive::open(&proxy.url(), &proxy.ca(), "none").await;
        match row {
            Row::ClientNotReading => {
                let mut body = completion(101, 20, 1_900);
                // more bytes a token
                body["logprobs"] = json!(5);
                victims.push(Box::new(not_reading(self.addr(), &body).await));
                self.stuck("blocked", 1).await;
            }
            Row::ProxyHolds | Row::ProxyExhausted => {
                let mut visitor = visit().await;
                let short = completion(100, 20, 4);
                visitor.complete(&short).await.expect("the first answer passes");
                victims.push(Box::new(AbortOnDropHandle::new(tokio::spawn(async move {
                    let _ = visitor.complete(&short).await;
                }))));
                proxy.struck(1).await;
            }
            Row::ProxyCuts => {
                for salt in 0..2 {
                    let answer = visit().await.complete(&completion(102 + salt, 20, 64)).await;
                    assert!(answer.is_err(), "it was not cut: {answer:?}");
                }
                proxy.struck(2).await;
            }
            Row::TokenizerSlow => {
                self.faults(Role::Router).plant(&["delay-tokenization hold"]).await;
                victims.push(Box::new(self.ask(108, 20, 8)));
                self.stuck("text", 1).await;
            }
            Row::RouterBlocked => {
                self.faults(Role::Router).plant(&["block-upstream hold"]).await;
                victims.push(Box::new(self.ask(104, 20, 8)));
                self.stuck("accept", 1).await;
            }
            Row::PrefillSlow => {
                self.faults(Role::Prefill).plant(&[SLOW]).await;
                // several chunks: it is still there when it is looked at
                victims.push(Box::new(self.ask(105, 900, 8)));
                self.stuck("prefill", 1).await;
            }
            Row::PrefillDead => {
                // and no other comes in its place
                for node in NODES {
                    self.stage.nodes.kubectl(&["cordon", node], "");
                }
                let pod = self.stage.pod(Role::Prefill);
                let name = pod["metadata"]["name"].as_str().expect("a name");
                let namespace = &self.stage.namespace;
                let words = [
                    "delete",
                    "pod",
                    name,
                    "--namespace",
                    namespace,
                    "--force",
                    "--grace-period=0",
                ];
                self.stage.nodes.kubectl(&words, "");
                self.kill_if_it_lives(&pod);
            }
            Row::TransferStalled => {
                self.faults(Role::Prefill).plant(&["stall-transfer hold"]).await;
                victims.push(Box::new(self.ask(106, 20, 8)));
                self.stuck("transfer", 1).await;
            }
            Row::DecodeWedged => {
                self.faults(Role::Decode).plant(&["wedge-decode hold"]).await;
                victims.push(Box::new(self.ask(107, 20, 8)));
                self.stuck("decode", 1).await;
            }
            Row::DecodeOverloaded => {
                self.stage.edit(json!({"decode": {"knobs": {"maxRunning": 2}}})).await;
                self.stage.promoted().await;
                for salt in 0..6 {
                    victims.push(Box::new(self.ask(110 + salt, 20, 1_900)));
                }
                self.stuck("queue", 4).await;
            }
            Row::DecodeLoading => {
                self.faults(Role::Decode).plant(&["delay-model-load hold"]).await;
                let before = self.stage.incarnation(Role::Decode);
                self.kill(Role::Decode);
                eventually("decode's process is another one", LIMIT, async || {
                    let now = self.stage.incarnation(Role::Decode);
                    let runs = |pod: &Value| pod["status"]["containerStatuses"][0]["state"]["running"].is_object();
                    if now != before && runs(&self.stage.pod(Role::Decode)) {
                        Ok(())
                    } else {
                        Err(format!("{now:?}"))
                    }
                })
                .await;
            }
            Row::Idle => {}
        }
        victims
    }

    fn kill_if_it_lives(&self, pod: &Value) {
        let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
        let id = id
            .and_then(|id| id.strip_prefix("containerd://"))
            .expect("containerd's");
        let node = pod["spec"]["nodeName"].as_str().expect("a node");
        let kill = format!("ctr --namespace=k8s.io tasks kill --signal=SIGKILL {id} || true");
        self.stage.nodes.on(node, &["sh", "-c", &kill]);
    }

    /// Nothing is planted any more.
    async fn clear(&self, row: Row) {
        for of in &self.faults {
            of.plant(&[]).await;
        }
        match row {
            Row::PrefillDead => {
                for node in NODES {
                    self.stage.nodes.kubectl(&["uncordon", node], "");
                }
            }
            Row::DecodeOverloaded => {
                self.stage
                    .edit(json!({"decode": {"knobs": {"maxRunning": null}}}))
                    .await;
            }
            _ => {}
        }
        self.stage.promoted().await;
        self.unused().await;
    }

    fn look(&self, command: &str, proxy: &ProxyPod) -> Vec<String> {
        vec![
            command.to_owned(),
            NAME.to_owned(),
            format!("--stuck-seconds={}", STUCK.as_secs()),
            format!("--probe-seconds={}", HANGS.as_secs()),
            format!("--via={}", proxy.url()),
            format!("--ca={}", proxy.ca().display()),
        ]
    }

    /// What is said, at once and by an archive; none: it is right.
    fn judge(&self, row: Row, proxy: &ProxyPod) -> Option<String> {
        let begun = Instant::now();
        let mut said = Vec::new();
        let mut look = self.look("diagnose", proxy);
        look.push("--json".into());
        said.push(("", self.oncall.tandem(&look)));

        let archive = self.oncall.archive();
        let mut capture = self.look("capture", proxy);
        capture.push(format!("--output={}", archive.display()));
        let captured = self.oncall.tandem(&capture);
        assert!(
            captured.status.success(),
            "{}",
            String::from_utf8_lossy(&captured.stderr)
        );
        let bytes = std::fs::read(&archive).expect("an archive");
        for secret in [MARK, &self.token] {
            let holds = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!holds, "the archive holds {secret}");
        }
        let later = [
            "diagnose".to_owned(),
            "--json".to_owned(),
            format!("--from={}", archive.display()),
        ];
        said.push((
            "captured",
            outcome(std::process::Command::new(bin("tandem")).args(later), ""),
        ));
        std::fs::remove_file(&archive).expect("it is there");

        let mut wrong = String::new();
        for (how, output) in said {
            let whole: Value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
            let verdict = &whole["verdict"];
            let suspects: Vec<&str> = list(&verdict["layers"])
                .iter()
                .filter(|layer| layer["standing"] == "suspected")
                .filter_map(|layer| layer["layer"].as_str())
                .collect();
            let expected: Vec<&str> = row.layer().into_iter().collect();
            let right = suspects == expected && (row != Row::Idle || verdict["finding"] == row.finding());
            println!(
                "{:<24}{how:<10}{:<18}{:<14}{:>5.1} s  {}",
                row.name(),
                verdict["finding"].as_str().unwrap_or_default(),
                suspects.join(", "),
                begun.elapsed().as_secs_f64(),
                if right { "ok" } else { "WRONG" }
            );
            if !right {
                wrong += &format!("{} {how}: {verdict:#}\n", row.name());
            }
        }
        (!wrong.is_empty()).then_some(wrong)
    }
}

#[test]
fn a_fault_that_was_planted_in_the_cluster_is_found_elsewhere_or_by_who_may_not_look() {
    node::test(async |nodes| {
        let scene = Scene::start(nodes).await;
        let all = std::env::var("TANDEM_TEST_ROWS").is_ok_and(|rows| rows == "all");
        let rows: &[Row] = if all { &Row::ALL } else { &FEW };
        let mut wrong = String::new();
        for row in rows {
            let plant = match row {
                Row::ProxyHolds => Plant::Hold(2),
                Row::ProxyExhausted => Plant::Exhaust(1),
                Row::ProxyCuts => Plant::Cut(600),
                _ => Plant::Nothing,
            };
            let proxy = ProxyPod::start(&scene.stage, plant).await;
            let victims = scene.plant(*row, &proxy).await;
            wrong += &scene.judge(*row, &proxy).unwrap_or_default();
            drop(victims);
            proxy.remove().await;
            scene.clear(*row).await;
        }
        assert!(wrong.is_empty(), "{wrong}");
        nodes.upgrade(&[]);
        scene.stage.remove().await;
    });
}
