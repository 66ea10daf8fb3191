//! How many deployments one operator holds, and what they cost: a bench with its limits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tandem_crds::API_VERSION;
use tandem_e2e::cluster::api::{Api, Client, Patch, path};
use tandem_e2e::cluster::audit::Request;
use tandem_e2e::cluster::operator::{Operator, Options};
use tandem_e2e::cluster::{self, Cluster};

use crate::fixtures::with_nodes;
use crate::stage::manifest;
use crate::{children, crd};

/// In `make test`, beside everything else that runs then. `make test-long` sets 200 and 1,000.
const EVERY_DAY: usize = 40;
/// Every settled deployment's processes are asked once a minute: a time in which each is must pass.
const QUIET: Duration = Duration::from_secs(65);
/// Of the API server, for each settled deployment in an hour.
const REQUESTS_AN_HOUR: f64 = 60.0;

/// No recorder: what it keeps of 1,000 deployments is more than they are.
struct Fleet {
    cluster: &'static Cluster,
    options: Options,
    namespace: String,
    api: Api<Value>,
}

impl Fleet {
    async fn new(cluster: &'static Cluster) -> Self {
        crd(cluster).await;
        let (client, namespace): (Client, String) = with_nodes(cluster, "scale", &[0]).await;
        children::models(&client, &namespace).await;
        let scope = format!("namespaces/{namespace}/");
        Self {
            cluster,
            options: Options::of(cluster, &namespace).await,
            api: Api::at(&client, &path(API_VERSION, &scope, "pddeployments")),
            namespace,
        }
    }

    async fn create(&self, count: usize) {
        let spec = json!({"gpus": {"budget": 0}, "prefill": {"gpusPerReplica": 0}, "decode": {"gpusPerReplica": 0}});
        for index in 0..count {
            let object = manifest(&name(index), &self.namespace, spec.clone());
            self.api.create(&object).await.expect("a deployment");
        }
    }

    /// Waits until each runs what its spec asks for, and nothing is left to do for any.
    async fn settled(&self, count: usize, limit: Duration) {
        let begin = Instant::now();
        loop {
            let all = self.api.list("").await;
            let settled = all.iter().filter(|one| is_settled(one)).count();
            if settled == count {
                return;
            }
            assert!(
                begin.elapsed() < limit,
                "{settled} of {count} are settled after {limit:?}; one that is not: {:#}",
                all.iter()
                    .find(|one| !is_settled(one))
                    .map_or(&Value::Null, |one| &one["status"])
            );
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    /// Waits until nothing was written for a while: what the last watches bring is looked at by then.
    async fn at_rest(&self, limit: Duration) {
        let begin = Instant::now();
        let mut before = usize::MAX;
        loop {
            let now = self.requests().iter().filter(|one| one.writes()).count();
            if now == before {
                return;
            }
            assert!(begin.elapsed() < limit, "it still writes after {limit:?}");
            before = now;
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    }

    /// The operator's requests so far; those of its lease, of which there is one however many deployments there are, aside.
    fn requests(&self) -> Vec<Request> {
        let mut all = self.cluster.audit().of(&self.options.user());
        all.retain(|one| one.object_ref.resource != "leases");
        all
    }
}

fn name(index: usize) -> String {
    format!("d{index}")
}

fn is_settled(object: &Value) -> bool {
    let status = &object["status"];
    let holds = |type_: &str| {
        let all = status["conditions"].as_array();
        all.is_some_and(|all| all.iter().any(|one| one["type"] == type_ && one["status"] == "True"))
    };
    status["step"] == "Settled"
        && status["observedGeneration"] == object["metadata"]["generation"]
        && status["rollout"].is_null()
        // the latter two may come a minute after what they are about
        && ["Ready", "KnobsLive", "CapacitySatisfied"].into_iter().all(holds)
}

/// How many of each kind, most first.
fn kinds(requests: &[Request]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for one in requests {
        let object = &one.object_ref;
        *counts
            .entry(format!("{} {}{}", one.verb, object.resource, object.subresource))
            .or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(kind, count)| (std::cmp::Reverse(*count), kind.clone()));
    let texts: Vec<String> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    texts.join(", ")
}

/// So many deployments from nothing, a quiet minute, and a rollout of some of them beside the others.
#[test]
fn many_deployments_settle_and_are_quiet_then() {
    let given = std::env::var("TANDEM_TEST_DEPLOYMENTS").ok();
    let count = given.map_or(EVERY_DAY, |given| {
        given.parse().expect("TANDEM_TEST_DEPLOYMENTS is a number")
    });
    let rolling = (count / 10).min(20);
    let rss_mib = if count > 200 { 128.0 } else { 64.0 };
    let limit = Duration::from_mins(10) + Duration::from_secs(3) * count as u32;
    cluster::test(async |cluster| {
        let fleet = Fleet::new(cluster).await;
        let mut operator = Operator::start(&fleet.options);
        operator.ready().await;
        let empty = operator.process().rss_mib();

        let begin = Instant::now();
        fleet.create(count).await;
        fleet.settled(count, limit).await;
        println!(
            "{count} deployments from nothing to settled: {:.0} s",
            begin.elapsed().as_secs_f64()
        );
        let requests = fleet.requests();
        println!(
            "  {:.1} requests for each: {}",
            requests.len() as f64 / count as f64,
            kinds(&requests)
        );
        let passes = operator.metrics().await.sum("tandem_operator_passes_total", &[]) / count as f64;
        let computed = operator.process().cpu_seconds() * 1e3 / count as f64;
        println!("  {passes:.1} passes for each, in which the operator computes {computed:.0} ms");
        let (rss, peak) = (operator.process().rss_mib(), operator.process().peak_rss_mib());
        println!("  the operator's memory: {empty:.1} MiB with none, {rss:.1} MiB now, {peak:.1} MiB at most");

        fleet.at_rest(limit).await;
        let since = format!("{:.6}", Timestamp::now());
        tokio::time::sleep(QUIET).await;
        // What an API server that was slow has answered only now was asked before.
        let mut quiet = fleet.requests();
        quiet.retain(|one| one.request_received_timestamp >= since);
        let writes: Vec<String> = quiet.iter().filter(|one| one.writes()).map(Request::summary).collect();
        let hourly = quiet.len() as f64 / count as f64 * 3600.0 / QUIET.as_secs_f64();
        println!(
            "settled: {} writes (at most 0) and {} requests in {QUIET:?}, {hourly:.1} for each deployment and hour (at most {REQUESTS_AN_HOUR}): {}",
            writes.len(),
            quiet.len(),
            kinds(&quiet)
        );
        assert_eq!(writes, [""; 0]);
        assert!(
            hourly <= REQUESTS_AN_HOUR,
            "{hourly} requests for each deployment and hour"
        );

        let begin = Instant::now();
        for index in 0..rolling {
            let edit = json!({"spec": {"decode": {"pod": {"annotations": {"change": "1"}}}}});
            let edited = fleet.api.patch(&name(index), Patch::Merge, &edit).await;
            edited.expect("an edit");
        }
        fleet.settled(count, limit).await;
        println!(
            "a rollout of {rolling} at once beside them: {:.0} s",
            begin.elapsed().as_secs_f64()
        );
        let (rss, peak) = (operator.process().rss_mib(), operator.process().peak_rss_mib());
        println!("  the operator's memory: {rss:.1} MiB now, {peak:.1} MiB at most (at most {rss_mib})");
        assert!(peak <= rss_mib, "the operator held {peak} MiB");
    });
}
