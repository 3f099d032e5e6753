"""Expansion of the command line into runs: the grid of `--depth=2,4 --seed=1,2`, and the lines of
--list=FILE."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training import tasks
from training.config import flags, loader, resolve
from training.config.convert import as_text
from training.config.schema import Known
from training.core.errors import Problem
from training.core.find_run import path_of
from training.core.messages import msg
from training.core.project import shipped
from training.core.sweep_dir import COMMAND

# A comma in these belongs to the value.
WHOLE = {"notify", "ssh_args", "inject", "out_dir", "log_dir", "run_name", "resume", "config"}
LISTED_UNIT = "comma-separated"
COMMA = re.compile(r"(?<!\\),")
ASKED, MOST = 100, 1000  # runs: above it --yes is needed; at most


@dataclass(frozen=True)
class Choice:
    """A flag with several values. `typed`: the flag as typed, `text`: its value as typed."""

    name: str
    typed: str
    text: str
    values: tuple[str, ...]


@dataclass
class Combination:
    """One run. `args`: config and flags; `words`: what the user typed for it; `choices` and
    `values`: the flags with several values, and the value of each in this run."""

    args: list[str]
    words: list[str]
    choices: list[Choice] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    def chosen(self) -> dict[str, str]:
        """Name → value of the flags with several values."""
        return {c.name: v for c, v in zip(self.choices, self.values, strict=True)}

    def flags(self) -> dict[str, str]:
        """Name → text of everything that is set, with the config file."""
        line = flags.parse(self.args, tasks.everything())
        found = {name: text for name, (text, _) in line.flags.items()}
        found |= {one.name: one.text or "true" for one in line.unknown}
        return found | ({"config": line.positional[0]} if line.positional else {})


def combinations(
    words: list[str], listed: str, environ: Mapping[str, str], problems: list[Problem]
) -> list[Combination]:
    """All runs in the order in which they start; [] with problems."""
    lines = _lines(path_of(listed), problems) if listed else [[]]
    out, count = list[Combination](), 0
    for line in lines:
        both = _merged(words, line)
        fields = _fields(both, environ)
        rest, choices = _choices(both, fields, problems)
        count += math.prod(len(choice.values) for choice in choices)
        if count > MOST:
            break
        for values in itertools.product(*(choice.values for choice in choices)):
            chosen = [f"{c.typed}={v}" for c, v in zip(choices, values, strict=True)]
            out.append(Combination([*rest, *chosen], both, choices, list(values)))
    if count > MOST:
        what = msg("cli.sweep.too_many", count=count)
        problems.append(Problem("sweep.too_many", what, msg("cli.sweep.at_most", most=MOST)))
        return []
    return out


def _lines(file: Path, problems: list[Problem]) -> list[list[str]]:
    """The words of each line of a list: flags, or a JSON object."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        what = msg("cli.sweep.list_unreadable", file=file, why=why)
        problems.append(Problem("sweep.list", what, msg("cli.sweep.list_allowed"), [], "list"))
        return []
    out = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        try:
            out.append(_of_json(line) if line.startswith("{") else shlex.split(line, comments=True))
        except ValueError as error:
            what = msg("cli.sweep.list_line", file=file, number=number, why=error)
            problems.append(Problem("sweep.list", what, msg("cli.sweep.list_allowed"), [], "list"))
    if not out and not problems:
        what = msg("cli.sweep.list_empty", file=file)
        problems.append(Problem("sweep.list", what, msg("cli.sweep.list_allowed"), [], "list"))
    return out


def _of_json(line: str) -> list[str]:
    """Raises ValueError."""
    found = json.loads(line)
    words = []
    for name, value in found.items():
        if isinstance(value, (dict, list)) or value is None:
            raise ValueError(msg("cli.sweep.json_value", name=name))
        text = as_text(value)
        text = text if _has_commas(name, tasks.everything()) else text.replace(",", r"\,")
        words.append(text if name == "config" else f"--{name}={text}")
    return words


def _merged(words: list[str], line: list[str]) -> list[str]:
    """The words of the command, where those of the line do not replace them."""
    theirs = flags.parse(line, tasks.everything())
    for name in [*theirs.flags, *(one.name for one in theirs.unknown)]:
        words = flags.without(words, name)
    if theirs.positional or "config" in theirs.flags:
        own = flags.parse(words, tasks.everything())
        words = [word for i, word in enumerate(words) if i not in own.positional_at]
        words = flags.without(words, "config")
    return [*words, *line]


def _fields(words: list[str], environ: Mapping[str, str]) -> Known:
    """The fields of the task; those of all tasks if it is unknown."""
    line = flags.parse(words, tasks.everything())
    name = line.flags.get("task", (environ.get(f"{resolve.PREFIX}TASK", ""), ""))[0]
    given = line.flags.get("config", ("", ""))[0] or next(iter(line.positional), "")
    if not name and given:
        path = shipped(path_of(given))
        values = loader.read(path, tasks.CONFIG_READERS, 0).values
        name = str(values.get("task", ("", ""))[0])
    found, problems = tasks.find(COMMA.split(name)[0] or tasks.DEFAULT.name, "")
    return tasks.everything() if problems else found.fields


def _choices(
    words: list[str], fields: Known, problems: list[Problem]
) -> tuple[list[str], list[Choice]]:
    """The words without the flags of several values, and these flags."""
    line = flags.parse(words, fields)
    problems += [problem for problem in line.problems if problem not in problems]
    places = [place for place in line.places if place[0] in line.flags]
    given = [(name, *line.flags[name], start, stop) for name, start, stop in places]
    given += [(u.name, u.text or "", u.typed, u.start, u.stop) for u in line.unknown]
    choices, taken = list[Choice](), set[int]()
    for name, text, typed, start, stop in sorted(given, key=lambda one: one[3]):
        if _has_commas(name, fields):
            continue
        after = _after_comma(text, words[stop:])
        values = tuple(part.strip().replace(r"\,", ",") for part in COMMA.split(text))
        if len(values) == 1 and r"\," not in text and not (not text and _typed(name, fields)):
            continue
        if "" in values and (empty := _empty(typed, text, after)) not in problems:
            problems.append(empty)
        choices.append(Choice(name, typed, text, tuple(value for value in values if value)))
        taken |= set(range(start, stop + len(after)))
    choices = [choice for choice in choices if choice.values]
    return [word for i, word in enumerate(words) if i not in taken], choices


def _has_commas(name: str, fields: Known) -> bool:
    """Whether a comma in the value of the field belongs to it."""
    listed = name in fields and LISTED_UNIT in fields[name].metadata["unit"]
    return name in WHOLE or listed


def _typed(name: str, fields: Known) -> bool:
    """Whether the field cannot be empty."""
    return name in fields and not str(fields[name].type).startswith("str")


def _after_comma(text: str, words: Sequence[str]) -> list[str]:
    """The following words that belong to the value: the user typed a space after a comma."""
    found = list[str]()
    for word in words:
        if not (found or [text])[-1].endswith(",") or word.startswith("--"):
            break
        if word.endswith((".py", ".json")):  # a config
            break
        found.append(word)
    return found


def _empty(typed: str, text: str, after: Sequence[str]) -> Problem:
    left = shlex.quote(",".join(v for v in COMMA.split("".join([text, *after])) if v.strip()))
    left = "" if left == "''" else left
    text = " ".join([text, *after])
    fixes = [f"{COMMAND} … {typed}={left}"] if left else []
    what = msg("cli.sweep.empty_value", typed=typed, text=text)
    return Problem("sweep.empty_value", what, msg("cli.sweep.values_allowed"), fixes)


def differing(runs: Sequence[Combination]) -> list[dict[str, str]]:
    """For each run, the flags (by name) in which the runs differ, as typed."""
    every = [run.flags() for run in runs]
    order = dict.fromkeys(name for run in runs for name in (c.name for c in run.choices))
    order |= dict.fromkeys(name for one in every for name in one)
    names = [name for name in order if len({one.get(name) for one in every}) > 1]
    return [{name: one[name] for name in names if name in one} for one in every]


def run_names(sweep: str, values: Sequence[Mapping[str, str]]) -> list[str]:
    """NAME_depth-2_matrix_lr-0.01; numbers where that would be too long or ambiguous."""
    found = [
        "_".join([sweep, *(f"{name}-{_plain(text)}" for name, text in one.items())])
        for one in values
    ]
    if len(set(found)) == len(found) and all(len(name.encode()) <= 120 for name in found):
        return found
    digits = len(str(len(found)))
    return [f"{sweep}_{number:0{digits}}" for number in range(1, len(found) + 1)]


def _plain(text: str) -> str:
    path = Path(text)
    word = path.stem if path.suffix.isalpha() or "/" in text or path.suffix[1:].isalpha() else text
    return re.sub(r"[^\w.]+", "_", word).strip("_.") or "_"
