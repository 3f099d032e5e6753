"""What a rank is doing right now, in one small memory-mapped file: written in less than a
microsecond, readable by any process.

A reader never waits for the writer and the writer never for a reader. Two records are written in
turn, each with a checksum: while one is being written the other is whole, also when the writer is
preempted, stopped or killed in the middle, and in whatever order the hardware or `read()` moves the
bytes. A reader takes the newest whole one.

The file stays after the run: it shows where each rank was at its end. After the records it holds
how long every phase took so far, as one histogram each: the limit of a phase is computed from that
(training.core.phase_timeouts).
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
# kinds of phases, bytes of a name; what comes after the last slot's first user shares it
_SLOTS, _NAME = (
    24,
    64,
)
_BUCKETS = 256  # of a histogram: four for each power of two nanoseconds
_NAMES_AT, _COUNTS_AT = _HEADER, _HEADER + _SLOTS * _NAME
SIZE = _COUNTS_AT + 4 * _SLOTS * _BUCKETS
# both records torn takes a reader that is as slow as two beats: it reads again
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
    """One reading. `age_s` counts from the last change of phase, on this machine's monotonic
    clock."""

    rank: int
    pid: int
    beats: int  # number of phase changes so far
    epoch: int
    step: int
    # phase changes since this step began: comparable between ranks, which do the same in a step
    place: int
    first_step: int  # that this process has begun; 0 before it
    monotonic_ns: int
    wall_time: float
    phase: str

    @property
    def age_s(self) -> float:
        return max(0.0, (time.monotonic_ns() - self.monotonic_ns) / 1e9)

    def __str__(self) -> str:
        return f"step {self.step}: {self.phase}" if self.phase in STEP_PHASES else self.phase


def kind(phase: str) -> str:
    """The phase without its numbers: 'epoch 7: creating data iterator' is one kind in every
    epoch."""
    return _NUMBERS.sub("#", phase)


class Heartbeat:
    """The writer of one rank. `epoch` and `step` are set by the trainer, `beat(phase)` publishes
    all."""

    def __init__(self, path: Path, rank: int, pid: int = 0) -> None:
        """`pid`: of the rank, where another process writes for it."""
        self.rank, self.epoch, self.step, self._beats = rank, 0, 0, 0
        self._begun = self._place = self._first_step = 0
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Allocated, not sparse: a write through the map into a hole of a full disk would be a
            # SIGBUS.
            os.posix_fallocate(handle, 0, SIZE)
            self._map = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._map[:] = bytes(SIZE)
        identity = _IDENTITY.pack(_MAGIC, _VERSION, rank, pid or os.getpid())
        self._map[: len(identity)] = identity
        self._checksum = crc32(identity)
        self._counts = memoryview(self._map)[_COUNTS_AT:].cast("I")
        # phase → its bytes, their checksum, where its histogram begins
        self._known: dict[str, tuple[bytes, int, int]] = {}
        self._kinds: list[str] = []
        self._since, self._histogram, self._phase = time.monotonic_ns(), -1, ""

    def again(self) -> None:
        """Still the same phase, and it gets on; how often may differ between ranks, so it does not
        count as a place."""
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
    """Stands in where there is no run directory (somebody else's script using our helpers)."""

    epoch = step = 0

    def beat(self, phase: str) -> None:
        pass

    def again(self) -> None:
        pass


def read(path: Path) -> HeartbeatRecord | None:
    """The last whole beat; None when there is none yet, or the file cannot be read."""
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
    """None: not yet written, or being written."""
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
    """How long each kind of phase took so far: kind → counts by bucket (see `upper_s`). The present
    phase is not in it."""
    for _ in range(_TRIES):
        content = _read(path, SIZE)
        if len(content) < SIZE or not _is_heartbeat(content):
            return {}
        # not read in the middle of a new name
        if _read(path, _COUNTS_AT)[_NAMES_AT:] == content[_NAMES_AT:_COUNTS_AT]:
            break
    names = (
        content[at : at + _NAME].rstrip(b"\0").decode("utf-8", "replace")
        for at in range(_NAMES_AT, _COUNTS_AT, _NAME)
    )
    # Each count is one aligned store. A name is whole before its first count: one without any may
    # be half-written.
    counts = struct.unpack_from(f"<{_SLOTS * _BUCKETS}I", content, _COUNTS_AT)
    found = {
        name: counts[i * _BUCKETS : (i + 1) * _BUCKETS] for i, name in enumerate(names) if name
    }
    return {name: histogram for name, histogram in found.items() if any(histogram)}


def upper_s(bucket: int) -> float:
    """The upper edge of a bucket in seconds; the lower one is at least 4/5 of it."""
    bits, quarter = divmod(bucket, 4)
    return float((5 + quarter) << max(0, bits - 3)) / 1e9


def quantile_s(counts: Histogram, share: float) -> float | None:
    """So long this share of the phases took, at most; None without any."""
    left = share * sum(counts)
    if not left:
        return None
    for bucket, count in enumerate(counts):
        left -= count
        if left <= 0:
            return upper_s(bucket)
    return upper_s(len(counts) - 1)


def read_all(folder: Path, ranks: Container[int] | None = None) -> list[HeartbeatRecord]:
    """The beats of these ranks (of all), in rank order. Ages mean something for ranks of this
    machine only. What can not be read (a disk that does not answer, no descriptor left) has no
    beat."""
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
    """The last beat of each of these ranks, kept while its file cannot be read: a rank that was
    seen is never absent."""

    def __init__(self, folder: Path, ranks: range) -> None:
        self._folder, self._ranks = folder, ranks
        self._last: dict[int, HeartbeatRecord] = {}
        # seen before, and not in the last call: their ages prove nothing
        self.unread: set[int] = set()

    def read(self) -> list[HeartbeatRecord]:
        """In rank order."""
        now = {beat.rank: beat for beat in read_all(self._folder, self._ranks)}
        self.unread = self._last.keys() - now.keys()
        self._last |= now
        return [self._last[rank] for rank in sorted(self._last)]


current: Heartbeat | NoHeartbeat = NoHeartbeat()


def start(path: Path, rank: int) -> None:
    """Give this process its heartbeat; from now on `current.beat(phase)` publishes."""
    global current
    current = Heartbeat(path, rank)
