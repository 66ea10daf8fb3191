//! An API server that cannot be relied on.

use std::time::Duration;

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::fault::{Fault, Proxy, Seen};
use tandem_e2e::cluster::operator::Operator;
use tandem_e2e::cluster::record::name;

use crate::always;
use crate::stage::{Stage, restarts};

/// More than a change with faults needs, and far less than a loop that does not wait would make.
const REQUESTS: usize = 1500;

/// Each of the operator's watches is listed and opened anew after a cut.
const CUTS: u32 = 15;

/// A fault and its name.
type Named = (&'static str, fn(u32, &Seen) -> Fault);

/// A change of the contract with each of these faults.
fn the_same_end(purpose: &'static str, faults: &'static [Named], cut: bool) {
    cluster::test(async |cluster| {
        let mut stage = Stage::new(cluster, purpose, &[8]).await;
        let proxy = Proxy::start(cluster.plain(&stage.options.kubeconfig)).await;
        stage.options.kubeconfig = cluster.kubeconfig_of(&format!("{}-proxy", stage.namespace), &proxy.server());
        let _operator = Operator::start(&stage.options);
        stage.create(json!({})).await;
        stage.promoted().await;
        for (round, (what, fault)) in faults.iter().enumerate() {
            let before = proxy.seen().len();
            let mut count = 0;
            // The lease is left alone: an operator that loses it ends, and another takes over.
            proxy.rule(move |seen| {
                if seen.path.contains("/leases") {
                    return Fault::None;
                }
                count += 1;
                fault(count, seen)
            });
            stage.edit(json!({"model": {"name": format!("m{round}")}})).await;
            tokio::select! {
                _ = stage.promoted() => {}
                () = cutting(&proxy, cut) => {}
            }
            proxy.rule(|_| Fault::None);
            let requests = proxy.seen().len() - before;
            assert!(requests < REQUESTS, "{what}: {requests} requests");
            println!("{purpose}, {what}: {requests} requests");
            // As many of each role as there are revisions that are kept: none was made twice.
            let state = stage.recorder.state();
            for role in Role::ALL {
                let running = stage.templates(role);
                assert_eq!(running.len(), 1, "{what}: {role:?} has {running:?}");
            }
            let names: Vec<_> = state.all("deployments").map(name).collect();
            assert!(names.len() <= 3 + 2 * (round + 2), "{what}: {names:?}");
        }
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
        always::check(&stage.events(), 8);
    });
}

/// Breaks all watches again and again, so often that a bound of the requests holds however long the change takes.
async fn cutting(proxy: &Proxy, cut: bool) {
    let cuts = if cut { CUTS } else { 0 };
    let mut tick = tokio::time::interval(Duration::from_millis(300));
    for _ in 0..cuts {
        tick.tick().await;
        proxy.cut_watches();
    }
    std::future::pending::<()>().await;
}

/// One in so many, without a rhythm that the operator's own could meet.
fn some(many: u32, count: u32, fault: Fault) -> Fault {
    if (count.wrapping_mul(2_654_435_761) >> 16).is_multiple_of(many) {
        fault
    } else {
        Fault::None
    }
}

fn some_writes(many: u32, count: u32, seen: &Seen, fault: Fault) -> Fault {
    if seen.writes() {
        some(many, count, fault)
    } else {
        Fault::None
    }
}

#[test]
fn requests_that_are_lost_or_late_change_nothing_about_the_end() {
    the_same_end(
        "lost",
        &[
            ("dropped", |count, _| some(6, count, Fault::Drop)),
            ("done but unheard", |count, seen| {
                some_writes(4, count, seen, Fault::Unheard)
            }),
            ("late", |count, seen| {
                some_writes(1, count, seen, Fault::Delay(Duration::from_millis(200)))
            }),
        ],
        false,
    );
}

#[test]
fn requests_that_are_refused_change_nothing_about_the_end() {
    the_same_end(
        "refused",
        &[
            ("409", |count, seen| some_writes(5, count, seen, Fault::Status(409))),
            ("429", |count, _| some(6, count, Fault::Status(429))),
            ("500", |count, _| some(6, count, Fault::Status(500))),
        ],
        false,
    );
}

#[test]
fn watches_that_are_cut_change_nothing_about_the_end() {
    the_same_end("cut", &[("cut watches", |_, _| Fault::None)], true);
}
