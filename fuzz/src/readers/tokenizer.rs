//! The router's readers of tokenizers: a GGUF's metadata where the bytes begin with `GGUF`, else a `tokenizer.json`.

use tandem_router::text::Text;

/// Vocabularies are held as text, as bytes, by id and by text.
pub const FACTOR: usize = 512;

/// Loads the tokenizer, and encodes and decodes a text with it.
pub fn read(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    let name = if data.starts_with(b"GGUF") {
        "m.gguf"
    } else {
        "tokenizer.json"
    };
    let path = dir.path().join(name);
    std::fs::write(&path, data).expect("a file");
    let Ok(text) = Text::load(&path) else { return };
    if let Ok(ids) = text.encode("Hello there, 42 times: é!", true) {
        std::hint::black_box(text.decode(&ids, true).is_ok());
    }
}
