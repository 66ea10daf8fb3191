//! A router in this process, in front of scripted engines.

use clap::Parser;
use serde_json::Value;
use tandem_router::shards::Shards;
use tandem_router::{Config, Router};
use tandem_telemetry::{Metrics, Readiness, State, Traces};

use super::PATIENCE;
use super::client::{Answer, Client};
use super::engine::{Mock, tokenizer};

pub struct Stack {
    pub router: Router,
    pub client: Client,
    pub metrics: Metrics,
    pub readiness: Readiness,
}

/// A router with these prefill and decode engines, once all of them are up.
pub async fn stack(prefills: &[&Mock], decodes: &[&Mock], flags: &[&str]) -> Stack {
    let stack = cold(prefills, decodes, flags).await;
    stack.becomes(|state| *state == State::Ready).await;
    for (role, mocks) in [("prefill", prefills), ("decode", decodes)] {
        for mock in mocks {
            let endpoint = mock.endpoint();
            stack
                .reaches(
                    &format!("tandem_router_upstream_up{{role=\"{role}\",endpoint=\"{endpoint}\"}}"),
                    1,
                )
                .await;
        }
    }
    stack
}

/// The same without waiting.
pub async fn cold(prefills: &[&Mock], decodes: &[&Mock], flags: &[&str]) -> Stack {
    let mut args = vec![
        "tandem-router".to_owned(),
        "--model-name=tiny".into(),
        "--listen=127.0.0.1:0".into(),
    ];
    args.push(format!("--tokenizer={}", tokenizer().display()));
    args.extend(prefills.iter().map(|mock| format!("--prefill={}", mock.endpoint())));
    args.extend(decodes.iter().map(|mock| format!("--decode={}", mock.endpoint())));
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let config = Config::try_parse_from(args).unwrap();
    let metrics = Metrics::new("tandem-router", "test");
    let readiness = Readiness::default();
    // on the test's own thread, where nothing happens at the same time, unless threads are asked for
    let shards = match config.threads {
        None => Shards::current(),
        Some(_) => Shards::start(config.threads()).unwrap(),
    };
    let router = Router::start_on(shards, config, metrics.clone(), readiness.clone(), Traces::off());
    let router = router.await.unwrap();
    let client = Client::new(router.addr());
    Stack {
        router,
        client,
        metrics,
        readiness,
    }
}

impl Stack {
    /// Waits for a readiness.
    pub async fn becomes(&self, wanted: impl FnMut(&State) -> bool) {
        let mut states = self.readiness.subscribe();
        let reached = states.wait_for(wanted);
        tokio::time::timeout(PATIENCE, reached)
            .await
            .expect("the router's readiness never changed")
            .unwrap();
    }

    /// A sample of `/metrics`, 0 where there is none.
    pub fn sample(&self, name: &str) -> i64 {
        let text = self.metrics.encode().unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    /// Waits until a sample has a value.
    pub async fn reaches(&self, name: &str, value: i64) {
        let wait = async {
            while self.sample(name) != value {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        let reached = tokio::time::timeout(PATIENCE, wait).await;
        assert!(reached.is_ok(), "{name} is {}, expected {value}", self.sample(name));
    }

    /// Waits until no client connection is open.
    pub async fn disconnected(&self) {
        let open = || {
            let text = self.metrics.encode().unwrap();
            let lines = text
                .lines()
                .filter_map(|line| line.strip_prefix("tandem_router_connections{"));
            let counts: Vec<i64> = lines
                .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
                .collect();
            assert!(!counts.is_empty(), "the connections are not counted");
            counts.iter().sum::<i64>()
        };
        let wait = async {
            while open() > 0 {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        let reached = tokio::time::timeout(PATIENCE, wait).await;
        assert!(reached.is_ok(), "{} connections stay open", open());
    }

    /// Waits until the router knows that so many requests are at `mock`.
    pub async fn knows_of(&self, mock: &Mock, requests: u32) {
        let labels = format!("{{role=\"decode\",endpoint=\"{}\"}}", mock.endpoint());
        self.reaches(&format!("tandem_router_upstream_occupied{labels}"), requests.into())
            .await;
    }

    /// Waits until nothing of any request is left.
    pub async fn at_rest(&self, engines: &[&Mock]) {
        self.reaches("tandem_router_in_flight", 0).await;
        self.reaches("tandem_router_queue_depth", 0).await;
        self.reaches("tandem_router_at_engines", 0).await;
        for mock in engines {
            mock.idle().await;
            for side in ["prefill", "decode"] {
                let labels = format!("{{role=\"{side}\",endpoint=\"{}\"}}", mock.endpoint());
                self.reaches(&format!("tandem_router_upstream_in_flight{labels}"), 0)
                    .await;
            }
        }
    }
}

/// A router with an admin port.
pub struct Governed {
    pub stack: Stack,
    _token: tempfile::NamedTempFile,
}

const TOKEN: &str = "token-0123456789abcdef";

impl Governed {
    /// Once its engines are up.
    pub async fn start(prefills: &[&Mock], decodes: &[&Mock], flags: &[&str]) -> Self {
        let (token, flags) = Self::flags(flags);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        Self {
            stack: stack(prefills, decodes, &flags).await,
            _token: token,
        }
    }

    /// The same without waiting.
    pub async fn cold(prefills: &[&Mock], decodes: &[&Mock], flags: &[&str]) -> Self {
        let (token, flags) = Self::flags(flags);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        Self {
            stack: cold(prefills, decodes, &flags).await,
            _token: token,
        }
    }

    fn flags(flags: &[&str]) -> (tempfile::NamedTempFile, Vec<String>) {
        let token = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(token.path(), TOKEN).unwrap();
        let mut flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        flags.push("--admin-listen=127.0.0.1:0".into());
        flags.push(format!("--admin-token-file={}", token.path().display()));
        (token, flags)
    }

    pub async fn get(&self, path: &str) -> Value {
        let url = format!("http://{}{path}", self.stack.router.admin_addr().unwrap());
        let request = self.stack.client.http.get(url).bearer_auth(TOKEN);
        Client::read(request.send().await.unwrap()).await.json()
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        let url = format!("http://{}{path}", self.stack.router.admin_addr().unwrap());
        let request = self.stack.client.http.post(url).bearer_auth(TOKEN).json(body);
        Client::read(request.send().await.unwrap()).await
    }

    /// An order that is taken; gives the acknowledgement.
    pub async fn order(&self, path: &str, body: Value) -> Value {
        let answer = self.post(path, &body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text);
        answer.json()
    }

    /// Waits until a view has these values.
    pub async fn shows(&self, path: &str, wanted: Value) {
        let began = std::time::Instant::now();
        loop {
            let view = self.get(path).await;
            if wanted
                .as_object()
                .unwrap()
                .iter()
                .all(|(field, value)| view[field] == *value)
            {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{path} never shows {wanted}: {view}");
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }
}
