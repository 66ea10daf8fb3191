//! Engines and routers: what they say they run with, and orders to them.
//!
//! | module | speaks to |
//! | --- | --- |
//! | [`engine`] | engines: GetInfo and SetKnobs |
//! | [`router`] | routers: traffic, knobs and the probe, on their admin port |
//! | [`knobs`] | nobody: which revision's knobs a process runs with |
//!
//! Every call has a deadline, and only so many are under way at a time. What a process said is kept for a while: asking
//! costs it something too.

pub mod engine;
pub mod knobs;
pub mod router;

use std::time::Duration;

use tandem_crds::Role;
use tandem_plan::{Evidence, Pod, Revision, Traffic};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::metrics::Metrics;
use crate::observe::pod::PodFacts;
use crate::render::ports::{ADMIN, CONTROL};

/// One call.
const DEADLINE: Duration = Duration::from_secs(3);
/// Calls under way at a time, of all deployments together.
const AT_ONCE: usize = 32;
/// A process that did not answer is not asked again for so long.
const SILENT: Duration = Duration::from_secs(5);

/// Why a process did not do as it was asked.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// It did not answer.
    #[error("{pod} did not answer {call} within {DEADLINE:?}")]
    Silent {
        /// The pod.
        pod: String,
        /// What was asked.
        call: &'static str,
    },
    /// It refused, or cannot be reached.
    #[error("{pod} did not do {call}: {reason}")]
    Refused {
        /// The pod.
        pod: String,
        /// What was asked.
        call: &'static str,
        /// In its words.
        reason: String,
        /// It does not know the admin token.
        token: bool,
    },
}

/// What a process says.
#[derive(Debug, Clone)]
pub enum Facts {
    /// Of itself, an engine.
    Engine(engine::Info),
    /// Of itself, a router.
    Router(router::Info),
}

impl Facts {
    /// Writes into what is known of a pod what its process says: `ordered` is what routers should do, `revisions` those whose
    /// knobs it may run with.
    pub fn tell(&self, pod: &mut Pod, ordered: Option<Traffic>, revisions: &[Revision]) {
        pod.knobs = knobs::hash(self, pod.role, revisions).map(str::to_owned);
        match self {
            Self::Engine(info) => {
                pod.backend.clone_from(&info.backend);
                pod.evidence = Evidence {
                    handoffs: info.handoffs.clone(),
                    ..Evidence::default()
                };
            }
            Self::Router(info) => {
                pod.order = Some(info.traffic.order(info.at, ordered));
                pod.in_flight = info.traffic.in_flight;
                pod.evidence = info.seen.evidence();
            }
        }
    }
}

/// What is known of one pod's process.
#[derive(Debug, Clone)]
pub struct Known {
    /// The process that was asked: another number of restarts is another one.
    restarts: i32,
    at: Instant,
    /// None: it did not answer.
    pub facts: Option<Facts>,
}

impl Known {
    fn of(pod: &PodFacts, facts: Option<Facts>) -> Self {
        Self {
            restarts: pod.restarts,
            at: Instant::now(),
            facts,
        }
    }

    /// Whether it need not be asked again.
    pub fn is_fresh(&self, pod: &PodFacts, max_age: Duration) -> bool {
        let max_age = if self.facts.is_some() { max_age } else { SILENT };
        self.restarts == pod.restarts && self.at.elapsed() < max_age
    }
}

/// What asks and tells.
#[derive(Debug)]
pub struct Peers {
    http: reqwest::Client,
    slots: Semaphore,
    metrics: Metrics,
}

impl Peers {
    /// Speaks to pods by their addresses, past any proxy.
    pub fn new(metrics: Metrics) -> reqwest::Result<Self> {
        Ok(Self {
            http: reqwest::Client::builder()
                .no_proxy()
                .pool_max_idle_per_host(0)
                .build()?,
            slots: Semaphore::new(AT_ONCE),
            metrics,
        })
    }

    /// Asks a pod's process about itself.
    pub async fn ask(&self, pod: &PodFacts, token: &str) -> (Known, Option<PeerError>) {
        let target = pod.into();
        let asked = match pod.role {
            Some(Role::Router) => {
                let info = self
                    .call(pod, "get_traffic", router::info(&self.http, &target, token))
                    .await;
                info.map(Facts::Router)
            }
            _ => self
                .call(pod, "get_info", engine::info(&target))
                .await
                .map(Facts::Engine),
        };
        let (facts, error) = match asked {
            Ok(facts) => (Some(facts), None),
            Err(error) => (None, Some(error)),
        };
        (Known::of(pod, facts), error)
    }

    /// Tells an engine its knobs, and reads them back.
    pub async fn set_knobs(
        &self,
        pod: &PodFacts,
        info: &engine::Info,
        token: &str,
        knobs: tandem_wire::proto::Knobs,
    ) -> Result<Known, PeerError> {
        let told = self
            .call(pod, "set_knobs", engine::set_knobs(&pod.into(), info, token, knobs))
            .await?;
        Ok(Known::of(pod, Some(Facts::Engine(told))))
    }

    /// Tells a router its knobs, and reads them back.
    pub async fn set_router_knobs(
        &self,
        pod: &PodFacts,
        info: &router::Info,
        token: &str,
        knobs: &router::Knobs,
    ) -> Result<Known, PeerError> {
        let target = pod.into();
        let set = router::set_knobs(&self.http, &target, token, knobs);
        let told = self.call(pod, "set_router_knobs", set).await?;
        let info = router::Info {
            knobs: told,
            ..info.clone()
        };
        Ok(Known::of(pod, Some(Facts::Router(info))))
    }

    /// Tells a router what to do with new requests; its answer is its acknowledgement.
    pub async fn set_traffic(
        &self,
        pod: &PodFacts,
        info: &router::Info,
        token: &str,
        order: &router::Order,
    ) -> Result<Known, PeerError> {
        let target = pod.into();
        let set = router::set_traffic(&self.http, &target, token, order);
        let traffic = self.call(pod, "set_traffic", set).await?;
        let info = router::Info {
            traffic,
            at: jiff::Timestamp::now(),
            ..info.clone()
        };
        Ok(Known::of(pod, Some(Facts::Router(info))))
    }

    /// Runs a completion through a router. It may take as long as `limit`.
    pub async fn probe(&self, pod: &PodFacts, token: &str, limit: Duration) -> Result<router::Probed, PeerError> {
        let probed = router::probe(&self.http, &pod.into(), token, limit).await;
        self.metrics.called("probe", probed.is_ok());
        probed
    }

    async fn call<T>(
        &self,
        pod: &PodFacts,
        call: &'static str,
        asked: impl Future<Output = Result<T, PeerError>>,
    ) -> Result<T, PeerError> {
        // never closed
        let _slot = self.slots.acquire().await;
        let result = timeout(DEADLINE, asked).await.unwrap_or_else(|_| {
            Err(PeerError::Silent {
                pod: pod.name.clone(),
                call,
            })
        });
        self.metrics.called(call, result.is_ok());
        result
    }
}

impl PeerError {
    fn refused(target: &Target, call: &'static str, reason: String, token: bool) -> Self {
        Self::Refused {
            pod: target.name.clone(),
            call,
            reason,
            token,
        }
    }

    /// Whether the process did not know the admin token.
    pub fn is_token(&self) -> bool {
        matches!(self, Self::Refused { token: true, .. })
    }
}

/// Where a process is asked and told.
#[derive(Debug, Clone)]
pub struct Target {
    /// For people.
    pub name: String,
    /// An engine's control port, as HOST:PORT.
    pub control: String,
    /// The admin port, as HOST:PORT.
    pub admin: String,
}

impl From<&PodFacts> for Target {
    fn from(pod: &PodFacts) -> Self {
        let ip = pod.ip.as_deref().unwrap_or_default();
        let at = |port: u16| {
            if ip.contains(':') {
                format!("[{ip}]:{port}")
            } else {
                format!("{ip}:{port}")
            }
        };
        Self {
            name: pod.name.clone(),
            control: at(CONTROL),
            admin: at(ADMIN),
        }
    }
}
