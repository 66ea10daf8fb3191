//! What a process is told of its knobs, and which revision's it runs with.

use serde_json::{Value, json};
use tandem_crds::{EngineRole, PDDeploymentSpec, PrefixCacheMode, Role};
use tandem_plan::Revision;
use tandem_wire::proto;

use super::{Facts, router};
use crate::render;

/// What the engines of a role are told.
pub fn engine(spec: &PDDeploymentSpec, role: Role) -> proto::Knobs {
    let EngineRole { knobs, .. } = if role == Role::Prefill {
        &spec.prefill
    } else {
        &spec.decode
    };
    let times = &spec.timeouts;
    let millis = |seconds: i32| Some(seconds.max(0) as u64 * 1000);
    proto::Knobs {
        chunked_prefill_tokens: Some(knobs.chunked_prefill_tokens.max(0) as u32),
        max_running: Some(knobs.max_running.max(0) as u32),
        prefix_cache: Some(knobs.prefix_cache.mode == PrefixCacheMode::Enabled),
        rendezvous_ms: millis(times.rendezvous_seconds),
        progress_ms: millis(times.progress_seconds),
        stall_ms: millis(times.stall_seconds),
        watchdog_ms: millis(times.inflight_watchdog_seconds),
        lease_ms: millis(times.lease_seconds),
        queue_ms: millis(times.queue_seconds),
        // what the spec does not name keeps its value
        step_tokens: None,
        prefill_queue: None,
    }
}

/// What the routers are told: the words of the flags, with `_` for `-`; times as numbers.
pub fn router(spec: &PDDeploymentSpec) -> router::Knobs {
    let knob = |knob: render::knobs::Knob| {
        let number = knob.value.parse::<u64>();
        let value = number.map_or_else(|_| json!(knob.value), |number| json!(number));
        (knob.flag.replace('-', "_"), value)
    };
    render::knobs::of(spec, Role::Router).into_iter().map(knob).collect()
}

/// The hash of the knobs that a process runs with: that of the newest revision whose knobs they are; none where they are no
/// revision's.
pub fn hash<'a>(facts: &Facts, role: Role, revisions: &'a [Revision]) -> Option<&'a str> {
    let runs = |revision: &&Revision| match facts {
        Facts::Engine(info) => has_engine(&engine(&revision.spec, role), &info.knobs),
        Facts::Router(info) => has_router(&router(&revision.spec), &info.knobs),
    };
    let found = revisions.iter().rev().find(runs);
    found.map(|revision| revision.knobs(role))
}

/// Whether all that was told is in effect.
fn has_engine(told: &proto::Knobs, live: &proto::Knobs) -> bool {
    fn is<T: PartialEq + Copy>(told: Option<T>, live: Option<T>) -> bool {
        told.is_none() || told == live
    }
    is(told.chunked_prefill_tokens, live.chunked_prefill_tokens)
        && is(told.max_running, live.max_running)
        && is(told.step_tokens, live.step_tokens)
        && is(told.prefix_cache, live.prefix_cache)
        && is(told.rendezvous_ms, live.rendezvous_ms)
        && is(told.progress_ms, live.progress_ms)
        && is(told.stall_ms, live.stall_ms)
        && is(told.watchdog_ms, live.watchdog_ms)
        && is(told.lease_ms, live.lease_ms)
        && is(told.queue_ms, live.queue_ms)
        && is(told.prefill_queue, live.prefill_queue)
}

fn has_router(told: &router::Knobs, live: &router::Knobs) -> bool {
    told.iter()
        .all(|(name, value): (&String, &Value)| live.get(name) == Some(value))
}
