//! Places, pages and their release: who is told what, and what wakes whom.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tandem_engine::sched::{Admission, PrefillEvent, Role, SchedKnobs};
use tandem_wire::Reason;

use crate::support::fake::FakeConfig;
use crate::support::node::eventually;
use crate::support::sched::{
    PATIENCE, collect, collect_prefill, generate, params, prefill_params, prompt, start, until_idle,
};

/// One chunk fills the whole budget of a step.
fn one_at_a_time() -> SchedKnobs {
    SchedKnobs {
        chunked_prefill_tokens: 16,
        step_tokens: 16,
        ..SchedKnobs::default()
    }
}

#[tokio::test]
async fn a_prefill_with_a_place_but_no_tokens_yet_still_waits() {
    let knobs = SchedKnobs {
        queue_ms: 200,
        ..one_at_a_time()
    };
    let (scheduler, control) = start(&FakeConfig::default(), Role::Prefill, knobs);
    control.pause();
    let mut first = scheduler.prefill(prefill_params(&prompt(1, 64))).unwrap();
    control.wait_until_held();
    let mut second = scheduler.prefill(prefill_params(&prompt(2, 16))).unwrap();
    let mut third = scheduler.prefill(prefill_params(&prompt(3, 16))).unwrap();
    control.allow(1);
    control.wait_until_held();
    assert_eq!(scheduler.load_now().running, 3, "all have their places");
    assert!(matches!(second.recv().await, Some(PrefillEvent::Queued { .. })));
    assert!(matches!(third.recv().await, Some(PrefillEvent::Queued { .. })));
    let told = tokio::time::timeout(Duration::from_millis(20), second.recv()).await;
    assert!(told.is_err(), "told {told:?} before it got a token");
    // the wait for tokens is a wait in the queue, with the queue's limit
    let late = Instant::now() + Duration::from_millis(250);
    eventually("queue_ms", || Instant::now() > late).await;
    control.resume();
    for waiting in [&mut second, &mut third] {
        let events = collect_prefill(waiting).await;
        let Some(PrefillEvent::Failed(failure)) = events.last() else {
            panic!("{events:?}");
        };
        assert_eq!(failure.reason, Reason::NoCapacity, "{failure}");
        assert!(failure.detail.contains("queue_ms"), "{failure}");
    }
    let events = collect_prefill(&mut first).await;
    assert!(events.iter().any(|e| matches!(e, PrefillEvent::Started { .. })));
    assert!(matches!(events.last(), Some(PrefillEvent::Done { .. })));
    drop((events, first));
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_prefill_that_waits_for_pages_costs_no_core_and_no_place() {
    let config = FakeConfig {
        total_pages: 8,
        ..FakeConfig::default()
    };
    let knobs = SchedKnobs {
        max_running: 1,
        ..SchedKnobs::default()
    };
    let (scheduler, _control) = start(&config, Role::Unified, knobs);
    let mut holder = scheduler.prefill(prefill_params(&prompt(1, 50))).unwrap();
    let held = collect_prefill(&mut holder).await;
    let mut waiting = scheduler.prefill(prefill_params(&prompt(2, 40))).unwrap();
    let before = scheduler.metrics().passes();
    let watched = Instant::now();
    let mut refused = 0;
    while watched.elapsed() < Duration::from_millis(300) {
        // the only place is free, and one page as well
        let admission = Admission {
            prompt: prompt(3, 4),
            max_new_tokens: 1,
            pulled: false,
        };
        refused += u32::from(scheduler.admit(&admission).is_err());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(refused, 0, "a prefill that only waits took the place");
    // each of the loop's own requests above wakes it once or twice
    let passes = scheduler.metrics().passes() - before;
    assert!(passes < 1_500, "{passes} passes in 300 ms");
    // and left alone it looks twice a second
    let before = scheduler.metrics().passes();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let passes = scheduler.metrics().passes() - before;
    assert!(passes < 20, "{passes} passes in 200 ms of waiting");
    drop((held, holder));
    assert!(matches!(
        collect_prefill(&mut waiting).await.last(),
        Some(PrefillEvent::Done { .. })
    ));
    drop(waiting);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_prefill_that_waits_for_a_place_costs_no_core() {
    let knobs = SchedKnobs {
        max_running: 1,
        ..SchedKnobs::default()
    };
    let (scheduler, _control) = start(&FakeConfig::default(), Role::Unified, knobs);
    let admission = Admission {
        prompt: prompt(1, 30),
        max_new_tokens: 9,
        pulled: true,
    };
    let held = scheduler.admit(&admission).unwrap();
    let mut waiting = scheduler.prefill(prefill_params(&prompt(2, 40))).unwrap();
    let before = scheduler.metrics().passes();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let passes = scheduler.metrics().passes() - before;
    assert!(passes < 20, "{passes} passes in 200 ms of waiting");
    drop(held);
    assert!(matches!(
        collect_prefill(&mut waiting).await.last(),
        Some(PrefillEvent::Done { .. })
    ));
    drop(waiting);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_finished_prefill_is_not_over_before_its_reader_let_go_of_it() {
    for max_new_tokens in [16, 1] {
        let (scheduler, control) = start(&FakeConfig::default(), Role::Prefill, SchedKnobs::default());
        control.pause();
        let given = tandem_engine::sched::PrefillParams {
            max_new_tokens,
            ..prefill_params(&prompt(1, 20))
        };
        let mut stream = scheduler.prefill(given).unwrap();
        control.wait_until_held();
        // looks at it without pause, as a drain might
        let (gone, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let looker = std::thread::spawn({
            let (scheduler, gone, seen) = (scheduler.clone(), Arc::clone(&gone), Arc::clone(&seen));
            move || {
                while !gone.load(Ordering::Acquire) {
                    if scheduler.remaining() == 0 && !gone.load(Ordering::Acquire) {
                        seen.store(true, Ordering::Release);
                    }
                }
            }
        });
        control.resume();
        let mut load = scheduler.load();
        tokio::time::timeout(PATIENCE, load.wait_for(|l| l.running == 0))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(scheduler.remaining(), 1, "nobody has read it yet");
        let events = collect_prefill(&mut stream).await;
        assert_eq!(scheduler.remaining(), 1, "its reader holds it");
        gone.store(true, Ordering::Release);
        looker.join().unwrap();
        assert!(!seen.load(Ordering::Acquire), "for a moment nothing was left");
        drop((events, stream));
        until_idle(&scheduler).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_last_hand_off_wakes_whoever_drains() {
    let (scheduler, _control) = start(&FakeConfig::default(), Role::Prefill, SchedKnobs::default());
    let looking = Arc::new(AtomicBool::new(true));
    let looker = std::thread::spawn({
        let (scheduler, looking) = (scheduler.clone(), Arc::clone(&looking));
        move || {
            while looking.load(Ordering::Acquire) {
                scheduler.load_now();
            }
        }
    });
    for round in 0..400 {
        let mut stream = scheduler.prefill(prefill_params(&prompt(round, 9))).unwrap();
        let events = collect_prefill(&mut stream).await;
        let mut load = scheduler.load();
        load.borrow_and_update();
        let dropper = std::thread::spawn(move || drop((events, stream)));
        let drained = async {
            loop {
                load.borrow_and_update();
                if scheduler.remaining() == 0 {
                    return;
                }
                load.changed().await.unwrap();
            }
        };
        let woken = tokio::time::timeout(Duration::from_secs(5), drained).await;
        looking.store(woken.is_ok(), Ordering::Release);
        assert!(woken.is_ok(), "round {round}: nobody woke it");
        dropper.join().unwrap();
    }
    looking.store(false, Ordering::Release);
    looker.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduler_that_ends_tells_every_request_that_it_drains() {
    for round in 0..20 {
        let knobs = SchedKnobs {
            max_running: 32,
            ..SchedKnobs::default()
        };
        let (scheduler, control) = start(&FakeConfig::default(), Role::Unified, knobs);
        control.step_delay(Duration::from_millis(1));
        let streams: Vec<_> = (0..30)
            .map(|i| tokio::spawn(collect(generate(&scheduler, &prompt(i, 20), params(30)).unwrap())))
            .collect();
        scheduler.shut_down();
        for stream in streams {
            let failure = stream.await.unwrap().unwrap_err();
            assert_eq!(failure.reason, Reason::Draining, "round {round}: {failure}");
        }
    }
}

#[test]
fn a_step_that_hangs_does_not_hold_whoever_drops_the_scheduler() {
    // given up by its watchdog, or told to end while it hangs
    for given_up in [true, false] {
        let (scheduler, control) = start(&FakeConfig::default(), Role::Unified, SchedKnobs::default());
        control.pause();
        let stream = generate(&scheduler, &prompt(1, 20), params(9)).unwrap();
        control.wait_until_held();
        if given_up {
            scheduler.give_up("planted");
        }
        let began = Instant::now();
        drop(scheduler);
        let limit = Duration::from_secs(if given_up { 1 } else { 15 });
        assert!(began.elapsed() < limit, "it held for {:?}", began.elapsed());
        control.resume();
        drop(stream);
    }
}
