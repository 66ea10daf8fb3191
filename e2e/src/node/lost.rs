//! A node out of reach.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::Nodes;
use crate::cluster::api::{Api, Client, path};
use crate::eventually;

/// A node whose kubelet has ended and whose cable is pulled, until this is dropped. Its pods live on.
#[derive(Debug)]
pub struct Lost {
    nodes: &'static Nodes,
    client: Client,
    name: &'static str,
    /// When it was cut off.
    pub since: Instant,
}

impl Lost {
    /// Cuts it off.
    pub fn cut(nodes: &'static Nodes, name: &'static str) -> Self {
        let lost = Self {
            nodes,
            client: nodes.admin(),
            name,
            since: Instant::now(),
        };
        nodes.cluster(&["cut", name]);
        lost
    }

    /// Waits until Kubernetes takes it for lost.
    pub async fn unknown(&self, limit: Duration) {
        let all: Api<Value> = Api::at(&self.client, &path("v1", "", "nodes"));
        eventually("the node is not known to live any more", limit, async || {
            let node = all.get(self.name).await.map_err(|refused| refused.to_string())?;
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.into_iter().find(|one| one["type"] == "Ready");
            match ready {
                Some(ready) if ready["status"] == "Unknown" => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        // A test that fails says why it does, not this.
        if let Err(why) = self.nodes.mend(self.name) {
            eprintln!("{} could not be mended: {why}", self.name);
        }
    }
}
