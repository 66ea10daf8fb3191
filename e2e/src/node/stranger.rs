//! A pod that is none of ours, in a namespace of its own.

use serde_json::{Value, json};

use super::serving::STAGE;
use super::{LIMIT, Nodes};
use crate::cluster::api::{Api, path};
use crate::eventually;

impl Nodes {
    /// Makes the namespace and the pod, and waits until it runs.
    pub async fn stranger(&self, namespace: &str) -> Value {
        let client = self.admin();
        let namespaces: Api<Value> = Api::at(&client, &path("v1", "", "namespaces"));
        let made = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {STAGE: "true"}}});
        namespaces.create(&made).await.expect("a namespace");
        let pods: Api<Value> = Api::at(&client, &path("v1", &format!("namespaces/{namespace}/"), "pods"));
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
            "spec": {
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0,
                // It does nothing for as long as it lives.
                "containers": [{"name": "stranger", "image": "localhost/pause:1", "imagePullPolicy": "Never"}],
            },
        });
        // The namespace's service account is made a moment later.
        eventually("the pod is admitted", LIMIT, async || {
            pods.create(&pod).await.map(drop).map_err(|refused| refused.to_string())
        })
        .await;
        eventually("the pod runs", LIMIT, async || {
            let pod = pods.get("stranger").await.map_err(|refused| refused.to_string())?;
            if pod["status"]["phase"] == "Running" {
                Ok(pod)
            } else {
                Err(pod["status"].to_string())
            }
        })
        .await
    }
}
