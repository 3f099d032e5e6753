"""Lines on the standard error of a user script's other ranks that the first rank does not print,
such as a warning on one rank only. The console shows them with their rank; of tracebacks there is
one warning at the end."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque

from training.launcher.symptoms import SymptomLines

HOLD_S = 2.0  # the first rank may print the same line later
MOST = 20  # lines of one attempt; the rest is in the log of the rank
WAITING = 10_000  # lines within HOLD_S
KNOWN = 1000  # lines of the first rank that are remembered
RAISED = 100  # the same of its exceptions, however many lines follow
LARGE_BYTES = 1 << 17  # at the end of a piece; more is not examined
_NUMBER = re.compile(rb"0x[0-9a-fA-F]+|\d+")
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(rb"\[rank\d+\]: ?")  # before each line of torch's tracebacks
_TRACEBACK = b"Traceback (most recent call last):"
_THREAD = b"Exception in thread "  # the line before it
_LINKS = (  # the line between the tracebacks of one exception
    b"During handling of the above exception",
    b"The above exception was the direct cause",
)


def shape(line: bytes) -> bytes:
    """A line without its numbers: times, ranks, devices and process ids differ between ranks."""
    return _NUMBER.sub(b"#", _PREFIX.sub(b"", _ESCAPE.sub(b"", line), count=1)).strip()


class _Tracebacks:
    """Those of one rank: the failure card shows the last one if it has ended the rank."""

    def __init__(self) -> None:
        self.inside = self._in_thread = False
        self.count = 0
        self.last = b""  # line with the exception

    def takes(self, line: bytes) -> bool:
        """Does this line belong to one, with the exception in its last line?"""
        text = _PREFIX.sub(b"", line, count=1)
        if text.startswith(_THREAD):
            self._in_thread = True
            return True
        # perhaps behind a progress bar; one of an exception group is indented
        _, bar, rest = text.rpartition(b"\r")
        if text.startswith(_TRACEBACK) or (bar and rest.rstrip().endswith(_TRACEBACK)):
            self.inside = True
            return True
        if text.startswith(_LINKS):
            self.count = max(0, self.count - 1)
            return True
        if not self.inside or text.startswith((b" ", b"\t")):
            return self.inside
        if not self._in_thread:  # that has a warning of its own
            self.count, self.last = self.count + 1, text
        self.inside = self._in_thread = False
        return True


class OtherRanks:
    """Collects lines of one attempt."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}
        self._raised: dict[bytes, None] = {}  # by the first rank
        self._waiting: deque[tuple[float, int, bytes]] = deque()
        self._tracebacks: defaultdict[int, _Tracebacks] = defaultdict(_Tracebacks)
        self._of_first: defaultdict[int, _Tracebacks] = defaultdict(_Tracebacks)
        self._symptoms: defaultdict[int, SymptomLines] = defaultdict(SymptomLines)
        self._rest: dict[int, bytes] = {}  # unfinished lines
        self.shown = 0
        self.silenced = 0  # lines beyond MOST

    def add(self, rank: int, chunk: bytes, *, first: bool) -> None:
        printed = (self._of_first if first else self._tracebacks)[rank]
        if self.silenced and not (_TRACEBACK in chunk or printed.inside):
            return
        if len(chunk) > LARGE_BYTES:
            lines = chunk[-LARGE_BYTES:].split(b"\n")[1:] or [b""]
        else:
            lines = (self._rest.get(rank, b"") + chunk).split(b"\n")
        self._rest[rank] = lines.pop()[-4096:]
        if first:
            for line in lines[-KNOWN:]:
                _remember(shape(line), self._known, KNOWN)
            for line in lines:
                if printed.takes(line) and not printed.inside:
                    _remember(shape(printed.last), self._raised, RAISED)
            return
        now = time.monotonic()
        for line in lines:
            if printed.takes(line) or self._symptoms[rank].rest(line) is not None:
                continue
            if len(self._waiting) < WAITING:
                self._waiting.append((now, rank, line))

    def drop_after(self, failure: float, failed: int | None) -> None:
        """Forget what the victims of a failure printed after it; not the `failed` rank."""
        self._waiting = deque(
            line for line in self._waiting if line[0] <= failure or line[1] == failed
        )

    def due(self, now: float | None = None) -> list[tuple[int, bytes]]:
        """(rank, line) of what the first rank has not printed within HOLD_S, each line once for all
        ranks. Progress bars and empty lines are left out."""
        now = time.monotonic() if now is None else now
        found = []
        while self._waiting and now - self._waiting[0][0] > HOLD_S:
            _, rank, line = self._waiting.popleft()
            seen = shape(line)
            if not seen or b"\r" in line or seen in self._known:
                continue
            _remember(seen, self._known, KNOWN)
            if self.shown < MOST:
                self.shown += 1
                found.append((rank, line))
            else:
                self.silenced += 1
        return found

    def exceptions(self) -> list[tuple[int, int, bytes]]:
        """(rank, number of its exceptions, the last one) where the first rank has not printed that
        exception, each once for all ranks."""
        found = []
        for rank, printed in sorted(self._tracebacks.items()):
            seen = shape(printed.last)
            if printed.count and not (seen in self._known or seen in self._raised):
                _remember(seen, self._known, KNOWN)
                found.append((rank, printed.count, printed.last))
        return found


def _remember(seen: bytes, known: dict[bytes, None], most: int) -> None:
    """The newest `most`."""
    known.pop(seen, None)
    known[seen] = None
    if len(known) > most:
        known.pop(next(iter(known)))
