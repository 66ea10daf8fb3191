//! A deterministic executor whose every token depends on every KV byte of its sequence.
//!
//! The KV of a token is a function of the token, its position and a running hash of all KV before it; a sample reads the
//! whole sequence's KV back and hashes it. So a byte that is lost, stale or another request's changes all tokens after it,
//! and neither neighbours nor chunks can.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock};
use tandem_engine::exec::{
    Adjust, Executor, KvError, KvRun, KvStore, Logprob, ModelSpec, PageId, Sample, SampleParams, Sampled, StepError,
    StepSeq,
};
use tandem_engine::sample::grammar::Vocabulary;
use tandem_engine::sample::logprob::{self, LOGPROB_WORDS};
use tandem_engine::sample::{Unchosen, Work};
use tandem_engine::sched::Sampling;
use tandem_wire::KvLayout;
use tandem_wire::layout::KvDtype;

/// Ends an answer; sampled about once in 2,000 tokens.
pub const END_TOKEN: u32 = 2;
const VOCAB: u32 = 2_048;
const LAYERS: u32 = 3;
const HEADS: u32 = 2;
const HEAD_DIM: u32 = 8;
/// Bytes of one token in one component of one layer.
const RUN_BYTES: usize = HEADS as usize * HEAD_DIM as usize * 2;
/// Bytes of one token.
const TOKEN_BYTES: usize = LAYERS as usize * 2 * RUN_BYTES;

/// Every byte, and what JSON often holds; all other tokens stand for no text.
pub fn token_bytes() -> Vec<Vec<u8>> {
    let mut tokens = vec![Vec::new(); 10];
    tokens.extend((0..=255).map(|byte| vec![byte]));
    let words = [
        "{\"", "\":", "\": ", "\",", "\", \"", "\"}", "[1", "],", "true", "false", "null", "name", "12", "ab",
    ];
    tokens.extend(words.map(|w| w.as_bytes().to_vec()));
    tokens
}

fn vocabulary() -> Result<Arc<Vocabulary>, String> {
    static MADE: OnceLock<Result<Arc<Vocabulary>, String>> = OnceLock::new();
    let made = || Vocabulary::new(token_bytes(), VOCAB, &[END_TOKEN]).map(Arc::new);
    MADE.get_or_init(made).clone()
}

/// What an executor is set up for.
#[derive(Debug, Clone)]
pub struct FakeConfig {
    pub total_pages: u32,
    pub page_tokens: u32,
    pub max_length_tokens: u32,
    pub max_step_tokens: u32,
    pub max_step_seqs: u32,
    /// Stands for the model's weights: other salt, other KV and tokens.
    pub salt: u64,
}

impl Default for FakeConfig {
    fn default() -> Self {
        Self {
            total_pages: 256,
            page_tokens: 8,
            max_length_tokens: 1_024,
            max_step_tokens: 512,
            max_step_seqs: 32,
            salt: 7,
        }
    }
}

#[derive(Debug, Default)]
struct Control {
    step_delay: Duration,
    layer_delay: Duration,
    /// `Some(n)`: only `n` more steps may start.
    allowed: Option<u64>,
    fail_next: Option<String>,
    panic_next: bool,
    not_finite: Vec<u32>,
    /// Times that each layer is told, after its delay each time; 0 is 1.
    tell_layers: u32,
    steps: u64,
    /// Largest step seen: tokens, sequences.
    widest: (usize, usize),
    waiting: bool,
}

/// Steers an executor from a test.
#[derive(Debug, Clone, Default)]
pub struct FakeControl {
    inner: Arc<(Mutex<Control>, Condvar)>,
}

impl FakeControl {
    fn change(&self, change: impl FnOnce(&mut Control)) {
        change(&mut self.inner.0.lock());
        self.inner.1.notify_all();
    }
    /// Each step takes this long more.
    pub fn step_delay(&self, delay: Duration) {
        self.change(|c| c.step_delay = delay);
    }
    /// Each layer takes this long more.
    pub fn layer_delay(&self, delay: Duration) {
        self.change(|c| c.layer_delay = delay);
    }
    /// Each layer is told `times` times, so that a step can be long without being silent.
    pub fn tell_layers(&self, times: u32) {
        self.change(|c| c.tell_layers = times);
    }
    /// No step starts until [`FakeControl::allow`] or [`FakeControl::resume`].
    pub fn pause(&self) {
        self.change(|c| c.allowed = Some(0));
    }
    /// While paused: `n` more steps may start.
    pub fn allow(&self, n: u64) {
        self.change(|c| {
            c.allowed = c.allowed.map(|a| a + n);
            // whoever waits says so again
            c.waiting = false;
        });
    }
    /// Steps run freely.
    pub fn resume(&self) {
        self.change(|c| c.allowed = None);
    }
    /// The next step fails.
    pub fn fail_next(&self, why: &str) {
        self.change(|c| c.fail_next = Some(why.to_owned()));
    }
    /// The next step panics.
    pub fn panic_next(&self) {
        self.change(|c| c.panic_next = true);
    }
    /// A sequence whose step computes `token` samples NaN.
    pub fn not_finite_after(&self, token: u32) {
        self.change(|c| c.not_finite.push(token));
    }
    /// Steps begun.
    pub fn steps(&self) -> u64 {
        self.inner.0.lock().steps
    }
    /// The most tokens and the most sequences of any step so far.
    pub fn widest(&self) -> (usize, usize) {
        self.inner.0.lock().widest
    }
    /// Blocks until a step waits for permission: everything before it has been handed out.
    pub fn wait_until_held(&self) {
        let mut control = self.inner.0.lock();
        while !control.waiting {
            let timeout = self.inner.1.wait_for(&mut control, Duration::from_secs(20));
            assert!(!timeout.timed_out(), "no step was begun within 20 s");
        }
    }
}

/// The pages' bytes: per page `[token][layer][component][bytes]`.
pub struct FakeKv {
    page_tokens: usize,
    layout: KvLayout,
    bytes: RwLock<Vec<u8>>,
}

impl FakeKv {
    /// Where a token's bytes begin.
    fn at(&self, pages: &[PageId], position: usize) -> usize {
        (pages[position / self.page_tokens] as usize * self.page_tokens + position % self.page_tokens) * TOKEN_BYTES
    }

    fn check(&self, pages: &[PageId], run: KvRun, len: usize) -> Result<(), KvError> {
        let refuse = |why: String| Err(KvError { run, why });
        if run.layer >= LAYERS || run.component >= 2 {
            return refuse("no such layer or component".into());
        }
        let end = run.first_token as usize + run.tokens as usize;
        if end > pages.len() * self.page_tokens {
            return refuse(format!(
                "ends at token {end}, the pages hold {}",
                pages.len() * self.page_tokens
            ));
        }
        if len != run.tokens as usize * RUN_BYTES {
            return refuse(format!("{len} bytes for {} tokens", run.tokens));
        }
        Ok(())
    }

    fn places(&self, pages: &[PageId], run: KvRun) -> impl Iterator<Item = usize> {
        let within = (run.layer as usize * 2 + run.component as usize) * RUN_BYTES;
        let first = run.first_token as usize;
        (first..first + run.tokens as usize).map(move |t| self.at(pages, t) + within)
    }
}

impl KvStore for FakeKv {
    fn read(&self, pages: &[PageId], run: KvRun, out: &mut [u8]) -> Result<(), KvError> {
        self.check(pages, run, out.len())?;
        let bytes = self.bytes.read();
        for (at, out) in self.places(pages, run).zip(out.chunks_exact_mut(RUN_BYTES)) {
            out.copy_from_slice(&bytes[at..at + RUN_BYTES]);
        }
        Ok(())
    }

    fn write(&self, pages: &[PageId], run: KvRun, data: &[u8]) -> Result<(), KvError> {
        self.check(pages, run, data.len())?;
        let mut bytes = self.bytes.write();
        for (at, data) in self.places(pages, run).zip(data.chunks_exact(RUN_BYTES)) {
            bytes[at..at + RUN_BYTES].copy_from_slice(data);
        }
        Ok(())
    }
}

/// See the module's text.
pub struct FakeExecutor {
    spec: ModelSpec,
    salt: u64,
    kv: Arc<FakeKv>,
    control: FakeControl,
}

impl FakeExecutor {
    /// An executor and the handle that steers it.
    pub fn new(config: &FakeConfig) -> (Self, FakeControl) {
        let layout = KvLayout::heads(LAYERS, HEADS, HEAD_DIM, KvDtype::F16, config.page_tokens);
        assert_eq!(layout.token_bytes(), TOKEN_BYTES);
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&config.salt.to_le_bytes());
        let kv = FakeKv {
            page_tokens: config.page_tokens as usize,
            layout: layout.clone(),
            bytes: RwLock::new(vec![
                0xEE;
                (config.total_pages * config.page_tokens) as usize * TOKEN_BYTES
            ]),
        };
        let control = FakeControl::default();
        let executor = Self {
            spec: ModelSpec {
                name: "fake".into(),
                hash,
                layout,
                max_length_tokens: config.max_length_tokens,
                vocab_size: VOCAB,
                end_tokens: vec![END_TOKEN],
                vocabulary: vocabulary(),
                backend: "fake",
                total_pages: config.total_pages,
                page_tokens: config.page_tokens,
                max_step_tokens: config.max_step_tokens,
                max_step_seqs: config.max_step_seqs,
            },
            salt: config.salt,
            kv: Arc::new(kv),
            control: control.clone(),
        };
        (executor, control)
    }

    fn check(&self, batch: &[StepSeq<'_>]) -> Result<(), StepError> {
        let tokens: usize = batch.iter().map(|s| s.tokens.len()).sum();
        if tokens > self.spec.max_step_tokens as usize || batch.len() > self.spec.max_step_seqs as usize {
            return Err(StepError::TooLarge {
                tokens,
                seqs: batch.len(),
                max_tokens: self.spec.max_step_tokens as usize,
                max_seqs: self.spec.max_step_seqs as usize,
            });
        }
        for seq in batch {
            let end = seq.first_position as usize + seq.tokens.len();
            if seq.tokens.is_empty() || seq.pages.len() * self.kv.page_tokens < end {
                return Err(StepError::Invalid(format!(
                    "{} pages for {end} tokens",
                    seq.pages.len()
                )));
            }
            if seq.tokens.iter().any(|t| *t >= VOCAB) || seq.pages.iter().any(|p| *p >= self.spec.total_pages) {
                return Err(StepError::Invalid("a token or page is out of range".into()));
            }
        }
        Ok(())
    }
}

/// The finalizer of splitmix64.
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

fn absorb(hash: u64, bytes: &[u8]) -> u64 {
    bytes
        .chunks_exact(8)
        .fold(hash, |h, word| mix(h ^ u64::from_le_bytes(word.try_into().unwrap())))
}

fn token_kv(hash: u64, token: u32, position: usize) -> [u8; TOKEN_BYTES] {
    let mut out = [0; TOKEN_BYTES];
    let mut state = mix(hash ^ u64::from(token) << 32 ^ position as u64);
    for word in out.chunks_exact_mut(8) {
        state = mix(state);
        word.copy_from_slice(&state.to_le_bytes());
    }
    out
}

/// The row of logits after a sequence of this hash.
pub fn logits(hash: u64) -> Vec<f32> {
    (0..u64::from(VOCAB))
        .map(|t| (mix(hash ^ t << 40) >> 40) as f32 / (1 << 21) as f32 - 4.0)
        .collect()
}

/// A plain request's token is a hash; one that asks for more chooses from a row of logits, as a model does.
fn choose(hash: u64, sample: &Sample<'_>, position: u32) -> Sampled {
    let plain = SampleParams {
        temperature: sample.params.temperature,
        top_p: sample.params.top_p,
        seed: sample.params.seed,
        ..SampleParams::GREEDY
    };
    let row = logits(hash);
    let token = if sample.params == plain && sample.adjust == Adjust::default() {
        let noise = match sample.params.temperature {
            0.0 => 0,
            _ => mix(mix(sample.params.seed) ^ u64::from(position)),
        };
        (mix(hash ^ noise) % u64::from(VOCAB)) as u32
    } else {
        let mut work = Work {
            row: &mut vec![0.0; row.len()],
            candidates: &mut vec![(0.0, 0); row.len()],
        };
        match tandem_engine::sample::choose(&row, &sample.params, &sample.adjust, position, &mut work) {
            Ok(token) => token,
            Err(Unchosen::NotFinite) => return Sampled::NotFinite,
            Err(Unchosen::NoneAllowed) => return Sampled::NoneAllowed,
        }
    };
    let told = |top: u32| {
        let mut words = [0; LOGPROB_WORDS];
        logprob::write(&row, token, top as usize, &mut words);
        logprob::read(&words, top as usize)
    };
    Sampled::Token(token, sample.logprobs.map(told))
}

impl Executor for FakeExecutor {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn step(&mut self, batch: &[StepSeq<'_>], on_layer: &mut dyn FnMut(u32)) -> Result<Vec<Sampled>, StepError> {
        let (lock, condvar) = &*self.control.inner;
        let (step_delay, layer_delay, tell_layers, not_finite) = {
            let mut control = lock.lock();
            while control.allowed == Some(0) {
                control.waiting = true;
                condvar.notify_all();
                // a test that failed must not hang in the join of this thread
                let timeout = condvar.wait_for(&mut control, Duration::from_secs(30));
                assert!(!timeout.timed_out(), "held for 30 s");
            }
            control.waiting = false;
            control.allowed = control.allowed.map(|n| n - 1);
            control.steps += 1;
            let tokens = batch.iter().map(|s| s.tokens.len()).sum();
            control.widest = (control.widest.0.max(tokens), control.widest.1.max(batch.len()));
            assert!(!std::mem::take(&mut control.panic_next), "planted panic");
            if let Some(why) = control.fail_next.take() {
                return Err(StepError::Invalid(why));
            }
            (
                control.step_delay,
                control.layer_delay,
                control.tell_layers.max(1),
                control.not_finite.clone(),
            )
        };
        self.check(batch)?;
        std::thread::sleep(step_delay);
        let mut sampled = Vec::with_capacity(batch.len());
        for seq in batch {
            let mut bytes = self.kv.bytes.write();
            let first = seq.first_position as usize;
            let mut hash = mix(self.salt);
            for position in 0..first {
                let at = self.kv.at(seq.pages, position);
                hash = absorb(hash, &bytes[at..at + TOKEN_BYTES]);
            }
            for (i, &token) in seq.tokens.iter().enumerate() {
                let at = self.kv.at(seq.pages, first + i);
                let kv = token_kv(hash, token, first + i);
                bytes[at..at + TOKEN_BYTES].copy_from_slice(&kv);
                hash = absorb(hash, &kv);
            }
            let position = (first + seq.tokens.len()) as u32;
            sampled.push(match seq.sample {
                None => Sampled::None,
                Some(_) if seq.tokens.iter().any(|t| not_finite.contains(t)) => Sampled::NotFinite,
                Some(sample) => choose(hash, &sample, position),
            });
        }
        for layer in 1..=LAYERS {
            for _ in 0..tell_layers {
                std::thread::sleep(layer_delay);
                on_layer(layer);
            }
        }
        Ok(sampled)
    }

    fn kv(&self) -> Arc<dyn KvStore> {
        Arc::clone(&self.kv) as Arc<dyn KvStore>
    }
}

/// The tokens that a lone run over `prompt` gives, computed beside any scheduler.
pub fn solo(config: &FakeConfig, prompt: &[u32], new_tokens: usize, sampling: SampleParams) -> Vec<u32> {
    let (tokens, _) = solo_with(config, prompt, new_tokens, &sampling.into());
    tokens
}

/// The same for a request that asks for more; what it brings to each choice is made anew each time. Nothing ends it early.
pub fn solo_with(
    config: &FakeConfig,
    prompt: &[u32],
    new_tokens: usize,
    sampling: &Sampling,
) -> (Vec<u32>, Vec<Logprob>) {
    let total = prompt.len() + new_tokens;
    let pages_needed = total.div_ceil(config.page_tokens as usize) as u32;
    let (mut executor, _) = FakeExecutor::new(&FakeConfig {
        total_pages: pages_needed,
        max_step_tokens: total as u32,
        ..config.clone()
    });
    let pages: Vec<PageId> = (0..pages_needed).collect();
    let mut tokens = prompt.to_vec();
    let mut logprobs = Vec::new();
    let mut computed = 0;
    while tokens.len() < total {
        let p = &sampling.params;
        let answer = &tokens[prompt.len()..];
        let mut seen: Vec<[u32; 2]> = Vec::new();
        let repeats = p.repetition_penalty.to_bits() != 1f32.to_bits();
        if repeats || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            for t in if repeats { &tokens[..] } else { answer } {
                if seen.iter().all(|[s, _]| s != t) {
                    seen.push([*t, answer.iter().filter(|a| *a == t).count() as u32]);
                }
            }
        }
        let mut mask = vec![u32::MAX; VOCAB as usize / 32];
        mask[END_TOKEN as usize / 32] &= !(1 << (END_TOKEN % 32));
        let step = StepSeq {
            tokens: &tokens[computed..],
            first_position: computed as u32,
            pages: &pages,
            sample: Some(Sample {
                params: *p,
                adjust: Adjust {
                    biases: &sampling.logit_bias,
                    seen: &seen,
                    mask: (answer.len() < sampling.min_new_tokens as usize).then_some(&mask[..]),
                },
                logprobs: sampling.logprobs,
            }),
        };
        let sampled = executor.step(&[step], &mut |_| {}).unwrap().remove(0);
        let Sampled::Token(token, logprob) = sampled else {
            panic!("no token: {sampled:?}")
        };
        computed = tokens.len();
        tokens.push(token);
        logprobs.extend(logprob);
    }
    (tokens.split_off(prompt.len()), logprobs)
}

/// A layout check that keeps [`FakeKv`]'s own copy in use.
impl std::fmt::Debug for FakeKv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FakeKv({} layers)", self.layout.layers)
    }
}
