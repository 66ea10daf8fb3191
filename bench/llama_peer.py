"""llama.cpp as a peer: answers one case per line on stdin with milliseconds as JSON on stdout.

usage: llama_peer.py MODEL.gguf THREADS [plain]
plain: no repacked weight buffers. AMX's are among them, and crash where the CPU shows AMX but the system does not grant it.
cases:  prefill TOKENS | decode STREAMS CONTEXT STEPS
Each step computes the logits of every stream and picks the largest, as a greedy server does.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp as L
import numpy as np

MODEL, THREADS = sys.argv[1], int(sys.argv[2])
silent = L.llama_log_callback(lambda *a: None)
L.llama_log_set(silent, ctypes.c_void_p(0))
L.llama_backend_init()
params = L.llama_model_default_params()
params.use_extra_bufts = "plain" not in sys.argv
model = L.llama_model_load_from_file(MODEL.encode(), params)
VOCAB = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
rng = random.Random(1)


def context(streams, length):
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch = length, 2048, 512
    p.n_threads = p.n_threads_batch = THREADS
    p.n_seq_max = streams
    return L.llama_init_from_model(model, p)


def decode(ctx, items):
    b = L.llama_batch_init(len(items), 0, 1)
    b.n_tokens = len(items)
    for i, (token, position, stream, logits) in enumerate(items):
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, position, 1, stream, logits
    assert L.llama_decode(ctx, b) == 0
    L.llama_synchronize(ctx)
    L.llama_batch_free(b)


def greedy(ctx, row):
    return int(np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, row), (VOCAB,)).argmax())


def tokens(n):
    return [rng.randrange(100, VOCAB) for _ in range(n)]


def prefill(n):
    ctx = context(1, max(1024, n + 8))
    decode(ctx, [(5, 0, 0, True)])  # first use allocates
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    items = [(t, i, 0, i == n - 1) for i, t in enumerate(tokens(n))]
    start = time.perf_counter()
    decode(ctx, items)
    greedy(ctx, n - 1)
    elapsed = time.perf_counter() - start
    L.llama_free(ctx)
    return elapsed * 1e3


def generate(streams, n, steps):
    ctx = context(streams, streams * 512)
    last = []
    for s in range(streams):
        decode(ctx, [(t, i, s, i == n - 1) for i, t in enumerate(tokens(n))])
        last.append(greedy(ctx, n - 1))
    start = time.perf_counter()
    for k in range(steps):
        decode(ctx, [(last[s], n + k, s, True) for s in range(streams)])
        last = [greedy(ctx, s) for s in range(streams)]
    elapsed = time.perf_counter() - start
    L.llama_free(ctx)
    return elapsed * 1e3


print(json.dumps({"system": L.llama_print_system_info().decode()}), flush=True)
for line in sys.stdin:
    case, *numbers = line.split()
    numbers = [int(x) for x in numbers]
    print(json.dumps({"ms": {"prefill": prefill, "decode": generate}[case](*numbers)}), flush=True)
