"""The command line, and which run it means."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from training.core import find_run, project
from training.core.errors import Problem, UserError
from training.core.rundir import RunDir

COMMAND = "./duet inspect"
ASKER = find_run.RunSelector("RUN", f"{COMMAND} ", COMMAND)
EVERY_S, EVERY_RANGE_S = 10.0, (1.0, 3600.0)
FLAGS = ("--pid=PID", "--json", "--watch[=SECONDS]", "--help")
TAKES_VALUE = {"pid": True, "run": True, "json": False, "watch": True, "help": False}


@dataclass(frozen=True)
class HealthOptions:
    """A checked command line; `run` as typed, "" for the newest."""

    run: str = ""
    pid: int | None = None
    json: bool = False
    every_s: float | None = None  # again and again
    help: bool = False


def parse(argv: list[str]) -> HealthOptions:
    """Raises UserError with all problems at once."""
    options, problems, rest, named = HealthOptions(), list[Problem](), list(argv), list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--pid":
            value = value if equals or not rest else rest.pop(0)
            if value.isascii() and value.isdecimal() and 0 < int(value) < 1 << 31:
                options = replace(options, pid=int(value))
            else:
                allowed = "the number of a process of the training"
                problems.append(Problem(f"--pid is {value!r}", allowed, ["pgrep -af python   # all Python processes, with their pids"]))
        elif name == "--watch":
            seconds = _seconds(value) if equals else EVERY_S
            if seconds is None:
                allowed = f"seconds from {EVERY_RANGE_S[0]:g} to {EVERY_RANGE_S[1]:g}"
                problems.append(Problem(f"--watch is {value!r}", allowed, [f"{COMMAND} --watch={EVERY_S:g}"]))
            options = replace(options, every_s=seconds)
        elif word == "--json":
            options = replace(options, json=True)
        elif word in ("-h", "--help"):
            options = replace(options, help=True)
        elif name == "--run" and equals:
            named.append(value)
        elif word.startswith("-"):
            from training.config.flags import unknown_flag  # only when something is wrong

            problems.append(replace(unknown_flag(COMMAND, name, equals + value, TAKES_VALUE), allowed=", ".join(FLAGS)))
        else:
            named.append(word)
    if len(named) > 1:
        fixes = [f"{COMMAND} {shlex.quote(run)}" for run in named]
        problems.append(Problem(f"{len(named)} runs are given: {', '.join(map(repr, named))}", "one of them", fixes))
    elif named and options.pid is not None:
        fixes = [f"{COMMAND} {shlex.quote(named[0])}", f"{COMMAND} --pid={options.pid}"]
        problems.append(Problem(f"both a run ({named[0]!r}) and --pid are given", "one of them", fixes))
    if problems and not options.help:
        raise UserError(problems)
    return replace(options, run="" if named == [find_run.LATEST] else "".join(named))


def _seconds(value: str) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if EVERY_RANGE_S[0] <= seconds <= EVERY_RANGE_S[1] else None


def find(wanted: str, root: Path = project.WORK) -> RunDir:
    """The run of that name or folder; "": the newest. Raises UserError."""
    try:
        return find_run.find(wanted or None, root / find_run.EXPERIMENTS, ASKER)
    except UserError as error:
        if wanted.isdecimal():
            error.problems[0].fixes.insert(0, f"{COMMAND} --pid={wanted}")
        raise
