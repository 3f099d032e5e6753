"""Conversion of typed text and config file values to the type and range of their field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from training.config.flags import WORDS
from training.config.schema import DURATION, FIELDS, Known, kind
from training.core.messages import msg
from training.core.units import read_duration


def as_text(raw: Any) -> str:
    """A config file value as it would be typed."""
    return (
        str(raw).lower()
        if isinstance(raw, bool) or raw is None
        else raw
        if isinstance(raw, str)
        else shown(raw)
    )


def convert(name: str, raw: Any, is_text: bool, fields: Known = FIELDS) -> tuple[Any, str | None]:
    """(value, None) or (None, error suffix): text from flags is parsed, values from files must have
    the type of the field."""
    meta, wanted = fields[name].metadata, kind(name, fields)
    if raw in meta["words"]:
        return raw, None
    value: Any = raw
    if meta["unit"] == DURATION and isinstance(raw, str):  # '8h', also in a file
        try:
            raw, is_text = read_duration(raw), False
        except ValueError:
            return None, ""
        value = raw
    if meta["choices"]:
        # `compile = True` and `TORCH_COMPILE=1` mean the same.
        value = str(int(raw)) if isinstance(raw, (bool, int)) else raw
        return (value, None) if value in meta["choices"] else (None, "")
    if is_text:
        try:
            value = PARSERS[wanted](raw)
        except ValueError:
            return None, ""
    elif wanted == "float" and isinstance(raw, int) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except OverflowError:
            return None, msg("config.convert.too_large")
    elif type(raw).__name__ != wanted:
        given = type(raw).__name__
        if given == "int":
            return None, msg("config.convert.wrong_type_int")
        return None, msg("config.convert.wrong_type", type=given)
    if wanted == "float" and not math.isfinite(value):
        return None, ""
    if wanted == "str" and "\0" in value:
        return None, msg("config.convert.null_character")
    if meta["unit"] == "path" and not value and fields[name].default:
        return None, ""
    if meta["low"] is not None and value < meta["low"]:
        return None, msg("config.convert.too_small")
    if meta["high"] is not None and value > meta["high"]:
        return None, msg("config.convert.too_large")
    return value, None


def _boolean(text: str) -> bool:
    if text.lower() not in WORDS:
        raise ValueError(text)
    return WORDS[text.lower()]


PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": _boolean,
    "str": str,
}


def shown(raw: Any) -> str:
    """`repr` of a value for a message, shortened to 200 characters."""
    try:
        text = repr(raw)
    except ValueError:
        return msg("config.convert.digits")
    return text if len(text) <= 200 else text[:197] + "…"
