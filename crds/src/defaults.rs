//! Every default that is not the first choice of an enum.

use crate::spec::{Backend, EngineKnobs, EngineRole, KvCache, Parallelism, PrefixCache, Timeouts};

/// `metadata.namespace`.
pub(crate) fn namespace() -> String {
    "default".to_owned()
}

impl Default for KvCache {
    fn default() -> Self {
        Self { page_tokens: 16 }
    }
}

impl Default for EngineRole {
    fn default() -> Self {
        Self {
            replicas: 1,
            backend: Backend::default(),
            parallelism: Parallelism::default(),
            knobs: EngineKnobs::default(),
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

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            queue_seconds: 60,
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
