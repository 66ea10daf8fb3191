//! Two operators, of which one works.

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::fault::{Fault, Proxy};
use tandem_e2e::cluster::operator::{Operator, Options};

use crate::stage::{LIMIT, Stage, restarts};

#[test]
fn another_operator_takes_over_from_one_that_was_killed() {
    cluster::test(async |cluster| {
        let (stage, mut first) = Stage::settled(cluster, "killed", &[8], json!({})).await;
        let mut second = Operator::start(&Options {
            identity: "second".into(),
            ..stage.options.clone()
        });
        second.ready().await;
        first.process().kill();
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
    });
}

#[test]
fn an_operator_that_is_cut_off_ends_and_writes_nothing_any_more() {
    cluster::test(async |cluster| {
        let mut stage = Stage::new(cluster, "cutoff", &[8]).await;
        let direct = stage.options.clone();
        let proxy = Proxy::start(cluster.plain(&stage.options.kubeconfig)).await;
        stage.options.kubeconfig = cluster.kubeconfig_of(&format!("{}-proxy", stage.namespace), &proxy.server());
        let mut first = Operator::start(&stage.options);
        stage.create(json!({})).await;
        stage.promoted().await;
        let mut second = Operator::start(&Options {
            identity: "second".into(),
            ..direct
        });
        second.ready().await;
        // The first sees no answer, while it has something to write.
        proxy.rule(|_| Fault::Drop);
        proxy.cut_watches();
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
        // It is reachable again: what it would still write came through now.
        let before = proxy.seen().len();
        proxy.rule(|_| Fault::None);
        first.process().wait(LIMIT).await;
        let late: Vec<_> = proxy.seen()[before..]
            .iter()
            .filter(|seen| seen.writes())
            .cloned()
            .collect();
        assert!(late.is_empty(), "{late:?}");
    });
}
