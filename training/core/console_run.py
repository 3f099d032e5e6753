"""The run that the console log of a launcher is of."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from training.core import log, rundir
from training.core.jsonl import dig, number
from training.core.rundir import RunDir

# As training.core.log writes a message of Duet, and training.plan.training_plan this one.
OF_DUET = r"^\[INFO\] [\d: -]{19} "
_NAMES = "run directory: "
RUN_DIRECTORY = OF_DUET + _NAMES
_LINE = re.compile(rf"{RUN_DIRECTORY}.".encode())
_SEARCHED_BYTES = 1 << 20  # at the beginning, where a launcher names its run, and at the end
_ANNOUNCED_S = 60.0  # at most between the plan of a start and this line


class Start(NamedTuple):
    """A start of a run, as its launcher's console names it."""

    time: str  # local
    folder: Path  # of the run


def of(path: Path, experiments: Path) -> RunDir | None:
    """The run of a console log, also if it was moved to `experiments`. None if the last start in
    the log is not the one that the run has now: a log of another program, of an earlier start, or
    of another run with this name. Raises OSError."""
    if not (start := last_start(path)):
        return None
    for run in (RunDir(path.parent / start.folder), RunDir(experiments / start.folder.name)):
        plan = rundir.read_json(run.plan)
        if plan and (_is_log_file(path, plan) or _announces(start, plan)):
            return run
    return None


def last_start(path: Path) -> Start | None:
    """The last one in a console log. Raises OSError."""
    content = _ends(path)
    end = len(content)
    while (place := content.rfind(_NAMES.encode(), 0, end)) >= 0:
        begin, stop = content.rfind(b"\n", 0, place) + 1, content.find(b"\n", place)
        line = content[begin : stop if stop >= 0 else len(content)].rstrip()
        if _LINE.match(line):
            clock, _, folder = os.fsdecode(line).removeprefix("[INFO] ").partition(f" {_NAMES}")
            return Start(clock, Path(folder))
        end = begin
    return None


def _ends(path: Path) -> bytes:
    """Beginning and end of a file."""
    with path.open("rb") as file:
        begin = file.read(_SEARCHED_BYTES)
        size = os.fstat(file.fileno()).st_size
        if size <= len(begin):
            return begin
        file.seek(max(len(begin), size - _SEARCHED_BYTES))
        return begin + b"\n" + file.read()


def _is_log_file(path: Path, plan: Mapping[str, object]) -> bool:
    """Also of a copy: its name has the time of the start."""
    return Path(str(plan.get("log_file", ""))).name == path.name


def _announces(start: Start, plan: Mapping[str, object]) -> bool:
    """Whether this is the start with that plan, in a copy of its console."""
    planned = number(plan.get("created")) or 0.0
    written = number(dig(plan, "starter", "started")) or planned
    with contextlib.suppress(ValueError, OverflowError):
        announced = time.mktime(time.strptime(start.time, log.TIME))  # in whole seconds
        return int(planned) <= announced < written + _ANNOUNCED_S
    return False
