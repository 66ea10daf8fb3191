//! What this router's evidence comes to, for who looks at many routers again and again.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::connections::{Lately, lately, recent};
use crate::engines::Engines;
use crate::evidence::{Registry, Standing};

/// A client that takes nothing for a shorter time has only paused.
const MOMENT: Duration = Duration::from_secs(10);

/// `GET /admin/evidence`. All times in milliseconds.
#[derive(Debug, Serialize)]
pub struct Evidence {
    /// Why no decode engine is known that could pull from a prefill engine; none: one is.
    no_pair: Option<String>,
    lately: Lately,
    blocked: Blocked,
}

/// Clients that take nothing of what waits for them, and have not for longer than a moment.
#[derive(Debug, Default, Serialize)]
struct Blocked {
    count: usize,
    longest_ms: u64,
}

/// How things stand now.
pub fn view(engines: &Engines, registry: &Registry) -> Evidence {
    let now = Instant::now();
    let mut blocked = Blocked::default();
    for connection in registry.connections() {
        let view = connection.view(now);
        let time = now.saturating_duration_since(view.since);
        if view.standing == Standing::Blocked && time >= MOMENT && !connection.probes_only() {
            blocked.count += 1;
            blocked.longest_ms = blocked.longest_ms.max(time.as_millis() as u64);
        }
    }
    Evidence {
        no_pair: engines.pair().err(),
        lately: lately(&recent(registry, now), now),
        blocked,
    }
}
