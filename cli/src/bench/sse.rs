//! Server-sent events, as far as OpenAI's streams use them: `data` lines, blank lines, comments.

/// An event larger than this is a fault of the server.
const MAX_EVENT: usize = 1024 * 1024;

/// Cuts a byte stream into events, however it is cut into chunks.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    data: String,
    after_cr: bool,
}

/// The server sends an event without end.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {MAX_EVENT} bytes")]
pub struct TooLarge;

impl Events {
    /// Takes a chunk; calls `event` with the data of each event that it completes.
    pub fn push(&mut self, chunk: &[u8], mut event: impl FnMut(&str)) -> Result<(), TooLarge> {
        for &byte in chunk {
            let lf_of_crlf = byte == b'\n' && std::mem::take(&mut self.after_cr);
            self.after_cr = byte == b'\r';
            match byte {
                _ if lf_of_crlf => {}
                b'\r' | b'\n' => self.end_line(&mut event),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.len() > MAX_EVENT {
                return Err(TooLarge);
            }
        }
        Ok(())
    }

    fn end_line(&mut self, event: &mut impl FnMut(&str)) {
        if self.line.is_empty() {
            if !self.data.is_empty() {
                event(self.data.trim_end_matches('\n'));
            }
            self.data.clear();
        } else if let Some(value) = self.line.strip_prefix(b"data:") {
            let value = value.strip_prefix(b" ").unwrap_or(value);
            self.data.push_str(&String::from_utf8_lossy(value));
            self.data.push('\n');
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] =
        "\u{20}: ping\n\ndata: {\"a\":\"é\"}\n\r\ndata:b\ndata: c\nid: 7\n\n: x\r\n\r\ndata: [DONE]\r\n\r\ndata: cut"
            .as_bytes();

    #[test]
    fn any_cut_of_the_stream_gives_the_same_events() {
        let expected = ["{\"a\":\"é\"}", "b\nc", "[DONE]"];
        for first in 0..=STREAM.len() {
            for second in [first, usize::midpoint(first, STREAM.len()), STREAM.len()] {
                let mut events = Events::default();
                let mut found = Vec::new();
                for part in [&STREAM[..first], &STREAM[first..second], &STREAM[second..]] {
                    events.push(part, |data| found.push(data.to_owned())).unwrap();
                }
                assert_eq!(found, expected, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn an_event_without_end_is_an_error_and_not_all_memory() {
        let mut events = Events::default();
        let chunk = vec![b'x'; 64 * 1024];
        let result = (0..100).try_for_each(|_| events.push(&chunk, |_| {}));
        assert_eq!(result, Err(TooLarge));
        let mut events = Events::default();
        let result = (0..1_000_000).try_for_each(|_| events.push(b"data: xx\n", |_| {}));
        assert_eq!(result, Err(TooLarge));
    }
}
