//! The planted proxy as a pod before a deployment's Service.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::serving::{STAGE, Stage};
use super::{Forward, LIMIT};
use crate::cluster::api::{Api, path};
use crate::proxy::{Doorway, Plant};
use crate::{bin_dir, eventually};

/// A running proxy pod. Its namespace has one at a time.
#[derive(Debug)]
pub struct ProxyPod {
    pods: Api<Value>,
    nodes: &'static super::Nodes,
    namespace: String,
    forward: Forward,
    folder: tempfile::TempDir,
}

const NAME: &str = "proxy";
/// Where the container sees them.
const PROGRAMS: &str = "/programs";
const CA: &str = "/ca";

impl ProxyPod {
    /// Starts one before the deployment's Service, in a namespace of its own, which is made.
    pub async fn start(stage: &Stage, plant: Plant) -> Self {
        let nodes = stage.nodes;
        let namespace = format!("{}-proxy", stage.namespace);
        let namespaces: Api<Value> = Api::at(&stage.client, &path("v1", "", "namespaces"));
        let made = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {STAGE: "true"}}});
        if let Err(refused) = namespaces.create(&made).await {
            assert_eq!(refused.code, 409, "{refused}");
        }
        let services: Api<Value> = Api::at(
            &stage.client,
            &path("v1", &format!("namespaces/{}/", stage.namespace), "services"),
        );
        let service = services.get(super::serving::NAME).await.expect("the Service");
        let upstream = format!("{}:80", service["spec"]["clusterIP"].as_str().expect("an address"));
        let image = stage.pod(tandem_crds::Role::Router)["spec"]["containers"][0]["image"].clone();
        let folder = tempfile::tempdir().expect("a folder");
        let words = [
            format!("{PROGRAMS}/planted-proxy"),
            upstream,
            plant.to_string(),
            format!("{CA}/ca.pem"),
        ];
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME},
            "spec": {
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0,
                "containers": [{
                    // for its libraries: the program comes from this machine
                    "name": NAME, "image": image, "imagePullPolicy": "Never", "command": words,
                    "securityContext": {"runAsUser": 0},
                    "volumeMounts": [
                        {"name": "programs", "mountPath": PROGRAMS, "readOnly": true},
                        {"name": "ca", "mountPath": CA},
                    ],
                }],
                "volumes": [
                    {"name": "programs", "hostPath": {"path": bin_dir(), "type": "Directory"}},
                    {"name": "ca", "hostPath": {"path": folder.path(), "type": "Directory"}},
                ],
            },
        });
        let pods: Api<Value> = Api::at(&stage.client, &path("v1", &format!("namespaces/{namespace}/"), "pods"));
        // The namespace's service account is made a moment later, and the proxy before this one goes.
        eventually("the proxy is admitted", LIMIT, async || {
            pods.create(&pod).await.map(drop).map_err(|refused| refused.to_string())
        })
        .await;
        let port = eventually("the proxy listens", LIMIT, async || {
            let log = log(nodes, &namespace)?;
            let line = log
                .lines()
                .find_map(|line| line.strip_prefix("listening 127.0.0.1:")?.parse().ok());
            line.ok_or(log)
        })
        .await;
        Self {
            forward: nodes.forward(&namespace, &format!("pod/{NAME}"), port),
            pods,
            nodes,
            namespace,
            folder,
        }
    }

    /// Ends it.
    pub async fn remove(self) {
        self.pods.delete(NAME, &json!({})).await.expect("a deletion");
    }
}

fn log(nodes: &super::Nodes, namespace: &str) -> Result<String, String> {
    let mut command = nodes.kubectl_command();
    command.args(["logs", "--namespace", namespace, NAME]);
    let output = super::outcome(&mut command, "");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

impl Doorway for ProxyPod {
    fn url(&self) -> String {
        format!("https://{}", self.forward.address)
    }

    fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    async fn struck(&self, times: usize) {
        eventually(&format!("the fault strikes {times} times"), LIMIT, async || {
            let log = log(self.nodes, &self.namespace)?;
            let struck = log.lines().filter(|line| line.starts_with("struck")).count();
            if struck >= times { Ok(()) } else { Err(log) }
        })
        .await;
    }
}
