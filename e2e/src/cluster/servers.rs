//! The server processes, their flags, and who ends them.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::PATIENCE;
use super::network::Network;
use super::pki::{Pki, User};

/// Where the API server listens in the namespace. Nothing else is there, so ports can be fixed.
const ADDRESS: &str = "127.0.0.1";
const PORT: u16 = 6443;
/// What the API server calls itself: it takes no loopback address. Nobody connects to it.
const ADVERTISED: &str = "10.244.0.1";
/// A node whose lease is not renewed for this long is taken for lost. Long enough that a busy machine loses none.
pub const NODE_GRACE: Duration = Duration::from_secs(20);

/// Requests that each controller, and the scheduler, may make in a second. By default they are 20 and 50: that the tests of many
/// deployments would measure.
const QPS: [&str; 2] = ["--kube-api-qps=500", "--kube-api-burst=1000"];

/// Everybody's requests but the control plane's own.
const AUDIT_POLICY: &str = r#"{
  "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "omitManagedFields": true,
  "rules": [
    {"level": "None", "users": ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"]},
    {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
    {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}], "users": ["scripted-kubelet"]},
    {"level": "Metadata"}
  ]
}"#;

/// Ends the processes whose ids it has read, and removes the folder, once nobody holds its input any more: however the test process
/// ended, the kernel closes the pipe.
const REAPER: &str = r#"
pids=
while read -r pid; do pids="$pids $pid"; done
[ -z "$pids" ] || kill -9 $pids 2>/dev/null
for try in 1 2 3 4 5; do rm -rf "$1" && break; sleep 1; done
"#;

/// The running servers.
#[derive(Debug)]
pub struct Servers {
    dir: PathBuf,
    pki: Pki,
    reaper: Arc<Reaper>,
}

/// Ends processes when this test process ends, however it ends.
#[derive(Debug)]
pub struct Reaper(Mutex<ChildStdin>);

impl Reaper {
    fn start(dir: &Path) -> Self {
        let input = Command::new("sh")
            .args(["-c", REAPER, "reaper"])
            .arg(dir)
            .current_dir("/")
            // no Ctrl-C and no signal to the test's process group reaches it
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .and_then(|child| child.stdin.ok_or_else(|| std::io::Error::other("no pipe")));
        Self(Mutex::new(input.expect("sh starts")))
    }

    /// The process is killed then.
    pub fn ends_with_the_test(&self, pid: u32) {
        let mut input = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(input, "{pid}").expect("the reaper reads");
    }
}

impl Servers {
    /// Starts all of them and waits until each is ready.
    ///
    /// # Panics
    /// When one ends or is not ready in time, with its last words.
    pub fn start(binary: &Path, network: &Network) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("tandem-cluster-")
            .tempdir()
            .expect("a folder")
            .keep();
        let reaper = Arc::new(Reaper::start(&dir));
        for part in [
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubectl",
        ] {
            std::os::unix::fs::symlink(binary, dir.join(part)).expect("a link");
        }
        fs::write(dir.join("audit-policy.json"), AUDIT_POLICY).expect("the audit policy");
        let servers = Self {
            pki: Pki::create(dir.join("pki"), ADDRESS, PORT),
            dir,
            reaper,
        };
        network.enter(|| servers.run());
        servers
    }

    fn run(&self) {
        let mut etcd = self.spawn("etcd", &self.etcd());
        let mut api = self.spawn("kube-apiserver", &self.api());
        self.ready(&mut [&mut etcd, &mut api], "the API server", || {
            let mut get = Command::new(self.program("kubectl"));
            get.arg("--kubeconfig").arg(self.kubeconfig(User::Admin));
            get.args(["get", "--raw", "/readyz", "--request-timeout=5s"]);
            let output = get.output().expect("kubectl starts");
            output.status.success()
        });
        let mut controllers = self.spawn("kube-controller-manager", &self.controllers());
        let mut scheduler = self.spawn("kube-scheduler", &self.scheduler());
        // Both have made what they need when they watch; pods that come earlier are seen by their first list.
        for child in [&mut etcd, &mut api, &mut controllers, &mut scheduler] {
            self.alive(child);
        }
    }

    fn etcd(&self) -> Vec<String> {
        let data = self.dir.join("etcd-data");
        vec![
            format!("--data-dir={}", data.display()),
            "--listen-client-urls=http://127.0.0.1:2379".into(),
            "--advertise-client-urls=http://127.0.0.1:2379".into(),
            "--listen-peer-urls=http://127.0.0.1:2380".into(),
            // The data dies with the test.
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
        ]
    }

    fn api(&self) -> Vec<String> {
        let file = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        let pki = |flag: &str, name: &str| file(flag, &self.pki.path(name));
        vec![
            "--etcd-servers=http://127.0.0.1:2379".into(),
            format!("--bind-address={ADDRESS}"),
            format!("--secure-port={PORT}"),
            format!("--advertise-address={ADVERTISED}"),
            "--endpoint-reconciler-type=none".into(),
            pki("tls-cert-file", "server.crt"),
            pki("tls-private-key-file", "server.key"),
            pki("token-auth-file", "tokens.csv"),
            "--authorization-mode=RBAC".into(),
            "--anonymous-auth=false".into(),
            "--service-cluster-ip-range=10.96.0.0/16".into(),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            pki("service-account-key-file", "accounts.pub"),
            pki("service-account-signing-key-file", "accounts.key"),
            // A test's namespace can have nodes of its own.
            "--enable-admission-plugins=PodNodeSelector".into(),
            file("audit-policy-file", &self.dir.join("audit-policy.json")),
            file("audit-log-path", &self.audit_log()),
            // One file, however long the test.
            "--audit-log-maxsize=4096".into(),
            // A pod that says nothing of it leaves a lost node as soon as that is known to be lost; Tandem's pods say it.
            "--default-not-ready-toleration-seconds=1".into(),
            "--default-unreachable-toleration-seconds=1".into(),
        ]
    }

    fn controllers(&self) -> Vec<String> {
        let mut flags = vec![
            format!("--kubeconfig={}", self.kubeconfig(User::Controllers).display()),
            format!(
                "--service-account-private-key-file={}",
                self.pki.path("accounts.key").display()
            ),
            format!("--root-ca-file={}", self.pki.path("ca.crt").display()),
            "--use-service-account-credentials".into(),
            "--leader-elect=false".into(),
            format!("--node-monitor-grace-period={}s", NODE_GRACE.as_secs()),
            "--node-monitor-period=1s".into(),
        ];
        flags.extend(QPS.map(str::to_owned));
        flags
    }

    fn scheduler(&self) -> Vec<String> {
        let mut flags = vec![
            format!("--kubeconfig={}", self.kubeconfig(User::Scheduler).display()),
            "--leader-elect=false".into(),
        ];
        flags.extend(QPS.map(str::to_owned));
        flags
    }

    fn spawn(&self, part: &'static str, args: &[String]) -> (&'static str, Child) {
        (part, self.start_part(part, part, args))
    }

    /// Starts a part with its output in a file; the reaper knows it from then on.
    fn start_part(&self, part: &str, log: &str, args: &[String]) -> Child {
        let log = File::create(self.log(log)).expect("a log file");
        let child = Command::new(self.program(part))
            .args(args)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {part}: {error}"));
        self.reaper.ends_with_the_test(child.id());
        child
    }

    /// Starts a proxy that adds a kubeconfig's token and TLS to plain HTTP; gives its address. The caller is in the namespace.
    #[expect(
        clippy::zombie_processes,
        reason = "it runs until this process ends, and the reaper ends it then"
    )]
    pub fn proxy(&self, kubeconfig: &Path) -> String {
        let name = kubeconfig.file_name().unwrap_or_default().to_string_lossy();
        let log = format!("proxy-{name}");
        let config = format!("--kubeconfig={}", kubeconfig.display());
        let mut child = self.start_part("kubectl", &log, &[config, "proxy".into(), "--port=0".into()]);
        let begin = Instant::now();
        loop {
            let said = fs::read_to_string(self.log(&log)).unwrap_or_default();
            let line = said.lines().find_map(|line| line.strip_prefix("Starting to serve on "));
            if let Some(address) = line.filter(|_| said.ends_with('\n')) {
                return format!("http://{address}");
            }
            let ended = child.try_wait().expect("try_wait");
            assert!(
                ended.is_none() && begin.elapsed() < PATIENCE,
                "no kubectl proxy for {name}: {ended:?}, it says {said:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Who ends what the test has started.
    pub fn reaper(&self) -> Arc<Reaper> {
        Arc::clone(&self.reaper)
    }

    fn ready(&self, children: &mut [&mut (&'static str, Child)], what: &str, check: impl Fn() -> bool) {
        let begin = Instant::now();
        while !check() {
            for child in &mut *children {
                self.alive(child);
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "{what} is not ready after {PATIENCE:?}:\n{}",
                children.iter().map(|(part, _)| self.tail(part)).collect::<String>()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn alive(&self, (part, child): &mut (&'static str, Child)) {
        if let Some(status) = child.try_wait().expect("try_wait") {
            panic!("{part} has ended ({status}):\n{}", self.tail(part));
        }
    }

    fn tail(&self, part: &str) -> String {
        let log = fs::read_to_string(self.log(part)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        format!("---- {part}\n{}\n", lines[lines.len().saturating_sub(20)..].join("\n"))
    }

    fn log(&self, part: &str) -> PathBuf {
        self.dir.join(format!("{part}.log"))
    }

    /// The folder of everything; it goes with the test process.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of a part of the binary.
    pub fn program(&self, part: &str) -> PathBuf {
        self.dir.join(part)
    }

    /// The kubeconfig of a user.
    pub fn kubeconfig(&self, user: User) -> PathBuf {
        self.pki.user(user)
    }

    /// Writes a kubeconfig for a token.
    pub fn kubeconfig_for(&self, name: &str, token: &str) -> PathBuf {
        self.pki.kubeconfig(name, ADDRESS, PORT, token)
    }

    /// Writes a kubeconfig for a plain address.
    pub fn kubeconfig_of(&self, name: &str, server: &str) -> PathBuf {
        self.pki.plain_kubeconfig(name, server)
    }

    /// One JSON object a line, one for each request.
    pub fn audit_log(&self) -> PathBuf {
        self.dir.join("audit.log")
    }
}
