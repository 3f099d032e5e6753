"""A measure of the host's speed: launches of empty kernels in the process that is measured. Time of
the thread, to which other programs on the same cores add little."""

from __future__ import annotations

import time

LAUNCHES = 120  # the most that an optimizer step may have


def launches_ms() -> float:
    """The thread's time for LAUNCHES small kernels."""
    import torch  # the tests read the number above

    one = torch.zeros(1, device="cuda")
    begun = time.thread_time()
    for _ in range(LAUNCHES):
        one.add_(1.0)
    return 1000 * (time.thread_time() - begun)
