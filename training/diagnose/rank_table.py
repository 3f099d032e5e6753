"""The table of failed ranks at the end of a log: torchrun's, or a line for each of another
launcher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from training.core.console_run import OF_DUET, RUN_DIRECTORY
from training.diagnose.log_line import LogLine

REPORTED = re.compile(r"rank {1,10}: (\d+) \(local_rank: (\d+)\)")
TIME = re.compile(r" {1,10}time {1,10}: \d")
# Other launchers have no table, but a line: Composer, Paddle, Lightning, mp.spawn. A process of
# mp.spawn that ends with 1 may have raised an exception whose text is lost.
REPORTS = re.compile(
    r"\bRank (?P<rank>\d+) crashed with exit code (?P<status>-?\d+)"
    r"|trainer process with rank=\[(?P<paddle>\d+)\] was aborted"
    r"|\[rank: (?P<lightning>\d+)\] Child process with PID (?P<pid>\d+) "
    r"terminated with code (?P<code>-?\d+)"
    r"|\bprocess (?P<spawned>\d+) terminated with exit code (?P<left>[2-9]|\d{2,})\b"
)
# srun's lines about the end of tasks, which are ranks unless srun starts a launcher on each
# machine. `alone`: a task with a number as status.
TASKS = re.compile(
    r"error: \S+: tasks? (?:(?P<alone>\d+): Exited with exit code (?P<left>[1-9]\d*)"
    r"|[\d,\-\[\]]+: )"
)
# Lines that only a launcher of several ranks prints: torchrun in any version, DeepSpeed.
LAUNCHER = re.compile(
    r"torch/distributed/(?:elastic|launcher|run)\b\S*:\d+\] |:torch\.distributed\.(?:elastic|run)\b"
    r"|torch\.distributed\.(?:elastic|run|launcher)\S*: \[(?:ERROR|WARNING|INFO)\]"
    r"|ChildFailedError|Root Cause \(first observed|\[launch\.py:\d+:"
)
# Duet prints this line in its launcher, and in rank 0 where another one has started the ranks
# (training.host.placement).
OF_DUET_ITSELF = re.compile(RUN_DIRECTORY)
STARTED_AS_RANK = re.compile(rf"{OF_DUET}(?:mode |模式：)rank \d")
NOT_STARTED = ("126", "127")  # exit statuses of a shell
STATUS = re.compile(r"exitcode {1,10}: (-?\d+)(?: \(pid: (\d+)\))?")


@dataclass
class Reported:
    """A rank in torchrun's own table, or in the report of another launcher."""

    rank: int
    local: int
    status: int | None
    pid: int | None
    line: LogLine
    root: bool
    task: bool = False  # of srun


def read(lines: Sequence[LogLine]) -> list[Reported]:
    found: list[Reported] = []
    root = False
    for index, line in enumerate(lines):
        if "Root Cause" in line.text:
            root = True
        elif "Other Failures" in line.text:
            root = False
        elif rank := REPORTED.search(line.text):
            ended = next(
                (m for after in lines[index : index + 3] if (m := STATUS.search(after.text))), None
            )
            status, pid = (
                (int(ended[1]), int(ended[2]) if ended[2] else None) if ended else (None, None)
            )
            found.append(Reported(int(rank[1]), int(rank[2]), status, pid, line, root))
        elif one := REPORTS.search(line.text):
            number = int(one["rank"] or one["paddle"] or one["lightning"] or one["spawned"])
            code = one["status"] or one["code"] or one["left"]
            found.append(
                Reported(
                    number,
                    number,
                    int(code) if code else None,
                    int(one["pid"]) if one["pid"] else None,
                    line,
                    not any(r.root for r in found),
                )
            )
    if not found and (task := _first_task(lines)):
        found.append(task)
    return found


def _first_task(lines: Sequence[LogLine]) -> Reported | None:
    """srun's task that ended first, if it ended alone, with a status of a rank."""
    line = next(filter(names_task, lines), None)
    ended = TASKS.search(line.text) if line else None
    if line is None or ended is None or not ended["alone"] or ended["left"] in NOT_STARTED:
        return None
    number = int(ended["alone"])
    return Reported(number, number, int(ended["left"]), None, line, root=True, task=True)


def names_task(line: LogLine) -> bool:
    return TASKS.search(line.text) is not None


def of_launcher(lines: Sequence[LogLine]) -> bool:
    """Whether a launcher of several ranks has printed one of them."""
    texts = [line.text for line in lines]
    by_duet = any(map(OF_DUET_ITSELF.match, texts)) and not any(map(STARTED_AS_RANK.match, texts))
    return by_duet or any(map(LAUNCHER.search, texts))
