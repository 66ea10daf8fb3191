"""Makes the goldens: small random models in every shape that the engine computes, and the logits that transformers gives for them.

Run it in a virtual environment with requirements.txt, from this folder: python make.py. It writes a folder a model, with
config.json and model.safetensors as transformers saves them, expected.json (the tokens, and the positions whose logits are told)
and expected.f32 (those logits, [positions][vocab_size], little endian). Transformers computes in f64 with the weights as saved.
"""

import json
import pathlib
import shutil

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

# 0: one token; 7, 8, 15, 16: edges of pages and of groups of 8 keys; 63, 64, 127, 128: edges of chunks and of blocks of keys
POSITIONS = [0, 1, 3, 4, 7, 8, 15, 16, 31, 32, 62, 63, 64, 65, 127, 128, 129, 149]
TOKENS = 150
VOCAB = 128

COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)

# two ranks can share it
HALVABLE = dict(intermediate_size=128)

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    # of the 8 wavelengths of a head one lies above 64 / 1 not far, one between, one below 64 / 4
    original_max_position_embeddings=64,
)


def rope(theta):
    return dict(rope_type="default", rope_theta=theta)


MODELS = {
    "llama-gqa": (LlamaConfig(**COMMON, rope_parameters=rope(10000.0)), torch.float32),
    "llama-mha-tied": (
        LlamaConfig(**{**COMMON, "num_key_value_heads": 4, "tie_word_embeddings": True}, rope_parameters=rope(10000.0)),
        torch.bfloat16,
    ),
    "llama3-scaled": (LlamaConfig(**COMMON, rope_parameters=LLAMA3), torch.bfloat16),
    # three layers, narrow heads, groups of 4
    "llama-narrow": (
        LlamaConfig(
            **{**COMMON, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 8, "tie_word_embeddings": True},
            rope_parameters=rope(500000.0),
        ),
        torch.float16,
    ),
    "qwen2": (Qwen2Config(**{**COMMON, **HALVABLE, "tie_word_embeddings": True}, rope_parameters=rope(1000000.0)), torch.bfloat16),
    # heads wider than hidden_size / heads
    "qwen3": (Qwen3Config(**{**COMMON, **HALVABLE, "head_dim": 32}, rope_parameters=rope(1000000.0)), torch.bfloat16),
    # heads whose width is no multiple of 16
    "qwen3-tied": (
        Qwen3Config(**{**COMMON, "head_dim": 24, "tie_word_embeddings": True}, rope_parameters=rope(1000000.0)),
        torch.bfloat16,
    ),
}


def fill(model, generator):
    """Weights of a size at which every part of the model shows in the logits; transformers' own are too small, and its biases zero."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * noise.clamp(-2, 2)
        elif name.endswith(".bias"):
            values = 0.5 * noise
        elif "embed_tokens" in name:
            values = noise
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            values = gain * noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(values)


def make(name, config, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    fill(model, generator)
    folder = pathlib.Path(name)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    # as a reader finds it: casting the model itself would round the rotary frequencies too
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    expected = logits[POSITIONS].to(torch.float32)
    (folder / "expected.f32").write_bytes(expected.numpy().astype("<f4").tobytes())
    (folder / "expected.json").write_text(json.dumps(dict(tokens=tokens.tolist(), positions=POSITIONS)) + "\n")
    print(f"{name}: logits of {expected.std().item():.2f} around {expected.mean().item():.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, (name, (config, dtype)) in enumerate(MODELS.items()):
        make(name, config, dtype, seed)
