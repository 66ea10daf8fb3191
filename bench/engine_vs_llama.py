"""One table: the unified engine through gRPC Generate beside llama.cpp, same file, same threads, one run, as ratios.

usage: engine_vs_llama.py --model FILE.gguf --bin DIR --peer-python PYTHON [--rounds 5] [--json OUT]
The two sides take turns within each round, so that a noisy machine slows both; the ratio is the median of paired ratios.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

args = argparse.ArgumentParser()
args.add_argument("--model", required=True)
args.add_argument("--bin", required=True, type=Path)
args.add_argument("--peer-python", required=True)
args.add_argument("--rounds", type=int, default=5)
args.add_argument("--threads", type=int, default=os.cpu_count())
args.add_argument("--json", type=Path)
args = args.parse_args()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


control, data, ops = free_port(), free_port(), free_port()
engine = subprocess.Popen(
    [args.bin / "tandem-engine", "--role", "unified", "--model", args.model, "--backend", "cpu",
     "--listen", f"127.0.0.1:{control}", "--data-listen", f"127.0.0.1:{data}", "--ops-listen", f"127.0.0.1:{ops}",
     "--threads", str(args.threads), "--no-prefix-cache"],
    stderr=subprocess.DEVNULL,
)
PEER = [args.peer_python, Path(__file__).with_name("llama_peer.py"), args.model, str(args.threads)]
# one step decides whether the peer's repacked buffers work on this machine
probe = subprocess.run(PEER, input="decode 1 8 1\n", capture_output=True, text=True, timeout=120)
if probe.returncode:
    print(f"llama.cpp died of signal {-probe.returncode} with repacked buffers; it runs without them", file=sys.stderr)
    PEER.append("plain")
peer = subprocess.Popen(PEER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_ready(deadline=120):
    end = time.time() + deadline
    while time.time() < end:
        if engine.poll() is not None:
            sys.exit(f"the engine exited with {engine.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ops}/readyz", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"the engine was not ready after {deadline} s")


def ours(prompt, output, streams, seed):
    out = subprocess.run(
        [args.bin / "tandem", "bench", "engine", "--endpoint", f"127.0.0.1:{control}", "--json", "--seed", str(seed),
         "--prompt-tokens", str(prompt), "--output-tokens", str(output), "--concurrency", str(streams)],
        check=True, capture_output=True, text=True, timeout=600,
    )
    return json.loads(out.stdout)


def theirs(line):
    peer.stdin.write(line + "\n")
    peer.stdin.flush()
    return json.loads(peer.stdout.readline())["ms"]


STEPS = 48
CASES = {
    "prefill 512": (
        lambda seed: ours(512, 1, 1, seed)["prefill_tokens_per_second"],
        lambda: 512 / theirs("prefill 512") * 1e3,
    ),
}
for streams in (1, 16):
    CASES[f"decode, {streams} stream{'s' * (streams > 1)}, context 128.."] = (
        lambda seed, n=streams: ours(128, STEPS, n, seed)["decode_tokens_per_second"],
        lambda n=streams: n * STEPS / theirs(f"decode {n} 128 {STEPS}") * 1e3,
    )

try:
    system = json.loads(peer.stdout.readline())["system"]
    wait_ready()
    rates = {name: ([], []) for name in CASES}
    for name, (a, b) in CASES.items():  # once each, unrecorded: first use touches memory
        a(0), b()
    for k in range(args.rounds):
        for name, (a, b) in CASES.items():
            for side in ((0, 1) if k % 2 else (1, 0)):
                rates[name][side].append(b() if side else a(1000 + k))
finally:
    engine.terminate()
    peer.kill()
    engine.wait(30)


def row(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


result = {"rounds": args.rounds, "threads": args.threads, "cpu": platform.processor() or platform.machine(),
          "peer": "llama.cpp (llama-cpp-python, native build)", "peer_system": system, "peer_repacked_buffers": "plain" not in PEER, "cases": {}}
print(f"{args.rounds} paired rounds, {args.threads} threads each, tok/s median (min..max)")
print(f"{'case':<36}{'tandem':>26}{'llama.cpp':>26}{'ratio':>20}")
for name, (a, b) in rates.items():
    ratios = [x / y for x, y in zip(a, b)]
    print(f"{name:<36}{row(a, 1):>26}{row(b, 1):>26}{row(ratios, 2):>20}")
    result["cases"][name] = {"tandem": a, "llama.cpp": b, "ratio_median": statistics.median(ratios)}
if args.json:
    args.json.write_text(json.dumps(result, indent=1) + "\n")
