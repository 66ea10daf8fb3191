//! Every write: only as the leader, within a deadline, counted, and known to the cache as soon as it is answered.

use std::sync::Arc;
use std::time::Duration;

use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use kube::core::DynamicObject;
use kube::{Api, Client};
use serde::Serialize;
use serde_json::{Value, json};
use tandem_crds::{API_VERSION, KIND, PDDeployment, PDDeploymentStatus};
use tokio::time::{Instant, sleep_until, timeout};

use super::cache::{Cache, Child, Key};
use super::kinds::Kind;
use super::lease::Leadership;
use crate::apply::{Need, need, signed};
use crate::metrics::Metrics;

/// The manager of the fields that the operator writes.
pub const MANAGER: &str = "tandem-operator";
/// Keeps a deployment until its requests have ended.
pub const FINALIZER: &str = "tandem.dev/quiesce";
/// One request, however long the lease lasts.
const DEADLINE: Duration = Duration::from_secs(15);

/// Why something was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Another operator leads, or may.
    #[error("{what} is not written: this operator does not lead any more")]
    NotLeading {
        /// Of what.
        what: String,
    },
    /// No answer.
    #[error("{what}: the API server did not answer in time; it is tried again")]
    Silent {
        /// Of what.
        what: String,
    },
    /// It was refused.
    #[error("{what}: {source}")]
    Refused {
        /// Of what.
        what: String,
        /// What the API server said.
        source: Box<kube::Error>,
    },
    /// An object that was to be rendered is of no kind that the operator makes.
    #[error("{0} is no kind that the operator makes")]
    Unknown(String),
}

impl WriteError {
    /// Whether somebody else was faster.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if matches!(&**source, kube::Error::Api(status) if status.code == 409))
    }

    fn is_there_already(&self) -> bool {
        matches!(self, Self::Refused { source, .. }
            if matches!(&**source, kube::Error::Api(status) if status.reason == "AlreadyExists"))
    }
}

/// What writes.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    cache: Arc<Cache>,
    leadership: Leadership,
    metrics: Metrics,
}

impl Writer {
    /// Writes only while `leadership` is held.
    pub fn new(client: Client, cache: Arc<Cache>, leadership: Leadership, metrics: Metrics) -> Self {
        Self {
            client,
            cache,
            leadership,
            metrics,
        }
    }

    /// Brings a child to what was rendered for it, if it is not that already. [`Need::Foreign`]: it is somebody else's, and
    /// was left alone.
    pub async fn apply(&self, owner: &Key, wanted: &Value, live: Option<&Child>) -> Result<Need, WriteError> {
        let kind = Kind::of(wanted).ok_or_else(|| WriteError::Unknown(wanted["kind"].to_string()))?;
        let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
        let api = self.children(kind, &owner.namespace);
        let found = match live {
            Some(child) => Some(child.object()),
            // What bears no label of ours is not watched: it has to be asked for before it could be overwritten.
            None => self.read(kind, &owner.namespace, name).await?,
        };
        let needed = need(found.as_ref(), wanted);
        if matches!(needed, Need::Nothing | Need::Foreign) {
            return Ok(needed);
        }
        let mut body = signed(wanted);
        let mut params = PatchParams::apply(MANAGER);
        if let Some(found) = &found {
            // Of this object and no other of its name; a field that somebody has changed is taken back.
            body["metadata"]["uid"] = found["metadata"]["uid"].clone();
            params = params.force();
        }
        if needed == Need::Repair {
            self.metrics.repaired(kind);
            tracing::warn!(deployment = %owner, kind = kind.name(), name, "somebody has changed it; it is put back");
        }
        let what = || format!("{} {}/{name}", kind.name(), owner.namespace);
        let patch = Patch::Apply(&body);
        let patch = api.patch(name, &params, &patch);
        let written = self.write(kind.name(), "apply", what, patch).await?;
        self.keep(owner, kind, &written);
        Ok(needed)
    }

    /// Makes a child that is never changed. None: one of this name is there already.
    pub async fn create(&self, owner: &Key, wanted: &Value) -> Result<Option<DynamicObject>, WriteError> {
        let kind = Kind::of(wanted).ok_or_else(|| WriteError::Unknown(wanted["kind"].to_string()))?;
        let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
        let what = || format!("{} {}/{name}", kind.name(), owner.namespace);
        let object: DynamicObject = serde_json::from_value(wanted.clone()).map_err(|error| WriteError::Refused {
            what: what(),
            source: Box::new(kube::Error::SerdeError(error)),
        })?;
        let params = PostParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PostParams::default()
        };
        let api = self.children(kind, &owner.namespace);
        match self
            .write(kind.name(), "create", what, api.create(&params, &object))
            .await
        {
            Ok(made) => {
                self.keep(owner, kind, &made);
                Ok(Some(made))
            }
            Err(error) if error.is_there_already() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes a child: this one, and none that has come in its place.
    pub async fn delete(&self, owner: &Key, kind: Kind, name: &str, uid: &str) -> Result<(), WriteError> {
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            preconditions: Some(Preconditions {
                uid: Some(uid.to_owned()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let what = || format!("{} {}/{name}", kind.name(), owner.namespace);
        let api = self.children(kind, &owner.namespace);
        let deleted = self.write(kind.name(), "delete", what, api.delete(name, &params)).await;
        match deleted {
            Err(WriteError::Refused { source, .. }) if is_missing(&source) => {}
            other => drop(other?),
        }
        self.cache.remove(super::cache::Watched::Children(kind), owner, name);
        Ok(())
    }

    /// Changes the number of a workload's pods and nothing else.
    pub async fn scale(&self, owner: &Key, name: &str, replicas: i32) -> Result<(), WriteError> {
        let what = || format!("Deployment {}/{name}", owner.namespace);
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patch = json!({"spec": {"replicas": replicas}});
        let api = self.children(Kind::Deployment, &owner.namespace);
        let patch = Patch::Merge(&patch);
        let scaled = api.patch(name, &params, &patch);
        let written = self.write(Kind::Deployment.name(), "scale", what, scaled).await?;
        self.keep(owner, Kind::Deployment, &written);
        Ok(())
    }

    /// Puts the finalizer on a deployment, or takes it off.
    pub async fn finalizer(&self, key: &Key, uid: &str, keep: bool) -> Result<(), WriteError> {
        let finalizers: &[&str] = if keep { &[FINALIZER] } else { &[] };
        let body = json!({
            "apiVersion": API_VERSION, "kind": KIND,
            "metadata": {"name": key.name, "uid": uid, "finalizers": finalizers},
        });
        let api: Api<PDDeployment> = Api::namespaced(self.client.clone(), &key.namespace);
        let (params, patch) = (PatchParams::apply(MANAGER).force(), Patch::Apply(&body));
        let what = || format!("finalizer of {KIND} {key}");
        let written = self
            .write(KIND, "finalizer", what, api.patch(&key.name, &params, &patch))
            .await;
        match written {
            Ok(object) => self.keep_deployment(key, object),
            Err(WriteError::Refused { source, .. }) if !keep && is_missing(&source) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Writes the status, if the deployment is still as it was when it was planned on.
    pub async fn status(&self, key: &Key, of: &PDDeployment, status: &PDDeploymentStatus) -> Result<(), WriteError> {
        let meta = &of.metadata;
        let body = json!({
            "apiVersion": API_VERSION, "kind": KIND,
            "metadata": {"name": key.name, "uid": meta.uid, "resourceVersion": meta.resource_version},
            "status": status,
        });
        let api: Api<PDDeployment> = Api::namespaced(self.client.clone(), &key.namespace);
        let (params, patch) = (PatchParams::apply(MANAGER).force(), Patch::Apply(&body));
        let what = || format!("status of {KIND} {key}");
        let object = self
            .write(KIND, "status", what, api.patch_status(&key.name, &params, &patch))
            .await?;
        self.keep_deployment(key, object);
        Ok(())
    }

    /// Reads a child as it is now.
    pub async fn read(&self, kind: Kind, namespace: &str, name: &str) -> Result<Option<Value>, WriteError> {
        let what = || format!("{} {namespace}/{name}", kind.name());
        match timeout(DEADLINE, self.children(kind, namespace).get_opt(name)).await {
            Err(_) => Err(WriteError::Silent { what: what() }),
            Ok(Err(error)) => Err(WriteError::Refused {
                what: what(),
                source: Box::new(error),
            }),
            Ok(Ok(found)) => Ok(found.map(|object| value(&object))),
        }
    }

    /// Whether a deployment is being deleted or gone, as the API server knows it now.
    pub async fn is_deleted(&self, key: &Key, uid: &str) -> Result<bool, WriteError> {
        let what = || format!("{KIND} {key}");
        let api: Api<PDDeployment> = Api::namespaced(self.client.clone(), &key.namespace);
        match timeout(DEADLINE, api.get_metadata_opt(&key.name)).await {
            Err(_) => Err(WriteError::Silent { what: what() }),
            Ok(Err(error)) => Err(WriteError::Refused {
                what: what(),
                source: Box::new(error),
            }),
            Ok(Ok(found)) => Ok(found.is_none_or(|found| {
                found.metadata.deletion_timestamp.is_some() || found.metadata.uid.as_deref() != Some(uid)
            })),
        }
    }

    /// The client, for what is no write of a child.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Runs a write within its deadline, if it may begin at all.
    pub async fn write<T>(
        &self,
        kind: &'static str,
        verb: &'static str,
        what: impl Fn() -> String,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, WriteError> {
        let Some(end) = self.leadership.allows() else {
            return Err(WriteError::NotLeading { what: what() });
        };
        let end = end.min(Instant::now() + DEADLINE);
        let result = tokio::select! {
            // The clock first: a process that was frozen must not send what is too late by now.
            biased;
            () = sleep_until(end) => Err(WriteError::Silent { what: what() }),
            answer = request => answer.map_err(|error| WriteError::Refused {
                what: what(),
                source: Box::new(error),
            }),
        };
        self.metrics.wrote(kind, verb, result.is_ok());
        result
    }

    fn children(&self, kind: Kind, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &kind.resource())
    }

    fn keep(&self, owner: &Key, kind: Kind, object: &DynamicObject) {
        let name = object.metadata.name.clone().unwrap_or_default();
        self.cache.put_child(owner, kind, &name, Child::of(&value(object)));
    }

    fn keep_deployment(&self, key: &Key, mut object: PDDeployment) {
        object.metadata.managed_fields = None;
        self.cache.put_deployment(key, object);
    }
}

/// An object without what only the API server needs.
fn value(object: &(impl Serialize + ?Sized)) -> Value {
    let mut value = serde_json::to_value(object).unwrap_or(Value::Null);
    if let Some(meta) = value["metadata"].as_object_mut() {
        meta.remove("managedFields");
    }
    value
}

fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}
