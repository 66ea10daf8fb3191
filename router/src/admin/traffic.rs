//! Whether requests go to the engines: what is told, and what is answered.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::RouterError;
use crate::flow::traffic::LONGEST;
use crate::flow::{Flow, Order};

/// `GET` and `POST /admin/traffic`. That of an order is its acknowledgement: it holds for every request that is not counted in
/// `in_flight`. A request with several choices counts once for each.
#[derive(Debug, Serialize)]
pub struct View {
    mode: &'static str,
    /// Until those that wait are refused, in milliseconds.
    remaining_ms: Option<u64>,
    /// Requests that are with engines.
    in_flight: i64,
    /// Requests that wait here.
    queued: usize,
}

/// `{"mode": "admit"}`, `{"mode": "queue", "remaining_ms": N}` or `{"mode": "reject"}`.
pub fn read(body: &[u8]) -> Result<Order, RouterError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Body {
        mode: String,
        remaining_ms: Option<u64>,
    }
    let body: Body = serde_json::from_slice(body).map_err(|error| RouterError::MalformedJson(error.to_string()))?;
    let order = match (body.mode.as_str(), body.remaining_ms) {
        ("admit", None) => Order::Admit,
        ("reject", None) => Order::Reject,
        ("queue", Some(ms)) => {
            let rest = Duration::from_millis(ms);
            if rest > LONGEST {
                let detail = format!("{ms} is too long: give at most {}", LONGEST.as_millis());
                return Err(RouterError::field("remaining_ms", detail));
            }
            Order::Queue {
                until: Instant::now() + rest,
            }
        }
        ("queue", None) => {
            let detail = "say how long requests may wait before they are refused";
            return Err(RouterError::field("remaining_ms", detail));
        }
        ("admit" | "reject", Some(_)) => {
            return Err(RouterError::field("remaining_ms", "goes with the mode \"queue\" only"));
        }
        (other, _) => {
            let detail = format!("{other:?} is none of {}", Order::MODES.join(", "));
            return Err(RouterError::field("mode", detail));
        }
    };
    Ok(order)
}

/// How it stands.
pub fn view(flow: &Flow) -> View {
    let order = flow.traffic.order();
    let remaining = match order {
        Order::Queue { until } => Some(until.saturating_duration_since(Instant::now())),
        Order::Admit | Order::Reject => None,
    };
    View {
        mode: order.mode(),
        remaining_ms: remaining.map(|rest| rest.as_millis() as u64),
        in_flight: flow.traffic.at_engines(),
        queued: flow.queue.depth(),
    }
}
