//! A real Kubernetes of two nodes on this machine, as `make cluster-up` makes it: containerd, kubelets, the shipped images.
//!
//! | module | holds |
//! | --- | --- |
//! | [`release`] | the operator, installed by helm as users do |
//! | [`serving`] | a deployment in a namespace of its own: its pods, their processes, and its clients |
//! | [`load`] | clients that go on asking, and how each request ended |
//! | [`lost`] | a node out of reach |
//! | [`proxy`] | the planted proxy as a pod |
//! | [`stranger`] | a pod that is none of ours |
//!
//! A test program shares one cluster; it starts with the first test that wants it, and is removed when the process has ended, however
//! that ends.

pub mod load;
pub mod lost;
pub mod proxy;
pub mod release;
pub mod serving;
pub mod stranger;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use crate::cluster::api::Client;

/// How long anything may take on a machine that is busy with other things.
pub const LIMIT: Duration = Duration::from_mins(4);
/// What the cluster calls itself; another one of this machine's is not touched.
const NAME: &str = "tandem-test";
const NETWORK: &str = "10.201.0.0";
/// The nodes' names.
pub const NODES: [&str; 2] = ["tandem-test-node1", "tandem-test-node2"];
/// Where a Service's port on nodes is reached from this machine: the first node.
pub const NODE_ADDRESS: &str = "10.201.0.11";

/// Says a line when no other cluster of this checkout's tests is left, waits until nobody holds its input any more, and removes the cluster.
const REMOVER: &str = r#"exec 9>"$1" && flock 9 && echo && cat >/dev/null && shift && exec "$@" >/dev/null 2>&1"#;

/// The running cluster.
#[derive(Debug)]
pub struct Nodes {
    state: PathBuf,
    api: String,
    _proxy: Forward,
    _remover: ChildStdin,
}

/// Runs a program until its input is closed.
const TIED: &str = r#""$@" </dev/null & read -r _; kill "$!"; wait"#;

/// A `kubectl` that carries connections for as long as it lives.
#[derive(Debug)]
pub struct Forward {
    child: Child,
    /// As long as it is open, it runs: the end of this process ends it too.
    input: Option<ChildStdin>,
    /// For example `127.0.0.1:40123`.
    pub address: String,
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

impl Nodes {
    #[expect(clippy::zombie_processes, reason = "the remover outlives this process")]
    fn start() -> Self {
        let state = crate::root().join("target/test-cluster");
        let program = words(&state);
        let mut remover = Command::new("sh")
            .args(["-c", REMOVER, "remover"])
            .arg(state.with_extension("lock"))
            .args(&program)
            .arg("down")
            // no Ctrl-C and no signal to the test's process group reaches it
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let mut turn = String::new();
        let said = BufReader::new(remover.stdout.take().expect("a pipe")).read_line(&mut turn);
        assert_eq!(said.expect("a line"), 1, "the remover waits for its turn");
        let made = Command::new(&program[0])
            .args(&program[1..])
            .args(["up", "--no-build"])
            .args(std::env::var("TANDEM_TEST_GRACE_SECONDS").map(|seconds| format!("--grace-seconds={seconds}")))
            .status()
            .expect("python3 starts");
        assert!(made.success(), "scripts/cluster up: {made}");
        let mut proxy = kubectl(&state);
        proxy.args(["proxy", "--port=0"]);
        let proxy = Forward::start(&proxy, "Starting to serve on ");
        Self {
            api: format!("http://{}", proxy.address),
            state,
            _proxy: proxy,
            _remover: remover.stdin.take().expect("a pipe"),
        }
    }

    /// A client that may do everything; of the runtime that it is made in.
    pub fn admin(&self) -> Client {
        Client::new(self.api.clone())
    }

    /// What `kubectl` prints.
    ///
    /// # Panics
    /// With its words if it fails.
    pub fn kubectl(&self, args: &[&str], stdin: &str) -> String {
        told(kubectl(&self.state).args(args), stdin)
    }

    /// `kubectl` with the environment of a user's shell.
    pub fn kubectl_command(&self) -> Command {
        kubectl(&self.state)
    }

    /// What `helm` prints.
    ///
    /// # Panics
    /// With its words if it fails.
    pub fn helm(&self, args: &[&str]) -> String {
        told(&mut self.helm_command(args), "")
    }

    fn helm_command(&self, args: &[&str]) -> Command {
        let mut command = within(&self.state, "helm");
        command.args(args).current_dir(crate::root());
        command
    }

    /// A command of `scripts/cluster`: `cut NODE`, `mend NODE`, `load ARCHIVE`.
    ///
    /// # Panics
    /// With its words if it fails.
    pub fn cluster(&self, args: &[&str]) -> String {
        let program = words(&self.state);
        told(Command::new(&program[0]).args(&program[1..]).args(args), "")
    }

    /// Brings a node back that was cut off.
    fn mend(&self, node: &str) -> Result<(), String> {
        let program = words(&self.state);
        let output = outcome(Command::new(&program[0]).args(&program[1..]).args(["mend", node]), "");
        if output.status.success() {
            return Ok(());
        }
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Runs a command on a node, as its root.
    ///
    /// # Panics
    /// With its words if it fails.
    pub fn on(&self, node: &str, args: &[&str]) -> String {
        let short = node.strip_prefix(NAME).expect("a node").trim_start_matches('-');
        let pid = std::fs::read_to_string(self.state.join(short).join("pid")).expect("the node's first process");
        let target = format!("--target={pid}");
        let inside = ["--net", "--mount", "--pid", "--uts", "--"];
        told(Command::new("nsenter").arg(target).args(inside).args(args), "")
    }

    /// Removes what a failed test has left: its deployment holds the GPUs that the next one needs.
    fn sweep(&self) {
        for kind in ["namespaces", "persistentvolumes"] {
            self.kubectl(&["delete", kind, "--selector", serving::STAGE, "--timeout=4m"], "");
        }
        for node in NODES {
            self.kubectl(&["uncordon", node], "");
        }
    }

    /// Puts the images of engine and router with faults onto the nodes; gives their tag.
    ///
    /// # Panics
    /// Where they cannot be built: scripts/test.py builds the binaries.
    pub fn load_faults(&self) -> String {
        let script = crate::root().join("scripts/images.py");
        let said = told(
            Command::new("python3")
                .arg(script)
                .args(["--build", "prebuilt", "--faults"]),
            "",
        );
        for name in ["tandem-engine", "tandem-router"] {
            let archive = crate::root().join(format!("target/images/{name}-faults.tar"));
            self.cluster(&["load", &archive.display().to_string()]);
        }
        let image = said.split_whitespace().find(|word| word.contains("/tandem-engine:"));
        image
            .and_then(|image| image.rsplit_once(':'))
            .expect("an image")
            .1
            .to_owned()
    }

    /// Carries connections to a port of a pod or Service, through the API server and the pod's kubelet.
    pub fn forward(&self, namespace: &str, target: &str, port: u16) -> Forward {
        let mut command = kubectl(&self.state);
        command.args(["port-forward", "--namespace", namespace, target, &format!(":{port}")]);
        Forward::start(&command, "Forwarding from ")
    }
}

impl Forward {
    fn start(command: &Command, prefix: &str) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", TIED, "tied"])
            .arg(command.get_program())
            .args(command.get_args())
            .envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        // It ends, or says where it listens: a read that hangs is a kubectl that hangs, which has its own limits.
        said.read_line(&mut line).expect("a line");
        let address = line
            .strip_prefix(prefix)
            .and_then(|rest| rest.split_whitespace().next());
        let address = address
            .unwrap_or_else(|| panic!("{command:?} says {line:?}"))
            .to_owned();
        // It goes on telling of each connection, and is to be read.
        std::thread::spawn(move || said.lines().map_while(Result::ok).for_each(drop));
        let input = child.stdin.take();
        Self { child, input, address }
    }
}

/// Runs a test on the shared cluster.
///
/// # Panics
/// Where the cluster does not start, and where the test does.
pub fn test(body: impl AsyncFnOnce(&'static Nodes)) {
    static SHARED: LazyLock<Nodes> = LazyLock::new(Nodes::start);
    let nodes = &*SHARED;
    nodes.sweep();
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(body(nodes));
}

fn words(state: &Path) -> Vec<String> {
    let program = crate::root().join("scripts/cluster");
    [
        "python3",
        &program.display().to_string(),
        "--name",
        NAME,
        "--network",
        NETWORK,
        "--state",
        &state.display().to_string(),
    ]
    .map(str::to_owned)
    .to_vec()
}

fn within(state: &Path, program: &str) -> Command {
    let mut command = Command::new(state.join("bin").join(program));
    command
        .env("KUBECONFIG", state.join("kubeconfig"))
        // both keep what they find out below it
        .env("HOME", state);
    command
}

fn kubectl(state: &Path) -> Command {
    within(state, "kubectl")
}

fn told(command: &mut Command, stdin: &str) -> String {
    let output = outcome(command, stdin);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How a command ended, given this input.
pub fn outcome(command: &mut Command, stdin: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let mut input = child.stdin.take().expect("a pipe");
    let text = stdin.to_owned();
    // A child that does not read its input closes it; its exit status tells.
    let writer = std::thread::spawn(move || drop(input.write_all(text.as_bytes())));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("the writer");
    output
}
