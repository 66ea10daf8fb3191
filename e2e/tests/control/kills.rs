//! The operator is killed after each write: the write is done, and it never learns of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tandem_crds::{PDDeployment, Role};
use tandem_e2e::cluster;
use tandem_e2e::cluster::api::Patch;
use tandem_e2e::cluster::audit::Request;
use tandem_e2e::cluster::fault::{Fault, Proxy};
use tandem_e2e::cluster::operator::Operator;
use tandem_e2e::eventually;

use crate::always;
use crate::stage::{LIMIT, NAME, Stage, restarts};

/// No change has so many writes.
const ENOUGH: usize = 80;
/// In `make test-long` besides: a change for each write of the undisturbed one, with one kill after that write.
const EACH: &str = "TANDEM_TEST_KILLS";

/// An operator, and changes that it carries out.
struct Rig {
    stage: Stage,
    proxy: Proxy,
    operator: Operator,
}

/// What a change came to.
struct Change {
    kills: usize,
    /// All that lasts, the status included.
    writes: usize,
    /// Those of children, in no order: `delete deployments chat-p-#`.
    children: Vec<String>,
    restarted: Vec<Role>,
}

impl Rig {
    /// Carries out an edit while each write that `killed` says is the last of its operator.
    async fn change(&mut self, edit: Value, mut killed: impl FnMut() -> bool + Send + 'static) -> Change {
        let since = always::now(&self.stage.events());
        let before = lasting(&self.stage).len();
        self.proxy.rule(move |seen| {
            if seen.writes() && killed() {
                Fault::Hold
            } else {
                Fault::None
            }
        });
        let mut held = self.proxy.held();
        held.borrow_and_update();
        self.stage.edit(edit).await;
        let mut kills = 0;
        let chat = loop {
            tokio::select! {
                chat = done(&self.stage, &mut self.operator) => break chat,
                _ = held.changed() => {}
            }
            kills += 1;
            assert!(
                kills < ENOUGH,
                "not done after {kills} kills: {:#?}",
                self.stage.writes()
            );
            self.operator.kill_and_restart();
        };
        self.proxy.rule(|_| Fault::None);
        let writes = lasting(&self.stage).split_off(before);
        let events = self.stage.events();
        always::check(&events, 8);
        let status = chat.status.expect("a status");
        let restarted = status.history[0].restarted.clone();
        let revisions: Vec<_> = status
            .roles
            .iter()
            .filter(|role| restarted.contains(&role.name))
            .map(|role| (role.name.field(), role.revision.as_str()))
            .collect();
        always::order(&events, since, &revisions);
        Change {
            kills,
            writes: writes.len(),
            children: children(&writes),
            restarted,
        }
    }
}

/// Waits until the change is promoted and an operator has nothing to write any more.
async fn done(stage: &Stage, operator: &mut Operator) -> PDDeployment {
    let chat = stage.promoted().await;
    operator.ready().await;
    let settled = async || {
        let metrics = operator.metrics().await;
        metrics.sum("tandem_operator_passes_total", &["result=\"settled\""])
    };
    let before = settled().await;
    let touch = json!({"metadata": {"annotations": {"test/touched": before.to_string()}}});
    stage.api().patch(NAME, Patch::Merge, &touch).await.expect("a touch");
    eventually("a pass that finds nothing to do", LIMIT, async || {
        let now = settled().await;
        if now > before {
            Ok(())
        } else {
            Err(format!("{now} passes"))
        }
    })
    .await;
    chat
}

/// The operator's writes that last: no lease, no event.
fn lasting(stage: &Stage) -> Vec<Request> {
    let mut all = stage.cluster.audit().writes_of(&stage.options.user());
    all.retain(|one| !["leases", "events"].contains(&one.object_ref.resource.as_str()));
    all
}

/// Writes of children without the hashes in their names, which differ from change to change.
fn children(writes: &[Request]) -> Vec<String> {
    let is_hash = |part: &&str| part.len() >= 6 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let anonymous = |name: &str| -> String {
        let parts = name.split('-').map(|part| if is_hash(&part) { "#" } else { part });
        parts.collect::<Vec<_>>().join("-")
    };
    let mut all: Vec<String> = writes
        .iter()
        .filter(|one| one.object_ref.resource != "pddeployments")
        .map(|one| {
            let object = &one.object_ref;
            let code = one.response_status.code;
            format!("{} {} {} -> {code}", one.verb, object.resource, anonymous(&object.name))
        })
        .collect();
    all.sort_unstable();
    all
}

/// Each once: an operator that comes when the old pods are gone already makes the new workload with its pods at once, and has none to
/// add later.
fn distinct(sorted: &[String]) -> Vec<String> {
    let mut each = sorted.to_vec();
    each.dedup();
    each
}

/// Changes of one kind: as they are, with each operator killed after its first write, and, in `make test-long`, one for each write.
fn killed_after_each_write(purpose: &'static str, edit: fn(usize) -> Value) {
    cluster::test(async |cluster| {
        let mut stage = Stage::new(cluster, purpose, &[8]).await;
        let proxy = Proxy::start(cluster.plain(&stage.options.kubeconfig)).await;
        stage.options.kubeconfig = cluster.kubeconfig_of(&format!("{}-proxy", stage.namespace), &proxy.server());
        let operator = Operator::start(&stage.options);
        // So that each change finds as many revisions stored as the one before.
        stage.create(json!({"historyLimit": 1})).await;
        stage.promoted().await;
        let mut rig = Rig { stage, proxy, operator };
        rig.change(edit(0), || false).await;
        let calm = rig.change(edit(1), || false).await;
        assert_eq!(calm.kills, 0);

        let killed = rig.change(edit(2), || true).await;
        // The status is written less often: an operator that comes finds more done than was told.
        let (children, all) = (calm.children.len(), calm.writes);
        println!(
            "{purpose}: {} kills; undisturbed {all} writes, {children} of them of children",
            killed.kills
        );
        assert_eq!(killed.kills, killed.writes, "after each write");
        assert_eq!(distinct(&killed.children), distinct(&calm.children));
        assert_eq!(killed.restarted, calm.restarted);

        if std::env::var(EACH).is_ok_and(|each| each == "each") {
            for last in 1..=calm.writes {
                let count = Arc::new(AtomicUsize::new(0));
                let at = Arc::clone(&count);
                let killed = move || at.fetch_add(1, Ordering::Relaxed) + 1 == last;
                let change = rig.change(edit(2 + last), killed).await;
                // How often the status is written depends on what comes to be seen together.
                assert!(
                    change.kills == 1 || change.writes < last,
                    "{} kills after write {last}",
                    change.kills
                );
                assert_eq!(
                    distinct(&change.children),
                    distinct(&calm.children),
                    "killed after write {last}"
                );
                assert_eq!(change.restarted, calm.restarted, "killed after write {last}");
            }
            println!("{purpose}: {} changes, one kill in each", calm.writes);
        }
    });
}

#[test]
fn killed_after_each_write_of_a_prefill_edit() {
    killed_after_each_write("kill-prefill", |number| restarts(Role::Prefill, &number.to_string()));
}

#[test]
fn killed_after_each_write_of_a_decode_edit() {
    killed_after_each_write("kill-decode", |number| restarts(Role::Decode, &number.to_string()));
}

#[test]
fn killed_after_each_write_of_a_router_edit() {
    killed_after_each_write("kill-router", |number| restarts(Role::Router, &number.to_string()));
}

#[test]
fn killed_after_each_write_of_a_change_of_the_contract() {
    killed_after_each_write(
        "kill-contract",
        |number| json!({"model": {"name": format!("m{number}")}}),
    );
}

#[test]
fn killed_after_each_write_of_a_hot_edit() {
    killed_after_each_write(
        "kill-hot",
        |number| json!({"decode": {"knobs": {"maxRunning": 7 + number}}}),
    );
}
