//! Chat templates: compiled, and rendered with a conversation.

use tandem_router::text::source::SpecialTokens;
use tandem_router::text::{ChatInput, ChatTemplate, Message};

/// A loop may print its body as often as its fuel lasts: what is held is bounded by the fuel, not by the input.
pub const FACTOR: usize = 1 << 20;

/// Compiles and renders.
pub fn read(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let tokens = SpecialTokens::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let Ok(template) = ChatTemplate::compile(source, &tokens) else {
        return;
    };
    let messages: Vec<Message> =
        serde_json::from_str(r#"[{"role":"system","content":"a"},{"role":"user","content":"b"}]"#).expect("messages");
    std::hint::black_box(template.render(&ChatInput::new(&messages)).is_ok());
}
