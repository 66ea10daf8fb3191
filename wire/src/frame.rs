//! How a transfer is cut into frames, each one's checksum, and the digest that proves that all of them came.

use sha2::{Digest as _, Sha256};

use crate::KvLayout;

/// About this many payload bytes go into one frame.
pub const FRAME_TARGET_BYTES: usize = 256 * 1024;
/// No frame may hold more; a receiver refuses it unread.
pub const FRAME_MAX_BYTES: usize = 4 * 1024 * 1024;

/// Where a frame's payload belongs: a run of tokens in one component of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameSpan {
    /// Layer, from 0.
    pub layer: u32,
    /// Index into the layout's components.
    pub component: u32,
    /// First token's position in the prompt.
    pub first_token: u32,
    /// Number of tokens, at least 1.
    pub tokens: u32,
}

impl FrameSpan {
    /// Bytes of the payload under `layout`; `None` if the span names a layer or component that it lacks.
    pub fn bytes(&self, layout: &KvLayout) -> Option<usize> {
        let component = layout.components.get(self.component as usize)?;
        (self.layer < layout.layers).then(|| self.tokens as usize * component.token_bytes())
    }
}

/// The frames that carry tokens `from..to`, in wire order.
pub fn spans(layout: &KvLayout, from: u32, to: u32) -> impl Iterator<Item = FrameSpan> + '_ {
    (0..layout.layers).flat_map(move |layer| {
        layout.components.iter().enumerate().flat_map(move |(component, c)| {
            let run = (FRAME_TARGET_BYTES / c.token_bytes()).max(1) as u32;
            (from..to).step_by(run as usize).map(move |first_token| FrameSpan {
                layer,
                component: component as u32,
                first_token,
                tokens: run.min(to - first_token),
            })
        })
    })
}

/// CRC32C (Castagnoli) of a payload.
pub fn checksum(payload: &[u8]) -> u32 {
    crc32c::crc32c(payload)
}

/// Order-independent sum over frames, of position and checksum: equal on both sides exactly if the same frames were
/// sent and accepted, each as often, up to a collision of 64 bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digest {
    sum: u64,
    frames: u64,
    bytes: u64,
}

impl Digest {
    /// Adds a frame.
    pub fn add(&mut self, span: FrameSpan, crc: u32, payload_bytes: usize) {
        let place = u64::from(span.layer) << 40 | u64::from(span.component) << 32 | u64::from(span.first_token);
        let mixed = mix(mix(place) ^ (u64::from(span.tokens) << 32 | u64::from(crc)));
        self.sum = self.sum.wrapping_add(mixed);
        self.frames += 1;
        self.bytes += payload_bytes as u64;
    }
    /// The value in the manifest.
    pub fn value(&self) -> u64 {
        self.sum
    }
    /// Frames added.
    pub fn frames(&self) -> u64 {
        self.frames
    }
    /// Payload bytes added.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The finalizer of splitmix64.
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// Which tokens of which (layer, component) have come. A token that comes twice is refused, one that is missing is told.
#[derive(Debug)]
pub struct Coverage {
    from: u32,
    to: u32,
    components: usize,
    /// Per (layer, component): runs that came, sorted and merged.
    runs: Vec<Vec<(u32, u32)>>,
}

/// Why a span was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// It lies outside what was asked for.
    #[error("frame {0:?} lies outside the transfer")]
    Outside(FrameSpan),
    /// Some of its tokens came before.
    #[error("frame {0:?} overlaps one that came before")]
    Overlap(FrameSpan),
}

impl Coverage {
    /// Nothing has come yet of tokens `from..to`.
    pub fn new(layout: &KvLayout, from: u32, to: u32) -> Self {
        let components = layout.components.len();
        Self {
            from,
            to,
            components,
            runs: vec![Vec::new(); layout.layers as usize * components],
        }
    }

    /// Is this span asked for and new? Says so without recording it.
    pub fn check(&self, span: FrameSpan) -> Result<(), SpanError> {
        let end = span
            .first_token
            .checked_add(span.tokens)
            .ok_or(SpanError::Outside(span))?;
        let inside = span.tokens > 0
            && span.first_token >= self.from
            && end <= self.to
            && (span.component as usize) < self.components;
        let runs = self
            .slot(span)
            .and_then(|i| self.runs.get(i))
            .filter(|_| inside)
            .ok_or(SpanError::Outside(span))?;
        if runs.iter().any(|&(a, b)| span.first_token < b && a < end) {
            return Err(SpanError::Overlap(span));
        }
        Ok(())
    }

    /// Records a span.
    pub fn add(&mut self, span: FrameSpan) -> Result<(), SpanError> {
        self.check(span)?;
        let slot = self.slot(span).ok_or(SpanError::Outside(span))?;
        let runs = &mut self.runs[slot];
        let (mut start, mut end) = (span.first_token, span.first_token + span.tokens);
        runs.retain(|&(a, b)| {
            let touches = b == start || a == end;
            if touches {
                (start, end) = (start.min(a), end.max(b));
            }
            !touches
        });
        let at = runs.partition_point(|&(a, _)| a < start);
        runs.insert(at, (start, end));
        Ok(())
    }

    /// Everything that was asked for has come.
    pub fn is_complete(&self) -> bool {
        self.from >= self.to || self.runs.iter().all(|r| r[..] == [(self.from, self.to)])
    }

    /// Tokens still missing, summed over layers and components.
    pub fn missing_tokens(&self) -> u64 {
        let each = u64::from(self.to.saturating_sub(self.from));
        let have: u64 = self.runs.iter().flatten().map(|&(a, b)| u64::from(b - a)).sum();
        each * self.runs.len() as u64 - have
    }

    fn slot(&self, span: FrameSpan) -> Option<usize> {
        (span.layer as usize)
            .checked_mul(self.components)?
            .checked_add(span.component as usize)
    }
}

/// sha256 over a prompt's token ids, u32 little endian: both sides prove that they mean the same prompt.
pub fn prompt_hash(tokens: &[u32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::KvDtype;

    fn small() -> KvLayout {
        KvLayout::heads(3, 2, 64, KvDtype::F16, 16)
    }

    fn sized(span: FrameSpan) -> usize {
        span.bytes(&small()).unwrap()
    }

    proptest! {
        #[test]
        fn frames_cover_each_token_of_each_layer_once(from in 0u32..5_000, len in 0u32..5_000, seed in any::<u64>()) {
            let layout = small();
            let mut all: Vec<_> = spans(&layout, from, from + len).collect();
            prop_assert!(all.iter().all(|s| sized(*s) <= FRAME_TARGET_BYTES));
            prop_assert_eq!(all.iter().map(|s| sized(*s)).sum::<usize>(), len as usize * layout.token_bytes());
            // any order is accepted
            all.sort_by_key(|s| mix(seed ^ u64::from(s.first_token) << 20 ^ u64::from(s.layer * 7 + s.component)));
            let mut coverage = Coverage::new(&layout, from, from + len);
            for span in &all {
                prop_assert!(!coverage.is_complete());
                coverage.add(*span).unwrap();
                prop_assert_eq!(coverage.add(*span), Err(SpanError::Overlap(*span)));
            }
            prop_assert!(coverage.is_complete());
            prop_assert_eq!(coverage.missing_tokens(), 0);
        }

        #[test]
        fn a_lost_doubled_or_changed_frame_changes_the_digest(n in 2usize..50, pick in any::<prop::sample::Index>(), bit in 0u32..32) {
            let frames: Vec<_> = spans(&small(), 0, 100_000).take(n).map(|s| (s, s.first_token ^ 0xABCD)).collect();
            let sum = |list: &[(FrameSpan, u32)]| {
                let mut d = Digest::default();
                for (span, crc) in list {
                    d.add(*span, *crc, 1);
                }
                d
            };
            let i = pick.index(n);
            let whole = sum(&frames);
            let mut reversed = frames.clone();
            reversed.reverse();
            prop_assert_eq!(whole, sum(&reversed));
            let mut lost = frames.clone();
            lost.remove(i);
            prop_assert_ne!(whole, sum(&lost));
            let mut doubled = frames.clone();
            doubled.push(frames[i]);
            prop_assert_ne!(whole, sum(&doubled));
            let mut changed = frames.clone();
            changed[i].1 ^= 1 << bit;
            prop_assert_ne!(whole.value(), sum(&changed).value());
        }
    }

    #[test]
    fn a_frame_outside_the_transfer_is_refused() {
        let mut coverage = Coverage::new(&small(), 16, 32);
        let span = |layer, component, first_token, tokens| FrameSpan {
            layer,
            component,
            first_token,
            tokens,
        };
        for bad in [
            span(3, 0, 16, 1),
            span(0, 2, 16, 1),
            span(0, 0, 15, 2),
            span(0, 0, 31, 2),
            span(0, 0, 16, 0),
            span(u32::MAX, u32::MAX, u32::MAX, u32::MAX),
            span(0, 0, u32::MAX, 2),
        ] {
            assert_eq!(coverage.add(bad), Err(SpanError::Outside(bad)));
        }
        assert_eq!(coverage.missing_tokens(), 16 * 6);
    }

    #[test]
    fn prompts_that_differ_in_one_token_have_different_hashes() {
        assert_ne!(prompt_hash(&[1, 2, 3]), prompt_hash(&[1, 2, 4]));
        assert_ne!(prompt_hash(&[]), prompt_hash(&[0]));
    }
}
