"""Problems of the runs of a sweep: each once, with the runs concerned and commands of the sweep."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from training.cli.sweep.grid import COMMA, Choice, Combination
from training.core.errors import Problem
from training.core.messages import msg
from training.core.sweep_dir import COMMAND
from training.core.units import plural
from training.monitor.runs.table import shown

LAUNCH = re.compile(r"(?:^|(?<= ))\./launch_train\.sh (\d+)")
SHOWN = 4  # runs in a problem


@dataclass
class Collected:
    """The problems of all runs. `own`: words of the sweep's own options, for the suggestions."""

    runs: int
    own: list[str]
    found: dict[tuple[str, str, str, str], Problem] = field(default_factory=dict)
    concerned: dict[tuple[str, str, str, str], list[str]] = field(default_factory=dict)

    def add(self, problems: Sequence[Problem], run: Combination, label: str) -> None:
        for problem in problems:
            key = (problem.code, problem.field, problem.what, problem.allowed)
            if key not in self.found:
                fixes = [translated(fix, run, self.own) for fix in problem.fixes]
                self.found[key] = replace(problem, fixes=list(dict.fromkeys(fixes)))
            self.concerned.setdefault(key, []).append(label)

    def problems(self) -> list[Problem]:
        out = []
        for key, problem in self.found.items():
            labels, what = self.concerned[key], problem.what
            if len(labels) < self.runs:
                few = "; ".join(labels[:SHOWN]) + ("; …" if len(labels) > SHOWN else "")
                counted = plural(len(labels), "run")
                what = msg("cli.sweep.concerns", what=what, runs=counted, shown=few)
            out.append(replace(problem, what=what))
        return out


def label(values: Mapping[str, object]) -> str:
    """The fields in which a run differs, as they are typed."""
    return " ".join(f"{name}={shown(value)}" for name, value in values.items())


def translated(fix: str, run: Combination, own: Sequence[str]) -> str:
    """A command that fixes one run as a command of the sweep: values that it leaves alone become
    the list that the user typed, others are replaced in that list."""
    if not LAUNCH.search(fix):
        return fix
    command, comment, rest = fix.partition("   # ")
    try:
        words = shlex.split(command)
    except ValueError:
        return fix
    left = dict(zip(run.choices, run.values, strict=True))
    program = next((i for i, word in enumerate(words) if word == "./launch_train.sh"), 0)
    out = [*words[:program], *COMMAND.split(), *own]
    if any(word.startswith("--list=") for word in own):  # the line of the run is to be changed
        return shlex.join(word for word in words[program + 2 :] if word not in run.args)
    given = {_name(word) for word in words}
    gone = [choice for choice in left if choice.name not in given]  # misspelt flags, corrected
    for word in words[program + 2 :]:
        out.append(_listed(word, left, gone if word not in run.args else []))
    return shlex.join(out).replace(" '…'", " …") + (f"{comment}{rest}" if comment else "")


def _name(word: str) -> str:
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _listed(word: str, left: dict[Choice, str], gone: Sequence[Choice]) -> str:
    flag, equals, text = word.partition("=")
    if not equals:
        return word
    same = [choice for choice in left if choice.name == _name(word)]
    renamed = [choice for choice in gone if left.get(choice) == text]
    for choice in same or renamed[:1]:
        value = left.pop(choice)
        if value == text:
            return f"{flag}={choice.text}"
        parts = [text if part.strip() == value else part for part in COMMA.split(choice.text)]
        return f"{flag}={','.join(dict.fromkeys(parts))}"
    return word
