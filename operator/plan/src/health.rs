//! What the processes' own measurements say of the ways between them. It informs and blocks nothing, and where nothing was
//! measured it says so.

use tandem_crds::Role;
use tandem_crds::status::GateOutcome;

use crate::gates;
use crate::revision::Revision;
use crate::world::{Clients, Handoffs, Pod, World};

/// One in so many of the hand-offs lately may not fail …
const FAILED_SHARE: u32 = 10;
/// One in so many of the clients may not leave, or take nothing …
const LOST_SHARE: u64 = 5;
/// … where there are so many of them: a single client that leaves is nobody's fault.
const LOST_LEAST: u64 = 5;

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// Not all of those who measure it were heard: what was said last stays.
    Unheard,
    /// Nothing was measured.
    Unknown,
    /// It is well, as far as it was measured.
    Well(&'static str),
    /// It is not: a reason in one word, and what was measured.
    Ill(&'static str, String),
}

/// The way from prefill to decode. `serves` is what runs while requests are let through to it.
pub fn transfer(world: &World, serves: Option<&Revision>) -> Health {
    if let Some(problem) = serves.and_then(|running| no_pair(world, running)) {
        return Health::Ill("NoPair", problem);
    }
    let engines = || world.pods.iter().filter(|pod| pod.serves() && pod.role != Role::Router);
    let said = || engines().filter_map(|pod| Some((pod, pod.evidence.handoffs.as_ref()?)));
    if let Some((pod, handoffs)) = said().find(|(_, handoffs)| fails(handoffs)) {
        return Health::Ill("HandoffsFail", failures(pod, handoffs));
    }
    let probed = world.probe.as_ref().is_some_and(|probe| {
        // one that passed has moved KV between these very pods
        probe.outcome == GateOutcome::Passed && probe.pods == gates::pods(world)
    });
    if probed || said().any(|(_, handoffs)| handoffs.finished > 0) {
        Health::Well("HandoffsFinish")
    } else {
        unmeasured(engines().count(), said().count())
    }
}

/// Why no decode can pull from a prefill, where some should be able to.
fn no_pair(world: &World, running: &Revision) -> Option<String> {
    let serving = |role| world.pods.iter().filter(move |pod| pod.role == role && pod.serves());
    for role in [Role::Prefill, Role::Decode] {
        if running.replicas(role) == 0 {
            return None;
        }
        if serving(role).next().is_none() {
            return Some(format!("no {} pod is ready", role.field()));
        }
    }
    let mut routers = serving(Role::Router).peekable();
    let first = routers.peek()?.evidence.no_pair.clone()?;
    routers.all(|router| router.evidence.no_pair.is_some()).then_some(first)
}

/// The last ones failed, or too many of those lately.
fn fails(handoffs: &Handoffs) -> bool {
    let Handoffs {
        recent,
        recent_failed,
        failed_since,
        ..
    } = *handoffs;
    failed_since > 0 || (recent_failed > 0 && recent_failed.saturating_mul(FAILED_SHARE) >= recent)
}

fn failures(pod: &Pod, handoffs: &Handoffs) -> String {
    let Handoffs {
        finished,
        failed,
        failed_since,
        recent,
        recent_failed,
    } = handoffs;
    let which = if *failed_since > 0 {
        format!("the last {failed_since} hand-offs failed")
    } else {
        format!("{recent_failed} of the last {recent} hand-offs failed")
    };
    let total: u64 = failed.iter().map(|(_, count)| count).sum();
    let reasons: Vec<_> = failed
        .iter()
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    format!(
        "{} pod {} says: {which}; since it started {finished} finished and {total} failed ({})",
        pod.role.field(),
        pod.name,
        reasons.join(", ")
    )
}

/// The way from the routers to whoever is connected to them, as they see it: what lies behind a proxy they do not.
pub fn client_path(world: &World) -> Health {
    let routers = || world.pods.iter().filter(|pod| pod.serves() && pod.role == Role::Router);
    let said = || routers().filter_map(|pod| pod.evidence.clients.as_ref());
    let Clients {
        ended,
        gone,
        stalled,
        blocked,
    } = said().fold(Clients::default(), |all, one| Clients {
        ended: all.ended + one.ended,
        gone: all.gone + one.gone,
        stalled: all.stalled + one.stalled,
        blocked: all.blocked + one.blocked,
    });
    let (lost, seen) = (gone + stalled + blocked, ended + blocked);
    if lost >= LOST_LEAST && lost * LOST_SHARE >= seen {
        return Health::Ill(
            "AnswersNotTaken",
            format!(
                "of {ended} requests that ended lately, {gone} clients left and {stalled} were cut off before their answer \
                 ended; {blocked} take nothing now. What lies between the routers and them was not measured"
            ),
        );
    }
    if ended > 0 {
        Health::Well("AnswersTaken")
    } else {
        unmeasured(routers().count(), said().count())
    }
}

/// Nothing was measured, if all of those who measure say so.
fn unmeasured(measure: usize, heard: usize) -> Health {
    if measure > 0 && measure == heard {
        Health::Unknown
    } else {
        Health::Unheard
    }
}
