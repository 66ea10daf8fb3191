//! Keeps the connection to one engine: dials, asks who it is, watches its load, and dials again when it is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{GetInfoRequest, Load, WatchLoadRequest};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Status, Streaming};

use super::channel::{Channel, Keep};
use super::{Changed, Session, Side};
use crate::metrics::EngineGauges;
use crate::shards::Shards;

/// To an engine on the same network; a host that is gone must not hold a request that waits for the probe.
const DIAL: Duration = Duration::from_secs(2);
/// GetInfo answers from memory; an engine under full load may take its time.
const ASK: Duration = Duration::from_secs(5);
/// An engine reports its load at least once a second; one that is silent for so long is asked again who it is.
const SILENCE: Duration = Duration::from_secs(5);
/// Between two probes in vain: doubled up to the second, cut short by a request that waits.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Requests that wait cannot make it dial more often than this.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

/// What is known about an engine.
#[derive(Debug, Clone)]
pub enum Link {
    /// It answers.
    Up(Arc<Session>),
    /// It does not, or cannot be used.
    Down {
        /// Why, for people.
        reason: String,
        /// When the probe began that found this out; none before the first one.
        probed: Option<Instant>,
    },
}

/// One engine. Dropping it closes the connection, as soon as no request is there.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    side: Side,
    endpoint: String,
    keep: Keep,
    shards: Shards,
    link: Mutex<Link>,
    /// The longest sequence that it can hold, by its last word; 0: unknown.
    longest: AtomicU32,
    wake: Notify,
    gauges: EngineGauges,
    changed: Arc<Changed>,
}

impl Worker {
    /// Begins to dial.
    pub fn start(
        side: Side,
        endpoint: &str,
        keep: Keep,
        shards: Shards,
        gauges: EngineGauges,
        changed: Arc<Changed>,
    ) -> Self {
        let shared = Arc::new(Shared {
            side,
            endpoint: endpoint.to_owned(),
            keep,
            shards,
            link: Mutex::new(Link::Down {
                reason: format!("{endpoint} was not reached yet"),
                probed: None,
            }),
            longest: AtomicU32::new(0),
            wake: Notify::new(),
            gauges,
            changed,
        });
        let task = tokio::spawn(Arc::clone(&shared).keep_connected());
        Self {
            shared,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// The engine, if requests may go there.
    pub fn session(&self) -> Option<Arc<Session>> {
        match &*self.shared.link.lock() {
            Link::Up(session) if session.open() => Some(Arc::clone(session)),
            _ => None,
        }
    }

    /// What it is used as.
    pub fn side(&self) -> Side {
        self.shared.side
    }

    /// Its control port as configured.
    pub fn endpoint(&self) -> &str {
        &self.shared.endpoint
    }

    /// What is known about it now.
    pub fn link(&self) -> Link {
        self.shared.link.lock().clone()
    }

    /// The longest sequence that the engine can hold, by its last word; none: it was never reached.
    pub fn longest(&self) -> Option<u32> {
        Some(self.shared.longest.load(Ordering::Relaxed)).filter(|longest| *longest > 0)
    }

    /// Dials at once if it waits to dial again.
    pub fn probe_now(&self) {
        if matches!(&*self.shared.link.lock(), Link::Down { .. }) {
            self.shared.wake.notify_one();
        }
    }

    /// Is what is known about it newer than `since`: a live connection, or a probe in vain that began after that?
    pub fn known_since(&self, since: Instant) -> bool {
        match &*self.shared.link.lock() {
            // whoever is in doubt is being asked
            Link::Up(session) => session.open() || session.draining(),
            Link::Down { probed, .. } => probed.is_some_and(|probed| probed >= since),
        }
    }

    /// Why it cannot be used, for people.
    pub fn down_reason(&self) -> Option<String> {
        match &*self.shared.link.lock() {
            Link::Up(session) => session.draining().then(|| format!("{} drains", self.shared.endpoint)),
            Link::Down { reason, .. } => Some(reason.clone()),
        }
    }
}

impl Shared {
    async fn keep_connected(self: Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        let mut last: Option<Arc<Session>> = None;
        loop {
            let began = Instant::now();
            match self.dial(last.as_deref()).await {
                Ok((session, loads, channel)) => {
                    let session = Arc::new(session);
                    last = Some(Arc::clone(&session));
                    tracing::info!(
                        endpoint = self.endpoint,
                        side = self.side.name(),
                        boot = %session.boot,
                        max_length_tokens = session.max_length_tokens(),
                        "engine is up"
                    );
                    self.longest.store(session.max_length_tokens(), Ordering::Relaxed);
                    self.set(Link::Up(Arc::clone(&session)));
                    self.gauges.up.set(1);
                    let reason = self.watch(&session, loads, &channel).await;
                    self.gauges.up.set(0);
                    tracing::warn!(endpoint = self.endpoint, side = self.side.name(), boot = %session.boot, reason, "engine is gone");
                    self.set(Link::Down { reason, probed: None });
                    if began.elapsed() > LONGEST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                }
                Err(reason) => {
                    tracing::debug!(endpoint = self.endpoint, reason, "engine cannot be used");
                    self.set(Link::Down {
                        reason,
                        probed: Some(began),
                    });
                }
            }
            tokio::time::sleep(SHORTEST_PAUSE).await;
            let _ = tokio::time::timeout(pause.saturating_sub(SHORTEST_PAUSE), self.wake.notified()).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn set(&self, link: Link) {
        *self.link.lock() = link;
        self.changed.link();
    }

    /// Dials, asks who is there, and waits for its first load report: nothing goes to an engine whose load is unknown.
    async fn dial(&self, last: Option<&Session>) -> Result<(Session, Streaming<Load>, Channel), String> {
        let failed = |what: &str, error: &dyn std::error::Error| {
            let mut text = format!("{} {what}: {error}", self.endpoint);
            let mut cause = error.source();
            while let Some(error) = cause {
                // some of the layers say the same
                let words = error.to_string();
                if !text.contains(&words) {
                    text = format!("{text}: {words}");
                }
                cause = error.source();
            }
            text
        };
        let origin = format!("http://{}", self.endpoint)
            .parse()
            .map_err(|error: http::uri::InvalidUri| failed("is no address", &error))?;
        let channel = tokio::time::timeout(DIAL, Channel::open(&self.endpoint, self.keep, &self.shards))
            .await
            .map_err(|_| format!("{} cannot be reached within {} s", self.endpoint, DIAL.as_secs()))?
            .map_err(|error| failed("cannot be reached", &error))?;
        let mut client = EngineClient::with_origin(channel.clone(), origin);
        let info = tokio::time::timeout(ASK, client.get_info(GetInfoRequest {}))
            .await
            .map_err(|_| format!("{} did not answer GetInfo within {} s", self.endpoint, ASK.as_secs()))?
            .map_err(|status| format!("{} refused GetInfo: {}", self.endpoint, status.message()))?
            .into_inner();
        let session = Session::new(
            self.side,
            &self.endpoint,
            client.clone(),
            &info,
            self.gauges.clone(),
            last,
        )
        .map_err(|unfit| unfit.to_string())?;
        let request = WatchLoadRequest {
            boot_id: session.boot.to_wire(),
            min_interval_ms: 0,
        };
        let first = async {
            let mut loads = client.watch_load(request).await?.into_inner();
            let load = loads.message().await?;
            Ok::<_, Status>((load, loads))
        };
        let (load, loads) = tokio::time::timeout(ASK, first)
            .await
            .map_err(|_| format!("{} sent no load within {} s", self.endpoint, ASK.as_secs()))?
            .map_err(|status| format!("{} refused WatchLoad: {}", self.endpoint, status.message()))?;
        session.report(load.ok_or_else(|| format!("{} closed its load stream", self.endpoint))?);
        Ok((session, loads, channel))
    }

    /// Follows the load until the engine is gone; says why.
    async fn watch(&self, session: &Session, mut loads: Streaming<Load>, channel: &Channel) -> String {
        loop {
            tokio::select! {
                load = tokio::time::timeout(SILENCE, loads.message()) => match load {
                    Ok(Ok(Some(load))) => {
                        let drained = load.draining != session.draining();
                        session.report(load);
                        if drained {
                            self.changed.link();
                        } else {
                            self.changed.room.notify_one();
                        }
                    }
                    Ok(Ok(None)) => return format!("{} closed its load stream", self.endpoint),
                    Err(_) => return format!("{} reported no load for {} s", self.endpoint, SILENCE.as_secs()),
                    Ok(Err(status)) => return format!("{} was lost: {}", self.endpoint, status.message()),
                },
                () = channel.ended() => return format!("{} was lost: a connection to it ended", self.endpoint),
                () = session.doubted() => return format!("{} failed a request, asking it again", self.endpoint),
            }
        }
    }
}
