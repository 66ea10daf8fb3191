//! What the API server said last, by deployment. Only what a pass needs is kept: a child as deflated JSON without its
//! managed fields, a pod as a few facts.
//!
//! What the operator has written itself is put in as it is answered, so that the next pass never plans on less than what
//! this one did; the watch's own, older word of it is then ignored.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec;
use serde_json::Value;
use tandem_crds::PDDeployment;

use super::kinds::Kind;
use crate::observe::node::NodeFacts;
use crate::observe::pod::PodFacts;

/// Fast: a child is put in each time that it changes.
const DEFLATE_LEVEL: u8 = 3;

/// Names a deployment, or an object in its namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A child as it is in the cluster.
#[derive(Debug, Clone)]
pub struct Child {
    /// Its uid.
    pub uid: String,
    version: u64,
    /// Deflated: a pass reads it once, and of a thousand deployments it is most of what is held.
    json: Arc<[u8]>,
}

impl Child {
    /// From an object as it was read.
    pub fn of(object: &Value) -> Self {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
        Self {
            uid: text("uid").to_owned(),
            version: version(text("resourceVersion")),
            json: compress_to_vec(object.to_string().as_bytes(), DEFLATE_LEVEL).into(),
        }
    }

    /// The object.
    pub fn object(&self) -> Value {
        let json = decompress_to_vec(&self.json);
        json.ok()
            .and_then(|json| serde_json::from_slice(&json).ok())
            .unwrap_or(Value::Null)
    }
}

/// All that is known of one deployment.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// The deployment itself.
    pub object: Option<Arc<PDDeployment>>,
    /// Its children, by kind and name.
    pub children: BTreeMap<(Kind, String), Child>,
    /// Pods that bear its name, by theirs.
    pub pods: BTreeMap<String, Arc<PodFacts>>,
}

/// Where an object that is watched belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Watched {
    /// `PDDeployment`s.
    Deployments,
    /// Children of a kind.
    Children(Kind),
    /// Pods.
    Pods,
    /// Nodes.
    Nodes,
}

/// The cache; all methods are short and never wait.
#[derive(Debug, Default)]
pub struct Cache(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    views: HashMap<Key, View>,
    nodes: BTreeMap<String, NodeFacts>,
    /// What could not be read, and why.
    broken: BTreeMap<Key, String>,
    /// Watches that have listed everything once.
    synced: HashSet<(Watched, Option<String>)>,
}

impl Cache {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that is known of a deployment.
    pub fn view(&self, key: &Key) -> View {
        self.lock().views.get(key).cloned().unwrap_or_default()
    }

    /// The nodes.
    pub fn nodes(&self) -> BTreeMap<String, NodeFacts> {
        self.lock().nodes.clone()
    }

    /// Deployments with pods on a node.
    pub fn on_node(&self, node: &str) -> Vec<Key> {
        let inner = self.lock();
        let runs = |view: &View| view.pods.values().any(|pod| pod.node.as_deref() == Some(node));
        let found = inner.views.iter().filter(|(_, view)| runs(view));
        found.map(|(key, _)| key.clone()).collect()
    }

    /// Deployments, and those that cannot be read.
    pub fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        let there = inner.views.values().filter(|view| view.object.is_some()).count();
        (there, inner.broken.len())
    }

    /// How many deployments say so of each condition: its type, and its status.
    pub fn conditions(&self) -> BTreeMap<(String, String), i64> {
        let mut counts = BTreeMap::new();
        for object in self.lock().views.values().filter_map(|view| view.object.as_ref()) {
            for condition in object.status.iter().flat_map(|status| &status.conditions) {
                let says = (condition.type_.clone(), condition.status.clone());
                *counts.entry(says).or_default() += 1;
            }
        }
        counts
    }

    /// Puts in a deployment. Whether that is news.
    pub fn put_deployment(&self, key: &Key, object: PDDeployment) -> bool {
        let mut inner = self.lock();
        inner.broken.remove(key);
        let view = inner.views.entry(key.clone()).or_default();
        let newer = view.object.as_ref().is_none_or(|old| of(old) < of(&object));
        if newer {
            view.object = Some(Arc::new(object));
        }
        newer
    }

    /// A deployment that cannot be read: it is left as it is. Whether that is news.
    pub fn put_broken(&self, key: &Key, error: String) -> bool {
        let mut inner = self.lock();
        if let Some(view) = inner.views.get_mut(key) {
            view.object = None;
        }
        inner.broken.insert(key.clone(), error.clone()) != Some(error)
    }

    /// Puts in a child of a deployment. Whether that is news.
    pub fn put_child(&self, owner: &Key, kind: Kind, name: &str, child: Child) -> bool {
        let mut inner = self.lock();
        let children = &mut inner.views.entry(owner.clone()).or_default().children;
        let at = (kind, name.to_owned());
        let newer = children.get(&at).is_none_or(|old| old.version < child.version);
        if newer {
            children.insert(at, child);
        }
        newer
    }

    /// Puts in a pod. Whether that is news.
    pub fn put_pod(&self, owner: &Key, pod: PodFacts) -> bool {
        let mut inner = self.lock();
        let pods = &mut inner.views.entry(owner.clone()).or_default().pods;
        let news = pods.get(&pod.name).is_none_or(|old| **old != pod);
        if news {
            pods.insert(pod.name.clone(), Arc::new(pod));
        }
        news
    }

    /// Puts in a node. Whether that is news.
    pub fn put_node(&self, name: String, node: NodeFacts) -> bool {
        self.lock().nodes.insert(name, node) != Some(node)
    }

    /// Takes out an object that is gone: by the name of its deployment, and its own.
    pub fn remove(&self, watched: Watched, owner: &Key, name: &str) {
        let mut inner = self.lock();
        if watched == Watched::Nodes {
            inner.nodes.remove(name);
            return;
        }
        inner.remove(watched, owner, name);
    }

    /// A watch has listed everything: what it did not name is gone. The deployments that lost something.
    pub fn listed(&self, watched: Watched, namespace: Option<&str>, there: &BTreeSet<(Key, String)>) -> Vec<Key> {
        let mut inner = self.lock();
        inner.synced.insert((watched, namespace.map(str::to_owned)));
        if watched == Watched::Nodes {
            inner
                .nodes
                .retain(|name, _| there.iter().any(|(_, listed)| listed == name));
            return Vec::new();
        }
        let mut gone = Vec::new();
        for (key, view) in &inner.views {
            if namespace.is_some_and(|namespace| namespace != key.namespace) {
                continue;
            }
            let names: Vec<&String> = match watched {
                Watched::Deployments if view.object.is_some() => vec![&key.name],
                Watched::Deployments | Watched::Nodes => Vec::new(),
                Watched::Children(kind) => {
                    let of_kind = view.children.keys().filter(|(of, _)| *of == kind);
                    of_kind.map(|(_, name)| name).collect()
                }
                Watched::Pods => view.pods.keys().collect(),
            };
            for name in names {
                let at = (key.clone(), name.clone());
                if !there.contains(&at) {
                    gone.push(at);
                }
            }
        }
        for (key, name) in &gone {
            inner.remove(watched, key, name);
        }
        if watched == Watched::Deployments {
            inner
                .broken
                .retain(|key, _| there.contains(&(key.clone(), key.name.clone())));
        }
        gone.into_iter().map(|(key, _)| key).collect()
    }

    /// Whether these watches have all listed everything once.
    pub fn synced(&self, watches: &[(Watched, Option<String>)]) -> bool {
        let inner = self.lock();
        watches.iter().all(|watch| inner.synced.contains(watch))
    }
}

impl Inner {
    fn remove(&mut self, watched: Watched, owner: &Key, name: &str) {
        self.broken
            .retain(|key, _| watched != Watched::Deployments || key != owner);
        let Some(view) = self.views.get_mut(owner) else { return };
        match watched {
            Watched::Deployments => view.object = None,
            Watched::Children(kind) => {
                view.children.remove(&(kind, name.to_owned()));
            }
            Watched::Pods => {
                view.pods.remove(name);
            }
            Watched::Nodes => {}
        }
        if view.object.is_none() && view.children.is_empty() && view.pods.is_empty() {
            self.views.remove(owner);
        }
    }
}

/// Versions of one object grow: the API server promises it to those who watch.
fn version(text: &str) -> u64 {
    text.parse().unwrap_or(0)
}

fn of(object: &PDDeployment) -> u64 {
    version(object.metadata.resource_version.as_deref().unwrap_or_default())
}
