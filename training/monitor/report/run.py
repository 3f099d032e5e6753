"""Records and monitor state of one run for the report, with secrets masked."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import tasks
from training.core import evaluations, heartbeat, last_resume, metric_units, rundir, standing
from training.core.jsonl import Record, dig, number, read_object, text, whole
from training.core.redact import masked_values
from training.diagnose.log_parsers.log_metrics import ScriptFigures
from training.monitor import launches, run_settings, run_status, state
from training.monitor.launches import clock
from training.monitor.report import rank_failure
from training.monitor.report.series import Metrics

if TYPE_CHECKING:
    from training.core.contracts.state import RunState

PROFILES = 64  # ranks, at most
PICTURES, PICTURE_BYTES, PICTURES_BYTES = 24, 2 << 20, 8 << 20
RANK_FILE = re.compile(r"rank(\d+)\.bin")


@dataclass(frozen=True)
class Picture:
    """A file of <run>/samples/. `address`: its content as a data URL; empty if too large."""

    name: str
    address: str
    size: int


@dataclass
class Run:
    """Content of one run. `state`: see training.monitor.state; other records are as in their files,
    {} if missing."""

    folder: rundir.RunDir
    state: RunState
    plan: Record
    data: Record
    summary: Record
    failure: Record
    checks: list[Record]
    metrics: Metrics
    events: list[Record]  # see training.monitor.launches
    left_out: Counter[str]  # events that are not in `events`, by kind
    durations: dict[int, dict[str, float]]  # rank → kind of phase → seconds, approximate
    pictures: list[Picture]
    profiles: list[Record]  # profile/rank<r>.json, by rank
    pauses: list[tuple[float, float]]  # from the end of a start to the next one, unix s
    ahead_s: float  # what the times of the last start lack, after the clock was set back

    @property
    def name(self) -> str:
        return str(self.state["run"]["name"])

    @property
    def counted(self) -> str:
        """Unit of the training data: tokens, samples, or the task's own unit."""
        return (
            metric_units.counted(self.metrics.last)
            or text(dig(self.plan, "task", "unit"))
            or metric_units.TOKENS
        )

    @property
    def on_gpu(self) -> bool:
        return self.state["run"]["device"] == "cuda"

    @property
    def memory_word(self) -> str:
        """What `memory_bytes` of a rank measures."""
        return metric_units.memory_word(self.on_gpu)

    @property
    def task(self) -> str:
        """Path of the user script or name of the task; plans of old versions have the default
        task."""
        return self.script or text(dig(self.plan, "task", "name")) or tasks.DEFAULT.name

    @property
    def script(self) -> str | None:
        """Path of the user script, if any."""
        return run_status.script_of(self.plan)

    @property
    def settings(self) -> Record:
        """Fields of the configuration, including those of the task; path and arguments of a user
        script."""
        return run_settings.settings(self.plan)

    @property
    def begun(self) -> float:
        """First start, unix s; 0 if unknown. plan.json only has the last one."""
        return self.metrics.origin or self.planned or 0.0

    @property
    def planned(self) -> float | None:
        """The last start, unix s."""
        created = number(self.plan.get("created"))
        return None if created is None else created + self.ahead_s

    @property
    def starts(self) -> int:
        return sum(event["event"] == "start" for event in self.events)

    @property
    def until(self) -> float:
        """The end, or now, unix s. If the clock was set back to before the start: the latest moment
        that the records have."""
        end = number(self.state["run"]["ended_unix_s"]) or number(self.state["time_unix_s"])
        if end is not None and end + self.ahead_s >= self.begun:
            return end + self.ahead_s
        return max([self.begun, *self.metrics.times[-1:], *map(clock, self.events)])

    @property
    def lasted_s(self) -> float | None:
        """Seconds from the first start to the end, or until now, without pauses."""
        return self.since(self.until) if self.begun else None

    def since(self, at: float) -> float:
        """Seconds from the first start to `at` (unix s), without pauses; 0 before it, after the
        clock was set back."""
        return max(0.0, launches.left_over(at, self.pauses) - self.begun)

    @property
    def ended(self) -> bool:
        return self.state["run"]["state"] in run_status.ENDED


def read_run(folder: rundir.RunDir) -> Run:
    """Reads everything that a report shows; treats missing and invalid files as empty."""
    watch = state.RunWatch(folder)
    seen = watch.read(patience_s=0.0)
    plan = masked_values(watch.plan or {})
    recorded, left_out = launches.read_events(folder.events)
    launched = number(plan.get("created"))
    events, set_back = launches.in_order(recorded, launched)
    ahead = launches.ahead_s(set_back)
    launched = None if launched is None else launched + ahead
    times = [t for t in (launched, *map(clock, events[:1])) if t and math.isfinite(t)]
    checks = (read_object(folder.preflight) or {}).get("checks")
    known = [masked_values(event) for event in events]
    printed = ScriptFigures(folder.ranks).read() if run_status.script_of(plan) else None
    metrics = Metrics(
        folder.metrics,
        min(times, default=None),
        records=printed.records() if printed else None,
        resumed=reduce(last_resume.after, events, None),
        set_back=set_back,
    )
    steps = [*metrics.times, *launches.last_steps(folder.metrics, known)]
    pauses = launches.pauses(known, steps, launched, metrics.origin)
    metrics.leave_out(pauses)
    metrics.discard(evaluations.discarded(folder.events))
    failure = read_object(folder.failure) if seen["run"]["state"] == run_status.FAILED else None
    if seen["run"]["state"] == run_status.DIED:  # no supervisor recorded the failure
        failure = rank_failure.of_ranks(folder, number(plan.get("created")) or 0.0)
    return Run(
        folder,
        masked_values(seen),
        plan,
        masked_values(read_object(standing.data_file(folder)) or {}),
        masked_values(standing.ends(folder)[0] or {}),
        masked_values(failure or {}),
        [check for check in masked_values(checks) if isinstance(check, dict)]
        if isinstance(checks, list)
        else [],
        metrics,
        known,
        left_out,
        _durations(folder.heartbeats),
        _pictures(folder.samples),
        _profiles(folder, whole(plan.get("ranks"))),
        pauses,
        ahead,
    )


def _durations(folder: Path) -> dict[int, dict[str, float]]:
    """Times by rank and kind of phase from the histograms of the heartbeats, accurate to 10 %."""
    out: dict[int, dict[str, float]] = {}
    try:
        files = sorted(
            (int(match[1]), path)
            for path in folder.iterdir()
            if (match := RANK_FILE.fullmatch(path.name))
        )
    except OSError:
        return {}
    for rank, path in files:
        kinds = heartbeat.durations(path)
        seconds = {
            kind: 0.9 * sum(n * heartbeat.upper_s(b) for b, n in enumerate(counts) if n)
            for kind, counts in kinds.items()
        }
        if any(seconds.values()):
            out[rank] = seconds
    return out


def _profiles(folder: rundir.RunDir, ranks: int | None) -> list[Record]:
    """The digests of the profiled ranks, from rank 0 on. Those of an earlier start, which may have
    had more ranks, are left out."""
    numbers = range(min(PROFILES, ranks or PROFILES))
    found = [digest for rank in numbers if (digest := read_object(folder.profile_digest(rank)))]
    first = found[0].get("first_step") if found else None
    return [masked_values(digest) for digest in found if digest.get("first_step") == first]


def _pictures(folder: Path) -> list[Picture]:
    """PNG files up to the size limit; the others only with name and size."""
    out: list[Picture] = []
    room = PICTURES_BYTES
    try:
        files = sorted(
            path for path in folder.iterdir() if path.suffix.lower() == ".png" and path.is_file()
        )
    except OSError:
        return []
    for path in files:
        try:
            size, content = path.stat().st_size, b""
            if len(out) < PICTURES and size <= min(PICTURE_BYTES, room):
                content = path.read_bytes()
        except OSError:  # gone meanwhile
            continue
        room -= len(content)
        is_png = content.startswith(b"\x89PNG")
        out.append(
            Picture(
                path.name,
                f"data:image/png;base64,{base64.b64encode(content).decode()}" if is_png else "",
                size,
            )
        )
    return out


def value_of(record: Record, *keys: str) -> Any:
    """The value of a decision {"value": …, "reason": …}."""
    return dig(record, *keys, "value")
