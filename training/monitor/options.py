"""Command line of the monitor, and the run that it selects."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from training.core import args, console_run, find_run, project
from training.core.errors import Problem, UserError
from training.core.find_run import FIRST_RUN, RunSelector
from training.core.messages import msg
from training.core.rundir import RunDir

COMMAND = "./monitor_training.sh"
ASKER = RunSelector("--run", f"{COMMAND} --run=", COMMAND)
FLAGS = {
    "log": args.TEXT,
    "run": args.TEXT,
    "all": args.SWITCH,
    "interval": args.seconds(0.2, 3600.0, 3),
    "once": args.SWITCH,
    "json": args.SWITCH,
    "follow-exit": args.SWITCH,
    "prometheus": args.whole(1, 65535, 9464, msg("monitor.option.port")),
    "ascii": args.SWITCH,
    "help": args.SWITCH,
}


@dataclass
class MonitorOptions:
    """A checked command line; `run` and `log` as typed."""

    log: str | None = None
    run: str | None = None
    all: bool = False
    interval_s: float = 3.0
    once: bool = False
    json: bool = False
    follow_exit: bool = False
    prometheus: int | None = None  # a port
    ascii: bool = False
    help: bool = False


def parse(argv: list[str]) -> MonitorOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND, positional=False)
    values = {name: value for name, value in line.values.items() if value is not None}
    interval_s = values.pop("interval", MonitorOptions.interval_s)
    options = MonitorOptions(**values, interval_s=interval_s)
    archived = [word for word in line.words if find_run.is_archive(Path(word))]
    if len(archived) == len(line.words) == 1 and options.run is None:
        options.run = line.words.pop()
    problems = [*line.problems, *map(_without_flag, line.words), *_contradictions(options)]
    if problems and not options.help:
        raise UserError(problems)
    return options


def _contradictions(options: MonitorOptions) -> list[Problem]:
    problems = []
    named = [(n, v) for n, v in (("run", options.run), ("log", options.log)) if v is not None]
    if len(named) == 2:
        problems.append(
            Problem(
                "flag.contradiction",
                msg("monitor.option.log_and_run"),
                msg("monitor.option.one_of_them"),
                [f"{COMMAND} --{n}={shlex.quote(v)}" for n, v in named],
            )
        )
    if options.all and named:
        fixes = [f"{COMMAND} --all", *(f"{COMMAND} --{n}={shlex.quote(v)}" for n, v in named)]
        problems.append(
            Problem(
                "flag.contradiction",
                msg("monitor.option.all_and_one", option=named[0][0]),
                msg("monitor.option.one_of_them"),
                fixes,
            )
        )
    if options.follow_exit and (options.once or options.json or options.all):
        other = "once" if options.once else "json" if options.json else "all"
        fixes = [f"{COMMAND} --follow-exit", f"{COMMAND} --{other}"]
        problems.append(
            Problem(
                "flag.contradiction",
                msg("monitor.option.follow_exit_all")
                if options.all
                else msg("monitor.option.follow_exit", option=other),
                msg("monitor.option.one_of_them"),
                fixes,
            )
        )
    if options.prometheus and (options.once or options.json):
        other = "once" if options.once else "json"
        fixes = [f"{COMMAND} --prometheus={options.prometheus}", f"{COMMAND} --{other}"]
        problems.append(
            Problem(
                "flag.contradiction",
                msg("monitor.option.prometheus", option=other),
                msg("monitor.option.one_of_them"),
                fixes,
            )
        )
    return problems


def _without_flag(word: str) -> Problem:
    """Problem with an argument that lacks --run= or --log=."""
    experiments = project.WORK / find_run.EXPERIMENTS
    what, allowed = msg("monitor.option.no_flag", word=word), msg("monitor.option.run_or_log")
    if os.path.isfile(word):  # noqa: PTH113 – Path.is_file raises for a name that no file system takes
        return Problem("flag.positional", what, allowed, [f"{COMMAND} --log={shlex.quote(word)}"])
    try:
        find_run.find(None if word == find_run.LATEST else word, experiments, ASKER)
    except UserError as error:  # no run of that name: suggest similar ones
        wrong = error.problems[0]
        return Problem(
            "flag.positional",
            msg("monitor.option.neither", word=word),
            msg("monitor.option.run_or_log_of", known=wrong.allowed),
            wrong.fixes,
        )
    return Problem("flag.positional", what, allowed, [f"{COMMAND} --run={shlex.quote(word)}"])


def find(options: MonitorOptions, root: Path) -> tuple[RunDir | None, Path | None]:
    """(run, log): the log only if --log was given; (None, log) for a log of another program. Raises
    UserError."""
    experiments = root / find_run.EXPERIMENTS
    if options.run is not None:
        named = None if options.run == find_run.LATEST else options.run
        return find_run.find(named, experiments, ASKER), None
    if options.log is not None:
        log = find_run.path_of(options.log)
        return _by_log(log, experiments), log.absolute()
    return find_run.find(None, experiments, ASKER), None


def _by_log(log: Path, experiments: Path) -> RunDir | None:
    """The run of a log (console_run.of); None for the log of another program, and if the run has
    been removed or started again."""
    allowed = msg("monitor.option.a_log")
    latest = f"{COMMAND}   # the newest run" if find_run.newest(experiments) else FIRST_RUN
    if not os.path.exists(log):
        near = _newest_log(log.parent)
        raise UserError(
            Problem(
                "log.missing",
                msg("monitor.log.given", log=str(log), why=msg("monitor.log.missing")),
                allowed,
                [*(f"{COMMAND} --log={shlex.quote(str(n))}" for n in near), latest],
            )
        )
    if not log.is_file():
        fixes = [f"{COMMAND} --run={shlex.quote(str(log))}"] if find_run.is_run(RunDir(log)) else []
        raise UserError(
            Problem(
                "log.not_a_file",
                msg("monitor.log.given", log=str(log), why=msg("monitor.log.not_a_file")),
                allowed,
                [*fixes, latest],
            )
        )
    if find_run.is_run(RunDir(log.parent)):  # a file of a run
        return RunDir(log.parent)
    try:
        return console_run.of(log, experiments)
    except OSError as error:
        raise UserError(
            Problem(
                "log.unreadable",
                msg("monitor.log.given", log=str(log), why=error.strerror),
                allowed,
                [f"chmod u+r {shlex.quote(str(log))}"],
            )
        ) from None


def _newest_log(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("*.log") if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):  # a link that leads nowhere
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)[-1:]]
