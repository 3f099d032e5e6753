"""Files of the safetensors library, which is optional."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host import packages

if TYPE_CHECKING:
    import torch

PACKAGE = "safetensors"


def lacking() -> list[Problem]:
    """The problem if the library is not installed."""
    lacks = packages.lacking([PACKAGE])
    if not lacks:
        return []
    return [
        Problem("package.missing", msg("tasks.safetensors.lacks"), "", [packages.install(lacks)])
    ]


def read(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors by name. Raises UserError without the library or for a damaged file."""
    if problems := lacking():
        raise UserError(problems, Exit.RESOURCES)
    try:
        found: Mapping[str, torch.Tensor] = import_module("safetensors.torch").load_file(file)
    except (OSError, import_module("safetensors").SafetensorError) as error:
        what = msg("tasks.trained.unreadable", file=file, error=error)
        allowed = msg("tasks.weights.allowed")
        raise UserError(Problem("weights.unreadable", what, allowed)) from None
    return found


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises OSError, and UserError for what the format cannot hold: extra states, sparse tensors,
    complex128."""
    import torch

    odd = {
        name: str(getattr(value, "layout", type(value).__name__))
        for name, value in tensors.items()
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided
    }
    if odd:
        raise _unfit(odd)
    try:
        import_module("safetensors.torch").save_file(tensors, file, metadata={"format": "pt"})
    except KeyError as error:  # a type that it does not know
        kinds = {name: str(value.dtype) for name, value in tensors.items()}
        raise _unfit({n: kind for n, kind in kinds.items() if kind == str(error.args[0])}) from None
    except import_module("safetensors").SafetensorError as error:
        raise OSError(str(error)) from None


def _unfit(odd: Mapping[str, str]) -> UserError:
    """`odd`: name → kind."""
    names = ", ".join(f"{name} ({kind})" for name, kind in odd.items())
    what = msg("tasks.safetensors.unfit", names=names)
    allowed = msg("tasks.safetensors.fit")
    return UserError(Problem("weights.format", what, allowed, ["--format=torch"]))


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes by name, from the header of the file: without torch. Raises ValueError."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, 100 << 20)))
        return {
            name: tuple(map(int, one["shape"]))
            for name, one in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
