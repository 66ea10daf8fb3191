//! The scheduler over the deterministic executor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_engine::exec::{KvRun, SampleParams};
use tandem_engine::sched::{
    Admission, Cause, First, GenParams, Health, PrefillEvent, Role, SchedKnobs, SeqEvent, StartError,
};
use tandem_wire::{Reason, Source};

use crate::support::fake::{END_TOKEN, FakeConfig, FakeExecutor, mix, solo};
use crate::support::node::eventually;
use crate::support::sched::{
    GREEDY, PATIENCE, collect, collect_prefill, generate, params, prefill_params, prompt, start, until_idle,
};

fn lone(token: u32) -> First {
    First { token, logprob: None }
}

#[tokio::test]
async fn how_a_prompt_is_cut_into_chunks_does_not_change_its_tokens() {
    let config = FakeConfig::default();
    let prompt = prompt(1, 190);
    let expected = solo(&config, &prompt, 20, GREEDY);
    for chunk in [1, 7, 64, 512] {
        let knobs = SchedKnobs {
            chunked_prefill_tokens: chunk,
            step_tokens: 512,
            ..SchedKnobs::default()
        };
        let (scheduler, control) = start(&config, Role::Unified, knobs);
        let (tokens, finish) = collect(generate(&scheduler, &prompt, params(20)).unwrap())
            .await
            .unwrap();
        assert_eq!(tokens, expected, "chunks of {chunk}");
        assert_eq!((finish.cause, finish.completion_tokens), (Cause::Length, 20));
        assert_eq!((finish.computed_tokens, finish.cached_tokens), (190, 0));
        assert_eq!(control.steps(), 190_u64.div_ceil(chunk.into()) + 19);
        until_idle(&scheduler).await;
    }
}

#[tokio::test]
async fn a_prefix_hit_gives_the_tokens_of_a_miss_and_computes_only_the_rest() {
    let config = FakeConfig::default();
    let (scheduler, _control) = start(&config, Role::Unified, SchedKnobs::default());
    let prompt = prompt(2, 100);
    let (cold, _) = collect(generate(&scheduler, &prompt, params(30)).unwrap())
        .await
        .unwrap();
    let (warm, finish) = collect(generate(&scheduler, &prompt, params(30)).unwrap())
        .await
        .unwrap();
    assert_eq!(cold, solo(&config, &prompt, 30, GREEDY));
    assert_eq!(warm, cold);
    assert_eq!((finish.cached_tokens, finish.computed_tokens), (96, 4));
    // the answer is cached too: the next turn of a chat finds prompt and answer
    let next: Arc<[u32]> = prompt.iter().chain(&cold).copied().chain(50..60).collect();
    let (tokens, finish) = collect(generate(&scheduler, &next, params(5)).unwrap()).await.unwrap();
    assert_eq!(tokens, solo(&config, &next, 5, GREEDY));
    assert_eq!(finish.cached_tokens, 128);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn neighbours_and_aborts_do_not_change_a_requests_tokens() {
    let config = FakeConfig {
        total_pages: 700,
        ..FakeConfig::default()
    };
    let knobs = SchedKnobs {
        chunked_prefill_tokens: 23,
        step_tokens: 61,
        ..SchedKnobs::default()
    };
    let (scheduler, _control) = start(&config, Role::Unified, knobs);
    for round in 0..3 {
        let mut tasks = Vec::new();
        for i in 0..32_u64 {
            let r = mix(round * 100 + i);
            // some share a prefix, cold and warm
            let mut tokens = prompt((r % 5) as u32, 40).to_vec();
            tokens.extend_from_slice(&prompt(i as u32 + 50, (r >> 8) as usize % 60));
            let tokens: Arc<[u32]> = tokens.into();
            let new = 1 + (r >> 16) as u32 % 60;
            let sampling = SampleParams {
                temperature: if r.is_multiple_of(3) { 0.8 } else { 0.0 },
                seed: r,
                ..GREEDY
            };
            let gather = r.is_multiple_of(2);
            let abort_after = (r % 4 == 1).then_some((r >> 24) as usize % 40);
            let scheduler = scheduler.clone();
            let config = config.clone();
            tasks.push(tokio::spawn(async move {
                let given = GenParams {
                    sampling: sampling.into(),
                    gather,
                    ..params(new)
                };
                let mut stream = generate(&scheduler, &tokens, given).unwrap();
                let expected = solo(&config, &tokens, new as usize, sampling);
                if let Some(after) = abort_after {
                    let mut seen = Vec::new();
                    while seen.len() < after {
                        match stream.recv().await.unwrap() {
                            SeqEvent::Tokens { ids: more, .. } => seen.extend(more),
                            SeqEvent::Finished(_) => break,
                            SeqEvent::Failed(failure) => panic!("{failure}"),
                        }
                    }
                    assert_eq!(seen[..], expected[..seen.len()]);
                } else {
                    assert_eq!(collect(stream).await.unwrap().0, expected, "request {i}");
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn what_was_prefilled_elsewhere_goes_on_as_if_it_had_been_computed_here() {
    let config = FakeConfig::default();
    let (prefill, _p) = start(&config, Role::Prefill, SchedKnobs::default());
    // another page size on this side
    let decode_config = FakeConfig {
        page_tokens: 16,
        total_pages: 64,
        ..config.clone()
    };
    let (decode, control) = start(&decode_config, Role::Decode, SchedKnobs::default());
    let prompt = prompt(3, 130);
    let expected = solo(&config, &prompt, 12, GREEDY);

    let mut stream = prefill.prefill(prefill_params(&prompt)).unwrap();
    let events = collect_prefill(&mut stream).await;
    assert!(
        events
            .iter()
            .any(|e| matches!(e, PrefillEvent::Started { cached_tokens: 0 }))
    );
    let Some(PrefillEvent::Done {
        first_token,
        ends,
        pages,
        computed_tokens,
        ..
    }) = events.last()
    else {
        panic!("{events:?}");
    };
    assert_eq!((*first_token, *ends, *computed_tokens), (expected[0], None, 130));
    assert_eq!(
        prefill.load_now().running,
        0,
        "a place is free as soon as the prefill is done"
    );

    let admitted = decode
        .admit(&Admission {
            prompt: Arc::clone(&prompt),
            max_new_tokens: 12,
            pulled: true,
        })
        .unwrap();
    assert_eq!(decode.load_now().transferring, 1);
    for layer in 0..prefill.spec().layout.layers {
        for component in 0..2 {
            let run = KvRun {
                layer,
                component,
                first_token: 0,
                tokens: 130,
            };
            let mut bytes = vec![0; 130 * 32];
            prefill.kv().read(pages.pages(), run, &mut bytes).unwrap();
            decode.kv().write(admitted.pages.pages(), run, &bytes).unwrap();
        }
    }
    let given = GenParams {
        first: Some(lone(*first_token)),
        computed: 130,
        ..params(12)
    };
    let (tokens, finish) = collect(decode.generate(admitted, given)).await.unwrap();
    assert_eq!(tokens, expected);
    assert_eq!((finish.computed_tokens, finish.completion_tokens), (0, 12));
    assert_eq!(control.steps(), 11, "decode computes no prompt token");

    // and what was pulled is in decode's own cache now, whole prompt included
    let again = decode
        .admit(&Admission {
            prompt: prompt[..128].into(),
            max_new_tokens: 1,
            pulled: true,
        })
        .unwrap();
    assert_eq!(again.pages.cached_tokens(), 128);
    drop((again, events, stream));
    until_idle(&prefill).await;
    until_idle(&decode).await;
}

#[tokio::test]
async fn a_prefill_beyond_the_queues_bound_is_refused_at_once_and_places_move_up() {
    let config = FakeConfig::default();
    let knobs = SchedKnobs {
        max_running: 1,
        prefill_queue: 2,
        ..SchedKnobs::default()
    };
    let (scheduler, control) = start(&config, Role::Prefill, knobs);
    control.pause();
    let mut first = scheduler.prefill(prefill_params(&prompt(1, 20))).unwrap();
    control.wait_until_held();
    let mut second = scheduler.prefill(prefill_params(&prompt(2, 20))).unwrap();
    let mut third = scheduler.prefill(prefill_params(&prompt(3, 20))).unwrap();
    let refused = scheduler.prefill(prefill_params(&prompt(4, 20))).unwrap_err();
    assert_eq!((refused.reason, refused.source), (Reason::NoCapacity, Source::Prefill));
    assert!(refused.detail.contains("prefill_queue allows 2"), "{refused}");
    assert!(matches!(third.recv().await, Some(PrefillEvent::Queued { ahead: 1 })));
    let load = scheduler.load_now();
    assert_eq!((load.running, load.waiting, load.waiting_tokens), (1, 2, 60));
    control.allow(1);
    assert!(matches!(
        collect_prefill(&mut first).await.last(),
        Some(PrefillEvent::Done { .. })
    ));
    // the second now runs and is held in its step, so the third has nobody before it
    assert!(matches!(third.recv().await, Some(PrefillEvent::Queued { ahead: 0 })));
    control.resume();
    for stream in [&mut second, &mut third] {
        let events = collect_prefill(stream).await;
        assert!(matches!(events.last(), Some(PrefillEvent::Done { .. })), "{events:?}");
    }
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_queued_prefill_gives_up_after_queue_ms_although_nothing_new_comes() {
    let config = FakeConfig {
        total_pages: 8,
        ..FakeConfig::default()
    };
    let knobs = SchedKnobs {
        queue_ms: 60,
        ..SchedKnobs::default()
    };
    let (scheduler, _control) = start(&config, Role::Prefill, knobs);
    let mut holder = scheduler.prefill(prefill_params(&prompt(1, 50))).unwrap();
    let held = collect_prefill(&mut holder).await;
    // finished prefills hold their pages until they are copied, so these two wait for pages
    let mut late = scheduler.prefill(prefill_params(&prompt(2, 40))).unwrap();
    let mut later = scheduler
        .prefill(tandem_engine::sched::PrefillParams {
            deadline: Some(Instant::now() + Duration::from_millis(5)),
            ..prefill_params(&prompt(3, 40))
        })
        .unwrap();
    let failure = |events: Vec<PrefillEvent>| match events.last() {
        Some(PrefillEvent::Failed(failure)) => failure.clone(),
        other => panic!("{other:?}"),
    };
    let own = failure(collect_prefill(&mut later).await);
    assert_eq!(own.reason, Reason::Deadline, "{own}");
    let queue = failure(collect_prefill(&mut late).await);
    assert_eq!(queue.reason, Reason::NoCapacity, "{queue}");
    assert!(queue.detail.contains("queue_ms"), "{queue}");
    drop((held, holder));
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_prefill_that_waits_for_pages_starts_when_they_are_released_and_nobody_overtakes_it() {
    let config = FakeConfig {
        total_pages: 8,
        ..FakeConfig::default()
    };
    let (scheduler, _control) = start(&config, Role::Prefill, SchedKnobs::default());
    let mut holder = scheduler.prefill(prefill_params(&prompt(1, 50))).unwrap();
    let held = collect_prefill(&mut holder).await;
    let mut large = scheduler.prefill(prefill_params(&prompt(2, 60))).unwrap();
    let mut small = scheduler.prefill(prefill_params(&prompt(3, 8))).unwrap();
    assert!(matches!(large.recv().await, Some(PrefillEvent::Queued { ahead: 0 })));
    assert!(matches!(small.recv().await, Some(PrefillEvent::Queued { ahead: 1 })));
    // the loop has looked at both, and one page is free
    let submitted = Instant::now();
    eventually("the loop looks", || scheduler.load_now().last_step > submitted).await;
    assert_eq!(scheduler.load_now().waiting, 2);
    drop((held, holder));
    let large_events = collect_prefill(&mut large).await;
    assert!(matches!(large_events.last(), Some(PrefillEvent::Done { .. })));
    drop((large_events, large));
    assert!(matches!(
        collect_prefill(&mut small).await.last(),
        Some(PrefillEvent::Done { .. })
    ));
    drop(small);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn an_abort_at_any_stage_frees_everything() {
    let config = FakeConfig {
        total_pages: 64,
        ..FakeConfig::default()
    };
    let knobs = SchedKnobs {
        chunked_prefill_tokens: 16,
        max_running: 2,
        ..SchedKnobs::default()
    };
    let (scheduler, control) = start(&config, Role::Unified, knobs);

    // admitted, never started
    let admission = Admission {
        prompt: prompt(1, 30),
        max_new_tokens: 9,
        pulled: true,
    };
    drop(scheduler.admit(&admission).unwrap());
    until_idle(&scheduler).await;

    // within a chunk, and between two
    for steps in [0, 1] {
        control.pause();
        let stream = generate(&scheduler, &prompt(2, 60), params(9)).unwrap();
        control.wait_until_held();
        control.allow(steps);
        drop(stream);
        control.resume();
        until_idle(&scheduler).await;
    }

    // while decoding
    let mut stream = generate(&scheduler, &prompt(3, 60), params(400)).unwrap();
    assert!(matches!(stream.recv().await, Some(SeqEvent::Tokens { .. })));
    control.pause();
    control.wait_until_held();
    let steps = control.steps();
    drop(stream);
    control.resume();
    until_idle(&scheduler).await;
    assert!(
        control.steps() <= steps + 1,
        "it ran on for {} steps",
        control.steps() - steps
    );

    // a prefill: queued, running, done but never read; by its reader or by its aborter
    control.pause();
    let running = scheduler.prefill(prefill_params(&prompt(4, 60))).unwrap();
    let also = scheduler.prefill(prefill_params(&prompt(5, 60))).unwrap();
    control.wait_until_held();
    let queued = scheduler.prefill(prefill_params(&prompt(6, 60))).unwrap();
    let mut watched = scheduler.prefill(prefill_params(&prompt(7, 60))).unwrap();
    drop(watched.aborter());
    assert!(
        watched
            .recv()
            .await
            .is_none_or(|e| matches!(e, PrefillEvent::Queued { .. }))
    );
    drop((running, queued));
    control.resume();
    let aborter = also.aborter();
    let mut load = scheduler.load();
    tokio::time::timeout(PATIENCE, load.wait_for(|l| l.running == 0))
        .await
        .unwrap()
        .unwrap();
    drop(aborter);
    until_idle(&scheduler).await;
    drop(also);
}

#[tokio::test]
async fn no_place_or_no_pages_is_an_answer_at_once() {
    let config = FakeConfig {
        total_pages: 16,
        ..FakeConfig::default()
    };
    let knobs = SchedKnobs {
        max_running: 2,
        ..SchedKnobs::default()
    };
    let (scheduler, control) = start(&config, Role::Decode, knobs);
    control.pause();
    // 100 + 20 tokens grow into 15 of 16 pages
    let large = generate(&scheduler, &prompt(1, 100), params(20)).unwrap();
    let pages = generate(&scheduler, &prompt(2, 8), params(9)).unwrap_err();
    assert_eq!(pages.reason, Reason::NoCapacity);
    assert!(pages.detail.contains("2 pages needed, 1 of 16 available"), "{pages}");
    let small = generate(&scheduler, &prompt(3, 3), params(2)).unwrap();
    let place = generate(&scheduler, &prompt(4, 3), params(2)).unwrap_err();
    assert_eq!(place.reason, Reason::NoCapacity);
    assert!(place.detail.contains("2 of 2 places"), "{place}");
    control.resume();
    collect(large).await.unwrap();
    collect(small).await.unwrap();
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_capacity_that_a_finished_answer_freed_can_be_had_at_once() {
    let config = FakeConfig {
        total_pages: 4,
        ..FakeConfig::default()
    };
    let knobs = SchedKnobs {
        max_running: 1,
        ..SchedKnobs::default()
    };
    let (scheduler, _control) = start(&config, Role::Unified, knobs);
    for i in 0..300 {
        collect(generate(&scheduler, &prompt(i, 20), params(4)).unwrap())
            .await
            .unwrap();
    }
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_request_ends_at_its_deadline_and_gives_everything_back() {
    let (scheduler, control) = start(&FakeConfig::default(), Role::Unified, SchedKnobs::default());
    control.step_delay(Duration::from_millis(2));
    let given = GenParams {
        deadline: Some(Instant::now() + Duration::from_millis(60)),
        ..params(900)
    };
    let failure = collect(generate(&scheduler, &prompt(1, 50), given).unwrap())
        .await
        .unwrap_err();
    assert_eq!((failure.reason, failure.source), (Reason::Deadline, Source::Decode));
    assert!(failure.detail.contains("50 of 50 prompt tokens"), "{failure}");
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn logits_that_are_not_finite_fail_their_request_alone_and_are_not_cached() {
    let config = FakeConfig::default();
    let (scheduler, control) = start(&config, Role::Unified, SchedKnobs::default());
    let (bad, good) = (prompt(1, 64), prompt(2, 64));
    control.not_finite_after(bad[63]);
    assert!(!good.contains(&bad[63]));
    let bad_stream = generate(&scheduler, &bad, params(9)).unwrap();
    let good_stream = generate(&scheduler, &good, params(9)).unwrap();
    let failure = collect(bad_stream).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Internal);
    assert!(failure.detail.contains("after token 64"), "{failure}");
    assert_eq!(collect(good_stream).await.unwrap().0, solo(&config, &good, 9, GREEDY));
    let admission = Admission {
        prompt: bad,
        max_new_tokens: 1,
        pulled: true,
    };
    assert_eq!(
        scheduler.admit(&admission).unwrap().pages.cached_tokens(),
        0,
        "poisoned KV was cached"
    );
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_step_that_fails_takes_its_own_requests_with_it_and_no_other() {
    let config = FakeConfig::default();
    let (scheduler, control) = start(&config, Role::Unified, SchedKnobs::default());
    control.fail_next("planted");
    let failure = collect(generate(&scheduler, &prompt(1, 20), params(9)).unwrap())
        .await
        .unwrap_err();
    assert_eq!(failure.reason, Reason::Internal);
    assert!(failure.detail.contains("planted"), "{failure}");
    let (tokens, _) = collect(generate(&scheduler, &prompt(1, 20), params(9)).unwrap())
        .await
        .unwrap();
    assert_eq!(tokens, solo(&config, &prompt(1, 20), 9, GREEDY));
    assert_eq!(*scheduler.health().borrow(), Health::Alive);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_panic_in_a_step_fails_everything_and_is_seen_from_outside() {
    let knobs = SchedKnobs {
        max_running: 2,
        ..SchedKnobs::default()
    };
    let (scheduler, control) = start(&FakeConfig::default(), Role::Unified, knobs);
    control.pause();
    let one = generate(&scheduler, &prompt(1, 20), params(9)).unwrap();
    let two = generate(&scheduler, &prompt(2, 20), params(9)).unwrap();
    let mut queued = scheduler.prefill(prefill_params(&prompt(3, 20))).unwrap();
    control.wait_until_held();
    control.panic_next();
    control.resume();
    for stream in [one, two] {
        let failure = collect(stream).await.unwrap_err();
        assert_eq!(failure.reason, Reason::Internal);
        assert!(failure.detail.contains("planted panic"), "{failure}");
    }
    let events = collect_prefill(&mut queued).await;
    assert!(matches!(events.last(), Some(PrefillEvent::Failed(f)) if f.reason == Reason::Internal));
    let mut health = scheduler.health();
    let dead = tokio::time::timeout(PATIENCE, health.wait_for(|h| *h != Health::Alive)).await;
    assert!(matches!(&*dead.unwrap().unwrap(), Health::Dead(why) if why.contains("planted panic")));
    let refused = generate(&scheduler, &prompt(4, 20), params(9)).unwrap_err();
    assert_eq!(refused.reason, Reason::Internal);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_step_that_hangs_is_seen_and_its_requests_can_be_told() {
    let (scheduler, control) = start(&FakeConfig::default(), Role::Unified, SchedKnobs::default());
    assert_eq!(scheduler.beat(), None);
    control.pause();
    let stream = generate(&scheduler, &prompt(1, 20), params(9)).unwrap();
    control.wait_until_held();
    let beat = scheduler.beat();
    assert!(beat.is_some());
    control.allow(1);
    control.wait_until_held();
    assert_ne!(scheduler.beat(), beat, "each layer shows");
    scheduler.give_up("a step shows no sign of life");
    let failure = collect(stream).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Internal);
    assert!(failure.detail.contains("no sign of life"), "{failure}");
    assert_eq!(
        generate(&scheduler, &prompt(2, 20), params(9)).unwrap_err().reason,
        Reason::Internal
    );
    control.resume();
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn what_can_never_run_is_refused_with_the_field_and_the_lengths() {
    let config = FakeConfig {
        total_pages: 8,
        ..FakeConfig::default()
    };
    let (scheduler, _control) = start(&config, Role::Unified, SchedKnobs::default());
    assert_eq!(scheduler.spec().max_length_tokens, 64, "no longer than the pool holds");
    let refused = |tokens: &[u32], new| {
        let failure = generate(&scheduler, &tokens.into(), params(new)).unwrap_err();
        (failure.reason, failure.detail)
    };
    let (reason, detail) = refused(&prompt(1, 60), 5);
    assert_eq!(reason, Reason::OverLength);
    assert!(detail.contains("60 tokens") && detail.contains("64 tokens"), "{detail}");
    for (tokens, new, named) in [
        (&[][..], 1, "prompt_tokens"),
        (&[5], 0, "max_new_tokens"),
        (&[5, 2_048], 1, "prompt_tokens[1]"),
    ] {
        let (reason, detail) = refused(tokens, new);
        assert_eq!(reason, Reason::Invalid);
        assert!(detail.contains(named), "{detail}");
    }
    let prefill = scheduler.prefill(prefill_params(&prompt(1, 64))).unwrap_err();
    assert_eq!(prefill.reason, Reason::OverLength);
    // exactly as long as can be
    let (tokens, _) = collect(generate(&scheduler, &prompt(1, 60), params(4)).unwrap())
        .await
        .unwrap();
    assert_eq!(tokens.len(), 4);
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn draining_refuses_what_is_new_and_finishes_what_is_old() {
    let config = FakeConfig::default();
    let (scheduler, control) = start(&config, Role::Unified, SchedKnobs::default());
    control.pause();
    let old = generate(&scheduler, &prompt(1, 20), params(9)).unwrap();
    let mut queued = scheduler.prefill(prefill_params(&prompt(2, 20))).unwrap();
    scheduler.drain();
    assert!(scheduler.load_now().draining);
    assert_eq!(
        generate(&scheduler, &prompt(3, 20), params(9)).unwrap_err().reason,
        Reason::Draining
    );
    assert_eq!(
        scheduler.prefill(prefill_params(&prompt(4, 20))).unwrap_err().reason,
        Reason::Draining
    );
    assert_eq!(scheduler.remaining(), 2);
    control.resume();
    assert_eq!(collect(old).await.unwrap().0, solo(&config, &prompt(1, 20), 9, GREEDY));
    assert!(matches!(
        collect_prefill(&mut queued).await.last(),
        Some(PrefillEvent::Done { .. })
    ));
    until_idle(&scheduler).await;
    scheduler.set_draining(false);
    collect(generate(&scheduler, &prompt(5, 20), params(9)).unwrap())
        .await
        .unwrap();
}

#[tokio::test]
async fn knobs_change_between_steps_and_are_checked_by_name() {
    let config = FakeConfig::default();
    let knobs = SchedKnobs {
        chunked_prefill_tokens: 100,
        step_tokens: 200,
        ..SchedKnobs::default()
    };
    let (scheduler, control) = start(&config, Role::Unified, knobs);
    collect(generate(&scheduler, &prompt(1, 150), params(2)).unwrap())
        .await
        .unwrap();
    assert_eq!(control.widest().0, 100);
    let changed = SchedKnobs {
        chunked_prefill_tokens: 300,
        step_tokens: 120,
        max_running: 1,
        ..knobs
    };
    scheduler.set_knobs(changed).unwrap();
    assert_eq!(scheduler.knobs(), changed);
    collect(generate(&scheduler, &prompt(2, 150), params(2)).unwrap())
        .await
        .unwrap();
    assert_eq!(control.widest().0, 120);
    let one = generate(&scheduler, &prompt(3, 150), params(300)).unwrap();
    assert!(generate(&scheduler, &prompt(4, 150), params(2)).is_err());
    drop(one);
    until_idle(&scheduler).await;
    scheduler
        .set_knobs(SchedKnobs {
            prefix_cache: false,
            ..changed
        })
        .unwrap();
    for _ in 0..2 {
        let (_, finish) = collect(generate(&scheduler, &prompt(1, 150), params(2)).unwrap())
            .await
            .unwrap();
        assert_eq!(finish.cached_tokens, 0);
    }
    for (bad, name) in [
        (
            SchedKnobs {
                chunked_prefill_tokens: 0,
                ..knobs
            },
            "chunked_prefill_tokens",
        ),
        (
            SchedKnobs {
                step_tokens: 1,
                ..knobs
            },
            "step_tokens",
        ),
        (
            SchedKnobs {
                step_tokens: 513,
                ..knobs
            },
            "step_tokens",
        ),
        (
            SchedKnobs {
                max_running: 33,
                ..knobs
            },
            "max_running",
        ),
        (
            SchedKnobs {
                prefill_queue: 0,
                ..knobs
            },
            "prefill_queue",
        ),
        (SchedKnobs { queue_ms: 0, ..knobs }, "queue_ms"),
    ] {
        assert_eq!(scheduler.set_knobs(bad).unwrap_err().name, name);
        let (executor, _) = FakeExecutor::new(&config);
        let refused = tandem_engine::sched::Scheduler::start(Box::new(executor), Role::Unified, bad);
        assert!(matches!(refused, Err(StartError::Knob(k)) if k.name == name));
    }
    assert!(!scheduler.knobs().prefix_cache, "a refused change changes nothing");
}

#[tokio::test]
async fn an_answer_ends_at_a_stop_token_an_end_token_or_its_length() {
    let config = FakeConfig::default();
    let (scheduler, _control) = start(&config, Role::Unified, SchedKnobs::default());
    let tokens = solo(&config, &prompt(1, 20), 30, GREEDY);
    let given = GenParams {
        stop_token_ids: vec![7, tokens[12]],
        ..params(30)
    };
    let (got, finish) = collect(generate(&scheduler, &prompt(1, 20), given).unwrap())
        .await
        .unwrap();
    assert_eq!(
        (&got[..], finish.cause, finish.completion_tokens),
        (&tokens[..12], Cause::Stop, 12)
    );

    // a prompt whose greedy run meets the model's end token
    let (ending, at) = (0..4_000)
        .find_map(|i| {
            let tokens = solo(&config, &prompt(i, 5), 8, GREEDY);
            let at = tokens.iter().position(|t| *t == END_TOKEN)?;
            (at > 0).then_some((prompt(i, 5), at))
        })
        .expect("some prompt ends");
    let ended = GenParams {
        ignore_eos: false,
        ..params(8)
    };
    let (got, finish) = collect(generate(&scheduler, &ending, ended).unwrap()).await.unwrap();
    assert_eq!((got.len(), finish.cause), (at, Cause::Stop));
    let (got, finish) = collect(generate(&scheduler, &ending, params(8)).unwrap())
        .await
        .unwrap();
    assert_eq!((got.len(), finish.cause), (8, Cause::Length));

    // a prefill says when its first token already ends the request
    let first = solo(&config, &prompt(2, 20), 1, GREEDY)[0];
    for (max_new_tokens, stop, expected) in [
        (1, vec![], Some(Cause::Length)),
        (5, vec![first], Some(Cause::Stop)),
        (5, vec![], None),
    ] {
        let given = tandem_engine::sched::PrefillParams {
            max_new_tokens,
            stop_token_ids: stop.clone(),
            ..prefill_params(&prompt(2, 20))
        };
        let events = collect_prefill(&mut scheduler.prefill(given).unwrap()).await;
        assert!(matches!(events.last(), Some(PrefillEvent::Done { ends, .. }) if *ends == expected));
        // and decode agrees
        let admission = Admission {
            prompt: prompt(2, 20),
            max_new_tokens,
            pulled: true,
        };
        let given = GenParams {
            stop_token_ids: stop,
            first: Some(lone(first)),
            computed: 20,
            ..params(max_new_tokens)
        };
        if expected.is_some() {
            let (got, finish) = collect(scheduler.generate(scheduler.admit(&admission).unwrap(), given))
                .await
                .unwrap();
            assert_eq!(Some(finish.cause), expected);
            assert_eq!(got.len(), usize::from(expected == Some(Cause::Length)));
        }
    }
    until_idle(&scheduler).await;
}

#[tokio::test]
async fn a_reader_that_does_not_read_delays_nobody_and_loses_nothing() {
    let config = FakeConfig::default();
    let (scheduler, _control) = start(&config, Role::Unified, SchedKnobs::default());
    let slow = generate(&scheduler, &prompt(1, 20), params(200)).unwrap();
    for i in 2..6 {
        let (tokens, _) = collect(generate(&scheduler, &prompt(i, 20), params(100)).unwrap())
            .await
            .unwrap();
        assert_eq!(tokens, solo(&config, &prompt(i, 20), 100, GREEDY));
    }
    let mut load = scheduler.load();
    tokio::time::timeout(PATIENCE, load.wait_for(|l| l.running == 0))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        collect(slow).await.unwrap().0,
        solo(&config, &prompt(1, 20), 200, GREEDY)
    );
}

#[tokio::test]
async fn gathered_tokens_come_in_few_events() {
    let config = FakeConfig::default();
    let (scheduler, control) = start(&config, Role::Unified, SchedKnobs::default());
    control.step_delay(Duration::from_micros(200));
    let mut stream = generate(
        &scheduler,
        &prompt(1, 20),
        GenParams {
            gather: true,
            ..params(300)
        },
    )
    .unwrap();
    let (mut events, mut tokens) = (0, Vec::new());
    while let Some(event) = stream.recv().await {
        match event {
            SeqEvent::Tokens { ids: more, .. } => {
                events += 1;
                tokens.extend(more);
            }
            SeqEvent::Finished(_) => {}
            SeqEvent::Failed(failure) => panic!("{failure}"),
        }
    }
    assert_eq!(tokens, solo(&config, &prompt(1, 20), 300, GREEDY));
    assert!(events <= 3, "{events} events");
}

#[tokio::test]
async fn progress_of_a_prefill_is_told_per_chunk_and_layer() {
    let config = FakeConfig::default();
    let knobs = SchedKnobs {
        chunked_prefill_tokens: 16,
        ..SchedKnobs::default()
    };
    let (scheduler, control) = start(&config, Role::Prefill, knobs);
    control.layer_delay(Duration::from_millis(4));
    let mut stream = scheduler.prefill(prefill_params(&prompt(1, 48))).unwrap();
    let progress: Vec<_> = collect_prefill(&mut stream)
        .await
        .into_iter()
        .filter_map(|e| match e {
            PrefillEvent::Progress {
                computed_tokens,
                layer,
                chunk,
            } => Some((chunk, computed_tokens, layer)),
            _ => None,
        })
        .collect();
    assert!(progress.is_sorted(), "{progress:?}");
    assert!(
        progress
            .iter()
            .all(|(chunk, computed, layer)| *computed == chunk * 16 && (1..=3).contains(layer))
    );
    assert!(progress.iter().any(|p| p.0 > 0), "{progress:?}");
}

#[tokio::test]
async fn the_last_handle_dropped_ends_the_loop_and_tells_its_requests() {
    let (scheduler, control) = start(&FakeConfig::default(), Role::Unified, SchedKnobs::default());
    control.step_delay(Duration::from_millis(1));
    let cache = Arc::clone(scheduler.cache());
    let stream = generate(&scheduler, &prompt(1, 20), params(900)).unwrap();
    drop(scheduler);
    let failure = collect(stream).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Draining);
    assert!(failure.detail.contains("shutting down"), "{failure}");
    assert_eq!(cache.stats().held, 0);
}

#[tokio::test]
async fn a_first_token_outside_of_the_vocabulary_fails_its_request_and_reaches_no_step() {
    let config = FakeConfig::default();
    let (scheduler, control) = start(&config, Role::Decode, SchedKnobs::default());
    let admission = Admission {
        prompt: prompt(1, 20),
        max_new_tokens: 5,
        pulled: true,
    };
    let given = GenParams {
        first: Some(lone(2_048)),
        computed: 20,
        ..params(5)
    };
    let failure = collect(scheduler.generate(scheduler.admit(&admission).unwrap(), given))
        .await
        .unwrap_err();
    assert_eq!(failure.reason, Reason::Internal);
    assert!(failure.detail.contains("2048"), "{failure}");
    assert_eq!(control.steps(), 0);
    until_idle(&scheduler).await;
}
