"""A plain f32 forward pass over the dequantised weights of a llama GGUF: what every quantised engine approximates.

Nothing is shared with the engines: `gguf` reads and dequantises, numpy multiplies. Keys and values stay f32.
"""

import gguf
import numpy as np


class Reference:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in reader.tensors}
        key = lambda name, default=None: reader.fields[name].contents() if name in reader.fields else default
        if key("general.architecture") != "llama":
            raise SystemExit(f"{path} is a {key('general.architecture')}; this reference knows llama alone")
        self.layers = key("llama.block_count")
        self.heads = key("llama.attention.head_count")
        self.kv_heads = key("llama.attention.head_count_kv", self.heads)
        self.epsilon = key("llama.attention.layer_norm_rms_epsilon")
        self.rope_base = key("llama.rope.freq_base", 10000.0)

    def weight(self, name):
        """f32, rows are outputs. Dequantised anew for each use: the whole model as f32 need not fit."""
        tensor = self.tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.epsilon)) * self.weight(name)

    def rope(self, x):
        """Rotates neighbouring pairs of [tokens][heads][dim]."""
        tokens, _, dim = x.shape
        angle = np.outer(np.arange(tokens), self.rope_base ** (-np.arange(0, dim, 2) / dim))
        cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    def attention(self, q, k, v):
        """Causal; [tokens][heads][dim] each, already rotated."""
        tokens, _, dim = q.shape
        k, v = (np.repeat(x, self.heads // self.kv_heads, 1) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) / np.float32(np.sqrt(dim))
        scores += np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", scores, v, optimize=True).reshape(tokens, -1)

    def logits(self, sequences):
        """[tokens][vocabulary] for each list of token ids."""
        embedding = self.weight("token_embd.weight")
        xs = [embedding[ids] for ids in sequences]
        for layer in range(self.layers):
            w = {part: self.weight(f"blk.{layer}.{part}.weight") for part in
                 ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
            for i, x in enumerate(xs):
                h = self.norm(x, f"blk.{layer}.attn_norm.weight")
                q, k, v = ((h @ w[part].T).reshape(len(x), heads, -1) for part, heads in
                           (("attn_q", self.heads), ("attn_k", self.kv_heads), ("attn_v", self.kv_heads)))
                x = x + self.attention(self.rope(q), self.rope(k), v) @ w["attn_output"].T
                h = self.norm(x, f"blk.{layer}.ffn_norm.weight")
                gate = h @ w["ffn_gate"].T
                xs[i] = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        head = self.weight("output.weight") if "output.weight" in self.tensors else embedding
        return [self.norm(x, "output_norm.weight") @ head.T for x in xs]
