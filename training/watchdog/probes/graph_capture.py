"""Does a rank capture a CUDA graph? An answer of NCCL's flight recorder would end the capture with
an error: it queries events in a thread without a guard (pytorch/pytorch#104487, #148594)."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable

from training.watchdog.probes import procfs, stacks
from training.watchdog.probes.stacks import Frame, Stack

_CALL = "cuda.graph("
_BEGIN_AND_END = {"__enter__", "__exit__", "capture_begin", "capture_end"}


def capturing(pids: Iterable[int]) -> bool:
    """Does one of these ranks capture now?"""
    found = stacks.dump([pid for pid in pids if procfs.uses_gpu(pid)]).values()
    mains = (stack.main for stack in found if isinstance(stack, Stack))
    return any(main and captures(main.frames) for main in mains)


def captures(frames: Iterable[Frame]) -> bool:
    """By the frames of its main thread: in a block `with torch.cuda.graph(…)`, of a script or of
    torch itself. Any other call of torch/cuda/graphs.py may replay one."""
    return any(_begins_or_ends(frame) or _in_block(frame) for frame in frames)


def _begins_or_ends(frame: Frame) -> bool:
    return frame.file.endswith("/torch/cuda/graphs.py") and frame.name in _BEGIN_AND_END


def _in_block(frame: Frame) -> bool:
    source = "".join(linecache.getlines(frame.file))
    if _CALL not in source:
        return False
    try:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.With)]
    except SyntaxError:  # of another Python, or a file that was edited
        return False
    return any(
        node.lineno <= frame.line <= (node.end_lineno or node.lineno)
        and any(_CALL in ast.unparse(item.context_expr) for item in node.items)
        for node in nodes
    )
