//! What needs a Kubernetes API server: a real control plane with scripted nodes. One binary, so that the tests share one cluster.

#![expect(clippy::expect_used, reason = "helpers of tests: a step that fails fails the test")]

mod always;
mod api;
mod children;
mod deletion;
mod discovery;
mod faults;
mod fixtures;
mod gates;
mod health;
mod kills;
mod knobs;
mod leaders;
mod nodes;
mod order;
mod plugin;
mod processes;
mod quiet;
mod scale;
mod stage;
mod supersede;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use tandem_e2e::cluster::api::Api;
use tandem_e2e::cluster::{Cluster, PATIENCE};
use tandem_e2e::eventually;

/// The CRD as it was installed from the committed file: once for all tests.
async fn crd(cluster: &Cluster) -> CustomResourceDefinition {
    let path = tandem_e2e::root().join("charts/tandem-crds/templates/pddeployments.yaml");
    let text = std::fs::read_to_string(&path).expect("the committed CRD");
    let applied = cluster.kubectl(&["apply", "--server-side", "--filename=-"], &text);
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    let api: Api<CustomResourceDefinition> = Api::all(&cluster.admin());
    eventually("the CRD is established", PATIENCE, async || {
        let crd = api
            .get("pddeployments.tandem.dev")
            .await
            .map_err(|refused| refused.to_string())?;
        let conditions = crd.status.as_ref().and_then(|status| status.conditions.as_ref());
        let established = conditions
            .into_iter()
            .flatten()
            .any(|one| one.type_ == "Established" && one.status == "True");
        established.then_some(crd).ok_or_else(|| "not yet".to_owned())
    })
    .await
}
