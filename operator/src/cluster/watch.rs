//! The watches: one for each kind in each namespace. They feed the cache, and say which deployment has to be looked at.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::{DeserializeGuard, Resource};
use kube::core::{DynamicObject, NamespaceResourceScope, PartialObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tandem_crds::PDDeployment;
use tokio::task::JoinSet;

use super::cache::{Cache, Child, Key, Watched};
use super::kinds::Kind;
use crate::metrics::Metrics;
use crate::observe::{node, pod};
use crate::queue::Queue;
use crate::render::meta::DEPLOYMENT;

/// Objects in one answer: fewer are fewer in memory at once.
const PAGE: u32 = 100;

/// All watches, and what they feed.
#[derive(Clone)]
pub struct Watches {
    client: Client,
    cache: Arc<Cache>,
    queue: Arc<Queue>,
    metrics: Metrics,
    /// None: all namespaces.
    namespaces: Vec<Option<String>>,
}

impl Watches {
    /// Of these namespaces; of all where none is named.
    pub fn new(client: Client, cache: Arc<Cache>, queue: Arc<Queue>, metrics: Metrics, namespaces: &[String]) -> Self {
        let named = namespaces.iter().cloned().map(Some);
        let namespaces = if namespaces.is_empty() {
            vec![None]
        } else {
            named.collect()
        };
        Self {
            client,
            cache,
            queue,
            metrics,
            namespaces,
        }
    }

    /// What has to be listed before anything is planned.
    pub fn all(&self) -> Vec<(Watched, Option<String>)> {
        let of_namespace = |namespace: &Option<String>| {
            let kinds = Kind::ALL.into_iter().map(Watched::Children);
            let watched = kinds.chain([Watched::Deployments, Watched::Pods]);
            let namespace = namespace.clone();
            watched.map(move |watched| (watched, namespace.clone()))
        };
        let all = self.namespaces.iter().flat_map(of_namespace);
        all.chain([(Watched::Nodes, None)]).collect()
    }

    /// Starts them; they end when `tasks` is dropped.
    pub fn start(&self, tasks: &mut JoinSet<()>) {
        let children = || watcher::Config::default().labels(DEPLOYMENT).page_size(PAGE);
        for namespace in &self.namespaces {
            let one = |watched| One {
                watches: self.clone(),
                watched,
                namespace: namespace.clone(),
                listing: None,
            };
            for kind in Kind::ALL {
                let resource = kind.resource();
                let (client, one) = (self.client.clone(), one(Watched::Children(kind)));
                if kind == Kind::Secret {
                    let api: Api<PartialObjectMeta<DynamicObject>> = match namespace {
                        None => Api::all_with(client, &resource),
                        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
                    };
                    tasks.spawn(one.follow(api, children(), move |one, event| one.child(kind, event)));
                } else {
                    let api: Api<DynamicObject> = match namespace {
                        None => Api::all_with(client, &resource),
                        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
                    };
                    tasks.spawn(one.follow(api, children(), move |one, event| one.child(kind, event)));
                }
            }
            let api: Api<Pod> = scoped(&self.client, namespace.as_deref());
            tasks.spawn(one(Watched::Pods).follow(api, children(), One::pod));
            let api: Api<DeserializeGuard<PDDeployment>> = scoped(&self.client, namespace.as_deref());
            let config = watcher::Config::default().page_size(PAGE);
            tasks.spawn(one(Watched::Deployments).follow(api, config, One::deployment));
        }
        let nodes = One {
            watches: self.clone(),
            watched: Watched::Nodes,
            namespace: None,
            listing: None,
        };
        let config = watcher::Config::default().page_size(PAGE);
        tasks.spawn(nodes.follow(Api::<Node>::all(self.client.clone()), config, One::node));
    }
}

fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        None => Api::all(client.clone()),
        Some(namespace) => Api::namespaced(client.clone(), namespace),
    }
}

/// One watch.
struct One {
    watches: Watches,
    watched: Watched,
    namespace: Option<String>,
    /// What was named since the list began.
    listing: Option<BTreeSet<(Key, String)>>,
}

/// An object, or that it is gone.
enum Seen<K> {
    There(K),
    Gone(K),
}

impl One {
    async fn follow<K>(mut self, api: Api<K>, config: watcher::Config, mut see: impl FnMut(&mut Self, Seen<K>))
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut events = Box::pin(watch(api, config).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => self.listing = Some(BTreeSet::new()),
                Ok(Event::InitApply(object) | Event::Apply(object)) => see(&mut self, Seen::There(object)),
                Ok(Event::Delete(object)) => see(&mut self, Seen::Gone(object)),
                Ok(Event::InitDone) => {
                    let there = self.listing.take().unwrap_or_default();
                    let gone = self
                        .watches
                        .cache
                        .listed(self.watched, self.namespace.as_deref(), &there);
                    for key in &gone {
                        self.watches.queue.touch(key);
                    }
                }
                Err(error) => {
                    self.watches.metrics.watch_error();
                    tracing::warn!(watch = ?self.watched, namespace = self.namespace, error = &error as &dyn std::error::Error, "a watch was cut; it begins again");
                }
            }
        }
    }

    /// Takes down that an object is there, or takes it out.
    fn note(&mut self, owner: &Key, name: &str, there: bool, put: impl FnOnce(&Cache) -> bool) {
        let news = if there {
            if let Some(listing) = &mut self.listing {
                listing.insert((owner.clone(), name.to_owned()));
            }
            put(&self.watches.cache)
        } else {
            self.watches.cache.remove(self.watched, owner, name);
            true
        };
        if news {
            self.watches.queue.touch(owner);
        }
    }

    fn child<K: Resource + serde::Serialize>(&mut self, kind: Kind, seen: Seen<K>) {
        let (mut object, there) = both(seen);
        let Some(owner) = owner(&object) else { return };
        let name = object.name_any();
        object.managed_fields_mut().clear();
        let mut child = serde_json::to_value(&object).unwrap_or(Value::Null);
        // The items of a list do not say what they are.
        child["apiVersion"] = kind.resource().api_version.into();
        child["kind"] = kind.name().into();
        self.note(&owner, &name, there, |cache| {
            cache.put_child(&owner, kind, &name, Child::of(&child))
        });
    }

    fn pod(&mut self, seen: Seen<Pod>) {
        let (object, there) = both(seen);
        let Some(owner) = owner(&object) else { return };
        let facts = pod::facts(&object);
        let name = facts.name.clone();
        self.note(&owner, &name, there, |cache| cache.put_pod(&owner, facts));
    }

    fn deployment(&mut self, seen: Seen<DeserializeGuard<PDDeployment>>) {
        let (object, there) = both(seen);
        let key = Key {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
        };
        let name = key.name.clone();
        match object.0 {
            Ok(mut object) => {
                object.metadata.managed_fields = None;
                self.note(&key, &name, there, |cache| cache.put_deployment(&key, object));
            }
            Err(invalid) => {
                let error = invalid.error.clone();
                self.note(&key, &name, there, |cache| {
                    let news = cache.put_broken(&key, invalid.error);
                    if news {
                        tracing::error!(deployment = %key, error, "a deployment cannot be read; it is left as it is");
                    }
                    news
                });
            }
        }
        let (deployments, broken) = self.watches.cache.counts();
        self.watches.metrics.deployments(deployments, broken);
    }

    fn node(&mut self, seen: Seen<Node>) {
        let (object, there) = both(seen);
        let name = object.name_any();
        let nowhere = Key {
            namespace: String::new(),
            name: String::new(),
        };
        if let Some(listing) = &mut self.listing {
            listing.insert((nowhere.clone(), name.clone()));
        }
        let cache = &self.watches.cache;
        let news = if there {
            cache.put_node(name.clone(), node::facts(&object))
        } else {
            cache.remove(Watched::Nodes, &nowhere, &name);
            true
        };
        if news {
            for key in cache.on_node(&name) {
                self.watches.queue.touch(&key);
            }
        }
    }
}

fn both<K>(seen: Seen<K>) -> (K, bool) {
    match seen {
        Seen::There(object) => (object, true),
        Seen::Gone(object) => (object, false),
    }
}

/// The deployment that an object is labelled with.
fn owner(object: &impl Resource) -> Option<Key> {
    Some(Key {
        namespace: object.meta().namespace.clone()?,
        name: object.meta().labels.as_ref()?.get(DEPLOYMENT)?.clone(),
    })
}
