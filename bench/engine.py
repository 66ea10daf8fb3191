"""The unified engine through gRPC Generate beside llama.cpp: same file, same threads, one run, as ratios.

usage: engine.py --models NAME=FILE.gguf... --bin DIR [--rounds 5] [--json OUT]    (under the llama.cpp peer's Python)
The sides take turns within each round, so that a noisy machine slows all; the ratio is the median of paired ratios. Where the
CPU has AMX, the peer runs twice: with it, and with the buffers that it repacks for AVX. The engine samples as a server does
(temperature 0.7, top_p 0.95); the peer picks the largest.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import gguf
from figures import ratios, spread, table

PROMPT, CONTEXT, STEPS = 512, 128, 32
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Bytes:
    """What a step has to read and to multiply at least: all matrices, the embedding only where it is the head too."""

    def __init__(self, path):
        tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
        head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
        blocks = [t for name, t in tensors.items() if name.startswith("blk.") and len(t.shape) == 2]
        self.read = sum(int(t.n_bytes) for t in [*blocks, tensors[head]])
        self.macs_layers = sum(int(t.n_elements) for t in blocks)
        self.macs = self.macs_layers + int(tensors[head].n_elements)


class Engine:
    def __init__(self, bin_dir, model, threads):
        self.bin = bin_dir
        self.control, self.data, self.ops = (free_port() for _ in range(3))
        self.process = subprocess.Popen(
            [bin_dir / "tandem-engine", "--role", "unified", "--model", model, "--backend", "cpu", "--threads", str(threads),
             "--listen", f"127.0.0.1:{self.control}", "--data-listen", f"127.0.0.1:{self.data}",
             "--ops-listen", f"127.0.0.1:{self.ops}", "--no-prefix-cache"],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_ready(self, seconds=120):
        end = time.time() + seconds
        while time.time() < end:
            if self.process.poll() is not None:
                sys.exit(f"the engine exited with {self.process.returncode} before it was ready")
            try:
                with NO_PROXY.open(f"http://127.0.0.1:{self.ops}/readyz", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        sys.exit(f"the engine was not ready after {seconds} s")

    def bench(self, prompt, output, streams, seed):
        out = subprocess.run(
            [self.bin / "tandem", "bench", "engine", "--endpoint", f"127.0.0.1:{self.control}", "--json", "--seed", str(seed),
             "--temperature", "0.7", "--top-p", "0.95", "--prompt-tokens", str(prompt), "--output-tokens", str(output),
             "--concurrency", str(streams)],
            check=True, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        return json.loads(out.stdout)

    def prefill(self, seed):
        return self.bench(PROMPT, 1, 1, seed)["prefill_tokens_per_second"]

    def decode(self, streams, seed):
        return self.bench(CONTEXT, STEPS, streams, seed)["decode_tokens_per_second"]


def peers():
    """Name to environment."""
    if " amx_int8 " not in Path("/proc/cpuinfo").read_text():
        return {"llama.cpp": {}}
    without = Path(sys.executable).parent.parent / "no_amx.so"
    return {"llama.cpp": {"LD_PRELOAD": str(without)}, "llama.cpp, AMX": {}}


class Peer:
    def __init__(self, env, model, threads):
        program = Path(__file__).with_name("llama_peer.py")
        self.process = subprocess.Popen(
            [sys.executable, program, model, str(threads)], env=os.environ | env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.system = self.answer()["system"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"llama.cpp ended with {self.process.wait(10)}")
        return json.loads(line)

    def ms(self, case):
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return self.answer()["ms"]

    def prefill(self, _seed):
        return PROMPT / self.ms(f"prefill {PROMPT}") * 1e3

    def decode(self, streams, _seed):
        return streams * STEPS / self.ms(f"decode {streams} {CONTEXT} {STEPS}") * 1e3


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def all_sides(bin_dir, model, threads):
    """Name to process: the engine first, then the peers. One of them computes at a time."""
    sides = {"tandem": Engine(bin_dir, model, threads)}
    try:
        for name, env in peers().items():
            sides[name] = Peer(env, model, threads)
        sides["tandem"].wait_ready()
        yield sides
    finally:
        for side in sides.values():
            side.process.terminate()
        for side in sides.values():
            side.process.wait(30)


CASES = {"prefill 512": None, "decode, 1 stream": 1, "decode, 16 streams": 16}


def run(side, streams, seed):
    return side.prefill(seed) if streams is None else side.decode(streams, seed)


def measure(name, model, args):
    """What the peer says of its build, and for each case the rates of all sides, in tokens/s."""
    with all_sides(args.bin, model, args.threads) as sides:
        rates = {case: {side: [] for side in sides} for case in CASES}
        for side in sides.values():  # unrecorded: first use touches memory
            run(side, None, 0), run(side, 1, 0)
        for k in range(args.rounds):
            for case, streams in CASES.items():
                for turn in range(len(sides)):
                    side = list(sides)[(turn + k) % len(sides)]
                    rates[case][side].append(run(sides[side], streams, 1000 + k))
            print(f"{name}: round {k + 1} of {args.rounds}", file=sys.stderr)
        return sides["llama.cpp"].system, rates


def judged(rates, model, limits):
    """The rates with their ratios and with the share of what the machine can do."""
    size, found = Bytes(model), {}
    for case, streams in CASES.items():
        ours = rates[case]["tandem"]
        rate = statistics.median(ours)
        macs = size.macs_layers if streams is None else size.macs
        found[case] = {
            "unit": "tokens/s",
            "rates": rates[case],
            "ratio": {side: ratios(ours, theirs) for side, theirs in rates[case].items() if side != "tandem"},
            "of_int8": rate * macs / 1e9 / limits["int8_gmac_s"],
        }
        if streams:  # a prompt reads the weights once for each chunk: not what bounds it
            found[case]["of_bandwidth"] = rate / streams * size.read / 1e9 / limits["read_gb_s"]
    return found


def show(result):
    rows = []
    for name, cases in result["cases"].items():
        for case, c in cases.items():
            bandwidth = f"{c['of_bandwidth']:.0%}" if "of_bandwidth" in c else ""
            rates, ratio = ([spread(v, d) for v in c[key].values()] for key, d in (("rates", 1), ("ratio", 2)))
            rows.append([f"{name}, {case}", *rates, *ratio, bandwidth, f"{c['of_int8']:.0%}"])
    limits = result["limits"].values()
    sides = list(next(iter(next(iter(result["cases"].values())).values()))["ratio"])
    print(f"\nEngine, {result['rounds']} paired rounds, {result['threads']} threads each: tokens/s, median (least..most)")
    table(["", "tandem", *sides, *(f"to {side}" for side in sides), "of bandwidth", "of int8 peak"], rows)
    read, int8 = (max(one[key] for one in limits) for key in ("read_gb_s", "int8_gmac_s"))
    print(f"measured in this run: {read:.1f} GB/s read, {int8 / 1e3:.2f} T int8 multiply-adds/s (AMX not counted)")
    print(f"llama.cpp: llama-cpp-python, built for this CPU: {result['peer']}")


def machine(args, model):
    """What the machine can do with so many threads: GB/s read from a block as large as the model, 1e9 int8 multiply-adds/s."""
    program = args.bin / "examples" / "throughput"
    run = subprocess.run([program, model, str(args.threads)], input="", check=True, capture_output=True, text=True, timeout=120)
    return json.loads(run.stdout.splitlines()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, nargs="+", metavar="NAME=FILE")
    parser.add_argument("--bin", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    models = dict(item.split("=", 1) for item in args.models)
    limits, measured, system = {}, {}, ""
    for name, model in models.items():
        before = machine(args, model)
        system, measured[name] = measure(name, model, args)
        after = machine(args, model)
        limits[name] = {key: max(before[key], after[key]) for key in before}
    result = {
        "rounds": args.rounds, "threads": args.threads, "limits": limits, "peer": system,
        "cases": {name: judged(rates, models[name], limits[name]) for name, rates in measured.items()},
    }  # fmt: skip
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
