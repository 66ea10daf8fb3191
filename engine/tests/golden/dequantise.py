"""Writes ../data/dequantise.json: random blocks of each element type and the f32 values that the `gguf` package (0.19, the
reference of the format's own project) reads from them. Both as hex of little-endian bytes.

usage: python3 dequantise.py
"""

import json
import pathlib

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

VALUES = 256
# where the f16 scales and minimums of a block lie; every other byte may be anything
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}

random = np.random.default_rng(1)
cases = []
for kind in [T.F16, T.BF16, *HALVES]:
    values, size = GGML_QUANT_SIZES[kind]
    if kind in HALVES:
        blocks = random.integers(0, 256, (VALUES // values, size), dtype=np.uint8)
        for at in HALVES[kind]:
            halves = random.normal(0, 0.1, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
        row = blocks.reshape(-1)
    else:
        row = random.normal(0, 1, VALUES).astype(np.float32)
        row = (row.astype(np.float16) if kind == T.F16 else (row.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    expected = dequantize(row, kind).astype("<f4")
    cases.append({"type": kind.name, "id": int(kind), "row": row.tobytes().hex(), "values": expected.tobytes().hex()})

path = pathlib.Path(__file__).parent.parent / "data" / "dequantise.json"
path.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
