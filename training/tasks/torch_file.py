"""Reads the pickles of torch without executing what they contain."""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from training.core import manifest


class _StandIn(torch.Tensor):
    """For a class of tensors in the state of an optimizer, such as torchao's: it is not imported,
    since only the weights are used."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def load(file: Path, *, mapped: bool = True) -> Any:
    """What the file contains, in memory where it is not mapped. Raises whatever torch does."""
    # files from before torch 1.6, as many published weights are, cannot be mapped
    mapped = mapped and zipfile.is_zipfile(file)
    read = partial(torch.load, file, map_location="cpu", weights_only=True, mmap=mapped)
    if file.name != manifest.STATE:
        return read()
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    with torch.serialization.safe_globals([(_StandIn, name) for name in names]):
        return read()


def has_stand_in(loaded: Any) -> bool:
    if isinstance(loaded, dict):
        return any(map(has_stand_in, loaded.values()))
    if isinstance(loaded, (list, tuple)):
        return any(map(has_stand_in, loaded))
    return isinstance(loaded, _StandIn) or loaded is _StandIn
