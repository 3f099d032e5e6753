"""Losses of ranks, launchers, machines and links: does the training continue, after how long, and
with the same samples? Duet's training, and one script under Duet and under torchrun.

    python -m benchmarks.elastic [--only=training-2x1] [--random=100] [--seed=1] [--out=DIR]
    python -m benchmarks.elastic --list

Machines are network namespaces (needs root). Every single loss, then `--random` runs with one to
three random losses. Each finished case is a line in DIR/cases.jsonl (experiments/elastic by
default), so the same command continues after an interruption. Exits with 1 if a run of Duet ends,
has other losses or samples than the untouched one, or leaves a process.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.elastic import table
from benchmarks.elastic.cases import drawn, single
from benchmarks.elastic.drill import examine, shown
from benchmarks.elastic.programs import TORCHRUN
from training.core.rundir import append_json, read_records


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/elastic")
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the machines are removed
    cases = [*single(), *(drawn(asked.seed, number) for number in range(asked.random))]
    cases = [case for case in cases if asked.only in case.name]
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    kept = asked.out / "cases.jsonl"
    asked.out.mkdir(parents=True, exist_ok=True)
    done = {line["name"]: line for line in read_records(kept)}
    for number, case in enumerate(cases, 1):
        if case.name not in done:
            line = json.loads(json.dumps(examine(case, asked.out.resolve())))
            done[case.name] = line
            append_json(kept, line)
            print(f"{number}/{len(cases)} {shown(line)}", flush=True)
    lines = [done[case.name] for case in cases]
    print("\n".join(table.lines(lines)))
    return int(any(line["problems"] for line in lines if line["program"] != TORCHRUN))


if __name__ == "__main__":
    sys.exit(main())
