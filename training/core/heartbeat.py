"""Heartbeat of a rank: its current phase in a small memory-mapped file, written in less than a
microsecond and readable by any process.

Reader and writer never wait for each other. Two records with checksums are written alternately:
while one is being written the other is complete, even if the writer is preempted, stopped or
killed halfway, and in whatever order the hardware or `read()` moves the bytes. A reader takes the
newest complete record.

The file is kept after the run and shows where each rank ended. The records are followed by one
histogram of durations per kind of phase, from which training.core.phase_timeouts computes the
limit of a phase.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

# magic, version, rank, pid: written once, before the first record
_IDENTITY = struct.Struct("<4sHHq")
# beats, epoch, step, place in the step, first step, monotonic ns of the beat, wall time in s
_FIELDS = struct.Struct("<qqqqqqd")
_PHASE = 96  # bytes of a phase's text
# numbers, phase, checksum of identity, phase and numbers
_RECORD = struct.Struct(f"<{_FIELDS.size}s{_PHASE}sI")
_RECORDS_AT = (64, 256)
_pack_fields, _pack_record = _FIELDS.pack, _RECORD.pack_into  # bound: a beat is in every step
_MAGIC, _VERSION = b"DUET", 3
_HEADER = 512  # bytes
# kinds of phases, bytes of a name; further kinds share the last slot
_SLOTS, _NAME = (
    24,
    64,
)
_BUCKETS = 256  # of a histogram: four for each power of two nanoseconds
_NAMES_AT, _COUNTS_AT = _HEADER, _HEADER + _SLOTS * _NAME
SIZE = _COUNTS_AT + 4 * _SLOTS * _BUCKETS
# Both records are torn only if a read takes as long as two beats: it is repeated.
_TRIES, _PAUSE_S = (
    20,
    0.0005,
)
# Phases that belong to one optimizer step: shown as 'step 397: forward'.
STEP_PHASES = ("fetch", "forward", "backward", "reduce", "optimizer", "record")
FINISHED = "finished"
_NUMBERS = re.compile(r"\d+")

Histogram = tuple[int, ...]  # counts by bucket


@dataclass(frozen=True)
class HeartbeatRecord:
    """One reading. `age_s`: seconds since the last change of phase, by the monotonic clock of this
    machine."""

    rank: int
    pid: int
    beats: int  # number of phase changes so far
    epoch: int
    step: int
    # phase changes since this step began: comparable between ranks, which run the same phases
    place: int
    first_step: int  # first step of this process; 0 before it
    monotonic_ns: int
    wall_time: float
    phase: str

    @property
    def age_s(self) -> float:
        return max(0.0, (time.monotonic_ns() - self.monotonic_ns) / 1e9)

    @property
    def stepped(self) -> bool:
        """Whether this process has completed a step."""
        begun = self.step == self.first_step and self.phase in STEP_PHASES
        return self.first_step > 0 and not begun

    def __str__(self) -> str:
        return f"step {self.step}: {self.phase}" if self.phase in STEP_PHASES else self.phase


def kind(phase: str) -> str:
    """The phase without its numbers: 'epoch 7: creating data iterator' has the same kind in every
    epoch."""
    return _NUMBERS.sub("#", phase)


class Heartbeat:
    """Heartbeat writer of one rank. The trainer sets `epoch` and `step`; `beat(phase)` publishes
    all three."""

    def __init__(self, path: Path, rank: int, pid: int = 0) -> None:
        """`pid`: of the rank, if another process writes on its behalf."""
        self.rank, self.epoch, self.step, self._beats = rank, 0, 0, 0
        self._begun = self._place = self._first_step = 0
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Allocated, not sparse: writing to a hole through the map raises SIGBUS on a full disk.
            os.posix_fallocate(handle, 0, SIZE)
            self._map = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._map[:] = bytes(SIZE)
        identity = _IDENTITY.pack(_MAGIC, _VERSION, rank, pid or os.getpid())
        self._map[: len(identity)] = identity
        self._checksum = crc32(identity)
        self._counts = memoryview(self._map)[_COUNTS_AT:].cast("I")
        # phase → its bytes, their checksum, offset of its histogram
        self._known: dict[str, tuple[bytes, int, int]] = {}
        self._kinds: list[str] = []
        self._since, self._histogram, self._phase = time.monotonic_ns(), -1, ""

    def again(self) -> None:
        """Progress within the same phase. Not counted in `place`: the number of calls may differ
        between ranks."""
        self._place -= 1
        self.beat(self._phase)

    def beat(self, phase: str) -> None:
        now, self._phase = time.monotonic_ns(), phase
        text, checksum, histogram = self._known.get(phase) or self._learn(phase)
        if self._histogram >= 0:
            took = now - self._since | 4
            bits = took.bit_length()
            self._counts[self._histogram + 4 * bits + (took >> bits - 3 & 3)] += 1
        self._since, self._histogram = now, histogram
        beats = self._beats = self._beats + 1
        step = self.step
        if step != self._begun:
            self._begun, self._place = step, 0
            self._first_step = self._first_step or step
        place = self._place = self._place + 1
        numbers = _pack_fields(beats, self.epoch, step, place, self._first_step, now, time.time())
        _pack_record(self._map, _RECORDS_AT[beats & 1], numbers, text, crc32(numbers, checksum))

    def _learn(self, phase: str) -> tuple[bytes, int, int]:
        name = kind(phase)
        if name not in self._kinds and len(self._kinds) < _SLOTS:
            at = _NAMES_AT + _NAME * len(self._kinds)
            self._map[at : at + _NAME] = name.encode("utf-8", "replace")[:_NAME].ljust(_NAME, b"\0")
            self._kinds.append(name)
        slot = self._kinds.index(name) if name in self._kinds else _SLOTS - 1
        if len(self._known) >= 4 * _SLOTS:  # one for each epoch's name
            self._known.clear()
        text = phase.encode("utf-8", "replace")[:_PHASE].ljust(_PHASE, b"\0")
        known = self._known[phase] = text, crc32(text, self._checksum), slot * _BUCKETS
        return known


class NoHeartbeat:
    """Stand-in without a run directory (a user script that uses Duet's helpers)."""

    epoch = step = 0

    def beat(self, phase: str) -> None:
        pass

    def again(self) -> None:
        pass


def read(path: Path) -> HeartbeatRecord | None:
    """The last complete beat; None before the first and if the file cannot be read."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        content = _read(path, _HEADER)
        if len(content) < _HEADER or not _is_heartbeat(content):
            return None
        if found := [beat for at in _RECORDS_AT if (beat := _parse(content, at))]:
            return max(found, key=lambda beat: beat.beats)
        if not any(content[_IDENTITY.size :]):
            return None
    return None


def _is_heartbeat(content: bytes) -> bool:
    return _IDENTITY.unpack_from(content)[:2] == (_MAGIC, _VERSION)


def _parse(content: bytes, at: int) -> HeartbeatRecord | None:
    """None: not written yet, or being written."""
    numbers, phase, checksum = _RECORD.unpack_from(content, at)
    if crc32(numbers, crc32(phase, crc32(content[: _IDENTITY.size]))) != checksum:
        return None
    _, _, rank, pid = _IDENTITY.unpack_from(content)
    beats, epoch, step, place, first_step, monotonic, wall = _FIELDS.unpack(numbers)
    text = phase.rstrip(b"\0").decode("utf-8", "replace")
    return (
        HeartbeatRecord(rank, pid, beats, epoch, step, place, first_step, monotonic, wall, text)
        if beats
        else None
    )


def _read(path: Path, size: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(size) or b""
    except OSError:
        return b""


def durations(path: Path) -> dict[str, Histogram]:
    """Durations of completed phases: kind → counts by bucket (see `upper_s`)."""
    for _ in range(_TRIES):
        content = _read(path, SIZE)
        if len(content) < SIZE or not _is_heartbeat(content):
            return {}
        # otherwise a new name was being written
        if _read(path, _COUNTS_AT)[_NAMES_AT:] == content[_NAMES_AT:_COUNTS_AT]:
            break
    names = (
        content[at : at + _NAME].rstrip(b"\0").decode("utf-8", "replace")
        for at in range(_NAMES_AT, _COUNTS_AT, _NAME)
    )
    # Each count is one aligned store. A name is complete before its first count, so a name without
    # counts may be half-written.
    counts = struct.unpack_from(f"<{_SLOTS * _BUCKETS}I", content, _COUNTS_AT)
    found = {
        name: counts[i * _BUCKETS : (i + 1) * _BUCKETS] for i, name in enumerate(names) if name
    }
    return {name: histogram for name, histogram in found.items() if any(histogram)}


def upper_s(bucket: int) -> float:
    """The upper edge of a bucket in seconds; the lower edge is at least 4/5 of it."""
    bits, quarter = divmod(bucket, 4)
    return float((5 + quarter) << max(0, bits - 3)) / 1e9


def quantile_s(counts: Histogram, share: float) -> float | None:
    """The duration in seconds that `share` (0 to 1) of the phases did not exceed; None for empty
    `counts`."""
    left = share * sum(counts)
    if not left:
        return None
    for bucket, count in enumerate(counts):
        left -= count
        if left <= 0:
            return upper_s(bucket)
    return upper_s(len(counts) - 1)


def read_all(folder: Path, ranks: Container[int] | None = None) -> list[HeartbeatRecord]:
    """The last beats of `ranks` (default: all), in rank order. `age_s` is meaningful only for ranks
    of this machine. Unreadable files (hung disk, no file descriptor left) are omitted."""
    paths: list[Path] = []
    if isinstance(ranks, Iterable):
        paths = [folder / f"rank{rank}.bin" for rank in ranks]
    else:
        with contextlib.suppress(OSError):
            paths = list(folder.glob("rank*.bin"))
    beats = (read(path) for path in paths)
    return sorted(
        (b for b in beats if b and (ranks is None or b.rank in ranks)), key=lambda b: b.rank
    )


class Readings:
    """The last beat of each rank, kept while its file cannot be read: a rank seen once is never
    absent."""

    def __init__(self, folder: Path, ranks: range) -> None:
        self._folder, self._ranks = folder, ranks
        self._last: dict[int, HeartbeatRecord] = {}
        # ranks seen before but not in the last call: their ages are stale
        self.unread: set[int] = set()

    def read(self) -> list[HeartbeatRecord]:
        """In rank order."""
        now = {beat.rank: beat for beat in read_all(self._folder, self._ranks)}
        self.unread = self._last.keys() - now.keys()
        self._last |= now
        return [self._last[rank] for rank in sorted(self._last)]


current: Heartbeat | NoHeartbeat = NoHeartbeat()


def start(path: Path, rank: int) -> None:
    """Open the heartbeat of this process as `current`."""
    global current
    current = Heartbeat(path, rank)
