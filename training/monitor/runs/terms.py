"""Filters and order of runs: `state=failed`, `depth=12`, `loss<3`, `age>2d`, or a name with
wildcards."""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from training.core import args, units
from training.core.errors import Problem
from training.core.messages import msg
from training.core.suggest import suggest
from training.monitor.run_settings import ARGS, SCRIPT
from training.monitor.runs.facts import STATES, RunFacts

_TERM = r"([A-Za-z_][\w.-]*)\s*(<=|>=|!=|=|<|>)\s*((?s:.*))"  # compiled at its first use
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TEXT = ("=", "!=")
COLUMNS: dict[str, Callable[[RunFacts], object]] = {
    "name": lambda run: run.name,
    "state": lambda run: run.state,
    "task": lambda run: run.task,
    "step": lambda run: run.step,
    "loss": lambda run: run.loss,
    "speed": lambda run: run.speed,
    "age": lambda run: run.age_s,
    "time": lambda run: run.seconds,
    "size": lambda run: run.bytes,
}
WORDS = ("name", "state", "task")
FILTER = "filter"  # the flag
# Names of the options that the runs have, such as those of a user's task file. Called only for a
# name that is neither a column nor a field, since all plans are read for it.
Options = Callable[[], Collection[str]]
_READ = {"age": units.read_duration, "time": units.read_duration, "size": units.read_size}


@dataclass(frozen=True)
class Term:
    """One condition. `compare`: '' for a name with wildcards in `value`."""

    key: str
    compare: str
    value: str

    def holds(self, run: RunFacts) -> bool:
        if not self.compare:
            return fnmatch.fnmatchcase(run.name, self.value)
        found = value_of(run, self.key)
        if found is None:
            return False
        wanted = number(self.value, self.key)
        if wanted is not None and isinstance(found, (int, float)) and not isinstance(found, bool):
            return _COMPARE[self.compare](found, wanted)
        shown = str(found).lower() if isinstance(found, bool) else str(found)
        same = fnmatch.fnmatchcase(shown, self.value)
        return same if self.compare == "=" else self.compare == "!=" and not same


def value_of(run: RunFacts, key: str) -> object:
    """A column, or a field of the configuration; None: unknown."""
    return COLUMNS[key](run) if key in COLUMNS else run.config.get(key)


def number(text: str, key: str) -> float | None:
    """The number that a term compares with; None for a word."""
    try:
        value = _READ.get(key, float)(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parsed(text: str) -> list[Term]:
    """The names and conditions of a text, separated by commas."""
    return [_term(part) for part in _parts(text)]


def read(
    line: args.Args, options: Options, others: Collection[str] = ()
) -> tuple[list[Term], list[Term]]:
    """The names and the conditions of a command line; these need no --filter. `others`: words that
    are neither. Adds the problems to the line, and corrects its words for suggestions."""
    texts: dict[int | str, str] = {n: w for n, w in enumerate(line.words) if w not in others}
    names = [term for text in texts.values() for term in parsed(text)]
    conditions = [term for term in names if term.compare]
    texts[FILTER] = line.values.get(FILTER) or ""
    wrong = list[tuple[int | str, Problem]]()
    for place, text in texts.items():
        problems, right = _problems(text, options)
        wrong += [(place, problem) for problem in problems]
        if problems:
            _put(line, place, right)
    for place, problem in wrong:  # each suggestion has the corrections of all others
        fixes = [_again(line, place, text) for text in problem.fixes]
        line.problems.append(replace(problem, fixes=fixes))
    return [term for term in names if not term.compare], [*parsed(texts[FILTER]), *conditions]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _term(text: str) -> Term:
    found = re.fullmatch(_TERM, text)
    return Term(*found.groups()) if found else Term("name", "", text)


def _problems(text: str, options: Options) -> tuple[list[Problem], str]:
    """The problems of a text, with corrected texts as fixes; the text with the first of each."""
    parts = _parts(text)
    wrong = [(n, one) for n, part in enumerate(parts) for one in _wrong(part, options)]
    for n, problem in wrong:
        parts[n] = next(iter(problem.fixes), parts[n])
    whole = [
        replace(one, fixes=[",".join([*parts[:n], fix, *parts[n + 1 :]]) for fix in one.fixes])
        for n, one in wrong
    ]
    return whole, ",".join(parts)


def _put(line: args.Args, place: int | str, text: str) -> None:
    """Replace a positional word or the value of a flag."""
    if isinstance(place, int):
        line.words[place] = text
    else:
        line.correct(place, text)


def _again(line: args.Args, place: int | str, text: str) -> str:
    changed = replace(line, words=[*line.words], written={**line.written})
    _put(changed, place, text)
    return changed.again()


def _wrong(text: str, options: Options) -> list[Problem]:
    """The problem of one condition; the fixes are other conditions."""
    term = _term(text)
    if not term.compare:
        return []
    key, compare, value = term.key, term.compare, term.value
    if not _is_known(key, options):
        fixes = [f"{one}{compare}{value}" for one in suggest(key, _known(options))]
        allowed = msg("monitor.runs.keys", columns=", ".join(COLUMNS))
        return [
            Problem(
                "runs.filter", msg("monitor.runs.unknown_key", key=key, text=text), allowed, fixes
            )
        ]
    if key == "state" and compare in _TEXT and not any(map(_glob(value), STATES)):
        fixes = [f"state{compare}{s}" for s in suggest(value, list(STATES))[:1]]
        what = msg("monitor.runs.no_state", value=value, text=text)
        return [Problem("runs.filter", what, ", ".join(STATES), fixes)]
    if key in WORDS and compare not in _TEXT:
        what = msg("monitor.runs.no_order", key=key, text=text)
        return [Problem("runs.filter", what, "=, !=", [f"{key}={value}"])]
    is_number = key in COLUMNS and key not in WORDS
    if (is_number or compare not in _TEXT) and number(value, key) is None:
        what = msg("monitor.runs.no_number", value=value, text=text)
        allowed = {
            "age": msg("monitor.runs.duration"),
            "time": msg("monitor.runs.duration"),
            "size": msg("monitor.runs.size"),
        }.get(key, msg("monitor.runs.number"))
        return [Problem("runs.filter", what, allowed)]
    return []


def _is_known(key: str, options: Options) -> bool:
    if key in (*COLUMNS, ARGS, SCRIPT):
        return True
    from training.config.schema import FIELDS

    return key in FIELDS or key in _known(options)


def _known(options: Options) -> list[str]:
    """Columns, fields, also of the tasks, and options of the runs."""
    from training import tasks

    return list(dict.fromkeys([*COLUMNS, *tasks.everything(), *sorted(options())]))


def _glob(pattern: str) -> Callable[[str], bool]:
    return lambda text: fnmatch.fnmatchcase(text, pattern)


def sort(runs: list[RunFacts], column: str) -> list[RunFacts]:
    """By a column or a field of the configuration, smallest first; `-column`: largest first.
    Unknown values and NaN come last."""
    key = column.removeprefix("-")
    known = [(value, run) for run in runs if _has_order(value := value_of(run, key))]
    rest = [run for run in runs if not _has_order(value_of(run, key))]
    known.sort(key=lambda pair: _order(pair[0]), reverse=column.startswith("-"))
    return [run for _, run in known] + rest


def _has_order(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _order(value: object) -> tuple[int, float, str]:
    """Numbers before words."""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def read_sort(line: args.Args, options: Options) -> str:
    """The column of --sort. Adds a problem with an unknown one to the line, and corrects it for
    other suggestions."""
    column = line.values.get("sort") or ""
    key = column.removeprefix("-")
    if not column or _is_known(key, options):
        return column
    near = [column[: -len(key)] + one for one in suggest(key, _known(options)) or ["age"]]
    line.correct("sort", near[0])
    line.problems.append(
        Problem(
            "flag.value",
            msg("core.args.is", name="sort", text=column),
            msg("monitor.runs.columns", columns=", ".join(COLUMNS)),
            [f"--sort={one}" for one in near],
            "sort",
        )
    )
    return column
