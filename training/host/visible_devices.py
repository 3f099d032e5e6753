"""CUDA_VISIBLE_DEVICES as CUDA reads it; torch's _parse_visible_devices is the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

WHOLE, PART = "GPU-", "MIG-"  # how the UUID of a GPU begins, and of an instance of one
ORDINAL = re.compile(r"[+-]?[0-9]+")  # CUDA ignores what follows: strtoul


def entries(selection: str) -> list[int] | list[str]:
    """The devices of the list: either ordinals, or UUIDs of one kind. The first entry of another
    kind ends the list; so does an empty or negative one."""
    for prefix in (WHOLE, PART):
        if selection.startswith(prefix):
            return _uuids(selection.split(","), prefix)
    return _ordinals(selection.split(","))


def naming(devices: Sequence[tuple[str, int]]) -> list[str]:
    """The entries for these devices (UUID, ordinal of the GPU): UUIDs if all are known and of one
    kind. Ordinals change when a GPU is lost, and instances of one GPU have the same."""
    uuids = [uuid for uuid, _ in devices]
    if any(all(uuid.startswith(kind) for uuid in uuids) for kind in (WHOLE, PART)):
        return uuids
    return [str(ordinal) for _, ordinal in devices]


def _uuids(words: Sequence[str], prefix: str) -> list[str]:
    found: list[str] = []
    for word in words:
        if not word.startswith(prefix):
            break
        found.append(word)
    return found


def _ordinals(words: Sequence[str]) -> list[int]:
    found: list[int] = []
    for word in words:
        digits = ORDINAL.match(word.strip())
        if digits is None or int(digits[0]) < 0:
            break
        found.append(int(digits[0]))
    return found


def choose(selection: str, places: Callable[[int | str], Sequence[int]]) -> tuple[list[int], bool]:
    """(places of the selected devices, whether the list names a device twice, which hides all of
    them). `places`: of the devices that an entry may mean; one that does not mean exactly one ends
    the list."""
    named = entries(selection)
    if len(set(named)) < len(named):
        return [], True
    found: list[int] = []
    for entry in named:
        matching = places(entry)
        if len(matching) != 1:
            break
        if matching[0] in found:
            return [], True
        found.append(matching[0])
    return found, False
