//! The Probe gate: a completion on a prompt that nobody has seen, through the router.

use std::time::Duration;

use jiff::Timestamp;
use tandem_crds::status::GateOutcome;
use tandem_operator::peers::{Target, router};
use tandem_operator::reconcile::probe::verdict;
use tandem_plan::{Probe, ProbeOrder};
use tokio::time::sleep;

/// Before another try, where a completion did not come about: the router may be about to know its engines.
const AGAIN: Duration = Duration::from_millis(300);
/// A failure is told before the planner says that there was no answer at all.
const BEFORE_DEADLINE: Duration = Duration::from_secs(2);

/// Runs a probe to its end, by its deadline. `kv_bytes_per_token` is what the engines say, 0 where they don't.
pub async fn probe(
    http: reqwest::Client,
    router: Target,
    token: String,
    order: ProbeOrder,
    kv_bytes_per_token: u64,
) -> Probe {
    let found = |outcome, message| Probe {
        revision: order.revision.clone(),
        pods: order.pods.clone(),
        outcome,
        message,
    };
    let mut last = "there was no time for it".to_owned();
    loop {
        let left = order.deadline.duration_since(Timestamp::now());
        let left = Duration::try_from(left)
            .unwrap_or_default()
            .saturating_sub(BEFORE_DEADLINE);
        if left.is_zero() {
            return found(GateOutcome::Failed, last);
        }
        match router::probe(&http, &router, &token, left).await {
            Ok(probed) => {
                let (outcome, message) = verdict(&probed, kv_bytes_per_token);
                return found(outcome, message);
            }
            Err(error) => last = error.to_string(),
        }
        sleep(AGAIN).await;
    }
}
