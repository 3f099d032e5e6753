"""Where a value came from: a text for people that keeps what a program needs to know."""

from __future__ import annotations

DEFAULT, FLAG, VARIABLE, FILE = "default", "flag", "variable", "file"


class Origin(str):
    """Reads and is written as its text. `source`: FLAG, VARIABLE or FILE; `name`: the flag or
    variable as typed."""

    source: str
    name: str

    def __new__(cls, text: str, source: str, name: str = "") -> Origin:
        made = super().__new__(cls, text)
        made.source, made.name = source, name
        return made


def asked_for(origin: str) -> bool:
    """Does this very command say it, by a flag or a variable?"""
    return isinstance(origin, Origin) and origin.source in (FLAG, VARIABLE)
