"""The command line of a sweep: its own options; all others are flags of the runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.config import flags, resolve
from training.core import args, find_run, sweep_dir
from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import WORK
from training.core.sweep_dir import COMMAND
from training.plan.cli_args import MAX_RANKS

MOST_JOBS = 1024
AUTO = "auto"


def _jobs(text: str) -> int | None:
    """None: auto."""
    if text == AUTO:
        return None
    if not args.is_whole(text) or not 1 <= int(text) <= MOST_JOBS:
        raise ValueError(text)
    return int(text)


FLAGS = {
    "list": args.TEXT,
    "name": args.TEXT,
    "jobs": args.Flag(_jobs, msg("cli.sweep.jobs_allowed", most=MOST_JOBS), lambda text: [AUTO]),
    "gpus_per_run": args.whole(1, MAX_RANKS, 1),
    "fail_fast": args.SWITCH,
    "dry_run": args.SWITCH,
    "yes": args.SWITCH,
    "resume": args.TEXT,
    "show": args.TEXT,
    "ascii": args.SWITCH,
    "help": args.SWITCH,
}
ALONE = ("resume", "show")  # take the runs from an existing sweep
WITH_RESUME = ("out_dir", "log_dir")


@dataclass
class SweepOptions:
    """The checked options; `rest`: words of the runs, as typed. `jobs`: None: one for each set of
    GPUs."""

    listed: str = ""  # --list
    name: str = ""
    jobs: int | None = None
    gpus_per_run: int = 1
    fail_fast: bool = False
    dry_run: bool = False
    yes: bool = False
    resume: str = ""
    show: str = ""
    ascii: bool = False
    help: bool = False
    rest: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse(argv: list[str], environ: Mapping[str, str] = os.environ) -> SweepOptions:
    """Collects problems instead of raising: they are reported with those of the runs."""
    line = args.parse(argv, FLAGS, COMMAND, lambda word: flags.own_option(word, FLAGS, {}))
    wrong = {problem.field for problem in line.problems}
    values = {name: value for name, value in line.values.items() if name not in wrong}
    values["listed"] = values.pop("list", "")
    options = SweepOptions(**values, rest=line.words, problems=line.problems)
    if not options.help:
        options.problems += _conflicts(options, line.values, environ)
    return options


def _conflicts(
    options: SweepOptions, given: Mapping[str, object], environ: Mapping[str, str]
) -> list[Problem]:
    """--resume and --show name a sweep with runs of its own."""
    flag = next((name for name in ALONE if getattr(options, name)), "")
    if not flag:
        return []
    own = {flag, "ascii", *(("jobs", "fail_fast") if flag == "resume" else ())}
    line = flags.parse(options.rest)
    typed = [f"--{name}" for name in given if name not in own]
    typed += [typed for name, (_, typed) in line.flags.items() if name not in WITH_RESUME]
    typed += [*line.positional, *(one.typed for one in line.unknown)]
    if not typed:
        return []
    name = getattr(options, flag)
    return [
        Problem(
            "sweep.resume_with_grid",
            msg("cli.sweep.resume_with_grid", flag=flag, name=name, typed=", ".join(typed)),
            msg("cli.sweep.resume_allowed", flag=flag),
            [sweep_dir.command(flag, name, experiments(options, environ))],
            flag,
        )
    ]


def experiments(options: SweepOptions, environ: Mapping[str, str]) -> Path:
    """The folder of the runs for --resume and --show, which read no config."""
    line = flags.parse(options.rest)
    given = line.flags.get("out_dir", ("", ""))[0] or environ.get(f"{resolve.PREFIX}OUT_DIR", "")
    return find_run.path_of(given).absolute() if given else WORK / find_run.EXPERIMENTS


def own_words(options: SweepOptions) -> list[str]:
    """The sweep's own options as typed."""
    words = [f"--list={options.listed}"] if options.listed else []
    words += [f"--name={options.name}"] if options.name else []
    words += [f"--jobs={options.jobs}"] if options.jobs else []
    words += [f"--gpus_per_run={options.gpus_per_run}"] if options.gpus_per_run != 1 else []
    switches = ("fail_fast", "ascii", "yes", "dry_run")
    return words + [f"--{name}" for name in switches if getattr(options, name)]
