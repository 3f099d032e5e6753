"""What the last words of a rank mean: one of the fixed ids of causes. Only structured evidence counts: the exception that a rank
reported itself, and what an aborted one said at its end. Words of the others are no evidence."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from training import console
from training.request import ROOT

DRIVER_S = 10.0  # NVML answers within a second; of a GPU that has fallen off the bus it may wait for ever
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from training.host import gpus
machine = gpus.look()
print(json.dumps({"uuids": [gpu.uuid for gpu in machine.gpus], "reason": machine.reason}))
"""
UNKNOWN = "unknown"
BY_TYPE = {
    "NotFinite": "nan_loss",
    "ParametersDiffer": "ddp_params_mismatch",
    "OutOfMemoryError": "gpu_oom",
    "BarrierError": "hang",
    "MemoryError": "host_oom_killed",
}
# How a rank ends whose peer has gone (gloo, NCCL, the store): it is not where it began.
LOST_PEER = re.compile(
    r"(closed|reset) by (the )?(remote )?peer|broken pipe|socket (is )?closed|remote process exited|connection was (likely )?closed"
    r"|failed to recv, got 0 bytes|rank 0 has ended while",
    re.I,
)
BY_TEXT = {
    "gpu_hardware": re.compile(r"uncorrectable ECC|GPU is lost|fallen off the bus|\bXid\b.{0,40}\d|hardware stack error", re.I),
    "cuda_device_assert": re.compile(r"device-side assert|CUDA error: (an )?(illegal|misaligned)", re.I),
    "gpu_oom": re.compile(r"CUDA out of memory|CUDA error: out of memory|Cuda failure.{0,5}'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"),
    "dataloader_worker_died": re.compile(r"DataLoader worker \(pid|Pin memory thread exited unexpectedly"),
    "shm_too_small": re.compile(r"insufficient shared memory|/dev/shm/nccl"),
    "too_many_open_files": re.compile(r"too many open files", re.I),
    "port_in_use": re.compile(r"EADDRINUSE|address already in use", re.I),
    "rendezvous_timeout": re.compile(r"waiting for clients|client socket has timed out|store based barrier", re.I),
    "collective_timeout": re.compile(r"Timed out waiting \d+ ?ms for|Watchdog caught collective operation timeout", re.I),
    "peer_died": LOST_PEER,
}


def of_error(error: dict[str, Any]) -> str:
    """Of what a rank reported (training.engine.failure)."""
    return BY_TYPE.get(error["type"]) or _first(error["message"])


def of_death(status: int, said: Sequence[str]) -> str:
    """Of a rank that has reported nothing. Who aborts says why; a log goes over several attempts, so the last word counts."""
    if -status != signal.SIGABRT:
        return UNKNOWN
    return next((found for line in reversed(said) if (found := _first(line)) != UNKNOWN), UNKNOWN)


def lost_gpus(plan: dict[str, Any]) -> str:
    """Those of this machine that have trained and of which the driver knows nothing any more, for people; '' when all are there."""
    if plan["device"]["value"] != "cuda" or not plan["gpus"]:
        return ""
    try:
        machine = _ask_driver()
    except subprocess.TimeoutExpired:
        return f"the driver does not answer: a GPU of this machine may have fallen off the bus (NVML, {DRIVER_S:g} s)"
    except (OSError, ValueError) as error:
        console.warning(f"it is not known whether a GPU is lost, since NVML could not be asked: {error}")
        return ""
    lost = [f"GPU {gpu['index']} ({gpu['name']})" for gpu in plan["gpus"] if gpu["uuid"] not in machine["uuids"]]
    return f"{', '.join(lost)} can not be seen any more: {machine['reason']}" if lost else ""


def _ask_driver() -> dict[str, Any]:
    """In a process of its own: one that waits for a dead GPU can not be interrupted, nor ended, so it is not waited for either."""
    command = [sys.executable, "-c", ASK, str(ROOT)]
    asked = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        answer, complaint = asked.communicate(timeout=DRIVER_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        raise
    if asked.returncode:
        raise OSError(complaint.decode("utf-8", "replace").strip().rpartition("\n")[2] or f"status {asked.returncode}")
    found: dict[str, Any] = json.loads(answer)
    return found


def is_victim(error: dict[str, Any]) -> bool:
    return error["type"] not in BY_TYPE and _first(error["message"]) == "peer_died"


def root(errors: Sequence[dict[str, Any]], rank: int | None) -> dict[str, Any] | None:
    """What the rank that failed first reported. Is that only the loss of a peer, which has reported something else before: that."""
    own = next((e for e in errors if e["rank"] == rank), None)
    if own is None or not is_victim(own):
        return own
    before = [e for e in errors if e["time"] <= own["time"] and not is_victim(e)]
    return min(before, key=lambda e: e["time"], default=own)


def _first(text: str) -> str:
    return next((cause for cause, pattern in BY_TEXT.items() if pattern.search(text)), UNKNOWN)
