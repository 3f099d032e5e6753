"""A log that no launcher of ours made, as the state that RunWatch returns of a run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.core.errors import Problem, UserError
from training.core.units import clock, duration
from training.diagnose.log_parsers import end_detection
from training.diagnose.log_parsers.log_metrics import LogMetrics
from training.monitor import alerts, host_stats
from training.monitor.run_figures import CURVE_POINTS
from training.monitor.run_status import FAILED, FINISHED, RUNNING, STARTING
from training.monitor.state import GPU_PATIENCE_S, LOG_LINES, SCHEMA_VERSION

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus
    from training.core.contracts.state import RunState

SILENT: Final = "silent"  # nothing comes any more, and nothing says how it ended
RECENT_S = 60.0  # written to so lately, or within some of its usual intervals: it runs
UNKNOWN = "no progress lines recognised"
EMPTY = "no output yet: the log is empty"


class LogWatch:
    """Looks at one log again and again; a look costs only what is new. Raises UserError for what
    can not be read."""

    def __init__(self, log: Path, shared: host_stats.Shared | None = None) -> None:
        _readable(log)
        self.log = log
        self._figures = LogMetrics(log)
        self._machine = shared or host_stats.Shared()

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunState:
        """One look; `patience_s`: how long the GPU driver may keep it waiting."""
        now = time.time()
        self._machine.ask()
        # Processes first: what they wrote before they ended is then certainly in what is read
        # below.
        writers = _writers(self.log)
        told = self._figures
        grown = told.read(now)
        state, reason = self._judge(writers, grown, now)
        gpus, host = self._machine.answer(patience_s, self.log.parent)
        seen: RunState = {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": now,
            "run": {
                "kind": "log",
                "source": told.source,
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
                "started_unix_s": None,
                "ended_unix_s": told.text.mtime if state != RUNNING and told.text.there else None,
                "supervisor_pid": None,
                "supervisor_alive": None,
            },
            "progress": told.progress(running=state == RUNNING),
            "training": told.training(),
            "loss_curve": told.loss_curve(CURVE_POINTS),
            "speed_curve": {"points": []},
            "ranks": [],
            "gpus": host_stats.gpu_records(gpus, set(writers), set()),
            "gpus_reason": gpus.reason,
            "system": host,
            "warnings": [],
            "log": {
                "file": str(self.log),
                "last_lines": told.text.last_lines(LOG_LINES),
                "read_whole": told.text.whole,
            },
            "checkpoint": None,
            "summary": None,
            "failure": None,
            "alerts": [],
        }
        seen["alerts"] = alerts.active_alerts(seen)
        return seen

    def _judge(self, writers: list[int], grown: bool, now: float) -> tuple[RunStatus, str | None]:
        """The state, and why where that is not plain."""
        text, tally = self._figures.text, self._figures.tally
        if not text.there:
            return SILENT, "the log is gone"
        how, why = (None, None) if text.binary else end_detection.read(text.end)
        if how and not writers:
            return (FINISHED, None) if how == end_detection.FINISHED else (FAILED, why)
        unknown = (
            "it is no text"
            if text.binary
            else EMPTY
            if not text.size
            else None
            if tally.facts
            else UNKNOWN
        )
        lives = (
            writers
            or grown
            or -RECENT_S
            < now - text.mtime
            < max(RECENT_S, alerts.LATE_LINES * (tally.interval_s() or 0))
        )
        if lives and not text.size:
            return STARTING, EMPTY
        if lives:
            return (
                RUNNING,
                f"{why}; but a process still writes to the log (pid {writers[0]})"
                if why
                else unknown,
            )
        since = (
            f"nothing new since {clock(text.mtime, '%Y-%m-%d %H:%M:%S')}, "
            f"{duration(now - text.mtime)} ago"
        )
        return (
            SILENT,
            f"{unknown}; {since}" if unknown else f"{since}, and nothing says how it ended",
        )


def _readable(log: Path) -> None:
    said, why, fixes = f"--log is {str(log)!r}", None, []
    try:
        kind = log.stat().st_mode
        if stat.S_ISDIR(kind):
            why, fixes = (
                "a folder",
                [
                    f"./monitor_training.sh --run={shlex.quote(str(log))}   (if it is a run "
                    f"directory)"
                ],
            )
        elif not stat.S_ISREG(kind):
            why = "not a file"  # a pipe can be read only once
        else:
            log.open("rb").close()
    except PermissionError as error:
        why, fixes = error.strerror, [f"chmod u+r {shlex.quote(str(log))}"]
    except OSError as error:
        why = error.strerror
    except ValueError:  # \0
        why = "no name of a file"
    if why:
        raise UserError(
            Problem("log.unreadable", f"{said}: {why}", "a log that can be read", fixes)
        )


def _writers(log: Path) -> list[int]:
    """Processes that have the log open for writing, as far as we may know: those of this user."""
    found = []
    try:
        wanted = os.path.realpath(log)
        pids = [
            name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()
        ]
    except OSError:
        return []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or it is somebody else's
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
