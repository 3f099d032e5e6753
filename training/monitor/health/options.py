"""Command line of `./duet inspect`, and the run that it selects."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from training.core import args, find_run, project
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.rundir import RunDir

COMMAND = "./duet inspect"
ASKER = find_run.RunSelector("RUN", f"{COMMAND} ", COMMAND)
EVERY_S = 10.0
FLAGS = {
    "pid": args.process_id(),
    "run": args.TEXT,
    "json": args.SWITCH,
    "watch": args.seconds(1.0, 3600.0, EVERY_S, bare=EVERY_S),
    "help": args.SWITCH,
}


@dataclass(frozen=True)
class HealthOptions:
    """A checked command line; `run` as typed, "" for the newest."""

    run: str = ""
    pid: int | None = None
    json: bool = False
    every_s: float | None = None  # --watch: interval
    help: bool = False


def parse(argv: list[str]) -> HealthOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    named = [*([values["run"]] if values.get("run") else []), *line.words]
    pid = values.get("pid")
    problems += find_run.several(named, ASKER)
    if len(named) == 1 and pid is not None:
        fixes = [f"{COMMAND} {shlex.quote(named[0])}", f"{COMMAND} --pid={pid}"]
        problems.append(
            Problem(
                "flag.contradiction",
                msg("monitor.option.run_and_pid", run=named[0]),
                msg("monitor.option.one_of_them"),
                fixes,
            )
        )
    if problems and "help" not in values:
        raise UserError(problems)
    run = "" if named == [find_run.LATEST] else "".join(named[:1])
    return HealthOptions(run, pid, "json" in values, values.get("watch"), "help" in values)


def find(wanted: str, root: Path = project.WORK) -> RunDir:
    """The run of that name or folder; "": the newest. Raises UserError."""
    try:
        return find_run.find(wanted or None, root / find_run.EXPERIMENTS, ASKER)
    except UserError as error:
        if wanted.isdecimal():
            error.problems[0].fixes.insert(0, f"{COMMAND} --pid={wanted}")
        raise
