//! Every event of a namespace, so that what must never be is looked for in all that was, not only in what happened to be there
//! when somebody looked.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::PATIENCE;
use super::api::{Api, Client, path};

/// What is recorded: the plural and its API.
const KINDS: [(&str, &str); 6] = [
    ("pddeployments", tandem_crds::API_VERSION),
    ("deployments", "apps/v1"),
    ("controllerrevisions", "apps/v1"),
    ("pods", "v1"),
    ("configmaps", "v1"),
    ("endpointslices", "discovery.k8s.io/v1"),
];

/// An object was made, changed, or removed.
#[derive(Debug, Clone)]
pub struct Event {
    /// Of all events of the API server, whatever the kind, a later one has a greater version.
    pub version: u64,
    /// For example `pods`.
    pub kind: &'static str,
    /// The object is gone; `object` is what it was.
    pub gone: bool,
    /// As it is now.
    pub object: Value,
    /// When it was heard of.
    pub heard: Instant,
}

/// Objects by kind and name.
#[derive(Debug, Clone, Default)]
pub struct State(BTreeMap<(&'static str, String), Value>);

impl State {
    /// One of them.
    pub fn get(&self, kind: &'static str, name: &str) -> Option<&Value> {
        self.0.get(&(kind, name.to_owned()))
    }

    /// All of a kind.
    pub fn all<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0
            .iter()
            .filter(move |((of, _), _)| *of == kind)
            .map(|(_, object)| object)
    }

    /// Follows an event.
    pub fn apply(&mut self, event: &Event) {
        let key = (event.kind, name(&event.object).to_owned());
        if event.gone {
            self.0.remove(&key);
        } else {
            self.0.insert(key, event.object.clone());
        }
    }
}

/// Records until it is dropped.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<Shared>,
    _watching: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    log: Mutex<Log>,
    changed: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Log {
    events: Vec<Event>,
    state: State,
}

impl Recorder {
    /// Of a namespace in which nothing has been made yet that matters; it returns once it sees all that follows.
    pub async fn start(client: &Client, namespace: &str) -> Self {
        let shared = Arc::new(Shared {
            log: Mutex::default(),
            changed: watch::channel(0).0,
        });
        let mut watching = JoinSet::new();
        for (kind, version) in KINDS {
            let api: Api<Value> = Api::at(client, &path(version, &format!("namespaces/{namespace}/"), kind));
            // A kind that has just been defined is not served yet for a moment.
            let (all, version) = crate::eventually(kind, PATIENCE, async || {
                api.snapshot("").await.map_err(|refused| refused.to_string())
            })
            .await;
            for object in all {
                shared.record(kind, false, object);
            }
            watching.spawn(follow(api, kind, version, Arc::clone(&shared)));
        }
        Self {
            shared,
            _watching: watching,
        }
    }

    /// All that happened so far, in the order in which it happened.
    pub fn events(&self) -> Vec<Event> {
        let mut events = self.shared.lock().events.clone();
        events.sort_by_key(|event| event.version);
        events
    }

    /// How it is now.
    pub fn state(&self) -> State {
        self.shared.lock().state.clone()
    }

    /// Waits until `check` holds of what is there; looks again at each event. Nothing is recorded while it looks.
    ///
    /// # Panics
    /// With what `check` said last when that takes longer than `limit`.
    pub async fn until<T>(&self, what: &str, limit: Duration, mut check: impl FnMut(&State) -> Result<T, String>) -> T {
        let mut changed = self.shared.changed.subscribe();
        let mut last = String::new();
        let waits = async {
            loop {
                changed.borrow_and_update();
                let found = check(&self.shared.lock().state);
                match found {
                    Ok(value) => return value,
                    Err(why) => last = why,
                }
                let _ = changed.changed().await;
            }
        };
        if let Ok(value) = tokio::time::timeout(limit, waits).await {
            return value;
        }
        panic!("{what}: not within {limit:?}; last seen: {last}")
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, kind: &'static str, gone: bool, object: Value) {
        let event = Event {
            version: version(&object).parse().unwrap_or(0),
            kind,
            gone,
            object,
            heard: Instant::now(),
        };
        let mut log = self.lock();
        log.state.apply(&event);
        log.events.push(event);
        drop(log);
        self.changed.send_modify(|count| *count += 1);
    }
}

/// Goes on where a watch ended: nothing is missed between two.
async fn follow(api: Api<Value>, kind: &'static str, mut from: String, shared: Arc<Shared>) {
    loop {
        let Ok(events) = api.watch("", &from).await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let mut events = pin!(events);
        while let Some((what, object)) = events.next().await {
            assert_ne!(what, "ERROR", "the watch of {kind} has lost events: {object}");
            version(&object).clone_into(&mut from);
            shared.record(kind, what == "DELETED", object);
        }
    }
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default()
}

/// An object's name.
pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// One of its labels.
pub fn label<'a>(object: &'a Value, key: &str) -> &'a str {
    object["metadata"]["labels"][key].as_str().unwrap_or_default()
}
