"""Does a lost GPU work again? A child process of the supervisor in which only this GPU is visible
(training.launcher.rejoin): exit status 0 if it does, otherwise the reason on standard output."""

from __future__ import annotations

import os
import sys

from training.core.errors import Exit
from training.core.messages import msg
from training.host import gpus, program
from training.plan.preflight import gpu_state

SIZE = 1024  # of a matrix
LONGEST = 300  # characters of a reason


def wrong() -> str:
    """What the driver reports against the only visible GPU; '' if nothing."""
    machine = gpus.inventory(os.environ)
    if len(machine.gpus) != 1:
        return msg("launcher.rejoin.not_listed")
    states, _ = gpu_state.read_state(machine.gpus)  # empty without pynvml
    for state in states:
        if state.remap_pending or state.remap_failed or state.uncorrected_errors:
            return msg("launcher.rejoin.errors", count=state.uncorrected_errors or 0)
    return ""


def compute() -> None:
    """Copies, memory and a product. Raises RuntimeError or AssertionError."""
    import torch

    numbers = torch.arange(SIZE, dtype=torch.float32)
    there = numbers.to("cuda")
    square = there.repeat(SIZE, 1)
    (square @ square).sum()
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), numbers)


def main(argv: list[str]) -> int:
    if argv:
        print((__doc__ or "").strip())
        return int(Exit.DONE)
    text = wrong()
    if not text:
        try:
            compute()
        except (ImportError, RuntimeError, AssertionError) as error:
            text = f"{type(error).__name__}: {error}"
    print(" ".join(text.split())[:LONGEST])
    return bool(text)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))
