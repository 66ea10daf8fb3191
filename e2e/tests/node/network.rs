//! Who reaches whom.

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::eventually;
use tandem_e2e::node::serving::Stage;
use tandem_e2e::node::{self, LIMIT, Nodes};

/// Whether a process in a pod's network reaches a port of another pod within two seconds.
fn reaches(nodes: &Nodes, stage: &Stage, from: Role, to: Role, port: u16) -> bool {
    let (from, to) = (stage.pod(from), stage.pod(to));
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

#[test]
fn roles_reach_each_other_by_the_ports_that_they_need_and_by_no_others() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "reach", json!({})).await;
        for (from, to, port, wanted) in [
            (Role::Decode, Role::Prefill, 7101, true),
            (Role::Decode, Role::Prefill, 7103, true),
            (Role::Router, Role::Decode, 7101, true),
            (Role::Prefill, Role::Router, 8080, true),
            (Role::Prefill, Role::Decode, 7101, false),
            (Role::Prefill, Role::Decode, 7104, false),
            (Role::Decode, Role::Router, 7104, false),
        ] {
            // The firewall follows new pods a moment later.
            let what = format!("from {from:?} to {to:?}, port {port}: {wanted}");
            eventually(&what, LIMIT, async || {
                let found = reaches(nodes, &stage, from, to, port);
                if found == wanted {
                    Ok(())
                } else {
                    Err(found.to_string())
                }
            })
            .await;
        }
        stage.remove().await;
    });
}
