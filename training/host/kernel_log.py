"""Messages of the kernel since a start, or since the boot: about processes that it has ended, and
about devices."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from training.core.messages import msg

KMSG = Path("/dev/kmsg")
# The newest ones. A kill for lack of memory lists all processes of the machine.
MOST_BYTES, MOST_LINES = 1 << 21, 10_000
JOURNAL_LINES = 2000
LINE_CHARACTERS = 1000
RECORD_BYTES = 8192  # the kernel refuses to deliver a longer record to a smaller buffer
FLOOD_S = 0.5  # a driver may write faster than this process reads
JOURNAL_S = 2.0
# priority,sequence,microseconds,flags;text – lines of further fields begin with a space
# (Documentation/ABI/testing/dev-kmsg)
RECORD = re.compile(rb"(?P<priority>\d+),\d+,\d+,[^;\n]*;(?P<text>.*)")
ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
# Programs may write to the log as well, but not as the kernel.
BY_KERNEL, LEVELS = 0, 8
# unix seconds, host, program, text
JOURNAL_LINE = re.compile(r"(?P<time>\d+\.\d+) \S+ kernel: (?P<text>.*)")
JOURNAL = ("journalctl", "-k", "-q", "--no-pager", "-o", "short-unix", "-n", str(JOURNAL_LINES))


@dataclass(frozen=True)
class KernelMessages:
    """`lines`: oldest first; `source`: what was read, "" if nothing could be, for `reason`;
    `whole`: from the start on."""

    lines: tuple[str, ...] = ()
    source: str = ""
    reason: str = ""
    whole: bool = False


class KernelLog:
    """An open descriptor marks the start. The times in the log do not: its clock is not corrected,
    and differs from CLOCK_MONOTONIC by minutes on a machine that has run for months."""

    def __init__(self, *, since_boot: bool = False) -> None:
        self._since = 0.0 if since_boot else time.time()
        self._file: io.FileIO | None = None
        self._refused = ""
        self._held: KernelMessages | None = None
        self.until: float | None = None  # unix s: what is newer does not count
        try:
            self._file = io.FileIO(KMSG, "r", opener=_without_waiting)
            self._file.seek(0, os.SEEK_SET if since_boot else os.SEEK_END)
        except OSError as error:  # kernel.dmesg_restrict, or a container
            self.close()
            self._refused = str(error)

    @property
    def may_be_read(self) -> bool:
        """By itself, not by the journal."""
        return self._file is not None

    def hold(self) -> None:
        """Only what has been added so far counts, for a read at any time."""
        if self.until is None:
            self.until = time.time()
            self._held = self._by_file() if self._file else None

    def read(self) -> KernelMessages:
        """What has been added since the start; once. By the journal if that alone may be read."""
        held, self._held = self._held, None
        if held is None and self._file is None:
            return _by_journal(self._since, self.until, self._refused)
        return held or self._by_file()

    def _by_file(self) -> KernelMessages:
        assert self._file
        try:
            data, whole = _rest(self._file)
            texts = _texts(data)
            kept = _newest(texts)
            return KernelMessages(kept, str(KMSG), whole=whole and len(kept) == len(texts))
        except OSError as error:
            return KernelMessages(reason=str(error))
        finally:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _rest(file: io.FileIO) -> tuple[bytes, bool]:
    """(the newest records, whether these are all)"""
    kept, size, whole = deque[bytes](), 0, True
    until = time.monotonic() + FLOOD_S
    while time.monotonic() < until:
        try:
            piece = file.read(RECORD_BYTES)
        except BrokenPipeError:  # older ones were overwritten
            whole = False
            continue
        if not piece:
            return b"".join(kept), whole
        kept.append(piece)
        size += len(piece)
        while size > MOST_BYTES:
            size -= len(kept.popleft())
            whole = False
    return b"".join(kept), False


def _texts(data: bytes) -> list[str]:
    found = (RECORD.match(line) for line in data.split(b"\n"))
    by_kernel = (one for one in found if one and int(one["priority"]) // LEVELS == BY_KERNEL)
    return [_unescaped(one["text"]) for one in by_kernel]


def _unescaped(text: bytes) -> str:
    """A record of several lines as one: a driver names its device in the first of them."""
    plain = ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), text)
    return " ".join(plain.decode("utf-8", "replace").split("\n"))


def _newest(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(deque((text[:LINE_CHARACTERS] for text in texts), maxlen=MOST_LINES))


def _by_journal(since: float, until: float | None, refused: str) -> KernelMessages:
    """For members of the groups adm and systemd-journal. `since`, `until`: unix s."""
    try:
        asked = subprocess.Popen(
            JOURNAL, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        return KernelMessages(reason=f"{refused}; {error}")
    try:
        answer, _ = asked.communicate(timeout=JOURNAL_S)
    except subprocess.TimeoutExpired:
        asked.kill()  # not waited for: a dead disk may block it
        late = msg("host.kernel_log.late", seconds=JOURNAL_S)
        return KernelMessages(reason=f"{refused}; {late}")
    lines = answer[-MOST_BYTES:].decode("utf-8", "replace").splitlines()
    found = [one for line in lines if (one := JOURNAL_LINE.match(line))]
    if not found:  # those of the boot at least, if it may be read
        return KernelMessages(reason=f"{refused}; {msg('host.kernel_log.no_journal')}")
    return KernelMessages(
        _newest(one["text"] for one in found if since <= float(one["time"]) <= (until or math.inf)),
        JOURNAL[0],
        whole=float(found[0]["time"]) < since,
    )
