"""Table-driven flag parser of every command except training, whose flags are the configuration
fields.

A flag is written --a-b=1, --a_b=1 or --a-b 1; a switch takes no value.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from training.core.errors import Problem
from training.core.messages import msg
from training.core.suggest import suggest

LONGEST_NUMBER = 19  # digits
Near = Callable[[str], str | None]


@dataclass(frozen=True)
class Flag:
    """`read` converts text to a value and raises ValueError; None: a switch. `allowed`: valid
    values, as shown in errors; `near`: suggested replacements for an invalid value; `fixes`: other
    commands that help; `bare`: the value of a flag without one (None: a value is required);
    `empty`: whether an empty text is a value; `repeated`: whether suggestions keep the flag."""

    read: Callable[[str], Any] | None = None
    allowed: str = ""
    near: Callable[[str], Iterable[str]] = lambda text: ()
    bare: Any = None
    fixes: tuple[str, ...] = ()
    empty: bool = False
    repeated: bool = True


SWITCH, TEXT = Flag(), Flag(str)


def whole(low: int, high: int, usual: int, allowed: str = "", bare: int | None = None) -> Flag:
    """A whole number; `usual`: the suggestion for anything that is not a number."""

    def read(text: str) -> int:
        if not is_whole(text) or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    def near(text: str) -> list[str]:
        return [str(min(max(int(text), low), high) if is_whole(text) else usual)]

    return Flag(read, allowed or msg("core.args.whole", low=low, high=high), near, bare)


def seconds(low: float, high: float, usual: float, bare: float | None = None) -> Flag:
    return number(low, high, usual, msg("core.args.seconds", low=low, high=high), bare)


def number(
    low: float, high: float, usual: float, allowed: str = "", bare: float | None = None
) -> Flag:
    """A number; `usual`: the suggestion for anything that is not one."""

    def value_of(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            return math.nan

    def read(text: str) -> float:
        if not low <= value_of(text) <= high:
            raise ValueError(text)
        return value_of(text)

    def near(text: str) -> list[str]:
        value = value_of(text)
        return [f"{usual if math.isnan(value) else min(max(value, low), high):g}"]

    return Flag(read, allowed or msg("core.args.number", low=low, high=high), near, bare)


def process_id() -> Flag:
    fixes = (msg("core.args.list_pythons"),)
    return Flag(whole(1, (1 << 31) - 1, 1).read, msg("core.args.training_pid"), fixes=fixes)


def one_of(*choices: str) -> Flag:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    def near(text: str) -> list[str]:
        return suggest(text, list(choices))[:1] or [choices[0]]

    return Flag(read, msg("core.args.or").join(choices), near)


def is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER


@dataclass
class Args:
    """`values`: flag name with underscores → value; `words`: positional arguments; `written`: flag
    → as typed into a shell, without invalid values that have no suggestion and without flags that
    are not repeated."""

    values: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    command: str = ""
    written: dict[str, str] = field(default_factory=dict)

    def flags(self, **changes: str | None) -> str:
        """The flags for a shell, with these changed; None: without it."""
        kept = {n: text for n, text in self.written.items() if n not in changes}
        changed = (f"--{n}={shlex.quote(t)}" for n, t in changes.items() if t is not None)
        return " ".join([*kept.values(), *changed])

    def again(self, **changes: str | None) -> str:
        """The whole command, with these flags changed."""
        parts = [self.command, shlex.join(self.words), self.flags(**changes)]
        return " ".join(filter(None, parts))

    def correct(self, flag: str, text: str) -> None:
        """Suggestions have this value of the flag."""
        self.written[flag] = f"--{flag}={shlex.quote(text)}"

    def choices(self, flag: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """Comma-separated words of a flag; a problem for each that is not allowed."""
        text = self.values.get(flag) or ""
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        wrong = [word for word in words if word not in allowed]
        near = [suggest(word, list(allowed))[:1] if word in wrong else [word] for word in words]
        right = ",".join(dict.fromkeys(word for found in near for word in found))
        if wrong and right:
            self.correct(flag, right)
        self.problems += [
            Problem(
                "flag.value",
                msg("core.args.is", name=flag, text=word),
                ", ".join(allowed),
                [f"--{flag}={right}"] if right else [],
                flag,
            )
            for word in wrong
        ]
        return words

    def completed(self, problems: Iterable[Problem], flags: Iterable[str]) -> list[Problem]:
        """Suggestions of these flags alone become the whole command with them."""
        known = {name.replace("-", "_") for name in flags}
        return [replace(p, fixes=[self._whole(fix, known) for fix in p.fixes]) for p in problems]

    def _whole(self, fix: str, known: set[str]) -> str:
        try:
            changed = {_key(word) for word in shlex.split(fix, comments=True)}
        except ValueError:  # a sentence with an apostrophe
            return fix
        if not changed or not changed <= known:
            return fix
        return f"{self.again(**dict.fromkeys(changed))} {fix}"


def parse(
    argv: list[str],
    flags: Mapping[str, Flag],
    command: str,
    near: Near | None = None,
    positional: bool = True,
) -> Args:
    """`flags`: by the name shown in help. `near(unknown flag)`: the closest known flag, "" for
    none; None keeps the word in `words`. `positional`: whether the command takes positional
    arguments. Problems are returned, not raised."""
    near = near or partial(nearest, flags=flags)
    known = {name.replace("-", "_"): name for name in flags}
    args, rest = Args(command=command), list(argv)
    # word as typed, flag or "", closest known flag, value
    typed: list[tuple[str, str, str, str | None]] = []
    while rest:
        word = rest.pop(0)
        start, equals, value = ("--help", "", "") if word == "-h" else word.partition("=")
        name = known.get(start[2:].replace("-", "_"), "") if start.startswith("--") else ""
        meant = name if name or not word.startswith("-") or word == "-" else near(start)
        if meant is None or not word.startswith("-") or word == "-":
            args.words.append(word)
            continue
        takes = flags[meant] if meant else SWITCH if positional else TEXT
        if (
            takes.read
            and not equals
            and takes.bare is None
            and rest
            and not rest[0].startswith("--")
        ):
            equals, value = "=", rest.pop(0)
        typed.append((start, name, meant, value if equals else None))
    for start, name, meant, text in typed:
        right = _right(flags[meant], text) if meant and flags[meant].repeated else None
        if right is not None and (name or meant.replace("-", "_") not in args.written):
            args.written[meant.replace("-", "_")] = (start if name else f"--{meant}") + right
    given = dict[str, str | None]()
    for start, name, meant, text in typed:
        key = (name or meant).replace("-", "_")
        others = {key: None} if key else {}
        again = (
            args.again(**others)
            if positional
            else " ".join(filter(None, [command, args.flags(**others)]))
        )
        if not name:
            args.problems.append(_unknown(start, text, meant, flags, command, again))
            continue
        problem, args.values[key] = _value(name, flags[name], text, again)
        if problem is None and given.setdefault(key, text) != text:
            problem = Problem(
                "flag.twice",
                msg("core.args.twice", name=name, given=given[key], text=text),
                msg("core.args.once"),
                field=key,
            )
        args.problems += [problem] if problem else []
    return args


def _key(word: str) -> str:
    """The name of a flag in `values`; "" for another word."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def _right(flag: Flag, text: str | None) -> str | None:
    """What follows the name in a shell: the value, or the first suggestion for an invalid one; None
    without one."""
    if flag.read is None or (text is None and flag.bare is not None):
        return ""
    if text is None or not (text or flag.empty):
        return None
    try:
        flag.read(text)
    except ValueError:
        text = next(iter(flag.near(text)), None)
    return None if text is None else f"={shlex.quote(text)}"


def _value(name: str, flag: Flag, text: str | None, again: str) -> tuple[Problem | None, Any]:
    key = name.replace("-", "_")
    if flag.read is None:
        wrong = Problem(
            "flag.unexpected_value",
            msg("core.args.unexpected_value", name=name, text=text),
            msg("core.args.takes_none"),
            [_corrected(again, name, flag)],
            key,
        )
        return wrong if text is not None else None, True
    if text is None and flag.bare is not None:
        return None, flag.bare
    if text is None or not (text or flag.empty):
        return Problem(
            "flag.no_value",
            msg("core.args.no_value", name=name),
            flag.allowed or msg("core.args.with_value", name=name),
            list(flag.fixes),
            key,
        ), None
    try:
        return None, flag.read(text)
    except ValueError:
        near = [_corrected(again, name, flag, f"={value}") for value in flag.near(text)]
        fixes = [*near, *flag.fixes]
        return Problem(
            "flag.value", msg("core.args.is", name=name, text=text), flag.allowed, fixes, key
        ), None


def _corrected(again: str, name: str, flag: Flag, value: str = "") -> str:
    """`again` with the flag, written correctly."""
    return f"{again} --{name}{value}" if flag.repeated else again


def nearest(word: str, flags: Mapping[str, Flag]) -> str:
    return next(iter(suggest(word.lstrip("-").replace("_", "-"), list(flags))[:1]), "")


def _unknown(
    word: str, text: str | None, near: str, flags: Mapping[str, Flag], command: str, again: str
) -> Problem:
    # Suggesting a flag without its value would only cause the next error.
    fits = near and (text or not flags[near].read)
    value = f"={shlex.quote(text or '')}" if near and flags[near].read else ""
    fix = _corrected(again, near, flags[near], value) if fits else f"{command} --help"
    return Problem(
        "flag.unknown",
        msg("core.args.unknown", word=word),
        ", ".join(f"--{n}" for n in flags),
        [fix],
    )
