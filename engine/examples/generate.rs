//! Continues a prompt of token ids greedily and prints the ids: `generate MODEL.gguf COUNT ID,ID,... [THREADS] [cpu-scalar|cpu-avx2|cpu-avx512|cpu-amx]`.

use std::error::Error;
use std::path::PathBuf;

use tandem_engine::backend::cpu::Isa;
use tandem_engine::exec::{SampleParams, Sampled, StepSeq};
use tandem_engine::model::{LoadOptions, load};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, path, count, ids, rest @ ..] = args.as_slice() else {
        return Err("usage: generate MODEL.gguf COUNT ID,ID,... [THREADS] [BACKEND]".into());
    };
    let mut options = LoadOptions::new(PathBuf::from(path));
    if let Some(threads) = rest.first() {
        options.threads = threads.parse()?;
    }
    if let Some(name) = rest.get(1) {
        options.isa = Some(Isa::named(name).ok_or("cpu-scalar, cpu-avx2, cpu-avx512 or cpu-amx")?);
    }
    let mut tokens = ids.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let prompt = tokens.len();
    let start = std::time::Instant::now();
    let mut model = load(&options, &mut |_| {})?;
    let spec = model.spec();
    let pages: Vec<u32> = (0..spec.max_length_tokens.div_ceil(spec.page_tokens)).collect();
    eprintln!("{} on {} in {:.0?}", spec.name, spec.backend, start.elapsed());
    let greedy = SampleParams::GREEDY;
    let mut done = 0;
    for _ in 0..count.parse()? {
        let seq = StepSeq {
            tokens: &tokens[done..],
            first_position: done as u32,
            pages: &pages,
            sample: Some(greedy.into()),
        };
        match model.step(&[seq], &mut |_| {})?.remove(0) {
            Sampled::Token(t, _) => {
                done = tokens.len();
                tokens.push(t);
            }
            other => return Err(format!("{other:?}").into()),
        }
    }
    let text: Vec<String> = tokens[prompt..].iter().map(u32::to_string).collect();
    println!("{}", text.join(","));
    Ok(())
}
