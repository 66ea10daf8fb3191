//! What each part of a model is called in a GGUF file.

use crate::model::checkpoint::{LayerPart, Part};

/// The tensor that holds `part`.
pub(in crate::model) fn name(part: Part) -> String {
    let (layer, part) = match part {
        Part::TokenEmbd => return "token_embd.weight".to_owned(),
        Part::OutputNorm => return "output_norm.weight".to_owned(),
        Part::Output => return "output.weight".to_owned(),
        Part::RopeFreqs => return "rope_freqs.weight".to_owned(),
        Part::Layer(layer, part) => (layer, part),
    };
    let name = match part {
        LayerPart::AttnNorm => "attn_norm.weight",
        LayerPart::Q => "attn_q.weight",
        LayerPart::K => "attn_k.weight",
        LayerPart::V => "attn_v.weight",
        LayerPart::QBias => "attn_q.bias",
        LayerPart::KBias => "attn_k.bias",
        LayerPart::VBias => "attn_v.bias",
        LayerPart::QNorm => "attn_q_norm.weight",
        LayerPart::KNorm => "attn_k_norm.weight",
        LayerPart::AttnOutput => "attn_output.weight",
        LayerPart::FfnNorm => "ffn_norm.weight",
        LayerPart::Gate => "ffn_gate.weight",
        LayerPart::Up => "ffn_up.weight",
        LayerPart::Down => "ffn_down.weight",
    };
    format!("blk.{layer}.{name}")
}
