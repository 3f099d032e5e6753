"""Time limits of phases, above which a rank hangs: five times the 99th percentile of the phase,
with --hang_timeout as the minimum. Slow phases have separate limits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from training.core import heartbeat, phases
from training.core.heartbeat import STEP_PHASES, HeartbeatRecord, Histogram

TIMES, SHARE = 5.0, 0.99
ROLL_S, WINDOWS = 60.0, 10  # durations from more than ten minutes ago are ignored
FEW = 20  # with fewer phases in the window, all phases so far count
SLOW_STARTS = (*phases.STARTING, "epoch #: creating data iterator")
START_S = 300.0  # imports from a slow disk, a large model
FIRST_STEPS = 2  # warm-up steps of a process: compilers, allocators, caches
FIRST_STEP_S, COMPILE_S = 300.0, 1800.0
OWN = {
    **dict.fromkeys(phases.EVALUATIONS, 300.0),
    "gather state": 600.0,
    "checkpoint": 600.0,
    "summary": 600.0,  # reads the metrics of all steps
    "sample": 300.0,
    "profile": 300.0,  # writes and reads a trace of many megabytes
    "closing trackers": 60.0,
}

BACKSTOP_S, UNWATCHED_S = 1800.0, 600.0
NEVER_S = 864000.0


def backstop_s(floor_s: float, *, supervised: bool) -> float:
    """The timeout of collectives in seconds. With a supervisor it only matters if that fails."""
    return max(BACKSTOP_S if supervised else UNWATCHED_S, 10 * floor_s) if floor_s else NEVER_S


def own_s(beat: HeartbeatRecord, *, compiled: bool) -> float:
    """The separate limit of its phase in seconds; 0 without one. `compiled`: torch.compile is
    on."""
    name, first_s = heartbeat.kind(beat.phase), COMPILE_S if compiled else FIRST_STEP_S
    if name in ("first pass", phases.FIRST_EVALUATION):  # these compile too
        return max(first_s, OWN.get(name, 0.0))
    if beat.first_step == 0 and name in SLOW_STARTS:
        return START_S
    if name in OWN:
        return OWN[name]
    warms_up = beat.phase in STEP_PHASES and beat.step < beat.first_step + FIRST_STEPS
    return first_s if warms_up else 0.0


class PhaseTimeouts:
    """Phase limits for the ranks of one machine. `floor_s` is --hang_timeout; `compiled` as in
    own_s."""

    def __init__(self, floor_s: float, *, compiled: bool) -> None:
        self.floor_s = floor_s
        self._compiled = compiled
        self._seen: dict[Path, deque[tuple[float, dict[str, Histogram]]]] = {}
        self._last: dict[Path, dict[str, Histogram]] = {}

    def seconds(self, beat: HeartbeatRecord, path: Path) -> float:
        """The limit of the current phase in `beat`, which was read from `path`."""
        own = own_s(beat, compiled=self._compiled)
        return max(self.floor_s, own, TIMES * self.usual_s(beat, path))

    def usual_s(self, beat: HeartbeatRecord, path: Path) -> float:
        """The recent 99th percentile of the current phase in seconds; 0 without data."""
        name, now = heartbeat.kind(beat.phase), self._durations(path)
        total, window = now.get(name, ()), self._window(now, name, path)
        return heartbeat.quantile_s(window if sum(window) >= FEW else total, SHARE) or 0.0

    def _window(self, now: Mapping[str, Histogram], name: str, path: Path) -> Histogram:
        """Counts added since the oldest stored reading."""
        then = self._seen.get(path, deque())[0][1].get(name, ()) if self._seen.get(path) else ()
        counts = now.get(name, ())
        return (
            tuple(a - b for a, b in zip(counts, then, strict=True))
            if len(then) == len(counts)
            else counts
        )

    def roll(self, paths: list[Path]) -> None:
        """Store the current histograms, at most once every ROLL_S; call it regularly."""
        clock = time.monotonic()
        for path in paths:
            kept = self._seen.setdefault(path, deque(maxlen=WINDOWS))
            if not kept or clock - kept[-1][0] > ROLL_S:
                kept.append((clock, self._durations(path)))

    def _durations(self, path: Path) -> dict[str, Histogram]:
        """The last histograms while the file cannot be read: limits must not shrink."""
        self._last[path] = heartbeat.durations(path) or self._last.get(path, {})
        return self._last[path]
