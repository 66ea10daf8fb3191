//! Tokens per second of the executor alone: no HTTP, tokenizer or scheduler. For a comparison, a driver runs cases one at a time.
//!
//! `throughput MODEL.gguf [THREADS] [cpu-scalar|cpu-avx2|cpu-avx512]` reads cases from standard input, one a line, and answers each with a line of JSON:
//! - `prefill TOKENS CHUNK`: one prompt, computed in chunks, the last one sampled
//! - `decode SEQUENCES CONTEXT STEPS`: so many steps of one token for each of the sequences, each sampled greedily
//! - `kv TOKENS`: reads and writes that many tokens' KV in the wire's order

use std::error::Error;
use std::io::Write;
use std::time::Instant;

use tandem_engine::backend::cpu::Isa;
use tandem_engine::exec::{Executor, KvRun, SampleParams, StepSeq};
use tandem_engine::model::{KvBudget, LoadOptions, load};

const GREEDY: SampleParams = SampleParams::GREEDY;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let mut options = LoadOptions::new(args.get(1).ok_or("usage: throughput MODEL.gguf [THREADS] [BACKEND]")?);
    if let Some(threads) = args.get(2) {
        options.threads = threads.parse()?;
    }
    if let Some(name) = args.get(3) {
        options.isa = Some(Isa::named(name).ok_or("cpu-scalar, cpu-avx2 or cpu-avx512")?);
    }
    options.kv = KvBudget::Mib(512);
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
        let seconds = match (words[0], numbers.as_slice()) {
            ("prefill", &[tokens, chunk]) => prefill(&mut *model, &[0], tokens, chunk)?,
            ("decode", &[seqs, context, steps]) => decode(&mut *model, seqs, context, steps)?,
            ("kv", &[tokens]) => kv(&*model, tokens)?,
            _ => return Err(format!("what is {line:?}?").into()),
        };
        println!("{{\"case\": {line:?}, \"seconds\": {seconds:.6}}}");
        std::io::stdout().flush()?;
    }
    Ok(())
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
