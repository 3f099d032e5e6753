"""A rank that counts the CUDA calls of each of its steps: `count_steps.py OUT.json CONFIG ARGS…` with
the null GPU preloaded; the variables of torchrun say which rank it is. Writes a list with one
dictionary a step, call → count."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training.cli import train
from training.trainer import step_queue

library = ctypes.CDLL(os.environ["LD_PRELOAD"])


def counts() -> dict[str, int]:
    """Calls since the last reading."""
    name, calls, found, number = ctypes.c_char_p(), ctypes.c_long(), dict[str, int](), 0
    while library.null_gpu_count(number, ctypes.byref(name), ctypes.byref(calls)):
        if calls.value and name.value:
            found[name.value.decode()] = calls.value
        number += 1
    library.null_gpu_reset()
    return found


def main(out: Path, args: list[str]) -> int:
    steps: list[dict[str, int]] = []

    class Counting(step_queue.StepQueue):
        def read(self, *args: object, **flags: object) -> object:
            done = super().read(*args, **flags)  # type: ignore[arg-type]
            steps.append(counts())
            out.write_text(json.dumps(steps))
            return done

    from training.trainer import loop

    loop.StepQueue = Counting  # type: ignore[misc]
    return train.main(args, os.environ)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
