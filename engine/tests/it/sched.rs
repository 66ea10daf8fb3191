//! The scheduler over the deterministic executor.

use std::sync::Arc;

use tandem_engine::exec::SampleParams;
use tandem_engine::sched::{Admission, GenParams, Role, SchedKnobs, Scheduler, SeqEvent};

use crate::support::fake::{FakeConfig, FakeExecutor, solo};

const GREEDY: SampleParams = SampleParams {
    temperature: 0.0,
    top_p: 1.0,
    seed: 0,
};

#[tokio::test]
async fn a_lone_request_gets_the_tokens_of_a_run_beside_any_scheduler() {
    let config = FakeConfig::default();
    let (executor, _control) = FakeExecutor::new(&config);
    let scheduler = Scheduler::start(Box::new(executor), Role::Unified, SchedKnobs::default()).unwrap();
    let prompt: Arc<[u32]> = (10..200).collect();
    let admitted = scheduler
        .admit(&Admission {
            prompt: Arc::clone(&prompt),
            max_new_tokens: 20,
            pulled: false,
        })
        .unwrap();
    let mut stream = scheduler.generate(
        admitted,
        GenParams {
            sampling: GREEDY,
            max_new_tokens: 20,
            stop_token_ids: vec![],
            ignore_eos: true,
            first: None,
            computed: 0,
            deadline: None,
            gather: false,
        },
    );
    let mut tokens = Vec::new();
    let finish = loop {
        match stream.recv().await.unwrap() {
            SeqEvent::Tokens(more) => tokens.extend(more),
            SeqEvent::Finished(finish) => break finish,
            SeqEvent::Failed(failure) => panic!("{failure}"),
        }
    };
    assert_eq!(tokens, solo(&config, &prompt, 20, GREEDY));
    assert_eq!((finish.completion_tokens, finish.computed_tokens), (20, 190));
}
