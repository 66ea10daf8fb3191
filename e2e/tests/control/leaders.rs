//! Two operators, of which one works.

use std::time::Duration;

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::cluster::fault::{Fault, Proxy, Seen};
use tandem_e2e::cluster::operator::{Operator, Options};
use tandem_e2e::cluster::{self, Cluster};

use crate::stage::{LIMIT, Stage, restarts};

/// So that nobody has to wait for the end of one.
const LEASE: Duration = Duration::from_secs(2);

/// A deployment that is settled, whose operator speaks through a proxy, and another operator that stands by.
async fn two(cluster: &'static Cluster, purpose: &str) -> (Stage, Proxy, Operator, Operator) {
    let mut stage = Stage::new(cluster, purpose, &[8]).await;
    stage.options.lease = LEASE;
    let direct = stage.options.clone();
    let proxy = Proxy::start(cluster.plain(&stage.options.kubeconfig)).await;
    stage.options.kubeconfig = cluster.kubeconfig_of(&format!("{}-proxy", stage.namespace), &proxy.server());
    let first = Operator::start(&stage.options);
    stage.create(json!({})).await;
    stage.promoted().await;
    let mut second = Operator::start(&Options {
        identity: "second".into(),
        ..direct
    });
    second.ready().await;
    (stage, proxy, first, second)
}

/// What an operator that does not lead any more has asked to be written since.
fn late(proxy: &Proxy, since: usize) -> Vec<Seen> {
    let seen = proxy.seen();
    seen[since..].iter().filter(|seen| seen.writes()).cloned().collect()
}

#[test]
fn another_operator_takes_over_from_one_that_was_killed() {
    cluster::test(async |cluster| {
        let (stage, _proxy, mut first, _second) = two(cluster, "killed").await;
        first.process().kill();
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
    });
}

#[test]
fn an_operator_that_is_cut_off_ends_and_writes_nothing_any_more() {
    cluster::test(async |cluster| {
        let (stage, proxy, mut first, _second) = two(cluster, "cutoff").await;
        // It sees no answer, while it has something to write.
        proxy.rule(|_| Fault::Drop);
        proxy.cut_watches();
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
        // It is reachable again: what it would still write came through now.
        let since = proxy.seen().len();
        proxy.rule(|_| Fault::None);
        first.process().wait(LIMIT).await;
        let late = late(&proxy, since);
        assert!(late.is_empty(), "{late:?}");
    });
}

#[test]
fn an_operator_that_is_frozen_ends_and_writes_nothing_any_more() {
    cluster::test(async |cluster| {
        let (stage, proxy, mut first, _second) = two(cluster, "frozen").await;
        // It thaws with a change to carry out, and with a lease that it does not know to be lost.
        first.process().signal(libc::SIGSTOP);
        let since = proxy.seen().len();
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
        first.process().signal(libc::SIGCONT);
        first.process().wait(LIMIT).await;
        let late = late(&proxy, since);
        assert!(late.is_empty(), "{late:?}");
    });
}
