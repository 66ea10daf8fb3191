//! Driving a scheduler from a test.

use std::sync::Arc;
use std::time::Duration;

use tandem_engine::exec::SampleParams;
use tandem_engine::sched::{
    Admission, Finish, GenParams, PrefillEvent, PrefillParams, PrefillStream, Role, SchedKnobs, Scheduler, SeqEvent,
    SeqStream,
};
use tandem_wire::Failure;

use super::fake::{FakeConfig, FakeControl, FakeExecutor};

/// No test waits longer for one thing.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub const GREEDY: SampleParams = SampleParams::GREEDY;

pub fn start(config: &FakeConfig, role: Role, knobs: SchedKnobs) -> (Scheduler, FakeControl) {
    let (executor, control) = FakeExecutor::new(config);
    (Scheduler::start(Box::new(executor), role, knobs).unwrap(), control)
}

/// A prompt that no other seed shares a token run with.
pub fn prompt(seed: u32, len: usize) -> Arc<[u32]> {
    (0..len as u32)
        .map(|i| 10 + (seed * 7919 + i * 31 + i * i) % 2_000)
        .collect()
}

pub fn params(new_tokens: u32) -> GenParams {
    GenParams {
        sampling: GREEDY.into(),
        max_new_tokens: new_tokens,
        stop_token_ids: vec![],
        ignore_eos: true,
        first: None,
        computed: 0,
        deadline: None,
        stay: None,
        gather: false,
    }
}

pub fn prefill_params(prompt: &Arc<[u32]>) -> PrefillParams {
    PrefillParams {
        prompt: Arc::clone(prompt),
        sampling: GREEDY.into(),
        stop_token_ids: vec![],
        ignore_eos: true,
        max_new_tokens: 16,
        deadline: None,
        stay: None,
    }
}

/// Admits and generates, computing whatever is not cached.
pub fn generate(scheduler: &Scheduler, prompt: &Arc<[u32]>, params: GenParams) -> Result<SeqStream, Failure> {
    let admitted = scheduler.admit(&Admission {
        prompt: Arc::clone(prompt),
        max_new_tokens: params.max_new_tokens,
        pulled: false,
    })?;
    let computed = admitted.pages.cached_tokens();
    Ok(scheduler.generate(admitted, GenParams { computed, ..params }))
}

/// Reads to the end.
pub async fn collect(mut stream: SeqStream) -> Result<(Vec<u32>, Finish), Failure> {
    let mut tokens = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, stream.recv())
            .await
            .expect("no event in time");
        match event.expect("the stream ended without a terminal event") {
            SeqEvent::Tokens { ids: more, .. } => tokens.extend(more),
            SeqEvent::Finished(finish) => {
                assert_eq!(stream.recv().await, None);
                return Ok((tokens, finish));
            }
            SeqEvent::Failed(failure) => {
                assert_eq!(stream.recv().await, None);
                return Err(failure);
            }
        }
    }
}

/// Reads a prefill to its terminal event; the others come first.
pub async fn collect_prefill(stream: &mut PrefillStream) -> Vec<PrefillEvent> {
    let mut events = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, stream.recv())
            .await
            .expect("no event in time");
        let event = event.expect("the stream ended without a terminal event");
        let over = matches!(event, PrefillEvent::Done { .. } | PrefillEvent::Failed(_));
        events.push(event);
        if over {
            return events;
        }
    }
}

/// Waits until nothing is held: every page free or cached, every place free.
pub async fn until_idle(scheduler: &Scheduler) {
    let mut load = scheduler.load();
    let idle = async {
        // the guard that it gives must not outlive it: it locks the load
        let _ = load
            .wait_for(|l| l.running == 0 && l.waiting == 0 && l.transferring == 0 && l.free_pages == l.total_pages)
            .await;
    };
    let reached = tokio::time::timeout(PATIENCE, idle).await;
    assert!(reached.is_ok(), "something is still held: {:?}", scheduler.load_now());
    let pages = scheduler.cache().stats();
    assert_eq!((pages.held, pages.free + pages.cached), (0, pages.total));
    assert_eq!(scheduler.remaining(), 0);
    scheduler.cache().flush();
    assert_eq!(scheduler.cache().stats().free, pages.total, "a page leaked");
}
