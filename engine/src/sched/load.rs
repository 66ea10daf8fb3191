//! What an engine says about its load and its health.

use std::sync::Arc;
use std::time::Instant;

use tandem_wire::{BootId, proto};

use super::inflight::Inflight;

/// The load at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadSnapshot {
    /// Sequences that hold a place.
    pub running: u32,
    /// Prefills that wait for a place.
    pub waiting: u32,
    /// Hand-offs under way.
    pub transferring: u32,
    /// Pages free, or cached and unreferenced.
    pub free_pages: u32,
    /// All pages.
    pub total_pages: u32,
    /// Places.
    pub max_running: u32,
    /// Nothing new is admitted.
    pub draining: bool,
    /// Prompt tokens not yet computed, of waiting and running sequences.
    pub waiting_tokens: u64,
    /// When the scheduler last ended a step, or found that there was nothing to do.
    pub last_step: Instant,
}

impl LoadSnapshot {
    /// The message form, as of now, with the requests in flight.
    pub fn to_wire(&self, boot_id: BootId, inflight: &Inflight) -> proto::Load {
        proto::Load {
            boot_id: boot_id.to_wire(),
            running: self.running,
            waiting: self.waiting,
            transferring: self.transferring,
            free_pages: self.free_pages,
            total_pages: self.total_pages,
            max_running: self.max_running,
            draining: self.draining,
            last_step_age_ms: self.last_step.elapsed().as_millis() as u64,
            waiting_tokens: self.waiting_tokens,
            last_progress_age_ms: inflight.progress_age().as_millis() as u64,
            inflight: inflight.to_wire(),
        }
    }
}

/// Whether the scheduler's thread still does its work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It does.
    Alive,
    /// It ended, and why. Nothing that was admitted will be answered by it any more. Terminal.
    Dead(Arc<str>),
}
