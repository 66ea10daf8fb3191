//! The lease, on an API server that holds one and does what a test says.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tandem_operator::cluster::lease::{Elector, Leadership};
use tokio::time::{Instant, sleep};

/// Of tests that wait for its end.
const SHORT: Duration = Duration::from_secs(3);
/// Of tests that do not.
const LONG: Duration = Duration::from_mins(1);

/// One lease, and what comes between a request and its answer.
#[derive(Default)]
struct Server {
    lease: Mutex<Option<Value>>,
    /// Written by somebody else right before each update.
    intruder: Mutex<Option<&'static str>>,
    /// Holders whose requests are never answered.
    silent: Mutex<Vec<&'static str>>,
    conflicts: Mutex<u32>,
}

impl Server {
    fn answer(&self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let refused = |status: StatusCode, reason: &str| {
            let body = json!({"kind": "Status", "status": "Failure", "reason": reason, "message": reason, "code": status.as_u16()});
            (status, body)
        };
        if *method != Method::GET
            && let Some(intruder) = *self.intruder.lock().unwrap()
        {
            self.write(intruder);
        }
        let mut lease = self.lease.lock().unwrap();
        if *method == Method::GET {
            return match &*lease {
                None => refused(StatusCode::NOT_FOUND, "NotFound"),
                Some(lease) => (StatusCode::OK, lease.clone()),
            };
        }
        let mut given: Value = serde_json::from_slice(body).unwrap();
        let version = |lease: &Value| lease["metadata"]["resourceVersion"].as_str().map(str::to_owned);
        let there = lease.as_ref().and_then(version);
        if version(&given) != there {
            *self.conflicts.lock().unwrap() += 1;
            return refused(StatusCode::CONFLICT, "Conflict");
        }
        let next = there.map_or(1, |version| version.parse::<u32>().unwrap() + 1);
        given["metadata"]["resourceVersion"] = next.to_string().into();
        *lease = Some(given.clone());
        (StatusCode::OK, given)
    }

    /// Somebody takes it for a minute.
    fn write(&self, holder: &str) {
        let mut lease = self.lease.lock().unwrap();
        let version = lease
            .as_ref()
            .and_then(|lease| lease["metadata"]["resourceVersion"].as_str()?.parse().ok());
        *lease = Some(json!({
            "metadata": {"name": "l", "resourceVersion": (version.unwrap_or(0_u32) + 1).to_string()},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 60},
        }));
    }

    fn holder(&self) -> Option<String> {
        let lease = self.lease.lock().unwrap();
        lease.as_ref()?["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }
}

/// One that wants the lease, and what it may do.
fn candidate(server: &Arc<Server>, name: &'static str, lasts: Duration) -> (Elector, Leadership) {
    let server = Arc::clone(server);
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&server);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await?;
            if server.silent.lock().unwrap().contains(&name) {
                return std::future::pending().await;
            }
            let (status, answer) = server.answer(&parts.method, &body);
            let response = Response::builder().status(status);
            Ok::<_, tower::BoxError>(response.body(Body::from(answer.to_string().into_bytes()))?)
        }
    });
    let leadership = Leadership::new(lasts);
    let client = Client::new(service, "default");
    (
        Elector::new(client, "default", "l", name.to_owned(), leadership.clone()),
        leadership,
    )
}

async fn until(mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_mins(1), "it does not come about");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn one_that_was_read_before_another_took_it_is_not_taken() {
    for is_there in [false, true] {
        let server = Arc::new(Server::default());
        if is_there {
            // Given up by whoever had it: free for all.
            server.write("");
        }
        *server.intruder.lock().unwrap() = Some("faster");
        let (mut elector, leadership) = candidate(&server, "slower", LONG);
        tokio::select! {
            () = elector.acquire() => panic!("it was taken"),
            () = until(|| *server.conflicts.lock().unwrap() > 0) => {}
        }
        assert!(leadership.allows().is_none());
        assert_eq!(server.holder().as_deref(), Some("faster"));
    }
}

#[tokio::test]
async fn one_that_another_has_taken_is_not_renewed() {
    let server = Arc::new(Server::default());
    let (mut elector, leadership) = candidate(&server, "first", SHORT);
    elector.acquire().await;
    *server.intruder.lock().unwrap() = Some("second");
    assert_eq!(elector.keep().await, "second holds it");
    assert!(leadership.allows().is_none());
    assert_eq!(server.holder().as_deref(), Some("second"));
}

#[tokio::test]
async fn no_write_of_one_that_is_cut_off_begins_or_ends_after_another_leads() {
    let server = Arc::new(Server::default());
    let (mut old, of_old) = candidate(&server, "old", SHORT);
    let (mut new, _) = candidate(&server, "new", SHORT);
    old.acquire().await;
    let mut last = of_old.allows();
    let keeps = tokio::spawn(async move { old.keep().await });
    let waits = tokio::spawn(async move { new.acquire().await });
    let first = last;
    until(|| {
        last = of_old.allows().max(last);
        last > first || waits.is_finished()
    })
    .await;
    // It was renewed, and now no answer comes any more.
    server.silent.lock().unwrap().push("old");
    until(|| {
        // A write that begins now may take so long.
        last = of_old.allows().max(last);
        waits.is_finished()
    })
    .await;
    assert_eq!(server.holder().as_deref(), Some("new"));
    assert!(of_old.allows().is_none());
    assert!(last <= Some(Instant::now()), "a write may still be under way");
    keeps.abort();
}

#[tokio::test]
async fn one_that_is_given_up_is_taken_at_once() {
    let server = Arc::new(Server::default());
    let (mut first, of_first) = candidate(&server, "first", LONG);
    first.acquire().await;
    first.release().await;
    assert!(of_first.allows().is_none());
    assert_eq!(server.holder().as_deref(), Some(""));
    let (mut second, of_second) = candidate(&server, "second", LONG);
    second.acquire().await;
    assert!(of_second.allows().is_some());
}
