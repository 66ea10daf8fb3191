//! Messages between router and engines, and what is checked of them before use. The first byte chooses the message.

use prost::Message;
use tandem_wire::proto::{DecodeMessage, Frame, GenerateRequest, KvLayout, PrefillMessage};

/// A repeated number of one byte is held in four, a vector grows to twice that.
pub const FACTOR: usize = 64;

/// The message.
pub fn read(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else {
        return;
    };
    match kind % 5 {
        0 => drop(std::hint::black_box(Frame::decode(bytes))),
        1 => drop(std::hint::black_box(GenerateRequest::decode(bytes))),
        2 => drop(std::hint::black_box(DecodeMessage::decode(bytes))),
        3 => drop(std::hint::black_box(PrefillMessage::decode(bytes))),
        _ => {
            let message = KvLayout::decode(bytes).ok();
            if let Ok(layout) = tandem_wire::KvLayout::from_wire(message.as_ref()) {
                assert_eq!(
                    tandem_wire::KvLayout::from_wire(Some(&layout.to_wire())).ok(),
                    Some(layout)
                );
            }
        }
    }
}
