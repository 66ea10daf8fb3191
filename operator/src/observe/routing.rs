//! Which engines the routers know.

use std::collections::BTreeSet;

use tandem_crds::Role;
use tandem_plan::Revision;

use super::pod::PodFacts;
use crate::peers::Facts;

/// The uids of engine pods that a router which serves their contract does not know. A router that was asked in vain knows none,
/// and one that is too old to say knows all. `said` is what each pod's process said, by its uid.
pub fn unrouted<'a>(
    serving: &[PodFacts],
    revisions: &[Revision],
    said: impl Fn(&str) -> Option<&'a Facts>,
) -> BTreeSet<String> {
    let contract = |pod: &PodFacts| {
        let role = pod.role?;
        let of_it = revisions.iter().find(|stored| stored.hash(role) == pod.revision);
        of_it.map(|stored| stored.contract.as_str())
    };
    let knows = |router: &PodFacts, ip: &str| match said(&router.uid) {
        Some(Facts::Router(info)) => info.endpoints.as_ref().is_none_or(|endpoints| endpoints.knows(ip)),
        _ => false,
    };
    let (routers, engines): (Vec<_>, Vec<_>) = serving.iter().partition(|pod| pod.role == Some(Role::Router));
    let is_unknown = |engine: &&&PodFacts| {
        let mut of_contract = routers.iter().filter(|router| contract(router) == contract(engine));
        of_contract.any(|router| !knows(router, engine.ip.as_deref().unwrap_or_default()))
    };
    let unknown = engines.iter().filter(is_unknown);
    unknown.map(|engine| engine.uid.clone()).collect()
}
