"""A log that no launcher of ours made, as the dict that state.Watch returns of a run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import time
from pathlib import Path

from training.errors import Problem, UserError
from training.monitor import alerts, machine
from training.monitor.draw import clock, duration
from training.monitor.foreign import ending, lines, names
from training.monitor.foreign.names import BAR
from training.monitor.foreign.tally import Tally
from training.monitor.foreign.text import Piece, Text
from training.monitor.state import CURVE_POINTS, FAILED, FINISHED, GPU_PATIENCE_S, LOG_LINES, RUNNING, SCHEMA_VERSION, State

SILENT = "silent"  # nothing comes any more, and nothing says how it ended
RECENT_S, INTERVALS = 60.0, 5  # written to so lately, or within so many of its usual intervals: it runs
NEAR = 5  # segments from the end of the log
UNKNOWN = "no progress lines recognised"


class LogWatch:
    """Looks at one log again and again; a look costs only what is new. Raises UserError for what can not be read."""

    def __init__(self, log: Path, shared: machine.Shared | None = None) -> None:
        _readable(log)
        self.log = log
        self._text, self._tally = Text(log), Tally()
        self._machine = shared or machine.Shared()
        self._looked, self._newest = False, -1
        self._last_step: float | None = None  # when the newest line of progress was seen to be written

    def read(self, patience_s: float = GPU_PATIENCE_S) -> State:
        """One look; `patience_s`: how long the GPU driver may keep it waiting."""
        now = time.time()
        self._machine.ask()
        # Processes first: what they wrote before they ended is then certainly in what is read below.
        writers = _writers(self.log)
        grown = self._read_log(now)
        state, reason = self._judge(writers, grown, now)
        tally, text = self._tally, self._text
        gpus, host = self._machine.answer(patience_s, self.log.parent)
        over, curve = tally.curve(CURVE_POINTS)
        seen: State = {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": now,
            "run": {
                "kind": "log",
                "source": self._source(),
                "name": self.log.name,
                "dir": None,
                "script": None,
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
                "ended_unix_s": text.mtime if state != RUNNING and text.there else None,
                "supervisor_pid": None,
                "supervisor_alive": None,
            },
            "progress": self._progress(state),
            "training": tally.training() | {"last_step_unix_s": self._last_step},
            "loss_curve": {"over": over, "points": [{"step": s, "loss": v} for s, v in curve]},
            "speed_curve": {"points": []},
            "ranks": [],
            "gpus": machine.gpu_records(gpus, set(writers), set()),
            "gpus_reason": gpus.reason,
            "system": host,
            "warnings": [],
            "log": {"file": str(self.log), "last_lines": text.last_lines(LOG_LINES), "read_whole": text.whole},
            "checkpoint": None,
            "summary": None,
            "failure": None,
        }
        return seen | {"alerts": alerts.of(seen)}

    def _read_log(self, now: float) -> bool:
        """Whether there is anything new, on a look that is not the first."""
        before, looked = self._text.size, self._looked
        fresh, pieces = self._text.read(now)
        if fresh:
            self._tally.clear()
            self._last_step, self._newest, before = None, -1, 0
        for piece in pieces:
            self._read_piece(piece)
        self._note_last_step(pieces)
        self._looked = True
        return looked and self._text.there and self._text.size > before

    def _source(self) -> str | None:
        """The framework that its lines tell; where only a bar is known, what it says around them."""
        found = self._tally.source
        return found if found not in (None, BAR) else names.source_around(self._text.start + "\n" + self._text.end) or found

    def _read_piece(self, piece: Piece) -> None:
        """Of a place in the middle one line of progress is enough, with the bar that stands right after it."""
        if piece.gap:
            self._tally.gap()
        told, columns = False, lines.columns(self._text.start)
        for offset, raw in piece.segments:
            fact = lines.parse(lines.of_row(raw, columns) if columns else raw, offset)
            if fact is None:
                continue
            if piece.brief and told and not fact.bar:
                break
            self._tally.add(fact)
            told |= fact.tells
            if piece.brief and told and fact.bar:
                break

    def _note_last_step(self, pieces: list[Piece]) -> None:
        """When the newest line of progress was written: now, when others came, or by the file's time, when it stands at its end."""
        newest, last = self._tally.newest_offset, [offset for piece in pieces[-1:] for offset, _ in piece.segments][-NEAR:]
        if newest > self._newest and (self._newest >= 0 or (last and newest >= last[0])):
            self._last_step = self._text.mtime
        self._newest = newest

    def _judge(self, writers: list[int], grown: bool, now: float) -> tuple[str, str | None]:
        """The state, and why where that is not plain."""
        text, tally = self._text, self._tally
        if not text.there:
            return SILENT, "the log is gone"
        how, why = (None, None) if text.binary else ending.read(text.end)
        if how and not writers:
            return (FINISHED, None) if how == ending.FINISHED else (FAILED, why)
        unknown = "it is no text" if text.binary else "it is empty" if not text.size else None if tally.facts else UNKNOWN
        if writers or grown or -RECENT_S < now - text.mtime < max(RECENT_S, INTERVALS * (tally.interval_s() or 0)):
            return RUNNING, f"{why}; but a process still writes to the log (pid {writers[0]})" if why else unknown
        since = f"nothing new since {clock(text.mtime, '%Y-%m-%d %H:%M:%S')}, {duration(now - text.mtime)} ago"
        return SILENT, f"{unknown}; {since}" if unknown else f"{since}, and nothing says how it ended"

    def _progress(self, state: str) -> State:
        tally, last = self._tally, self._tally.last
        step, total = (last.step, tally.total) if last else (None, tally.total)
        percent = last.percent if last else None
        if percent is None and step is not None and total:
            percent = min(100.0, 100 * step / total)
        return {
            "scope": "epoch" if tally.within_epoch else "run",  # what steps, time and time left are those of
            "step": step,
            "total_steps": total,
            "percent": percent,
            "epoch": int(tally.epoch) if tally.epoch is not None and float(tally.epoch).is_integer() else tally.epoch,
            "epochs": tally.epochs,
            "elapsed_s": tally.elapsed_s(),
            "eta_s": tally.eta_s() if state == RUNNING else None,
        }


def _readable(log: Path) -> None:
    said, why, fixes = f"--log is {str(log)!r}", None, []
    try:
        kind = log.stat().st_mode
        if stat.S_ISDIR(kind):
            why, fixes = "a folder", [f"./monitor_training.sh --run={shlex.quote(str(log))}   (if it is a run directory)"]
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
        raise UserError(Problem(f"{said}: {why}", "a log that can be read", fixes))


def _writers(log: Path) -> list[int]:
    """Processes that have the log open for writing, as far as we may know: those of this user."""
    found = []
    try:
        wanted = os.path.realpath(log)
        pids = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    except OSError:
        return []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or it is somebody else's
            folder = f"/proc/{pid}/fd"
            if any(os.readlink(f"{folder}/{fd}") == wanted and _writes(pid, fd) for fd in os.listdir(folder)):  # noqa: PTH115  it is fast
                found.append(int(pid))
    return sorted(found)


def _writes(pid: str, fd: str) -> bool:
    flags = re.search(r"^flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{fd}").read_text(), re.M)
    return bool(flags) and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY  # type: ignore[index]
