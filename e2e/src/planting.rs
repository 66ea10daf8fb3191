//! Plants what `tandem diagnose` has to find, among processes or in a cluster, and waits until it has struck.

#![expect(async_fn_in_trait, reason = "tests alone call these, each with one kind")]

use std::any::Any;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_faults::rows::Row;
use tokio_util::task::AbortOnDropHandle;

use crate::proxy::{Doorway, Plant};
use crate::stack::{Faults, MODEL};
use crate::visitor::{KeptAlive, not_reading};
use crate::{eventually, probe, salted_text};

/// What has not moved for so long is stuck: `--stuck-seconds` of all runs.
pub const STUCK: Duration = Duration::from_secs(5);
/// In each prompt; no log, record or archive may hold it.
pub const MARK: &str = "quokka7431";

/// Where clients ask, and where a router tells of them.
#[derive(Debug, Clone)]
pub struct Door {
    /// Without a slash at its end.
    pub url: String,
    /// host:port of the router's admin port.
    pub admin: String,
    /// Of the admin port.
    pub token: String,
    /// Of clients.
    pub key: String,
    /// How long is waited for what a fault does, and for everything to be let go, on a busy machine.
    pub limit: Duration,
}

impl Door {
    /// Where clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.url.trim_start_matches("http://").parse().expect("an address")
    }

    /// `/admin/connections`.
    pub async fn connections(&self) -> Result<Value, String> {
        let url = format!("http://{}/admin/connections", self.admin);
        let answer = probe::http().get(url).bearer_auth(&self.token).send().await;
        let answer = answer.map_err(|error| format!("{error:?}"))?;
        answer.json().await.map_err(|error| format!("{error:?}"))
    }

    /// Waits until `count` connections, or requests on them, have been in `state` for so long.
    pub async fn stuck(&self, state: &str, count: usize, since: Duration) {
        eventually(
            &format!("{count} are in {state} for {since:?}"),
            self.limit,
            async || {
                let seen = self.connections().await?;
                let long = |of: &Value| {
                    of["state"] == state && u128::from(of["state_ms"].as_u64().unwrap_or(0)) >= since.as_millis()
                };
                let stuck = list(&seen["connections"])
                    .iter()
                    .filter(|connection| long(connection) || list(&connection["requests"]).iter().any(long))
                    .count();
                if stuck >= count {
                    Ok(())
                } else {
                    Err(seen["by_state"].to_string())
                }
            },
        )
        .await;
    }

    /// Waits until no answer is due and at most so many clients are connected.
    pub async fn unused(&self, connected: u64) {
        eventually("no request is under way any more", self.limit, async || {
            let seen = self.connections().await?;
            if seen["in_flight"] == 0 && seen["open"].as_u64().is_some_and(|open| open <= connected) {
                Ok(())
            } else {
                Err(seen["by_state"].to_string())
            }
        })
        .await;
    }

    /// A client's request, until the guard is dropped. Each has a prompt of its own.
    pub fn ask(&self, salt: u64, words: usize, max_tokens: u32) -> AbortOnDropHandle<()> {
        let url = format!("{}/v1/completions", self.url);
        let (key, body) = (self.key.clone(), completion(salt, words, max_tokens));
        AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = async {
                let request = probe::http().post(url).bearer_auth(key).json(&body);
                request.send().await?.bytes().await
            }
            .await;
        }))
    }
}

/// What is served, and how it is broken where no fault of a process does it.
pub trait Site {
    /// Milliseconds for each of the model's layers, by which a tiny probe takes longer than [`STUCK`].
    const LAYER_MS: u32;
    /// A completion of so many tokens lasts for as long as it is looked at.
    const LONG_TOKENS: u32;

    /// The router's.
    fn door(&self) -> &Door;
    /// Of the role's only process.
    fn faults(&self, role: Role) -> &Faults;
    /// Prefill is gone, and nothing comes in its place.
    async fn lose_prefill(&mut self);
    /// Decode takes so many sequences at once from now on; none: as many as it does by itself.
    async fn set_max_running(&mut self, max_running: Option<u32>);
    /// Decode's process is another one, which has not loaded its model.
    async fn load_decode_anew(&mut self);
    /// Everything serves again.
    async fn restored(&mut self, row: Row);
}

/// The fault of the proxy that clients come through.
pub fn of_proxy(row: Row) -> Plant {
    match row {
        Row::ProxyHolds => Plant::Hold(2),
        Row::ProxyExhausted => Plant::Exhaust(1),
        Row::ProxyCuts => Plant::Cut(600),
        _ => Plant::Nothing,
    }
}

/// Plants it and waits until it has struck; gives the requests that have met it, which last until they are dropped.
pub async fn plant<S: Site>(row: Row, site: &mut S, proxy: &impl Doorway) -> Vec<Box<dyn Any>> {
    let mut victims: Vec<Box<dyn Any>> = Vec::new();
    let door = site.door().clone();
    let visit = async || KeptAlive::open(&proxy.url(), &proxy.ca(), &door.key).await;
    match row {
        Row::ClientNotReading => {
            let mut body = completion(101, 20, S::LONG_TOKENS);
            // more bytes a token
            body["logprobs"] = json!(5);
            victims.push(Box::new(not_reading(door.addr(), &body).await));
            door.stuck("blocked", 1, STUCK).await;
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
            let gone = async || {
                let seen = door.connections().await?;
                seen["lately"]["client_gone"].as_u64().ok_or_else(|| seen.to_string())
            };
            let before = gone().await.expect("the router's connections");
            for salt in 0..2 {
                let answer = visit().await.complete(&completion(102 + salt, 20, 64)).await;
                assert!(answer.is_err(), "it was not cut: {answer:?}");
            }
            proxy.struck(2).await;
            eventually("both were left", door.limit, async || match gone().await? {
                now if now >= before + 2 => Ok(()),
                now => Err(format!("{now}, {before} before")),
            })
            .await;
        }
        Row::TokenizerSlow => {
            site.faults(Role::Router).plant(&["delay-tokenization hold"]).await;
            victims.push(Box::new(door.ask(108, 20, 8)));
            door.stuck("text", 1, STUCK).await;
        }
        Row::RouterBlocked => {
            site.faults(Role::Router).plant(&["block-upstream hold"]).await;
            victims.push(Box::new(door.ask(104, 20, 8)));
            door.stuck("accept", 1, STUCK).await;
        }
        Row::PrefillSlow => {
            let slow = format!("slow-prefill {}", S::LAYER_MS);
            site.faults(Role::Prefill).plant(&[&slow]).await;
            // several chunks: it is still there when it is looked at
            victims.push(Box::new(door.ask(105, 900, 8)));
            door.stuck("prefill", 1, STUCK).await;
        }
        Row::PrefillDead => site.lose_prefill().await,
        Row::TransferStalled => {
            site.faults(Role::Prefill).plant(&["stall-transfer hold"]).await;
            victims.push(Box::new(door.ask(106, 20, 8)));
            door.stuck("transfer", 1, STUCK).await;
        }
        Row::DecodeWedged => {
            site.faults(Role::Decode).plant(&["wedge-decode hold"]).await;
            victims.push(Box::new(door.ask(107, 20, 8)));
            door.stuck("decode", 1, STUCK).await;
        }
        Row::DecodeOverloaded => {
            site.set_max_running(Some(2)).await;
            for salt in 0..6 {
                victims.push(Box::new(door.ask(110 + salt, 20, S::LONG_TOKENS)));
            }
            door.stuck("queue", 4, STUCK).await;
        }
        Row::DecodeLoading => {
            site.faults(Role::Decode).plant(&["delay-model-load hold"]).await;
            site.load_decode_anew().await;
        }
        Row::Idle => {}
    }
    victims
}

/// Nothing is planted any more, and everything serves again.
pub async fn clear(row: Row, site: &mut impl Site) {
    for role in Role::ALL {
        site.faults(role).plant(&[]).await;
    }
    if row == Row::DecodeOverloaded {
        site.set_max_running(None).await;
    }
    site.restored(row).await;
}

/// A streamed completion, sampled, so that it does not end early.
pub fn completion(salt: u64, words: usize, max_tokens: u32) -> Value {
    json!({
        "model": MODEL, "prompt": format!("{MARK} {}", salted_text(salt, words)), "max_tokens": max_tokens, "temperature": 1.0, "seed": salt,
        "stream": true, "ignore_eos": true,
    })
}

/// What an array holds; nothing else is one.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
