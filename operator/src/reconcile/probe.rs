//! The Probe gate: a completion on a prompt that nobody has seen goes through a router, and its KV is counted where decode
//! receives it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tandem_crds::Role;
use tandem_crds::status::GateOutcome;
use tandem_plan::{Probe, ProbeOrder};

use super::observe::Observed;
use super::{Memory, Reconciler};
use crate::cluster::cache::Key;
use crate::peers::Facts;
use crate::peers::router::Probed;

/// Before another try, where a completion did not come about.
const AGAIN: Duration = Duration::from_secs(5);
/// A failure is told before the planner says that there was no answer at all; in milliseconds.
const BEFORE_DEADLINE: i128 = 7_000;

/// Begins a probe in a task of its own, unless one is under way or done for this order. Its finding is there for a later
/// pass, which it asks for.
pub(super) fn begin(reconciler: &Reconciler, key: &Key, memory: &Memory, observed: &Observed, order: &ProbeOrder) {
    let about = (order.revision.clone(), order.pods.clone());
    let routers = observed.serving.iter().filter(|pod| pod.role == Some(Role::Router));
    let routers: Vec<_> = routers.cloned().collect();
    let Some(token) = memory.token.clone() else { return };
    let kv_bytes = observed
        .serving
        .iter()
        .find_map(|pod| match memory.peers.get(&pod.uid)?.facts.as_ref()? {
            Facts::Engine(info) if pod.role == Some(Role::Decode) => Some(info.kv_bytes_per_token),
            _ => None,
        });
    {
        let mut state = memory.probe.lock().unwrap_or_else(PoisonError::into_inner);
        let done = state
            .found
            .as_ref()
            .is_some_and(|found| (&found.revision, &found.pods) == (&about.0, &about.1));
        if done || state.running.as_ref() == Some(&about) || routers.is_empty() {
            return;
        }
        state.running = Some(about.clone());
    }
    let (peers, queue) = (Arc::clone(&reconciler.peers), Arc::clone(&reconciler.queue));
    let (state, key, deadline) = (Arc::clone(&memory.probe), key.clone(), order.deadline);
    // It ends by its deadline; one that a new order has overtaken changes nothing.
    tokio::spawn(async move {
        let mut found = None;
        let mut may_again = false;
        for router in &routers {
            let left = deadline.duration_since(Timestamp::now()).as_millis();
            let Some(left) = u64::try_from(left).ok().filter(|left| *left > 0) else {
                break;
            };
            match peers.probe(router, &token, Duration::from_millis(left)).await {
                Ok(probed) => {
                    let (outcome, message) = verdict(&probed, kv_bytes.unwrap_or(0));
                    let failed = outcome == GateOutcome::Failed;
                    found = Some((outcome, message));
                    if failed {
                        break;
                    }
                }
                // Until the deadline it may be a router that is about to know its engines.
                Err(error) => {
                    found = Some((GateOutcome::Failed, error.to_string()));
                    may_again = deadline.duration_since(Timestamp::now()).as_millis() > BEFORE_DEADLINE;
                    break;
                }
            }
        }
        let mut held = state.lock().unwrap_or_else(PoisonError::into_inner);
        if held.running.as_ref() != Some(&about) {
            return;
        }
        held.running = None;
        match found {
            Some((GateOutcome::Failed, message)) if may_again => {
                tracing::info!(deployment = %key, message, "a probe failed; another one follows");
                drop(held);
                queue.at(&key, tokio::time::Instant::now() + AGAIN);
            }
            Some((outcome, message)) => {
                held.found = Some(Probe {
                    revision: about.0,
                    pods: about.1,
                    outcome,
                    message,
                });
                drop(held);
                queue.touch(&key);
            }
            None => {}
        }
    });
}

/// What a completion proves: that all of its prompt's KV came over the wire, and that decode computed none of it.
/// `kv_bytes_per_token` is 0 where the engines do not say it.
pub fn verdict(probed: &Probed, kv_bytes_per_token: u64) -> (GateOutcome, String) {
    let Probed {
        prompt_tokens,
        completion_tokens,
        cached_tokens,
        moved_tokens,
        moved_bytes,
        computed_tokens,
    } = *probed;
    let layout = moved_tokens * kv_bytes_per_token;
    let problem = if completion_tokens == 0 {
        Some("the answer has no token".to_owned())
    } else if computed_tokens > 0 {
        Some(format!("decode computed {computed_tokens} tokens of the prompt itself"))
    } else if moved_tokens == 0 {
        Some("no KV crossed from prefill to decode".to_owned())
    } else if moved_tokens < prompt_tokens {
        Some(format!("KV of {moved_tokens} of {prompt_tokens} tokens crossed"))
    } else if kv_bytes_per_token == 0 {
        Some("the engines do not say how large their KV is".to_owned())
    } else if moved_bytes != layout {
        Some(format!(
            "{moved_bytes} bytes of KV crossed, {moved_tokens} tokens are {layout}"
        ))
    } else {
        None
    };
    if let Some(problem) = problem {
        return (GateOutcome::Failed, problem);
    }
    let cached = match cached_tokens {
        0 => String::new(),
        cached => format!(", {cached} of them cached by prefill"),
    };
    let message =
        format!("KV of {moved_tokens} prompt tokens{cached} crossed, {moved_bytes} bytes; decode computed none");
    (GateOutcome::Passed, message)
}
