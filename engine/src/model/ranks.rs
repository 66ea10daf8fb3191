//! A model in several parts: each rank holds its heads and its inner columns, on a backend of its own, and all compute every step
//! together. Rank 0 lives on the caller's thread, samples and tells the layers; each other one has a thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::batch::HostBatch;
use super::forward::{Bounds, Bucket, Llama, Workspace};
use crate::backend::cpu::ThreadCommunicator;
use crate::backend::{Backend, BackendError, Context};
use crate::exec::{KvError, KvRun, KvStore, PageId};

/// The longest that a rank waits for the others: ranks do equal work, so on a machine that is alive they come within one layer.
pub(super) const RANK_LIMIT: Duration = Duration::from_mins(1);

/// One rank's part of the model.
pub(super) struct Rank<B> {
    pub(super) backend: B,
    pub(super) context: Context,
    pub(super) model: Llama,
    pub(super) workspace: Workspace,
    pub(super) bounds: Bounds,
}

impl<B: Backend> Rank<B> {
    /// Computes this rank's part of a step.
    pub(super) fn pass(&mut self, batch: &HostBatch, on_layer: &mut dyn FnMut(u32)) {
        batch.write(&mut self.backend, &self.workspace);
        let bucket = Bucket::of(batch.rows(), batch.outs(), self.bounds);
        self.model
            .enqueue(&mut self.backend, &self.context, &self.workspace, bucket);
        self.backend.finish(on_layer);
    }
}

/// The ranks beside the first.
#[derive(Default)]
pub(super) struct Peers {
    peers: Vec<Peer>,
    communicator: Option<Arc<ThreadCommunicator>>,
}

struct Peer {
    steps: Option<SyncSender<Arc<HostBatch>>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

/// Tells the other ranks that this one has ended, however it did.
struct Farewell(Arc<ThreadCommunicator>, usize);

impl Drop for Farewell {
    fn drop(&mut self) {
        self.0.lose(format!("rank {} has ended", self.1));
    }
}

impl Peers {
    /// Beside a first rank that talks to them through `communicator`.
    pub(super) fn new(communicator: Arc<ThreadCommunicator>) -> Self {
        Self {
            peers: Vec::new(),
            communicator: Some(communicator),
        }
    }

    /// Gives a rank its thread.
    pub(super) fn start<B: Backend + 'static>(&mut self, mut rank: Rank<B>) -> Result<(), BackendError> {
        let Some(communicator) = &self.communicator else {
            return Ok(());
        };
        let farewell = Farewell(Arc::clone(communicator), rank.context.rank);
        let (steps, orders) = sync_channel::<Arc<HostBatch>>(1);
        let (tell, done) = sync_channel(1);
        let work = move || {
            let _farewell = farewell;
            for batch in orders {
                rank.pass(&batch, &mut |_| {});
                // before it tells: the first rank fills the next step into the same memory
                drop(batch);
                if tell.send(()).is_err() {
                    break;
                }
            }
        };
        let name = format!("rank-{}", self.peers.len() + 1);
        let thread = std::thread::Builder::new().name(name).spawn(work);
        self.peers.push(Peer {
            steps: Some(steps),
            done,
            thread: Some(thread.map_err(BackendError::Thread)?),
        });
        Ok(())
    }

    /// The others begin their part of a step.
    pub(super) fn begin(&self, batch: &Arc<HostBatch>) {
        for peer in &self.peers {
            if let Some(steps) = &peer.steps {
                // one that has ended has said so to the communicator
                let _ = steps.send(Arc::clone(batch));
            }
        }
    }

    /// The others have done their part.
    ///
    /// # Panics
    /// If a rank was lost: the model is no longer whole, and nothing that is computed from now on means anything.
    pub(super) fn end(&self) {
        let Some(communicator) = &self.communicator else { return };
        for (i, peer) in self.peers.iter().enumerate() {
            if let Err(e) = peer.done.recv_timeout(RANK_LIMIT) {
                communicator.lose(format!("rank {} does not end its step: {e}", i + 1));
            }
        }
        if let Some(why) = communicator.lost() {
            panic!("a part of the model is lost: {why}; this engine has to start again");
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        for peer in &mut self.peers {
            peer.steps.take();
        }
        for thread in self.peers.iter_mut().filter_map(|p| p.thread.take()) {
            if thread.join().is_err() {
                tracing::error!("a rank panicked");
            }
        }
    }
}

/// The ranks' KV pools as one: every rank holds some of the heads, in order.
pub(super) struct AllHeads {
    ranks: Vec<Arc<dyn KvStore>>,
    /// Bytes of a token in one component of a layer, of one rank's heads.
    token_bytes: usize,
}

impl AllHeads {
    /// Of pools that hold `token_bytes` of a token each.
    pub(super) fn new(ranks: Vec<Arc<dyn KvStore>>, token_bytes: usize) -> Self {
        Self { ranks, token_bytes }
    }

    /// One rank's share of a run's bytes.
    fn share(&self, run: KvRun, bytes: usize) -> Result<Vec<u8>, KvError> {
        let share = run.tokens as usize * self.token_bytes;
        let expected = share * self.ranks.len();
        if bytes != expected {
            let why = format!("it takes {expected} bytes, {bytes} are given");
            return Err(KvError { run, why });
        }
        Ok(vec![0; share])
    }
}

impl KvStore for AllHeads {
    fn read(&self, pages: &[PageId], run: KvRun, out: &mut [u8]) -> Result<(), KvError> {
        let mut share = self.share(run, out.len())?;
        let (own, all) = (self.token_bytes, self.token_bytes * self.ranks.len());
        for (i, rank) in self.ranks.iter().enumerate() {
            rank.read(pages, run, &mut share)?;
            for (to, from) in out.chunks_exact_mut(all).zip(share.chunks_exact(own)) {
                to[i * own..(i + 1) * own].copy_from_slice(from);
            }
        }
        Ok(())
    }

    fn write(&self, pages: &[PageId], run: KvRun, data: &[u8]) -> Result<(), KvError> {
        let mut share = self.share(run, data.len())?;
        let (own, all) = (self.token_bytes, self.token_bytes * self.ranks.len());
        for (i, rank) in self.ranks.iter().enumerate() {
            for (to, from) in share.chunks_exact_mut(own).zip(data.chunks_exact(all)) {
                to.copy_from_slice(&from[i * own..(i + 1) * own]);
            }
            rank.write(pages, run, &share)?;
        }
        Ok(())
    }
}
