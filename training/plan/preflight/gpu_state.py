"""Hardware state of GPUs: memory errors, throttling, power, links. Read by `--check`, and where a
plan explains a slow exchange: some drivers take milliseconds per query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.core.messages import msg
from training.core.units import unknown
from training.host import gpu_damage, nvlink, peers
from training.host.gpus import Gpu, kernel_number, pci_folder
from training.host.nvml import ask

WHERE = {
    0: msg("plan.link.board"),
    10: msg("plan.link.switch"),
    20: msg("plan.link.switches"),
    30: msg("plan.link.root"),
    40: msg("plan.link.numa"),
    50: msg("plan.link.sockets"),
}
# The driver's reasons against direct copies.
REFUSED = {
    1: msg("plan.link.chipset"),
    2: msg("plan.link.gpu"),
    3: msg("plan.link.topology"),
    4: msg("plan.link.registry"),
}
# Normal reasons for clocks below the maximum; abnormal ones: training.host.gpus.SLOWDOWNS.
LIMITS = {
    0x01: msg("plan.gpu.clocks.idle"),
    0x02: msg("plan.gpu.clocks.fixed"),
    0x04: msg("plan.gpu.clocks.power"),
    0x10: msg("plan.gpu.clocks.sync"),
    0x100: msg("plan.gpu.clocks.display"),
}
BUS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class State:
    """State of one GPU; None: not reported by the driver."""

    index: int
    slowdowns: tuple[str, ...] | None
    uncorrected_errors: int | None  # of the memory, since the driver was loaded
    remap_pending: bool | None  # damaged memory is remapped at the next reset
    remap_failed: bool | None
    link_width: int | None
    link_width_most: int | None  # maximum of card and slot
    link_generation: int | None
    link_generation_most: int | None
    persistent: bool | None  # the driver stays loaded between programs
    nvlinks: int | None  # number of active links
    limits: tuple[str, ...] | None = None  # current ones of LIMITS
    use_percent: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    ecc: bool | None = None
    card_width: int | None = None  # lanes of the card alone, without the slot
    card_generation: int | None = None
    numa: int | None = None  # node of the memory next to its slot; None: there is only one
    bus: tuple[str, ...] = ()  # address, below those of the bridges above it


@dataclass(frozen=True)
class Pair:
    """The connection of two GPUs."""

    first: int
    second: int
    where: str | None
    nvlink: bool | None
    direct: bool | None  # peer-to-peer copies
    refused: str = ""  # reason against direct copies

    @property
    def way(self) -> str:
        if self.nvlink:
            return "NVLink"
        copies = {True: msg("plan.link.direct"), False: msg("plan.link.through_host"), None: ""}[
            self.direct
        ]
        if self.refused:
            copies = msg("plan.link.why", copies=copies, why=self.refused)
        return msg("plan.word.comma").join(filter(None, (self.where, copies))) or unknown()


def read_state(gpus: Sequence[Gpu]) -> tuple[list[State], list[Pair]]:
    """The state of these GPUs and of the links between them; empty if the driver does not
    respond, and before the installation."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return [], []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # reported by gpus.inventory()
        return [], []
    try:
        handles = {
            g: handle
            for g in gpus
            if (handle := ask("nvmlDeviceGetHandleByIndex", g.index)) is not None
        }
        states = [_state(gpu, handle) for gpu, handle in handles.items()]
        order = list(handles)
        pairs = [
            _pair(a.index, b.index, handles[a], handles[b])
            for n, a in enumerate(order)
            for b in order[n + 1 :]
        ]
    finally:
        pynvml.nvmlShutdown()
    return states, pairs


def _state(gpu: Gpu, handle: Any) -> State:
    pending, failed = gpu_damage.remapping(handle)
    persistent = ask("nvmlDeviceGetPersistenceMode", handle)
    default = ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
    ecc = ask("nvmlDeviceGetEccMode", handle)
    slot = pci_folder(handle)
    return State(
        index=gpu.index,
        slowdowns=gpu.slowdowns,
        uncorrected_errors=gpu_damage.uncorrected_errors(handle),
        remap_pending=pending,
        remap_failed=failed,
        link_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        link_width_most=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        link_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        link_generation_most=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        persistent=None if persistent is None else bool(persistent),
        nvlinks=gpu.nvlinks,
        limits=_limits(handle),
        use_percent=gpu.use_percent,
        power_limit_w=gpu.power_limit_w,
        power_default_w=None if default is None else default / 1000,
        ecc=None if ecc is None else bool(ecc[0]),
        # the driver reports only what card and slot have in common
        card_width=kernel_number(slot / "max_link_width") if slot else None,
        card_generation=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        numa=gpu.numa_node,
        bus=tuple(part for part in slot.resolve().parts if BUS.fullmatch(part)) if slot else (),
    )


def _limits(handle: Any) -> tuple[str, ...] | None:
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if reasons is None:
        return None
    return tuple(text for bit, text in LIMITS.items() if reasons & bit)


def _pair(first: int, second: int, one: Any, other: Any) -> Pair:
    level = ask("nvmlDeviceGetTopologyCommonAncestor", one, other)
    direct = peers.status(one, other)
    return Pair(
        first,
        second,
        None if level is None else WHERE.get(level),
        nvlink.connects(one, other),
        None if direct is None else direct == peers.WORKS,
        REFUSED.get(direct or 0, ""),
    )
