//! What each part of a model is called in safetensors files.

use crate::model::checkpoint::{LayerPart, Part};

/// The tensor that holds `part`; `None` for what these files have no tensor for.
pub(in crate::model) fn name(part: Part) -> Option<String> {
    let (layer, part) = match part {
        Part::TokenEmbd => return Some("model.embed_tokens.weight".to_owned()),
        Part::OutputNorm => return Some("model.norm.weight".to_owned()),
        Part::Output => return Some("lm_head.weight".to_owned()),
        Part::RopeFreqs => return None,
        Part::Layer(layer, part) => (layer, part),
    };
    let name = match part {
        LayerPart::AttnNorm => "input_layernorm.weight",
        LayerPart::Q => "self_attn.q_proj.weight",
        LayerPart::K => "self_attn.k_proj.weight",
        LayerPart::V => "self_attn.v_proj.weight",
        LayerPart::QBias => "self_attn.q_proj.bias",
        LayerPart::KBias => "self_attn.k_proj.bias",
        LayerPart::VBias => "self_attn.v_proj.bias",
        LayerPart::QNorm => "self_attn.q_norm.weight",
        LayerPart::KNorm => "self_attn.k_norm.weight",
        LayerPart::AttnOutput => "self_attn.o_proj.weight",
        LayerPart::FfnNorm => "post_attention_layernorm.weight",
        LayerPart::Gate => "mlp.gate_proj.weight",
        LayerPart::Up => "mlp.up_proj.weight",
        LayerPart::Down => "mlp.down_proj.weight",
    };
    Some(format!("model.layers.{layer}.{name}"))
}

/// Whether a tensor is one that old checkpoints hold and nothing reads: the rotary frequencies, which follow from the config.
pub(super) fn is_needless(name: &str) -> bool {
    name.starts_with("model.layers.") && name.ends_with(".self_attn.rotary_emb.inv_freq")
}
