//! A small API server that lists and watches EndpointSlices.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Its state, shared with its connections.
#[derive(Clone)]
pub struct ApiServer {
    pub addr: SocketAddr,
    state: Arc<Mutex<State>>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    version: u64,
    slices: BTreeMap<String, Value>,
    /// Each change: its version, its kind, the object.
    changes: Vec<(u64, &'static str, Value)>,
    /// Answers each request with this status.
    fails: Option<u16>,
    /// Watches that began before this many cuts have ended.
    cuts: u64,
    /// An event of this status ends each watch.
    expires: bool,
    asked: u32,
}

/// How an endpoint stands.
#[derive(Debug, Clone, Copy)]
pub enum Stands {
    Ready,
    NotReady,
    Terminating,
}

impl ApiServer {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            addr: listener.local_addr().unwrap(),
            state: Arc::default(),
            changed: watch::Sender::new(()),
        };
        let serving = server.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let server = serving.clone();
                let service = service_fn(move |request| {
                    let answer = server.answer(&request);
                    async { Ok::<_, Infallible>(answer) }
                });
                let connection =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                tokio::spawn(async { drop(connection.await) });
            }
        });
        server
    }

    /// A slice of `service` with one endpoint.
    pub fn put(&self, name: &str, service: &str, at: SocketAddr, stands: Stands) {
        let (ready, terminating) = match stands {
            Stands::Ready => (true, false),
            Stands::NotReady => (false, false),
            Stands::Terminating => (false, true),
        };
        let object = json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "ports": [{"name": "control", "port": at.port(), "protocol": "TCP"}],
            "endpoints": [{"addresses": [at.ip()], "conditions": {"ready": ready, "terminating": terminating}}],
        });
        self.change(|state| {
            let kind = if state.slices.contains_key(name) {
                "MODIFIED"
            } else {
                "ADDED"
            };
            let mut object = object;
            object["metadata"]["resourceVersion"] = state.version.to_string().into();
            state.slices.insert(name.to_owned(), object.clone());
            state.changes.push((state.version, kind, object));
        });
    }

    pub fn delete(&self, name: &str) {
        self.change(|state| {
            let object = state.slices.remove(name).unwrap();
            state.changes.push((state.version, "DELETED", object));
        });
    }

    /// Answers each request with this status, and ends what runs.
    pub fn fails(&self, status: Option<u16>) {
        self.change(|state| {
            state.fails = status;
            state.cuts += 1;
        });
    }

    /// Ends each watch, with the word that its version is too old where `expires`; what changes until the next list, no watch tells.
    pub fn cut(&self, expires: bool) {
        self.change(|state| {
            state.expires = expires;
            state.cuts += 1;
            state.changes.clear();
        });
    }

    /// How often it was asked.
    pub fn asked(&self) -> u32 {
        self.state.lock().asked
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        state.version += 1;
        change(&mut state);
        self.changed.send_replace(());
    }

    /// A file that leads to it.
    pub fn kubeconfig(&self) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": format!("http://{}", self.addr)}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "serving"}}],
        });
        std::fs::write(file.path(), config.to_string()).unwrap();
        file
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Body> {
        let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
        assert_eq!(path, "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices");
        let selected = query.split('&').find_map(|field| field.strip_prefix("labelSelector="));
        let selected = selected.expect("a selector").replace("%2F", "/").replace("%3D", "=");
        let service = selected
            .strip_prefix("kubernetes.io/service-name=")
            .expect("of a service");
        let mut state = self.state.lock();
        state.asked += 1;
        if let Some(status) = state.fails {
            let text = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "scripted", "code": status});
            let mut response = Response::new(once(text.to_string()));
            *response.status_mut() = status.try_into().unwrap();
            return response;
        }
        let of = |object: &Value| object["metadata"]["labels"]["kubernetes.io/service-name"] == service;
        if !query.split('&').any(|field| field == "watch=true") {
            state.expires = false;
            let items: Vec<_> = state.slices.values().filter(|object| of(object)).collect();
            let list = json!({
                "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": state.version.to_string()}, "items": items,
            });
            return Response::new(once(list.to_string()));
        }
        let version = query
            .split('&')
            .find_map(|field| field.strip_prefix("resourceVersion="));
        let mut version: u64 = version.unwrap().parse().unwrap();
        let (service, cuts) = (service.to_owned(), state.cuts);
        drop(state);
        let (server, mut changed) = (self.clone(), self.changed.subscribe());
        let events = async_stream::stream! {
            loop {
                changed.borrow_and_update();
                let (lines, ends) = server.since(&mut version, &service, cuts);
                for line in lines {
                    yield Ok(Frame::data(Bytes::from(line)));
                }
                if ends || changed.changed().await.is_err() {
                    return;
                }
            }
        };
        Response::new(StreamBody::new(Box::pin(events)))
    }

    /// What a watch has to tell, and whether it ends with that.
    fn since(&self, version: &mut u64, service: &str, cuts: u64) -> (Vec<String>, bool) {
        let state = self.state.lock();
        let mut lines = Vec::new();
        if state.cuts != cuts {
            if state.expires {
                let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410});
                lines.push(json!({"type": "ERROR", "object": status}).to_string() + "\n");
            }
            return (lines, true);
        }
        for (at, kind, object) in &state.changes {
            if at > version && object["metadata"]["labels"]["kubernetes.io/service-name"] == service {
                lines.push(json!({"type": kind, "object": object}).to_string() + "\n");
            }
        }
        *version = state.version;
        (lines, false)
    }
}

type Body = StreamBody<Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>>;

fn once(text: String) -> Body {
    StreamBody::new(Box::pin(futures::stream::once(async {
        Ok(Frame::data(Bytes::from(text)))
    })))
}
