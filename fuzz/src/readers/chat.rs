//! Bodies of `/v1/chat/completions`.

use tandem_router::api::request::ChatBody;

/// JSON values take 16 times their text, and growing vectors twice that.
pub const FACTOR: usize = 128;

/// The body.
pub fn read(data: &[u8]) {
    if let Ok(body) = ChatBody::read(data) {
        std::hint::black_box(body.common());
    }
}
