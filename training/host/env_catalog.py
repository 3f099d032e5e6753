"""What each environment variable does that matters for a run; the table is variables.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.core.jsonl import Record

TABLE = Path(__file__).with_name("variables.json")
TYPING_ERROR = 0.85  # so alike are a name and a known one when it is one


@dataclass(frozen=True)
class Known:
    """`wrong`: what is the matter with it, `instead`: what to use, where it does nothing or is an
    old name."""

    does: str
    device: str = ""  # "cuda": nothing reads it without a GPU
    wrong: str = ""
    instead: str = ""

    def explain(self, value: str, device: str) -> str:
        if self.wrong:
            return f"{self.wrong}; instead: {self.replacement(value)}"
        return (
            f"{self.does} (nothing reads it on a CPU)"
            if self.device and self.device != device
            else self.does
        )

    def replacement(self, value: str) -> str:
        return self.instead.format(value=value if value.isdecimal() else "VALUE")


@functools.cache
def _table() -> Record:
    found: Record = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


@functools.cache
def known() -> dict[str, Known]:
    out = {}
    for group in _table()["groups"]:
        for name in group["undocumented"]:
            out[name] = Known(f"{group['of']} knows it, but does not document it", group["device"])
        for name, does in group["variables"].items():
            out[name] = Known(does, group["device"])
    for name, entry in _table()["wrong"].items():
        out[name] = Known("", "", entry["why"], entry["instead"])
    return out


def owner(name: str) -> str | None:
    """Who owns all names that begin like this one (NCCL_…), so that an unknown one is a mistake;
    None: nobody."""
    return next(
        (g["of"] for g in _table()["groups"] if g["prefix"] and name.startswith(g["prefix"])), None
    )


def meant(name: str) -> str | None:
    """The variable that a person may have meant by a name that nobody knows."""
    import difflib

    near = difflib.get_close_matches(
        name, [n for n, k in known().items() if not k.wrong], n=1, cutoff=TYPING_ERROR
    )
    return near[0] if near else None


def unknown(name: str) -> str:
    """'' for a name that is known or that anybody may use."""
    of = owner(name)
    if of is None or name in known():
        return ""
    near = meant(name)
    return f"is not a variable {of} knows" + (f", did you mean {near}?" if near else "")


def relevant(environ: Mapping[str, str]) -> list[str]:
    """The names in this environment that matter for a run, in the order of the table."""
    order = {name: number for number, name in enumerate(known())}
    found = [name for name in environ if name in order or owner(name)]
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))
