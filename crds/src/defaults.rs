//! Every default that is not the first choice of an enum or empty.

use crate::pod::Pod;
use crate::role::{Backend, EngineKnobs, EngineRole, Parallelism, PrefixCache, Resources};
use crate::rollout::TrafficDuringRestart;
use crate::rollout::{Approval, GateMode, Gates, HealthGate, OnFailure, ProbeGate, RestartScope, Rollout};
use crate::spec::{Gpus, KvCache, Router, RouterPolicy, Service, Timeouts};

/// `metadata.namespace` of a file.
pub(crate) fn namespace() -> String {
    "default".to_owned()
}

/// `spec.historyLimit`.
pub(crate) fn history_limit() -> i32 {
    20
}

impl Default for KvCache {
    fn default() -> Self {
        Self { page_tokens: 16 }
    }
}

impl Default for Gpus {
    fn default() -> Self {
        Self {
            budget: 0,
            resource_name: "nvidia.com/gpu".to_owned(),
        }
    }
}

impl Default for EngineRole {
    fn default() -> Self {
        Self {
            replicas: 1,
            backend: Backend::default(),
            gpus_per_replica: 0,
            parallelism: Parallelism::default(),
            image: String::new(),
            knobs: EngineKnobs::default(),
            resources: Resources::default(),
            pod: Pod::default(),
        }
    }
}

impl Default for Parallelism {
    fn default() -> Self {
        Self { tensor: 1 }
    }
}

impl Default for EngineKnobs {
    fn default() -> Self {
        Self {
            chunked_prefill_tokens: 128,
            max_running: 32,
            prefix_cache: PrefixCache::default(),
        }
    }
}

impl Default for Router {
    fn default() -> Self {
        Self {
            replicas: 1,
            policy: RouterPolicy::default(),
            service: Service::default(),
            api_keys_secret_name: String::new(),
            image: String::new(),
            resources: Resources::default(),
            pod: Pod::default(),
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            queue_seconds: 60,
            restart_queue_seconds: 3000,
            rendezvous_seconds: 30,
            progress_seconds: 30,
            stall_seconds: 10,
            inflight_watchdog_seconds: 60,
            lease_seconds: 30,
            drain_seconds: 90,
            startup_seconds: 1200,
            request_seconds: 1800,
        }
    }
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            paused: false,
            restart_scope: RestartScope::default(),
            approval: Approval::default(),
            approved_revision: String::new(),
            traffic_during_restart: TrafficDuringRestart::default(),
            progress_deadline_seconds: 7200,
            on_failure: OnFailure::default(),
            gates: Gates::default(),
        }
    }
}

impl Default for HealthGate {
    fn default() -> Self {
        Self {
            mode: GateMode::default(),
            timeout_seconds: 300,
        }
    }
}

impl Default for ProbeGate {
    fn default() -> Self {
        Self {
            mode: GateMode::default(),
            timeout_seconds: 120,
        }
    }
}
