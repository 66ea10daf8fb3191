//! A deployment with an operator of its own, in a namespace with nodes of its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tandem_crds::status::{Outcome, Step};
use tandem_crds::{API_VERSION, PDDeployment, Role};
use tandem_e2e::cluster::Cluster;
use tandem_e2e::cluster::api::{Api, Client, Patch, path};
use tandem_e2e::cluster::kubelet::Life;
use tandem_e2e::cluster::operator::{Operator, Options};
use tandem_e2e::cluster::record::{Event, Recorder, State, label, name};

use crate::fixtures::with_nodes;
use crate::{children, crd};

/// How long a change may take on a busy machine.
pub const LIMIT: Duration = Duration::from_mins(4);
/// The deployment of a stage.
pub const NAME: &str = "chat";

/// What a test acts on.
pub struct Stage {
    pub cluster: &'static Cluster,
    pub client: Client,
    pub namespace: String,
    pub recorder: Recorder,
    pub options: Options,
    pub script: Scripted,
}

/// What becomes of each pod; a test changes it while things run.
#[derive(Clone)]
pub struct Scripted(Arc<Mutex<Script>>);

type Script = Box<dyn Fn(&Pod) -> Life + Send>;

impl Scripted {
    /// From now on.
    pub fn set(&self, script: impl Fn(&Pod) -> Life + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(script);
    }
}

impl Stage {
    /// With so many nodes, each with so many GPUs; no operator runs yet.
    pub async fn new(cluster: &'static Cluster, purpose: &str, gpus: &[u32]) -> Self {
        crd(cluster).await;
        let (client, namespace) = with_nodes(cluster, purpose, gpus).await;
        children::models(&client, &namespace).await;
        let script = Scripted(Arc::new(Mutex::new(Box::new(|_| Life::default()))));
        let shared = Arc::clone(&script.0);
        cluster.kubelet().script(&namespace, move |pod| {
            let script = shared.lock().unwrap_or_else(PoisonError::into_inner);
            script(pod)
        });
        Self {
            cluster,
            recorder: Recorder::start(&client, &namespace).await,
            options: Options::of(cluster, &namespace).await,
            client,
            namespace,
            script,
        }
    }

    /// The same, with an operator and a deployment that is promoted: 4 GPUs for each engine, and what `spec` adds.
    pub async fn settled(cluster: &'static Cluster, purpose: &str, gpus: &[u32], spec: Value) -> (Self, Operator) {
        let stage = Self::new(cluster, purpose, gpus).await;
        let operator = Operator::start(&stage.options);
        stage.create(spec).await;
        stage.promoted().await;
        (stage, operator)
    }

    pub fn api(&self) -> Api<Value> {
        self.api_of(API_VERSION, "pddeployments")
    }

    pub fn api_of(&self, version: &str, plural: &str) -> Api<Value> {
        let scope = format!("namespaces/{}/", self.namespace);
        Api::at(&self.client, &path(version, &scope, plural))
    }

    /// Makes the deployment.
    pub async fn create(&self, spec: Value) {
        let made = self.api().create(&manifest(NAME, &self.namespace, spec)).await;
        made.expect("a deployment");
    }

    /// Changes its spec; the generation that it has then.
    pub async fn edit(&self, spec: Value) -> i64 {
        let edited = self.api().patch(NAME, Patch::Merge, &json!({"spec": spec})).await;
        edited.expect("an edit")["metadata"]["generation"]
            .as_i64()
            .expect("a generation")
    }

    /// Waits until a change has come to a step, or is done already.
    pub async fn meet(&self, generation: i64, wanted: Step) {
        let met = |chat: &PDDeployment| {
            let of_it = chat.metadata.generation == Some(generation);
            of_it && (step(chat) as u8 >= wanted as u8 || is_settled(chat))
        };
        self.until(&format!("step {wanted:?}"), met).await;
    }

    /// As it is.
    pub fn chat(&self) -> PDDeployment {
        chat(&self.recorder.state()).expect("it is there")
    }

    /// Waits until `check` holds of the deployment.
    pub async fn until(&self, what: &str, check: impl Fn(&PDDeployment) -> bool) -> PDDeployment {
        let looked = |state: &State| match chat(state) {
            Some(chat) if check(&chat) => Ok(chat),
            Some(chat) => Err(format!("{:#?}", chat.status)),
            None => Err("it is not there".into()),
        };
        self.recorder.until(what, LIMIT, looked).await
    }

    /// Waits until what the spec asks for now runs, and all that ran before is gone.
    pub async fn promoted(&self) -> PDDeployment {
        let generation = self.api().get(NAME).await.expect("it is there")["metadata"]["generation"].clone();
        let chat = self
            .until("the change is promoted", |chat| {
                let status = chat.status.clone().unwrap_or_default();
                json!(chat.metadata.generation) == generation
                    && is_settled(chat)
                    && is(chat, "Ready", "True")
                    && status.revisions.running == status.revisions.target
            })
            .await;
        let status = chat.status.clone().unwrap_or_default();
        let roles = status.roles.clone();
        let looked = |state: &State| {
            let wrong: Vec<String> = state
                .all("pods")
                .filter(|pod| label(pod, "tandem.dev/deployment") == NAME)
                .filter(|pod| {
                    let wanted = roles
                        .iter()
                        .find(|role| role.name.field() == label(pod, "tandem.dev/role"));
                    wanted.is_none_or(|wanted| wanted.revision != label(pod, "tandem.dev/revision"))
                })
                .map(|pod| name(pod).to_owned())
                .collect();
            if wrong.is_empty() {
                Ok(())
            } else {
                Err(format!("{wrong:?}"))
            }
        };
        self.recorder
            .until("no pod of another revision is left", LIMIT, looked)
            .await;
        let looked = |state: &State| {
            let moving: Vec<&str> = state.all("deployments").filter(|one| !rests(one)).map(name).collect();
            if moving.is_empty() {
                Ok(())
            } else {
                Err(format!("{moving:?}"))
            }
        };
        self.recorder
            .until("the controllers have said all", LIMIT, looked)
            .await;
        chat
    }

    /// All events of the namespace since it was made.
    pub fn events(&self) -> Vec<Event> {
        self.recorder.events()
    }

    /// The operator's writes that last: no lease, no event.
    pub fn writes(&self) -> Vec<String> {
        let all = self.cluster.audit().writes_of(&self.options.user());
        let lasting = all
            .iter()
            .filter(|one| !["leases", "events"].contains(&one.object_ref.resource.as_str()));
        lasting.map(tandem_e2e::cluster::audit::Request::summary).collect()
    }

    /// The template of each of a role's workloads that asks for pods, by name.
    pub fn templates(&self, role: Role) -> Vec<(String, Value)> {
        let state = self.recorder.state();
        let of_role = workloads(&state, role).filter(|one| one["spec"]["replicas"] != 0);
        of_role
            .map(|one| (name(one).to_owned(), one["spec"]["template"].clone()))
            .collect()
    }

    /// Name and version of each of a role's workloads, and the uids of its pods.
    pub fn untouched(&self, role: Role) -> Vec<String> {
        let state = self.recorder.state();
        let version = |one: &Value| format!("{} {}", name(one), one["metadata"]["resourceVersion"]);
        let pod = |one: &Value| format!("{} {}", name(one), one["metadata"]["uid"]);
        let pods = state
            .all("pods")
            .filter(|pod| label(pod, "tandem.dev/role") == role.field())
            .map(pod);
        workloads(&state, role).map(version).chain(pods).collect()
    }
}

/// A manifest with 4 GPUs for each engine, and what `spec` adds to it or changes.
pub fn manifest(name: &str, namespace: &str, spec: Value) -> Value {
    let mut all = json!({
        "model": {"name": "m", "source": {"pvc": {"claimName": "models", "path": tandem_e2e::model().file_name().and_then(|name| name.to_str())}}, "maxLengthTokens": 2048},
        "gpus": {"budget": 8},
        "prefill": {"backend": "Cpu", "gpusPerReplica": 4},
        "decode": {"backend": "Cpu", "gpusPerReplica": 4},
    });
    crate::api::merge(&mut all, spec);
    json!({
        "apiVersion": API_VERSION, "kind": "PDDeployment", "metadata": {"name": name, "namespace": namespace}, "spec": all,
    })
}

fn workloads(state: &State, role: Role) -> impl Iterator<Item = &Value> {
    state
        .all("deployments")
        .filter(move |one| label(one, "tandem.dev/role") == role.field())
}

/// Its controller has nothing more to say of it.
fn rests(workload: &Value) -> bool {
    let (wanted, status) = (&workload["spec"]["replicas"], &workload["status"]);
    let is = |type_: &str, field: &str, value: &str| {
        let all = status["conditions"].as_array();
        all.is_some_and(|all| all.iter().any(|one| one["type"] == type_ && one[field] == value))
    };
    let seen = status["observedGeneration"] == workload["metadata"]["generation"];
    let counted = |name: &str| status[name].as_i64().unwrap_or(0) == wanted.as_i64().unwrap_or(1);
    let all = ["replicas", "updatedReplicas", "availableReplicas"]
        .into_iter()
        .all(counted);
    let told =
        *wanted == 0 || (is("Available", "status", "True") && is("Progressing", "reason", "NewReplicaSetAvailable"));
    seen && all && told
}

pub fn chat(state: &State) -> Option<PDDeployment> {
    let object = state.get("pddeployments", NAME)?;
    Some(serde_json::from_value(object.clone()).expect("a deployment"))
}

pub fn step(chat: &PDDeployment) -> Step {
    chat.status.as_ref().map_or(Step::Settled, |status| status.step)
}

/// Nothing is under way, and the status is about the spec as it is.
pub fn is_settled(chat: &PDDeployment) -> bool {
    chat.status.as_ref().is_some_and(|status| {
        Some(status.observed_generation) == chat.metadata.generation
            && status.rollout.is_none()
            && status.step == Step::Settled
    })
}

/// A condition has this status.
pub fn is(chat: &PDDeployment, type_: &str, wanted: &str) -> bool {
    condition(chat, type_).0 == wanted
}

/// A condition's status and reason.
pub fn condition(chat: &PDDeployment, type_: &str) -> (String, String) {
    let conditions = chat.status.iter().flat_map(|status| &status.conditions);
    let found = conditions.into_iter().find(|one| one.type_ == type_);
    found.map_or_else(Default::default, |one| (one.status.clone(), one.reason.clone()))
}

/// How the changes so far ended, newest first.
pub fn outcomes(chat: &PDDeployment) -> Vec<Outcome> {
    let history = chat.status.iter().flat_map(|status| &status.history);
    history.map(|entry| entry.outcome).collect()
}

/// An edit that restarts one role.
pub fn restarts(role: Role, value: &str) -> Value {
    json!({role.field(): {"pod": {"annotations": {"change": value}}}})
}

/// Ready and not to be deleted.
pub fn serves(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let ready = conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"));
    ready && pod["metadata"]["deletionTimestamp"].is_null()
}
