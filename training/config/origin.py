"""Origin of a value: display text with machine-readable attributes."""

from __future__ import annotations

DEFAULT, FLAG, VARIABLE, FILE = "default", "flag", "variable", "file"


class Origin(str):
    """`source`: FLAG, VARIABLE or FILE; `name`: the flag or variable as typed. Stored as its
    text."""

    source: str
    name: str

    def __new__(cls, text: str, source: str, name: str = "") -> Origin:
        made = super().__new__(cls, text)
        made.source, made.name = source, name
        return made


def asked_for(origin: str) -> bool:
    """Whether a flag or variable of this command sets the value."""
    return isinstance(origin, Origin) and origin.source in (FLAG, VARIABLE)
