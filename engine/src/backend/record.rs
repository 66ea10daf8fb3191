//! A backend that executes nothing and remembers what it was asked: the proof that a step could be captured and replayed.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Backend, BackendError, BufferId, BufferShape, KvShape, Op, Row, WeightId};
use crate::exec::{KvError, KvRun, KvStore, PageId};

/// What the backend was asked, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    Alloc(BufferShape),
    Write(BufferId, usize),
    Read(BufferId, usize),
    Op(Op),
    Finish,
}

/// The recorder.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    /// Shared, so that a test can look into a rank that lives on another thread.
    pub(crate) events: Arc<Mutex<Vec<Event>>>,
    /// The first op panics.
    pub(crate) dies: bool,
    buffers: u32,
    weights: u32,
}

struct NoKv;

impl KvStore for NoKv {
    fn read(&self, _: &[PageId], run: KvRun, _: &mut [u8]) -> Result<(), KvError> {
        Err(KvError {
            run,
            why: "nothing is stored".to_owned(),
        })
    }
    fn write(&self, _: &[PageId], run: KvRun, _: &[u8]) -> Result<(), KvError> {
        Err(KvError {
            run,
            why: "nothing is stored".to_owned(),
        })
    }
}

impl Recorder {
    fn push(&self, event: Event) {
        self.events.lock().push(event);
    }
    fn weight(&mut self) -> WeightId {
        self.weights += 1;
        WeightId(self.weights - 1)
    }
}

impl Backend for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }
    fn buffer(&mut self, shape: BufferShape) -> Result<BufferId, BackendError> {
        self.push(Event::Alloc(shape));
        self.buffers += 1;
        Ok(BufferId(self.buffers - 1))
    }
    fn matrix(&mut self, _rows: &[Row<'_>], _k: usize) -> Result<WeightId, BackendError> {
        Ok(self.weight())
    }
    fn vector(&mut self, _values: Vec<f32>) -> Result<WeightId, BackendError> {
        Ok(self.weight())
    }
    fn kv_pool(&mut self, _shape: KvShape) -> Result<Arc<dyn KvStore>, BackendError> {
        Ok(Arc::new(NoKv))
    }
    fn write(&mut self, buffer: BufferId, data: &[u32]) {
        self.push(Event::Write(buffer, data.len()));
    }
    fn read(&mut self, buffer: BufferId, out: &mut [u32]) {
        self.push(Event::Read(buffer, out.len()));
        out.fill(0);
    }
    fn enqueue(&mut self, op: Op) {
        assert!(!self.dies, "this backend was told to die");
        self.push(Event::Op(op));
    }
    fn finish(&mut self, _on_layer: &mut dyn FnMut(u32)) {
        self.push(Event::Finish);
    }
}
