"""Catalogue of environment variables that affect a run, read from variables.json; their
descriptions in Chinese are in variables.zh.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.core.jsonl import Record
from training.core.messages import language, msg

TABLE = Path(__file__).with_name("variables.json")
CHINESE = Path(__file__).with_name("variables.zh.json")  # name → description
TYPING_ERROR = 0.85  # similarity from which an unknown name is taken for a typo


@dataclass(frozen=True)
class Known:
    """`wrong`: why an obsolete or ineffective variable has no effect; `instead`: its
    replacement."""

    does: str
    device: str = ""  # "cuda": unused without a GPU
    wrong: str = ""
    instead: str = ""

    def explain(self, value: str, device: str) -> str:
        if self.wrong:
            return msg("host.variable.wrong", wrong=self.wrong, replacement=self.replacement(value))
        return (
            msg("host.variable.unused", does=self.does)
            if self.device and self.device != device
            else self.does
        )

    def replacement(self, value: str) -> str:
        return self.instead.format(value=value if value.isdecimal() else "VALUE")


@functools.cache
def _table() -> Record:
    found: Record = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def known() -> dict[str, Known]:
    """Every variable, described in the user's language."""
    return _known(language())


@functools.cache
def _known(spoken: str) -> dict[str, Known]:
    texts = json.loads(CHINESE.read_text(encoding="utf-8")) if spoken == "zh" else {}
    out = {}
    for group in _table()["groups"]:
        for name in group["undocumented"]:
            out[name] = Known(msg("host.variable.undocumented", of=group["of"]), group["device"])
        for name, does in group["variables"].items():
            out[name] = Known(texts.get(name, does), group["device"])
    for name, entry in _table()["wrong"].items():
        out[name] = Known("", "", texts.get(name, entry["why"]), entry["instead"])
    return out


def owner(name: str) -> str | None:
    """The library that owns the prefix of this name (NCCL_…), so that an unknown name is an error;
    None without one."""
    return next(
        (g["of"] for g in _table()["groups"] if g["prefix"] and name.startswith(g["prefix"])), None
    )


def meant(name: str) -> str | None:
    """The known variable closest to an unknown name, or None."""
    import difflib

    near = difflib.get_close_matches(
        name, [n for n, k in known().items() if not k.wrong], n=1, cutoff=TYPING_ERROR
    )
    return near[0] if near else None


def unknown(name: str) -> str:
    """Error text for an unknown name with a reserved prefix; '' for any other name."""
    of = owner(name)
    if of is None or name in known():
        return ""
    near = meant(name)
    return msg("host.variable.unknown", of=of) + (
        msg("host.variable.meant", near=near) if near else ""
    )


def relevant(environ: Mapping[str, str]) -> list[str]:
    """The names in `environ` that affect a run, in the order of the table."""
    order = {name: number for number, name in enumerate(known())}
    found = [name for name in environ if name in order or owner(name)]
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))
