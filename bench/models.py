"""Makes the files that the benches compare over, from the demo's model, once.

usage: models.py SOURCE.gguf FOLDER     (under the llama.cpp peer's Python; prints name and path of each)
- smollm2.{Q4_0,Q8_0,Q4_K_M}.gguf: the same weights in other formats, by llama.cpp's own quantiser; the source is smollm2.Q4_1.
- random.Q4_K_M.gguf: random weights whose widths are multiples of 256, so that K-quants are what their name says: in the
  file above, 576 columns make most of the tensors Q5_0 and Q8_0.
"""

import ctypes
import os
import sys
from pathlib import Path

import gguf
import llama_cpp as L
import numpy as np

FILES = ["smollm2.Q4_0", "smollm2.Q8_0", "smollm2.Q4_K_M", "random.Q4_K_M"]
FTYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
HIDDEN, INTER, LAYERS, HEADS, KV_HEADS = 1024, 2816, 12, 16, 4
SILENT = L.llama_log_callback(lambda *a: None)


def writer(path, source, replaced):
    """A file with the source's keys, some of them replaced."""
    out = gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if field.name.startswith(("GGUF.", "split.")) or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        out.add_key_value(field.name, replaced.get(field.name, field.contents()), kind, inner)
    out.add_file_type(0)
    return out


def finish(out):
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def dequantised(source, path):
    out = writer(path, source, {})
    for t in source.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        out.add_tensor(t.name, np.asarray(gguf.dequantize(t.data, t.tensor_type), np.float32).reshape(shape))
    finish(out)


def random_weights(source, path):
    """Same vocabulary, other widths; magnitudes as trained weights have them."""
    rng = np.random.default_rng(1)
    out = writer(path, source, {
        "general.name": "random", "llama.block_count": LAYERS, "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTER, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.rope.dimension_count": HIDDEN // HEADS,
    })  # fmt: skip
    vocabulary = next(int(t.shape[1]) for t in source.tensors if t.name == "token_embd.weight")

    def matrix(name, rows, columns):
        out.add_tensor(name, rng.standard_normal((rows, columns), np.float32) * np.float32(0.02))

    def ones(name):
        out.add_tensor(name, np.ones(HIDDEN, np.float32))

    matrix("token_embd.weight", vocabulary, HIDDEN)
    ones("output_norm.weight")
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        ones(p + "attn_norm.weight"), ones(p + "ffn_norm.weight")
        matrix(p + "attn_q.weight", HIDDEN, HIDDEN)
        matrix(p + "attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        matrix(p + "attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        matrix(p + "attn_output.weight", HIDDEN, HIDDEN)
        matrix(p + "ffn_gate.weight", INTER, HIDDEN)
        matrix(p + "ffn_up.weight", INTER, HIDDEN)
        matrix(p + "ffn_down.weight", HIDDEN, INTER)
    finish(out)


def quantise(source, path, name):
    p = L.llama_model_quantize_default_params()
    p.ftype, p.nthread = FTYPES[name], os.cpu_count()
    if L.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(p)):
        sys.exit(f"llama.cpp cannot quantise {source} to {name}")


def main():
    L.llama_log_set(SILENT, ctypes.c_void_p(0))
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    source = gguf.GGUFReader(path)
    print("smollm2.Q4_1", path)
    for file in FILES:
        target = folder / f"{file}.gguf"
        kind, name = file.split(".")
        if not target.exists():
            print(f"making {target}", file=sys.stderr)
            partial = target.with_suffix(".partial")
            whole = folder / f"{kind}.F32"
            if not whole.exists():
                {"smollm2": dequantised, "random": random_weights}[kind](source, partial)
                partial.replace(whole)
            quantise(whole, partial, name)
            partial.replace(target)
        print(file, target)
    for whole in folder.glob("*.F32"):
        whole.unlink()


if __name__ == "__main__":
    main()
