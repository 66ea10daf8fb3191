//! What a token's KV consists of, as a value that two processes compare before the first byte moves.
//!
//! The order on the wire is canonical, `[layer][component][token][head][dim]`, little endian, so page size and the order in
//! memory may differ between the two sides.

use std::fmt;

use crate::proto;

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single.
    F32,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// How a component is spread over the ranks of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvAxis {
    /// By head.
    Heads,
    /// Every rank has all of it; one rank sends it, once.
    Replicated,
}

/// One component of a layer's KV.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KvComponent {
    /// `k`, `v`, …; both sides must know it.
    pub name: String,
    /// Element type.
    pub dtype: KvDtype,
    /// Format id of scales, empty for none.
    pub scale_format: String,
    /// KV heads, all ranks together.
    pub heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// How it is sharded.
    pub axis: KvAxis,
}

impl KvComponent {
    /// Bytes of one token in one layer.
    pub const fn token_bytes(&self) -> usize {
        self.heads as usize * self.head_dim as usize * self.dtype.bytes()
    }
}

/// What a token's KV consists of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// The components of every layer, in wire order.
    pub components: Vec<KvComponent>,
    /// Layers.
    pub layers: u32,
    /// Tokens in a page of this side; does not have to agree.
    pub page_tokens: u32,
}

/// Why a layout off the wire was refused, or two layouts do not go together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("layout: {0}")]
pub struct LayoutError(pub String);

/// Bounds on what a peer may claim; far above any model, far below an overflow.
const MAX_LAYERS: u32 = 4_096;
const MAX_COMPONENTS: usize = 64;
const MAX_HEADS: u32 = 65_536;
const MAX_HEAD_DIM: u32 = 65_536;
const MAX_PAGE_TOKENS: u32 = 1 << 20;

impl KvLayout {
    /// The usual layout: K and V heads of one dtype.
    pub fn heads(layers: u32, heads: u32, head_dim: u32, dtype: KvDtype, page_tokens: u32) -> Self {
        let component = |name: &str| KvComponent {
            name: name.to_owned(),
            dtype,
            scale_format: String::new(),
            heads,
            head_dim,
            axis: KvAxis::Heads,
        };
        Self {
            components: vec![component("k"), component("v")],
            layers,
            page_tokens,
        }
    }

    /// Bytes of one token, all layers and components.
    pub fn token_bytes(&self) -> usize {
        self.layers as usize * self.components.iter().map(KvComponent::token_bytes).sum::<usize>()
    }

    /// Can KV of `other` be put into pages of `self`? The error names the first difference.
    pub fn compatible(&self, other: &Self) -> Result<(), LayoutError> {
        let differ = |what: &str, own: &dyn fmt::Debug, peer: &dyn fmt::Debug| {
            Err(LayoutError(format!("{what} differs: {own:?} here, {peer:?} there")))
        };
        if self.layers != other.layers {
            return differ("number of layers", &self.layers, &other.layers);
        }
        let names = |l: &Self| l.components.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
        if names(self) != names(other) {
            return differ("component set", &names(self), &names(other));
        }
        for (own, peer) in self.components.iter().zip(&other.components) {
            if own != peer {
                return differ(&format!("component {}", own.name), own, peer);
            }
        }
        Ok(())
    }

    /// The message form.
    pub fn to_wire(&self) -> proto::KvLayout {
        proto::KvLayout {
            components: self
                .components
                .iter()
                .map(|c| proto::KvComponent {
                    name: c.name.clone(),
                    dtype: match c.dtype {
                        KvDtype::F16 => proto::KvDtype::F16,
                        KvDtype::Bf16 => proto::KvDtype::Bf16,
                        KvDtype::F32 => proto::KvDtype::F32,
                    }
                    .into(),
                    scale_format: c.scale_format.clone(),
                    heads: c.heads,
                    head_dim: c.head_dim,
                    axis: match c.axis {
                        KvAxis::Heads => proto::KvAxis::Heads,
                        KvAxis::Replicated => proto::KvAxis::Replicated,
                    }
                    .into(),
                })
                .collect(),
            layers: self.layers,
            page_tokens: self.page_tokens,
        }
    }

    /// From the message form; sizes are bounded so that no product overflows.
    pub fn from_wire(message: Option<&proto::KvLayout>) -> Result<Self, LayoutError> {
        let message = message.ok_or_else(|| LayoutError("absent".to_owned()))?;
        let within = |what: &str, value: u32, max: u32| {
            if value == 0 || value > max {
                Err(LayoutError(format!("{what} {value} is not in 1..={max}")))
            } else {
                Ok(value)
            }
        };
        let layers = within("layers", message.layers, MAX_LAYERS)?;
        let page_tokens = within("page_tokens", message.page_tokens, MAX_PAGE_TOKENS)?;
        let n = message.components.len();
        if n == 0 || n > MAX_COMPONENTS {
            return Err(LayoutError(format!("{n} components, expected 1..={MAX_COMPONENTS}")));
        }
        let components = message
            .components
            .iter()
            .map(|c| {
                let dtype = match c.dtype() {
                    proto::KvDtype::F16 => KvDtype::F16,
                    proto::KvDtype::Bf16 => KvDtype::Bf16,
                    proto::KvDtype::F32 => KvDtype::F32,
                    proto::KvDtype::Unspecified => {
                        return Err(LayoutError(format!(
                            "component {:?}: unknown dtype {}",
                            c.name, c.dtype
                        )));
                    }
                };
                let axis = match c.axis() {
                    proto::KvAxis::Heads => KvAxis::Heads,
                    proto::KvAxis::Replicated => KvAxis::Replicated,
                    proto::KvAxis::Unspecified => {
                        return Err(LayoutError(format!("component {:?}: unknown axis {}", c.name, c.axis)));
                    }
                };
                Ok(KvComponent {
                    name: c.name.clone(),
                    dtype,
                    scale_format: c.scale_format.clone(),
                    heads: within("heads", c.heads, MAX_HEADS)?,
                    head_dim: within("head_dim", c.head_dim, MAX_HEAD_DIM)?,
                    axis,
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            components,
            layers,
            page_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smollm2() -> KvLayout {
        KvLayout::heads(30, 3, 64, KvDtype::F16, 16)
    }

    #[test]
    fn a_token_of_smollm2_has_23040_bytes() {
        assert_eq!(smollm2().token_bytes(), 30 * 2 * 3 * 64 * 2);
    }

    #[test]
    fn a_layout_survives_the_wire() {
        assert_eq!(KvLayout::from_wire(Some(&smollm2().to_wire())), Ok(smollm2()));
    }

    type Edit = fn(&mut KvLayout);

    #[test]
    fn page_size_may_differ_but_nothing_that_a_byte_depends_on() {
        let a = smollm2();
        assert_eq!(
            a.compatible(&KvLayout {
                page_tokens: 64,
                ..a.clone()
            }),
            Ok(())
        );
        let edits: [(Edit, &str); 8] = [
            (|l| l.layers = 31, "layers"),
            (|l| l.components[1].dtype = KvDtype::Bf16, "component v"),
            (|l| l.components[0].heads = 4, "component k"),
            (|l| l.components[0].head_dim = 128, "component k"),
            (|l| l.components[0].axis = KvAxis::Replicated, "component k"),
            (|l| l.components[0].scale_format = "e8m0".to_owned(), "component k"),
            (|l| l.components.swap(0, 1), "component set"),
            (|l| drop(l.components.pop()), "component set"),
        ];
        for (edit, named) in edits {
            let mut b = a.clone();
            edit(&mut b);
            let error = a.compatible(&b).unwrap_err().to_string();
            assert!(error.contains(named), "{error} should name {named}");
        }
    }

    #[test]
    fn sizes_that_no_model_has_are_refused_before_they_are_multiplied() {
        let mut message = smollm2().to_wire();
        message.components[0].heads = u32::MAX;
        assert!(KvLayout::from_wire(Some(&message)).is_err());
        message = smollm2().to_wire();
        message.layers = 0;
        assert!(KvLayout::from_wire(Some(&message)).is_err());
        message = smollm2().to_wire();
        message.components[0].dtype = 77;
        assert!(
            KvLayout::from_wire(Some(&message))
                .unwrap_err()
                .to_string()
                .contains("77")
        );
        assert!(KvLayout::from_wire(None).is_err());
    }
}
