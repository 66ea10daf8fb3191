//! What a failure means for the request and for the engines: pure.

use tandem_wire::{Failure, Reason, Source};

use crate::engines::Side;
use crate::knobs::OnPrefillFailure;

/// Attempts of one request, the first included. Waiting for room is no attempt.
pub const MAX_ATTEMPTS: u32 = 3;

/// A failure as the router met it.
#[derive(Debug, Clone, Copy)]
pub struct Met<'a> {
    /// What failed.
    pub failure: &'a Failure,
    /// The engine said it in its own words; else the connection to decode broke.
    pub carried: bool,
    /// A prefill engine took part.
    pub with_prefill: bool,
}

impl Met<'_> {
    /// At whose side it went wrong: that engine is avoided by the next attempt.
    pub fn side(&self) -> Side {
        if !self.with_prefill || !self.carried {
            return Side::Decode;
        }
        match self.failure.source {
            Source::Prefill | Source::Transfer => Side::Prefill,
            // the peer that decode lost is its prefill
            Source::Decode if lost_peer(self.failure.reason) => Side::Prefill,
            Source::Decode | Source::Router | Source::Client | Source::Unspecified => Side::Decode,
        }
    }

    /// Is it a fault of that engine, which its breaker counts?
    pub fn fault(&self) -> bool {
        self.failure.meaning().fault
    }

    /// Does it raise doubt that the engine is still the one that we know?
    pub fn doubt(&self) -> bool {
        lost_peer(self.failure.reason) || matches!(self.failure.reason, Reason::StaleBoot | Reason::Loading)
    }

    /// May the request be sent again? Never once the client has a piece of the answer (`delivered`).
    pub fn again(&self, policy: OnPrefillFailure, attempts: u32, delivered: bool) -> bool {
        if delivered || !self.failure.meaning().retryable {
            return false;
        }
        // a full engine is waited for; the queue's time bounds it
        if self.failure.reason == Reason::NoCapacity {
            return true;
        }
        let prefill_failed = self.side() == Side::Prefill && self.fault();
        attempts < MAX_ATTEMPTS && !(prefill_failed && policy == OnPrefillFailure::Fail)
    }
}

fn lost_peer(reason: Reason) -> bool {
    matches!(reason, Reason::PeerLost | Reason::RendezvousTimeout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::all_reasons;

    fn failures() -> impl Iterator<Item = Failure> {
        let sources = [
            Source::Unspecified,
            Source::Client,
            Source::Router,
            Source::Prefill,
            Source::Transfer,
            Source::Decode,
        ];
        all_reasons().flat_map(move |(reason, _)| sources.map(|source| Failure::new(reason, source, "")))
    }

    const POLICIES: [OnPrefillFailure; 3] = [
        OnPrefillFailure::Retry,
        OnPrefillFailure::Recompute,
        OnPrefillFailure::Fail,
    ];

    #[test]
    fn nothing_is_sent_again_once_the_client_has_a_piece_or_attempts_are_used_up() {
        for failure in failures() {
            let met = Met {
                failure: &failure,
                carried: true,
                with_prefill: true,
            };
            for policy in POLICIES {
                assert!(!met.again(policy, 1, true), "{failure:?}");
                if failure.reason != Reason::NoCapacity {
                    assert!(!met.again(policy, MAX_ATTEMPTS, false), "{failure:?}");
                }
            }
        }
    }

    #[test]
    fn the_policy_fail_stops_at_a_prefill_failure_but_not_at_a_full_prefill_or_a_lost_decode() {
        let again = |reason, source, carried| {
            let failure = Failure::new(reason, source, "");
            Met {
                failure: &failure,
                carried,
                with_prefill: true,
            }
            .again(OnPrefillFailure::Fail, 1, false)
        };
        assert!(!again(Reason::PeerLost, Source::Decode, true));
        assert!(!again(Reason::Stalled, Source::Prefill, true));
        assert!(again(Reason::NoCapacity, Source::Prefill, true));
        assert!(again(Reason::PeerLost, Source::Router, false));
    }

    #[test]
    fn a_broken_connection_is_decodes_and_a_lost_peer_of_decode_is_prefills() {
        let failure = Failure::new(Reason::PeerLost, Source::Decode, "");
        assert_eq!(
            Met {
                failure: &failure,
                carried: true,
                with_prefill: true
            }
            .side(),
            Side::Prefill
        );
        assert_eq!(
            Met {
                failure: &failure,
                carried: false,
                with_prefill: true
            }
            .side(),
            Side::Decode
        );
        assert_eq!(
            Met {
                failure: &failure,
                carried: true,
                with_prefill: false
            }
            .side(),
            Side::Decode
        );
    }
}
