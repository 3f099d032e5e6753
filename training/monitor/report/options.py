"""Command line of the report: its runs and its output file."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import args, find_run, sweep_dir
from training.core.errors import Problem, UserError
from training.core.find_run import EXPERIMENTS, LATEST, RunSelector
from training.core.messages import msg
from training.core.project import WORK
from training.core.rundir import RunDir
from training.core.suggest import suggest
from training.core.sweep_dir import SweepDir

if TYPE_CHECKING:
    from training.core.contracts.run_files import SweepRecord

COMMAND = "./duet report"
FLAGS = {
    "out": args.TEXT,
    "quiet": args.SWITCH,
    "help": args.SWITCH,
}
NAMES, NAME_LENGTH = 3, 90  # of runs in a file name, characters


@dataclass
class ReportOptions:
    """A checked command line."""

    runs: list[RunDir] = field(default_factory=list)
    sweep: tuple[SweepDir, SweepRecord] | None = None  # in place of runs
    out: Path = Path()
    quiet: bool = False
    help: bool = False


def parse(argv: list[str], root: Path = WORK) -> ReportOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    options = ReportOptions(quiet="quiet" in values, help="help" in values)
    if options.help:
        return options
    _find_runs(options, line, root, problems)
    if not problems:
        options.out = (
            find_run.path_of(values["out"]).absolute()
            if values.get("out")
            else _place(options, root)
        )
        problems += _not_writable(options)
    if problems:
        raise UserError(problems)
    return options


def _find_runs(
    options: ReportOptions, line: args.Args, root: Path, problems: list[Problem]
) -> None:
    words = line.words
    if not words:
        problems.append(
            Problem(
                "run.not_given",
                msg("monitor.report.options.no_run"),
                msg("monitor.report.options.runs_allowed"),
                [" ".join(filter(None, [COMMAND, LATEST, line.flags()]))],
            )
        )
    for word in words:
        others = shlex.join(dict.fromkeys(one for one in words if one != word))
        asker = _selector(" ".join(filter(None, [others, line.flags()])))
        try:
            run = find_run.find(None if word == LATEST else word, root / EXPERIMENTS, asker)
        except UserError as error:
            if sweep_dir.at(word, root / EXPERIMENTS).exists():
                alone = _selector(line.flags())
                problems += _find_sweep(options, word, root) + find_run.several(words, alone)
            else:
                problems += [_or_latest(problem, word, asker) for problem in error.problems]
            continue
        if any(
            os.path.realpath(run.path) == os.path.realpath(other.path) for other in options.runs
        ):
            problems.append(
                Problem(
                    "run.twice",
                    msg("monitor.report.options.run_twice", name=run.name),
                    msg("monitor.report.options.once"),
                )
            )
        options.runs.append(run)


def _selector(rest: str) -> RunSelector:
    """`rest`: the other runs and flags."""
    newest = " ".join(filter(None, [COMMAND, LATEST, rest]))
    return RunSelector("RUN", f"{COMMAND} ", newest, rest)


def _find_sweep(options: ReportOptions, word: str, root: Path) -> list[Problem]:
    try:
        options.sweep = sweep_dir.find(
            word, root / EXPERIMENTS, lambda name: f"{COMMAND} {shlex.quote(name)}"
        )
    except UserError as error:  # its record is damaged
        return error.problems
    return []


def _or_latest(problem: Problem, word: str, asker: RunSelector) -> Problem:
    return (
        replace(problem, fixes=[asker.newest, *problem.fixes])
        if word != LATEST and suggest(word, [LATEST])
        else problem
    )


def _place(options: ReportOptions, root: Path) -> Path:
    if options.sweep:
        return options.sweep[0].page
    runs = options.runs
    if len(runs) == 1:
        # that of an archived run is in the cache
        return Path.cwd() / f"{runs[0].name}.html" if runs[0].is_archived else runs[0].report
    names = "_".join(run.name for run in runs)
    short = (
        len(runs) <= NAMES
        and len(names) <= NAME_LENGTH
        and all(c.isalnum() or c in "_-." for c in names)
    )
    return (
        root / EXPERIMENTS / f"comparison_{names if short else time.strftime('%Y%m%d_%H%M%S')}.html"
    )


def _not_writable(options: ReportOptions) -> list[Problem]:
    folder = options.out.parent
    if find_run.is_folder(options.out):
        there = [options.sweep[0].path] if options.sweep else [run.path for run in options.runs]
        again = shlex.join([*map(str, there), f"--out={options.out / 'report.html'}"])
        return [
            Problem(
                "output.is_folder",
                msg("monitor.report.options.out_is_folder", out=str(options.out)),
                msg("monitor.report.options.a_file"),
                [f"{COMMAND} {again}"],
            )
        ]
    if not find_run.is_folder(folder):
        fix = f"mkdir -p {shlex.quote(str(folder))}"
        return [
            Problem(
                "output.no_folder",
                msg("monitor.report.options.no_folder", folder=str(folder)),
                msg("monitor.report.options.existing_folder"),
                [fix],
            )
        ]
    return []
