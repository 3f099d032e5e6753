"""Rank side of training.watchdog.probes.flight_recorder: torch's control server on a socket in the
run directory. It answers from its own C++ thread, which needs neither the GIL nor the main thread.

The server is a private part of torch (2.5 and newer); without it only this evidence is missing.
Standard library only, Python >= 3.8: lib/run_script.py loads this file into the user's script.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Iterator  # noqa: UP035 – 3.8

# of an entry in an error report
KEPT = ("process_group", "collective_seq_id", "profiling_name", "input_sizes", "input_dtypes")
_servers: list[Any] = []  # kept until the process ends


def address(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.sock"


def serve(folder: Path, rank: int) -> str:
    """Start the server; called before the rank joins the others. Returns why there is none, or
    ""."""
    try:
        from torch._C._distributed_c10d import _WorkerServer  # type: ignore[attr-defined]
    except ImportError:
        return "this torch has no control server"
    path = address(folder, rank)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with short(str(folder)) as name, _quiet():
            _servers.append(_WorkerServer(f"{name}/{path.name}"))
        atexit.register(_remove, path, os.getpid())
        path.chmod(0o600)
    except (OSError, RuntimeError, TypeError) as error:
        reason = str(error).strip() or type(error).__name__
        return f"torch's control server: {reason.splitlines()[0]}"
    return ""


def stop(folder: Path, rank: int) -> None:
    """For a rank that ends without exit handlers."""
    _remove(address(folder, rank), os.getpid())


def last_call() -> dict[str, object] | None:
    """The newest collective that this process has called by gloo, as the recorder has it; None:
    unknown. For the report of a rank that fails: its server may be gone before anyone asks."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        entries = json.loads(_dump_fr_trace_json())["entries"]
    except (ImportError, RuntimeError, TypeError, ValueError, KeyError):
        return None  # another version of torch, or no group
    calls = [entry for entry in entries if not entry.get("is_p2p")]
    return {name: calls[-1].get(name) for name in KEPT} if calls else None


def _remove(path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    with _quiet():
        while _servers:
            _servers.pop().shutdown()
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def short(folder: str) -> Iterator[str]:
    """A name of the folder that fits into the 107 bytes of a socket address."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the server's start message, a warning on standard error."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
