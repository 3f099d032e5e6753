"""What a thread of a rank waits for or does, by the frames of its stack."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from training.core import libraries
from training.watchdog.probes import graph_capture
from training.watchdog.probes.stacks import BARRIERS, Frame, Stack, Thread

# Where the call into C++ waits for other ranks. Much else in torch/distributed computes, or reads
# files.
_COLLECTIVES = re.compile(
    r"/torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives|rendezvous|utils|device_mesh|collective_utils)\.py$"
    r"|/torch/distributed/(nn|elastic/utils|algorithms|fsdp|_composable|tensor)/"
)
# Below torch/distributed, but not for other ranks: files of a checkpoint, calls of torch's RPC,
# whose ranks serve each other, and child processes.
_OWN_WAITS = re.compile(r"/torch/distributed/(checkpoint|rpc|elastic)/")
_FUNCTIONAL = re.compile(r"/torch/distributed/_functional_collectives\w*\.py$")
_DDP = "/torch/nn/parallel/distributed.py"
_DDP_SYNCS = re.compile(
    r"__init__|_ddp_init_helper|_pre_forward|_sync_.*|_check_sync_bufs_.*|_\w+_broadcast_coalesced|_match_.*|_find_common_rank"
)
# The outermost frame of a main thread whose program runs: of a file, or of `python -m`.
_PROGRAM = {"<module>", "_run_module_as_main"}
_LOADER_WAITS = {"_get_data", "_try_get_data", "_shutdown_workers"}
# A call that waits for the GPU: with NCCL an innocent rank is found here.
_DEVICE = re.compile(
    r"\.(item|cpu|cuda|to|tolist|numpy|synchronize|nonzero)\(|\b(float|print|isnan|isinf)\("
)
# Where a checkpoint is written: bytes of a system call are counted when it returns, which takes
# minutes on a slow disk.
_SAVES = re.compile(
    r"/torch/serialization\.py$|/torch/distributed/checkpoint/|/safetensors/|/shutil\.py$"
)
# `with` closes the file
_SAVING = re.compile(r"\bfsync\(|\.(close|flush|write)\(|\bwith open\(")
# Only while it compiles: other frames of torch/_dynamo and torch/_inductor run what is compiled.
_COMPILES = re.compile(
    r"/torch/_dynamo/convert_frame\.py:|/triton/compiler/"
    r"|/torch/_inductor/compile_fx\.py:_?compile_fx_inner$"
)


_MOST_FILES = 100


def forget_lines() -> None:
    """Of files that were edited since: another attempt begins."""
    linecache.checkcache()
    graph_capture.forget_lines()


def remember_lines(scripts: Iterable[str]) -> None:
    """Read these programs and the files beside them as they are when their ranks start: a stack has
    line numbers, and the user may edit a file meanwhile."""
    for script in scripts:
        linecache.getlines(script)
        # Python imports the files beside a script from its real folder
        for folder in {Path(script).parent, Path(os.path.realpath(script)).parent}:
            for file in sorted(folder.glob("*.py"))[:_MOST_FILES]:
                linecache.getlines(str(file))


def in_debugger(thread: Thread) -> bool:
    """In pdb, or a debugger built on it, such as ipdb?"""
    return any(Path(frame.file).name in ("pdb.py", "bdb.py") for frame in thread.frames)


def in_collective(thread: Thread) -> str | None:
    """The collective in which this thread waits for other ranks, or None. 'backward' may also
    compute: its CPU time decides."""
    if not thread.frames:
        return None
    inner = thread.frames[0]
    if inner.file.endswith("/torch/autograd/graph.py") and inner.name == "_engine_run_backward":
        return "backward"
    if inner.file == BARRIERS:
        return inner.name
    if inner.file.endswith(_DDP):
        return (
            f"DistributedDataParallel.{_method(inner)}"
            if _DDP_SYNCS.fullmatch(inner.name)
            else None
        )
    if _waits_in_operator(thread.frames):
        return "wait_tensor"
    if not _COLLECTIVES.search(inner.file):
        return _waits_in_c(inner)
    name = None
    for frame in thread.frames:
        if frame.file.endswith(_DDP):
            return f"DistributedDataParallel.{_method(frame)}"
        if not _COLLECTIVES.search(frame.file):
            break
        # torch's logging of collectives wraps all of them
        if not frame.name.startswith("_") and frame.name != "wrapper":
            name = frame.name
    return name or inner.name


def at_exit(thread: Thread) -> bool:
    """Does the interpreter exit: has the main program ended, and a thread or an atexit function
    keeps the process? In a child of multiprocessing, Python calls both from its own module."""
    if not thread.frames:
        return False
    outermost = thread.frames[-1].name
    return outermost not in _PROGRAM or any(
        f.name == "_shutdown" and f.file.endswith("/threading.py") for f in thread.frames
    )


def waits_for_worker(thread: Thread) -> bool:
    """Is it in torch's data loader, waiting for a batch or for the exit of its worker processes?"""
    return any(
        f.file.endswith("/torch/utils/data/dataloader.py") and f.name in _LOADER_WAITS
        for f in thread.frames
    )


def waits_for_device(frame: Frame) -> bool:
    """The innermost frame of a process that uses a GPU: does it wait for the GPU?"""
    if frame.file.endswith(("/torch/cuda/__init__.py", "/torch/cuda/streams.py")):
        return frame.name == "synchronize"
    return _DEVICE.search(linecache.getline(frame.file, frame.line)) is not None


def saves(frames: Sequence[Frame]) -> bool:
    """Does it write or copy a file? Innermost frame first."""
    if any(_SAVES.search(frame.file) for frame in frames):
        return True
    return (
        bool(frames)
        and _SAVING.search(linecache.getline(frames[0].file, frames[0].line)) is not None
    )


def compiles(frames: Iterable[Frame]) -> bool:
    """Does it compile, with torch.compile or Triton?"""
    return any(_COMPILES.search(f"{frame.file}:{frame.name}") for frame in frames)


def deciding(stack: Stack | str) -> Thread | None:
    """The thread on which the progress of a process depends: the main thread, or the one that saves
    in the background while the main thread waits in Python's `threading` for a thread; then with
    the frames of the main thread as its callers."""
    main = stack.main if isinstance(stack, Stack) else None
    if main is None or isinstance(stack, str) or not _waits_for_thread(main):
        return main
    saving = [thread for thread in stack.threads if not thread.main and saves(thread.frames)]
    # One of them may wait for the others, as torch's does for those that write the files.
    saver = min(saving, key=_waits_for_thread, default=None)
    return replace(saver, main=True, frames=saver.frames + main.frames) if saver else main


def _waits_for_thread(thread: Thread) -> bool:
    return bool(thread.frames) and thread.frames[0].file.endswith("/threading.py")


def _method(frame: Frame) -> str:
    return "__init__" if frame.name in ("__init__", "_ddp_init_helper") else "forward"


def _waits_in_operator(frames: Sequence[Frame]) -> bool:
    """A functional collective, as of DTensor and compiled code, waits in an operator of torch."""
    return (
        len(frames) > 1
        and frames[0].file.endswith("/torch/_ops.py")
        and (
            _FUNCTIONAL.search(frames[1].file) is not None
            or "wait_tensor" in linecache.getline(frames[1].file, frames[1].line)
        )
    )


def _waits_in_c(frame: Frame) -> str | None:
    """`work.wait()` of a collective and the calls of torch's store are C++ and have no frame: the
    calling line shows them, in a script or in a part of torch.distributed such as ZeRO and
    pipelining. All other common kinds of wait() are Python, and would be the innermost frame
    themselves."""
    distributed = "/torch/distributed/" in frame.file and not _OWN_WAITS.search(frame.file)
    if libraries.contain(frame.file) and not distributed:
        return None
    line = linecache.getline(frame.file, frame.line)
    if re.search(r"(?i:store)\w*(\(\))?\.get\(", line):
        return "store.get"
    return "wait" if re.search(r"(?<!\bos)\.wait\(", line) else None
