"""Origin of a value: display text with machine-readable attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeGuard

from training.core.messages import msg

FLAG, VARIABLE, FILE = "flag", "variable", "file"


class _Default(str):
    """Compared and stored as `default`, shown in the user's language."""

    def __format__(self, spec: str) -> str:
        return format(msg("config.origin.default"), spec)


DEFAULT: str = _Default("default")


class Origin(str):
    """`source`: FLAG, VARIABLE or FILE; `name`: the flag or variable as typed, or the place in the
    file. Stored as its text."""

    source: str
    name: str

    def __new__(cls, text: str, source: str, name: str = "") -> Origin:
        made = super().__new__(cls, text)
        made.source, made.name = source, name
        return made


def shown(origin: str) -> str:
    """The origin without "from", as in a table."""
    return f"{origin}".removeprefix("from ")


def asked_for(origin: str | None) -> TypeGuard[Origin]:
    """Whether a flag or variable of this command sets the value."""
    return isinstance(origin, Origin) and origin.source in (FLAG, VARIABLE)


def given(origins: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """The flags and variables, as typed, that set these fields. `origins`: as made by
    training.config.resolve, since those in a plan are only texts."""
    return [one.name for name in names if asked_for(one := origins.get(name))]
