//! `tandem up`: the example's manifest as processes on this machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use tandem_e2e::process::Process;
use tandem_e2e::{bin, eventually, free_port, model, probe, root, stack};

/// What the example's manifest names.
pub const MODEL: &str = "smollm2-135m-instruct";

/// A `tandem up` of the example in the foreground.
pub struct Up {
    process: Process,
    folder: tempfile::TempDir,
    pub http: u16,
}

impl Up {
    pub fn launch(flags: &[&str]) -> Self {
        Self::launch_logging("info", flags)
    }

    pub fn launch_logging(filter: &str, flags: &[&str]) -> Self {
        Self::launch_file(filter, flags, None)
    }

    /// With a copy of the example that can be edited, changed by `edit`.
    pub fn launch_edited(edit: &[(String, String)]) -> Self {
        Self::launch_file("info", &[], Some(&edited(edit)))
    }

    fn launch_file(filter: &str, flags: &[&str], manifest: Option<&str>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let http = free_port();
        let claim = claim(folder.path());
        let mut args = arguments(&claim, folder.path(), http);
        if let Some(manifest) = manifest {
            args[2] = folder.path().join(MANIFEST).display().to_string();
            std::fs::write(&args[2], manifest).expect("a manifest");
        }
        args.extend(flags.iter().map(ToString::to_string));
        Self {
            process: Process::start_logging(filter, "tandem", &bin("tandem"), &args),
            folder,
            http,
        }
    }

    /// Replaces the manifest, as editors do, by the example with these parts replaced.
    pub fn edit(&self, edit: &[(String, String)]) {
        let (new, path) = (self.folder.path().join("new"), self.folder.path().join(MANIFEST));
        std::fs::write(&new, edited(edit)).expect("a manifest");
        std::fs::rename(new, path).expect("in its place");
    }

    /// The processes that `tandem up` runs at this moment.
    pub fn processes(&self) -> Vec<i32> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.process.pid())).expect("its threads");
        let children = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
        let children: Vec<String> = children.collect();
        let pids = children.iter().flat_map(|children| children.split_whitespace());
        pids.filter_map(|pid| pid.parse().ok()).collect()
    }

    /// As Ctrl-C.
    pub fn interrupt(&self) {
        self.process.signal(libc::SIGINT);
    }

    pub async fn ended(&mut self, limit: Duration) -> std::process::ExitStatus {
        self.process.wait(limit).await
    }

    /// The folder that the claim is.
    pub fn models(&self) -> PathBuf {
        self.folder.path().join("models/smollm2")
    }

    pub fn log(&self) -> String {
        self.process.log()
    }

    pub fn state(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.folder.path().join("state/state.json")).ok()?).ok()
    }

    pub fn state_dir(&self) -> String {
        self.folder.path().join("state").display().to_string()
    }

    pub async fn ready(&mut self) -> Value {
        let (state, process) = (self.folder.path().join("state/state.json"), &mut self.process);
        eventually("tandem up is ready", stack::START, async || {
            if let Some(status) = process.exited() {
                panic!("tandem up ended ({status}):\n{}", process.tail(30));
            }
            let state: Value = std::fs::read(&state)
                .map_err(|error| error.to_string())
                .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()))?;
            if state["phase"] == "ready" {
                Ok(state)
            } else {
                Err(state.to_string())
            }
        })
        .await
    }

    pub async fn asks(&self) -> u16 {
        let body = serde_json::json!({"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8});
        let url = format!("http://127.0.0.1:{}/v1/completions", self.http);
        let answer = probe::http().post(url).json(&body).send().await;
        answer.map_or(0, |answer| answer.status().as_u16())
    }
}

const MANIFEST: &str = "manifest.yaml";

/// The example with parts replaced.
fn edited(edit: &[(String, String)]) -> String {
    let mut text = std::fs::read_to_string(root().join("examples/smollm2.yaml")).expect("the example");
    for (old, new) in edit {
        assert!(text.contains(old), "the example has no {old:?}");
        text = text.replacen(old.as_str(), new, 1);
    }
    text
}

/// A claim's folder with the model where the example looks for it.
fn claim(folder: &Path) -> PathBuf {
    let claim = folder.join("models");
    std::fs::create_dir_all(claim.join("smollm2")).expect("a folder");
    std::os::unix::fs::symlink(model(), claim.join("smollm2/model.gguf")).expect("a link to the model");
    claim
}

fn arguments(claim: &Path, folder: &Path, http: u16) -> Vec<String> {
    vec![
        "up".into(),
        "-f".into(),
        root().join("examples/smollm2.yaml").display().to_string(),
        format!("--claim=models={}", claim.display()),
        format!("--http=127.0.0.1:{http}"),
        format!("--state-dir={}", folder.join("state").display()),
        "--kv-memory-mib=128".into(),
    ]
}

/// Runs `tandem up` to its end, which has to be an error before anything serves; gives what it said.
fn refused(args: &[String]) -> String {
    let Output { status, stderr, .. } = Command::new("timeout")
        .arg("60")
        .arg(bin("tandem"))
        .args(args)
        .output()
        .expect("timeout(1) runs");
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(1), "{said}");
    said
}

/// The pid of a process of the stack.
pub fn pid(state: &Value, name: &str) -> i32 {
    let processes = state["processes"].as_array().expect("processes");
    let process = processes.iter().find(|process| process["name"] == name).expect(name);
    i32::try_from(process["pid"].as_i64().expect("a pid")).expect("a pid")
}

fn alive(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_is_served_a_dead_child_comes_back_on_its_port_and_ctrl_c_stops_all() {
    let mut up = Up::launch(&[]);
    let state = up.ready().await;
    assert_eq!(up.asks().await, 200);
    assert!(
        up.process.log().contains("curl "),
        "no curl line:\n{}",
        up.process.log()
    );

    let old = pid(&state, "decode-0");
    // SAFETY: a child of the stack that this test started; a signal has no other effect.
    assert_eq!(unsafe { libc::kill(old, libc::SIGKILL) }, 0);
    let state = eventually("decode runs again", Duration::from_secs(30), async || {
        let state = up.state().ok_or("no state")?;
        let decode = state["processes"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|process| process["name"] == "decode-0");
        match decode {
            Some(decode) if decode["restarts"] == 1 && decode["ready"] == true => Ok(state),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_ne!(pid(&state, "decode-0"), old);
    assert!(up.process.log().contains("decode-0 died"), "{}", up.process.log());
    assert_eq!(up.asks().await, 200, "the first request after the restart");

    let children: Vec<i32> = ["prefill-0", "decode-0", "router"]
        .iter()
        .map(|name| pid(&state, name))
        .collect();
    up.process.signal(libc::SIGINT);
    let status = up.process.wait(Duration::from_secs(30)).await;
    assert_eq!(status.code(), Some(0), "{}", up.process.tail(20));
    assert!(
        children.into_iter().all(|pid| !alive(pid)),
        "a child outlived tandem up"
    );
    assert_eq!(up.asks().await, 0, "something still listens");
}

#[tokio::test(flavor = "multi_thread")]
async fn children_do_not_outlive_a_supervisor_that_is_killed() {
    let mut up = Up::launch(&[]);
    let state = up.ready().await;
    let children: Vec<i32> = ["prefill-0", "decode-0", "router"]
        .iter()
        .map(|name| pid(&state, name))
        .collect();
    up.process.kill();
    eventually("all children are gone", Duration::from_secs(10), async || {
        if children.iter().any(|pid| alive(*pid)) {
            Err(format!("{children:?}"))
        } else {
            Ok(())
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_dies_three_times_in_a_minute_ends_the_whole_with_1() {
    let mut up = Up::launch(&[]);
    up.ready().await;
    for death in 0..3 {
        let pid = eventually("prefill is ready", Duration::from_secs(30), async || {
            let state = up.state().ok_or("no state")?;
            let prefill = &state["processes"][0];
            let ready = prefill["ready"] == true && prefill["restarts"] == death;
            if ready {
                Ok(pid(&state, "prefill-0"))
            } else {
                Err(prefill.to_string())
            }
        })
        .await;
        // SAFETY: as above.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    }
    let status = up.process.wait(Duration::from_mins(1)).await;
    assert_eq!(status.code(), Some(1), "{}", up.process.tail(20));
    assert!(up.process.log().contains("died 3 times"), "{}", up.process.tail(20));
}

#[test]
fn a_detached_stack_serves_after_the_command_and_down_stops_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let http = free_port();
    let state_dir = format!("--state-dir={}", folder.path().join("state").display());
    let args = arguments(&claim(folder.path()), folder.path(), http);
    let up = |args: &[String]| {
        Command::new("timeout")
            .arg("90")
            .arg(bin("tandem"))
            .args(args)
            .arg("--detach")
            .output()
            .expect("timeout(1) runs")
    };
    let first = up(&args);
    // Whatever follows, the stack is stopped.
    let down = || {
        Command::new("timeout")
            .arg("60")
            .arg(bin("tandem"))
            .args(["down", &state_dir])
            .output()
    };
    let answer = std::panic::catch_unwind(|| {
        assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
        let second = up(&args);
        assert_eq!(second.status.code(), Some(1));
        let said = String::from_utf8_lossy(&second.stderr).into_owned();
        assert!(
            said.contains("running already") && said.contains("tandem down"),
            "{said}"
        );
        let logs = std::fs::read_dir(folder.path().join("state/logs"))
            .expect("a folder of logs")
            .count();
        assert!(logs >= 3, "{logs} log files");
        std::net::TcpStream::connect(("127.0.0.1", http)).expect("the router listens");
        for (order, said) in [("status", "smollm2: ready, "), ("flush", " pages freed")] {
            let told = Command::new(bin("tandem"))
                .args([order, &state_dir])
                .output()
                .expect("tandem runs");
            let text = String::from_utf8_lossy(&told.stdout).into_owned();
            assert!(
                told.status.success(),
                "{order}: {}",
                String::from_utf8_lossy(&told.stderr)
            );
            assert_eq!(
                text.matches(said).count(),
                if order == "flush" { 2 } else { 1 },
                "{text}"
            );
        }
    });
    let down = down().expect("timeout(1) runs");
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    assert!(
        std::net::TcpStream::connect(("127.0.0.1", http)).is_err(),
        "the router still listens"
    );
    answer.expect("the detached stack");
}

#[test]
fn a_port_that_is_taken_is_named_before_anything_starts() {
    let folder = tempfile::tempdir().expect("a folder");
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let said = refused(&arguments(&claim(folder.path()), folder.path(), port));
    assert!(
        said.contains(&format!("127.0.0.1:{port}")) && said.contains("--http"),
        "{said}"
    );
}

#[test]
fn a_missing_model_names_the_claim_the_path_and_the_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).expect("a folder");
    let said = refused(&arguments(&empty, folder.path(), free_port()));
    for part in [
        "\"models\"",
        "smollm2/model.gguf",
        &empty.display().to_string(),
        "--claim models=",
    ] {
        assert!(said.contains(part), "{part:?} is missing in: {said}");
    }
}

#[test]
fn a_model_that_is_cut_off_is_refused_by_name_and_size() {
    let folder = tempfile::tempdir().expect("a folder");
    let claim = folder.path().join("models");
    std::fs::create_dir_all(claim.join("smollm2")).expect("a folder");
    let whole = std::fs::read(model()).expect("the model");
    for keep in [whole.len() - 1, whole.len() / 2, 5000, 10] {
        std::fs::write(claim.join("smollm2/model.gguf"), &whole[..keep]).expect("a file");
        let said = refused(&arguments(&claim, folder.path(), free_port()));
        assert!(
            said.contains("model.gguf"),
            "{keep} bytes: the file is not named: {said}"
        );
        assert!(
            said.contains(&keep.to_string()),
            "{keep} bytes: its size is not named: {said}"
        );
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_wrong_field_of_the_manifest_is_named_with_its_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let example = std::fs::read_to_string(root().join("examples/smollm2.yaml")).expect("the example");
    for (right, wrong, named) in [
        ("backend: Cpu", "backend: Gpu", "backend"),
        ("policy: LeastLoaded", "polcy: LeastLoaded", "polcy"),
        ("kind: PDDeployment", "kind: Pod", "kind"),
    ] {
        let manifest = folder.path().join("manifest.yaml");
        assert!(example.contains(right), "the example has no {right:?}");
        std::fs::write(&manifest, example.replacen(right, wrong, 1)).expect("a file");
        let mut args = arguments(&claim_once(folder.path()), folder.path(), free_port());
        args[2] = manifest.display().to_string();
        let said = refused(&args);
        assert!(
            said.contains(named) && said.contains("manifest.yaml"),
            "{wrong}: {said}"
        );
    }
}

fn claim_once(folder: &Path) -> PathBuf {
    if folder.join("models").exists() {
        folder.join("models")
    } else {
        claim(folder)
    }
}

#[test]
fn too_little_memory_is_an_error_with_both_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut args = arguments(&claim(folder.path()), folder.path(), free_port());
    args.pop();
    args.push("--kv-memory-mib=90000000".into());
    let said = refused(&args);
    assert!(said.contains("MiB") && said.contains("--kv-memory-mib"), "{said}");
}
