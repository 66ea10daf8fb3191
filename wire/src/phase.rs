//! What a request waits for in an engine: the names of [`Phase`](crate::proto::phase::Kind), the same everywhere.

pub use crate::proto::phase::Kind as Phase;

/// All that have a meaning, in the order of a request's life.
pub const PHASES: [Phase; 6] = [
    Phase::Accept,
    Phase::Queued,
    Phase::Prefill,
    Phase::Transfer,
    Phase::Decode,
    Phase::Client,
];

/// As JSON and labels say it; the router's own states that mean the same are called the same.
pub const fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Unspecified => "unknown",
        Phase::Accept => "accept",
        Phase::Queued => "prefill_queue",
        Phase::Prefill => "prefill",
        Phase::Transfer => "transfer",
        Phase::Decode => "decode",
        Phase::Client => "client",
    }
}
