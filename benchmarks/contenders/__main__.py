"""Runs one contender in this process, for benchmarks.peers.

python -m benchmarks.contenders NAME JOB        NAME is a module of this folder, JOB the fields of
                                                parts.Job in JSON

Prints {"stamps": end time of each step in seconds, "loss": of the last step}.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict

import torch

from benchmarks.contenders.parts import Job


def main() -> None:
    name, facts = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trace = importlib.import_module(f"benchmarks.contenders.{name}").run(Job(**json.loads(facts)))
    print("\n" + json.dumps(asdict(trace)))


if __name__ == "__main__":
    main()
