//! The rules that no single type can hold, in CEL, each with the message that a person reads. The API server applies
//! them, also while no operator runs; [`crate::validate`] applies the same ones to a file.
//!
//! A rule sees the object after defaults were filled in. A message says what is wrong and what to write instead.

/// A rule and its message.
pub type Rule = (&'static str, &'static str);

/// A DNS label.
pub const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A DNS label or nothing.
pub const DNS_LABEL_OR_EMPTY: &str = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$";
/// A resource name with its domain, such as `nvidia.com/gpu`.
pub const RESOURCE_NAME: &str = "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$";
/// A text without white space.
pub const NO_SPACES: &str = r"^\S*$";
/// A Kubernetes quantity that is not negative.
pub const QUANTITY: &str = "^[0-9]+(\\.[0-9]+)?([numkMGTPE]|[KMGTPE]i)?$";
/// The name of an environment variable.
pub const ENV_NAME: &str = "^[A-Za-z_][A-Za-z0-9_]*$";
/// An absolute path.
pub const ABSOLUTE_PATH: &str = "^/.+$";

/// The longest `metadata.name`: what is appended for the names of children makes a DNS label with it.
pub const MAX_NAME: usize = 40;

/// On the object.
pub const NAME: Rule = (
    "self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "metadata.name is not a name that children can be named after; write 1 to 40 of a-z, 0-9 and -, with a letter in \
     front and a letter or digit at the end",
);

/// On `spec`.
pub const BOTH_OR_NEITHER: Rule = (
    "(self.prefill.replicas == 0) == (self.decode.replicas == 0)",
    "one of prefill.replicas and decode.replicas is zero, which leaves the other without a peer; set both to zero or \
     neither",
);
/// On `spec`.
pub const GPU_BUDGET: Rule = (
    "self.prefill.replicas * self.prefill.gpusPerReplica + self.decode.replicas * self.decode.gpusPerReplica <= \
     self.gpus.budget",
    "prefill and decode (replicas times gpusPerReplica) hold more GPUs than gpus.budget; raise the budget or lower them",
);
/// On `spec`.
pub const RESTART_QUEUE: Rule = (
    "self.rollout.trafficDuringRestart == 'Reject' || self.timeouts.restartQueueSeconds >= \
     self.timeouts.drainSeconds + 2 * self.timeouts.startupSeconds + self.rollout.gates.health.timeoutSeconds + \
     self.rollout.gates.probe.timeoutSeconds",
    "timeouts.restartQueueSeconds is less than drainSeconds + 2 x startupSeconds + the Health and Probe timeouts, so a \
     request could wait in vain; raise it, or set rollout.trafficDuringRestart to Reject",
);
/// On `spec`.
pub const PROGRESS_DEADLINE: Rule = (
    "self.rollout.progressDeadlineSeconds >= 2 * self.timeouts.drainSeconds + (self.prefill.replicas + \
     self.decode.replicas) * (self.timeouts.drainSeconds + self.timeouts.startupSeconds) + \
     self.rollout.gates.health.timeoutSeconds + self.rollout.gates.probe.timeoutSeconds",
    "rollout.progressDeadlineSeconds is less than a change may take: 2 x drainSeconds + drainSeconds + startupSeconds \
     for each replica + the Health and Probe timeouts; raise it or lower those",
);

/// On `spec.model.name`.
pub const MODEL_NAME: Rule = (
    r"!self.matches('[\\s\\pZ\\p{Cc}]')",
    "model.name has white space or control characters; write it without",
);
/// On `spec.model.revision`.
pub const MODEL_REVISION: Rule = (
    "self == '' || self.matches('^[0-9a-f]{64}$')",
    "model.revision is not a SHA-256 digest; write its 64 lower-case hex digits (sha256sum prints them), or leave it \
     empty",
);
/// On `spec.model.source.pvc.path`.
pub const INSIDE_CLAIM: Rule = (
    "self.split('/').all(part, !(part in ['', '.', '..']))",
    "path does not name a file inside the claim; write a relative path without \"..\", such as smollm2/model.gguf",
);
/// On `spec.kvCache`.
pub const PAGE_TOKENS: Rule = (
    "self.pageTokens in [8, 16, 32, 64, 128, 256]",
    "pageTokens is not a power of two; write 8, 16, 32, 64, 128 or 256",
);

/// On `spec.prefill` and `spec.decode`.
pub const TENSOR_DIVIDES: Rule = (
    "self.gpusPerReplica % self.parallelism.tensor == 0",
    "parallelism.tensor does not divide gpusPerReplica; write a divisor, or no GPUs",
);
/// On `spec.prefill` and `spec.decode`.
pub const GPUS_NEED_BACKEND: Rule = (
    "self.gpusPerReplica == 0 || self.backend == 'Cpu'",
    "backend Auto never leaves the GPUs of gpusPerReplica to the CPU, and there is no GPU backend yet; write backend: \
     Cpu, or gpusPerReplica: 0",
);
/// On `resources`.
pub const REQUESTED_RESOURCES: Rule = (
    "!has(self.requests) || self.requests.all(name, name in ['cpu', 'memory', 'ephemeral-storage'])",
    "requests names another resource than cpu, memory and ephemeral-storage; GPUs are asked for by gpusPerReplica",
);
/// On `resources`.
pub const LIMITED_RESOURCES: Rule = (
    "!has(self.limits) || self.limits.all(name, name in ['cpu', 'memory', 'ephemeral-storage'])",
    "limits names another resource than cpu, memory and ephemeral-storage; GPUs are asked for by gpusPerReplica",
);

/// On `spec.*.pod.labels`.
pub const NOT_OUR_LABELS: Rule = (
    "self.all(key, !key.startsWith('tandem.dev/') && !key.startsWith('app.kubernetes.io/'))",
    "labels of tandem.dev/ and app.kubernetes.io/ are set by the operator; choose another prefix",
);
/// On each item of `spec.*.pod.env`.
pub const ENV_SOURCE: Rule = (
    "!has(self.secretKeyRef) || !has(self.value)",
    "an environment variable has both value and secretKeyRef; write one",
);
/// On each item of `spec.*.pod.volumes`.
pub const ONE_VOLUME_SOURCE: Rule = (
    "[has(self.secret), has(self.configMap), has(self.claimName), has(self.emptyDirSize)].filter(given, given).size() \
     == 1",
    "a volume has not exactly one source; write one of secret, configMap, claimName and emptyDirSize",
);

/// On `spec.timeouts`.
pub const STALL_BELOW_WATCHDOG: Rule = (
    "self.stallSeconds < self.inflightWatchdogSeconds",
    "stallSeconds is not below inflightWatchdogSeconds; lower it, or the watchdog ends a transfer before its own timer \
     can say why",
);
/// On `spec.timeouts`.
pub const WATCHDOG_BELOW_DRAIN: Rule = (
    "self.inflightWatchdogSeconds < self.drainSeconds",
    "inflightWatchdogSeconds is not below drainSeconds; raise drainSeconds, or a stopping process is killed while the \
     watchdog still lets a request wait",
);
