"""Command line of `./duet clean`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from training.config.schema import FIELDS, kind
from training.core import args, find_run, units
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import WORK
from training.monitor.runs import facts, terms
from training.monitor.runs.facts import DAMAGED, EMPTY, LIVE, STATES
from training.monitor.runs.terms import Term

COMMAND = "./duet clean"
RUNS, CHECKPOINTS, LOGS, TRACES = "runs", "checkpoints", "logs", "traces"
PARTS = (RUNS, CHECKPOINTS, LOGS, TRACES)
LAST, BEST, NONE = "last", "best", "none"
CLEANABLE = tuple(state for state in STATES if state not in LIVE)


def _age(text: str) -> float:
    if text.strip().replace(".", "").isdecimal():  # 30 of what?
        raise ValueError(text)
    return units.read_duration(text)


FLAGS = {
    "what": args.TEXT,
    "keep": args.TEXT,
    "state": args.TEXT,
    "older_than": args.Flag(_age, msg("monitor.runs.duration"), lambda text: ["30d"]),
    "filter": args.TEXT,
    "dir": args.TEXT,
    # what a suggestion selects is listed first
    "yes": args.Flag(repeated=False),
    "dry_run": args.SWITCH,
    "json": args.SWITCH,
    "help": args.SWITCH,
}


@dataclass
class CleanOptions:
    """A checked command line. `last`: how many of the newest checkpoints stay; `best`: so does the
    one with the best evaluation."""

    dir: Path
    names: list[Term] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    states: tuple[str, ...] = ()
    older_s: float | None = None
    what: tuple[str, ...] = ()
    last: int = 1
    best: bool = False
    yes: bool = False
    json: bool = False
    help: bool = False


def parse(argv: list[str], root: Path = WORK) -> CleanOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    options = CleanOptions(
        find_run.path_of(values["dir"]) if values.get("dir") else root / find_run.EXPERIMENTS,
        older_s=values.get("older_than"),
        yes="yes" in values and "dry_run" not in values,
        json="json" in values,
        help="help" in values,
    )
    if options.help:
        return options
    known = functools.cache(lambda: facts.option_names(options.dir))
    given = [("", word) for word in line.words]
    given += [(flag, values[flag]) for flag in ("state", "filter") if values.get(flag)]
    options.states = line.choices("state", CLEANABLE)
    options.what = line.choices("what", PARTS)
    options.names, options.terms = terms.read(line, known)
    if values.get("keep"):
        problems += _keep(options, values["keep"])
        options.what = tuple({**dict.fromkeys(options.what), CHECKPOINTS: None})
    problems += [_empty(flag, text) for flag, text in given if _has_gap(text)]
    problems += _incomplete(options, line)
    if values.get("dir") and not find_run.is_folder(options.dir):
        what = msg("cli.clean.no_folder", folder=options.dir)
        problems.append(Problem("runs.no_folder", what, msg("cli.runs.folder_allowed"), [], "dir"))
    if problems:
        raise UserError(line.completed(problems, FLAGS))
    return options


def _has_gap(text: str) -> bool:
    """Whether a name or condition between commas is empty, as from a variable that is not set. It
    would select every run."""
    parts = [part.strip() for part in text.split(",")]
    empty = {term.key for term in terms.parsed(text) if term.value == ""}
    return not all(parts) or any(not _is_text(key) for key in empty)


def _is_text(key: str) -> bool:
    """Whether an empty value is one, as in `data=`: the built-in data."""
    return key not in terms.COLUMNS and (key not in FIELDS or kind(key) == "str")


def _empty(flag: str, text: str) -> Problem:
    name = f"--{flag}={text}" if flag else repr(text)
    what, allowed = msg("cli.clean.empty", given=name), msg("cli.clean.select")
    return Problem("clean.empty", what, allowed, [f"{COMMAND} --help"], flag)


def _keep(options: CleanOptions, text: str) -> list[Problem]:
    """--keep=last,best; --keep=checkpoints:3,best; --keep=none."""
    part, _, rule = text.rpartition(":")
    words = [word.strip() for word in rule.split(",") if word.strip()]
    numbers = [int(word) for word in words if args.is_whole(word)]
    known = part in ("", CHECKPOINTS) and all(
        word in (LAST, BEST, NONE) or args.is_whole(word) for word in words
    )
    if not words or not known or (NONE in words and len(words) > 1):
        return [
            Problem(
                "flag.value",
                msg("core.args.is", name="keep", text=text),
                msg("cli.clean.keep_allowed"),
                [f"--keep={LAST},{BEST}"],
                "keep",
            )
        ]
    options.best = BEST in words
    # the last one stays unless `none` is asked for
    options.last = 0 if NONE in words else max([1, *numbers])
    return []


def _incomplete(options: CleanOptions, line: args.Args) -> list[Problem]:
    """What to delete must be given, and for whole runs a condition."""
    typed = line.words or {"state", "older_than", "filter"} & line.values.keys()
    if not options.what and not line.values.get("what"):
        fixes = ["--keep=last,best", f"--what={RUNS}" if typed else f"--what={RUNS} --state=failed"]
        return [
            Problem("clean.what", msg("cli.clean.no_what"), msg("cli.clean.what_allowed"), fixes)
        ]
    chosen = options.names or options.terms or options.states or options.older_s is not None
    # a condition, or what may be one, has a problem of its own
    wrong = (typed and line.problems) or any(p.code == "flag.unknown" for p in line.problems)
    if RUNS in options.what and not chosen and not wrong:
        fixes = [f"--state={DAMAGED},{EMPTY}", f"{line.again()} NAME"]
        return [
            Problem("clean.all_runs", msg("cli.clean.all_runs"), msg("cli.clean.select"), fixes)
        ]
    return []
