//! A deployment in a namespace of its own, and what a test sees of it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim};
use serde_json::{Value, json};
use tandem_crds::{API_VERSION, PDDeployment, Role};

use super::{Forward, LIMIT, NODE_ADDRESS, Nodes};
use crate::cluster::api::{Api, Client, Patch, path};
use crate::cluster::record::{Recorder, State, label, name};
use crate::probe::Metrics;
use crate::stack::Faults;

/// The deployment of a stage.
pub const NAME: &str = "chat";
/// What the model is called.
pub const MODEL: &str = "smollm2";
/// Labels the namespaces of stages and their volumes.
pub(super) const STAGE: &str = "tandem.test/stage";
/// Ports of the pods.
const OPS: u16 = 7102;

/// A deployment, everything that happens in its namespace, and the way in for clients.
#[derive(Debug)]
pub struct Stage {
    /// The cluster.
    pub nodes: &'static Nodes,
    /// Acts as admin.
    pub client: Client,
    /// Held to the restricted standard.
    pub namespace: String,
    /// What happened.
    pub recorder: Recorder,
}

impl Stage {
    /// A namespace that holds its pods to the restricted standard, with a claim of the model's folder.
    pub async fn new(nodes: &'static Nodes, purpose: &str) -> Self {
        let client = nodes.admin();
        let namespace = format!("test-{purpose}");
        let labels = json!({"pod-security.kubernetes.io/enforce": "restricted", STAGE: "true"});
        let made: Api<Namespace> = Api::all(&client);
        made.create(&object(json!({"metadata": {"name": namespace, "labels": labels}})))
            .await
            .expect("a namespace");
        let model = crate::model();
        let folder = model.parent().expect("a folder");
        claim(&client, &namespace, "models", "ReadOnlyMany", folder).await;
        Self {
            recorder: Recorder::start(&client, &namespace).await,
            nodes,
            client,
            namespace,
        }
    }

    /// The same with an installed operator and a deployment that serves: prefill and decode hold 4 GPUs each, and what `spec` adds.
    pub async fn serving(nodes: &'static Nodes, purpose: &str, spec: Value) -> Self {
        nodes.install();
        let stage = Self::new(nodes, purpose).await;
        stage.create(spec).await;
        stage.promoted().await;
        stage
    }

    /// What the spec says of a role in whose processes faults can be planted, and where.
    pub async fn faults(&self, role: Role, tag: &str) -> (Faults, Value) {
        let faults = Faults::none();
        let everybody = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(faults.folder(), everybody).expect("a mode");
        let name = format!("faults-{}", role.field());
        claim(&self.client, &self.namespace, &name, "ReadWriteMany", faults.folder()).await;
        let program = if role == Role::Router {
            "tandem-router"
        } else {
            "tandem-engine"
        };
        let spec = json!({
            "image": format!("localhost/{program}:{tag}"),
            "pod": {
                "env": [{"name": "TANDEM_FAULTS", "value": format!("/faults/{}", Faults::FILE)}],
                "volumes": [{"name": "faults", "mountPath": "/faults", "claimName": name}],
            },
        });
        (faults, spec)
    }

    fn api(&self) -> Api<Value> {
        let scope = format!("namespaces/{}/", self.namespace);
        Api::at(&self.client, &path(API_VERSION, &scope, "pddeployments"))
    }

    /// Makes the deployment.
    pub async fn create(&self, spec: Value) {
        let manifest = json!({
            "apiVersion": API_VERSION, "kind": "PDDeployment", "metadata": {"name": NAME, "namespace": self.namespace},
            "spec": manifest(spec),
        });
        self.api().create(&manifest).await.expect("a deployment");
    }

    /// Changes its spec.
    pub async fn edit(&self, spec: Value) {
        let edited = self.api().patch(NAME, Patch::Merge, &json!({"spec": spec})).await;
        edited.expect("an edit");
    }

    /// Waits until what the spec asks for now runs and serves.
    pub async fn promoted(&self) -> PDDeployment {
        let object = self.api().get(NAME).await.expect("it is there");
        let generation = object["metadata"]["generation"].as_i64();
        self.until("the change is promoted", |chat| {
            let status = chat.status.clone().unwrap_or_default();
            Some(status.observed_generation) == generation
                && status.rollout.is_none()
                && is(chat, "Ready") == "True"
                && status.revisions.running == status.revisions.target
        })
        .await
    }

    /// Waits until `check` holds of the deployment.
    pub async fn until(&self, what: &str, check: impl Fn(&PDDeployment) -> bool) -> PDDeployment {
        let looked = |state: &State| match state.get("pddeployments", NAME) {
            Some(chat) => {
                let chat: PDDeployment = object(chat.clone());
                let seen = format!("{:#?}", chat.status);
                if check(&chat) { Ok(chat) } else { Err(seen) }
            }
            None => Err("it is not there".into()),
        };
        self.recorder.until(what, LIMIT, looked).await
    }

    /// The pods of a role that are not to be deleted.
    pub fn pods(&self, role: Role) -> Vec<Value> {
        let state = self.recorder.state();
        let of = state
            .all("pods")
            .filter(|pod| label(pod, "tandem.dev/role") == role.field());
        of.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
            .cloned()
            .collect()
    }

    /// The one pod of a role.
    pub fn pod(&self, role: Role) -> Value {
        let mut pods = self.pods(role);
        assert_eq!(pods.len(), 1, "pods of {role:?}");
        pods.remove(0)
    }

    /// The pods' identities: a restart of a container keeps the uid and counts.
    pub fn incarnation(&self, role: Role) -> Vec<(Value, Value)> {
        let one = |pod: &Value| {
            (
                pod["metadata"]["uid"].clone(),
                pod["status"]["containerStatuses"][0]["restartCount"].clone(),
            )
        };
        self.pods(role).iter().map(one).collect()
    }

    /// SIGKILL for the container of a pod; whether it was there.
    pub fn kill(&self, pod: &Value) -> bool {
        let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
        let id = id
            .and_then(|id| id.strip_prefix("containerd://"))
            .expect("containerd's");
        let node = pod["spec"]["nodeName"].as_str().expect("a node");
        let kill = format!("ctr --namespace=k8s.io tasks kill --signal=SIGKILL {id} 2>&1 || true");
        // it says nothing where it has done so
        self.nodes.on(node, &["sh", "-c", &kill]).trim().is_empty()
    }

    /// What a pod counts.
    pub async fn metrics(&self, pod: &Value) -> Metrics {
        let forward = self.nodes.forward(&self.namespace, &format!("pod/{}", name(pod)), OPS);
        Metrics::of(&forward.address).await
    }

    /// The way in for clients as users without an ingress have it.
    pub fn front(&self) -> Forward {
        self.nodes.forward(&self.namespace, &format!("service/{NAME}"), 80)
    }

    /// The Service's address on a node, which all routers are behind; the deployment asks for a Service of that type.
    pub async fn node_port(&self) -> String {
        let services: Api<Value> = Api::at(
            &self.client,
            &path("v1", &format!("namespaces/{}/", self.namespace), "services"),
        );
        let service = services.get(NAME).await.expect("the Service");
        let port = service["spec"]["ports"][0]["nodePort"]
            .as_u64()
            .expect("a port on nodes");
        format!("http://{NODE_ADDRESS}:{port}")
    }

    /// Deletes the namespace and all that is in it, and waits until no pod is left. Its volumes go with those of others before the
    /// next test.
    pub async fn remove(self) {
        let all: Api<Namespace> = Api::all(&self.client);
        all.delete(&self.namespace, &json!({})).await.expect("a deletion");
        let gone = |state: &State| {
            let left: Vec<&str> = state.all("pods").map(name).collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        };
        self.recorder.until("no pod is left", LIMIT, gone).await;
    }
}

/// A claim of a folder of this machine's, which all nodes see.
async fn claim(client: &Client, namespace: &str, name: &str, mode: &str, folder: &Path) {
    let volume_name = format!("{namespace}-{name}");
    let volume = json!({
        "metadata": {"name": volume_name, "labels": {STAGE: "true"}},
        "spec": {
            "accessModes": [mode], "storageClassName": "", "capacity": {"storage": "1Gi"},
            "hostPath": {"path": folder, "type": "Directory"}, "claimRef": {"namespace": namespace, "name": name},
        },
    });
    let volumes: Api<PersistentVolume> = Api::all(client);
    volumes.create(&object(volume)).await.expect("a volume");
    let claim = json!({
        "metadata": {"name": name},
        "spec": {
            "accessModes": [mode], "storageClassName": "", "volumeName": volume_name,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    });
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client, namespace);
    claims.create(&object(claim)).await.expect("a claim");
}

/// A condition's status.
pub fn is(chat: &PDDeployment, type_: &str) -> String {
    let mut conditions = chat.status.iter().flat_map(|status| &status.conditions);
    conditions
        .find(|one| one.type_ == type_)
        .map(|one| one.status.clone())
        .unwrap_or_default()
}

fn manifest(spec: Value) -> Value {
    let mut all = json!({
        "model": {"name": MODEL, "source": {"pvc": {"claimName": "models", "path": crate::model().file_name().and_then(|name| name.to_str())}}, "maxLengthTokens": 2048},
        "gpus": {"budget": 8},
        "prefill": {"backend": "Cpu", "gpusPerReplica": 4},
        "decode": {"backend": "Cpu", "gpusPerReplica": 4},
    });
    merge(&mut all, spec);
    all
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object of this kind")
}
