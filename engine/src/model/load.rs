//! From a file to an executor: checks, memory, packing, hash.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use tandem_wire::KvLayout;
use tandem_wire::layout::KvDtype;

use super::LoadError;
use super::budget;
use super::checkpoint::Checkpoint;
use super::forward::{self, Bounds, Workspace};
use super::ranks::{AllHeads, Peers, RANK_LIMIT, Rank};
use super::revision;
use super::runner::Runner;
use super::vocabulary;
use super::weights::{self, Cut};
use crate::backend::cpu::{Cpu, Isa, ThreadCommunicator};
use crate::backend::{Backend, BackendError, Context, KvShape};
use crate::exec::{Executor, KvStore, ModelSpec};
use crate::sample::grammar::Vocabulary;

/// A KV cache that holds fewer tokens, and fewer than the model takes, is a mistake unless the length is asked for.
const LEAST_TOKENS: usize = 512;

/// The most tokens of a KV page.
pub const MAX_PAGE_TOKENS: u32 = 1024;
/// The most tokens of one step.
pub const MAX_STEP_TOKENS: u32 = 65_536;
/// The most sequences of one step.
pub const MAX_STEP_SEQS: u32 = 4_096;
/// The most parts that a model is cut into.
pub const MAX_RANKS: u32 = 64;

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
    /// What its bytes have to be, see [`revision`]; `None`: whatever is found.
    pub revision: Option<String>,
    /// Compute threads, all ranks together.
    pub threads: usize,
    /// Parts of every layer, each with a rank of its own: heads and inner columns are cut, embedding and head are not.
    pub tensor_parallel: usize,
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
            revision: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            tensor_parallel: 1,
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

/// Loads a model onto CPU backends made for it.
pub(super) fn load_cpu(options: &LoadOptions, progress: &mut dyn FnMut(u8)) -> Result<Runner<Cpu>, LoadError> {
    let isa = options.isa.unwrap_or_else(Isa::detect);
    let threads = (options.threads / options.tensor_parallel.max(1)).max(1);
    load_on(|context| Cpu::new(threads, isa, context), options, progress)
}

/// Loads a model onto backends that `make` makes, one for each rank.
pub(super) fn load_on<B: Backend + 'static>(
    make: impl Fn(Context) -> Result<B, BackendError> + Sync,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u8),
) -> Result<Runner<B>, LoadError> {
    progress(0);
    let checkpoint = Checkpoint::open(&options.path)?;
    let sizes = Sizes::choose(options, &checkpoint)?;
    let c = checkpoint.config();
    let ranks = options.tensor_parallel;
    let communicator = (ranks > 1).then(|| {
        Arc::new(ThreadCommunicator::new(
            ranks,
            sizes.bounds.rows * c.hidden_size,
            RANK_LIMIT,
        ))
    });
    let context = |rank| match &communicator {
        None => Context::single(),
        Some(c) => Context {
            rank,
            communicator: Arc::<ThreadCommunicator>::clone(c),
        },
    };
    let one = |rank, progress: &mut dyn FnMut(u8)| {
        let cut = Cut { rank, ranks };
        load_rank(
            make(context(rank)),
            context(rank),
            &checkpoint,
            cut,
            &sizes,
            options,
            progress,
        )
    };
    let one = &one;
    let vocabulary = || Vocabulary::new(vocabulary::read(&options.path)?, c.vocab_size as u32, &c.end_tokens);
    let (hash, vocabulary, first, others) = thread::scope(|scope| {
        let hash = scope.spawn(|| {
            let hash = checkpoint.hash();
            let expected = options.revision.as_deref();
            expected.map_or(Ok(hash), |expected| {
                revision::check(&options.path, expected, hash).map(|()| hash)
            })
        });
        let vocabulary = scope.spawn(vocabulary);
        let others: Vec<_> = (1..ranks)
            .map(|rank| scope.spawn(move || one(rank, &mut |_| {})))
            .collect();
        let first = one(0, progress);
        let others: Vec<_> = others.into_iter().map(thread::ScopedJoinHandle::join).collect();
        (hash.join(), vocabulary.join(), first, others)
    });
    let (rank, pool) = first?;
    let mut pools = vec![pool];
    let mut peers = communicator.map_or_else(Peers::default, Peers::new);
    for other in others {
        let (rank, pool) = other.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        peers
            .start(rank)
            .map_err(|source| backend_error(&options.path, source))?;
        pools.push(pool);
    }
    let kv = match pools.len() {
        1 => pools.remove(0),
        _ => Arc::new(AllHeads::new(pools, 2 * c.num_key_value_heads / ranks * c.head_dim)),
    };
    let hash = hash.map_err(|_| LoadError::Damaged {
        path: options.path.clone(),
        what: "it could not be hashed".to_owned(),
    })??;
    let vocabulary = vocabulary
        .unwrap_or_else(|_| Err("its vocabulary breaks the reader".to_owned()))
        .map(Arc::new);
    if let Err(why) = &vocabulary {
        tracing::warn!("no answer can be held to a schema: {why}");
    }
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
        vocabulary,
        backend: rank.backend.name(),
        total_pages: sizes.kv.pages as u32,
        page_tokens: options.page_tokens,
        max_step_tokens: options.max_step_tokens,
        max_step_seqs: options.max_step_seqs,
    };
    progress(100);
    Ok(Runner::new(rank, peers, spec, kv))
}

/// Packs one rank's weights and makes its buffers.
fn load_rank<B: Backend>(
    backend: Result<B, BackendError>,
    context: Context,
    checkpoint: &Checkpoint,
    cut: Cut,
    sizes: &Sizes,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u8),
) -> Result<(Rank<B>, Arc<dyn KvStore>), LoadError> {
    let error = |source| backend_error(checkpoint.path(), source);
    let mut backend = backend.map_err(error)?;
    let own = weights::part_of(checkpoint.config(), cut.ranks);
    let workspace = Workspace::new(&mut backend, &own, sizes.bounds).map_err(error)?;
    let kv = KvShape {
        heads: forward::heads(&own),
        ..sizes.kv
    };
    let kv = backend.kv_pool(kv).map_err(error)?;
    let model = weights::pack(
        &mut backend,
        checkpoint,
        cut,
        options.as_f32,
        sizes.max_length,
        progress,
    )?;
    let rank = Rank {
        backend,
        context,
        model,
        workspace,
        bounds: sizes.bounds,
    };
    Ok((rank, kv))
}

fn backend_error(path: &Path, source: BackendError) -> LoadError {
    LoadError::Backend {
        path: path.to_owned(),
        source,
    }
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
        if !(1..=MAX_RANKS as usize).contains(&o.tensor_parallel) {
            let why = format!("at least 1 and at most {MAX_RANKS} are possible");
            return refuse("--tensor-parallel", o.tensor_parallel.to_string(), &why);
        }
        if let Err(why) = weights::check_ranks(c, o.tensor_parallel) {
            return refuse("--tensor-parallel", o.tensor_parallel.to_string(), &why);
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
        let weights = weights::packed_bytes(checkpoint, o.tensor_parallel, o.as_f32);
        let own = weights::part_of(c, o.tensor_parallel);
        let buffers: usize = forward::shapes(&own, self.bounds)
            .into_iter()
            .map(Cpu::buffer_bytes)
            .sum();
        let rope = self.max_length * c.head_dim * 4;
        let work = ((buffers + rope) * o.tensor_parallel) as u64 + (o.threads as u64) * (4 << 20);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_kv_bytes_than_64_bits_count_are_refused_by_flag() {
        let budget = KvBudget::Pages(4_000_000);
        let e = pool(budget, 1024, 1 << 43).unwrap_err().to_string();
        assert!(e.contains("--kv-pages 4000000") && e.contains("64 bits"), "{e}");
        assert_eq!(pool(budget, 1024, 1 << 42).unwrap(), (4_000_000, 4_000_000 << 42));
    }
}
