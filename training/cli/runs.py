"""List the runs in experiments/, the newest first: state, progress, best loss,
speed, size, and the settings in which they differ.

Usage: ./duet runs [NAME…] [--state=STATE,…] [--filter=TERM,…] [--sort=COLUMN]

  NAME           only runs of this name; * and ? are wildcards. A file of
                 `./duet archive` is listed as a run
  --state=STATE  starting, running, finished, stopped, failed, died, damaged,
                 empty, foreign
  --filter=TERM  only runs for which all terms hold: depth=12, "loss<3",
                 "age>2d", "size>1GB"; any column, field, or option
                 of a task file
  --sort=COLUMN  name, state, task, step, loss, speed, age, time, size, a field
                 or an option, smallest first; --sort=-loss: largest first
  --dir=DIR      default: experiments/
  --json         print one JSON object
  --ascii        no Unicode characters

All runs live on one screen: ./duet monitor --all
Exit codes: 0 also if no run is listed; 2 invalid option or folder.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path

from training.core import args, find_run, log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import WORK, typed
from training.host import program
from training.monitor import print_table, term_text
from training.monitor.runs import facts, table, terms
from training.monitor.runs.facts import RunFacts
from training.monitor.runs.terms import Term

COMMAND = "./duet runs"
ASKER = find_run.RunSelector("NAME", f"{COMMAND} ", COMMAND)
FLAGS = {
    "state": args.TEXT,
    "filter": args.TEXT,
    "sort": args.TEXT,
    "dir": args.TEXT,
    "json": args.SWITCH,
    "ascii": args.SWITCH,
    "help": args.SWITCH,
}


@dataclass
class RunsOptions:
    """A checked command line. `names`: of which one must match; `archives`: files to list."""

    dir: Path
    names: list[Term] = field(default_factory=list)
    archives: list[Path] = field(default_factory=list)
    states: tuple[str, ...] = ()
    terms: list[Term] = field(default_factory=list)
    sort: str = ""
    json: bool = False
    ascii: bool = False
    help: bool = False


def options(argv: list[str], root: Path = WORK) -> RunsOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    chosen = RunsOptions(
        find_run.path_of(values["dir"]) if values.get("dir") else root / find_run.EXPERIMENTS,
        json="json" in values,
        ascii="ascii" in values,
        help="help" in values,
    )
    if chosen.help:
        return chosen
    archives = [word for word in line.words if find_run.is_archive(Path(word))]
    chosen.archives = [Path(word) for word in archives]
    known = functools.cache(lambda: _option_names(chosen))
    chosen.states = line.choices("state", facts.STATES)
    chosen.sort = terms.read_sort(line, known)
    chosen.names, chosen.terms = terms.read(line, known, archives)
    if values.get("dir") and not find_run.is_folder(chosen.dir):
        problems.append(
            Problem(
                "runs.no_folder",
                msg("cli.runs.no_folder", folder=chosen.dir),
                msg("cli.runs.folder_allowed"),
                [line.again(dir=None)],
                "dir",
            )
        )
    if problems:
        raise UserError(line.completed(problems, FLAGS))
    return chosen


def select(runs: list[RunFacts], names: list[Term], conditions: list[Term]) -> list[RunFacts]:
    """The runs that match one of the names, if any are given, and all conditions."""
    return [
        run
        for run in runs
        if (not names or any(name.holds(run) for name in names))
        and all(term.holds(run) for term in conditions)
    ]


def main(argv: list[str]) -> int:
    try:
        chosen = options(argv)
        if chosen.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        there = _read(chosen)
        runs = select(there, chosen.names, chosen.terms)
        runs = [run for run in runs if not chosen.states or run.state in chosen.states]
        if chosen.sort:
            runs = terms.sort(runs, chosen.sort)
        if chosen.json:
            print(facts.as_json(runs))
        else:
            _print(runs, len(there), chosen)
    except UserError as error:
        log.report(error, closing=msg("cli.runs.nothing_listed"))
        return int(error.code)
    return int(Exit.DONE)


def _option_names(chosen: RunsOptions) -> set[str]:
    """Options that the runs have which can be listed. Raises UserError."""
    archived = (name for run in _archived(chosen) for name in run.config)
    return facts.option_names(chosen.dir).union(archived)


def _archived(chosen: RunsOptions) -> list[RunFacts]:
    """Raises UserError."""
    return [
        facts.read(find_run.find(str(file), chosen.dir, ASKER).path) for file in chosen.archives
    ]


def _read(chosen: RunsOptions) -> list[RunFacts]:
    """Raises UserError."""
    archived = _archived(chosen)
    if chosen.archives and not chosen.names:
        return archived
    try:
        return archived + facts.read_all(chosen.dir)
    except FileNotFoundError:  # before the first run
        return archived
    except OSError as error:
        what = msg("cli.runs.unreadable", folder=chosen.dir, error=error.strerror)
        raise UserError(Problem("runs.no_folder", what, msg("cli.runs.folder_allowed"))) from None


def _print(runs: list[RunFacts], there: int, chosen: RunsOptions) -> None:
    if not runs:
        print(
            msg("cli.runs.none_of", count=there, folder=chosen.dir)
            if there
            else msg("cli.runs.none", folder=chosen.dir, command=typed(find_run.FIRST_RUN))
        )
        return
    width = print_table.columns()
    print_table.print_lines(table.lines(runs, width), width, ascii_only=chosen.ascii)
    foot = table.footer(runs, there)
    print(term_text.to_ascii(foot) if print_table.in_ascii(chosen.ascii) else foot)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))
