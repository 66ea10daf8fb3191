"""The router beside vllm-router and SMG: CPU time of each one's process per answer and per streamed token.

usage: router.py --overhead PROGRAM --tokenizer MODEL.gguf [--vllm-router PROGRAM] [--smg PROGRAM] [--rounds 5] [--seconds 2] [--json OUT]
`tandem` is asked with token ids: beyond template and tokenization, which the others do not do. `tandem, chat` is the total.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from figures import ratios, spread, table

OURS = ("tandem", "tandem, chat")


def measure(args):
    command = [args.overhead, "--tokenizer", args.tokenizer, "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    for flag, program in (("--vllm-router", args.vllm_router), ("--smg", args.smg)):
        command += [flag, program] if program else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    cases = {}
    for line in process.stdout:
        m = json.loads(line)
        clients = f"{m['clients']} client{'s' * (m['clients'] > 1)}"
        figure = "cpu_us_per_token" if m["case"].startswith("stream") else "cpu_us_per_answer"
        case = cases.setdefault(f"{m['case']}, {clients}", {"unit": figure.replace("_", " "), "p50_ms": {}, "rss_mib": {}, "routers": {}})
        case["routers"].setdefault(m["router"], []).append(m[figure])
        for extra in ("p50_ms", "rss_mib"):
            case[extra].setdefault(m["router"], []).append(m[extra])
    if process.wait():
        sys.exit(f"{args.overhead} ended with {process.returncode}")
    for case in cases.values():
        peers = {name: values for name, values in case["routers"].items() if name not in OURS}
        if peers:
            case["best_peer"] = min(peers, key=lambda name: statistics.median(peers[name]))
            best = peers[case["best_peer"]]
            case["ratio"] = {name: ratios(case["routers"][name], best) for name in OURS}
    return {"rounds": args.rounds, "seconds": args.seconds, "cases": cases}


def show(result):
    routers = list(next(iter(result["cases"].values()))["routers"])
    rows = []
    for name, case in result["cases"].items():
        row = [f"{name}, {'us/token' if 'token' in case['unit'] else 'us/answer'}", *(spread(case["routers"][r], 1) for r in routers)]
        if "ratio" in case:
            row += [case["best_peer"], spread(case["ratio"]["tandem"], 2), spread(case["ratio"]["tandem, chat"], 2)]
        rows.append(row)
    head = ["", *routers] + (["best peer", "tandem / best", "chat / best"] if "best_peer" in case else [])
    print(f"\nRouter, {result['rounds']} rounds in turn, {result['seconds']} s each: CPU time of the process, median (least..most); less is better")
    table(head, rows)
    print("a stream's tokens carry the cost of its request; tandem is asked with token ids, as others tokenize nothing; tandem, chat is the total")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--vllm-router", type=Path)
    parser.add_argument("--smg", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
