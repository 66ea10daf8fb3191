//! A `PDDeployment` as the API server has it.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Api;
use kube::core::DynamicObject;
use serde::Deserialize;
use serde_json::Value;
use tandem_crds::{Inputs, PDDeploymentSpec, PDDeploymentStatus};
use tandem_plan::{Revision, target_of};

use super::connect::{Cluster, ClusterError, Need, RESOURCE};

/// One of them. Its spec is read only where it is needed: another version may have fields that are not known here.
#[derive(Debug, Clone)]
pub struct Deployment {
    pub object: DynamicObject,
    pub status: PDDeploymentStatus,
}

impl Deployment {
    /// Asks for it; none where it is not there.
    pub async fn find(cluster: &Cluster, name: &str) -> Result<Option<Self>, ClusterError> {
        let asked = cluster.deployments();
        let found = cluster.ask(Need::view("get", RESOURCE), asked.get_opt(name)).await?;
        found.map(Self::read).transpose()
    }

    /// Asks for it.
    pub async fn get(cluster: &Cluster, name: &str) -> Result<Self, ClusterError> {
        let found = Self::find(cluster, name).await?;
        found.ok_or_else(|| ClusterError::NotFound {
            name: name.to_owned(),
            namespace: cluster.namespace.clone(),
        })
    }

    /// Reads an object.
    pub fn read(object: DynamicObject) -> Result<Self, ClusterError> {
        let status = match object.data.get("status") {
            None => PDDeploymentStatus::default(),
            Some(status) => PDDeploymentStatus::deserialize(status)
                .map_err(|error| newer(object.metadata.name.as_deref(), "status", &error))?,
        };
        Ok(Self { object, status })
    }

    pub fn name(&self) -> &str {
        self.object.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.object.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// What it should be.
    pub fn spec(&self) -> Result<PDDeploymentSpec, ClusterError> {
        PDDeploymentSpec::deserialize(&self.object.data["spec"])
            .map_err(|error| newer(self.object.metadata.name.as_deref(), "spec", &error))
    }

    /// The generation that no status is about yet.
    pub fn unseen(&self) -> Option<i64> {
        let generation = self.object.metadata.generation?;
        (self.status.observed_generation < generation).then_some(generation)
    }

    pub fn is_paused(&self) -> bool {
        self.object.data["spec"]["rollout"]["paused"] == true
    }

    /// A condition by its type.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.conditions.iter().find(|condition| condition.type_ == type_)
    }

    /// The spec of what runs, with the restart that it was last asked for: what a change is told against. None before the first
    /// was promoted.
    pub async fn running(&self, cluster: &Cluster) -> Result<Option<PDDeploymentSpec>, ClusterError> {
        let running = &self.status.revisions.running;
        if running.is_empty() {
            return Ok(None);
        }
        let now = self.spec()?;
        let mut spec = if Inputs::of(&now).target() == target_of(running) {
            now
        } else {
            self.stored(cluster, running).await?
        };
        if let Some(token) = &self.status.restart_token {
            spec.restart.token.clone_from(token);
        }
        Ok(Some(spec))
    }

    /// A revision, as the operator has stored it.
    async fn stored(&self, cluster: &Cluster, id: &str) -> Result<PDDeploymentSpec, ClusterError> {
        #[derive(Deserialize)]
        struct Stored {
            revision: Revision,
        }
        let revisions: Api<ControllerRevision> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let name = format!("{}-{id}", self.name());
        let asked = cluster.ask(Need::view("get", "controllerrevisions"), revisions.get(&name));
        let data = asked.await?.data.map_or(Value::Null, |data| data.0);
        let stored = Stored::deserialize(data).map_err(|error| newer(Some(&name), "revision", &error))?;
        Ok(stored.revision.spec)
    }
}

fn newer(name: Option<&str>, what: &str, error: &serde_json::Error) -> ClusterError {
    ClusterError::Refused(format!(
        "the {what} of {} is not known to this program: {error}; use the tandem of the cluster's version",
        name.unwrap_or_default()
    ))
}
