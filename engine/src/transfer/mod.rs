//! The KV hand-off, both ends, over gRPC: decode dials prefill and pulls.
//!
//! | module | holds |
//! | --- | --- |
//! | `pull` | decode: what a hand-off needs and gives, and the attempts under way |
//! | `attempt` | decode: one attempt, from dialling to commit |
//! | `inbox` | decode: checks each frame before its first byte touches a page |
//! | `wait` | decode: what an attempt waits for, by name, and what its expiry means |
//! | `peers` | decode: connections, each bound to an incarnation |
//! | `source` | prefill: the two services, and what may be opened and fetched |
//! | `control` | prefill: the control stream, from Open to the last word |
//! | `data` | the data stream: KV bytes, frame by frame |
//! | `body` | the data stream's gRPC framing, without the codec's copies |
//! | `chunks` | decode: the data stream's messages, out of pieces of any size |
//! | `cell` | one side's state of one attempt; whoever wins a transition runs its effects |
//! | `registry` | live attempts and tombstones |
//! | `watchdog` | ends what stands still, on its own thread |
//! | `timers` | the timers, settable while transfers run |
//! | `metrics` | `tandem_transfer_*` |
//! | `tally` | how hand-offs ended, for whoever judges the way between two engines |

mod attempt;
mod body;
mod cell;
mod chunks;
mod control;
mod data;
mod inbox;
mod metrics;
mod peers;
mod pull;
mod registry;
mod source;
mod tally;
mod timers;
mod wait;
mod watchdog;

pub use chunks::Chunks;
pub use metrics::TransferMetrics;
pub use peers::HTTP2_FRAME_BYTES;
pub use pull::{Phase, PullRequest, Pulled, Puller, PullerConfig};
pub use source::{ControlPort, DataPort, Source, SourceConfig};
pub use tally::Tally;
pub use timers::{KeepAlive, TimerOrder, TimerValues, Timers};
pub use watchdog::{Sweep, Watchdog};
