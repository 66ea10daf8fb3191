//! From a file to an executor: checks, memory, packing, hash.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tandem_wire::KvLayout;
use tandem_wire::layout::KvDtype;

use super::LoadError;
use super::budget;
use super::checkpoint::{Checkpoint, LayerPart, Part, Tensor};
use super::config::RopePairs;
use super::forward::{self, Bounds, Layer, Llama, Workspace};
use super::runner::Runner;
use super::tensor::{BLOCK, Dtype, dequantise_row};
use crate::backend::cpu::{Cpu, Isa};
use crate::backend::{Backend, BackendError, Context, KvShape, Row, WeightId};
use crate::exec::{Executor, ModelSpec};

/// A KV cache that holds fewer tokens, and fewer than the model takes, is a mistake unless the length is asked for.
const LEAST_TOKENS: usize = 512;

/// The most tokens of a KV page.
pub const MAX_PAGE_TOKENS: u32 = 1024;
/// The most tokens of one step.
pub const MAX_STEP_TOKENS: u32 = 65_536;
/// The most sequences of one step.
pub const MAX_STEP_SEQS: u32 = 4_096;

/// How much KV cache to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// So many pages.
    Pages(u32),
    /// As many pages as fit into so many MiB.
    Mib(u64),
}

impl KvBudget {
    /// As on the command line.
    fn flag(self) -> (&'static str, String) {
        match self {
            Self::Pages(n) => ("--kv-pages", n.to_string()),
            Self::Mib(n) => ("--kv-memory-mib", n.to_string()),
        }
    }
}

/// What to load and how large to set it up.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The model.
    pub path: PathBuf,
    /// Compute threads.
    pub threads: usize,
    /// Kernels; `None`: the best that this CPU has.
    pub isa: Option<Isa>,
    /// KV cache.
    pub kv: KvBudget,
    /// Tokens a page, a multiple of 8.
    pub page_tokens: u32,
    /// The longest sequence; `None`: the model's, or what the KV cache holds if that is less.
    pub max_length_tokens: Option<u32>,
    /// The most tokens of one step.
    pub max_step_tokens: u32,
    /// The most sequences of one step.
    pub max_step_seqs: u32,
    /// Hold every matrix as f32, whatever the file holds: matmuls then round nothing but f32 sums. The oracle of numerics; several times
    /// the memory and time.
    pub as_f32: bool,
}

impl LoadOptions {
    /// Defaults for a file: all cores, 512 MiB of KV cache in pages of 16 tokens, steps of up to 512 tokens and 32 sequences.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            isa: None,
            kv: KvBudget::Mib(512),
            page_tokens: 16,
            max_length_tokens: None,
            max_step_tokens: 512,
            max_step_seqs: 32,
            as_f32: false,
        }
    }
}

/// Loads a model onto the CPU. `progress` is told percent, rising from 0 to 100.
pub fn load(options: &LoadOptions, progress: &mut dyn FnMut(u8)) -> Result<Box<dyn Executor>, LoadError> {
    Ok(Box::new(load_cpu(options, progress)?))
}

/// Loads a model onto a CPU backend made for it.
pub(super) fn load_cpu(options: &LoadOptions, progress: &mut dyn FnMut(u8)) -> Result<Runner<Cpu>, LoadError> {
    let error = |source| LoadError::Backend {
        path: options.path.clone(),
        source,
    };
    let context = Context::single();
    let cpu = Cpu::new(
        options.threads,
        options.isa.unwrap_or_else(Isa::detect),
        context.clone(),
    )
    .map_err(error)?;
    load_on(cpu, context, options, progress)
}

/// Loads a model onto `backend`.
pub(super) fn load_on<B: Backend>(
    backend: B,
    context: Context,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u8),
) -> Result<Runner<B>, LoadError> {
    progress(0);
    let checkpoint = Checkpoint::open(&options.path)?;
    let sizes = Sizes::choose(options, &checkpoint)?;
    let (hash, built) = std::thread::scope(|scope| {
        let hash = scope.spawn(|| checkpoint.hash());
        let built = build(backend, &checkpoint, &sizes, options.as_f32, progress);
        (hash.join(), built)
    });
    let (backend, model, kv, workspace) = built?;
    let hash = hash.map_err(|_| LoadError::Damaged {
        path: options.path.clone(),
        what: "it could not be hashed".to_owned(),
    })?;
    let c = &model.config;
    let spec = ModelSpec {
        name: c.name.clone(),
        hash,
        layout: KvLayout::heads(
            c.num_hidden_layers as u32,
            c.num_key_value_heads as u32,
            c.head_dim as u32,
            KvDtype::F16,
            options.page_tokens,
        ),
        max_length_tokens: sizes.max_length as u32,
        vocab_size: c.vocab_size as u32,
        end_tokens: c.end_tokens.clone(),
        backend: backend.name(),
        total_pages: sizes.kv.pages as u32,
        page_tokens: options.page_tokens,
        max_step_tokens: options.max_step_tokens,
        max_step_seqs: options.max_step_seqs,
    };
    progress(100);
    Ok(Runner::new(backend, context, spec, model, workspace, sizes.bounds, kv))
}

/// What follows from options and config.
struct Sizes {
    kv: KvShape,
    max_length: usize,
    bounds: Bounds,
}

impl Sizes {
    /// Checks the options against the model and the machine.
    fn choose(o: &LoadOptions, checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let c = checkpoint.config();
        let refuse = |option, value: String, why: &str| {
            Err(LoadError::Option {
                option,
                value,
                why: why.to_owned(),
            })
        };
        if o.page_tokens == 0 || !o.page_tokens.is_multiple_of(8) || o.page_tokens > MAX_PAGE_TOKENS {
            return refuse(
                "--page-tokens",
                o.page_tokens.to_string(),
                &format!("a multiple of 8 up to {MAX_PAGE_TOKENS} is needed"),
            );
        }
        for (option, value, most) in [
            ("--step-tokens", o.max_step_tokens, MAX_STEP_TOKENS),
            ("--max-running", o.max_step_seqs, MAX_STEP_SEQS),
        ] {
            if !(1..=most).contains(&value) {
                return refuse(
                    option,
                    value.to_string(),
                    &format!("at least 1 and at most {most} are needed"),
                );
            }
        }
        if !(1..=1024).contains(&o.threads) {
            return refuse(
                "--threads",
                o.threads.to_string(),
                "at least 1 and at most 1024 are needed",
            );
        }
        let one = KvShape {
            layers: c.num_hidden_layers,
            heads: forward::heads(c),
            pages: 1,
            page_tokens: o.page_tokens as usize,
        };
        let page_bytes = (2 * 2 * one.layers * one.page_tokens * one.heads.kv * one.heads.dim) as u64;
        let (pages, kv_bytes) = pool(o.kv, o.page_tokens, page_bytes)?;
        let pool_tokens = pages as usize * o.page_tokens as usize;
        let max_length = match o.max_length_tokens.map(|n| n as usize) {
            None if pool_tokens < c.max_position_embeddings.min(LEAST_TOKENS) => {
                let (option, value) = o.kv.flag();
                let why = format!(
                    "holds {pool_tokens} tokens, the model takes {}; raise {option}, or ask for sequences this short with \
                     --max-length-tokens {pool_tokens}",
                    c.max_position_embeddings
                );
                return refuse(option, value, &why);
            }
            None => {
                if pool_tokens < c.max_position_embeddings {
                    let (option, value) = o.kv.flag();
                    tracing::warn!(
                        pool_tokens,
                        model_tokens = c.max_position_embeddings,
                        "longer sequences than the KV cache holds will be refused: {option} {value} holds {pool_tokens} \
                         tokens, the model takes {}; raise {option}, or set --max-length-tokens",
                        c.max_position_embeddings
                    );
                }
                c.max_position_embeddings.min(pool_tokens)
            }
            Some(n) if (2..=c.max_position_embeddings.min(pool_tokens)).contains(&n) => n,
            Some(n) => {
                let (option, value) = o.kv.flag();
                let why = format!(
                    "the model takes 2 to {} tokens, the KV cache of {option} {value} holds {pool_tokens}; lower \
                     --max-length-tokens or raise {option}",
                    c.max_position_embeddings
                );
                return refuse("--max-length-tokens", n.to_string(), &why);
            }
        };
        let kv = KvShape {
            pages: pages as usize,
            ..one
        };
        let bounds = Bounds {
            rows: o.max_step_tokens as usize,
            seqs: o.max_step_seqs as usize,
            seq_pages: max_length.div_ceil(o.page_tokens as usize),
            seq_adjust: forward::adjustments(c.vocab_size, max_length),
        };
        let sizes = Self { kv, max_length, bounds };
        sizes.check_memory(o, checkpoint, kv_bytes)?;
        Ok(sizes)
    }

    /// Refuses a set-up that the machine has no memory for, before any of it is taken.
    fn check_memory(&self, o: &LoadOptions, checkpoint: &Checkpoint, kv: u64) -> Result<(), LoadError> {
        let c = checkpoint.config();
        let Some(available) = budget::available_bytes() else {
            return Ok(());
        };
        let weights = packed_bytes(checkpoint, o.as_f32);
        let buffers: usize = forward::shapes(c, self.bounds).into_iter().map(Cpu::buffer_bytes).sum();
        let rope = self.max_length * c.head_dim * 4;
        let work = (buffers + rope) as u64 + (o.threads as u64) * (4 << 20);
        let need = weights.saturating_add(kv).saturating_add(work);
        if need <= available {
            return Ok(());
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        Err(LoadError::Memory {
            path: o.path.clone(),
            need_mib: mib(need),
            weights_mib: mib(weights),
            kv_mib: mib(kv),
            work_mib: mib(work),
            available_mib: available >> 20,
        })
    }
}

/// Pages of the KV cache, and all their bytes.
pub(super) fn pool(budget: KvBudget, page_tokens: u32, page_bytes: u64) -> Result<(u64, u64), LoadError> {
    let refuse = |why: String| {
        let (option, value) = budget.flag();
        LoadError::Option { option, value, why }
    };
    let pages = match budget {
        KvBudget::Pages(n) => u64::from(n),
        KvBudget::Mib(n) => n.saturating_mul(1 << 20) / page_bytes,
    };
    // slots are 32 bits
    if pages == 0 || pages > u64::from(u32::MAX / page_tokens) {
        return Err(refuse(format!(
            "makes {pages} pages of {page_bytes} bytes; at least one and fewer than 2^32 tokens are needed"
        )));
    }
    let bytes = pages.checked_mul(page_bytes).ok_or_else(|| {
        refuse(format!(
            "makes {pages} pages of {page_bytes} bytes, more than 64 bits can count; lower it"
        ))
    })?;
    Ok((pages, bytes))
}

/// Bytes of the weights as the backend packs them.
fn packed_bytes(checkpoint: &Checkpoint, as_f32: bool) -> u64 {
    let c = checkpoint.config();
    let held = |dtype| if as_f32 { Dtype::F32 } else { dtype };
    let matrix = |parts: &[Part]| -> u64 {
        let rows: Vec<_> = parts
            .iter()
            .filter_map(|part| Some((held(checkpoint.tensor(*part)?.dtype), part.dims(c)[1])))
            .collect();
        match parts[0].dims(c)[0] {
            _ if rows.is_empty() => 0,
            k => Cpu::matrix_bytes(&rows, k),
        }
    };
    let layer = |l: usize| -> u64 {
        let of = |parts: &[LayerPart]| matrix(&parts.iter().map(|p| Part::Layer(l, *p)).collect::<Vec<_>>());
        of(&QKV) + of(&[LayerPart::AttnOutput]) + of(&GATE_UP) + of(&[LayerPart::Down])
    };
    (0..c.num_hidden_layers).map(layer).sum::<u64>() + matrix(&[Part::TokenEmbd]) + matrix(&[Part::Output])
}

/// The tensors of a layer that are packed as one matrix.
const QKV: [LayerPart; 3] = [LayerPart::Q, LayerPart::K, LayerPart::V];
const GATE_UP: [LayerPart; 2] = [LayerPart::Gate, LayerPart::Up];

type Built<B> = (B, Llama, std::sync::Arc<dyn crate::exec::KvStore>, Workspace);

/// Packs the weights and makes the buffers.
fn build<B: Backend>(
    mut backend: B,
    checkpoint: &Checkpoint,
    sizes: &Sizes,
    as_f32: bool,
    progress: &mut dyn FnMut(u8),
) -> Result<Built<B>, LoadError> {
    let error = |source: BackendError| LoadError::Backend {
        path: checkpoint.path().to_owned(),
        source,
    };
    let c = checkpoint.config();
    if c.rope_pairs == RopePairs::Halves || c.qkv_bias || c.qk_norm || c.rope_scaling.is_some() {
        return Err(LoadError::Architecture {
            path: checkpoint.path().to_owned(),
            found: c.architecture.name().to_owned(),
            known: "llama",
        });
    }
    let workspace = Workspace::new(&mut backend, c, sizes.bounds).map_err(error)?;
    let kv = backend.kv_pool(sizes.kv).map_err(error)?;
    let mut w = Weights {
        checkpoint,
        backend: &mut backend,
        used: BTreeSet::new(),
        as_f32,
        done: 0,
        all: checkpoint.tensor_bytes().max(1),
        progress,
    };
    let token_embd = w.matrix(&[Part::TokenEmbd], false)?;
    let mut layers = Vec::with_capacity(c.num_hidden_layers);
    for l in 0..c.num_hidden_layers {
        let part = |p: LayerPart| Part::Layer(l, p);
        layers.push(Layer {
            attn_norm: w.vector(part(LayerPart::AttnNorm))?,
            qkv: w.matrix(&QKV.map(part), false)?,
            attn_output: w.matrix(&[part(LayerPart::AttnOutput)], false)?,
            ffn_norm: w.vector(part(LayerPart::FfnNorm))?,
            gate_up: w.matrix(&GATE_UP.map(part), true)?,
            ffn_down: w.matrix(&[part(LayerPart::Down)], false)?,
        });
    }
    let output_norm = w.vector(Part::OutputNorm)?;
    let output = if checkpoint.tensor(Part::Output).is_some() {
        w.matrix(&[Part::Output], false)?
    } else {
        token_embd
    };
    let factors = if checkpoint.tensor(Part::RopeFreqs).is_some() {
        let factors = w.values(Part::RopeFreqs)?;
        forward::check_factors(checkpoint.path(), &factors)?;
        Some(factors)
    } else {
        None
    };
    checkpoint.all_used(&w.used)?;
    let table = forward::rope_table(c, factors.as_deref(), sizes.max_length);
    let rope = backend.vector(table).map_err(error)?;
    Ok((
        backend,
        Llama {
            config: c.clone(),
            token_embd,
            layers,
            output_norm,
            output,
            rope,
        },
        kv,
        workspace,
    ))
}

/// Takes tensors out of a checkpoint.
struct Weights<'a, B> {
    checkpoint: &'a Checkpoint,
    backend: &'a mut B,
    used: BTreeSet<Part>,
    as_f32: bool,
    /// Bytes taken, of how many.
    done: u64,
    all: u64,
    progress: &'a mut dyn FnMut(u8),
}

impl<'a, B: Backend> Weights<'a, B> {
    fn tensor(&mut self, part: Part) -> Result<Tensor<'a>, LoadError> {
        let tensor = self.checkpoint.tensor(part).ok_or_else(|| LoadError::MissingTensor {
            path: self.checkpoint.path().to_owned(),
            tensor: self.checkpoint.name(part),
        })?;
        self.used.insert(part);
        self.done += tensor.bytes.len() as u64;
        // tensors neither overlap nor are taken twice; the rest is making tables and waiting for the hash
        (self.progress)((self.done * 98 / self.all) as u8 + 1);
        Ok(tensor)
    }

    fn values(&mut self, part: Part) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(part)?;
        let mut values = vec![0.0; part.dims(self.checkpoint.config())[0]];
        dequantise_row(tensor.dtype, tensor.bytes, &mut values);
        Ok(values)
    }

    fn error(&self, source: BackendError) -> LoadError {
        LoadError::Backend {
            path: self.checkpoint.path().to_owned(),
            source,
        }
    }

    fn vector(&mut self, part: Part) -> Result<WeightId, LoadError> {
        let values = self.values(part)?;
        self.backend.vector(values).map_err(|e| self.error(e))
    }

    /// One matrix of the rows of several tensors of as many inputs: one after the other, or in turn by 32.
    fn matrix(&mut self, from: &[Part], in_turn: bool) -> Result<WeightId, LoadError> {
        let mut parts: Vec<Vec<Row<'a>>> = Vec::with_capacity(from.len());
        for part in from {
            let tensor = self.tensor(*part)?;
            let n = part.dims(self.checkpoint.config())[1];
            parts.push(
                tensor
                    .bytes
                    .chunks_exact(tensor.bytes.len() / n)
                    .map(|bytes| Row {
                        dtype: tensor.dtype,
                        bytes,
                    })
                    .collect(),
            );
        }
        let rows: Vec<Row<'a>> = if in_turn {
            (0..parts[0].len() / BLOCK)
                .flat_map(|i| parts.iter().flat_map(move |p| &p[i * BLOCK..(i + 1) * BLOCK]))
                .copied()
                .collect()
        } else {
            parts.concat()
        };
        let k = from[0].dims(self.checkpoint.config())[0];
        if self.as_f32 {
            let values = dequantised(&rows, k);
            let row = |bytes| Row {
                dtype: Dtype::F32,
                bytes,
            };
            let rows: Vec<Row<'_>> = values.chunks_exact(4 * k).map(row).collect();
            return self.backend.matrix(&rows, k).map_err(|e| self.error(e));
        }
        self.backend.matrix(&rows, k).map_err(|e| self.error(e))
    }
}

/// The bytes of rows of `k` values as f32.
fn dequantised(rows: &[Row<'_>], k: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows.len() * k * 4);
    let mut values = vec![0.0; k];
    for row in rows {
        dequantise_row(row.dtype, row.bytes, &mut values);
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    bytes
}
