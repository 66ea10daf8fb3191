//! A model's weights and sizes, whichever format they come in.
//!
//! What is opened is whole: each part that the architecture has is there in its shape, and nothing else is.

use std::collections::BTreeSet;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::LoadError;
use super::config::{Architecture, ModelConfig};
use super::gguf::container::Gguf;
use super::safetensors::folder::Folder;
use super::tensor::Dtype;
use super::{gguf, safetensors};

/// A tensor's role in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// `[hidden_size, vocab_size]`, inputs first as everywhere here.
    TokenEmbd,
    /// `[hidden_size]`.
    OutputNorm,
    /// `[hidden_size, vocab_size]`; absent where the embedding serves as the head too.
    Output,
    /// `[rope_dim / 2]`, what the rotary frequencies are divided by; absent where they are not.
    RopeFreqs,
    /// A part of a layer, counted from 0.
    Layer(usize, LayerPart),
}

/// A tensor's role in a layer. Head counts: h query, g KV, of width d.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerPart {
    /// `[hidden_size]`.
    AttnNorm,
    /// `[hidden_size, h d]`.
    Q,
    /// `[hidden_size, g d]`.
    K,
    /// `[hidden_size, g d]`.
    V,
    /// `[h d]`, with [`ModelConfig::qkv_bias`].
    QBias,
    /// `[g d]`, with [`ModelConfig::qkv_bias`].
    KBias,
    /// `[g d]`, with [`ModelConfig::qkv_bias`].
    VBias,
    /// `[d]`, with [`ModelConfig::qk_norm`].
    QNorm,
    /// `[d]`, with [`ModelConfig::qk_norm`].
    KNorm,
    /// `[h d, hidden_size]`.
    AttnOutput,
    /// `[hidden_size]`.
    FfnNorm,
    /// `[hidden_size, intermediate_size]`.
    Gate,
    /// `[hidden_size, intermediate_size]`.
    Up,
    /// `[intermediate_size, hidden_size]`.
    Down,
}

impl LayerPart {
    /// The parts of every layer.
    pub const COMMON: [Self; 9] = [
        Self::AttnNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::AttnOutput,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
    /// The parts that come with [`ModelConfig::qkv_bias`].
    pub const BIASES: [Self; 3] = [Self::QBias, Self::KBias, Self::VBias];
    /// The parts that come with [`ModelConfig::qk_norm`].
    pub const HEAD_NORMS: [Self; 2] = [Self::QNorm, Self::KNorm];
}

impl Part {
    /// Every part that a model of this config has, and may have.
    pub fn all(c: &ModelConfig) -> impl Iterator<Item = Self> {
        let layer: Vec<LayerPart> = [
            (true, LayerPart::COMMON.as_slice()),
            (c.qkv_bias, &LayerPart::BIASES),
            (c.qk_norm, &LayerPart::HEAD_NORMS),
        ]
        .into_iter()
        .filter(|(has, _)| *has)
        .flat_map(|(_, parts)| parts)
        .copied()
        .collect();
        let llama = c.architecture == Architecture::Llama;
        let layers = c.num_hidden_layers;
        [Self::TokenEmbd, Self::OutputNorm, Self::Output]
            .into_iter()
            .chain(llama.then_some(Self::RopeFreqs))
            .chain((0..layers).flat_map(move |l| layer.clone().into_iter().map(move |p| Self::Layer(l, p))))
    }

    /// Whether a model may be without it.
    pub const fn is_optional(self) -> bool {
        matches!(self, Self::Output | Self::RopeFreqs)
    }

    /// Its sizes, inputs first.
    pub fn dims(self, c: &ModelConfig) -> Vec<usize> {
        let (hidden, inner) = (c.hidden_size, c.intermediate_size);
        let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
        let part = match self {
            Self::TokenEmbd | Self::Output => return vec![hidden, c.vocab_size],
            Self::OutputNorm => return vec![hidden],
            Self::RopeFreqs => return vec![c.rope_dim / 2],
            Self::Layer(_, part) => part,
        };
        match part {
            LayerPart::AttnNorm | LayerPart::FfnNorm => vec![hidden],
            LayerPart::Q => vec![hidden, queries],
            LayerPart::K | LayerPart::V => vec![hidden, keys],
            LayerPart::QBias => vec![queries],
            LayerPart::KBias | LayerPart::VBias => vec![keys],
            LayerPart::QNorm | LayerPart::KNorm => vec![c.head_dim],
            LayerPart::AttnOutput => vec![queries, hidden],
            LayerPart::Gate | LayerPart::Up => vec![hidden, inner],
            LayerPart::Down => vec![inner, hidden],
        }
    }
}

/// A tensor in a mapped file.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, the contiguous one (a matmul's inputs) first.
    pub dims: &'a [u64],
    /// Exactly the bytes of so many elements.
    pub bytes: &'a [u8],
}

/// An open model: every size and every tensor checked.
pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
}

enum Source {
    Gguf(Gguf),
    Folder(Folder),
}

impl Checkpoint {
    /// Opens a `.gguf` file, or a folder with `config.json` and safetensors files.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let (source, config) = if path.is_dir() {
            let (folder, config) = Folder::open(path)?;
            (Source::Folder(folder), config)
        } else {
            let gguf = Gguf::open(path)?;
            let config = gguf::config::read(&gguf)?;
            (Source::Gguf(gguf), config)
        };
        let checkpoint = Self { source, config };
        checkpoint.is_whole()?;
        Ok(checkpoint)
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        match &self.source {
            Source::Gguf(gguf) => gguf.path(),
            Source::Folder(folder) => folder.path(),
        }
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the files call a part.
    pub fn name(&self, part: Part) -> String {
        self.name_of(part).unwrap_or_else(|| format!("{part:?}"))
    }

    /// The tensor of a part, of the shape that [`Part::dims`] says; `None` where the model has none.
    pub fn tensor(&self, part: Part) -> Option<Tensor<'_>> {
        self.find(&self.name_of(part)?)
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.names()
            .filter_map(|name| self.find(name))
            .map(|t| t.bytes.len() as u64)
            .sum()
    }

    /// SHA-256 of everything that was read.
    pub fn hash(&self) -> [u8; 32] {
        match &self.source {
            Source::Gguf(gguf) => Sha256::digest(gguf.bytes()).into(),
            Source::Folder(folder) => folder.hash(),
        }
    }

    /// The first tensor whose part is not among `used`: computing without it would give wrong answers.
    pub fn all_used(&self, used: &BTreeSet<Part>) -> Result<(), LoadError> {
        let used: BTreeSet<String> = used.iter().filter_map(|part| self.name_of(*part)).collect();
        match self.names().find(|name| !used.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(LoadError::UnknownTensor {
                path: self.path().to_owned(),
                tensor: name.to_owned(),
                architecture: self.config.architecture.name(),
            }),
        }
    }

    fn find(&self, name: &str) -> Option<Tensor<'_>> {
        match &self.source {
            Source::Gguf(gguf) => gguf.find(name),
            Source::Folder(folder) => folder.find(name),
        }
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match &self.source {
            Source::Gguf(gguf) => Box::new(gguf.tensors().keys().map(String::as_str)),
            Source::Folder(folder) => Box::new(folder.names()),
        }
    }

    /// What the files call a part; `None` where this format has no tensor for it.
    fn name_of(&self, part: Part) -> Option<String> {
        match self.source {
            Source::Gguf(_) => Some(gguf::name(part)),
            Source::Folder(_) => safetensors::name(part),
        }
    }

    /// Each part is there in its shape, and there is nothing else.
    fn is_whole(&self) -> Result<(), LoadError> {
        let mut known = BTreeSet::new();
        for part in Part::all(&self.config) {
            let Some(name) = self.name_of(part) else { continue };
            match self.find(&name) {
                None if part.is_optional() => {}
                None => {
                    return Err(LoadError::MissingTensor {
                        path: self.path().to_owned(),
                        tensor: name,
                    });
                }
                Some(tensor) => self.has_shape(&name, &tensor, &part.dims(&self.config))?,
            }
            known.insert(part);
        }
        self.all_used(&known)
    }

    fn has_shape(&self, name: &str, tensor: &Tensor<'_>, expected: &[usize]) -> Result<(), LoadError> {
        // trailing ones are no dimensions
        let last = tensor.dims.iter().rposition(|d| *d != 1).map_or(0, |i| i + 1);
        let found = &tensor.dims[..last.max(expected.len()).min(tensor.dims.len())];
        if found.iter().copied().eq(expected.iter().map(|e| *e as u64)) {
            return Ok(());
        }
        Err(LoadError::Shape {
            path: self.path().to_owned(),
            tensor: name.to_owned(),
            found: tensor.dims.to_vec(),
            expected: expected.iter().map(|e| *e as u64).collect(),
        })
    }
}
