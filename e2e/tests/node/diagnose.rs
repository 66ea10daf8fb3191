//! `kubectl tandem diagnose` and `capture` through real kubelets, as an account that may look and no more: what was planted is
//! found where it was planted. `-- --nocapture` prints the table; `TANDEM_TEST_ROWS=all` plants everything, another value those whose
//! name holds it.

use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::node::proxy::ProxyPod;
use tandem_e2e::node::serving::{NAME, Stage};
use tandem_e2e::node::{self, Forward, LIMIT, NODES, Nodes, outcome};
use tandem_e2e::planting::{Door, MARK, STUCK, Site, clear, list, of_proxy, plant};
use tandem_e2e::proxy::Doorway;
use tandem_e2e::stack::Faults;
use tandem_e2e::{bin, eventually};
use tandem_faults::rows::Row;

/// Of every day.
const FEW: [Row; 4] = [Row::ProxyHolds, Row::TransferStalled, Row::DecodeWedged, Row::Idle];
/// Probes that take so long hang.
const HANGS: Duration = Duration::from_secs(13);
const ADMIN: u16 = 7104;

struct Scene {
    stage: Stage,
    /// The Service's port on a node, and a forwarded admin port.
    door: Door,
    _admin: Forward,
    faults: [Faults; 3],
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
        let admin = nodes.forward(&stage.namespace, &target, ADMIN);
        Self {
            door: Door {
                url: stage.node_port().await,
                admin: admin.address.clone(),
                token: secret,
                key: "none".to_owned(),
                limit: LIMIT,
            },
            _admin: admin,
            faults: faults.try_into().expect("one for each role"),
            oncall,
            stage,
        }
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
        for secret in [MARK, &self.door.token] {
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

impl Site for Scene {
    // thirty layers
    const LAYER_MS: u32 = 300;
    const LONG_TOKENS: u32 = 1_900;

    fn door(&self) -> &Door {
        &self.door
    }

    fn faults(&self, role: Role) -> &Faults {
        let at = Role::ALL.iter().position(|one| *one == role);
        &self.faults[at.expect("one of them")]
    }

    async fn lose_prefill(&mut self) {
        for node in NODES {
            self.stage.nodes.kubectl(&["cordon", node], "");
        }
        let pod = self.stage.pod(Role::Prefill);
        let name = pod["metadata"]["name"].as_str().expect("a name");
        let within = ["--namespace", &self.stage.namespace];
        let at_once = ["delete", "pod", name, "--force", "--grace-period=0"];
        self.stage.nodes.kubectl(&[&at_once[..], &within].concat(), "");
        self.stage.kill(&pod);
    }

    async fn set_max_running(&mut self, max_running: Option<u32>) {
        self.stage
            .edit(json!({"decode": {"knobs": {"maxRunning": max_running}}}))
            .await;
        self.stage.promoted().await;
    }

    async fn load_decode_anew(&mut self) {
        let before = self.stage.incarnation(Role::Decode);
        self.stage.kill(&self.stage.pod(Role::Decode));
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

    async fn restored(&mut self, row: Row) {
        if row == Row::PrefillDead {
            for node in NODES {
                self.stage.nodes.kubectl(&["uncordon", node], "");
            }
        }
        self.stage.promoted().await;
        // a proxy's connections may stay
        self.door.unused(u64::MAX).await;
    }
}

#[test]
fn a_fault_that_was_planted_in_the_cluster_is_found_elsewhere_or_by_who_may_not_look() {
    node::test(async |nodes| {
        let mut scene = Scene::start(nodes).await;
        let rows: Vec<Row> = match std::env::var("TANDEM_TEST_ROWS").as_deref() {
            Err(_) => FEW.to_vec(),
            Ok("all") => Row::ALL.to_vec(),
            Ok(part) => Row::ALL.into_iter().filter(|row| row.name().contains(part)).collect(),
        };
        assert!(!rows.is_empty(), "TANDEM_TEST_ROWS names no row");
        let mut wrong = String::new();
        for row in rows {
            let proxy = ProxyPod::start(&scene.stage, of_proxy(row)).await;
            let victims = plant(row, &mut scene, &proxy).await;
            wrong += &scene.judge(row, &proxy).unwrap_or_default();
            drop(victims);
            proxy.remove().await;
            clear(row, &mut scene).await;
        }
        assert!(wrong.is_empty(), "{wrong}");
        nodes.upgrade(&[]);
        scene.stage.remove().await;
    });
}
