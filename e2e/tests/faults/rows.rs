//! How a row is planted among processes of this machine.

use tandem_crds::Role;
use tandem_e2e::eventually;
use tandem_e2e::planting::{Door, Site};
use tandem_e2e::stack::Faults;
use tandem_faults::rows::Row;

use crate::rig::{Front, Rig, SETTLE};

/// A router before the engines.
pub struct Machine<'a> {
    pub rig: &'a mut Rig,
    pub front: &'a Front,
}

/// Is nothing wrong inside, so that it matters what is said of the outside?
pub fn is_outside(row: Row) -> bool {
    matches!(row, Row::ProxyHolds | Row::ProxyExhausted | Row::ProxyCuts | Row::Idle)
}

impl Site for Machine<'_> {
    // two layers
    const LAYER_MS: u32 = 4_000;
    const LONG_TOKENS: u32 = 4_000;

    fn door(&self) -> &Door {
        &self.front.door
    }

    fn faults(&self, role: Role) -> &Faults {
        match role {
            Role::Prefill => &self.rig.prefill_faults,
            Role::Decode => &self.rig.decode_faults,
            Role::Router => &self.front.faults,
        }
    }

    async fn lose_prefill(&mut self) {
        self.rig.prefill.process.kill();
    }

    async fn set_max_running(&mut self, max_running: Option<u32>) {
        self.rig.set_max_running(max_running.unwrap_or(32)).await;
    }

    async fn load_decode_anew(&mut self) {
        let decode = &mut self.rig.decode;
        decode.process.kill();
        decode.relaunch();
        eventually("decode says that it loads", SETTLE, async || {
            let (status, body) = decode.readiness().await?;
            let loads = status == 503 && body.contains(r#""status":"loading""#);
            if loads { Ok(()) } else { Err(body) }
        })
        .await;
    }

    async fn restored(&mut self, row: Row) {
        match row {
            Row::PrefillDead => self.rig.prefill.restart().await,
            Row::DecodeLoading => self.rig.decode.ready().await,
            _ => {}
        }
    }
}
