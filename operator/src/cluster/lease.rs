//! One operator of several works; the others stand by.
//!
//! A lease is taken and renewed by updates that name the version they were made from: of two at once the API server refuses
//! one. Clocks of different machines are never compared: another's lease is over when it has not changed for its duration
//! since it was last *seen* to change, and one's own is over, at the latest, a duration after its last renewal was *sent*.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, sleep, timeout};

/// Whether this process is the one that works, as all of it sees it.
#[derive(Debug, Clone)]
pub struct Leadership {
    renewed: Arc<Mutex<Option<Instant>>>,
    duration: Duration,
}

impl Leadership {
    /// Of a lease of this duration; not held yet.
    pub fn new(duration: Duration) -> Self {
        Self {
            renewed: Arc::default(),
            duration,
        }
    }

    /// Until when a write that begins now may take; none where no write may begin. A third of the lease is left for it.
    pub fn allows(&self) -> Option<Instant> {
        let renewed = (*self.renewed.lock().unwrap_or_else(PoisonError::into_inner))?;
        (Instant::now() < renewed + self.duration * 2 / 3).then_some(renewed + self.duration)
    }

    fn set(&self, renewed: Option<Instant>) {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = renewed;
    }
}

/// Takes the lease and keeps it.
#[derive(Debug)]
pub struct Elector {
    api: Api<Lease>,
    name: String,
    identity: String,
    leadership: Leadership,
    /// The lease as it was last seen to change, and when.
    seen: Option<(LeaseSpec, Instant)>,
}

/// Why a lease was not taken or renewed.
#[derive(Debug, thiserror::Error)]
enum Miss {
    #[error("{0} holds it")]
    Held(String),
    #[error("the API server did not answer within {0:?}")]
    Silent(Duration),
    #[error(transparent)]
    Refused(#[from] kube::Error),
}

impl Elector {
    /// Of the lease of this name in the operator's own namespace.
    pub fn new(client: Client, namespace: &str, name: &str, identity: String, leadership: Leadership) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity,
            leadership,
            seen: None,
        }
    }

    /// Waits until the lease is this process's.
    pub async fn acquire(&mut self) {
        let mut told = String::new();
        loop {
            match self.attempt(false).await {
                Ok(()) => {
                    tracing::info!(lease = self.name, identity = self.identity, "leads");
                    return;
                }
                Err(miss) => {
                    let why = miss.to_string();
                    if why != told {
                        tracing::info!(lease = self.name, reason = why, "stands by");
                        told = why;
                    }
                }
            }
            sleep(self.leadership.duration / 5).await;
        }
    }

    /// Renews it until somebody else has had it; says who. While it cannot be renewed nothing is written, and nothing is lost
    /// as long as nobody has taken it.
    pub async fn keep(&mut self) -> String {
        let mut pause = self.leadership.duration / 3;
        loop {
            sleep(pause).await;
            match self.attempt(true).await {
                Ok(()) => pause = self.leadership.duration / 3,
                Err(miss @ Miss::Held(_)) => {
                    self.leadership.set(None);
                    return miss.to_string();
                }
                Err(miss) => {
                    tracing::warn!(lease = self.name, reason = %miss, "the lease was not renewed; another try follows");
                    pause = self.leadership.duration / 10;
                }
            }
        }
    }

    /// Gives it up, so that another takes over at once. Nothing may be written after this call.
    pub async fn release(&mut self) {
        self.leadership.set(None);
        let deadline = self.leadership.duration / 3;
        let released = timeout(deadline, async {
            let mut lease = self.api.get(&self.name).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() != Some(self.identity.as_str()) {
                return Ok(());
            }
            spec.holder_identity = Some(String::new());
            let replaced = self.api.replace(&self.name, &PostParams::default(), &lease).await;
            replaced.map(|_| ())
        });
        match released.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the lease was not given up; it ends by itself"),
            Err(_) => tracing::warn!("the lease was not given up within {deadline:?}; it ends by itself"),
        }
    }

    async fn attempt(&mut self, again: bool) -> Result<(), Miss> {
        let deadline = self.leadership.duration / 3;
        match timeout(deadline, self.take(again)).await {
            Ok(result) => result,
            Err(_) => Err(Miss::Silent(deadline)),
        }
    }

    /// Takes the lease, or renews it: then it has to be this process's still.
    async fn take(&mut self, again: bool) -> Result<(), Miss> {
        let begun = Instant::now();
        let found = self.api.get_opt(&self.name).await?;
        let now = MicroTime(Timestamp::now());
        let holder = found
            .as_ref()
            .and_then(|lease| lease.spec.as_ref()?.holder_identity.clone());
        if again && holder.as_ref() != Some(&self.identity) {
            return Err(Miss::Held(holder.unwrap_or_else(|| "nobody".to_owned())));
        }
        let taken = match found {
            None => {
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(self.name.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: Some(self.spec(&LeaseSpec::default(), now)),
                };
                self.api.create(&PostParams::default(), &lease).await?
            }
            Some(mut lease) => {
                let spec = lease.spec.take().unwrap_or_default();
                if let Some(holder) = self.held_by_another(&spec) {
                    return Err(Miss::Held(holder));
                }
                // Its metadata has the version that it was read at: whoever was faster has made another.
                lease.spec = Some(self.spec(&spec, now));
                self.api.replace(&self.name, &PostParams::default(), &lease).await?
            }
        };
        self.seen = taken.spec.map(|spec| (spec, begun));
        self.leadership.set(Some(begun));
        Ok(())
    }

    /// Who else holds it, if its duration has not passed since it was last seen to change.
    fn held_by_another(&mut self, spec: &LeaseSpec) -> Option<String> {
        let holder = spec.holder_identity.clone().filter(|holder| !holder.is_empty())?;
        if holder == self.identity {
            return None;
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == spec => *since,
            _ => {
                let now = Instant::now();
                self.seen = Some((spec.clone(), now));
                now
            }
        };
        let lasts = Duration::from_secs(spec.lease_duration_seconds.unwrap_or(0).max(0) as u64);
        (since.elapsed() <= lasts).then_some(holder)
    }

    fn spec(&self, old: &LeaseSpec, now: MicroTime) -> LeaseSpec {
        let mine = old.holder_identity.as_deref() == Some(self.identity.as_str());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(self.leadership.duration.as_secs() as i32),
            acquire_time: if mine {
                old.acquire_time.clone()
            } else {
                Some(now.clone())
            },
            lease_transitions: Some(old.lease_transitions.unwrap_or(0) + i32::from(!mine)),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }
}
