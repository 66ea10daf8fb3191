"""Writes the seeds of fuzz/corpus: small inputs that each reader takes. What fuzzing finds is added beside them by hand.

usage: python3 fuzz/seeds.py
"""

import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).parent
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 30: (1, 2)}


def put(target: str, name: str, data: bytes | str) -> None:
    path = ROOT / "corpus" / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def gguf(metadata: dict, tensors: list[tuple[str, int, list[int]]]) -> bytes:
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()

    def value(v) -> bytes:
        if isinstance(v, bool):
            return struct.pack("<IB", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, float):
            return struct.pack("<If", 6, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(text, v))

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, v in metadata.items():
        out += text(key) + value(v)
    data = b""
    for name, kind, dims in tensors:
        values, size = BLOCKS[kind]
        count = 1
        for d in dims:
            count *= d
        out += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        out += struct.pack("<IQ", kind, len(data))
        data += bytes(i * 37 % 61 for i in range(count // values * size))
        data += bytes(-len(data) % 32)
    return out + bytes(-len(out) % 32) + data


def model(architecture: str, kind: int) -> bytes:
    layer = [("attn_q", [32, 32]), ("attn_k", [32, 16]), ("attn_v", [32, 16]), ("attn_output", [32, 32])]
    layer += [("ffn_gate", [32, 32]), ("ffn_up", [32, 32]), ("ffn_down", [32, 32])]
    tensors = [("token_embd.weight", kind, [32, 9]), ("output_norm.weight", 0, [32])]
    tensors += [(f"blk.0.{name}.weight", kind, dims) for name, dims in layer]
    tensors += [(f"blk.0.{name}.weight", 0, [32]) for name in ("attn_norm", "ffn_norm")]
    if architecture == "qwen2":
        tensors += [(f"blk.0.attn_{x}.bias", 0, [n]) for x, n in (("q", 32), ("k", 16), ("v", 16))]
    if architecture == "qwen3":
        tensors += [(f"blk.0.attn_{x}_norm.weight", 0, [16]) for x in "qk"]
    sizes = {
        "block_count": 1, "embedding_length": 32, "attention.head_count": 2, "attention.head_count_kv": 1,
        "attention.key_length": 16, "feed_forward_length": 32, "context_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }  # fmt: skip
    metadata = {"general.architecture": architecture, "general.name": "tiny"}
    metadata |= {f"{architecture}.{key}": v for key, v in sizes.items()}
    metadata |= {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.eos_token_id": 2}
    return gguf(metadata, tensors)


for architecture, kind in [("llama", 2), ("qwen2", 8), ("qwen3", 7)]:
    for target in ("gguf", "checkpoint"):
        put(target, architecture, model(architecture, kind))
put("gguf", "empty", gguf({"general.alignment": 64, "a": True}, []))


def safetensors(tensors: dict) -> bytes:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(at))


put("safetensors", "three", safetensors({"a": ("F32", [2, 3], 24), "b": ("BF16", [4], 8), "c": ("F16", [0, 2], 0)}))
put("safetensors", "none", safetensors({}))

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 9,
    "tie_word_embeddings": True, "eos_token_id": [1, 2], "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "a.safetensors", "model.norm.weight": "b.safetensors"}})
for name, architecture, more in [
    ("llama", "LlamaForCausalLM", {"rope_parameters": LLAMA3, "attention_bias": False, "mlp_bias": False}),
    ("qwen2", "Qwen2ForCausalLM", {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}),
    ("qwen3", "Qwen3ForCausalLM", {"model_type": "qwen3", "layer_types": ["full_attention"], "rope_theta": 1e6}),
]:
    config = json.dumps(CONFIG | {"architectures": [architecture]} | more)
    put("folder", name, "\0".join([config, '{"eos_token_id": 3}', INDEX]))

for kind, (_, size) in (BLOCKS | {12: (256, 144), 13: (256, 176), 14: (256, 210)}).items():
    put("dequantise", str(kind), bytes([kind]) + bytes(i * 91 % 256 for i in range(size)))

COMMON = {
    "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": -1, "stop": ["a", "b"], "n": 1, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
PARTS = [{"type": "text", "text": "hi"}]
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}, {"role": "assistant", "content": None}]
put("chat", "whole", json.dumps(COMMON | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}))
put("chat", "short", '{"model":"m","messages":[{"role":"user","content":"\\u00e9"}],"logit_bias":{"1":-100},"stop":"x"}')
put("completions", "whole", json.dumps(COMMON | {"prompt": "once", "logprobs": 1}))
put("completions", "ids", '{"model":"m","prompt":[[1,2],[3]],"response_format":{"type":"json_object"},"min_p":0.1}')

DATA = ROOT.parent / "router" / "tests" / "data"
put("tokenizer", "gguf", (DATA / "tiny.gguf").read_bytes())
put("tokenizer", "json", (DATA / "tiny-json" / "tokenizer.json").read_bytes())
put("tokenizer", "pieces", (DATA / "pieces-json" / "tokenizer.json").read_bytes())
for path in sorted((DATA / "templates").iterdir()):
    if path.stat().st_size < 8000:
        put("template", path.name, path.read_bytes())

field = lambda number, data: bytes([number << 3 | 2, len(data)]) + data
FRAME = b"\x08\x01\x10\x00\x18\x05\x20\x02\x2d\x01\x02\x03\x04" + field(6, b"payload")
message = lambda data: b"\0" + struct.pack(">I", len(data)) + data
put("frames", "three", b"\x05" + message(FRAME) + message(b"\x18\x03\x20\x25") + message(b"\x08\x01\x18\x07\x20\x04"))
put("frames", "cut", b"\x00" + message(FRAME) + message(FRAME)[:-3])
put("wire", "frame", b"\x00" + FRAME)
put("wire", "generate", b"\x01" + field(1, b"0123456789abcdef") + field(2, bytes([1, 2, 3])))
put("wire", "layout", b"\x04\x08\x02\x10\x10" + field(3, b"\x08\x01\x10\x02\x18\x08"))
put("manifest", "smollm2", (ROOT.parent / "examples" / "smollm2.yaml").read_bytes())
put("manifest", "anchors", "apiVersion: tandem.dev/v1alpha1\nkind: PDDeployment\nmetadata: &a {name: x}\nspec: {model: *a}\n")
put("sse", "stream", '\x09: ping\n\ndata: {"a":1}\n\r\ndata:b\ndata: c\nid: 7\n\n: x\r\n\r\ndata: [DONE]\r\n\r\n')
