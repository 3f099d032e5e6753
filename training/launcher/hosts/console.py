"""The consoles of the nodes, shown here. Node 0: as it is. Others: warnings and lines of ranks at
once, each with the name of the machine, and errors at the end where node 0 has not shown them."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from typing import IO

from training.core import console, log
from training.launcher.output import OPEN_BYTES

_LEVEL = re.compile(r"\[(INFO|SUCCESS|WARNING|ERROR)\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")
_RANK = re.compile(r"\[rank\d+\] ")
LAST_LINES = 15  # of a node that ended without an error message
ERROR_LINES = 500  # kept of a node, the first ones
JOIN_S = 5.0


class Copy(threading.Thread):
    """Copies one stream of node 0 to a descriptor. ssh itself would make it non-blocking, for all
    processes that share it."""

    def __init__(self, stream: IO[bytes], fd: int) -> None:
        super().__init__(daemon=True)
        self._stream, self._fd = stream, fd
        self.start()

    def run(self) -> None:
        while data := os.read(self._stream.fileno(), 1 << 16):
            # The terminal is gone: its own log has everything. What is not read would block node 0.
            with contextlib.suppress(OSError):
                console.of(self._fd).write(data)

    def end(self) -> None:
        self.join(JOIN_S)


class Console(threading.Thread):
    """Reads the output of one node until its end. `seen`: what all nodes have shown: the same
    warning of several machines is shown once. `quiet`: no more warnings; `whole`: every line, of a
    machine that coordinates the run now."""

    def __init__(self, name: str, stream: IO[bytes], seen: set[str]) -> None:
        super().__init__(daemon=True)
        self.quiet = self.whole = False
        self._name, self._stream, self._seen = name, stream, seen
        self._errors: list[str] = []
        self._last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._level, self._shows = "", False
        self.start()

    def run(self) -> None:
        # a progress bar may be one line without end
        while raw := self._stream.readline(OPEN_BYTES):
            self._take(raw.decode("utf-8", "replace").rstrip("\r\n"))

    def _take(self, line: str) -> None:
        if self.whole:
            self._print(line)
            return
        begins = _LEVEL.match(line)
        if begins:
            self._level = begins[1]
            text = line[begins.end() :]
            warns = self._level == "WARNING" and not self.quiet
            self._shows = warns and text not in self._seen
            self._seen.add(text)
        elif self._level != "ERROR" and not line.startswith(" "):
            self._level, self._shows = "", _RANK.match(line) is not None
        if self._level == "ERROR":
            if len(self._errors) < ERROR_LINES:
                self._errors.append(line)
        elif self._shows:
            self._print(line)
        else:
            self._last.append(line)

    def end(self) -> None:
        self.join(JOIN_S)

    def errors(self, *, or_last: bool = False, once: bool = False) -> None:
        """Show the errors, or without any the last lines; with `once` unless an earlier start of
        this machine has shown them. Called after its end."""
        self.end()
        lines = [*self._errors] or [*(self._last if or_last else ())]
        # times and ports differ each time
        text = "\n".join([self._name, *(_NUMBER.sub("", line) for line in lines)])
        if not (once and text in self._seen):
            for line in lines:
                self._print(line)
        self._seen.add(text)
        self._errors.clear()
        self._last.clear()

    def _print(self, line: str) -> None:
        log.raw(f"[{self._name}] {line}\n")
