"""GPU inventory through NVML, without creating a CUDA context.

NVML ignores CUDA_VISIBLE_DEVICES, so the selection is applied here, in PCI order (the plan sets
CUDA_DEVICE_ORDER to match).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from training.core.messages import msg
from training.host.nvml import ask

if TYPE_CHECKING:
    from training.core.contracts.plan import GpuRecord


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
VISIBLE = "CUDA_VISIBLE_DEVICES"
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    used_bytes: int | None
    user: str = "-"
    command: str = "-"


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
    processes: tuple[GpuProcess, ...] = ()
    compute_mode: str | None = None  # one of COMPUTE_MODES
    mig: bool | None = None  # split into instances
    power_limit_w: float | None = None
    fan_percent: int | None = None
    slowdowns: tuple[str, ...] | None = None  # current ones of SLOWDOWNS
    numa_node: int | None = None

    def record(self) -> GpuRecord:
        return cast("GpuRecord", asdict(self))


@dataclass(frozen=True)
class GpuInventory:
    """The visible GPUs, and the reason for their number."""

    gpus: tuple[Gpu, ...]
    reason: str
    driver: str | None = None
    cuda: str | None = None  # newest CUDA version supported by the driver


def inventory(environ: Mapping[str, str] = os.environ) -> GpuInventory:
    """The GPUs visible to a process with this environment."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # checked before the slow import of pynvml
        return GpuInventory((), msg("host.gpus.no_driver"))
    try:
        import pynvml
    except ModuleNotFoundError:  # before the installation
        return _counted(environ)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuInventory((), msg("host.gpus.driver_error", error=error))
    try:
        driver = ask("nvmlSystemGetDriverVersion")
        version = ask("nvmlSystemGetCudaDriverVersion_v2")
        cuda = _cuda_version(version)
        count = ask("nvmlDeviceGetCount") or 0
        every = [gpu for gpu in (_read(index) for index in range(count)) if gpu]
    finally:
        pynvml.nvmlShutdown()
    chosen, reason = visible(every, environ.get(VISIBLE))
    return GpuInventory(tuple(chosen), reason, driver, cuda)


class _Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _counted(environ: Mapping[str, str]) -> GpuInventory:
    """The GPUs before pynvml is installed: UUID, name, memory and compute capability."""
    nvml, count, every = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(), list[Gpu]()
    if nvml.nvmlInitWithFlags(0) != 0:
        return GpuInventory((), msg("host.gpus.driver_silent"))
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
            name = _text(nvml.nvmlDeviceGetName, handle)
            major, minor = ctypes.c_int(), ctypes.c_int()
            capability = nvml.nvmlDeviceGetCudaComputeCapability
            known = capability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
            memory = _Memory()
            told = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            every.append(
                Gpu(
                    index,
                    uuid.value.decode() or "-",
                    name or "-",
                    memory.total if told else None,
                    memory.free if told else None,
                    None,
                    None,
                    None,
                    capability=(major.value, minor.value) if known else None,
                )
            )
    driver, version = _text(nvml.nvmlSystemGetDriverVersion), ctypes.c_int()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    nvml.nvmlShutdown()
    chosen, reason = visible(every, environ.get(VISIBLE))
    cuda = _cuda_version(version.value)
    return GpuInventory(tuple(chosen), reason, driver or None, cuda)


def _text(query: Callable[..., int], *of: Any) -> str:
    """A text of NVML without pynvml; '' if it is not reported."""
    text = ctypes.create_string_buffer(96)
    query(*of, text, len(text))
    return text.value.decode("utf-8", "replace")


def _cuda_version(number: int | None) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def visible(every: list[Gpu], selection: str | None) -> tuple[list[Gpu], str]:
    """(selected GPUs, reason) by CUDA_VISIBLE_DEVICES (indices or UUID prefixes); as in CUDA, the
    first invalid entry ends the list."""
    if selection is None:
        return every, msg("host.gpus.on_machine", count=len(every))
    chosen: list[Gpu] = []
    for word in filter(None, (w.strip() for w in selection.split(","))):
        match = [
            g
            for g in every
            if word == str(g.index) or (word.startswith("GPU-") and g.uuid.startswith(word))
        ]
        if not match or match[0] in chosen:
            break
        chosen.append(match[0])
    return chosen, msg(
        "host.gpus.selected", chosen=len(chosen), every=len(every), selection=selection
    )


def _read(index: int) -> Gpu | None:
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    load = ask("nvmlDeviceGetUtilizationRates", handle)
    power = ask("nvmlDeviceGetPowerUsage", handle)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    running = ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
    mode, mig = (
        ask("nvmlDeviceGetComputeMode", handle),
        ask("nvmlDeviceGetMigMode", handle),
    )
    return Gpu(
        index=index,
        uuid=ask("nvmlDeviceGetUUID", handle) or "-",
        name=ask("nvmlDeviceGetName", handle) or "-",
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        use_percent=load.gpu if load else None,
        temperature_c=ask("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU),
        power_w=power / 1000 if power is not None else None,
        capability=ask("nvmlDeviceGetCudaComputeCapability", handle),
        processes=tuple(_process(p.pid, p.usedGpuMemory) for p in running),
        compute_mode=None if mode is None else COMPUTE_MODES.get(mode),
        mig=None if mig is None else bool(mig[0]),
        power_limit_w=limit / 1000 if limit is not None else None,
        fan_percent=ask("nvmlDeviceGetFanSpeed", handle),
        slowdowns=_slowdowns(handle),
        numa_node=_numa_node(handle),
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


def one_line(text: str) -> str:
    """`text` (such as another process's command line) without line breaks and escape sequences that
    would affect the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _process(pid: int, used: int | None) -> GpuProcess:
    try:
        import psutil
    except ModuleNotFoundError:  # before the installation
        return GpuProcess(pid, used)
    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
        return GpuProcess(pid, used, process.username(), one_line(" ".join(words))[:80])
    except (psutil.Error, OSError):  # a PID of the host in a container, or an ended process
        return GpuProcess(pid, used)
