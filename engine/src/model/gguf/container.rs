//! A memory-mapped GGUF file, versions 2 and 3: metadata scalars and the tensors' places.
//!
//! Nothing in the file is believed: every count, length, offset and alignment is checked against the file's length before it
//! is used, and nothing is allocated by a count that the file claims. Arrays (vocabulary, merges) are walked and
//! checked, not kept: the engine has no use for them.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::model::LoadError;
use crate::model::checkpoint::Tensor;
use crate::model::tensor::{Dtype, ggml_type_name};

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any of the unsigned types.
    Unsigned(u64),
    /// Any of the signed types.
    Signed(i64),
    /// Either float type.
    Float(f64),
    /// true or false.
    Bool(bool),
    /// UTF-8 text; other bytes are replaced.
    Text(String),
    /// Checked, not kept; the number of elements.
    Array(u64),
}

impl Value {
    /// In words, for errors.
    pub fn describe(&self) -> String {
        match self {
            Self::Unsigned(v) => v.to_string(),
            Self::Signed(v) => v.to_string(),
            Self::Float(v) => v.to_string(),
            Self::Bool(v) => v.to_string(),
            Self::Text(v) => format!("{v:?}"),
            Self::Array(n) => format!("an array of {n}"),
        }
    }
}

/// Where a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, the contiguous one (a matmul's inputs) first; one to four.
    pub dims: Vec<u64>,
    /// First byte in the file.
    start: usize,
    /// Bytes.
    len: usize,
}

/// An open file whose header has been checked.
pub struct Gguf {
    path: PathBuf,
    map: Mmap,
    metadata: BTreeMap<String, Value>,
    arrays: BTreeMap<String, ArrayPlace>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// Where a checked metadata array lies.
#[derive(Debug, Clone, Copy)]
struct ArrayPlace {
    /// Type of its elements.
    element: u32,
    count: u64,
    /// Of its first element in the file.
    start: usize,
}

/// The format allows any power of two; more than this is damage.
const MAX_ALIGNMENT: u64 = 1 << 20;

impl Gguf {
    /// Maps the file and checks its header, metadata and tensor table.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let open = |source| LoadError::Open {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(open)?;
        // SAFETY: the mapping is read only and private to this value. A file that is cut while it is mapped would raise
        // SIGBUS: the map is dropped as soon as the weights are packed, so that is a matter of the loading seconds.
        let map = unsafe { Mmap::map(&file) }.map_err(open)?;
        let (metadata, arrays, tensors) = Header {
            path,
            bytes: &map,
            at: 0,
            arrays: BTreeMap::new(),
        }
        .read()?;
        Ok(Self {
            path: path.to_owned(),
            map,
            metadata,
            arrays,
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

    /// All metadata.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The texts of a metadata array; `None` where there is none of texts.
    pub(in crate::model) fn texts(&self, key: &str) -> Option<Vec<String>> {
        let (mut header, count) = self.elements(key, |element| element == 8)?;
        (0..count).map(|_| header.text(key).ok()).collect()
    }

    /// The whole numbers of a metadata array; `None` where there is none of them.
    pub(in crate::model) fn integers(&self, key: &str) -> Option<Vec<i64>> {
        let element = self.arrays.get(key)?.element;
        let (mut header, count) = self.elements(key, |_| true)?;
        (0..count)
            .map(|_| match header.scalar(element, key, key).ok()? {
                Value::Signed(n) => Some(n),
                Value::Unsigned(n) => i64::try_from(n).ok(),
                _ => None,
            })
            .collect()
    }

    /// The header at an array's first element, and how many there are.
    fn elements(&self, key: &str, wanted: impl Fn(u32) -> bool) -> Option<(Header<'_>, u64)> {
        let place = self.arrays.get(key).filter(|place| wanted(place.element))?;
        let header = Header {
            path: &self.path,
            bytes: &self.map,
            at: place.start,
            arrays: BTreeMap::new(),
        };
        Some((header, place.count))
    }

    /// All tensors.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// A tensor, if there is one of this name.
    pub(in crate::model) fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensors.get(name).map(|info| Tensor {
            dtype: info.dtype,
            dims: &info.dims,
            bytes: &self.map[info.start..info.start + info.len],
        })
    }

    /// A tensor and its bytes.
    pub fn tensor(&self, name: &str) -> Result<(&TensorInfo, &[u8]), LoadError> {
        let info = self.tensors.get(name).ok_or_else(|| LoadError::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
        })?;
        Ok((info, &self.map[info.start..info.start + info.len]))
    }
}

/// Reads the header front to back.
struct Header<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
    arrays: BTreeMap<String, ArrayPlace>,
}

type Tables = (
    BTreeMap<String, Value>,
    BTreeMap<String, ArrayPlace>,
    BTreeMap<String, TensorInfo>,
);

impl<'a> Header<'a> {
    fn read(mut self) -> Result<Tables, LoadError> {
        let magic = &self.bytes[..self.bytes.len().min(4)];
        if magic != b"GGUF" {
            return if !magic.is_empty() && b"GGUF".starts_with(magic) {
                Err(self.cut_off("the magic number", 4))
            } else {
                Err(LoadError::NotGguf {
                    path: self.path.to_owned(),
                    found: magic.escape_ascii().to_string(),
                })
            };
        }
        self.at = 4;
        let version = self.u32("the version")?;
        let why = match version {
            2 | 3 => "",
            1 => "of 2023, with other counts",
            v if v.swap_bytes() <= 3 => "big endian",
            _ => "unknown",
        };
        if !why.is_empty() {
            return Err(LoadError::Version {
                path: self.path.to_owned(),
                version,
                why,
            });
        }
        let tensor_count = self.u64("the tensor count")?;
        let metadata_count = self.u64("the metadata count")?;

        let mut metadata = BTreeMap::new();
        for i in 0..metadata_count {
            let key = self.text(&format!("the key of metadata {i} of {metadata_count}"))?;
            let value = self.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.damaged(format!("metadata key {key:?} is there twice")));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(&Value::Unsigned(a)) if a.is_power_of_two() && a <= MAX_ALIGNMENT => a,
            Some(v) => {
                return Err(self.damaged(format!(
                    "general.alignment is {}, a power of two is expected",
                    v.describe()
                )));
            }
        };

        // name, type, dims, offset; the data section's start is known only after the last one
        let mut entries = Vec::new();
        for i in 0..tensor_count {
            entries.push(self.tensor_entry(i, tensor_count, alignment)?);
        }
        let base = (self.at as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, dtype, dims, offset, len) in entries {
            let start = base
                .checked_add(offset)
                .ok_or_else(|| self.damaged(format!("tensor {name} has offset {offset}")))?;
            let end = start
                .checked_add(len)
                .ok_or_else(|| self.damaged(format!("tensor {name} has offset {offset}")))?;
            if end > self.bytes.len() as u64 {
                return Err(LoadError::CutOff {
                    path: self.path.to_owned(),
                    what: format!("tensor {name}"),
                    offset: start,
                    need: len,
                    len: self.bytes.len() as u64,
                });
            }
            let info = TensorInfo {
                dtype,
                dims,
                start: start as usize,
                len: len as usize,
            };
            if tensors.insert(name.clone(), info).is_some() {
                return Err(self.damaged(format!("tensor {name:?} is there twice")));
            }
        }
        self.no_overlap(&tensors)?;
        Ok((metadata, self.arrays, tensors))
    }

    /// Each byte belongs to one tensor at most, so all tensors together are no longer than the file.
    fn no_overlap(&self, tensors: &BTreeMap<String, TensorInfo>) -> Result<(), LoadError> {
        let mut places: Vec<_> = tensors.iter().collect();
        places.sort_unstable_by_key(|(_, t)| t.start);
        match places.windows(2).find(|w| w[0].1.start + w[0].1.len > w[1].1.start) {
            None => Ok(()),
            Some(w) => Err(self.damaged(format!("tensors {} and {} overlap", w[0].0, w[1].0))),
        }
    }

    fn tensor_entry(
        &mut self,
        i: u64,
        count: u64,
        alignment: u64,
    ) -> Result<(String, Dtype, Vec<u64>, u64, u64), LoadError> {
        let name = self.text(&format!("the name of tensor {i} of {count}"))?;
        let dim_count = self.u32(&format!("the shape of tensor {name}"))?;
        if !(1..=4).contains(&dim_count) {
            return Err(self.damaged(format!("tensor {name} has {dim_count} dimensions, 1 to 4 are expected")));
        }
        let mut dims = Vec::with_capacity(4);
        for _ in 0..dim_count {
            dims.push(self.u64(&format!("the shape of tensor {name}"))?);
        }
        let type_id = self.u32(&format!("the type of tensor {name}"))?;
        let offset = self.u64(&format!("the offset of tensor {name}"))?;
        let dtype = Dtype::from_ggml(type_id).ok_or_else(|| LoadError::UnsupportedType {
            path: self.path.to_owned(),
            tensor: name.clone(),
            dtype: ggml_type_name(type_id),
        })?;
        let shape = || self.damaged(format!("tensor {name} has shape {dims:?} in {}", dtype.name()));
        if dims.contains(&0) {
            return Err(shape());
        }
        let row = usize::try_from(dims[0])
            .ok()
            .and_then(|k| dtype.row_bytes(k))
            .ok_or_else(shape)?;
        let len = dims[1..]
            .iter()
            .try_fold(row as u64, |n, &d| n.checked_mul(d))
            .ok_or_else(shape)?;
        if !offset.is_multiple_of(alignment) {
            return Err(self.damaged(format!(
                "tensor {name} has offset {offset}, not a multiple of {alignment}"
            )));
        }
        Ok((name, dtype, dims, offset, len))
    }

    fn value(&mut self, key: &str) -> Result<Value, LoadError> {
        let what = format!("the value of {key}");
        let type_id = self.u32(&what)?;
        if type_id != 9 {
            return self.scalar(type_id, key, &what);
        }
        let element = self.u32(&what)?;
        let count = self.u64(&what)?;
        let start = self.at;
        let place = ArrayPlace { element, count, start };
        self.arrays.insert(key.to_owned(), place);
        match element {
            8 => {
                for _ in 0..count {
                    self.bytes_of_text(&what)?;
                }
            }
            9 => return Err(self.damaged(format!("metadata {key} is an array of arrays"))),
            _ => {
                let size = scalar_bytes(element)
                    .ok_or_else(|| self.damaged(format!("metadata {key} has element type {element}")))?;
                let bytes = count
                    .checked_mul(size)
                    .ok_or_else(|| self.damaged(format!("metadata {key} has {count} elements")))?;
                self.take(bytes, &what)?;
            }
        }
        Ok(Value::Array(count))
    }

    fn scalar(&mut self, type_id: u32, key: &str, what: &str) -> Result<Value, LoadError> {
        Ok(match type_id {
            0 => Value::Unsigned(self.array::<1>(what)?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Unsigned(self.u32(what)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => match self.array::<1>(what)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                b => return Err(self.damaged(format!("metadata {key} is a bool of value {b}"))),
            },
            8 => Value::Text(self.text(what)?),
            10 => Value::Unsigned(self.u64(what)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            t => return Err(self.damaged(format!("metadata {key} has type {t}"))),
        })
    }

    fn cut_off(&self, what: &str, need: u64) -> LoadError {
        LoadError::CutOff {
            path: self.path.to_owned(),
            what: what.to_owned(),
            offset: self.at as u64,
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

    fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8], LoadError> {
        let left = self.bytes.len() - self.at;
        if n > left as u64 {
            return Err(self.cut_off(what, n));
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn bytes_of_text(&mut self, what: &str) -> Result<&'a [u8], LoadError> {
        let n = self.u64(what)?;
        self.take(n, what)
    }

    fn text(&mut self, what: &str) -> Result<String, LoadError> {
        Ok(String::from_utf8_lossy(self.bytes_of_text(what)?).into_owned())
    }
}

/// Bytes of a fixed-size metadata type.
const fn scalar_bytes(type_id: u32) -> Option<u64> {
    match type_id {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
