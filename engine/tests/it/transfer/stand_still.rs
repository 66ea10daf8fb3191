//! Nothing breaks, but nothing moves: queues, slow and stuck prefills, a stuck runtime. Each wait ends by its own timer,
//! and what only takes long is left alone.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use tandem_engine::transfer::Phase;
use tandem_wire::{Reason, Source};
use tokio::runtime::Runtime;

use super::pull::prompt;
use super::relay::Rule;
use super::rig::{Ask, Decode, GREEDY, Prefill, Relayed, Running, Setup, eventually, failures};
use crate::support::fake::solo;

/// A timer that a test means to expire.
const SHORT: Duration = Duration::from_millis(300);

fn ask(seed: u64) -> Ask {
    Ask::new(prompt(seed, 500), 8)
}

#[tokio::test]
async fn a_prefill_that_computes_nothing_ends_by_the_progress_timer() {
    let setup = Setup::default();
    let decode = setup.clone().timers(|t| t.progress = SHORT);
    let rig = Relayed::start_with(&setup, &decode).await;
    rig.prefill.fake.pause();
    let (failure, after) = rig.begin(&ask(1)).failure().await;
    assert_eq!(failure.reason, Reason::Stalled, "{failure}");
    assert!(failure.detail.starts_with("progress timer"), "{failure}");
    assert!(after >= SHORT, "{after:?}");
    rig.prefill.fake.resume();
    rig.idle().await;
}

#[tokio::test]
async fn a_long_prefill_that_moves_is_left_alone() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| {
        t.progress = SHORT * 2;
        t.watchdog = SHORT * 2;
        t.stall = SHORT * 2;
        t.rendezvous = SHORT * 2;
    });
    let rig = Relayed::start_with(&short, &short).await;
    // 8 chunks of 3 layers, 50 ms each: twice as long as any timer, each part a twelfth of one
    rig.prefill.fake.layer_delay(SHORT / 6);
    let ask = ask(1);
    let (answer, after) = rig.begin(&ask).end().await;
    assert_eq!(answer.unwrap().tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    assert!(after > SHORT * 3, "{after:?}");
    rig.idle().await;
}

/// A prefill with one place, which is taken by a request that does not move.
async fn occupied(prefill: &Setup) -> (Prefill, Arc<Decode>, Running) {
    let prefill = Prefill::start(&prefill.clone().knobs(|k| k.max_running = 1)).await;
    let decode = Arc::new(Decode::start(&Setup::default()));
    prefill.fake.pause();
    let mut first = Running::begin(&decode, &ask(100), prefill.peer());
    first.reached(Phase::Prefill).await;
    (prefill, decode, first)
}

#[tokio::test]
async fn waiting_in_the_queue_is_no_stall() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| {
        t.rendezvous = SHORT;
        t.progress = SHORT;
        t.stall = SHORT;
        t.watchdog = SHORT;
    });
    let (prefill, _decode, first) = occupied(&setup).await;
    let hasty = Arc::new(Decode::start(&short));
    let behind = ask(1);
    let mut second = Running::begin(&hasty, &behind, prefill.peer());
    second.reached(Phase::Queued).await;
    let early = tokio::time::timeout(SHORT * 3, &mut second.task).await;
    assert!(early.is_err(), "ended while it was queued: {early:?}");
    prefill.fake.resume();
    assert!(first.end().await.0.is_ok());
    let (answer, _) = second.end().await;
    assert_eq!(answer.unwrap().tokens, solo(&setup.fake, &behind.prompt, 8, GREEDY));
}

#[tokio::test]
async fn a_queue_that_does_not_move_ends_by_the_queue_timer_of_either_side() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| t.queue = SHORT);
    for (of_prefill, of_decode, source) in [(&setup, &short, Source::Decode), (&short, &setup, Source::Prefill)] {
        let (prefill, decode, first) = occupied(of_prefill).await;
        let hasty = Arc::new(Decode::start(of_decode));
        let (failure, after) = Running::begin(&hasty, &ask(1), prefill.peer()).failure().await;
        assert_eq!(
            (failure.reason, failure.source),
            (Reason::NoCapacity, source),
            "{failure}"
        );
        assert!(failure.detail.starts_with("queue timer"), "{failure}");
        assert!(after >= SHORT, "{after:?}");
        prefill.fake.resume();
        assert!(first.end().await.0.is_ok());
        hasty.idle().await;
        decode.idle().await;
        prefill.idle().await;
    }
}

#[tokio::test]
async fn a_full_queue_refuses_at_once() {
    let setup = Setup::default().knobs(|k| k.prefill_queue = 1);
    let (prefill, decode, first) = occupied(&setup).await;
    let mut second = Running::begin(&decode, &ask(1), prefill.peer());
    second.reached(Phase::Queued).await;
    let (failure, _) = Running::begin(&decode, &ask(2), prefill.peer()).failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::NoCapacity, Source::Prefill),
        "{failure}"
    );
    prefill.fake.resume();
    assert!(first.end().await.0.is_ok());
    assert!(second.end().await.0.is_ok());
    decode.idle().await;
    prefill.idle().await;
}

#[tokio::test]
async fn the_requests_own_time_ends_it_in_every_wait() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.prefill.fake.pause();
    let short = Ask {
        remaining: Some(SHORT),
        ..ask(1)
    };
    let (failure, after) = rig.begin(&short).failure().await;
    assert_eq!(failure.reason, Reason::Deadline, "{failure}");
    assert!(after >= SHORT, "{after:?}");
    rig.prefill.fake.resume();
    rig.idle().await;
}

#[tokio::test]
async fn the_requests_own_time_ends_it_though_prefill_cannot_say_so() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.prefill.fake.pause();
    let short = Ask {
        remaining: Some(SHORT),
        ..ask(1)
    };
    let mut request = rig.begin(&short);
    request.reached(Phase::Prefill).await;
    rig.control.both(Rule::Freeze);
    let (failure, _) = request.failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::Deadline, Source::Decode),
        "{failure}"
    );
    rig.control.both(Rule::Pass);
    rig.prefill.fake.resume();
    rig.idle().await;
}

#[tokio::test]
async fn a_timer_that_is_shortened_counts_for_waits_that_run() {
    let setup = Setup::default();
    let rig = Relayed::start(&setup).await;
    rig.prefill.fake.pause();
    let mut request = rig.begin(&ask(1));
    request.reached(Phase::Prefill).await;
    rig.decode.timers.update(|t| t.progress = SHORT);
    let (failure, _) = request.failure().await;
    assert_eq!(failure.reason, Reason::Stalled, "{failure}");
    rig.prefill.fake.resume();
    rig.idle().await;
}

#[tokio::test]
async fn a_stuck_scheduler_is_ended_by_either_sides_watchdog_and_the_peer_is_told() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| t.watchdog = SHORT);
    for (of_prefill, of_decode, source) in [(&setup, &short, Source::Decode), (&short, &setup, Source::Prefill)] {
        let rig = Relayed::start_with(of_prefill, of_decode).await;
        rig.prefill.fake.pause();
        let (failure, after) = rig.begin(&ask(1)).failure().await;
        assert_eq!(
            (failure.reason, failure.source),
            (Reason::Deadline, source),
            "{failure}"
        );
        assert!(failure.detail.starts_with("watchdog"), "{failure}");
        assert!(after >= SHORT, "{after:?}");
        eventually("both sides have ended it", || {
            rig.prefill.source.live() == 0 && rig.decode.puller.live() == 0
        })
        .await;
        rig.prefill.fake.resume();
        rig.idle().await;
    }
}

/// Occupies the one worker of a runtime until dropped.
fn wedge(runtime: &Runtime) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel();
    let (begun, wedged) = mpsc::channel();
    runtime.spawn(async move {
        begun.send(()).unwrap();
        let _ = held.recv();
    });
    wedged.recv_timeout(Duration::from_secs(20)).unwrap();
    release
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watchdog_frees_pages_while_the_runtime_stands_still() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| t.watchdog = SHORT);
    let rig = Relayed::start_with(&short, &setup).await;
    rig.data.to_client(Rule::FreezeAfter(20_000));
    let request = rig.begin(&ask(1));
    eventually("the manifest is out", || rig.prefill.inflight("await_commit") == 1).await;
    let release = wedge(rig.prefill.runtime());
    assert!(rig.prefill.scheduler.cache().stats().held > 0);
    eventually("pages are free, without runtime and scheduler", || {
        rig.prefill.scheduler.cache().stats().held == 0 && rig.prefill.source.live() == 0
    })
    .await;
    assert_eq!(failures(&rig.prefill.metrics, "prefill", Reason::Deadline), 1);
    drop(release);
    let (failure, _) = request.failure().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::Deadline, Source::Prefill),
        "{failure}"
    );
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watchdog_ends_a_computation_while_the_runtime_stands_still() {
    let setup = Setup::default();
    let short = setup.clone().timers(|t| t.watchdog = SHORT);
    let rig = Relayed::start_with(&short, &setup).await;
    rig.prefill.fake.pause();
    let mut request = rig.begin(&ask(1));
    request.reached(Phase::Prefill).await;
    let release = wedge(rig.prefill.runtime());
    eventually("the watchdog has ended it", || rig.prefill.source.live() == 0).await;
    rig.prefill.fake.resume();
    eventually("the scheduler has let go of it", || {
        rig.prefill.scheduler.cache().stats().held == 0 && rig.prefill.scheduler.remaining() == 0
    })
    .await;
    drop(release);
    let (failure, _) = request.failure().await;
    assert_eq!(failure.reason, Reason::Deadline, "{failure}");
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_that_was_paused_takes_what_came_meanwhile() {
    let setup = Setup::default();
    let decode = setup.clone().timers(|t| t.stall = SHORT * 4);
    let rig = Relayed::start_with(&setup, &decode).await;
    rig.data.to_client(Rule::FreezeAfter(20_000));
    let decoding = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let ask = ask(1);
    let request = {
        let _on = decoding.enter();
        rig.begin(&ask)
    };
    eventually("the manifest is out", || rig.prefill.inflight("await_commit") == 1).await;
    let release = wedge(&decoding);
    rig.data.to_client(Rule::Pass);
    // as long as its timer, and more
    tokio::time::sleep(SHORT * 6).await;
    drop(release);
    let (answer, _) = request.end().await;
    assert_eq!(answer.unwrap().tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    rig.idle().await;
    decoding.shutdown_background();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_that_was_paused_hears_the_renewals_that_came_meanwhile() {
    let setup = Setup::default();
    let prefill = setup.clone().timers(|t| t.lease = SHORT * 2);
    let rig = Relayed::start_with(&prefill, &setup).await;
    rig.data.to_client(Rule::FreezeAfter(20_000));
    let ask = ask(1);
    let request = rig.begin(&ask);
    eventually("the manifest is out", || rig.prefill.inflight("await_commit") == 1).await;
    let release = wedge(rig.prefill.runtime());
    tokio::time::sleep(SHORT * 5).await;
    drop(release);
    rig.data.to_client(Rule::Pass);
    let (answer, _) = request.end().await;
    assert_eq!(answer.unwrap().tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    rig.idle().await;
}
