"""llama.cpp as a peer: answers one case per line on stdin with milliseconds as JSON on stdout.

usage: llama_peer.py MODEL.gguf THREADS
cases: prefill TOKENS | decode STREAMS CONTEXT STEPS
Each step computes the logits of every stream and picks the largest, as a greedy server does.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp as L
import numpy as np

SILENT = L.llama_log_callback(lambda *a: None)


class Peer:
    def __init__(self, path, threads):
        L.llama_log_set(SILENT, ctypes.c_void_p(0))
        L.llama_backend_init()
        self.threads = threads
        self.model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        self.vocab = L.llama_model_get_vocab(self.model)
        self.vocab_size = L.llama_vocab_n_tokens(self.vocab)
        self.rng = random.Random(1)

    def context(self, streams, length):
        p = L.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = length, 2048, 512
        p.n_threads = p.n_threads_batch = self.threads
        p.n_seq_max = streams
        return L.llama_init_from_model(self.model, p)

    @staticmethod
    def step(ctx, items):
        """(token, position, stream, wants logits) each."""
        b = L.llama_batch_init(len(items), 0, 1)
        b.n_tokens = len(items)
        for i, (token, position, stream, logits) in enumerate(items):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, position, 1, stream, logits
        assert L.llama_decode(ctx, b) == 0
        L.llama_synchronize(ctx)
        L.llama_batch_free(b)

    def row(self, ctx, index):
        return np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, index), (self.vocab_size,))

    def random_tokens(self, n):
        return [self.rng.randrange(100, self.vocab_size) for _ in range(n)]

    def prefill(self, n):
        ctx = self.context(1, max(1024, n + 8))
        self.step(ctx, [(5, 0, 0, True)])  # first use allocates
        L.llama_memory_clear(L.llama_get_memory(ctx), True)
        items = [(t, i, 0, i == n - 1) for i, t in enumerate(self.random_tokens(n))]
        start = time.perf_counter()
        self.step(ctx, items)
        self.row(ctx, n - 1).argmax()
        elapsed = time.perf_counter() - start
        L.llama_free(ctx)
        return elapsed * 1e3

    def decode(self, streams, n, steps):
        ctx = self.context(streams, streams * 512)
        last = []
        for s in range(streams):
            self.step(ctx, [(t, i, s, i == n - 1) for i, t in enumerate(self.random_tokens(n))])
            last.append(int(self.row(ctx, n - 1).argmax()))
        start = time.perf_counter()
        for k in range(steps):
            self.step(ctx, [(last[s], n + k, s, True) for s in range(streams)])
            last = [int(self.row(ctx, s).argmax()) for s in range(streams)]
        elapsed = time.perf_counter() - start
        L.llama_free(ctx)
        return elapsed * 1e3

    def tokens(self, text):
        """Token ids of a text, without special tokens."""
        text = text.encode()
        ids = (ctypes.c_int32 * (len(text) + 8))()
        n = L.llama_tokenize(self.vocab, text, len(text), ids, len(ids), False, False)
        return list(ids[:n])

    def logits(self, ids):
        """f32 [tokens][vocabulary], teacher-forced."""
        ctx = self.context(1, 1024)
        self.step(ctx, [(t, i, 0, True) for i, t in enumerate(ids)])
        rows = np.stack([self.row(ctx, i) for i in range(len(ids))])
        L.llama_free(ctx)
        return rows


def main():
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"system": L.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        case, *numbers = line.split()
        ms = {"prefill": peer.prefill, "decode": peer.decode}[case](*map(int, numbers))
        print(json.dumps({"ms": ms}), flush=True)


if __name__ == "__main__":
    main()
