"""Parser of the training command line: every field is a flag, written `--a_b=1`, `--a-b=1` or
`--a-b 1`, and `--flag` or `--no-flag` for bool."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from training.config.schema import FIELDS, Known, kind
from training.core import suggest
from training.core.errors import Problem
from training.core.messages import msg

# Flags that are not fields: they select an action.
ACTIONS = {
    "config": "config file (its path alone is enough)",
    "dry_run": "show the plan, launch nothing",
    "explain": "--dry_run, with the origin and effect of every relevant environment variable",
    "check": "--dry_run, with all checks of the machine and the memory of a step, measured with "
    "fake tensors (a few seconds)",
    "json": "with --check: one JSON object on standard output",
    "save_config": "write the resolved configuration to this .py or .json file, launch nothing "
    "(with --dry_run: show the plan too)",
    "script": "launch_train.sh N --script main.py -- ARGS: launch a user script instead of the "
    "built-in training",
    "module": "with --script: it is the name of a module, as for python -m",
    "no_python": "with --script: execute it directly, without Python",
    "watch": "with --script: the program starts the ranks itself (./duet watch)",
    "help": "show this help",
}
ALIASES = {"opt": "config"}  # as KAIR calls it
SWITCHES = ("dry_run", "explain", "check", "json", "module", "no_python", "watch", "help")
# An empty text, as of an unset shell variable, would silently start another run than meant.
# The value is an example.
NEVER_EMPTY = {"hosts": "a,b", "hostfile": "HOSTFILE", "master_addr": "ADDRESS"}
EXAMPLES = {**NEVER_EMPTY, "resume": "latest"}
WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True)
class Unknown:
    """An unknown flag as typed, its value (None: none), and the range of its words on the command
    line."""

    typed: str
    text: str | None
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.typed.lstrip("-").replace("-", "_")


@dataclass
class CommandLine:
    """A parsed command line. `flags`: name → (text, flag as typed); `places`: the range of words of
    each flag; `positional_at`: the word index of each positional argument; `unknown`: handled by
    training.plan.cli_args, which knows the whole command."""

    flags: dict[str, tuple[str, str]] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    places: list[tuple[str, int, int]] = field(default_factory=list)
    positional_at: list[int] = field(default_factory=list)

    def on(self, action: str) -> bool:
        text = self.flags.get(action, ("false", ""))[0].lower()
        return WORDS.get(text, False)


def parse(argv: list[str], fields: Known = FIELDS) -> CommandLine:
    """Parse a command line. `fields`: known fields, including options of the task."""
    line = CommandLine()
    known = [*fields, *ACTIONS]
    rest = list(argv)
    while rest:
        start = len(argv) - len(rest)
        word = rest.pop(0)
        if word == "--":
            continue
        if not word.startswith("-") or word == "-":
            line.positional.append(word)
            line.positional_at.append(start)
            continue
        if not word.startswith("--"):
            _unknown(line, word, rest, start, len(argv))
            continue
        typed, equals, text = word[2:].partition("=")
        name = ALIASES.get(typed, typed.replace("-", "_"))
        if (
            name not in known
            and name.startswith("no_")
            and name[3:] in fields
            and kind(name[3:], fields) == "bool"
            and not equals
        ):
            name, equals, text = name[3:], "=", "false"
        if name not in known:
            _unknown(line, word, rest, start, len(argv))
            continue
        is_switch = name in SWITCHES or (name in fields and kind(name, fields) == "bool")
        if not equals:
            if is_switch:
                # Not 0 and 1: `./launch_train.sh --dry_run 1 CONFIG` has a number of processes.
                text = (
                    rest.pop(0)
                    if rest and rest[0].lower() in WORDS and not rest[0].isdigit()
                    else "true"
                )
            elif rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            else:
                if name in EXAMPLES:  # replaced by the suggestion
                    line.places.append((name, start, len(argv) - len(rest)))
                line.problems.append(no_value(typed))
                continue
        line.places.append((name, start, len(argv) - len(rest)))
        if not text and name in NEVER_EMPTY:
            line.problems.append(no_value(typed))
            continue
        if name in ACTIONS and is_switch and text.lower() not in WORDS:
            line.problems.append(
                Problem(
                    "flag.unexpected_value",
                    msg("config.flags.unexpected_value", typed=typed, text=text),
                    msg("config.allowed.bool"),
                    [f"--{typed}={word}" for word in bool_words(text)],
                )
            )
            continue
        if name in line.flags and line.flags[name][0] != text:
            line.problems.append(
                Problem(
                    "flag.twice",
                    msg("core.args.twice", name=typed, given=line.flags[name][0], text=text),
                    msg("core.args.once"),
                    [written(name, text)],
                )
            )
        line.flags[name] = (text, f"--{typed}")
    if line.on("json") and not line.on("check"):
        line.problems.append(
            Problem(
                "flag.json_without_check",
                msg("config.flags.json_without_check"),
                "",
                ["--check --json"],
            )
        )
    return line


def bool_words(text: str) -> list[str]:
    """true or false, if `text` is a misspelled word for it."""
    near = suggest.suggest(text.lower(), [word for word in WORDS if word.isalpha()], most=1)
    return [str(WORDS[word]).lower() for word in near]


def no_value(typed: str) -> Problem:
    """The problem of a flag, without its dashes, that has no value or an empty one."""
    name = typed.replace("-", "_")
    fixes = [written(name, EXAMPLES[name])] if name in EXAMPLES else []
    what = msg("core.args.no_value", name=typed)
    return Problem("flag.no_value", what, f"--{typed}=VALUE", fixes)


def without(args: list[str], name: str) -> list[str]:
    """The arguments without this flag and its value, however it was typed."""
    kept, skip = [], False
    switch = name not in FIELDS or kind(name) == "bool"
    for i, arg in enumerate(args):
        typed, equals, _ = arg.partition("=")
        if skip:
            skip = False
        elif typed.startswith("--") and typed[2:].replace("-", "_") in (name, f"no_{name}"):
            after = args[i + 1] if i + 1 < len(args) else "--"
            takes = (
                after.lower() in WORDS and not after.isdigit()
                if switch
                else not after.startswith("--")
            )
            skip = takes and not equals
        else:
            kept.append(arg)
    return kept


def own_option(word: str, own: Collection[str], foreign: Mapping[str, str]) -> str | None:
    """The option in `own` that an unknown flag may mean; None: a flag of the training.

    `own`: options that a command has besides those of the training. `foreign`: field → the option
    that other tools call by a name of this field.
    """
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    known = name in FIELDS or name in ACTIONS or name.removeprefix("no_") in FIELDS
    if not word.startswith("--") or known:
        return None
    from training.config import foreign_names

    if (row := foreign_names.row_of(name)) is not None:
        return foreign.get(" ".join(row.to))
    best = suggest.suggest(name, [*own, *FIELDS, *ACTIONS])[:1]
    return next((option for option in best if option in own), None)


def written(name: str, value: Any) -> str:
    """A flag quoted for the shell; `value` None: a switch."""
    return f"--{name}" + ("" if value is None else f"={shlex.quote(str(value))}")


def _unknown(line: CommandLine, word: str, rest: list[str], start: int, words: int) -> None:
    """Record an unknown flag; its value, if any, is removed from `rest`, the words that follow."""
    from training.config import foreign_names

    typed, equals, text = word.partition("=")
    if number := re.fullmatch(r"-n(\d+)", word):
        typed, equals, text = "-n", "=", number[1]
    switch = foreign_names.is_switch(typed.lstrip("-"))
    value: str | None = text if equals else None
    # A config path is not a value.
    follows = bool(rest) and not rest[0].startswith("--") and not rest[0].endswith((".py", ".json"))
    if (
        not equals
        and follows
        and (not switch or (rest[0].lower() in WORDS and not rest[0].isdigit()))
    ):
        value = rest.pop(0)
    line.unknown.append(Unknown(typed, value, start, words - len(rest)))
