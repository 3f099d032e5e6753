"""State of a training that another launcher started, from its log; the same dict as a run's."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.units import clock, duration
from training.diagnose.log_parsers import end_detection
from training.diagnose.log_parsers.log_metrics import LogMetrics
from training.monitor import alerts, host_stats
from training.monitor.run_figures import CURVE_POINTS
from training.monitor.run_status import DIED, FAILED, FINISHED, RUNNING, STARTING
from training.monitor.state import GPU_PATIENCE_S, LOG_LINES, SCHEMA_VERSION
from training.watchdog.probes import procfs

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus
    from training.core.contracts.state import RunState

SILENT: Final = "silent"  # no new output, and no line that shows how it ended
RECENT_S = 60.0  # a log written this recently, or within a few usual intervals, is of a running job


class LogWatch:
    """Reads one log repeatedly; each read covers only what is new. Raises UserError for an
    unreadable log."""

    def __init__(self, log: Path, shared: host_stats.Shared | None = None) -> None:
        _readable(log)
        self.log = log
        self._figures = LogMetrics(log)
        self._wrote: dict[int, int] = {}  # pid → start in ticks, of the last processes seen writing
        self._gone: float | None = None  # monotonic, when the log was first missing
        self._grew = -math.inf  # monotonic, when it was last seen growing
        self._machine = shared or host_stats.Shared()

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunState:
        """State of the log now. `patience_s`: longest wait for the GPU driver."""
        now = time.time()
        self._machine.ask()
        # Processes first: whatever a process wrote before it ended is then in the log read below.
        writers = _writers(self.log)
        if writers:
            self._wrote = {pid: procfs.began(pid) for pid in writers}
        figures = self._figures
        if figures.read(now):
            self._grew = time.monotonic()
        state, reason = self._judge(writers, now)
        gpus, host = self._machine.answer(patience_s, self.log.parent)
        seen: RunState = {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": now,
            "run": {
                "kind": "log",
                "source": figures.source,
                "name": self.log.name,
                "dir": None,
                "script": None,
                "program": None,
                "task": None,
                "ranks": None,
                "device": None,
                "precision": None,
                "state": state,
                "reason": reason,
                "exit_code": None,
                "restarts": 0,
                "warnings": 0,
                "first_event_unix_s": None,
                "started_unix_s": None,
                "ended_unix_s": figures.text.mtime
                if state != RUNNING and figures.text.there
                else None,
                "supervisor_pid": None,
                "supervisor_alive": None,
            },
            "progress": figures.progress(running=state == RUNNING),
            "training": figures.training(),
            "loss_curve": figures.loss_curve(CURVE_POINTS),
            "speed_curve": {"points": []},
            "ranks": [],
            "gpus": host_stats.gpu_records(gpus, set(writers), set()),
            "gpus_reason": gpus.reason,
            "system": host,
            "warnings": [],
            "log": {
                "file": str(self.log),
                "last_lines": figures.text.last_lines(LOG_LINES),
                "read_whole": figures.text.whole,
            },
            "checkpoint": None,
            "summary": None,
            "failure": None,
            "alerts": [],
        }
        seen["alerts"] = alerts.active_alerts(seen)
        return seen

    def _judge(self, writers: list[int], now: float) -> tuple[RunStatus, str | None]:
        """The status, and a reason where the status alone does not explain it."""
        text, tally = self._figures.text, self._figures.tally
        if not text.there:
            return self._judge_missing(now)
        self._gone = None
        how, why = (None, None) if text.binary else end_detection.read(text.end)
        if how and not writers:
            return (FINISHED, None) if how == end_detection.FINISHED else (FAILED, why)
        empty = msg("monitor.log.empty")
        unknown = (
            msg("monitor.log.binary")
            if text.binary
            else empty
            if not text.size
            else None
            if tally.facts or tally.epoch is not None
            else msg("monitor.log.unknown")
        )
        recent_s = max(RECENT_S, alerts.LATE_LINES * (tally.interval_s() or 0))
        lives = (
            writers
            # the clock of its file may be wrong
            or time.monotonic() - self._grew < recent_s
            or -RECENT_S < now - text.mtime < recent_s
        )
        if lives and not text.size:
            return STARTING, empty
        if lives:
            return (
                RUNNING,
                msg("monitor.log.still_written", why=why, pid=writers[0]) if why else unknown,
            )
        since = msg(
            "monitor.log.silent",
            time=clock(text.mtime, "%Y-%m-%d %H:%M:%S"),
            duration=duration(max(0.0, now - text.mtime)),
        )
        if former := self._former(now):
            return SILENT, msg("monitor.log.elsewhere", pid=former[0])
        if self._wrote:
            return DIED, msg("monitor.log.writer_gone", pid=min(self._wrote), silent=since)
        return (
            SILENT,
            msg("monitor.log.unknown_and_silent", unknown=unknown, silent=since)
            if unknown
            else msg("monitor.log.end_unknown", silent=since),
        )

    def _judge_missing(self, now: float) -> tuple[RunStatus, str | None]:
        """As _judge, for a log that is missing. A rotation may create it again."""
        if self._gone is None:
            self._gone = time.monotonic()
        if former := self._former(now):
            return SILENT, msg("monitor.log.elsewhere", pid=former[0])
        over = time.monotonic() - self._gone >= RECENT_S
        return DIED if over else SILENT, msg("monitor.log.gone")

    def _former(self, now: float) -> list[int]:
        """The processes last seen writing that still run."""
        return [
            pid
            for pid, ticks in sorted(self._wrote.items())
            if host_stats.alive({"pid": pid, "ticks": ticks}, now)
        ]


def _readable(log: Path) -> None:
    why, fixes = None, []
    try:
        kind = log.stat().st_mode
        if stat.S_ISDIR(kind):
            why, fixes = (
                msg("monitor.log.a_directory"),
                [
                    f"./monitor_training.sh --run={shlex.quote(str(log))}   "
                    + msg("monitor.log.if_a_run")
                ],
            )
        elif not stat.S_ISREG(kind):
            why = msg("monitor.log.not_regular")  # a pipe can be read only once
        else:
            log.open("rb").close()
    except PermissionError as error:
        why, fixes = error.strerror, [f"chmod u+r {shlex.quote(str(log))}"]
    except OSError as error:
        why = error.strerror
    except ValueError:  # \0
        why = msg("monitor.log.bad_name")
    if why:
        what = msg("monitor.log.given", log=str(log), why=why)
        raise UserError(Problem("log.unreadable", what, msg("monitor.log.readable"), fixes))


def _writers(log: Path) -> list[int]:
    """Pids of this user's processes that have the log open for writing."""
    found = []
    try:
        wanted = os.path.realpath(log)
        pids = [
            name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()
        ]
    except OSError:
        return []
    for pid in pids:
        with contextlib.suppress(OSError):  # ended, or another user's
            folder = f"/proc/{pid}/fd"
            if any(
                os.readlink(f"{folder}/{fd}") == wanted  # noqa: PTH115  it is fast
                and _writes(pid, fd)
                for fd in os.listdir(folder)
            ):
                found.append(int(pid))
    return sorted(found)


def _writes(pid: str, fd: str) -> bool:
    flags = re.search(r"^flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{fd}").read_text(), re.M)
    return bool(flags) and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY  # type: ignore[index]
