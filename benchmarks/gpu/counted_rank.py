"""A rank whose CUDA calls are counted by torch's profiler: `python -m benchmarks.gpu.counted_rank
JOB`. Prints {"calls": …} of a step in the last line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.gpu import timing
from training.cli import train
from training.trainer import loop, step_queue

FIRST = 12  # DDP and the compiler have done their first passes


def main(args: list[str]) -> int:
    found: dict[str, Any] = {"calls": None}
    profile: list[Any] = []

    class Counting(step_queue.StepQueue):
        """Profiles the steps from FIRST on: it is asked once a step."""

        asked = 0

        def read(self, *args: Any, **flags: Any) -> Any:
            self.asked += 1
            if self.asked == FIRST:
                profile.append(timing.profiler())
                profile[0].__enter__()
            elif self.asked == FIRST + timing.PROFILED:
                profile[0].__exit__(None, None, None)
                found["calls"] = timing.calls(profile[0], timing.PROFILED)
            return super().read(*args, **flags)

    loop.StepQueue = Counting  # type: ignore[attr-defined]
    code = train.main(args, os.environ)
    print("\n" + json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])["flags"]))
