"""The processes on a GPU, by the driver's lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.core import redact, standing
from training.host import process
from training.host.nvml import ask

PIDS = standing.PID_NAMESPACE
HOST_PIDS = "pid:[4026531836]"  # the first namespace of every kernel (PROC_PID_INIT_INO)
MPS = "nvidia-cuda-mps-server"  # shares a GPU in exclusive mode
UNKNOWN = "-"  # user or command of a process
MUCH = 1 << 30  # bytes: more than displays and the driver's own memory vary
SOME = MUCH // 4  # bytes: more than an idle display has
# Programs without which a desktop ends, with all that runs in it.
DESKTOP = {
    *("X", "Xorg", "Xwayland", "cinnamon", "gnome-shell", "mutter"),
    *("kwin_wayland", "kwin_x11", "plasmashell", "Hyprland", "sway", "weston"),
}


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    used_bytes: int | None
    user: str = UNKNOWN
    command: str = UNKNOWN
    known: bool = True  # False: the pid is one of the host, seen from a container


def computing(handle: Any) -> tuple[GpuProcess, ...] | None:
    """None: not reported."""
    running = _listed("nvmlDeviceGetComputeRunningProcesses", handle)
    return None if running is None else tuple(_process(p.pid, p.usedGpuMemory) for p in running)


def drawing(handle: Any, others: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Those that draw and are not among `others`, which compute."""
    running = _listed("nvmlDeviceGetGraphicsRunningProcesses", handle) or ()
    there = {one.pid for one in others}
    return tuple(_process(p.pid, p.usedGpuMemory) for p in running if p.pid not in there)


def _listed(function: str, handle: Any) -> Any:
    running = ask(function, handle)
    return ask(f"{function}_v2", handle) if running is None else running  # a driver before 510


def is_desktop(command: str) -> bool:
    words = command.split()
    return bool(words) and Path(words[0]).name in DESKTOP


def own_pids() -> bool:
    """Whether the driver's pids are those of this process too: in a container they are not."""
    try:
        return str(PIDS.readlink()) == HOST_PIDS
    except OSError:  # no /proc
        return True


def _process(pid: int, used: int | None) -> GpuProcess:
    if not own_pids():
        return GpuProcess(pid, used, known=False)  # here it may be another process
    return here(pid, used)


def here(pid: int, used: int | None = None) -> GpuProcess:
    """`pid`: in the namespace of this process."""
    try:
        import psutil
    except ModuleNotFoundError:  # before the installation
        return GpuProcess(pid, used)
    try:
        words = process.command(pid) or Path(f"/proc/{pid}/comm").read_text().strip()
        return GpuProcess(pid, used, psutil.Process(pid).username(), redact.running(words, 80))
    except (psutil.Error, OSError):  # it has ended
        return GpuProcess(pid, used)
