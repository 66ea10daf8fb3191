//! The admin port.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tandem_wire::proto::admin_server::{Admin, AdminServer};
use tandem_wire::proto::{DrainRequest, DrainResponse, FlushRequest, FlushResponse, Knobs, Role, SetKnobsRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::{Request, Response, Status};

use super::PATIENCE;
use super::client::{Answer, Client};
use super::engine::{self, Mock, Shape, Step};
use super::stack::{Stack, stack};
use tandem_telemetry::State;

const TOKEN: &str = "token-0123456789abcdef";

/// An engine's admin port that writes down what it is told.
#[derive(Clone, Default)]
struct Orders(Arc<Mutex<Vec<String>>>);

impl Orders {
    fn note<T>(&self, what: &str, request: &Request<T>, boot_id: &[u8]) -> Result<(), Status> {
        let token = request
            .metadata()
            .get("authorization")
            .map(|value| value.to_str().unwrap());
        if token != Some(&format!("Bearer {TOKEN}")) {
            return Err(Status::unauthenticated("scripted"));
        }
        assert_eq!(boot_id.len(), 16);
        self.0.lock().push(what.to_owned());
        Ok(())
    }

    fn told(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }

    /// Serves; gives its port as an engine names it.
    async fn serve(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let service = AdminServer::new(self.clone());
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming),
        );
        format!(":{port}")
    }
}

#[tonic::async_trait]
impl Admin for Orders {
    async fn set_knobs(&self, _: Request<SetKnobsRequest>) -> Result<Response<Knobs>, Status> {
        Err(Status::unimplemented("the router sets no knobs"))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let order = request.get_ref();
        let what = format!("drain {} {}", order.deadline_ms, order.resume);
        self.note(&what, &request, &order.boot_id)?;
        Ok(Response::new(DrainResponse { remaining: 3 }))
    }

    async fn flush(&self, request: Request<FlushRequest>) -> Result<Response<FlushResponse>, Status> {
        self.note("flush", &request, &request.get_ref().boot_id)?;
        Ok(Response::new(FlushResponse { freed_pages: 7 }))
    }
}

/// A router with an admin port in front of a prefill and a decode with one each.
struct Rig {
    stack: Stack,
    prefill: Mock,
    decode: Mock,
    orders: [Orders; 2],
    _token: tempfile::NamedTempFile,
}

impl Rig {
    async fn start() -> Self {
        let orders = [Orders::default(), Orders::default()];
        let mock = async |role, orders: &Orders| {
            Mock::start(Shape {
                role,
                admin_endpoint: orders.serve().await,
                ..Shape::default()
            })
        };
        let (prefill, decode) = (
            mock(Role::Prefill, &orders[0]).await,
            mock(Role::Decode, &orders[1]).await,
        );
        let token = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(token.path(), TOKEN).unwrap();
        let file = format!("--admin-token-file={}", token.path().display());
        let stack = stack(&[&prefill], &[&decode], &["--admin-listen=127.0.0.1:0", &file]).await;
        Self {
            stack,
            prefill,
            decode,
            orders,
            _token: token,
        }
    }

    fn addr(&self) -> SocketAddr {
        self.stack.router.admin_addr().unwrap()
    }

    async fn ask(&self, method: &str, path: &str, body: Option<Value>, authorization: Option<&str>) -> Answer {
        let url = format!("http://{}{path}", self.addr());
        let mut request = self.stack.client.http.request(method.parse().unwrap(), url);
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Some(authorization) = authorization {
            request = request.header("authorization", authorization);
        }
        Client::read(request.send().await.unwrap()).await
    }

    async fn authorized(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        self.ask(method, path, body, Some(&format!("Bearer {TOKEN}"))).await
    }

    fn told(&self) -> [Vec<String>; 2] {
        [self.orders[0].told(), self.orders[1].told()]
    }
}

#[tokio::test]
async fn without_the_token_nothing_is_shown_and_no_engine_is_told_anything() {
    let rig = Rig::start().await;
    for authorization in [
        None,
        Some("Bearer token-0123456789abcdeF"),
        Some(TOKEN),
        Some("Basic x"),
    ] {
        for (method, path) in [
            ("GET", "/admin/endpoints"),
            ("GET", "/admin/loads"),
            ("GET", "/admin/traffic"),
            ("POST", "/admin/traffic"),
            ("GET", "/admin/knobs"),
            ("POST", "/admin/knobs"),
            ("POST", "/admin/probe"),
            ("POST", "/admin/badge"),
            ("POST", "/admin/flush"),
            ("POST", "/admin/drain"),
            ("POST", "/admin/resume"),
            ("GET", "/nowhere"),
        ] {
            let body = (method == "POST").then(|| json!({"all": true}));
            let answer = rig.ask(method, path, body, authorization).await;
            assert_eq!(
                (answer.status, answer.code().as_str()),
                (401, "invalid_admin_token"),
                "{method} {path}"
            );
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            assert!(!answer.text.contains("token-"), "{}", answer.text);
        }
    }
    assert_eq!(rig.told(), [Vec::<String>::new(), Vec::new()]);
}

#[tokio::test]
async fn the_public_port_has_no_admin_paths() {
    let rig = Rig::start().await;
    for path in ["/admin/endpoints", "/admin/loads", "/admin/flush"] {
        let request = rig.stack.client.http.get(rig.stack.client.url(path)).bearer_auth(TOKEN);
        assert_eq!(
            Client::read(request.send().await.unwrap()).await.code(),
            "unknown_path",
            "{path}"
        );
    }
    let stack = stack(&[], &[&rig.decode], &[]).await;
    assert_eq!(stack.router.admin_addr(), None, "it is off by default");
}

#[tokio::test]
async fn each_engine_is_shown_with_who_it_is_and_how_it_stands() {
    let rig = Rig::start().await;
    rig.decode.then(vec![
        Step::Started,
        Step::Hold,
        Step::Finish(tandem_wire::proto::finished::Cause::Stop),
    ]);
    let held = rig.stack.client.streaming(json!({})).await;
    let shown = rig.authorized("GET", "/admin/endpoints", None).await.json();
    let [prefill, decode] = &shown["endpoints"].as_array().unwrap()[..] else {
        panic!("{shown}")
    };
    assert_eq!(prefill["side"], "prefill");
    assert_eq!(prefill["endpoint"], rig.prefill.endpoint());
    assert_eq!(decode["role"], "decode");
    assert_eq!(decode["state"], "up");
    assert_eq!(decode["boot_id"], rig.decode.boot().to_string());
    assert_eq!(decode["in_flight"], 1);
    assert_eq!(
        decode["breaker"],
        json!({"state": "closed", "failures": 0, "open_ms": null})
    );
    let admin = decode["admin_endpoint"].as_str().unwrap();
    assert!(admin.starts_with("127.0.0.1:"), "{admin}");
    rig.stack.knows_of(&rig.decode, 1).await;
    let loads = rig.authorized("GET", "/admin/loads", None).await.json();
    assert_eq!(loads["loads"][1]["running"], 1, "{loads}");
    assert!(loads["loads"][1]["age_ms"].as_u64().unwrap() < 5_000, "{loads}");
    rig.decode.release();
    drop(held);

    rig.decode.report(tandem_wire::proto::Load {
        draining: true,
        ..Default::default()
    });
    rig.stack.becomes(|state| *state != State::Ready).await;
    let shown = rig.authorized("GET", "/admin/endpoints", None).await.json();
    assert_eq!(shown["endpoints"][1]["state"], "draining");
}

#[tokio::test]
async fn an_engine_that_is_gone_is_shown_with_the_reason() {
    let mut rig = Rig::start().await;
    let labels = format!("{{role=\"decode\",endpoint=\"{}\"}}", rig.decode.endpoint());
    let endpoint = rig.decode.endpoint();
    // as a killed process
    drop(std::mem::replace(&mut rig.decode, engine::decode()));
    rig.stack
        .reaches(&format!("tandem_router_upstream_up{labels}"), 0)
        .await;
    let shown = rig.authorized("GET", "/admin/endpoints", None).await.json();
    let decode = &shown["endpoints"][1];
    assert_eq!(decode["state"], "down");
    assert!(decode["reason"].as_str().unwrap().contains(&endpoint), "{shown}");
    assert_eq!(decode["boot_id"], Value::Null);
}

#[tokio::test]
async fn a_flush_reaches_every_engine_with_the_token_and_says_who_did_it() {
    let rig = Rig::start().await;
    let answer = rig.authorized("POST", "/admin/flush", None).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let engines = answer.json()["engines"].clone();
    assert_eq!(
        engines,
        json!([
            {"side": "prefill", "endpoint": rig.prefill.endpoint(), "freed_pages": 7},
            {"side": "decode", "endpoint": rig.decode.endpoint(), "freed_pages": 7},
        ])
    );
    assert_eq!(rig.told(), [["flush"], ["flush"]]);
}

#[tokio::test]
async fn an_engine_that_cannot_be_told_is_named_and_the_others_are_told() {
    let rig = Rig::start().await;
    let silent = engine::decode();
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(token.path(), TOKEN).unwrap();
    let file = format!("--admin-token-file={}", token.path().display());
    let second = stack(&[&rig.prefill], &[&silent], &["--admin-listen=127.0.0.1:0", &file]).await;
    let flush = async |token: &str| {
        let url = format!("http://{}/admin/flush", second.router.admin_addr().unwrap());
        Client::read(second.client.http.post(url).bearer_auth(token).send().await.unwrap()).await
    };
    let answer = flush(TOKEN).await;
    assert_eq!(answer.status, 502, "{}", answer.text);
    let engines = &answer.json()["engines"];
    assert_eq!(engines[0]["freed_pages"], 7);
    assert!(
        engines[1]["error"].as_str().unwrap().contains("no admin port"),
        "{engines}"
    );
    assert_eq!(rig.told(), [vec!["flush".to_owned()], vec![]]);
    // a router with another token than its engines
    let other = "other-0123456789abcdef";
    std::fs::write(token.path(), other).unwrap();
    let refused = async {
        loop {
            let answer = flush(other).await;
            if answer.status != 401 {
                return answer.json();
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let answer = tokio::time::timeout(PATIENCE, refused)
        .await
        .expect("the new token is never taken");
    assert!(
        answer["engines"][0]["error"]
            .as_str()
            .unwrap()
            .contains("another admin token"),
        "{answer}"
    );
    assert!(!answer.to_string().contains("0123456789abcdef"), "{answer}");
}

#[tokio::test]
async fn a_drain_means_the_engine_that_it_names_or_all() {
    let rig = Rig::start().await;
    let one = json!({"endpoint": rig.decode.endpoint(), "wait_ms": 50});
    let answer = rig.authorized("POST", "/admin/drain", Some(one.clone())).await.json();
    assert_eq!(
        answer["engines"],
        json!([{"side": "decode", "endpoint": rig.decode.endpoint(), "remaining": 3}])
    );
    assert_eq!(rig.told(), [vec![], vec!["drain 50 false".to_owned()]]);
    rig.authorized("POST", "/admin/resume", Some(json!({"all": true})))
        .await;
    assert_eq!(rig.told(), [["drain 0 true"], ["drain 0 true"]]);
    for (body, named) in [
        (json!({}), "endpoint"),
        (json!({"all": true, "endpoint": rig.decode.endpoint()}), "endpoint"),
        (json!({"endpoint": "127.0.0.1:1"}), "endpoint"),
        (json!({"all": true, "wait_ms": 600_001}), "wait_ms"),
    ] {
        let answer = rig.authorized("POST", "/admin/drain", Some(body)).await;
        assert_eq!(
            (answer.status, answer.param().as_deref()),
            (400, Some(named)),
            "{}",
            answer.text
        );
    }
    for body in [json!({"al": true}), json!([]), json!({"all": 1})] {
        assert_eq!(
            rig.authorized("POST", "/admin/drain", Some(body)).await.code(),
            "malformed_json"
        );
    }
    let large = json!({"endpoint": "x".repeat(70_000)});
    assert_eq!(
        rig.authorized("POST", "/admin/drain", Some(large)).await.code(),
        "body_too_large"
    );
    assert_eq!(
        rig.authorized("GET", "/admin/drain", None).await.code(),
        "method_not_allowed"
    );
    assert_eq!(rig.authorized("GET", "/admin", None).await.code(), "unknown_path");
    assert_eq!(rig.told(), [Vec::<String>::new(), Vec::new()]);
}

#[tokio::test]
async fn a_connection_to_the_admin_port_serves_one_request() {
    let rig = Rig::start().await;
    let mut socket = TcpStream::connect(rig.addr()).await.unwrap();
    let request = format!("GET /admin/loads HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    tokio::time::timeout(PATIENCE, socket.read_to_string(&mut text))
        .await
        .expect("the connection stays open")
        .unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}
