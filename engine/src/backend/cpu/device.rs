//! The backend's state: buffers, weights, the stream of ops, the workers.

use std::sync::Arc;

use super::act::Act;
use super::kernels::{Isa, Kernels, MATMUL_SCRATCH};
use super::kv::KvPool;
use super::layout::LANES;
use super::memory::Memory;
use super::pack::Panels;
use super::pool::Pool;
use super::step;
use crate::backend::{Backend, BackendError, BufferId, BufferShape, Context, KvShape, Op, Row, WeightId};
use crate::exec::KvStore;
use crate::model::Dtype;

/// A buffer and what it holds.
pub(super) struct Buffer {
    pub(super) memory: Memory,
    pub(super) shape: BufferShape,
}

/// A matrix or a vector.
pub(super) enum Weight {
    Matrix(Panels),
    Vector(Vec<f32>),
}

/// One worker's private memory.
pub(super) struct Scratch {
    /// Unpacked panels and partial sums.
    pub(super) matmul: Memory,
    /// One normed row.
    pub(super) row: Memory,
    /// Gate and up, 32 columns each, of all rows.
    pub(super) gate_up: Memory,
    /// Attention's own, and the output of a tile behind it.
    pub(super) attention: Memory,
    /// One row as a matmul's input, and what rounding lost of it.
    pub(super) act: Memory,
    /// A row of logits, adjusted.
    pub(super) adjusted: Memory,
    /// (probability, token) while sampling.
    pub(super) candidates: Memory,
}

/// The largest sizes seen while loading; the workers' memory follows them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sizes {
    rows: usize,
    row: usize,
    columns: usize,
    dim: usize,
    group: usize,
}

/// What the workers share during a pass.
pub(super) struct Device {
    pub(super) kernels: Kernels,
    pub(super) buffers: Vec<Buffer>,
    pub(super) weights: Vec<Weight>,
    pub(super) kv: Option<Arc<KvPool>>,
    pub(super) scratch: Vec<Scratch>,
    pub(super) context: Context,
}

/// The CPU backend.
pub struct Cpu {
    isa: Isa,
    device: Device,
    sizes: Sizes,
    queue: Vec<Op>,
    pool: Pool,
}

/// Ops of a pass that the queue holds without growing: 8 a layer for more layers than any model has that a CPU serves.
const QUEUE: usize = 4096;

impl Cpu {
    /// `threads` workers, the thread that calls `finish` included.
    pub fn new(threads: usize, isa: Isa, context: Context) -> Result<Self, BackendError> {
        let pool = Pool::new(threads).map_err(BackendError::Thread)?;
        let device = Device {
            kernels: isa.kernels()?,
            buffers: Vec::new(),
            weights: Vec::new(),
            kv: None,
            scratch: Vec::new(),
            context,
        };
        let mut cpu = Self {
            isa,
            device,
            sizes: Sizes::default(),
            queue: Vec::with_capacity(QUEUE),
            pool,
        };
        cpu.resize(Sizes {
            rows: 1,
            row: LANES,
            columns: LANES,
            dim: LANES,
            group: 1,
        })?;
        Ok(cpu)
    }

    /// Bytes that a buffer of this shape takes.
    pub fn buffer_bytes(shape: BufferShape) -> usize {
        match shape {
            BufferShape::F32 { rows, cols } => rows * cols * 4,
            BufferShape::Activation { rows, k } => Act::bytes(rows, k),
            BufferShape::U32 { len } => len * 4,
        }
    }

    /// Bytes that a matrix of rows of these types, so many of each, takes with `k` values a row.
    pub fn matrix_bytes(rows: &[(Dtype, usize)], k: usize) -> u64 {
        Panels::bytes(rows, k)
    }

    /// What an f32 buffer holds now.
    #[cfg(test)]
    pub(crate) fn floats(&self, id: BufferId) -> Vec<f32> {
        let b = &self.device.buffers[id.0 as usize];
        // SAFETY: the buffer's length; no pass runs (`finish` has returned).
        unsafe { std::slice::from_raw_parts(b.memory.ptr::<f32>(), Self::buffer_bytes(b.shape) / 4) }.to_vec()
    }

    /// Gives every worker memory for the largest sizes so far.
    fn resize(&mut self, seen: Sizes) -> Result<(), BackendError> {
        let sizes = Sizes {
            rows: self.sizes.rows.max(seen.rows),
            row: self.sizes.row.max(seen.row),
            columns: self.sizes.columns.max(seen.columns),
            dim: self.sizes.dim.max(seen.dim),
            group: self.sizes.group.max(seen.group),
        };
        if sizes == self.sizes {
            return Ok(());
        }
        self.sizes = sizes;
        self.device.scratch.clear();
        for _ in 0..self.pool.threads() {
            self.device.scratch.push(Scratch {
                matmul: Memory::zeroed("matmul scratch", MATMUL_SCRATCH, false)?,
                row: Memory::zeroed("a normed row", sizes.row * 4, false)?,
                gate_up: Memory::zeroed("gate and up", sizes.rows * 64 * 4, false)?,
                attention: Memory::zeroed(
                    "attention scratch",
                    step::attention_scratch(sizes.dim, sizes.group) * 4,
                    false,
                )?,
                act: Memory::zeroed("one row's input", Act::bytes(2, sizes.row), false)?,
                adjusted: Memory::zeroed("an adjusted row", sizes.columns * 4, false)?,
                candidates: Memory::zeroed("sampling candidates", sizes.columns * 8, false)?,
            });
        }
        Ok(())
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        self.isa.backend_name()
    }

    fn buffer(&mut self, shape: BufferShape) -> Result<BufferId, BackendError> {
        match shape {
            BufferShape::F32 { cols, .. } => self.resize(Sizes {
                columns: cols,
                ..self.sizes
            })?,
            BufferShape::Activation { rows, k } => self.resize(Sizes {
                rows,
                row: k,
                ..self.sizes
            })?,
            BufferShape::U32 { .. } => {}
        }
        let memory = Memory::zeroed("a workspace", Self::buffer_bytes(shape), false)?;
        self.device.buffers.push(Buffer { memory, shape });
        Ok(BufferId(self.device.buffers.len() as u32 - 1))
    }

    fn matrix(&mut self, rows: &[Row<'_>], k: usize) -> Result<WeightId, BackendError> {
        self.resize(Sizes { row: k, ..self.sizes })?;
        let panels = Panels::pack(rows, k, &mut self.pool)?;
        self.device.weights.push(Weight::Matrix(panels));
        Ok(WeightId(self.device.weights.len() as u32 - 1))
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<WeightId, BackendError> {
        self.device.weights.push(Weight::Vector(values));
        Ok(WeightId(self.device.weights.len() as u32 - 1))
    }

    fn kv_pool(&mut self, shape: KvShape) -> Result<Arc<dyn KvStore>, BackendError> {
        let heads = shape.heads;
        if !heads.dim.is_multiple_of(LANES) || !heads.query.is_multiple_of(heads.kv) {
            return Err(BackendError::Unsupported(format!(
                "{} query heads, {} KV heads of {}: heads of a multiple of 8 in whole groups are computed",
                heads.query, heads.kv, heads.dim
            )));
        }
        self.resize(Sizes {
            dim: heads.dim,
            group: heads.group(),
            ..self.sizes
        })?;
        let pool = Arc::new(KvPool::new(shape)?);
        self.device.kv = Some(Arc::clone(&pool));
        Ok(pool)
    }

    fn write(&mut self, buffer: BufferId, data: &[u32]) {
        let b = &self.device.buffers[buffer.0 as usize];
        let words = b.memory.ptr::<u32>();
        assert!(
            size_of_val(data) <= b.memory.len(),
            "{} words into {:?}",
            data.len(),
            b.shape
        );
        // SAFETY: within the buffer; the workers wait (`&mut self`, and a pass ends in `finish`).
        unsafe { words.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }

    fn read(&mut self, buffer: BufferId, out: &mut [u32]) {
        let b = &self.device.buffers[buffer.0 as usize];
        let words = b.memory.ptr::<u32>();
        assert!(
            size_of_val(out) <= b.memory.len(),
            "{} words out of {:?}",
            out.len(),
            b.shape
        );
        // SAFETY: within the buffer; the workers wait.
        unsafe { words.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
    }

    fn enqueue(&mut self, op: Op) {
        self.device.check(&op);
        self.queue.push(op);
    }

    fn finish(&mut self, on_layer: &mut dyn FnMut(u32)) {
        let (device, queue) = (&self.device, &self.queue);
        let threads = self.pool.threads();
        let barrier = Arc::clone(self.pool.barrier());
        let own = || step::run(device, queue, &barrier, 0, threads, on_layer);
        let others = |t: usize| step::run(device, queue, &barrier, t, threads, &mut |_| {});
        self.pool.run(own, &others);
        self.queue.clear();
    }
}
