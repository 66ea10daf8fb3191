//! Tokens per second of the executor alone: no HTTP, tokenizer or scheduler. For a comparison, a driver runs cases one at a time.
//!
//! `throughput MODEL [THREADS] [cpu-scalar|cpu-avx2|cpu-avx512|cpu-amx]` reads cases from standard input, one a line, and answers each with a line of JSON:
//! - `prefill TOKENS CHUNK`: one prompt, computed in chunks, the last one sampled
//! - `decode SEQUENCES CONTEXT STEPS`: so many steps of one token for each of the sequences, each sampled greedily
//! - `kv TOKENS`: reads and writes that many tokens' KV in the wire's order
//!
//! An answer tells the share of the machine's limits that was reached: of the bytes that it reads in a second (each step reads all
//! weights once; the KV cache is not counted), and of its int8 products (attention is not counted).

mod limits;

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use tandem_engine::backend::cpu::Isa;
use tandem_engine::exec::{Executor, KvRun, SampleParams, StepSeq};
use tandem_engine::model::checkpoint::{Checkpoint, Part};
use tandem_engine::model::{KvBudget, LoadOptions, load};

use limits::Limits;

const GREEDY: SampleParams = SampleParams::GREEDY;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let mut options = LoadOptions::new(args.get(1).ok_or("usage: throughput MODEL.gguf [THREADS] [BACKEND]")?);
    if let Some(threads) = args.get(2) {
        options.threads = threads.parse()?;
    }
    if let Some(name) = args.get(3) {
        options.isa = Some(Isa::named(name).ok_or("cpu-scalar, cpu-avx2, cpu-avx512 or cpu-amx")?);
    }
    options.kv = KvBudget::Mib(512);
    let weights = Weights::of(&options.path)?;
    let limits = Limits::measure(options.threads, weights.bytes());
    println!(
        "{{\"read_gb_s\": {:.1}, \"read_1_gib_gb_s\": {:.1}, \"int8_gmac_s\": {:.0}}}",
        limits.read / 1e9,
        limits.read_memory / 1e9,
        limits.int8 / 1e9
    );
    let start = Instant::now();
    let mut model = load(&options, &mut |_| {})?;
    eprintln!(
        "{} on {} in {:.0?}",
        model.spec().name,
        model.spec().backend,
        start.elapsed()
    );
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers = words[1..]
            .iter()
            .map(|w| w.parse())
            .collect::<Result<Vec<usize>, _>>()?;
        // tokens, those of them with logits, passes over the weights
        let (seconds, work) = match (words[0], numbers.as_slice()) {
            ("prefill", &[tokens, chunk]) => {
                let seconds = prefill(&mut *model, &[0], tokens, chunk)?;
                (seconds, Some((tokens, 1, tokens.div_ceil(chunk))))
            }
            ("decode", &[seqs, context, steps]) => {
                let seconds = decode(&mut *model, seqs, context, steps)?;
                (seconds, Some((seqs * steps, seqs * steps, steps)))
            }
            ("kv", &[tokens]) => (kv(&*model, tokens)?, None),
            _ => return Err(format!("what is {line:?}?").into()),
        };
        print!("{{\"case\": {line:?}, \"seconds\": {seconds:.6}");
        if let Some((tokens, sampled, passes)) = work {
            let read = (passes * weights.layer_bytes + sampled.min(passes) * weights.head_bytes) as f64;
            let products = (tokens * weights.layer_values + sampled * weights.head_values) as f64;
            print!(
                ", \"tokens_per_s\": {:.1}, \"share_of_read\": {:.2}, \"share_of_int8\": {:.2}",
                tokens as f64 / seconds,
                read / seconds / limits.read,
                products / seconds / limits.int8
            );
        }
        println!("}}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// How many weights a pass multiplies with, and their bytes in the file.
#[derive(Default)]
struct Weights {
    layer_values: usize,
    layer_bytes: usize,
    head_values: usize,
    head_bytes: usize,
}

impl Weights {
    fn of(path: &Path) -> Result<Self, Box<dyn Error>> {
        let checkpoint = Checkpoint::open(path)?;
        let config = checkpoint.config();
        let head = if checkpoint.tensor(Part::Output).is_some() {
            Part::Output
        } else {
            Part::TokenEmbd
        };
        let mut weights = Self::default();
        for part in Part::all(config) {
            let (dims, Some(tensor)) = (part.dims(config), checkpoint.tensor(part)) else {
                continue;
            };
            let (values, bytes) = (dims.iter().product::<usize>(), tensor.bytes.len());
            if part == head {
                (weights.head_values, weights.head_bytes) = (values, bytes);
            } else if matches!(part, Part::Layer(..)) && dims.len() == 2 {
                weights.layer_values += values;
                weights.layer_bytes += bytes;
            }
        }
        Ok(weights)
    }

    fn bytes(&self) -> usize {
        self.layer_bytes + self.head_bytes
    }
}

/// The pages of sequence `s` when each has room for `tokens`.
fn pages(model: &dyn Executor, s: usize, tokens: usize) -> Vec<u32> {
    let each = tokens.div_ceil(model.spec().page_tokens as usize);
    (s * each..(s + 1) * each).map(|p| p as u32).collect()
}

fn prompt(model: &dyn Executor, s: usize, tokens: usize) -> Vec<u32> {
    (0..tokens)
        .map(|i| ((i * 7919 + s * 104_729 + 100) % model.spec().vocab_size as usize) as u32)
        .collect()
}

/// Computes prompts one after the other; the seconds.
fn prefill(model: &mut dyn Executor, seqs: &[usize], tokens: usize, chunk: usize) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    for &s in seqs {
        let (ids, pages) = (prompt(model, s, tokens), pages(model, s, tokens + 256));
        let mut done = 0;
        for part in ids.chunks(chunk) {
            let end = done + part.len() == tokens;
            let seq = StepSeq {
                tokens: part,
                first_position: done as u32,
                pages: &pages,
                sample: end.then(|| GREEDY.into()),
            };
            model.step(&[seq], &mut |_| {})?;
            done += part.len();
        }
    }
    Ok(start.elapsed().as_secs_f64())
}

fn decode(model: &mut dyn Executor, seqs: usize, context: usize, steps: usize) -> Result<f64, Box<dyn Error>> {
    let all: Vec<usize> = (0..seqs).collect();
    prefill(model, &all, context, 128)?;
    let pages: Vec<Vec<u32>> = all.iter().map(|s| pages(model, *s, context + 256)).collect();
    let tokens: Vec<Vec<u32>> = all.iter().map(|s| prompt(model, s + 1, steps)).collect();
    let start = Instant::now();
    for k in 0..steps {
        let batch: Vec<StepSeq<'_>> = all
            .iter()
            .map(|&s| StepSeq {
                tokens: &tokens[s][k..=k],
                first_position: (context + k) as u32,
                pages: &pages[s],
                sample: Some(GREEDY.into()),
            })
            .collect();
        model.step(&batch, &mut |_| {})?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn kv(model: &dyn Executor, tokens: usize) -> Result<f64, Box<dyn Error>> {
    let (kv, layout) = (model.kv(), model.spec().layout.clone());
    let pages = pages(model, 0, tokens);
    let mut bytes = vec![0; tokens * layout.components[0].token_bytes()];
    let start = Instant::now();
    for layer in 0..layout.layers {
        for component in 0..layout.components.len() as u32 {
            let run = KvRun {
                layer,
                component,
                first_token: 0,
                tokens: tokens as u32,
            };
            kv.read(&pages, run, &mut bytes)?;
            kv.write(&pages, run, &bytes)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let moved = 2.0 * (tokens * layout.token_bytes()) as f64;
    eprintln!("{:.2} GB/s", moved / seconds / 1e9);
    Ok(seconds)
}
