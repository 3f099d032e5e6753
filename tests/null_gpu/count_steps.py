"""A rank that counts the CUDA calls of each of its steps: `count_steps.py OUT.json CONFIG ARGS…` with
the null GPU preloaded; it is the rank in the variables of torchrun. Writes a list with a record
for each step: calls of the optimizer and of everything else, and the host's time for the optimizer
and for the step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.null_gpu import counters
from training.cli import train
from training.tasks import optim
from training.trainer import loop, step_queue


def main(out: Path, args: list[str]) -> int:
    steps: list[dict[str, Any]] = []
    optimizer: dict[str, Any] = {}
    before: dict[str, int] = {}
    last = time.perf_counter()
    plain_step = optim.Optimizers.step

    def step(self: optim.Optimizers, *overflow: Any) -> None:
        before.update(counters.take())
        begun = time.perf_counter()
        plain_step(self, *overflow)
        optimizer["ms"] = 1000 * (time.perf_counter() - begun)
        optimizer["calls"] = counters.take()

    class Counting(step_queue.StepQueue):
        def read(self, *args: Any, **flags: Any) -> Any:
            nonlocal last
            done = super().read(*args, **flags)
            now = time.perf_counter()
            after = counters.take()
            other = {n: before.get(n, 0) + after.get(n, 0) for n in before | after}
            record = {"optimizer": optimizer["calls"], "optimizer_ms": optimizer["ms"]}
            steps.append(record | {"other": other, "step_ms": 1000 * (now - last)})
            last = now
            before.clear()
            out.write_text(json.dumps(steps))
            return done

    optim.Optimizers.step = step  # type: ignore[method-assign,assignment]
    loop.StepQueue = Counting  # type: ignore[attr-defined]
    return train.main(args, os.environ)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
