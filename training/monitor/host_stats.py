"""This machine: live processes, CPU, memory, disks, GPUs. None: unknown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.jsonl import whole
from training.core.messages import msg
from training.host import cgroups, gpu_words, gpus
from training.host.visible_devices import PART
from training.watchdog.probes import procfs

if TYPE_CHECKING:
    from training.core.contracts.state import GpuState, HostState
    from training.core.jsonl import Record

try:
    import psutil
except ImportError:  # an interpreter without Duet's packages can still show the run itself
    psutil = None  # type: ignore[assignment]

STALE_S = 10.0  # without an answer of the driver, its last measurements are unknown


def alive(known: Record, seen: float) -> bool:
    """Whether the process with this `pid` still runs; False for a zombie and for a later process
    with the same pid: one with other `ticks`, or begun after `seen` (unix s) where they are not
    recorded."""
    pid, ticks = whole(known.get("pid")), known.get("ticks")
    if pid is None or pid <= 0:
        return False
    if psutil is None:
        return Path(f"/proc/{pid}").exists()
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        if ticks:  # unlike times, they do not move with the clock
            return procfs.began(pid) == ticks
        return process.create_time() <= seen + procfs.CLOCK_SLACK_S
    except (psutil.NoSuchProcess, OverflowError):
        return False
    except (
        psutil.Error,
        OSError,
    ):
        # another user's process, or out of file descriptors: neither proves that it is gone
        return Path(f"/proc/{pid}").exists()


def belongs(pid: int, family: set[int]) -> bool:
    """Whether a process is in `family` or descends from it, e.g. a data-loader worker."""
    if pid in family:
        return True
    if psutil is None:
        return False
    try:
        return any(parent.pid in family for parent in psutil.Process(pid).parents())
    except (psutil.Error, OSError):
        return False


class Host:
    """CPU, memory, disks. CPU use is measured between two looks: the first has only the load."""

    def __init__(self) -> None:
        self._looked = False

    def look(self, folder: Path) -> HostState:
        memory = cgroups.tightest_memory()
        out: HostState = {
            "cpu_cores": os.cpu_count(),
            "cpu_percent": None,
            "load_1min": os.getloadavg()[0],
            "ram_used_bytes": memory.used,
            "ram_total_bytes": memory.limit,
        }
        if psutil is not None:
            percent = psutil.cpu_percent()
            out["cpu_percent"] = percent if self._looked else None
            self._looked = True
        out["disk_used_bytes"], out["disk_total_bytes"] = _space(folder)
        out["shm_used_bytes"], out["shm_total_bytes"] = _space(Path("/dev/shm"))
        return out


def _space(place: Path) -> tuple[int | None, int | None]:
    """(used, total) in bytes; used is all that this user cannot write."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return None, None
    return (facts.f_blocks - facts.f_bavail) * facts.f_frsize, facts.f_blocks * facts.f_frsize


class Gpus:
    """NVML queries in a thread of their own: a hanging driver, as after some hardware faults, must
    not block the monitor."""

    def __init__(self) -> None:
        self.instances = frozenset[str]()  # UUIDs of MIG instances to list instead of their GPUs
        self._answer = gpus.GpuInventory((), msg("monitor.gpus.not_queried"))
        self._asked = 0.0
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Starts a query, unless an earlier one is still running."""
        if self._thread is None or not self._thread.is_alive():
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def answer(self, patience_s: float) -> gpus.GpuInventory:
        """All GPUs of the machine, regardless of CUDA_VISIBLE_DEVICES; the previous answer if the
        driver does not respond within `patience_s`, for STALE_S with its measurements."""
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                waited = time.monotonic() - self._asked
                known = self._answer.gpus
                return gpus.GpuInventory(
                    tuple(map(_unmeasured, known)) if waited > STALE_S else known,
                    msg("monitor.gpus.driver_silent", waited=waited),
                )
        return self._answer

    def _look(self) -> None:
        try:
            self._answer = gpus.inventory({}, self.instances, displays=False)
        except ImportError:
            self._answer = gpus.GpuInventory((), msg("monitor.gpus.no_nvml"))
        except Exception as error:
            self._answer = gpus.GpuInventory((), msg("host.gpus.driver_error", error=error))


def _unmeasured(gpu: gpus.Gpu) -> gpus.Gpu:
    return replace(
        gpu,
        free_bytes=None,
        use_percent=None,
        temperature_c=None,
        power_w=None,
        fan_percent=None,
        slowdowns=None,
        processes=(),
    )


class Shared:
    """One look at the machine for several readers; reused for `hold_s` seconds."""

    def __init__(self, hold_s: float = 0.0) -> None:
        self._host, self._gpus, self._hold_s = Host(), Gpus(), hold_s
        self._known: tuple[gpus.GpuInventory, HostState] | None = None
        self._at = 0.0

    def ask(self, planned: Iterable[str] = ()) -> None:
        """`planned`: UUIDs of a run's GPUs."""
        parts = frozenset(uuid for uuid in planned if uuid.startswith(PART))
        if not parts <= self._gpus.instances:
            self._gpus.instances |= parts
            self._known = None
        if not self._fresh():
            self._gpus.ask()

    def answer(self, patience_s: float, folder: Path) -> tuple[gpus.GpuInventory, HostState]:
        """(GPUs; CPU, memory, and the disk of `folder`)."""
        if self._known is None or not self._fresh():
            self._known = self._gpus.answer(patience_s), self._host.look(folder)
            self._at = time.monotonic()
        return self._known

    def _fresh(self) -> bool:
        return self._known is not None and time.monotonic() - self._at < self._hold_s


def slowdowns(reasons: Sequence[str]) -> str:
    """`throttle_reasons` of a GPU as they are shown."""
    return ", ".join(map(gpu_words.slowdown, reasons))


def gpu_records(machine: gpus.GpuInventory, family: set[int], planned: set[str]) -> list[GpuState]:
    """GPUs as plain dicts. `family`: pids of the run; `planned`: uuids of its GPUs."""
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "in_plan": gpu.uuid in planned,
            "use_percent": gpu.use_percent,
            "memory_used_bytes": None
            if gpu.total_bytes is None or gpu.free_bytes is None
            else gpu.total_bytes - gpu.free_bytes,
            "memory_total_bytes": gpu.total_bytes,
            "temperature_c": gpu.temperature_c,
            "power_w": gpu.power_w,
            "power_limit_w": gpu.power_limit_w,
            "fan_percent": gpu.fan_percent,
            "throttle_reasons": None if gpu.slowdowns is None else list(gpu.slowdowns),
            "processes": [
                {
                    "pid": p.pid,
                    "user": p.user,
                    "command": p.command,
                    "used_bytes": p.used_bytes,
                    # In a container the only process on a GPU of the run is taken for its rank.
                    "this_run": belongs(p.pid, family)
                    if p.known
                    else gpu.uuid in planned and len(gpu.processes) == 1,
                    "known": p.known,
                }
                for p in gpu.processes
            ],
        }
        for gpu in machine.gpus
    ]
