//! Which deployment is looked at next.

use std::time::Duration;

use tandem_operator::cluster::cache::Key;
use tandem_operator::queue::Queue;
use tokio::time::{Instant, timeout};

fn key(name: &str) -> Key {
    Key {
        namespace: "serving".into(),
        name: name.into(),
    }
}

fn test(body: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(body);
}

/// Long enough to be seen, were something due.
const A_MOMENT: Duration = Duration::from_millis(50);
const AN_HOUR: Duration = Duration::from_hours(1);

async fn nothing_is_due(queue: &Queue) -> bool {
    timeout(A_MOMENT, queue.next()).await.is_err()
}

#[test]
fn one_that_is_due_twice_is_looked_at_once() {
    test(async {
        let queue = Queue::default();
        queue.touch(&key("a"));
        queue.touch(&key("a"));
        assert_eq!(queue.next().await, key("a"));
        queue.done(&key("a"));
        assert!(nothing_is_due(&queue).await);
        assert!(queue.is_empty());
    });
}

#[test]
fn what_comes_during_a_look_is_looked_at_after_it_and_never_beside_it() {
    test(async {
        let queue = Queue::default();
        queue.touch(&key("a"));
        assert_eq!(queue.next().await, key("a"));
        queue.touch(&key("a"));
        assert!(nothing_is_due(&queue).await, "beside it");
        queue.done(&key("a"));
        assert_eq!(queue.next().await, key("a"));
    });
}

#[test]
fn an_earlier_time_goes_before_a_later_one_and_not_the_other_way_round() {
    test(async {
        let queue = Queue::default();
        let begun = Instant::now();
        queue.at(&key("a"), begun + 3 * A_MOMENT);
        queue.at(&key("b"), begun + A_MOMENT);
        queue.at(&key("a"), begun + AN_HOUR);
        assert_eq!(queue.next().await, key("b"));
        assert_eq!(queue.next().await, key("a"), "within the hour");
        assert!(begun.elapsed() >= 3 * A_MOMENT, "not before its time");
        queue.done(&key("a"));
        queue.at(&key("a"), Instant::now() + AN_HOUR);
        queue.touch(&key("a"));
        assert_eq!(queue.next().await, key("a"), "something happened before");
    });
}
