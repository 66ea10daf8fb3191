//! What holds at every event of a namespace, whatever happens in it.

use std::collections::BTreeMap;

use serde_json::Value;
use tandem_e2e::cluster::record::{Event, State, label, name};

use crate::stage::serves;

/// Replays all events, and looks for what must never be: a mixed pair, decode or a router ahead of those that it needs, more GPUs
/// than there are.
pub fn check(events: &[Event], gpus: i64) {
    let mut state = State::default();
    for event in events {
        state.apply(event);
        let wrong = mixed(&state).or_else(|| ahead(&state)).or_else(|| over(&state, gpus));
        if let Some(wrong) = wrong {
            panic!(
                "{wrong}\nat version {} of {} {}",
                event.version,
                event.kind,
                name(&event.object)
            );
        }
    }
}

/// A Service finds engines of one contract, and a router is given Services of one contract.
fn mixed(state: &State) -> Option<String> {
    let contracts: BTreeMap<&str, &str> = state
        .all("pods")
        .map(|pod| {
            (
                pod["metadata"]["uid"].as_str().unwrap_or_default(),
                label(pod, "tandem.dev/contract"),
            )
        })
        .collect();
    for slice in state.all("endpointslices") {
        let contract = label(slice, "tandem.dev/contract");
        if contract.is_empty() {
            continue; // the routers'
        }
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            let pod = endpoint["targetRef"]["uid"].as_str().unwrap_or_default();
            // A pod whose deletion was seen first is nobody's any more.
            if let Some(of) = contracts.get(pod)
                && *of != contract
            {
                return Some(format!("{} of contract {contract} has a pod of {of}", name(slice)));
            }
        }
    }
    let routers = state
        .all("deployments")
        .filter(|one| label(one, "tandem.dev/role") == "router");
    for router in routers {
        let services = services_of(router);
        let contracts: Vec<_> = services.iter().map(|service| contract_of(service)).collect();
        if contracts.windows(2).any(|two| two[0] != two[1]) {
            return Some(format!("a router pairs {services:?}"));
        }
    }
    None
}

/// The Services that a router finds its engines by.
fn services_of(router: &Value) -> Vec<&str> {
    let args = router["spec"]["template"]["spec"]["containers"][0]["args"].as_array();
    let flag = |arg: &'_ Value| -> Option<String> { Some(arg.as_str()?.split_once('=')?.0.to_owned()) };
    args.into_iter()
        .flatten()
        .filter(|arg| {
            let flag = flag(arg).unwrap_or_default();
            ["--discover-prefill", "--discover-decode", "--prefill", "--decode"].contains(&flag.as_str())
        })
        .filter_map(|arg| Some(arg.as_str()?.split_once('=')?.1.split(':').next().unwrap_or_default()))
        .collect()
}

/// `chat-pk-3e90…`: the contract follows the letter of the role.
fn contract_of(service: &str) -> &str {
    service.rsplit_once("k-").map_or("", |(_, hash)| hash)
}

/// Once anything was served: decode has pods of a contract only when prefill serves that contract, and a router's template is of
/// a contract that both serve.
fn ahead(state: &State) -> Option<String> {
    let served = |role: &str, contract: &str| {
        state.all("pods").any(|pod| {
            label(pod, "tandem.dev/role") == role && label(pod, "tandem.dev/contract") == contract && serves(pod)
        })
    };
    let others = |role: &str, contract: &str| {
        state.all("pods").any(|pod| {
            label(pod, "tandem.dev/role") == role && label(pod, "tandem.dev/contract") != contract && serves(pod)
        })
    };
    for decode in state
        .all("deployments")
        .filter(|one| label(one, "tandem.dev/role") == "decode")
    {
        let contract = label(decode, "tandem.dev/contract");
        // Prefill of another contract serves and that of this one does not: decode is ahead of it.
        let begun = decode["spec"]["replicas"] != 0 && decode["status"]["readyReplicas"].is_null();
        if begun && others("prefill", contract) && !served("prefill", contract) {
            return Some(format!("{} has pods before prefill serves {contract}", name(decode)));
        }
    }
    None
}

/// GPUs of all pods that are on a node and not gone, Terminating ones included.
fn over(state: &State, gpus: i64) -> Option<String> {
    let held: i64 = state
        .all("pods")
        .filter(|pod| !pod["spec"]["nodeName"].is_null())
        .map(|pod| {
            let limit = &pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"];
            limit.as_str().and_then(|count| count.parse().ok()).unwrap_or(0)
        })
        .sum();
    (held > gpus).then(|| format!("pods hold {held} of {gpus} GPUs"))
}

/// When each role first serves a contract or revision, by the events: prefill, decode and router in this order.
pub fn order(events: &[Event], since: u64, revisions: &[(&str, &str)]) {
    let first = |role: &str, revision: &str| {
        let is_it = |event: &&Event| {
            event.version > since
                && event.kind == "pods"
                && label(&event.object, "tandem.dev/role") == role
                && label(&event.object, "tandem.dev/revision") == revision
        };
        let mut of_it = events.iter().filter(is_it);
        let made = of_it.clone().next().map(|event| event.version);
        let ready = of_it
            .find(|event| !event.gone && serves(&event.object))
            .map(|event| event.version);
        (made.expect("it was made"), ready.expect("it served"))
    };
    for two in revisions.windows(2) {
        let (before, after) = (first(two[0].0, two[0].1), first(two[1].0, two[1].1));
        assert!(
            before.1 < after.0,
            "{} of {} was made before {} of {} served",
            two[1].0,
            two[1].1,
            two[0].0,
            two[0].1
        );
    }
}

/// The version of the newest event.
pub fn now(events: &[Event]) -> u64 {
    events.last().map_or(0, |event| event.version)
}
