//! The metadata of a GGUF file, without its tensors.
//!
//! Read front to back through a buffer: nothing is mapped, so a file that shrinks meanwhile is an error and not a
//! signal. Every length is checked against the bytes that the file still has before anything is allocated for it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::TextError;

/// Most key/value pairs; real files have some tens.
const MAX_PAIRS: u64 = 65_536;
/// Longest key in bytes, as the format says.
const MAX_KEY_BYTES: u64 = 65_535;

/// A value of the metadata. Numbers that text has no use for are kept as their widest type.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Unsigneds(Vec<u64>),
    Strings(Vec<String>),
    /// An array of another type: read over.
    Other,
}

/// The metadata by key.
#[derive(Debug)]
pub(super) struct Metadata {
    values: HashMap<String, Value>,
}

impl Metadata {
    /// Reads the metadata of the file at `path`.
    pub(super) fn read(path: &Path) -> Result<Self, TextError> {
        let io = |source| TextError::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        Self::parse(BufReader::with_capacity(64 << 10, file), length).map_err(|reason| TextError::Malformed {
            path: path.to_owned(),
            reason,
        })
    }

    /// Reads metadata from a source of `length` bytes; the error is the reason alone.
    pub(super) fn parse(input: impl Read, length: u64) -> Result<Self, String> {
        let mut reader = Reader {
            input,
            left: length,
            length,
        };
        let magic: [u8; 4] = reader.bytes()?;
        if &magic != b"GGUF" {
            return Err(format!("it begins with {magic:02x?}, a GGUF file with \"GGUF\""));
        }
        let version = reader.u32()?;
        if version != 2 && version != 3 {
            return Err(format!(
                "GGUF version {version}; 2 and 3 are known (and only little-endian files)"
            ));
        }
        let _tensors = reader.u64()?;
        let pairs = reader.u64()?;
        if pairs > MAX_PAIRS {
            return Err(format!("{pairs} metadata pairs, more than {MAX_PAIRS}"));
        }
        let mut values = HashMap::new();
        for _ in 0..pairs {
            let at = reader.length - reader.left;
            let key = reader
                .string(MAX_KEY_BYTES)
                .map_err(|why| format!("key at byte {at}: {why}"))?;
            let value = reader
                .u32()
                .and_then(|kind| reader.value(kind))
                .map_err(|why| format!("{key}: {why}"))?;
            if values.contains_key(&key) {
                return Err(format!("{key} is there twice"));
            }
            values.insert(key, value);
        }
        Ok(Self { values })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&str>, String> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(format!("{key} should be a string and is {}", other.name())),
        }
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, String> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(format!("{key} should be true or false and is {}", other.name())),
        }
    }

    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>, String> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(value)) => Ok(Some(*value)),
            // older converters write -1 for "none"
            Some(Value::Signed(value)) => Ok(u64::try_from(*value).ok()),
            Some(other) => Err(format!("{key} should be an integer and is {}", other.name())),
        }
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<&[String]>, String> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Strings(texts)) => Ok(Some(texts)),
            Some(other) => Err(format!("{key} should be an array of strings and is {}", other.name())),
        }
    }

    pub(super) fn unsigneds(&self, key: &str) -> Result<Option<&[u64]>, String> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigneds(numbers)) => Ok(Some(numbers)),
            Some(other) => Err(format!("{key} should be an array of integers and is {}", other.name())),
        }
    }
}

impl Value {
    fn name(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Unsigneds(_) => "an array of integers",
            Self::Strings(_) => "an array of strings",
            Self::Other => "an array",
        }
    }
}

/// Reads little-endian values and knows how many bytes are left.
struct Reader<R> {
    input: R,
    left: u64,
    length: u64,
}

impl<R: Read> Reader<R> {
    fn take(&mut self, bytes: u64) -> Result<(), String> {
        let at = self.length - self.left;
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or_else(|| format!("{bytes} bytes at byte {at}, but the file has {} in all", self.length))?;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn string(&mut self, most: u64) -> Result<String, String> {
        let bytes = self.u64()?;
        if bytes > most {
            return Err(format!("a string of {bytes} bytes where {most} is the most"));
        }
        self.take(bytes)?;
        let mut text = vec![0; bytes as usize];
        self.input.read_exact(&mut text).map_err(|error| error.to_string())?;
        String::from_utf8(text).map_err(|error| format!("a string that is not UTF-8: {error}"))
    }

    fn value(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Unsigned(u64::from(u8::from_le_bytes(self.bytes()?))),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.bytes()?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => Value::Unsigned(u64::from(self.u32()?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.bytes()?))),
            7 => match self.bytes::<1>()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(format!("a boolean with the value {other}")),
            },
            8 => Value::String(self.string(u64::MAX)?),
            9 => self.array()?,
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.bytes()?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes()?)),
            other => return Err(format!("value type {other}; 0 to 12 are known")),
        })
    }

    fn array(&mut self) -> Result<Value, String> {
        let kind = self.u32()?;
        let count = self.u64()?;
        // the fewest bytes an element takes: what bounds a capacity
        let (smallest, integer) = match kind {
            0 | 1 => (1, true),
            7 => (1, false),
            2 | 3 => (2, true),
            4 | 5 => (4, true),
            6 => (4, false),
            10 | 11 => (8, true),
            8 | 12 => (8, false),
            9 => return Err("an array of arrays".into()),
            other => return Err(format!("an array of value type {other}; 0 to 12 are known")),
        };
        if count.checked_mul(smallest).is_none_or(|bytes| bytes > self.left) {
            return Err(format!(
                "an array of {count} elements, but only {} bytes are left",
                self.left
            ));
        }
        match (kind, integer) {
            (8, _) => {
                let mut texts = Vec::with_capacity(count as usize);
                for index in 0..count {
                    texts.push(self.string(u64::MAX).map_err(|why| format!("element {index}: {why}"))?);
                }
                Ok(Value::Strings(texts))
            }
            (_, true) => {
                let mut numbers = Vec::with_capacity(count as usize);
                for index in 0..count {
                    numbers.push(match self.value(kind)? {
                        Value::Unsigned(number) => number,
                        Value::Signed(number) => u64::try_from(number)
                            .map_err(|_| format!("element {index}: {number}, where none below 0 has a meaning"))?,
                        _ => unreachable!("integer types read as integers"),
                    });
                }
                Ok(Value::Unsigneds(numbers))
            }
            _ => {
                for _ in 0..count {
                    self.value(kind)?;
                }
                Ok(Value::Other)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    fn pair(key: &str, kind: u32, payload: &[u8]) -> Vec<u8> {
        [&string(key), &kind.to_le_bytes()[..], payload].concat()
    }

    fn file(version: u32, pairs: &[Vec<u8>]) -> Vec<u8> {
        let head = [
            &b"GGUF"[..],
            &version.to_le_bytes(),
            &0u64.to_le_bytes(),
            &(pairs.len() as u64).to_le_bytes(),
        ];
        [head.concat(), pairs.concat()].concat()
    }

    fn parse(bytes: &[u8]) -> Result<Metadata, String> {
        Metadata::parse(bytes, bytes.len() as u64)
    }

    fn array(kind: u32, count: u64, payload: &[u8]) -> Vec<u8> {
        pair(
            "a",
            9,
            &[&kind.to_le_bytes()[..], &count.to_le_bytes(), payload].concat(),
        )
    }

    #[test]
    fn a_length_that_the_file_does_not_have_is_believed() {
        for kind in [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12] {
            for count in [1000, 1 << 60, u64::MAX] {
                let error = parse(&file(3, &[array(kind, count, &[0; 64])])).unwrap_err();
                assert!(
                    error.starts_with("a: ") && error.contains(&count.to_string()),
                    "{error}"
                );
            }
        }
        for length in [65, 1 << 60, u64::MAX] {
            let value = [&length.to_le_bytes()[..], &[b'x'; 64]].concat();
            let error = parse(&file(3, &[pair("s", 8, &value)])).unwrap_err();
            assert!(
                error.starts_with("s: ") && error.contains(&format!("{length} bytes at byte")),
                "{error}"
            );
        }
        let error = parse(&[&file(3, &[])[..16], &u64::MAX.to_le_bytes()].concat()).unwrap_err();
        assert!(error.contains("metadata pairs"), "{error}");
        let error = parse(
            &[
                file(3, &[])[..16].to_vec(),
                1u64.to_le_bytes().to_vec(),
                u64::MAX.to_le_bytes().to_vec(),
            ]
            .concat(),
        );
        assert!(error.unwrap_err().contains("key at byte 24"));
    }

    #[test]
    fn a_value_that_the_format_does_not_know_is_skipped() {
        for (bytes, words) in [
            (file(1, &[]), "version 1"),
            (file(3u32.swap_bytes(), &[]), "little-endian"),
            (b"GGML\0\0\0\0".to_vec(), "\"GGUF\""),
            (file(3, &[pair("b", 7, &[2])]), "b: a boolean with the value 2"),
            (file(3, &[pair("v", 13, &[])]), "v: value type 13"),
            (file(3, &[array(13, 0, &[])]), "a: an array of value type 13"),
            (file(3, &[array(9, 1, &[0; 32])]), "a: an array of arrays"),
            (file(3, &[pair("t", 0, &[1]), pair("t", 0, &[2])]), "t is there twice"),
            (
                file(3, &[pair("u", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])]),
                "u: a string that is not UTF-8",
            ),
            (file(3, &[array(5, 1, &(-1i32).to_le_bytes())]), "element 0: -1"),
        ] {
            let error = parse(&bytes).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_value_of_another_type_passes_for_the_wanted_one() {
        let metadata = parse(&file(
            2,
            &[
                pair("s", 8, &string("text")),
                pair("n", 4, &7u32.to_le_bytes()),
                pair("minus", 5, &(-1i32).to_le_bytes()),
                pair("yes", 7, &[1]),
                pair("f", 6, &1.5f32.to_le_bytes()),
                array(8, 2, &[string("x"), string("y")].concat()),
            ],
        ))
        .unwrap();
        assert_eq!(metadata.string("s"), Ok(Some("text")));
        assert_eq!(metadata.unsigned("n"), Ok(Some(7)));
        assert_eq!(metadata.unsigned("minus"), Ok(None), "-1 stands for none");
        assert_eq!(metadata.bool("yes"), Ok(Some(true)));
        assert_eq!(metadata.strings("a"), Ok(Some(&["x".to_owned(), "y".to_owned()][..])));
        assert_eq!(metadata.string("absent"), Ok(None));
        assert!(
            metadata
                .string("n")
                .unwrap_err()
                .contains("n should be a string and is an integer")
        );
        assert!(metadata.unsigned("f").unwrap_err().contains("is a float"));
        assert!(metadata.bool("s").unwrap_err().contains("is a string"));
        assert!(metadata.strings("s").unwrap_err().contains("array of strings"));
        assert!(metadata.unsigneds("a").unwrap_err().contains("array of integers"));
    }
}
