//! Text: templates and ids against references, streaming against the whole decode.

mod ids;
mod loading;
mod renderings;
mod requests;
mod streaming;
mod tools;

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use tandem_router::text::Text;

/// A file of `tests/data`.
fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A small vocabulary that has every byte, so that any text survives encoding and decoding.
static TINY: LazyLock<Arc<Text>> = LazyLock::new(|| Arc::new(Text::load(&data("tiny.gguf")).unwrap()));

/// Writes `tiny.gguf` into `folder` with one metadata value replaced: `key`'s, by the bytes `value` (type and payload).
///
/// `None` takes the key away.
fn tiny_with(folder: &Path, key: &str, value: Option<&[u8]>) -> PathBuf {
    let bytes = std::fs::read(data("tiny.gguf")).unwrap();
    let name = [&(key.len() as u64).to_le_bytes(), key.as_bytes()].concat();
    let start = bytes
        .windows(name.len())
        .position(|window| window == name)
        .unwrap_or_else(|| panic!("no {key}"));
    let at = start + name.len();
    let kind = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let end = at
        + 4
        + match kind {
            4 => 4,
            7 => 1,
            8 => 8 + u64::from_le_bytes(bytes[at + 4..at + 12].try_into().unwrap()) as usize,
            9 => 12 + 4 * u64::from_le_bytes(bytes[at + 8..at + 16].try_into().unwrap()) as usize,
            other => panic!("{key} is of type {other}, which this helper does not skip"),
        };
    let mut out = bytes[..start].to_vec();
    if let Some(value) = value {
        out.extend([&name, value].concat());
    } else {
        let pairs = u64::from_le_bytes(out[16..24].try_into().unwrap());
        out[16..24].copy_from_slice(&(pairs - 1).to_le_bytes());
    }
    out.extend(&bytes[end..]);
    let path = folder.join("changed.gguf");
    std::fs::write(&path, out).unwrap();
    path
}

/// A string as GGUF writes it, with its type.
fn gguf_string(text: &str) -> Vec<u8> {
    [
        &8u32.to_le_bytes()[..],
        &(text.len() as u64).to_le_bytes(),
        text.as_bytes(),
    ]
    .concat()
}
