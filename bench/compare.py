"""Two runs out of bench/history: what changed from the first to the second.

usage: compare.py BEFORE.json AFTER.json
For the engine the figures are tokens/s and the ratio to llama.cpp of the same run; for the router, CPU time. Machines differ
and so do hours: the ratio to a peer of the same run says more than the rate.
"""

import json
import statistics
import sys
from pathlib import Path

from figures import table


def medians(run):
    """Case and peer to (our median, median ratio to that peer)."""
    found = {}
    for model, cases in run.get("engine", {}).get("cases", {}).items():
        for name, case in cases.items():
            for peer, ratio in case["ratio"].items():
                found[f"{model}, {name}, tokens/s", peer] = statistics.median(case["rates"]["tandem"]), statistics.median(ratio)
    for name, case in run.get("router", {}).get("cases", {}).items():
        for router, ratio in case["ratio"].items():
            found[f"{name}, {router}, {case['unit']}", "best peer"] = statistics.median(case["routers"][router]), statistics.median(ratio)
    return found


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = (json.loads(Path(path).read_text()) for path in sys.argv[1:])
    for name, run in (("before", before), ("after", after)):
        changed = " with changes" if run["changed_since"] else ""
        print(f"{name}: {run['date']}, commit {run['commit']}{changed}, {run['cpu']}, {run['threads']} threads")
    old, new = medians(before), medians(after)
    rows = [
        [case, f"{old[case, peer][0]:.1f}", f"{new[case, peer][0]:.1f}", f"{new[case, peer][0] / old[case, peer][0]:.2f}",
         peer, f"{old[case, peer][1]:.2f}", f"{new[case, peer][1]:.2f}"]
        for case, peer in old if (case, peer) in new
    ]  # fmt: skip
    if not rows:
        sys.exit("the two runs have no case in common")
    table(["", "before", "after", "after/before", "peer", "ratio before", "ratio after"], rows)


if __name__ == "__main__":
    main()
