"""How far each engine's logits lie from an f32 pass over the same dequantised weights, over fixed text, teacher-forced.

usage: numerics.py --logits target/release/examples/logits [--json OUT] MODEL.gguf...
Runs under the llama.cpp peer's Python. For each file: mean KL divergence in nats, its 99 % quantile, and how often the likeliest
token is the same. Exits with 1 if the engine's mean is above llama.cpp's.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from llama_peer import Peer
from reference import Reference

TEXT = Path(__file__).with_name("text.txt")
LONGEST = 512


def sequences(peer):
    """The text's pieces as token ids, none longer than LONGEST."""
    for piece in TEXT.read_text().split("----\n"):
        ids = peer.tokens(piece)
        parts = -(-len(ids) // LONGEST)
        yield from (ids[i * len(ids) // parts : (i + 1) * len(ids) // parts] for i in range(parts))


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Distance:
    """From a reference, position by position."""

    def __init__(self):
        self.kl, self.same = [], []

    def add(self, reference, other):
        p, q = log_softmax(reference), log_softmax(other)
        self.kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        self.same += (p.argmax(-1) == q.argmax(-1)).tolist()

    def result(self):
        kl = np.array(self.kl)
        return {"positions": len(kl), "mean_kl": kl.mean(), "p99_kl": np.quantile(kl, 0.99), "max_kl": kl.max(), "same_top_1": np.mean(self.same)}


def compare(model, program, threads):
    peer = Peer(model, threads)
    texts = list(sequences(peer))
    positions = sum(map(len, texts))
    lines = "".join(" ".join(map(str, ids)) + "\n" for ids in texts)
    run = subprocess.run(
        [program, model, "--threads", str(threads)],
        input=lines.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=900, check=True,
    )  # fmt: skip
    engine = np.frombuffer(run.stdout, np.float32).reshape(-1, peer.vocab_size)
    if len(engine) != positions:
        sys.exit(f"{program} gave the logits of {len(engine)} tokens for a text of {positions}")
    distances = {"tandem": Distance(), "llama.cpp": Distance()}
    at = 0
    for ids, reference in zip(texts, Reference(model).logits(texts)):
        distances["tandem"].add(reference, engine[at : at + len(ids)])
        distances["llama.cpp"].add(reference, peer.logits(ids))
        at += len(ids)
    return {name: distance.result() for name, distance in distances.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logits", required=True, type=Path, help="the engine's example program of that name")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("models", nargs="+", type=Path)
    args = parser.parse_args()

    cases, worse = {}, []
    print(f"{'file':<12}{'':<12}{'positions':>10}{'mean KL':>12}{'99 % KL':>12}{'max KL':>10}{'same top-1':>12}")
    for path in args.models:
        name = path.stem.split(".")[-1] if "." in path.stem else path.stem
        cases[name] = compare(path, args.logits, args.threads)
        for side, r in cases[name].items():
            print(f"{name:<12}{side:<12}{r['positions']:>10}{r['mean_kl']:>12.6f}{r['p99_kl']:>12.5f}{r['max_kl']:>10.4f}{r['same_top_1']:>12.2%}", flush=True)
        if cases[name]["tandem"]["mean_kl"] > cases[name]["llama.cpp"]["mean_kl"]:
            worse.append(name)
    if args.json:
        args.json.write_text(json.dumps(cases, indent=1) + "\n")
    if worse:
        sys.exit(f"farther from f32 than llama.cpp: {', '.join(worse)}")


if __name__ == "__main__":
    main()
