//! Raw logits of given texts, teacher-forced: for comparison with another implementation, or with the same weights held as f32.
//!
//! `logits MODEL [--f32] [--chunk N] [--threads N] [--tensor-parallel N] [--isa cpu-scalar|cpu-avx2|cpu-avx512|cpu-amx]` reads texts from
//! standard input, one a line, as token ids, and writes to standard output `vocab_size` little-endian f32 for each token: the logits of what follows it. `--f32`
//! holds all weights as f32 (the oracle), `--chunk 1` goes the way of decoding.

use std::error::Error;
use std::io::{BufWriter, Write};
use std::str::FromStr;

use tandem_engine::backend::cpu::Isa;
use tandem_engine::model::{LoadOptions, Scorer};

const USAGE: &str =
    "usage: logits MODEL [--f32] [--chunk N] [--threads N] [--tensor-parallel N] [--isa NAME] < ids > logits";

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut options = LoadOptions::new(args.next().ok_or(USAGE)?);
    let mut chunk = 64;
    while let Some(flag) = args.next() {
        match flag.as_str() {
            "--f32" => options.as_f32 = true,
            "--chunk" => chunk = value(args.next())?,
            "--tensor-parallel" => options.tensor_parallel = value(args.next())?,
            "--threads" => options.threads = value(args.next())?,
            "--isa" => options.isa = Some(args.next().and_then(|n| Isa::named(&n)).ok_or(USAGE)?),
            _ => return Err(format!("what is {flag:?}? {USAGE}").into()),
        }
    }
    options.max_step_tokens = chunk;
    options.max_step_seqs = chunk;
    let mut scorer = Scorer::load(&options)?;
    eprintln!(
        "{} on {}, vocabulary {}",
        scorer.spec().name,
        scorer.spec().backend,
        scorer.spec().vocab_size
    );
    let mut out = BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lines() {
        let tokens = line?
            .split_whitespace()
            .map(u32::from_str)
            .collect::<Result<Vec<_>, _>>()?;
        let mut failed = None;
        scorer.score(&tokens, chunk as usize, &mut |_, logits| {
            let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
            if let Err(e) = out.write_all(&bytes) {
                failed.get_or_insert(e);
            }
        })?;
        if let Some(e) = failed {
            return Err(e.into());
        }
    }
    out.flush()?;
    Ok(())
}

fn value<T: FromStr>(text: Option<String>) -> Result<T, Box<dyn Error>>
where
    T::Err: Error + 'static,
{
    Ok(text.ok_or(USAGE)?.parse()?)
}
