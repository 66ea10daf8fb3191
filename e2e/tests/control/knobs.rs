//! What a process takes while it runs.

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::operator::Operator;

use crate::processes::{info, ready};
use crate::stage::{Stage, condition};

async fn max_running(stage: &Stage) -> Option<u32> {
    let pod = ready(&stage.client, &stage.namespace, "decode").await;
    info(&pod).await.knobs.and_then(|knobs| knobs.max_running)
}

#[test]
fn a_hot_knob_writes_no_workload_and_is_taken_by_a_running_process() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "knob", &[8], json!({})).await;
        let before: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        stage
            .edit(json!({"decode": {"knobs": {"maxRunning": 7}}, "timeouts": {"queueSeconds": 5}}))
            .await;
        stage.promoted().await;
        let after: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        assert_eq!(before, after);
        assert_eq!(max_running(&stage).await, Some(7));
    });
}

#[test]
fn a_real_engine_takes_a_knob_and_still_has_it_when_it_starts_again_without_an_operator() {
    cluster::test(async |cluster| {
        let stage = Stage::new(cluster, "realknob", &[8]).await;
        stage.script.set(|pod| {
            let labels = pod.metadata.labels.as_ref();
            let router = labels.is_some_and(|labels| labels["tandem.dev/role"] == "router");
            Life {
                runs: if router { Runs::default() } else { Runs::Real },
                ..Life::default()
            }
        });
        let mut operator = Operator::start(&stage.options);
        stage.create(json!({})).await;
        let chat = stage.promoted().await;
        // the probe's KV has crossed
        assert_eq!(
            condition(&chat, "TransferHealthy"),
            ("True".into(), "HandoffsFinish".into())
        );
        let begun = info(&ready(&stage.client, &stage.namespace, "decode").await).await;
        stage.edit(json!({"decode": {"knobs": {"maxRunning": 7}}})).await;
        stage.promoted().await;
        let pod = ready(&stage.client, &stage.namespace, "decode").await;
        let now = info(&pod).await;
        assert_eq!(now.boot_id, begun.boot_id, "it was not restarted");
        assert_eq!(now.knobs.and_then(|knobs| knobs.max_running), Some(7));

        operator.process().kill();
        cluster.kubelet().kill(&pod);
        let again = tandem_e2e::eventually("another incarnation", crate::stage::LIMIT, async || {
            let pod = ready(&stage.client, &stage.namespace, "decode").await;
            let restarts = pod
                .status
                .iter()
                .flat_map(|status| status.container_statuses.iter().flatten());
            match restarts.map(|container| container.restart_count).sum::<i32>() {
                0 => Err("not started again"),
                _ => Ok(info(&pod).await),
            }
            .map_err(str::to_owned)
        })
        .await;
        assert_ne!(again.boot_id, begun.boot_id);
        assert_eq!(again.knobs.and_then(|knobs| knobs.max_running), Some(7));
    });
}
