//! `tandem up` and `tandem down`, with stand-ins for engine and router where a fault is wanted that the real ones do
//! not show on demand.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

const MANIFEST: &str = "
apiVersion: tandem.dev/v1alpha1
kind: PDDeployment
metadata: {name: chat}
spec:
  model: {name: tiny-chat, source: {pvc: {claimName: models, path: tiny/model.gguf}}}
  timeouts: {startupSeconds: 30, stallSeconds: 1, inflightWatchdogSeconds: 2, drainSeconds: 10}
  rollout: {gates: {health: {mode: Off}, probe: {mode: Off}}}
";
const PATIENCE: Duration = Duration::from_secs(30);

/// Written once, before any test starts a process: a child that is just being forked holds every file open that is being
/// written, and a program that is open for writing cannot be started.
static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();

/// A folder with the program, its two companions, a manifest and a claim.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let programs = PROGRAMS.get_or_init(|| {
            let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-ins");
            fs::create_dir_all(&dir).unwrap();
            for name in ["tandem-engine", "tandem-router"] {
                fs::write(dir.join(name), include_str!("stand_in.py")).unwrap();
                fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o755)).unwrap();
            }
            dir
        });
        let place = Self {
            dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        };
        fs::hard_link(env!("CARGO_BIN_EXE_tandem"), place.path("tandem")).unwrap();
        for name in ["tandem-engine", "tandem-router"] {
            fs::hard_link(programs.join(name), place.path(name)).unwrap();
        }
        fs::create_dir_all(place.path("models/tiny")).unwrap();
        fs::write(place.path("models/tiny/model.gguf"), "good").unwrap();
        place.manifest(MANIFEST);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn manifest(&self, text: &str) {
        fs::write(self.path("chat.yaml"), text).unwrap();
    }

    fn tandem(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("tandem"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("HOME", self.dir.path());
        command.env_remove("XDG_DATA_HOME").env_remove("XDG_STATE_HOME");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn up(&self, more: &[&str]) -> Command {
        let mut command = self.tandem(&[
            "up",
            "-f",
            "chat.yaml",
            "--claim",
            "models=models",
            "--http",
            "127.0.0.1:0",
        ]);
        command.args(["--state-dir", "state"]).args(more);
        command
    }

    /// The state file, once `until` holds.
    fn state(&self, until: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let state = fs::read(self.path("state/state.json"))
                .ok()
                .and_then(|bytes| serde_json::from_slice(&bytes).ok());
            match state {
                Some(state) if until(&state) => return state,
                state => assert!(began.elapsed() < PATIENCE, "not reached: {state:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn events(&self) -> Vec<String> {
        fs::read_to_string(self.path("events"))
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    fn events_of(&self, what: &str) -> Vec<String> {
        let events = self.events();
        events
            .iter()
            .filter_map(|line| line.split_once(' '))
            .filter(|(_, event)| event.starts_with(what))
            .map(|(name, _)| name.to_owned())
            .collect()
    }
}

fn ready(state: &Value) -> bool {
    state["phase"] == "ready"
}

fn pid(state: &Value, index: usize) -> u32 {
    u32::try_from(state["processes"][index]["pid"].as_u64().unwrap()).unwrap()
}

/// A signal to a process, or to a group by its negated id.
fn kill(signal: &str, pid: i64) {
    assert!(
        Command::new("kill")
            .args([signal, "--", &pid.to_string()])
            .status()
            .unwrap()
            .success()
    );
}

fn gone(pid: u32) {
    let began = Instant::now();
    while Path::new(&format!("/proc/{pid}")).exists() {
        assert!(began.elapsed() < PATIENCE, "process {pid} still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The program's end, in time; otherwise it is killed and the test fails.
fn end(mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("did not end: {}", stderr(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn run(mut command: Command) -> Output {
    end(command.spawn().unwrap())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The program refuses with this code and these words, and no process was started.
fn refused(place: &Place, command: Command, code: i32, words: &[&str]) {
    let output = run(command);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    assert_eq!(place.events(), Vec::<String>::new());
}

#[test]
fn starts_in_order_says_where_it_serves_and_stops_in_the_opposite_order() {
    let place = Place::new();
    let child = place.up(&["--log-dir", "logs"]).process_group(0).spawn().unwrap();
    let state = place.state(ready);
    // As a terminal does on Ctrl-C: to the whole process group.
    kill("-INT", -i64::from(child.id()));
    let output = end(child);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert_eq!(place.events_of("started"), ["prefill", "decode", "router"]);
    assert_eq!(place.events_of("stopped"), ["router", "decode", "prefill"]);
    let url = format!(
        "curl -sS http://{}/v1/chat/completions",
        state["http"].as_str().unwrap()
    );
    assert!(
        text.contains(&url) && text.contains("\"model\": \"tiny-chat\""),
        "{text}"
    );
    assert!(text.contains("prefill-0 | loading"), "{text}");
    assert!(text.contains("router    | drained"), "{text}");
    assert_eq!(
        fs::read_to_string(place.path("logs/decode-0.log")).unwrap(),
        "loading\ndrained\n"
    );
    (0..3).for_each(|index| gone(pid(&state, index)));
    assert!(!place.path("state/state.json").exists());
}

#[test]
fn a_model_that_the_engine_refuses_ends_it_with_the_engines_words_and_code() {
    let place = Place::new();
    fs::write(place.path("models/tiny/model.gguf"), "broken").unwrap();
    refused(
        &place,
        place.up(&[]),
        4,
        &[
            "prefill-0 ended before it was ready",
            "tensor 7 ends at byte 900 of 600",
        ],
    );
    refused(
        &place,
        place.up(&["--detach"]),
        4,
        &["prefill-0 ended before it was ready", "tensor 7 ends at byte 900"],
    );
}

#[test]
fn what_cannot_work_is_refused_before_a_process_starts() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let on_taken = |more: &[&str]| {
        let mut command = place.tandem(&["up", "-f", "chat.yaml", "--claim", "models=models", "--http", &addr]);
        command.args(["--state-dir", "state"]).args(more);
        command
    };
    refused(
        &place,
        on_taken(&[]),
        1,
        &["error: the router cannot listen on", &addr, "--http"],
    );
    refused(
        &place,
        on_taken(&["--detach"]),
        1,
        &["error: the router cannot listen on", &addr, "--http"],
    );
    refused(
        &place,
        place.up(&["--kv-memory-mib", "900000000"]),
        1,
        &["too little memory", "--kv-memory-mib"],
    );
    refused(
        &place,
        place.up(&["--claim", "other=x"]),
        1,
        &["no claim \"other\" but \"models\""],
    );
    refused(&place, place.up(&["--threads", "0"]), 2, &["--threads", "1..=1024"]);
    refused(&place, place.tandem(&["up"]), 2, &["--file"]);
    refused(
        &place,
        place.tandem(&["up", "-f", "nowhere.yaml"]),
        1,
        &["cannot read manifest nowhere.yaml"],
    );

    let default_claim = place.path(".local/share/tandem/claims/models/tiny/model.gguf");
    let words = [
        "claim \"models\"",
        "path \"tiny/model.gguf\"",
        default_claim.to_str().unwrap(),
        "--claim models=DIR",
    ];
    refused(
        &place,
        place.tandem(&["up", "-f", "chat.yaml", "--http", "127.0.0.1:0"]),
        1,
        &words,
    );

    place.manifest(&MANIFEST.replace("timeouts:", "timeout:"));
    refused(
        &place,
        place.up(&[]),
        1,
        &["chat.yaml:7:", "spec.timeout: unknown field `timeout`"],
    );
    place.manifest(&MANIFEST.replace("drainSeconds: 10", "drainSeconds: 1"));
    refused(
        &place,
        place.up(&[]),
        1,
        &["spec.timeouts.inflightWatchdogSeconds: 2: inflightWatchdogSeconds is not below drainSeconds"],
    );
    place.manifest(&MANIFEST.replace(
        "timeouts:",
        "prefill: {replicas: 0}\n  decode: {replicas: 0}\n  timeouts:",
    ));
    refused(&place, place.up(&[]), 1, &["nothing to run"]);

    place.manifest(MANIFEST);
    fs::remove_file(place.path("tandem-router")).unwrap();
    refused(
        &place,
        place.up(&[]),
        1,
        &["no tandem-router beside this program", "cargo build"],
    );
}

#[test]
fn a_dead_child_is_reported_and_serves_again_on_its_port() {
    let place = Place::new();
    let child = place.up(&[]).spawn().unwrap();
    let before = place.state(ready);
    kill("-KILL", pid(&before, 1).into());
    let after = place.state(|state| state["processes"][1]["restarts"] == 1 && state["processes"][1]["ready"] == true);
    assert_ne!(pid(&before, 1), pid(&after, 1));
    assert_eq!(pid(&before, 0), pid(&after, 0), "prefill was not touched");
    kill("-TERM", child.id().into());
    let output = end(child);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains("decode-0 died: signal: 9 (SIGKILL); its last lines:\n    loading"),
        "{text}"
    );
    assert!(text.contains("decode-0 is ready again"), "{text}");
    let ports: Vec<String> = place
        .events()
        .iter()
        .filter(|line| line.starts_with("decode started"))
        .map(|line| line.splitn(4, ' ').last().unwrap().to_owned())
        .collect();
    assert_eq!(ports.len(), 2);
    assert_eq!(ports[0], ports[1]);
}

#[test]
fn a_child_that_dies_three_times_in_a_minute_ends_the_whole() {
    let place = Place::new();
    let child = place.up(&[]).spawn().unwrap();
    let mut last = 0;
    for restarts in 0..3 {
        let state = place.state(|state| {
            ready(state) && state["processes"][0]["restarts"] == restarts && state["processes"][0]["ready"] == true
        });
        assert_ne!(pid(&state, 0), last);
        last = pid(&state, 0);
        kill("-KILL", last.into());
    }
    let output = end(child);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("error: prefill-0 died 3 times within a minute, the last time by signal: 9"),
        "{text}"
    );
    assert_eq!(
        place.events_of("stopped"),
        ["router", "decode"],
        "the others were stopped in order"
    );
}

#[test]
fn no_child_outlives_a_killed_supervisor() {
    let place = Place::new();
    let mut child = place.up(&[]).spawn().unwrap();
    let state = place.state(ready);
    child.kill().unwrap();
    child.wait().unwrap();
    (0..3).for_each(|index| gone(pid(&state, index)));
    // Its state file is still there, and believed by nobody.
    let output = run(place.tandem(&["down", "--state-dir", "state"]));
    assert!(
        output.status.success() && stderr(&output).contains("nothing runs"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn what_runs_is_told_from_its_folder_and_an_error_where_something_is_not_ready() {
    let place = Place::new();
    let status = |more: &[&str]| {
        let mut command = place.tandem(&["status", "--state-dir", "state"]);
        command.args(more);
        run(command)
    };
    let output = status(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("nothing runs from /"), "{}", stderr(&output));

    let child = place.up(&[]).spawn().unwrap();
    let state = place.state(ready);
    let token = fs::read_to_string(place.path("state/admin-token")).unwrap();
    let mode = fs::metadata(place.path("state/admin-token"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!((token.trim().len(), mode & 0o777), (64, 0o600));
    let output = status(&["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&told["ready"], &told["phase"]),
        (&Value::Bool(true), &Value::from("ready"))
    );
    assert_eq!(told["url"], format!("http://{}/v1", state["http"].as_str().unwrap()));
    for index in 0..3 {
        let (told, known) = (&told["processes"][index], &state["processes"][index]);
        for field in ["name", "pid", "listen", "admin", "ops"] {
            assert_eq!(told[field], known[field], "{field}");
        }
        assert_eq!((&told["ready"], &told["reason"]), (&Value::Bool(true), &Value::Null));
    }
    let text = String::from_utf8(status(&[]).stdout).unwrap();
    assert!(
        text.starts_with("chat: ready, process ") && text.contains("\n  decode-0 "),
        "{text}"
    );

    // stopped, it does not answer, whatever the supervisor saw last
    let decode = pid(&state, 1);
    kill("-STOP", decode.into());
    let output = status(&[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    kill("-CONT", decode.into());
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("not ready: its health port does not answer"), "{text}");

    let folder = place.path("state");
    kill("-TERM", child.id().into());
    let text = stderr(&end(child));
    let down = format!("tandem down --state-dir {}", folder.display());
    assert!(text.contains(&down), "{text}");
    assert!(
        !text.contains(token.trim()) && !folder.join("admin-token").exists(),
        "{text}"
    );
}

#[test]
fn keys_and_certificates_that_cannot_be_used_are_refused_before_a_process_starts() {
    let place = Place::new();
    fs::write(place.path("keys"), "short\n").unwrap();
    refused(
        &place,
        place.up(&["--api-key-file", "nowhere"]),
        1,
        &["--api-key-file nowhere: it cannot be read"],
    );
    refused(
        &place,
        place.up(&["--api-key-file", "keys"]),
        1,
        &["line 1 has 5 characters"],
    );
    refused(&place, place.up(&["--tls-cert", "keys"]), 2, &["--tls-key"]);
    refused(
        &place,
        place.up(&["--tls-cert", "keys", "--tls-key", "none"]),
        1,
        &["--tls-key none: it cannot be read"],
    );
    refused(
        &place,
        place.up(&["--secret", "front=x"]),
        1,
        &["--secret front=x: spec.router.apiKeysSecretName is \"\""],
    );
    place.manifest(&MANIFEST.replace("timeouts:", "router: {apiKeysSecretName: front}\n  timeouts:"));
    let folder = place.path(".local/share/tandem/secrets/front/api-keys");
    refused(&place, place.up(&[]), 1, &[folder.to_str().unwrap()]);
    fs::create_dir(place.path("front")).unwrap();
    fs::write(place.path("front/api-keys"), "sk-0123456789abcdef\n").unwrap();
    let child = place.up(&["--secret", "front=front"]).spawn().unwrap();
    let state = place.state(ready);
    assert_eq!(state["apiKeys"], true);
    kill("-TERM", child.id().into());
    let text = stderr(&end(child));
    assert!(
        text.contains("-H \"authorization: Bearer $OPENAI_API_KEY\"") && !text.contains("sk-0"),
        "{text}"
    );
}

#[test]
fn an_edit_takes_a_router_away_before_another_serves() {
    let place = Place::new();
    let child = place.up(&[]).spawn().unwrap();
    let first = place.state(ready);
    place.manifest(&MANIFEST.replace("timeouts:", "router: {pod: {annotations: {change: a}}}\n  timeouts:"));
    let second = place.state(|state| {
        let promoted = |one: &Value| one["outcome"] == "Promoted";
        let history = state["history"].as_array().unwrap();
        state["step"] == "Settled" && history.len() == 2 && history.iter().all(promoted)
    });
    for engine in [0, 1] {
        assert_eq!(pid(&first, engine), pid(&second, engine));
    }
    assert_eq!(first["http"], second["http"]);
    gone(pid(&first, 2));
    let mut of_routers = place.events();
    of_routers.retain(|line| line.starts_with("router"));
    let words: Vec<&str> = of_routers.iter().filter_map(|line| line.split(' ').nth(1)).collect();
    assert_eq!(words, ["started", "started", "stopped"]);
    kill("-TERM", child.id().into());
    let text = stderr(&end(child));
    for words in ["chat.yaml was edited: target ", "Step Router: ", "Rollout Promoted: "] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn detached_it_serves_until_down() {
    let place = Place::new();
    let output = run(place.up(&["--detach"]));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let state = place.state(ready);
    assert!(
        text.contains("curl -sS http://") && text.contains("tandem down --state-dir"),
        "{text}"
    );
    let log = |name: &str| fs::read_to_string(place.path("state/logs").join(name)).unwrap();
    assert!(log("router.log").contains("loading"));
    // Rolled over by nobody, so it repeats no child's lines.
    let own = log("tandem.log");
    assert!(own.contains("decode-0 is ready") && !own.contains(" | "), "{own}");

    kill("-KILL", pid(&state, 1).into());
    let state = place.state(|state| state["processes"][1]["restarts"] == 1 && state["processes"][1]["ready"] == true);
    let own = log("tandem.log");
    assert!(
        own.contains("decode-0 died: signal: 9 (SIGKILL); its log is in /") && !own.contains("    loading"),
        "{own}"
    );

    for more in [&[][..], &["--detach"][..]] {
        let output = run(place.up(more));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("running already") && text.contains("tandem down"),
            "{text}"
        );
    }

    let output = run(place.tandem(&["down", "--state-dir", "state"]));
    assert!(output.status.success(), "{}", stderr(&output));
    (0..3).for_each(|index| gone(pid(&state, index)));
    gone(u32::try_from(state["pid"].as_u64().unwrap()).unwrap());
    assert_eq!(place.events_of("stopped"), ["router", "decode", "prefill"]);
    assert!(run(place.tandem(&["down", "--state-dir", "state"])).status.success());
}

#[test]
fn detached_a_second_signal_kills_what_does_not_stop() {
    let place = Place::new();
    fs::write(place.path("models/tiny/model.gguf"), "deaf").unwrap();
    place.manifest(&MANIFEST.replace("drainSeconds: 10", "drainSeconds: 300"));
    let child = place.up(&["--detach"]).spawn().unwrap();
    let state = place.state(|state| state["processes"][0]["loading"] == 40);
    kill("-INT", child.id().into());
    let began = Instant::now();
    while place.events_of("was asked to stop").is_empty() {
        assert!(began.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    kill("-INT", child.id().into());
    let output = end(child);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("killed before it was ready: SIGINT again"), "{text}");
    gone(pid(&state, 0));
    gone(u32::try_from(state["pid"].as_u64().unwrap()).unwrap());
}
