"""What a rank is doing right now, in one small memory-mapped file: written in about a microsecond, readable by anybody.

A reader never waits for the writer and the writer never for a reader. The file stays after the run: it tells where each
rank was at its end.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

# magic, version, rank, pid, beats, epoch, step, monotonic ns of the last beat, wall time in s, phase
_LAYOUT = struct.Struct("<4sHHqqqqqd96s")
_MAGIC, _VERSION = b"DUET", 1
# Phases that belong to one optimizer step: shown as 'step 397: forward'.
STEP_PHASES = ("fetch", "forward", "backward", "reduce", "optimizer", "record")
FINISHED = "finished"


@dataclass(frozen=True)
class Beat:
    """One reading. `age_s` counts from the last change of phase, on this machine's monotonic clock."""

    rank: int
    pid: int
    beats: int  # number of phase changes so far
    epoch: int
    step: int
    monotonic_ns: int
    wall_time: float
    phase: str

    @property
    def age_s(self) -> float:
        return max(0.0, (time.monotonic_ns() - self.monotonic_ns) / 1e9)

    def __str__(self) -> str:
        return f"step {self.step}: {self.phase}" if self.phase in STEP_PHASES else self.phase


class Heartbeat:
    """The writer of one rank. `epoch` and `step` are set by the trainer, `beat(phase)` publishes all."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank, self.epoch, self.step, self._beats = rank, 0, 0, 0
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Allocated, not sparse: a write through the map into a hole of a full disk would be a SIGBUS.
            os.posix_fallocate(handle, 0, _LAYOUT.size)
            self._map = mmap.mmap(handle, _LAYOUT.size)
        finally:
            os.close(handle)
        self._pid = os.getpid()

    def beat(self, phase: str) -> None:
        self._beats += 1
        _LAYOUT.pack_into(
            self._map,
            0,
            _MAGIC,
            _VERSION,
            self.rank,
            self._pid,
            self._beats,
            self.epoch,
            self.step,
            time.monotonic_ns(),
            time.time(),
            phase.encode("utf-8", "replace")[:96],
        )


class NoHeartbeat:
    """Stands in where there is no run directory (somebody else's script using our helpers)."""

    epoch = step = 0

    def beat(self, phase: str) -> None:
        pass


def read(path: Path) -> Beat | None:
    """The last beat, or None when there is none (yet)."""
    for _ in range(3):  # twice the same content: not read in the middle of a write
        try:
            first, second = path.read_bytes(), path.read_bytes()
        except OSError:
            return None
        if first == second and len(first) >= _LAYOUT.size:
            magic, version, rank, pid, beats, epoch, step, monotonic, wall, phase = _LAYOUT.unpack_from(first)
            if magic == _MAGIC and version == _VERSION:
                return Beat(rank, pid, beats, epoch, step, monotonic, wall, phase.rstrip(b"\0").decode("utf-8", "replace"))
            return None
    return None


def read_all(folder: Path, ranks: Container[int] | None = None) -> list[Beat]:
    """The beats of these ranks (of all), in rank order. Ages mean something for ranks of this machine only."""
    beats = (read(path) for path in folder.glob("rank*.bin"))
    return sorted((b for b in beats if b and (ranks is None or b.rank in ranks)), key=lambda b: b.rank)


current: Heartbeat | NoHeartbeat = NoHeartbeat()


def start(path: Path, rank: int) -> None:
    """Give this process its heartbeat; from now on `current.beat(phase)` publishes."""
    global current
    current = Heartbeat(path, rank)
