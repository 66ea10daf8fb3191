//! The files of a model in a folder, found and checked against each other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::config::{self, FromConfig};
use super::container::Safetensors;
use super::names;
use super::unique::Unique;
use crate::model::LoadError;
use crate::model::checkpoint::Tensor;
use crate::model::config::ModelConfig;

/// The longest `config.json` or `generation_config.json`; known ones have a few KB.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The longest index; the largest known ones have some 10 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// The most files with weights; the largest known models have some 200.
const MAX_SHARDS: usize = 4096;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A model's folder, its files open.
pub struct Folder {
    path: PathBuf,
    /// Names and contents of the texts that were read, for the hash.
    texts: Vec<(&'static str, Vec<u8>)>,
    shards: Vec<Safetensors>,
    /// The shard of each tensor.
    places: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: Unique<String>,
}

impl Folder {
    /// Opens the files, and reads `config.json`.
    pub fn open(path: &Path) -> Result<(Self, ModelConfig), LoadError> {
        let text = read(path, CONFIG, MAX_CONFIG_BYTES)?.ok_or_else(|| LoadError::MissingFile {
            folder: path.to_owned(),
            file: CONFIG,
            remedy: "give a folder as published, with config.json, tokenizer.json and the safetensors files, or the path of a .gguf file",
        })?;
        let generation = read(path, GENERATION, MAX_CONFIG_BYTES)?;
        let FromConfig { config, tied } = config::read(path, &text, generation.as_deref())?;
        let mut texts = vec![(CONFIG, text)];
        texts.extend(generation.map(|text| (GENERATION, text)));

        let (shards, places) = if path.join(SINGLE).exists() {
            let file = Safetensors::open(&path.join(SINGLE))?;
            let places = file.names().map(|name| (name.to_owned(), 0)).collect();
            (vec![file], places)
        } else {
            let index = read(path, INDEX, MAX_INDEX_BYTES)?.ok_or_else(|| LoadError::MissingFile {
                folder: path.to_owned(),
                file: SINGLE,
                remedy: "and there is no model.safetensors.index.json either; fetch the safetensors files, or convert the weights to them",
            })?;
            let sharded = shards(path, &index)?;
            texts.push((INDEX, index));
            sharded
        };
        let mut folder = Self {
            path: path.to_owned(),
            texts,
            shards,
            places,
        };
        folder.places.retain(|name, _| !names::is_needless(name));
        folder.head(tied)?;
        Ok((folder, config))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors' names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// A tensor, if there is one of this name.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.shards[*self.places.get(name)?].find(name)
    }

    /// SHA-256 over name and content of everything that was read: the configs, the index, the shards by name.
    pub fn hash(&self) -> [u8; 32] {
        let mut hasher = Sha256::new();
        let texts = self.texts.iter().map(|(name, text)| (Path::new(name), text.as_slice()));
        let shards = self.shards.iter().map(|shard| (shard.path(), shard.bytes()));
        for (path, bytes) in texts.chain(shards) {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            for part in [name, bytes] {
                hasher.update((part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        }
        hasher.finalize().into()
    }

    /// The head is there if the config says that it is one of its own; one beside tied embeddings may only repeat them.
    fn head(&mut self, tied: bool) -> Result<(), LoadError> {
        let (head, embedding) = ("lm_head.weight", "model.embed_tokens.weight");
        match (self.find(head), self.find(embedding)) {
            (None, _) if !tied => Err(LoadError::MissingTensor {
                path: self.path.clone(),
                tensor: head.to_owned(),
            }),
            (Some(own), Some(shared)) if tied && (own.dtype != shared.dtype || own.bytes != shared.bytes) => {
                Err(LoadError::Metadata {
                    path: self.path.join(CONFIG),
                    key: "tie_word_embeddings".to_owned(),
                    why: format!(
                        "is true, but {head} is there and differs from {embedding}; set it to false if the head is meant, or fetch \
                         the model again"
                    ),
                })
            }
            _ => {
                if tied {
                    self.places.remove(head);
                }
                Ok(())
            }
        }
    }
}

/// Opens the files that the index names, and checks that they hold what it says.
fn shards(folder: &Path, text: &[u8]) -> Result<(Vec<Safetensors>, BTreeMap<String, usize>), LoadError> {
    let path = folder.join(INDEX);
    let damaged = |what: String| LoadError::Damaged {
        path: path.clone(),
        what,
    };
    let index: Index =
        serde_json::from_slice(text).map_err(|e| damaged(format!("it is no index of safetensors files: {e}")))?;
    let Unique(weight_map) = index.weight_map;
    let mut numbers: BTreeMap<&str, usize> = weight_map.values().map(|file| (file.as_str(), 0)).collect();
    if numbers.len() > MAX_SHARDS {
        return Err(damaged(format!(
            "it names {} files, at most {MAX_SHARDS} are opened",
            numbers.len()
        )));
    }
    let mut shards = Vec::with_capacity(numbers.len());
    for (file, number) in &mut numbers {
        if !is_plain(file) {
            return Err(damaged(format!(
                "it names {file:?}, which is no .safetensors file of the folder"
            )));
        }
        *number = shards.len();
        shards.push(Safetensors::open(&folder.join(file))?);
    }
    for (file, number) in &numbers {
        let shard = &shards[*number];
        if let Some(name) = shard
            .names()
            .find(|name| weight_map.get(*name).is_none_or(|f| f != file))
        {
            return Err(damaged(format!(
                "tensor {name} is in {file}, where the index has it not"
            )));
        }
    }
    let mut places = BTreeMap::new();
    for (name, file) in &weight_map {
        let number = numbers[file.as_str()];
        if shards[number].find(name).is_none() {
            return Err(LoadError::MissingTensor {
                path: folder.join(file),
                tensor: name.clone(),
            });
        }
        places.insert(name.clone(), number);
    }
    Ok((shards, places))
}

/// Whether a name is one of a safetensors file in the folder itself.
fn is_plain(file: &str) -> bool {
    let path = Path::new(file);
    path.file_name() == Some(path.as_os_str()) && path.extension().is_some_and(|e| e == "safetensors")
}

/// A text of the folder, read whole; `None` where there is none of this name.
fn read(folder: &Path, file: &str, most: u64) -> Result<Option<Vec<u8>>, LoadError> {
    let path = folder.join(file);
    let error = |source| LoadError::Open {
        path: path.clone(),
        source,
    };
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(e)),
    };
    let mut text = Vec::new();
    file.take(most + 1).read_to_end(&mut text).map_err(error)?;
    if text.len() as u64 > most {
        return Err(LoadError::Damaged {
            path,
            what: format!("it is longer than {most} bytes"),
        });
    }
    Ok(Some(text))
}
