"""Files of /proc that the kernel copies from the memory of a process: cmdline, environ, maps.

It takes a lock for that, which a process that is stuck in a driver (a GPU that has fallen off the
bus) may hold for ever, as `ps` hangs then. They are read by a thread that is abandoned without
an answer. It holds no lock while it waits, so code between fork and exec remains safe. Standard
library only: lib/guardian.py uses it.
"""

from __future__ import annotations

import os
import queue
import threading
import time

PROC = "/proc"
ANSWER_S = 0.5
AGAIN_S = 30.0  # until a file that had no answer is read again


class Blocked(OSError):
    """The process holds its lock."""


class _Reader:
    """Its thread ends with this object, which ends with the thread that reads by it."""

    def __init__(self) -> None:
        self.process = os.getpid()  # a fork has no such thread
        self.asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()
        queues = (self.asked, self.answers)
        threading.Thread(target=_serve, args=queues, daemon=True, name="duet-proc").start()

    def __del__(self) -> None:
        self.asked.put(None)


def _serve(
    asked: queue.SimpleQueue[str | None], answers: queue.SimpleQueue[bytes | OSError]
) -> None:
    while (path := asked.get()) is not None:
        try:
            with open(path, "rb") as file:
                answers.put(file.read())
        except OSError as error:
            answers.put(error)


_own = threading.local()  # of each thread: no lock that a fork could leave taken
_blocked: dict[str, float] = {}  # path → time of the read without an answer


def read(pid: int, name: str) -> bytes:
    """Raises OSError: Blocked, or that of an ended process or of another user's."""
    path = f"{PROC}/{pid}/{name}"
    if time.monotonic() - _blocked.get(path, -AGAIN_S) < AGAIN_S:
        raise Blocked(path)
    reader: _Reader | None = getattr(_own, "reader", None)
    if reader is None or reader.process != os.getpid():
        reader = _own.reader = _Reader()
    reader.asked.put(path)
    try:
        answer = reader.answers.get(timeout=ANSWER_S)
    except queue.Empty:
        _own.reader = None
        _blocked[path] = time.monotonic()
        raise Blocked(path) from None
    _blocked.pop(path, None)
    if isinstance(answer, OSError):
        raise answer
    return answer
