"""Does a rank capture a CUDA graph? An answer of NCCL's flight recorder would end the capture with
an error: it queries events in a thread without a guard (pytorch/pytorch#104487, #148594)."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Sequence

from training.watchdog.probes import procfs, stacks
from training.watchdog.probes.stacks import Frame, Stack

# Of torch, Transformer Engine and Megatron.
_BLOCK = re.compile(r"\bgraph\(|\b_graph_context_wrapper\(|\bcapture_to_graph\(")
_BEGIN, _END = "capture_begin", "capture_end"
_BEGIN_AND_END = {"__enter__", "__exit__", _BEGIN, _END}


def capturing(pids: Iterable[int]) -> bool:
    """Does one of these ranks capture now?"""
    found = stacks.dump([pid for pid in pids if procfs.uses_gpu(pid)]).values()
    mains = (stack.main for stack in found if isinstance(stack, Stack))
    return any(main and captures(main.frames) for main in mains)


def captures(frames: Iterable[Frame]) -> bool:
    """By the frames of its main thread: in a block `with torch.cuda.graph(…)`, or between
    `capture_begin` and `capture_end`, of a script or of torch itself. Any other call of
    torch/cuda/graphs.py may replay one."""
    return any(
        _begins_or_ends(frame) or any(frame.line in lines for lines in _captured(frame.file))
        for frame in frames
    )


def forget_lines() -> None:
    _captured.cache_clear()


def _begins_or_ends(frame: Frame) -> bool:
    return frame.file.endswith("/torch/cuda/graphs.py") and frame.name in _BEGIN_AND_END


@functools.cache
def _captured(file: str) -> Sequence[range]:
    """Lines that are executed during a capture. Parsing a large file takes 30 ms."""
    source = "".join(linecache.getlines(file))
    if not _BLOCK.search(source) and _BEGIN not in source:
        return ()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # of another Python, or a file that was edited
        return ()
    blocks = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in nodes
        if isinstance(node, ast.With)
        and any(_BLOCK.search(ast.unparse(item.context_expr)) for item in node.items)
    ]
    called = [
        (node.lineno, node.func.attr)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    ends = sorted(line for line, name in called if name == _END)
    for begin in (line for line, name in called if name == _BEGIN):
        end = next((line for line in ends if line > begin), begin)
        blocks.append(range(begin, end + 1))
    return blocks
