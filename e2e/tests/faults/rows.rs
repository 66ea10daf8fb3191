//! The eleven rows: what is planted, and which layer has to be named.

use std::any::Any;
use std::time::Duration;

use serde_json::json;
use tandem_e2e::eventually;
use tandem_e2e::proxy::{Plant, Proxy};
use tandem_e2e::visitor::{KeptAlive, not_reading};
use tokio_util::task::AbortOnDropHandle;

use crate::rig::{Front, KEY, Rig, completion};

/// What has not moved for so long is stuck: `--stuck-seconds` of all runs.
pub const STUCK: Duration = Duration::from_secs(5);
/// Milliseconds for each of the model's two layers: a tiny probe takes longer than [`STUCK`].
const SLOW: &str = "slow-prefill 4000";

/// What is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row {
    ClientNotReading,
    ProxyHolds,
    ProxyExhausted,
    ProxyCuts,
    RouterBlocked,
    PrefillSlow,
    PrefillDead,
    TransferStalled,
    DecodeWedged,
    DecodeOverloaded,
    Idle,
}

/// What is planted, until it is dropped.
pub struct Planted {
    /// Before the router; its fault is the row's own, or none.
    pub proxy: Proxy,
    _victims: Vec<Box<dyn Any>>,
}

impl Row {
    pub const ALL: [Self; 11] = [
        Self::ClientNotReading,
        Self::ProxyHolds,
        Self::ProxyExhausted,
        Self::ProxyCuts,
        Self::RouterBlocked,
        Self::PrefillSlow,
        Self::PrefillDead,
        Self::TransferStalled,
        Self::DecodeWedged,
        Self::DecodeOverloaded,
        Self::Idle,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::ClientNotReading => "client not reading",
            Self::ProxyHolds => "proxy holding answers",
            Self::ProxyExhausted => "proxy pool exhausted",
            Self::ProxyCuts => "proxy cutting streams",
            Self::RouterBlocked => "router blocked",
            Self::PrefillSlow => "prefill slow",
            Self::PrefillDead => "prefill dead",
            Self::TransferStalled => "transfer stalled",
            Self::DecodeWedged => "decode wedged",
            Self::DecodeOverloaded => "decode overloaded",
            Self::Idle => "idle",
        }
    }

    /// The layer at fault.
    pub fn layer(self) -> Option<&'static str> {
        match self {
            Self::ClientNotReading | Self::ProxyHolds | Self::ProxyExhausted | Self::ProxyCuts => Some("client_path"),
            Self::RouterBlocked => Some("router"),
            Self::PrefillSlow | Self::PrefillDead => Some("prefill"),
            Self::TransferStalled => Some("transfer"),
            Self::DecodeWedged => Some("decode"),
            Self::DecodeOverloaded | Self::Idle => None,
        }
    }

    /// Is nothing wrong inside, so that it matters what is said of the outside?
    pub fn is_outside(self) -> bool {
        matches!(
            self,
            Self::ProxyHolds | Self::ProxyExhausted | Self::ProxyCuts | Self::Idle
        )
    }

    /// Of the proxy that clients come through.
    fn of_proxy(self) -> Plant {
        match self {
            Self::ProxyHolds => Plant::Hold(2),
            Self::ProxyExhausted => Plant::Exhaust(1),
            Self::ProxyCuts => Plant::Cut(600),
            _ => Plant::Nothing,
        }
    }

    /// Plants it and waits until it has struck.
    pub async fn plant(self, rig: &mut Rig, front: &Front) -> Planted {
        let proxy = Proxy::start(front.addr(), self.of_proxy()).await;
        let mut victims: Vec<Box<dyn Any>> = Vec::new();
        let visit = async || KeptAlive::open(&proxy.url(), &proxy.ca(), KEY).await;
        match self {
            Self::ClientNotReading => {
                let mut body = completion(101, 20, 4_000);
                // more bytes a token
                body["logprobs"] = json!(5);
                victims.push(Box::new(not_reading(front.addr(), &body).await));
                front.stuck("blocked", 1, STUCK).await;
            }
            Self::ProxyHolds | Self::ProxyExhausted => {
                let mut visitor = visit().await;
                let short = completion(100, 20, 4);
                visitor.complete(&short).await.expect("the first answer passes");
                victims.push(Box::new(AbortOnDropHandle::new(tokio::spawn(async move {
                    let _ = visitor.complete(&short).await;
                }))));
                proxy.struck(1).await;
            }
            Self::ProxyCuts => {
                for salt in 0..2 {
                    let answer = visit().await.complete(&completion(102 + salt, 20, 64)).await;
                    assert!(answer.is_err(), "it was not cut: {answer:?}");
                }
                proxy.struck(2).await;
                eventually("both were left", STUCK * 10, async || {
                    let gone = front.connections().await["lately"]["client_gone"].clone();
                    if gone == 2 { Ok(()) } else { Err(gone.to_string()) }
                })
                .await;
            }
            Self::RouterBlocked => {
                front.faults.plant(&["block-upstream hold"]).await;
                victims.push(Box::new(front.ask(104, 20, 8)));
                front.stuck("accept", 1, STUCK).await;
            }
            Self::PrefillSlow => {
                rig.prefill_faults.plant(&[SLOW]).await;
                // several chunks: it is still there when it is looked at
                victims.push(Box::new(front.ask(105, 900, 8)));
                front.stuck("prefill", 1, STUCK).await;
            }
            Self::PrefillDead => rig.prefill.process.kill(),
            Self::TransferStalled => {
                rig.prefill_faults.plant(&["stall-transfer hold"]).await;
                victims.push(Box::new(front.ask(106, 20, 8)));
                front.stuck("transfer", 1, STUCK).await;
            }
            Self::DecodeWedged => {
                rig.decode_faults.plant(&["wedge-decode hold"]).await;
                victims.push(Box::new(front.ask(107, 20, 8)));
                front.stuck("decode", 1, STUCK).await;
            }
            Self::DecodeOverloaded => {
                rig.set_max_running(2).await;
                for salt in 0..6 {
                    victims.push(Box::new(front.ask(110 + salt, 20, 4_000)));
                }
                front.stuck("queue", 4, STUCK).await;
            }
            Self::Idle => {}
        }
        Planted {
            proxy,
            _victims: victims,
        }
    }

    /// Nothing is planted any more.
    pub async fn clear(self, rig: &mut Rig, front: &Front) {
        front.faults.plant(&[]).await;
        rig.prefill_faults.plant(&[]).await;
        rig.decode_faults.plant(&[]).await;
        match self {
            Self::PrefillDead => rig.prefill.restart().await,
            Self::DecodeOverloaded => rig.set_max_running(32).await,
            _ => {}
        }
    }
}
