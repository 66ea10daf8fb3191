//! Where a model's vocabulary lies: beside the weights in a GGUF file, or in its folder's `tokenizer.json`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::gguf::container::{Gguf, Value};
use crate::sample::vocabulary::{TokenBytes, from_gguf, from_tokenizer_json};

/// The largest one in use has 33 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// The tokens' bytes of the model at `path`, a file or a folder.
///
/// # Errors
/// Says why there are none; a model serves without, but holds no answer to a schema.
pub(super) fn read(path: &Path) -> Result<TokenBytes, String> {
    if path.is_dir() {
        let path = path.join("tokenizer.json");
        let mut text = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_TOKENIZER_BYTES).read_to_end(&mut text))
            .map_err(|e| format!("{}: {e}", path.display()))?;
        return from_tokenizer_json(&text);
    }
    let gguf = Gguf::open(path).map_err(|e| e.to_string())?;
    let missing = |key: &str| format!("the file has no {key}");
    let Some(Value::Text(model)) = gguf.metadata().get("tokenizer.ggml.model") else {
        return Err(missing("tokenizer.ggml.model"));
    };
    let (tokens, kinds) = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type");
    let tokens = gguf.texts(tokens).ok_or_else(|| missing(tokens))?;
    let kinds = gguf.integers(kinds).ok_or_else(|| missing(kinds))?;
    from_gguf(model, &tokens, &kinds)
}
