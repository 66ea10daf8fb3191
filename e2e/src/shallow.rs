//! A model with fewer layers than it has: the same words, nonsense said, and a tenth of the work. For tests in which it only
//! matters that something is computed.

use std::path::Path;

/// Copies the GGUF file `model` with the first `layers` layers alone.
pub fn shallow(model: &Path, layers: u32, to: &Path) {
    let bytes = std::fs::read(model).expect("a model");
    let mut out = Gguf { bytes: &bytes, at: 8 };
    let tensors = out.u64();
    let pairs = out.u64();
    let mut head = bytes[..out.at].to_vec();
    let mut alignment = 32;
    for _ in 0..pairs {
        let begin = out.at;
        let key = out.string();
        let kind = out.u32();
        let value = out.at;
        out.skip(kind);
        head.extend_from_slice(&bytes[begin..out.at]);
        let in_head = head.len() - (out.at - value);
        if key.ends_with(b".block_count") {
            head[in_head..in_head + 4].copy_from_slice(&layers.to_le_bytes());
        } else if key == b"general.alignment" {
            alignment = u32::from_le_bytes(bytes[value..value + 4].try_into().expect("four bytes")) as usize;
        }
    }
    let mut kept: u64 = 0;
    for _ in 0..tensors {
        let begin = out.at;
        let name = String::from_utf8_lossy(out.string()).into_owned();
        let dimensions = out.u32() as usize;
        // dimensions, type, offset
        out.at += dimensions * 8 + 4 + 8;
        let layer: Option<u32> = name
            .strip_prefix("blk.")
            .and_then(|rest| rest.split('.').next()?.parse().ok());
        if layer.is_none_or(|layer| layer < layers) {
            kept += 1;
            head.extend_from_slice(&bytes[begin..out.at]);
        }
    }
    head[8..16].copy_from_slice(&kept.to_le_bytes());
    head.resize(head.len().next_multiple_of(alignment), 0);
    let data = &bytes[out.at.next_multiple_of(alignment)..];
    std::fs::write(to, [&head, data].concat()).expect("a file");
}

/// A reader of the file's head.
struct Gguf<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Gguf<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        self.at += count;
        &self.bytes[self.at - count..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("eight bytes"))
    }

    fn string(&mut self) -> &'a [u8] {
        let length = self.u64() as usize;
        self.take(length)
    }

    /// A value of this type.
    fn skip(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            8 => {
                self.string();
            }
            9 => {
                let of = self.u32();
                for _ in 0..self.u64() {
                    self.skip(of);
                }
            }
            10..=12 => self.at += 8,
            _ => panic!("GGUF knows no value of type {kind}"),
        }
    }
}
