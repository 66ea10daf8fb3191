"""`make bench`: engine and router beside their peers, as tables and as a file in bench/history.

usage: run.py [engine] [router] [numerics] [load] [accounting] [--rounds 5]      (default: engine router)
- engine: tokens/s beside llama.cpp
- router: CPU time beside vllm-router and SMG
- numerics: how far from f32 the logits are, beside llama.cpp's
- load: a public load generator against the whole
- accounting: instructions of a request with and without the router's account of it; wants valgrind
Builds what is missing: the binaries, the model, the peers (outside the clone, once).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import figures

ROOT = figures.ROOT
MODEL = ROOT / ".demo" / "models" / "smollm2" / "model.gguf"
BIN = ROOT / "target" / "release"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def do(*command, capture=False):
    """Runs it from the clone's root; the last line of its output if wanted."""
    run = subprocess.run(list(map(str, command)), cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if run.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} ended with {run.returncode}")
    return run.stdout.strip() if capture else None


def peer(kind):
    """The Python that has these peers."""
    return Path(do("bench/peers.sh", kind, capture=True).splitlines()[-1])


def models(python):
    """Name to file."""
    lines = do(python, "bench/models.py", MODEL, CACHE / "bench-models", capture=True).splitlines()
    return dict(line.split(" ", 1) for line in lines)


def engine(rounds, out):
    python = peer("llama")
    files = [f"{name}={path}" for name, path in models(python).items()]
    do(python, "bench/engine.py", "--bin", BIN, "--rounds", str(rounds), "--json", out, "--models", *files)


def router(rounds, out):
    programs = peer("routers").parent
    do(
        sys.executable, "bench/router.py", "--overhead", BIN / "examples" / "overhead", "--tokenizer", MODEL,
        "--vllm-router", programs / "vllm-router", "--smg", programs / "smg", "--rounds", str(rounds), "--json", out,
    )  # fmt: skip


def numerics(_rounds, out):
    python = peer("llama")
    files = [path for name, path in models(python).items() if not name.startswith("random")]
    do(python, "bench/numerics.py", "--logits", BIN / "examples" / "logits", "--json", out, *files)


def load(_rounds, out):
    do(peer("load"), "bench/load.py", "--bin", BIN, "--model", MODEL, "--json", out)


def accounting(_rounds, out):
    # the same program, built anew with the account and last, so that what lies there is what is shipped
    build = ("cargo", "build", "--release", "--workspace", "--locked", "--bin", "tandem-router")
    without = Path(out).with_suffix(".router")
    do(*build, "--features", "tandem-router/unaccounted")
    shutil.copy(BIN / "tandem-router", without)
    do(*build)
    do(
        sys.executable, "bench/accounting.py", "--overhead", BIN / "examples" / "overhead", "--tokenizer", MODEL,
        "--with", BIN / "tandem-router", "--without", without, "--json", out,
    )  # fmt: skip


PARTS = {"engine": engine, "router": router, "numerics": numerics, "load": load, "accounting": accounting}
# Speed changes from commit to commit and is kept; the others pass or fail.
KEPT = ("engine", "router")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: engine router")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parts = args.parts or ["engine", "router"]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")

    do("scripts/venv.sh")
    do(".venv/bin/python", "scripts/model.py", capture=True)
    do("cargo", "build", "--release", "--workspace", "--locked", "--bins", "--example", "overhead", "--example", "logits", "--example", "throughput")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in parts:
            out = Path(folder) / f"{name}.json"
            PARTS[name](args.rounds, out)
            found[name] = json.loads(out.read_text())
    kept = {name: found[name] for name in found if name in KEPT}
    if kept:
        print(f"\nkept as {figures.keep('-'.join(kept), kept).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
