//! How each row is planted, and cleared again.

use std::any::Any;
use std::time::Duration;

use serde_json::json;
use tandem_e2e::eventually;
use tandem_e2e::proxy::{Plant, Proxy};
use tandem_e2e::visitor::{KeptAlive, not_reading};
use tandem_faults::rows::Row;
use tokio_util::task::AbortOnDropHandle;

use crate::rig::{Front, KEY, Rig, completion};

/// What has not moved for so long is stuck: `--stuck-seconds` of all runs.
pub const STUCK: Duration = Duration::from_secs(5);
/// Milliseconds for each of the model's two layers: a tiny probe takes longer than [`STUCK`].
const SLOW: &str = "slow-prefill 4000";

/// What is planted, until it is dropped.
pub struct Planted {
    /// Before the router; its fault is the row's own, or none.
    pub proxy: Proxy,
    _victims: Vec<Box<dyn Any>>,
}

/// Is nothing wrong inside, so that it matters what is said of the outside?
pub fn is_outside(row: Row) -> bool {
    matches!(row, Row::ProxyHolds | Row::ProxyExhausted | Row::ProxyCuts | Row::Idle)
}

/// Of the proxy that clients come through.
fn of_proxy(row: Row) -> Plant {
    match row {
        Row::ProxyHolds => Plant::Hold(2),
        Row::ProxyExhausted => Plant::Exhaust(1),
        Row::ProxyCuts => Plant::Cut(600),
        _ => Plant::Nothing,
    }
}

/// Plants it and waits until it has struck.
pub async fn plant(row: Row, rig: &mut Rig, front: &Front) -> Planted {
    let proxy = Proxy::start(front.addr(), of_proxy(row)).await;
    let mut victims: Vec<Box<dyn Any>> = Vec::new();
    let visit = async || KeptAlive::open(&proxy.url(), &proxy.ca(), KEY).await;
    match row {
        Row::ClientNotReading => {
            let mut body = completion(101, 20, 4_000);
            // more bytes a token
            body["logprobs"] = json!(5);
            victims.push(Box::new(not_reading(front.addr(), &body).await));
            front.stuck("blocked", 1, STUCK).await;
        }
        Row::ProxyHolds | Row::ProxyExhausted => {
            let mut visitor = visit().await;
            let short = completion(100, 20, 4);
            visitor.complete(&short).await.expect("the first answer passes");
            victims.push(Box::new(AbortOnDropHandle::new(tokio::spawn(async move {
                let _ = visitor.complete(&short).await;
            }))));
            proxy.struck(1).await;
        }
        Row::ProxyCuts => {
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
        Row::TokenizerSlow => {
            front.faults.plant(&["delay-tokenization hold"]).await;
            victims.push(Box::new(front.ask(108, 20, 8)));
            front.stuck("text", 1, STUCK).await;
        }
        Row::RouterBlocked => {
            front.faults.plant(&["block-upstream hold"]).await;
            victims.push(Box::new(front.ask(104, 20, 8)));
            front.stuck("accept", 1, STUCK).await;
        }
        Row::PrefillSlow => {
            rig.prefill_faults.plant(&[SLOW]).await;
            // several chunks: it is still there when it is looked at
            victims.push(Box::new(front.ask(105, 900, 8)));
            front.stuck("prefill", 1, STUCK).await;
        }
        Row::PrefillDead => rig.prefill.process.kill(),
        Row::TransferStalled => {
            rig.prefill_faults.plant(&["stall-transfer hold"]).await;
            victims.push(Box::new(front.ask(106, 20, 8)));
            front.stuck("transfer", 1, STUCK).await;
        }
        Row::DecodeWedged => {
            rig.decode_faults.plant(&["wedge-decode hold"]).await;
            victims.push(Box::new(front.ask(107, 20, 8)));
            front.stuck("decode", 1, STUCK).await;
        }
        Row::DecodeOverloaded => {
            rig.set_max_running(2).await;
            for salt in 0..6 {
                victims.push(Box::new(front.ask(110 + salt, 20, 4_000)));
            }
            front.stuck("queue", 4, STUCK).await;
        }
        Row::DecodeLoading => {
            rig.decode_faults.plant(&["delay-model-load hold"]).await;
            rig.decode.process.kill();
            rig.decode.relaunch();
            eventually("decode says that it loads", STUCK * 10, async || {
                let (status, body) = rig.decode.readiness().await?;
                let loads = status == 503 && body.contains(r#""status":"loading""#);
                if loads { Ok(()) } else { Err(body) }
            })
            .await;
        }
        Row::Idle => {}
    }
    Planted {
        proxy,
        _victims: victims,
    }
}

/// Nothing is planted any more.
pub async fn clear(row: Row, rig: &mut Rig, front: &Front) {
    front.faults.plant(&[]).await;
    rig.prefill_faults.plant(&[]).await;
    rig.decode_faults.plant(&[]).await;
    match row {
        Row::PrefillDead => rig.prefill.restart().await,
        Row::DecodeOverloaded => rig.set_max_running(32).await,
        Row::DecodeLoading => rig.decode.ready().await,
        _ => {}
    }
}
