//! What a change of a field costs: one table. The hashes of [`crate::inputs`], the restart set, the diff that people see
//! and the field's text in `kubectl explain` all come from it.

use std::fmt;

use crate::status::Role;

/// What a change of a field does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Both sides of a hand-off have to agree on it: prefill, decode and router restart, in this order.
    Contract,
    /// These roles restart.
    Restart(&'static [Role]),
    /// These roles' processes take it while they run.
    Hot(&'static [Role]),
    /// The number of the role's pods.
    Scale(Role),
    /// No process sees it.
    Operator,
}

const PREFILL: &[Role] = &[Role::Prefill];
const DECODE: &[Role] = &[Role::Decode];
const ENGINES: &[Role] = &[Role::Prefill, Role::Decode];
const ROUTER: &[Role] = &[Role::Router];
const ALL: &[Role] = &Role::ALL;

/// Every field of the spec, or a field above it that decides for all below, and its class.
pub const CLASSES: &[(&str, Class)] = &[
    ("model.name", Class::Contract),
    ("model.source.pvc.claimName", Class::Contract),
    ("model.source.pvc.path", Class::Contract),
    ("model.revision", Class::Contract),
    ("model.maxLengthTokens", Class::Restart(ALL)),
    ("kvCache.pageTokens", Class::Restart(ENGINES)),
    ("gpus.budget", Class::Operator),
    ("gpus.resourceName", Class::Restart(ENGINES)),
    ("prefill.replicas", Class::Scale(Role::Prefill)),
    ("prefill.backend", Class::Restart(PREFILL)),
    ("prefill.gpusPerReplica", Class::Restart(PREFILL)),
    ("prefill.parallelism.tensor", Class::Restart(PREFILL)),
    ("prefill.image", Class::Restart(PREFILL)),
    ("prefill.knobs", Class::Hot(PREFILL)),
    ("prefill.resources", Class::Restart(PREFILL)),
    ("prefill.pod", Class::Restart(PREFILL)),
    ("decode.replicas", Class::Scale(Role::Decode)),
    ("decode.backend", Class::Restart(DECODE)),
    ("decode.gpusPerReplica", Class::Restart(DECODE)),
    ("decode.parallelism.tensor", Class::Restart(DECODE)),
    ("decode.image", Class::Restart(DECODE)),
    ("decode.knobs", Class::Hot(DECODE)),
    ("decode.resources", Class::Restart(DECODE)),
    ("decode.pod", Class::Restart(DECODE)),
    ("router.replicas", Class::Scale(Role::Router)),
    ("router.policy", Class::Hot(ROUTER)),
    ("router.service.type", Class::Operator),
    ("router.apiKeysSecretName", Class::Restart(ROUTER)),
    ("router.image", Class::Restart(ROUTER)),
    ("router.resources", Class::Restart(ROUTER)),
    ("router.pod", Class::Restart(ROUTER)),
    ("transfer.onPrefillFailure", Class::Hot(ROUTER)),
    ("timeouts.queueSeconds", Class::Hot(ALL)),
    ("timeouts.restartQueueSeconds", Class::Operator),
    ("timeouts.rendezvousSeconds", Class::Hot(ENGINES)),
    ("timeouts.progressSeconds", Class::Hot(ENGINES)),
    ("timeouts.stallSeconds", Class::Hot(ENGINES)),
    ("timeouts.inflightWatchdogSeconds", Class::Hot(ENGINES)),
    ("timeouts.leaseSeconds", Class::Hot(ENGINES)),
    // These two lie in the pods' templates: the grace period and the startup probe.
    ("timeouts.drainSeconds", Class::Restart(ALL)),
    ("timeouts.startupSeconds", Class::Restart(ALL)),
    ("timeouts.requestSeconds", Class::Hot(ROUTER)),
    ("rollout", Class::Operator),
    ("restart", Class::Operator),
    ("historyLimit", Class::Operator),
];

/// The class of a field, by its path below `spec`; none for a path that is no field's.
pub fn class(path: &str) -> Option<Class> {
    let covers = |above: &str| path == above || path.strip_prefix(above).is_some_and(|rest| rest.starts_with('.'));
    CLASSES
        .iter()
        .find_map(|&(above, class)| covers(above).then_some(class))
}

impl fmt::Display for Class {
    /// What a change does, as a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contract => f.write_str("A change restarts prefill, decode and the router, in this order."),
            Self::Restart(roles) => write!(f, "A change restarts {}.", Names(roles)),
            Self::Hot(roles @ [_]) => write!(f, "A change restarts nothing: {} takes it while it runs.", Names(roles)),
            Self::Hot(roles) => write!(f, "A change restarts nothing: {} take it while they run.", Names(roles)),
            Self::Scale(role) => write!(
                f,
                "A change adds or removes pods of {} and restarts none.",
                Names(&[*role])
            ),
            Self::Operator => f.write_str("A change restarts nothing: no process sees it."),
        }
    }
}

/// `prefill, decode and the router`.
struct Names<'a>(&'a [Role]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, role) in self.0.iter().enumerate() {
            f.write_str(match index {
                0 => "",
                _ if index + 1 == self.0.len() => " and ",
                _ => ", ",
            })?;
            f.write_str(if *role == Role::Router {
                "the router"
            } else {
                role.field()
            })?;
        }
        Ok(())
    }
}
