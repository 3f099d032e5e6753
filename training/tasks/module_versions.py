"""The versions of a model's modules, which torch keeps beside the tensors of a state_dict(): some
modules refuse weights of an unknown version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any


def of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """By the names of the modules; empty where unknown."""
    found: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
    return found


def added(state: Mapping[str, Any], versions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state with these versions; as it is without any."""
    if not versions:
        return state
    made = OrderedDict(state)
    made._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # as torch does
    return made


def renamed(versions: Mapping[str, Any], change: Callable[[str], str | None]) -> Mapping[str, Any]:
    """The versions under other names of the modules: `change` gets the beginning of the names of a
    module's tensors ('' of the model, 'layer.'), and returns the new one, or None."""
    names = {name: change(f"{name}." if name else "") for name in versions}
    return {new.removesuffix("."): versions[name] for name, new in names.items() if new is not None}
