//! `tandem up`: an edit of its file is a change like any other, with real processes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tandem_e2e::{client, eventually, stack};

use crate::up::{Up, pid};

const ALL: [&str; 3] = ["prefill-0", "decode-0", "router"];
/// A file where requests are queued and answers are long takes a while on a busy machine.
const PATIENCE: Duration = Duration::from_mins(3);

/// Another annotation is another revision of its role.
fn annotated(role: &str, value: &str) -> (String, String) {
    let old = format!("  {role}:\n");
    let new = format!("{old}    pod: {{annotations: {{change: {value}}}}}\n");
    (old, new)
}

fn pids(state: &Value) -> [i32; 3] {
    ALL.map(|name| pid(state, name))
}

fn history(state: &Value) -> Vec<&str> {
    let entries = state["history"].as_array().into_iter().flatten();
    entries.filter_map(|entry| entry["outcome"].as_str()).collect()
}

/// Waits until nothing is under way any more and the changes have ended so, the newest first; all runs then.
async fn ended(up: &Up, outcomes: &[&str]) -> Value {
    eventually("the change ends", PATIENCE, async || {
        let state = up.state().ok_or("no state")?;
        let runs = |one: &Value| one["ready"] == true;
        let ready = state["processes"].as_array().is_some_and(|all| all.iter().all(runs));
        if state["step"] == "Settled" && history(&state) == outcomes && ready {
            Ok(state)
        } else {
            Err(format!("{state}\n{}", up.log()))
        }
    })
    .await
}

async fn at(up: &Up, step: &str) {
    eventually("the change is under way", PATIENCE, async || {
        let state = up.state().ok_or("no state")?;
        (state["step"] == step).then_some(()).ok_or_else(|| state.to_string())
    })
    .await;
}

async fn refused(up: &Up, named: &str) {
    eventually("the edit is refused", PATIENCE, async || {
        let log = up.log();
        let says = |line: &str| line.contains("is refused, what runs goes on: ") && line.contains(named);
        log.lines().any(says).then_some(()).ok_or(log)
    })
    .await;
}

/// All of the words come in the log, in this order.
fn in_order(log: &str, words: &[&str]) {
    let mut from = 0;
    for word in words {
        let found = log[from..].find(word);
        from += found.unwrap_or_else(|| panic!("{word:?} is missing after byte {from}:\n{log}")) + word.len();
    }
}

/// Requests on new connections, one after the other, all the time while something goes on; how many were refused for the time
/// being, by 503. All others are answered.
async fn asked<T>(up: &Up, meanwhile: impl Future<Output = T>) -> (T, usize) {
    let over = AtomicBool::new(false);
    let asks = async || {
        let mut answers = Vec::new();
        while !over.load(Ordering::Relaxed) {
            answers.push(up.asks().await);
        }
        answers
    };
    let meanwhile = async {
        let value = meanwhile.await;
        over.store(true, Ordering::Relaxed);
        value
    };
    let (value, one, other) = tokio::join!(meanwhile, asks(), asks());
    let answers = [one, other].concat();
    let refused = answers.iter().filter(|status| **status == 503).count();
    let answered = answers.iter().filter(|status| **status == 200).count();
    assert_eq!(refused + answered, answers.len(), "{answers:?}\n{}", up.log());
    (value, refused)
}

/// None of them is refused.
async fn answered<T>(up: &Up, meanwhile: impl Future<Output = T>) -> T {
    let (value, refused) = asked(up, meanwhile).await;
    assert_eq!(refused, 0, "{}", up.log());
    value
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_of_one_role_restarts_another_or_a_hot_knob_restarts_one() {
    let mut up = Up::launch_edited(&[]);
    let first = pids(&up.ready().await);
    up.edit(&[annotated("decode", "a")]);
    let second = pids(&answered(&up, ended(&up, &["Promoted", "Promoted"])).await);
    assert_eq!((first[0], first[2]), (second[0], second[2]));
    assert_ne!(first[1], second[1]);
    in_order(
        &up.log(),
        &[
            "manifest.yaml was edited: target ",
            "decode.pod.annotations.change: none -> a. A change restarts decode.",
            "new pods: decode; the same pods as before: prefill, router",
            "Rollout Begun: revision ",
            "Step Quiesce: ",
            "Available Queued: ",
            "decode-0 stopped",
            "decode-0 is ready",
            "Step Gates: ",
            "Rollout Promoted: ",
        ],
    );

    let knob = "    knobs: {maxRunning: 7}\n";
    let (old, new) = annotated("decode", "a");
    up.edit(&[(old, new + knob)]);
    let third = answered(&up, ended(&up, &["Promoted"; 3])).await;
    assert_eq!(pids(&third), second);
    assert_eq!(max_running(&third).await, Some(7));
    // SAFETY: a child of the stack that this test started; a signal has no other effect.
    assert_eq!(unsafe { libc::kill(second[1], libc::SIGKILL) }, 0);
    let again = eventually("decode runs again", stack::START, async || {
        let state = up.state().ok_or("no state")?;
        let decode = &state["processes"][1];
        let again = decode["restarts"] == 1 && decode["ready"] == true;
        again.then_some(state.clone()).ok_or_else(|| state.to_string())
    })
    .await;
    assert_eq!(
        max_running(&again).await,
        Some(7),
        "what starts again starts with the newest knobs"
    );
}

/// As decode says.
async fn max_running(state: &Value) -> Option<u32> {
    let listen = state["processes"][1]["listen"].as_str().expect("an address");
    let info = client::info(&mut client::connect(listen).await).await;
    info.knobs.and_then(|knobs| knobs.max_running)
}

#[tokio::test(flavor = "multi_thread")]
async fn another_contract_loses_a_request_or_a_model_that_is_broken_stays() {
    let mut up = Up::launch_edited(&[]);
    let first = pids(&up.ready().await);
    let model = up.models().join("model.gguf");
    std::os::unix::fs::symlink(&model, up.models().join("other.gguf")).expect("a link");
    let path = |name: &str| ("path: smollm2/model.gguf".to_owned(), format!("path: smollm2/{name}"));
    up.edit(&[path("other.gguf")]);
    let (second, refused) = asked(&up, ended(&up, &["Promoted"; 2])).await;
    // Those that the old router held, made for the old model: one of each client, or few more. A router that refuses all
    // the time would be asked hundreds of times.
    assert!(refused < 10, "{refused}\n{}", up.log());
    for (old, new) in first.iter().zip(pids(&second)) {
        assert_ne!(*old, new);
    }
    in_order(
        &up.log(),
        &[
            "was edited: target",
            "Step Quiesce: ",
            "prefill-0 stopped",
            "prefill-0 is ready",
            "decode-0 stopped",
            "decode-0 is ready",
            "router is ready",
        ],
    );
    eventually("the old router goes", PATIENCE, async || {
        let log = up.log();
        log.contains("router stopped").then_some(()).ok_or(log)
    })
    .await;

    // One that no engine reads is found out by the first that tries.
    let whole = std::fs::read(&model).expect("the model");
    std::fs::write(up.models().join("broken.gguf"), &whole[..whole.len() / 2]).expect("a file");
    up.edit(&[path("broken.gguf")]);
    let third = answered(&up, ended(&up, &["Reverted", "Promoted", "Promoted"])).await;
    assert_eq!(third["revision"], second["revision"]);
    let failure = third["history"][0]["failure"].as_str().unwrap_or_default();
    assert!(
        failure.contains("prefill-0") && failure.contains("broken.gguf"),
        "{failure}"
    );
    assert!(up.log().contains("Rollout Reverted: "), "{}", up.log());
    let (old, new) = (pids(&second), pids(&third));
    assert_eq!((old[1], old[2]), (new[1], new[2]), "what had not been touched yet");
    assert_eq!(up.asks().await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_that_is_wrong_touches_what_runs_or_the_last_of_two_is_not_the_one_that_serves() {
    let mut up = Up::launch_edited(&[]);
    let before = up.ready().await;
    for (old, new, named) in [
        (
            "policy: LeastLoaded",
            "polcy: LeastLoaded",
            "spec.router.polcy: unknown field",
        ),
        (
            "  decode:\n",
            "  decode:\n    replicas: 2\n",
            "spec.decode.replicas: 2: 1 run",
        ),
        ("name: smollm2\n", "name: another\n", "metadata.name: \"another\""),
        ("smollm2/model.gguf", "smollm2/nowhere.gguf", "nowhere.gguf"),
    ] {
        up.edit(&[(old.to_owned(), new.to_owned())]);
        refused(&up, named).await;
    }
    assert_eq!(up.state().map(|state| pids(&state)), Some(pids(&before)));

    // The first edit waits for a person after its restart, for ever.
    let (old, new) = annotated("decode", "a");
    up.edit(&[
        (
            "spec:\n".to_owned(),
            "spec:\n  rollout: {approval: BeforePromote}\n".to_owned(),
        ),
        (old, new),
    ]);
    at(&up, "Approve").await;
    up.edit(&[annotated("decode", "b")]);
    let last = ended(&up, &["Promoted", "Superseded", "Promoted"]).await;
    assert!(last["history"][0]["changed"].to_string().contains("\"b\""), "{last}");
    assert_eq!(pids(&before)[0], pids(&last)[0]);
    assert_eq!(up.asks().await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_in_the_middle_of_a_change_leaves_a_process_or_waits_for_a_request_that_it_holds() {
    let mut up = Up::launch_edited(&[]);
    let before = up.ready().await;
    let ours = |pid: &i32| Path::new(&format!("/proc/{pid}")).exists();
    up.edit(&[annotated("prefill", "a")]);
    at(&up, "Prefill").await;
    let asked = up.asks();
    let stopped = async {
        // Whether it is held by then or not: it is not waited for.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let pids = up.processes();
        up.interrupt();
        pids
    };
    let (_, pids) = tokio::join!(asked, stopped);
    // Much less than the 90 s that its drain may take.
    let status = up.ended(Duration::from_mins(1)).await;
    assert_eq!(status.code(), Some(0), "{}", up.log());
    let left: Vec<i32> = pids.into_iter().chain(self::pids(&before)).filter(ours).collect();
    assert!(left.is_empty(), "{left:?} run on:\n{}", up.log());
}
