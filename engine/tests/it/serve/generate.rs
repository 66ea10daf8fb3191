//! Generate over real gRPC: unified, and decode that pulls from prefill.

use std::sync::Arc;
use std::time::Duration;

use tandem_engine::exec::SampleParams;
use tandem_engine::sched::{Role, SchedKnobs};
use tandem_engine::serve::NodeConfig;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::phase::Kind as Phase;
use tandem_wire::proto::{GenerateRequest, OnPrefillFailure, Peer, Sampling};
use tandem_wire::{BootId, Reason, Source};
use tonic::transport::Channel;

use crate::support::fake::{FakeConfig, FakeControl, mix, solo};
use crate::support::node::{TestNode, alive_tasks, config, eventually, next};
use crate::support::sched::{GREEDY, PATIENCE, prompt, until_idle};

#[tokio::test]
async fn a_unified_engine_answers_with_tokens_phases_and_usage() {
    let fake = FakeConfig::default();
    let (node, _control) = TestNode::fake(&fake, config(Role::Unified)).await;
    let prompt = prompt(1, 100);
    let answer = node.ask(node.request(&prompt, 20)).await.unwrap();
    assert_eq!(answer.tokens, solo(&fake, &prompt, 20, GREEDY));
    assert_eq!(answer.cause, Some(Cause::Length));
    assert_eq!(answer.phases, [Phase::Prefill, Phase::Decode]);
    let usage = answer.usage;
    assert_eq!(
        (usage.prompt_tokens, usage.completion_tokens, usage.computed_tokens),
        (100, 20, 100)
    );
    assert_eq!(
        (usage.cached_tokens, usage.moved_tokens, usage.recomputed),
        (0, 0, false)
    );
    assert!(usage.prefill_us > 0 && usage.decode_us > 0);
    // stop ids, and a seed that counts
    let mut request = node.request(&prompt, 20);
    request.stop_token_ids = vec![answer.tokens[7]];
    let stopped = node.ask(request).await.unwrap();
    assert_eq!(
        (&stopped.tokens[..], stopped.cause),
        (&answer.tokens[..7], Some(Cause::Stop))
    );
    assert_eq!(stopped.usage.cached_tokens, 96);
    let mut request = node.request(&prompt, 20);
    request.sampling = Some(Sampling {
        temperature: 1.0,
        top_p: 0.0,
        seed: 9,
        ..Sampling::default()
    });
    let sampling = SampleParams {
        temperature: 1.0,
        seed: 9,
        ..GREEDY
    };
    assert_eq!(
        node.ask(request).await.unwrap().tokens,
        solo(&fake, &prompt, 20, sampling)
    );
    until_idle(&node.scheduler).await;
    node.close().await;
}

#[tokio::test]
async fn decode_pulls_its_prompt_and_answers_as_a_unified_engine_would() {
    let fake = FakeConfig::default();
    let (prefill, _p) = TestNode::fake(&fake, config(Role::Prefill)).await;
    let (decode, control) = TestNode::fake(&fake, config(Role::Decode)).await;
    let prompt = prompt(2, 130);
    let expected = solo(&fake, &prompt, 12, GREEDY);
    let ask = |new| GenerateRequest {
        prefill: Some(prefill.peer()),
        ..decode.request(&prompt, new)
    };
    let answer = decode.ask(ask(12)).await.unwrap();
    assert_eq!(answer.tokens, expected);
    assert!(answer.phases.contains(&Phase::Transfer), "{:?}", answer.phases);
    assert_eq!(answer.phases.last(), Some(&Phase::Decode));
    let usage = answer.usage;
    assert_eq!(
        (usage.computed_tokens, usage.moved_tokens, usage.recomputed),
        (0, 130, false)
    );
    assert_eq!(
        usage.moved_bytes,
        130 * decode.scheduler.spec().layout.token_bytes() as u64
    );
    assert_eq!(control.steps(), 11, "decode computed no prompt token");

    // again: both have 128 tokens, the rest is moved
    let again = decode.ask(ask(12)).await.unwrap();
    assert_eq!(again.tokens, expected);
    assert_eq!((again.usage.moved_tokens, again.usage.cached_tokens), (2, 128));

    // the first token ends it: nothing is moved
    let mut stop = ask(12);
    stop.stop_token_ids = vec![expected[0]];
    let stopped = decode.ask(stop).await.unwrap();
    assert_eq!((stopped.tokens.len(), stopped.cause), (0, Some(Cause::Stop)));
    let one = decode.ask(ask(1)).await.unwrap();
    assert_eq!((&one.tokens[..], one.cause), (&expected[..1], Some(Cause::Length)));
    assert_eq!(one.usage.completion_tokens, 1);

    // and without a prefill a decode engine computes by itself
    let local = decode.ask(decode.request(&prompt, 12)).await.unwrap();
    assert_eq!((local.tokens, local.usage.computed_tokens), (expected, 2));
    for node in [prefill, decode] {
        until_idle(&node.scheduler).await;
        node.close().await;
    }
}

#[tokio::test]
async fn neighbours_aborts_and_hand_offs_do_not_change_a_requests_tokens() {
    let fake = FakeConfig {
        total_pages: 700,
        ..FakeConfig::default()
    };
    let cut = |role| NodeConfig {
        knobs: SchedKnobs {
            chunked_prefill_tokens: 23,
            step_tokens: 61,
            prefill_queue: 64,
            ..SchedKnobs::default()
        },
        ..config(role)
    };
    let (prefill, _p) = TestNode::fake(&fake, cut(Role::Prefill)).await;
    let (decode, _d) = TestNode::fake(&fake, cut(Role::Decode)).await;
    let (prefill, decode) = (Arc::new(prefill), Arc::new(decode));
    let before = alive_tasks();
    let mut tasks = Vec::new();
    for i in 0..32_u64 {
        let r = mix(i);
        let mut tokens = prompt((r % 4) as u32, 48).to_vec();
        tokens.extend_from_slice(&prompt(i as u32 + 50, (r >> 8) as usize % 60));
        let new = 2 + (r >> 16) as u32 % 60;
        let sampling = SampleParams {
            temperature: if r.is_multiple_of(3) { 0.8 } else { 0.0 },
            seed: r,
            ..GREEDY
        };
        let request = GenerateRequest {
            // one in four computes locally
            prefill: (i % 4 != 3).then(|| prefill.peer()),
            sampling: Some(Sampling {
                temperature: sampling.temperature,
                top_p: 1.0,
                seed: r,
                ..Sampling::default()
            }),
            batch_tokens: r.is_multiple_of(2),
            request_id: i.to_string(),
            ..decode.request(&tokens, new)
        };
        let abort_after = (i.is_multiple_of(3)).then_some((r >> 24) as usize % 30);
        let (decode, fake) = (Arc::clone(&decode), fake.clone());
        tasks.push(tokio::spawn(async move {
            let expected = solo(&fake, &tokens, new as usize, sampling);
            decode.must_answer(request, &expected, abort_after).await;
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    until_idle(&decode.scheduler).await;
    until_idle(&prefill.scheduler).await;
    // one connection's tasks may stay for each lane
    eventually("tasks end", || alive_tasks() <= before + 12).await;
}

#[tokio::test]
async fn a_request_that_cannot_run_is_refused_with_the_field_or_the_lengths() {
    let fake = FakeConfig::default();
    let (node, control) = TestNode::fake(&fake, config(Role::Unified)).await;
    let good = node.request(&prompt(1, 10), 5);
    let with = |change: fn(&mut GenerateRequest)| {
        let mut request = good.clone();
        change(&mut request);
        request
    };
    for (request, reason, named) in [
        (with(|r| r.prompt_tokens.clear()), Reason::Invalid, "prompt_tokens"),
        (
            with(|r| r.prompt_tokens[3] = 9_999),
            Reason::Invalid,
            "prompt_tokens[3]",
        ),
        (with(|r| r.max_new_tokens = 0), Reason::Invalid, "max_new_tokens"),
        (
            with(|r| r.sampling.as_mut().unwrap().temperature = -1.0),
            Reason::Invalid,
            "temperature",
        ),
        (
            with(|r| r.sampling.as_mut().unwrap().temperature = f32::NAN),
            Reason::Invalid,
            "temperature",
        ),
        (
            with(|r| r.sampling.as_mut().unwrap().top_p = 1.5),
            Reason::Invalid,
            "top_p",
        ),
        (
            with(|r| r.stop_token_ids = vec![1; 300]),
            Reason::Invalid,
            "stop_token_ids",
        ),
        (with(|r| r.prefill = Some(Peer::default())), Reason::Invalid, "prefill"),
        (
            with(|r| r.max_new_tokens = 1_015),
            Reason::OverLength,
            "1015 new tokens make 1025, this engine holds 1024",
        ),
        (with(|r| r.prompt_tokens = vec![5; 4_000]), Reason::OverLength, "4000"),
    ] {
        let failure = node.ask(request).await.unwrap_err();
        assert_eq!((failure.reason, failure.source), (reason, Source::Decode), "{failure}");
        assert!(failure.detail.contains(named), "{failure}");
    }
    // a message beyond any bound is not read
    let failure = node
        .ask(with(|r| r.prompt_tokens = vec![1 << 28; 2_000_000]))
        .await
        .unwrap_err();
    assert_eq!(failure.reason, Reason::Invalid);
    let (prefill, _p) = TestNode::fake(&fake, config(Role::Prefill)).await;
    let failure = prefill.ask(prefill.request(&prompt(1, 10), 5)).await.unwrap_err();
    assert_eq!((failure.reason, failure.source), (Reason::Invalid, Source::Prefill));
    assert_eq!(control.steps(), 0);
    until_idle(&node.scheduler).await;
    node.close().await;
}

#[tokio::test]
async fn no_capacity_is_told_at_once_and_with_the_places() {
    let small = NodeConfig {
        knobs: SchedKnobs {
            max_running: 1,
            ..SchedKnobs::default()
        },
        ..config(Role::Decode)
    };
    let (node, control) = TestNode::fake(&FakeConfig::default(), small).await;
    control.pause();
    let held = node.open(node.request(&prompt(1, 10), 5)).await.unwrap();
    let status = node
        .client
        .clone()
        .generate(node.request(&prompt(2, 10), 5))
        .await
        .map(drop)
        .unwrap_err();
    let failure = tandem_wire::Failure::from_status(&status, Source::Router);
    assert_eq!(failure.reason, Reason::NoCapacity, "{failure}");
    assert!(failure.detail.contains("1 of 1 places"), "{failure}");
    drop(held);
    control.resume();
    until_idle(&node.scheduler).await;
    node.close().await;
}

#[tokio::test]
async fn a_caller_that_leaves_frees_everything_within_a_step() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    let mut stream = node.open(node.request(&prompt(1, 50), 900)).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Some(Event::Tokens(_))) {}
    control.pause();
    control.wait_until_held();
    drop(stream);
    // the step that was begun still runs; nothing else may
    let steps = control.steps();
    eventually("the request's task ends", || node.handle.under_way() == 0).await;
    assert_eq!((node.scheduler.load_now().running, control.steps()), (1, steps));
    control.resume();
    until_idle(&node.scheduler).await;
    assert!(
        control.steps() <= steps + 2,
        "{} steps after the caller left",
        control.steps() - steps
    );
    node.close().await;
}

#[tokio::test]
async fn a_requests_own_time_ends_it_whatever_it_does() {
    let fake = FakeConfig::default();
    let (prefill, prefill_control) = TestNode::fake(&fake, config(Role::Prefill)).await;
    let (decode, control) = TestNode::fake(&fake, config(Role::Decode)).await;
    let late = |request: GenerateRequest| GenerateRequest {
        remaining_ms: 80,
        // its own deadline is no failure of the prefill
        on_prefill_failure: OnPrefillFailure::Recompute.into(),
        ..request
    };
    // while it decodes
    control.step_delay(Duration::from_millis(2));
    let failure = decode.ask(late(decode.request(&prompt(1, 50), 900))).await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::Deadline, Source::Decode),
        "{failure}"
    );
    // while the prefill stands still
    prefill_control.pause();
    let pulled = GenerateRequest {
        prefill: Some(prefill.peer()),
        ..decode.request(&prompt(2, 50), 900)
    };
    let failure = decode.ask(late(pulled)).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Deadline, "{failure}");
    let counted = decode.metrics.encode().unwrap();
    assert!(counted.contains("tandem_engine_recomputed_total 0\n"), "{counted}");
    prefill_control.resume();
    for node in [prefill, decode] {
        until_idle(&node.scheduler).await;
        node.close().await;
    }
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_up_nobody_else() {
    let fake = FakeConfig {
        total_pages: 1_024,
        max_length_tokens: 4_096,
        ..FakeConfig::default()
    };
    let (node, _control) = TestNode::fake(&fake, config(Role::Unified)).await;
    let mut slow = node.open(node.request(&prompt(1, 20), 4_000)).await.unwrap();
    for i in 2..6 {
        let answer = node.ask(node.request(&prompt(i, 20), 50)).await.unwrap();
        assert_eq!(answer.tokens, solo(&fake, &prompt(i, 20), 50, GREEDY));
    }
    // it runs to its end unread, and holds no page after that
    until_idle(&node.scheduler).await;
    let mut tokens = Vec::new();
    while let Some(event) = next(&mut slow).await.unwrap() {
        if let Event::Tokens(more) = event {
            tokens.extend(more.ids);
        }
    }
    assert_eq!(tokens, solo(&fake, &prompt(1, 20), 4_000, GREEDY));
    node.close().await;
}

#[tokio::test]
async fn gathered_tokens_come_in_few_messages() {
    let fake = FakeConfig::default();
    let (node, control) = TestNode::fake(&fake, config(Role::Unified)).await;
    control.step_delay(Duration::from_micros(300));
    let request = GenerateRequest {
        batch_tokens: true,
        ..node.request(&prompt(1, 20), 300)
    };
    let answer = node.ask(request).await.unwrap();
    assert_eq!(answer.tokens, solo(&fake, &prompt(1, 20), 300, GREEDY));
    assert!(answer.messages <= 3, "{} messages", answer.messages);
    node.close().await;
}

/// A decode engine and a prefill that is about to fail.
async fn failing(
    fail: impl Fn(&FakeControl),
    policy: OnPrefillFailure,
) -> (
    Result<crate::support::node::Answer, tandem_wire::Failure>,
    Vec<u32>,
    TestNode,
) {
    let fake = FakeConfig::default();
    let (prefill, prefill_control) = TestNode::fake(&fake, config(Role::Prefill)).await;
    let (decode, _control) = TestNode::fake(&fake, config(Role::Decode)).await;
    let prompt = prompt(3, 100);
    fail(&prefill_control);
    let request = GenerateRequest {
        prefill: Some(prefill.peer()),
        on_prefill_failure: policy.into(),
        ..decode.request(&prompt, 15)
    };
    let answer = decode.ask(request).await;
    until_idle(&decode.scheduler).await;
    (answer, solo(&fake, &prompt, 15, GREEDY), decode)
}

#[tokio::test]
async fn a_failed_prefill_is_recomputed_if_the_policy_says_so_and_told_if_not() {
    let fail = |control: &FakeControl| control.fail_next("planted");
    let (answer, expected, decode) = failing(fail, OnPrefillFailure::Recompute).await;
    let answer = answer.unwrap();
    assert_eq!(answer.tokens, expected);
    assert_eq!(
        (
            answer.usage.recomputed,
            answer.usage.computed_tokens,
            answer.usage.moved_tokens
        ),
        (true, 100, 0)
    );
    let counted = decode.metrics.encode().unwrap();
    assert!(counted.contains("tandem_engine_recomputed_total 1\n"), "{counted}");
    decode.close().await;
    let (answer, _, decode) = failing(fail, OnPrefillFailure::Fail).await;
    let failure = answer.unwrap_err();
    assert_eq!((failure.reason, failure.source), (Reason::Internal, Source::Prefill));
    assert!(failure.detail.contains("planted"), "{failure}");
    decode.close().await;
}

#[tokio::test]
async fn a_recompute_of_a_wholly_cached_prompt_writes_into_no_shared_page() {
    let fake = FakeConfig::default();
    let (decode, _control) = TestNode::fake(&fake, config(Role::Decode)).await;
    let prompt = prompt(4, 64);
    decode.ask(decode.request(&prompt, 4)).await.unwrap();
    let request = GenerateRequest {
        prefill: Some(Peer {
            // nobody listens there
            endpoint: "127.0.0.1:1".into(),
            boot_id: BootId::random().to_wire(),
        }),
        on_prefill_failure: OnPrefillFailure::Recompute.into(),
        ..decode.request(&prompt, 15)
    };
    let answer = decode.ask(request.clone()).await.unwrap();
    assert_eq!(answer.tokens, solo(&fake, &prompt, 15, GREEDY));
    assert_eq!(
        (
            answer.usage.computed_tokens,
            answer.usage.cached_tokens,
            answer.usage.recomputed
        ),
        (8, 56, true)
    );
    let refused = decode
        .ask(GenerateRequest {
            key: decode.request(&prompt, 1).key,
            on_prefill_failure: OnPrefillFailure::Fail.into(),
            ..request
        })
        .await
        .unwrap_err();
    assert_eq!(refused.reason, Reason::PeerLost, "{refused}");
    until_idle(&decode.scheduler).await;
    decode.close().await;
}

#[tokio::test]
async fn what_is_under_way_when_the_engine_ends_is_told_so() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    control.step_delay(Duration::from_millis(1));
    let mut stream = node.open(node.request(&prompt(1, 20), 900)).await.unwrap();
    while !matches!(next(&mut stream).await.unwrap(), Some(Event::Tokens(_))) {}
    assert_eq!(node.handle.drain(Duration::from_millis(20)).await, 1);
    node.close().await;
    let mut last = None;
    while let Some(event) = next(&mut stream).await.unwrap() {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failure(f)) if f.reason() == Reason::Draining));
}

#[tokio::test]
async fn more_requests_than_http2_allows_by_default_run_at_once_on_one_connection() {
    let fake = FakeConfig {
        max_step_seqs: 256,
        total_pages: 1_024,
        ..FakeConfig::default()
    };
    let wide = NodeConfig {
        knobs: SchedKnobs {
            max_running: 256,
            ..SchedKnobs::default()
        },
        ..config(Role::Unified)
    };
    let (node, control) = TestNode::fake(&fake, wide).await;
    control.pause();
    let mut streams = Vec::new();
    for i in 0..250 {
        let mut stream = node.open(node.request(&prompt(i, 10), 3)).await.unwrap();
        assert!(matches!(next(&mut stream).await.unwrap(), Some(Event::Started(_))));
        streams.push(stream);
    }
    control.resume();
    for (i, mut stream) in streams.into_iter().enumerate() {
        let mut tokens = Vec::new();
        while let Some(event) = next(&mut stream).await.unwrap() {
            if let Event::Tokens(more) = event {
                tokens.extend(more.ids);
            }
        }
        assert_eq!(tokens, solo(&fake, &prompt(i as u32, 10), 3, GREEDY));
    }
    until_idle(&node.scheduler).await;
    node.close().await;
}

#[tokio::test]
async fn what_the_request_itself_did_wrong_is_told_and_not_recomputed() {
    let fake = FakeConfig::default();
    let short = FakeConfig {
        max_length_tokens: 64,
        ..fake.clone()
    };
    let (prefill, _p) = TestNode::fake(&short, config(Role::Prefill)).await;
    let (decode, control) = TestNode::fake(&fake, config(Role::Decode)).await;
    let request = GenerateRequest {
        prefill: Some(prefill.peer()),
        on_prefill_failure: OnPrefillFailure::Recompute.into(),
        ..decode.request(&prompt(1, 100), 5)
    };
    let failure = decode.ask(request).await.unwrap_err();
    assert_eq!((failure.reason, failure.source), (Reason::OverLength, Source::Prefill));
    assert_eq!(control.steps(), 0);
    for node in [prefill, decode] {
        until_idle(&node.scheduler).await;
        node.close().await;
    }
}

#[tokio::test]
async fn prompts_that_wait_for_their_turn_of_the_budget_do_not_fail() {
    let layer = Duration::from_millis(100);
    let timed = |role| {
        let mut config = config(role);
        config.timers.progress = layer * 6;
        config.knobs = SchedKnobs {
            chunked_prefill_tokens: 16,
            step_tokens: 16,
            ..SchedKnobs::default()
        };
        config
    };
    let fake = FakeConfig::default();
    let (prefill, control) = TestNode::fake(&fake, timed(Role::Prefill)).await;
    let (decode, _d) = TestNode::fake(&fake, timed(Role::Decode)).await;
    control.layer_delay(layer);
    let asked = (0..4).map(|i| {
        decode.ask(GenerateRequest {
            prefill: Some(prefill.peer()),
            ..decode.request(&prompt(i, 32), 2)
        })
    });
    for (i, answer) in futures::future::join_all(asked).await.into_iter().enumerate() {
        let answer = answer.unwrap_or_else(|failure| panic!("request {i}: {failure}"));
        assert_eq!(answer.usage.moved_tokens, 32);
    }
    for node in [prefill, decode] {
        until_idle(&node.scheduler).await;
        node.close().await;
    }
}

/// A client that lets the engine send `window` bytes of an answer before it reads.
pub async fn hesitant(node: &TestNode, window: u32) -> EngineClient<Channel> {
    let endpoint = Channel::from_shared(format!("http://{}", node.addr)).unwrap();
    EngineClient::new(endpoint.initial_stream_window_size(window).connect().await.unwrap())
}

#[tokio::test]
async fn a_caller_that_never_reads_is_left_after_a_while_or_with_its_own_time() {
    for (stall, remaining_ms) in [(Duration::from_millis(300), 0), (Duration::from_mins(10), 300)] {
        let impatient = NodeConfig {
            reader_stall: stall,
            ..config(Role::Unified)
        };
        let (node, _control) = TestNode::fake(&FakeConfig::default(), impatient).await;
        let request = GenerateRequest {
            remaining_ms,
            ..node.request(&prompt(1, 20), 900)
        };
        let unread = hesitant(&node, 100).await.generate(request).await.unwrap();
        assert_eq!(node.handle.drain(PATIENCE).await, 0, "it holds the drain");
        until_idle(&node.scheduler).await;
        drop(unread);
        node.close().await;
    }
}

#[tokio::test]
async fn a_drain_waits_until_the_last_event_is_taken() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    // one event after the other: all find room in the engine, only the first ones in the connection
    control.step_delay(Duration::from_millis(20));
    let mut stream = hesitant(&node, 10)
        .await
        .generate(node.request(&prompt(1, 20), 4))
        .await
        .unwrap()
        .into_inner();
    eventually("all is computed", || node.scheduler.remaining() == 0).await;
    assert_eq!(node.handle.drain(Duration::from_millis(100)).await, 1);
    let drained = tokio::spawn({
        let handle = node.handle.clone();
        async move { handle.drain(PATIENCE).await }
    });
    let mut last = None;
    while let Some(event) = next(&mut stream).await.unwrap() {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Finished(_))), "{last:?}");
    assert_eq!(drained.await.unwrap(), 0);
    node.close().await;
}
