//! `tandem diagnose` and `tandem capture` of a deployment on a cluster: an API server that has one object and three pods, and
//! forwards their ports to what `tandem up` runs.
//!
//! It answers as Kubernetes does: objects as JSON, a port as a WebSocket with two channels, of data and of errors.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tandem_e2e::bin;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::up::{MODEL, Up};

/// On a busy machine nothing is slow and nothing hangs: the two verdicts are compared, not the speed.
const PATIENT: [&str; 3] = ["--rounds=2", "--stuck-seconds=250", "--probe-seconds=250"];
const SECRET: &str = "s3cret-of-a-variable";

/// The API server, and the ports that it was asked to forward.
struct Server {
    config: PathBuf,
    forwarded: Arc<Mutex<BTreeSet<(String, u16)>>>,
    _dir: tempfile::TempDir,
}

/// What it has: answers by their paths.
#[derive(Debug)]
struct World {
    answers: Vec<(String, Value)>,
    /// Nobody listens there any more.
    dead: Mutex<BTreeSet<u16>>,
}

impl Server {
    async fn start(world: Arc<World>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let place = listener.local_addr().expect("an address");
        let forwarded = Arc::new(Mutex::new(BTreeSet::new()));
        let seen = Arc::clone(&forwarded);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (world, seen) = (Arc::clone(&world), Arc::clone(&seen));
                let service = hyper::service::service_fn(move |request| {
                    let answer = answer(&world, &seen, request);
                    async move { Ok::<_, std::convert::Infallible>(answer) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades();
                tokio::spawn(connection);
            }
        });
        let dir = tempfile::tempdir().expect("a folder");
        let config = dir.path().join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{place}")}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "serving"}}],
            "users": [{"name": "u", "user": {}}],
        });
        std::fs::write(&config, text.to_string()).expect("a kubeconfig");
        Self {
            config,
            forwarded,
            _dir: dir,
        }
    }

    fn tandem(&self, args: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.arg("300").arg(bin("tandem")).args(args).args(PATIENT);
        command.arg("--kubeconfig").arg(&self.config);
        command.output().expect("timeout(1) runs")
    }
}

fn answer(
    world: &Arc<World>,
    seen: &Mutex<BTreeSet<(String, u16)>>,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    if let Some(pod) = path
        .strip_suffix("/portforward")
        .and_then(|path| path.rsplit('/').next())
    {
        let query = request.uri().query().expect("ports");
        let port = query.rsplit('=').next().expect("ports=PORT");
        let port: u16 = port.parse().expect("one port");
        seen.lock().expect("a lock").insert((pod.to_owned(), port));
        return upgrade(world, request, port);
    }
    let found = world.answers.iter().find(|(known, _)| *known == path);
    let (status, body) = match found {
        Some((_, Value::String(text))) => (StatusCode::OK, text.clone()),
        Some((_, object)) => (StatusCode::OK, object.to_string()),
        None => {
            let missing = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound", "message": path});
            (StatusCode::NOT_FOUND, missing.to_string())
        }
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response
}

fn upgrade(world: &Arc<World>, mut request: Request<Incoming>, port: u16) -> Response<Full<Bytes>> {
    let key = request.headers()[SEC_WEBSOCKET_KEY].as_bytes().to_owned();
    let upgraded = hyper::upgrade::on(&mut request);
    let world = Arc::clone(world);
    tokio::spawn(async move {
        let io = TokioIo::new(upgraded.await.expect("an upgrade"));
        let socket = WebSocketStream::from_raw_socket(io, Role::Server, None).await;
        forward(&world, socket, port).await;
    });
    let response = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_ACCEPT, derive_accept_key(&key))
        .header(SEC_WEBSOCKET_PROTOCOL, "v4.channel.k8s.io");
    response.body(Full::default()).expect("a response")
}

/// Channel 0 is data, channel 1 says what went wrong; each begins with the port.
async fn forward<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    world: &World,
    socket: WebSocketStream<S>,
    port: u16,
) {
    let (mut out, mut messages) = socket.split();
    let [low, high] = port.to_le_bytes();
    for channel in [0, 1] {
        let _ = out.send(Message::binary(vec![channel, low, high])).await;
    }
    let dead = world.dead.lock().expect("a lock").contains(&port);
    let stream = if dead {
        None
    } else {
        TcpStream::connect(("127.0.0.1", port)).await.ok()
    };
    let Some(stream) = stream else {
        let mut said = vec![1];
        said.extend_from_slice(format!("error forwarding port {port}: connection refused").as_bytes());
        let _ = out.send(Message::binary(said)).await;
        let _ = out.close().await;
        return;
    };
    let (mut read, mut write) = stream.into_split();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        tokio::select! {
            read = read.read(&mut buffer) => match read {
                Ok(count) if count > 0 => {
                    let mut message = vec![0];
                    message.extend_from_slice(&buffer[..count]);
                    if out.send(Message::binary(message)).await.is_err() { return }
                }
                _ => break,
            },
            message = messages.next() => match message {
                Some(Ok(Message::Binary(bytes))) if bytes.len() > 1 && bytes[0] == 0 => {
                    if write.write_all(&bytes[1..]).await.is_err() { break }
                }
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                Some(Ok(_)) => {}
            },
        }
    }
    let _ = out.close().await;
}

/// The objects of a deployment whose processes are those of a `tandem up`.
fn world(state: &Value, token: &str) -> World {
    let port = |process: &Value, field: &str| -> u16 {
        let place: SocketAddr = process[field].as_str().expect(field).parse().expect("an address");
        place.port()
    };
    let pods: Vec<Value> = state["processes"]
        .as_array()
        .expect("processes")
        .iter()
        .map(|process| {
            let listen = if process["role"] == "router" { "http" } else { "control" };
            let named = [(listen, "listen"), ("ops", "ops"), ("admin", "admin")];
            let ports = named.map(|(name, field)| json!({"name": name, "containerPort": port(process, field)}));
            let name = process["name"].as_str().expect("a name");
            json!({
                "metadata": {"name": format!("chat-{name}"), "namespace": "serving", "labels": {
                    "tandem.dev/deployment": "chat", "tandem.dev/owner": "uid-1", "tandem.dev/role": process["role"],
                }},
                "spec": {"containers": [{"name": "tandem", "ports": ports, "env": [{"name": "A", "value": SECRET}]}]},
                "status": {"phase": "Running", "podIP": "127.0.0.1"},
            })
        })
        .collect();
    let core = "/api/v1/namespaces/serving";
    let object = json!({
        "apiVersion": "tandem.dev/v1alpha1", "kind": "PDDeployment",
        "metadata": {"name": "chat", "namespace": "serving", "uid": "uid-1",
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": SECRET}},
        "spec": {"model": {"name": MODEL}, "decode": {"pod": {"env": [{"name": "A", "value": SECRET}]}}},
    });
    let secret = json!(ByteString(token.as_bytes().to_vec()));
    let mut answers = vec![
        (
            "/apis/tandem.dev/v1alpha1/namespaces/serving/pddeployments/chat".to_owned(),
            object,
        ),
        (
            format!("{core}/pods"),
            json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods}),
        ),
        (
            format!("{core}/secrets/chat-admin-token"),
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-admin-token"}, "data": {"admin-token": secret}}),
        ),
        (
            format!("{core}/events"),
            json!({"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": []}),
        ),
    ];
    for pod in &pods {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        let log = format!("a line of {name}\nand {token}\n");
        answers.push((format!("{core}/pods/{name}/log"), Value::String(log)));
    }
    World {
        answers,
        dead: Mutex::default(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_on_a_cluster_is_judged_otherwise_than_the_same_on_this_machine() {
    let mut up = Up::launch(&[]);
    let state = up.ready().await;
    let token = std::fs::read_to_string(Path::new(&up.state_dir()).join("admin-token")).expect("a token");
    let token = token.trim();
    let world = Arc::new(world(&state, token));
    let server = Server::start(Arc::clone(&world)).await;
    let judged = |output: &Output| -> (Option<i32>, Value) {
        let said = String::from_utf8_lossy(&output.stderr);
        let judged: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
        let layers = judged["verdict"]["layers"].as_array().expect("layers");
        let standings: Vec<_> = layers.iter().map(|layer| layer["standing"].clone()).collect();
        (output.status.code(), json!([judged["verdict"]["finding"], standings]))
    };

    let far = server.tandem(&["diagnose", "chat", "--json"]);
    let near = Command::new(bin("tandem"))
        .args(["diagnose", "--json", "--state-dir", &up.state_dir()])
        .args(PATIENT)
        .output()
        .expect("it starts");
    assert_eq!(judged(&far), judged(&near));
    assert_eq!(judged(&far).1[0], "no_fault_inside");
    // three processes: each engine's control port, the router's API and its admin port, were all reached through the server
    let pods = |names: &[&str]| names.iter().map(|name| format!("chat-{name}")).collect::<BTreeSet<_>>();
    let forwarded = server.forwarded.lock().expect("a lock").clone();
    assert_eq!(
        forwarded.iter().map(|(pod, _)| pod.clone()).collect::<BTreeSet<_>>(),
        pods(&["prefill-0", "decode-0", "router"])
    );
    assert_eq!(forwarded.len(), 4, "{forwarded:?}");

    let folder = tempfile::tempdir().expect("a folder");
    let capture = folder.path().join("capture.tar").display().to_string();
    let output = server.tandem(&["capture", "chat", "-o", &capture]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let archive = String::from_utf8_lossy(&std::fs::read(&capture).expect("an archive")).into_owned();
    for part in [
        "tandem-capture/deployment.json",
        "tandem-capture/pods.json",
        "tandem-capture/events.json",
        "tandem-capture/metrics/chat-decode-0.txt",
        "tandem-capture/logs/chat-router.log",
        "a line of chat-prefill-0",
        "tandem_engine_inflight",
        "tandem_router_requests",
    ] {
        assert!(archive.contains(part), "the archive lacks {part}");
    }
    for planted in [token, SECRET] {
        assert!(!archive.contains(planted), "the archive holds {planted:?}");
    }

    // What cannot be reached from here, and answers others, is not called dead.
    let control = |name: &str| {
        let processes = state["processes"].as_array().expect("processes");
        let process = processes.iter().find(|process| process["name"] == name).expect(name);
        let place: SocketAddr = process["listen"].as_str().expect("listen").parse().expect("an address");
        place.port()
    };
    world.dead.lock().expect("a lock").insert(control("decode-0"));
    let output = server.tandem(&["diagnose", "chat"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("answers the router, and not here"), "{said}");

    let output = server.tandem(&["diagnose", "chat", "--router-pod", "chat-decode-0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("there are: chat-router"), "{said}");
}
