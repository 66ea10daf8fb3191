//! Whether requests may go to the engines: let in, held back for a while, or refused, as those who run the engines say.
//!
//! An order holds for every request that is not at an engine when it is taken, on whichever thread; those that are go on. A
//! request counts itself before it looks at the order, and whoever gives one counts after it: none is missed by both.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;

use crate::error::RouterError;
use crate::metrics::{Metrics, TrafficGauges};

/// The longest that requests are held back: as long as a manifest's `restartQueueSeconds` can be.
pub const LONGEST: Duration = Duration::from_hours(7 * 24);

/// What happens to requests that are not at an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// They go.
    Admit,
    /// They wait for another order, and are refused after this.
    Queue {
        /// When the waiting ends.
        until: Instant,
    },
    /// They are refused.
    Reject,
}

impl Order {
    /// The names of all.
    pub const MODES: [&'static str; 3] = ["admit", "queue", "reject"];

    /// As flags, labels and JSON say it.
    pub const fn mode(self) -> &'static str {
        match self {
            Self::Admit => Self::MODES[0],
            Self::Queue { .. } => Self::MODES[1],
            Self::Reject => Self::MODES[2],
        }
    }
}

/// The order in force, and the requests that it does not concern any more.
#[derive(Debug)]
pub struct Traffic {
    /// It is [`Order::Admit`]: all that a request looks at where nothing is held back.
    open: AtomicBool,
    order: watch::Sender<Order>,
    gauges: TrafficGauges,
}

/// A request that is at engines, or on its way there.
#[derive(Debug)]
pub struct Pass(Gauge);

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.inner().fetch_sub(1, Ordering::SeqCst);
    }
}

impl Traffic {
    /// Begins with `order`.
    pub fn new(order: Order, metrics: &Metrics) -> Self {
        let traffic = Self {
            open: AtomicBool::new(true),
            order: watch::Sender::new(Order::Admit),
            gauges: metrics.traffic.clone(),
        };
        traffic.take(order);
        traffic
    }

    /// From the return on no request goes to an engine against `order`.
    pub fn take(&self, order: Order) {
        self.order.send_modify(|now| {
            *now = order;
            // before anybody is told, so that who is told finds it
            self.open.store(order == Order::Admit, Ordering::SeqCst);
        });
        self.gauges.say(order);
    }

    /// The order in force.
    pub fn order(&self) -> Order {
        *self.order.borrow()
    }

    /// Told of each order.
    pub fn orders(&self) -> watch::Receiver<Order> {
        self.order.subscribe()
    }

    /// Requests that are at engines.
    pub fn at_engines(&self) -> i64 {
        self.gauges.at_engines.inner().load(Ordering::SeqCst)
    }

    /// Do requests go?
    pub fn open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// Lets a request go to the engines, unless an order is against it.
    pub fn enter(&self) -> Option<Pass> {
        self.gauges.at_engines.inner().fetch_add(1, Ordering::SeqCst);
        let pass = Pass(self.gauges.at_engines.clone());
        self.open().then_some(pass)
    }

    /// Waits until requests go.
    pub async fn opens(&self) -> Result<(), RouterError> {
        let mut orders = self.orders();
        loop {
            let order = *orders.borrow_and_update();
            match order {
                Order::Admit => return Ok(()),
                Order::Queue { until } if Instant::now() < until => {
                    tokio::select! {
                        _ = orders.changed() => {}
                        () = tokio::time::sleep_until(until.into()) => {}
                    }
                }
                Order::Queue { .. } | Order::Reject => return Err(RouterError::NotAdmitted),
            }
        }
    }
}
