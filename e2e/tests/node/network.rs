//! Who reaches whom.

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::eventually;
use tandem_e2e::node::serving::Stage;
use tandem_e2e::node::{self, LIMIT, Nodes};

/// Ports of the pods.
const API: u16 = 8080;
const CONTROL: u16 = 7101;
const OPS: u16 = 7102;
const DATA: u16 = 7103;
const ADMIN: u16 = 7104;

/// Whether a process in a pod's network reaches a port of another pod within two seconds.
fn reaches(nodes: &Nodes, from: &Value, to: &Value, port: u16) -> bool {
    let node = from["spec"]["nodeName"].as_str().expect("a node");
    let id = from["status"]["containerStatuses"][0]["containerID"]
        .as_str()
        .expect("an id");
    let id = id.strip_prefix("containerd://").expect("containerd's");
    let address = to["status"]["podIP"].as_str().expect("an address");
    let script = format!(
        "pid=$(ctr --namespace=k8s.io tasks list | awk -v id={id} '$1 == id {{print $2}}'); \
         nsenter --target=$pid --net timeout 2 bash -c 'exec 3<>/dev/tcp/{address}/{port}' && echo yes || echo no"
    );
    nodes.on(node, &["sh", "-c", &script]).trim() == "yes"
}

/// Waits until it is so: the firewall follows new pods a moment later.
async fn hold(nodes: &Nodes, from: (&str, &Value), to: (&str, &Value), port: u16, wanted: bool) {
    let what = format!("from {} to {}, port {port}: {wanted}", from.0, to.0);
    eventually(&what, LIMIT, async || {
        let found = reaches(nodes, from.1, to.1, port);
        if found == wanted {
            Ok(())
        } else {
            Err(found.to_string())
        }
    })
    .await;
}

#[test]
fn roles_reach_each_other_by_the_ports_that_they_need_and_by_no_others() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "reach", json!({})).await;
        for (from, to, port, wanted) in [
            (Role::Decode, Role::Prefill, CONTROL, true),
            (Role::Decode, Role::Prefill, DATA, true),
            (Role::Router, Role::Decode, CONTROL, true),
            (Role::Prefill, Role::Router, API, true),
            (Role::Prefill, Role::Decode, CONTROL, false),
            (Role::Prefill, Role::Decode, ADMIN, false),
            (Role::Decode, Role::Router, ADMIN, false),
        ] {
            let [from, to] = [from, to].map(|role| (role.field(), stage.pod(role)));
            hold(nodes, (from.0, &from.1), (to.0, &to.1), port, wanted).await;
        }
        stage.remove().await;
    });
}

#[test]
fn a_foreign_pod_reaches_the_api_and_with_leave_the_metrics_and_nothing_else() {
    const SCRAPER: &str = "test-scraper";
    node::test(async |nodes| {
        nodes.upgrade(&[&format!("metrics.namespaces={{{SCRAPER}}}")]);
        let stage = Stage::new(nodes, "foreign").await;
        stage.create(json!({})).await;
        stage.promoted().await;
        let (stranger, scraper) = tokio::join!(nodes.stranger("test-stranger"), nodes.stranger(SCRAPER));
        let operators = nodes.operators().await;
        let mut ours: Vec<(&str, Value)> = Role::ALL.map(|role| (role.field(), stage.pod(role))).into();
        ours.extend(operators.iter().map(|pod| ("operator", pod.clone())));
        for (name, pod) in &ours {
            let to = (*name, pod);
            hold(nodes, ("the scraper", &scraper), to, OPS, true).await;
            hold(nodes, ("the stranger", &stranger), to, OPS, false).await;
            // to what everybody may reach it is on its way already
            hold(nodes, ("the stranger", &stranger), to, API, *name == "router").await;
            for port in [CONTROL, DATA, ADMIN] {
                for from in [("the stranger", &stranger), ("the scraper", &scraper)] {
                    hold(nodes, from, to, port, false).await;
                }
            }
        }
        // which asks engines and routers for what conditions are made of
        for (role, port) in [
            (Role::Prefill, CONTROL),
            (Role::Decode, CONTROL),
            (Role::Prefill, ADMIN),
            (Role::Decode, ADMIN),
            (Role::Router, ADMIN),
        ] {
            hold(
                nodes,
                ("the operator", &operators[0]),
                (role.field(), &stage.pod(role)),
                port,
                true,
            )
            .await;
        }
        nodes.upgrade(&[]);
        stage.remove().await;
    });
}
