//! Makes small llama files with random weights: every element type, any shape, whatever damage a test wants.

use std::path::{Path, PathBuf};

use half::{bf16, f16};

/// A metadata value to write.
#[derive(Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
}

/// Element types to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl Kind {
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// Rounds values into the type's bytes.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let half = |v: f32| f16::from_f32(v).to_le_bytes();
        let mut out = Vec::new();
        match self {
            Self::F32 => values.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Self::F16 => values.iter().for_each(|v| out.extend(half(*v))),
            Self::Bf16 => values.iter().for_each(|v| out.extend(bf16::from_f32(*v).to_le_bytes())),
            Self::Q8_0 => {
                for b in values.chunks_exact(32) {
                    let d = b.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
                    out.extend(half(d));
                    out.extend(b.iter().map(|v| (v / d.max(1e-20)).round() as i8 as u8));
                }
            }
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => {
                let levels = if matches!(self, Self::Q4_0 | Self::Q4_1) {
                    15.0
                } else {
                    31.0
                };
                let has_min = matches!(self, Self::Q4_1 | Self::Q5_1);
                for b in values.chunks_exact(32) {
                    let (low, high) = range(b);
                    let (d, m) = if has_min {
                        ((high - low) / levels, low)
                    } else {
                        let centre = if levels > 15.0 { 16.0 } else { 8.0 };
                        let d = low.abs().max(high.abs()) / centre;
                        (d, -centre * d)
                    };
                    out.extend(half(d));
                    if has_min {
                        out.extend(half(m));
                    }
                    let q = |i: usize| ((b[i] - m) / d.max(1e-20)).round().clamp(0.0, levels) as u8;
                    if levels > 15.0 {
                        let fifths = (0..32).fold(0u32, |all, i| all | u32::from(q(i) >> 4) << i);
                        out.extend(fifths.to_le_bytes());
                    }
                    out.extend((0..16).map(|i| q(i) & 15 | q(i + 16) << 4));
                }
            }
            Self::Q4K => values.chunks_exact(256).for_each(|b| encode_k(b, 15.0, &mut out)),
            Self::Q5K => values.chunks_exact(256).for_each(|b| encode_k(b, 31.0, &mut out)),
            Self::Q6K => values.chunks_exact(256).for_each(|b| encode_q6k(b, &mut out)),
        }
        out
    }
}

/// Least and largest value.
fn range(values: &[f32]) -> (f32, f32) {
    values
        .iter()
        .fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(*v), h.max(*v)))
}

/// 256 values in Q4_K or Q5_K.
fn encode_k(values: &[f32], levels: f32, out: &mut Vec<u8>) {
    let ranges: Vec<(f32, f32)> = values.chunks_exact(32).map(range).collect();
    let most = |of: fn(&(f32, f32)) -> f32| ranges.iter().map(of).fold(1e-20, f32::max);
    let (d, e) = (most(|(l, h)| h - l) / levels / 63.0, most(|(l, _)| -l) / 63.0);
    let (mut packed, mut q) = ([0u8; 12], [0u8; 256]);
    for (j, (low, high)) in ranges.iter().enumerate() {
        let s = ((high - low) / levels / d).ceil().clamp(1.0, 63.0) as u8;
        let m = (-low / e).ceil().clamp(0.0, 63.0) as u8;
        if j < 4 {
            packed[j] |= s;
            packed[j + 4] |= m;
        } else {
            packed[j + 4] = s & 15 | m << 4;
            packed[j - 4] |= s >> 4 << 6;
            packed[j] |= m >> 4 << 6;
        }
        for i in 32 * j..32 * (j + 1) {
            let v = (values[i] + e * f32::from(m)) / (d * f32::from(s));
            q[i] = v.round().clamp(0.0, levels) as u8;
        }
    }
    out.extend([d, e].into_iter().flat_map(|v| f16::from_f32(v).to_le_bytes()));
    out.extend(packed);
    if levels > 15.0 {
        out.extend((0..32).map(|i| (0..8).fold(0, |all, j| all | q[32 * j + i] >> 4 << j)));
    }
    out.extend((0..128).map(|i| {
        let at = i / 32 * 64 + i % 32;
        q[at] & 15 | q[at + 32] << 4
    }));
}

/// 256 values in Q6_K.
fn encode_q6k(values: &[f32], out: &mut Vec<u8>) {
    let size = |v: &[f32]| v.iter().fold(1e-20f32, |m, v| m.max(v.abs()));
    let d = size(values) / 31.0 / 127.0;
    let (mut nibbles, mut upper, mut scales) = ([0u8; 128], [0u8; 64], [0u8; 16]);
    for (i, v) in values.iter().enumerate() {
        let s = (size(&values[i / 16 * 16..][..16]) / 31.0 / d).ceil().clamp(1.0, 127.0);
        scales[i / 16] = s as u8;
        let q = ((v / (d * s)).round().clamp(-32.0, 31.0) + 32.0) as u8;
        let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
        nibbles[half * 64 + quarter % 2 * 32 + l] |= (q & 15) << (quarter / 2 * 4);
        upper[half * 32 + l] |= q >> 4 << (quarter * 2);
    }
    out.extend(nibbles);
    out.extend(upper);
    out.extend(scales);
    out.extend(f16::from_f32(d).to_le_bytes());
}

/// A tensor to write.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub kind: u32,
    pub dims: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A file to write.
#[derive(Clone)]
pub struct File {
    pub version: u32,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
}

impl File {
    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        fn text(out: &mut Vec<u8>, s: &str) {
            out.extend((s.len() as u64).to_le_bytes());
            out.extend(s.as_bytes());
        }
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            match value {
                Meta::U32(v) => {
                    out.extend(4u32.to_le_bytes());
                    out.extend(v.to_le_bytes());
                }
                Meta::F32(v) => {
                    out.extend(6u32.to_le_bytes());
                    out.extend(v.to_le_bytes());
                }
                Meta::Text(v) => {
                    out.extend(8u32.to_le_bytes());
                    text(&mut out, v);
                }
                Meta::Texts(v) => {
                    out.extend([9u32, 8].into_iter().flat_map(u32::to_le_bytes));
                    out.extend((v.len() as u64).to_le_bytes());
                    for s in v {
                        text(&mut out, s);
                    }
                }
                Meta::Floats(v) => {
                    out.extend([9u32, 6].into_iter().flat_map(u32::to_le_bytes));
                    out.extend((v.len() as u64).to_le_bytes());
                    out.extend(v.iter().flat_map(|f| f.to_le_bytes()));
                }
            }
        }
        let mut offset = 0;
        for t in &self.tensors {
            text(&mut out, &t.name);
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += t.bytes.len().next_multiple_of(32);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&t.bytes);
        }
        out
    }

    /// Writes it into `dir`.
    pub fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("tiny.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }

    /// Replaces or adds a metadata value.
    pub fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(k, _)| k != key);
        self.metadata.push((key.to_owned(), value));
    }

    /// Gives a matrix of `k` inputs fresh random weights in another type.
    pub fn retype(&mut self, name: &str, kind: Kind, seed: u64) {
        let t = self.tensor(name);
        let n = t.dims.iter().product::<u64>() as usize;
        let scale = (3.0 / t.dims[0] as f32).sqrt();
        let mut random = Random(seed);
        let values: Vec<f32> = (0..n).map(|_| scale * random.unit()).collect();
        (t.kind, t.bytes) = (kind.id(), kind.encode(&values));
    }

    /// The tensor of this name.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }
}

/// A small random generator, so that files are the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// A model's shape.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inner: usize,
    pub vocab: usize,
    pub context: usize,
    pub tied: bool,
}

impl Shape {
    /// Two layers, 4 heads in 2 groups.
    pub const SMALL: Self = Self {
        layers: 2,
        hidden: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        inner: 96,
        vocab: 101,
        context: 512,
        tied: true,
    };
}

/// A llama file of this shape: matrices of layers in `kind`, embedding and head in `embedding`.
pub fn llama(s: Shape, kind: Kind, embedding: Kind, seed: u64) -> File {
    let mut random = Random(seed);
    let mut tensors = Vec::new();
    let mut add = |name: String, kind: Kind, dims: &[usize], scale: f32, centre: f32| {
        let n = dims.iter().product();
        let values: Vec<f32> = (0..n).map(|_| centre + scale * random.unit()).collect();
        let dims = dims.iter().map(|d| *d as u64).collect();
        tensors.push(Tensor {
            name,
            kind: kind.id(),
            dims,
            bytes: kind.encode(&values),
        });
    };
    let scale = |k: usize| (3.0 / k as f32).sqrt();
    let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
    add("token_embd.weight".into(), embedding, &[s.hidden, s.vocab], 1.0, 0.0);
    for l in 0..s.layers {
        let mut matrix = |part: &str, k: usize, n: usize| {
            add(format!("blk.{l}.{part}.weight"), kind, &[k, n], scale(k), 0.0);
        };
        matrix("attn_q", s.hidden, queries);
        matrix("attn_k", s.hidden, keys);
        matrix("attn_v", s.hidden, keys);
        matrix("attn_output", queries, s.hidden);
        matrix("ffn_gate", s.hidden, s.inner);
        matrix("ffn_up", s.hidden, s.inner);
        matrix("ffn_down", s.inner, s.hidden);
        add(format!("blk.{l}.attn_norm.weight"), Kind::F32, &[s.hidden], 0.3, 1.0);
        add(format!("blk.{l}.ffn_norm.weight"), Kind::F32, &[s.hidden], 0.3, 1.0);
    }
    add("output_norm.weight".into(), Kind::F32, &[s.hidden], 0.3, 1.0);
    if !s.tied {
        add(
            "output.weight".into(),
            embedding,
            &[s.hidden, s.vocab],
            scale(s.hidden),
            0.0,
        );
    }
    let n = |v: usize| Meta::U32(v as u32);
    let metadata = [
        ("general.architecture", Meta::Text("llama".into())),
        ("general.name", Meta::Text("tiny".into())),
        ("llama.block_count", n(s.layers)),
        ("llama.context_length", n(s.context)),
        ("llama.embedding_length", n(s.hidden)),
        ("llama.feed_forward_length", n(s.inner)),
        ("llama.attention.head_count", n(s.heads)),
        ("llama.attention.head_count_kv", n(s.kv_heads)),
        ("llama.attention.key_length", n(s.head_dim)),
        ("llama.attention.value_length", n(s.head_dim)),
        ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
        ("llama.rope.dimension_count", n(s.head_dim)),
        ("llama.rope.freq_base", Meta::F32(10_000.0)),
        ("tokenizer.ggml.model", Meta::Text("gpt2".into())),
        (
            "tokenizer.ggml.tokens",
            Meta::Texts((0..s.vocab).map(|i| format!("t{i}")).collect()),
        ),
        ("tokenizer.ggml.scores", Meta::Floats(vec![0.5; 3])),
        ("tokenizer.ggml.eos_token_id", n(2)),
    ];
    File {
        version: 3,
        metadata: metadata.map(|(k, v)| (k.to_owned(), v)).to_vec(),
        tensors,
    }
}
