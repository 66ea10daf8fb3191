//! Why something ended, and the one table of what that means to a caller.

use std::fmt;

use tonic::{Code, Status};

pub use crate::proto::{Reason, Source};
use crate::{BootId, proto};

/// What a reason means to the layers above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meaning {
    /// Stable machine code, also on the HTTP surface.
    pub code: &'static str,
    /// gRPC status.
    pub grpc: Code,
    /// HTTP status, if nothing was sent yet.
    pub http: u16,
    /// The same request may succeed on another pair or later: a new attempt is allowed before the first byte.
    pub retryable: bool,
    /// It says that an engine, or the way between two, is not well. What its client or its request did, an engine that is full, on its
    /// way out or just started again, and a peer that gave the work up say nothing of the kind.
    pub fault: bool,
}

/// The table. Total, without a wildcard: a new reason has to decide.
pub const fn meaning(reason: Reason) -> Meaning {
    const fn row(code: &'static str, grpc: Code, http: u16, retryable: bool, fault: bool) -> Meaning {
        Meaning {
            code,
            grpc,
            http,
            retryable,
            fault,
        }
    }
    match reason {
        // 499 is nginx's "client closed request"; nobody is left to read it
        Reason::AbortedByClient => row("aborted_by_client", Code::Cancelled, 499, false, false),
        Reason::AbortedByPeer => row("aborted_by_peer", Code::Aborted, 502, true, false),
        Reason::PeerLost => row("peer_lost", Code::Unavailable, 502, true, true),
        Reason::StaleBoot => row("stale_boot", Code::FailedPrecondition, 503, true, false),
        Reason::StaleAttempt => row("stale_attempt", Code::FailedPrecondition, 503, true, false),
        Reason::RendezvousTimeout => row("rendezvous_timeout", Code::Unavailable, 504, true, true),
        Reason::Stalled => row("stalled", Code::Unavailable, 504, true, true),
        Reason::Deadline => row("deadline", Code::DeadlineExceeded, 504, false, false),
        Reason::Incomplete => row("incomplete", Code::DataLoss, 502, true, true),
        Reason::Checksum => row("checksum", Code::DataLoss, 502, true, true),
        Reason::PromptMismatch => row("prompt_mismatch", Code::DataLoss, 502, true, true),
        Reason::LayoutMismatch => row("layout_mismatch", Code::FailedPrecondition, 502, true, true),
        Reason::NoCapacity => row("no_capacity", Code::ResourceExhausted, 503, true, false),
        Reason::LeaseLost => row("lease_lost", Code::Unavailable, 502, true, true),
        Reason::OverLength => row("over_length", Code::InvalidArgument, 400, false, false),
        Reason::Draining => row("draining", Code::Unavailable, 503, true, false),
        Reason::Internal | Reason::Unspecified => row("internal", Code::Internal, 500, false, true),
        Reason::Invalid => row("invalid", Code::InvalidArgument, 400, false, false),
        Reason::Loading => row("loading", Code::Unavailable, 503, true, false),
    }
}

/// A reason off the wire; one that a newer peer knows and we do not is INTERNAL.
pub fn reason_from_wire(value: i32) -> Reason {
    match Reason::try_from(value) {
        Ok(Reason::Unspecified) | Err(_) => Reason::Internal,
        Ok(reason) => reason,
    }
}

/// A failure as a value: reason, who saw it first, and words for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub reason: Reason,
    /// Which part saw it first.
    pub source: Source,
    /// What failed, the value, the remedy.
    pub detail: String,
    /// With STALE_BOOT: the boot that answered, so that the caller can refresh at once.
    pub boot_id: Option<BootId>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", meaning(self.reason).code, self.detail)
    }
}

impl std::error::Error for Failure {}

/// Who saw it first, in a word.
pub const fn source_name(source: Source) -> &'static str {
    match source {
        Source::Unspecified => "unknown",
        Source::Client => "client",
        Source::Router => "router",
        Source::Prefill => "prefill",
        Source::Transfer => "transfer",
        Source::Decode => "decode",
    }
}

/// Metadata key under which a failed call carries its [`proto::Failure`].
pub const FAILURE_KEY: &str = "tandem-failure-bin";

impl Failure {
    /// A failure without a boot id.
    pub fn new(reason: Reason, source: Source, detail: impl Into<String>) -> Self {
        Self {
            reason,
            source,
            detail: detail.into(),
            boot_id: None,
        }
    }

    /// The call meant another boot.
    pub fn stale_boot(source: Source, meant: &[u8], own: BootId) -> Self {
        let meant = BootId::from_wire(meant).map_or_else(|e| e.to_string(), |b| b.to_string());
        Self {
            reason: Reason::StaleBoot,
            source,
            detail: format!("call meant boot {meant}, this process is boot {own}; ask GetInfo and try again"),
            boot_id: Some(own),
        }
    }

    /// What it means to a caller.
    pub fn meaning(&self) -> Meaning {
        meaning(self.reason)
    }

    /// The message form.
    pub fn to_wire(&self) -> proto::Failure {
        proto::Failure {
            reason: self.reason.into(),
            source: self.source.into(),
            detail: self.detail.clone(),
            boot_id: self.boot_id.map(BootId::to_wire).unwrap_or_default(),
        }
    }

    /// From the message form.
    pub fn from_wire(message: &proto::Failure) -> Self {
        Self {
            reason: reason_from_wire(message.reason),
            source: message.source(),
            detail: message.detail.clone(),
            boot_id: BootId::from_wire(&message.boot_id).ok(),
        }
    }

    /// As the status of a failed call; [`Failure::from_status`] reads it back whole.
    pub fn to_status(&self) -> Status {
        use prost::Message;
        let mut metadata = tonic::metadata::MetadataMap::new();
        let value = tonic::metadata::MetadataValue::from_bytes(&self.to_wire().encode_to_vec());
        metadata.insert_bin(FAILURE_KEY, value);
        Status::with_metadata(self.meaning().grpc, self.to_string(), metadata)
    }

    /// Reads a status. One without our metadata comes from the transport: a broken or refused connection is PEER_LOST.
    pub fn from_status(status: &Status, source: Source) -> Self {
        use prost::Message;
        let carried = status
            .metadata()
            .get_bin(FAILURE_KEY)
            .and_then(|v| v.to_bytes().ok())
            .and_then(|b| proto::Failure::decode(b).ok());
        if let Some(message) = carried {
            return Self::from_wire(&message);
        }
        let reason = match status.code() {
            Code::Cancelled => Reason::AbortedByPeer,
            Code::DeadlineExceeded => Reason::Deadline,
            Code::ResourceExhausted => Reason::NoCapacity,
            Code::InvalidArgument | Code::OutOfRange => Reason::Invalid,
            // a reset stream, a closed socket, a silent peer: tonic tells them apart by text only
            Code::Unavailable | Code::Unknown | Code::Internal => Reason::PeerLost,
            Code::Ok
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::Unimplemented
            | Code::DataLoss
            | Code::Unauthenticated => Reason::Internal,
        };
        Self::new(reason, source, format!("{:?}: {}", status.code(), status.message()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_reason() -> impl Iterator<Item = Reason> {
        (0..64).filter_map(|v| Reason::try_from(v).ok())
    }

    #[test]
    fn every_reason_has_its_own_code_and_an_error_status() {
        let mut codes: Vec<_> = every_reason()
            .filter(|r| *r != Reason::Unspecified)
            .map(|r| meaning(r).code)
            .collect();
        for reason in every_reason() {
            let m = meaning(reason);
            assert!(
                m.http >= 400 && m.grpc != Code::Ok,
                "{reason:?} must not look like success"
            );
            assert_eq!(
                m.code.to_uppercase(),
                reason
                    .as_str_name()
                    .trim_start_matches("REASON_")
                    .replace("UNSPECIFIED", "INTERNAL")
            );
        }
        codes.sort_unstable();
        let n = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), n);
        assert!(n >= 19);
    }

    #[test]
    fn what_the_client_did_wrong_is_retried_or_blamed_on_an_engine() {
        for reason in every_reason().filter(|r| meaning(*r).http < 500) {
            assert!(!meaning(reason).retryable && !meaning(reason).fault, "{reason:?}");
        }
    }

    #[test]
    fn an_unknown_reason_of_a_newer_peer_reads_as_internal() {
        assert_eq!(reason_from_wire(9_999), Reason::Internal);
        assert_eq!(reason_from_wire(0), Reason::Internal);
        assert_eq!(reason_from_wire(Reason::Stalled.into()), Reason::Stalled);
    }

    #[test]
    fn a_failure_survives_a_status() {
        for reason in every_reason().filter(|r| *r != Reason::Unspecified) {
            let mut failure = Failure::new(reason, Source::Prefill, "pages: 3 of 7 — ünïcode\nand a line");
            failure.boot_id = Some(BootId::random());
            assert_eq!(Failure::from_status(&failure.to_status(), Source::Router), failure);
        }
    }

    #[test]
    fn a_broken_connection_is_peer_lost_with_the_observer_as_source() {
        let failure = Failure::from_status(&Status::unavailable("tcp connect error"), Source::Decode);
        assert_eq!((failure.reason, failure.source), (Reason::PeerLost, Source::Decode));
    }
}
