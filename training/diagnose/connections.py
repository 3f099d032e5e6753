"""Was a lost connection one to another process of the training, or the program's own: an upload, a
pipe to another program?"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# FileNotFoundError without a name: a Unix socket, or a deleted working directory
EXCEPTIONS = (
    *("ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError"),
    *("BrokenPipeError", "TimeoutError", "FileNotFoundError"),
)
# Part of a path, of code that is connected to other ranks; or to any process of the training.
RANKS = ("torch/distributed/",)
PROCESSES = (*RANKS, "multiprocessing/")


def is_own(exception: str, trace: Iterable[str], others: Collection[str]) -> bool:
    """`trace`: its traceback, or the frames of that; `others`: RANKS or PROCESSES."""
    return exception in EXCEPTIONS and not any(part in text for text in trace for part in others)
