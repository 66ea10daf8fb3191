//! A memory-mapped safetensors file: 8 bytes with the header's length, the header in JSON, the tensors' bytes.
//!
//! Nothing in the file is believed: every length, shape and offset is checked against the file before it is used, and nothing is
//! allocated by a count that the file claims. The reader is our own because the format's own crate keeps the last of two tensors of
//! one name, adds up lengths without a check, and names no tensor where a type or a shape is at fault.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::unique::Unique;
use crate::model::LoadError;
use crate::model::checkpoint::Tensor;
use crate::model::tensor::Dtype;

/// The longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Dimensions of a tensor; weights have two at most.
const MAX_DIMS: usize = 4;

/// An open file whose header has been checked.
pub struct Safetensors {
    path: PathBuf,
    map: Mmap,
    tensors: BTreeMap<String, Place>,
}

/// Where a tensor lies.
struct Place {
    dtype: Dtype,
    /// The contiguous one first, as everywhere in the engine; the file has it last.
    dims: Vec<u64>,
    start: usize,
    len: usize,
}

/// A tensor as the header says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl Safetensors {
    /// Maps the file and checks its header.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let open = |source| LoadError::Open {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(open)?;
        // SAFETY: the mapping is read only and private to this value. A file that is cut while it is mapped would raise
        // SIGBUS: the map is dropped as soon as the weights are packed, so that is a matter of the loading seconds.
        let map = unsafe { Mmap::map(&file) }.map_err(open)?;
        let tensors = Reader { path, bytes: &map }.read()?;
        Ok(Self {
            path: path.to_owned(),
            map,
            tensors,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The tensors' names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor, if there is one of this name.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensors.get(name).map(|place| Tensor {
            dtype: place.dtype,
            dims: &place.dims,
            bytes: &self.map[place.start..place.start + place.len],
        })
    }
}

struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn read(&self) -> Result<BTreeMap<String, Place>, LoadError> {
        let length = self.bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b));
        let length = length.ok_or_else(|| self.cut_off("the header's length", 0, 8))?;
        if length > MAX_HEADER_BYTES {
            return Err(self.damaged(format!(
                "its first 8 bytes give a header of {length} bytes, more than the {MAX_HEADER_BYTES} that safetensors files may \
                 have"
            )));
        }
        let base = 8 + length as usize;
        let header = self
            .bytes
            .get(8..base)
            .ok_or_else(|| self.cut_off("the header", 8, length))?;
        let Unique(items): Unique<&RawValue> = serde_json::from_slice(header)
            .map_err(|e| self.damaged(format!("its header is no list of tensors: {e}")))?;

        let mut tensors = BTreeMap::new();
        for (name, item) in items {
            // notes of whoever wrote the file
            if name == "__metadata__" {
                continue;
            }
            let entry: Entry = serde_json::from_str(item.get())
                .map_err(|e| self.damaged(format!("tensor {name} has no type, shape and place: {e}")))?;
            let place = self.place(&name, &entry, base)?;
            tensors.insert(name, place);
        }
        self.no_gaps(&tensors, base)?;
        Ok(tensors)
    }

    fn place(&self, name: &str, entry: &Entry, base: usize) -> Result<Place, LoadError> {
        let dtype = Dtype::from_safetensors(&entry.dtype).ok_or_else(|| LoadError::UnsupportedType {
            path: self.path.to_owned(),
            tensor: name.to_owned(),
            dtype: entry.dtype.chars().take(20).collect(),
        })?;
        if entry.shape.len() > MAX_DIMS {
            let n = entry.shape.len();
            return Err(self.damaged(format!(
                "tensor {name} has {n} dimensions, at most {MAX_DIMS} are expected"
            )));
        }
        let (_, size) = dtype.block();
        let [start, end] = entry.data_offsets;
        let len = entry.shape.iter().try_fold(size as u64, |n, d| n.checked_mul(*d));
        let Some(len) = len.filter(|n| end.checked_sub(start) == Some(*n)) else {
            return Err(self.damaged(format!(
                "tensor {name} has shape {:?} in {} at bytes {start} to {end}, which is not its length",
                entry.shape, entry.dtype
            )));
        };
        let data = (self.bytes.len() - base) as u64;
        if end > data {
            return Err(self.cut_off(&format!("tensor {name}"), (base as u64).saturating_add(start), len));
        }
        Ok(Place {
            dtype,
            dims: entry.shape.iter().rev().copied().collect(),
            start: base + start as usize,
            len: len as usize,
        })
    }

    /// The tensors follow one another from the header's end to the file's, as the format demands: no byte belongs to two or to none.
    fn no_gaps(&self, tensors: &BTreeMap<String, Place>, base: usize) -> Result<(), LoadError> {
        let mut places: Vec<_> = tensors.iter().collect();
        // an empty tensor lies before the one that begins where it does
        places.sort_unstable_by_key(|(_, place)| (place.start, place.len));
        let mut at = base;
        for (name, place) in places {
            if place.start != at {
                let start = place.start - base;
                return Err(self.damaged(format!(
                    "tensor {name} begins at byte {start}, the one before it ends at {}",
                    at - base
                )));
            }
            at += place.len;
        }
        if at == self.bytes.len() {
            return Ok(());
        }
        Err(self.damaged(format!(
            "its tensors end at byte {at}, the file has {} bytes",
            self.bytes.len()
        )))
    }

    fn cut_off(&self, what: &str, offset: u64, need: u64) -> LoadError {
        LoadError::CutOff {
            path: self.path.to_owned(),
            what: what.to_owned(),
            offset,
            need,
            len: self.bytes.len() as u64,
        }
    }

    fn damaged(&self, what: String) -> LoadError {
        LoadError::Damaged {
            path: self.path.to_owned(),
            what,
        }
    }
}
