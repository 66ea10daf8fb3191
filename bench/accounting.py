"""What the router's account of its connections and requests costs: instructions under callgrind, with it and compiled without it.

usage: accounting.py --overhead PROGRAM --tokenizer MODEL.gguf --with PROGRAM --without PROGRAM [--seconds 10] [--json OUT]
Both routers answer the same requests, for a short time and for a longer one. What the longer run has more, in instructions and in
requests, is what requests cost, without the start. A CPU's time says nothing here: the account is less than its noise.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import table

# of the bench's cases; a stream's tokens carry the cost of their request
CASES = (("JSON", 1, "request"), ("stream, unpaced", 32, "token"))
TOKENS = 32
# called once for each request, and by no other kind of request than the one that is counted
COUNTED = "::CompletionBody::read"
MOST = 0.03
# stays the child that is killed; valgrind is told to end afterwards, and writes what it has counted
WRAPPER = """#!/bin/sh
valgrind --tool=callgrind --log-file=/dev/null --callgrind-out-file={folder}/out.$$ {router} "$@" &
echo $! >> {folder}/pids
wait
"""


def counted(path):
    """Instructions, and requests."""
    names, calls, called, total = {}, 0, "", 0
    for line in path.read_text().splitlines():
        if match := re.match(r"(c?fn)=\((\d+)\)(?: (.*))?", line):
            names.setdefault(match[2], match[3])
            called = names[match[2]] if match[1] == "cfn" else called
        elif line.startswith("calls=") and called.endswith(COUNTED):
            calls += int(line[6:].split()[0])
        elif line.startswith(("summary:", "totals:")):
            total = int(line.split()[1])
    return total, calls


def run(overhead, tokenizer, router, case, clients, seconds):
    """Instructions and requests of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").mkdir()
        shutil.copy(overhead, folder / "examples" / "overhead")
        wrapper = folder / "tandem-router"
        wrapper.write_text(WRAPPER.format(folder=folder, router=router))
        wrapper.chmod(0o755)
        command = [folder / "examples" / "overhead", "--tokenizer", tokenizer, "--rounds", "1", "--seconds", str(seconds)]
        command += ["--case", case, "--clients", str(clients)]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        finally:
            pids = [int(pid) for pid in (folder / "pids").read_text().split()]
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.2)
        return max((counted(path) for path in folder.glob("out.*")), key=lambda pair: pair[1])


def each(args, router, case, clients):
    """Instructions of a request."""
    (short, few), (long, many) = (run(args.overhead, args.tokenizer, router, case, clients, s) for s in (args.seconds / 3, args.seconds))
    if many <= few:
        sys.exit(f"{case}: {few} requests in the short run, {many} in the long one: give more --seconds")
    return (long - short) / (many - few), many - few


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--with", required=True, type=Path, dest="kept")
    parser.add_argument("--without", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, found = [], {}
    for case, clients, unit in CASES:
        units = TOKENS if unit == "token" else 1
        (kept, n), (without, m) = (each(args, router.resolve(), case, clients) for router in (args.kept, args.without))
        share = kept / without - 1
        found[f"{case}, {clients}"] = {"unit": unit, "with": kept / units, "without": without / units, "share": share, "requests": [n, m]}
        rows.append([f"{case}, {clients}: per {unit}", f"{without / units:,.0f}", f"{kept / units:,.0f}", f"{share:+.2%}", f"{m}, {n}"])
    print("\nThe router's account of connections and requests, instructions:")
    table(["", "without it", "with it", "it costs", "requests"], rows)
    if args.json:
        args.json.write_text(json.dumps(found))
    if any(row["share"] > MOST for row in found.values()):
        sys.exit(f"error: the account costs more than {MOST:.0%}")


if __name__ == "__main__":
    main()
