"""A rank that counts the CUDA calls of each of its steps: `count_steps.py OUT.json CONFIG ARGS…` with
the null GPU preloaded; it is the rank in the variables of torchrun. Writes a list with a record
for each step: calls of the optimizer, of reading the figures of the step before, and of everything
else; the host's time for the optimizer and for the step, also as CPU time, and that of a number of
launches (host_time.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.null_gpu import counters, host_time
from training.cli import train
from training.tasks import optim
from training.trainer import loop, step_queue, step_stats


def main(out: Path, args: list[str]) -> int:
    steps: list[dict[str, Any]] = []
    calls: dict[str, Counter[str]] = {n: Counter() for n in ("other", "optimizer", "report")}
    times: dict[str, float] = {}
    last, last_cpu = time.perf_counter(), time.process_time()
    plain_step, plain_read = optim.Optimizers.step, step_stats.PendingReport.read

    def count(part: str) -> None:
        calls[part].update(counters.take())

    def step(self: optim.Optimizers, *overflow: Any) -> None:
        nonlocal last, last_cpu
        count("other")
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        plain_step(self, *overflow)
        ended, ended_cpu = time.perf_counter(), time.thread_time()
        count("optimizer")
        times["optimizer_ms"] = 1000 * (ended - begun)
        times["optimizer_cpu_ms"] = 1000 * (ended_cpu - begun_cpu)
        times["launches_ms"] = host_time.launches_ms()
        counters.take()
        last += time.perf_counter() - ended  # not a part of the step
        last_cpu += time.thread_time() - ended_cpu

    def read_report(self: step_stats.PendingReport) -> step_stats.StepReport:
        count("other")
        report = plain_read(self)
        count("report")
        return report

    class Counting(step_queue.StepQueue):
        def read(self, *args: Any, **flags: Any) -> Any:
            nonlocal last, last_cpu
            done = super().read(*args, **flags)
            now, cpu = time.perf_counter(), time.process_time()
            count("other")
            times.update(step_ms=1000 * (now - last), step_cpu_ms=1000 * (cpu - last_cpu))
            steps.append({**calls, **times})
            last, last_cpu = now, cpu
            calls.update({name: Counter() for name in calls})
            out.write_text(json.dumps(steps))
            return done

    optim.Optimizers.step = step  # type: ignore[method-assign,assignment]
    step_stats.PendingReport.read = read_report  # type: ignore[method-assign]
    loop.StepQueue = Counting  # type: ignore[attr-defined]
    return train.main(args, os.environ)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
