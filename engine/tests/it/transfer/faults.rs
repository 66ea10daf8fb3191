//! Links and peers that break: each ends by the reason that fits it, at once or by the timer that owns it, and nothing stays held.

use std::time::Duration;

use tandem_engine::transfer::{KeepAlive, Phase};
use tandem_wire::{Reason, Source};

use super::pull::prompt;
use super::relay::Rule;
use super::rig::{Ask, Decode, GREEDY, Prefill, Relayed, Running, Setup, eventually, failures, soon};
use crate::support::fake::solo;

/// About a fifth of what a prompt of 1,000 tokens moves.
const SOME_BYTES: u64 = 40_000;
/// A timer that a test means to expire.
const SHORT: Duration = Duration::from_millis(300);

fn long_ask(seed: u64) -> Ask {
    Ask::new(prompt(seed, 1_000), 8)
}

async fn answers_rightly(rig: &Relayed, ask: &Ask, setup: &Setup) {
    let answer = soon("a request after the fault", rig.decode.generate(ask, &rig.peer()))
        .await
        .unwrap();
    assert_eq!(
        answer.tokens,
        solo(&setup.fake, &ask.prompt, ask.new_tokens as usize, GREEDY)
    );
}

#[tokio::test]
async fn a_flipped_bit_on_the_wire_gives_no_token() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.data.to_client(Rule::FlipAt(SOME_BYTES));
    let (failure, _) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::Checksum, Source::Transfer),
        "{failure}"
    );
    assert_eq!(failures(&rig.decode.metrics, "decode", Reason::Checksum), 1);
    rig.idle().await;
    assert_eq!(
        failures(&rig.prefill.metrics, "prefill", Reason::AbortedByPeer),
        1,
        "prefill was told"
    );
    answers_rightly(&rig, &long_ask(1), &setup).await;
}

#[tokio::test]
async fn a_data_link_that_breaks_is_a_lost_peer_at_once() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.data.to_client(Rule::CutAfter(SOME_BYTES));
    let (failure, _) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    rig.idle().await;
    rig.data.to_client(Rule::Pass);
    answers_rightly(&rig, &long_ask(1), &setup).await;
}

#[tokio::test]
async fn a_control_link_that_breaks_is_a_lost_peer_at_once_for_all_bound_to_it() {
    let setup = Setup::default().fake(|f| f.total_pages = 1_024);
    let rig = Relayed::start(&setup).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let mut running: Vec<_> = (0..4).map(|i| rig.begin(&long_ask(i))).collect();
    for request in &mut running {
        request.reached(Phase::Transfer).await;
    }
    rig.control.both(Rule::Cut);
    for request in running {
        let (failure, _) = request.failure().await;
        assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    }
    rig.idle().await;
}

#[tokio::test]
async fn a_prefill_that_dies_in_the_middle_is_a_lost_peer_at_once() {
    let setup = Setup::default();
    let mut rig = Relayed::start(&setup).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let request = rig.begin(&long_ask(1));
    eventually("some bytes passed", || rig.data.rule_to_client() == Rule::Freeze).await;
    rig.prefill.kill().await;
    let (failure, _) = request.failure().await;
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    rig.decode.idle().await;
}

#[tokio::test]
async fn a_prefill_that_died_while_it_computed_is_a_lost_peer_at_once() {
    let setup = Setup::default();
    let mut prefill = Prefill::start(&setup).await;
    let decode = std::sync::Arc::new(Decode::start(&setup));
    prefill.fake.pause();
    let mut request = Running::begin(&decode, &long_ask(1), prefill.peer());
    request.reached(Phase::Prefill).await;
    prefill.kill().await;
    let (failure, _) = request.failure().await;
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    decode.idle().await;
}

#[tokio::test]
async fn nobody_who_listens_is_a_lost_peer_at_once() {
    let setup = Setup::default();
    let mut prefill = Prefill::start(&setup).await;
    let decode = Decode::start(&setup);
    prefill.kill().await;
    let failure = soon("a refusal", decode.generate(&long_ask(1), &prefill.peer()))
        .await
        .unwrap_err();
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    decode.idle().await;
}

#[tokio::test]
async fn silence_on_the_data_link_ends_by_the_stall_timer() {
    let setup = Setup::default();
    let decode = setup.clone().timers(|t| t.stall = SHORT);
    let rig = Relayed::start_with(&setup, &decode).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let (failure, after) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(failure.reason, Reason::Stalled, "{failure}");
    assert!(failure.detail.starts_with("stall timer"), "{failure}");
    assert!(after >= SHORT, "{after:?}");
    // prefill's own timers are long: it was told
    rig.idle().await;
}

#[tokio::test]
async fn a_link_that_swallows_everything_does_not_swallow_the_next_attempt_too() {
    // no pings: only the failed attempt can know
    let setup = Setup::default();
    let decode = setup.clone().timers(|t| t.stall = SHORT);
    let rig = Relayed::start_with(&setup, &decode).await;
    answers_rightly(&rig, &long_ask(1), &setup).await;
    rig.data.freeze_established();
    let (failure, _) = rig.begin(&long_ask(2)).failure().await;
    assert_eq!(failure.reason, Reason::Stalled, "{failure}");
    answers_rightly(&rig, &long_ask(2), &setup).await;
    rig.idle().await;
}

#[tokio::test]
async fn a_slow_data_link_that_moves_is_left_alone() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| {
        t.stall = SHORT * 2;
        t.progress = SHORT * 2;
        t.watchdog = SHORT * 2;
    });
    let rig = Relayed::start_with(&short, &short).await;
    // 12 pieces, two to a frame: as a whole twice as long as any timer, each frame a third of one
    rig.data.to_client(Rule::Slow(SHORT / 3));
    let ask = long_ask(1);
    let (answer, after) = rig.begin(&ask).end().await;
    assert_eq!(answer.unwrap().tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    assert!(after > SHORT * 3, "{after:?}");
    rig.idle().await;
}

#[tokio::test]
async fn silence_everywhere_ends_by_keep_alive_on_both_sides() {
    let setup = Setup {
        keep_alive: KeepAlive {
            interval: SHORT / 3,
            timeout: SHORT,
        },
        ..Setup::default()
    };
    let rig = Relayed::start(&setup).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let mut request = rig.begin(&long_ask(1));
    request.reached(Phase::Transfer).await;
    eventually("some bytes passed", || rig.data.rule_to_client() == Rule::Freeze).await;
    rig.control.both(Rule::Freeze);
    rig.data.both(Rule::Freeze);
    let (failure, after) = request.failure().await;
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    assert!(after >= SHORT, "{after:?}");
    rig.idle().await;
    // both come back: the lost connections are not used again
    rig.control.both(Rule::Pass);
    rig.data.both(Rule::Pass);
    answers_rightly(&rig, &long_ask(2), &setup).await;
}

#[tokio::test]
async fn the_keep_alives_timeout_is_the_silence_in_all() {
    let keep_alive = KeepAlive {
        interval: SHORT * 5,
        timeout: SHORT * 6,
    };
    let setup = Setup {
        keep_alive,
        ..Setup::default()
    };
    let rig = Relayed::start(&setup).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let request = rig.begin(&long_ask(1));
    eventually("some bytes passed", || rig.data.rule_to_client() == Rule::Freeze).await;
    rig.control.both(Rule::Freeze);
    rig.data.both(Rule::Freeze);
    let frozen = std::time::Instant::now();
    let (failure, _) = request.failure().await;
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    // not an interval and a timeout
    let silence = frozen.elapsed();
    assert!(silence < keep_alive.timeout + keep_alive.interval / 2, "{silence:?}");
    rig.idle().await;
}

#[tokio::test]
async fn a_link_that_died_while_idle_does_not_cost_the_next_request() {
    let setup = Setup {
        keep_alive: KeepAlive {
            interval: SHORT / 3,
            timeout: SHORT,
        },
        ..Setup::default()
    };
    let rig = Relayed::start(&setup).await;
    answers_rightly(&rig, &long_ask(1), &setup).await;
    // what was established stays frozen for good, new connections pass
    rig.control.freeze_established();
    rig.data.freeze_established();
    eventually("both connections are given up", || {
        rig.control.connections() == 0 && rig.data.connections() == 0
    })
    .await;
    answers_rightly(&rig, &long_ask(2), &setup).await;
}

#[tokio::test]
async fn a_prefill_that_does_not_answer_ends_by_the_rendezvous_timer() {
    let setup = Setup::default();
    let decode = setup.clone().timers(|t| t.rendezvous = SHORT);
    let rig = Relayed::start_with(&setup, &decode).await;
    rig.control.both(Rule::Freeze);
    let (failure, after) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(failure.reason, Reason::RendezvousTimeout, "{failure}");
    assert!(after >= SHORT, "{after:?}");
    rig.control.both(Rule::Pass);
    // what was still on its way must not occupy prefill
    rig.idle().await;
    answers_rightly(&rig, &long_ask(1), &setup).await;
}

#[tokio::test]
async fn a_restart_on_the_same_port_works_at_the_first_try() {
    let setup = Setup::default();
    let mut prefill = Prefill::start(&setup).await;
    let decode = Decode::start(&setup);
    let old = prefill.peer();
    soon("before", decode.generate(&long_ask(1), &old)).await.unwrap();
    prefill.kill().await;
    let again = Prefill::start_at(&setup, prefill.control, None).await;
    let ask = long_ask(2);
    let answer = soon("after", decode.generate(&ask, &again.peer())).await.unwrap();
    assert_eq!(answer.tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));

    let failure = soon("the boot before", decode.generate(&long_ask(3), &old))
        .await
        .unwrap_err();
    assert_eq!(failure.reason, Reason::StaleBoot, "{failure}");
    assert_eq!(
        failure.boot_id,
        Some(again.boot_id),
        "the caller learns the boot at once"
    );
    // and that call on the old name did not harm the new one
    soon("the new boot", decode.generate(&long_ask(4), &again.peer()))
        .await
        .unwrap();
    decode.idle().await;
    again.idle().await;
}

#[tokio::test]
async fn a_step_that_fails_is_told_to_decode_at_once() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.prefill.fake.fail_next("planted");
    let (failure, _) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::Internal, Source::Prefill),
        "{failure}"
    );
    assert!(failure.detail.contains("planted"), "{failure}");
    rig.idle().await;
    rig.prefill.fake.panic_next();
    let (failure, _) = rig.begin(&long_ask(2)).failure().await;
    assert_eq!(failure.reason, Reason::Internal, "{failure}");
    rig.idle().await;
}

#[tokio::test]
async fn a_prompt_that_prefill_cannot_hold_is_refused_with_both_lengths() {
    let setup = Setup::default();
    let small = setup.clone().fake(|f| f.max_length_tokens = 512);
    let rig = Relayed::start_with(&small, &setup).await;
    let (failure, _) = rig.begin(&Ask::new(prompt(1, 600), 8)).failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::OverLength, Source::Prefill),
        "{failure}"
    );
    assert!(
        failure.detail.contains("600") && failure.detail.contains("512"),
        "{failure}"
    );
    rig.idle().await;
}

#[tokio::test]
async fn other_weights_are_refused_at_the_handshake() {
    let setup = Setup::default();
    let other = setup.clone().fake(|f| f.salt += 1);
    let rig = Relayed::start_with(&other, &setup).await;
    let (failure, _) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(failure.reason, Reason::LayoutMismatch, "{failure}");
    assert!(failure.detail.contains("model hash"), "{failure}");
    rig.idle().await;
    assert_eq!(rig.prefill.fake.steps(), 0, "nothing was computed for it");
}

#[tokio::test]
async fn a_draining_prefill_refuses_at_once() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.prefill.scheduler.drain();
    let (failure, _) = rig.begin(&long_ask(1)).failure().await;
    assert_eq!(failure.reason, Reason::Draining, "{failure}");
    rig.idle().await;
}

#[tokio::test]
async fn a_decode_that_goes_at_any_stage_frees_prefill_at_once() {
    // every timer is long: only the news of its going can free anything
    let setup = Setup::default().knobs(|k| k.max_running = 1);
    let decode = Setup::default();
    let rig = Relayed::start_with(&setup, &decode).await;

    // while it computes, and while another waits behind it
    rig.prefill.fake.pause();
    let mut computing = rig.begin(&long_ask(1));
    computing.reached(Phase::Prefill).await;
    let mut queued = rig.begin(&long_ask(2));
    queued.reached(Phase::Queued).await;
    queued.drop_it().await;
    eventually("the queued one is gone", || rig.prefill.source.live() == 1).await;
    computing.drop_it().await;
    eventually("the computing one is gone", || rig.prefill.source.live() == 0).await;
    rig.prefill.fake.resume();
    rig.idle().await;

    // while frames are on their way, more than the receive window holds
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let mut streaming = rig.begin(&long_ask(3));
    streaming.reached(Phase::Transfer).await;
    eventually("some bytes passed", || rig.data.rule_to_client() == Rule::Freeze).await;
    eventually("all is sent, none of it committed", || {
        rig.prefill.inflight("await_commit") == 1
    })
    .await;
    streaming.drop_it().await;
    rig.idle().await;
    assert_eq!(failures(&rig.decode.metrics, "decode", Reason::AbortedByClient), 3);
    assert_eq!(failures(&rig.prefill.metrics, "prefill", Reason::AbortedByPeer), 3);

    rig.data.to_client(Rule::Pass);
    answers_rightly(&rig, &long_ask(3), &decode).await;
}

#[tokio::test]
async fn late_frames_never_reach_the_next_owner_of_the_pages() {
    // the pool of decode holds one such request: the second one gets the pages of the first
    let setup = Setup::default();
    let decode = setup.clone().fake(|f| f.total_pages = 127);
    let rig = Relayed::start_with(&setup, &decode).await;
    for seed in 0..10 {
        rig.data
            .to_client(Rule::FreezeAfter(rig.data.passed_to_client() + SOME_BYTES));
        let first = rig.begin(&long_ask(2 * seed));
        eventually("some bytes passed", || rig.data.rule_to_client() == Rule::Freeze).await;
        first.drop_it().await;
        let ask = long_ask(2 * seed + 1);
        let mut second = rig.begin(&ask);
        second.reached(Phase::Transfer).await;
        // now the first one's frames come, then the second one's
        rig.data.to_client(Rule::Pass);
        let (answer, _) = second.end().await;
        assert_eq!(
            answer.unwrap().tokens,
            solo(&setup.fake, &ask.prompt, 8, GREEDY),
            "round {seed}"
        );
        rig.decode.scheduler.cache().flush();
    }
    rig.idle().await;
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_is_lost_and_gives_no_token() {
    let setup = Setup::default();
    let prefill = setup.clone().timers(|t| t.lease = SHORT);
    let rig = Relayed::start_with(&prefill, &setup).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let request = rig.begin(&long_ask(1));
    eventually("the manifest is out", || rig.prefill.inflight("await_commit") == 1).await;
    rig.control.to_server(Rule::Freeze);
    let (failure, after) = request.failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::LeaseLost, Source::Prefill),
        "{failure}"
    );
    assert!(after >= SHORT, "{after:?}");
    rig.control.to_server(Rule::Pass);
    rig.idle().await;
}

#[tokio::test]
async fn a_slow_reader_that_renews_keeps_its_lease() {
    let setup = Setup::default();
    let prefill = setup.clone().timers(|t| t.lease = SHORT);
    let rig = Relayed::start_with(&prefill, &setup).await;
    rig.data.to_client(Rule::FreezeAfter(SOME_BYTES));
    let ask = long_ask(1);
    let mut request = rig.begin(&ask);
    eventually("the manifest is out", || rig.prefill.inflight("await_commit") == 1).await;
    let early = tokio::time::timeout(SHORT * 4, &mut request.task).await;
    assert!(early.is_err(), "ended while its lease was renewed: {early:?}");
    rig.data.to_client(Rule::Pass);
    let (answer, _) = request.end().await;
    assert_eq!(answer.unwrap().tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    rig.idle().await;
}
