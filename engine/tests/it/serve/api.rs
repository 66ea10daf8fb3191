//! Everything of the `Engine` service but Generate, the `Admin` service, and health.

use std::time::{Duration, Instant};

use tandem_engine::sched::{Role, SchedKnobs};
use tandem_engine::serve::NodeConfig;
use tandem_telemetry::State;
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{DrainRequest, FlushRequest, GetInfoRequest, Knobs, SetKnobsRequest, WatchLoadRequest};
use tandem_wire::{BootId, Failure, Reason, Source};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::fake::FakeConfig;
use crate::support::node::{TestNode, config, eventually, next};
use crate::support::sched::{PATIENCE, prompt, until_idle};

async fn health(node: &TestNode, service: &str) -> ServingStatus {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::new(node.channel.clone()).check(request).await.unwrap();
    answer.into_inner().status()
}

async fn set(node: &TestNode, knobs: Knobs) -> Result<Knobs, Failure> {
    let request = SetKnobsRequest {
        boot_id: node.boot.to_wire(),
        knobs: Some(knobs),
    };
    let answer = node.admin.clone().set_knobs(node.authorized(request)).await;
    answer
        .map(tonic::Response::into_inner)
        .map_err(|s| Failure::from_status(&s, Source::Router))
}

#[tokio::test]
async fn get_info_says_what_runs_and_with_which_knobs() {
    let named = NodeConfig {
        served_name: Some("chat".into()),
        ..config(Role::Unified)
    };
    let (node, _control) = TestNode::fake(&FakeConfig::default(), named).await;
    let info = node
        .client
        .clone()
        .get_info(GetInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(info.boot_id, node.boot.to_wire());
    assert_eq!(info.role(), tandem_wire::proto::Role::Unified);
    assert_eq!((&info.model_name[..], &info.backend[..]), ("chat", "fake"));
    assert_eq!(
        (info.total_pages, info.max_length_tokens, info.vocab_size),
        (256, 1_024, 2_048)
    );
    assert_eq!(info.model_hash.len(), 32);
    assert_eq!(info.layout, Some(node.scheduler.spec().layout.to_wire()));
    let knobs = info.knobs.unwrap();
    assert_eq!(
        (knobs.max_running, knobs.chunked_prefill_tokens, knobs.step_tokens),
        (Some(32), Some(128), Some(160))
    );
    assert_eq!(
        (knobs.lease_ms, knobs.watchdog_ms, knobs.queue_ms),
        (Some(30_000), Some(60_000), Some(60_000))
    );
    node.close().await;
}

#[tokio::test]
async fn knobs_are_changed_one_by_one_and_refused_by_name() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    let change = Knobs {
        chunked_prefill_tokens: Some(10),
        stall_ms: Some(77),
        queue_ms: Some(88),
        ..Knobs::default()
    };
    let now = set(&node, change).await.unwrap();
    assert_eq!(
        (now.chunked_prefill_tokens, now.stall_ms, now.queue_ms),
        (Some(10), Some(77), Some(88))
    );
    assert_eq!(
        (now.max_running, now.lease_ms, now.prefix_cache),
        (Some(32), Some(30_000), Some(true)),
        "unset fields stay"
    );
    node.ask(node.request(&prompt(1, 100), 2)).await.unwrap();
    assert_eq!(control.widest().0, 10, "the change reached the scheduler");
    let info = node
        .client
        .clone()
        .get_info(GetInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(info.knobs, Some(now));

    let none = Knobs::default();
    for (change, name) in [
        (
            Knobs {
                chunked_prefill_tokens: Some(0),
                ..none
            },
            "chunked_prefill_tokens",
        ),
        (
            Knobs {
                max_running: Some(1_000),
                ..none
            },
            "max_running",
        ),
        (
            Knobs {
                step_tokens: Some(1),
                ..none
            },
            "step_tokens",
        ),
        (
            Knobs {
                rendezvous_ms: Some(0),
                ..none
            },
            "rendezvous_ms",
        ),
        (
            Knobs {
                progress_ms: Some(0),
                ..none
            },
            "progress_ms",
        ),
        (
            Knobs {
                stall_ms: Some(u64::MAX),
                ..none
            },
            "stall_ms",
        ),
        (
            Knobs {
                watchdog_ms: Some(0),
                ..none
            },
            "watchdog_ms",
        ),
        (
            Knobs {
                lease_ms: Some(0),
                ..none
            },
            "lease_ms",
        ),
        (
            Knobs {
                queue_ms: Some(0),
                ..none
            },
            "queue_ms",
        ),
        (
            Knobs {
                prefill_queue: Some(0),
                ..none
            },
            "prefill_queue",
        ),
    ] {
        // one good field beside the bad one
        let failure = set(
            &node,
            Knobs {
                prefix_cache: Some(false),
                ..change
            },
        )
        .await
        .unwrap_err();
        assert_eq!(failure.reason, Reason::Invalid);
        assert!(failure.detail.starts_with(name), "{failure}");
    }
    // two that do not go together, given together or one by one
    for (stall_ms, watchdog_ms) in [(Some(500), Some(500)), (Some(60_000), None), (None, Some(77))] {
        let change = Knobs {
            stall_ms,
            watchdog_ms,
            ..none
        };
        let failure = set(&node, change).await.unwrap_err();
        assert_eq!(failure.reason, Reason::Invalid);
        for name in ["stall_ms", "watchdog_ms"] {
            assert!(failure.detail.contains(name), "{failure}");
        }
    }
    assert_eq!(set(&node, none).await.unwrap(), now, "a refused change changes nothing");
    node.close().await;
}

#[tokio::test]
async fn a_call_that_means_another_boot_is_refused_with_our_own() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    let other = BootId::random().to_wire();
    let (mut client, mut admin) = (node.client.clone(), node.admin.clone());
    let mut refusals = Vec::new();
    let mut request = node.request(&prompt(1, 10), 2);
    request.boot_id = other.clone();
    refusals.push(client.generate(request).await.map(drop).unwrap_err());
    let knobs = Some(Knobs::default());
    refusals.push(
        admin
            .set_knobs(node.authorized(SetKnobsRequest {
                boot_id: other.clone(),
                knobs,
            }))
            .await
            .unwrap_err(),
    );
    let watch = WatchLoadRequest {
        boot_id: other.clone(),
        min_interval_ms: 0,
    };
    refusals.push(client.watch_load(watch).await.map(drop).unwrap_err());
    let drain = DrainRequest {
        boot_id: other.clone(),
        deadline_ms: 0,
        resume: false,
    };
    refusals.push(admin.drain(node.authorized(drain)).await.unwrap_err());
    for boot_id in [other, /* an absent id is no wildcard */ bytes::Bytes::new()] {
        let flush = node.authorized(FlushRequest { boot_id });
        refusals.push(admin.flush(flush).await.unwrap_err());
    }
    for status in refusals {
        let failure = Failure::from_status(&status, Source::Router);
        assert_eq!((failure.reason, failure.boot_id), (Reason::StaleBoot, Some(node.boot)));
    }
    assert_eq!(control.steps(), 0);
    assert!(!node.scheduler.load_now().draining);
    node.close().await;
}

#[tokio::test]
async fn a_drain_lets_old_requests_end_and_a_resume_admits_again() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    assert_eq!(health(&node, "").await, ServingStatus::Serving);
    assert_eq!(health(&node, "tandem.v1.Engine").await, ServingStatus::Serving);
    control.pause();
    let mut old = node.open(node.request(&prompt(1, 10), 5)).await.unwrap();
    let drain = |deadline_ms, resume| {
        node.authorized(DrainRequest {
            boot_id: node.boot.to_wire(),
            deadline_ms,
            resume,
        })
    };
    let mut admin = node.admin.clone();
    let began = Instant::now();
    let left = admin.drain(drain(50, false)).await.unwrap().into_inner().remaining;
    assert_eq!(left, 1);
    assert!(began.elapsed() >= Duration::from_millis(50));
    eventually("health follows", || !matches!(node.readiness.get(), State::Ready)).await;
    let refused = node.ask(node.request(&prompt(2, 10), 5)).await.unwrap_err();
    assert_eq!(refused.reason, Reason::Draining);
    let waiting = tokio::spawn({
        let (mut admin, request) = (node.admin.clone(), drain(60_000, false));
        async move { admin.drain(request).await.unwrap().into_inner().remaining }
    });
    control.resume();
    assert_eq!(tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap(), 0);
    let mut last = None;
    while let Some(event) = next(&mut old).await.unwrap() {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Finished(_))), "{last:?}");
    assert_eq!(health(&node, "").await, ServingStatus::NotServing);
    admin.drain(drain(0, true)).await.unwrap();
    node.ask(node.request(&prompt(2, 10), 5)).await.unwrap();
    let mut serving = false;
    for _ in 0..1_000 {
        serving = health(&node, "").await == ServingStatus::Serving;
        if serving {
            break;
        }
    }
    assert!(serving);
    until_idle(&node.scheduler).await;
    node.close().await;
}

#[tokio::test]
async fn a_process_on_its_way_out_is_not_called_back_by_a_resume() {
    let (node, _control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    assert_eq!(node.handle.drain(PATIENCE).await, 0);
    let request = DrainRequest {
        boot_id: node.boot.to_wire(),
        deadline_ms: 0,
        resume: true,
    };
    node.admin.clone().drain(node.authorized(request)).await.unwrap();
    assert_eq!(
        node.ask(node.request(&prompt(2, 10), 5)).await.unwrap_err().reason,
        Reason::Draining
    );
    assert_eq!(node.readiness.get(), State::Draining);
    node.close().await;
}

#[tokio::test]
async fn an_admin_call_without_the_token_changes_nothing() {
    let (node, _control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    node.ask(node.request(&prompt(1, 80), 9)).await.unwrap();
    let (cached, knobs) = (node.scheduler.load_now().free_pages, node.scheduler.knobs());
    assert_eq!(cached, 256, "the cache's pages count as free");
    let token = node.authorized(()).metadata().get("authorization").unwrap().clone();
    let token = token.to_str().unwrap().strip_prefix("Bearer ").unwrap().to_owned();
    let mut wrong: Vec<Vec<String>> = vec![
        vec![],
        vec!["Bearer".into()],
        vec![token.clone()],
        vec![format!("Basic {token}")],
        vec![format!("Bearer {}", &token[1..])],
        vec![format!("Bearer {token}0")],
        vec![format!("Bearer {token}"), format!("Bearer {token}")],
    ];
    wrong.push(vec![format!("Bearer {}", token.to_uppercase())]);
    let mut admin = node.admin.clone();
    for values in wrong {
        fn with<T>(values: &[String], message: T) -> tonic::Request<T> {
            let mut request = tonic::Request::new(message);
            for value in values {
                request.metadata_mut().append("authorization", value.parse().unwrap());
            }
            request
        }
        let boot_id = node.boot.to_wire();
        let change = SetKnobsRequest {
            boot_id: boot_id.clone(),
            knobs: Some(Knobs {
                max_running: Some(1),
                ..Knobs::default()
            }),
        };
        let drain = DrainRequest {
            boot_id: boot_id.clone(),
            ..DrainRequest::default()
        };
        for status in [
            admin.set_knobs(with(&values, change)).await.unwrap_err(),
            admin.drain(with(&values, drain)).await.unwrap_err(),
            admin.flush(with(&values, FlushRequest { boot_id })).await.unwrap_err(),
        ] {
            assert_eq!(status.code(), tonic::Code::Unauthenticated, "{values:?}: {status}");
            assert!(!status.message().contains(&token), "{status}");
        }
    }
    assert_eq!(node.scheduler.knobs(), knobs);
    assert!(!node.scheduler.load_now().draining);
    let again = node.ask(node.request(&prompt(1, 80), 9)).await.unwrap();
    assert_eq!(again.usage.cached_tokens, 72, "the cache was flushed");
    node.close().await;
}

#[tokio::test]
async fn the_control_port_has_nothing_that_changes_the_engine_and_says_where_it_is() {
    let (node, _control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    let mut on_control = AdminClient::new(node.channel.clone());
    let flush = FlushRequest {
        boot_id: node.boot.to_wire(),
    };
    let status = on_control.flush(node.authorized(flush.clone())).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unimplemented);
    let info = node
        .client
        .clone()
        .get_info(GetInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    let port: u16 = info.admin_endpoint.strip_prefix(':').unwrap().parse().unwrap();
    let mut dialled = AdminClient::connect(format!("http://127.0.0.1:{port}")).await.unwrap();
    dialled.flush(node.authorized(flush)).await.unwrap();
    node.close().await;
}

#[tokio::test]
async fn loads_come_at_each_change_and_without_one() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    control.pause();
    let request = WatchLoadRequest {
        boot_id: node.boot.to_wire(),
        min_interval_ms: 10,
    };
    let mut loads = node.client.clone().watch_load(request).await.unwrap().into_inner();
    let first = loads.message().await.unwrap().unwrap();
    assert_eq!(
        (first.running, first.free_pages, first.total_pages, first.max_running),
        (0, 256, 256, 32)
    );
    let quiet = Instant::now();
    loads.message().await.unwrap().unwrap();
    assert!(quiet.elapsed() < Duration::from_secs(10));
    let _running = node.open(node.request(&prompt(1, 100), 5)).await.unwrap();
    let busy = async {
        loop {
            let load = loads.message().await.unwrap().unwrap();
            if load.running == 1 && load.waiting_tokens == 100 {
                return load;
            }
        }
    };
    let load = tokio::time::timeout(PATIENCE, busy).await.unwrap();
    // 100 + 5 - 1 tokens in pages of 8
    assert_eq!(
        (load.boot_id, load.free_pages, load.draining),
        (node.boot.to_wire(), 256 - 13, false)
    );
    // a step that stands still shows in its age
    let aged = async { while loads.message().await.unwrap().unwrap().last_step_age_ms < 20 {} };
    tokio::time::timeout(PATIENCE, aged).await.unwrap();
    control.resume();
    node.close().await;
    assert!(
        loads.message().await.is_ok_and(|m| m.is_none()) || loads.message().await.is_err(),
        "the stream ends"
    );
}

#[tokio::test]
async fn flush_drops_what_nobody_uses() {
    let (node, _control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    let ask = async || {
        node.ask(node.request(&prompt(1, 80), 9))
            .await
            .unwrap()
            .usage
            .cached_tokens
    };
    assert_eq!((ask().await, ask().await), (0, 72));
    let request = FlushRequest {
        boot_id: node.boot.to_wire(),
    };
    let freed = node
        .admin
        .clone()
        .flush(node.authorized(request))
        .await
        .unwrap()
        .into_inner()
        .freed_pages;
    assert_eq!(freed, 11);
    assert_eq!(ask().await, 0);
    node.close().await;
}

#[tokio::test]
async fn a_step_that_panics_turns_liveness_off_and_ends_the_node() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    control.panic_next();
    let failure = node.ask(node.request(&prompt(1, 10), 5)).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Internal);
    assert!(failure.detail.contains("planted panic"), "{failure}");
    let ended = tokio::time::timeout(PATIENCE, node.running).await.unwrap().unwrap();
    assert!(ended.unwrap_err().to_string().contains("planted panic"));
    assert!(matches!(node.readiness.get(), State::Failed { reason } if reason.contains("planted panic")));
}

#[tokio::test]
async fn a_step_that_hangs_is_ended_by_the_watchdog_without_new_work() {
    let mut short = config(Role::Unified);
    short.timers.watchdog = Duration::from_millis(400);
    short.timers.stall = Duration::from_millis(200);
    let (node, control) = TestNode::fake(&FakeConfig::default(), short).await;
    // slow is not hung: a step of twice the limit, where something is done forty times within it
    control.layer_delay(Duration::from_millis(10));
    control.tell_layers(27);
    node.ask(node.request(&prompt(1, 10), 1)).await.unwrap();
    control.layer_delay(Duration::ZERO);
    control.pause();
    let failure = node.ask(node.request(&prompt(2, 10), 5)).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Internal);
    assert!(failure.detail.contains("watchdog_ms"), "{failure}");
    let ended = tokio::time::timeout(PATIENCE, node.running).await.unwrap().unwrap();
    assert!(ended.is_err());
    assert!(matches!(node.readiness.get(), State::Failed { .. }));
    // the step still hangs, and nobody waits for it
    let began = Instant::now();
    drop(node.scheduler);
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "held for {:?}",
        began.elapsed()
    );
    control.resume();
}

#[tokio::test]
async fn metrics_count_what_was_served_and_refused() {
    let small = NodeConfig {
        knobs: SchedKnobs {
            max_running: 1,
            ..SchedKnobs::default()
        },
        ..config(Role::Unified)
    };
    let (node, control) = TestNode::fake(&FakeConfig::default(), small).await;
    let text = node.metrics.encode().unwrap();
    for line in [
        "tandem_engine_failures_total{reason=\"no_capacity\"} 0",
        "tandem_engine_pages{state=\"free\"} 256",
        "tandem_engine_tokens_total{kind=\"prompt\"} 0",
        "tandem_engine_requests_total{kind=\"prefill\"} 0",
        "tandem_engine_steps_total 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing at the start");
    }
    control.pause();
    let mut running = node.open(node.request(&prompt(1, 24), 5)).await.unwrap();
    let refused = node.ask(node.request(&prompt(2, 10), 5)).await.unwrap_err();
    assert_eq!(refused.reason, Reason::NoCapacity);
    control.resume();
    while next(&mut running).await.unwrap().is_some() {}
    until_idle(&node.scheduler).await;
    let text = node.metrics.encode().unwrap();
    for line in [
        "tandem_engine_failures_total{reason=\"no_capacity\"} 1",
        "tandem_engine_requests_total{kind=\"generate\"} 2",
        "tandem_engine_finished_total 1",
        "tandem_engine_tokens_total{kind=\"prompt\"} 24",
        "tandem_engine_tokens_total{kind=\"decode\"} 4",
        "tandem_engine_steps_total 5",
        "tandem_engine_step_seconds_count 5",
        "tandem_engine_running 0",
        "tandem_engine_pages{state=\"held\"} 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing:\n{text}");
    }
    node.close().await;
}
