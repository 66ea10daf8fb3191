//! The states of a transfer and their one transition function.
//!
//! Decode: Reserved → Attached → Receiving → Verifying → **Committed**. Prefill: Queued → Prefilling → Streaming →
//! AwaitCommit → **Released**, or Prefilling → **Finished** when the first token already ends the request. From any state
//! that is not terminal → **Failed**, **Aborted** (and on prefill **Expired**). A terminal returns itself for every later event, so
//! whoever wins the transition runs its effects, once. (`Resuming` joins the decode side together with resume.)

use crate::Reason;

/// The result of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<S> {
    /// The state changed: the caller owns the effects of this transition.
    Moved(S),
    /// Nothing changes: a terminal, or an event that this state already contains.
    Same(S),
    /// The event is out of order in this state; the protocol was broken and the transfer must fail.
    Illegal(S),
}

impl<S: Copy> Step<S> {
    /// The state after the event.
    pub fn state(self) -> S {
        match self {
            Self::Moved(s) | Self::Same(s) | Self::Illegal(s) => s,
        }
    }
}

/// How a transfer ended without success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Something broke.
    Failed(Reason),
    /// Somebody no longer wants it.
    Aborted(Reason),
}

impl End {
    /// Why.
    pub fn reason(self) -> Reason {
        match self {
            Self::Failed(r) | Self::Aborted(r) => r,
        }
    }
}

/// Decode's side of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DecodeState {
    /// Pages are reserved, prefill is being dialled.
    Reserved,
    /// Prefill accepted.
    Attached,
    /// Frames may arrive.
    Receiving,
    /// The manifest is here; coverage and digest are compared.
    Verifying,
    /// Terminal: the pages are the sequence's.
    Committed,
    /// Terminal: failed or aborted.
    Ended(End),
}

/// What can happen to decode's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DecodeEvent {
    /// `Accepted` arrived.
    Accepted,
    /// The data stream is open, or frames are on their way.
    DataOpen,
    /// A frame arrived and was accepted.
    Frame,
    /// `Manifest` arrived.
    Manifest,
    /// Coverage, digest and prompt hash agree.
    Verified,
    /// It ends here.
    End(End),
}

impl DecodeState {
    /// Nothing can change it any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Committed | Self::Ended(_))
    }

    /// The transition function.
    #[must_use]
    #[expect(clippy::match_same_arms, reason = "a table: rows stand in the order of the protocol")]
    pub fn on(self, event: DecodeEvent) -> Step<Self> {
        use DecodeEvent as E;
        match (self, event) {
            (Self::Committed | Self::Ended(_), _) | (Self::Receiving, E::DataOpen | E::Frame) => Step::Same(self),
            (_, E::End(end)) => Step::Moved(Self::Ended(end)),
            (Self::Reserved, E::Accepted) => Step::Moved(Self::Attached),
            (Self::Attached, E::DataOpen | E::Frame) => Step::Moved(Self::Receiving),
            // a full prefix hit, or a first token that ends the request: a manifest without a frame
            (Self::Attached | Self::Receiving, E::Manifest) => Step::Moved(Self::Verifying),
            // the manifest travels on another connection than the frames and may overtake the last of them
            (Self::Verifying, E::DataOpen | E::Frame) => Step::Same(self),
            (Self::Verifying, E::Verified) => Step::Moved(Self::Committed),
            (
                Self::Reserved | Self::Attached | Self::Receiving | Self::Verifying,
                E::Accepted | E::DataOpen | E::Frame | E::Manifest | E::Verified,
            ) => Step::Illegal(self),
        }
    }
}

/// Prefill's side of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefillState {
    /// Waiting in the bounded run queue.
    Queued,
    /// Chunks are computed.
    Prefilling,
    /// Frames are due.
    Streaming,
    /// The manifest is sent; the pages are leased until Commit.
    AwaitCommit,
    /// Terminal: decode committed.
    Released,
    /// Terminal: the first token ended the request, no KV was needed.
    Finished,
    /// Terminal: failed or aborted.
    Ended(End),
    /// Terminal: the lease ran out before a commit.
    Expired,
}

/// What can happen to prefill's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefillEvent {
    /// The scheduler took it up.
    Started,
    /// KV is ready to be sent.
    DataReady,
    /// Everything was sent and so was the manifest.
    ManifestSent,
    /// The first token ended the request.
    FirstTokenEnds,
    /// `Commit` arrived.
    Commit,
    /// The lease ran out.
    LeaseOver,
    /// It ends here.
    End(End),
}

impl PrefillState {
    /// Nothing can change it any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Released | Self::Finished | Self::Ended(_) | Self::Expired)
    }

    /// The transition function.
    #[must_use]
    #[expect(clippy::match_same_arms, reason = "a table: rows stand in the order of the protocol")]
    pub fn on(self, event: PrefillEvent) -> Step<Self> {
        use PrefillEvent as E;
        match (self, event) {
            (Self::Released | Self::Finished | Self::Ended(_) | Self::Expired, _) => Step::Same(self),
            (_, E::End(end)) => Step::Moved(Self::Ended(end)),
            (Self::Queued, E::Started) => Step::Moved(Self::Prefilling),
            (Self::Prefilling, E::DataReady) => Step::Moved(Self::Streaming),
            (Self::Prefilling, E::FirstTokenEnds) => Step::Moved(Self::Finished),
            (Self::Prefilling, E::Started) | (Self::Streaming, E::DataReady) => Step::Same(self),
            (Self::Streaming, E::ManifestSent) => Step::Moved(Self::AwaitCommit),
            (Self::AwaitCommit, E::Commit) => Step::Moved(Self::Released),
            (Self::AwaitCommit, E::LeaseOver) => Step::Moved(Self::Expired),
            (
                Self::Queued | Self::Prefilling | Self::Streaming | Self::AwaitCommit,
                E::Started | E::DataReady | E::ManifestSent | E::FirstTokenEnds | E::Commit | E::LeaseOver,
            ) => Step::Illegal(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn end() -> impl Strategy<Value = End> {
        (1..=19i32, any::<bool>()).prop_map(|(r, abort)| {
            let reason = Reason::try_from(r).unwrap();
            if abort {
                End::Aborted(reason)
            } else {
                End::Failed(reason)
            }
        })
    }

    fn decode_event() -> impl Strategy<Value = DecodeEvent> {
        use DecodeEvent as E;
        prop_oneof![
            4 => prop_oneof![Just(E::Accepted), Just(E::DataOpen), Just(E::Frame), Just(E::Manifest), Just(E::Verified)],
            1 => end().prop_map(E::End),
        ]
    }

    fn prefill_event() -> impl Strategy<Value = PrefillEvent> {
        use PrefillEvent as E;
        prop_oneof![
            4 => prop_oneof![
                Just(E::Started), Just(E::DataReady), Just(E::ManifestSent), Just(E::FirstTokenEnds), Just(E::Commit),
                Just(E::LeaseOver)
            ],
            1 => end().prop_map(E::End),
        ]
    }

    proptest! {
        #[test]
        fn a_terminal_of_decode_is_entered_once_and_never_left(events in prop::collection::vec(decode_event(), 0..40)) {
            let mut state = DecodeState::Reserved;
            let (mut entered, mut seen) = (0, Vec::new());
            for event in events {
                let step = state.on(event);
                if state.is_terminal() {
                    prop_assert_eq!(step, Step::Same(state));
                }
                if let Step::Moved(next) = step {
                    prop_assert_ne!(next, state);
                    entered += u32::from(next.is_terminal());
                    seen.push(event);
                }
                state = step.state();
            }
            prop_assert!(entered <= 1);
            prop_assert_eq!(entered == 1, state.is_terminal());
            // nothing is committed that was not accepted, sent whole and verified
            if state == DecodeState::Committed {
                for needed in [DecodeEvent::Accepted, DecodeEvent::Manifest, DecodeEvent::Verified] {
                    prop_assert!(seen.contains(&needed));
                }
            }
        }

        #[test]
        fn a_terminal_of_prefill_is_entered_once_and_never_left(events in prop::collection::vec(prefill_event(), 0..40)) {
            let mut state = PrefillState::Queued;
            let (mut entered, mut seen) = (0, Vec::new());
            for event in events {
                let step = state.on(event);
                if state.is_terminal() {
                    prop_assert_eq!(step, Step::Same(state));
                }
                if let Step::Moved(next) = step {
                    prop_assert_ne!(next, state);
                    entered += u32::from(next.is_terminal());
                    seen.push(event);
                }
                state = step.state();
            }
            prop_assert!(entered <= 1);
            prop_assert_eq!(entered == 1, state.is_terminal());
            if state == PrefillState::Released {
                prop_assert!(seen.contains(&PrefillEvent::ManifestSent) && seen.contains(&PrefillEvent::Commit));
            }
        }

        #[test]
        fn an_end_always_wins_over_a_state_that_is_not_terminal(events in prop::collection::vec(decode_event(), 0..6), e in end()) {
            let state = events.into_iter().fold(DecodeState::Reserved, |s, ev| s.on(ev).state());
            let expected = if state.is_terminal() { state } else { DecodeState::Ended(e) };
            prop_assert_eq!(state.on(DecodeEvent::End(e)).state(), expected);
        }
    }

    #[test]
    fn the_good_paths_are_legal() {
        use DecodeEvent as D;
        use PrefillEvent as P;
        let decode = [
            D::Accepted,
            D::DataOpen,
            D::Frame,
            D::Frame,
            D::Manifest,
            D::Frame,
            D::Verified,
        ];
        let state = decode.into_iter().fold(DecodeState::Reserved, |s, e| match s.on(e) {
            Step::Illegal(s) => panic!("{e:?} in {s:?}"),
            step => step.state(),
        });
        assert_eq!(state, DecodeState::Committed);
        let prefill = [P::Started, P::DataReady, P::ManifestSent, P::Commit];
        let state = prefill.into_iter().fold(PrefillState::Queued, |s, e| match s.on(e) {
            Step::Illegal(s) => panic!("{e:?} in {s:?}"),
            step => step.state(),
        });
        assert_eq!(state, PrefillState::Released);
    }

    #[test]
    fn a_frame_before_the_handshake_is_out_of_order() {
        assert_eq!(
            DecodeState::Reserved.on(DecodeEvent::Frame),
            Step::Illegal(DecodeState::Reserved)
        );
        assert_eq!(
            PrefillState::Queued.on(PrefillEvent::Commit),
            Step::Illegal(PrefillState::Queued)
        );
    }
}
