"""An error of the GPU, such as a lack of memory, while a trained model is used."""

from __future__ import annotations

import re

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg

SHOWN = 160  # characters
PATTERN = re.compile(r"(?:CUDA|HIP)(?: driver)? (?:error|out of memory)")


def of_gpu(error: Exception) -> bool:
    """Is this an error of the GPU, and not of the weights? load_state_dict() repeats some in an
    error of its own."""
    import torch

    names = ("OutOfMemoryError", "AcceleratorError")  # the second: since torch 2.8
    kinds = tuple(getattr(torch, name) for name in names if hasattr(torch, name))
    return isinstance(error, kinds) or PATTERN.search(str(error)) is not None


def first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def resort(device: str, line: str) -> None:
    """The CPU is next if `device` is auto, with a warning. Raises UserError otherwise. `line`: of
    the error, which would keep the tensors of its traceback in memory."""
    if device == "auto":
        log.warning(msg("tasks.trained.gpu_full", error=line))
        return
    what = msg("tasks.trained.not_on_gpu", error=line)
    allowed = msg("tasks.trained.devices_free")
    raise UserError(Problem("gpu.memory", what, allowed, ["--device=cpu"]), Exit.RESOURCES)
