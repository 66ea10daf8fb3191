//! `kubectl tandem` on a real API server: what it shows, what it asks for, and what it says where it may not.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tandem_crds::status::Step;
use tandem_crds::{PDDeploymentSpec, Role, rules};
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::peer::{Completions, Script};
use tandem_e2e::cluster::{self, PATIENCE};
use tandem_e2e::{bin, eventually};
use tandem_plan::rehearsal;
use tokio::process::Command;

use crate::stage::{NAME, Stage, manifest, restarts, step};

/// The program, as somebody in a namespace.
struct Plugin {
    program: PathBuf,
    before: Vec<String>,
    config: PathBuf,
    namespace: String,
}

/// What it said.
#[derive(Debug)]
struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Plugin {
    fn new(stage: &Stage, config: PathBuf) -> Self {
        Self {
            program: bin("tandem"),
            before: Vec::new(),
            config,
            namespace: stage.namespace.clone(),
        }
    }

    /// As an account of the namespace with this ClusterRole.
    async fn of(stage: &Stage, role: &str) -> Self {
        stage.cluster.account(&stage.namespace, role, role).await;
        let plugin = Self::new(stage, stage.cluster.token(&stage.namespace, role).await);
        // The controllers add Tandem's own rights to the ClusterRoles that Kubernetes has.
        eventually("the ClusterRole has our rights", PATIENCE, async || {
            let said = plugin.run(&["history", NAME]).await;
            if said.code == 0 { Ok(()) } else { Err(said.err) }
        })
        .await;
        plugin
    }

    async fn run(&self, args: &[&str]) -> Said {
        let output = Command::new(&self.program)
            .args(&self.before)
            .args(args)
            .args(["-n", &self.namespace])
            .env("KUBECONFIG", &self.config)
            .kill_on_drop(true)
            .output()
            .await
            .expect("it starts");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Said {
            code: output.status.code().expect("an exit code"),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    /// What it says where it does as asked.
    async fn does(&self, args: &[&str]) -> String {
        let said = self.run(args).await;
        assert_eq!(said.code, 0, "{args:?}: {said:?}");
        said.out
    }
}

fn file(dir: &Path, stage: &Stage, spec: Value) -> String {
    let path = dir.join("file.yaml");
    let text = manifest(NAME, &stage.namespace, spec).to_string();
    std::fs::write(&path, text).expect("a file");
    path.to_str().expect("UTF-8").to_owned()
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn a_viewer_sees_nothing_or_changes_something() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "viewer", &[8], json!({})).await;
        let viewer = Plugin::of(&stage, "view").await;
        let status = stage.chat().status.expect("a status");
        let running = status.revisions.running.as_str();

        let shown = viewer.does(&["status", NAME]).await;
        has(
            &shown,
            &[
                &format!("{NAME} in {}: ready: revision {running} runs", stage.namespace),
                "Available",
                "Serving",
                &status.roles[1].revision,
            ],
        );
        let listed = viewer.does(&["status"]).await;
        let like_kubectl = cluster.kubectl(&["get", "pdd", "-n", &stage.namespace], "").stdout;
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let (listed, like_kubectl) = (words(&listed), words(&String::from_utf8_lossy(&like_kubectl)));
        // all but the age
        assert_eq!(listed[..listed.len() - 1], like_kubectl[..like_kubectl.len() - 1]);
        let wide = viewer.does(&["status", "-o", "wide"]).await;
        has(&wide, &["LASTGOOD", running]);
        let json: Value = serde_json::from_str(&viewer.does(&["status", NAME, "-o", "json"]).await).expect("JSON");
        assert_eq!(json["status"]["revisions"]["running"], running);
        assert!(json["metadata"]["managedFields"].is_null());
        has(
            &viewer.does(&["history", NAME]).await,
            &["REVISION", running, "Promoted"],
        );
        has(
            &viewer.does(&["history", NAME, "--revision", &running[..6]]).await,
            &["restarted: prefill,decode,router"],
        );

        for asked in [vec!["restart", NAME], vec!["approve", NAME, "--revision", "0123456789"]] {
            let said = viewer.run(&asked).await;
            assert_eq!(said.code, 1, "{said:?}");
            has(
                &said.err,
                &["may not patch pddeployments", &stage.namespace, "tandem-edit"],
            );
        }
        let said = viewer.run(&["status", "nobody"]).await;
        assert_eq!(said.code, 1, "{said:?}");
        has(
            &said.err,
            &["no PDDeployment \"nobody\" in namespace", &stage.namespace],
        );
        let said = viewer.run(&["status", "-A"]).await;
        assert_eq!(said.code, 2, "-A and -n: {said:?}");

        // As kubectl's own users have it, and as one that an administrator stands in for.
        let dir = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink(bin("tandem"), dir.path().join("kubectl-tandem")).expect("a link");
        let admin = cluster.dir().join("pki/admin.kubeconfig");
        let output = Command::new(cluster.dir().join("kubectl"))
            .args(["tandem", "status", "-n", &stage.namespace])
            .arg(format!("--as=system:serviceaccount:{}:view", stage.namespace))
            .env("PATH", dir.path())
            .env("KUBECONFIG", &admin)
            .output()
            .await
            .expect("kubectl starts");
        let (out, err) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(output.status.success() && out.contains(running), "{out}{err}");
        let mut plugin = Plugin::new(&stage, admin);
        plugin.program = dir.path().join("kubectl-tandem");
        let help = plugin.run(&["--help"]).await.out;
        has(&help, &["Usage: kubectl tandem <COMMAND>", "restart"]);
        assert!(!help.contains("bench"), "{help}");
        plugin.before = vec![format!("--as=system:serviceaccount:{}:view", stage.namespace)];
        plugin.before.insert(0, "restart".into());
        let said = plugin.run(&[NAME]).await;
        has(&said.err, &["may not patch pddeployments"]);
        assert_eq!(outcomes(&stage), 1, "nothing was changed");
    });
}

fn outcomes(stage: &Stage) -> usize {
    crate::stage::outcomes(&stage.chat()).len()
}

/// What this file does not say is as in the cluster.
fn kept() -> Value {
    json!({"decode": {"pod": {"annotations": {"kept": "1"}}}, "rollout": {"gates": {"probe": {"timeoutSeconds": 15}}}})
}

#[test]
fn a_plan_tells_of_another_change_than_apply_makes() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "plans", &[8], kept()).await;
        let editor = Plugin::of(&stage, "edit").await;
        let dir = tempfile::tempdir().expect("a folder");
        let spec = |value: Value| -> PDDeploymentSpec {
            let manifest = manifest(NAME, &stage.namespace, value);
            serde_json::from_value(manifest["spec"].clone()).expect("a spec")
        };

        let mut wanted = kept();
        crate::api::merge(&mut wanted, restarts(Role::Decode, "1"));
        let path = file(dir.path(), &stage, wanted.clone());
        let told = editor.does(&["plan", NAME, "-f", &path]).await;
        assert_eq!(told, rehearsal::tell(Some(&spec(kept())), &spec(wanted)));

        for (wrong, said) in [
            (json!({"gpus": {"budget": 7}}), rules::GPU_BUDGET.1),
            (
                json!({"decode": {"replica": 7}}),
                "unknown field \"spec.decode.replica\"",
            ),
        ] {
            let path = file(dir.path(), &stage, wrong);
            let refused = editor.run(&["plan", "-f", &path]).await;
            assert_eq!(refused.code, 1, "{refused:?}");
            has(&refused.err, &[said]);
        }
        let refused = editor.run(&["plan", "other", "-f", &path]).await;
        has(&refused.err, &["the file is of \"chat\", not of \"other\""]);

        // A field that was applied and is not in the file any more goes; one that others have set stays.
        let applied = manifest(NAME, &stage.namespace, kept()).to_string();
        let applied = cluster.kubectl(&["apply", "--filename=-"], &applied);
        assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
        editor
            .does(&["restart", NAME, "--scope", "decode-only", "--wait"])
            .await;
        let path = file(dir.path(), &stage, kept());
        let told = editor.does(&["plan", NAME, "-f", &path]).await;
        has(&told, &["nothing changes that a process sees"]);
        let path = file(dir.path(), &stage, json!({}));
        let told = editor.does(&["plan", NAME, "-f", &path]).await;
        has(
            &told,
            &["decode.pod.annotations.kept: 1 -> none. A change restarts decode."],
        );
        // Nothing of all this was kept.
        assert_eq!(outcomes(&stage), 2);

        let mut new = manifest("new", &stage.namespace, json!({}));
        new["metadata"]["name"] = json!("new");
        let path = dir.path().join("new.yaml");
        std::fs::write(&path, new.to_string()).expect("a file");
        let told = editor.does(&["plan", "-f", path.to_str().expect("UTF-8")]).await;
        has(&told, &["a first install"]);
    });
}

#[test]
fn a_restart_takes_other_roles_with_it_or_is_not_waited_for() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "restarts", &[8], kept()).await;
        let editor = Plugin::of(&stage, "edit").await;
        let stays = [Role::Prefill, Role::Router].map(|role| stage.untouched(role));
        let goes = stage.untouched(Role::Decode);
        let said = editor
            .does(&["restart", NAME, "--scope", "decode-only", "--wait"])
            .await;
        let running = stage.promoted().await.status.expect("a status").revisions.running;
        has(
            &said,
            &[
                "new pods: decode; the same pods as before: prefill, router",
                &format!("promoted: {running} runs"),
            ],
        );
        assert_eq!([Role::Prefill, Role::Router].map(|role| stage.untouched(role)), stays);
        assert_ne!(stage.untouched(Role::Decode), goes);

        // One that fails is told as such.
        stage.script.set(|_| Life {
            runs: Runs::Peer(Script {
                completions: Completions::Failed,
                ..Script::default()
            }),
            ..Life::default()
        });
        let said = editor.run(&["restart", NAME, "--wait"]).await;
        assert_eq!(said.code, 4, "{said:?}");
        has(
            &said.out,
            &[&format!("reverted to {running}: "), "new pods: prefill, decode, router"],
        );
        let said = editor.run(&["restart", NAME, "--wait", "--timeout", "0s"]).await;
        assert_eq!(said.code, 3, "{said:?}");
        has(&said.out, &["it goes on"]);
    });
}

#[test]
fn an_approval_lets_more_go_on_than_what_waits() {
    cluster::test(async |cluster| {
        let mut spec = kept();
        spec["rollout"]["approval"] = json!("BeforeRestart");
        let (stage, _operator) = Stage::settled(cluster, "approves", &[8], spec).await;
        let editor = Plugin::of(&stage, "edit").await;
        let waits = async || {
            let waits = |chat: &tandem_crds::PDDeployment| {
                let seen = chat.status.as_ref().map(|status| status.observed_generation);
                step(chat) == Step::Approve && seen == chat.metadata.generation
            };
            stage.until("it waits for a person", waits).await
        };
        let said = editor.run(&["approve", NAME]).await;
        assert_eq!(said.code, 1, "{said:?}");
        has(&said.err, &["waits for no approval: ready: revision"]);

        stage.edit(restarts(Role::Decode, "1")).await;
        waits().await;
        let said = editor.run(&["status", NAME]).await;
        assert_eq!(said.code, 4, "{said:?}");
        has(&said.out, &["kubectl tandem approve chat", "waits for a person"]);
        has(
            &editor.does(&["approve", NAME, "--wait"]).await,
            &["is approved", "promoted: "],
        );

        // The same spec again is another change, which nobody has approved.
        editor.does(&["restart", NAME, "--scope", "full"]).await;
        let target = waits()
            .await
            .status
            .expect("a status")
            .rollout
            .expect("a change")
            .target;
        let said = editor.does(&["approve", NAME, "--wait"]).await;
        has(&said, &[&format!("promoted: {target} runs")]);

        // Beforehand.
        let mut spec = kept();
        spec["rollout"]["approval"] = json!("BeforeRestart");
        crate::api::merge(&mut spec, restarts(Role::Decode, "2"));
        let dir = tempfile::tempdir().expect("a folder");
        let path = file(dir.path(), &stage, spec);
        let told = editor.does(&["plan", NAME, "-f", &path]).await;
        let target = told.split_whitespace().nth(1).expect("target HASH");
        has(
            &editor.does(&["approve", NAME, "--revision", target]).await,
            &["is approved"],
        );
        stage.edit(restarts(Role::Decode, "2")).await;
        stage.promoted().await;
    });
}

#[test]
fn the_role_of_diagnose_lacks_a_right_or_has_one_too_many() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "diagnoses", &[8], json!({})).await;
        let viewer = Plugin::of(&stage, "view").await;
        let refused = async |right: &str| {
            eventually(right, PATIENCE, async || {
                let said = viewer.run(&["diagnose", NAME, "--rounds=0"]).await;
                let named = said.err.contains(right) && said.err.contains("tandem-diagnose");
                if said.code == 1 && named {
                    Ok(())
                } else {
                    Err(format!("{said:?}"))
                }
            })
            .await;
        };
        let kubectl = |args: &[&str], input: &str| {
            let output = cluster.kubectl(&[args, &["-n", &stage.namespace]].concat(), input);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        refused("may not get secrets").await;
        let role = tandem_e2e::root().join("charts/tandem/files/diagnose-rbac.yaml");
        let role = std::fs::read_to_string(role).expect("the role");
        kubectl(&["apply", "--filename=-"], &role);
        let account = format!("--serviceaccount={}:view", stage.namespace);
        kubectl(&["create", "rolebinding", "d", "--role=tandem-diagnose", &account], "");
        // All rights are there. No port is forwarded, for nobody stands behind a scripted node: no engine is called dead for that.
        eventually("it may look", PATIENCE, async || {
            let said = viewer.run(&["diagnose", NAME, "--rounds=0"]).await;
            let parts = ["its ports cannot be forwarded", "no engine of chat can be looked at"];
            let tried = said.code == 1 && parts.iter().all(|part| said.err.contains(part));
            if tried { Ok(()) } else { Err(format!("{said:?}")) }
        })
        .await;
        // Each of them is needed.
        let without = |rule: usize| {
            let patch = format!("[{{\"op\": \"remove\", \"path\": \"/rules/{rule}\"}}]");
            kubectl(
                &["patch", "role", "tandem-diagnose", "--type=json", "--patch", &patch],
                "",
            );
        };
        without(0);
        refused("may not create pods/portforward").await;
        without(0);
        refused("may not get secrets").await;
    });
}
