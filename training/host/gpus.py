"""GPU inventory through NVML, without creating a CUDA context.

NVML ignores CUDA_VISIBLE_DEVICES, so the selection is applied here, in PCI order (the plan sets
CUDA_DEVICE_ORDER to match).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from training.core import log
from training.core.messages import msg
from training.core.units import plural
from training.host import (
    bare_nvml,
    gpu_processes,
    kernel_quotes,
    nvlink,
    peers,
    utilization,
    visible_devices,
)
from training.host.gpu_processes import MPS, UNKNOWN, GpuProcess
from training.host.nvml import ask
from training.host.visible_devices import PART

if TYPE_CHECKING:
    from training.core.contracts.plan import GpuRecord
    from training.host.kernel_quotes import KernelQuotes


DEFAULT, EXCLUSIVE, PROHIBITED = "default", "exclusive process", "prohibited"
COMPUTE_MODES = {0: DEFAULT, 1: EXCLUSIVE, 2: PROHIBITED, 3: EXCLUSIVE}
# Abnormal clock event reasons of the driver; idle, power cap and fixed clocks are normal.
BY_HARDWARE = 0x08  # set together with a more specific bit on cards that support it
SLOWDOWNS = {
    BY_HARDWARE: "slowed down by the hardware",
    0x20: "slowed down for heat (driver)",
    0x40: "slowed down for heat (hardware)",
    0x80: "slowed down by the power supply's brake",
}

TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU
SLOW_S, LIMIT_S = 5.0, 120.0  # a driver that is not kept loaded takes seconds for each GPU
FAILED, LOST = "Failed to initialize NVML", "GPU is lost"
VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_PIPES, MPS_USUAL = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
VIRTUAL = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU
PCI_DEVICES = Path("/sys/bus/pci/devices")
WSL_LIBRARY = Path("/usr/lib/wsl/lib/libnvidia-ml.so.1")  # of the driver in Windows
DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu"))  # the second: Jetson


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; None: not reported by the driver (normal under MIG and on some boards)."""

    index: int  # among all GPUs of the machine, in PCI order
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    use_percent: int | None
    temperature_c: int | None
    power_w: float | None
    capability: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()  # that compute
    compute_mode: str | None = None  # one of COMPUTE_MODES
    mig: bool | None = None  # split into instances
    power_limit_w: float | None = None
    fan_percent: int | None = None
    slowdowns: tuple[str, ...] | None = None  # current ones of SLOWDOWNS
    numa_node: int | None = None
    pci: str | None = None  # address
    nvlinks: int | None = None  # active ones; None: it has none
    peers: int | None = None  # other GPUs of the machine that copy directly; None: not asked
    lanes: int | None = None  # of PCIe, which card and slot have in common
    displays: tuple[GpuProcess, ...] = ()  # processes that only draw
    virtual: bool = False  # a share of a GPU that the hypervisor gives to this machine (vGPU)

    @property
    def by_mps(self) -> bool:
        """Do processes share it? By MPS's pipe where their commands are unknown, as in
        containers."""
        commands = [process.command for process in self.processes]
        return any(MPS in one for one in commands) or (UNKNOWN in commands and _mps_runs())

    def record(self) -> GpuRecord:
        return cast("GpuRecord", asdict(self))


@dataclass(frozen=True)
class GpuInventory:
    """The visible GPUs, and the reason for their number."""

    gpus: tuple[Gpu, ...]
    reason: str
    driver: str | None = None
    cuda: str | None = None  # newest CUDA version supported by the driver
    hidden: tuple[Gpu, ...] = ()  # whole GPUs that CUDA_VISIBLE_DEVICES leaves out
    silent: tuple[int, ...] = ()  # GPUs that the driver counts but that do not answer
    spare: int = 0  # further visible ones, which this launch does not use
    failure: str = ""  # of a driver that does not answer, as NVIDIA's tools print it


def inventory(
    environ: Mapping[str, str] = os.environ,
    instances: Collection[str] = (),
    *,
    patient: bool = False,
    displays: bool = True,
) -> GpuInventory:
    """The GPUs visible to a process with this environment. `instances`: UUIDs of MIG instances
    that are listed in place of their GPU. `patient`: with what may take a second longer, their
    utilisation after the driver has been loaded, and their peers. `displays`: with the processes
    that only draw, of which a desktop has many to look up."""
    try:
        ctypes.CDLL(bare_nvml.LIBRARY)
    except OSError as error:  # checked before the slow import of pynvml
        return GpuInventory((), _without_library(environ, error))
    try:
        import pynvml
    except ModuleNotFoundError:  # before the installation
        return _counted(environ)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuInventory(
            (), msg("host.gpus.driver_error", error=error), failure=f"{FAILED}: {error}"
        )
    try:
        driver = ask("nvmlSystemGetDriverVersion")
        version = ask("nvmlSystemGetCudaDriverVersion_v2")
        cuda = _cuda_version(version)
        count = ask("nvmlDeviceGetCount") or 0
        read = (_read(index, displays=displays) for index in range(count))
        every = [gpu for gpu in read if gpu]
        if patient:
            every = peers.counted(utilization.after_load(every))
        silent = sorted(set(range(count)) - {gpu.index for gpu in every})
        named = visible_devices.entries(environ.get(VISIBLE, ""))
        own = [uuid for uuid in named if isinstance(uuid, str) and uuid.startswith(PART)]
        parts = [_part(uuid, displays=displays) for uuid in own]
        others = (_part(uuid, displays=displays) for uuid in sorted(instances))
        listed = [part for part in others if part]
    finally:
        pynvml.nvmlShutdown()
    chosen, reason = _selected([*every, *filter(None, parts)], silent, environ)
    hidden = [gpu for gpu in every if gpu.index not in {one.index for one in chosen}]
    if listed:
        split = {part.index for part in listed}
        chosen = [*(gpu for gpu in chosen if gpu.index not in split), *listed]
        chosen.sort(key=lambda gpu: gpu.index)
    return GpuInventory(tuple(chosen), reason, driver, cuda, tuple(hidden), tuple(silent))


def inventory_at_start(environ: Mapping[str, str]) -> GpuInventory:
    """inventory() with a limit. A driver with a dead GPU may not answer: a warning follows after
    SLOW_S, Ctrl-C works meanwhile, and after LIMIT_S the machine counts as one without GPUs."""
    answers: list[GpuInventory | Exception] = []

    def look() -> None:
        try:
            answers.append(inventory(environ, patient=True))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=look, name="driver", daemon=True)
    thread.start()
    thread.join(SLOW_S)
    if thread.is_alive():
        kernel = kernel_quotes.of_driver().newest
        log.warning(msg("host.gpus.waits", seconds=SLOW_S, limit=LIMIT_S, kernel=kernel))
        thread.join(LIMIT_S - SLOW_S)
    if not answers:
        return GpuInventory((), msg("host.gpus.no_answer", limit=LIMIT_S), failure=LOST)
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _without_library(environ: Mapping[str, str], error: OSError) -> str:
    if WSL_LIBRARY.exists():
        folder = str(WSL_LIBRARY.parent)
        if folder in environ.get("LD_LIBRARY_PATH", "").split(":"):
            return msg("host.gpus.unloadable", error=error)
        return msg("host.gpus.not_loaded", folder=folder)
    here = any(device.exists() for device in DRIVER_DEVICES)
    return msg("host.gpus.no_nvml") if here else msg("host.gpus.no_driver")


def _counted(environ: Mapping[str, str]) -> GpuInventory:
    """The GPUs before pynvml is installed."""
    bare = bare_nvml.count()
    if bare is None:
        return GpuInventory((), msg("host.gpus.driver_silent"), failure=FAILED)
    every = [
        Gpu(
            *(one.index, one.uuid, one.name, one.total_bytes, one.free_bytes, None, None, None),
            capability=one.capability,
        )
        for one in bare.gpus
    ]
    chosen, reason = _selected(every, bare.silent, environ)
    hidden = tuple(gpu for gpu in every if gpu not in chosen)
    cuda = _cuda_version(bare.cuda)
    return GpuInventory(tuple(chosen), reason, bare.driver, cuda, hidden, tuple(bare.silent))


def _selected(
    every: list[Gpu], silent: Sequence[int], environ: Mapping[str, str]
) -> tuple[list[Gpu], str]:
    chosen, reason = visible(every, environ.get(VISIBLE))
    if silent:
        lost = ", ".join(map(str, silent))
        kernel = silent_quotes(every).newest
        reason = msg("host.gpus.silent", selected=reason, gpus=lost, kernel=kernel)
    return chosen, reason


def silent_quotes(others: Iterable[Gpu]) -> KernelQuotes:
    """What the kernel has logged about GPUs that do not answer; `others`: those that do."""
    return kernel_quotes.of_silent_gpus(tuple(gpu.pci for gpu in others if gpu.pci))


def _cuda_version(number: int | None) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def visible(every: list[Gpu], selection: str | None) -> tuple[list[Gpu], str]:
    """(selected GPUs, reason) by CUDA_VISIBLE_DEVICES, as CUDA reads it."""
    whole = [gpu for gpu in every if not gpu.uuid.startswith(PART)]
    if selection is None:
        return whole, msg("host.gpus.on_machine", gpus=plural(len(whole), "GPU"))

    def places(entry: int | str) -> list[int]:
        if isinstance(entry, int):
            return [at for at, gpu in enumerate(every) if gpu.index == entry and gpu in whole]
        return [at for at, gpu in enumerate(every) if gpu.uuid.startswith(entry)]

    found, twice = visible_devices.choose(selection, places)
    reason = msg("host.gpus.selected", chosen=len(found), every=len(whole), selection=selection)
    if twice:
        reason = msg("host.gpus.twice", selected=reason)
    return [every[at] for at in found], reason


def _read(index: int, *, displays: bool) -> Gpu | None:
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    mode, mig = ask("nvmlDeviceGetComputeMode", handle), ask("nvmlDeviceGetMigMode", handle)
    first = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, 0) if mig and mig[0] else handle
    # A process that sees a GPU in parts computes on the first one.
    memory = ask("nvmlDeviceGetMemoryInfo", first) if first is not None else None
    power = ask("nvmlDeviceGetPowerUsage", handle)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    processes = gpu_processes.computing(handle) or ()
    return Gpu(
        index=index,
        uuid=ask("nvmlDeviceGetUUID", handle) or "-",
        name=ask("nvmlDeviceGetName", handle) or "-",
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        use_percent=utilization.percent(handle),
        temperature_c=ask("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU),
        power_w=power / 1000 if power is not None else None,
        capability=ask("nvmlDeviceGetCudaComputeCapability", handle),
        processes=processes,
        compute_mode=None if mode is None else COMPUTE_MODES.get(mode),
        mig=None if mig is None else bool(mig[0]),
        power_limit_w=limit / 1000 if limit is not None else None,
        fan_percent=ask("nvmlDeviceGetFanSpeed", handle),
        slowdowns=_slowdowns(handle),
        numa_node=_numa_node(handle),
        pci=folder.name if (folder := pci_folder(handle)) else None,
        nvlinks=nvlink.active(handle),
        lanes=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        displays=gpu_processes.drawing(handle, processes) if displays else (),
        virtual=ask("nvmlDeviceGetVirtualizationMode", handle) == VIRTUAL,
    )


def _part(uuid: str, *, displays: bool) -> Gpu | None:
    """An instance of a GPU in parts (MIG)."""
    handle = ask("nvmlDeviceGetHandleByUUID", uuid)
    parent = None if handle is None else ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    index = None if parent is None else ask("nvmlDeviceGetIndex", parent)
    whole = None if index is None else _read(index, displays=displays)
    if whole is None:
        return None
    memory, name = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetName", handle)
    processes = gpu_processes.computing(handle)
    return replace(
        whole,
        uuid=uuid,
        name=name or whole.name,
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        processes=whole.processes if processes is None else processes,
        mig=True,
    )


def pci_folder(handle: Any) -> Path | None:
    """What the kernel knows about a GPU; None: the driver does not report its address."""
    facts = ask("nvmlDeviceGetPciInfo", handle)
    if facts is None:
        return None
    bus = facts.busId.decode() if isinstance(facts.busId, bytes) else str(facts.busId)
    # NVML has eight digits for the domain, the kernel four.
    return PCI_DEVICES / bus.lower()[-len("0000:00:00.0") :]


def kernel_number(file: Path) -> int | None:
    """A number that the kernel reports; None: it has none (-1), as virtual machines often do."""
    try:
        found = int(file.read_text())
    except (OSError, ValueError):
        return None
    return found if found >= 0 else None


def _numa_node(handle: Any) -> int | None:
    folder = pci_folder(handle)
    return kernel_number(folder / "numa_node") if folder else None


def _slowdowns(handle: Any) -> tuple[str, ...] | None:
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # its name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if reasons is None else slowdowns(reasons)


def slowdowns(reasons: int) -> tuple[str, ...]:
    found = {bit: text for bit, text in SLOWDOWNS.items() if reasons & bit}
    if len(found) > 1:
        found.pop(BY_HARDWARE, None)
    return tuple(found.values())


def _mps_runs() -> bool:
    """Whether MPS serves this process: its clients need this file."""
    return os.path.exists(os.path.join(os.environ.get(MPS_PIPES) or MPS_USUAL, "control"))
